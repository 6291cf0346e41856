"""The parameter store at one node, whose peers are this test: what comes late, twice, from
strangers, or in too great a number.

One rule: a test speaks through the doors of `Storage` and looks at what is said, done and kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from moshpitd.core.effects import Send
from moshpitd.core.storage import Storage
from moshpitd.core.store_common import KEPT, Copy
from moshpitd.core.store_coordinator import GRADIENTS, ORDERS, TERMS_TRIES
from moshpitd.core.store_owner import FETCHES
from moshpitd.core.store_words import (
    WORKERS,
    Ballot,
    Collect,
    Collected,
    DropPull,
    DropStore,
    Gradient,
    GradientArrived,
    Rules,
    Seeded,
    SendGradient,
    SendSeed,
    SendValues,
    ShardFailed,
    StoreAnswer,
    StoreAsk,
    StoreBehind,
    StoreBroken,
    StoreCancelled,
    StoreClosed,
    StoreEvent,
    StoreFetch,
    StoreGone,
    StoreGrant,
    StoreHave,
    StoreHeld,
    StoreLeave,
    StoreMessage,
    StoreMissing,
    StoreOpened,
    StoreOrder,
    StorePull,
    StorePullAsked,
    StorePush,
    StorePushAsked,
    StoreReady,
    StoreTerms,
    StoreVerdict,
    StoreWait,
    StoreWanted,
    Update,
    Verdict,
    owner_of,
)

PARTS = 16  # enough that each of three peers owns some
NAMES = ["a", "b", "c"]
CHIEF = owner_of(0, NAMES)
OTHER, THIRD = (name for name in NAMES if name != CHIEF)
RULES = Rules(0.1)
FIRST = Ballot(1, CHIEF)
STRANGER = "stranger"


class Node:
    """A storage, its clock, and what it has said and done since somebody last looked."""

    def __init__(self, me: str) -> None:
        self.me, self.now = me, 0.0
        self.live = [name for name in NAMES if name != me]
        self.storage = Storage(
            me, live=lambda: self.live, addresses=lambda _: (), parts=lambda: PARTS
        )

    def handle(self, event: StoreEvent) -> list[Any]:
        self.storage.handle(event, self.now)
        return self.effects()

    def hear(self, sender: str, message: StoreMessage) -> list[Any]:
        self.storage.receive(sender, message, self.now)
        return self.effects()

    def wake(self) -> list[Any]:
        """Time goes on to the next deadline."""
        deadline = self.storage.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.storage.tick(self.now)
        return self.effects()

    def effects(self) -> list[Any]:
        return list(self.storage.take_effects())

    def memory(self) -> str:
        """All that it knows, for before and after."""
        storage, common = self.storage, self.storage.common
        coordinator, owner = storage.coordinator, storage.owner
        return repr((
            common.terms, common.promised, common.copy, common.rules, common.suspects,
            coordinator.founding, coordinator.office, owner.version, owner.ready,
            storage.calls.calls,
        ))  # fmt: skip

    def ignores(self, sender: str, message: StoreMessage) -> None:
        before = self.memory()
        assert self.hear(sender, message) == []
        assert self.memory() == before

    def hold(self, worker: str, sequence: int, owners: list[str]) -> Gradient:
        """These owners say that they have that gradient."""
        gradient = self.storage.common.gradient(worker, sequence, FIRST)
        for owner in owners:
            self.storage.receive(owner, StoreHeld(FIRST, gradient.peer, gradient.name), self.now)
        return gradient


def terms_of(
    owners: tuple[str, ...] = tuple(NAMES), *, seeder: str = CHIEF, version: int = 0
) -> StoreTerms:
    return StoreTerms(FIRST, owners, version, seeder, RULES)


def member(**terms: Any) -> Node:
    """Somebody whom the coordinator has told its terms, and who has its shard."""
    node = Node(OTHER)
    node.handle(StoreOpened(f"{OTHER}/0", RULES))
    node.hear(CHIEF, terms_of(**terms))
    node.handle(Seeded(FIRST.name))
    return node


def chief(rules: Rules = RULES, *, ready: bool = True) -> Node:
    """The coordinator of a store of three."""
    node = Node(CHIEF)
    node.handle(StoreOpened(f"{CHIEF}/0", rules))
    node.handle(StorePullAsked("t", f"{CHIEF}/0"))
    for ballot in (Ballot(0, CHIEF), FIRST):  # it looks, and then it asks
        for peer in (OTHER, THIRD):
            node.hear(peer, StoreHave(ballot, 0, -1))
    node.handle(StoreClosed(f"{CHIEF}/0"))  # its pull only had to begin the store
    if ready:
        make_ready(node)
    assert node.storage.common.holds(FIRST)
    return node


def make_ready(node: Node) -> list[Any]:
    effects = node.handle(Seeded(FIRST.name))
    return [*effects, *node.hear(OTHER, StoreReady(FIRST)), *node.hear(THIRD, StoreReady(FIRST))]


def said(effects: list[Any], kind: type) -> list[tuple[str, Any]]:
    return [
        (effect.to, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def of(effects: list[Any], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


# -- who is not the coordinator, or not whom it says


@pytest.mark.parametrize(
    "message",
    [
        StorePull(FIRST, f"{THIRD}/0", 1),
        StorePush(FIRST, f"{THIRD}/0", 0, 1, 0),
        StoreHeld(FIRST, THIRD, b"gradient"),
        StoreBehind(FIRST, 0),
        StoreLeave(f"{THIRD}/0"),
        StoreOrder(FIRST, 1, (Gradient(THIRD, b"gradient"),)),  # only the coordinator orders
        StoreBroken(FIRST, OTHER),  # we ourselves, and we know better
    ],
)
def test_a_member_is_no_coordinator(message: StoreMessage) -> None:
    member().ignores(THIRD, message)


def test_nobody_pulls_pushes_or_leaves_for_a_worker_of_another_node() -> None:
    node = chief(Rules(0.1, max_staleness=0, block=True))
    node.hear(OTHER, StorePull(FIRST, f"{OTHER}/0", 1))
    node.ignores(THIRD, StorePull(FIRST, f"{OTHER}/0", 2))
    node.ignores(THIRD, StorePush(FIRST, f"{OTHER}/0", 0, 2, 0))
    node.ignores(THIRD, StoreLeave(f"{OTHER}/0"))
    office = node.storage.coordinator.office
    assert office is not None
    assert office.ordering.pulled == {f"{OTHER}/0": 0}
    node.hear(OTHER, StoreLeave(f"{OTHER}/0"))
    assert office.ordering.pulled == {}


def test_who_owns_nothing_is_not_waited_for() -> None:
    node = chief(ready=False)
    node.ignores(STRANGER, StoreReady(FIRST))
    node.ignores(STRANGER, StoreHeld(FIRST, OTHER, b"gradient"))


# -- a store begins


def test_without_anything_to_begin_with_there_is_no_store() -> None:
    node = Node(CHIEF)
    node.hear(OTHER, StoreBroken(Ballot(), ""))  # its trainers come in a moment
    effects: list[Any] = []
    for ballot in (Ballot(0, CHIEF), FIRST):
        for peer in (OTHER, THIRD):
            effects += node.hear(peer, StoreHave(ballot, 0, -1))
    assert len(said(effects, StoreAsk)) == 2
    assert said(effects, StoreTerms) == []
    assert node.storage.common.terms is None
    assert node.storage.coordinator.founding is None
    # Whoever has something asks again, and then one begins.
    asks = said(node.hear(OTHER, StoreBroken(FIRST, "")), StoreAsk)
    assert asks == [(peer, StoreAsk(Ballot(2, CHIEF))) for peer in sorted((OTHER, THIRD))]
    node.hear(THIRD, StoreHave(Ballot(2, CHIEF), 0, -1))
    effects = node.hear(OTHER, StoreHave(Ballot(2, CHIEF), 0, 0, (), RULES))
    assert {terms.seeder for _, terms in said(effects, StoreTerms)} == {OTHER}


def test_an_owner_that_never_has_its_shard_is_replaced() -> None:
    node = chief(ready=False)
    node.handle(Seeded(FIRST.name))
    node.hear(OTHER, StoreReady(FIRST))
    for _ in range(TERMS_TRIES):
        assert said(node.wake(), StoreTerms) == [(THIRD, terms_of())]
    assert said(node.wake(), StoreAsk) == [(OTHER, StoreAsk(Ballot(2, CHIEF)))]
    terms = said(node.hear(OTHER, StoreHave(Ballot(2, CHIEF), 0, -1)), StoreTerms)
    assert [(to, one.owners) for to, one in terms] == [(OTHER, tuple(sorted((CHIEF, OTHER))))]


def test_who_is_lost_while_a_store_begins_is_asked_for_nothing() -> None:
    """The newcomer was never an owner, so the store before does not break by it."""
    node = chief()
    node.live.append(STRANGER)
    node.handle(ShardFailed(FIRST.name))
    founding = node.storage.coordinator.founding
    assert founding is not None
    assert STRANGER in founding.waiting
    node.live.remove(STRANGER)
    node.storage.lost(STRANGER, node.now)
    assert node.effects() == []
    assert node.storage.coordinator.founding is founding
    assert sorted(founding.waiting) == sorted((OTHER, THIRD))
    assert STRANGER in node.storage.common.suspects


def test_a_second_trainer_does_not_take_the_node_back_to_its_beginning() -> None:
    node = member(version=7, seeder=OTHER)
    before = node.storage.common.copy
    assert before == Copy(1, 7)
    node.handle(StoreOpened(f"{OTHER}/1", Rules(0.9)))
    assert node.storage.common.copy == before
    assert node.storage.common.rules == RULES


def test_without_its_last_trainer_a_node_is_part_of_no_store() -> None:
    node = member()
    node.handle(StorePullAsked("t", f"{OTHER}/0"))
    (collect,) = of(node.hear(CHIEF, StoreGrant(1, 0)), Collect)
    node.storage.reset(node.now)
    assert node.effects() == [DropPull(collect.pull), DropStore()]
    assert node.storage.common.terms is None
    assert node.storage.common.copy is None
    later = Ballot(2, CHIEF)
    haves = said(node.hear(CHIEF, StoreAsk(later)), StoreHave)
    assert haves == [(CHIEF, StoreHave(later, 0, -1))]


# -- pulls and pushes, at the coordinator


def test_a_pull_that_was_overtaken_is_not_answered() -> None:
    node = chief()
    worker = f"{OTHER}/0"
    grant = Send(OTHER, StoreGrant(2, 0))
    assert node.hear(OTHER, StorePull(FIRST, worker, 2)) == [grant]
    node.ignores(OTHER, StorePull(FIRST, worker, 1))
    assert node.hear(OTHER, StorePull(FIRST, worker, 2)) == [grant]


def test_a_push_that_was_overtaken_is_not_answered() -> None:
    node = chief()
    worker = f"{OTHER}/0"
    for sequence in (0, 1):  # of a version that is not there yet, so refused
        node.hold(worker, sequence, NAMES)
        effects = node.hear(OTHER, StorePush(FIRST, worker, sequence, sequence + 1, 5))
        verdict = StoreVerdict(sequence + 1, Verdict.TOO_OLD)
        assert said(effects, StoreVerdict) == [(OTHER, verdict)]
    node.ignores(OTHER, StorePush(FIRST, worker, 0, 1, 5))
    # A new number, because the store was begun anew for it; the verdict stays.
    again = StorePush(FIRST, worker, 1, 9, 5, True)
    assert node.hear(OTHER, again) == [Send(OTHER, StoreVerdict(9, Verdict.TOO_OLD))]


def test_no_more_pulls_wait_than_there_may_be_workers() -> None:
    node = chief(ready=False)
    for number in range(WORKERS):
        wait = node.hear(OTHER, StorePull(FIRST, f"{OTHER}/{number}", number + 1))
        assert wait == [Send(OTHER, StoreWait(number + 1))]
    late = StorePull(FIRST, f"{THIRD}/0", 1)
    node.ignores(THIRD, late)
    # Who waits already may ask again.
    assert node.hear(OTHER, StorePull(FIRST, f"{OTHER}/0", 1)) == [Send(OTHER, StoreWait(1))]
    grants = said(make_ready(node), StoreGrant)
    assert sorted(grant.number for _, grant in grants) == [*range(1, WORKERS + 1)]
    assert node.hear(THIRD, late) == [Send(THIRD, StoreGrant(1, 0))]


def test_invented_workers_cost_no_memory_and_nobody_its_place() -> None:
    node = chief()
    mine, office = f"{THIRD}/0", node.storage.coordinator.office
    assert office is not None
    for number in range(2 * WORKERS):
        node.hear(OTHER, StorePull(FIRST, f"{OTHER}/{number}", 1))
        node.hear(OTHER, StorePush(FIRST, f"{OTHER}/{number}", 0, 2, 9))
        node.hold(f"{OTHER}/{number}", 0, NAMES)
        node.hear(OTHER, StoreLeave(f"{OTHER}/{number}", 3))
        assert number == 0 or mine in office.grants  # whoever pulls is one of those heard of last
        node.hear(THIRD, StorePull(FIRST, mine, number + 1))
    for table in (office.left, office.verdicts, office.grants):
        assert len(table) == WORKERS
    # Who has pulled lately is still known.
    node.effects()
    again = node.hear(THIRD, StorePull(FIRST, mine, 2 * WORKERS))
    assert again == [Send(THIRD, office.grants[mine])]


def test_no_more_pushes_wait_than_the_limit() -> None:
    node = chief()
    for number in range(GRADIENTS):
        assert node.hear(OTHER, StorePush(FIRST, f"{OTHER}/0", number, number + 1, 0)) == []
    late = StorePush(FIRST, f"{THIRD}/0", 0, 1, 0)
    node.ignores(THIRD, late)
    # It is not lost: it is said again, and finds room when another is decided on.
    node.hold(f"{OTHER}/0", 0, NAMES)
    node.hold(f"{THIRD}/0", 0, NAMES)
    node.effects()
    verdicts = said(node.hear(THIRD, late), StoreVerdict)
    assert verdicts == [(THIRD, StoreVerdict(1, Verdict.TOO_OLD))]  # T = 0, and one was taken


def test_of_too_many_gradients_the_oldest_is_wanted_again() -> None:
    node = chief()
    worker = f"{THIRD}/0"
    node.hold(worker, 0, NAMES)
    node.hold(worker, 1, NAMES)
    for number in range(2, GRADIENTS + 1):
        node.hold(worker, number, [OTHER])
    wanted = node.hear(THIRD, StorePush(FIRST, worker, 0, 1, 0, True))
    assert wanted == [Send(THIRD, StoreWanted(1, tuple(NAMES)))]
    taken = node.hear(THIRD, StorePush(FIRST, worker, 1, 2, 0, True))
    assert said(taken, StoreVerdict) == [(THIRD, StoreVerdict(2, Verdict.TAKEN))]


def test_who_lacks_an_order_that_nobody_knows_any_more_is_replaced() -> None:
    node = chief(Rules(0.1, max_staleness=ORDERS))
    for number in range(ORDERS + 1):
        node.hold(f"{OTHER}/0", number, NAMES)
        node.hear(OTHER, StorePush(FIRST, f"{OTHER}/0", number, number + 1, number))
    node.ignores(THIRD, StoreBehind(FIRST, ORDERS + 1))  # which is the newest
    orders = said(node.hear(THIRD, StoreBehind(FIRST, 1)), StoreOrder)
    assert [order.version for _, order in orders] == [*range(2, ORDERS + 2)]
    effects = node.hear(THIRD, StoreBehind(FIRST, 0))
    assert said(effects, StoreAsk) == [(OTHER, StoreAsk(Ballot(2, CHIEF)))]


# -- a shard and its owner


def test_a_seed_or_a_failure_of_another_life_says_nothing() -> None:
    node = Node(OTHER)
    assert node.handle(Seeded(FIRST.name)) == []
    node = member()
    for event in (Seeded(Ballot(9, CHIEF).name), ShardFailed(Ballot(9, CHIEF).name)):
        before = node.memory()
        assert node.handle(event) == []
        assert node.memory() == before


def test_an_owner_that_cannot_follow_says_so_and_shows_nothing() -> None:
    node = member()
    fetch = StoreFetch(FIRST, 1, 0)
    assert of(node.hear(THIRD, fetch), SendValues)
    broken = node.handle(ShardFailed(FIRST.name))
    assert broken == [Send(CHIEF, StoreBroken(FIRST, OTHER))]
    assert of(node.hear(THIRD, fetch), SendValues) == []


def test_a_coordinator_that_cannot_follow_begins_anew() -> None:
    asks = said(chief().handle(ShardFailed(FIRST.name)), StoreAsk)
    assert asks == [(peer, StoreAsk(Ballot(2, CHIEF))) for peer in sorted((OTHER, THIRD))]


def test_who_has_no_shard_holds_no_gradient() -> None:
    arrived = GradientArrived(THIRD, b"gradient")
    assert Node(OTHER).handle(arrived) == []
    assert member(owners=(CHIEF, THIRD)).handle(arrived) == []
    assert member().handle(arrived) == [Send(CHIEF, StoreHeld(FIRST, THIRD, b"gradient"))]


def test_no_more_fetches_wait_than_the_limit() -> None:
    node = member()
    for number in range(FETCHES):
        node.ignores(THIRD, StoreFetch(FIRST, number + 1, 1))
    late = StoreFetch(FIRST, FETCHES + 1, 1)
    node.ignores(THIRD, late)
    effects = node.hear(CHIEF, StoreOrder(FIRST, 1, (Gradient(THIRD, b"gradient"),)))
    assert [update.version for update in of(effects, Update)] == [1]
    assert len(of(effects, SendValues)) == FETCHES
    assert len(of(node.hear(THIRD, late), SendValues)) == 1
    for version in range(2, KEPT + 2):
        node.hear(CHIEF, StoreOrder(FIRST, version, (Gradient(THIRD, b"gradient"),)))
    assert node.hear(THIRD, late) == [Send(THIRD, StoreGone(FETCHES + 1))]


def test_a_seeder_that_has_gone_on_sends_no_later_version_as_the_seed() -> None:
    node = member(seeder=OTHER)
    assert [seed.to for seed in of(node.hear(THIRD, StoreMissing(FIRST, (1,))), SendSeed)] == [
        THIRD
    ]
    node.handle(StorePullAsked("t", f"{OTHER}/0"))
    (collect,) = of(node.hear(CHIEF, StoreGrant(1, 3)), Collect)
    node.handle(Collected(collect.pull))
    assert node.storage.common.copy == Copy(1, 3)
    node.ignores(THIRD, StoreMissing(FIRST, (1,)))


# -- calls of our trainers


def test_a_call_that_was_given_up_is_not_answered() -> None:
    node = member()
    worker = f"{OTHER}/0"
    node.handle(StorePullAsked("t", worker))
    (collect,) = of(node.hear(CHIEF, StoreGrant(1, 0)), Collect)
    left = Send(CHIEF, StoreLeave(worker, 1))
    assert node.handle(StoreCancelled("t")) == [DropPull(collect.pull), left]
    assert node.handle(StoreCancelled("t")) == []
    assert node.handle(Collected(collect.pull)) == []
    assert node.storage.common.copy == Copy(0, 0)


def test_a_pull_that_was_given_up_holds_nobody_up() -> None:
    """With T = 0 one gradient may be outstanding: whoever pulls next waits for the first."""
    node = chief(Rules(0.1, max_staleness=0, block=True))
    first, second = f"{OTHER}/0", f"{THIRD}/0"
    assert said(node.hear(OTHER, StorePull(FIRST, first, 1)), StoreGrant)
    waits = node.hear(THIRD, StorePull(FIRST, second, 1))
    assert said(waits, StoreWait)
    assert not said(waits, StoreGrant)
    effects = node.hear(OTHER, StoreLeave(first, 1))
    assert [to for to, _ in said(effects, StoreGrant)] == [THIRD]
    # What it said again just before is void, and its next pull is not.
    assert node.hear(OTHER, StorePull(FIRST, first, 1)) == []
    assert said(node.hear(OTHER, StorePull(FIRST, first, 2)), StoreWait)
    assert said(node.hear(THIRD, StoreLeave(second, 1)), StoreGrant) == [(OTHER, StoreGrant(2, 0))]
    node.hear(OTHER, StoreLeave(first, 1))  # late, and of the pull before this one
    assert node.storage.coordinator.office is not None
    assert node.storage.coordinator.office.ordering.pulled == {first: 0}


def test_a_pull_that_was_said_to_nobody_is_given_up_in_silence() -> None:
    node = member()
    worker = f"{OTHER}/0"
    node.handle(StorePullAsked("t", worker))
    assert node.handle(StoreCancelled("t")) == [Send(CHIEF, StoreLeave(worker, 1))]
    node.handle(StorePushAsked("t", worker, 0))
    assert node.handle(StoreCancelled("t")) == []
    alone = Node(OTHER)
    alone.handle(StoreOpened(worker, RULES))
    alone.handle(StorePullAsked("t", worker))
    assert said(alone.handle(StoreCancelled("t")), StoreLeave) == []


@pytest.mark.parametrize("adopted", [True, False])
def test_a_second_trainer_of_a_node_with_other_rules_is_refused(adopted: bool) -> None:
    """Every time it pulls, and until it asks for the store's; the first one goes on."""
    if adopted:
        node = member()
    else:
        node = Node(OTHER)
        node.handle(StoreOpened(f"{OTHER}/0", RULES))
    node.handle(StorePullAsked("first", f"{OTHER}/0"))
    node.handle(StoreOpened(f"{OTHER}/1", Rules(0.2)))
    for token in ("t0", "t1"):
        (answer,) = of(node.handle(StorePullAsked(token, f"{OTHER}/1")), StoreAnswer)
        assert (answer.token, answer.refusal) == (token, "store_differs")
        assert "0.1" in answer.detail
        assert "0.2" in answer.detail
    assert [*node.storage.calls.calls] == ["first"]
    node.handle(StoreOpened(f"{OTHER}/1", RULES))
    assert of(node.handle(StorePullAsked("t2", f"{OTHER}/1")), StoreAnswer) == []
    assert [*node.storage.calls.calls] == ["first", "t2"]


def test_with_a_worker_go_its_calls_and_no_others() -> None:
    node = member()
    for number in (0, 1):
        node.handle(StorePullAsked(f"t{number}", f"{OTHER}/{number}"))
    effects = node.handle(StoreClosed(f"{OTHER}/0"))
    assert effects == [Send(CHIEF, StoreLeave(f"{OTHER}/0"))]
    node.ignores(CHIEF, StoreGrant(1, 0))
    (collect,) = of(node.hear(CHIEF, StoreGrant(2, 0)), Collect)
    # A part of some other pull says nothing about this one.
    assert node.handle(Collected(b"another")) == []
    assert node.handle(Collected(collect.pull)) == [StoreAnswer("t1", collect.pull)]


def test_a_worker_that_leaves_without_a_store_tells_nobody() -> None:
    node = Node(OTHER)
    assert node.handle(StoreClosed(f"{OTHER}/0")) == []


def test_an_answer_to_nothing_is_not_one_to_a_call_that_was_not_said_yet() -> None:
    node = Node(OTHER)
    node.handle(StoreOpened(f"{OTHER}/0", RULES))
    node.handle(StorePushAsked("t", f"{OTHER}/0", 0))  # there is no store to say it to
    for message in (StoreVerdict(0, Verdict.TAKEN), StoreGone(0), StoreWait(0)):
        node.ignores(CHIEF, message)
    assert [*node.storage.calls.calls] == ["t"]


def test_a_gradient_goes_to_owners_only() -> None:
    node = member()
    node.handle(StorePushAsked("t", f"{OTHER}/0", 0))
    effects = node.hear(CHIEF, StoreWanted(1, (STRANGER, THIRD)))
    assert [gradient.to for gradient in of(effects, SendGradient)] == [THIRD]
