"""Peers that come and go. One rule: how often somebody is away follows from how long a round takes,
so that a slow method pays for its slowness.

Arrivals are a Poisson process, lifetimes exponential (preemption does not remember how long a
machine has run), so the swarm has arrivals x lifetime peers on average, whatever its history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moshpitd.sim.costs.net import Floats, Net

ASKING_HOPS = 4
"""Before the first byte of a snapshot: the donor is asked and answers, then the link is used."""


@dataclass(frozen=True, slots=True)
class Churn:
    """Mean lifetime of a peer; inf: nobody ever leaves. `arrivals_per_s` over the whole swarm."""

    lifetime_s: float = math.inf
    arrivals_per_s: float = 0.0

    def failure(self, round_s: float) -> float:
        """Chance that a peer which starts a round does not see its end."""
        return -math.expm1(-round_s / self.lifetime_s)

    @property
    def peers(self) -> float:
        """Mean size of the swarm, newcomers that still load included."""
        return self.arrivals_per_s * self.lifetime_s

    def useful_share(self, join_s: float) -> float:
        """Share of a mean lifetime that is left after a newcomer has loaded: exp(-join / life).
        Those that vanish while they load are in it."""
        return math.exp(-join_s / self.lifetime_s)

    def sizes(self, rng: np.random.Generator, *, seconds: float, samples: int) -> Floats:
        """The number of peers at `samples` instants, drawn arrival by arrival; starts empty, and
        is looked at only after five lifetimes."""
        begin, end = 5.0 * self.lifetime_s, 5.0 * self.lifetime_s + seconds
        count = int(rng.poisson(self.arrivals_per_s * end))
        came = np.sort(rng.uniform(0.0, end, count))
        left = np.sort(came + rng.exponential(self.lifetime_s, count))
        at = np.linspace(begin, end, samples)
        return (np.searchsorted(came, at) - np.searchsorted(left, at)).astype(np.float64)


def join_s(net: Net, state_bytes: float) -> float:
    """A newcomer's way to its first round: one snapshot from one donor, uplink to downlink."""
    rate = min(net.up_bytes_per_s, net.down_bytes_per_s)
    return ASKING_HOPS * net.latency_s + state_bytes / rate
