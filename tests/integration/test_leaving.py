"""A drain on real nodes: what is finished, what is handed over, what people see, and when it
ends."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moshpitd.cli.main import app
from moshpitd.client import DaemonUnavailable
from moshpitd.daemon.leaving import Leaving
from moshpitd.daemon.node import Node
from moshpitd.rpc.calls import Calls
from moshpitd.testing import LocalSwarm
from tests.kit.clouds import AwsMetadata
from tests.kit.http import get
from tests.kit.ports import free_port
from tests.kit.processes import DaemonProcess, TrainerProcess, wait_for
from tests.kit.swarm import average, same_bits, trainers, until

FLOATS = 12_000_000  # a round of these takes long enough to be met in the middle


def phase(node: Node, run: str) -> str:
    return node.runs[run].driver.peer.phase


def phase_of(daemon: DaemonProcess) -> str:
    status = daemon.status()
    return str(status.runs[0].phase) if status is not None and status.runs else ""


async def test_a_notice_lets_the_running_round_end_and_begins_no_other(tmp_path: Path) -> None:
    file, http = tmp_path / "preempted", free_port()
    notices: dict[str, Any] = {"notices__provider": "file", "notices__file": str(file)}
    async with LocalSwarm(2) as swarm:
        node = await swarm.add(http__port=http, notices__poll_s=0.01, **notices)
        await swarm.together()
        tensors = [{"w": torch.full((FLOATS,), float(i))} for i in range(3)]
        async with trainers(swarm, "r", tensors) as sessions:
            await average(swarm, sessions)
            running = [asyncio.create_task(swarm.call(one.average)) for one in sessions]
            await until(lambda: phase(node, "r") == "exchange", timeout_s=20, what="an exchange")
            file.write_text("30")
            ended = asyncio.create_task(node.wait())
            await until(node.draining.is_set, timeout_s=5, what="the drain")
            assert phase(node, "r") == "exchange"
            status = await swarm.call(Calls(swarm.socket(2)).status)
            code, words = await swarm.call(get, f"http://127.0.0.1:{http}/readyz")
            assert status.draining
            assert 20 < status.drain_left_s <= 25
            assert status.drain_reason == f"file: {file} appeared"
            assert code == 503
            assert "draining" in words
            assert str(file) in words
            results = await asyncio.gather(*running)
            assert [(one.status, one.participants) for one in results] == [("complete", 3)] * 3
            assert same_bits(tensors)
            await asyncio.wait_for(ended, 5.0)
            with pytest.raises(DaemonUnavailable):
                await swarm.call(sessions[2].average)
            (line,) = [line for line in swarm.node(0).peers("r") if line["peer_id"] == node.peer_id]
            assert (line["state"], line["note"]) == ("lost", "preempted")
            metrics = swarm.node(0).metrics.render().decode()
            assert 'moshpit_peer_events_total{event="preempted",run="r"} 1.0' in metrics
            assert "moshpit_draining 1.0" in node.metrics.render().decode()
            others = await average(swarm, sessions[:2])
            assert [(one.status, one.participants) for one in others] == [("complete", 2)] * 2
            assert all(sum(one.seconds.values()) < 5.0 for one in others)  # nobody waits for it


async def test_the_only_peer_with_the_newest_state_stays_until_somebody_took_it() -> None:
    async with LocalSwarm(2) as swarm:
        first, second = {"w": torch.full((1000,), 1.0)}, {"w": torch.full((1000,), 2.0)}
        async with trainers(swarm, "r", [first], nodes=[0]) as (old,):
            for turn in range(3):
                first["w"].fill_(10.0 + turn)
                assert (await swarm.call(old.average)).status == "alone"
            node = swarm.node(0)
            # The newcomer is known and has asked for nothing yet.
            other = swarm.node(1)
            async with trainers(swarm, "r", [second], nodes=[1], sync=False) as (new,):
                run = other.runs["r"]
                (trainer,) = run.trainers.values()
                trainer.bucket.hand_over(0)
                await run._introduce(trainer)
                trainer.bucket.hand_back()
                await until(
                    lambda: bool(node.peers("r")) and node.peers("r")[0]["state"] == "heard",
                    timeout_s=10,
                    what="the newcomer is known",
                )
                node.begin_drain(20.0)
                ended = asyncio.create_task(node.wait())
                await asyncio.sleep(0.5)
                assert not ended.done()
                with pytest.raises(DaemonUnavailable):
                    await swarm.call(old.average)
                result = await swarm.call(new.sync)
                assert result.loaded_snapshot
                assert second["w"].tolist() == first["w"].tolist()
                await asyncio.wait_for(ended, 5.0)


async def test_a_peer_with_nothing_of_its_own_leaves_at_once() -> None:
    async with LocalSwarm(3) as swarm:
        tensors = [{"w": torch.full((1000,), float(i))} for i in range(3)]
        async with trainers(swarm, "r", tensors) as sessions:
            await average(swarm, sessions)
            node = swarm.node(0)
            started = asyncio.get_running_loop().time()
            node.begin_drain(30.0)
            await asyncio.wait_for(node.wait(), 10.0)
            assert asyncio.get_running_loop().time() - started < 3.0


class Stays:
    """A run that has something to do until `go` is set."""

    name = "r"

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.seen: list[str] = []

    async def depart(self, *, preempted: bool) -> None:
        self.seen.append(f"depart {preempted}")
        try:
            await self.go.wait()
        finally:
            self.seen.append("goodbye")

    def unfinished(self) -> str:
        return "" if self.go.is_set() else "a call is in exchange"


async def test_a_drain_ends_with_the_work_and_not_with_the_budget() -> None:
    run = Stays()
    leaving = Leaving(lambda: [run])
    assert leaving.left_s == 0.0
    assert leaving.begin(3600.0, "gcp: preempted", preempted=True)
    assert 3590 < leaving.left_s <= 3600
    run.go.set()
    await asyncio.wait_for(leaving.over(), 5.0)
    assert run.seen == ["depart True", "goodbye"]


async def test_the_budget_ends_a_drain_with_a_goodbye_and_says_what_was_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Stays()
    leaving = Leaving(lambda: [run])
    leaving.begin(0.05, "SIGTERM")
    await asyncio.wait_for(leaving.over(), 5.0)
    assert run.seen == ["depart False", "goodbye"]
    assert "drain over budget, leaving" in [record.getMessage() for record in caplog.records]


async def test_several_reasons_are_one_drain_and_the_earliest_deadline_holds() -> None:
    run = Stays()
    leaving = Leaving(lambda: [run])
    assert leaving.begin(3600.0, "aws: spot terminate", preempted=True)
    await asyncio.sleep(0)
    assert not leaving.begin(7200.0, "drain")
    assert leaving.left_s <= 3600
    assert not leaving.begin(0.05, "SIGTERM")
    await asyncio.wait_for(leaving.over(), 5.0)
    assert run.seen == ["depart True", "goodbye"]
    assert (leaving.why, leaving.preempted) == ("aws: spot terminate", True)


async def test_who_stops_waiting_for_a_drain_does_not_end_it() -> None:
    run = Stays()
    leaving = Leaving(lambda: [run])
    leaving.begin(3600.0, "drain")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(leaving.over(), 0.05)
    assert run.seen == ["depart False"]
    run.go.set()
    await asyncio.wait_for(leaving.over(), 5.0)


async def test_a_rebalance_recommendation_is_a_warning_in_status(tmp_path: Path) -> None:
    async with AwsMetadata() as cloud, LocalSwarm(0) as swarm:
        cloud.rebalance = "{}"
        node = await swarm.add(
            notices__provider="aws", notices__url=cloud.url, notices__poll_s=0.01
        )
        await until(
            lambda: "notice of aws: rebalance recommended" in node.status()["warnings"],
            timeout_s=10,
            what="the warning",
        )
        assert not node.draining.is_set()


async def test_the_flight_recorder_of_a_swarm_tells_a_round_and_who_left() -> None:
    async with LocalSwarm(3) as swarm:
        tensors = [{"w": torch.full((1000,), float(i))} for i in range(3)]
        async with trainers(swarm, "r", tensors) as sessions:
            await average(swarm, sessions)
            swarm.node(2).begin_drain(10.0, "gcp: preempted", preempted=True)
            await asyncio.wait_for(swarm.node(2).wait(), 10.0)
            await average(swarm, sessions[:2])
            ids = [swarm.node(index).peer_id for index in range(3)]
            for index in range(3):
                await swarm.stop_node(index)
        places = [str(swarm.folder / str(index)) for index in range(3)]
        result = CliRunner().invoke(app, ["replay", *places, "--json"])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        first, second = told["rounds"]
        assert sorted(first["members"]) == sorted(ids)
        assert sorted(second["members"]) == sorted(ids[:2])
        assert {one["outcome"] for one in first["ended"].values()} == {"complete"}
        assert told["torn_bytes"] == 0
        # One machine, so the clocks are one clock, as far as a message's way lets it be seen.
        assert all(abs(clock["offset_s"]) < 1.0 for clock in told["clocks"])
        result = CliRunner().invoke(app, ["replay", *places, "--round", "last", "--json"])
        last = json.loads(result.stdout)["round"]
        assert last["group"] == second["group"]
        assert [line["what"] for line in last["timeline"]].count("round_ended") == 2


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["notice", "SIGTERM"])
async def test_a_daemon_that_is_taken_away_exits_0_when_its_round_is_done(
    place: Path, how: str
) -> None:
    file = place / "preempted"
    assignments = ["averaging.window_s=2.0", "averaging.answer_timeout_s=1.0"]
    assignments += ["notices.provider=file", f"notices.file={file}", "notices.poll_s=0.02"]
    async with LocalSwarm(1) as swarm:
        address = swarm.node(0).status()["addresses"][0]
        daemon = DaemonProcess(place / "d", bootstrap=(address,), settings=assignments)
        daemon.start()
        try:
            await swarm.call(daemon.up)
            trainer = TrainerProcess(daemon.socket, "r", floats=FLOATS)
            own = {"w": torch.zeros(FLOATS)}
            async with trainers(swarm, "r", [own]) as (session,):
                await swarm.call(trainer.attached)
                await asyncio.gather(swarm.call(session.average), swarm.call(trainer.average))
                own["w"].fill_(1.0)
                running = asyncio.create_task(swarm.call(session.average))
                theirs = asyncio.create_task(swarm.call(trainer.average, fill=3.0))
                # There, not here: a leader is in the exchange before its Begin has arrived.
                await swarm.call(
                    wait_for, lambda: phase_of(daemon) == "exchange", 30.0, "an exchange"
                )
                if how == "notice":
                    file.write_text("40")
                else:
                    daemon.signal(signal.SIGTERM)
                told_at = asyncio.get_running_loop().time()
                mine, answer = await asyncio.gather(running, theirs)
                assert (mine.status, mine.participants) == ("complete", 2)
                assert (answer["what"], answer["w"], answer["even"]) == ("averaged", 2.0, True)
                assert await swarm.call(daemon.wait, 20.0) == 0
                assert asyncio.get_running_loop().time() - told_at < 25.0
                log = daemon.log.read_text()
                assert "Traceback" not in log
                assert not list(daemon.buffers.glob("*"))
                after = await swarm.call(trainer.average)
                assert (after["what"], after["unchanged"]) == ("unavailable", True)
            await swarm.call(trainer.end)
        finally:
            await swarm.call(daemon.end)
