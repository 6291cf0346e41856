"""CHOCO-Gossip, CHOCO-SGD and DCD-PSGD: decentralized SGD that sends compressed differences.

One rule: every peer's public copy x^ is changed only by messages that all its neighbours get, so
that all agree on it. CHOCO (arXiv 1902.00340): mean(x) moves only by -eta mean(g) for ANY
compressor, biased or not. DCD (arXiv 1803.06443): the peer's own x is the public copy, so the codec
must be unbiased and precise (its authors had to use lr 1e-15 for rand-1 %).

Trap: a lost message breaks s = W x^ for ever, silently. Messages carry a sequence number per edge
(`Inbox`), and a gap is healed by sending x^ in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from moshpitd.tensors.rules.common import Compressor, weighted_sum


@dataclass(frozen=True, slots=True)
class Choco:
    """x is private; `public` is x^, what neighbours know; `around` is s = sum_j w_ij x^_j, own
    included. No copies per neighbour, hence for a W that does not change."""

    x: Tensor
    public: Tensor
    around: Tensor


def choco_start(parameters: Tensor) -> Choco:
    """x^ = 0 and s = 0 (the deep learning code): nobody has to know anybody's start."""
    zeros = torch.zeros_like(parameters)
    return Choco(parameters.clone(), zeros, zeros.clone())


def choco_start_equal(parameters: Tensor) -> Choco:
    """x^ = x0 and s = x0 (the convex code): only if all peers start from equal parameters, with
    rows of W that sum to one."""
    return Choco(parameters.clone(), parameters.clone(), parameters.clone())


def choco_message(
    state: Choco, *, grad: Tensor, eta: float, compress: Compressor
) -> tuple[Tensor, Choco]:
    """(q, state with x = x - eta g): q = C(x_half - x^) goes to all neighbours and to oneself.

    eta = 0 is CHOCO-Gossip. The public copy does not move before `choco_mix`.
    """
    half = state.x - eta * grad
    return compress(half - state.public), replace(state, x=half)


def choco_mix(
    state: Choco,
    *,
    own: Tensor,
    own_weight: float,
    others: Sequence[tuple[float, Tensor]],
    gamma: float,
) -> Choco:
    """x^ += q_i; s += w_ii q_i + sum_j w_ij q_j; x += gamma (s - x^). `others`: (w_ij, q_j)."""
    public = state.public + own
    weights = [1.0, own_weight, *(weight for weight, _ in others)]
    around = weighted_sum([state.around, own, *(q for _, q in others)], weights)
    return Choco(state.x + gamma * (around - public), public, around)


def choco_resync(
    state: Choco, *, own_weight: float, others: Sequence[tuple[float, Tensor]]
) -> Choco:
    """s rebuilt from x^ in full: after a gap, or when W changes. `others`: (w_ij, x^_j).

    x does not move, so neither does the mean.
    """
    weights = [own_weight, *(weight for weight, _ in others)]
    values = [state.public, *(public for _, public in others)]
    return replace(state, around=weighted_sum(values, weights))


def choco_gamma(*, gap: float, delta: float, beta: float) -> float:
    """gap^2 delta / (16 gap + gap^2 + 4 beta^2 + 2 gap beta^2 - 8 gap delta): the theory's step.

    gap = 1 - |lambda_2|(W), beta = ||I - W||_2, delta of the compressor (theorem 2 of the paper,
    from memory). Tuned values are far larger: ring of 9, d = 2000: 0.04 for top-1 %, 0.34 for 4-bit
    QSGD.
    """
    below = 16 * gap + gap**2 + 4 * beta**2 + 2 * gap * beta**2 - 8 * gap * delta
    return gap**2 * delta / below


# ---- DCD-PSGD: difference compression, neighbours hold replicas.


def dcd_message(
    x: Tensor,
    *,
    grad: Tensor,
    eta: float,
    own_weight: float,
    others: Sequence[tuple[float, Tensor]],
    compress: Compressor,
) -> Tensor:
    """q = C(sum_j w_ij x_j - eta g_i - x_i), with the replicas x_j that this peer holds.

    Then x_i += q here and every neighbour adds q to its replica of x_i. Exact C: D-PSGD.
    """
    weights = [own_weight, *(weight for weight, _ in others)]
    mixed = weighted_sum([x, *(replica for _, replica in others)], weights)
    return compress(mixed - eta * grad - x)


# ---- Sequence numbers.


class Arrival(Enum):
    """What to do with a difference that arrived over one edge."""

    APPLY = "apply"
    REPEATED = "repeated"  # drop it: it was applied
    LOST = "lost"  # one or more before it never came: ask for the copy in full


@dataclass(frozen=True, slots=True)
class Inbox:
    """Receiving end of one edge. Invariant: all differences below `expected` are in the copy.

    After a gap nothing is applied until a resync, because s is wrong from the gap on.
    """

    expected: int = 0
    broken: bool = False


def arrive(inbox: Inbox, sequence: int) -> tuple[Arrival, Inbox]:
    """Sequence numbers count a sender's differences from 0, the same number to all neighbours."""
    if inbox.broken or sequence > inbox.expected:
        return Arrival.LOST, replace(inbox, broken=True)
    if sequence < inbox.expected:
        return Arrival.REPEATED, inbox
    return Arrival.APPLY, Inbox(sequence + 1)


def resynced(sequence: int) -> Inbox:
    """After x^ in full, which contains all differences below `sequence`."""
    return Inbox(sequence)
