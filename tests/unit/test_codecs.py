"""tensors/codecs. One rule: every case is held against the codec's own stated bound."""

from __future__ import annotations

import struct
import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.tensors.codecs import (
    CODECS,
    HALF_BLOCK,
    INT8_BLOCK,
    RAW,
    Codec,
    codec_by_code,
    codec_for,
)
from moshpitd.tensors.dtypes import DTYPES, dtype_name

LARGEST = torch.finfo(torch.float32).max
NAMES = ["float32", "float16", "bfloat16", "int8"]
LOSSY = NAMES[1:]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    size = codec.payload_bytes(values.numel(), dtype_name(values.dtype))
    room = torch.full((size + 7,), 0xA5, dtype=torch.uint8)
    assert codec.encode(values, room) == size
    assert room[size:].tolist() == [0xA5] * 7
    out = torch.full_like(values, 1)
    codec.decode(room[:size], out)
    return out


def assert_within_bound(codec: Codec, values: Tensor) -> Tensor:
    out = round_trip(codec, values)
    block = INT8_BLOCK if codec.name == "int8" else HALF_BLOCK
    for start in range(0, values.numel(), block):
        piece = values[start : start + block].double()
        error = (out[start : start + block].double() - piece).abs().max().item()
        assert error <= codec.error_bound(piece.abs().max().item())
    return out


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(FLOATS, max_size=40))
@example([LARGEST, -LARGEST, 1.0])
@example([LARGEST])
@example([2.0**-149, -(2.0**-149), 0.0])
@example([2.0**-149, 2.0**-140])
@example([2.0**-130, 1.5e-39])
@example([65504.0, 65520.0, 70000.0])
@example([1e-8, 2e-8])
@example([3.3961775292304957e38, 1.0])  # between the largest bfloat16 and infinity
def test_round_trip_within_the_bound(name: str, numbers: list[float]) -> None:
    assert_within_bound(CODECS[name], torch.tensor(numbers, dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-149, -135, -126, -100, -20, 0, 15, 16, 100, 127])
@pytest.mark.parametrize(
    "numel", [1, 2, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, HALF_BLOCK, 2 * HALF_BLOCK + 1030]
)
def test_all_sizes_and_magnitudes(name: str, exponent: int, numel: int) -> None:
    source = torch.Generator().manual_seed(numel)
    unit = torch.rand(numel, generator=source, dtype=torch.float64) * 2 - 1
    values = (unit * 2.0**exponent).float()
    values[0] = 2.0**exponent
    out = assert_within_bound(CODECS[name], values)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [1, 5, INT8_BLOCK, INT8_BLOCK + 3, HALF_BLOCK + 5])
@given(FLOATS)
@example(LARGEST)
@example(-LARGEST)
@example(2.0**-149)
@example(0.0)
@example(0.1)
def test_a_constant_is_exact(name: str, numel: int, value: float) -> None:
    values = torch.full((numel,), value, dtype=torch.float32)
    assert torch.equal(round_trip(CODECS[name], values), values)


@given(FLOATS, st.lists(st.booleans(), min_size=1, max_size=50))
def test_int8_keeps_the_extremes_exactly(value: float, signs: list[bool]) -> None:
    values = torch.tensor([value if sign else -value for sign in signs], dtype=torch.float32)
    assert torch.equal(round_trip(CODECS["int8"], values), values)


@pytest.mark.parametrize("name", LOSSY)
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
    threads = [threading.Thread(target=codec.encode, args=(values, room)) for room in rooms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(room, rooms[0]) for room in rooms)


@pytest.mark.parametrize("name", LOSSY)
def test_a_payload_at_an_odd_offset(name: str) -> None:
    codec = CODECS[name]
    values = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    size = codec.payload_bytes(3000, "float32")
    straight, room = torch.empty(size, dtype=torch.uint8), torch.empty(size + 3, dtype=torch.uint8)
    codec.encode(values, straight)
    codec.encode(values, room[3:])
    assert torch.equal(room[3:], straight)
    one, two = torch.empty(3000), torch.empty(3000)
    codec.decode(straight, one)
    codec.decode(room[3:], two)
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
    if name != "float32":
        payload = torch.zeros(size, dtype=torch.uint8)
        payload[:4] = torch.tensor(list(struct.pack("<f", float("nan"))), dtype=torch.uint8)
        with pytest.raises(RemoteProtocolError, match="scale is not finite"):
            codec.decode(payload, out)


@pytest.mark.parametrize("name", NAMES)
@given(st.binary(min_size=0, max_size=300), st.integers(0, 60))
def test_any_bytes_decode_or_are_refused(name: str, junk: bytes, numel: int) -> None:
    payload = torch.tensor(list(junk), dtype=torch.uint8)
    try:
        CODECS[name].decode(payload, torch.empty(numel))
    except RemoteProtocolError:
        return
    assert len(junk) == CODECS[name].payload_bytes(numel, "float32")


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
        (torch.zeros(10), room.float()),
    ):
        with pytest.raises(LocalProtocolError, match="expected"):
            codec.encode(values, out)
    if codec is not RAW:
        with pytest.raises(LocalProtocolError, match="expected float32"):
            codec.encode(torch.zeros(10, dtype=torch.float64), room)


def test_names_and_codes() -> None:
    assert list(CODECS) == NAMES
    assert [codec_by_code(codec.code) for codec in CODECS.values()] == list(CODECS.values())
    assert [codec.code for codec in CODECS.values()] == [0, 1, 2, 3]  # on the wire: never change
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, int8"):
        codec_for("zip", "float32")
    with pytest.raises(LocalProtocolError, match="complex64"):
        codec_for("int8", "complex64")
    with pytest.raises(RemoteProtocolError, match="code 99"):
        codec_by_code(99)


def test_payload_sizes_are_arithmetic() -> None:
    numel = 2**31 + 1
    assert RAW.payload_bytes(numel, "float64") == 8 * numel
    assert CODECS["float16"].payload_bytes(numel, "float32") == 2 * numel + 4 * (2**14 + 1)
    assert CODECS["int8"].payload_bytes(numel, "float32") == numel + 4 * (2**21 + 1)
    assert all(codec.payload_bytes(0, "float32") == 0 for codec in CODECS.values())
