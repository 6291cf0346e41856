"""S19: calls that fail by a deadline that is too short, hundreds of them; S11: clocks that are off.
One rule: what is counted is counted when nothing runs, after a stretch that has filled every cache
there is."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from moshpitd.testing import LocalSwarm
from tests.kit.processes import DaemonProcess, TrainerProcess
from tests.kit.swarm import average, trainers, until

pytestmark = pytest.mark.asyncio

WARM, CALLS = 80, 400
TOO_SHORT_S = 0.02
SLACK_KIB = 24 * 1024
"""What an allocator may keep: a quarter of what 320 leaked buckets of these tensors would be."""


def standing() -> tuple[int, int, int]:
    """(file descriptors, threads, resident KiB) of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), int(resident.split()[1])


async def test_four_hundred_calls_that_are_too_short_leave_nothing_behind() -> None:
    async with LocalSwarm(2, averaging__window_s=3.0) as swarm:
        own = [{"w": torch.zeros(75_000)} for _ in range(2)]
        async with trainers(swarm, "short", own) as sessions:
            seen = []
            for number in range(CALLS):
                # The other trainer never contributes, so the call waits for it until its end.
                result = await swarm.call(sessions[0].average, timeout_s=TOO_SHORT_S)
                assert result.status in ("failed", "alone"), str(result)
                if number in (WARM, CALLS - 1):
                    await asyncio.sleep(0.5)
                    seen.append((*standing(), len(asyncio.all_tasks())))
        (fds, count, resident, tasks), (fds_end, count_end, resident_end, tasks_end) = seen
        assert fds_end <= fds + 2, seen
        assert count_end <= count + 2, seen
        assert tasks_end <= tasks + 4, seen
        assert resident_end <= resident + SLACK_KIB, seen


@pytest.mark.timeout(180)
async def test_wall_clocks_that_are_ninety_seconds_off_average_normally() -> None:
    """S11: one daemon's clock is 90 s ahead, another's 90 s behind, the third's is right."""
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        async with LocalSwarm(1) as swarm:
            address = swarm.node(0).status()["addresses"][0]
            daemons = [
                DaemonProcess(Path(name) / side, bootstrap=(address,), clock_ahead_s=ahead_s)
                for side, ahead_s in (("ahead", 90.0), ("behind", -90.0))
            ]
            others: list[TrainerProcess] = []
            try:
                for daemon in daemons:
                    daemon.start()
                for daemon in daemons:
                    await swarm.call(daemon.up)
                await until(
                    lambda: swarm.node(0).status()["swarm_peers"] == 3,
                    timeout_s=30,
                    what="all three",
                )
                own = [{"w": torch.full((1000,), 3.0)}]
                async with trainers(swarm, "r", own) as sessions:
                    others += [TrainerProcess(one.socket, "r", floats=1000) for one in daemons]
                    for one in others:
                        await swarm.call(one.attached)
                    await average(swarm, sessions)  # whoever is there takes the state
                    for value in (6.0, 9.0):
                        own[0]["w"].fill_(3.0)
                        mine, *theirs = await asyncio.gather(
                            average(swarm, sessions),
                            *[swarm.call(one.average, fill=value) for one in others],
                        )
                    assert [result.participants for result in mine] == [3]
                    assert [told["participants"] for told in theirs] == [3, 3]
                    assert [told["w"] for told in theirs] == [7.0, 7.0]
                    assert own[0]["w"].unique().tolist() == [7.0]
            finally:
                for one in others:
                    await swarm.call(one.end)
                for daemon in daemons:
                    await swarm.call(daemon.end)
