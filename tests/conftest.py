"""What every test shares: which folder means which marker, how long a test may take, hypothesis.

One rule: nothing of moshpitd is imported here; a unit test pays only for what it imports itself.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A background job of a shell ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests read tables as a pipe gets them, whatever width a shell, or pytest-xdist, has told.
os.environ.pop("COLUMNS", None)

# Tests are of the sources, also where somebody has compiled them; one says otherwise.
os.environ["MOSHPITD_INTERPRETED"] = "1"

TESTS = Path(__file__).resolve().parent
CHAOS_TIMEOUT_S = 600  # a demo of 3 minutes on 2 cores, with room for a loaded machine

# In CI the examples come from the test's own source, so that a red run is red again when repeated;
# a developer's runs stay random and find new ones. No deadline: two shared cores are not a clock.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = _folder(item.path)
        if folder == "integration":
            item.add_marker(pytest.mark.integration)
        if folder == "chaos":
            item.add_marker(pytest.mark.chaos)
        if item.get_closest_marker("chaos") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CHAOS_TIMEOUT_S))


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
