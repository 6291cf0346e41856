"""Stochastic rounding to fractions of a norm: QSGD and NUQSGD. One rule: the mean over seeds is x.

A value is divided by the norm of its bucket and rounded to one of the two neighbouring levels, up
with the probability that makes the expectation exact. Any scale of at least absmax would do; the
norm is what the papers bound, and a larger one only costs variance. So a norm that float32 cannot
hold is replaced by the largest float32, which keeps every decoded value finite.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.draws import DRAW_BITS, DRAW_MASK, draws
from moshpitd.tensors.codecs.packing import (
    nibble_room,
    pack_nibbles,
    packed_bytes,
    unpack_nibbles,
)
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    TINIEST,
    aligned,
    aligned_room,
    block_slices,
    blocks,
    check_finite,
    check_flat,
    check_float32,
    check_payload,
    checked_scales,
    landed,
    scales_and_codes,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import scratch

QSGD_BUCKET = 512  # the paper's choice
NUQSGD_BUCKET = 8192  # the authors' choice; with 64 as the lowest level's inverse omega is 0.63
# Half of the usual slice, since five arrays of it are alive at once; a quarter was 30 % slower.
_STEP = 64 * 1024
_EXPONENT_ONE = 127  # biased exponent of 1.0
_EXPONENT_SHIFT = 23


class Levels(Protocol):
    """A grid on [0, 1] that contains 0 and 1. Codes are signed indices, `bits` of them."""

    bits: int
    finest: float  # the widest gap between two levels: no ratio moves by more

    @abstractmethod
    def omega(self, numel: int) -> float: ...

    @abstractmethod
    def round(self, ratios: Tensor, chances: Tensor) -> Tensor:
        """ratios x / norm, |ratio| <= 1 -> signed indices as float32, in place.

        chances: int32 t of [0, 2^23), overwritten; up if and only if t / 2^23 < the fraction.
        """
        ...

    @abstractmethod
    def ratios(self, indices: Tensor) -> Tensor:
        """Signed indices as float32 -> signed levels, in place. An index of -2^(bits - 1) is no
        code of ours, but must give a finite number."""
        ...


class UniformLevels(Levels):
    """0, 1/s, ..., 1: QSGD. omega = min(d / s^2, sqrt(d) / s)."""

    def __init__(self, *, steps: int, bits: int) -> None:
        self.bits = bits
        self.finest = 1 / steps
        self._steps = steps

    def omega(self, numel: int) -> float:
        return min(numel / self._steps**2, math.sqrt(numel) / self._steps)

    def round(self, ratios: Tensor, chances: Tensor) -> Tensor:
        uniform = scratch(2 * ratios.numel(), ratios.dtype, ratios.device)[ratios.numel() :]
        uniform.copy_(chances).mul_(2.0**-DRAW_BITS)
        scaled = ratios.mul_(self._steps)
        # ceil(y - u) is floor(y) + (u < frac y), and one operation instead of three.
        torch.sub(scaled.abs(), uniform, out=uniform)
        return torch.copysign(uniform.ceil_(), scaled, out=scaled)

    def ratios(self, indices: Tensor) -> Tensor:
        return indices.mul_(1.0 / self._steps)  # steps * float32(1 / steps) is 1 for ours


class DyadicLevels(Levels):
    """0, 2^-s, ..., 1/2, 1: NUQSGD. omega <= 1/8 + min(d 4^-s / 4, sqrt(d) 2^-s)."""

    def __init__(self, *, halvings: int, bits: int) -> None:
        self.bits = bits
        self.finest = 0.5
        self._halvings = halvings

    def omega(self, numel: int) -> float:
        lowest = 2.0**-self._halvings
        return 1 / 8 + min(numel * lowest**2 / 4, math.sqrt(numel) * lowest)

    def round(self, ratios: Tensor, chances: Tensor) -> Tensor:
        # With z = |ratio| 2^s the levels are 0, 1, 2, 4, .... z + max(z, 1) is z + 1 below 1 and 2z
        # above, so that between two levels its mantissa is the fraction and its exponent the index
        # of the lower one; a random addend to the mantissa carries into the exponent with
        # exactly that probability.
        scaled = ratios.mul_(2.0**self._halvings)
        raised = scaled.abs()
        raised.add_(raised.clamp(min=1.0))
        carried = chances.bitwise_xor_(DRAW_MASK).add_(raised.view(torch.int32))
        carried.bitwise_right_shift_(_EXPONENT_SHIFT).sub_(_EXPONENT_ONE)
        return torch.copysign(raised.copy_(carried), scaled, out=scaled)

    def ratios(self, indices: Tensor) -> Tensor:
        # floor(2^(i - 1)) is 0, 1, 2, 4, ...; the power is written into the exponent.
        powers = indices.abs().to(torch.int32)
        powers.add_(_EXPONENT_ONE - 1).bitwise_left_shift_(_EXPONENT_SHIFT)
        levels = powers.view(torch.float32).floor_().mul_(2.0**-self._halvings)
        return torch.copysign(levels, indices, out=indices)


class NormCodec(Codec):
    """norm sign(x) level(|x| / norm), the norm (l2) kept per bucket; 8 or 4 bits per value.

    Unbiased: up with probability frac, to the last bits of float32. Bound: the
    widest gap between two levels, times the norm, which is at most sqrt(bucket) absmax.
    "qsgd": s = 127, bucket 512 (Alistarh et al., "QSGD", 2017). "nuqsgd": levels 0, 2^-6, ..., 1,
    bucket 8192 (Ramezani-Kebrya et al., "NUQSGD", 2021); the list of the paper, with 0. The
    authors' code has none, so that values near 0 flip between plus and minus the lowest level.
    """

    unbiased = True

    def __init__(self, *, name: str, code: int, levels: Levels, bucket: int) -> None:
        self.name = name
        self.code = code
        self.block = bucket
        self.levels = levels

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        codes = packed_bytes(numel, bits=self.levels.bits)
        return blocks(numel, self.block) * FLOAT32_BYTES + codes

    def error_bound(self, absmax: float) -> float:
        norm = min(absmax * math.sqrt(self.block), LARGEST)
        return norm * self.levels.finest * (1 + 2.0**-13) + 2 * TINIEST

    def omega(self, numel: int) -> float:
        return self.levels.omega(min(numel, self.block)) * (1 + 2.0**-12)

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        size = self.payload_bytes(values.numel(), dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        room = aligned_room(out, size)
        norms, codes = scales_and_codes(room, blocks(values.numel(), self.block), torch.int8)
        for start, stop, width in block_slices(values.numel(), block=self.block, step=_STEP):
            piece = values[start:stop].detach().view(-1, width)
            norm = norms[start // self.block : blocks(stop, self.block)]
            self._norms(piece, out=norm)
            chances, spare = scratch(2 * (stop - start), torch.int32, piece.device).chunk(2)
            draws(chances, spare, seed=seed, start=start)
            ratios = scratch(2 * (stop - start), piece.dtype, piece.device)[: stop - start]
            torch.div(piece, norm.view(-1, 1), out=ratios.view(-1, width))
            self._store(self.levels.round(ratios, chances), codes, start=start)
        return landed(room, out)

    def _norms(self, piece: Tensor, *, out: Tensor) -> None:
        """Of each row; in float64, where the squares of float32 neither overflow nor vanish."""
        norms = torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64)
        check_finite(float(norms.max().item()), codec=self.name)
        out.copy_(norms.clamp_(max=LARGEST))
        # Rounded down it may be below the largest magnitude of a bucket with one value.
        torch.maximum(out, piece.abs().amax(dim=1), out=out)
        out.masked_fill_(out == 0, 1.0)  # codes are 0 then; 0 / 0 would be NaN

    def _store(self, indices: Tensor, codes: Tensor, *, start: int) -> None:
        stop = start + indices.numel()
        if self.levels.bits == 8:
            codes[start:stop].copy_(indices)
            return
        nibbles = nibble_room(indices.numel(), indices.device)
        nibbles[: indices.numel()].copy_(indices.add_(8.0))
        pack_nibbles(nibbles, codes.view(torch.uint8)[start // 2 : blocks(stop, 2)])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = self.payload_bytes(out.numel(), dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        norms, codes = scales_and_codes(
            aligned(payload), blocks(out.numel(), self.block), torch.int8
        )
        checked_scales(norms, codec=self.name)
        for start, stop, width in block_slices(out.numel(), block=self.block, step=_STEP):
            piece = out[start:stop]
            if self.levels.bits == 8:
                piece.copy_(codes[start:stop])
            else:
                packed = codes.view(torch.uint8)[start // 2 : blocks(stop, 2)]
                piece.copy_(unpack_nibbles(packed, stop - start)).sub_(8.0)
            norm = norms[start // self.block : blocks(stop, self.block)]
            self.levels.ratios(piece).view(-1, width).mul_(norm.view(-1, 1))
