"""Runs that nobody trains any more, on real daemons: they go whole, and come back from a peer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest
import torch

from moshpitd.client import attach
from moshpitd.core.messages import Goodbye, Hello
from moshpitd.core.outcome import Reason
from moshpitd.daemon import roster
from moshpitd.daemon.node import Node
from moshpitd.errors import TrainerError
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until

RUN = "left"


def series(node: Node) -> list[str]:
    """The lines of /metrics that name the run."""
    return [line for line in node.metrics.render().decode().splitlines() if f'"{RUN}"' in line]


def traces(node: Node) -> list[str]:
    """What of the run is anywhere in a node, by the name of the part."""
    assert node._exchange is not None
    assert node._storages is not None
    assert node._network is not None
    places = {
        "runs": node.runs,
        "exchange": node._exchange._runs,
        "frames": node._exchange._intake._hashes,
        "stores": node._storages._stores,
        "names": node._storages._names,
        "control bytes": node._network.control_bytes,
        "series": series(node),
        "buckets": list(Path(node.paths.buffers_dir).glob("*")),
    }
    return [name for name, place in places.items() if place]


async def test_an_idle_run_is_let_go_whole_and_a_trainer_that_returns_gets_it_from_a_peer() -> None:
    async with LocalSwarm(2) as swarm:
        await swarm.stop_node(1)
        node = await swarm.start(1, runs__idle_s=1.0)
        await swarm.together()
        old, here = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
        async with trainers(swarm, RUN, [here], nodes=[0]) as (stays,):
            async with trainers(swarm, RUN, [old], nodes=[1]) as (leaves,):
                old["w"].fill_(1.0)
                here["w"].fill_(3.0)
                first = await average(swarm, [stays, leaves])
                assert [one.participants for one in first] == [2, 2]
                await until(lambda: len(series(node)) > 10, timeout_s=5, what="series of the run")
                ongoing = node._exchange._runs[RUN]  # type: ignore[union-attr]
                copy, residuals = weakref.ref(ongoing.snapshots._copy), ongoing.residuals
                assert sum(residuals.nbytes.values()) > 0
                del ongoing
            (line,) = node.status()["runs"]
            assert line["trainers"] == 0
            assert 0 <= line["idle_s"] < 30
            assert 0 <= line["forgotten_in_s"] <= 1.0

            await until(lambda: not traces(node), timeout_s=5, what=f"gone: {traces(node)}")
            gc.collect()
            assert copy() is None, "the copy of the parameters is kept"
            assert sum(residuals.nbytes.values()) == 0
            assert node.status()["runs"] == []
            assert 'moshpit_runs_forgotten_total{reason="idle"} 1.0' in (
                node.metrics.render().decode()
            )

            # It comes back with nothing, and its peer takes it back at once.
            await swarm.call(stays.average)
            new = {"w": torch.zeros(1000)}
            async with trainers(swarm, RUN, [new], nodes=[1]) as (returned,):
                assert returned.synced is not None
                assert returned.synced.loaded_snapshot
                assert same_bits([new, here])
                new["w"].add_(2.0)
                again = await average(swarm, [stays, returned])
                assert [one.group_size for one in again] == [2, 2], str(again)
                assert same_bits([new, here])


async def test_only_the_copy_of_a_trainer_that_died_last_counts_as_the_last() -> None:
    async with LocalSwarm(2) as swarm:
        tensors = [{"w": torch.zeros(10)}, {"w": torch.zeros(10)}]
        async with trainers(swarm, RUN, tensors) as sessions:
            results = await average(swarm, sessions)
            assert [one.participants for one in results] == [2, 2]
            first, last = (swarm.node(index).runs[RUN] for index in (0, 1))
            now = last.driver.now
            await swarm.call(sessions[0].close)
            await until(
                lambda: last.driver.peer.state.swarm.living(last.driver.peer.record.schema) == 0,
                timeout_s=5,
                what="the goodbye of the other",
            )
            last.leave(*last.trainers)  # as when its stream breaks
            assert last.is_last_copy(now())
            assert not first.is_last_copy(now())
            await until(lambda: not last.in_use(now()), timeout_s=5, what="nothing is under way")
        # Both trainers ended in order this time: what they averaged is theirs.
        async with trainers(swarm, RUN, tensors) as sessions:
            await average(swarm, sessions)
            runs = [swarm.node(index).runs[RUN] for index in (0, 1)]
        for run in runs:
            assert run.idle_since is not None
            assert not run.is_last_copy(now())


async def test_a_trainer_that_attaches_while_its_run_is_let_go_gets_a_new_one() -> None:
    async with LocalSwarm(1) as swarm:
        node = swarm.node(0)
        async with trainers(swarm, RUN, [{"w": torch.ones(1000)}]) as (session,):
            await swarm.call(session.average)
            old = node.runs[RUN]
        await until(lambda: old.idle_since is not None, timeout_s=5, what="the trainer is gone")
        sequence = old.driver.peer.record.sequence
        ending = node._roster._let_go(old, roster.IDLE)
        asking = asyncio.create_task(
            swarm.call(attach, RUN, tensors={"w": torch.ones(1000)}, socket=swarm.socket(0))
        )
        await ending
        session = await asking
        assert node.runs[RUN] is not old
        assert node.runs[RUN].driver.peer.record.sequence > sequence
        assert (await swarm.call(session.average)).version == 1, "a fresh run"
        await swarm.call(session.close)


async def test_a_goodbye_of_a_run_that_was_let_go_does_not_meet_its_next_life() -> None:
    """A stranger's question is answered with the number of a record made then: below those of a run
    that comes after it, above those of one that was before."""
    async with LocalSwarm(2) as swarm:
        here, there = swarm.nodes
        assert here is not None
        assert there is not None
        async with trainers(swarm, RUN, [{"w": torch.ones(10)}], nodes=[1]):
            before = there.runs[RUN].driver.peer.record.sequence
        heard: list[Goodbye] = []
        async with trainers(swarm, RUN, [{"w": torch.ones(10)}], nodes=[0]):
            peer = here.runs[RUN].driver.peer
            await there._roster._let_go(there.runs[RUN], roster.IDLE)
            goes = peer.state.swarm.goes
            peer.state.swarm.goes = lambda who, word: heard.append(word) or goes(who, word)  # type: ignore[func-returns-value,method-assign]
            hello = Hello(peer.record)
            await here.send(RUN, there.peer_id, hello)
            await until(lambda: bool(heard), timeout_s=5, what="a goodbye")
        assert heard[0].reason is Reason.NO_TRAINER
        async with trainers(swarm, RUN, [{"w": torch.ones(10)}], nodes=[1]):
            after = there.runs[RUN].driver.peer.record.sequence
        assert before < heard[0].sequence < after


async def test_seventy_runs_one_after_another_on_a_daemon_that_keeps_sixty_four() -> None:
    async with LocalSwarm(1) as swarm:
        node = swarm.node(0)
        for number in range(70):
            own = {"w": torch.full((10,), float(number))}
            session = await swarm.call(attach, f"run-{number}", tensors=own, socket=swarm.socket(0))
            await swarm.call(session.close)
        assert list(node.runs) == [f"run-{number}" for number in range(6, 70)]
        await until(
            lambda: 'moshpit_trainers{run="run-69"}' in node.metrics.render().decode(),
            timeout_s=5,
            what="the newest run has a series of its own",
        )
        text = node.metrics.render().decode()
        assert 'moshpit_runs_forgotten_total{reason="limit"} 6.0' in text
        assert 'run="run-5"' not in text
        assert 'run="other"' not in text


async def test_a_daemon_that_keeps_all_runs_says_who_holds_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalSwarm(1, runs__idle_s=0.0) as swarm:
        monkeypatch.setattr(swarm.node(0)._roster, "_most", 1)
        async with trainers(swarm, RUN, [{"w": torch.ones(10)}]):
            pass
        with pytest.raises(TrainerError, match=r"left without, kept because runs\.idle_s is 0"):
            await swarm.call(attach, "next", tensors={"w": torch.ones(10)}, socket=swarm.socket(0))
