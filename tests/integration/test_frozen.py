"""A daemon that is stopped (SIGSTOP) in the middle of a round and goes on later, as a real process.

The group closes without it; when it wakes it discards the stale round, learns the swarm's version,
takes a snapshot if it is further behind than `max_version_lag`, and goes on. Here for some seconds;
chaos/ has the minute.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.frozen import freeze_and_thaw


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.timeout(300)
async def test_a_daemon_that_freezes_in_a_round_is_left_out_and_catches_up(place: Path) -> None:
    await freeze_and_thaw(place, frozen_s=12.0, rounds=4)


@pytest.mark.timeout(300)
async def test_a_daemon_that_wakes_up_discards_the_stale_round(place: Path) -> None:
    await freeze_and_thaw(place, frozen_s=12.0, rounds=4, discards=True)
