"""The asynchronous primitives of `ArithmeticSwarm`: pairs that meet, a parameter store, shared
memory. One rule: every call is one event under the swarm's lock, so any order of threads is an
order of events.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from moshpitd.client.primitives import Pulled, StoreOptions, Tensors
from moshpitd.core.mixing import EdgeMixing, MixingSchedule
from moshpitd.core.topologies import is_active, passive_neighbours
from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules import adpsgd, asysg
from moshpitd.testing.coding import check_alike, copies, flattened, unflattened
from moshpitd.testing.rendezvous import Crowd


class Pairs:
    """The parameters of all peers that meet in pairs. `order` are partners to meet first, by active
    peer (for worked examples); then they are drawn."""

    def __init__(self, schedule: MixingSchedule, seed: int) -> None:
        self.schedule = schedule
        self.values: dict[int, dict[str, Tensor]] = {}
        self.order: dict[int, list[int]] = {}
        self._draws: dict[int, random.Random] = {}
        self._seed = seed

    def partner(self, peer: int) -> int | None:
        if self.order.get(peer):
            return self.order[peer].pop(0)
        mixing = self.schedule.sample(0)
        if not isinstance(mixing, EdgeMixing):
            raise LocalProtocolError("pairs meet on a graph of edges, such as ring or torus")
        choice = [other for other in passive_neighbours(peer, mixing) if other in self.values]
        if not is_active(peer) or not choice:
            return None
        draws = self._draws.setdefault(peer, random.Random(f"{self._seed}/{peer}"))
        return draws.choice(choice)


@dataclass(slots=True)
class PairMeetings:
    crowd: Crowd
    peer: int
    pairs: Pairs

    def start(self, tensors: Tensors) -> None:
        with self.crowd.lock:
            self.pairs.values[self.peer] = copies(tensors)

    def add(self, update: Tensors) -> dict[str, Tensor]:
        with self.crowd.lock:
            held = self.pairs.values[self.peer]
            for name, delta in update.items():
                held[name] = held[name] + delta
            return copies(held)

    def meet(self) -> str:
        with self.crowd.lock:
            other = self.pairs.partner(self.peer)
            if other is None:
                return ""
            mine, theirs = self.pairs.values[self.peer], self.pairs.values[other]
            for name in mine:
                delta = adpsgd.average_delta(mine[name], theirs[name])
                mine[name], theirs[name] = mine[name] + delta, theirs[name] - delta
            return f"peer{other}"

    def close(self) -> None:
        with self.crowd.lock:
            self.pairs.values.pop(self.peer, None)


class Shelf:
    """A parameter store: one `asysg.Store` per tensor would be several versions, so all tensors
    are one flat vector."""

    def __init__(self, start: dict[str, Tensor], options: StoreOptions) -> None:
        self.like, self.options = start, options
        self.names = list(start)
        bound = asysg.Bound.BLOCK if options.block else asysg.Bound.REFUSE
        self.store = asysg.Store(
            flattened(start, self.names),
            options.gamma,
            batch=options.batch,
            max_staleness=options.max_staleness,
            bound=bound,
        )
        self.updates: list[asysg.Update] = []


@dataclass(slots=True)
class ShelfStore:
    crowd: Crowd
    worker: str
    shelf: Shelf

    def pull(self) -> Pulled:
        shelf = self.shelf
        with self.crowd.lock:
            while True:
                version, shelf.store = asysg.pull(shelf.store, self.worker)
                if version is not None:
                    return Pulled(unflattened(shelf.store.x, shelf.like, shelf.names), version)
                if not self.crowd.lock.wait(60.0):
                    raise TimeoutError(f"{self.worker} may not pull from the store for 60 s")

    def push(self, gradient: Tensors, *, version: int) -> bool:
        shelf = self.shelf
        check_alike(shelf.like, gradient, "store")
        with self.crowd.lock:
            flat = flattened(gradient, shelf.names)
            pushed, shelf.store, updates = asysg.push(
                shelf.store, self.worker, flat, version=version
            )
            shelf.updates += updates
            self.crowd.lock.notify_all()
            return pushed is asysg.Pushed.TAKEN

    def close(self) -> None:
        """Nobody waits for this worker's gradient any more; with fewer workers than M, an update
        needs no more than they are."""
        shelf = self.shelf
        with self.crowd.lock:
            shelf.store = asysg.forget(shelf.store, self.worker, drop_waiting=False)
            batch = max(1, min(shelf.store.batch, len(self.crowd.present) - 1))
            shelf.store = replace(shelf.store, batch=batch)
            shelf.store, updates = asysg.advance(shelf.store)
            shelf.updates += updates
            self.crowd.lock.notify_all()


class Memory:
    """Shared parameters. `missed`, for worked examples: a read after k writes does not see those
    that `missed[k]` names by number."""

    def __init__(self, start: dict[str, Tensor]) -> None:
        self.values = {name: x.reshape(-1) for name, x in start.items()}
        self.missed: dict[int, tuple[int, ...]] = {}
        self.writes: list[Mapping[str, asysg.BlockUpdate]] = []


@dataclass(slots=True)
class MemoryOfThreads:
    crowd: Crowd
    memory: Memory

    def read(self, into: Tensors) -> None:
        memory = self.memory
        with self.crowd.lock:
            unseen = [memory.writes[j] for j in memory.missed.get(len(memory.writes), ())]
            for name, target in into.items():
                seen = asysg.torn_read(
                    memory.values[name], [write[name] for write in unseen if name in write]
                )
                target.copy_(seen.reshape(target.shape))

    def add(self, writes: Mapping[str, asysg.BlockUpdate]) -> None:
        memory = self.memory
        with self.crowd.lock:
            for name, write in writes.items():
                memory.values[name] = asysg.apply_block(memory.values[name], write)
            memory.writes.append(writes)

    def close(self) -> None:
        return
