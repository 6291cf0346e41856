"""What the codecs with compiled passes share. One rule: which of the two ways a part goes shows in
nothing but time; each codec has both, and here is where one of them is chosen."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.payload import (
    aligned_room,
    check_finite,
    check_flat,
    check_payload,
    checked_norm,
    landed,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.kernels import address, takes
from moshpitd.tensors.reduction import examine

Where = tuple[int, int, int, int, int]
"""Addresses of values, added, left, decoded (float32, 0 for none) and payload."""


class CompiledCodec(Codec):
    """A codec that encodes with or without feedback in one visit, compiled where it can be.

    `_compiled`: whether this form of the codec has compiled passes at all.
    """

    _compiled: bool

    @abstractmethod
    def _encode_compiled(self, where: Where, numel: int) -> bool:
        """What `_encode_torch` does; False where a value is not finite."""
        ...

    @abstractmethod
    def _decode_compiled(self, payload: int, out: int, numel: int) -> float:
        """The squared norm, not finite if a value is not; -1 where a scale is not finite."""
        ...

    @abstractmethod
    def _encode_torch(
        self,
        values: Tensor,
        whole: Tensor,
        *,
        added: Tensor | None,
        left: Tensor | None,
        decoded: Tensor | None,
    ) -> None:
        """Fill `whole`, the aligned payload; `left` and `decoded` as in `encode_fed`."""
        ...

    @abstractmethod
    def _decode_torch(self, payload: Tensor, out: Tensor) -> None: ...

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
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        whole = aligned_room(out, size)
        if self._compiled and takes(values, whole, added, left, decoded):
            where = (
                address(values.detach(), numel), address(added, numel), address(left, numel),
                address(decoded, numel), address(whole, size, torch.uint8),
            )  # fmt: skip
            finite = self._encode_compiled(where, numel)
            check_finite(0.0 if finite else math.nan, codec=self.name)
        else:
            self._encode_torch(values, whole, added=added, left=left, decoded=decoded)
        return landed(whole, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out)

    def decode_examined(self, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        squared = self._decode(payload, out)
        return (None, squared) if math.isfinite(squared) else examine(out)

    def _decode(self, payload: Tensor, out: Tensor) -> float:
        """The squared norm; NaN if nobody looked or a value is not finite."""
        numel = out.numel()
        size = self.payload_bytes(numel, dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        if not (self._compiled and takes(payload, out)):
            self._decode_torch(payload, out)
            return math.nan
        there = address(payload, payload.numel(), torch.uint8)
        squared = self._decode_compiled(there, address(out, numel), numel)
        return checked_norm(squared, codec=self.name)
