"""D-PSGD: mix with the neighbours and take a local step (arXiv 1705.09056, algorithm 1).

One rule: the gradient is taken before mixing, so that it may overlap with the exchange.
x_i <- sum_j W_ij x_j - gamma g_i(x_i). With doubly stochastic W the mean over peers moves by
exactly -gamma mean(g), in both orders below; with gamma = 0 the distance to the mean shrinks by
rho = ||W - 11^T/n|| per step; W = 11^T/n from equal starts is mini-batch SGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from moshpitd.tensors.rules.common import weighted_sum


class Order(Enum):
    """Which comes first in a step."""

    MIX_THEN_STEP = "mix-then-step"
    ADAPT_THEN_COMBINE = "adapt-then-combine"


def mix(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_j W_ij x_j: one row of the mixing matrix, own value included.

    `values` any shape and floating dtype, `weights` floats that sum to one. Trap: the neighbours'
    values must be those of the same step; mixing own new with their old moves the mean.
    """
    return weighted_sum(values, weights)


def mix_then_step(mixed: Tensor, *, grad: Tensor, gamma: float) -> Tensor:
    """x' = (W x)_i - gamma g_i(x_i), the paper's order: `grad` was taken at the unmixed x_i."""
    return mixed - gamma * grad


def adapt(x: Tensor, *, grad: Tensor, gamma: float) -> Tensor:
    """The half step x_i - gamma g_i that adapt-then-combine sends; then x' = mix(halves)."""
    return x - gamma * grad


def carry_update(mixed: Tensor, *, before: Tensor, after: Tensor) -> Tensor:
    """mix-then-step for any local optimizer: (W x)_i + (after - before).

    The optimizer ran `before` -> `after` while the exchange of `before` was under way. Nothing of
    the local update is lost, and the mean moves by exactly mean(after - before).
    """
    return mixed + (after - before)


def swarm_step(
    states: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    rows: Sequence[dict[int, float]],
    gamma: float,
    order: Order = Order.MIX_THEN_STEP,
) -> list[Tensor]:
    """One step of all n peers at once: X' = W X - gamma G, or X' = W (X - gamma G).

    `rows` are the sparse rows of W (`core.mixing.Mixing.rows()`): target -> {source: weight}. The
    gradients are those at `states` in both orders.
    """
    sent = list(states)
    if order is Order.ADAPT_THEN_COMBINE:
        sent = [adapt(x, grad=g, gamma=gamma) for x, g in zip(states, grads, strict=True)]
    mixed = [mix([sent[j] for j in row], list(row.values())) for row in rows]
    if order is Order.ADAPT_THEN_COMBINE:
        return mixed
    return [mix_then_step(m, grad=g, gamma=gamma) for m, g in zip(mixed, grads, strict=True)]


def theory_gamma(*, smoothness: float, sigma: float, steps: int, peers: int) -> float:
    """1 / (2 L + sigma sqrt(K / n)): the step of the paper's corollary (from memory; check the
    paper before quoting it)."""
    return 1.0 / (2.0 * smoothness + sigma * math.sqrt(steps / peers))


def bytes_per_step(numel: int, *, neighbours: int) -> int:
    """Payload that one peer sends per step, uncompressed float32: degree * 4 d."""
    return neighbours * 4 * numel
