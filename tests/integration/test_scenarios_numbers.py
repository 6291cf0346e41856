"""Scenarios S6, S9, S13, S18 and S20 on real daemons, under every codec.

One rule: what is expected comes from the inputs by arithmetic in float64 (`kit.bounds`), never from
another run. Two swarms: `swarm`, once per codec, for what travels through codecs, and `plain` for
the rest. Node 3 of the first has a slow link and reduces nothing while there are few parts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from moshpitd.client import Result, TrainerError
from moshpitd.testing import LocalSwarm
from tests.kit.bounds import FLOAT32_STEPS, Bounds, mean_bound, true_mean
from tests.kit.swarm import Tensors, average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CODECS = ("float32", "float16", "bfloat16", "int8")
ROUNDS = 100
FLOATS = 75_000  # two parts
SLOW = 3
PATIENT = {"averaging__window_s": 8.0, "averaging__answer_timeout_s": 4.0}
"""Nobody waits here; a machine that stands still for a second must not look like a lost peer."""
ANYTHING = {"averaging__max_norm_ratio": 1e12}
"""1e8 beside 1 is averaged here; where the guard stands, such a peer is refused (the last test)."""

_names = itertools.count()


@pytest.fixture
def run() -> str:
    return f"numbers-{next(_names)}"


@pytest.fixture(scope="module", params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(codec: str) -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(3, averaging__codec=codec, **PATIENT, **ANYTHING) as running:
        await running.add(network__up_mbps=1.0, network__down_mbps=1.0)
        await running.together()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(4, **PATIENT) as running:
        yield running


def by_peer_id(swarm: LocalSwarm) -> list[int]:
    """The nodes' indices, the one that leads all groups first."""
    return sorted(range(len(swarm.nodes)), key=lambda index: swarm.node(index).peer_id)


def normal(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randn(count, generator=generator)


def complete(results: list[Result], count: int) -> None:
    for result in results:
        assert (result.status, result.reason) == ("complete", ""), str(result)
        assert (result.participants, result.group_size) == (count, count), str(result)
        assert result.parts_without_result == ()
        assert result.excluded == {}


async def test_a_hundred_healthy_rounds_are_within_the_codecs_bound(
    swarm: LocalSwarm, run: str, codec: str
) -> None:
    """S13. Random numbers in every round, so that a value left over from an earlier round, a part
    of another peer or a part that ended early is far outside of the bound.

    With error feedback a round brings what the one before rounded away, so each average is within
    the codec's bound of mean(values + residuals), and the sum of all within one of their sum.
    """
    bounds = Bounds(codec, FLOATS)
    meant, got = (torch.zeros(FLOATS, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(13)
    tensors = [{"w": torch.zeros(FLOATS)} for _ in range(3)]
    async with trainers(swarm, run, tensors) as sessions:
        for turn in range(1, ROUNDS + 1):
            values = [normal(generator, FLOATS) for _ in tensors]
            for own, value in zip(tensors, values, strict=True):
                own["w"].copy_(value)
            results = await average(swarm, sessions)
            complete(results, 3)
            assert results[0].parts == 2
            assert [result.version for result in results] == [turn] * 3
            assert same_bits(tensors), f"round {turn}: the peers hold different bits"
            mean, average_of_all = true_mean(values), tensors[0]["w"].double()
            over = ((average_of_all - mean).abs() > bounds.of(values)).nonzero()
            assert not len(over), f"round {turn}: {len(over)} elements, first {over[0].item()}"
            meant, got = meant + mean, got + average_of_all
    # Float32 rounds too, in every round, and nobody feeds that back.
    exact = ROUNDS * 8 * FLOAT32_STEPS
    assert ((got - meant).abs() <= bounds.owed(reducers=2) + exact).all()


def odd(peer: int) -> Tensors:
    """Every shape and dtype of S6. `peer` 0, 1, 2: the mean is that of peer 1."""
    f = float(peer)
    return {
        "0-d": torch.tensor(f - 1.0),
        "one": torch.tensor([2.0 * f]),
        "empty": torch.empty(0, 7),
        "plain": torch.linspace(-1.0, 1.0, 5000) * f,
        "strided": torch.arange(24.0).reshape(4, 6).t() * f,
        "sliced": torch.arange(40.0)[::4] * f,
        "float64": torch.tensor([1.0 + f * 1e-12, -1e300 * f], dtype=torch.float64),
        "bfloat16": torch.full((5,), f, dtype=torch.bfloat16),
        "float16": torch.full((3, 2), 1.0 + f, dtype=torch.float16),
        "steps": torch.tensor([2**40 + peer, -peer]),
        "step": torch.tensor(7 - peer, dtype=torch.int64),
        "bytes": torch.tensor([250 + peer], dtype=torch.uint8),
        "mask": torch.tensor([peer == 2, False]),
    }


async def test_every_shape_and_dtype_by_its_rule(swarm: LocalSwarm, run: str, codec: str) -> None:
    """S6: floats within the bound, other floats exactly, integers and bools the maximum."""
    tensors = [odd(0) for _ in range(3)]
    async with trainers(swarm, run, tensors) as sessions:
        for peer, own in enumerate(tensors):
            for name, value in odd(peer).items():
                own[name].copy_(value)
        complete(await average(swarm, sessions), 3)
    assert same_bits(tensors)
    # The float32 tensors share one region, so the loudest element of any of them counts.
    loudest = [torch.full((1,), 24.0 * peer + 40.0 * peer) for peer in range(3)]
    bound = mean_bound(codec, loudest).item()
    mean, got = odd(1), tensors[0]
    for name in ("0-d", "one", "empty", "plain", "strided", "sliced"):
        assert got[name].shape == mean[name].shape
        assert ((got[name].double() - mean[name].double()).abs() <= bound).all(), name
    for name in ("bfloat16", "float16"):
        assert torch.equal(got[name], mean[name]), name
    torch.testing.assert_close(got["float64"], mean["float64"], rtol=2.0**-52, atol=0.0)
    assert got["steps"].tolist() == [2**40 + 2, 0]
    assert got["step"].item() == 7
    assert got["bytes"].item() == 252
    assert got["mask"].tolist() == [True, False]


@pytest.mark.parametrize("values", [(0.1, 0.1, 0.1), (-3.0, 0.0, 6.0)])
async def test_a_constant_stays_constant(
    swarm: LocalSwarm, run: str, values: tuple[float, ...]
) -> None:
    """S6: min = max comes out exact under every codec; where the peers differ it is their mean, to
    the last bit or two of the arithmetic, and the same everywhere in the tensor.
    """
    tensors = [{"w": torch.zeros(3000)} for _ in values]
    async with trainers(swarm, run, tensors) as sessions:
        for own, value in zip(tensors, values, strict=True):
            own["w"].fill_(value)
        complete(await average(swarm, sessions), 3)
    assert same_bits(tensors)
    got = tensors[0]["w"]
    assert torch.equal(got, got[:1].expand(3000))
    mean = sum(values) / 3
    if min(values) == max(values):
        assert got[0] == torch.tensor(mean)
    assert got[0].item() == pytest.approx(mean, rel=2.0**-22)


async def test_precision_is_that_of_the_input(swarm: LocalSwarm, run: str) -> None:
    """S20: float64 keeps 1 + i * 1e-12 and a 1 beside 1e8, whatever the codec of float32."""
    peers = 4
    expected = [1.0 + 1.5e-12, 25_000_000.75, 1e8 + 1.5e-7]

    def make(i: int) -> Tensors:
        fine = [1.0 + i * 1e-12, 1e8 if i == 0 else 1.0, 1e8 + i * 1e-7]
        return {"fine": torch.tensor(fine, dtype=torch.float64)}

    tensors = [make(0) for _ in range(peers)]
    async with trainers(swarm, run, tensors) as sessions:
        for i, own in enumerate(tensors):
            own["fine"].copy_(make(i)["fine"])
        complete(await average(swarm, sessions), peers)
    got = tensors[0]["fine"]
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=2.0**-52, atol=0.0
    )
    assert same_bits(tensors)


async def test_a_1_beside_1e8_in_float32(swarm: LocalSwarm, run: str, codec: str) -> None:
    """S20: raw float32 loses nothing that float32 can hold; the lossy ones keep their bound."""
    tensors = [{"w": torch.zeros(2)} for _ in range(4)]
    values = [torch.tensor([1e8 if i == 0 else 1.0, float(i)]) for i in range(4)]
    async with trainers(swarm, run, tensors) as sessions:
        for own, value in zip(tensors, values, strict=True):
            own["w"].copy_(value)
        complete(await average(swarm, sessions), 4)
    got, mean = tensors[0]["w"].double(), true_mean(values)
    if codec == "float32":
        nearest = mean.float().double()
        step = torch.tensor([2.0, 2.0**-23])  # of float32 at 25,000,000 and at 1.5
        assert ((got - nearest).abs() <= step).all(), got.tolist()
    else:
        assert ((got - mean).abs() <= mean_bound(codec, values)).all(), got.tolist()


@pytest.mark.parametrize(("place", "bad"), [(-1, float("nan")), (0, float("inf"))])
async def test_one_bad_element_is_refused_to_its_trainer(
    plain: LocalSwarm, run: str, place: int, bad: float
) -> None:
    """S9: at the local API, before any traffic, by the tensor's name; twice in a row, and then the
    repaired trainer is back in. `place` 0 is the one that the others ask first.
    """
    good = by_peer_id(plain)
    wrong = good.pop(place)
    tensors = [{"first": torch.zeros(1000), "second": torch.zeros(2, 500)} for _ in range(4)]
    async with trainers(plain, run, tensors) as sessions:
        for _ in range(2):
            for i, own in enumerate(tensors):
                own["first"].fill_(float(i))
                own["second"].fill_(float(i))
            tensors[wrong]["second"][1, 77] = bad
            before = {name: tensor.clone() for name, tensor in tensors[wrong].items()}
            ends = await asyncio.gather(
                *(plain.call(session.average, timeout_s=20) for session in sessions),
                return_exceptions=True,
            )
            refused = ends[wrong]
            assert isinstance(refused, TrainerError), refused
            assert (refused.reason, refused.code) == ("not_finite", "INVALID_ARGUMENT")
            assert "'second'" in refused.message
            assert "'first'" not in refused.message
            assert same_bits([before, tensors[wrong]])
            mean = torch.tensor(sum(good) / 3.0)
            for i in good:
                result = ends[i]
                assert isinstance(result, Result), result
                assert (result.participants, result.group_size) == (3, 3), str(result)
                torch.testing.assert_close(tensors[i]["first"], mean.expand(1000))
                torch.testing.assert_close(tensors[i]["second"], mean.expand(2, 500))
            assert same_bits([tensors[i] for i in good])
        tensors[wrong]["second"].fill_(0.0)
        # It is first: the others do not wait for one that said no a moment ago.
        repaired = asyncio.ensure_future(plain.call(sessions[wrong].average, timeout_s=20))
        peer = plain.node(wrong).runs[run].driver.peer
        await until(lambda: peer.conductor.work is not None, timeout_s=10, what="it contributes")
        rest = await average(plain, [sessions[i] for i in good], timeout_s=20)
        complete([await repaired, *rest], 4)


async def test_a_bad_contribution_that_reaches_the_others_stays_out_of_the_average(
    swarm: LocalSwarm, run: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9 when the sender's own daemon does not look: the reducers do."""

    async def blind(trainer: object) -> float:
        return 0.0

    tensors = [{"a": torch.zeros(500), "b": torch.zeros(500)} for _ in range(4)]
    async with trainers(swarm, run, tensors) as sessions:
        monkeypatch.setattr(swarm.node(SLOW).runs[run], "_check_finite", blind)
        for i, own in enumerate(tensors):
            own["a"].fill_(float(i))
            own["b"].fill_(float(i))
        tensors[SLOW]["b"][321] = float("nan")
        results = await average(swarm, sessions)
        liar = sessions[SLOW].peer_id
    for result in results:
        assert result.status == "partial", str(result)
        assert result.participants == 3
        assert liar not in result.contributors
        assert result.parts_without_result == ()
    for result in results[:3]:
        assert list(result.excluded) == [liar]
    if codec == "float32":  # the lossy ones cannot encode it, so nothing arrives to be named
        told = [result.detail for result in results[:3] if "'b'" in result.detail]
        assert told, "the reducer does not name the tensor"
    for own in tensors:
        assert torch.equal(own["a"], torch.ones(500))
        assert torch.equal(own["b"], torch.ones(500))


@pytest.mark.parametrize("weights", [[10, 20, 30], [0, 1, 3], [7, 1 << 32]])
async def test_the_mean_is_by_samples(plain: LocalSwarm, run: str, weights: list[int]) -> None:
    """S18. The largest weight there is counts in full between two: of two nobody can say which one
    is wrong.
    """
    tensors = [{"w": torch.zeros(64, dtype=torch.float64)} for _ in weights]
    async with trainers(plain, run, tensors) as sessions:
        for i, own in enumerate(tensors):
            own["w"].fill_(float(i) + 1.0)
        results = await average(plain, sessions, weights)
    heavy = [weight for weight in weights if weight > 0]
    for result in results:
        assert (result.status, result.participants) == ("complete", len(heavy)), str(result)
        assert result.total_weight == sum(weights)
    expected = sum(w * (i + 1.0) for i, w in enumerate(weights)) / sum(weights)
    assert same_bits(tensors)
    torch.testing.assert_close(
        tensors[0]["w"], torch.full((64,), expected, dtype=torch.float64), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("place", [0, -1])
async def test_a_weight_of_a_thousand_million_among_ones_does_not_take_over(
    plain: LocalSwarm, run: str, place: int
) -> None:
    """S18: over `max_weight_ratio` times the group's median the result is failed, with that
    reason; what the others get, at once, is their own mean. `place` 0 is the one that leads.
    """
    others = by_peer_id(plain)
    heavy = others.pop(place)
    tensors = [{"w": torch.full((64,), 1.0)} for _ in range(4)]
    async with trainers(plain, run, tensors) as sessions:
        tensors[heavy]["w"].fill_(1000.0)
        weights = [10**9 if i == heavy else 1 for i in range(4)]
        results = await average(plain, sessions, weights, timeout_s=20)
        for i in others:
            assert (results[i].status, results[i].participants) == ("complete", 3), str(results[i])
            assert sum(results[i].seconds.values()) < 1.0
            assert tensors[i]["w"].tolist() == [1.0] * 64
        refused = results[heavy]
        assert (refused.status, refused.reason) == ("failed", "weight_out_of_range"), str(refused)
        assert not refused.accepted
        assert tensors[heavy]["w"].tolist() == [1000.0] * 64
        # and it is a peer like any other with the next, sane weight
        complete(await average(plain, sessions, timeout_s=20), 4)


async def test_all_weights_zero_change_nothing(plain: LocalSwarm, run: str) -> None:
    """S18: flagged as "no contributors" to everybody, the tensors bit for bit what they were; the
    next round with weights is an ordinary one.
    """
    tensors = [{"w": torch.zeros(64)} for _ in range(3)]
    async with trainers(plain, run, tensors) as sessions:
        for i, own in enumerate(tensors):
            own["w"].fill_(float(i))
        results = await average(plain, sessions, [0, 0, 0])
        for i, (own, result) in enumerate(zip(tensors, results, strict=True)):
            assert (result.status, result.reason) == ("failed", "no_contributors"), str(result)
            assert not result.accepted
            assert own["w"].tolist() == [float(i)] * 64
        complete(await average(plain, sessions), 3)
        assert tensors[0]["w"].tolist() == [1.0] * 64


@pytest.mark.parametrize("weight", [-1, 0.5, float("nan"), float("inf"), (1 << 32) + 1])
async def test_a_weight_that_is_none_is_refused_before_any_traffic(
    plain: LocalSwarm, run: str, weight: float
) -> None:
    async with trainers(plain, run, [{"w": torch.zeros(8)}]) as (session,):
        with pytest.raises(TrainerError) as refused:
            await plain.call(session.average, weight)
        assert refused.value.reason == "weight_out_of_range"
        assert repr(weight) in refused.value.message
        assert plain.node(0).rounds(run) == []


async def test_a_poisoned_contribution_is_refused_and_the_others_average_without_it(
    plain: LocalSwarm, run: str
) -> None:
    """Finite, but 10^9 times larger than anybody else's: refused by its norm, with a strike."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(1000, generator=generator)
    tensors = [{"w": start.clone()} for _ in range(4)]
    async with trainers(plain, run, tensors) as sessions:
        for own in tensors:
            own["w"].add_(0.1 * torch.randn(1000, generator=generator))
        good = [i for i in range(4) if i != SLOW]
        mean = torch.stack([tensors[i]["w"] for i in good]).mean(0)
        tensors[SLOW]["w"].mul_(1e9)
        ends = await average(plain, sessions, timeout_s=30)
        for i in good:
            result = ends[i]
            assert result.status == "partial", str(result)
            assert set(result.contributors) == {sessions[k].peer_id for k in good}
            # Within any codec's rounding (int8: 3.5 / 127 and a residual); the poison is 1e9.
            torch.testing.assert_close(tensors[i]["w"], mean, rtol=0.0, atol=0.06)
        strikes = [
            entry.strikes
            for i in good
            for entry in [
                plain.node(i).runs[run].driver.peer.state.swarm.heard[sessions[SLOW].peer_id]
            ]
        ]
        assert any(strikes)
