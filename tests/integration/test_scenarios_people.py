"""Scenarios S10, S12, S14 and S16 on real daemons: what people bring along goes wrong, or stops.

One rule: every test also shows that the others, or the next round, are as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor, nn

from moshpitd.client import PartialAverage, Result, TrainerError, attach
from moshpitd.rpc.calls import Calls
from moshpitd.tensors.codecs import CODECS, RAW
from moshpitd.tensors.reduction import examine
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PART = 65_536  # float32 values in a part
PROCESS_S = 60.0

_names = itertools.count()


@pytest.fixture
def run() -> str:
    return f"people-{next(_names)}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    # Raw values: a codec that raises takes the place of that one.
    async with LocalSwarm(3, averaging__refresh_s=0.5, averaging__codec="float32") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def unmeasured() -> AsyncIterator[LocalSwarm]:
    """Links that have carried nothing yet, so that three members reduce a third each: by rates that
    were measured on a busy machine one of them may get two parts."""
    async with LocalSwarm(3, averaging__refresh_s=0.5, averaging__codec="float32") as running:
        yield running


# -- S10: another model under the same name -----------------------------------------------------


def model(layers: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))


async def test_a_model_with_one_more_layer_never_enters_a_group(
    swarm: LocalSwarm, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S10: before, during and after its calls the others average as if it were not there; both
    sides log and show the first difference.
    """
    caplog.set_level(logging.INFO, "moshpitd")
    models = [model(2), model(2), model(3)]
    sessions = [
        await swarm.call(attach, run, model=own, socket=swarm.socket(i))
        for i, own in enumerate(models)
    ]
    stranger_before = {name: value.clone() for name, value in models[2].state_dict().items()}
    try:
        for turn in range(3):
            for i in (0, 1):
                with torch.no_grad():
                    models[i][0].bias.fill_(float(i + turn))
            results = await average(swarm, sessions, timeout_s=20)
            assert [result.status for result in results] == ["complete", "complete", "alone"]
            assert [result.group_size for result in results] == [2, 2, 1]
            for result in results[:2]:
                assert sum(result.seconds.values()) < 1.0, result.seconds
            assert models[0][0].bias.tolist() == [0.5 + turn] * 8
            assert same_bits([own.state_dict() for own in models[:2]])
        assert same_bits([models[2].state_dict(), stranger_before])
        ids = [session.peer_id for session in sessions]

        def notes(node: int) -> dict[str, str]:
            return {line["peer_id"]: line["note"] for line in swarm.node(node).peers(run)}

        await until(
            lambda: all(len(notes(node)) == 2 for node in range(3)),
            timeout_s=5.0,
            what="the next look-up, of which there are two a second here",
        )
        seen = [notes(node) for node in range(3)]
    finally:
        for session in sessions:
            await swarm.call(session.close)
    # 0.bias, 0.weight, 1.bias, 1.weight, and then the stranger goes on.
    difference = "2.bias (float32 [8])"
    for one, other in ((0, 2), (1, 2), (2, 0), (2, 1)):
        assert difference in seen[one][ids[other]], seen
    assert seen[0][ids[1]] == seen[1][ids[0]] == ""
    told = [
        fields["peer"]
        for record in caplog.records
        if (fields := getattr(record, "moshpit_fields", {})).get("run") == run
        and difference in str(fields.get("detail"))
    ]
    assert ids[2] in told, "the others' log"
    assert {ids[0], ids[1]} & set(told), "the stranger's log"


# -- S12: a file system that is too small -------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
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


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(bytes(1 << 16))
    left = os.statvfs(path.parent)
    assert left.f_bavail * left.f_frsize < 1 << 16


async def test_a_model_that_does_not_fit_is_one_sentence_and_leaves_nothing(
    small_tmpfs: Path,
) -> None:
    """S12: path, need and fix, to the trainer itself; the daemon and the file system are as they
    were, and what does fit is whole, so that a full file system later hurts nobody (no SIGBUS).
    """
    async with LocalSwarm(1, node__buffers_dir=str(small_tmpfs)) as one:
        huge = {"w": torch.empty(100_000_000)}  # never touched: 400 MB of addresses
        with pytest.raises(TrainerError) as refused:
            await one.call(attach, "room", tensors=huge, socket=one.socket(0))
        error = refused.value
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "no_room")
        assert str(small_tmpfs) in error.message
        assert "400004096 bytes needed" in error.message
        assert "buffers_dir" in error.message
        assert "\n" not in error.message
        assert os.listdir(small_tmpfs) == []
        assert mapped(small_tmpfs) == []
        assert not one.node(0).runs["room"].trainers

        fits = {"w": torch.ones(5_000_000)}  # 20 MB, under the name that was refused
        async with trainers(one, "room", [fits], sync=False) as (session,):
            (name,) = os.listdir(small_tmpfs)  # nothing was written to it yet
            blocks = os.stat(small_tmpfs / name).st_blocks
            assert blocks * 512 >= 20_000_000, "a sparse bucket is a SIGBUS later"
            with pytest.raises(TrainerError, match="no room"):
                await one.call(
                    attach, "other", tensors={"w": torch.empty(12_000_000)}, socket=one.socket(0)
                )
            fill_up(small_tmpfs / "somebody-else")
            fits["w"].fill_(2.0)
            result = await one.call(session.average)
            assert result.status == "alone", str(result)
            assert fits["w"].unique().tolist() == [2.0]
        (small_tmpfs / "somebody-else").unlink()
        await until(lambda: os.listdir(small_tmpfs) == [], timeout_s=2.0, what="the bucket is gone")


# -- S14: a codec that raises -------------------------------------------------------------------


class Failing:
    """A codec like raw float32 that raises where it is told to: a fake of the Codec protocol."""

    def __init__(
        self, *, encode: Callable[[Tensor], bool], decode: Callable[[Tensor], bool]
    ) -> None:
        self.name, self.code = RAW.name, RAW.code
        self._fails_to_encode, self._fails_to_decode = encode, decode

    def payload_bytes(self, numel: int, dtype: str) -> int:
        return RAW.payload_bytes(numel, dtype)

    def error_bound(self, absmax: float) -> float:
        return RAW.error_bound(absmax)

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        if self._fails_to_encode(values):
            raise RuntimeError("out of order")
        return RAW.encode(values, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        RAW.decode(payload, out)
        if self._fails_to_decode(out):
            raise RuntimeError("out of order")

    def decode_examined(self, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        self.decode(payload, out)
        return examine(out)


def never(values: Tensor) -> bool:
    return False


def starts_with(*numbers: float) -> Callable[[Tensor], bool]:
    return lambda values: values[0].item() in numbers


# Three parts. Every contribution, the mean of all and the mean of any two are different numbers, so
# that the first value of a part says what it is.
OWN = (0.0, 1.0, 5.0)


def values_of(number: float) -> Tensor:
    return torch.cat([torch.full((PART,), 10.0 * part + number) for part in range(3)])


async def test_a_result_that_cannot_be_encoded_follows_on_partial(
    swarm: LocalSwarm, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S14: part 1 has no result. Three trainers in one round, one for each choice of `on_partial`;
    nobody is told of a plain success, and everybody reads codec and part.
    """
    tensors = [{"w": torch.zeros(3 * PART)} for _ in OWN]
    async with trainers(swarm, run, tensors) as sessions:
        for number, own in zip(OWN, tensors, strict=True):
            own["w"].copy_(values_of(number))
        failing = Failing(encode=starts_with(12.0), decode=never)
        monkeypatch.setitem(CODECS, "float32", failing)
        ends = await asyncio.gather(
            *(
                swarm.call(session.average, on_partial=choice, timeout_s=20)
                for session, choice in zip(sessions, ("accept", "skip", "raise"), strict=True)
            ),
            return_exceptions=True,
        )
        accepted, skipped, raised = ends
        assert isinstance(accepted, Result), accepted
        assert isinstance(skipped, Result), skipped
        assert isinstance(raised, PartialAverage), raised
        told = (accepted, skipped, raised.result)
        for result in told:
            assert (result.status, result.reason) == ("partial", "codec_failed"), str(result)
            assert (result.parts_without_result, result.parts) == ((1,), 3)
            assert "1 of 3 parts have no result: 1" in result.detail
            assert "float32" in result.detail
        assert any("float32: out of order" in result.detail for result in told), told
        assert [result.accepted for result in told] == [True, False, False]
        expected = values_of(2.0)
        expected[PART : 2 * PART] = 10.0 + OWN[0]
        assert torch.equal(tensors[0]["w"], expected)
        assert torch.equal(tensors[1]["w"], values_of(OWN[1]))
        assert torch.equal(tensors[2]["w"], values_of(OWN[2]))
        monkeypatch.undo()
        for _ in range(3):  # who kept its own values loads the others' before it contributes again
            results = await average(swarm, sessions, timeout_s=20)
            if [result.participants for result in results] == [3, 3, 3]:
                break
        assert [result.status for result in results] == ["complete"] * 3, [str(r) for r in results]
        assert same_bits(tensors)


@pytest.mark.parametrize("side", ["encode", "decode"])
async def test_a_contribution_that_a_codec_spoils_is_left_out_whole(
    unmeasured: LocalSwarm, run: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S14 at the sender and at the reducer: what peer 2 sends is not in the averages of the parts
    that others reduce, is in the one that it reduces itself, and nobody is told of a plain success.
    """
    tensors = [{"w": torch.zeros(3 * PART)} for _ in OWN]
    async with trainers(unmeasured, run, tensors) as sessions:
        for number, own in zip(OWN, tensors, strict=True):
            own["w"].copy_(values_of(number))
        hit = starts_with(5.0, 15.0, 25.0)
        failing = Failing(encode=hit if side == "encode" else never, decode=never)
        if side == "decode":
            failing = Failing(encode=never, decode=hit)
        monkeypatch.setitem(CODECS, "float32", failing)
        results = await average(unmeasured, sessions, timeout_s=20)
        spoilt = sessions[2].peer_id
    for result in results:
        assert result.status == "partial", str(result)
        assert result.parts_without_result == ()
        assert sorted(result.contributors) == sorted(s.peer_id for s in sessions[:2])
    for result in results[:2]:
        assert list(result.excluded) == [spoilt]
    assert any("float32: out of order" in result.detail for result in results), results
    assert same_bits(tensors)
    firsts = [tensors[0]["w"][part * PART].item() - 10.0 * part for part in range(3)]
    assert sorted(firsts) == [0.5, 0.5, 2.0], firsts
    for part in range(3):
        assert tensors[0]["w"][part * PART : (part + 1) * PART].unique().numel() == 1


# -- S16: three trainers of one node ------------------------------------------------------------

TRAINER = """
import json, os, signal, sys, threading, torch

before = {number: signal.getsignal(number) for number in signal.valid_signals()}

from moshpitd.client import attach

def say(**words):
    print(json.dumps(words), flush=True)

def children():
    return [c for t in os.listdir("/proc/self/task")
            for c in open(f"/proc/self/task/{t}/children").read().split()]

run, path = sys.argv[1:]
mine, other = {"w": torch.zeros(100)}, {"w": torch.zeros(100)}
session = attach(run, tensors=mine, socket=path)
mine["w"].fill_(1.0)
other["w"].fill_(2.0)

def interrupt(progress):
    os.kill(os.getpid(), signal.SIGINT)

try:
    session.average(10, progress=interrupt)
    say(interrupted=False)
except KeyboardInterrupt:
    say(interrupted=True, attached=session.attached, value=mine["w"][0].item())

def second():
    with attach(run, tensors=other, socket=path) as from_a_thread:
        other["w"].fill_(2.0)
        say(in_thread=threading.current_thread() is not threading.main_thread())
        go.wait()
        result = from_a_thread.average(20)
        say(second=[result.status, result.participants, result.total_weight,
                    other["w"].unique().tolist()])

go = threading.Event()
worker = threading.Thread(target=second)
worker.start()
sys.stdin.readline()
go.set()
result = session.average(10)
say(first=[result.status, result.participants, result.total_weight, mine["w"].unique().tolist()])
worker.join()
now = {number: signal.getsignal(number) for number in signal.valid_signals()}
say(handlers_unchanged=before == now, children=children())
"""


async def test_three_trainers_of_one_node_are_one_contribution_whatever_happens_to_one(
    swarm: LocalSwarm, run: str
) -> None:
    """S16: one process with a trainer in its main thread, which interrupts itself in the middle of
    a round, and one in another thread; a third trainer beside it, and a peer on another node.
    """
    third, far = {"w": torch.zeros(100)}, {"w": torch.zeros(100)}
    argv = [sys.executable, "-c", TRAINER, run, str(swarm.socket(0))]
    pipe = subprocess.PIPE
    async with trainers(swarm, run, [third, far], nodes=[0, 1]) as sessions:
        with subprocess.Popen(  # noqa: ASYNC220  # reading from it happens in threads
            argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                told: list[dict[str, Any]] = []

                async def hear() -> dict[str, Any]:
                    line = await asyncio.wait_for(
                        swarm.call(process.stdout.readline),  # type: ignore[union-attr]
                        PROCESS_S,
                    )
                    assert line, process.stderr.read()  # type: ignore[union-attr]
                    told.append(json.loads(line))
                    return told[-1]

                assert await hear() == {"interrupted": True, "attached": True, "value": 1.0}
                assert await hear() == {"in_thread": True}
                assert len(swarm.node(0).runs[run].trainers) == 3
                third["w"].fill_(3.0)
                far["w"].fill_(10.0)
                process.stdin.write("go\n")
                process.stdin.flush()
                results = await average(swarm, sessions, [30, 40], timeout_s=30)
                rest = [await hear() for _ in range(3)]
                assert await swarm.call(process.wait, PROCESS_S) == 0
            finally:
                process.kill()
        mean = (10 * 1.0 + 20 * 2.0 + 30 * 3.0 + 40 * 10.0) / 100
        for result, own in zip(results, (third, far), strict=True):
            assert (result.status, result.participants) == ("complete", 2), str(result)
            assert result.total_weight == 100.0
            torch.testing.assert_close(own["w"], torch.full((100,), mean))
        assert same_bits([third, far])
        heard = {name: value for line in rest for name, value in line.items()}
        assert heard["first"] == heard["second"] == ["complete", 2, 100.0, [third["w"][0].item()]]
        assert heard["handlers_unchanged"] is True
        assert heard["children"] == []
        node = swarm.node(0)
        await until(
            lambda: len(node.runs[run].trainers) == 1, timeout_s=2.0, what="the process is gone"
        )


async def test_status_tells_three_trainers_and_one_peer(swarm: LocalSwarm, run: str) -> None:
    """S16 as the other node sees it: one peer, whatever is behind it."""
    tensors = [{"w": torch.zeros(10)} for _ in range(4)]
    async with trainers(swarm, run, tensors, nodes=[0, 0, 0, 1]):
        calls = Calls(swarm.socket(0))
        try:
            status = await swarm.call(calls.status)
        finally:
            calls.close()
        (line,) = [one for one in status.runs if one.run == run]
        assert (line.trainers, line.peers) == (3, 1)
        (peer,) = swarm.node(1).peers(run)
        assert peer["peer_id"] == swarm.node(0).peer_id
