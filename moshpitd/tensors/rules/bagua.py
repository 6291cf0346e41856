"""BAGUA's cube: {centralized, decentralized} x {full, low precision} x {sync, async}.

One rule: compatible with the open implementation where it is sound, and its quirks are switches
with a name (arXiv 2107.01499; code read in 2.7 of the specification).

Traps. Open QAdam codes with 8 bits, has no error feedback, and at step == warmup_steps updates
neither moment (off by one). "Decentralized" averages over all peers by default, which is an
all-reduce of weights; shift_one (core/topologies.Pairs) is the decentralized one. MinMaxUInt8 wraps
around in float32 when |max| is much larger than the range: that is the codec's switch, not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moshpitd.errors import ConfigError
from moshpitd.tensors.rules.common import Compressor, mean
from moshpitd.tensors.rules.onebit import pad

# The header of a MinMaxUInt8 chunk is min and max, padded to 32 bytes for aligned CUDA access.
CHUNK_HEADER_BYTES = 32


# ---- Centralized low precision: ByteGrad, and the second half of QAdam.


def split_chunks(values: Tensor, peers: int) -> list[Tensor]:
    """1-D values, padded with zeros to a multiple of n, as n equal chunks; chunk r goes to peer r.

    The zeros take part in the last chunk's range, as in BAGUA.
    """
    size = -(-values.numel() // peers) * peers
    return list(pad(values, size).chunk(peers)) if size else [values] * peers


def reduce_chunk(decoded: Sequence[Tensor], compress: Compressor) -> Tensor:
    """Server r: the mean of the decoded chunks r of all peers, coded again; what all will hold."""
    return compress(mean(decoded))


def low_precision_allreduce(values: Sequence[Tensor], compress: Compressor) -> Tensor:
    """ByteGrad of n peers in one process: code chunks, exchange, mean, code again, gather.

    values: n times 1-D of one length and dtype. `compress` codes one chunk (MinMaxUInt8 in BAGUA),
    and also the own chunk, so that all peers get the same bits. No error feedback: the error is at
    most mean_i(range_i) / 510 + range_of_mean / 510 per element for MinMaxUInt8.
    """
    peers, numel = len(values), values[0].numel()
    sent = [[compress(chunk) for chunk in split_chunks(value, peers)] for value in values]
    served = [reduce_chunk([chunks[r] for chunks in sent], compress) for r in range(peers)]
    return torch.cat(served)[:numel]


def bytegrad_bytes(numel: int, *, peers: int) -> int:
    """Payload sent per worker: 2 (n-1) (d/n + 32)."""
    return 2 * (peers - 1) * (-(-numel // peers) + CHUNK_HEADER_BYTES)


# ---- QAdam.


@dataclass(frozen=True, slots=True)
class QAdam:
    """m, v and the number of steps taken. Equal on all peers."""

    m: Tensor
    v: Tensor
    step: int = 0


@dataclass(frozen=True, slots=True)
class QAdamOptions:
    """warmup_steps must be > 0: without warm-up v is 0 and m / sqrt(v) explodes.

    `off_by_one` True is the open code: step == warmup_steps updates nothing. False: that step is
    the last of the warm-up.
    """

    warmup_steps: int = 100
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    off_by_one: bool = True

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigError(
                f"QAdam with {self.warmup_steps} warm-up steps has no variance",
                key="warmup_steps",
                expected="at least 1",
            )


def qadam_is_compressed(state: QAdam, options: QAdamOptions) -> bool:
    """Whether the coming step exchanges momentum (low precision) instead of gradients (full)."""
    return state.step + 1 > options.warmup_steps


def qadam_local_momentum(state: QAdam, grad: Tensor, options: QAdamOptions) -> Tensor:
    """b1 m + (1 - b1) g_i, what a peer puts into the low precision all-reduce."""
    return options.betas[0] * state.m + (1 - options.betas[0]) * grad


def qadam_step(
    x: Tensor, state: QAdam, shared: Tensor, options: QAdamOptions
) -> tuple[Tensor, QAdam]:
    """(x, state) after step s = state.step + 1.

    `shared` is the mean gradient while `qadam_is_compressed` is False, then the low precision mean
    of the local momenta. Warm-up: m, v as Adam while s < warmup_steps (and at s == warmup_steps
    unless off_by_one). Afterwards m = shared, v frozen. Bias correction goes on with s throughout:
    x - lr / (1 - b1^s) * m / (sqrt(v) / sqrt(1 - b2^s) + eps). Weight decay is L2, added to the
    gradient by the caller (`gradient_with_decay`).
    """
    b1, b2 = options.betas
    step = state.step + 1
    if qadam_is_compressed(state, options):
        state = replace(state, m=shared)
    elif step < options.warmup_steps or not options.off_by_one:
        state = replace(
            state,
            m=b1 * state.m + (1 - b1) * shared,
            v=b2 * state.v + (1 - b2) * shared * shared,
        )
    denominator = state.v.sqrt() / (1 - b2**step) ** 0.5 + options.eps
    moved = x - options.lr / (1 - b1**step) * (state.m / denominator)
    return moved, replace(state, step=step)


def gradient_with_decay(grad: Tensor, x: Tensor, options: QAdamOptions) -> Tensor:
    """g + wd x, before anything is exchanged."""
    return grad + options.weight_decay * x if options.weight_decay else grad


# ---- Decentralized, low precision: a ring of differences (DCD-PSGD on a ring).


@dataclass(frozen=True, slots=True)
class RingReplicas:
    """w and copies of both neighbours' w. Invariant: left and right equal the neighbours' own
    `weights` bit for bit; all start from the same parameters. In a ring of two both are the one
    other peer, in a ring of one both are oneself."""

    weights: Tensor
    left: Tensor
    right: Tensor


def ring_start(parameters: Tensor) -> RingReplicas:
    """All peers must start from equal parameters."""
    return RingReplicas(parameters.clone(), parameters.clone(), parameters.clone())


def ring_difference(state: RingReplicas, x_new: Tensor) -> Tensor:
    """t = x_new + L/3 + R/3 - 5/3 w, what a peer codes; x_new is w after the local optimizer.

    w + t = (w + L + R)/3 + (x_new - w): with an exact codec this is D-PSGD on the ring.
    """
    return x_new + state.left / 3 + state.right / 3 - state.weights * (5 / 3)


def ring_apply(
    state: RingReplicas, *, own: Tensor, from_left: Tensor, from_right: Tensor
) -> RingReplicas:
    """w += own, L += from_left, R += from_right: decoded differences. Then x = w.

    Trap: a lost or doubled difference breaks the replicas for ever; count them (rules/choco.Inbox)
    and copy the neighbour's w in full when one is missing.
    """
    return RingReplicas(state.weights + own, state.left + from_left, state.right + from_right)


def low_precision_ring_bytes(numel: int) -> int:
    """Payload sent per worker and step: 2 (d + 32)."""
    return 2 * (numel + CHUNK_HEADER_BYTES)


# ---- Asynchronous model average.


def async_delta(*, snapshot: Tensor, total: Tensor, contributors: int) -> Tensor:
    """S / n - s: what a peer adds to its weights, under the weight lock, when the sum S of all
    snapshots is there.

    Local updates u that happened meanwhile survive: x = mean + u. With none it is the exact
    average. The result belongs to the snapshot that went into the sum, not to a later one.
    """
    return total / contributors - snapshot


def goes_on(votes: Sequence[int]) -> bool:
    """MIN all-reduce of one byte per peer before each round (1: go on, 0: abort).

    All peers see the same minimum, so all leave in the same round and nobody waits for a partner
    that has gone. No votes: nobody is left to go on.
    """
    return min(votes, default=0) > 0


# ---- The cube by name.


@dataclass(frozen=True, slots=True)
class Cell:
    """A corner of the cube and the primitive of the daemon that it needs."""

    centralized: bool
    full_precision: bool
    synchronous: bool
    primitive: str


CELLS: dict[str, Cell] = {
    "gradient-allreduce": Cell(True, True, True, "group average of gradients"),
    "bytegrad": Cell(True, False, True, "group average of gradients, 8-bit codec"),
    "async-model-average": Cell(True, True, False, "group average of snapshots, delta applied"),
    "async-low-precision-average": Cell(
        True, False, False, "group average of snapshots, 8-bit codec with error feedback"
    ),
    "decentralized": Cell(False, True, True, "neighbour exchange, pairs"),
    "low-precision-decentralized": Cell(False, False, True, "neighbour exchange of differences"),
    "async-decentralized": Cell(False, True, False, "neighbour exchange, pairwise deltas"),
    "async-low-precision-decentralized": Cell(
        False, False, False, "neighbour exchange of differences, deltas applied"
    ),
}


def cell_rule(name: str) -> Cell:
    """The cell called `name`; ConfigError lists the eight names."""
    if name not in CELLS:
        raise ConfigError(f"unknown cell {name!r}", key="algorithm", expected=", ".join(CELLS))
    return CELLS[name]
