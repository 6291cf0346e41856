"""The file system of one daemon is full in the middle of a run: its home and its buffers lie on a
tmpfs of 64 MB that somebody else fills.

One rule: needs root, to mount it; what is full is really full.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moshpitd.client import TrainerError, attach
from tests.kit.crew import Crew
from tests.kit.fleet import Fleet
from tests.kit.processes import wait_for

FLOATS = 1_000_000
TOGETHER_S = 60.0
FULL = 2  # the node


@pytest.fixture
def tmpfs(place: Path) -> Iterator[Path]:
    folder = place / str(FULL)
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs of 64 MB")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this container may not mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(file: Path) -> None:
    with file.open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(bytes(4096))
    left = os.statvfs(file.parent)
    assert left.f_bavail == 0


def test_a_tmpfs_that_is_full_in_the_middle_of_a_run_costs_nobody_a_round(
    tmpfs: Path, place: Path
) -> None:
    with Fleet(place, 3, floats=FLOATS) as fleet:
        daemon, rest = fleet.daemons[FULL], tmpfs / "somebody-else"
        with Crew(fleet) as crew:
            crew.together(3, TOGETHER_S)
            fill_up(rest)
            for _ in range(5):
                crew.together(3, TOGETHER_S)
                fill_up(tmpfs / "somebody-else-again")  # whatever was set free meanwhile
            # What is new has no room, and says so; what runs is not disturbed.
            with pytest.raises(TrainerError) as refused:
                attach("other", tensors={"w": torch.zeros(10)}, socket=daemon.socket)
            assert refused.value.reason == "no_room"
            assert str(daemon.buffers) in refused.value.message
            assert "\n" not in refused.value.message
            crew.together(3, TOGETHER_S)
            # The daemon dies while the file system is full. Its trainer goes on without it...
            daemon.kill()
            others = [one for one in crew.trainers if one.index != FULL]
            steps = len(crew.trainers[FULL].steps)
            wait_for(
                lambda: len(crew.trainers[FULL].steps) > steps + 50, 30.0, "it trains on locally"
            )
            for one in others:
                assert all(result.accepted for _, result in one.results)
            # ...and with it again once there is room.
            (tmpfs / "somebody-else-again").unlink()
            rest.unlink()
            daemon.start()
            daemon.up()
            crew.together(3, TOGETHER_S)
        fleet.settle()
        assert fleet.same_bits()
        assert fleet.tracebacks() == []
