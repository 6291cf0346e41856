"""float16 and bfloat16. One rule: the type's range never costs a value, only its precision does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    SLICE,
    TINIEST,
    aligned,
    aligned_room,
    blocks,
    check_finite,
    check_flat,
    check_float32,
    check_payload,
    checked_norm,
    checked_scales,
    landed,
    scales_and_codes,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.kernels import address, native, takes
from moshpitd.tensors.reduction import examine
from moshpitd.tensors.slices import scratch, slice_bounds

HALF_BLOCK = SLICE


class HalfCodec(Codec):
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
        self._scaled = dtype == torch.float16

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

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return self._encode(values, out)

    def encode_fed(
        self,
        values: Tensor,
        out: Tensor,
        *,
        added: Tensor | None,
        left: Tensor,
        seed: int = 0,
        decoded: Tensor | None = None,
    ) -> int:
        return self._encode(values, out, added=added, left=left, decoded=decoded)

    def _encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        added: Tensor | None = None,
        left: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> int:
        size = self.payload_bytes(values.numel(), dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        whole = aligned_room(out, size)
        if self._scaled and takes(values, whole, added, left, decoded):
            self._encode_native(values.detach(), whole, added=added, left=left, decoded=decoded)
            return landed(whole, out)
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
        return landed(whole, out)

    def _encode_native(
        self,
        values: Tensor,
        whole: Tensor,
        *,
        added: Tensor | None,
        left: Tensor | None,
        decoded: Tensor | None,
    ) -> None:
        numel = values.numel()
        room = scratch(min(HALF_BLOCK, numel), torch.float32, values.device, name="fed")
        finite = native.half_encode(
            address(values, numel), address(added, numel), address(left, numel),
            address(decoded, numel), address(whole, whole.numel(), torch.uint8),
            address(room, 0), numel,
        )  # fmt: skip
        check_finite(0.0 if finite else math.nan, codec=self.name)

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

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        if self._scaled and takes(payload, out):
            self._decode_native(payload, out)
            return
        count = blocks(out.numel(), HALF_BLOCK)
        scales, codes = scales_and_codes(aligned(payload), count, self._dtype)
        factors = checked_scales(scales, codec=self.name).tolist()
        for factor, (start, stop) in zip(
            factors, slice_bounds(out.numel(), step=HALF_BLOCK), strict=True
        ):
            _decode_block(codes[start:stop], out[start:stop], scale=factor)

    def decode_examined(self, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        if not (self._scaled and takes(payload, out)):
            return super().decode_examined(payload, out)
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        squared = self._decode_native(payload, out)
        return (None, squared) if math.isfinite(squared) else examine(out)

    def _decode_native(self, payload: Tensor, out: Tensor) -> float:
        """The squared norm, not finite if a value is not."""
        numel = out.numel()
        squared = native.half_decode(
            address(payload, payload.numel(), torch.uint8), address(out, numel), numel
        )
        return checked_norm(squared, codec=self.name)


def _decode_block(codes: Tensor, out: Tensor, *, scale: float) -> Tensor:
    out.copy_(codes)
    return out if scale == 1.0 else out.mul_(scale)
