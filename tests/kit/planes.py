"""Data planes wired together: Exchange objects over links in memory or over the real LinkPool.

One rule: the script that plays the core here asks for exactly the effects the core would ask for,
so what passes here is the contract of the data plane and not an accident of the driver.
"""

from __future__ import annotations

import itertools
import queue
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from moshpitd.core.effects import Average, Close, Open, Push
from moshpitd.core.events import (
    Averaged,
    Event,
    Listened,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.messages import Group, Lineage, Member, Shape
from moshpitd.daemon.buffers import Bucket, create_bucket
from moshpitd.daemon.exchange import Exchange
from moshpitd.daemon.pacing import Links, PayloadFunction
from moshpitd.errors import Unreachable
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.layout import Layout, specs_of

RUN = "run"
WAIT_S = 20.0
PAYLOAD_MAX = 4 << 20


class MemoryLinks:
    """LinkPool's methods over queues: one writer thread per peer, which is the reader there too."""

    def __init__(self, peer_id: str, world: dict[str, MemoryLinks], exchange: Exchange) -> None:
        self.peer_id = peer_id
        self.exchange = exchange
        self.dialled: list[str] = []
        self.expected: list[str] = []
        self.pinged: list[str] = []
        self.frozen = False  # takes nothing and answers nothing
        self.bytes_in: Counter[str] = Counter()
        self.rates: dict[str, float] = {}  # what links are said to take
        self.told: list[tuple[FrameKind, bool]] = []  # what was sent, and whether with its crc32
        self.codes: Counter[tuple[FrameKind, str, int]] = Counter()  # kind, to whom, codec
        self._world = world
        self._numbers = itertools.count()
        self._queues: dict[str, queue.PriorityQueue[tuple[int, int, object]]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        world[peer_id] = self

    def dial(self, peer_id: str, addresses: Sequence[str]) -> Future[None]:
        self.dialled.append(peer_id)
        future: Future[None] = Future()
        other = self._world.get(peer_id)
        if other is None or not addresses:
            future.set_exception(Unreachable(f"{peer_id}: nobody there"))
            return future
        other._up(self.peer_id)
        self._up(peer_id)
        future.set_result(None)
        return future

    def expect(self, peer_id: str) -> None:
        self.expected.append(peer_id)
        self._queue(peer_id)

    def is_up(self, peer_id: str) -> bool:
        return peer_id in self._threads

    def send(
        self, peer_id: str, header: Header, payload_fn: PayloadFunction | None, *, priority: int = 0
    ) -> None:
        self._queue(peer_id).put((priority, next(self._numbers), (header, payload_fn)))

    def discard(self, group: bytes) -> int:
        return 0  # what is discarded here skips itself; the real pool's queue is tested on its own

    def takes(self, peer_id: str) -> float | None:
        return self.rates.get(peer_id)

    def ping(self, peer_id: str) -> None:
        self.pinged.append(peer_id)
        other = self._world[peer_id]
        if not other.frozen:  # a ping there, and its answer here
            other.bytes_in[self.peer_id] += 1
            self.bytes_in[peer_id] += 1

    def heard(self, peer_id: str) -> int:
        return self.bytes_in[peer_id]

    def waiting(self, peer_id: str) -> int:
        return self._queue(peer_id).qsize()

    def close(self) -> None:
        for peer_id in list(self._threads):
            self._queue(peer_id).put((-1, next(self._numbers), None))
        for thread in list(self._threads.values()):
            thread.join(WAIT_S)

    def _queue(self, peer_id: str) -> queue.PriorityQueue[tuple[int, int, object]]:
        with self._lock:
            return self._queues.setdefault(peer_id, queue.PriorityQueue())

    def _up(self, peer_id: str) -> None:
        waiting = self._queue(peer_id)
        with self._lock:
            if peer_id in self._threads:
                return
            thread = threading.Thread(target=self._write, args=(peer_id, waiting), daemon=True)
            self._threads[peer_id] = thread
        thread.start()

    def _write(self, peer_id: str, waiting: queue.PriorityQueue[tuple[int, int, object]]) -> None:
        room, body = bytearray(PAYLOAD_MAX), bytearray(PAYLOAD_MAX)
        while (item := waiting.get()[2]) is not None:
            header, payload_fn = item  # type: ignore[misc]
            try:
                payload = memoryview(payload_fn(memoryview(room))).cast("B")
            except Exception as error:
                self.exchange.on_send_failed(peer_id, header, error)
                continue
            body[: len(payload)] = payload
            crc = zlib.crc32(payload)
            self.told.append((header.kind, header.crc == crc))
            self.codes[header.kind, peer_id, header.codec] += 1
            assert header.crc in (0, crc), "a crc32 that the sender knows goes out as it is"
            whole = replace(header, length=len(payload), crc=crc)
            other = self._world[peer_id]
            other.bytes_in[self.peer_id] += len(payload)
            other.exchange.on_frame(self.peer_id, whole, memoryview(body)[: len(payload)])


class AnyLinks(Links, Protocol):
    """Links that somebody made and therefore closes."""

    def close(self) -> None: ...


@dataclass
class Plane:
    """One node's data plane, and what it told its core."""

    exchange: Exchange
    links: AnyLinks
    layout: Layout
    where: Path
    addresses: tuple[str, ...]
    news: threading.Semaphore  # of all nodes together: somebody was told something
    buckets: dict[str, Bucket] = field(default_factory=dict)
    events: queue.Queue[Event] = field(default_factory=queue.Queue)
    seen: list[Event] = field(default_factory=list)

    @property
    def peer_id(self) -> str:
        return self.exchange.peer_id

    def trainer(
        self, name: str, tensors: Mapping[str, Tensor], *, in_place: bool = False
    ) -> Bucket:
        """Attach a trainer whose bucket holds these tensors. In place: in its second block, and it
        is in a call."""
        size = self.layout.nbytes
        blocks = Blocks(size, slots=0, full=False) if in_place else None
        bucket = create_bucket(
            self.where, nbytes=size, data_dir=self.where, blocks=blocks, in_place=in_place
        )
        set_generation(bucket, 2)
        if in_place:
            assert bucket.hand_over(2)
        self.layout.gather(list(tensors.values()), bucket.data)
        self.buckets[name] = bucket
        self.exchange.add_bucket(RUN, name, bucket)
        return bucket

    def values(self, name: str) -> list[Tensor]:
        return [view.clone() for view in self.layout.views(self.buckets[name].result)]

    def wait(self, *kinds: type, timeout_s: float = WAIT_S) -> Event:
        """The next event of one of these kinds; others are kept in `seen`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = [kind.__name__ for kind in kinds]
                raise AssertionError(f"{self.peer_id}: none of {names}; {self.seen}") from None
            self.seen.append(event)
            if isinstance(event, kinds):
                return event

    def fresh(self) -> list[Event]:
        """What was told since the last look, without waiting."""
        before = len(self.seen)
        with suppress(queue.Empty):
            while True:
                self.seen.append(self.events.get_nowait())
        return self.seen[before:]

    def quiet(self) -> list[Event]:
        """Everything that was told by now; but not who was heard, which goes on all the time."""
        self.fresh()
        return [event for event in self.seen if not isinstance(event, Listened)]


def set_generation(bucket: Bucket, generation: int) -> None:
    """As the trainer does it, through its own mapping of the file."""
    with bucket.path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<Q", generation))


def layout_of(tensors: Mapping[str, Tensor], part_bytes: int = 4096) -> Layout:
    return Layout.from_specs(specs_of(tensors), part_bytes)


# number, directory, post -> the exchange, its links, where these can be dialled
MakePlane: TypeAlias = Callable[
    [int, Path, Callable[[str, Event], None]], tuple[Exchange, AnyLinks, tuple[str, ...]]
]


def in_memory(*, feedback: bool = True) -> MakePlane:
    """Nodes whose links are queues of one world."""
    world: dict[str, MemoryLinks] = {}

    def make(
        number: int, where: Path, post: Callable[[str, Event], None]
    ) -> tuple[Exchange, AnyLinks, tuple[str, ...]]:
        exchange = Exchange(f"peer-{number}", post, error_feedback=feedback)
        return exchange, MemoryLinks(exchange.peer_id, world, exchange), ("memory",)

    return make


@contextmanager
def planes(
    count: int,
    layout: Layout,
    where: Path,
    make: MakePlane | None = None,
    *,
    feedback: bool = True,
    codec: str = "float32",
) -> Iterator[list[Plane]]:
    """`count` nodes; at the end nothing of them is left: no file, no thread."""
    before = set(threading.enumerate())
    make = make or in_memory(feedback=feedback)
    news = threading.Semaphore(0)
    made: list[Plane] = []
    for number in range(count):
        events: queue.Queue[Event] = queue.Queue()
        own = where / str(number)
        own.mkdir()

        def post(_: str, event: Event, events: queue.Queue[Event] = events) -> None:
            events.put(event)
            news.release()

        exchange, links, addresses = make(number, where, post)
        exchange.use(links)
        exchange.add_run(RUN, layout, codec)
        made.append(Plane(exchange, links, layout, own, addresses, news, events=events))
    try:
        yield made
    finally:
        for plane in made:
            plane.links.close()
        for plane in made:
            plane.exchange.close()
    left = {t for t in threading.enumerate() if t not in before and t.is_alive()}
    assert not left, f"threads are left: {left}"
    for plane in made:
        assert not list(plane.where.iterdir()), "a bucket's file is left"


_serial = itertools.count(1)


def group_of(
    made: Sequence[Plane], *, weights: Sequence[float] | None = None, codec: str = "float32"
) -> Group:
    members = tuple(
        Member(plane.peer_id, 1, weight, 1, weight == 0, 1000.0, 1000.0, plane.addresses)
        for plane, weight in zip(made, weights or [1.0] * len(made), strict=True)
    )
    return Group(
        next(_serial).to_bytes(16, "big"), "key", made[0].peer_id, 1, 1, Shape(),
        made[0].layout.schema_digest, Lineage(), codec, members,
    )  # fmt: skip


def open_round(
    made: Sequence[Plane],
    group: Group,
    *,
    late: Mapping[int, tuple[str, ...]] | None = None,
    trainers: Mapping[int, tuple[tuple[str, int], ...]] | None = None,
    norm_limit: float | None = None,
) -> tuple[int, ...]:
    """Open it in all of `made`; parts go round the members. Returns the reducers."""
    count = len(group.members)
    reducers = tuple(part % count for part in range(len(made[0].layout.parts)))
    indices = {member.peer_id: i for i, member in enumerate(group.members)}
    for plane in made:
        index = indices[plane.peer_id]
        mine = (trainers or {}).get(index, (("t", 1),))
        plane.exchange.handle(
            RUN,
            Open(
                group,
                index,
                reducers,
                mine,
                (late or {}).get(index, ()),
                group.members[index].weight,
                norm_limit,
            ),
        )
    return reducers


def play_round(
    made: Sequence[Plane],
    group: Group,
    reducers: tuple[int, ...],
    *,
    absent: frozenset[tuple[int, int]] = frozenset(),
) -> list[dict[int, tuple[tuple[int, ...], int]]]:
    """Push, average and push results as the core does, until every part has an end everywhere.

    `absent` are (part, member) contributions that will not come. Returns per member what it knows:
    part -> (contributors, crc); parts that failed are missing.
    """
    count, parts = len(group.members), len(reducers)
    weights = [member.weight for member in group.members]
    waits = [
        {
            part: {
                i for i in range(count) if i != me and weights[i] > 0 and (part, i) not in absent
            }
            for part in range(parts)
            if reducers[part] == me
        }
        for me in range(count)
    ]
    known: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in range(count)]
    ended: list[set[int]] = [set() for _ in range(count)]
    for me, plane in enumerate(made):
        for to in range(count):
            mine = tuple(p for p in range(parts) if reducers[p] == to)
            if to != me and weights[me] > 0 and mine:
                plane.exchange.handle(RUN, Push(group.group_id, to, mine, result=False))
        for part, missing in waits[me].items():
            if not missing:
                plane.exchange.handle(RUN, Average(group.group_id, part))
    while any(len(done) < parts for done in ended):
        assert made[0].news.acquire(timeout=WAIT_S), f"{ended}, {[plane.seen for plane in made]}"
        for me, plane in enumerate(made):
            for event in plane.fresh():
                _play(made, group, me, event, waits=waits[me], known=known[me], ended=ended)
    return known


def _play(
    made: Sequence[Plane],
    group: Group,
    me: int,
    event: Event,
    *,
    waits: dict[int, set[int]],
    known: dict[int, tuple[tuple[int, ...], int]],
    ended: list[set[int]],
) -> None:
    match event:
        case PartArrived() | PartRefused(result=False):
            waits[event.part].discard(event.sender)
            if not waits[event.part]:
                made[me].exchange.handle(RUN, Average(group.group_id, event.part))
        case Averaged():
            for to in range(len(group.members)):
                if to != me:
                    push = Push(group.group_id, to, (event.part,), result=True)
                    made[me].exchange.handle(RUN, push)
            known[event.part] = (event.contributors, event.crc)
            ended[me].add(event.part)
        case ResultArrived():
            known[event.part] = (event.contributors, event.crc)
            ended[me].add(event.part)
        case PartFailed(result=True):
            for done in ended:
                done.add(event.part)


def close_round(made: Sequence[Plane], group: Group) -> None:
    for plane in made:
        plane.exchange.handle(RUN, Close(group.group_id))


def some_tensors(seed: int) -> dict[str, Tensor]:
    """Every region of a layout, several parts of 4096 bytes, an empty and a 0-d tensor."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(70, 50, generator=rng),
        "bias": torch.randn(7, generator=rng),
        "empty": torch.empty(0, 3),
        "scale": torch.randn((), generator=rng),
        "wide": torch.randn(600, generator=rng, dtype=torch.float64),
        "half": torch.randn(40, generator=rng).to(torch.float16),
        "brain": torch.randn(40, generator=rng).to(torch.bfloat16),
        "steps": torch.randint(-100, 100, (5,), generator=rng),
        "mask": torch.rand(9, generator=rng) > 0.5,
    }
