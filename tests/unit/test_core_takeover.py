"""Silence, freezes, lies: what makes a round go on without somebody, or with other bits than it was
sent. The plain deaths are in test_core_allreduce, beside the twin that judges them.

One rule: time moves only by `Listened`, as on a node, where silence is judged when it is listened
for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.allreduce import Round
from moshpitd.core.balance import load_shares, succession
from moshpitd.core.lateness import Offer
from moshpitd.core.messages import (
    Begin,
    Crcs,
    Group,
    Lineage,
    Member,
    Missing,
    NoResult,
    NotMember,
    Parity,
    Promise,
    Resend,
    Shape,
    TakeOver,
)
from moshpitd.core.outcome import Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.quiet import ENOUGH, Quiet
from moshpitd.core.succession import Succession
from tests.kit.hands import Result, crc_of
from tests.unit.test_core_allreduce import Swarm, from_its_reducer, swarm

LISTEN_S = 0.2


def listen(it: Swarm, until_s: float, *, deaf: Callable[[str, str], bool]) -> None:
    """Everybody hears everybody, a few times a second, except where `deaf(who, whom)`."""
    hands = it.hands
    end = hands.now + until_s
    while hands.now < end and hands.open_calls():
        hands.run(until_s=hands.now + LISTEN_S)
        for name in it.tokens:
            heard = tuple(o for o in it.tokens if o != name and not deaf(name, o))
            if hands.nodes[name].alive:
                hands.tell(name, ev.Listened(heard))
        hands.settle()


# -- silence and freezes


def test_a_frozen_member_costs_the_others_the_shortest_silence_and_no_result() -> None:
    it = swarm(4, parts=12)
    it.begun()
    hands = it.hands
    hands.step(7)
    began = hands.now
    hands.nodes["p03"].alive = False  # stopped: its links stay up and say nothing
    listen(it, 30.0, deaf=lambda who, whom: whom == "p03")
    for name in ("p00", "p01", "p02"):
        outcome = it.outcome(name)
        assert outcome.parts_without_result == ()
        assert dict(outcome.excluded)["p03"] is Reason.SILENT
        assert outcome.agreed == ("p00", "p01", "p02")
        took = hands.ended_at[it.tokens[name]] - began
        assert hands.params.silence_min_s - LISTEN_S <= took <= hands.params.silence_min_s + 0.5
    # It wakes: what the others said meanwhile is waiting for it.
    hands.nodes["p03"].alive = True
    told = [m for m in hands.said(NotMember, to="p03") if isinstance(m, NotMember)]
    assert {m.peer_id for m in told} == {"p03"}
    for sender in ("p00", "p01", "p02"):
        hands.tell("p03", ev.Received(sender, told[0]))
    hands.tell("p03", ev.Listened(("p00", "p01", "p02")))
    hands.settle()
    outcome = it.outcome("p03")
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.EXCLUDED)
    assert not outcome.accepted
    assert hands.nodes["p03"].peer.version == 0


def test_who_slept_blames_nobody_for_it() -> None:
    it = swarm(3, parts=6)
    it.hands.drop = lambda sender, to, what: from_its_reducer(what)
    it.begun()
    it.hands.settle()
    it.hands.tell("p00", ev.Listened(("p01", "p02")))
    it.hands.settle()
    it.hands.now += 8.0  # p00 was stopped, nobody heard anybody meanwhile
    it.hands.tell("p00", ev.Listened(()))
    it.hands.settle()
    assert [name for name, _ in it.hands.named("woke")] == ["p00"]
    assert not [n for name, n in it.hands.named("member_excluded") if name == "p00"]
    it.hands.now += LISTEN_S
    it.hands.tell("p00", ev.Listened(("p01",)))
    it.hands.settle()
    assert not [n for name, n in it.hands.named("member_excluded") if name == "p00"]


def test_one_that_one_member_alone_does_not_hear_is_told_and_goes_on_with_the_others() -> None:
    it = swarm(4, parts=8)
    it.begun()
    it.hands.step(5)
    it.hands.drop = lambda sender, to, what: (
        isinstance(what, tuple)
        and {sender, to}
        == {
            "p00",
            "p03",
        }
    )
    listen(it, 60.0, deaf=lambda who, whom: (who, whom) == ("p00", "p03"))
    for name in ("p01", "p02", "p03"):
        assert it.outcome(name).parts_without_result == ()
        assert it.outcome(name).reason is not Reason.EXCLUDED
    for part in range(8):
        assert len({it.hands.value(name, part) for name in it.tokens}) == 1


def test_who_is_asked_by_one_that_it_has_lost_says_so_at_once() -> None:
    """A link broke for one end only, and a reducer dies: the one that takes its parts over asks a
    member to which it is out of the round."""
    it = swarm(4, parts=16)
    hands = it.hands
    hands.drop = lambda sender, to, what: sender == "p01" and from_its_reducer(what)
    it.begun()
    hands.settle()
    began = hands.now
    hands.tell("p03", ev.LinkLost("p00"))
    hands.kill("p01")
    hands.settle()
    assert hands.said(TakeOver, sender="p00", to="p03")
    assert hands.said(NotMember, sender="p03", to="p00")
    hands.finish()
    out = {note.peer: note.reason for name, note in hands.named("member_excluded") if name == "p00"}
    assert out["p03"] == Reason.EXCLUDED.value
    for name in ("p00", "p02", "p03"):
        assert it.outcome(name).parts_without_result == ()
        assert hands.ended_at[it.tokens[name]] - began < hands.params.answer_timeout_s


def test_how_long_a_link_may_be_quiet_is_learned_from_it() -> None:
    params = Params()
    quiet = Quiet(params)
    assert quiet.limit_s("p01") == params.silence_min_s
    for gap in (0.2, 0.21, 0.2, 0.19, 0.2):
        quiet.heard("p01", gap)
    assert quiet.limit_s("p01") == params.silence_min_s
    for gap in (1.0, 1.5, 2.0, 1.2, 1.8, 1.4, 1.6, 1.1, 1.9):  # a link that stutters
        quiet.heard("p02", gap)
    assert quiet.limit_s("p02") == pytest.approx(1.5 + 8.0 * 0.3)
    for _ in range(ENOUGH):
        quiet.heard("p03", 500.0)
    assert quiet.limit_s("p03") == params.part_timeout_s


def test_what_is_known_of_quiet_links_is_bounded() -> None:
    quiet = Quiet(Params(max_candidates=4))
    for number in range(100):
        for _ in range(ENOUGH):
            quiet.heard(f"p{number}", 5.0)
        quiet.limit_s(f"p{number}")
    assert quiet.limit_s("p99") == 5.0
    assert quiet.limit_s("p95") == Params().silence_min_s
    assert len(quiet._limits) <= 4


# -- lies and damage


def test_a_reducer_that_tells_one_member_something_else_is_outvoted() -> None:
    it = swarm(4, parts=8)
    mine = 1  # p01 reduces parts 1 and 5
    it.hands.lie = lambda name, to, part, value: value + (name == "p01" and to == "p03") * 1.0
    it.hands.finish()
    assert it.reducers()[mine] == 1
    for name in it.tokens:
        outcome = it.outcome(name)
        assert outcome.status is Status.COMPLETE
        assert outcome.parts_without_result == ()
        assert outcome.agreed == ("p00", "p01", "p02", "p03")
        for part in range(8):
            assert it.hands.value(name, part) == it.hands.value("p00", part)
    repaired = [(name, note.fields["part"]) for name, note in it.hands.named("part_repaired")]
    assert repaired == [("p03", 1), ("p03", 5)]
    assert {name for name, _ in it.hands.named("parity_differs")} == {"p00", "p01", "p02", "p03"}


def test_damage_at_one_member_is_repaired_by_the_majority() -> None:
    """A bit flips between the reducer's memory and one member's bucket, under a right frame."""
    it = swarm(3, parts=6)
    it.hands.lie = lambda name, to, part, value: (
        -value if (name, to, part) == ("p00", "p02", 3) else value
    )
    it.hands.finish()
    assert it.hands.named("part_repaired")
    # Not its reducer again, which sent the damage: the other one that holds it.
    assert [who for _, _, who, m in it.hands.sent if isinstance(m, Resend)] == ["p01"]
    for name in it.tokens:
        assert it.hands.value(name, 3) == it.hands.value("p00", 3)
        assert it.outcome(name).status is Status.COMPLETE


@pytest.mark.parametrize("count", [2, 4])
def test_without_a_majority_all_keep_local_values(count: int) -> None:
    it = swarm(count, parts=8)
    low = ("p00", "p01")[: count // 2]
    it.hands.lie = lambda name, to, part, value: (
        value + 1.0 if part == 3 and from_three(it, name) and to in low else value
    )
    it.hands.finish()
    for name in it.tokens:
        outcome = it.outcome(name)
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.PARITY)
        assert outcome.parts_without_result == (3,)
        assert set(outcome.agreed) == set(it.tokens)


def from_three(it: Swarm, name: str) -> bool:
    return list(it.tokens).index(name) == it.reducers()[3]


@pytest.mark.parametrize("seed", range(30))
def test_random_lies_are_repaired_or_disputed_and_never_kept(seed: int) -> None:
    """One reducer lies to a random choice of members about random parts."""
    it = swarm(5, parts=10, seed=seed, shuffle=True)
    rng = random.Random(seed)
    fooled = {(name, part) for name in it.tokens for part in range(10) if rng.random() < 0.3}
    it.hands.lie = lambda name, to, part, value: (
        value + 1.0 if name == "p02" and (to, part) in fooled else value
    )
    it.hands.finish()
    honest = [name for name in it.tokens if name != "p02"]
    for part in range(10):
        held = {
            it.hands.value(name, part)
            for name in honest
            if part not in it.outcome(name).parts_without_result
        }
        assert len(held) <= 1
    # Members that cannot agree keep local values in step, not some of them.
    assert len({it.outcome(name).parts_without_result for name in honest}) == 1


def test_stamps_that_lie_cost_at_most_the_part() -> None:
    """A member whose stamps are made up cannot outvote two that agree."""
    it = swarm(3, parts=4)
    it.hands.change = lambda sender, to, message: (
        Parity(message.group_id, b"made up", 0)
        if sender == "p02" and isinstance(message, Parity)
        else Crcs(message.group_id, 0, bytes(range(16)))
        if sender == "p02" and isinstance(message, Crcs)
        else message
    )
    it.hands.finish()
    for name in ("p00", "p01"):
        assert it.outcome(name).parts_without_result == ()
        assert it.outcome(name).agreed == ("p00", "p01")
        for part in range(4):
            assert it.hands.value(name, part) == it.hands.value("p00", part)


def test_one_that_wakes_after_a_minute_asks_and_discards_its_round() -> None:
    """What was said to it while it was frozen was lost; whether the others still play is over."""
    it = swarm(3, parts=6)
    it.begun()
    hands = it.hands
    hands.step(6)
    hands._give("p02", ev.Listened(("p00", "p01")))
    hands.nodes["p02"].alive = False
    listen(it, 30.0, deaf=lambda who, whom: whom == "p02")
    assert not [name for name in ("p00", "p01") if it.tokens[name] not in hands.outcomes]
    hands.lanes.clear()
    hands.now += 60.0
    hands.nodes["p02"].alive = True
    hands.tell("p02", ev.Ticked())  # every deadline of the old round has passed
    hands.settle()
    outcome = it.outcome("p02")
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.EXCLUDED)
    assert outcome.contributors == ()
    assert hands.nodes["p02"].values["t"] != hands.nodes["p00"].values["t"]


def test_one_that_froze_before_it_first_listened_in_a_round_blames_nobody_either() -> None:
    """In an earlier round it was told whom it hears, so it knows that it should have been here."""
    it = swarm(3, parts=6)
    hands = it.hands
    it.begun()
    hands._give("p02", ev.Listened(("p00", "p01")))
    hands.finish()
    tokens = {name: hands.contribute(name, [5.0] * 6) for name in it.tokens}
    while len(hands.nodes["p02"].opened) < 2:
        hands.step(1)
    before = list(hands.nodes["p02"].values["t"])
    hands.nodes["p02"].alive = False
    for name in ("p00", "p01"):
        hands._give(name, ev.LinkLost("p02"))
    hands.finish()
    hands.lanes.clear()
    hands.now += 60.0
    hands.nodes["p02"].alive = True
    hands.tell("p02", ev.Ticked())  # every deadline of the round has passed
    hands.settle()
    outcome = hands.outcomes[tokens["p02"]]
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.EXCLUDED)
    assert not outcome.accepted
    assert hands.nodes["p02"].values["t"] == before
    assert [name for name, _ in hands.named("woke")] == ["p02"]


# -- audits


AUDITING = Params(audit_fraction=1.0)


def test_audits_of_honest_reducers_change_nothing() -> None:
    it = swarm(4, parts=12, params=AUDITING)
    it.hands.finish()
    plain = swarm(4, parts=12)
    plain.hands.finish()
    for name in it.tokens:
        assert it.outcome(name).status is Status.COMPLETE
        for part in range(12):
            assert it.hands.value(name, part) == plain.hands.value(name, part)
    checked = [e for e in it.hands.did(ef.Check) if isinstance(e, ef.Check)]
    assert sorted(check.part for check in checked) == list(range(12))  # each by exactly one


def test_a_consistent_lie_is_found_and_nobody_takes_it() -> None:
    it = swarm(4, parts=12, params=AUDITING)
    it.hands.spoil = lambda name, part, mean: mean + (name == "p02" and part == 6) * 0.5
    it.hands.finish()
    assert it.reducers()[6] == 2
    for name in it.tokens:
        outcome = it.outcome(name)
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.AUDIT)
        assert outcome.parts_without_result == (6,)
        assert "part 6" in outcome.detail
    found = it.hands.named("audit_failed")
    assert [(note.peer, note.fields["part"]) for _, note in found] == [("p02", 6)]
    auditor = found[0][0]
    assert [(name, n.peer) for name, n in it.hands.named("strike")] == [(auditor, "p02")]


def test_a_share_of_the_parts_is_audited_and_which_is_not_known_before() -> None:
    seen = []
    for seed in range(12):
        it = swarm(4, parts=40, params=Params(audit_fraction=0.25), seed=seed)
        it.hands.finish()
        seen.append(
            tuple(sorted(e.part for e in it.hands.did(ef.Check) if isinstance(e, ef.Check)))
        )
        assert all(it.outcome(name).status is Status.COMPLETE for name in it.tokens)
    assert 0.15 <= sum(map(len, seen)) / (12 * 40) <= 0.35
    assert len(set(seen)) > 6


@pytest.mark.parametrize("seed", range(30))
def test_a_death_during_audits_ends_them(seed: int) -> None:
    it = swarm(4, parts=8, params=AUDITING, seed=seed, shuffle=True)
    it.begun()
    it.hands.step(60 + seed * 3)
    it.hands.kill("p01")
    it.hands.finish()
    for name in ("p00", "p02", "p03"):
        outcome = it.outcome(name)
        assert outcome.parts_without_result == ()
        took = it.hands.ended_at[it.tokens[name]]
        assert took <= 1.0 + it.hands.params.answer_timeout_s + it.hands.params.part_timeout_s


# -- the one that takes over


def test_a_member_that_lives_and_never_answers_a_takeover_is_left_out() -> None:
    it = swarm(4, parts=8)
    it.hands.average_fault = {("p03", part): None for part in range(8)}
    mute: list[bool] = []
    it.hands.drop = lambda sender, to, what: (
        bool(mute) and sender == "p02" and not isinstance(what, tuple)
    )
    it.begun()
    it.hands.settle()
    began = it.hands.now
    mute.append(True)
    it.hands.kill("p03")
    it.hands.finish()
    for name in ("p00", "p01"):
        assert it.outcome(name).parts_without_result == ()
        took = it.hands.ended_at[it.tokens[name]] - began
        # Once for its answer, once for its last message.
        assert took <= 2.0 * it.hands.params.part_timeout_s + 0.1
    asked = it.hands.said(TakeOver, to="p02")
    assert len(asked) >= 4  # again and again: what is lost once may arrive later
    assert (Reason.NO_ANSWER.value, "p02") in {
        (note.reason, note.peer) for _, note in it.hands.named("member_excluded")
    }


def test_a_round_that_is_over_says_so_to_whoever_takes_over_too_late() -> None:
    it = swarm(3, parts=6)
    it.hands.finish()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    it.hands.tell("p00", ev.Received("p01", TakeOver(group, 1, 1, (0,))))
    it.hands.settle()
    assert it.hands.said(NotMember, sender="p00") == [NotMember(group, "p00")]


def test_what_another_makes_of_a_part_after_our_round_does_not_reach_our_bucket() -> None:
    it = swarm(3, parts=6)
    it.hands.drop = lambda sender, to, what: isinstance(what, Parity) and to == "p00"
    it.hands.finish()  # its results stay for the others, of whom it heard no last word
    own = it.hands.nodes["p00"]
    opened = own.opened[-1]
    assert opened.group.group_id in own.exchanges
    ends = [e for n, e in it.hands.effects if n == "p00" and isinstance(e, (ef.Linger, ef.Finish))]
    assert [type(e) for e in ends] == [ef.Linger, ef.Finish]
    part = next(p for p, reducer in enumerate(opened.reducers) if reducer)
    succession = Succession(opened.group, opened.reducers)
    epoch = next(e for e in (1, 2) if succession.reducer(part, e))
    mean, sender = it.hands.value("p00", part), succession.reducer(part, epoch)
    late = Result(opened.group.group_id, part, sender, mean + 1.0, (1, 2), crc_of(mean), epoch)
    it.hands.tell("p00", late)
    it.hands.settle()
    assert it.hands.value("p00", part) == mean
    it.hands.run(until_s=it.hands.now + it.hands.params.result_timeout_s)
    assert not own.exchanges


def test_the_order_of_a_part_names_everybody_once_and_spreads_by_share() -> None:
    rates = [1000.0, 1000.0, 500.0, 0.0, 1000.0]
    shares = load_shares(rates)
    group = b"0123456789abcdef"
    seconds = dict.fromkeys(range(5), 0)
    for part in range(2000):
        order = succession(group, part, rates, shares, first=0)
        assert order[0] == 0
        assert sorted(order) == [0, 1, 2, 3, 4]
        assert order[-1] == 3  # it cannot be dialled: only when nobody else is left
        seconds[order[1]] += 1
    total = sum(shares[i] for i in (1, 2, 4))
    for i in (1, 2, 4):
        assert seconds[i] / 2000 == pytest.approx(shares[i] / total, abs=0.04)


def test_the_effects_of_a_takeover_in_order() -> None:
    it = swarm(3, parts=3)
    it.hands.average_fault = {("p02", 2): None}
    it.begun()
    it.hands.settle()
    it.hands.effects.clear()
    it.hands.kill("p02")
    it.hands.settle()
    took = it.hands.named("part_taken_over")[0][0]
    kinds = [
        type(effect).__name__
        for name, effect in it.hands.effects
        if name == took and isinstance(effect, (ef.Bar, ef.Average, ef.Push, ef.HandOver))
    ]
    assert kinds == ["Bar", "Average", "Push"]


# -- a partition


@pytest.mark.parametrize("seed", range(25))
def test_both_halves_finish_with_their_own_and_meet_again(seed: int) -> None:
    it = swarm(6, parts=10, seed=seed, shuffle=True)
    hands, names = it.hands, list(it.tokens)
    it.begun()
    hands.step(seed * 4)
    halves = (names[:3], names[3:])
    cut = [True]
    hands.drop = lambda sender, to, what: cut[0] and (sender in halves[0]) != (to in halves[0])
    for one in names:
        for other in names:
            if (one in halves[0]) != (other in halves[0]):
                hands.tell(one, ev.LinkLost(other), origin=other, plane="bulk")
    hands.finish()
    before = spread(it)
    for half in halves:
        for name in half:
            assert it.outcome(name).parts_without_result == ()
            assert set(half) <= set(it.outcome(name).agreed)
            for part in range(10):
                assert hands.value(name, part) == hands.value(half[0], part)
    # It heals. They announce themselves and meet again; what drifted apart comes together.
    cut.clear()
    cut.append(False)
    hands.run(until_s=hands.now + hands.params.ttl_s)
    tokens = {name: hands.contribute(name, hands.nodes[name].values["t"]) for name in names}
    hands.finish()
    assert {hands.outcomes[token].group_size for token in tokens.values()} == {6}
    assert spread(it) <= before
    assert spread(it) == 0.0


def spread(it: Swarm) -> float:
    """The largest difference between two members in a part."""
    columns = [[it.hands.value(name, part) for name in it.tokens] for part in range(10)]
    return max(max(column) - min(column) for column in columns)


def test_a_leader_that_dies_while_it_says_begin_is_spoken_for_by_those_that_heard_it() -> None:
    it = swarm(4, parts=8)
    hands = it.hands
    hands.hold = lambda sender, to, message: isinstance(message, Begin) and sender == "p00"
    while not hands.held:
        hands.step(1)
    hands.settle()
    (first, *others) = [held for held in hands.held if held[1] == "p02"], *hands.held
    hands.held = first  # only p02's Begin left the leader
    hands.release()
    hands.settle()
    hands.hold = lambda sender, to, message: False
    hands.kill("p00")
    hands.finish()
    assert len(others) == 3
    for name in ("p01", "p02", "p03"):
        outcome = it.outcome(name)
        assert outcome.group_size == 4
        assert outcome.parts_without_result == ()
        assert outcome.agreed == ("p01", "p02", "p03")
        assert hands.ended_at[it.tokens[name]] <= 1.0 + hands.params.parity_timeout_s


def test_what_is_given_up_at_the_end_of_the_call_is_not_averaged_in_the_same_instant() -> None:
    """A takeover that became a collection between the call's end and the data plane's last moment:
    its average would lie in the bucket of a part that is reported without a result."""
    names = ("p00", "p01", "p02")
    members = tuple(Member(name, 1, 1.0, 0, False, 1e3, 1e3, ("a",)) for name in names)
    group = Group(b"one", "peers", "p00", 0, 0, Shape(), b"", Lineage(), "float32", members)
    for me in names:
        params = Params()
        learned = Quiet(params), Offer(8), random.Random(1)
        round_ = Round(
            params, group, me, (1 << 20,) * 6, (("t", 1),), (), 0.0, 8.0, *learned
        )  # fmt: skip
        round_.start(0.0)
        st, (first, lost) = round_.st, [i for i in range(3) if i != round_.index]
        for own in [p for p, r in enumerate(st.reducers) if r == round_.index]:
            for sender in (first, lost):  # so that nobody owes us anything
                round_.handle(ev.PartArrived(group.group_id, own, sender), 1.0)
            round_.handle(ev.Averaged(group.group_id, own, (0, 1, 2), 7), 1.0)
        part = st.reducers.index(lost)
        epoch = next(e for e in range(1, 9) if st.succession.reducer(part, e) == round_.index)
        missing = Missing(group.group_id, lost, Reason.SILENT, epoch, (part,))
        round_.receive(names[first], missing, 7.9)
        round_.tick(8.0)  # the call is over
        round_.handle(ev.Barred(group.group_id, epoch, (part,), (), round_.index, 1), 8.1)
        for other in (first, lost):
            promise = Promise(group.group_id, 1, epoch, (part,))
            round_.receive(names[other], promise, 8.2)
        assert part in st.awaiting, "it collects"
        round_.effects.clear()
        round_.tick(8.0 + params.parity_timeout_s)
        assert st.without[part] is Reason.TIMEOUT
        asked = [it.part for it in round_.effects if isinstance(it, ef.Average)]
        assert not asked
        told = [it.message for it in round_.effects if isinstance(it, ef.Send)]
        assert NoResult(group.group_id, Reason.TIMEOUT, epoch, (part,)) in told
