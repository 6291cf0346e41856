"""1-bit LAMB: LAMB's per-tensor trust ratio with 1-bit Adam's compressed momentum.

One rule: after the freeze v stays, and what would have changed in LAMB's coefficient is tracked by
a factor of a second, fresh variance that is rebuilt from the compressed momentum, so all peers
compute the same factor (arXiv 2104.06069, algorithm 1). One `Lamb` per tensor.

Trap: the momenta of different tensors differ by orders of magnitude, and one scale of signs covers
the whole buffer; before the all-reduce each is multiplied by `united_scaling`, after it divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moshpitd.tensors.rules.onebit_adam import Betas, Moments, warmup


@dataclass(frozen=True, slots=True)
class LambBounds:
    """Limits of the coefficient and of its factor; defaults of the published implementation."""

    least: float = 0.01
    most: float = 10.0
    beta: float = 0.9  # of the running average of coefficients during warm-up
    factor_least: float = 0.5
    factor_most: float = 4.0
    factor_change: float = 0.1  # largest relative change of the factor from step to step


@dataclass(frozen=True, slots=True)
class Lamb:
    """One tensor's state, equal on all peers. fresh: the variance that goes on after the freeze."""

    moments: Moments
    fresh: Tensor
    coefficient: float = 0.0
    factor: float = 1.0


def lamb_warmup(
    x: Tensor,
    state: Lamb,
    grad: Tensor,
    *,
    betas: Betas,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bounds: LambBounds | None = None,
) -> tuple[Tensor, Lamb]:
    """A LAMB step (arXiv 1904.00962) with the mean gradient: x - lr c (m / (sqrt(v) + eps) + wd x),
    c = ||x|| / ||update|| within bounds, 1 where either norm is 0.

    Keeps a running average of c (of those that are not exactly 1) for after the freeze.
    """
    bounds = bounds or LambBounds()
    moments = warmup(state.moments, grad, betas=betas)
    update = moments.m / (moments.v.sqrt() + eps) + weight_decay * x
    long, short = float(torch.linalg.vector_norm(x)), float(torch.linalg.vector_norm(update))
    ratio = min(max(long / short, bounds.least), bounds.most) if long and short else 1.0
    average = state.coefficient
    if ratio != 1.0:
        average = bounds.beta * average + (1 - bounds.beta) * ratio
    return x - lr * ratio * update, replace(
        state, moments=moments, fresh=moments.v, coefficient=average
    )


def united_scaling(momenta: Sequence[Tensor]) -> list[float]:
    """Factor per tensor that brings each momentum to the mean RMS of all, taken once at the freeze.

    A tensor whose momentum is all zero gets 1 (the published code divides by zero there).
    """
    lengths = [float(torch.linalg.vector_norm(m)) / math.sqrt(max(1, m.numel())) for m in momenta]
    united = sum(lengths) / len(lengths)
    return [united / length if length else 1.0 for length in lengths]


def lamb_compressed(
    x: Tensor,
    state: Lamb,
    reduced: Tensor,
    *,
    betas: Betas,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bounds: LambBounds | None = None,
) -> tuple[Tensor, Lamb]:
    """A step after the freeze: `reduced` is this tensor's momentum from the compressed all-reduce,
    divided by its scaling and masked.

    g^ = (m' - b1 m) / (1 - b1) feeds the fresh variance; the coefficient of the warm-up is scaled
    by max((sqrt(v) + eps) / (sqrt(fresh) + eps)), within bounds and within 10 % of the last one.
    """
    bounds = bounds or LambBounds()
    b1, b2 = betas
    rebuilt = (reduced - b1 * state.moments.m) / (1 - b1)
    fresh = b2 * state.fresh + (1 - b2) * rebuilt * rebuilt
    denominator = state.moments.v.sqrt() + eps
    plain = reduced / denominator
    update = plain + weight_decay * x
    factor = float((denominator / (fresh.sqrt() + eps)).max()) if x.numel() else 1.0
    whole = float(torch.linalg.vector_norm(update))
    if weight_decay > 0 and whole:
        part = min(1.0, float(torch.linalg.vector_norm(plain)) / whole)
        factor = factor * part + (1.0 - part)
    factor = min(max(factor, bounds.factor_least), bounds.factor_most)
    low, high = 1.0 - bounds.factor_change, 1.0 + bounds.factor_change
    factor = min(max(factor, state.factor * low), state.factor * high)
    moments = replace(state.moments, m=reduced, step=state.moments.step + 1)
    return (
        x - lr * state.coefficient * factor * update,
        replace(state, moments=moments, fresh=fresh, factor=factor),
    )
