"""The data plane of parameter stores, for all runs of a node: parts travel on the bulk links, and
trainers hand gradients over and get snapshots through their buckets.

One rule: effects are carried out one after the other in one thread, as the core decided them, so
that a shard is never read between two updates; what arrives only adds to it, under the run's lock.
Values are float32 or what the trainer has, as they are: a store has no codec yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from moshpitd.core.events import Event, LinkLost
from moshpitd.core.outcome import Reason
from moshpitd.core.store_words import (
    Collect,
    DropGradients,
    DropPull,
    DropStore,
    LinkTo,
    SendGradient,
    SendSeed,
    SendValues,
    StoreAnswer,
    StoreEffect,
    StoreEvent,
    TakeSeed,
    Update,
)
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.pacing import ROUND_PRIORITY, Frame, Links, Pacer, link
from moshpitd.daemon.shelf import Shelf
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import Tensor, bytes_of, fresh, tensor_of, typed
from moshpitd.tensors.reduction import examine_bucket, first_nonfinite
from moshpitd.tensors.rules import asysg
from moshpitd.tensors.slices import copy_quietly

log = logging.getLogger(__name__)

SEED, GRADIENT, VALUES = 1, 2, 3  # in a frame's flags: what its part is a part of

Parts = dict[int, Tensor]


def step(x: Tensor, gradients: Sequence[Tensor], gamma: float) -> Tensor:
    return asysg.update(x, gradients, gamma=gamma)


class _Waiter:
    """A trainer's call. `bucket`: a pull's, which gets the snapshot."""

    def __init__(self, bucket: Bucket | None) -> None:
        self.bucket = bucket
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[StoreAnswer] = self.loop.create_future()

    def answer(self, answer: StoreAnswer) -> None:
        def settle() -> None:
            if not self.future.done():
                self.future.set_result(answer)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(settle)


class _Store:
    """One run's. Invariant: `lock` is held by whoever touches `shelf`, `desk` by whoever touches
    `pushes` and `waiters` and the buckets of these; an update of gigabytes must not hold up the
    daemon's loop, which only needs the latter."""

    def __init__(self, run: str, layout: Layout) -> None:
        self.run, self.layout = run, layout
        self.lock, self.desk = threading.Lock(), threading.Lock()
        self.shelf: Shelf[Tensor] = Shelf(step)
        self.pushes: dict[str, Parts] = {}  # by token
        self.waiters: dict[str, _Waiter] = {}

    def parts(self, buffer: Tensor) -> Parts:
        return {part.index: self.layout.part_view(buffer, part) for part in self.layout.parts}

    def copy_of(self, bucket: Bucket) -> tuple[Parts, str | None]:
        """What the bucket holds now, in memory of our own, and the first tensor in it with a NaN or
        an infinity."""
        memory = fresh(self.layout.nbytes)
        copy_quietly(bucket.data[: self.layout.nbytes], memory)
        return self.parts(memory), examine_bucket(self.layout, memory)[0]

    def value(self, index: int, payload: memoryview) -> Tensor | None:
        """A part as it came, if it can be one: an honest peer sends no NaN."""
        if index >= len(self.layout.parts):
            return None
        part = self.layout.parts[index]
        if len(payload) != part.nbytes:
            return None
        value = typed(tensor_of(bytearray(payload)), part.dtype)
        return value if first_nonfinite(value) is None else None


class Storages:
    """`layout_of(run)`: None while a run has had no trainer here. `post` as in `Exchange`."""

    def __init__(
        self,
        peer_id: str,
        post: Callable[[str, Event], None],
        layout_of: Callable[[str], Layout | None],
    ) -> None:
        self.peer_id = peer_id
        self._post, self._layout_of = post, layout_of
        self._links: Links | None = None
        self._pacer: Pacer | None = None
        self._lock = threading.Lock()
        self._stores: dict[bytes, _Store] = {}  # by run hash
        self._names: dict[bytes, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    def use(self, links: Links) -> None:
        """The links, which are made with our callbacks and so come second."""
        self._links, self._pacer = links, Pacer(links)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- what a run asks of it

    def open(self, run: str, bucket: Bucket) -> str | None:
        """The bucket holds what the store may begin with. Blocks; returns the first tensor of it
        that is not finite, of which nothing is taken."""
        store = self._store(run)
        if store is None:
            return None
        found = store

        def begin() -> str | None:
            with found.lock:
                if found.shelf.copy:
                    return None
                copy, bad = found.copy_of(bucket)
                if bad is None:
                    found.shelf.copy = copy
                return bad

        # In its turn: what an earlier trainer left may be about to be dropped.
        return self._thread.submit(begin).result()

    def begin_push(self, run: str, token: str, bucket: Bucket) -> str | None:
        """Take the gradient out of the bucket. Blocks; as `open`, returns what is not finite."""
        store = self._store(run)
        if store is None:
            return None
        gradient, bad = store.copy_of(bucket)
        if bad is None:
            with store.desk:
                store.pushes[token] = gradient
        return bad

    def expect(self, run: str, token: str, bucket: Bucket | None) -> asyncio.Future[StoreAnswer]:
        """The end of a call. A pull's bucket is filled before."""
        store = self._store(run)
        waiter = _Waiter(bucket)
        if store is not None:
            with store.desk:
                store.waiters[token] = waiter
        return waiter.future

    def give_up(self, run: str, token: str) -> None:
        """The call is over: its bucket is not touched any more."""
        store = self._store(run)
        if store is not None:
            with store.desk:
                store.waiters.pop(token, None)
                store.pushes.pop(token, None)

    # -- effects

    def handle(self, run: str, effect: StoreEffect) -> None:
        """On the daemon's loop; returns at once."""
        store = self._store(run)
        if store is None:
            return
        if isinstance(effect, LinkTo):
            self._link(run, effect)
            return
        with suppress(RuntimeError):  # the node ends
            self._thread.submit(self._carry_out, store, effect)

    def _carry_out(self, store: _Store, effect: StoreEffect) -> None:
        try:
            with store.lock:
                events = self._locked(store, effect)
        except Exception:
            log.exception("run %s: the store failed", store.run)
            return
        for event in events:
            self._post(store.run, event)

    def _locked(self, store: _Store, effect: StoreEffect) -> list[StoreEvent]:
        shelf = store.shelf
        match effect:
            case TakeSeed():
                return shelf.take_seed(effect, self.peer_id)
            case Update():
                failed = shelf.update(effect)
                return [failed] if failed is not None else []
            case SendSeed():
                return self._send(store, effect.to, SEED, effect.seed, 0, shelf.copy, effect.parts)
            case SendGradient():
                with store.desk:
                    gradient = store.pushes.get(effect.token, {})
                return self._send(
                    store, effect.to, GRADIENT, effect.name, effect.epoch, gradient, effect.parts
                )
            case SendValues():
                shard = shelf.shard(effect.version)
                return self._send(store, effect.to, VALUES, effect.pull, 0, shard, tuple(shard))
            case DropGradients():
                shelf.drop_gradients(effect.gradients)
            case Collect():
                shelf.collect(effect)
            case DropPull():
                shelf.drop_pull(effect.pull)
            case DropStore():
                store.shelf = Shelf(step)
            case StoreAnswer():
                self._answer(store, effect)
        return []

    def _answer(self, store: _Store, answer: StoreAnswer) -> None:
        if answer.pull:
            store.shelf.keep(answer.pull)
        with store.desk:
            store.pushes.pop(answer.token, None)
            waiter = store.waiters.pop(answer.token, None)
            if waiter is None:
                return
            if answer.pull and waiter.bucket is not None:
                for index, value in store.parts(waiter.bucket.data).items():
                    value.copy_(store.shelf.copy[index])
        waiter.answer(answer)

    def _send(
        self, store: _Store, to: str, what: int, name: bytes, epoch: int,
        values: Mapping[int, Tensor], parts: Sequence[int],
    ) -> list[StoreEvent]:  # fmt: skip
        """Parts of `values`, which nobody changes any more. To ourselves they do not travel."""
        chosen = [(part, values[part]) for part in parts if part in values]
        if to == self.peer_id:
            taken = [
                _take(store.shelf, to, what, name, epoch, part, value) for part, value in chosen
            ]
            return [event for event in taken if event is not None]
        if self._pacer is not None:
            frames = _frames(run_hash(store.run), what, name, epoch, chosen)
            self._pacer.put(to, name, frames, priority=ROUND_PRIORITY)
        return []

    def _link(self, run: str, effect: LinkTo) -> None:
        def failed(words: str) -> None:
            log.info("run %s: %s", run, words)
            self._post(run, LinkLost(effect.peer, Reason.UNREACHABLE))

        if self._links is not None:
            # Both ends dial if they can, and the links keep one.
            dials = bool(effect.addresses)
            link(self._links, effect.peer, effect.addresses, dials=dials, failed=failed)

    # -- what the links call

    def on_frame(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """In a reader thread; never raises. What is of no use is dropped: whoever needs an answer
        asks again."""
        try:
            name = self._names.get(header.run)
            store = self._store(name) if name is not None else None
            if store is None:
                return
            value = store.value(header.part, payload)
            if value is None:
                return
            with store.lock:
                event = _take(
                    store.shelf, peer_id, header.flags, header.group,
                    header.contributors, header.part, value,
                )  # fmt: skip
            if event is not None:
                self._post(store.run, event)
        except Exception:
            log.exception("a frame from %s could not be handled", peer_id)

    def link_lost(self, peer_id: str) -> None:
        """The network tells every run."""
        if self._pacer is not None:
            self._pacer.forget(peer_id)

    def know(self, run: str) -> None:
        """Frames of this run may come from now on."""
        self._names[run_hash(run)] = run

    def forget(self, run: str) -> None:
        """The run is over, and with it what a store had of it here."""
        key = run_hash(run)
        self._names.pop(key, None)
        with self._lock:
            self._stores.pop(key, None)

    def _store(self, run: str) -> _Store | None:
        key, layout = run_hash(run), self._layout_of(run)
        with self._lock:
            store = self._stores.get(key)
            if layout is None:
                return store
            if store is None or store.layout.schema_digest != layout.schema_digest:
                store = self._stores[key] = _Store(run, layout)
            return store


def _take(
    shelf: Shelf[Tensor], peer: str, what: int, name: bytes, epoch: int, part: int, value: Tensor
) -> StoreEvent | None:
    if what == SEED:
        return shelf.seed(peer, name, part, value)
    if what == GRADIENT:
        return shelf.gradient(peer, name, epoch=epoch, part=part, value=value)
    if what == VALUES:
        return shelf.value(peer, name, part, value)
    return None


def _frames(
    run: bytes, what: int, name: bytes, epoch: int, parts: list[tuple[int, Tensor]]
) -> Iterator[Frame]:
    for part, value in parts:
        header = Header(FrameKind.STORE, run, name, part=part, flags=what, contributors=epoch)
        yield header, partial(_payload, value)


def _payload(value: Tensor, room: memoryview) -> memoryview:
    return bytes_of(value)
