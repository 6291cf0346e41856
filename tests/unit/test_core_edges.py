"""The seldom branches of a round's parts, each from a real round that has just begun.

One rule: what is asserted is what others see of it, or the invariant that the part promises.
"""

from __future__ import annotations

from dataclasses import replace

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.allreduce import Round
from moshpitd.core.messages import (
    Crcs,
    Held,
    Missing,
    NotMember,
    Promise,
    Resend,
    SnapshotRequest,
    TakeOver,
)
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.swarm import EXPIRE_S
from moshpitd.core.swarm import Swarm as Known
from moshpitd.core.takeover import MAX_TURNS
from tests.kit.hands import Hands, record_of
from tests.unit.test_core_allreduce import swarm


def begun(count: int = 4, parts: int = 8, params: Params | None = None) -> Round:
    """p00's side of a round of which nothing has arrived yet."""
    it = swarm(count, parts=parts, params=params)
    it.begun()
    work = it.hands.nodes["p00"].peer.conductor.work
    assert work is not None
    assert work.round is not None
    work.round.effects.clear()
    return work.round


def sent(round_: Round, kind: type) -> list[object]:
    return [
        effect.message
        for effect in round_.effects
        if isinstance(effect, ef.Send) and isinstance(effect.message, kind)
    ]


def stamps(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "big") for value in values)


# -- comparison


def test_who_lacks_a_part_compares_nothing() -> None:
    round_ = begun()
    for lane in round_.st.lanes:
        lane.parity = b"other"
    assert round_.comparison.differing() == [1, 2, 3]
    round_.st.give_up(0, Reason.CODEC)
    assert round_.comparison.differing() == []


def test_stamps_that_make_no_sense_are_not_said() -> None:
    round_ = begun()
    comparison, group = round_.comparison, round_.st.group_id
    comparison.heard(1, Crcs(group, 0, b"123"))  # no whole stamp
    comparison.heard(1, Crcs(group, 0, stamps(*range(9))))  # more than there are parts
    comparison.heard(1, Crcs(group, 4, stamps(1, 2)))  # a piece before the first
    assert comparison.votes == {}
    comparison.heard(1, Crcs(group, 0, stamps(1, 2, 3, 4)))
    comparison.heard(1, Crcs(group, 0, stamps(9, 9, 9, 9)))  # the first piece again
    comparison.heard(1, Crcs(group, 4, stamps(5, 6, 7, 8)))
    assert bytes(comparison.votes[1]) == stamps(1, 2, 3, 4, 5, 6, 7, 8)
    comparison.judged = True
    comparison.heard(2, Crcs(group, 0, stamps(1)))
    assert 2 not in comparison.votes
    assert not comparison.agrees(2)  # it has not said what it holds


def test_a_repair_goes_from_holder_to_holder_until_nobody_is_left() -> None:
    round_ = begun()
    comparison = round_.comparison
    round_.st.put(Held(3, 0, 0b1111, 7))
    comparison.repairs[3] = (99, [1, 2, 3])
    comparison.failed(5)  # of a part that nobody asked for
    comparison.gone(2)  # one that was not asked yet
    assert comparison.repairs[3] == (99, [1, 3])
    comparison.arrived(3)  # not what was asked for
    assert [message.parts for message in sent(round_, Resend)] == [(3,)]  # type: ignore[attr-defined]
    comparison.gone(3)  # the one that was asked last
    assert comparison.repairs == {}
    assert round_.st.without[3] is Reason.PARITY
    comparison.repairs[4] = (99, [1])
    comparison.close()
    assert comparison.repairs == {}


# -- takeover


def test_a_part_travels_through_its_order_only_so_often() -> None:
    round_ = begun()
    part = next(p for p, reducer in enumerate(round_.st.reducers) if reducer == 1)
    round_.st.epochs[part] = MAX_TURNS * 4 - 1
    round_.takeovers.leave([part], Reason.SILENT)
    assert round_.st.without[part] is Reason.SILENT
    round_.effects.clear()
    round_.takeovers.leave([part], Reason.SILENT)  # decided: nothing more happens
    assert round_.effects == []


def test_of_a_part_that_was_given_up_nobody_is_promised_anything() -> None:
    round_ = begun()
    st = round_.st
    part = next(p for p in range(8) if st.succession.reducer(p, 1) == 2)
    st.give_up(part, Reason.CODEC)
    round_.takeovers.asked(2, TakeOver(st.group_id, 5, 1, (part,)))
    assert sent(round_, Promise) == [Promise(st.group_id, 5, 1, ())]
    mine = next(p for p in range(8) if st.succession.reducer(p, 1) == 0)
    st.give_up(mine, Reason.CODEC)
    round_.effects.clear()
    round_.takeovers.missing(2, Missing(st.group_id, 1, Reason.SILENT, 1, (mine, 99)))
    assert sent(round_, TakeOver) == []


def test_what_was_taken_over_and_decided_is_handed_to_who_asks_late() -> None:
    round_ = begun()
    st = round_.st
    part = next(p for p in range(8) if st.succession.reducer(p, 1) == 0)
    st.assign(part, 0, 1)
    st.put(Held(part, 1, 0b1111, 7))
    round_.takeovers.missing(2, Missing(st.group_id, 1, Reason.SILENT, 1, (part,)))
    assert ef.HandOver(st.group_id, 2, (part,), 1) in round_.effects


def test_a_bar_ends_an_average_that_had_not_begun() -> None:
    round_ = begun()
    st = round_.st
    st.closing[0] = 0
    round_.takeovers.barred(ev.Barred(st.group_id, 1, (0,), (), 2, 9))
    assert st.closing == {}
    assert sent(round_, Promise) == [Promise(st.group_id, 9, 1, (0,), ())]


# -- audits


def test_what_a_dead_member_contributed_is_not_audited() -> None:
    round_ = begun(params=Params(audit_fraction=1.0))
    st = round_.st
    for part in range(8):
        st.put(Held(part, 0, 0b1111, part + 1))
    st.lanes[3].gone = Reason.LINK_LOST
    round_.audits.start(0.0)
    assert round_.audits.awaiting == {}
    assert round_.audits.told


def test_a_member_that_goes_takes_its_audits_with_it() -> None:
    round_ = begun(params=Params(audit_fraction=1.0))
    st = round_.st
    for part in range(8):
        st.put(Held(part, 0, 0b1111, part + 1))
    assert not round_.audits.over(0.0)
    round_.audits.start(0.0)
    assert round_.audits.awaiting
    st.lanes[3].gone = Reason.LINK_LOST
    round_.audits.gone(3)
    assert round_.audits.told
    round_.audits.checked(ev.Checked(st.group_id, 0, False))  # nobody waits for it any more
    assert st.without == {}
    assert round_.audits.over(st.params.part_timeout_s)


# -- who is known


def test_a_full_memory_of_peers_takes_a_new_one_only_for_one_that_is_gone() -> None:
    hands = Hands(3)
    hands.attach_all()
    record = hands.nodes["p01"].peer.record
    known = Known(replace(Params(), max_candidates=2), "p00")
    assert not known.hear(record_of(hands.nodes["p00"].peer), 0.0, direct=True)  # ourselves
    assert known.hear(record, 0.0, direct=True)
    assert known.hear(replace(record, peer_id="p02"), 0.0, direct=True)
    assert not known.hear(replace(record, peer_id="p03"), 0.0, direct=False)
    known.lose("p02", Reason.LINK_LOST)
    assert known.hear(replace(record, peer_id="p04"), 5.0, direct=True)
    assert known.expire([], 5.0 + known.params.heard_fresh_s) == ["p01"]
    assert not known.expire([], 6.0 + known.params.heard_fresh_s), "looked a moment ago"
    late = 5.0 + known.params.heard_fresh_s + EXPIRE_S
    assert not known.expire(["p04"], late), "the directory still names it"
    assert known.expire([], late + EXPIRE_S) == ["p04"]


def test_who_is_heard_of_no_more_is_forgotten_with_the_next_answer_of_the_directory() -> None:
    hands = Hands(3)
    hands.attach_all()
    hands.settle()
    peer = hands.nodes["p00"].peer
    swarm, key = peer.state.swarm, peer.state.presence.key
    assert list(swarm.heard) == ["p01", "p02"]
    swarm.lose("p02", Reason.UNREACHABLE)
    now = hands.now + peer.params.heard_fresh_s + 1.0
    peer.handle(ev.Found(key, (), ok=False), now)
    assert list(swarm.heard) == ["p01", "p02"], "no answer says nothing"
    peer.handle(ev.Found(key, (record_of(hands.nodes["p01"].peer),), ok=True), now)
    assert list(swarm.heard) == ["p01"]
    assert swarm.is_lost("p02"), "an old record of it is no news"


# -- what the simulator found


def test_the_others_last_messages_are_not_waited_for_long_after_the_calls_end() -> None:
    round_ = begun()
    params = round_.params
    round_.parity_sent_at, round_.takeovers.happened = 10.0, True
    round_.deadline_at = 100.0
    assert round_._patience() == 10.0 + params.part_timeout_s
    round_.deadline_at = 13.0
    assert round_._patience() == 13.0
    round_.deadline_at = 5.0
    assert round_._patience() == 10.0 + params.parity_timeout_s


def test_a_snapshot_that_is_asked_for_twice_is_offered_once() -> None:
    hands = Hands(2)
    hands.attach_all()
    request = SnapshotRequest(b"0123456789abcdef", record_of(hands.nodes["p01"].peer))
    for _ in range(2):
        hands.tell("p00", ev.Received("p01", request))
    hands.settle()
    assert len(hands.did(ef.PushSnapshot, name="p00")) == 1


def test_a_round_that_fails_after_a_snapshot_was_loaded_leaves_the_snapshot() -> None:
    """Some of its results were in the bucket already; what is handed back is no mixture."""
    hands = Hands(3)
    for name in ("p00", "p01"):
        hands.attach(name, [1.0] * 4, version=20)
    hands.run(until_s=hands.now + 1.0)
    hands.attach("p02", [9.0] * 4)  # so far behind that it takes the others' state first
    mine = hands.contribute("p02", [9.0] * 4)
    hands.settle()
    assert hands.nodes["p02"].values["t"] == [1.0] * 4
    for name in ("p00", "p01"):
        hands.contribute(name, [3.0] * 4)
    hands.settle()
    hands.now += hands.params.settle_s  # p02 leads, and listens so long before it begins
    hands.tell("p02", ev.Ticked())
    for _ in range(200):
        if 3.0 in hands.nodes["p02"].values["t"]:
            break
        hands.step(1)
    assert set(hands.nodes["p02"].values["t"]) == {1.0, 3.0}
    group = hands.nodes["p02"].opened[-1].group.group_id
    for name in ("p00", "p01"):
        hands._give("p02", ev.Received(name, NotMember(group, "p02")))
    outcome = hands.outcomes[mine]
    assert outcome.reason is Reason.EXCLUDED
    assert outcome.loaded_snapshot
    assert outcome.accepted
    assert hands.nodes["p02"].values["t"] == [1.0] * 4
