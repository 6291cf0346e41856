"""The mixing schedules by name. One rule: any number of peers from one up, odd ones too.

A schedule is plain values and a seed, so that every peer, the simulator and the daemon draw the
same rounds. Peers are indices 0..peers-1 in an order that all share (a sorted member list); when
the membership itself changes, make the schedule anew for the new number.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moshpitd.core.grid import cell, meeting_key, rekey
from moshpitd.core.messages import Shape
from moshpitd.core.mixing import (
    Edge,
    EdgeMixing,
    GroupMixing,
    Mixing,
    MixingSchedule,
    circulant,
    directed,
    reachable,
    require_peers,
    undirected,
)
from moshpitd.errors import ConfigError

_ROUNDING = 1e-9  # of weights that a person wrote with a dozen digits


@dataclass(frozen=True, slots=True)
class Ring:
    """Left, self, right with a third each; two peers halve, one is alone."""

    peers: int

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        n = self.peers
        return undirected(n, ((i, (i + 1) % n) for i in range(n))).without(dead)


@dataclass(frozen=True, slots=True)
class Torus:
    """Four neighbours and self with a fifth each, on rows x columns = peers.

    Without `rows` the most nearly square one; a prime number of peers has none and gives a ring.
    Where a side is 2 both neighbours are one peer, which counts once.
    """

    peers: int
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and (self.rows < 1 or self.peers % self.rows):
            raise ConfigError(
                f"{self.peers} peers do not fill {self.rows} rows",
                key="topology.rows",
                expected="a divisor of the number of peers",
            )

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        rows = self.rows or _near_root(self.peers)
        columns = self.peers // rows
        pairs = []
        for peer in range(self.peers):
            row, column = divmod(peer, columns)
            pairs.append((peer, row * columns + (column + 1) % columns))
            pairs.append((peer, (row + 1) % rows * columns + column))
        return undirected(self.peers, pairs).without(dead)


@dataclass(frozen=True, slots=True)
class Complete:
    """Everybody with everybody: the all-reduce of parameters (BAGUA's default "all")."""

    peers: int

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        return GroupMixing(self.peers, (tuple(range(self.peers)),)).without(dead)


@dataclass(frozen=True, slots=True)
class StaticExponential:
    """To self + 1, + 2, + 4 ... in every round (arXiv 2110.13363). Directed."""

    peers: int

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        shifts = [2**power for power in range(_exponents(self.peers, 2))]
        return circulant(self.peers, shifts).without(dead)


@dataclass(frozen=True, slots=True)
class OnePeerExponential:
    """To one peer per round (or k): shifts j (k+1)^i for j = 1..k, i rotating with the round.

    With k = 1 and a power of two peers the product of log2 n rounds is exactly the mean; the graph
    of Stochastic Gradient Push (arXiv 1811.10792). Directed: needs weights as soon as a peer dies.
    """

    peers: int
    peers_per_round: int = 1

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        return circulant(self.peers, self.shifts(t)).without(dead)

    def shifts(self, t: int) -> list[int]:
        k = self.peers_per_round
        step = (k + 1) ** (t % max(1, _exponents(self.peers, k + 1)))
        return [j * step for j in range(1, k + 1)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """One partner per round, and every round another (BAGUA's shift_one).

    Even n as in BAGUA: halves, left r meets right. Odd n, which BAGUA refuses: i meets the j with
    i + j = t (mod n), so that one peer rests per round and every pair meets once in n rounds.
    """

    peers: int

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        partners = [shift_one_peer(rank, step=t, peers=self.peers) for rank in range(self.peers)]
        pairs = tuple((one, other) for one, other in enumerate(partners) if one < other)
        return GroupMixing(self.peers, pairs).without(dead)


@dataclass(frozen=True, slots=True)
class RandomMatching:
    """Uniformly random pairs among the living; with an odd number one stays alone."""

    peers: int
    seed: int = 0

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        order = _shuffled(self.peers, dead, "matching", self.seed, t)
        pairs = zip(order[::2], order[1::2], strict=False)
        return GroupMixing(self.peers, tuple((min(pair), max(pair)) for pair in pairs))


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """floor(alive / size) groups among the living, leftovers dealt round-robin (the rule of the
    paper's own baseline), so groups have `size` peers or a few more."""

    peers: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(
                f"groups of {self.size}", key="topology.group_size", expected="at least 1"
            )

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        order = _shuffled(self.peers, dead, "groups", self.seed, t)
        if not order:
            return GroupMixing(self.peers, ())
        count = max(1, len(order) // self.size)
        groups = [order[i * self.size : (i + 1) * self.size] for i in range(count)]
        for index, peer in enumerate(order[count * self.size :]):
            groups[index % count].append(peer)
        return GroupMixing(self.peers, tuple(tuple(sorted(group)) for group in groups))


@dataclass(slots=True)
class MoshpitGrid:
    """Moshpit All-Reduce: peers that agree on all coordinates but number t mod d average.

    Where a peer stands depends on the rounds before, and those on who was dead: the schedule
    remembers the `dead` of each round that it was asked about, and replays.
    """

    peers: int
    sides: tuple[int, ...]
    seed: int = 0
    rule: str = "distinct"
    start: tuple[tuple[int, ...], ...] = ()  # default: distinct random cells
    _deaths: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)
    _known: tuple[int, list[tuple[int, ...]]] | None = field(default=None, repr=False)

    def sample(self, t: int, dead: Collection[int] = ()) -> Mixing:
        gone = frozenset(dead)
        if self._deaths.get(t, frozenset()) != gone:
            self._deaths[t] = gone
            if self._known is not None and self._known[0] > t:
                self._known = None  # the rounds after t went another way
        return GroupMixing(self.peers, tuple(self._groups(t, self.coordinates(t)).values()))

    def coordinates(self, t: int) -> list[tuple[int, ...]]:
        """Where every peer stands before round t."""
        if self._known is None or self._known[0] > t:
            self._known = (0, self._first_cells())
        now, cells = self._known
        for round_number in range(now, t):
            cells = self._after(round_number, cells)
        self._known = (t, cells)
        return cells

    def _first_cells(self) -> list[tuple[int, ...]]:
        if self.start:
            return list(self.start)
        indices = list(range(max(math.prod(self.sides), self.peers)))  # more peers than cells wrap
        random.Random(_seed("cells", self.seed, 0)).shuffle(indices)
        return [cell(index, self.sides) for index in indices[: self.peers]]

    def _groups(self, t: int, cells: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shape, gone = Shape(1, self.sides), self._deaths.get(t, frozenset())
        groups: dict[str, tuple[int, ...]] = {}
        for peer, coordinates in enumerate(cells):
            if peer not in gone:
                key = meeting_key(shape, coordinates, t)
                groups[key] = (*groups.get(key, ()), peer)
        return groups

    def _after(self, t: int, cells: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        moved = list(cells)
        for key, group in self._groups(t, cells).items():
            group_id = hashlib.blake2b(f"{self.seed}/{t}/{key}".encode(), digest_size=16).digest()
            for index, peer in enumerate(group):
                moved[peer] = rekey(
                    cells[peer],
                    shape=Shape(1, self.sides),
                    round_number=t,
                    group_id=group_id,
                    index=index,
                    size=len(group),
                    rule=self.rule,
                )
        return moved


@dataclass(frozen=True, slots=True)
class OwnTopology:
    """A graph from the operator. Invariant: every peer's value can get to every other peer, and
    nobody gives away more than it has.

    `weights`, one per pair, are the shares that cross an edge (both ways, or along an arrow); left
    out, `undirected` and `directed` say them.
    """

    peers: int
    pairs: tuple[tuple[int, int], ...]
    arrows: bool = False  # True: pairs are (from, to), and push-sum weights are needed
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_peers(self.peers)
        for pair in self.pairs:
            if not all(0 <= peer < self.peers for peer in pair):
                raise ConfigError(
                    f"edge {pair[0]} {pair[1]} names a peer that does not exist",
                    key="topology.edges",
                    expected=f"peers 0 to {self.peers - 1}",
                )
        if self.weights:
            self._check_weights()
        back = [(target, source) for source, target in self.pairs]
        there = list(self.pairs) if self.arrows else [*self.pairs, *back]
        home = back if self.arrows else there
        for arrows, way in ((there, "from"), (home, "to")):
            seen = reachable(self.peers, arrows)
            if not all(seen):
                raise ConfigError(
                    f"no way {way} peer 0 {'to' if way == 'from' else 'from'} {seen.index(False)}",
                    key="topology.edges",
                    expected="a connected graph",
                )

    def _check_weights(self) -> None:
        if len(self.weights) != len(self.pairs):
            raise ConfigError(
                f"{len(self.weights)} weights for {len(self.pairs)} edges",
                key="topology.weights",
                expected="one for each edge, or none at all",
            )
        seen: set[tuple[int, int]] = set()
        for (source, target), weight in zip(self.pairs, self.weights, strict=True):
            way = (source, target) if self.arrows else (min(source, target), max(source, target))
            if source == target or way in seen:
                raise ConfigError(
                    f"edge {source} {target} has two weights, or joins a peer to itself",
                    key="topology.edges",
                    expected="each pair of peers once; what a peer keeps is what is left",
                )
            seen.add(way)
            if not 0.0 < weight <= 1.0:
                raise ConfigError(
                    f"edge {source} {target} has the weight {weight}",
                    key="topology.weights",
                    expected="a share above 0, and at most 1",
                )
        for peer, own in enumerate(self._weighted().own):
            if own < -_ROUNDING:
                raise ConfigError(
                    f"the edges of peer {peer} carry {1.0 - own:.6g} of what it has",
                    key="topology.weights",
                    expected="at most 1 in all, so that rows and columns sum to one"
                    if not self.arrows
                    else "at most 1 in all, so that columns sum to one",
                )

    def sample(self, t: int, dead: Collection[int] = ()) -> EdgeMixing:
        if self.weights:
            return self._weighted().without(dead)
        weigh = directed if self.arrows else undirected
        return weigh(self.peers, self.pairs).without(dead)

    def _weighted(self) -> EdgeMixing:
        edges = []
        for (source, target), weight in zip(self.pairs, self.weights, strict=True):
            edges.append(Edge(source, target, weight))
            if not self.arrows:
                edges.append(Edge(target, source, weight))
        given: list[list[float]] = [[] for _ in range(self.peers)]
        for edge in edges:
            given[edge.source].append(edge.weight)
        # A sum of thirds is a few units above one now and then; nobody keeps less than nothing.
        own = [1.0 - math.fsum(weights) for weights in given]
        kept = tuple(max(0.0, left) if left > -_ROUNDING else left for left in own)
        return EdgeMixing(self.peers, tuple(edges), kept)


NAMES = (
    "ring",
    "torus",
    "complete",
    "static-exponential",
    "one-peer-exponential",
    "pairs",
    "random-matching",
    "random-groups",
    "moshpit",
)


def schedule_for(
    name: str, peers: int, *, seed: int = 0, group_size: int = 32, sides: Sequence[int] = ()
) -> MixingSchedule:
    """The schedule that a setting names. `group_size` is for random-groups, `sides` for moshpit."""
    require_peers(peers)
    match name:
        case "ring":
            return Ring(peers)
        case "torus":
            return Torus(peers)
        case "complete":
            return Complete(peers)
        case "static-exponential":
            return StaticExponential(peers)
        case "one-peer-exponential":
            return OnePeerExponential(peers)
        case "pairs":
            return Pairs(peers)
        case "random-matching":
            return RandomMatching(peers, seed)
        case "random-groups":
            return RandomGroups(peers, group_size, seed)
        case "moshpit":
            return MoshpitGrid(peers, tuple(sides) or (peers,), seed)
    raise ConfigError(f"unknown topology {name!r}", key="topology", expected=", ".join(NAMES))


def shift_one_peer(rank: int, *, step: int, peers: int) -> int:
    """The partner of `rank`; `rank` itself when it rests. See `Pairs`."""
    if peers % 2:
        return (step - rank) % peers
    half = peers // 2
    if rank < half:
        return (step + rank) % half + half
    return (rank - half - step) % half


def is_active(rank: int) -> bool:
    """AD-PSGD's bipartite split: odd ranks start exchanges, even ones only answer.

    An active peer waits for a passive one and never the other way round, so there is no cycle of
    waiting (arXiv 1710.06952, section 3.2).
    """
    return rank % 2 == 1


def passive_neighbours(rank: int, mixing: EdgeMixing) -> tuple[int, ...]:
    """Whom an active peer may choose from: its even neighbours, ascending.

    Empty for a passive peer, and where a graph has no even neighbour for it.
    """
    if not is_active(rank):
        return ()
    found = {edge.target: None for edge in mixing.edges if edge.source == rank}
    return tuple(sorted(peer for peer in found if not is_active(peer)))


def _exponents(peers: int, factor: int) -> int:
    """How many powers of `factor`, from 1 on, are below `peers`; integers, so no log to round."""
    count, power = 0, 1
    while power < peers:
        power *= factor
        count += 1
    return count


def _near_root(peers: int) -> int:
    """The largest divisor that is at most the square root."""
    rows = math.isqrt(peers)
    while peers % rows:
        rows -= 1
    return rows


def _shuffled(peers: int, dead: Collection[int], *words: object) -> list[int]:
    alive = [peer for peer in range(peers) if peer not in dead]
    random.Random(_seed(*words)).shuffle(alive)
    return alive


def _seed(*words: object) -> int:
    """The same number on every peer; hash() of a str differs between processes."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
