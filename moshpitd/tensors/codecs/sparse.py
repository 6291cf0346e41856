"""A few values and nothing of the rest. One rule: what is kept is kept as float32, exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError, RemoteProtocolError
from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.draws import SEED_MASK, words
from moshpitd.tensors.codecs.payload import (
    FLOAT32_BYTES,
    LARGEST,
    SLICE,
    TINIEST,
    aligned,
    aligned_room,
    check_flat,
    check_float32,
    check_payload,
    checked_extremes,
    landed,
)
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import scratch, slice_bounds

DENSITY = 100  # one value in a hundred
_LARGEST_INDEX = 2**31 - 1
_SEED_BYTES = 8


class TopKCodec(Codec):
    """The k values of largest magnitude, k = ceil(d / one_in); of equal ones those that come first.

    Payload: k indices (int32, ascending), then k values. A contraction with delta = k / d, so it
    needs error feedback: averaged without, it can diverge (ALGORITHMS 2.15). Bound: absmax.
    Source: Stich et al., "Sparsified SGD with memory", 2018.
    """

    block = 0
    unbiased = False

    def __init__(self, *, name: str, code: int, one_in: int) -> None:
        self.name = name
        self.code = code
        self._one_in = one_in

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return self.kept(numel) * 2 * FLOAT32_BYTES

    def kept(self, numel: int) -> int:
        return -(-numel // self._one_in)

    def error_bound(self, absmax: float) -> float:
        return absmax

    def omega(self, numel: int) -> float:
        return 1 - self.kept(numel) / numel if numel else 0.0

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        if numel - 1 > _LARGEST_INDEX:
            raise LocalProtocolError(f"codec {self.name}: {numel} values, expected at most 2^31")
        checked_extremes(values, codec=self.name)
        kept = self.kept(numel)
        room = aligned_room(out, size)
        indices, carried = _halves(room, kept)
        chosen = _largest(values.detach(), kept)
        indices.copy_(chosen)
        torch.index_select(values.detach(), 0, chosen, out=carried)
        return landed(room, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel()
        check_payload(payload, self.payload_bytes(numel, dtype_name(out.dtype)), codec=self.name)
        indices, carried = _halves(aligned(payload), self.kept(numel))
        where = indices.long()
        if where.numel():
            ends = int(where[0].item()), int(where[-1].item())
            rising = bool((where[1:] > where[:-1]).all().item())
            if ends[0] < 0 or ends[1] >= numel or not rising:
                raise RemoteProtocolError(
                    f"payload of codec {self.name}: indices from {ends[0]} to {ends[1]}, expected "
                    f"rising ones of 0 to {numel - 1}"
                )
        out.zero_().index_copy_(0, where, carried)


class RandKCodec(Codec):
    """k values at places that the seed draws, k = ceil(d / one_in), times d / k.

    Every set of k places is equally likely, so it is unbiased with omega = d / k - 1 exactly.
    Payload: the seed (8 bytes) and the k values; the decoder draws the same places. Peers that
    share a seed share the places, and then the sum of their payloads is as sparse as each. A value
    whose d / k-fold float32 cannot hold decodes to the largest one (biased).
    Omega is far above 1: with error feedback it needs the factor 1 / (1 + omega), which is not
    part of this codec, hence no contraction. Bound: absmax max(1, d / k - 1).
    Source: Stich et al., "Sparsified SGD with memory", 2018; the factor makes it unbiased.
    """

    block = 0
    unbiased = True

    def __init__(self, *, name: str, code: int, one_in: int) -> None:
        self.name = name
        self.code = code
        self._one_in = one_in

    def payload_bytes(self, numel: int, dtype: str) -> int:
        check_float32(dtype, codec=self.name)
        return _SEED_BYTES + self.kept(numel) * FLOAT32_BYTES if numel else 0

    def kept(self, numel: int) -> int:
        return -(-numel // self._one_in)

    def error_bound(self, absmax: float) -> float:
        return absmax * max(1.0, self._one_in - 1) * (1 + 2.0**-22) + self._one_in * TINIEST

    def omega(self, numel: int) -> float:
        return (numel / self.kept(numel) - 1) * (1 + 2.0**-20) if numel else 0.0

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        numel = values.numel()
        size = self.payload_bytes(numel, dtype_name(values.dtype))
        check_flat(values, out, size, codec=self.name)
        if numel == 0:
            return 0
        checked_extremes(values, codec=self.name)
        room = aligned_room(out, size)
        seed &= SEED_MASK
        written = torch.tensor(list(seed.to_bytes(_SEED_BYTES, "little")), dtype=torch.uint8)
        room[:_SEED_BYTES].copy_(written)
        places = places_of(seed, numel, self.kept(numel), device=values.device)
        carried = room[_SEED_BYTES:].view(torch.float32)
        torch.index_select(values.detach(), 0, places, out=carried)
        return landed(room, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel()
        check_payload(payload, self.payload_bytes(numel, dtype_name(out.dtype)), codec=self.name)
        if numel == 0:
            return
        seed = int.from_bytes(bytes(payload[:_SEED_BYTES].tolist()), "little")
        kept = self.kept(numel)
        places = places_of(seed, numel, kept, device=out.device)
        carried = aligned(payload)[_SEED_BYTES:].view(torch.float32) * (numel / kept)
        out.zero_().index_copy_(0, places, carried.clamp_(-LARGEST, LARGEST))


def places_of(seed: int, numel: int, kept: int, *, device: torch.device) -> Tensor:
    """`kept` of 0 to numel - 1, ascending, int64; all such sets are equally likely over seeds.

    They are the places of the `kept` smallest of `numel` random words, which are all different.
    Only words below a bound that leaves a few too many are sorted: sorting all takes ten times as
    long. Should the bound leave too few, it is raised; the answer does not depend on it.
    """
    share = (kept + 8 * math.sqrt(kept) + 16) / numel
    while True:
        bound = min(2**31 - 1, int(share * 2**32) - 2**31)
        places, drawn = _words_up_to(bound, seed=seed, numel=numel, device=device)
        if places.numel() >= kept:
            order = torch.topk(drawn, kept, largest=False, sorted=False).indices
            return places[order].sort().values
        share *= 2


def _words_up_to(
    bound: int, *, seed: int, numel: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    found, drawn = [], []
    for start, stop in slice_bounds(numel, step=SLICE // 2):
        room, spare = scratch(2 * (stop - start), torch.int32, device).chunk(2)
        words(room, spare, seed=seed, start=start)
        at = torch.nonzero(room <= bound).view(-1)
        drawn.append(room[at])
        found.append(at.add_(start))
    return torch.cat(found), torch.cat(drawn)


def _largest(values: Tensor, kept: int) -> Tensor:
    """Places of the `kept` largest magnitudes, ascending. torch.topk alone does not say which of
    equal ones it takes."""
    if kept == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    sizes = values.abs()
    threshold = torch.topk(sizes, kept, sorted=False).values.min()
    above = torch.nonzero(sizes > threshold).view(-1)
    equal = torch.nonzero(sizes == threshold).view(-1)[: kept - above.numel()]
    return torch.cat((above, equal)).sort().values


def _halves(room: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    border = kept * FLOAT32_BYTES
    return room[:border].view(torch.int32), room[border:].view(torch.float32)
