"""Who mixes with whom in a round, and with what weights. One rule: mass is never lost.

A `Mixing` is one round's matrix W: peer `target` computes sum over sources of W[target][source] x.
Every column sums to one, so the sum over peers survives whatever the graph and whoever is dead: a
share that cannot be delivered stays with its sender. Where the rows sum to one as well (all groups,
all undirected graphs, and directed ones with nobody dead) a plain mix keeps the mean; where they do
not (`needs_weights`) only push-sum weights give the mean back (Stochastic Gradient Push,
arXiv 1811.10792). Schedules live in core/topologies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moshpitd.errors import ConfigError

# Rows built from thirds and fifths sum to one but for a few units in the last place each.
_ROUNDING = 1e-9


class Edge(NamedTuple):
    """The share `weight` of its value that `source` gives to `target` (never itself)."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True, slots=True)
class GroupMixing:
    """Disjoint groups; each member gets the mean of its group, everybody else keeps its value.

    Doubly stochastic and symmetric always. In the daemon this is the group average.
    """

    peers: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def needs_weights(self) -> bool:
        return False

    def rows(self) -> list[dict[int, float]]:
        """Per target: source -> weight, own value included."""
        rows: list[dict[int, float]] = [{peer: 1.0} for peer in range(self.peers)]
        for group in self.groups:
            for member in group:
                rows[member] = dict.fromkeys(group, 1.0 / len(group))
        return rows

    def without(self, dead: Collection[int]) -> GroupMixing:
        """The survivors of each group average among themselves; the dead keep their values."""
        alive = ([peer for peer in group if peer not in dead] for group in self.groups)
        return GroupMixing(self.peers, tuple(tuple(group) for group in alive if group))


@dataclass(frozen=True, slots=True)
class EdgeMixing:
    """Weighted directed edges, and what each peer keeps of its own value.

    Invariant: own[i] + the weights of i's outgoing edges = 1. In the daemon this is the neighbour
    exchange.
    """

    peers: int
    edges: tuple[Edge, ...]
    own: tuple[float, ...]

    @property
    def needs_weights(self) -> bool:
        """True where the rows do not sum to one: x alone drifts, x / w does not."""
        received = list(self.own)
        for edge in self.edges:
            received[edge.target] += edge.weight
        return any(abs(total - 1.0) > _ROUNDING for total in received)

    def rows(self) -> list[dict[int, float]]:
        """Per target: source -> weight, own value included, in the order of the edges."""
        rows = [{peer: share} for peer, share in enumerate(self.own)]
        for source, target, weight in self.edges:
            rows[target][source] = rows[target].get(source, 0.0) + weight
        return rows

    def outgoing(self, source: int) -> list[Edge]:
        """What a sender has to push in this round."""
        return [edge for edge in self.edges if edge.source == source]

    def without(self, dead: Collection[int]) -> EdgeMixing:
        """Shares from or to the dead stay with their senders.

        On an undirected graph rows stay one as well, because what i no longer gives to a dead k is
        what it no longer gets. On a directed one only the columns do: see `needs_weights`.
        """
        own = list(self.own)
        edges = []
        for edge in self.edges:
            if edge.source in dead or edge.target in dead:
                own[edge.source] += edge.weight
            else:
                edges.append(edge)
        return EdgeMixing(self.peers, tuple(edges), tuple(own))


Mixing = GroupMixing | EdgeMixing


class MixingSchedule(Protocol):
    """Who mixes in round t, for the simulator and the daemon alike.

    Equal schedules give equal samples on every peer: randomness comes from a seed that they share.
    """

    @property
    def peers(self) -> int: ...

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        """The mixing of round t >= 0, with peers that are known to be dead before it starts.

        Groups that are drawn are drawn among the living; on a fixed graph the dead's shares stay
        with their senders. Deaths during the round: `.without(dead)` on the result.
        """
        ...


def matrix(mixing: Mixing) -> list[list[float]]:
    """W as rows, dense: for tests and small simulations only."""
    return [[row.get(source, 0.0) for source in range(mixing.peers)] for row in mixing.rows()]


def undirected(peers: int, pairs: Iterable[tuple[int, int]]) -> EdgeMixing:
    """Metropolis-Hastings weights 1 / (1 + max(degrees)): symmetric, doubly stochastic, local.

    A peer needs to know only its neighbours' degrees. On a regular graph all weights are
    1 / (degree + 1), which is W = 1/3 on a ring and 1/5 on a torus (D-PSGD, arXiv 1705.09056).
    Pairs may come in any order and twice; (i, i) is left out.
    """
    neighbours: list[dict[int, None]] = [{} for _ in range(peers)]  # dict: ordered, no repeats
    for one, other in pairs:
        if one != other:
            neighbours[one][other] = None
            neighbours[other][one] = None
    degrees = [len(found) for found in neighbours]
    edges, own = [], []
    for source, targets in enumerate(neighbours):
        weights = [1.0 / (1 + max(degrees[source], degrees[target])) for target in targets]
        edges += [
            Edge(source, target, weight) for target, weight in zip(targets, weights, strict=True)
        ]
        own.append(1.0 - math.fsum(weights))
    return EdgeMixing(peers, tuple(edges), tuple(own))


def directed(peers: int, arrows: Iterable[tuple[int, int]]) -> EdgeMixing:
    """Each peer splits its value evenly between itself and those that it sends to.

    Column-stochastic for every graph; push-sum needs no more than that.
    """
    targets: list[dict[int, None]] = [{} for _ in range(peers)]
    for source, target in arrows:
        if source != target:
            targets[source][target] = None
    shares = [1.0 / (1 + len(found)) for found in targets]
    edges = tuple(
        Edge(source, target, shares[source])
        for source, found in enumerate(targets)
        for target in found
    )
    return EdgeMixing(peers, edges, tuple(shares))


def circulant(peers: int, shifts: Sequence[int]) -> EdgeMixing:
    """Everybody sends equal shares to itself and to itself + shift, for each different shift.

    All columns and all rows sum to one for any number of peers. Shifts that are multiples of
    `peers`, and repeats, count once, as the sender's own share.
    """
    steps = list(dict.fromkeys(shift % peers for shift in shifts if shift % peers))
    return directed(peers, ((i, (i + step) % peers) for i in range(peers) for step in steps))


def reachable(peers: int, arrows: Iterable[tuple[int, int]], start: int = 0) -> list[bool]:
    """Which peers a value that starts at `start` gets to along the arrows."""
    targets: list[list[int]] = [[] for _ in range(peers)]
    for source, target in arrows:
        targets[source].append(target)
    seen = [False] * peers
    seen[start] = True
    front = [start]
    while front:
        for target in targets[front.pop()]:
            if not seen[target]:
                seen[target] = True
                front.append(target)
    return seen


def require_peers(peers: int) -> None:
    """A schedule for nobody is a mistake in a setting."""
    if peers < 1:
        raise ConfigError(f"{peers} peers cannot mix", key="peers", expected="at least 1")


# How much one round takes off the variance between peers: E V' = factor * V. Closed forms of
# ALGORITHMS 1.4 and 2.10; p of the unified analysis (arXiv 2003.10422) is 1 - factor.


def random_groups_factor(peers: int, groups: int) -> float:
    """(r-1) / (N-1), exact for a uniformly random split into r groups of any fixed sizes.

    The paper's (r-1)/N + r/N^2 is an upper bound for this model: 11 % above it at N = 6, r = 2.
    """
    return (groups - 1) / (peers - 1) if peers > 1 else 0.0


def random_groups_bound(peers: int, groups: int) -> float:
    """(r-1)/N + r/N^2, the bound of the paper (Moshpit SGD, arXiv 2103.03239, theorem on random
    grouping)."""
    return (groups - 1) / peers + groups / peers**2


def random_groups_factor_with_failures(peers: int, *, size: int, failure: float) -> float:
    """The same when each peer is dead in a round with probability `failure` and keeps its value.

    With a alive and r = floor(a / size) groups (at least one, if anybody is alive):
    (N-a)/N + (rN-a)/(N(N-1)), averaged over a ~ Binomial(N, 1 - failure).
    """
    if peers == 1:
        return 1.0 if failure >= 1.0 else 0.0
    total = []
    for alive in range(peers + 1):
        groups = min(alive, max(1, alive // size))
        factor = (peers - alive) / peers + (groups * peers - alive) / (peers * (peers - 1))
        total.append(_binomial(peers, alive, 1.0 - failure) * factor)
    return math.fsum(total)


def random_matching_factor(peers: int) -> float:
    """One random matching; odd numbers leave one peer alone: groups of two, so exact as above."""
    return random_groups_factor(peers, peers - peers // 2)


def random_pair_factor(peers: int) -> float:
    """One random pair averages, everybody else waits: p = 1 / (n-1)."""
    return 1.0 - 1.0 / (peers - 1) if peers > 1 else 0.0


def _binomial(trials: int, successes: int, chance: float) -> float:
    """P(successes), through logarithms: 1024 choose 512 does not fit a float's range times 0."""
    if chance <= 0.0 or chance >= 1.0:
        return 1.0 if successes == (trials if chance >= 1.0 else 0) else 0.0
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1)
    ways -= math.lgamma(trials - successes + 1)
    return math.exp(
        ways + successes * math.log(chance) + (trials - successes) * math.log1p(-chance)
    )
