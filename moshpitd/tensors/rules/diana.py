"""DIANA, VR-DIANA and ADIANA: unbiased compression of differences to a learned gradient.

One rule: server and workers change their h by the very same coded messages, so h = mean h_i always.
m_i = Q(g_i - h_i); g^ = h + mean m_i with h BEFORE its update; x -= gamma g^; h_i += alpha m_i;
h += alpha mean m_i (arXiv 1901.09269, algorithm 1). As h_i -> grad f_i(x*), the messages and their
errors go to zero: linear convergence to the exact optimum even when the f_i differ.

Traps. alpha = 1 / (1 + omega) at most. The "diana" of the MARINA repository uses h_i after its
update in place of h_i + m_i; that is a damped, weaker method, not this one. A worker that misses
one message of its own breaks h = mean h_i: replicas must resync (`mean_of_shifts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moshpitd.tensors.rules.common import Compressor, mean


def diana_worker(
    grad: Tensor, shift: Tensor, *, alpha: float, quantize: Compressor
) -> tuple[Tensor, Tensor]:
    """(m_i = Q(g_i - h_i), new h_i = h_i + alpha m_i). Any shape; h_i starts at 0 (or anything)."""
    message = quantize(grad - shift)
    return message, shift + alpha * message


def diana_server(
    shift: Tensor, messages: Sequence[Tensor], *, alpha: float
) -> tuple[Tensor, Tensor]:
    """(g^ = h + mean m_i, new h = h + alpha mean m_i). g^ is unbiased: E g^ = mean g_i.

    The server keeps only h = mean h_i. Q = identity gives g^ = mean g_i for any alpha.
    """
    average = mean(messages)
    return shift + average, shift + alpha * average


def mean_of_shifts(shifts: Sequence[Tensor]) -> Tensor:
    """h after a change of membership: the mean of the h_i of those who are there."""
    return mean(shifts)


def diana_alpha(omega: float) -> float:
    """1 / (1 + omega), the largest step of the shifts that the theory allows."""
    return 1.0 / (1.0 + omega)


def diana_gamma(*, smoothness: float, omega: float, workers: int, samples: int = 1) -> float:
    """1 / (10 L sqrt(1 + omega/n) (1 + omega + m^(2/3))), nonconvex, as coded; m = 1 without VR."""
    spread = math.sqrt(1.0 + omega / workers) * (1.0 + omega + math.pow(samples, 2.0 / 3.0))
    return 1.0 / (10.0 * smoothness * spread)


# ---- VR-DIANA: the gradient of one sample, corrected by a snapshot (L-SVRG).


@dataclass(frozen=True, slots=True)
class Snapshot:
    """w_i and the full local gradient at w_i."""

    point: Tensor
    full: Tensor


def lsvrg_gradient(at_x: Tensor, at_point: Tensor, snapshot: Snapshot) -> Tensor:
    """g_i = grad f_ij(x) - grad f_ij(w_i) + grad f_i(w_i) of one sample j at both.

    Unbiased; goes into `diana_worker` in the place of g_i.
    """
    return at_x - at_point + snapshot.full


def lsvrg_refresh(
    snapshot: Snapshot, x: Tensor, *, coin: bool, full_gradient: Callable[[Tensor], Tensor]
) -> Snapshot:
    """w_i <- x where the worker's coin (probability 1/m for m samples) says so. The only place
    where a full local gradient is computed."""
    return Snapshot(x.clone(), full_gradient(x)) if coin else snapshot


# ---- ADIANA (arXiv 2002.11364, algorithm 1; the update rule from memory).


@dataclass(frozen=True, slots=True)
class AdianaSteps:
    """Parameters of ADIANA. L smoothness, mu strong convexity, p chance to move w."""

    theta1: float
    theta2: float
    eta: float
    gamma: float
    beta: float
    alpha: float


def adiana_steps(*, eta: float, mu: float, chance: float, omega: float) -> AdianaSteps:
    """theta2 = 1/2, theta1 = min(1/4, sqrt(eta mu / p)), gamma = eta / (2 (theta1 + eta mu)),
    beta = 1 - gamma mu, alpha = 1 / (1 + omega). `eta` is the step, at most about 1 / (2 L)."""
    theta1 = min(0.25, math.sqrt(eta * mu / chance))
    gamma = eta / (2.0 * (theta1 + eta * mu))
    return AdianaSteps(theta1, 0.5, eta, gamma, 1.0 - gamma * mu, diana_alpha(omega))


@dataclass(frozen=True, slots=True)
class Adiana:
    """y, z, w of the server (equal on all replicas) and h = mean h_i; y = z = w = x0 at first."""

    y: Tensor
    z: Tensor
    w: Tensor
    shift: Tensor


def adiana_start(x: Tensor) -> Adiana:
    """Everything at x0, shifts at zero."""
    return Adiana(x.clone(), x.clone(), x.clone(), x.new_zeros(x.shape))


def adiana_point(state: Adiana, steps: AdianaSteps) -> Tensor:
    """x = th1 z + th2 w + (1 - th1 - th2) y, where the workers take their first gradient."""
    third = 1.0 - steps.theta1 - steps.theta2
    return steps.theta1 * state.z + steps.theta2 * state.w + third * state.y


def adiana_worker(
    grad_x: Tensor, grad_w: Tensor, shift: Tensor, *, alpha: float, quantize: Compressor
) -> tuple[Tensor, Tensor, Tensor]:
    """(Q(grad f_i(x) - h_i), Q(grad f_i(w) - h_i), new h_i = h_i + alpha times the second).

    Two messages per step, coded apart (two draws); both use h_i before its update.
    """
    first, second = quantize(grad_x - shift), quantize(grad_w - shift)
    return first, second, shift + alpha * second


def adiana_server(
    state: Adiana,
    x: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    steps: AdianaSteps,
    move: bool,
) -> Adiana:
    """g = mean first + h; y' = x - eta g; z' = beta z + (1 - beta) x + (gamma/eta) (y' - x);
    w' = y (the old one) if `move` (shared coin of chance p); h += alpha mean second."""
    grad = mean(first) + state.shift
    y = x - steps.eta * grad
    z = steps.beta * state.z + (1.0 - steps.beta) * x + (steps.gamma / steps.eta) * (y - x)
    shift = state.shift + steps.alpha * mean(second)
    return replace(state, y=y, z=z, w=state.y if move else state.w, shift=shift)
