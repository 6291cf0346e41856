"""The primitives of `client.primitives` in one process: no network, no daemon, no clock.

    swarm = ArithmeticSwarm(4, seed=0)
    def train(peer: int) -> float:
        model = ...
        optimizer = by_name("onebit-adam", model.parameters(), swarm.peer(peer), lr=1e-3)
        ...
    losses = swarm.play(train)

Every peer is a thread; a round closes when all who play are in it. One rule: results depend on the
seed and on what peers bring, never on the order in which threads came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from moshpitd.client.primitives import (
    EXACT,
    Coding,
    Exchanged,
    Mean,
    Message,
    StoreOptions,
    Tensors,
)
from moshpitd.core.mixing import MixingSchedule
from moshpitd.core.topologies import schedule_for
from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.testing.asynchronous import (
    Memory,
    MemoryOfThreads,
    PairMeetings,
    Pairs,
    Shelf,
    ShelfStore,
)
from moshpitd.testing.coding import (
    Arithmetic,
    Brought,
    CodedAverage,
    Coder,
    Cut,
    Debts,
    check_alike,
    copies,
    payload_bytes,
)
from moshpitd.testing.rendezvous import Crowd, Rounds, Ticket

T = TypeVar("T")


class ArithmeticSwarm:
    """`count` peers. `cut` says which elements share a codec's scale, `coders` replaces codecs by
    name (own draws, float64), `topologies` mixing schedules by name.

    Faults are set by round and peer before the round: `lose_contribution`, `lose_result`,
    `lose_edge`; a peer that is not in `play(peers=...)` is dead.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        cut: Cut = Cut.PARTS,
        coders: Mapping[str, Coder] | None = None,
        topologies: Mapping[str, MixingSchedule] | None = None,
    ) -> None:
        self.count, self.seed = count, seed
        self.arithmetic = Arithmetic(seed, cut, dict(coders or {}))
        self.crowd = Crowd([f"peer{index}" for index in range(count)])
        self._topologies = dict(topologies or {})
        self._averages: dict[str, tuple[CodedAverage, Rounds[Brought, Mean]]] = {}
        self._neighbours: dict[str, tuple[Edges, Rounds[Sent, Exchanged]]] = {}
        self._meetings: dict[str, Pairs] = {}
        self._stores: dict[str, Shelf] = {}
        self._memories: dict[str, Memory] = {}

    def peer(self, index: int) -> ArithmeticPeer:
        """What one trainer gets in the place of a session."""
        if not 0 <= index < self.count:
            raise LocalProtocolError(f"peer {index}, expected 0 to {self.count - 1}")
        return ArithmeticPeer(self, index)

    def play(self, part: Callable[[int], T], peers: Iterable[int] | None = None) -> list[T]:
        """`part(peer)` in a thread for each of `peers` (default: all); what they returned, in
        order. Raises what the first of them raised."""
        chosen = list(range(self.count)) if peers is None else list(peers)
        ends = self.crowd.play({peer: _bound(part, peer) for peer in chosen})
        found: list[T] = []
        for peer in chosen:
            end = ends[peer]
            if isinstance(end, BaseException):
                raise end
            found.append(end)
        return found

    # -- faults -----------------------------------------------------------------------------------

    def lose_contribution(self, name: str, *, round: int, peer: int) -> None:
        """What this peer brings to that round does not get into the average."""
        self.average(name).lost_contributions.add((round, peer))

    def lose_result(self, name: str, *, round: int, peer: int, tensors: Collection[str]) -> None:
        """These tensors of that round's result do not get to this peer."""
        self.average(name).lost_results[round, peer] = frozenset(tensors)

    def lose_edge(self, name: str, *, round: int, between: tuple[int, int]) -> None:
        """Nothing passes between these two in that round, either way."""
        self.edges(name).lost.add((round, frozenset(between)))

    def lose_message(self, name: str, *, round: int, source: int, target: int) -> None:
        """What `source` sends to `target` in that round is lost, and `source` does not know."""
        self.edges(name).lost_messages.add((round, source, target))

    # -- what is under a name ---------------------------------------------------------------------

    def average(self, name: str) -> CodedAverage:
        """Also before a trainer opened it: then with faults only, and the trainer's coding."""
        return self._average(name, None)[0]

    def edges(self, name: str) -> Edges:
        return self._edges(name, None, None)[0]

    def bytes_sent(self, peer: int) -> int:
        """Payload of all group averages and exchanges."""
        counted = [channel.sent for channel, _ in self._averages.values()]
        counted += [channel.sent for channel, _ in self._neighbours.values()]
        return sum(sent.get(peer, 0) for sent in counted)

    def _average(
        self, name: str, coding: Coding | None
    ) -> tuple[CodedAverage, Rounds[Brought, Mean]]:
        with self.crowd.lock:
            if name not in self._averages:
                channel = CodedAverage(name, coding or EXACT, self.arithmetic)
                self._averages[name] = channel, Rounds(self.crowd, channel.work)
            found = self._averages[name]
            if coding is not None:
                found[0].coding = coding
            return found

    def _edges(
        self, name: str, topology: str | None, coding: Coding | None
    ) -> tuple[Edges, Rounds[Sent, Exchanged]]:
        with self.crowd.lock:
            if name not in self._neighbours:
                channel = Edges(name, self.arithmetic)
                self._neighbours[name] = channel, Rounds(self.crowd, channel.work)
            found = self._neighbours[name]
            if topology is not None:
                found[0].schedule = self.schedule(topology)
            if coding is not None:
                found[0].coding = coding
            return found

    def schedule(self, topology: str) -> MixingSchedule:
        own = self._topologies.get(topology)
        return own or schedule_for(topology, self.count, seed=self.seed)


def _bound(part: Callable[[int], T], peer: int) -> Callable[[], T]:
    return lambda: part(peer)


@dataclass(frozen=True, slots=True)
class ArithmeticPeer:
    """One peer's way to the swarm: `Averages`, `Neighbourhood`, `Stores` and `Memories`."""

    swarm: ArithmeticSwarm
    index: int

    @property
    def name(self) -> str:
        return f"peer{self.index}"

    def averages(self, name: str, *, like: Tensors, coding: Coding = EXACT) -> _Average:
        channel, rounds = self.swarm._average(name, coding)
        return _Average(self.index, channel, rounds, copies(like))

    def neighbours(
        self, name: str, *, like: Tensors, topology: str, coding: Coding = EXACT
    ) -> _Neighbours:
        channel, rounds = self.swarm._edges(name, topology, coding)
        return _Neighbours(self.index, channel, rounds)

    def meetings(self, name: str, *, like: Tensors, topology: str) -> PairMeetings:
        with self.swarm.crowd.lock:
            schedule = self.swarm.schedule(topology)
            pairs = self.swarm._meetings.setdefault(name, Pairs(schedule, self.swarm.seed))
        return PairMeetings(self.swarm.crowd, self.index, pairs)

    def store(self, name: str, *, start: Tensors, options: StoreOptions) -> ShelfStore:
        with self.swarm.crowd.lock:
            shelf = self.swarm._stores.setdefault(name, Shelf(copies(start), options))
        if shelf.options != options:  # as a daemon says it
            raise TrainerError(
                f"store {name!r} has {shelf.options}, expected by {self.name}: {options}",
                reason="store_differs",
            )
        return ShelfStore(self.swarm.crowd, self.name, shelf)

    def shared(self, name: str, *, start: Tensors) -> MemoryOfThreads:
        """All peers are one node's trainers."""
        with self.swarm.crowd.lock:
            memory = self.swarm._memories.setdefault(name, Memory(copies(start)))
        return MemoryOfThreads(self.swarm.crowd, memory)


@dataclass(slots=True)
class _Average:
    peer: int
    channel: CodedAverage
    rounds: Rounds[Brought, Mean]
    like: dict[str, Tensor]

    def average(self, tensors: Tensors, *, weight: int = 1) -> Mean:
        return self.begin(tensors, weight=weight).land()

    def begin(self, tensors: Tensors, *, weight: int = 1) -> Ticket[Mean]:
        check_alike(self.like, tensors, self.channel.name)
        return self.rounds.begin(self.peer, Brought(copies(tensors), weight))

    def state_dict(self) -> dict[str, Any]:
        return self.channel.debts.get(self.peer, Debts()).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.channel.debts[self.peer] = Debts.loaded(state)

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Sent:
    tensors: dict[str, Tensor]
    mass: float
    full: dict[str, Tensor] | None
    knows: frozenset[str]


class Edges:
    """One exchange with neighbours. Invariant: columns of the mixing sum to one, whoever is dead
    and whatever is lost: a share that cannot be delivered stays with its sender."""

    def __init__(self, name: str, arithmetic: Arithmetic) -> None:
        self.name, self.arithmetic = name, arithmetic
        self.schedule: MixingSchedule | None = None
        self.coding = EXACT
        self.sent: dict[int, int] = {}
        self.lost: set[tuple[int, frozenset[int]]] = set()
        self.lost_messages: set[tuple[int, int, int]] = set()  # (round, source, target)
        self._counts: dict[int, int] = {}

    def rows(self, number: int, present: Collection[int]) -> list[dict[int, float]]:
        """Per target: source -> weight, after deaths and losses."""
        assert self.schedule is not None  # opened before it is used
        dead = [peer for peer in range(self.schedule.peers) if peer not in present]
        rows = self.schedule.sample(number, dead).rows()
        for lost, pair in self.lost:
            if lost != number:
                continue
            for source, target in (tuple(pair), tuple(pair)[::-1]):
                share = rows[target].pop(source, 0.0)
                rows[source][source] = rows[source].get(source, 0.0) + share
        for lost, source, target in self.lost_messages:
            if lost == number:  # its receiver has nothing to mix with but its own
                share = rows[target].pop(source, 0.0)
                rows[target][target] = rows[target].get(target, 0.0) + share
        return rows

    def work(self, number: int, brought: dict[int, Sent]) -> dict[int, Exchanged]:
        """For `rendezvous.Rounds`."""
        assert self.schedule is not None
        coded = {}
        for peer, one in brought.items():
            coded[peer] = self.arithmetic.message(
                self.coding,
                one.tensors,
                partial(self.arithmetic.draw, self.name, number, peer=peer, result=False),
            )
        meant, rows = self.schedule.sample(number).rows(), self.rows(number, brought)
        self._count(rows, brought)
        found = {}
        for peer in brought:
            messages = tuple(
                self._message(source, peer, share, brought[source], coded[source])
                for source, share in rows[peer].items()
                if source != peer
            )
            heard = {message.peer for message in messages}
            silent = [f"peer{source}" for source in meant[peer] if source != peer]
            found[peer] = Exchanged(
                own_share=rows[peer].get(peer, 0.0),
                own=copies(coded[peer]),
                messages=messages,
                unheard=tuple(name for name in silent if name not in heard),
            )
        for peer in brought:
            self._counts[peer] = self._counts.get(peer, 0) + 1
        return found

    def _count(self, rows: list[dict[int, float]], brought: Mapping[int, Sent]) -> None:
        for target in brought:
            for source in rows[target]:
                if source != target:
                    one = brought[source]
                    whole = one.full is not None and f"peer{target}" not in one.knows
                    size = payload_bytes(one.tensors, self.coding)
                    size += payload_bytes(one.tensors, EXACT) if whole else 0
                    self.sent[source] = self.sent.get(source, 0) + size

    def _message(
        self, source: int, target: int, share: float, sent: Sent, coded: Tensors
    ) -> Message:
        whole = None if f"peer{target}" in sent.knows else sent.full
        return Message(
            peer=f"peer{source}",
            share=share,
            tensors=copies(coded),
            mass=sent.mass,
            sequence=self._counts.get(source, 0),
            full=None if whole is None else copies(whole),
        )


@dataclass(slots=True)
class _Neighbours:
    peer: int
    channel: Edges
    rounds: Rounds[Sent, Exchanged]

    def exchange(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> Exchanged:
        return self.begin(tensors, mass=mass, full=full, knows=knows).land()

    def begin(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> Ticket[Exchanged]:
        whole = None if full is None else copies(full)
        sent = Sent(copies(tensors), mass, whole, frozenset(knows))
        return self.rounds.begin(self.peer, sent)

    def close(self) -> None:
        return
