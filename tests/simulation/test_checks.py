"""The checks can fail. One rule: for every property that the world guards there is a small peer
here that breaks it, and an honest one beside it that does not; a check that nothing can trip guards
nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from moshpitd.core.effects import (
    Announce,
    Average,
    Close,
    Effect,
    Finish,
    Linger,
    LoadSnapshot,
    Note,
    Open,
    Push,
    Send,
)
from moshpitd.core.events import (
    Averaged,
    Contributed,
    Event,
    PartArrived,
    Received,
    ResultArrived,
    Ticked,
)
from moshpitd.core.messages import (
    Declined,
    Goodbye,
    Group,
    Invite,
    Lineage,
    Member,
    Parity,
    Record,
    Shape,
)
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.sim.checks import Violation
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import MakePeer, Node
from moshpitd.sim.world import World

TWO = Options(seed=4, peers=2, parts=2, join_spread_s=0.0, compute_sigma=0.0, goal=1, bound_s=100.0)
ALONE = Outcome(Status.ALONE, Reason.NO_PEERS)


class Echo:
    """Ends every call at once, alone."""

    lineage = Lineage()

    def __init__(self, params: Params, peer_id: str, rng: Random, life: int) -> None:
        self.params, self.peer_id, self.life = params, peer_id, life
        self.effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> None:
        if isinstance(event, Contributed):
            self.effects += self.answer(event, now)

    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Finish(event.token, event.trainer, ALONE)]

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def deadline(self) -> float | None:
        return None


class Static(Echo):
    """Two peers that have always known each other: part i is reduced by member i. Honest.

    It closes when both have said Parity: Close takes what is not yet sent out of the queue.
    """

    members: tuple[str, ...] = ()
    calls = 0
    parities = 0

    def handle(self, event: Event, now: float) -> None:
        group_id = f"group {self.calls}".encode()
        match event:
            case Contributed():
                self.call, self.results = event, dict[int, tuple[int, ...]]()
                self.calls += 1
                self.parities = 0
                self.effects += self.begin(event, f"group {self.calls}".encode())
            case PartArrived():
                self.effects.append(Average(group_id, event.part))
            case Averaged():
                self.effects.append(Push(group_id, 1 - self.index, (event.part,), result=True))
                self.result(event.part, event.contributors, group_id)
            case ResultArrived():
                self.result(event.part, event.contributors, group_id)
            case Received(message=Parity()):
                self.parity(group_id)
            case _:
                pass

    @property
    def index(self) -> int:
        return self.members.index(self.peer_id)

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        lent = ((event.trainer, event.weight),)
        return [
            Open(self.group(group_id), self.index, (0, 1), lent, (), 1.0),
            Push(group_id, 1 - self.index, (1 - self.index,), result=False),
        ]

    def group(self, group_id: bytes) -> Group:
        def member(peer_id: str) -> Member:
            return Member(peer_id, 1, 1.0, self.calls - 1, False, 1e3, 1e3, ())

        members = tuple(member(peer_id) for peer_id in self.members)
        return Group(
            group_id, "peers", self.members[0], 0, 0, Shape(), b"", Lineage(), "float32", members
        )

    def result(self, part: int, contributors: tuple[int, ...], group_id: bytes) -> None:
        self.results[part] = contributors
        if len(self.results) == 2:
            self.effects.append(Send(self.members[1 - self.index], Parity(group_id, b"", 0)))
            self.parity(group_id)

    def parity(self, group_id: bytes) -> None:
        self.parities += 1
        if self.parities == 2:
            outcome = Outcome(
                Status.COMPLETE,
                group_size=2,
                participants=2,
                contributors=self.members,
                agreed=self.members,
                total_weight=2.0,
                parts=2,
                version=self.calls,
                group_id=group_id,
            )
            self.effects += self.end(group_id, self.call, outcome)

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        return [Close(group_id), Finish(call.token, call.trainer, outcome)]


def world_of(kind: type[Echo], options: Options = TWO) -> World:
    made: list[Any] = []

    def make(params: Params, peer_id: str, rng: Random, life: int) -> Echo:
        made.append(kind(params, peer_id, rng, life))
        return made[-1]  # type: ignore[no-any-return]

    maker: MakePeer = make
    world = World(options, maker)
    if issubclass(kind, Static):
        kind.members = tuple(node.peer_id for node in world.nodes)
    return world


def test_the_honest_ones_pass() -> None:
    assert world_of(Echo, replace(TWO, peers=1)).run().outcomes == {"alone": 1}
    report = world_of(Static).run()
    assert report.outcomes == {"complete": 2}
    assert report.group_sizes == {2: 2}


# -- liars about calls -----------------------------------------------------------------------------


class Silent(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return []


class Twice(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Finish(event.token, event.trainer, ALONE)] * 2


class Unreasoned(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Finish(event.token, event.trainer, Outcome(Status.FAILED, accepted=False))]


class Crowded(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Finish(event.token, event.trainer, replace(ALONE, group_size=2))]


class Raising(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        raise KeyError("no such peer")


class Impatient(Echo):
    """Asks for a deadline that has passed, whatever the time."""

    def deadline(self) -> float | None:
        return 0.0


class Inventive(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Note("had_a_nice_day"), *super().answer(event, now)]


class Wordy(Echo):
    def answer(self, event: Contributed, now: float) -> list[Effect]:
        record = Record(self.peer_id, 1, b"", 0, Lineage(), addresses=("/sim/0",) * 17)
        message = Invite("peers", 1, record, 1.0)
        return [Send(self.peer_id, message), *super().answer(event, now)]


class Fine(Echo):
    """Says goodbye to nobody in particular; that is allowed."""

    def answer(self, event: Contributed, now: float) -> list[Effect]:
        return [Send("nobody", Goodbye(Reason.DRAINING)), *super().answer(event, now)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Silent, "did not finish"),
        (Twice, "which is not an open call"),
        (Unreasoned, "fails without a reason"),
        (Crowded, "is alone in a group of 2"),
        (Raising, "raised KeyError"),
        (Impatient, "asks again and again"),
        (Inventive, "not one of NOTES"),
        (Wordy, "Record.addresses with 17 entries, allowed are 16"),
    ],
)
def test_a_peer_that_misuses_its_doors_is_caught(kind: type[Echo], words: str) -> None:
    with pytest.raises(Violation, match=words):
        world_of(kind, replace(TWO, peers=1)).run()


def test_an_unknown_receiver_is_no_violation() -> None:
    assert world_of(Fine, replace(TWO, peers=1)).run().outcomes == {"alone": 1}


# -- liars about rounds ----------------------------------------------------------------------------


class Greedy(Static):
    """In two groups at once."""

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        first = super().begin(event, group_id)
        return [*first, *super().begin(event, group_id + b" again")]


class Forger(Static):
    """Another member list under the same id."""

    def group(self, group_id: bytes) -> Group:
        group = super().group(group_id)
        return replace(group, nonce=self.index)


class Usurper(Static):
    """Takes the other member's place."""

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        opened, pushed = super().begin(event, group_id)
        assert isinstance(opened, Open)
        return [replace(opened, index=1 - opened.index), pushed]


class Heavy(Static):
    """Opens with another weight than Begin says."""

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        opened, pushed = super().begin(event, group_id)
        assert isinstance(opened, Open)
        return [replace(opened, weight=2.0), pushed]


class Reshuffler(Static):
    """Assigns reducers of its own."""

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        opened, pushed = super().begin(event, group_id)
        assert isinstance(opened, Open)
        return [replace(opened, reducers=(self.index, self.index)), pushed]


class Hasty(Static):
    """Calls the round complete when its own part is done."""

    def result(self, part: int, contributors: tuple[int, ...], group_id: bytes) -> None:
        self.results[1 - part] = contributors
        super().result(part, contributors, group_id)


class Boaster(Static):
    """Counts a contributor that was in no part."""

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        outcome = replace(outcome, contributors=(*self.members, "ghost"), participants=3)
        return super().end(group_id, call, outcome)


class Leaper(Static):
    """Ends two versions further."""

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        return super().end(group_id, call, replace(outcome, version=outcome.version + 1))


class Weighty(Static):
    """Reports another weight than that of its contributors."""

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        return super().end(group_id, call, replace(outcome, total_weight=2.5))


class Heaviest(Static):
    """Begins with a member beyond the largest weight."""

    def group(self, group_id: bytes) -> Group:
        group = super().group(group_id)
        heavy = replace(group.members[1 - self.index], weight=2.0**33)
        members = tuple(heavy if i != self.index else m for i, m in enumerate(group.members))
        return replace(group, members=members)


class Early(Static):
    """Ends its call when one part is there, and takes what comes after that."""

    def result(self, part: int, contributors: tuple[int, ...], group_id: bytes) -> None:
        self.effects.append(Finish(self.call.token, self.call.trainer, ALONE))


class Clinging(Static):
    """Never closes a round, although its calls end."""

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        return [
            effect for effect in super().end(group_id, call, outcome) if isinstance(effect, Finish)
        ]


class Repeater(Static):
    """Averages a part a second time."""

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        return [*super().begin(event, group_id), *[Average(group_id, self.index)] * 2]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Greedy, "inside"),
        (Forger, "knows another group under the id"),
        (Usurper, "takes the place of"),
        (Heavy, "opens with weight 2.0, Begin says 1.0"),
        (Reshuffler, "assigns other reducers"),
        (Hasty, r"claims results for parts \[[01]\] that never arrived"),
        (Boaster, "reports contributors"),
        (Leaper, "its bucket holds"),
        (Weighty, r"reports weight 2.5, that of .* is 2.0"),
        (Heaviest, "opens a group with a weight of 8589934592"),
        (Repeater, "averages part . of epoch 0 twice"),
        (Early, r"gets a result into the bucket of \['t0.1'\], which it gave back"),
    ],
)
def test_a_peer_that_breaks_a_round_is_caught(kind: type[Echo], words: str) -> None:
    with pytest.raises(Violation, match=words):
        world_of(kind).run()


def test_a_round_that_is_never_closed_is_noticed() -> None:
    """One round after the other would be open; the first has a deadline of its own."""
    with pytest.raises(Violation, match=r"has not closed 67726f75 by its deadline"):
        world_of(Clinging, replace(TWO, goal=9, compute_s=100.0, bound_s=1000.0)).run()


class Sweeper(Static):
    """Two rounds in one call: in the second everybody weighs what the group left to each, or,
    `share` apart, something else."""

    share = 1.0

    def begin(self, event: Contributed, group_id: bytes) -> list[Effect]:
        self.turn = 0
        return super().begin(event, group_id)

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        if self.turn:
            return super().end(group_id, call, outcome)
        self.turn, self.results, self.parities = 1, {}, 0
        self.calls += 1
        lent = ((call.trainer, call.weight),)
        second = f"group {self.calls}".encode()
        group = self.group(second)
        members = tuple(replace(member, weight=self.share) for member in group.members)
        opened = Open(replace(group, members=members), self.index, (0, 1), lent, (), self.share)
        return [
            Close(group_id),
            opened,
            Push(second, 1 - self.index, (1 - self.index,), result=False),
        ]


class Gainer(Sweeper):
    share = 1.5


def test_weight_that_comes_from_nowhere_between_two_rounds_is_caught() -> None:
    with pytest.raises(Violation, match=r"weighs 1.5 after 67726f75, which left 1.0 to each"):
        world_of(Gainer).run()
    assert world_of(Sweeper).run().outcomes == {"complete": 2}


class Halved(Sweeper):
    share = 0.5

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        return super().end(group_id, call, replace(outcome, total_weight=2.0 * self.share))


@pytest.mark.parametrize(("kind", "holds"), [(Halved, True), (Sweeper, False)])
def test_the_weight_after_a_repair_is_that_of_the_result_that_was_put_in_place(
    kind: type[Sweeper], holds: bool
) -> None:
    """Both say Parity with both contributions in their results. Then a part is repaired to a result
    that has only the first's: half of its weight is left to each."""
    world = world_of(kind)

    def repair(node: Node, what: Event | Effect) -> None:
        if isinstance(what, Close) and what.group_id == b"group 1":
            round_ = node.plane.rounds[what.group_id]
            round_.results[0] = replace(round_.results[0], contributors=(0,))

    world.watchers.append(repair)
    if holds:
        assert world.run().outcomes == {"complete": 2}
        return
    with pytest.raises(Violation, match=r"weighs 1.0 after 67726f75, which left 0.5 to each"):
        world.run()


# -- liars about meetings --------------------------------------------------------------------------


class Seeker(Echo):
    """Looks for somebody for five seconds and says how it ended. `ends` are its last notes."""

    ends: tuple[Note, ...] = (
        Note("attempt_ended", reason="no_peers", detail="heard no other peer"),
    )
    takes = 5.0
    lineage_digest = b"one"
    until = math.inf
    refuses = False

    def answer(self, event: Contributed, now: float) -> list[Effect]:
        self.until, self.call = now + self.takes, event
        lineage = Lineage(self.peer_id, self.lineage_digest)
        record = Record(self.peer_id, self.life, b"", 0, lineage)
        other = self.others[0] if self.refuses else self.peer_id
        return [
            Note("attempt_started", fields={"key": "peers", "round": 0}),
            Announce("peers", record, 300.0),
            Send(other, Declined("peers", 1, Reason.SCHEMA)),
        ]

    @property
    def others(self) -> list[str]:
        return [peer_id for peer_id in SEEKERS if peer_id != self.peer_id]

    def handle(self, event: Event, now: float) -> None:
        super().handle(event, now)
        if isinstance(event, Ticked) and now >= self.until:
            self.until = math.inf
            self.effects += [*self.ends, Finish(self.call.token, self.call.trainer, ALONE)]

    def deadline(self) -> float | None:
        return self.until if self.until < math.inf else None


SEEKERS = [node.peer_id for node in World(TWO, lambda *made: Echo(*made)).nodes]


class Refusing(Seeker):
    refuses = True


class Divided(Seeker):
    """Each of another lineage."""

    @property
    def lineage_digest(self) -> bytes:  # type: ignore[override]
        return self.peer_id.encode()


class Wordless(Seeker):
    ends = (Note("attempt_ended", reason="no_peers"),)


class Twofold(Seeker):
    ends = Seeker.ends * 2


class Stubborn(Seeker):
    takes = 16.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Seeker, r"both end alone under peers after [45]\.\d+ s together"),
        (Wordless, "ends an attempt without a reason and a sentence"),
        (Twofold, "notes attempt_ended without an attempt"),
        (Stubborn, "ends an attempt after 16.000 s, the bound is 15.001 s"),
    ],
)
def test_a_meeting_that_should_have_been_is_missed_by_nobody(
    kind: type[Seeker], words: str
) -> None:
    with pytest.raises(Violation, match=words):
        world_of(kind).run()


@pytest.mark.parametrize("kind", [Refusing, Divided])
def test_peers_that_may_not_meet_may_end_alone(kind: type[Seeker]) -> None:
    calm = replace(TWO, faults_s=50.0, goal=0)
    assert world_of(kind, calm).run().outcomes["alone"] > 2


def test_where_messages_are_lost_no_meeting_is_claimed() -> None:
    calm = replace(TWO, loss=0.5, faults_s=50.0, goal=0)
    assert world_of(Seeker, calm).run().outcomes["alone"] > 2


# -- what a Peer keeps -----------------------------------------------------------------------------


class Hoarder(Echo):
    """Remembers every moment."""

    def handle(self, event: Event, now: float) -> None:
        super().handle(event, now)
        self.memories = {number: [number] for number in range(self.params.max_candidates + 1)}


def test_a_peer_that_remembers_too_much_is_caught() -> None:
    with pytest.raises(Violation, match=r"keeps 257 entries in Hoarder\.memories"):
        world_of(Hoarder, replace(TWO, peers=1)).run()


@pytest.mark.parametrize("peers", [1, 2])
def test_a_trainer_that_finds_no_group_for_long_is_stuck_unless_nobody_else_is_there(
    peers: int,
) -> None:
    world = world_of(Echo, replace(TWO, peers=peers, lone_calls=3))
    if peers == 1:
        world.run()
        return
    with pytest.raises(Violation, match="is stuck: no group in 3 calls"):
        world.run()


class Denier(Static):
    """Reports a part without a result that is in its bucket, in its first round."""

    disputes = False

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        if self.calls > 1:
            return super().end(group_id, call, outcome)
        few = replace(
            outcome, status=Status.PARTIAL, reason=Reason.SILENT, parts_without_result=(0,)
        )  # fmt: skip
        said = {"group": group_id.hex(), "part": 0}
        dispute = Note("part_without_result", reason=Reason.PARITY.value, fields=dict(said))
        return [*([dispute] if self.disputes else ()), *super().end(group_id, call, few)]


class Disputer(Denier):
    disputes = True


def test_a_result_that_is_in_place_is_not_denied_unless_it_was_disputed() -> None:
    with pytest.raises(Violation, match=r"has results in place for parts \[0\]"):
        world_of(Denier).run()
    assert world_of(Disputer).run().outcomes == {"partial": 2, "complete": 2}


class Loader(Static):
    """Its first round lingers, while it loads a snapshot before the call ends."""

    def end(self, group_id: bytes, call: Contributed, outcome: Outcome) -> list[Effect]:
        if self.calls > 1:
            return super().end(group_id, call, outcome)
        loads = LoadSnapshot(b"", 0, (call.trainer,))
        loaded = replace(ALONE, loaded_snapshot=True)
        finish = Finish(call.token, call.trainer, loaded)
        return [Linger(group_id), loads, finish, Close(group_id)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_bucket_holds_the_results_of_its_round_until_a_snapshot_is_loaded(damaged: bool) -> None:
    world = world_of(Loader)

    def spoil(node: Node, item: object) -> None:
        if damaged and isinstance(item, LoadSnapshot):
            node.trainers[0].bucket[0] += 1e-15

    world.watchers.append(spoil)
    if not damaged:
        assert world.run().outcomes == {"alone": 2, "complete": 2}
        return
    with pytest.raises(Violation, match="has other values in the bucket"):
        world.run()


# -- damage outside of any peer --------------------------------------------------------------------


def _at_first_parity(spoil: Callable[[World, Any], None]) -> World:
    world = world_of(Static)
    done: list[bool] = []

    def watch(node: Any, item: object) -> None:
        if isinstance(item, Send) and isinstance(item.message, Parity) and not done:
            done.append(True)
            spoil(world, node)

    world.watchers.append(watch)
    return world


def test_other_bits_in_a_bucket_are_caught() -> None:
    def spoil(world: World, node: Any) -> None:
        node.trainers[0].bucket[0] += 1e-15

    with pytest.raises(Violation, match="has other values in the bucket"):
        _at_first_parity(spoil).run()


def test_members_that_hold_other_bits_are_caught() -> None:
    def spoil(world: World, node: Any) -> None:
        (round_,) = node.plane.rounds.values()
        payload = round_.results[0]
        round_.results[0] = replace(payload, crc=payload.crc ^ 1)

    with pytest.raises(Violation, match="holds other bits of part 0 than"):
        _at_first_parity(spoil).run()


def test_members_that_say_they_agree_and_do_not_are_caught() -> None:
    """After Parity, where only the outcome speaks of it."""
    world = world_of(Static)
    done: list[bool] = []

    def watch(node: Any, item: object) -> None:
        if isinstance(item, Close) and not done:
            done.append(True)
            (round_,) = node.plane.rounds.values()
            round_.results[1] = replace(round_.results[1], crc=round_.results[1].crc ^ 1)

    world.watchers.append(watch)
    with pytest.raises(Violation, match=r"say that they agree, and differ in \[1\]"):
        world.run()


def test_a_result_that_is_not_a_number_is_caught_before_it_is_anywhere() -> None:
    world = world_of(Static)

    def watch(node: Any, item: object) -> None:
        if isinstance(item, Average):
            (round_,) = node.plane.rounds.values()
            round_.value[:] = math.nan
            world.checks._contributions[round_.group.group_id][round_.index] = (0.0, round_.value)

    world.watchers.append(watch)
    with pytest.raises(Violation, match=r"averages element 0 of part . to nan"):
        world.run()


def test_an_average_that_is_not_the_mean_is_caught() -> None:
    world = world_of(Static)

    def watch(node: Any, item: object) -> None:
        if isinstance(item, Average):
            (round_,) = node.plane.rounds.values()
            round_.sums[item.part, item.epoch] += 1e-9

    world.watchers.append(watch)
    with pytest.raises(Violation, match=r"averages element 0 of part . to .*, the twin to"):
        world.run()


def test_a_violation_tells_the_whole_story() -> None:
    with pytest.raises(Violation) as caught:
        world_of(Boaster).run()
    violation = caught.value
    assert violation.options.seed == TWO.seed
    assert violation.at > 0.0
    assert f"seed {TWO.seed} at" in str(violation)
    for word in ("Attached(", "Contributed(", "Open(", "PartArrived(", "Averaged(", "Finish("):
        assert word in violation.transcript
