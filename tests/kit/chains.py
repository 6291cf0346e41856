"""Trainers that exchange with neighbours again and again, on whole Peers: a heap of instants,
messages that take a while, overtake each other, vanish and come twice, links that break, peers that
die and come late. One rule: everything comes from one seed; no clock, no threads.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moshpitd.core.effects import (
    Announce,
    Close,
    Effect,
    Finish,
    LookUp,
    Note,
    OpenEdges,
    Send,
)
from moshpitd.core.events import (
    Announced,
    Attached,
    Contributed,
    EdgeArrived,
    EdgesCoded,
    Event,
    Found,
    LinkLost,
    Listened,
    Mix,
    Received,
    Ticked,
    TrainerGone,
    Undelivered,
)
from moshpitd.core.messages import Join, Message, Record
from moshpitd.core.outcome import Outcome
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer

SCHEMA = b"schema"
PARTS = (1024, 512)
FAST = Params(window_s=2.0, answer_timeout_s=1.0)
LOOK_S = 0.3


@dataclass
class Node:
    """One daemon and its trainer. Every exchange leaves its outcome, and when it began and ended,
    under its sequence."""

    peer: Peer
    compute_s: Callable[[], float]
    steps: int = 10**9
    sequence: int = 0
    alive: bool = True
    open: dict[bytes, OpenEdges] = field(default_factory=dict)
    over: set[bytes] = field(default_factory=set)
    early: dict[bytes, list[tuple[str, int]]] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    asked: int = 0  # Joins that it said
    opened: list[bytes] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    wakes_at: float = float("inf")


class Chains:
    """`loss` and `twice`: chances of a control message to vanish, or to come once more later."""

    def __init__(
        self,
        count: int,
        topology: str,
        *,
        seed: int = 0,
        delay_s: float = 0.02,
        jitter: float = 0.0,
        loss: float = 0.0,
        twice: float = 0.0,
        params: Params = FAST,
        parts: tuple[int, ...] = PARTS,
    ) -> None:
        self.rng = random.Random(f"chains/{seed}")
        self.topology, self.params, self.parts = topology, params, parts
        self.delay_s, self.jitter, self.loss, self.twice = delay_s, jitter, loss, twice
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.nodes: dict[str, Node] = {}
        self.directory: dict[str, dict[str, Record]] = {}
        self.cut_off: set[frozenset[str]] = set()
        self.said: list[tuple[str, str, Message]] = []
        for _ in range(count):
            self.add()
        self.later(LOOK_S, self._listen)

    def add(self, *, compute_s: Callable[[], float] | None = None) -> str:
        """One more peer, whose trainer begins at once."""
        number = len(self.nodes)
        name = f"peer{number:02}"
        rng = random.Random(f"{name}/{self.rng.random()}")
        peer = Peer(self.params, name, rng, run="r", sequence=int(self.now * 1000))
        draw = random.Random(f"compute/{name}/{self.rng.random()}")
        node = Node(peer, compute_s or (lambda: draw.uniform(0.05, 0.08)))
        self.nodes[name] = node
        self.tell(name, Attached("t", SCHEMA, "text", self.parts, SCHEMA))
        self.later(0.01, lambda: self.contribute(name))
        return name

    def contribute(self, name: str) -> None:
        node = self.nodes[name]
        if not node.alive or node.sequence >= node.steps:
            return
        sequence, node.sequence = node.sequence, node.sequence + 1
        node.began[sequence] = self.now
        mix = Mix(self.topology, sequence)
        self.tell(name, Contributed("t", str(sequence), 1, timeout_s=30.0, mix=mix))

    # -- faults

    def kill(self, name: str) -> None:
        """Its links break; what it had sent still arrives."""
        self.nodes[name].alive = False
        for other in self.nodes:
            self.later(self._takes(), lambda other=other: self.tell(other, LinkLost(name)))  # type: ignore[misc]

    def leave(self, name: str) -> None:
        """Its trainer goes; the daemon stays."""
        self.nodes[name].steps = 0
        self.tell(name, TrainerGone("t"))

    def cut(self, one: str, other: str) -> None:
        """The link breaks once, with what is on its way; the next exchange makes another."""
        pair = frozenset((one, other))
        self.cut_off.add(pair)

        def mended() -> None:
            self.cut_off.discard(pair)

        for name, gone in ((one, other), (other, one)):
            self.later(self._takes(), lambda name=name, gone=gone: self.tell(name, LinkLost(gone)))  # type: ignore[misc]
        self.later(2 * self.delay_s, mended)

    # -- time

    def later(self, in_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + in_s, next(self.numbers), what))

    def run(self, until_s: float) -> None:
        while self.heap and self.heap[0][0] <= until_s:
            at, _, what = heapq.heappop(self.heap)
            self.now = max(self.now, at)
            what()
        self.now = until_s

    def settle(self, steps: int, *, within_s: float = 120.0) -> None:
        """Until all that live have made so many steps more than the furthest has begun."""
        aim = steps + max(node.sequence for node in self.nodes.values() if node.alive)
        until_s = self.now + within_s

        def open_ones() -> list[str]:
            return [n for n, node in self.nodes.items() if node.alive and len(node.ended) < aim]

        while open_ones():
            assert self.now < until_s, f"{open_ones()} made no {steps} steps in {within_s:g} s"
            self.run(min(until_s, self.now + 0.5))

    # -- one peer

    def tell(self, name: str, event: Event) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        node.peer.handle(event, self.now)
        for effect in node.peer.take_effects():
            self._perform(name, node, effect)
        self._wake(name, node)

    def _wake(self, name: str, node: Node) -> None:
        at = node.peer.deadline()
        if at is None or at >= node.wakes_at:
            return
        node.wakes_at = at

        def tick() -> None:
            if node.wakes_at == at:
                node.wakes_at = float("inf")
                self.tell(name, Ticked())

        self.later(max(0.0, at - self.now), tick)

    def _listen(self) -> None:
        for name, node in self.nodes.items():
            if node.open:
                self.tell(name, Listened(tuple(sorted(node.heard))))
            node.heard.clear()
            node.heard |= {
                other
                for other, one in self.nodes.items()
                if one.alive and frozenset((name, other)) not in self.cut_off
            }
        self.later(LOOK_S, self._listen)

    def _perform(self, name: str, node: Node, effect: Effect) -> None:
        match effect:
            case Send():
                node.asked += isinstance(effect.message, Join)
                self.said.append((name, effect.to, effect.message))
                self._post(name, effect.to, effect.message)
            case Announce():
                self.directory.setdefault(effect.key, {})[name] = effect.record
                if effect.ttl_s <= 0:
                    del self.directory[effect.key][name]
                self.later(self._takes(), lambda: self.tell(name, Announced(effect.key, True)))
            case LookUp():
                records = self.directory.get(effect.key, {})
                found = tuple(record for other, record in records.items() if other != name)
                answer = Found(effect.key, found, ok=True)
                self.later(2 * self._takes(), lambda: self.tell(name, answer))
            case OpenEdges():
                self._open(name, node, effect)
            case Close():
                node.open.pop(effect.group_id, None)
                node.over.add(effect.group_id)
            case Finish():
                sequence = int(effect.token)
                node.outcomes[sequence], node.ended[sequence] = effect.outcome, self.now
                self.later(node.compute_s(), lambda: self.contribute(name))
            case Note():
                pass
            case _:
                pass  # snapshots: nobody takes one here

    def _post(self, sender: str, to: str, message: Message) -> None:
        other = self.nodes.get(to)
        if other is None or not other.alive:
            undelivered = Undelivered(to, message)
            self.later(2 * self._takes(), lambda: self.tell(sender, undelivered))
            return
        if self.rng.random() < self.loss:
            return
        for _ in range(1 + (self.rng.random() < self.twice)):
            self.later(self._takes(), lambda: self.tell(to, Received(sender, message)))

    def _open(self, name: str, node: Node, effect: OpenEdges) -> None:
        group_id, members = effect.group.group_id, effect.group.members
        assert group_id not in node.over, "opened twice"
        node.open[group_id] = effect
        node.opened.append(group_id)
        self.later(0.0, lambda: self.tell(name, EdgesCoded(group_id)))
        for target in effect.targets:
            to = members[target].peer_id
            at = self._takes()
            for left in reversed(range(len(self.parts))):
                at += 1e-4
                self.later(
                    at,
                    lambda to=to, left=left: self._frame(name, to, group_id, left),  # type: ignore[misc]
                )
        for sender, left in node.early.pop(group_id, []):
            self._land(name, node, sender, group_id, left)

    def _frame(self, sender: str, to: str, group_id: bytes, left: int) -> None:
        node = self.nodes[to]
        if not node.alive or frozenset((sender, to)) in self.cut_off or group_id in node.over:
            return
        if group_id in node.open:
            self._land(to, node, sender, group_id, left)
        else:
            node.early.setdefault(group_id, []).append((sender, left))

    def _land(self, name: str, node: Node, sender: str, group_id: bytes, left: int) -> None:
        opened = node.open[group_id]
        index = next(i for i, m in enumerate(opened.group.members) if m.peer_id == sender)
        if index in opened.sources:
            event = EdgeArrived(group_id, index, left)
            self.later(0.0, lambda: self.tell(name, event))

    def _takes(self) -> float:
        return self.delay_s * (1.0 + self.jitter * self.rng.random())
