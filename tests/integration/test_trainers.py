"""Trainers that come and go on one daemon, in processes of their own where that is the point."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moshpitd.client import DaemonUnavailable, TrainerError
from moshpitd.daemon.buffers import Bucket, create_bucket
from moshpitd.errors import MoshpitError
from moshpitd.rpc.calls import Calls
from moshpitd.rpc.channel import sync_channel
from moshpitd.rpc.stubs import SERVICE, messages, services
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAINER = """
import sys, time, torch
from moshpitd.client import attach
session = attach("killed", tensors={"w": torch.ones(1000)}, socket=sys.argv[1])
print("attached", flush=True)
time.sleep(60)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(1) as running:
        yield running


def buckets(swarm: LocalSwarm) -> list[Path]:
    return sorted((swarm.folder / "0" / "buffers").glob("*.bucket"))


async def test_a_killed_trainer_leaves_no_bucket(swarm: LocalSwarm) -> None:
    with subprocess.Popen(  # noqa: ASYNC220  # starting it is quick, reading from it is in a thread
        [sys.executable, "-c", TRAINER, str(swarm.socket(0))], stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        assert await swarm.call(trainer.stdout.readline) == b"attached\n"
        (bucket,) = buckets(swarm)
        assert stat.S_IMODE(bucket.stat().st_mode) == 0o600
        os.kill(trainer.pid, signal.SIGKILL)
        took_s = await until(lambda: not buckets(swarm), timeout_s=2.0, what="the bucket is gone")
        assert took_s < 2.0
        assert not swarm.node(0).runs["killed"].trainers


async def test_the_memory_of_a_bucket_goes_with_its_trainer(swarm: LocalSwarm) -> None:
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if str(swarm.folder) in line and ".bucket" in line]

    gc.collect()
    before = len(mapped())
    gc.disable()  # a mapping in a cycle would stay until some later collection
    try:
        async with trainers(swarm, "mapped", [{"w": torch.ones(1000)}]) as (session,):
            await swarm.call(session.average)
            assert len(mapped()) == before + 2  # the daemon's and the trainer's
        del session
        await until(
            lambda: len(mapped()) <= before + 1, timeout_s=2.0, what="the daemon's mapping is gone"
        )
    finally:
        gc.enable()


async def test_a_trainer_that_never_holds_is_dropped(
    swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moshpitd.daemon.runs.HOLD_WITHIN_S", 0.2)
    calls = Calls(swarm.socket(0))
    reply = await swarm.call(calls.attach, request("unheld"), 5.0)
    assert [str(path) for path in buckets(swarm)] == [reply.bucket_path]
    await until(lambda: not buckets(swarm), timeout_s=2.0, what="the bucket is gone")
    calls.close()


async def test_a_trainer_that_gives_up_while_its_bucket_is_made_leaves_none(
    swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ended = threading.Event(), threading.Event()

    def slow(*arguments: Any, **more: Any) -> Bucket:
        made = create_bucket(*arguments, **more)
        go.wait(10.0)
        ended.set()
        return made

    monkeypatch.setattr("moshpitd.daemon.buffers.create_bucket", slow)
    calls = Calls(swarm.socket(0))
    with pytest.raises(MoshpitError):
        await swarm.call(calls.attach, request("impatient"), 0.5)
    await until(lambda: len(buckets(swarm)) == 1, timeout_s=2.0, what="the bucket is made")
    go.set()
    await swarm.call(ended.wait, 10.0)
    await until(lambda: not buckets(swarm), timeout_s=2.0, what="the bucket is gone")
    calls.close()


async def test_residuals_are_given_between_rounds_and_to_who_is_known(swarm: LocalSwarm) -> None:
    calls = Calls(swarm.socket(0))
    nobody = messages.ResidualsRequest(trainer="nobody")
    with pytest.raises(TrainerError) as refused:
        await swarm.call(calls.get_residuals, nobody, 5.0)
    assert refused.value.reason == "unknown_trainer"
    reply = await swarm.call(calls.attach, request("owing"), 5.0)
    run = swarm.node(0).runs["owing"]
    with run.between_rounds(reply.trainer, 0):
        pass
    with (
        pytest.raises(TrainerError, match="began a round") as late,
        run.between_rounds(reply.trainer, 0),
    ):
        run.driver.peer.state.attempts += 1  # another trainer's call, while a thread copies
    assert late.value.reason == "bucket_busy"
    await swarm.call(calls.detach, reply.trainer, 5.0)
    calls.close()


def request(run: str, **fields: Any) -> messages.AttachRequest:
    tensors = [messages.Tensor(name="w", shape=[4], dtype="float32")]
    return messages.AttachRequest(**({"run": run, "tensors": tensors, "api": 1} | fields))


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"run": "no/slash"}, "bad_run", "letters"),
        ({"run": ""}, "bad_run", "1 to 64"),
        ({"api": 2}, "api_differs", "API 2"),
        ({"tensors": []}, "no_tensors", "at least one"),
        (
            {"tensors": [messages.Tensor(name="c", shape=[2], dtype="complex64")]},
            "dtype_refused",
            "'c'",
        ),
        (
            {"tensors": [messages.Tensor(name="n", shape=[-2], dtype="float32")]},
            "shape_refused",
            "'n'",
        ),
    ],
)
async def test_an_impossible_attach_is_refused_by_name(
    swarm: LocalSwarm, fields: dict[str, Any], reason: str, words: str
) -> None:
    calls = Calls(swarm.socket(0))
    with pytest.raises(TrainerError) as refused:
        await swarm.call(calls.attach, request(**({"run": "bad"} | fields)), 5.0)
    calls.close()
    assert refused.value.reason == reason
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight": (1 << 32) + 1}, "weight_out_of_range"),
        ({"rounds": 65}, "rounds_out_of_range"),
        ({"on_partial": "panic"}, "unknown_on_partial"),
        ({"timeout_s": -1.0}, "timeout_out_of_range"),
        ({"timeout_s": float("nan")}, "timeout_out_of_range"),
        ({"generation": 3}, "bucket_modified"),
        ({"generation": 4}, "bucket_modified"),
        ({"trainer": "nobody"}, "unknown_trainer"),
    ],
)
async def test_an_impossible_average_is_refused_by_name(
    swarm: LocalSwarm, fields: dict[str, Any], reason: str
) -> None:
    calls = Calls(swarm.socket(0))
    reply = await swarm.call(calls.attach, request("asked"), 5.0)
    ask = {"trainer": reply.trainer, "weight": 1, "rounds": 1, "timeout_s": 5.0} | fields
    with pytest.raises(TrainerError) as refused:
        await swarm.call(lambda: list(calls.average(messages.AverageRequest(**ask), 5.0)))
    await swarm.call(calls.detach, reply.trainer, 5.0)
    calls.close()
    assert refused.value.reason == reason, refused.value


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a tmpfs, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_model_larger_than_the_tmpfs_is_one_sentence(small_tmpfs: Path) -> None:
    async with LocalSwarm(1, node__buffers_dir=str(small_tmpfs)) as swarm:
        tensors = [messages.Tensor(name="w", shape=[100_000_000], dtype="float32")]
        calls = Calls(swarm.socket(0))
        with pytest.raises(TrainerError) as refused:
            await swarm.call(calls.attach, request("huge", tensors=tensors), 10.0)
        assert (refused.value.code, refused.value.reason) == ("RESOURCE_EXHAUSTED", "no_room")
        assert str(small_tmpfs) in refused.value.message
        assert "400004096 bytes needed" in refused.value.message
        assert "buffers_dir" in refused.value.message
        assert os.listdir(small_tmpfs) == []
        await swarm.call(calls.attach, request("small"), 10.0)  # and the daemon goes on
        calls.close()


async def test_the_socket_is_ours_alone_and_speaks_health_and_reflection(
    swarm: LocalSwarm,
) -> None:
    path = swarm.socket(0)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def ask() -> tuple[int, list[str]]:
        with sync_channel(path) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            (reply,) = list(reflection.ServerReflectionInfo(iter([question]), timeout=5))
            return answer.status, [one.name for one in reply.list_services_response.service]

    status, names = await swarm.call(ask)
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert SERVICE in names


async def test_a_newer_trainer_of_the_node_loads_what_the_node_has(swarm: LocalSwarm) -> None:
    first = {"w": torch.full((10,), 5.0)}
    async with trainers(swarm, "again", [first]) as (session,):
        result = await swarm.call(session.average)
        assert (result.status, result.version) == ("alone", 1)
        await swarm.call(session.put_state, b"epoch 3")
    second = {"w": torch.zeros(10)}
    async with trainers(swarm, "again", [second]) as (session,):
        assert session.synced is not None
        assert session.synced.loaded_snapshot
        assert second["w"].tolist() == [5.0] * 10
        assert session.version == 1
        assert await swarm.call(session.get_state) == b"epoch 3"


async def test_another_schema_may_follow_when_nobody_has_the_old_one(swarm: LocalSwarm) -> None:
    async with trainers(swarm, "changing", [{"w": torch.ones(3)}]) as (session,):
        await swarm.call(session.average)
    async with trainers(swarm, "changing", [{"w": torch.ones(7)}]) as (session,):
        assert (await swarm.call(session.average)).status == "alone"
        assert len(buckets(swarm)) == 1


async def test_the_state_of_a_trainer_has_a_bound(swarm: LocalSwarm) -> None:
    async with trainers(swarm, "state", [{"w": torch.ones(3)}]) as (session,):
        big = bytes(64 << 20)
        await swarm.call(session.put_state, big)
        assert len(await swarm.call(session.get_state)) == len(big)
        with pytest.raises(TrainerError):
            await swarm.call(session.put_state, big + b"x")


async def test_a_second_call_of_one_trainer_is_refused(swarm: LocalSwarm) -> None:
    calls = Calls(swarm.socket(0))
    node = swarm.node(0)
    reply = await swarm.call(calls.attach, request("busy"), 5.0)
    run = node.runs["busy"]
    run.trainer(reply.trainer).token = "in another call"
    ask = messages.AverageRequest(trainer=reply.trainer, weight=1, rounds=1, timeout_s=5)
    with pytest.raises(TrainerError) as refused:
        await swarm.call(lambda: list(calls.average(ask, 5.0)))
    assert refused.value.reason == "bucket_busy"
    await swarm.call(calls.detach, reply.trainer, 5.0)
    calls.close()


async def test_a_drain_is_told_to_trainers_and_ends_the_node() -> None:
    async with LocalSwarm(2) as swarm:
        tensors = [{"w": torch.full((10,), float(i))} for i in range(2)]
        async with trainers(swarm, "leaving", tensors) as sessions:
            await asyncio.gather(*(swarm.call(session.average) for session in sessions))
            calls = Calls(swarm.socket(0))
            ended = asyncio.create_task(swarm.node(0).wait())
            await swarm.call(calls.drain, 5.0)
            await asyncio.wait_for(ended, 5.0)
            calls.close()
            await until(lambda: sessions[0].draining, timeout_s=2, what="the trainer knows")
            with pytest.raises(DaemonUnavailable):
                await swarm.call(sessions[0].average)
            late = {"w": torch.ones(1)}
            async with trainers(swarm, "late", [late]) as (session,):
                assert not session.attached  # it trains locally
            (line,) = swarm.node(1).peers("leaving")
            assert (line["state"], line["note"]) == ("lost", "draining")
            result = await swarm.call(sessions[1].average)
            assert result.status == "alone"
            assert sum(result.seconds.values()) < 1.0
            await swarm.stop_node(0)
            assert not swarm.socket(0).exists()


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_late_trainer_gets_what_the_others_moved(in_place: bool) -> None:
    tensors = [{"w": torch.full((100,), 1.0), "step": torch.tensor(0)} for _ in range(3)]
    async with (
        LocalSwarm(2, averaging__local_window_s=0.1) as swarm,
        trainers(swarm, "late", tensors, nodes=[0, 0, 1], in_place=in_place) as sessions,
    ):
        for own, value, step in zip(tensors, (1.0, 5.0, 3.0), (4, 9, 6), strict=True):
            own["w"].fill_(value)
            own["step"].fill_(step)
        first = asyncio.create_task(swarm.call(sessions[0].average))
        await asyncio.sleep(0.4)  # its local window is over, and it waits for the other node
        late = asyncio.create_task(swarm.call(sessions[1].average))
        await asyncio.sleep(0.2)
        results = [await swarm.call(sessions[2].average), await first, await late]
        assert [result.participants for result in results] == [2, 2, 2], str(results)
        assert [result.delta for result in results] == [False, False, True]
        assert [own["w"][0].item() for own in tensors] == [2.0, 6.0, 2.0]  # 5 + (2 - 1)
        assert [own["step"].item() for own in tensors] == [6, 9, 6]
        again = await average(swarm, sessions)
        assert [result.accepted for result in again] == [True] * 3, str(again)
        assert same_bits(tensors)


async def test_services_are_those_of_the_proto(swarm: LocalSwarm) -> None:
    calls = Calls(swarm.socket(0))
    status = await swarm.call(calls.status)
    assert status.peer_id == swarm.node(0).peer_id
    assert status.swarm_peers == 1
    assert not status.joined
    assert len((await swarm.call(calls.peers)).peers) == 0
    assert isinstance(await swarm.call(calls.rounds, "", 5), messages.RoundsReply)
    calls.close()
    assert hasattr(services, "DaemonStub")
    assert grpc.aio is not None
