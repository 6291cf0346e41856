"""What a node holds of one store, part by part: its shard in its last versions, gradients that wait
for an order, the newest snapshot, and what is on its way here. One rule: values are opaque; what an
update makes of them is given by whoever makes the shelf, so that the tests run it on plain tuples.

Nothing here waits or locks: the caller does one thing after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from moshpitd.core.store_common import KEPT
from moshpitd.core.store_words import (
    Collect,
    Collected,
    Gradient,
    GradientArrived,
    Seeded,
    ShardFailed,
    StoreEvent,
    TakeSeed,
    Update,
)

V = TypeVar("V")
Step = Callable[[V, Sequence[V], float], V]
"""x, gradients, gamma -> x - gamma sum of them."""

HELD_MAX = 512
"""Gradients of which parts are here. More are the remains of pushes that nobody decided on: the
oldest goes, and should it be ordered after all, this shard says that it cannot follow."""
SEEDS_MAX = 4  # beginnings that are heard of; all but one of them were given up
DONE_MAX = 4096  # names whose stragglers are dropped


@dataclass(slots=True)
class _Incoming(Generic[V]):
    epoch: int
    parts: dict[int, V] = field(default_factory=dict)


@dataclass(slots=True)
class _Pull(Generic[V]):
    owners: tuple[str, ...]
    parts: dict[int, V] = field(default_factory=dict)


class Shelf(Generic[V]):
    """Invariant: `_shard` has the same versions of every part in `_parts`."""

    def __init__(self, step: Step[V]) -> None:
        self._step = step
        self.copy: dict[int, V] = {}
        """The newest snapshot, or what our trainers say a store should begin with."""
        self._seed, self._seeder = b"", ""
        self._epoch = 0
        self._version = 0
        self._parts: tuple[int, ...] = ()
        self._shard: OrderedDict[int, dict[int, V]] = OrderedDict()  # by version
        self._seeds: OrderedDict[tuple[str, bytes], _Incoming[V]] = OrderedDict()
        self._gradients: OrderedDict[Gradient, _Incoming[V]] = OrderedDict()
        self._done: OrderedDict[Gradient, bool] = OrderedDict()
        self._pulls: dict[bytes, _Pull[V]] = {}

    # -- what arrives: each returns what the core has to hear, if anything

    def seed(self, peer: str, name: bytes, part: int, value: V) -> StoreEvent | None:
        """A part of what a store begins with; maybe before we know of that store."""
        if name == self._seed and self._shard:
            return None
        while (peer, name) not in self._seeds and len(self._seeds) >= SEEDS_MAX:
            self._seeds.popitem(last=False)
        self._seeds.setdefault((peer, name), _Incoming(0)).parts[part] = value
        return self._seeded() if (peer, name) == (self._seeder, self._seed) else None

    def gradient(
        self, peer: str, name: bytes, *, epoch: int, part: int, value: V
    ) -> StoreEvent | None:
        gradient = Gradient(peer, name)
        if epoch < self._epoch or gradient in self._done:
            return None
        if gradient not in self._gradients:
            while len(self._gradients) >= HELD_MAX:
                self._gradients.popitem(last=False)
            self._gradients[gradient] = _Incoming(epoch)
        self._gradients[gradient].parts[part] = value
        return self._arrived(gradient)

    def value(self, peer: str, name: bytes, part: int, value: V) -> StoreEvent | None:
        """A part of a version that a pull of ours waits for."""
        pull = self._pulls.get(name)
        if pull is None or part >= len(pull.owners) or pull.owners[part] != peer:
            return None
        pull.parts[part] = value
        return Collected(name) if len(pull.parts) == len(pull.owners) else None

    # -- what the core says

    def take_seed(self, effect: TakeSeed, me: str) -> list[StoreEvent]:
        self._seed, self._seeder = effect.seed, effect.seeder
        self._epoch, self._version, self._parts = effect.epoch, effect.version, effect.parts
        self._shard.clear()
        self._done.clear()
        self._pulls.clear()
        for gradient, incoming in list(self._gradients.items()):
            if incoming.epoch < effect.epoch:
                del self._gradients[gradient]
        if not effect.parts:
            return []
        if effect.seeder == me:
            self._shard[effect.version] = {part: self.copy[part] for part in effect.parts}
            events: list[StoreEvent] = [Seeded(effect.seed)]
        else:
            seeded = self._seeded()
            events = [seeded] if seeded is not None else []
        arrived = [self._arrived(gradient) for gradient in list(self._gradients)]
        return events + [event for event in arrived if event is not None]

    def update(self, effect: Update) -> StoreEvent | None:
        current = self._shard.get(effect.version - 1)
        held = [self._gradients.pop(one, None) for one in effect.gradients]
        self._finish(effect.gradients)
        if current is None or any(
            one is None or any(part not in one.parts for part in self._parts) for one in held
        ):
            self._shard.clear()
            return ShardFailed(self._seed)
        self._shard[effect.version] = {
            part: self._step(x, [one.parts[part] for one in held if one is not None], effect.gamma)
            for part, x in current.items()
        }
        while len(self._shard) > KEPT:
            self._shard.popitem(last=False)
        return None

    def drop_gradients(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            self._gradients.pop(gradient, None)
        self._finish(gradients)

    def collect(self, effect: Collect) -> None:
        self._pulls[effect.pull] = _Pull(effect.owners)

    def keep(self, pull: bytes) -> None:
        """What was collected is our newest snapshot. Only the core knows: a store that began in
        between would make it one of nothing."""
        self.copy = self._pulls.pop(pull).parts

    def drop_pull(self, pull: bytes) -> None:
        self._pulls.pop(pull, None)

    def shard(self, version: int) -> dict[int, V]:
        """Ours of that version; empty when it is not here any more."""
        return self._shard.get(version, {})

    # -- below

    def _seeded(self) -> StoreEvent | None:
        incoming = self._seeds.get((self._seeder, self._seed))
        if incoming is None or any(part not in incoming.parts for part in self._parts):
            return None
        self._shard[self._version] = {part: incoming.parts[part] for part in self._parts}
        self._seeds.clear()
        return Seeded(self._seed)

    def _arrived(self, gradient: Gradient) -> StoreEvent | None:
        """Once all of it that is ours is here; said again when parts of it come again, because
        then somebody has not heard it."""
        incoming = self._gradients[gradient]
        if incoming.epoch != self._epoch or not self._parts:
            return None
        if any(part not in incoming.parts for part in self._parts):
            return None
        return GradientArrived(gradient.peer, gradient.name)

    def _finish(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            self._done[gradient] = True
        while len(self._done) > DONE_MAX:
            self._done.popitem(last=False)
