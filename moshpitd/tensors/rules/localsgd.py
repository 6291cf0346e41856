"""Local SGD against mini-batch SGD on one budget, and averages by weight in a sweep.

One rule: R rounds of H gradients per worker either way (arXiv 2002.07839, 2006.04735). Local: H
local steps, then average. Mini-batch: one step with all n H gradients taken at one point. Bytes per
round are equal, and H = 1 makes them the same algorithm.

Trap: on heterogeneous data local SGD has another fixed point than the optimum unless all curvatures
are equal; the bias is O(gamma H). Expose H and report both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules.common import mean, weighted_sum

Gradient = Callable[[Tensor], Tensor]
"""x -> g(x), both of one shape and dtype."""


def local_steps(x: Tensor, gradients: Sequence[Gradient], *, gamma: float) -> Tensor:
    """x after one step per gradient oracle, in order: x <- x - gamma g_h(x)."""
    for gradient in gradients:
        x = x - gamma * gradient(x)
    return x


def local_round(x: Tensor, gradients: Sequence[Sequence[Gradient]], *, gamma: float) -> Tensor:
    """The mean of all workers after H local steps each from `x`. gradients[worker][step]."""
    return mean([local_steps(x, own, gamma=gamma) for own in gradients])


def minibatch_round(x: Tensor, gradients: Sequence[Sequence[Gradient]], *, gamma: float) -> Tensor:
    """x - gamma H * mean of the n H gradients, all taken at `x`. gradients[worker][step].

    The step is gamma * H (linear scaling), so that both rules travel equally far per round. All
    workers take the same number of steps; H = 1 gives exactly `local_round`.
    """
    steps = {len(own) for own in gradients}
    if len(steps) != 1:
        raise LocalProtocolError(f"mini-batch: workers took {sorted(steps)} steps, expected equal")
    taken = [gradient(x) for own in gradients for gradient in own]
    return x - gamma * steps.pop() * mean(taken)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum w_i x_i / sum w_i. Weights are samples since the last average, 0 for a newcomer."""
    total = sum(weights)
    if not total > 0 or min(weights) < 0:
        raise LocalProtocolError(f"average: weights {list(weights)}, expected >= 0, one above 0")
    return weighted_sum(values, weights, divisor=total)


def weight_after_round(weights: Sequence[float]) -> float:
    """What every member's weight becomes within a sweep of d rounds: the group's mean weight.

    sum_i w_i x_i is then constant in every round and a full grid is exact after d rounds. Trap:
    with own weights kept it is not (2 x 2 grid, x = 1, 2, 5, 9, w = 1, 3, 1, 1: 4.375 and 3.0625
    instead of 3.5). The next sweep starts with own weights again.
    """
    return sum(weights) / len(weights)


def quadratic_fixed_point(
    curvatures: Sequence[Tensor], optima: Sequence[Tensor], *, gamma: float, steps: int
) -> Tensor:
    """Where local gradient descent with H steps per round ends on f_i = sum a_i (x - b_i)^2 / 2.

    sum_i c_i b_i / sum_i c_i with c_i = 1 - (1 - gamma a_i)^H, elementwise: the optimum
    sum a_i b_i / sum a_i only for H = 1 or equal curvatures.
    """
    pull = [1.0 - (1.0 - gamma * a) ** steps for a in curvatures]
    weighed = torch.stack([c * b for c, b in zip(pull, optima, strict=True)]).sum(0)
    return weighed / torch.stack(pull).sum(0)
