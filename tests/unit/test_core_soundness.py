"""What an honest peer could not have said. One rule: every bound is tried on either side of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moshpitd.core import events as ev
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Group, Hello, Letter, Lineage, Member, Record, Shape
from moshpitd.core.params import Params
from moshpitd.core.soundness import (
    MAX_MASS,
    MAX_NORM,
    MAX_ROUND,
    MAX_SEQUENCE,
    is_fair,
    is_sane,
    is_sound,
    norm_limit,
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
