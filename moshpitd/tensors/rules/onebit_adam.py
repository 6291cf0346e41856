"""1-bit Adam and 0/1 Adam: Adam whose variance is frozen so that momentum can be compressed.

One rule: after the freeze v is not touched, not even multiplied by one, so it stays bitwise
constant and equal on all peers. Compressing plain Adam fails because v is not linear in the
gradient; a frozen v makes the update linear in m, and error feedback works again
(arXiv 2102.02888). The compressed all-reduce is in rules/onebit.

Traps, as in DeepSpeed: there is no bias correction although the option is accepted; its very first
step() is a dry run that throws the gradient away (not done here: the worked examples do not).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from moshpitd.errors import ConfigError

Betas = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Moments:
    """m and v, equal on all peers. Any shape, dtype of the parameters; zeros at the start."""

    m: Tensor
    v: Tensor
    step: int = 0


def warmup(moments: Moments, grad: Tensor, *, betas: Betas) -> Moments:
    """One uncompressed step with the mean gradient: m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2."""
    b1, b2 = betas
    return Moments(
        m=b1 * moments.m + (1 - b1) * grad,
        v=b2 * moments.v + (1 - b2) * grad * grad,
        step=moments.step + 1,
    )


def local_momentum(moments: Moments, grad: Tensor, *, betas: Betas) -> Tensor:
    """m_i = b1 m + (1-b1) g_i of this peer: what goes into the compressed all-reduce."""
    return betas[0] * moments.m + (1 - betas[0]) * grad


def compressed(moments: Moments, reduced: Tensor) -> Moments:
    """After the all-reduce: m is its result, v the very same tensor as before."""
    return replace(moments, m=reduced, step=moments.step + 1)


def apply(
    x: Tensor, moments: Moments, *, lr: float, eps: float = 1e-8, weight_decay: float = 0.0
) -> Tensor:
    """x - lr (m / (sqrt(v) + eps) + wd x). No bias correction. eps outside the root."""
    update = moments.m / (moments.v.sqrt() + eps)
    if weight_decay > 0:
        update = update + weight_decay * x
    return x - lr * update


# ---- 0/1 Adam (arXiv 2202.06009): v refreshed ever more rarely, local steps between exchanges.


@dataclass(frozen=True, slots=True)
class ZeroOnePolicy:
    """When 0/1 Adam refreshes v and when it exchanges momentum. All peers count alike.

    Refresh intervals double after every `variance_scaler` refreshes (kappa in the paper) until
    `freeze_step`; from then on exchanges are an interval apart that doubles every `local_scaler`
    steps up to `local_clipper` (H). Defaults are the published implementation's.
    """

    freeze_step: int = 100_000
    variance_scaler: int = 16
    local_scaler: int = 32_678  # sic: 32768 was probably meant; kept for compatibility
    local_clipper: int = 16

    def __post_init__(self) -> None:
        for key in ("freeze_step", "variance_scaler", "local_scaler", "local_clipper"):
            if getattr(self, key) < 1:
                raise ConfigError("0/1 Adam cannot count with it", key=key, expected="at least 1")


@dataclass(frozen=True, slots=True)
class ZeroOneClock:
    """Where the policy's counters stand before step `step + 1`."""

    step: int = 0
    variance_interval: int = 1
    refreshes: int = 0
    local_interval: int = 1
    local_steps: int = 0

    def frozen(self, policy: ZeroOnePolicy) -> bool:
        """True once v is constant and local steps are allowed."""
        return self.step >= policy.freeze_step

    def refreshes_variance(self, policy: ZeroOnePolicy) -> bool:
        """Whether the coming step all-reduces the gradient uncompressed and updates v."""
        return not self.frozen(policy) and (self.step + 1) % self.variance_interval == 0

    def exchanges(self, policy: ZeroOnePolicy) -> bool:
        """Whether the coming step sends anything: always before the freeze, then every interval."""
        return not self.frozen(policy) or (self.step + 1) % self.local_interval == 0

    def tick(self, policy: ZeroOnePolicy) -> ZeroOneClock:
        """The clock after the coming step."""
        if self.frozen(policy):
            steps, interval = self.local_steps + 1, self.local_interval
            if steps == policy.local_scaler:
                steps, interval = 0, min(policy.local_clipper, interval * 2)
            return replace(self, step=self.step + 1, local_steps=steps, local_interval=interval)
        refreshes, interval = self.refreshes, self.variance_interval
        if self.refreshes_variance(policy):
            refreshes += 1
            if refreshes == policy.variance_scaler:
                refreshes, interval = 0, interval * 2
        return replace(self, step=self.step + 1, refreshes=refreshes, variance_interval=interval)


@dataclass(frozen=True, slots=True)
class Journey:
    """What a peer does alone between exchanges.

    origin: x at the last exchange, equal bits on all peers (kept whole: subtracting a sum of moves
    again, as the published code does, lets peers drift apart by rounding). lrs: sum of the learning
    rates since.
    """

    origin: Tensor
    lrs: float = 0.0


def zero_one_before_freeze(
    moments: Moments, grad: Tensor, *, betas: Betas, refresh: bool
) -> Moments:
    """A step before the freeze. `grad` is the exact mean on a refresh, else the compressed mean;
    only a refresh touches v."""
    if refresh:
        return warmup(moments, grad, betas=betas)
    return compressed(moments, local_momentum(moments, grad, betas=betas))


def zero_one_local(
    x: Tensor,
    moments: Moments,
    journey: Journey,
    grad: Tensor,
    *,
    betas: Betas,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Moments, Journey]:
    """A local step after the freeze with this peer's own gradient: (x, moments, journey)."""
    moments = compressed(moments, local_momentum(moments, grad, betas=betas))
    moved = apply(x, moments, lr=lr, eps=eps, weight_decay=weight_decay)
    return moved, moments, replace(journey, lrs=journey.lrs + lr)


def zero_one_exchange(
    x: Tensor,
    moments: Moments,
    journey: Journey,
    *,
    reduce: Callable[[Tensor], Tensor],
    eps: float = 1e-8,
) -> tuple[Tensor, Moments, Journey]:
    """Join the peers again: x = origin + mean move, m = -mean move in momentum units / sum of lrs.

    `reduce` is the compressed all-reduce (its errors are the caller's); it gets the move in units
    of momentum, (x - origin) * (sqrt(v) + eps), because that is what signs code well. Error buffers
    must be reset once at the freeze: before it they are in units of gradients. With weight decay
    its part of the move ends up in m, as in the published code.
    """
    denominator = moments.v.sqrt() + eps
    shared = reduce((x - journey.origin) * denominator)
    joined = journey.origin + shared / denominator
    return joined, replace(moments, m=-shared / journey.lrs), Journey(joined)
