"""The compressed all-reduce of 1-bit Adam: signs both ways, errors fed back at both ends.

One rule: what a code left out is kept and added next time, on the worker for its message and on the
server for its result. So per element mean_i(c_i + e_i) + E = result + mean_i(e_i') + E' in every
step, and over all steps nothing is lost (1-bit Adam, arXiv 2102.02888, algorithm 1).

Phase 1, worker i: c = m_i + e_i; code q = scale(c) sign(c); e_i = c - q; chunk r of q to server r.
Phase 2, server r: u = mean_i q_i[r] + E_r; code scale(u) sign(u); E_r = u - code; code to all.

Traps. DeepSpeed's scale is RMS over the worker's whole padded buffer and per chunk at the server,
padding included; it drops all errors when a checkpoint is loaded. Here server errors are kept per
element range (`ServerErrors`), so that they survive a change of members and a checkpoint. A sign
has no zero: parameters whose gradient is always 0 need a mask (`momentum_mask`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules.common import mean, weighted_sum
from moshpitd.tensors.rules.signs import SCALE_BYTES, Scale, Signs, encode_signs

Span = tuple[int, int]
"""Elements [start, stop) of the flat vector."""


def padded_size(numel: int, peers: int) -> int:
    """numel rounded up to a multiple of n * lcm(n, 8), as DeepSpeed pads: n equal chunks that are
    whole bytes and divide evenly again."""
    step = peers * math.lcm(peers, 8)
    return -(-numel // step) * step


def pad(values: Tensor, size: int) -> Tensor:
    """1-D `values` followed by zeros up to `size` elements. The zeros are part of an RMS scale."""
    if size < values.numel():
        raise LocalProtocolError(f"padding {values.numel()} elements to {size}: expected more room")
    padded = values.new_zeros(size)
    padded[: values.numel()] = values
    return padded


def equal_spans(numel: int, peers: int) -> list[Span]:
    """n spans that differ by at most one element, longer ones first; equal if n divides numel."""
    size, longer = divmod(numel, peers)
    edges = [index * size + min(index, longer) for index in range(peers + 1)]
    return list(pairwise(edges))


def worker_encode(
    values: Tensor, error: Tensor, *, scale: Scale, mask: Tensor | None = None
) -> tuple[Signs, Tensor]:
    """Phase 1: (code of c = values + error, new error c - code). 1-D, one floating dtype.

    One scale for the whole vector; chunk r of the signs goes to server r with that scale. Where a
    mask is given, masked elements are sent as zero and their error is zero for ever.
    """
    carried = values + error
    if mask is not None:
        carried = carried * mask
    code = encode_signs(carried, scale, mask)
    return code, carried - code.values()


def server_encode(
    contributions: Sequence[Tensor],
    error: Tensor,
    *,
    scale: Scale,
    weights: Sequence[float] | None = None,
    mask: Tensor | None = None,
) -> tuple[Signs, Tensor]:
    """Phase 2: (code of u = mean of decoded chunks + error, new error u - code).

    `contributions` are those that arrived whole, in member order; the mean is over them (weighted
    by `weights` if given). `mask` is this chunk of the workers' mask.
    """
    if weights is None:
        average = mean(contributions)
    else:
        average = weighted_sum(contributions, weights, divisor=sum(weights))
    return worker_encode(average, error, scale=scale, mask=mask)


@dataclass(frozen=True, slots=True)
class Reduced:
    """What one compressed all-reduce leaves behind, for all n peers of one process.

    result: 1-D, equal bits on all peers. Codes are kept for byte counts and worked examples.
    """

    result: Tensor
    worker_errors: list[Tensor]
    server_errors: list[Tensor]
    worker_codes: list[Signs]
    server_codes: list[Signs]


def compressed_allreduce(
    values: Sequence[Tensor],
    worker_errors: Sequence[Tensor],
    server_errors: Sequence[Tensor],
    *,
    scale: Scale,
    mask: Tensor | None = None,
) -> Reduced:
    """Both phases of n peers at once. values, worker_errors: n times 1-D of one padded size;
    server_errors: n chunks in the order of `equal_spans`. mask: 1-D bool of the padded size."""
    spans = equal_spans(values[0].numel(), len(values))
    sent = [
        worker_encode(value, error, scale=scale, mask=mask)
        for value, error in zip(values, worker_errors, strict=True)
    ]
    decoded = [code.values() for code, _ in sent]
    served = [
        server_encode(
            [whole[start:stop] for whole in decoded],
            error,
            scale=scale,
            mask=None if mask is None else mask[start:stop],
        )
        for (start, stop), error in zip(spans, server_errors, strict=True)
    ]
    return Reduced(
        result=torch.cat([code.values() for code, _ in served]),
        worker_errors=[error for _, error in sent],
        server_errors=[error for _, error in served],
        worker_codes=[code for code, _ in sent],
        server_codes=[code for code, _ in served],
    )


@dataclass(slots=True)
class ServerErrors:
    """The residuals of the ranges that this peer serves, keyed by elements and not by rank.

    Invariant: spans do not overlap. Which peer serves a range changes with the membership; what the
    range still owes does not, so a residual moves with its elements: `take` the ranges that went to
    others, send them as plain values, `put` them there. A lost one is zeros, and is counted by the
    caller. `items()` is the whole state for a checkpoint.
    """

    _pieces: dict[int, Tensor] = field(default_factory=dict)  # start -> 1-D residual

    def items(self) -> list[tuple[int, Tensor]]:
        """(start, residual) in ascending order; feed to `put` to restore."""
        return [(start, self._pieces[start]) for start in sorted(self._pieces)]

    def put(self, start: int, residual: Tensor) -> None:
        """Add a 1-D residual for elements from `start` on; it must not overlap what is here.

        An overlap means that two peers thought they served one range: LocalProtocolError, because
        adding both would pay the debt twice.
        """
        if not residual.numel():
            return
        stop = start + residual.numel()
        for begin, piece in self._pieces.items():
            if begin < stop and start < begin + piece.numel():
                raise LocalProtocolError(
                    f"server error for [{start}, {stop}) overlaps [{begin}, "
                    f"{begin + piece.numel()}), expected disjoint ranges"
                )
        self._pieces[start] = residual.clone()

    def take(self, span: Span, like: Tensor) -> Tensor:
        """Remove and return the residual of `span`: 1-D, zeros where nothing is known, dtype and
        device of `like`."""
        first, last = span
        found = torch.zeros(last - first, dtype=like.dtype, device=like.device)
        for start, piece in self.items():
            stop = start + piece.numel()
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            found[low - first : high - first] = piece[low - start : high - start]
            del self._pieces[start]
            if start < low:
                self._pieces[start] = piece[: low - start]
            if high < stop:
                self._pieces[high] = piece[high - start :]
        return found

    def outside(self, keep: Sequence[Span]) -> list[tuple[int, Tensor]]:
        """Remove and return (start, residual) of every element that is not in `keep`: what has to
        be handed over when this peer's ranges shrink or it leaves (`keep=()`)."""
        leaving = []
        for start, piece in self.items():
            edge, stop = start, start + piece.numel()
            for low, high in [*sorted(keep), (stop, stop)]:
                if edge < min(low, stop):
                    cut = min(low, stop)
                    leaving.append((edge, self.take((edge, cut), piece)))
                edge = max(edge, high)
        return leaving


def fold_into_worker(error: Tensor, residual: Tensor, *, start: int, contributors: int) -> Tensor:
    """The other way to keep a server's debt: one worker adds n E to its own error.

    The server divides by the number of contributors n, so n E from one of them is E in the mean.
    Returns the new worker error; use it when the new server of the range is not known yet.
    """
    folded = error.clone()
    folded[start : start + residual.numel()] += contributors * residual
    return folded


def momentum_mask(variance: Tensor) -> Tensor:
    """1-D bool: False where the gradient was zero in all of the warm-up, so v = 0 exactly.

    There m / (sqrt(v) + eps) would turn one scale into a step of scale / eps. All peers hold the
    same v, so they compute the same mask. A row that first gets a gradient after the warm-up stays
    frozen with its variance; give a mask of your own if that is not what you want.
    """
    return variance != 0


def bytes_per_worker(numel: int, *, peers: int) -> tuple[int, int]:
    """(phase 1, phase 2) payload sent per worker and step: (n-1) (d / (8 n) + 4) each.

    `numel` is the padded size. Against float32 ring all-reduce, 2 (n-1)/n * 4 d, it is 32 x less.
    """
    phase = (peers - 1) * (-(-numel // (8 * peers)) + SCALE_BYTES)
    return phase, phase
