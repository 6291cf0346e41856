"""The checks can fail. One rule: for every property that the world guards there is a small peer
here that breaks it, and an honest one beside it that does not; a check that nothing can trip guards
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from moshpitd.core.effects import Average, Close, Effect, Finish, Note, Open, Push, Send
from moshpitd.core.events import Averaged, Contributed, Event, PartArrived, Received, ResultArrived
from moshpitd.core.messages import Goodbye, Group, Invite, Lineage, Member, Parity, Record, Shape
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.sim.checks import Violation
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import MakePeer
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
        (Repeater, "averages part . of epoch 0 twice"),
    ],
)
def test_a_peer_that_breaks_a_round_is_caught(kind: type[Echo], words: str) -> None:
    with pytest.raises(Violation, match=words):
        world_of(kind).run()


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
