"""Meetings in pairs: whatever is delayed, lost or cut, both halves of a mean are applied or none,
so the sum over all peers is what their trainers made it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from moshpitd.core.effects import ClosePair, Effect, Finish, OpenPair, PushPair, Send
from moshpitd.core.events import Attached, MeetAsked, TrainerGone, ValuesKept
from moshpitd.core.messages import Lineage, Message, Pair, PairAnswer, Record
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer

STEP_S = 0.05


@dataclass
class Half:
    """The data plane of one meeting at one peer."""

    opened: OpenPair
    staged: Fraction | None = None
    settled: bool = False


@dataclass
class Node:
    peer: Peer
    value: Fraction
    halves: dict[bytes, Half] = field(default_factory=dict)
    applied: set[bytes] = field(default_factory=set)
    ends: list[Outcome] = field(default_factory=list)
    asks: int = 0


class Ring:
    """`loss`: chance of a control message, or of a push, to vanish."""

    def __init__(self, peers: int, seed: int, *, loss: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.loss, self.now = loss, 0.0
        self.names = [f"peer{index}" for index in range(peers)]
        self.nodes = {}
        for index, name in enumerate(self.names):
            peer = Peer(Params(), name, random.Random(f"{seed}/{name}"), run="r")
            attached = Attached("t", b"schema", "", (8,), b"digest")
            peer.handle(attached, 0.0)
            peer.handle(ValuesKept("t"), 0.0)
            peer.take_effects()
            self.nodes[name] = Node(peer, Fraction(10 * index))
        for name, node in self.nodes.items():
            for other in self.names:
                if other != name:
                    record = Record(
                        other, 1, b"schema", 0, Lineage(other, b"digest"), addresses=("h:1",)
                    )
                    node.peer.state.swarm.hear(record, 0.0, direct=True)
        self.total = sum((node.value for node in self.nodes.values()), Fraction(0))
        self.todo: list[tuple[str, str, object, object]] = []

    @property
    def sum(self) -> Fraction:
        return sum((node.value for node in self.nodes.values()), Fraction(0))

    def ask(self, name: str) -> None:
        node = self.nodes[name]
        if len(node.ends) == node.asks:
            node.asks += 1
            node.peer.handle(MeetAsked("t", f"{node.asks}", "ring", 20.0), self.now)
            self.collect(name)

    def train(self, name: str) -> None:
        update = Fraction(self.rng.randrange(-5, 6))
        self.nodes[name].value += update
        self.total += update

    def cut(self, one: str, other: str) -> None:
        """Their link breaks, and with it what is on its way on it."""
        self.todo = [
            step for step in self.todo if step[0] != "data" or {step[1], step[2]} != {one, other}
        ]
        self.todo += [("link", one, other, None), ("link", other, one, None)]

    def step(self) -> None:
        self.now += STEP_S
        if self.todo:
            kind, to, what, more = self.todo.pop(self.rng.randrange(len(self.todo)))
            pairs = self.nodes[to].peer.pairs
            if kind == "message":
                assert isinstance(more, (Pair, PairAnswer))
                pairs.receive(str(what), more, self.now)
            elif kind == "link":
                pairs.lost(str(what), Reason.LINK_LOST)
            elif kind == "arrived":
                assert isinstance(what, bytes)
                pairs.arrived(what)
            else:
                assert isinstance(more, tuple)
                self.data(to, str(what), *more)
            self.collect(to)
        for name in self.names:
            self.nodes[name].peer.pairs.tick(self.now)
            self.collect(name)

    def data(self, to: str, source: str, nonce: bytes, value: Fraction) -> None:
        node = self.nodes[to]
        half = node.halves.get(nonce)
        if half is None or half.staged is not None or half.opened.peer != source:
            return
        half.staged = value
        if half.opened.active:
            if nonce not in node.applied:
                node.value += value
            node.applied.add(nonce)
        self.todo.append(("arrived", to, nonce, None))

    def collect(self, name: str) -> None:
        node = self.nodes[name]
        effects, node.peer.state.effects = node.peer.state.effects, []
        for effect in effects:
            self.perform(name, node, effect)

    def perform(self, name: str, node: Node, effect: Effect) -> None:
        lost = self.rng.random() < self.loss
        match effect:
            case Send() if isinstance(effect.message, (Pair, PairAnswer)) and not lost:
                self.todo.append(("message", effect.to, name, effect.message))
            case OpenPair() if effect.active and effect.nonce in node.applied:
                self.todo.append(("arrived", name, effect.nonce, None))
            case OpenPair():
                node.halves[effect.nonce] = Half(effect)
            case ClosePair():
                node.halves.pop(effect.nonce, None)
            case PushPair():
                half = node.halves.get(effect.nonce)
                if half is not None and not half.opened.active and half.staged is not None:
                    if not half.settled:
                        delta = (node.value - half.staged) / 2
                        node.value -= delta
                        half.staged, half.settled = delta, True
                    self.push(name, half, half.staged, lost=lost)
                elif half is not None and half.opened.active:
                    self.push(name, half, node.value, lost=lost)
            case Finish():
                node.ends.append(effect.outcome)
            case _:
                pass

    def push(self, name: str, half: Half, value: Fraction, *, lost: bool) -> None:
        if not lost:
            self.todo.append(("data", half.opened.peer, name, (half.opened.nonce, value)))

    def settle(self) -> None:
        """Faults stop; everybody asks until nobody is unsure."""
        self.loss = 0.0
        for _ in range(6000):
            for name in self.names:
                if self.nodes[name].peer.pairs.unsure:
                    self.ask(name)
            self.step()
            unsure = any(node.peer.pairs.unsure for node in self.nodes.values())
            if not self.todo and not unsure:
                return
        raise AssertionError("somebody stays unsure")


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_the_sum_moves_by_the_updates_alone(loss: float) -> None:
    met = 0
    for seed in range(40):
        ring = Ring(2 + seed % 5, seed, loss=loss)
        for _ in range(400):
            choice = ring.rng.random()
            if choice < 0.2:
                ring.ask(ring.rng.choice(ring.names))
            elif choice < 0.3:
                ring.train(ring.rng.choice(ring.names))
            elif choice < 0.32 and loss:
                ring.cut(*ring.rng.sample(ring.names, 2))
            ring.step()
        ring.settle()
        assert ring.sum == ring.total, f"seed {seed}"
        ends = [end for node in ring.nodes.values() for end in node.ends]
        met += sum(1 for end in ends if end.status is Status.COMPLETE)
    assert met > 200


def test_without_faults_an_active_peer_gets_the_mean_of_two() -> None:
    ring = Ring(2, 0)
    ring.ask("peer1")
    while not ring.nodes["peer1"].ends:
        ring.step()
    assert [node.value for node in ring.nodes.values()] == [5, 5]
    assert ring.nodes["peer1"].ends[0].contributors == ("peer0",)
    ring.ask("peer0")  # passive: it only answers
    assert ring.nodes["peer0"].ends[0].reason is Reason.NO_PEERS


def test_a_partner_that_is_gone_costs_a_meeting_and_no_more() -> None:
    ring = Ring(2, 0)
    ring.nodes["peer0"].peer.handle(TrainerGone("t"), 0.0)
    ring.nodes["peer0"].peer.take_effects()
    ring.ask("peer1")
    while not ring.nodes["peer1"].ends:
        ring.step()
    assert ring.nodes["peer1"].ends[0].reason is Reason.REFUSED
    assert ring.nodes["peer1"].value == 10
    assert ring.now < 1.0
    ring.loss = 1.0
    ring.ask("peer1")  # and one that says nothing, a bounded time
    while len(ring.nodes["peer1"].ends) < 2:
        ring.step()
    assert ring.nodes["peer1"].ends[1].reason is Reason.NO_ANSWER
    assert ring.now < 1.0 + Params().answer_timeout_s + 2 * STEP_S


def test_an_answer_to_somebody_else_is_nothing() -> None:
    ring = Ring(4, 0)
    ring.ask("peer1")
    meeting = ring.nodes["peer1"].peer.pairs.meeting
    assert meeting is not None
    answer: Message = PairAnswer(meeting.nonce, ready=True)
    ring.nodes["peer1"].peer.pairs.receive("peer3", answer, ring.now)
    assert not meeting.answered
