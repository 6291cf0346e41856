"""What every chaos test needs: a short place. One rule: nothing here starts anything."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)
