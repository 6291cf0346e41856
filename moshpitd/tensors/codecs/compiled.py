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
    def _decode_compiled(self, payload: int, out: int, numel: int, past: bool) -> float:
        """The squared norm, not finite if a value is not; -1 where a scale is not finite. `out` 0:
        nothing is kept; `past`: it goes past the caches."""
        ...

    @abstractmethod
    def _bound_compiled(self, payload: int, numel: int) -> float:
        """At least the squared norm; infinite where a value may be; -1 as above."""
        ...

    @abstractmethod
    def _mix_compiled(
        self, payload: int, mean: int, numel: int, *, share: float, rest: float
    ) -> None:
        """mean = rest * mean + share * decoded, with the bits of `reduction._mix_small`."""
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

    def _decode(self, payload: Tensor, out: Tensor, *, past: bool = False) -> float:
        """The squared norm; NaN if nobody looked or a value is not finite."""
        numel = out.numel()
        size = self.payload_bytes(numel, dtype_name(out.dtype))
        check_payload(payload, size, codec=self.name)
        if not (self._compiled and takes(payload, out)):
            self._decode_torch(payload, out)
            return math.nan
        there = address(payload, payload.numel(), torch.uint8)
        squared = self._decode_compiled(there, address(out, numel), numel, past)
        return checked_norm(squared, codec=self.name)

    def coded(self, payload: Tensor, numel: int, *, enough: float = 0.0) -> Coded | None:
        """A payload (1-D uint8, as for `decode`) of `numel` float32 that can be used without being
        decoded first, and what its values are like; None where nothing was compiled for it. A
        squared norm that is certainly not above `enough` need not be told exactly."""
        check_payload(payload, self.payload_bytes(numel, "float32"), codec=self.name)
        if not self.stays_coded(payload):
            return None
        there = address(payload, payload.numel(), torch.uint8)
        squared = checked_norm(self._bound_compiled(there, numel), codec=self.name)
        if not squared <= enough:
            squared = checked_norm(self._decode_compiled(there, 0, numel, False), codec=self.name)
        return Coded(self, payload, numel, squared)

    def stays_coded(self, payload: Tensor) -> bool:
        """Whether `coded` has something to give for a payload there."""
        return self._compiled and takes(payload)


class Coded:
    """The values of a payload that are never written down. Invariant: its scales are finite.

    `squared`: their squared norm as `decode_examined` tells it, not finite if a value is not; or a
    bound of it that was enough for who asked.
    """

    __slots__ = ("_codec", "_payload", "numel", "squared")

    def __init__(self, codec: CompiledCodec, payload: Tensor, numel: int, squared: float) -> None:
        self._codec, self._payload = codec, payload
        self.numel, self.squared = numel, squared

    def decode(self, out: Tensor, *, past: bool = False) -> None:
        """The values themselves (1-D float32); `past` the caches if nobody reads them soon."""
        self._codec._decode(self._payload, out, past=past)

    def mix(self, mean: Tensor, *, share: float, rest: float) -> None:
        """mean = rest * mean + share * values in one pass; share + rest = 1. For values that are
        finite and small (`reduction.is_small`), like those in the mean."""
        there = address(self._payload, self._payload.numel(), torch.uint8)
        self._codec._mix_compiled(
            there, address(mean, self.numel), self.numel, share=share, rest=rest
        )


def coded(codec: Codec, payload: Tensor, numel: int, *, enough: float = 0.0) -> Coded | None:
    """`CompiledCodec.coded` of a codec that may be any."""
    if not isinstance(codec, CompiledCodec):
        return None
    return codec.coded(payload, numel, enough=enough)


def stays_coded(codec: Codec, payload: Tensor) -> bool:
    """`CompiledCodec.stays_coded` of a codec that may be any."""
    return isinstance(codec, CompiledCodec) and codec.stays_coded(payload)
