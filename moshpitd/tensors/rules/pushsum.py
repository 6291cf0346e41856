"""Stochastic Gradient Push: gossip on directed graphs (arXiv 1811.10792, algorithm 1).

One rule: x and w travel together and are never thrown away. Each peer holds biased parameters x and
a push-sum weight w, and trains at z = x / w. Columns of the mixing matrix sum to one, so sum(w)
stays n and sum(x) falls by gamma sum(g) for any graph; z goes to the mean although w != 1.

Trap: the "PushSum/SGP" baseline of the Moshpit experiment is none. It normalises rows, has no
weights and does not keep the mean; this one is honest. On a regular graph w stays 1 while nobody
dies, so dropping w shows only under churn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules.common import weighted_sum

# A peer that only gives halves its weight per round; long before the division loses x's precision
# it has to wait for a share. 2^-40 is 40 rounds without a message.
LEAST_WEIGHT = 2.0**-40


@dataclass(frozen=True, slots=True)
class PushSum:
    """A peer's mass, or a message with part of it. Invariant: x and w were split alike.

    x: any shape, floating dtype. weight: Python float, so that float16 x does not round it.
    """

    x: Tensor
    weight: float

    @property
    def z(self) -> Tensor:
        """x / w, where gradients are taken and what is evaluated. Shape and dtype of x."""
        if self.weight < LEAST_WEIGHT:
            raise LocalProtocolError(
                f"push-sum: weight {self.weight} is too small to divide by, expected at least "
                f"{LEAST_WEIGHT}: this peer gave without receiving"
            )
        return self.x / self.weight


def start(parameters: Tensor) -> PushSum:
    """x = z, w = 1: at the start of a run and for a newcomer, whose z is a snapshot's.

    A newcomer adds mass, so sum(w) is the number of peers again.
    """
    return PushSum(parameters.clone(), 1.0)


def local_step(state: PushSum, *, grad: Tensor, gamma: float) -> PushSum:
    """x <- x - gamma g(z). The gradient is taken at z and applied to x (not to z: with w != 1 that
    would scale the step by w and break the invariant on sum(x))."""
    return PushSum(state.x - gamma * grad, state.weight)


def carry_update(state: PushSum, *, before: Tensor, after: Tensor) -> PushSum:
    """The same for any local optimizer that ran on z: x <- x + (z_after - z_before)."""
    return PushSum(state.x + (after - before), state.weight)


def split(state: PushSum, shares: Sequence[float]) -> tuple[PushSum, list[PushSum]]:
    """(what stays, one message per share): the column of this peer in P.

    Shares are >= 0 and sum to at most one; SGP with k out-peers uses 1 / (k + 1) each. What stays
    takes 1 - sum(shares), so the column sums to one by construction.
    """
    kept = 1.0 - sum(shares)
    if min(shares, default=0.0) < 0.0 or kept < -1e-9:
        raise LocalProtocolError(f"push-sum: shares {list(shares)} must be >= 0 and sum to <= 1")
    messages = [PushSum(state.x * share, state.weight * share) for share in shares]
    return PushSum(state.x * max(kept, 0.0), state.weight * max(kept, 0.0)), messages


def absorb(kept: PushSum, messages: Sequence[PushSum]) -> PushSum:
    """What stayed plus all that arrived: x = sum x_j, w = sum w_j, in the order of `messages`.

    Also for a message that could not be delivered: it is absorbed by its own sender, which is what
    keeps sum(w) = n when a peer is dead. Never absorb a message at both ends: a sender that is not
    sure must ask (by sequence number) before it takes one back.
    """
    parts = [kept, *messages]
    total = weighted_sum([part.x for part in parts], [1.0] * len(parts))
    return PushSum(total, sum(part.weight for part in parts))


def leave(state: PushSum) -> PushSum:
    """The message a leaving peer sends to any one neighbour: all its mass.

    Then sum(x) / sum(w) does not change, though sum(w) stays at the old n: only ratios matter.
    """
    return state


def swarm_mix(states: Sequence[PushSum], rows: Sequence[dict[int, float]]) -> list[PushSum]:
    """One exchange of all peers: x <- P x, w <- P w with column-stochastic rows of P.

    `rows`: `core.mixing.Mixing.rows()`, target -> {source: weight}.
    """
    return [
        PushSum(
            weighted_sum([states[j].x for j in row], list(row.values())),
            sum(weight * states[j].weight for j, weight in row.items()),
        )
        for row in rows
    ]


def bytes_per_step(numel: int, *, out_peers: int) -> int:
    """Payload sent per step, float32: 4 (d + 1) k."""
    return 4 * (numel + 1) * out_peers
