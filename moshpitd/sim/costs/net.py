"""Links and machines: how long bytes take, and how long one waits for the slowest. One rule: pure
values; whoever wants a random draw brings the generator.

Moving m bytes over k connections takes m / B, plus what TCP's windows cost beyond that:
max(0, m RTT / (k W) - m / B). B is the rate that is left after headers (`goodput`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GOODPUT = 0.90
"""Share of a link's rate that carries payload: fitted to the published bandwidth sweeps, where
headers, acknowledgements and uneven sharing take the rest."""

_GRID = 4001  # points of the integral below; twice as many change it by less than 1e-9
_LOW, _HIGH = -9.0, 14.0  # standard deviations: exp(5 z) times the normal density is nothing there


@dataclass(frozen=True, slots=True)
class Net:
    """One class of links. Every node has one uplink and one downlink, shared by its connections.

    `latency_s` is one way. `base_rtt_s` is a round trip that the windows see beside it: published
    sweeps add a delay to a cluster that has one already, and their zero includes its hops.
    """

    name: str
    latency_s: float
    up_bits_per_s: float
    down_bits_per_s: float = 0.0  # 0: as fast as up
    goodput: float = GOODPUT
    window_bytes: float = math.inf  # per connection; inf: it grows with the path, as TCP's does now
    base_rtt_s: float = 0.0

    @property
    def up_bytes_per_s(self) -> float:
        return self.up_bits_per_s * self.goodput / 8.0

    @property
    def down_bytes_per_s(self) -> float:
        return (self.down_bits_per_s or self.up_bits_per_s) * self.goodput / 8.0

    @property
    def rtt_s(self) -> float:
        return 2.0 * self.latency_s + self.base_rtt_s

    def bandwidth_s(self, sent: float, received: float) -> float:
        """What the slower direction of one node takes; both run at once."""
        return max(sent / self.up_bytes_per_s, received / self.down_bytes_per_s)

    def window_s(self, size: float, connections: int) -> float:
        """How long windows alone would take: one window per round trip on each connection."""
        return size * self.rtt_s / (max(1, connections) * self.window_bytes)

    def excess_s(self, sent: float, received: float, connections: int) -> float:
        """What the windows cost beyond the links' rates."""
        windows = self.window_s(max(sent, received), connections)
        return max(0.0, windows - self.bandwidth_s(sent, received))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A duration that differs between peers and rounds: `median_s` exp(sigma z), z normal."""

    median_s: float = 0.0
    sigma: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2.0)

    def slowest_s(self, peers: int) -> float:
        """Expected maximum over `peers` independent draws: what a barrier waits for."""
        if peers <= 1:
            return self.mean_s
        return self.median_s * (_expected_maximum(peers, self.sigma) if self.sigma else 1.0)

    def draw(self, rng: np.random.Generator, *shape: int) -> Floats:
        return self.median_s * np.exp(self.sigma * rng.standard_normal(shape))


@lru_cache(maxsize=256)
def _expected_maximum(count: int, sigma: float) -> float:
    """E max of exp(sigma z_i): the integral of exp(sigma z) n phi(z) Phi(z)^(n-1)."""
    z = np.linspace(_LOW, _HIGH + sigma, _GRID)
    log_below = np.array([_log_normal_cdf(x) for x in z.tolist()])
    log_density = -0.5 * z**2 - 0.5 * math.log(2.0 * math.pi)
    values = np.exp(math.log(count) + (count - 1) * log_below + log_density + sigma * z)
    return float(np.trapezoid(values, z))


def _log_normal_cdf(z: float) -> float:
    """log Phi(z), exact in both tails."""
    if z < 0.0:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    return math.log1p(-0.5 * math.erfc(z / math.sqrt(2.0)))
