"""Stochastic rounding to powers of two. One rule: an exponent is all that a value keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.draws import DRAW_MASK, draws
from moshpitd.tensors.codecs.packing import pack_flags, packed_bytes, unpack_flags
from moshpitd.tensors.codecs.payload import (
    check_finite,
    check_flat,
    check_float32,
    check_payload,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import scratch, slice_bounds

_STEP = 64 * 1024  # half of the usual slice: three arrays of it are alive at once
_MANTISSA_BITS = 23
_LARGEST_EXPONENT = 254  # 255 means infinity
_MAGNITUDE = 0x7FFFFFFF


class NaturalCodec(Codec):
    """sign(x) times one of the two powers of two around |x|: an exponent byte and a sign bit, so 9
    bits per value and no scale. Payload: all exponents, then all signs.

    A random addend to the mantissa carries into the exponent with the probability that the mantissa
    says, so the mean over seeds is x exactly, and omega = 1/8. Two ends of float32 differ: denormal
    values round to 0 or 2^-126 (unbiased, but with a larger variance: the 2^-126 in the bound), and
    values from 2^127 on always round down, because 2^128 is infinity (biased).
    Source: Horvath et al., "Natural compression for distributed deep learning", 2019.
    """

    name = "natural"
    code = 9
    block = 1
    unbiased = True

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return numel + packed_bytes(numel, bits=1)

    def error_bound(self, absmax: float) -> float:
        return max(absmax, 2.0**-126)

    def omega(self, numel: int) -> float:
        return 1 / 8

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        exponents, signs = out[:numel], out[numel:size]
        for start, stop in slice_bounds(numel, step=_STEP):
            piece = values[start:stop].detach()
            low, high = (side.item() for side in torch.aminmax(piece))
            check_finite(low, high, codec=self.name)
            chances, spare = scratch(2 * (stop - start), torch.int32, piece.device).chunk(2)
            draws(chances, spare, seed=seed, start=start)
            exponents[start:stop].copy_(exponents_of(piece, chances, spare))
            pack_flags(piece < 0, signs[start // 8 : -(-stop // 8)])
        return size

    def decode(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel()
        check_payload(payload, self.payload_bytes(numel, dtype_name(out.dtype)), codec=self.name)
        exponents, signs = payload[:numel], payload[numel:]
        for start, stop in slice_bounds(numel, step=_STEP):
            bits, negative = scratch(2 * (stop - start), torch.int32, out.device).chunk(2)
            bits.copy_(exponents[start:stop]).bitwise_left_shift_(_MANTISSA_BITS)
            negative.copy_(unpack_flags(signs[start // 8 : -(-stop // 8)], stop - start))
            # Flags are 0 or one bit of a byte: any of them becomes the highest bit of 32.
            negative.ne_(0).bitwise_left_shift_(31)
            out[start:stop].copy_(bits.bitwise_or_(negative).view(torch.float32))


def exponents_of(values: Tensor, chances: Tensor, spare: Tensor) -> Tensor:
    """Biased exponents (int32, in `chances`) of the powers that float32 values are rounded to.

    chances: int32 t of [0, 2^23); up if and only if t / 2^23 < the fraction, which is the mantissa.
    """
    torch.bitwise_and(values.view(torch.int32), _MAGNITUDE, out=spare)
    carried = chances.bitwise_xor_(DRAW_MASK).add_(spare)
    return carried.bitwise_right_shift_(_MANTISSA_BITS).clamp_(max=_LARGEST_EXPONENT)
