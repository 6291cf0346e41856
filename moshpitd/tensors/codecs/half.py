"""float16 and bfloat16. One rule: the type's range never costs a value, only its precision does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.tensors.codecs.compiled import CompiledCodec, Where
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    SLICE,
    TINIEST,
    aligned,
    blocks,
    check_finite,
    check_float32,
    checked_scales,
    scales_and_codes,
)
from moshpitd.tensors.kernels import CPU, address, native
from moshpitd.tensors.slices import scratch, slice_bounds

HALF_BLOCK = SLICE


class HalfCodec(CompiledCodec):
    """float16 or bfloat16 with one scale per block of 131,072 values (512 KiB of float32).

    float16: the scale is the power of two that brings the block's absmax into [2^14, 2^15), because
    unscaled float16 turns 70,000 into infinity and a gradient of 1e-8 into 0. Scaling by a power of
    two costs no precision. bfloat16 has float32's range and needs no scale.
    Bounds: |x| 2^-11 + absmax 2^-39 for float16, |x| 2^-8 + 2^-133 for bfloat16.
    Sources: IEEE 754-2008 binary16; bfloat16 as torch has it; the scale is loss scaling
    (Micikevicius et al., "Mixed precision training", 2018) per block.
    """

    block = HALF_BLOCK
    unbiased = False

    def __init__(self, *, name: str, code: int, dtype: torch.dtype) -> None:
        self.name = name
        self.code = code
        self._dtype = dtype
        self._scaled = self._compiled = dtype == torch.float16

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return blocks(numel, HALF_BLOCK) * FLOAT32_BYTES + numel * 2

    def error_bound(self, absmax: float) -> float:
        if self._scaled:
            return absmax * (2.0**-11 + 2.0**-39) + TINIEST
        return absmax * 2.0**-8 + 2.0**-133

    def omega(self, numel: int) -> float:
        # For float16 the second term of the bound, over a whole block: sqrt(2^17) 2^-39.
        return (2.0**-11 + 2.0**-30) ** 2 if self._scaled else 2.0**-16

    def _encode_torch(
        self,
        values: Tensor,
        whole: Tensor,
        *,
        added: Tensor | None,
        left: Tensor | None,
        decoded: Tensor | None,
    ) -> None:
        scales, codes = scales_and_codes(whole, blocks(values.numel(), HALF_BLOCK), self._dtype)
        for block, (start, stop) in enumerate(slice_bounds(values.numel(), step=HALF_BLOCK)):
            piece = values[start:stop].detach()
            if added is not None:
                room = scratch(stop - start, piece.dtype, piece.device, name="fed")
                piece = torch.add(piece, added[start:stop], out=room)
            # Two reductions: torch.aminmax takes half as long again as both (19 against 12 us).
            low, high = torch.amin(piece).item(), torch.amax(piece).item()
            check_finite(low, high, codec=self.name)
            scale = self._encode_block(piece, codes[start:stop], low=low, high=high)
            scales[block] = scale
            if left is None:
                continue
            if decoded is None:
                rest = left[start:stop].copy_(codes[start:stop])
                torch.sub(piece, rest, alpha=scale, out=rest)
            else:
                told = _decode_block(codes[start:stop], decoded[start:stop], scale=scale)
                torch.sub(piece, told, out=left[start:stop])

    def _encode_compiled(self, where: Where, numel: int) -> bool:
        room = scratch(min(HALF_BLOCK, numel), torch.float32, CPU, name="fed")
        return native.half_encode(*where, address(room, 0), numel)

    def _encode_block(self, piece: Tensor, codes: Tensor, *, low: float, high: float) -> float:
        absmax = max(-low, high)
        if low == high and absmax > 0:
            codes.fill_(1.0)
            return low
        scale = self._scale(absmax)
        if scale == 1.0 and absmax < LARGEST / 2:
            codes.copy_(piece)
            return scale
        scaled = torch.mul(
            piece, 1.0 / scale, out=scratch(piece.numel(), piece.dtype, piece.device)
        )
        if absmax >= LARGEST / 2:
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

    def _decode_compiled(self, payload: int, out: int, numel: int, past: bool) -> float:
        return native.half_decode(payload, out, numel, past)

    def _bound_compiled(self, payload: int, numel: int) -> float:
        return native.half_bound(payload, numel)

    def _mix_compiled(
        self, payload: int, mean: int, numel: int, *, share: float, rest: float
    ) -> None:
        native.half_mix(payload, mean, numel, share, rest)

    def _decode_torch(self, payload: Tensor, out: Tensor) -> None:
        count = blocks(out.numel(), HALF_BLOCK)
        scales, codes = scales_and_codes(aligned(payload), count, self._dtype)
        factors = checked_scales(scales, codec=self.name).tolist()
        for factor, (start, stop) in zip(
            factors, slice_bounds(out.numel(), step=HALF_BLOCK), strict=True
        ):
            _decode_block(codes[start:stop], out[start:stop], scale=factor)


def _decode_block(codes: Tensor, out: Tensor, *, scale: float) -> Tensor:
    out.copy_(codes)
    return out if scale == 1.0 else out.mul_(scale)
