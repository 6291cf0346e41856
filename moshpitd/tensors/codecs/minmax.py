"""Codes of 8 bits between the lowest and the highest value. One rule: an offset costs no precision.

Values far from zero in a narrow range (a normalisation's scales, a learned offset) waste most codes
of a symmetric codec; these two spend all 256 between the extremes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    SLICE,
    aligned,
    aligned_room,
    block_slices,
    blocks,
    check_finite,
    check_flat,
    check_float32,
    check_payload,
    checked_extremes,
    checked_scales,
    landed,
    scales_and_codes,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import scratch, slice_bounds

MINMAX_BLOCK = 1024
BAGUA_HEADER_BYTES = 32
BAGUA_REFUSED_RATIO = 2.0**14  # |max| / range; x * scale stays below 2^22, where 1/4 is a step
_TOP = 255
_EPSILON = 1e-7  # BAGUA's, against a range of 0
# 255 steps overflow float32 above this; such blocks go through float64.
_LARGE_STEP = LARGEST / (2 * _TOP)


class MinmaxCodec(Codec):
    """round((x - low) / step), step = (high - low) / 255, low and step kept per block of 1,024.

    A constant block comes back exactly (its step is 0). Bound: (high - low) / 510, plus float32
    rounding of the largest magnitude. At least one extreme is half the range away from 0, so the
    block's squared norm is at least range^2 / 2, and omega = 2 block / 510^2.
    Source: MinMaxUInt8 (Gan et al., "BAGUA", 2021), without its epsilon and its product x * scale,
    which loses the fraction where |x| is large against the range (ALGORITHMS 0.7).
    """

    name = "minmax-uint8"
    code = 5
    block = MINMAX_BLOCK
    unbiased = False

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return blocks(numel, MINMAX_BLOCK) * 2 * FLOAT32_BYTES + numel

    def error_bound(self, absmax: float) -> float:
        # Both extremes at absmax is the worst range. A step below 2^-149 / 2 becomes 0: then the
        # error is the range itself, which is below 255 times that.
        return absmax / 255 * (1 + 2.0**-14) + absmax * 2.0**-21 + 2.0**-141

    def omega(self, numel: int) -> float:
        return 2 * min(numel, MINMAX_BLOCK) / 510**2 * (1 + 2.0**-10) + 2.0**-40

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        size = self.payload_bytes(values.numel(), dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        room = aligned_room(out, size)
        count = blocks(values.numel(), MINMAX_BLOCK)
        scales, codes = scales_and_codes(room, 2 * count, torch.uint8)
        for start, stop, width in block_slices(values.numel(), block=MINMAX_BLOCK):
            piece = values[start:stop].detach().view(-1, width)
            of = slice(start // MINMAX_BLOCK, blocks(stop, MINMAX_BLOCK))
            low, step = scales[:count][of], scales[count:][of]
            torch.amin(piece, dim=1, out=low)
            high = torch.amax(piece, dim=1)
            check_finite(float(low.min().item()), float(high.max().item()), codec=self.name)
            # In float64, because the difference of the extremes may overflow float32.
            step.copy_((high.double() - low.double()) / _TOP)
            if float(step.max().item()) > _LARGE_STEP:
                low64, step64 = low.double().view(-1, 1), step.double().view(-1, 1)
                rounded = ((piece.double() - low64) / step64.masked_fill(step64 == 0, 1.0)).round()
                codes[start:stop].copy_(rounded.clamp_(0, _TOP).view(-1))
                continue
            shifted = scratch(stop - start, piece.dtype, piece.device).view(-1, width)
            torch.sub(piece, low.view(-1, 1), out=shifted)
            shifted.div_(step.masked_fill(step == 0, 1.0).view(-1, 1)).round_()
            # A denormal step is rounded so coarsely that 255 of them may not reach the highest.
            codes[start:stop].copy_(shifted.clamp_(0, _TOP).view(-1))
        return landed(room, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        count = blocks(out.numel(), MINMAX_BLOCK)
        scales, codes = scales_and_codes(aligned(payload), 2 * count, torch.uint8)
        checked_scales(scales, codec=self.name)
        for start, stop, width in block_slices(out.numel(), block=MINMAX_BLOCK):
            of = slice(start // MINMAX_BLOCK, blocks(stop, MINMAX_BLOCK))
            low, step = scales[:count][of].view(-1, 1), scales[count:][of].view(-1, 1)
            piece = out[start:stop].view(-1, width)
            if float(step.max().item()) > _LARGE_STEP:
                wide = codes[start:stop].view(-1, width).double().mul_(step.double())
                piece.copy_(wide.add_(low.double()).clamp_(-LARGEST, LARGEST))
            else:
                piece.copy_(codes[start:stop].view(-1, width)).mul_(step).add_(low)


class BaguaMinmaxCodec(Codec):
    """BAGUA's MinMaxUInt8, bit for bit: one range per part, of which the header keeps min and max.

    scale = 255 / (max - min + 1e-7); code = min(rint(x scale), rint(max scale)) - (rint(max scale)
    - 255), modulo 256. In float32 the products lose their fraction where |max| is large against the
    range, and the code wraps around: an error of the whole range. So a part is refused where |max|
    exceeds 2^14 times the range, and wherever else a code would wrap: x scale of both extremes at a
    half (min = -1, max = 1) rounds to codes from -1 on. Otherwise the bound is (range + 1e-7) / 510
    plus float32 rounding. Below a range of 1e-7 the epsilon, not the range, sets the step.
    Source: BAGUA's MinMaxUInt8 (Gan et al. 2021), to measure against; golden minmax_uint8.
    """

    name = "bagua-minmax-uint8"
    code = 6
    block = 0
    unbiased = False

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return numel + BAGUA_HEADER_BYTES if numel else 0

    def error_bound(self, absmax: float) -> float:
        return (2 * absmax + _EPSILON) / 510 * (1 + 2.0**-20) + absmax * 2.0**-21

    def omega(self, numel: int) -> float:
        # 0 is on its grid, so no value moves by more than itself. Not less, because of the epsilon:
        # values below 2e-10 all decode to 0.
        return 1.0 + 2.0**-19

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        if numel == 0:
            return 0
        low, high = checked_extremes(values, codec=self.name)
        if abs(high) > BAGUA_REFUSED_RATIO * (high - low) or high - low > LARGEST:
            raise self._refusal(low, high)
        room = aligned_room(out, size)
        room[:BAGUA_HEADER_BYTES].zero_()
        header = room[: 2 * FLOAT32_BYTES].view(torch.float32)
        header[0], header[1] = low, high
        scale, upper = bagua_scale(header)
        lowest = float(bagua_codes(header[:1], scale, upper).item())
        if not 0 <= lowest <= _TOP:
            raise self._refusal(low, high)
        codes = room[BAGUA_HEADER_BYTES:]
        for start, stop in slice_bounds(numel, step=SLICE):
            codes[start:stop].copy_(bagua_codes(values[start:stop].detach(), scale, upper))
        return landed(room, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        if out.numel() == 0:
            return
        payload = aligned(payload)
        header = payload[: 2 * FLOAT32_BYTES].view(torch.float32)
        scale, upper = bagua_scale(checked_scales(header, codec=self.name))
        codes = payload[BAGUA_HEADER_BYTES:]
        for start, stop in slice_bounds(out.numel(), step=SLICE):
            out[start:stop].copy_(codes[start:stop]).add_(upper).sub_(_TOP).div_(scale)

    def _refusal(self, low: float, high: float) -> TrainerError:
        return TrainerError(
            f"codec {self.name}: values from {low:g} to {high:g} would wrap around, expected a "
            f"range of at least |max| / {BAGUA_REFUSED_RATIO:g} that float32 can hold and no code "
            "outside 0 to 255; minmax-uint8 has no such limit",
            reason="range_refused",
        )


def bagua_scale(header: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, upper) from float32 [min, max]; tensors of one element, so that all is float32."""
    low, high = header[:1], header[1:]
    span = high - low + _EPSILON
    # 255 / span would be 255 * (1 / span) in torch, rounded twice.
    scale = torch.full_like(span, _TOP) / span
    return scale, torch.round(high * scale)


def bagua_codes(values: Tensor, scale: Tensor, upper: Tensor) -> Tensor:
    """BAGUA's codes as float32, before they are taken modulo 256."""
    rounded = torch.mul(values, scale, out=scratch(values.numel(), values.dtype, values.device))
    return torch.minimum(rounded.round_(), upper, out=rounded).sub_(upper - _TOP)
