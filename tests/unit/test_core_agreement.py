"""Members in each other's final survivor set hold the same bits, whoever lost whom, and also where
the members do not all see the same others.

One rule: who agrees with whom is what the outcomes say; the bits are what lies in the buckets.
"""

from __future__ import annotations

import random

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import Crcs, Parity, Resend
from moshpitd.core.outcome import Reason, Status
from moshpitd.core.succession import Succession
from tests.kit.hands import Result, crc_of
from tests.unit.test_core_allreduce import Swarm, from_its_reducer, swarm


def forget(it: Swarm, who: str, whom: str) -> None:
    """To `who`, `whom` is out of the round. What is on its way between them arrives all the same,
    as it does after a silence or a message that was lost."""
    it.hands.tell(who, ev.LinkLost(whom))


def agrees(it: Swarm, names: list[str]) -> None:
    for one in names:
        for other in names:
            ours, theirs = it.outcome(one), it.outcome(other)
            if other not in ours.agreed or one not in theirs.agreed:
                continue
            assert ours.parts_without_result == theirs.parts_without_result, (one, other)
            for part in range(it.hands.parts):
                if part not in ours.parts_without_result:
                    same = it.hands.value(one, part) == it.hands.value(other, part)
                    assert same, (one, other, part)


def test_what_a_lost_holder_hands_over_late_replaces_nothing() -> None:
    """A reducer dies, and one member alone has its result. The one that takes over asks for it,
    loses its holder and makes another result with the third; then the network is whole again and
    the first result arrives."""
    it = swarm(4, parts=4)
    hands, late, part = it.hands, list[Result](), 0
    it.begun()
    opened = hands.nodes["p00"].opened[-1]
    assert opened.reducers[part] == 0
    following = Succession(opened.group, opened.reducers).following(part, 0, [1, 2, 3])
    assert following is not None
    taker = opened.group.members[following[1]].peer_id
    holder, other = (name for name in ("p01", "p02", "p03") if name != taker)

    def drop(sender: str, to: str, what: object) -> bool:
        if not isinstance(what, tuple) or what[1] != part:
            return False
        if isinstance(what[0], ef.HandOver) and sender == holder and not late:
            exchange = hands.nodes[sender].exchanges[what[0].group_id]
            value, inside, _ = exchange.results[part]
            late.append(
                Result(
                    what[0].group_id, part, exchange.open.index, value, inside, crc_of(value),
                    what[0].epoch,
                )
            )  # fmt: skip
            return True
        return sender == "p00" and to != holder and from_its_reducer(what)

    hands.drop = drop
    hands.settle()
    hands.kill("p00")
    hands.settle()
    assert late
    assert hands.said(Resend, sender=taker, to=holder)
    for name in (taker, other):
        forget(it, name, holder)
        forget(it, holder, name)
    for _ in range(200):
        if not any(effect.part == part for effect in averages(it, taker)):
            hands.step(1)
    hands.tell(taker, late[0], origin=holder, plane="bulk")
    hands.finish()
    for name in (taker, other):
        outcome = it.outcome(name)
        assert outcome.parts_without_result == ()
        assert set(outcome.agreed) == {taker, other}
        assert hands.value(name, part) == hands.value(taker, part)
    assert not hands.named("parity_differs")
    agrees(it, [holder, taker, other])


def averages(it: Swarm, name: str) -> list[ef.Average]:
    return [
        effect for effect in it.hands.did(ef.Average, name=name) if isinstance(effect, ef.Average)
    ]


def test_who_sees_a_tie_does_not_agree_with_one_that_sees_none() -> None:
    """p00 and p01 hold one result of a part, p02 and p03 another. p00 hears all four and gives the
    part up; p01 has lost p02 and p03, hears p00's stamps before its Parity, and keeps it."""
    it = swarm(4, parts=8)
    hands = it.hands
    low = ("p00", "p01")
    hands.lie = lambda name, to, part, value: (
        value + 1.0 if part == 3 and name == "p03" and to in low else value
    )
    hands.hold = lambda sender, to, message: isinstance(message, Parity)
    it.begun()
    assert it.reducers()[3] == 3
    hands.settle()
    for name in ("p02", "p03"):
        forget(it, "p01", name)
        forget(it, name, "p01")
    hands.settle()
    hands.hold = lambda sender, to, message: False
    hands.held = [held for held in hands.held if held[:2] != ("p00", "p01")]  # that one is lost
    hands.release()
    hands.finish()
    assert it.outcome("p00").parts_without_result == (3,)
    assert it.outcome("p00").reason is Reason.PARITY
    assert it.outcome("p01").parts_without_result == ()
    agrees(it, list(it.tokens))
    # These two count three votes, a majority for theirs; they wait for p00 to say so too.
    for name in ("p02", "p03"):
        assert it.outcome(name).parts_without_result == ()
        assert set(it.outcome(name).agreed) == {"p02", "p03"}
    assert it.outcome("p00").agreed == ("p00",)


def test_a_part_that_was_given_up_stays_so_whatever_comes_for_it() -> None:
    it = swarm(2, parts=4)
    hands = it.hands
    hands.lie = lambda name, to, part, value: value + (part == 1 and name != to) * 1.0
    hands.hold = lambda sender, to, message: (
        isinstance(message, Parity) and bool(hands.named("part_without_result"))
    )
    it.begun()
    hands.settle()
    assert {name for name, _ in hands.named("part_without_result")} == {"p00", "p01"}
    group_id = hands.nodes["p00"].opened[-1].group.group_id
    late = ev.ResultArrived(group_id, 1, 1, (0, 1), crc_of(5.0), 0)
    hands.tell("p00", late)
    hands.settle()
    hands.hold = lambda sender, to, message: False
    hands.release()
    hands.finish()
    for name in it.tokens:
        outcome = it.outcome(name)
        assert (outcome.status, outcome.parts_without_result) == (Status.PARTIAL, (1,))
        assert set(outcome.agreed) == {"p00", "p01"}


def test_a_difference_that_comes_up_after_the_end_of_the_call_holds_nobody_for_long() -> None:
    """All run into their calls' end, because one part lacks a contribution. Then they compare, and
    p00 hears of it late, and never that the others are through. Their trainers wait meanwhile."""
    timeout_s, part = 8.0, 5
    it = swarm(4, parts=8, timeout_s=timeout_s)
    hands = it.hands
    waits_s = hands.params.parity_timeout_s
    hands.lie = lambda name, to, at, value: (
        value + 1.0 if at == 3 and name == "p03" and to in ("p00", "p01") else value
    )
    hands.hold = lambda sender, to, message: to == "p00" and isinstance(message, Parity | Crcs)

    def drop(sender: str, to: str, what: object) -> bool:
        if not isinstance(what, tuple) or what[1] != part:
            return False
        return (sender, to) == ("p02", "p01") or to == "p00" != sender

    hands.drop = drop
    it.begun()
    assert it.reducers()[part] == 1
    assert it.reducers()[3] == 3
    calls_at = hands.calls[it.tokens["p00"]][2]
    hands.run(until_s=calls_at + 0.75 * waits_s)
    hands.held = [held for held in hands.held if held[0] == "p02"]
    hands.release()
    hands.finish()
    assert hands.said(Crcs, sender="p00")
    assert it.outcome("p00").parts_without_result == (3, part)
    assert hands.ended_at[it.tokens["p00"]] == pytest.approx(calls_at + 2.0 * waits_s, abs=0.01)
    agrees(it, list(it.tokens))


@pytest.mark.parametrize("seed", range(60))
def test_whoever_loses_whom_and_when_those_that_agree_hold_the_same(seed: int) -> None:
    """Losses of one side or both, a death, and everything that was on its way arrives: late."""
    it = swarm(5, parts=8, seed=seed, shuffle=True)
    hands, rng = it.hands, random.Random(seed)
    names, dead = list(it.tokens), list[str]()
    it.begun()
    at = sorted(rng.randrange(150) for _ in range(6))
    for before, step in zip([0, *at], at, strict=False):
        hands.step(step - before)
        one, other = rng.sample(names, 2)
        if rng.random() < 0.2 and not dead:
            dead.append(one)
            hands.kill(one)
            continue
        forget(it, one, other)
        if rng.random() < 0.5:
            forget(it, other, one)
    hands.finish()
    agrees(it, [name for name in names if name not in dead])
