"""Codecs: a part's values to payload bytes and back. One rule: encode is a pure function.

Same values, same bytes, on any thread: a repeated push must equal the first, and all members of a
group decode one payload to the same bits. A codec keeps no state; scratch belongs to the thread.

Payloads (little-endian): raw is the values. The lossy ones are all scales (float32, one per block),
then all codes. A block that holds one value everywhere comes back exactly under every codec: its
scale is the value itself and its codes are "1".

Lossy codecs exist for float32 only. float64 asked for more precision than they have, the half types
are as small already, and a rounded integer is a wrong integer; so `codec_for` gives those raw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.tensors.dtypes import DTYPES, dtype_name
from moshpitd.tensors.slices import SLICE_BYTES, scratch, slice_bounds

_FLOAT32_BYTES = 4
# One slice of float32: the half codecs' block, and a whole number of int8 blocks.
_SLICE = SLICE_BYTES // _FLOAT32_BYTES
HALF_BLOCK = _SLICE
INT8_BLOCK = 1024  # 0.4 % overhead for scales; one outlier costs 1023 neighbours their precision
_INT8_TOP = 127
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_TINIEST = (
    2.0**-149
)  # the step of float32 near zero; every bound needs it once the scale is that small


class Codec(Protocol):
    """Turns 1-D contiguous values into bytes and back.

    `name` is what people write in settings, `code` what travels in a frame.
    """

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int: ...

    def payload_bytes(self, numel: int, dtype: str) -> int:
        """Exact payload size; arithmetic only, so any size will do."""
        ...

    def error_bound(self, absmax: float) -> float:
        """Largest |decoded - value| in a block whose largest magnitude is `absmax`."""
        ...

    def encode(self, values: Tensor, out: Tensor) -> int:
        """Write the payload to the front of `out` (1-D uint8); return its length.

        Values must be finite: TrainerError(not_finite) where the codec notices (the lossy ones do).
        """
        ...

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill `out` from a payload of exactly `payload_bytes`, else RemoteProtocolError.

        A lying sender can make a decoded value infinite: check with `first_nonfinite` before use.
        """
        ...


def codec_for(name: str, dtype: str) -> Codec:
    """The codec called `name` for a part of `dtype`: raw for everything but float32."""
    chosen = CODECS.get(name)
    if chosen is None:
        raise ConfigError(f"unknown codec {name!r}", key="codec", expected=", ".join(CODECS))
    if dtype not in DTYPES:
        raise LocalProtocolError(f"codec {name}: dtype {dtype!r} has no region in any layout")
    return chosen if dtype == "float32" else RAW


def codec_by_code(code: int) -> Codec:
    """The codec a frame names; RemoteProtocolError for a code that nobody here knows."""
    chosen = _BY_CODE.get(code)
    if chosen is None:
        raise RemoteProtocolError(f"unknown codec code {code}, expected one of {sorted(_BY_CODE)}")
    return chosen


class RawCodec:
    """The values as they are, of any dtype; lossless. Its name says what it is for float32."""

    name = "float32"
    code = 0

    def payload_bytes(self, numel: int, dtype: str) -> int:
        return numel * DTYPES[dtype].itemsize

    def error_bound(self, absmax: float) -> float:
        return 0.0

    def encode(self, values: Tensor, out: Tensor) -> int:
        size = values.numel() * values.element_size()
        _check_flat(values, out, size, codec=self.name)
        out[:size].copy_(values.detach().view(torch.uint8))
        return size

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = out.numel() * out.element_size()
        _check_payload(payload, size, codec=self.name)
        if out.dtype == torch.bool and size and int(payload.max().item()) > 1:
            # A bool that holds 2 compares unequal to True in some kernels and equal in others.
            raise RemoteProtocolError("payload of a bool part has bytes other than 0 and 1")
        out.view(torch.uint8).copy_(payload)


class HalfCodec:
    """float16 or bfloat16 with one scale per block of 131,072 values (512 KiB of float32).

    float16: the scale is the power of two that brings the block's absmax into [2^14, 2^15), because
    unscaled float16 turns 70,000 into infinity and a gradient of 1e-8 into 0. Scaling by a power of
    two costs no precision. bfloat16 has float32's range and needs no scale.
    Bounds: |x| 2^-11 + absmax 2^-39 for float16, |x| 2^-8 + 2^-133 for bfloat16.
    """

    def __init__(self, *, name: str, code: int, dtype: torch.dtype) -> None:
        self.name = name
        self.code = code
        self._dtype = dtype
        self._scaled = dtype == torch.float16

    def payload_bytes(self, numel: int, dtype: str) -> int:
        _check_float32(dtype, codec=self.name)
        return _blocks(numel, HALF_BLOCK) * _FLOAT32_BYTES + numel * 2

    def error_bound(self, absmax: float) -> float:
        if self._scaled:
            return absmax * (2.0**-11 + 2.0**-39) + _TINIEST
        return absmax * 2.0**-8 + 2.0**-133

    def encode(self, values: Tensor, out: Tensor) -> int:
        size = self.payload_bytes(values.numel(), dtype_name(values.dtype))
        _check_flat(values, out, size, codec=self.name)
        room = _aligned_room(out, size)
        scales, codes = _scales_and_codes(room, _blocks(values.numel(), HALF_BLOCK), self._dtype)
        for block, (start, stop) in enumerate(slice_bounds(values.numel(), step=HALF_BLOCK)):
            piece = values[start:stop].detach()
            low, high = (side.item() for side in torch.aminmax(piece))
            _check_finite(low, high, codec=self.name)
            scales[block] = self._encode_block(piece, codes[start:stop], low=low, high=high)
        if room.data_ptr() != out.data_ptr():
            out[:size].copy_(room)
        return size

    def _encode_block(self, piece: Tensor, codes: Tensor, *, low: float, high: float) -> float:
        absmax = max(-low, high)
        if low == high and absmax > 0:
            codes.fill_(1.0)
            return low
        scale = self._scale(absmax)
        if scale == 1.0 and absmax < _LARGEST_FLOAT32 / 2:
            codes.copy_(piece)
            return scale
        scaled = torch.mul(
            piece, 1.0 / scale, out=scratch(piece.numel(), piece.dtype, piece.device)
        )
        if absmax >= _LARGEST_FLOAT32 / 2:
            # Rounding the largest float32 values up would make them infinite after decoding. The
            # largest code below that is as close as the bound promises.
            top = 2.0**15 - 2.0**4 if self._scaled else torch.finfo(self._dtype).max
            scaled.clamp_(-top, top)
        codes.copy_(scaled)
        return scale

    def _scale(self, absmax: float) -> float:
        if not self._scaled or absmax == 0:
            return 1.0
        exponent = math.frexp(absmax)[1]  # absmax in [2^(e-1), 2^e)
        return math.ldexp(1.0, max(exponent - 15, -126))  # so that 1 / scale is a float32 too

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        _check_payload(payload, size, codec=self.name)
        count = _blocks(out.numel(), HALF_BLOCK)
        scales, codes = _scales_and_codes(_aligned(payload), count, self._dtype)
        factors = _checked_scales(scales, codec=self.name).tolist()
        for factor, (start, stop) in zip(
            factors, slice_bounds(out.numel(), step=HALF_BLOCK), strict=True
        ):
            piece = out[start:stop]
            piece.copy_(codes[start:stop])
            if factor != 1.0:
                piece.mul_(factor)


class Int8Codec:
    """One byte per value: round(127 x / absmax), with absmax kept per block of 1,024 values.

    The scale that travels is absmax itself, not absmax / 127: 127 * float32(1/127) is exactly 1,
    so the extremes (and constant blocks, of any sign) come back exactly, and a denormal absmax does
    not lose its last bits to the division. Bound: absmax / 254 (plus float32 rounding).
    """

    name = "int8"
    code = 3

    def payload_bytes(self, numel: int, dtype: str) -> int:
        _check_float32(dtype, codec=self.name)
        return _blocks(numel, INT8_BLOCK) * _FLOAT32_BYTES + numel

    def error_bound(self, absmax: float) -> float:
        return absmax / (2 * _INT8_TOP) * (1 + 2.0**-13) + 2 * _TINIEST

    def encode(self, values: Tensor, out: Tensor) -> int:
        size = self.payload_bytes(values.numel(), dtype_name(values.dtype))
        _check_flat(values, out, size, codec=self.name)
        room = _aligned_room(out, size)
        scales, codes = _scales_and_codes(room, _blocks(values.numel(), INT8_BLOCK), torch.int8)
        for start, stop, width in _int8_slices(values.numel()):
            piece = values[start:stop].detach().view(-1, width)
            scaled = scratch(stop - start, piece.dtype, piece.device).view(-1, width)
            absmax = scales[start // INT8_BLOCK : _blocks(stop, INT8_BLOCK)]
            torch.amax(torch.abs(piece, out=scaled), dim=1, out=absmax)
            if not bool(torch.isfinite(absmax).all().item()):
                _check_finite(math.inf, math.inf, codec=self.name)
            absmax.masked_fill_(absmax == 0, 1.0)  # codes are 0 then; 0 / 0 would be NaN
            # Divide first: 127 / absmax overflows for a denormal absmax.
            torch.div(piece, absmax.view(-1, 1), out=scaled)
            codes[start:stop].copy_(scaled.mul_(_INT8_TOP).round_().view(-1))
        if room.data_ptr() != out.data_ptr():
            out[:size].copy_(room)
        return size

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        _check_payload(payload, size, codec=self.name)
        count = _blocks(out.numel(), INT8_BLOCK)
        scales, codes = _scales_and_codes(_aligned(payload), count, torch.int8)
        _checked_scales(scales, codec=self.name)
        for start, stop, width in _int8_slices(out.numel()):
            piece = out[start:stop].copy_(codes[start:stop]).mul_(1.0 / _INT8_TOP)
            absmax = scales[start // INT8_BLOCK : _blocks(stop, INT8_BLOCK)]
            piece.view(-1, width).mul_(absmax.view(-1, 1))


RAW = RawCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RAW,
        HalfCodec(name="float16", code=1, dtype=torch.float16),
        HalfCodec(name="bfloat16", code=2, dtype=torch.bfloat16),
        Int8Codec(),
    )
}
_BY_CODE = {codec.code: codec for codec in CODECS.values()}


def _blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def _int8_slices(numel: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, width): slices of whole blocks, then the tail that does not fill one."""
    whole = numel - numel % INT8_BLOCK
    for start, stop in slice_bounds(whole, step=_SLICE):
        yield start, stop, INT8_BLOCK
    if whole < numel:
        yield whole, numel, numel - whole


def _scales_and_codes(room: Tensor, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    border = blocks * _FLOAT32_BYTES
    return room[:border].view(torch.float32), room[border:].view(dtype)


def _aligned(payload: Tensor) -> Tensor:
    """The payload, copied only if torch would refuse a typed view at its offset in its storage."""
    return payload if payload.storage_offset() % _FLOAT32_BYTES == 0 else payload.clone()


def _aligned_room(out: Tensor, size: int) -> Tensor:
    """The front of `out`, or a temporary of that size where no typed view of `out` is possible."""
    return (
        out[:size] if out.storage_offset() % _FLOAT32_BYTES == 0 else torch.empty_like(out[:size])
    )


def _check_float32(dtype: str, *, codec: str) -> None:
    if dtype != "float32":
        raise LocalProtocolError(
            f"codec {codec}: got {dtype}, expected float32 (codec_for gives raw)"
        )


def _check_flat(values: Tensor, out: Tensor, size: int, *, codec: str) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise LocalProtocolError(
            f"codec {codec}: values of shape {list(values.shape)}, expected contiguous 1-D"
        )
    if out.dtype != torch.uint8 or out.dim() != 1 or out.numel() < size or not out.is_contiguous():
        raise LocalProtocolError(
            f"codec {codec}: room {dtype_name(out.dtype)} {list(out.shape)}, expected contiguous "
            f"1-D uint8 of at least {size} bytes"
        )


def _check_payload(payload: Tensor, size: int, *, codec: str) -> None:
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise RemoteProtocolError(
            f"payload of codec {codec}: {dtype_name(payload.dtype)} {list(payload.shape)}, "
            f"expected {size} bytes"
        )


def _checked_scales(scales: Tensor, *, codec: str) -> Tensor:
    if not bool(torch.isfinite(scales).all().item()):
        raise RemoteProtocolError(f"payload of codec {codec}: a scale is not finite")
    return scales


def _check_finite(low: float, high: float, *, codec: str) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise TrainerError(
            f"codec {codec}: the values hold NaN or infinity, expected finite values",
            reason="not_finite",
        )
