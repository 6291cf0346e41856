"""One bit per value and one scale. One rule: the scale is the codec; the bits are the same."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.packing import pack_flags, packed_bytes, unpack_flags
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    SLICE,
    TINIEST,
    aligned,
    aligned_room,
    check_finite,
    check_flat,
    check_float32,
    check_payload,
    checked_scales,
    landed,
    scales_and_codes,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import scratch, slice_bounds


class SignCodec(Codec):
    """scale sign(x) with sign(0) = +1, of which the scale is one number for all values.

    "sign-l1": ||x||_1 / d. Its squared error is ||x||^2 - ||x||_1^2 / d, so it is a contraction
    with delta = ||x||_1^2 / (d ||x||^2), which is 1/d at worst (one value that is not 0).
    Source: Karimireddy et al., "Error feedback fixes SignSGD", 2019.
    "sign-rms": ||x||_2 / sqrt(d), as DeepSpeed's 1-bit Adam. Relative error
    2 - 2 ||x||_1 / (sqrt(d) ||x||_2), which exceeds 1 for sparse vectors (1.75 for one value of
    64): no contraction, and only there to be compatible.
    Both bounds: absmax, since no scale is above it.
    """

    block = 0
    unbiased = False

    def __init__(self, *, name: str, code: int, root: bool) -> None:
        self.name = name
        self.code = code
        self._root = root

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return FLOAT32_BYTES + packed_bytes(numel, bits=1) if numel else 0

    def error_bound(self, absmax: float) -> float:
        return absmax * (1 + 2.0**-22) + TINIEST

    def omega(self, numel: int) -> float:
        if self._root:
            return 2.0
        return 1 - 1 / numel + 2.0**-30 if numel else 0.0

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        if numel == 0:
            return 0
        room = aligned_room(out, size)
        scale, signs = scales_and_codes(room, 1, torch.uint8)
        scale[0] = self._scale(values.detach())
        for start, stop in slice_bounds(numel, step=SLICE):
            pack_flags(values[start:stop].detach() < 0, signs[start // 8 : -(-stop // 8)])
        return landed(room, out)

    def _scale(self, values: Tensor) -> float:
        """In float64, where neither the sum nor the squares of float32 overflow."""
        total = 0.0
        for start, stop in slice_bounds(values.numel(), step=SLICE):
            piece = values[start:stop]
            if self._root:
                norm = torch.linalg.vector_norm(piece, dtype=torch.float64)
                total += float(norm.item()) ** 2
            else:
                size = scratch(stop - start, piece.dtype, piece.device)
                total += float(torch.abs(piece, out=size).sum(dtype=torch.float64).item())
        check_finite(total, codec=self.name)
        mean = total / values.numel()
        return min(math.sqrt(mean) if self._root else mean, LARGEST)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel()
        check_payload(payload, self.payload_bytes(numel, dtype_name(out.dtype)), codec=self.name)
        if numel == 0:
            return
        scale, signs = scales_and_codes(aligned(payload), 1, torch.uint8)
        size = float(checked_scales(scale, codec=self.name).item())
        for start, stop in slice_bounds(numel, step=SLICE):
            flags = unpack_flags(signs[start // 8 : -(-stop // 8)], stop - start)
            out[start:stop].copy_(flags.clamp_(max=1)).mul_(-2.0).add_(1.0).mul_(size)
