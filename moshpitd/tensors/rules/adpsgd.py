"""AD-PSGD: average with one random neighbour, then apply a gradient of an older copy.

One rule: both ends of an exchange apply opposite deltas, so the sum over peers changes by -gamma g
and by nothing else (arXiv 1710.06952, algorithm 1). A peer's average and its gradient step come
from different threads; deltas let both land in any order without losing either.

Who meets whom (active odd ranks, passive even ones, so that nobody waits in a circle) is in
core/topologies. Trap: the average must be atomic per pair. If a passive peer serves two actives at
once from one copy, mass appears from nowhere; if only one end applies its delta, it is lost.
"""

from __future__ import annotations

from torch import Tensor

from moshpitd.tensors.rules.common import same_shape


def average_delta(own: Tensor, other: Tensor) -> Tensor:
    """(x_j - x_i) / 2, what peer i adds; j computes exactly the negative from the same two values.

    Any shape, floating dtype; `own` and `other` are the copies that were exchanged, not what the
    peers have moved to since. Adding the delta to the present x keeps concurrent local steps.
    """
    same_shape([own, other])
    return (other - own) / 2


def apply_gradient(x: Tensor, *, grad: Tensor, gamma: float) -> Tensor:
    """x <- x - gamma g(x_hat), g taken at the copy x_hat that was read before the average."""
    return x - gamma * grad


def event(active: Tensor, passive: Tensor, *, grad: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """One whole event: (new active, new passive) = (mean - gamma g, mean).

    `grad` was taken at an older copy of the active peer's x. With no neighbour to meet (one peer)
    an event is `apply_gradient` alone.
    """
    same_shape([active, passive])
    middle = (active + passive) / 2
    return apply_gradient(middle, grad=grad, gamma=gamma), middle.clone()


def bytes_per_event(numel: int) -> int:
    """Payload each way per event, float32: 4 d."""
    return 4 * numel
