"""What an honest peer could not have said. One rule: every bound is tried on either side of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from moshpitd.core import events as ev
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Group, Hello, Letter, Lineage, Member, Record, Shape
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.soundness import (
    MAX_BATCH,
    MAX_COUNT,
    MAX_MASS,
    MAX_NORM,
    MAX_ROUND,
    MAX_SEQUENCE,
    is_fair,
    is_sane,
    is_sound,
    is_steady,
    norm_limit,
)
from moshpitd.core.store_words import (
    Applied,
    Ballot,
    Rules,
    StoreAsk,
    StoreBroken,
    StoreGrant,
    StoreHave,
    StoreLeave,
    StoreMessage,
    StoreOpened,
    StorePull,
    StorePullAsked,
    StorePush,
    StoreTerms,
)
from moshpitd.rpc.stubs import messages
from tests.kit.hands import Hands, record_of

RECORD = Record("p", 1, b"s", 0, Lineage())


def members(*norms: float) -> list[Member]:
    return [
        replace(Member(f"p{i}", 1, 1.0, 0, False, 1.0, 1.0), norm=norm)
        for i, norm in enumerate(norms)
    ]


def test_the_norm_limit_is_of_the_median_and_of_no_two() -> None:
    params = Params()
    assert norm_limit(members(1.0, 2.0), params) is None
    assert norm_limit(members(1.0, 2.0, 0.0), params) is None, "0 is not known"
    assert norm_limit(members(1.0, 2.0, MAX_NORM), params) == 2.0 * params.max_norm_ratio
    # The square of every limit is finite, so what has an infinite square is above it.
    largest = replace(params, max_norm_ratio=9e12)
    limit = norm_limit(members(1.0, MAX_NORM / 2, MAX_NORM), largest)
    assert limit is not None
    assert math.isfinite(limit * limit)
    assert norm_limit(members(1.0, MAX_NORM, MAX_NORM), params) is None, "how much, nobody knows"


@pytest.mark.parametrize("number", [0, MAX_ROUND])
def test_what_is_sane_can_be_shown(number: int) -> None:
    shape = Shape(1, (MAX_ROUND, MAX_ROUND))
    record = replace(RECORD, round=number, shape=shape, coordinates=(0, min(number, MAX_ROUND - 1)))
    assert is_sane(record)
    messages.PeerLine(round=record.round, coordinates=list(record.coordinates))
    for insane in (
        replace(record, round=MAX_ROUND + 1),
        replace(record, round=-1),
        replace(record, shape=Shape(1, (MAX_ROUND, MAX_ROUND + 1))),
    ):
        assert not is_sane(insane)


def test_a_group_of_a_round_that_cannot_be_is_not_sound() -> None:
    group = Group(
        b"", "k", "p0", 1, MAX_ROUND, Shape(), b"s", Lineage(), "float32",
        tuple(members(1.0, 1.0)),
    )  # fmt: skip
    for number in (MAX_ROUND, 0, MAX_ROUND + 1, -1):
        other = replace(group, round=number)
        sound = is_sound(replace(other, group_id=group_id_of(other)), Params())
        assert sound is (0 <= number <= MAX_ROUND)


LETTER = Letter(b"g" * 16, 0, 1.0, False)
UNFAIR = [
    replace(LETTER, mass=-1.0),
    replace(LETTER, mass=2 * MAX_MASS),
    replace(LETTER, sequence=-1),
    replace(LETTER, sequence=MAX_SEQUENCE + 1),
]


def test_what_is_fair_can_be_told_to_a_trainer() -> None:
    for mass in (0.0, 1.0, MAX_MASS):
        assert is_fair(replace(LETTER, mass=mass, sequence=MAX_SEQUENCE))
    messages.Heard(sequence=MAX_SEQUENCE)
    assert not any(is_fair(letter) for letter in UNFAIR)


@pytest.mark.parametrize("letter", UNFAIR)
def test_an_unfair_letter_is_a_strike(letter: Letter) -> None:
    hands = Hands(2)
    hands.attach_all()
    hands.tell("p00", ev.Received("p01", Hello(record_of(hands.nodes["p01"].peer))))
    swarm = hands.nodes["p00"].peer.state.swarm
    hands.tell("p00", ev.Received("p01", letter))
    hands.settle()
    assert swarm.strikes("p01", hands.now) > 0


# -- parameter stores

BALLOT, RULES = Ballot(9, "p01"), Rules(0.1)
TERMS = StoreTerms(BALLOT, ("p01",), 0, "p01", RULES)
UNSTEADY: list[StoreMessage] = [
    replace(TERMS, owners=()),
    replace(TERMS, rules=replace(RULES, batch=0)),
    replace(TERMS, rules=replace(RULES, batch=MAX_BATCH + 1)),
    replace(TERMS, rules=replace(RULES, max_staleness=-1)),
    replace(TERMS, version=-1),
    replace(TERMS, applied=(Applied("p01/t", MAX_COUNT + 1),)),
    replace(TERMS, ballot=Ballot(MAX_COUNT + 1, "p01")),
    StoreAsk(Ballot(-1, "p01")),
    StoreHave(BALLOT, 0, -2),
    StoreHave(BALLOT, -1, 0),
    StoreHave(BALLOT, 0, 0, rules=replace(RULES, batch=-1)),
    StoreGrant(1, -1),
    StorePull(BALLOT, "p01/t", -1),
    StorePush(BALLOT, "p01/t", MAX_COUNT + 1, 1, 0),
]


def test_what_a_store_says_at_its_bounds_is_steady() -> None:
    for message in (
        TERMS,
        replace(TERMS, rules=replace(RULES, batch=MAX_BATCH), version=MAX_COUNT),
        StoreHave(BALLOT, 0, -1),
        StoreGrant(1, MAX_COUNT),
        StoreBroken(Ballot(), ""),
        StoreLeave("p01/t"),
    ):
        assert is_steady(message)


@pytest.mark.parametrize("message", UNSTEADY)
def test_what_no_store_can_go_on_with_is_a_strike_and_nothing_else(message: StoreMessage) -> None:
    peer = acquainted()
    peer.handle(ev.Received("p01", message), 1.0)
    assert peer.state.swarm.strikes("p01", 1.0) == 1.0
    assert peer.storage.idle


def acquainted() -> Peer:
    """p00, which has heard of p01."""
    peer = Peer(Params(), "p00", random.Random(1), run="r")
    peer.handle(ev.Attached("t", b"s", "", (8, 8), b"d"), 0.0)
    record = Record("p01", 1, b"s", 0, Lineage("p01", b"d"), addresses=("h:1",))
    peer.handle(ev.Received("p01", Hello(record)), 0.0)
    return peer


def test_terms_without_owners_do_not_end_the_daemon() -> None:
    """They were adopted, and the grant that followed asked for the largest of no owners."""
    peer = acquainted()
    peer.handle(StoreOpened("p00/t", RULES), 0.0)
    peer.handle(ev.Received("p01", replace(TERMS, owners=())), 0.1)
    peer.handle(StorePullAsked("token", "p00/t"), 0.2)
    peer.handle(ev.Received("p01", StoreGrant(1, 0)), 0.3)
    assert peer.storage.common.terms is None


def test_a_batch_of_no_gradients_does_not_end_the_daemon() -> None:
    """The next store took its rules from the one before, and its order divided by the batch."""
    peer = acquainted()
    rules = replace(RULES, block=True)
    peer.handle(StoreOpened("p00/t", rules), 0.0)
    terms = replace(TERMS, owners=("p00",), rules=replace(rules, batch=0))
    peer.handle(ev.Received("p01", terms), 0.1)
    peer.handle(ev.LinkLost("p01", Reason.LINK_LOST), 0.2)
    peer.handle(StorePullAsked("token", "p00/t"), 1.0)
    for second in range(1, 20):
        peer.handle(ev.Ticked(), 1.0 + second)
    founded = peer.storage.common.terms
    assert founded is not None
    assert founded.rules == rules
