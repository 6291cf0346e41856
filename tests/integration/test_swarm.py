"""Averages between four real daemons in this process. Every test has a run of its own, so that they
share the daemons and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from moshpitd.client import PartialAverage, Progress, TrainerError, attach
from moshpitd.tensors.codecs import RawCodec
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import Tensors, average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_names = itertools.count()


@pytest.fixture
def run() -> str:
    return f"run-{next(_names)}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    # Raw values, so that what groups and trainers add up to can be compared to the last bit; what
    # codecs make of it is looked at in test_scenarios_numbers.
    async with LocalSwarm(4, averaging__codec="float32") as running:
        yield running


def numbers(seed: int, count: int = 300) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(count, generator=generator)}


async def fill(tensors: list[Tensors], values: list[Tensors]) -> None:
    for own, value in zip(tensors, values, strict=True):
        for name, tensor in own.items():
            tensor.copy_(value[name])


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_the_average_is_exact_and_the_same_everywhere(
    swarm: LocalSwarm, run: str, count: int
) -> None:
    weights = [10, 20, 30, 40][:count]
    tensors = [numbers(0) for _ in range(count)]
    async with trainers(swarm, run, tensors) as sessions:
        await fill(tensors, [numbers(10 + i) for i in range(count)])
        results = await average(swarm, sessions, weights)
    expected = sum(numbers(10 + i)["w"].double() * w for i, w in enumerate(weights)) / sum(weights)
    assert same_bits(tensors)
    torch.testing.assert_close(tensors[0]["w"].double(), expected, rtol=1e-6, atol=1e-6)
    for result in results:
        assert result.status == "complete", str(result)
        assert (result.participants, result.group_size) == (count, count)
        assert result.total_weight == sum(weights)
        assert result.version == 1
        assert set(result.contributors) == {session.peer_id for session in sessions}
        assert result.bytes_sent > 0
        assert result.bytes_received > 0


async def test_many_parts_and_several_rounds(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(0, 175_000) for _ in range(4)]
    async with trainers(swarm, run, tensors) as sessions:
        for turn in range(1, 4):
            fresh = [numbers(100 * turn + i, 175_000) for i in range(4)]
            await fill(tensors, fresh)
            results = await average(swarm, sessions)
            mean = sum(own["w"].double() for own in fresh) / 4
            assert [result.status for result in results] == ["complete"] * 4, str(results)
            assert [result.version for result in results] == [turn] * 4
            assert results[0].parts == 3
            assert same_bits(tensors)
            torch.testing.assert_close(tensors[0]["w"].double(), mean, rtol=1e-6, atol=1e-6)


async def test_one_peer_gets_its_input_back_at_once(swarm: LocalSwarm, run: str) -> None:
    own = numbers(1)
    async with trainers(swarm, run, [own]) as sessions:
        before = own["w"].clone()
        (result,) = await average(swarm, sessions)
    assert (result.status, result.participants) == ("alone", 1)
    assert sum(result.seconds.values()) < 0.5
    assert torch.equal(own["w"], before)


async def test_every_dtype_by_its_rule(swarm: LocalSwarm, run: str) -> None:
    def make(i: int) -> Tensors:
        return {
            "steps": torch.tensor(100 + i, dtype=torch.int64),
            "mask": torch.tensor([i == 1, False]),
            "half": torch.full((5,), float(i), dtype=torch.bfloat16),
            "fine": torch.tensor([1.0 + i * 1e-12], dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(2 * i)),
            "same": torch.full((4,), 0.1),
            "strided": torch.full((4, 6), float(i)).t(),
        }

    tensors = [make(0) for _ in range(3)]
    async with trainers(swarm, run, tensors) as sessions:
        await fill(tensors, [make(i) for i in range(3)])
        results = await average(swarm, sessions)
    assert [result.status for result in results] == ["complete"] * 3
    for own in tensors:
        assert own["steps"].item() == 102
        assert own["mask"].tolist() == [True, False]
        assert own["half"].tolist() == [1.0] * 5
        assert own["fine"].item() == 1.0 + 1e-12
        assert own["scalar"].item() == 2.0
        assert torch.equal(own["same"], torch.full((4,), 0.1))
        assert torch.equal(own["strided"], torch.full((6, 4), 1.0))


async def test_a_nan_is_refused_by_name_and_the_others_average(swarm: LocalSwarm, run: str) -> None:
    tensors = [{"a": torch.ones(4), "b": torch.zeros(4)} for _ in range(4)]
    async with trainers(swarm, run, tensors) as sessions:
        for i, own in enumerate(tensors):
            own["b"].fill_(float(i))
        tensors[3]["b"][2] = float("nan")
        results = await asyncio.gather(
            *(swarm.call(session.average, timeout_s=20) for session in sessions),
            return_exceptions=True,
        )
        refused = results.pop()
        assert isinstance(refused, TrainerError)
        assert refused.reason == "not_finite"
        assert "'b'" in refused.message
        for result in results:
            assert not isinstance(result, BaseException), result
            assert result.participants == 3, str(result)
        assert all(own["b"].tolist() == [1.0] * 4 for own in tensors[:3])


async def test_another_schema_is_refused_on_one_node(swarm: LocalSwarm, run: str) -> None:
    async with trainers(swarm, run, [{"a": torch.ones(4)}]):
        with pytest.raises(TrainerError) as refused:
            await swarm.call(
                attach, run, tensors={"a": torch.ones(5)}, socket=swarm.socket(0), timeout_s=5.0
            )
    assert refused.value.reason == "schema_differs"
    assert "'a' is float32 [4] here but float32 [5] there" in refused.value.message


async def test_another_schema_never_meets_and_both_say_why(swarm: LocalSwarm, run: str) -> None:
    layers = {"a": torch.ones(4), "z": torch.ones(2)}
    tensors = [{"a": torch.ones(4)}, {"a": torch.ones(4)}, layers]
    async with trainers(swarm, run, tensors) as sessions:
        tensors[0]["a"].fill_(1.0)
        tensors[1]["a"].fill_(3.0)
        results = await average(swarm, sessions, timeout_s=20)
        notes = {
            i: [line["note"] for line in swarm.node(i).peers(run) if line["note"]] for i in range(3)
        }
    assert [result.status for result in results] == ["complete", "complete", "alone"]
    assert tensors[0]["a"].tolist() == [2.0] * 4
    assert notes[0], "node 0 does not say why node 2 is left out"
    assert "z (float32 [2])" in notes[0][0]
    assert any("z (float32 [2])" in note for note in notes[2])
    assert max(sum(result.seconds.values()) for result in results[:2]) < 1.0


async def test_three_trainers_of_one_node_are_one_contribution(swarm: LocalSwarm, run: str) -> None:
    values = [1.0, 2.0, 3.0, 10.0]
    weights = [10, 20, 30, 40]
    tensors = [{"w": torch.zeros(100)} for _ in values]
    async with trainers(swarm, run, tensors, nodes=[0, 0, 0, 1]) as sessions:
        for own, value in zip(tensors, values, strict=True):
            own["w"].fill_(value)
        results = await average(swarm, sessions, weights)
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    for own, result in zip(tensors, results, strict=True):
        assert result.status == "complete", str(result)
        assert (result.participants, result.total_weight) == (2, 100.0)
        assert own["w"][0].item() == pytest.approx(expected, rel=1e-6)
    assert same_bits(tensors)


async def test_different_inits_settle_on_one_lineage(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(i) for i in range(4)]
    async with trainers(swarm, run, tensors) as sessions:
        # Who decided on half the picture at its sync loads the winner's state now and adds nothing.
        await average(swarm, sessions)
        lineages = {str(session.state_dict()["founder_digest"]) for session in sessions}
        assert len(lineages) == 1, lineages
        values = [numbers(10 + i) for i in range(4)]
        await fill(tensors, values)
        results = await average(swarm, sessions)
    assert [result.participants for result in results] == [4] * 4, str(results)
    assert same_bits(tensors)
    mean = sum(own["w"].double() for own in values) / 4
    torch.testing.assert_close(tensors[0]["w"].double(), mean, rtol=1e-6, atol=1e-6)


async def test_a_newcomer_takes_parameters_and_state_from_a_donor(
    swarm: LocalSwarm, run: str
) -> None:
    tensors = [numbers(i) for i in range(2)]
    async with trainers(swarm, run, tensors) as sessions:
        await average(swarm, sessions)
        for session in sessions:
            await swarm.call(session.put_state, b"step 17")
        late = numbers(99)
        async with trainers(swarm, run, [late], nodes=[2]) as (newcomer,):
            assert newcomer.synced is not None
            assert newcomer.synced.loaded_snapshot, str(newcomer.synced)
            assert newcomer.version == 1
            assert same_bits([tensors[0], late])
            assert await swarm.call(newcomer.get_state) == b"step 17"
            results = await average(swarm, [*sessions, newcomer])
            assert [result.status for result in results] == ["complete"] * 3, str(results)
            assert [result.version for result in results] == [2] * 3


async def test_weights_of_zero_and_out_of_range(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(0), numbers(0)]
    before = tensors[0]["w"].clone()
    async with trainers(swarm, run, tensors) as sessions:
        results = await average(swarm, sessions, [0, 0])
        assert {(result.status, result.reason) for result in results} == {
            ("failed", "no_contributors")
        }
        for weight in (-1, float("nan"), 1 << 33):
            with pytest.raises(TrainerError) as refused:
                await swarm.call(sessions[0].average, weight)
            assert refused.value.reason == "weight_out_of_range"
    assert torch.equal(tensors[0]["w"], before)
    assert torch.equal(tensors[1]["w"], before)


async def test_too_few_participants_is_the_callers_choice(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(0), numbers(0)]
    async with trainers(swarm, run, tensors) as sessions:
        tensors[0]["w"].fill_(1.0)
        tensors[1]["w"].fill_(3.0)
        results = await average(swarm, sessions, min_participants=3)
        assert [result.accepted for result in results] == [False, False]
        assert tensors[0]["w"][0].item() == 1.0
        calls = (
            swarm.call(session.average, min_participants=3, on_partial="raise")
            for session in sessions
        )
        raised = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, PartialAverage) for error in raised), raised


async def test_a_codec_that_raises_is_never_a_plain_success(
    swarm: LocalSwarm, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RawCodec.encode
    last_bytes = 4 * (175_000 - 2 * 65_536)

    def failing(self: RawCodec, values: torch.Tensor, out: torch.Tensor, *, seed: int = 0) -> int:
        if values.numel() * values.element_size() == last_bytes:
            raise RuntimeError("out of order")
        return sound(self, values, out)

    tensors = [numbers(0, 175_000) for _ in range(2)]
    async with trainers(swarm, run, tensors) as sessions:
        await fill(tensors, [numbers(0, 175_000), numbers(1, 175_000)])
        monkeypatch.setattr(RawCodec, "encode", failing)
        results = await average(swarm, sessions)
        for i, (own, result) in enumerate(zip(tensors, results, strict=True)):
            assert (result.status, result.reason) == ("partial", "codec_failed"), str(result)
            assert result.parts_without_result == (2,)
            assert "out of order" in result.detail or "no result: 2" in result.detail
            kept = numbers(i, 175_000)["w"][2 * 65_536 :]
            assert torch.equal(own["w"][2 * 65_536 :], kept)
        assert torch.equal(tensors[0]["w"][: 2 * 65_536], tensors[1]["w"][: 2 * 65_536])
        monkeypatch.undo()
        results = await average(swarm, sessions)
        assert [result.status for result in results] == ["complete"] * 2, str(results)


async def test_progress_is_told_while_a_peer_is_waited_for(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(0), numbers(0)]
    seen: list[Progress] = []
    async with trainers(swarm, run, tensors) as sessions:
        first = asyncio.create_task(swarm.call(sessions[0].average, progress=seen.append))
        await asyncio.sleep(0.4)  # inside the window in which the second is waited for
        results = [await swarm.call(sessions[1].average), await first]
    assert [result.participants for result in results] == [2, 2]
    assert "matchmaking" in {progress.phase for progress in seen}


async def test_a_trainer_that_gives_up_leaves_the_others_their_average(
    swarm: LocalSwarm, run: str
) -> None:
    tensors = [numbers(0) for _ in range(3)]

    class EnoughError(Exception):
        pass

    def impatient(progress: Progress) -> None:
        raise EnoughError

    async with trainers(swarm, run, tensors) as sessions:
        leaving = asyncio.create_task(swarm.call(sessions[2].average, progress=impatient))
        with pytest.raises(EnoughError):
            await leaving
        results = await average(swarm, sessions[:2], timeout_s=20)
        assert [result.participants for result in results] == [2, 2], str(results)
        assert sessions[2].attached
        results = await average(swarm, sessions)
        assert [result.participants for result in results] == [3, 3, 3], str(results)


async def test_status_peers_and_rounds_tell_what_happened(swarm: LocalSwarm, run: str) -> None:
    tensors = [numbers(0) for _ in range(2)]
    async with trainers(swarm, run, tensors) as sessions:
        (result, _) = await average(swarm, sessions)
        node = swarm.node(0)
        (line,) = [one for one in node.status()["runs"] if one["run"] == run]
        assert (line["trainers"], line["peers"], line["version"]) == (1, 1, 1)
        assert (line["rounds_complete"], line["last_outcome"]) == (1, "complete")
        assert line["parameters"] == 300
        (peer,) = node.peers(run)
        assert (peer["peer_id"], peer["state"]) == (swarm.node(1).peer_id, "heard")
        (ended,) = node.rounds(run)
        assert ended["group_id"] == result.group_id
        assert (ended["status"], ended["group_size"]) == ("complete", 2)
        assert ended["bytes_sent"] == result.bytes_sent
        text = node.metrics.render().decode()
        assert f'moshpit_rounds_total{{outcome="complete",run="{run}"}} 1.0' in text
    await until(
        lambda: not swarm.node(0).runs[run].trainers, timeout_s=2, what="the trainer is gone"
    )


async def test_a_round_is_seen_in_the_metrics(swarm: LocalSwarm, run: str) -> None:
    """What a dashboard shows of it: outcome, bytes, seconds in the codec, rate of the links."""
    async with trainers(swarm, run, [numbers(i) for i in range(2)]) as sessions:
        await average(swarm, sessions, [1, 1])
    lines = swarm.nodes[0].metrics.render().decode().splitlines()
    told: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            kind = name.split("{")[0]
            told[kind] = max(told.get(kind, 0.0), float(value))
    for name in (
        "moshpit_rounds_total",
        "moshpit_bytes_total",
        "moshpit_codec_seconds_total",
        "moshpit_link_bytes_per_second",
    ):
        assert told[name] > 0, name
