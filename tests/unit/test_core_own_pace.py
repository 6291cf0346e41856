"""Sweeps that begin whenever their trainers are ready: who is told, who is waited for, and who is
asked although it seemed to be elsewhere.

One rule: what comes of it in a run of many is in tests/simulation/test_own_pace.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moshpitd.core.effects import Send
from moshpitd.core.events import Found
from moshpitd.core.matchmaking import Attempt
from moshpitd.core.meeting import APART, SWEEPS, WAITED, Meeting
from moshpitd.core.messages import Declined, Hello, Invite, Join, Lineage, Record, Redirect, Shape
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer

SHAPE = Shape(1, (6, 5, 5))
ROUND = 30
"""The first line of a sweep: its axis is the first."""


def record(name: str, round_number: int = ROUND, at: tuple[int, ...] = (3, 1, 2)) -> Record:
    return Record(name, 1, b"", 0, Lineage(), round=round_number, coordinates=at, shape=SHAPE)


def meeting_of(*, sweeps: bool = True) -> Meeting:
    """Ours, of p1, in the line *.1.2 of a run of 150."""
    peer = Peer(Params(), "p1", random.Random(1), run="r")
    state, meeting = peer.state, peer.conductor.meeting
    state.place.shape, state.place.coordinates = SHAPE, (0, 1, 2)
    state.place.round, state.place.crowd.peers = ROUND, 150
    state.sweeps, state.trainers = sweeps, {"t": False}
    meeting.key = state.place.key()
    return meeting


def attempt_of(meeting: Meeting, *, own_pace: bool = False) -> Attempt:
    me = record("p1", at=(0, 1, 2))
    return Attempt(
        Params(), me, meeting.key, 1, 1.0, False, nonce=1, started=0.0, deadline_at=15.0,
        expected=6, unsettled=0, lone_waits=True, looked_up=True, own_pace=own_pace,
    )  # fmt: skip


@pytest.mark.parametrize("sweeps", [True, False])
def test_who_may_wait_in_our_line_is_told_whatever_its_number_of_the_round(sweeps: bool) -> None:
    """Of two that came at the same time, in sweeps of different numbers, neither had told the
    other; a fifth of those that ended alone did so beside each other."""
    meeting, far = meeting_of(sweeps=sweeps), 3 * (APART + 1)
    there = {
        "ours": record("ours"), "behind": record("behind", ROUND - 3),
        "ahead": record("ahead", ROUND + 3 * APART), "long ago": record("long ago", ROUND - far),
        "other line": record("other line", at=(3, 1, 3)),
    }  # fmt: skip
    for one in there.values():
        meeting.state.swarm.hear(one, 0.0, direct=False)
    meeting.found(Found(meeting.key, tuple(there.values())), 1.0)
    sent = [it for it in meeting.state.effects if isinstance(it, Send)]
    told = [it.to for it in sent if isinstance(it.message, Hello)]
    assert told == (["ours", "behind", "ahead"] if sweeps else ["ours"])


def test_who_was_told_from_another_round_does_not_take_us_along() -> None:
    """That one which was ahead when it was told is ahead is no news of our line."""
    meeting = meeting_of()
    ahead = record("ahead", ROUND + 3)
    meeting.state.swarm.hear(ahead, 0.0, direct=True)
    meeting.found(Found(meeting.key, (ahead,)), 1.0)
    meeting.greeted("ahead", ahead, 1.1)
    assert meeting.state.place.round == ROUND


def test_a_line_has_gone_when_those_of_our_own_round_have() -> None:
    meeting = meeting_of()
    meeting.state.sweeping = True
    for one in (record("ours"), record("behind", ROUND - 3)):
        meeting.state.swarm.hear(one, 0.0, direct=True)
        meeting.found(Found(meeting.key, (one,)), 1.0)
    on = replace(record("ours", ROUND + 1), sequence=2)
    meeting.state.swarm.hear(on, 1.1, direct=True)
    meeting.greeted("ours", on, 1.1)
    assert meeting.state.place.round == ROUND + 1


@pytest.mark.parametrize("own_pace", [True, False])
def test_that_some_have_moved_on_ends_a_lone_wait_only_where_all_go_together(
    own_pace: bool,
) -> None:
    meeting = meeting_of()
    attempt = attempt_of(meeting, own_pace=own_pace)
    attempt.add(record("p0"), 0.0)
    attempt.start(0.0)
    moved = Declined(meeting.key, attempt.number, Reason.MOVED, record("p0", ROUND + 1))
    attempt.receive("p0", moved, 0.1)
    attempt.tick(0.2)
    assert attempt.ended is (None if own_pace else Reason.NO_PEERS)
    attempt.tick(Params().window_s)
    assert attempt.ended is Reason.NO_PEERS


@pytest.mark.parametrize("waits", [WAITED - 1, WAITED])
def test_who_finds_the_others_unready_sweep_after_sweep_goes_at_its_own_pace(waits: int) -> None:
    meeting = meeting_of()
    for number in range(SWEEPS):
        took = 1.5 if number < waits else 0.1
        meeting.ended(attempt_of(meeting), took, in_time=True, first=True)
        meeting.ended(attempt_of(meeting), 1.5, in_time=True, first=False)  # later lines
    assert meeting.own_pace() is (waits == WAITED)
    meeting.state.sweeps = False
    assert not meeting.own_pace()
    meeting.state.sweeps = True
    for _ in range(SWEEPS):
        meeting.ended(attempt_of(meeting), 0.1, in_time=True, first=True)
    assert not meeting.own_pace()


@pytest.mark.parametrize("lost", [None, Reason.NO_ANSWER, Reason.DRAINING])
def test_a_leader_that_is_followed_under_our_key_is_there_whatever_we_knew(
    lost: Reason | None,
) -> None:
    """Its group had just begun to form when it changed its place, and we had not heard of that: we
    ended alone at once, next to it. Who has said goodbye says itself that it is back."""
    meeting = meeting_of()
    attempt = attempt_of(meeting)
    meeting.state.swarm.hear(record("p0", ROUND - 1, at=(4, 4, 4)), 0.0, direct=True)
    if lost is not None:
        assert meeting.state.swarm.lose("p0", lost)
    attempt.add(record("p2"), 0.0)
    attempt.start(0.0)
    assert [type(it.message) for it in attempt.effects if isinstance(it, Send)] == [Invite]
    attempt.effects.clear()
    meeting.pointed_at(attempt, "p0", 0.1)
    attempt.receive("p2", Redirect(meeting.key, 0, "p0"), 0.1)
    joins = [
        it.to for it in attempt.effects if isinstance(it, Send) and isinstance(it.message, Join)
    ]
    assert joins == ([] if lost is Reason.DRAINING else ["p0"])
