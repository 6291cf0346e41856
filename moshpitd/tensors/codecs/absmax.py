"""int8 and int4 per block. One rule: the largest magnitude of a block comes back exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.codecs.compiled import CompiledCodec, Where
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
    block_slices,
    blocks,
    check_finite,
    check_float32,
    checked_scales,
    scales_and_codes,
)
from moshpitd.tensors.kernels import CPU, address, native
from moshpitd.tensors.slices import scratch

INT8_BLOCK = 1024  # 0.4 % overhead for scales; one outlier costs 1023 neighbours their precision
INT4_BLOCK = 64  # an outlier costs more where there are 15 codes; 12.5 % overhead for scales


class AbsmaxCodec(CompiledCodec):
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
        self._compiled = bits == 8
        self._top = (1 << (bits - 1)) - 1

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return blocks(numel, self.block) * FLOAT32_BYTES + packed_bytes(numel, bits=self._bits)

    def error_bound(self, absmax: float) -> float:
        return absmax / (2 * self._top) * (1 + 2.0**-13) + 2 * TINIEST

    def omega(self, numel: int) -> float:
        ratio = max(0, min(numel, self.block) - 1) / (4 * self._top * self._top) * (1 + 2.0**-12)
        return ratio / (1 + ratio)

    def _encode_torch(
        self,
        values: Tensor,
        whole: Tensor,
        *,
        added: Tensor | None,
        left: Tensor | None,
        decoded: Tensor | None,
    ) -> None:
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
        if decoded is not None:
            # From the bytes: codes that are 0 have a sign in `scaled`, and the others would not.
            self.decode(whole, decoded)

    def _encode_compiled(self, where: Where, numel: int) -> bool:
        room = scratch(self.block, torch.float32, CPU, name="fed")
        return native.absmax_encode(*where, address(room, self.block), numel, self.block)

    def _store(self, rounded: Tensor, codes: Tensor, *, start: int) -> None:
        stop = start + rounded.numel()
        if self._bits == 8:
            codes[start:stop].copy_(rounded)
            return
        nibbles = nibble_room(rounded.numel(), rounded.device)
        nibbles[: rounded.numel()].copy_(rounded.add_(8.0))
        rounded.sub_(8.0)
        pack_nibbles(nibbles, codes.view(torch.uint8)[start // 2 : blocks(stop, 2)])

    def _decode_compiled(self, payload: int, out: int, numel: int, past: bool) -> float:
        return native.absmax_decode(payload, out, numel, self.block, past)

    def _bound_compiled(self, payload: int, numel: int) -> float:
        return native.absmax_bound(payload, numel, self.block)

    def _mix_compiled(
        self, payload: int, mean: int, numel: int, *, share: float, rest: float
    ) -> None:
        native.absmax_mix(payload, mean, numel, self.block, share, rest)

    def _decode_torch(self, payload: Tensor, out: Tensor) -> None:
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
