"""Delayed SGD: x_{t+1} = x_t - gamma_t g(x_{t - tau}) (arXiv 1104.5525).

One rule: a gradient is applied tau steps after the point that it was taken at, never sooner and
never twice. A bounded delay costs O(tau^2 / T), which vanishes beside O(1 / sqrt(T)), but only
while the step is small enough: see `stability_limit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moshpitd.errors import ConfigError
from moshpitd.tensors.rules.common import mean


@dataclass(frozen=True, slots=True)
class DelayLine:
    """Gradients on their way. Invariant: at most `tau` of them, oldest first."""

    tau: int
    waiting: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigError(f"a delay of {self.tau} steps", key="tau", expected="0 or more")


def pass_through(line: DelayLine, grad: Tensor) -> tuple[DelayLine, Tensor | None]:
    """Put in the gradient of step t, take out that of step t - tau; None in the first tau steps.

    tau = 0 returns `grad` itself: plain SGD. The steps without a gradient leave x alone, as if the
    run had begun tau steps earlier with zero gradients.
    """
    waiting = (*line.waiting, grad)
    if len(waiting) <= line.tau:
        return DelayLine(line.tau, waiting), None
    return DelayLine(line.tau, waiting[1:]), waiting[0]


def delayed_step(x: Tensor, grad: Tensor | None, *, gamma: float) -> Tensor:
    """x - gamma g(x_{t - tau}); a copy of x while nothing has arrived yet."""
    return x.clone() if grad is None else x - gamma * grad


def averaged_gradient(grads: Sequence[Tensor]) -> Tensor:
    """Delayed averaging: the mean of the workers' delayed gradients (each of another age).

    The alternative, cyclic delay, applies one worker's gradient per step: `pass_through` with tau =
    n - 1 and gamma as for one worker.
    """
    return mean(grads)


def stability_limit(tau: int) -> float:
    """The largest stable gamma * curvature: 2 sin(pi / (2 (2 tau + 1))), about pi / (2 tau).

    Exact for x_{t+1} = x_t - gamma lambda x_{t - tau}; 2 for tau = 0, 1 for tau = 1.
    """
    return 2.0 * math.sin(math.pi / (2.0 * (2 * tau + 1)))


def adaptive_gamma(gamma: float, *, tau: int) -> float:
    """gamma / (1 + tau): stable at every delay if gamma * curvature <= 1.5.

    `tau` is the staleness of this very gradient, so a fresh one gets the whole step.
    """
    return gamma / (1 + tau)
