"""Members hold the same bits, or the check says who does not. One rule: every test makes the very
difference that it is about, at the data plane of a small honest group, so that what is judged is
the check and not the protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from moshpitd.core.effects import Average, Close, Effect, Finish, Note, Open, Push, Send
from moshpitd.core.events import (
    Averaged,
    Contributed,
    Event,
    PartArrived,
    Received,
    ResultArrived,
    Ticked,
)
from moshpitd.core.messages import Group, Lineage, Member, Parity, Shape
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.sim.checks import Violation
from moshpitd.sim.faults import Options
from moshpitd.sim.network import Links
from moshpitd.sim.nodes import Node, Round
from moshpitd.sim.partings import Partings
from moshpitd.sim.plan import Partition
from moshpitd.sim.world import World

GROUP = b"the only group"
THREE = Options(
    seed=4, peers=3, parts=3, join_spread_s=0.0, compute_sigma=0.0, compute_jitter=0.0,
    goal=0, faults_s=8.0, bound_s=400.0,
)  # fmt: skip
PAUSE_S = 1.0
"""Between the last result and Parity, so that everything is there when links break; and after the
last Parity, for repairs."""


class Trio:
    """Three that have always known each other and average once; part i is reduced by member i.

    Honest by itself. `agrees`: whom each names in its outcome; `disputes`: who gives part 0 up
    because members differ, and `reports` whether it says so; `ends`: whether the round ever ends;
    `last`: who ends it later than the others.
    """

    lineage = Lineage()
    members: tuple[str, ...] = ()
    agrees: dict[int, tuple[int, ...]]
    disputes: tuple[int, ...] = ()
    reports = True
    ends = True
    last = -1

    def __init__(self, params: Params, peer_id: str, rng: Random, life: int) -> None:
        self.peer_id, self.effects = peer_id, list[Effect]()
        self.until, self.said = math.inf, False
        self.arrived, self.results, self.parities = 0, set[int](), 0
        self.call: Contributed | None = None

    def handle(self, event: Event, now: float) -> None:
        me = self.members.index(self.peer_id)
        match event:
            case Contributed() if self.call is None:
                self.call = event
                lent = ((event.trainer, event.weight),)
                self.effects.append(Open(self.group(), me, (0, 1, 2), lent, (), 1.0))
                for other in self.others():
                    self.effects.append(Push(GROUP, other, (other,), result=False))
            case PartArrived():
                self.arrived += 1
                if self.arrived == 2:
                    self.effects.append(Average(GROUP, me))
            case Averaged():
                for other in self.others():
                    self.effects.append(Push(GROUP, other, (me,), result=True))
                self.result(me, now)
            case ResultArrived():
                self.result(event.part, now)
            case Received(message=Parity()):
                self.parity(now)
            case Ticked() if now >= self.until:
                self.until = math.inf
                self.effects += self.end(me) if self.said else self.say()
                self.parity(now, own=not self.said)
            case _:
                pass

    def others(self) -> list[int]:
        return [i for i, peer_id in enumerate(self.members) if peer_id != self.peer_id]

    def group(self) -> Group:
        members = tuple(Member(peer_id, 1, 1.0, 0, False, 1e3, 1e3, ()) for peer_id in self.members)
        first = self.members[0]
        return Group(GROUP, "peers", first, 0, 0, Shape(), b"", Lineage(), "float32", members)

    def result(self, part: int, now: float) -> None:
        self.results.add(part)
        if len(self.results) == 3:
            self.until = now + PAUSE_S

    def say(self) -> list[Effect]:
        return [Send(self.members[other], Parity(GROUP, b"", 0)) for other in self.others()]

    def parity(self, now: float, *, own: bool = False) -> None:
        self.said |= own
        self.parities += 1
        if self.parities == 3 and self.ends:
            late = 0 <= self.last == self.members.index(self.peer_id)
            self.until = now + (2.0 if late else 1.0) * PAUSE_S

    def end(self, me: int) -> list[Effect]:
        gives_up = me in self.disputes
        without = (0,) if gives_up and self.reports else ()
        said = {"group": GROUP.hex(), "part": 0}
        note = Note("part_without_result", reason=Reason.PARITY.value, fields=dict(said))
        outcome = Outcome(
            Status.PARTIAL if without else Status.COMPLETE,
            Reason.PARITY if without else None,
            group_size=3,
            participants=3,
            contributors=self.members,
            agreed=tuple(self.members[i] for i in (me, *self.agrees.get(me, ()))),
            total_weight=3.0,
            parts=3,
            parts_without_result=without,
            version=1,
            group_id=GROUP,
        )
        assert self.call is not None
        finish = Finish(self.call.token, self.call.trainer, outcome)
        return [*([note] if gives_up else []), Close(GROUP, without=without), finish]

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def deadline(self) -> float | None:
        return self.until if self.until < math.inf else None


Act = Callable[[World, Node], None]


def trio(
    *,
    on_the_way: Act | None = None,
    before: Act | None = None,
    at_parity: Act | None = None,
    after: Act | None = None,
    at_the_end: Act | None = None,
    options: Options = THREE,
    **changes: Any,
) -> World:
    """The world of three in which these happen to member 0: while parts travel, before and as it
    says Parity, when it hears the first, and just before its round ends."""
    kind: type[Trio] = type("Changed", (Trio,), {"agrees": {}, **changes})
    world = World(options, kind)
    kind.members = tuple(node.peer_id for node in world.nodes)
    done: list[str] = []

    def watch(node: Node, item: object) -> None:
        parity = isinstance(item, Send) and isinstance(item.message, Parity)
        heard = isinstance(item, Received) and isinstance(item.message, Parity)
        for what, when, act in (
            ("on the way", isinstance(item, PartArrived), on_the_way),
            ("before", isinstance(item, Ticked), before),
            ("parity", parity, at_parity),
            ("after", heard, after),
            ("end", isinstance(item, Close), at_the_end),
        ):
            if when and act is not None and what not in done and node is world.nodes[0]:
                done.append(what)
                act(world, node)

    world.watchers.append(watch)
    return world


def _round(node: Node) -> Round:
    return node.plane.rounds[GROUP]


def other_bits(world: World, node: Node, *, bucket: bool = True) -> None:
    """Its result of part 0 is another from now on, and so is the bucket. Or it is as it was."""
    round_ = _round(node)
    result = round_.results[0]
    round_.results[0] = replace(result, values=-result.values, crc=~result.crc)
    if bucket:
        for values in round_.buckets.values():
            values[world.options.slice_of(0)] *= -1.0


def repaired(world: World, node: Node) -> None:
    assert world.checks.bits.undecided, "it was remembered"
    other_bits(world, node)


def cut_off(number: int) -> Act:
    """For a moment nobody reaches that one."""
    return lambda world, _: world.trouble.cut_off(world.nodes[number], 1e-3)


def freeze(number: int) -> Act:
    return lambda world, _: world.trouble.freeze(world.nodes[number], 1e-3)


def cut_link(one: int, other: int) -> Act:
    """The link that these two have in the round breaks; nothing uses it any more."""

    def act(world: World, _: Node) -> None:
        nodes = world.nodes
        world.bulk._lose(nodes[one], GROUP, nodes[other].peer_id, Reason.LINK_LOST)

    return act


def dies(number: int) -> Act:
    def act(world: World, _: Node) -> None:
        world.life.kill(world.nodes[number])
        world.nodes[number].gone = True

    return act


def both(*acts: Act) -> Act:
    def act(world: World, node: Node) -> None:
        for one in acts:
            one(world, node)

    return act


AGREE = {0: (1, 2), 1: (0, 2), 2: (0, 1)}
APART = {1: (2,), 2: (1,)}
"""The two that hold the same bits say so, and the third nothing of anybody."""


def test_three_that_agree_pass() -> None:
    world = trio(agrees=AGREE)
    assert world.run().outcomes == {"complete": 3}
    assert not world.checks.bits.undecided


# -- where nobody was parted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [None, dies(2), both(dies(2), cut_link(0, 2))],
    ids=["nothing", "a death", "a death that is noticed"],
)
def test_a_difference_without_any_parting_is_a_fault_at_once(before: Act | None) -> None:
    """A death is no parting: who is dead has had nobody make another result."""
    world = trio(before=before, at_parity=other_bits, at_the_end=repaired, agrees=APART)
    with pytest.raises(Violation, match=r"holds other bits of part 0 than"):
        world.run()


def test_a_parting_that_was_over_before_the_round_excuses_nothing() -> None:
    world = trio(at_parity=other_bits, at_the_end=repaired, agrees=APART)
    world.later(1.0, world.trouble.cut_off, world.nodes[2], 1e-3)  # they compute for three
    world.later(1.0, world.trouble.freeze, world.nodes[0], 1e-3)
    with pytest.raises(Violation, match=r"holds other bits of part 0 than"):
        world.run()


def test_nobody_is_parted_because_it_says_so() -> None:
    """The word of a Peer that it has lost the others moves nothing."""

    def slander(world: World, node: Node) -> None:
        lost = Note("member_excluded", world.nodes[1].peer_id, Reason.SILENT.value)
        world.checks.effect(node, lost)

    world = trio(before=slander, at_parity=other_bits, at_the_end=repaired, agrees=APART)
    with pytest.raises(Violation, match=r"holds other bits of part 0 than"):
        world.run()


# -- where somebody was ----------------------------------------------------------------------------

PARTINGS: list[dict[str, Any]] = [
    {"on_the_way": cut_off(2)}, {"on_the_way": freeze(2)},
    {"before": cut_link(1, 2)}, {"before": cut_link(2, 1)},
]  # fmt: skip
NAMES = ["partition", "freeze", "link", "link, the other end"]


@pytest.mark.parametrize("parting", PARTINGS, ids=NAMES)
def test_a_difference_that_is_repaired_is_none(parting: dict[str, Any]) -> None:
    world = trio(**parting, at_parity=other_bits, at_the_end=repaired, agrees=AGREE)
    assert world.run().outcomes == {"complete": 3}
    assert not world.checks.bits.undecided


@pytest.mark.parametrize("parting", PARTINGS, ids=NAMES)
def test_a_repair_that_does_not_come_is_a_fault(parting: dict[str, Any]) -> None:
    """Members 0 and 1 were in touch all the time, whoever lost the third."""
    world = trio(**parting, at_parity=other_bits, agrees=APART)
    who = "differ in part 0 of 74686520 since .* s; the round is over, neither repaired nor gave"
    with pytest.raises(Violation, match=rf"end with other bits: .* {who} it up") as caught:
        world.run()
    for node in (world.nodes[0], world.nodes[1]):
        assert node.peer_id in caught.value.what
        assert node.peer_id in caught.value.transcript


def test_who_was_parted_before_and_came_together_again_is_not_excused() -> None:
    """They could compare, and one of them should have."""
    world = trio(on_the_way=cut_off(0), at_parity=other_bits, agrees=APART)
    with pytest.raises(Violation, match="and they had stayed in touch"):
        world.run()


@pytest.mark.parametrize(
    "after", [cut_off(0), both(cut_link(0, 1), cut_link(2, 0))], ids=["partition", "links"]
)
def test_nothing_is_promised_to_those_who_lost_each_other(after: Act) -> None:
    world = trio(before=cut_link(1, 2), at_parity=other_bits, after=after, agrees=APART)
    assert world.run().outcomes == {"complete": 3}


def test_two_that_say_they_agree_hold_the_same_bits_also_across_a_partition() -> None:
    world = trio(before=cut_link(1, 2), at_parity=other_bits, after=cut_off(0), agrees=AGREE)
    with pytest.raises(Violation, match=r"say that they agree, and differ in \[0\]"):
        world.run()


LOST: dict[str, Any] = {"on_the_way": cut_off(2), "at_parity": other_bits}


def test_a_part_that_is_given_up_has_no_bits_to_compare() -> None:
    world = trio(**LOST, agrees=APART, disputes=(0,))
    assert world.run().outcomes == {"complete": 2, "partial": 1}


def test_a_part_that_is_given_up_and_not_reported_so_is_not() -> None:
    world = trio(**LOST, agrees=APART, disputes=(0,), reports=False)
    with pytest.raises(Violation, match="neither repaired nor gave it up"):
        world.run()


def test_the_bucket_holds_what_was_repaired() -> None:
    def half(world: World, node: Node) -> None:
        other_bits(world, node, bucket=False)

    world = trio(**LOST, at_the_end=half, agrees=AGREE)
    with pytest.raises(Violation, match=r"other values in the bucket of t0\.1 .* of part 0"):
        world.run()


def says_again(world: World, node: Node) -> None:
    other_bits(world, node)
    for other in world.nodes[1:]:
        world.checks.effect(node, Send(other.peer_id, Parity(GROUP, b"", 0)), other)


def test_who_changes_its_bits_for_those_of_others_owes_nothing_to_one_that_has_ended() -> None:
    """Who sees both sides of a partition agrees with the one that is through first, and goes with
    the majority of the other: it cannot hold the bits of both. It may not claim to."""
    ended = trio(on_the_way=cut_off(2), at_the_end=says_again, agrees=APART, last=0)
    assert ended.run().outcomes == {"complete": 3}
    open_ = trio(on_the_way=cut_off(2), after=says_again, agrees=APART, last=0)
    with pytest.raises(Violation, match="neither repaired nor gave it up"):
        open_.run()
    claims = trio(on_the_way=cut_off(2), at_the_end=says_again, agrees=AGREE, last=0)
    with pytest.raises(Violation, match=r"say that they agree, and differ in \[0\]"):
        claims.run()


def test_what_a_dead_member_held_is_not_judged() -> None:
    world = trio(**LOST, agrees=APART)
    world.run_until(lambda: world.checks.bits.undecided, bound_s=20.0)
    dies(0)(world, world.nodes[0])
    assert not world.checks.bits.undecided
    assert world.run().outcomes == {"complete": 2}


def test_a_round_that_does_not_end_leaves_no_difference_open() -> None:
    """Its trainer has given up, so nothing but the round itself is late."""
    world = trio(**LOST, options=replace(THREE, impatient=1.0), ends=False)
    words = r"has not closed 74686520, where .* differ in part 0 of 74686520 since .* by its dead"
    with pytest.raises(Violation, match=words):
        world.run()


def test_a_world_does_not_end_while_a_difference_is_open() -> None:
    """It goes on until the round is over, and says so if that is no way out."""
    world = trio(**LOST, agrees=APART)
    world.run_until(lambda: world.checks.bits.undecided, bound_s=20.0)
    with pytest.raises(Violation, match=r"never ended the round in which .* differ in part 0"):
        world.checks.at_the_end(world.nodes)
    early = replace(THREE, faults_s=world.now + PAUSE_S / 2.0)
    with pytest.raises(Violation, match="neither repaired nor gave it up") as caught:
        trio(**LOST, agrees=APART, options=early).run()
    assert caught.value.at > early.faults_s


# -- who was parted --------------------------------------------------------------------------------


def test_partings_are_what_happened_to_two_members_while_both_were_there() -> None:
    now = [10.0]
    links = Links(replace(THREE, oneway=1.0))
    partings = Partings(links, lambda: now[0])
    partings.parted(Partition(10.0, 20.0, (1, 2)))
    partings.frozen(5, 3.0)
    now[0] = 30.0
    partings.unreached(7, 8)
    partings.broke(GROUP, 3, 4)
    assert not links.reaches(8, 9)

    def parted(one: int, other: int, since: float, until: float, group: bytes = GROUP) -> bool:
        return partings.between(group, one, other, since, until)

    assert parted(1, 3, 15.0, 16.0)
    assert parted(3, 2, 0.0, 10.0)
    assert not parted(1, 2, 15.0, 16.0), "on one side"
    assert not parted(1, 3, 21.0, 40.0), "it was over"
    assert not parted(1, 3, 0.0, 9.0), "one was dead by then"
    assert parted(5, 6, 12.0, 40.0)
    assert not parted(5, 6, 14.0, 40.0)
    assert parted(8, 7, 30.0, 40.0)
    assert not parted(8, 7, 31.0, 40.0), "it was told before"
    assert parted(4, 3, 30.0, 40.0)
    assert not parted(4, 3, 30.0, 40.0, b"another group")
    assert not parted(4, 3, 31.0, 40.0)
    assert parted(9, 8, 35.0, 40.0)
    assert not parted(9, 6, 35.0, 40.0), "neither tried"

    partings.parted(Partition(30.0, 90.0, (1,)))
    now[0] = 40.0
    partings.calm()
    links.calm()
    assert parted(1, 2, 35.0, 50.0)
    assert not parted(1, 2, 41.0, 50.0)
    assert not parted(9, 8, 41.0, 50.0)
