"""Trainers whose tensors live in the bucket, beside others that copy, on real daemons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import nn

from moshpitd.client import DaemonUnavailable, Session, attach
from moshpitd.client.optim import LocalSGD
from moshpitd.tensors.codecs import RawCodec
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import Tensors, average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMEL = 175_000  # three parts
LAST = 2 * 65_536  # where the third one begins


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(4, averaging__codec="float32") as running:
        yield running


def numbers(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(NUMEL, generator=generator), "step": torch.tensor(seed)}


@asynccontextmanager
async def mixed(
    swarm: LocalSwarm, run: str, tensors: Sequence[Tensors], *, copying: int = 0
) -> AsyncIterator[list[Session]]:
    """All in place but the last `copying`."""
    cut = len(tensors) - copying
    async with (
        trainers(swarm, run, tensors[:cut], in_place=True) as placed,
        trainers(swarm, run, tensors[cut:], nodes=range(cut, len(tensors))) as others,
    ):
        yield [*placed, *others]


def mapped(swarm: LocalSwarm, tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a bucket of this swarm's daemons."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= at < high:
            return str(swarm.folder) in line and ".bucket" in line
    return False


async def test_two_in_place_and_two_that_copy_hold_the_same_bits(
    swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [numbers(0) for _ in range(4)]
    async with mixed(swarm, "mixed", tensors, copying=2) as sessions:
        for number in range(3):
            for index, own in enumerate(tensors):
                own["w"].add_(numbers(10 * number + index)["w"])
                own["step"].fill_(10 * number + index)
            mean = sum(own["w"].double() for own in tensors) / 4
            results = await average(swarm, sessions, min_participants=4)
            assert [result.participants for result in results] == [4] * 4, str(results)
            assert same_bits(tensors)
            torch.testing.assert_close(tensors[0]["w"].double(), mean, rtol=1e-5, atol=1e-6)
            assert tensors[0]["step"].item() == 10 * number + 3
            assert [mapped(swarm, own["w"]) for own in tensors] == [True, True, False, False]

        for own in tensors:  # a round that fails changes nobody
            own["w"].add_(1)
        before = [own["w"].clone() for own in tensors]
        results = await average(swarm, sessions, min_participants=5)
        assert not any(result.applied for result in results)
        assert all(torch.equal(a["w"], b) for a, b in zip(tensors, before, strict=True))

        sound = RawCodec.encode  # a part that nobody gets is what it was, with each of them

        def failing(
            self: RawCodec, values: torch.Tensor, out: torch.Tensor, *, seed: int = 0
        ) -> int:
            if values.numel() == NUMEL - LAST:
                raise RuntimeError("out of order")
            return sound(self, values, out, seed=seed)

        for index, own in enumerate(tensors):
            own["w"].add_(index)
        before = [own["w"].clone() for own in tensors]
        monkeypatch.setattr(RawCodec, "encode", failing)
        results = await average(swarm, sessions)
        monkeypatch.undo()
        for own, kept, result in zip(tensors, before, results, strict=True):
            assert (result.status, len(result.parts_without_result)) == ("partial", 1), str(result)
            assert torch.equal(own["w"][LAST:], kept[LAST:])
            assert torch.equal(own["w"][:LAST], tensors[0]["w"][:LAST])
            assert not torch.equal(own["w"][:LAST], kept[:LAST])
        results = await average(swarm, sessions)
        assert [result.status for result in results] == ["complete"] * 4, str(results)
        assert same_bits(tensors)
    assert not any(mapped(swarm, own["w"]) for own in tensors), "they left, and took theirs along"


async def test_a_newcomer_gets_the_last_result_whole_while_its_donor_trains_on(
    swarm: LocalSwarm,
) -> None:
    tensors = [numbers(0), numbers(0)]
    async with mixed(swarm, "donors", tensors) as sessions:
        for own in tensors:
            own["w"].fill_(3.0)

        def average_and_train(number: int) -> torch.Tensor:
            result = sessions[number].average(min_participants=2)
            assert result.accepted, str(result)
            average = tensors[number]["w"].clone()
            for _ in range(20):
                tensors[number]["w"].add_(1)
            return average

        results = await asyncio.gather(
            *(swarm.call(average_and_train, number) for number in range(2))
        )
        late = [numbers(99)]
        async with trainers(swarm, "donors", late, nodes=[2], in_place=True) as (newcomer,):
            assert newcomer.synced is not None
            assert newcomer.synced.loaded_snapshot, str(newcomer.synced)
            assert newcomer.version == 1
            assert torch.equal(late[0]["w"], results[0])
            assert mapped(swarm, late[0]["w"])
            again = await average(swarm, [*sessions, newcomer])
            assert [result.status for result in again] == ["complete"] * 3, str(again)
            assert same_bits([*tensors, *late])


async def test_local_sgd_learns_the_same_in_place_bit_for_bit(swarm: LocalSwarm) -> None:
    inputs = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))

    def train(run: str, *, in_place: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 1))
        session = attach(run, model=model, socket=swarm.socket(0), in_place=in_place)
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = LocalSGD(inner, session, every=4, on_error="raise")
        for _ in range(20):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        session.close()
        return [tensor.clone() for tensor in model.state_dict().values()]

    copied = await swarm.call(train, "sgd-copied", in_place=False)
    placed = await swarm.call(train, "sgd-placed", in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(copied, placed, strict=True))


async def test_a_sweep_of_a_grid_and_a_daemon_that_restarts() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    tensors = [{"w": torch.zeros(50, dtype=torch.float64)} for _ in values]
    async with (
        LocalSwarm(4, averaging__max_group=2) as swarm,
        mixed(swarm, "grid", tensors, copying=1) as sessions,
    ):
        nodes = [swarm.node(index) for index in range(4)]
        await until(
            lambda: all(len(node.peers("grid")) == 3 for node in nodes),
            timeout_s=20,
            what="every peer knows the other three",
        )
        for own, value in zip(tensors, values, strict=True):
            own["w"].fill_(value)
        results = await average(swarm, sessions, rounds="sweep")
        assert [(one.status, one.rounds) for one in results] == [("complete", 2)] * 4, str(results)
        assert all(own["w"].unique().tolist() == [4.0] for own in tensors)

        await swarm.stop_node(0)
        tensors[0]["w"].add_(1)  # it trains on, in a file that nobody else has
        with pytest.raises(DaemonUnavailable):
            await swarm.call(sessions[0].average)
        assert tensors[0]["w"].unique().tolist() == [5.0]
        await swarm.start(0)
        assert await swarm.call(sessions[0].wait_attached, 10.0)
        await swarm.call(sessions[0].sync)
        assert mapped(swarm, tensors[0]["w"])
        assert tensors[0]["w"].unique().tolist() in ([5.0], [4.0])  # its own, or the swarm's
