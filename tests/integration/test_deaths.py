"""Trainers and daemons that die with kill -9, as real processes; what the others see, and how they
come back. The nodes that live are in this process.

Scenarios S17 and (three kills instead of twenty) S7; part 7 of the faults.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.client import DaemonUnavailable, Result, Session, attach
from moshpitd.testing import LocalSwarm
from tests.kit.flapping import Flapping, accepted_again
from tests.kit.ports import free_port
from tests.kit.processes import DaemonProcess, TrainerProcess
from tests.kit.swarm import Tensors, average, same_bits, trainers, until

FLOATS = 12_000_000  # a round of these takes long enough to be met in the middle
OFFER_GONE_S = 5.0
ANSWERED_S = 10.0
BUCKET_GONE_S = 2.0
FAST = {"window_s": 2.0, "answer_timeout_s": 1.0}  # as in LocalSwarm


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)


@asynccontextmanager
async def trainer_process(swarm: LocalSwarm, index: int, **options: Any) -> AsyncIterator[Any]:
    trainer = TrainerProcess(swarm.socket(index), "r", **options)
    try:
        await swarm.call(trainer.attached)
        yield trainer
    finally:
        await swarm.call(trainer.end)


def buckets(swarm: LocalSwarm, index: int) -> list[Path]:
    return list((swarm.folder / str(index) / "buffers").glob("*.bucket"))


# -- a trainer dies ---------------------------------------------------------------------------


async def test_a_trainer_killed_in_the_exchange_is_wholly_in_the_average() -> None:
    async with LocalSwarm(3) as swarm:
        own = [{"w": torch.zeros(FLOATS)} for _ in range(2)]
        async with (
            trainers(swarm, "r", own) as sessions,
            trainer_process(swarm, 2, floats=FLOATS) as victim,
        ):
            await asyncio.gather(
                average(swarm, sessions), swarm.call(victim.average, timeout_s=60.0)
            )
            for tensors, value in zip(own, (1.0, 2.0), strict=True):
                tensors["w"].fill_(value)
            run = swarm.node(2).runs["r"]
            victim.ask(fill=6.0)
            averaging = asyncio.create_task(average(swarm, sessions))
            await until(
                lambda: run.driver.peer.phase == "exchange", timeout_s=30, what="the exchange"
            )
            victim.kill()
            killed_at = time.monotonic()
            results = await averaging
            assert [one.status for one in results] == ["complete"] * 2, results
            assert [one.participants for one in results] == [3, 3]
            assert [one.total_weight for one in results] == [3.0, 3.0]
            assert own[0]["w"].unique().tolist() == [3.0]
            assert same_bits(own)
            await until(
                lambda: not buckets(swarm, 2), timeout_s=BUCKET_GONE_S, what="its bucket is gone"
            )
            again = await average(swarm, sessions)
            assert [one.participants for one in again] == [2, 2]
            assert time.monotonic() - killed_at < 20.0


async def test_a_trainer_killed_while_its_node_waits_for_others_is_waited_for_by_nobody() -> None:
    async with LocalSwarm(3) as swarm:
        own = [{"w": torch.zeros(1000)} for _ in range(2)]
        async with trainers(swarm, "r", own) as sessions, trainer_process(swarm, 2) as victim:
            await asyncio.gather(
                average(swarm, sessions), swarm.call(victim.average, timeout_s=60.0)
            )
            run = swarm.node(2).runs["r"]
            victim.ask()
            await until(
                lambda: run.driver.peer.phase == "matchmaking", timeout_s=10, what="it waits"
            )
            victim.kill()
            await until(lambda: not run.trainers, timeout_s=BUCKET_GONE_S, what="the node knows")
            assert not buckets(swarm, 2)
            results = await average(swarm, sessions)
            assert [(one.status, one.participants) for one in results] == [("complete", 2)] * 2
            assert all(sum(one.seconds.values()) < 1.5 for one in results)


async def test_a_node_whose_trainer_was_killed_is_no_donor_and_takes_it_back() -> None:
    """S17."""
    async with LocalSwarm(3) as swarm:
        own = {"w": torch.zeros(1000)}
        async with trainers(swarm, "r", [own]) as (session,), trainer_process(swarm, 1) as victim:
            for turn in range(2):
                own["w"].fill_(10.0 + turn)
                theirs, mine = await asyncio.gather(
                    swarm.call(victim.average, fill=20.0 + turn), swarm.call(session.average)
                )
                assert (theirs["participants"], mine.participants) == (2, 2)
            victim.kill()
            run = swarm.node(1).runs["r"]
            await until(
                lambda: not run.driver.peer.record.has_snapshot and not run.trainers,
                timeout_s=OFFER_GONE_S,
                what="it offers no snapshot",
            )
            await until(
                lambda: swarm.node(0).peers("r")[0]["state"] == "lost",
                timeout_s=OFFER_GONE_S,
                what="the others know",
            )
            async with trainer_process(swarm, 2, value=99.0) as newcomer:
                first = newcomer.heard[0]
                assert first["w"] == own["w"][0].item()  # from the donor that is left
                assert first["version"] == session.version == 2
                async with trainer_process(swarm, 1, value=77.0) as back:
                    assert back.heard[0]["w"] == own["w"][0].item()
                    for _ in range(3):  # who has just loaded a state enters with weight 0
                        others = (swarm.call(one.average) for one in (back, newcomer))
                        *theirs, mine = await asyncio.gather(*others, swarm.call(session.average))
                        if mine.participants == 3:
                            break
                    assert [one["participants"] for one in theirs] == [3, 3], theirs
                    assert mine.participants == 3


async def test_a_newcomer_that_finds_no_donor_is_told_within_ten_seconds() -> None:
    """S17, when the trainer that was killed was the only one."""
    async with LocalSwarm(2) as swarm, trainer_process(swarm, 0) as victim:
        await swarm.call(victim.average)
        victim.kill()
        late = {"w": torch.full((1000,), 5.0)}
        started = time.monotonic()
        async with trainers(swarm, "r", [late], nodes=[1]) as (session,):
            assert time.monotonic() - started < ANSWERED_S
            assert session.synced is not None
            assert not session.synced.loaded_snapshot
            assert late["w"][0].item() == 5.0
            result = await swarm.call(session.average)
            assert (result.status, result.participants) == ("alone", 1)


# -- a daemon dies ----------------------------------------------------------------------------


@asynccontextmanager
async def with_a_daemon(
    place: Path, **settings: Any
) -> AsyncIterator[tuple[LocalSwarm, DaemonProcess]]:
    """Two nodes in this process, and a daemon of its own."""
    async with LocalSwarm(2) as swarm:
        address = swarm.node(0).status()["addresses"][0]
        assignments = [f"averaging.{key}={value}" for key, value in FAST.items()]
        daemon = DaemonProcess(place / "d", bootstrap=(address,), settings=assignments)
        daemon.start()
        try:
            await swarm.call(daemon.up)
            await until(
                lambda: all(node.status()["swarm_peers"] == 3 for node in swarm.nodes if node),
                timeout_s=30,
                what="the daemon is in the swarm",
            )
            yield swarm, daemon
        finally:
            await swarm.call(daemon.end)


async def kill_in_the_exchange(
    swarm: LocalSwarm, daemon: DaemonProcess, sessions: list[Session], own: list[Tensors]
) -> list[Result]:
    """Node 0, node 1 and the daemon average 1, 2 and 6; the daemon is killed; what the two that
    live came to."""
    results = await average(swarm, sessions)
    assert [one.participants for one in results] == [3] * 3
    for tensors, value in zip(own, (1.0, 2.0, 6.0), strict=True):
        tensors["w"].fill_(value)
    running = [asyncio.create_task(swarm.call(one.average, timeout_s=60.0)) for one in sessions]
    peer = swarm.node(0).runs["r"].driver.peer
    await until(lambda: peer.phase == "exchange", timeout_s=30, what="the exchange")
    daemon.kill()
    with pytest.raises(DaemonUnavailable):
        await running[2]
    assert own[2]["w"].unique().tolist() == [6.0]  # the model is as it was
    return list(await asyncio.gather(*running[:2]))


async def test_trainers_of_a_daemon_killed_in_a_round_go_on_and_come_back(place: Path) -> None:
    """Two of them in place, that of the killed daemon among them: its tensors are in the file that
    the daemon leaves behind, and then in the next one."""
    async with with_a_daemon(place) as (swarm, daemon):
        own = [{"w": torch.zeros(FLOATS)} for _ in range(3)]
        sockets = [*swarm.sockets, daemon.socket]
        async with at(swarm, sockets, own, in_place=(1, 2)) as sessions:
            survivors = await kill_in_the_exchange(swarm, daemon, sessions, own)
            assert all(one.accepted for one in survivors), survivors
            for tensors, value in zip(own, (1.0, 2.0), strict=False):
                # Whole parts only: the mean of all three, of the two that live, or as it was.
                assert set(tensors["w"].unique().tolist()) <= {3.0, 1.5, value}
            with pytest.raises(DaemonUnavailable):
                await swarm.call(sessions[2].average)
            own[2]["w"].fill_(7.0)  # it trains on locally
            daemon.start()
            await swarm.call(daemon.up)
            assert await swarm.call(sessions[2].wait_attached, 30.0)
            synced = await swarm.call(sessions[2].sync)
            assert synced.version <= survivors[0].version
            again = await average(swarm, sessions)
            assert [(one.status, one.participants) for one in again] == [("complete", 3)] * 3
            assert same_bits(own)
            assert len({one.version for one in again}) == 1
            assert again[0].contributors == again[2].contributors
            assert daemon.peer_id in again[0].contributors


async def test_a_daemon_killed_in_a_round_costs_no_part(place: Path) -> None:
    async with with_a_daemon(place) as (swarm, daemon):
        own = [{"w": torch.zeros(FLOATS)} for _ in range(3)]
        async with at(swarm, [*swarm.sockets, daemon.socket], own) as sessions:
            survivors = await kill_in_the_exchange(swarm, daemon, sessions, own)
            assert [one.parts_without_result for one in survivors] == [(), ()], survivors
            assert same_bits(own[:2]), survivors
            # All three, or the two that live; a part that one of these missed is theirs alone.
            assert set(own[0]["w"].unique().tolist()) <= {3.0, 1.5, 1.0, 2.0}, survivors


@asynccontextmanager
async def at(
    swarm: LocalSwarm, sockets: list[Path], own: list[Tensors], *, in_place: Sequence[int] = ()
) -> AsyncIterator[list[Session]]:
    """A trainer at each of these sockets."""
    sessions = await asyncio.gather(
        *(
            swarm.call(attach, "r", tensors=tensors, socket=socket, in_place=number in in_place)
            for number, (socket, tensors) in enumerate(zip(sockets, own, strict=True))
        )
    )
    try:
        yield sessions
    finally:
        await asyncio.gather(*(swarm.call(session.close) for session in sessions))


@pytest.mark.timeout(400)
async def test_a_daemon_killed_again_and_again_leaves_nothing_and_is_taken_back(
    place: Path,
) -> None:
    """S7, with three of its twenty kills; the others are in chaos/."""
    async with LocalSwarm(1) as swarm:
        address = swarm.node(0).status()["addresses"][0]
        daemon = DaemonProcess(
            place / "d", port=free_port(), bootstrap=(address,), http=free_port()
        )
        flapping = Flapping(daemon, random.Random(7))
        try:
            bystander = flapping.place_a_bystander()
            await swarm.call(flapping.kill_often, 3)
            await accepted_again(swarm, daemon)
            await swarm.call(daemon.end)
            assert await swarm.call(flapping.left_behind) == []
            assert bystander.poll() is None
        finally:
            await swarm.call(daemon.end)
            flapping.end()
