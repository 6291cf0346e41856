"""One daemon of three is stopped in the exchange and goes on later: the situation and its right
outcome, for a few seconds in integration/ and for a minute in chaos/.

One rule: the two that stay are nodes of the test's own process, whose values can be looked at.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import torch

from moshpitd.core.allreduce import Round
from moshpitd.testing import LocalSwarm
from tests.kit.processes import DaemonProcess, TrainerProcess
from tests.kit.swarm import average, same_bits, trainers, until

FLOATS = 12_000_000  # a round of these takes long enough to be met in the middle
MAX_LAG = 2
PARAMS = {
    "window_s": 2.0,
    "answer_timeout_s": 1.0,
    "part_timeout_s": 3.0,
    "result_timeout_s": 7.0,
    "max_version_lag": MAX_LAG,
}


async def freeze_and_thaw(
    place: Path, *, frozen_s: float, rounds: int, discards: bool = False
) -> None:
    """Frozen for at least `frozen_s`, and while the others average `rounds` times, which must be
    more than MAX_LAG. With `discards` only the stale round is looked at, otherwise what follows.
    """
    assert rounds > MAX_LAG
    overrides = {f"averaging__{key}": value for key, value in PARAMS.items()}
    assignments = [f"averaging.{key}={value}" for key, value in PARAMS.items()]
    async with LocalSwarm(2, **overrides) as swarm:
        address = swarm.node(0).status()["addresses"][0]
        daemon = DaemonProcess(place / "d", bootstrap=(address,), settings=assignments)
        daemon.start()
        trainer = None
        try:
            await swarm.call(daemon.up)
            await until(
                lambda: swarm.node(0).status()["swarm_peers"] == 3, timeout_s=30, what="all three"
            )
            own = [{"w": torch.zeros(FLOATS)} for _ in range(2)]
            async with trainers(swarm, "r", own) as sessions:
                trainer = TrainerProcess(daemon.socket, "r", floats=FLOATS)
                await swarm.call(trainer.attached)
                first, theirs = await asyncio.gather(
                    average(swarm, sessions), swarm.call(trainer.average)
                )
                assert [one.participants for one in first] == [3, 3]
                assert theirs["participants"] == 3

                for tensors, value in zip(own, (1.0, 2.0), strict=True):
                    tensors["w"].fill_(value)
                number = trainer.ask(fill=6.0, timeout_s=30.0 + frozen_s)
                running = asyncio.create_task(average(swarm, sessions))
                peer = swarm.node(0).runs["r"].driver.peer

                def all_began() -> bool:
                    """Also the daemon: stopped before Begin it would have no stale round."""
                    work = peer.conductor.work
                    round_ = work.round if work is not None else None
                    return isinstance(round_, Round) and all(
                        lane.spoke for i, lane in enumerate(round_.st.lanes) if i != round_.index
                    )

                await until(all_began, timeout_s=30, what="an exchange of all three")
                daemon.signal(signal.SIGSTOP)
                loop = asyncio.get_running_loop()
                frozen_at = loop.time()
                survivors = await running
                assert all(one.accepted for one in survivors), survivors
                assert loop.time() - frozen_at < 15.0  # not paced by the frozen one
                for tensors, value in zip(own, (1.0, 2.0), strict=True):
                    # All three, the two, or a part that was the frozen one's to reduce.
                    assert set(tensors["w"].unique().tolist()) <= {3.0, 1.5, value}
                for turn in range(rounds):
                    for tensors in own:
                        tensors["w"].fill_(100.0 + turn)
                    results = await average(swarm, sessions)
                    assert [one.participants for one in results] == [2, 2], results
                    assert same_bits(own)
                newest = sessions[0].version
                await asyncio.sleep(max(0.0, frozen_s - (loop.time() - frozen_at)))

                daemon.signal(signal.SIGCONT)
                stale = await swarm.call(trainer.answer, number, 60.0)
                assert stale["version"] < newest, stale
                if discards:
                    # No mixture of its old round and its own values.
                    # Or it was through before it froze, with everybody's mean.
                    told = (stale["status"], stale["w"])
                    assert told in (("failed", 6.0), ("complete", 3.0)), stale
                    assert stale["even"], stale
                    return
                for tensors in own:
                    tensors["w"].fill_(200.0)
                fill: dict[str, float] = {"fill": 6.0}
                for _ in range(4):  # one to catch up, one to enter with weight 0, one to count
                    results, theirs = await asyncio.gather(
                        average(swarm, sessions), swarm.call(trainer.average, **fill)
                    )
                    fill = {}
                    if theirs["participants"] == 3:
                        break
                assert theirs["participants"] == 3, theirs
                assert [one.participants for one in results] == [3, 3], results
                assert theirs["version"] == results[0].version > newest
                # It was further behind than max_version_lag, so its 6.0 counted for nothing. If it
                # took the snapshot in one round and met the others in the next, it counts with it.
                snapshot = 100.0 + rounds - 1
                allowed = {200.0, float(torch.tensor((400.0 + snapshot) / 3.0))}
                assert set(own[0]["w"].unique().tolist()) <= allowed, own[0]["w"].unique()
                assert theirs["even"], theirs
                assert theirs["w"] in allowed, theirs
                assert same_bits(own)
        finally:
            if trainer is not None:
                await swarm.call(trainer.end)
            await swarm.call(daemon.end)
