"""How many rounds an algorithm needs until the peers agree: the other factor of "how long". One
rule: distortion is the mean squared deviation from the mean, relative to the start, as in the
paper's experiment; whatever is random is averaged over before it is compared with a target.

Closed forms where there is one (core.mixing has the factors), else the daemon's own schedules on
one number per peer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moshpitd.core.mixing import (
    EdgeMixing,
    Mixing,
    MixingSchedule,
    random_groups_factor_with_failures,
)
from moshpitd.core.topologies import OnePeerExponential
from moshpitd.errors import ConfigError
from moshpitd.sim.costs.net import Floats

MOST_ROUNDS = 1000
"""A drawn run that is not there by then is given up: no method we draw needs more than 60."""
PEERS_DRAWN = 20_000
"""Repeats of a drawn run are as many as make so many peers, at least `REPEATS_LEAST`."""
REPEATS_LEAST = 3


def rounds_of_factor(factor: float, *, target: float) -> int:
    """Rounds until factor^t <= target."""
    if factor <= target:
        return 1
    return math.ceil(math.log(target) / math.log(factor) - 1e-9)


def ring_rounds(peers: int, *, target: float) -> int:
    """Gossip on a ring with weights of a third, from the worst start: rho^(2t), with rho the second
    eigenvalue 1/3 + 2/3 cos(2 pi / n). Failures are not in it; they only make it slower."""
    if peers <= 3:
        return 1
    # 1 - rho, without the cancellation that eats all digits from 10^8 peers on.
    gap = 4.0 / 3.0 * math.sin(math.pi / peers) ** 2
    return math.ceil(math.log(target) / (2.0 * math.log1p(-gap)))


def group_rounds(peers: int, *, size: int, failure: float, target: float) -> int:
    """Random groups: the exact expected factor, failures included."""
    return rounds_of_factor(_group_factor(peers, size, failure), target=target)


@lru_cache(maxsize=256)
def _group_factor(peers: int, size: int, failure: float) -> float:
    return random_groups_factor_with_failures(peers, size=size, failure=failure)


def moshpit_rounds(sides: Sequence[int], *, failure: float, target: float) -> int:
    """A full grid: exact after a sweep of d rounds; with failures a sweep takes distortion to
    d p / M^(d-1) + p^d of what it was (leading order, ALGORITHMS 1.4), and a round to its d-th
    root. Never less than a sweep."""
    dimensions, side = len(sides), min(sides)
    factor = dimensions * failure / side ** (dimensions - 1) + failure**dimensions
    if factor <= target:
        return dimensions
    return max(dimensions, rounds_of_factor(factor ** (1.0 / dimensions), target=target))


@lru_cache(maxsize=256)
def one_peer_rounds(peers: int, *, failure: float, target: float) -> int:
    """Push-sum to one peer per round.

    Without failures exact: the round's matrix is circulant, so frequency j shrinks by
    cos^2(pi j s / n) under shift s. With them drawn: a message to or from a peer that is away
    stays with its sender.
    """
    if peers == 1:
        return 1
    schedule = OnePeerExponential(peers)
    if failure > 0.0:
        return _drawn_one_peer(schedule, failure, target)
    left = np.ones(peers - 1)
    frequencies = np.arange(1, peers)
    for t in range(MOST_ROUNDS):
        (shift,) = schedule.shifts(t)
        # Modulo n in whole numbers first: j s is far beyond what a cosine takes exactly.
        left = left * np.cos(np.pi * ((frequencies * shift) % peers) / peers) ** 2
        if left.mean() <= target:
            return t + 1
    raise ConfigError(f"{peers} peers on a one-peer graph do not agree", key="target")


def _drawn_one_peer(schedule: OnePeerExponential, failure: float, target: float) -> int:
    peers = schedule.peers
    repeats = max(REPEATS_LEAST, PEERS_DRAWN // peers)
    rng = np.random.default_rng(peers)
    values = rng.standard_normal((repeats, peers))
    weights = np.ones((repeats, peers))
    means, start = values.mean(axis=1, keepdims=True), values.var()
    for t in range(MOST_ROUNDS):
        (shift,) = schedule.shifts(t)
        alive = rng.random((repeats, peers)) >= failure
        goes = alive & np.roll(alive, -shift, axis=1)  # both ends are there
        values = _pushed(values, goes, shift)
        weights = _pushed(weights, goes, shift)
        if float(((values / weights - means) ** 2).mean()) <= target * start:
            return t + 1
    raise ConfigError(f"{peers} peers with failure {failure} do not agree", key="target")


def _pushed(values: Floats, goes: NDArray[np.bool_], shift: int) -> Floats:
    half = np.where(goes, values / 2.0, 0.0)
    return values - half + np.roll(half, shift, axis=1)


@dataclass(slots=True)
class Population:
    """One number per peer under a schedule, with push-sum weights where the graph needs them.

    `distortion` is relative to the start; of what a peer would report (x / w).
    """

    schedule: MixingSchedule
    values: Floats
    weights: Floats
    started: float
    mean: float

    @classmethod
    def drawn(cls, schedule: MixingSchedule, rng: np.random.Generator) -> Population:
        values = rng.standard_normal(schedule.peers)
        started, mean = float(values.var()), float(values.mean())
        return cls(schedule, values, np.ones_like(values), started, mean)

    @property
    def distortion(self) -> float:
        return float(((self.values / self.weights - self.mean) ** 2).mean()) / self.started

    def mix(self, t: int, dead: Collection[int] = ()) -> Mixing:
        """Carry out round t."""
        mixing = self.schedule.sample(t, dead)
        self.values = mixed(mixing, self.values)
        self.weights = mixed(mixing, self.weights) if mixing.needs_weights else self.weights
        return mixing


def mixed(mixing: Mixing, values: Floats) -> Floats:
    """W x without the matrix."""
    if isinstance(mixing, EdgeMixing):
        result = np.array(mixing.own) * values
        sources = [edge.source for edge in mixing.edges]
        targets = [edge.target for edge in mixing.edges]
        shares = np.array([edge.weight for edge in mixing.edges])
        return result + np.bincount(
            targets, weights=shares * values[sources], minlength=len(values)
        )
    result = values.copy()
    for group in mixing.groups:
        result[list(group)] = values[list(group)].mean()
    return result
