"""Meetings in pairs: whatever is delayed, lost or cut, both halves of a mean are applied or none,
so the sum over all peers is what their trainers made it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from moshpitd.core.effects import ClosePair, Effect, Finish, OpenPair, PushPair, Send
from moshpitd.core.events import (
    Attached,
    Cancelled,
    Drained,
    Event,
    MeetAsked,
    PairArrived,
    PairFailed,
    Received,
    Ticked,
    TrainerGone,
    Undelivered,
    ValuesKept,
)
from moshpitd.core.messages import Hello, Lineage, Pair, PairAnswer, Record
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.pairs import KEPT
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
    answer = PairAnswer(meeting.nonce, ready=True)
    ring.nodes["peer1"].peer.pairs.receive("peer3", answer, ring.now)
    assert not meeting.answered


# -- one peer at a time: of two, peer1 is active and peer0 answers


def tell(ring: Ring, name: str, event: Event, now: float = 0.0) -> list[Effect]:
    """What it has to say about the meeting, or to do for it."""
    peer = ring.nodes[name].peer
    peer.handle(event, now)
    return [
        effect
        for effect in peer.take_effects()
        if isinstance(effect, (OpenPair, PushPair, ClosePair, Finish))
        or (isinstance(effect, Send) and isinstance(effect.message, (Pair, PairAnswer)))
    ]


def asks(ring: Ring, token: str, now: float = 0.0) -> Pair:
    """peer1 asks for a meeting: the question that goes to peer0."""
    opened, sent = tell(ring, "peer1", MeetAsked("t", token, "ring", 20.0), now)
    assert isinstance(opened, OpenPair)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Pair)
    assert (sent.to, sent.message.nonce) == ("peer0", opened.nonce)
    return sent.message


def ready(ring: Ring, nonce: bytes) -> list[Effect]:
    return tell(ring, "peer1", Received("peer0", PairAnswer(nonce, ready=True)))


def invited(ring: Ring, nonce: bytes, sender: str = "peer1", *, again: bool = False) -> PairAnswer:
    """What peer0 answers to a question."""
    effects = tell(ring, "peer0", Received(sender, Pair(nonce, again=again)))
    sent = [effect for effect in effects if isinstance(effect, Send)]
    assert [one.to for one in sent] == [sender]
    assert isinstance(sent[0].message, PairAnswer)
    return sent[0].message


def introduce(ring: Ring, name: str, schema: bytes = b"schema") -> None:
    """peer0 knows of it from now on."""
    record = Record(name, 1, schema, 0, Lineage(name, b"digest"), addresses=("h:1",))
    ring.nodes["peer0"].peer.state.swarm.hear(record, 0.0, direct=True)


def ends(effects: list[Effect]) -> list[tuple[str, Status, Reason | None]]:
    found = [effect for effect in effects if isinstance(effect, Finish)]
    return [(one.token, one.outcome.status, one.outcome.reason) for one in found]


NONCE = b"n" * 16


def test_a_meeting_that_cannot_be_is_a_failed_one() -> None:
    ring = Ring(2, 0)
    unknown = tell(ring, "peer1", MeetAsked("other", "1", "ring", 20.0))
    assert ends(unknown) == [("1", Status.FAILED, Reason.NO_TRAINER)]
    asks(ring, "2")
    second = tell(ring, "peer1", MeetAsked("t", "3", "ring", 20.0))
    assert ends(second) == [("3", Status.FAILED, Reason.NO_TRAINER)]
    ring.nodes["peer0"].peer.handle(Drained(), 0.0)
    drained = tell(ring, "peer0", MeetAsked("t", "4", "ring", 20.0))
    assert ends(drained) == [("4", Status.FAILED, Reason.DRAINING)]


def test_a_withdrawn_meeting_is_over_and_no_other_is() -> None:
    ring = Ring(2, 0)
    nonce = asks(ring, "1").nonce
    assert tell(ring, "peer1", Cancelled("2")) == []
    withdrawn = tell(ring, "peer1", Cancelled("1"))
    assert ClosePair(nonce) in withdrawn
    assert ends(withdrawn) == [("1", Status.ALONE, Reason.WITHDRAWN)]
    assert ready(ring, nonce) == [], "nobody waits for that answer any more"


def test_an_answer_that_comes_after_the_end_is_not_asked_for_again() -> None:
    for late in (False, True):
        ring = Ring(2, 0)
        first = asks(ring, "1")
        assert ready(ring, first.nonce) == [PushPair(first.nonce)]
        tell(ring, "peer1", Cancelled("1"))
        if late:  # both halves are applied: nothing is left to ask for
            assert tell(ring, "peer1", PairArrived(first.nonce)) == []
        second = asks(ring, "2")
        assert (second.again, second.nonce == first.nonce) == (not late, not late)


def test_who_is_told_twice_that_it_may_send_sends_once() -> None:
    ring = Ring(2, 0)
    nonce = asks(ring, "1").nonce
    assert ready(ring, nonce) == [PushPair(nonce)]
    assert ready(ring, nonce) == []
    tell(ring, "peer1", Cancelled("1"))
    assert asks(ring, "2").again
    # Its partner knows of no values under that nonce yet asks for some: what it had may be applied.
    assert ready(ring, nonce) == []


def test_values_that_cannot_be_used_cost_the_meeting_and_a_strike() -> None:
    ring = Ring(2, 0)
    passive, active = (ring.nodes[name].peer.state.swarm for name in ring.names)
    assert invited(ring, NONCE).ready
    refused = tell(ring, "peer0", PairFailed(NONCE, Reason.NOT_FINITE))
    assert refused == [ClosePair(NONCE), Send("peer1", PairAnswer(NONCE))]
    assert passive.strikes("peer1", 0.0) == 1.0
    assert tell(ring, "peer0", PairFailed(NONCE, Reason.NOT_FINITE)) == [], "it is over already"
    assert passive.strikes("peer1", 0.0) == 1.0

    nonce = asks(ring, "1").nonce
    ready(ring, nonce)
    assert tell(ring, "peer1", PairFailed(NONCE, Reason.NOT_FINITE)) == [], "of another meeting"
    failed = tell(ring, "peer1", PairFailed(nonce, Reason.NOT_FINITE))
    assert ends(failed) == [("1", Status.ALONE, Reason.NOT_FINITE)]
    assert active.strikes("peer0", 0.0) == 1.0
    assert not asks(ring, "2").again, "the same answer would be as useless again"


def test_values_of_our_own_that_are_gone_are_nobodys_fault() -> None:
    ring = Ring(2, 0)
    assert invited(ring, NONCE).ready
    refused = tell(ring, "peer0", PairFailed(NONCE, Reason.NO_TRAINER))
    assert refused == [ClosePair(NONCE), Send("peer1", PairAnswer(NONCE))]
    assert ring.nodes["peer0"].peer.state.swarm.strikes("peer1", 0.0) == 0.0


def test_who_is_unknown_or_struck_out_is_not_met() -> None:
    ring = Ring(2, 0)
    peer0 = ring.nodes["peer0"].peer
    stranger = Received("stranger", Pair(NONCE))
    peer0.handle(stranger, 0.0)
    sent = [e.message for e in peer0.take_effects() if isinstance(e, Send) and e.to == "stranger"]
    assert sent == [Hello(peer0.record), PairAnswer(NONCE)], "it is asked who it is"
    introduce(ring, "stranger", b"other tensors")
    assert invited(ring, NONCE, "stranger") == PairAnswer(NONCE)
    introduce(ring, "liar")
    for index in range(int(Params().max_strikes)):
        assert invited(ring, bytes([index]) * 16, "liar").ready
        tell(ring, "peer0", PairFailed(bytes([index]) * 16, Reason.NOT_FINITE))
    assert invited(ring, NONCE, "liar") == PairAnswer(NONCE)
    assert invited(ring, NONCE).ready, "of which the others know nothing"


def test_a_name_that_cannot_be_one_is_a_strike() -> None:
    for length in (0, 15, 17):
        ring = Ring(2, 0)
        assert not invited(ring, b"n" * length).ready
        assert ring.nodes["peer0"].peer.state.swarm.strikes("peer1", 0.0) == 1.0
    ring = Ring(2, 0)
    nonce = asks(ring, "1").nonce
    effects = tell(ring, "peer1", Received("peer0", Pair(nonce)))
    assert effects == [Send("peer0", PairAnswer(nonce))], "ours is not opened a second time"


def test_values_of_a_trainer_that_left_meanwhile_are_not_met() -> None:
    ring = Ring(2, 0)
    tell(ring, "peer0", TrainerGone("t"))
    tell(ring, "peer0", ValuesKept("t"))  # its copying ended after its trainer had
    assert not invited(ring, NONCE).ready


def test_partners_that_never_come_back_are_forgotten_some_day() -> None:
    ring = Ring(2, 0)
    pairs = ring.nodes["peer1"].peer.pairs
    most = Params().max_candidates
    pairs.unsure = {f"gone{index}": b"" for index in range(most)}
    ready(ring, asks(ring, "1").nonce)
    assert len(pairs.unsure) == most
    assert "gone0" not in pairs.unsure
    assert "peer0" in pairs.unsure


def test_a_passive_peer_moves_once_per_meeting() -> None:
    ring = Ring(2, 0)
    assert invited(ring, NONCE).ready
    assert tell(ring, "peer0", PairArrived(NONCE)) == [PushPair(NONCE)]
    assert tell(ring, "peer0", PairArrived(NONCE)) == []
    assert invited(ring, NONCE, again=True).done


def test_the_oldest_difference_is_forgotten_and_not_given_to_its_active() -> None:
    ring = Ring(2, 0)
    nonces = [bytes([index]) * 16 for index in range(KEPT + 1)]
    for index, nonce in enumerate(nonces):
        introduce(ring, f"active{index}")
        assert invited(ring, nonce, f"active{index}").ready
        arrived = tell(ring, "peer0", PairArrived(nonce))
        forgotten = [ClosePair(nonces[0])] if index == KEPT else []
        assert arrived == [PushPair(nonce), *forgotten]
    assert invited(ring, nonces[0], "active0", again=True) == PairAnswer(nonces[0])
    assert invited(ring, nonces[1], "active1", again=True).done


def test_half_of_a_message_that_comes_again_is_begun_anew() -> None:
    ring = Ring(2, 0)
    assert invited(ring, NONCE).ready
    assert invited(ring, NONCE, "stranger") == PairAnswer(NONCE)
    # The stranger's question has closed nothing: what is under way still arrives.
    effects = tell(ring, "peer0", Received("peer1", Pair(NONCE, again=True)))
    assert effects == [ClosePair(NONCE), Send("peer1", PairAnswer(NONCE))]
    assert invited(ring, NONCE).ready


def test_a_trainer_that_goes_takes_its_meetings_with_it() -> None:
    ring = Ring(2, 0)
    assert invited(ring, NONCE).ready
    assert tell(ring, "peer0", TrainerGone("t")) == [ClosePair(NONCE)]
    assert invited(ring, NONCE) == PairAnswer(NONCE)
    nonce = asks(ring, "1").nonce
    assert ends(tell(ring, "peer1", TrainerGone("t"))) == [("1", Status.ALONE, Reason.TRAINER_GONE)]
    assert ready(ring, nonce) == []


@pytest.mark.parametrize("answered", [False, True])
def test_woken_only_when_it_asks_to_be_a_meeting_ends_in_time(answered: bool) -> None:
    ring = Ring(2, 0)
    peer, nonce = ring.nodes["peer1"].peer, asks(ring, "1").nonce
    if answered:
        ready(ring, nonce)
    now, earliest = peer.pairs.deadline(), peer.deadline()
    assert now is not None
    assert earliest is not None
    assert earliest <= now
    assert tell(ring, "peer1", Ticked(), now - 0.01) == []
    found = tell(ring, "peer1", Ticked(), now)
    expected = (Reason.TIMEOUT, 20.0) if answered else (Reason.NO_ANSWER, Params().answer_timeout_s)
    assert (ends(found)[0][2], now) == expected


def test_a_partner_that_a_question_cannot_reach_ends_the_meeting_at_once() -> None:
    ring = Ring(2, 0)
    asked = asks(ring, "1")
    found = tell(ring, "peer1", Undelivered("peer0", asked))
    assert ends(found) == [("1", Status.ALONE, Reason.UNREACHABLE)]


def test_in_a_group_every_passive_peer_may_be_met() -> None:
    met = set()
    for seed in range(20):
        ring = Ring(5, seed)
        found = tell(ring, "peer3", MeetAsked("t", "1", "complete", 20.0))
        met |= {effect.to for effect in found if isinstance(effect, Send)}
        alone = tell(ring, "peer2", MeetAsked("t", "1", "complete", 20.0))
        assert ends(alone) == [("1", Status.ALONE, Reason.NO_PEERS)]
    assert met == {"peer0", "peer2", "peer4"}
