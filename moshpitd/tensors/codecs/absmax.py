"""int8 and int4 per block. One rule: the largest magnitude of a block comes back exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.packing import (
    nibble_room,
    pack_nibbles,
    packed_bytes,
    unpack_nibbles,
)
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    TINIEST,
    aligned,
    aligned_room,
    block_slices,
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
from moshpitd.tensors.slices import scratch

INT8_BLOCK = 1024  # 0.4 % overhead for scales; one outlier costs 1023 neighbours their precision
INT4_BLOCK = 64  # an outlier costs more where there are 15 codes; 12.5 % overhead for scales


class AbsmaxCodec(Codec):
    """Codes of 8 or 4 bits: round(top x / absmax), top = 127 or 7, with absmax kept per block.

    The scale that travels is absmax itself, not absmax / top: top * float32(1/top) is exactly 1,
    so the extremes (and constant blocks, of any sign) come back exactly, and a denormal absmax does
    not lose its last bits to the division. Bound: absmax / (2 top), plus float32 rounding.
    Rounding to nearest changes x by at most min(absmax / (2 top), |x|) and the extreme by nothing,
    so omega = r / (1 + r) < 1 with r = (block - 1) / (2 top)^2.
    Source: block-wise absmax quantization (Dettmers et al., "8-bit optimizers via block-wise
    quantization", 2022), with equidistant codes.
    """

    unbiased = False

    def __init__(self, *, name: str, code: int, bits: int, block: int) -> None:
        self.name = name
        self.code = code
        self.block = block
        self._bits = bits
        self._top = (1 << (bits - 1)) - 1

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return blocks(numel, self.block) * FLOAT32_BYTES + packed_bytes(numel, bits=self._bits)

    def error_bound(self, absmax: float) -> float:
        return absmax / (2 * self._top) * (1 + 2.0**-13) + 2 * TINIEST

    def omega(self, numel: int) -> float:
        ratio = max(0, min(numel, self.block) - 1) / (4 * self._top * self._top) * (1 + 2.0**-12)
        return ratio / (1 + ratio)

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
        if self._bits == 8 and takes(values, whole, added, left, decoded):
            self._encode_native(values.detach(), whole, added=added, left=left, decoded=decoded)
            return landed(whole, out)
        scales, codes = scales_and_codes(whole, blocks(values.numel(), self.block), torch.int8)
        for start, stop, width in block_slices(values.numel(), block=self.block):
            piece = values[start:stop].detach()
            if added is not None:
                room = scratch(stop - start, piece.dtype, piece.device, name="fed")
                piece = torch.add(piece, added[start:stop], out=room)
            piece = piece.view(-1, width)
            scaled = scratch(stop - start, piece.dtype, piece.device).view(-1, width)
            absmax = scales[start // self.block : blocks(stop, self.block)]
            torch.amax(torch.abs(piece, out=scaled), dim=1, out=absmax)
            # One number for all blocks: infinity and NaN survive a maximum.
            check_finite(float(absmax.max().item()), codec=self.name)
            absmax.masked_fill_(absmax == 0, 1.0)  # codes are 0 then; 0 / 0 would be NaN
            # Divide first: top / absmax overflows for a denormal absmax.
            torch.div(piece, absmax.view(-1, 1), out=scaled)
            self._store(scaled.mul_(self._top).round_().view(-1), codes, start=start)
            if left is not None:  # what `decode` does, with the codes as they are here already
                scaled.mul_(1.0 / self._top).mul_(absmax.view(-1, 1))
                torch.sub(piece, scaled, out=left[start:stop].view(-1, width))
        size = landed(whole, out)
        if decoded is not None:
            # From the bytes: codes that are 0 have a sign in `scaled`, and the others would not.
            self.decode(out[:size], decoded)
        return size

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
        room = scratch(self.block, torch.float32, values.device, name="fed")
        finite = native.absmax_encode(
            address(values, numel), address(added, numel), address(left, numel),
            address(decoded, numel), address(whole, whole.numel(), torch.uint8),
            address(room, self.block), numel, self.block,
        )  # fmt: skip
        check_finite(0.0 if finite else math.nan, codec=self.name)

    def _store(self, rounded: Tensor, codes: Tensor, *, start: int) -> None:
        stop = start + rounded.numel()
        if self._bits == 8:
            codes[start:stop].copy_(rounded)
            return
        nibbles = nibble_room(rounded.numel(), rounded.device)
        nibbles[: rounded.numel()].copy_(rounded.add_(8.0))
        rounded.sub_(8.0)
        pack_nibbles(nibbles, codes.view(torch.uint8)[start // 2 : blocks(stop, 2)])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        if self._bits == 8 and takes(payload, out):
            self._decode_native(payload, out)
            return
        count = blocks(out.numel(), self.block)
        scales, codes = scales_and_codes(aligned(payload), count, torch.int8)
        checked_scales(scales, codec=self.name)
        for start, stop, width in block_slices(out.numel(), block=self.block):
            piece = out[start:stop]
            if self._bits == 8:
                piece.copy_(codes[start:stop])
            else:
                packed = codes.view(torch.uint8)[start // 2 : blocks(stop, 2)]
                piece.copy_(unpack_nibbles(packed, stop - start)).sub_(8.0)
            absmax = scales[start // self.block : blocks(stop, self.block)]
            piece.mul_(1.0 / self._top).view(-1, width).mul_(absmax.view(-1, 1))

    def decode_examined(self, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        if not (self._bits == 8 and takes(payload, out)):
            return super().decode_examined(payload, out)
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        squared = self._decode_native(payload, out)
        return (None, squared) if math.isfinite(squared) else examine(out)

    def _decode_native(self, payload: Tensor, out: Tensor) -> float:
        """The squared norm, not finite if a value is not."""
        numel = out.numel()
        squared = native.absmax_decode(
            address(payload, payload.numel(), torch.uint8), address(out, numel), numel, self.block
        )
        return checked_norm(squared, codec=self.name)
