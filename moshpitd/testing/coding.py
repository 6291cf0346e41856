"""The arithmetic of coded exchanges, for all peers of one process. One rule: every value that a
peer gets went through the codec that it would go through on a wire, with a seed of its own.

How a vector is cut into the pieces that share a scale is the swarm's choice (`Cut`), because the
published systems differ in it and the worked examples are theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from moshpitd.client.primitives import Coding, Mean, Tensors
from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.codecs import CODECS, codec_for
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.rules.common import weighted_sum
from moshpitd.tensors.rules.errorfeedback import feed_back
from moshpitd.tensors.rules.onebit import ServerErrors, Span, equal_spans, pad, padded_size

PART_ELEMENTS = (256 << 10) // 4  # a part of the daemon, of a small model: 256 KiB of float32


class Cut(Enum):
    """Which elements share a scale, on the way to the servers and back."""

    PARTS = "parts"  # the daemon's: pieces of 256 KiB both ways; a server's own travels nowhere
    TENSORS = "tensors"  # one tensor, one scale (EF-SignSGD)
    DEEPSPEED = "deepspeed"  # whole padded buffer on the way in, n chunks on the way back
    BAGUA = "bagua"  # n chunks both ways, padded to a multiple of n


@dataclass(frozen=True, slots=True)
class Draw:
    """Which message a random codec draws for."""

    seed: int
    channel: str
    round: int
    peer: int
    piece: int
    result: bool = False


Coder = Callable[[Tensor, Draw], Tensor]
"""1-D values -> what the other side decodes. For worked examples with stored draws, and for
float64, which no codec of the wire takes."""


class Drawing(Protocol):
    """A draw for one piece of a message."""

    def __call__(self, *, piece: int) -> Draw: ...


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What all channels of a swarm share."""

    seed: int = 0
    cut: Cut = Cut.PARTS
    coders: Mapping[str, Coder] = field(default_factory=dict)
    part: int = PART_ELEMENTS  # elements of a piece where the cut is `PARTS`

    def code(self, codec: str, values: Tensor, draw: Draw) -> Tensor:
        own = self.coders.get(codec)
        if own is not None:
            return own(values, draw)
        wire = codec_for(codec, dtype_name(values.dtype))
        room = torch.empty(
            wire.payload_bytes(values.numel(), dtype_name(values.dtype)), dtype=torch.uint8
        )
        wire.encode(values.contiguous(), room, seed=draw.seed)
        decoded = torch.empty_like(values)
        wire.decode(room, decoded)
        return decoded

    def draw(self, channel: str, number: int, *, peer: int, piece: int, result: bool) -> Draw:
        words = f"{self.seed}/{channel}/{number}/{peer}/{piece}/{int(result)}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")
        return Draw(seed, channel, number, peer, piece, result)

    def spans(self, sizes: Sequence[int], peers: int) -> tuple[int, list[Span], list[Span]]:
        """(padded size, pieces on the way in, pieces on the way back) of one flat vector."""
        numel = sum(sizes)
        match self.cut:
            case Cut.DEEPSPEED:
                size = padded_size(numel, peers)
                return size, [(0, size)], equal_spans(size, peers)
            case Cut.BAGUA:
                size = -(-numel // peers) * peers
                return size, equal_spans(size, peers), equal_spans(size, peers)
            case Cut.TENSORS:
                edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
                pieces = list(pairwise(edges))
                return numel, pieces, pieces
            case Cut.PARTS:
                starts = range(0, max(numel, 1), self.part)
                pieces = [(start, min(start + self.part, numel)) for start in starts]
                return numel, pieces, pieces

    def message(self, coding: Coding, tensors: Tensors, draw: Drawing) -> Tensors:
        """One peer's message to its neighbours as they decode it: pieces as on the way in, but a
        neighbour gets the whole vector, so no cut into n."""
        whole = Arithmetic(
            self.seed,
            Cut.DEEPSPEED if self.cut is Cut.BAGUA else self.cut,
            self.coders,
            self.part,
        )
        found: dict[str, Tensor] = {}
        for names in by_dtype(tensors):
            sizes = [tensors[name].numel() for name in names]
            numel = sum(sizes)
            pieces = [(0, numel)] if whole.cut is Cut.DEEPSPEED else whole.spans(sizes, 1)[1]
            flat = flattened(tensors, names)
            coded = [
                self.code(coding.codec, flat[start:stop], draw(piece=index))
                for index, (start, stop) in enumerate(pieces)
            ]
            found |= unflattened(torch.cat(coded), tensors, names)
        return {name: found.get(name, tensors[name].clone()) for name in tensors}


@dataclass(slots=True)
class Debts:
    """What one peer owes: as a sender, and as a server of some ranges, by dtype."""

    sender: dict[str, Tensor] = field(default_factory=dict)
    server: dict[str, ServerErrors] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sender": {key: value.clone() for key, value in self.sender.items()},
            "server": {
                key: [(start, piece.clone()) for start, piece in errors.items()]
                for key, errors in self.server.items()
            },
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Debts:
        debts = cls({key: value.clone() for key, value in state.get("sender", {}).items()})
        for key, pieces in state.get("server", {}).items():
            debts.server[key] = ServerErrors()
            for start, piece in pieces:
                debts.server[key].put(int(start), piece)
        return debts


@dataclass(frozen=True, slots=True)
class Brought:
    tensors: dict[str, Tensor]
    weight: int


class CodedAverage:
    """One group average of all peers. Invariant: what went in, plus what was owed, is what came
    out, plus what is owed now, in every round and for every codec with feedback."""

    def __init__(self, name: str, coding: Coding, arithmetic: Arithmetic) -> None:
        self.name, self.coding, self.arithmetic = name, coding, arithmetic
        self.debts: dict[int, Debts] = {}
        self.sent: dict[int, int] = {}  # payload bytes by peer
        self.lost_contributions: set[tuple[int, int]] = set()  # (round, peer)
        self.lost_results: dict[tuple[int, int], frozenset[str]] = {}  # names that do not arrive

    def work(self, number: int, brought: dict[int, Brought]) -> dict[int, Mean]:
        """For `rendezvous.Rounds`."""
        inside = {
            peer: one
            for peer, one in brought.items()
            if one.weight > 0 and (number, peer) not in self.lost_contributions
        }
        if not inside:
            return {
                peer: Mean(copies(one.tensors), copies(one.tensors))
                for peer, one in brought.items()
            }
        first = next(iter(brought.values())).tensors
        for peer, one in brought.items():
            check_alike(first, one.tensors, f"{self.name}, peer {peer}")
        mean: dict[str, Tensor] = {}
        own = {peer: copies(one.tensors) for peer, one in brought.items()}
        for names in by_dtype(first):
            sent, result = self._reduce(number, list(brought), inside, names)
            mean |= unflattened(result, first, names)
            for peer, values in sent.items():
                own[peer] |= unflattened(values, first, names)
        for name, tensor in first.items():
            if not tensor.is_floating_point():
                values = torch.stack([one.tensors[name] for one in inside.values()])
                mean[name] = values.amax(0)
        return {
            peer: self._mean(number, peer, one, mean=mean, own=own[peer], inside=inside)
            for peer, one in brought.items()
        }

    def _mean(
        self,
        number: int,
        peer: int,
        one: Brought,
        *,
        mean: dict[str, Tensor],
        own: dict[str, Tensor],
        inside: Mapping[int, Brought],
    ) -> Mean:
        missing = self.lost_results.get((number, peer), frozenset())
        source = {name: one.tensors if name in missing else mean for name in one.tensors}
        return Mean(
            tensors={name: source[name][name].clone() for name in one.tensors},
            own=own,
            contributors=tuple(f"peer{index}" for index in inside),
            missing=missing,
            excluded=(number, peer) in self.lost_contributions,
        )

    def _reduce(
        self, number: int, members: list[int], inside: Mapping[int, Brought], names: list[str]
    ) -> tuple[dict[int, Tensor], Tensor]:
        first = next(iter(inside.values())).tensors
        sizes, dtype = [first[name].numel() for name in names], dtype_name(first[names[0]].dtype)
        numel = sum(sizes)
        size, pieces, served = self.arithmetic.spans(sizes, len(members))
        servers = [members[index % len(members)] for index in range(len(served))]
        sent = {
            peer: self._send(
                number,
                peer,
                pad(flattened(one.tensors, names), size),
                pieces=pieces,
                raw=[self.arithmetic.cut is Cut.PARTS and server == peer for server in servers],
                dtype=dtype,
            )
            for peer, one in inside.items()
        }
        self._count(members, inside, served=list(zip(served, servers, strict=True)), dtype=dtype)
        self._move_debts(dict(zip(served, servers, strict=True)), dtype)
        weights = [float(one.weight) for one in inside.values()]
        if len(set(weights)) == 1:
            weights = [1.0] * len(weights)
        result = [
            self._serve(
                number,
                server,
                weighted_sum(
                    [values[start:stop] for values in sent.values()], weights, divisor=sum(weights)
                ),
                start=start,
                piece=index,
                dtype=dtype,
            )
            for index, ((start, stop), server) in enumerate(zip(served, servers, strict=True))
        ]
        return {peer: values[:numel] for peer, values in sent.items()}, torch.cat(result)[:numel]

    def _send(
        self,
        number: int,
        peer: int,
        values: Tensor,
        *,
        pieces: list[Span],
        raw: list[bool],
        dtype: str,
    ) -> Tensor:
        def compress(carried: Tensor) -> Tensor:
            coded = [
                carried[start:stop]
                if raw[min(index, len(raw) - 1)]
                else self.arithmetic.code(
                    self.coding.codec,
                    carried[start:stop],
                    self.arithmetic.draw(self.name, number, peer=peer, piece=index, result=False),
                )
                for index, (start, stop) in enumerate(pieces)
            ]
            return torch.cat(coded)

        if not self.coding.feedback:
            return compress(values)
        debts = self.debts.setdefault(peer, Debts())
        owed = debts.sender.get(dtype, values.new_zeros(0))
        # Padding differs with the number of members; what was owed for it is nobody's.
        owed = pad(owed[: values.numel()], values.numel())
        decoded, debts.sender[dtype] = feed_back(values, owed, compress)
        return decoded

    def _serve(
        self, number: int, peer: int, average: Tensor, *, start: int, piece: int, dtype: str
    ) -> Tensor:
        def compress(carried: Tensor) -> Tensor:
            draw = self.arithmetic.draw(self.name, number, peer=peer, piece=piece, result=True)
            return self.arithmetic.code(self.coding.back, carried, draw)

        if not self.coding.feedback:
            return compress(average)
        errors = self.debts.setdefault(peer, Debts()).server.setdefault(dtype, ServerErrors())
        owed = errors.take((start, start + average.numel()), average)
        decoded, owed = feed_back(average, owed, compress)
        errors.put(start, owed)
        return decoded

    def _move_debts(self, serves: Mapping[Span, int], dtype: str) -> None:
        """What a range owes goes to its server of now; what an absent peer held stays with it."""
        if not self.coding.feedback:
            return
        for peer in set(serves.values()):
            held = self.debts.setdefault(peer, Debts()).server.setdefault(dtype, ServerErrors())
            own = [span for span, server in serves.items() if server == peer]
            for start, piece in held.outside(own):
                for (low, high), server in serves.items():
                    cut, end = max(low, start), min(high, start + piece.numel())
                    if cut < end:
                        target = self.debts.setdefault(server, Debts())
                        errors = target.server.setdefault(dtype, ServerErrors())
                        moved = piece[cut - start : end - start]
                        errors.put(cut, errors.take((cut, end), moved) + moved)

    def _count(
        self,
        members: list[int],
        inside: Mapping[int, Brought],
        *,
        served: list[tuple[Span, int]],
        dtype: str,
    ) -> None:
        """Payload bytes sent: to each other server its piece, from each server its result."""
        there, back = (_payload(name, dtype) for name in (self.coding.codec, self.coding.back))
        for (start, stop), server in served:
            for peer in inside:
                if peer != server:
                    self.sent[peer] = self.sent.get(peer, 0) + there(stop - start)
            results = (len(members) - 1) * back(stop - start)
            self.sent[server] = self.sent.get(server, 0) + results


def payload_bytes(tensors: Tensors, coding: Coding) -> int:
    """Of one message that is coded as one piece per dtype."""
    return sum(
        _payload(coding.codec, dtype_name(tensors[names[0]].dtype))(
            sum(tensors[name].numel() for name in names)
        )
        for names in by_dtype(tensors)
    )


def _payload(codec: str, dtype: str) -> Callable[[int], int]:
    """Own coders are counted as the codec of that name; without one, as raw values."""
    wire = codec_for(codec if codec in CODECS else "float32", "float32")
    return lambda numel: wire.payload_bytes(numel, "float32" if wire.name != "float32" else dtype)


def by_dtype(tensors: Tensors) -> list[list[str]]:
    """Names of floating tensors, one list per dtype, in order."""
    found: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            found.setdefault(tensor.dtype, []).append(name)
    return list(found.values())


def flattened(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].detach().reshape(-1) for name in names])


def unflattened(flat: Tensor, like: Tensors, names: Sequence[str]) -> dict[str, Tensor]:
    pieces = flat.split([like[name].numel() for name in names])
    return {
        name: piece.reshape(like[name].shape).clone()
        for name, piece in zip(names, pieces, strict=True)
    }


def copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def check_alike(first: Tensors, other: Tensors, where: str) -> None:
    ours = [(name, tuple(t.shape), t.dtype) for name, t in first.items()]
    theirs = [(name, tuple(t.shape), t.dtype) for name, t in other.items()]
    for one, two in zip(ours, theirs, strict=False):
        if one != two:
            raise LocalProtocolError(f"{where}: {two}, expected {one}")
    if len(ours) != len(theirs):
        raise LocalProtocolError(f"{where}: {len(theirs)} tensors, expected {len(ours)}")
