"""What codecs promise of the mean and of the squared error; the worked examples in tests/golden.

One rule: a bound on a random quantity names its confidence. Below it is SIGMAS standard errors or
Bernstein's inequality with LOG_ODDS; chance exceeds either in fewer than one of 2e8 comparisons.
Seeds are fixed, so a test that passes goes on passing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs import CODECS, Codec
from moshpitd.tensors.codecs.draws import DRAW_BITS, draws, words
from moshpitd.tensors.codecs.levels import DyadicLevels, Levels, UniformLevels
from moshpitd.tensors.codecs.minmax import bagua_codes, bagua_scale
from moshpitd.tensors.codecs.natural import exponents_of
from moshpitd.tensors.codecs.packing import (
    nibble_room,
    pack_flags,
    pack_nibbles,
    unpack_flags,
    unpack_nibbles,
)
from moshpitd.tensors.codecs.sparse import RandKCodec, TopKCodec, places_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SIGMAS = 6.0
LOG_ODDS = 20.0  # 2 e^-20 is 4e-9
CPU = torch.device("cpu")
STOCHASTIC = ["qsgd", "nuqsgd", "natural", "rand-k"]
NEAREST = [name for name in CODECS if name not in STOCHASTIC]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def golden(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def round_trip(codec: Codec, values: Tensor, *, seed: int = 0) -> Tensor:
    room = torch.empty(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
    codec.encode(values, room, seed=seed)
    out = torch.empty_like(values)
    codec.decode(room, out)
    return out


def samples(codec: Codec, values: Tensor, count: int) -> Tensor:
    return torch.stack([round_trip(codec, values, seed=seed) for seed in range(count)]).double()


def chances_of(uniforms: list[float] | Tensor) -> Tensor:
    return (torch.as_tensor(uniforms, dtype=torch.float64) * 2**DRAW_BITS).floor().int()


def rounded(levels: Levels, values: Tensor, norm: float, chances: Tensor) -> Tensor:
    return levels.ratios(levels.round(values / norm, chances)) * norm


def natural(values: Tensor, chances: Tensor) -> Tensor:
    powers = exponents_of(values, chances, torch.empty_like(chances)) << 23
    return torch.copysign(powers.view(torch.float32), values)


def vectors(numel: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=source)
    one_hot = torch.zeros(numel)
    one_hot[numel // 2] = -3.0
    flat = torch.full((numel,), 1 / 14)  # every value half a step of int4 away from its codes
    flat[0] = 1.0
    return {
        "normal": normal,
        "one hot": one_hot,
        "constant": torch.full((numel,), 0.3),
        "half a step": flat,
        "heavy": normal**9,
        "offset": normal * 1e-3 + 5,
        "huge": normal.clamp(-1, 1) * 3e38,
        "small": normal * 2.0**-96,
    }


# -- the squared error ------------------------------------------------------------------------


def relative_error(codec: Codec, values: Tensor) -> float:
    error = round_trip(codec, values).double() - values.double()
    return float((error.square().sum() / values.double().square().sum()).item())


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 1500])
def test_the_squared_error_is_within_omega(name: str, numel: int) -> None:
    codec = CODECS[name]
    assert codec.contraction(numel) == max(0.0, 1 - codec.omega(numel))
    for title, values in vectors(numel).items():
        try:
            assert relative_error(codec, values) <= codec.omega(numel), title
        except TrainerError as error:
            if error.reason != "range_refused":
                raise


@pytest.mark.parametrize("name", [name for name in NEAREST if name != "bagua-minmax-uint8"])
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=130))
@settings(max_examples=40)
@example([1.0] + [1 / 14] * 63)
@example([1.0] + [1 / 254] * 63)
@example([-1.0, 1.0] + [1 / 510] * 62)
def test_no_vector_exceeds_omega(name: str, numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    if values.abs().max() > 2.0**-90:
        assert relative_error(CODECS[name], values) <= CODECS[name].omega(values.numel())


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_expected_squared_error_is_within_omega(name: str) -> None:
    codec, numel = CODECS[name], 300
    for title, values in vectors(numel).items():
        if title == "huge":
            continue  # the ends of float32, where natural and rand-k say that they are biased
        error = samples(codec, values, 300) - values.double()
        ratios = error.square().sum(1) / values.double().square().sum()
        slack = SIGMAS * ratios.std().item() / math.sqrt(len(ratios))
        assert ratios.mean().item() <= codec.omega(numel) + slack, title


def test_who_promises_a_contraction() -> None:
    promised = {name: codec.contraction(1 << 18) for name, codec in CODECS.items()}
    none = {"bagua-minmax-uint8", "rand-k", "sign-rms"}
    assert {name for name, delta in promised.items() if delta == 0} == none
    assert promised["float32"] == 1
    assert promised["int4"] == pytest.approx(1 - (63 / 196) / (1 + 63 / 196), rel=1e-3)
    assert promised["nuqsgd"] == pytest.approx(0.375, rel=1e-3)
    assert promised["natural"] == 7 / 8
    assert promised["top-k"] == pytest.approx(0.01, rel=1e-3)
    assert 0 < promised["sign-l1"] <= 2.0**-18
    assert [name for name, codec in CODECS.items() if codec.unbiased] == ["float32", *STOCHASTIC]


# -- the mean ---------------------------------------------------------------------------------


def gaps_of(name: str, values: Tensor) -> Tensor:
    """At most how far apart the two numbers are that each value may become."""
    sizes, norm = values.double().abs(), values.double().norm()
    match name:
        case "qsgd":
            parts = values.double().split(512)
            return torch.cat([part.norm() / 127 * torch.ones_like(part) for part in parts])
        case "nuqsgd":
            return sizes.clamp(min=(norm / 64).item())
        case "natural":
            return sizes
        case _:
            return sizes * 100


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_mean_over_seeds_is_the_value(name: str) -> None:
    values = vectors(700)["normal"]
    found = samples(CODECS[name], values, 800)
    error = found.mean(0) - values.double()
    gaps = gaps_of(name, values)
    # A value rounds to one of two, `gap` apart, so its variance is (x - low)(high - x).
    variance = values.double().square() * 99 if name == "rand-k" else gaps**2 / 4
    slack = (2 * variance * LOG_ODDS / 800).sqrt() + gaps * LOG_ODDS / (3 * 800)
    assert (error.abs() <= slack + 1e-6).all()
    # Together: what is left along the vector itself shrinks with the number of elements too.
    along = (found - values.double()) @ values.double()
    assert abs(along.mean().item()) <= SIGMAS * along.std().item() / math.sqrt(800)


@pytest.mark.parametrize(
    "levels", [UniformLevels(steps=127, bits=8), DyadicLevels(halvings=6, bits=4)]
)
def test_integrating_the_draws_gives_the_value(levels: Levels) -> None:
    count = 1 << 10
    chances = chances_of((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for ratio in (0.0, 1e-4, 0.003, 0.015625, 0.02, 0.3, -0.7, 0.999, 1.0, -1.0):
        drawn = rounded(levels, torch.full((count,), ratio), 1.0, chances.clone())
        # The number of draws that round up is exact to one of them.
        assert abs(drawn.double().mean().item() - ratio) <= levels.finest / count + 1e-6
        assert len(set(drawn.tolist())) <= 2


@pytest.mark.parametrize("value", [1.0, 1.5, -3.0, 5.25, 1e-30, -7e20, 3 * 2.0**-149, 2.0**-127])
def test_natural_enumerates_to_the_value(value: float) -> None:
    chances = torch.arange(1 << DRAW_BITS, dtype=torch.int32)  # all that there are
    values = torch.full((1 << DRAW_BITS,), value, dtype=torch.float32)
    mean = natural(values, chances).double().mean().item()
    assert mean == values[0].double().item()


def test_every_set_of_places_is_equally_likely() -> None:
    count, sets = 6000, list(itertools.combinations(range(6), 2))
    drawn = Counter(tuple(places_of(seed, 6, 2, device=CPU).tolist()) for seed in range(count))
    share = 1 / len(sets)
    slack = SIGMAS * math.sqrt(count * share * (1 - share))
    assert all(abs(drawn[one] - count * share) <= slack for one in sets)
    assert sum(drawn[one] for one in sets) == count


@pytest.mark.parametrize(("numel", "kept"), [(1, 1), (7, 7), (1000, 10), (300_000, 3000)])
def test_places_are_the_smallest_words(numel: int, kept: int) -> None:
    drawn = torch.cat(
        [
            words(*torch.empty(2, size, dtype=torch.int32), seed=9, start=start)
            for start in range(0, numel, 1 << 16)
            for size in [min(1 << 16, numel - start)]
        ]
    )
    smallest = drawn.sort().indices[:kept].sort().values
    assert torch.equal(places_of(9, numel, kept, device=CPU), smallest)


# -- random bits and packing --------------------------------------------------------------------


def test_draws_are_uniform_and_differ_between_seeds_and_places() -> None:
    count = 1 << 17
    rooms = torch.empty(4, 2, count, dtype=torch.int32)
    for (room, spare), seed in zip(rooms, (0, 1, 2**32, 2**63), strict=True):
        draws(room, spare, seed=seed)
    uniforms = rooms[:, 0].double() / 2**DRAW_BITS
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    for one in uniforms:
        share = torch.histc(one, 64, 0, 1) / count
        assert (share - 1 / 64).abs().max() <= SIGMAS * math.sqrt(1 / 64 / count)
    centred = (uniforms - 0.5) * math.sqrt(12)
    for one, other in itertools.combinations(centred, 2):
        assert abs((one @ other).item()) <= SIGMAS * math.sqrt(count)
    for lag in (1, 2, 64, 4096):
        assert abs((centred[0, lag:] @ centred[0, :-lag]).item()) <= SIGMAS * math.sqrt(count)


def test_words_of_a_seed_are_known_to_other_builds() -> None:
    # On the wire in rand-k: a peer must draw the same from the same seed, for ever.
    room, spare = torch.empty(2, 4, dtype=torch.int32)
    assert words(room, spare, seed=0).tolist() == WORDS[0]
    assert words(room, spare, seed=2**64 - 1, start=3).tolist() == WORDS[1]
    whole = torch.empty(2, 9, dtype=torch.int32)
    later = words(*whole, seed=2**64 - 1)[3:7]
    assert later.tolist() == WORDS[1]


def slow_words(seed: int, places: range) -> list[int]:
    """The hash as its author writes it."""
    word = (seed + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    found = []
    for place in places:
        x = (place + word) % 2**32
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15 ^ word >> 32) * 0xD35A2D97 % 2**32
        x ^= x >> 15
        found.append(x - 2**32 if x >= 2**31 else x)
    return found


WORDS = [slow_words(0, range(4)), slow_words(2**64 - 1, range(3, 7))]


@given(st.lists(st.booleans(), max_size=70))
def test_flags_are_packed_as_numpy_does(flags: list[bool]) -> None:
    packed = torch.empty(-(-len(flags) // 8), dtype=torch.uint8)
    pack_flags(torch.tensor(flags, dtype=torch.bool), packed)
    assert packed.tolist() == numpy.packbits(numpy.array(flags, dtype=bool)).tolist()
    assert unpack_flags(packed, len(flags)).bool().tolist() == flags


@given(st.lists(st.integers(0, 15), max_size=70))
def test_nibbles_lie_in_pairs(numbers: list[int]) -> None:
    room = nibble_room(len(numbers), CPU)
    room[: len(numbers)] = torch.tensor(numbers, dtype=torch.uint8)
    packed = torch.empty(room.numel() // 2, dtype=torch.uint8)
    pack_nibbles(room, packed)
    pairs = itertools.zip_longest(numbers[::2], numbers[1::2], fillvalue=0)
    assert packed.tolist() == [low + 16 * high for low, high in pairs]
    assert unpack_nibbles(packed, len(numbers)).tolist() == numbers


# -- worked examples ------------------------------------------------------------------------------


def test_golden_quantizers() -> None:
    case = golden("quantizers")
    inputs, outputs = case["inputs"], case["outputs"]
    x, norm = torch.tensor(inputs["x"]), outputs["norm"]
    assert torch.linalg.vector_norm(x).item() == norm
    square = norm**2
    grids: dict[str, Levels] = {
        "qsgd": UniformLevels(steps=inputs["qsgd_levels_s"], bits=4),
        "nuqsgd": DyadicLevels(halvings=len(inputs["nuqsgd_levels"]) - 2, bits=4),
    }
    for uniforms, *expected in zip(
        inputs["u"], outputs["qsgd"], outputs["nuqsgd"], outputs["natural"], strict=True
    ):
        for levels, values in zip(grids.values(), expected[:2], strict=True):
            assert rounded(levels, x, norm, chances_of(uniforms)).tolist() == values
        assert natural(x, chances_of(uniforms)).tolist() == expected[2]
    count = 1 << 14
    every = chances_of((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for name, levels in grids.items():
        assert levels.omega(6) * square == pytest.approx(outputs[f"{name}_bound"])
        errors = [
            (rounded(levels, torch.full((count,), one), norm, every.clone()) - one).double()
            for one in x.tolist()
        ]
        variance = sum(error.square().mean().item() for error in errors)
        assert variance == pytest.approx(outputs[f"{name}_variance"], rel=1e-3)
        assert variance <= outputs[f"{name}_bound"]
    errors = [(natural(torch.full((count,), one), every.clone()) - one) for one in x.tolist()]
    variance = sum(error.double().square().mean().item() for error in errors)
    assert variance == pytest.approx(outputs["natural_variance"], rel=1e-3)
    assert variance <= CODECS["natural"].omega(6) * square


def test_golden_sparse() -> None:
    case = golden("quantizers")
    x, outputs = torch.tensor(case["inputs"]["x"]), case["outputs"]
    one_in = 6 // case["inputs"]["randk_k"]
    top = TopKCodec(name="top-2", code=200, one_in=one_in)
    assert round_trip(top, x).tolist() == outputs["topk2"]
    few = RandKCodec(name="rand-2", code=201, one_in=one_in)
    assert few.omega(6) * outputs["norm"] ** 2 == pytest.approx(outputs["randk_theory"])
    errors = (samples(few, x, 4000) - x.double()).square().sum(1)
    slack = SIGMAS * errors.std().item() / math.sqrt(4000)
    assert errors.mean().item() == pytest.approx(outputs["randk_variance"], abs=slack)


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0, 2.0])
    top = TopKCodec(name="top-2", code=200, one_in=3)
    assert round_trip(top, values).tolist() == [0.0, -2.0, 2.0, 0.0, 0.0, 0.0]
    assert round_trip(top, torch.zeros(6)).tolist() == [0.0] * 6


def test_golden_minmax_uint8() -> None:
    case = golden("minmax_uint8")
    refused = []
    for number, one in enumerate(case["outputs"]["cases"]):
        x = torch.tensor(one["x"])
        header = torch.tensor([one["min"], one["max"]])
        assert torch.equal(torch.stack([x.min(), x.max()]), header)
        scale, upper = bagua_scale(header)
        codes = (bagua_codes(x, scale, upper) % 256).to(torch.uint8)
        assert codes.tolist() == one["codes"]
        payload = torch.zeros(32 + x.numel(), dtype=torch.uint8)
        payload[:8], payload[32:] = header.view(torch.uint8), codes
        decoded = torch.empty_like(x)
        CODECS["bagua-minmax-uint8"].decode(payload, decoded)
        torch.testing.assert_close(
            decoded, torch.tensor(one["decoded"]), atol=case["atol"], rtol=2.0**-23
        )
        # Ours has neither the epsilon nor the wrap.
        span = one["max"] - one["min"]
        error = (round_trip(CODECS["minmax-uint8"], x).double() - x.double()).abs().max().item()
        assert error <= span / 510 + x.abs().max().item() * 2.0**-22
        room = torch.empty_like(payload)
        try:
            CODECS["bagua-minmax-uint8"].encode(x, room)
        except TrainerError as error_:
            assert "minmax-uint8 has no such limit" in str(error_)  # noqa: PT017
            refused.append(number)
        else:
            assert torch.equal(room, payload)
    assert refused == [1, 4]  # a constant, and |max| of 2e5 times the range


@pytest.mark.parametrize(
    ("numbers", "refused"),
    [
        ([2.0**14, 2.0**14 - 1.5], False),
        ([2.0**14 + 1, 2.0**14], True),
        ([0.0, 0.0], False),
        ([-1.0, 1.0], True),  # -127.5 and 127.5 round to 256 codes and one more
        ([-1.0, 1.1], False),
        ([-3e38, 3e38], True),
    ],
)
def test_bagua_refuses_what_would_wrap(numbers: list[float], refused: bool) -> None:
    codec = CODECS["bagua-minmax-uint8"]
    if refused:
        with pytest.raises(TrainerError, match="wrap around") as caught:
            round_trip(codec, torch.tensor(numbers))
        assert caught.value.reason == "range_refused"
    else:
        round_trip(codec, torch.tensor(numbers))


def test_golden_onebit_scale_contraction() -> None:
    rows = {row["vector"]: row for row in golden("onebit_scale_contraction")["outputs"]["rows"]}
    one_hot = torch.zeros(64)
    one_hot[17] = -2.5
    for title, values in (("one_hot_64", one_hot), ("const", torch.full((16,), 0.7))):
        row = rows[title]
        assert relative_error(CODECS["sign-l1"], values) == pytest.approx(
            row["l1_over_d_rel_err"], abs=1e-6
        )
        assert relative_error(CODECS["sign-rms"], values) == pytest.approx(
            row["rms_rel_err"], abs=1e-6
        )


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60))
def test_the_errors_of_signs_are_the_closed_forms(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    wide = values.double()
    one, two, numel = wide.abs().sum().item(), wide.norm().item(), values.numel()
    if two > 1e-20:
        theory = 1 - one**2 / (numel * two**2)
        assert relative_error(CODECS["sign-l1"], values) == pytest.approx(theory, abs=1e-6)
        theory = 2 - 2 * one / (math.sqrt(numel) * two)
        assert relative_error(CODECS["sign-rms"], values) == pytest.approx(theory, abs=1e-6)


# -- the other kind of device ---------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(CODECS))
def test_cuda_decodes_to_the_same_bits(name: str) -> None:
    codec, values = CODECS[name], vectors(70_001)["normal"]
    size = codec.payload_bytes(values.numel(), "float32")
    host, device = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8).cuda()
    codec.encode(values, host, seed=5)
    codec.encode(values.cuda(), device, seed=5)
    for payload in (host, device.cpu()):
        here, there = torch.empty_like(values), torch.empty_like(values).cuda()
        codec.decode(payload, here)
        codec.decode(payload.cuda(), there)
        assert torch.equal(here.view(torch.int32), there.cpu().view(torch.int32))
        error = (here - values).abs().max().item()
        assert error <= codec.error_bound(values.abs().max().item())
