"""The compiled passes against the torch code and zlib: the same bits, whatever the values.

One rule: both run here on the same inputs; where the compiled code was not built there is nothing
to compare, and the tests of the codecs have run on torch alone.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.net.checksum import crc32
from moshpitd.tensors import kernels
from moshpitd.tensors.codecs import Codec, codec_for
from moshpitd.tensors.codecs.compiled import coded
from moshpitd.tensors.reduction import PartAccumulator, _mix_small, examine, first_nonfinite

pytestmark = pytest.mark.skipif(
    not kernels.BUILT, reason="moshpitd._native is not built (no compiler, or no AVX2)"
)

LARGEST = torch.finfo(torch.float32).max
# Blocks of both codecs, one element more and less, what fills no vector of 8, and several blocks.
LENGTHS = (1, 7, 8, 9, 1000, 1023, 1024, 1031, 131_072, 131_073, 262_150)


def pairs(numel: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, values, what is added to them)."""
    generator = torch.Generator().manual_seed(numel)

    def normal(size: float = 1.0) -> Tensor:
        return torch.randn(numel, generator=generator) * size

    yield "usual", normal(), normal(1e-4)
    yield "alone", normal(), None
    yield "zeros", torch.zeros(numel), torch.zeros(numel)
    yield "negative zeros", -torch.zeros(numel), None
    yield "constant", torch.full((numel,), 0.3), None
    yield "constant and a little", torch.full((numel,), -0.3), torch.full((numel,), 1e-9)
    yield "denormal", normal(1e-40), normal(1e-44)
    yield "barely normal", normal(1e-38), normal(1e-38)
    yield "huge", normal(2e37), normal(1e37)
    yield "largest", torch.full((numel,), LARGEST), None
    one = normal()
    one[0] = LARGEST
    yield "one largest", one, normal()
    yield "every size", (normal(20.0)).exp().clamp(max=3e38), normal()
    some = normal()
    some[::3], some[::5] = 0.0, -0.0
    yield "some zeros", some, None
    for name, bad in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        broken = normal()
        broken[numel // 2] = bad
        yield name, broken, normal()


class Made:
    """What one encoder made of values: everything that it writes."""

    def __init__(self, codec: Codec, values: Tensor, added: Tensor | None, *, told: bool) -> None:
        numel = values.numel()
        self.payload = torch.zeros(codec.payload_bytes(numel, "float32"), dtype=torch.uint8)
        self.left, self.decoded = torch.full((numel,), 7.0), torch.full((numel,), 7.0)
        self.finite = True
        try:
            codec.encode_fed(
                values,
                self.payload,
                added=added,
                left=self.left,
                decoded=self.decoded if told else None,
            )
        except TrainerError:
            self.finite = False

    def bits(self) -> list[Tensor]:
        return [self.payload, self.left.view(torch.int32), self.decoded.view(torch.int32)]


@pytest.mark.parametrize("name", ["float16", "int8"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_compiled_and_torch_write_the_same_bits(
    name: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codec_for(name, "float32")
    for what, values, added in pairs(numel):
        for told in (False, True):
            fast = Made(codec, values, added, told=told)
            out = torch.empty(numel)
            norm = codec.decode_examined(fast.payload, out) if fast.finite else (None, 0.0)
            with monkeypatch.context() as without:
                without.setattr(kernels, "BUILT", False)
                slow = Made(codec, values, added, told=told)
                assert fast.finite == slow.finite, what
                if not slow.finite:
                    continue
                usual = torch.empty(numel)
                codec.decode(slow.payload, usual)
            for quick, plain in zip(fast.bits(), slow.bits(), strict=True):
                assert torch.equal(quick, plain), (what, told)
            assert torch.equal(out.view(torch.int32), usual.view(torch.int32)), what
            bad, squared = examine(usual)
            assert norm[0] == bad, what
            assert math.isclose(norm[1], squared, rel_tol=1e-4, abs_tol=1e-30), what


@pytest.mark.parametrize("fed", [False, True])
def test_a_block_that_is_not_like_those_before_it(
    fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two blocks with one scale the third is encoded before it is looked at."""
    codec, block = codec_for("float16", "float32"), 131_072
    generator = torch.Generator().manual_seed(9)
    usual = [torch.randn(block, generator=generator).clamp(-4.5, 4.5) for _ in range(3)]
    for one in usual:
        one[7] = 4.5
    for what, odd in {
        "alike": usual[0],
        "larger": usual[0] * 1e6,
        "smaller": usual[0] * 1e-6,
        "zeros": torch.zeros(block),
        "constant": torch.full((block,), 4.5),
        "largest": torch.where(usual[0] == 4.5, LARGEST, usual[0]),
        "nan": torch.where(usual[0] == 4.5, math.nan, usual[0]),
        "inf": torch.where(usual[0] == 4.5, -math.inf, usual[0]),
        "denormal": usual[0] * 1e-41,
        "short": usual[0][: block - 3],
        "with a tail": torch.cat([usual[0], usual[1][:13]]),
    }.items():
        values = torch.cat([*usual, odd, usual[1]])
        added = torch.randn(values.numel(), generator=generator) * 1e-5 if fed else None
        fast = [Made(codec, values, added, told=fed) for _ in range(2)]
        with monkeypatch.context() as without:
            without.setattr(kernels, "BUILT", False)
            slow = Made(codec, values, added, told=fed)
        assert {one.finite for one in fast} == {slow.finite}, what
        for again in fast if slow.finite else ():
            for quick, plain in zip(again.bits(), slow.bits(), strict=True):
                assert torch.equal(quick, plain), what


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_what_is_left_may_be_written_over_what_was_added(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a block whose scale is not the guessed one: it is read twice then."""
    codec, block = codec_for(name, "float32"), 131_072
    generator = torch.Generator().manual_seed(4)
    usual = torch.randn(block, generator=generator).clamp(-4.5, 4.5)
    usual[7] = 4.5
    values = torch.cat([usual, usual, usual, usual * 1e6, usual * 1e-6])
    added = torch.randn(values.numel(), generator=generator) * 1e-5
    made = []
    for _ in range(2):
        kept, over, told = added.clone(), values.clone(), torch.empty_like(values)
        payload = torch.zeros(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
        again = payload.clone()
        codec.encode_fed(values, payload, added=kept, left=kept, decoded=told)
        codec.encode_fed(over, again, added=added, left=over)
        made.append((payload, kept, told, again, over))
        monkeypatch.setattr(kernels, "BUILT", False)
    for quick, plain in zip(*made, strict=True):
        assert torch.equal(quick, plain)


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_without_feedback_the_payload_is_the_same_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codec_for(name, "float32")
    values = torch.randn(140_001, generator=torch.Generator().manual_seed(1))
    payloads = []
    for _ in range(2):
        out = torch.zeros(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
        codec.encode(values, out)
        payloads.append(out)
        monkeypatch.setattr(kernels, "BUILT", False)
    assert torch.equal(*payloads)


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_a_lying_payload_is_found(name: str) -> None:
    codec = codec_for(name, "float32")
    payload = torch.zeros(codec.payload_bytes(4096, "float32"), dtype=torch.uint8)
    codec.encode(torch.randn(4096), payload)
    payload[:4] = torch.tensor([3e38]).view(torch.uint8)  # a scale that its codes overflow with
    payload[-3:] = torch.tensor([0x7B, 0xFF, 0x7B], dtype=torch.uint8)
    out = torch.empty(4096)
    found = codec.decode_examined(payload, out)
    assert found[0] == examine(out)[0]
    payload[:4] = torch.tensor([math.inf]).view(torch.uint8)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        codec.decode_examined(payload, out)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        codec.decode(payload, out)


def test_what_is_said_of_values_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (*LENGTHS, 16_383, 16_385):
        for what, values, _ in pairs(numel):
            bad, squared = examine(values)
            first = first_nonfinite(values)
            with monkeypatch.context() as without:
                without.setattr(kernels, "BUILT", False)
                assert (bad, first) == (examine(values)[0], first_nonfinite(values)), what
            if bad is None:
                exact = float((values.double() ** 2).sum().item())
                assert math.isclose(squared, exact, rel_tol=1e-5, abs_tol=1e-37), what
            else:
                assert math.isnan(squared), what


def test_memory_that_does_not_fit_is_refused_before_it_is_written_to() -> None:
    codec = codec_for("float16", "float32")
    values, room = torch.randn(100), torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(LocalProtocolError, match="at least 100"):
        codec.encode_fed(values, room, added=None, left=torch.empty(99))
    with pytest.raises(LocalProtocolError, match="float64"):
        codec.encode_fed(values, room, added=torch.zeros(100).double(), left=torch.empty(100))


def test_the_checksum_is_that_of_zlib() -> None:
    rng = random.Random(5)
    for size in (*range(300), *range(500, 530), *range(760, 1100, 7), 4096, 524_352):
        payload = rng.randbytes(size)
        assert crc32(payload) == zlib.crc32(payload), size
        assert crc32(memoryview(bytearray(payload))[size // 3 :]) == zlib.crc32(
            payload[size // 3 :]
        )


@pytest.mark.parametrize("nbytes", [262_143, 262_144, 262_144 + 127, 1_000_003])
@pytest.mark.parametrize("apart", [0, 1, 31])
def test_a_copy_past_the_caches_is_the_copy_and_nothing_beside_it(nbytes: int, apart: int) -> None:
    source = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8)[3:]
    whole = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
    kernels.copy_past(source, whole[apart : apart + nbytes])
    assert torch.equal(whole[apart : apart + nbytes], source)
    assert (whole[:apart] == 7).all()
    assert (whole[apart + nbytes :] == 7).all()


def test_what_is_no_plain_copy_is_torchs() -> None:
    source = torch.arange(200_000, dtype=torch.float64)
    target = torch.zeros(100_000)
    kernels.copy_past(source[::2], target)
    assert torch.equal(target, source[::2].float())
    kernels.copy_past(torch.ones(1), target.view(100_000, 1)[:1, 0])
    assert target[0] == 1


class Tripled(torch.Tensor):
    """A trainer's own class, with its values in another tensor, as quantised weights have them."""

    third: torch.Tensor

    @staticmethod
    def __new__(cls, third: torch.Tensor) -> Tripled:
        made = torch.Tensor._make_wrapper_subclass(cls, third.shape, dtype=third.dtype)
        made.third = third
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # named by position
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].third)
        worth = [one.third * 3 if isinstance(one, Tripled) else one for one in args]
        return function(*worth, **(kwargs or {}))


def test_what_has_its_values_elsewhere_is_copied_by_torch() -> None:
    target = torch.full((100_000,), 7.0)
    kernels.copy_past(Tripled(torch.ones(100_000)), target)
    assert (target == 3).all()
    kernels.copy_past(torch._efficientzerotensor(100_000), target)
    assert (target == 0).all()


# -- payloads that are used without being written down -------------------------------------------

SHARES = [(1, 1), (1, 3), (3, 1), (1, 1 << 20), (1 << 20, 1), (7, 8)]
"""(weight of what comes, of what is there): either side of a half, and a half itself."""


def payload_of(codec: Codec, values: Tensor) -> Tensor:
    room = torch.empty(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
    codec.encode(values, room)
    return room


def small(numel: int) -> Iterator[tuple[str, Tensor]]:
    for name, values, _ in pairs(numel):
        if bool(torch.isfinite(values).all()) and float(values.abs().max()) < 2.0**60:
            yield name, values


@pytest.mark.parametrize("name", ["float16", "int8"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_mixing_a_payload_in_gives_the_bits_of_decoding_it_first(name: str, numel: int) -> None:
    codec, there = codec_for(name, "float32"), torch.randn(numel)
    whole = numel // 32 * 32  # torch rounds what fills no two vectors in another way
    for what, values in small(numel):
        payload = payload_of(codec, values)
        found = coded(codec, payload, numel)
        assert found is not None
        decoded = torch.empty(numel)
        bad, squared = codec.decode_examined(payload, decoded)
        assert (bad, squared) == (None, found.squared), what
        for ours, theirs in SHARES:
            mean, twin = there.clone(), there.clone()
            share, rest = ours / (ours + theirs), theirs / (ours + theirs)
            found.mix(mean, share=share, rest=rest)
            _mix_small(twin, decoded, share=share, rest=rest)
            same = mean[:whole].view(torch.int32) == twin[:whole].view(torch.int32)
            assert bool(same.all()), (what, ours, theirs)
            torch.testing.assert_close(mean, twin, rtol=2.0**-22, atol=1e-44)


@pytest.mark.parametrize("name", ["float16", "int8"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_a_bound_of_the_norm_is_not_below_it_and_is_told_only_where_it_is_enough(
    name: str, numel: int
) -> None:
    codec = codec_for(name, "float32")
    for what, values in small(numel):
        payload = payload_of(codec, values)
        exact = codec.decode_examined(payload, torch.empty(numel))[1]
        bound = coded(codec, payload, numel, enough=math.inf)
        assert bound is not None
        assert exact * (1 - 2.0**-12) <= bound.squared < math.inf, what  # it sums in float32
        if exact * 1.01 < bound.squared:
            near = coded(codec, payload, numel, enough=(exact + bound.squared) / 2)
            assert near is not None
            assert near.squared == exact, what


@pytest.mark.parametrize("at", [0, 5, 131_071, 131_072, 131_072 + 33, 131_072 + 47])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_no_bound_hides_a_code_that_is_not_finite(at: int, bits: int) -> None:
    codec, numel = codec_for("float16", "float32"), 131_072 + 48
    payload = payload_of(codec, torch.ones(numel).uniform_(-1, 1))
    payload[8 + 2 * at], payload[9 + 2 * at] = bits & 0xFF, bits >> 8
    found = coded(codec, payload, numel, enough=2.0**127)
    assert found is not None
    assert not math.isfinite(found.squared)


@pytest.mark.parametrize("name", ["float16", "int8"])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_decoding_past_the_caches_is_decoding(name: str, offset: int) -> None:
    codec, values = codec_for(name, "float32"), torch.randn(131_072 + 1024 + 7)
    payload = payload_of(codec, values)
    found = coded(codec, payload, values.numel())
    assert found is not None
    room = torch.full((values.numel() + offset + 1,), 5.0)
    found.decode(room[offset : offset + values.numel()], past=True)
    twin = torch.empty_like(values)
    codec.decode(payload, twin)
    assert torch.equal(room[offset : offset + values.numel()], twin)
    assert float(room[-1]) == 5.0
    assert offset == 0 or float(room[offset - 1]) == 5.0


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_an_accumulator_does_not_care_whether_contributions_were_decoded(name: str) -> None:
    codec, numel = codec_for(name, "float32"), 4096
    ours = PartAccumulator(numel, "float32", "mean")
    twin = PartAccumulator(numel, "float32", "mean")
    own = torch.randn(numel)
    for weight in (3.0, 1.0, 2.0):
        payload, decoded = payload_of(codec, torch.randn(numel)), torch.empty(numel)
        codec.decode(payload, decoded)
        found = coded(codec, payload, numel)
        assert found is not None
        ours.add_coded(found, weight)
        twin.add(decoded, weight, small=True)
    for one in (ours, twin):
        one.add(own, 1.0, small=True)
    assert (ours.count, ours.total_weight) == (twin.count, twin.total_weight) == (4, 7.0)
    assert torch.equal(ours.take(), twin.take())
    with pytest.raises(LocalProtocolError, match="4096 coded float32, expected 8"):
        PartAccumulator(8, "float32", "mean").add_coded(found, 1.0)


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_what_is_not_small_is_mixed_the_careful_way(name: str) -> None:
    codec, numel = codec_for(name, "float32"), 4096
    for first in (torch.full((numel,), -LARGEST), torch.randn(numel) * 1e25):
        payload, decoded = payload_of(codec, torch.randn(numel) * 2.0**60), torch.empty(numel)
        codec.decode(payload, decoded)
        found = coded(codec, payload, numel)
        assert found is not None
        ours = PartAccumulator(numel, "float32", "mean")
        twin = PartAccumulator(numel, "float32", "mean")
        for one in (ours, twin):
            one.add(first, 1.0)  # not known to be small
        ours.add_coded(found, 1.0)
        twin.add(decoded, 1.0, small=True)
        mean = ours.take()
        assert bool(torch.isfinite(mean).all())
        assert torch.equal(mean, twin.take())


def test_a_payload_that_lies_is_not_taken_as_it_is() -> None:
    codec, numel = codec_for("float16", "float32"), 100
    payload = payload_of(codec, torch.randn(numel))
    payload[4 + 2 * 50 : 4 + 2 * 50 + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity
    found = coded(codec, payload, numel)
    assert found is not None
    assert not math.isfinite(found.squared)
    payload[:4] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)  # its scale
    with pytest.raises(RemoteProtocolError, match="scale"):
        coded(codec, payload, numel)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        coded(codec, payload[:-1], numel)
    assert coded(codec_for("float32", "float32"), torch.zeros(400, dtype=torch.uint8), 100) is None


@pytest.mark.parametrize("numel", LENGTHS)
def test_a_sum_and_what_is_said_of_it(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, values, added in pairs(numel):
        out, twin = torch.full((numel + 1,), 7.0), torch.empty(numel)
        squared = kernels.sum_into(values, added, out[:numel])
        with monkeypatch.context() as torch_only:
            torch_only.setattr(kernels, "BUILT", False)
            assert math.isnan(kernels.sum_into(values, added, twin))
        same = out[:numel].view(torch.int32) == twin.view(torch.int32)
        assert bool((same | (out[:numel].isnan() & twin.isnan())).all()), what
        assert float(out[numel]) == 7.0
        bad, known = examine(twin)
        assert bad is None or not math.isfinite(squared), what
        if math.isfinite(squared):
            assert math.isclose(squared, known, rel_tol=1e-4), what
