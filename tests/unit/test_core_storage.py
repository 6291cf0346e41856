"""The parameter store without a network: random loss, repetition, reordering and deaths.

One rule: a value is the row of gradients that are inside it, so a mixed snapshot, a gradient
that was applied twice, or one that is too old can be read off any value that a trainer sees.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moshpitd.core.effects import Send
from moshpitd.core.storage import Storage
from moshpitd.core.store_order import Ordering, Waiting
from moshpitd.core.store_words import (
    Collect,
    DropGradients,
    DropPull,
    DropStore,
    Gradient,
    LinkTo,
    Rules,
    SendGradient,
    SendSeed,
    SendValues,
    StoreAnswer,
    StoreClosed,
    StoreEvent,
    StoreOpened,
    StorePullAsked,
    StorePushAsked,
    TakeSeed,
    Update,
    Verdict,
    name_of,
    owner_of,
)
from moshpitd.daemon.shelf import Shelf
from moshpitd.tensors.rules import asysg

PARTS = 5
Row = tuple[Any, ...]
"""The gradients inside a part of a value: (worker, number of its push, version it was read at)."""


def applied(x: Row, gradients: Any, gamma: float) -> Row:
    return (*x, tuple(gradients))


@dataclass
class Trainer:
    """Pulls and pushes in turn, as AsySGCon does."""

    worker: str
    version: int | None = None
    token: str = ""
    pushes: int = 0
    refused: int = 0
    steps: int = 0
    closed: bool = False
    seen: list[Row] = field(default_factory=list)


class Node:
    """A storage with its shelf and its trainers."""

    def __init__(self, world: World, me: str, trainers: int) -> None:
        self.world, self.me = world, me
        self.shelf: Shelf[Row] = Shelf(applied)
        self.storage = Storage(
            me,
            live=lambda: [peer for peer in world.known[me] if peer != me],
            addresses=lambda peer: (f"{peer}:1",),
            parts=lambda: PARTS,
        )
        self.trainers = [Trainer(f"{me}/{number}") for number in range(trainers)]
        self.gradients: dict[str, Row] = {}  # by token
        self.events: deque[StoreEvent] = deque()
        self.busy = False

    def open(self) -> None:
        if not self.trainers:
            return
        self.shelf.copy = dict.fromkeys(range(PARTS), ())
        for trainer in self.trainers:
            self.handle(StoreOpened(trainer.worker, self.world.rules))

    def handle(self, event: StoreEvent) -> None:
        """One that arises while effects are carried out waits for the last of them."""
        self.events.append(event)
        if not self.busy:
            self.carry_out()

    @property
    def idle(self) -> bool:
        """A trainer has something to do and waits for nothing."""
        return any(not one.token and one.steps < self.world.steps for one in self.trainers)

    def turn(self) -> None:
        """Every trainer that waits for nothing does its next thing."""
        for trainer in self.trainers:
            if trainer.token or trainer.steps >= self.world.steps:
                continue
            self.world.tokens += 1
            trainer.token = f"t{self.world.tokens}"
            if trainer.version is None:
                self.handle(StorePullAsked(trainer.token, trainer.worker))
            else:
                trainer.pushes += 1
                self.gradients[trainer.token] = (trainer.worker, trainer.pushes, trainer.version)
                self.handle(StorePushAsked(trainer.token, trainer.worker, trainer.version))

    def carry_out(self) -> None:
        self.busy = True
        while True:
            for effect in self.storage.take_effects():
                self.perform(effect)
            if not self.events:
                break
            self.storage.handle(self.events.popleft(), self.world.now)
        self.busy = False

    def perform(self, effect: Any) -> None:
        world = self.world
        match effect:
            case Send():
                world.send(self.me, effect.to, ("say", effect.message))
            case LinkTo() | DropStore():
                pass
            case SendSeed():
                for part in effect.parts:
                    self.frame(effect.to, ("seed", effect.seed, part, self.shelf.copy[part]))
            case TakeSeed():
                for event in self.shelf.take_seed(effect, self.me):
                    self.handle(event)
            case SendGradient():
                for part in effect.parts:
                    value = self.gradients[effect.token]
                    self.frame(effect.to, ("gradient", effect.name, effect.epoch, part, value))
            case Update():
                if (failed := self.shelf.update(effect)) is not None:
                    world.failed += 1
                    self.handle(failed)
            case DropGradients():
                self.shelf.drop_gradients(effect.gradients)
            case SendValues():
                for part, value in self.shelf.shard(effect.version).items():
                    self.frame(effect.to, ("value", effect.pull, part, value))
            case Collect():
                self.shelf.collect(effect)
            case DropPull():
                self.shelf.drop_pull(effect.pull)
            case StoreAnswer():
                self.answered(effect)

    def frame(self, to: str, what: Any) -> None:
        if to == self.me:
            self.take(self.me, what)
        else:
            self.world.send(self.me, to, what)

    def take(self, sender: str, what: Any) -> None:
        event: StoreEvent | None
        match what:
            case ("say", message):
                self.storage.receive(sender, message, self.world.now)
                self.carry_out()
                return
            case ("seed", name, part, value):
                event = self.shelf.seed(sender, name, part, value)
            case ("gradient", name, epoch, part, value):
                event = self.shelf.gradient(sender, name, epoch=epoch, part=part, value=value)
            case ("value", name, part, value):
                event = self.shelf.value(sender, name, part, value)
            case _:
                raise AssertionError(what)
        if event is not None:
            self.handle(event)

    def answered(self, answer: StoreAnswer) -> None:
        assert not answer.refusal, answer
        trainer = next(one for one in self.trainers if one.token == answer.token)
        trainer.token = ""
        self.gradients.pop(answer.token, None)
        if trainer.version is None:
            self.shelf.keep(answer.pull)
            rows = set(self.shelf.copy.values())
            assert len(rows) == 1, f"parts of several versions: {rows}"
            (row,) = rows
            self.world.check(row, answer.version)
            trainer.version = answer.version
            trainer.seen.append(row)
        else:
            trainer.version = None
            trainer.refused += answer.verdict is not Verdict.TAKEN
            trainer.steps += 1


class World:
    """Nodes by name, and messages that are lost, repeated and overtaken."""

    def __init__(
        self, seed: int, *, nodes: int, rules: Rules, loss: float, steps: int, trainers: int = 1
    ) -> None:
        self.rng = random.Random(seed)
        self.rules, self.loss, self.steps = rules, loss, steps
        self.now, self.tokens, self.failed = 0.0, 0, 0
        names = [f"n{number}" for number in range(nodes)]
        self.known = {name: list(names) for name in names}
        self.wire: list[tuple[float, int, str, str, Any]] = []
        self.count = 0
        self.nodes = {name: Node(self, name, trainers) for name in names}

    def send(self, source: str, target: str, what: Any) -> None:
        copies = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss)
        for _ in range(copies):
            self.count += 1
            at = self.now + self.rng.uniform(0.001, 0.2)
            self.wire.append((at, self.count, source, target, what))

    def check(self, row: Row, version: int) -> None:
        """What every snapshot has to be, whichever life of the store it is of."""
        assert len(row) == version, "one batch for every version"
        inside = [gradient for batch in row for gradient in batch]
        assert len(set(inside)) == len(inside), "a gradient twice"
        for index, batch in enumerate(row):
            assert len(batch) == self.rules.batch
            for _, _, read in batch:
                assert 0 <= index - read <= self.rules.max_staleness

    def start(self) -> None:
        for node in self.nodes.values():
            node.open()

    def run(self, until_s: float) -> Iterator[None]:
        """One event after the other; yields after each."""
        while self.now < until_s:
            for node in list(self.nodes.values()):
                node.turn()
            deadlines = [(node.storage.deadline(), name) for name, node in self.nodes.items()]
            ticks = [(max(at, self.now), name) for at, name in deadlines if at is not None]
            next_tick = min(ticks, default=None)
            next_message = min(self.wire, default=None)
            if next_tick is None and next_message is None:
                if any(node.idle for node in self.nodes.values()):
                    yield
                    continue
                return
            if next_message is not None and (next_tick is None or next_message[0] <= next_tick[0]):
                self.wire.remove(next_message)
                self.now = next_message[0]
                node = self.nodes.get(next_message[3])
                if node is not None:
                    node.take(next_message[2], next_message[4])
            else:
                assert next_tick is not None  # or there is a message
                self.now = next_tick[0] + 0.001
                node = self.nodes[next_tick[1]]
                node.storage.tick(self.now)
                node.carry_out()
            yield

    def kill(self, name: str, *, told: bool = True) -> None:
        """`told`: links break; else it is only silent."""
        del self.nodes[name]
        self.wire = [one for one in self.wire if name not in (one[2], one[3])]
        if told:
            for other, node in self.nodes.items():
                self.known[other].remove(name)
                node.storage.lost(name, self.now)
                node.carry_out()

    @property
    def done(self) -> bool:
        return all(t.steps >= self.steps for node in self.nodes.values() for t in node.trainers)

    def finish(self, within_s: float = 4000.0) -> None:
        """No more faults: everybody gets to its end."""
        self.loss = 0.0
        for _ in self.run(self.now + within_s):
            if self.done:
                return
        assert self.done, [
            (t.worker, t.steps, t.token, t.version) for n in self.nodes.values() for t in n.trainers
        ]


RULES = st.builds(
    Rules,
    gamma=st.just(0.1),
    batch=st.integers(1, 2),
    max_staleness=st.integers(0, 4),
    block=st.booleans(),
)


def close_done(world: World) -> None:
    """With `block` a trainer that stops after a pull would be waited for."""
    for node in world.nodes.values():
        for trainer in node.trainers:
            if trainer.steps >= world.steps and not trainer.token and not trainer.closed:
                trainer.closed = True
                node.handle(StoreClosed(trainer.worker))


def test_four_nodes_share_the_parts_and_every_pull_is_one_version() -> None:
    rules = Rules(0.1, batch=1, max_staleness=16)
    world = World(0, nodes=4, rules=rules, loss=0.0, steps=10)
    world.start()
    world.finish(200.0)
    terms = world.nodes["n0"].storage.common.terms
    assert terms is not None
    assert set(terms.owners) == {owner_of(part, sorted(world.nodes)) for part in range(PARTS)}
    assert len(terms.owners) > 1
    assert {node.storage.common.terms for node in world.nodes.values()} == {terms}
    assert sum(t.refused for node in world.nodes.values() for t in node.trainers) == 0
    assert terms.ballot.epoch == 1
    office = world.nodes[terms.ballot.coordinator].storage.coordinator.office
    assert office is not None
    assert office.ordering.version == 40


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 4), rules=RULES)
@settings(max_examples=60)
def test_loss_repetition_and_disorder_change_nothing(seed: int, nodes: int, rules: Rules) -> None:
    world = World(seed, nodes=nodes, rules=rules, loss=0.15, steps=6)
    world.start()
    for _ in world.run(60.0):
        close_done(world)
        if world.done:
            break
    for _ in world.run(world.now + 4000.0):
        world.loss = 0.0
        close_done(world)
        if world.done:
            break
    assert world.done
    assert world.failed == 0


@given(
    seed=st.integers(0, 10**6), rules=RULES, told=st.booleans(),
    deaths=st.lists(st.tuples(st.integers(5, 400), st.integers(0, 3)), min_size=1, max_size=2),
)  # fmt: skip
@example(  # who holds the others up owns nothing, so nobody misses its node
    seed=59, rules=Rules(0.1, batch=1, max_staleness=0, block=True), told=False,
    deaths=[(108, 2), (388, 1)],
)  # fmt: skip
@settings(max_examples=60)
def test_the_store_survives_its_owners(
    seed: int, rules: Rules, told: bool, deaths: list[tuple[int, int]]
) -> None:
    world = World(seed, nodes=4, rules=rules, loss=0.05, steps=6)
    world.start()
    due = dict(deaths)
    for number, _ in enumerate(world.run(60.0)):
        close_done(world)
        name = f"n{due.get(number)}"
        if name in world.nodes:
            world.kill(name, told=told)
    world.loss = 0.0
    for _ in world.run(world.now + 4000.0):
        close_done(world)
        if world.done:
            break
    assert world.done


def test_after_a_death_the_store_goes_on_from_the_newest_snapshot_pulled() -> None:
    rules = Rules(0.1, batch=1, max_staleness=16)
    world = World(3, nodes=3, rules=rules, loss=0.0, steps=10**6)
    world.start()
    for number, _ in enumerate(world.run(100.0)):
        if number == 600:
            break
    terms = world.nodes["n0"].storage.common.terms
    assert terms is not None
    world.kill(terms.ballot.coordinator)
    copies = [node.storage.common.copy for node in world.nodes.values()]
    newest = max(copy.rank for copy in copies if copy is not None)
    best = max((len(node.shelf.copy[0]), node.shelf.copy[0]) for node in world.nodes.values())[1]
    for _ in world.run(world.now + 30.0):
        pass
    for node in world.nodes.values():
        after = node.storage.common.terms
        assert after is not None
        assert after.ballot.epoch == 2
        assert after.version == newest[1]
        assert node.trainers[0].seen[-1][: len(best)] == best
        assert len(node.trainers[0].seen[-1]) > len(best)


def test_who_comes_later_gets_parts_and_nothing_is_lost() -> None:
    world = World(5, nodes=4, rules=Rules(0.1, max_staleness=16), loss=0.0, steps=150)
    for name in world.known:
        world.known[name] = [name]
    world.nodes["n0"].open()
    later = {name: world.nodes.pop(name) for name in ("n1", "n2", "n3")}
    for number, _ in enumerate(world.run(100.0)):
        if number == 20:
            break
    before = world.nodes["n0"].storage.common.terms
    assert before is not None
    assert before.owners == ("n0",)
    world.nodes |= later
    for name in world.known:
        world.known[name] = [*world.nodes]
    for node in later.values():
        node.open()
    world.finish()
    terms = world.nodes["n0"].storage.common.terms
    assert terms is not None
    assert terms.owners == world.nodes["n0"].storage.common.owners(sorted(world.nodes))
    office = world.nodes[terms.ballot.coordinator].storage.coordinator.office
    assert office is not None
    assert office.ordering.version == 4 * 150


def test_trainers_that_do_not_agree_are_told() -> None:
    world = World(0, nodes=2, rules=Rules(0.1), loss=0.0, steps=5)
    first, second = world.nodes.values()
    first.open()
    world.rules = Rules(0.2)
    second.open()
    refusals = []
    for node in (first, second):
        node.answered = lambda answer: refusals.append(answer)  # type: ignore[method-assign]
    for _ in world.run(20.0):
        pass
    told = [answer.refusal for answer in refusals if answer.refusal]
    assert told
    assert set(told) == {"store_differs"}


@pytest.mark.parametrize("peers", [2, 5, 9])
def test_who_leaves_moves_only_its_own_parts(peers: int) -> None:
    names = [f"peer{number}" for number in range(peers)]
    before = [owner_of(part, names) for part in range(500)]
    after = [owner_of(part, names[1:]) for part in range(500)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != names[0])
    counts = [before.count(name) for name in names]
    assert min(counts) > 500 / peers / 2


@given(
    n=st.integers(1, 4), batch=st.integers(1, 3), bound=st.integers(0, 3), block=st.booleans(),
    turns=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
)  # fmt: skip
@settings(max_examples=150)
def test_the_order_is_that_of_the_rules(
    n: int, batch: int, bound: int, block: bool, turns: list[tuple[int, bool]]
) -> None:
    """The same words to both; `forget` is the boolean."""
    how = asysg.Bound.BLOCK if block else asysg.Bound.REFUSE
    x = torch.zeros(1, dtype=torch.float64)
    twin = asysg.Store(x, 1.0, batch=batch, max_staleness=bound, bound=how)
    ours = Ordering(Rules(1.0, batch, bound, block), 0)
    read: dict[int, int] = {}
    for number, (turn, forget) in enumerate(turns):
        worker = turn % n
        name = str(worker)
        updates: list[asysg.Update] = []
        if forget and block:
            read.pop(worker, None)
            ours.forget(name)
            twin = asysg.forget(twin, name, drop_waiting=False)
            twin, updates = asysg.advance(twin)
        elif worker not in read:
            version = ours.pull(name)
            theirs, twin = asysg.pull(twin, name)
            assert version == theirs
            if version is not None:
                read[worker] = version
            continue
        else:
            at = read.pop(worker)
            gradient = Gradient("peer", name_of(number))
            verdict = ours.push(Waiting(name, at, number, gradient))
            pushed, twin, updates = asysg.push(twin, name, x + 1, version=at)
            assert verdict.value == pushed.value
        batches = ours.advance()
        assert [one.version for one in batches] == [update.version for update in updates]
        for one, update in zip(batches, updates, strict=True):
            staleness = [one.version - 1 - waiting.read for waiting in one.gradients]
            assert tuple(staleness) == update.staleness
    assert ours.version == twin.version
