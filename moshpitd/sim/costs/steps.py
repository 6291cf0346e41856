"""Seconds of a round: by formula, and by drawing many rounds. One rule: both read the same
`Operation` and `Net`, so with nothing random they give the same number.

A round waits for the slowest peer it needs, moves its bytes, and pays its hops. In training that
overlaps (gradients leave while others are still computed) bandwidth hides behind compute and
latency does not: max(compute, bandwidth) + latency, the rule that fits the published figures. An
average that starts when the compute is over pays both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moshpitd.sim.costs.net import Floats, Lognormal, Net
from moshpitd.sim.costs.operations import Operation, matchmaking_s

CHUNK_DRAWS = 1 << 22  # 32 MiB of float64 at once, whatever the number of peers
LONGEST_LOG = 27.0
"""exp(27) = 5e11 attempts: beyond that "never" is the honest word."""


@dataclass(frozen=True, slots=True)
class Step:
    """One round in its parts. `attempts`: how often it is tried until nobody fails."""

    compute_s: float
    bandwidth_s: float
    latency_s: float
    excess_s: float
    matchmaking_s: float
    overlap: bool = False
    attempts: float = 1.0

    @property
    def seconds(self) -> float:
        work = (
            max(self.compute_s, self.bandwidth_s)
            if self.overlap
            else self.compute_s + self.bandwidth_s
        )
        return (work + self.latency_s + self.excess_s + self.matchmaking_s) * self.attempts


NOTHING = Lognormal()


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What surrounds an operation. `delay` comes on top of a peer's compute in every round (a slow
    disk, another tenant); `failure` is the chance that a peer is away in a round; `window_s` the
    matchmaking window."""

    compute: Lognormal = NOTHING
    delay: Lognormal = NOTHING
    failure: float = 0.0
    window_s: float = 0.0
    overlap: bool = False


def closed_form(operation: Operation, net: Net, around: Circumstances) -> Step:
    """Expected seconds of one round. With a `delay` that varies the wait is an upper bound (the
    slowest compute and the longest delay need not be one peer's)."""
    waits_for = operation.waits_for
    return step(
        operation,
        net,
        around,
        wait_s=around.compute.slowest_s(waits_for) + around.delay.slowest_s(waits_for),
    )


def step(operation: Operation, net: Net, around: Circumstances, *, wait_s: float) -> Step:
    """The same with a given wait for the slowest peer."""
    if operation.background:
        return Step(wait_s, 0.0, 0.0, 0.0, 0.0)
    sent, received = operation.sent, operation.received
    # A node whose directions take turns pays for each; otherwise for the slower one.
    each = operation.each
    ways = [(each, received), (sent, each)] if operation.turns else [(sent, received)]
    connections = operation.connections
    gathering = 0.0
    if operation.gathers:
        gathering = matchmaking_s(net, operation.peers, window_s=around.window_s)
    return Step(
        compute_s=wait_s,
        bandwidth_s=sum(net.bandwidth_s(out, back) for out, back in ways),
        latency_s=operation.hops * net.latency_s,
        excess_s=sum(net.excess_s(out, back, connections) for out, back in ways),
        matchmaking_s=gathering,
        overlap=around.overlap,
        attempts=attempts_of(operation.peers, around.failure) if operation.everybody else 1.0,
    )


def attempts_of(peers: int, failure: float) -> float:
    """1 / (1-p)^N: how often a collective starts until nobody is away; inf beyond 5e11."""
    if failure >= 1.0:
        return math.inf
    exponent = -peers * math.log1p(-failure)
    return math.exp(exponent) if exponent <= LONGEST_LOG else math.inf


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rounds that were drawn: mean seconds, its standard error, and how many."""

    seconds: float
    error_s: float
    rounds: int


def monte_carlo(
    operation: Operation, net: Net, around: Circumstances, *, rounds: int, seed: int
) -> Sampled:
    """Draw `rounds` rounds: compute and delay of each peer that is waited for, and who is away.

    A member that is away costs a group nothing but itself; one of a collective costs a restart.
    """
    rng = np.random.default_rng(seed)
    waits = _waits(operation.waits_for, around, rounds, rng)
    once = step(operation, net, around, wait_s=0.0)
    moving = once.latency_s + once.excess_s + once.matchmaking_s
    if around.overlap:
        seconds = np.maximum(waits, once.bandwidth_s) + moving
    else:
        seconds = waits + once.bandwidth_s + moving
    if operation.everybody and around.failure > 0.0:
        seconds = seconds * rng.geometric(_all_there(operation.peers, around.failure), rounds)
    spread = float(seconds.std(ddof=1)) if rounds > 1 else 0.0
    return Sampled(float(seconds.mean()), spread / math.sqrt(rounds), rounds)


def _all_there(peers: int, failure: float) -> float:
    return max(math.exp(-LONGEST_LOG), (1.0 - failure) ** peers)


def _waits(peers: int, around: Circumstances, rounds: int, rng: np.random.Generator) -> Floats:
    waits = np.empty(rounds)
    step = max(1, CHUNK_DRAWS // peers)
    for start in range(0, rounds, step):
        count = min(step, rounds - start)
        drawn = around.compute.draw(rng, count, peers) + around.delay.draw(rng, count, peers)
        waits[start : start + count] = drawn.max(axis=1)
    return waits
