"""tensors/codecs. One rule: every case is held against the codec's own stated bound."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.tensors.codecs import (
    CODECS,
    HALF_BLOCK,
    RAW,
    Codec,
    codec_by_code,
    codec_for,
)
from moshpitd.tensors.dtypes import DTYPES, dtype_name

LARGEST = torch.finfo(torch.float32).max
NAMES = [
    "float32", "float16", "bfloat16", "int8", "int4", "minmax-uint8", "bagua-minmax-uint8", "qsgd",
    "nuqsgd", "natural", "top-k", "rand-k", "sign-l1", "sign-rms",
]  # fmt: skip
LOSSY = NAMES[1:]
EXACT_CONSTANTS = [*NAMES[:6], "sign-l1", "sign-rms"]
HAS_SCALES = [name for name in LOSSY if name not in {"natural", "top-k", "rand-k"}]
STOCHASTIC = ["qsgd", "nuqsgd", "natural", "rand-k"]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Parts are small: a second thread only waits, and for long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def round_trip(codec: Codec, values: Tensor, *, seed: int = 0) -> Tensor:
    size = codec.payload_bytes(values.numel(), dtype_name(values.dtype))
    room = torch.full((size + 7,), 0xA5, dtype=torch.uint8)
    assert codec.encode(values, room, seed=seed) == size
    assert room[size:].tolist() == [0xA5] * 7
    out = torch.full_like(values, 1)
    codec.decode(room[:size], out)
    return out


def assert_within_bound(codec: Codec, values: Tensor, *, seed: int = 0) -> Tensor | None:
    """The decoded values; None where the codec says that it refuses such values."""
    try:
        out = round_trip(codec, values, seed=seed)
    except TrainerError as error:
        if (codec.name, error.reason) != ("bagua-minmax-uint8", "range_refused"):
            raise
        return None
    if values.numel() == 0:
        return out
    block = codec.block or values.numel()
    fill = -values.numel() % block
    wide = values.double()
    pairs = torch.stack(((out.double() - wide).abs(), wide.abs()))
    errors, sizes = torch.nn.functional.pad(pairs, (0, fill)).view(2, -1, block).amax(2)
    # Asking for the bound of each block takes seconds: the worst in both senses will do.
    worst = torch.cat([t.topk(min(200, t.numel())).indices for t in (errors, errors / sizes)])
    for error, absmax in zip(errors[worst].tolist(), sizes[worst].tolist(), strict=True):
        assert error <= codec.error_bound(absmax)
    return out


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(FLOATS, max_size=40), st.integers(0, 2**64 - 1))
@settings(max_examples=40)
@example([LARGEST, -LARGEST, 1.0], 0)
@example([LARGEST], 0)
@example([LARGEST] * 33, 1)
@example([-LARGEST, LARGEST, 3.4e38, 1e38] * 9, 5)
@example([2.0**-149, -(2.0**-149), 0.0], 0)
@example([2.0**-149, 2.0**-140], 0)
@example([2.0**-149, 2.0**-140], 2)
@example([2.0**-130, 1.5e-39], 0)
@example([65504.0, 65520.0, 70000.0], 0)
@example([1e-8, 2e-8], 0)
@example([3.3961775292304957e38, 1.0], 0)  # between the largest bfloat16 and infinity
@example([-1.0, 1.0, 0.3], 0)  # BAGUA's codes wrap here, and at the next two
@example([1000.0, 1000.005], 0)
@example([1.0, 1.0], 0)
def test_round_trip_within_the_bound(name: str, numbers: list[float], seed: int) -> None:
    assert_within_bound(CODECS[name], torch.tensor(numbers, dtype=torch.float32), seed=seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-149, -135, -126, -100, 0, 16, 127])
@pytest.mark.parametrize("numel", [1, 2, 1023, 1024, 1025, HALF_BLOCK + 1031])
def test_all_sizes_and_magnitudes(name: str, exponent: int, numel: int) -> None:
    source = torch.Generator().manual_seed(numel)
    unit = torch.rand(numel, generator=source, dtype=torch.float64) * 2 - 1
    values = (unit * 2.0**exponent).float()
    values[0] = 2.0**exponent
    out = assert_within_bound(CODECS[name], values, seed=numel)
    assert out is None or torch.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1025, HALF_BLOCK + 3])
def test_zeros_come_back_as_zeros(name: str, numel: int) -> None:
    assert torch.equal(round_trip(CODECS[name], torch.zeros(numel), seed=3), torch.zeros(numel))


@pytest.mark.parametrize("name", EXACT_CONSTANTS)
@given(FLOATS, st.sampled_from([1, 5, 64, 1024, 1027]))
@settings(max_examples=50)
def test_a_constant_is_exact(name: str, value: float, numel: int) -> None:
    values = torch.full((numel,), value, dtype=torch.float32)
    assert torch.equal(round_trip(CODECS[name], values), values)


@pytest.mark.parametrize("name", EXACT_CONSTANTS)
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 2.0**-149, -(2.0**-133), 0.1, -3.0])
def test_a_long_constant_is_exact(name: str, value: float) -> None:
    values = torch.full((HALF_BLOCK + 5,), value, dtype=torch.float32)
    assert torch.equal(round_trip(CODECS[name], values), values)


@pytest.mark.parametrize("name", ["qsgd", "nuqsgd", "top-k", "rand-k"])
@given(FLOATS, st.integers(0, 2**64 - 1))
@settings(max_examples=30)
def test_one_value_is_exact(name: str, value: float, seed: int) -> None:
    values = torch.tensor([value])
    assert torch.equal(round_trip(CODECS[name], values, seed=seed), values)


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(FLOATS, st.lists(st.booleans(), min_size=1, max_size=90))
def test_the_extremes_are_exact(name: str, value: float, signs: list[bool]) -> None:
    values = torch.tensor([value if sign else -value for sign in signs], dtype=torch.float32)
    assert torch.equal(round_trip(CODECS[name], values), values)


@pytest.mark.parametrize("name", [name for name in HAS_SCALES if CODECS[name].block])
def test_one_loud_block_does_not_drown_the_next(name: str) -> None:
    values = torch.full((2 * HALF_BLOCK,), 1e30)
    values[0] = 1e31
    values[HALF_BLOCK:] = torch.linspace(-1e-6, 1e-6, HALF_BLOCK)
    assert_within_bound(CODECS[name], values)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_float32_travels_raw(dtype: str, name: str) -> None:
    codec = codec_for(name, dtype)
    assert codec is (CODECS[name] if dtype == "float32" else RAW)
    if codec is RAW:
        bits = torch.randint(0, 256, (8 * 9,), dtype=torch.uint8)
        values = (bits % 2 == 1) if dtype == "bool" else bits.view(DTYPES[dtype].torch_dtype)
        assert torch.equal(round_trip(RAW, values).view(torch.uint8), values.view(torch.uint8))
        assert RAW.error_bound(1.0) == 0.0


def test_float64_keeps_what_only_float64_has() -> None:
    values = 1 + torch.arange(1000, dtype=torch.float64) * 1e-12
    assert torch.equal(round_trip(codec_for("int8", "float64"), values), values)


@pytest.mark.parametrize("name", NAMES)
def test_encode_is_a_pure_function_on_every_thread(name: str) -> None:
    codec = CODECS[name]
    values = torch.randn(HALF_BLOCK + 77, generator=torch.Generator().manual_seed(1))
    size = codec.payload_bytes(values.numel(), "float32")
    rooms = [torch.full((size,), fill, dtype=torch.uint8) for fill in range(4)]
    threads = [
        threading.Thread(target=codec.encode, args=(values, room), kwargs={"seed": 7})
        for room in rooms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(room, rooms[0]) for room in rooms)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_counts_where_it_should(name: str) -> None:
    codec = CODECS[name]
    values = torch.randn(3000, generator=torch.Generator().manual_seed(5))
    room = torch.empty(codec.payload_bytes(3000, "float32"), dtype=torch.uint8)
    payloads = []
    for seed in (0, 1, 2**64, -1, 2**64 - 1):
        codec.encode(values, room, seed=seed)
        payloads.append(room.clone())
    codec.encode(values, room)  # callers that know no seeds
    payloads.append(room)
    same = [torch.equal(payload, payloads[0]) for payload in payloads]
    if name in STOCHASTIC:
        assert same == [True, False, True, False, False, True]
        assert torch.equal(payloads[3], payloads[4])
    else:
        assert all(same)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("odd", [1, 2, 3, 4, 6])
def test_a_payload_at_an_odd_offset(name: str, odd: int) -> None:
    codec = CODECS[name]
    values = torch.randn(3003, generator=torch.Generator().manual_seed(2))
    size = codec.payload_bytes(3003, "float32")
    straight = torch.empty(size, dtype=torch.uint8)
    room = torch.empty(size + odd, dtype=torch.uint8)
    codec.encode(values, straight)
    codec.encode(values, room[odd:])
    assert torch.equal(room[odd:], straight)
    one, two = torch.empty(3003), torch.empty(3003)
    codec.decode(straight, one)
    codec.decode(room[odd:], two)
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 1500, -1])
def test_a_lossy_codec_refuses_what_is_not_finite(name: str, bad: float, at: int) -> None:
    values = torch.ones(HALF_BLOCK + 2000)
    values[at] = bad
    room = torch.empty(CODECS[name].payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
    with pytest.raises(TrainerError, match=name) as caught:
        CODECS[name].encode(values, room)
    assert caught.value.reason == "not_finite"


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_that_is_none(name: str) -> None:
    codec = CODECS[name]
    size = codec.payload_bytes(1000, "float32")
    out = torch.empty(1000)
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(RemoteProtocolError, match=f"expected {size} bytes"):
            codec.decode(torch.zeros(wrong, dtype=torch.uint8), out)
    if name in HAS_SCALES:
        payload = torch.zeros(size, dtype=torch.uint8)
        payload[:4] = torch.tensor(list(struct.pack("<f", float("nan"))), dtype=torch.uint8)
        with pytest.raises(RemoteProtocolError, match="scale is not finite"):
            codec.decode(payload, out)


@pytest.mark.parametrize("indices", [[-1, 5], [5, 200], [7, 7], [9, 3]])
def test_indices_that_are_none(indices: list[int]) -> None:
    payload = torch.tensor([*indices, 0, 0], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(RemoteProtocolError, match="rising ones of 0 to 199"):
        CODECS["top-k"].decode(payload, torch.empty(200))


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(0, 60), st.data())
@settings(max_examples=40)
def test_any_bytes_decode_or_are_refused(name: str, numel: int, data: st.DataObject) -> None:
    size = CODECS[name].payload_bytes(numel, "float32")
    wanted = data.draw(st.sampled_from([size, size, size + 1, max(0, size - 3)]))
    junk = data.draw(st.binary(min_size=wanted, max_size=wanted))
    payload = torch.tensor(list(junk), dtype=torch.uint8)
    try:
        CODECS[name].decode(payload, torch.empty(numel))
    except RemoteProtocolError:
        return
    assert len(junk) == size


def test_a_bool_is_0_or_1() -> None:
    out = torch.empty(3, dtype=torch.bool)
    with pytest.raises(RemoteProtocolError, match="other than 0 and 1"):
        RAW.decode(torch.tensor([0, 1, 2], dtype=torch.uint8), out)
    RAW.decode(torch.tensor([0, 1, 1], dtype=torch.uint8), out)
    assert out.tolist() == [False, True, True]


@pytest.mark.parametrize("name", NAMES)
def test_our_own_mistakes_are_local(name: str) -> None:
    codec = CODECS[name]
    room = torch.empty(codec.payload_bytes(10, "float32"), dtype=torch.uint8)
    for values, out in (
        (torch.zeros(2, 5), room),
        (torch.zeros(20)[::2], room),
        (torch.zeros(10), room[:-1]),
        (torch.zeros(10), torch.empty(60)),
    ):
        with pytest.raises(LocalProtocolError, match="expected"):
            codec.encode(values, out)
    if codec is not RAW:
        with pytest.raises(LocalProtocolError, match="expected float32"):
            codec.encode(torch.zeros(10, dtype=torch.float64), room)


def test_names_and_codes() -> None:
    assert list(CODECS) == NAMES
    assert [codec_by_code(codec.code) for codec in CODECS.values()] == list(CODECS.values())
    assert [codec.code for codec in CODECS.values()] == list(range(14))  # on the wire: never change
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, int8"):
        codec_for("zip", "float32")
    with pytest.raises(LocalProtocolError, match="complex64"):
        codec_for("int8", "complex64")
    with pytest.raises(RemoteProtocolError, match="code 99"):
        codec_by_code(99)


def test_payload_sizes_are_arithmetic() -> None:
    numel = 2**31 + 1
    assert RAW.payload_bytes(numel, "float64") == 8 * numel
    half = 2**30 + 1  # of an odd number of half bytes, rounded up
    kept = -(-numel // 100)
    expected = {
        "float32": 4 * numel,
        "float16": 2 * numel + 4 * (2**14 + 1),
        "bfloat16": 2 * numel + 4 * (2**14 + 1),
        "int8": numel + 4 * (2**21 + 1),
        "int4": half + 4 * (2**25 + 1),
        "minmax-uint8": numel + 8 * (2**21 + 1),
        "bagua-minmax-uint8": numel + 32,
        "qsgd": numel + 4 * (2**22 + 1),
        "nuqsgd": half + 4 * (2**18 + 1),
        "natural": numel + 2**28 + 1,
        "top-k": 8 * kept,
        "rand-k": 4 * kept + 8,
        "sign-l1": 4 + 2**28 + 1,
        "sign-rms": 4 + 2**28 + 1,
    }
    assert {n: c.payload_bytes(numel, "float32") for n, c in CODECS.items()} == expected
    assert all(codec.payload_bytes(0, "float32") == 0 for codec in CODECS.values())
