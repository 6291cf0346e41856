"""The store's data plane on tensors: three nodes joined by queues instead of links, and frames that
cannot be used. One rule: the core here is the real one, and every value is compared bit by bit."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moshpitd.core.effects import Send
from moshpitd.core.storage import Storage
from moshpitd.core.store_words import (
    Collected,
    GradientArrived,
    Rules,
    StoreAnswer,
    StoreEvent,
    StoreOpened,
    StorePullAsked,
    StorePushAsked,
    TakeSeed,
)
from moshpitd.daemon.buffers import Bucket, create_bucket
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.storage import GRADIENT, SEED, VALUES, Storages
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.layout import Layout, TensorSpec
from moshpitd.tensors.rules import asysg

RUN = "job"
SPECS = [TensorSpec("a", (300,), "float32"), TensorSpec("b", (5, 40), "float64")]
LAYOUT = Layout.from_specs(SPECS, part_bytes=256)


class Links:
    """What a node sends waits in the world's queue."""

    def __init__(self, world: World, me: str) -> None:
        self._world, self._me = world, me

    def dial(self, peer_id: str, addresses: tuple[str, ...]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def expect(self, peer_id: str) -> None: ...

    def is_up(self, peer_id: str) -> bool:
        return True

    def send(
        self, peer_id: str, header: Header, payload_fn: Callable[[memoryview], Any] | None,
        *, priority: int = 0,
    ) -> None:  # fmt: skip
        assert payload_fn is not None

        def arrive() -> None:
            payload = bytes(payload_fn(memoryview(bytearray(4096))))
            raw = header.pack(length=len(payload), crc=None)
            known = Header.unpack(raw, payload_bytes_max=4096)
            self._world.planes[peer_id].on_frame(self._me, known, memoryview(payload))

        self._world.queue.append(arrive)

    def discard(self, group: bytes) -> int:
        return 0

    def takes(self, peer_id: str) -> float | None:
        return None

    def ping(self, peer_id: str) -> None: ...

    def heard(self, peer_id: str) -> int:
        return 0


class World:
    def __init__(self, folder: Path, count: int, rules: Rules) -> None:
        names = [f"n{number}" for number in range(count)]
        self.queue: deque[Callable[[], None]] = deque()
        self.now = 0.0
        self.planes = {name: self._plane(name) for name in names}
        self.cores = {
            name: Storage(
                name,
                live=lambda name=name: [one for one in names if one != name],  # type: ignore[misc]
                addresses=lambda peer: (),
                parts=lambda: len(LAYOUT.parts),
            )
            for name in names
        }
        self.buckets = {
            name: create_bucket(folder, nbytes=LAYOUT.nbytes, data_dir=folder) for name in names
        }
        self.rules, self.tokens = rules, 0

    def _plane(self, me: str) -> Storages:
        def post(run: str, event: Any) -> None:
            self.queue.append(lambda: self.handle(me, event))

        plane = Storages(me, post, lambda run: LAYOUT)
        plane.use(Links(self, me))
        plane.know(RUN)
        return plane

    def handle(self, me: str, event: StoreEvent) -> None:
        self.cores[me].handle(event, self.now)
        self.carry_out(me)

    def carry_out(self, me: str) -> None:
        for effect in self.cores[me].take_effects():
            if isinstance(effect, Send):
                self.queue.append(lambda to=effect.to, what=effect.message: self.hear(me, to, what))
            else:
                self.planes[me].handle(RUN, effect)
        self.planes[me]._thread.submit(lambda: None).result()  # it is one thread: all is done then

    def hear(self, sender: str, to: str, message: Any) -> None:
        self.cores[to].receive(sender, message, self.now)
        self.carry_out(to)

    def run(self) -> None:
        """Until nothing is on its way; then time passes until something is due."""
        for _ in range(200):
            while self.queue:
                self.queue.popleft()()
            self.now += 0.01
            for name, core in self.cores.items():
                deadline = core.deadline()
                if deadline is not None and deadline <= self.now:
                    core.tick(self.now)
                    self.carry_out(name)

    def open(self, name: str, start: list[Tensor]) -> None:
        LAYOUT.gather(start, self.buckets[name].data)
        assert self.planes[name].open(RUN, self.buckets[name]) is None
        self.handle(name, StoreOpened(f"{name}/t", self.rules))

    async def pull(self, name: str) -> tuple[int, list[Tensor]]:
        bucket = self.buckets[name]
        answer = await self._call(name, bucket, StorePullAsked(self._token(), f"{name}/t"))
        return answer.version, [view.clone() for view in LAYOUT.views(bucket.data)]

    async def push(self, name: str, gradient: list[Tensor], version: int) -> str:
        LAYOUT.gather(gradient, self.buckets[name].data)
        event = StorePushAsked(self._token(), f"{name}/t", version)
        assert self.planes[name].begin_push(RUN, event.token, self.buckets[name]) is None
        LAYOUT.gather([torch.full_like(one, 9.0) for one in gradient], self.buckets[name].data)
        return (await self._call(name, None, event)).verdict.value

    def _token(self) -> str:
        self.tokens += 1
        return f"t{self.tokens}"

    async def _call(self, name: str, bucket: Bucket | None, event: Any) -> StoreAnswer:
        future = self.planes[name].expect(RUN, event.token, bucket)
        self.handle(name, event)
        self.run()
        return await asyncio.wait_for(future, 5.0)

    def close(self) -> None:
        for name, plane in self.planes.items():
            plane.close()
            self.buckets[name].close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path, 3, Rules(0.1, batch=2, max_staleness=4))
    yield found
    found.close()


def drawn(seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(300, generator=source), torch.randn(5, 40, generator=source).double()]


async def test_what_trainers_read_is_the_rule_bit_by_bit(world: World) -> None:
    x = drawn(0)
    for name in world.planes:
        world.open(name, x)
    order = ["n2", "n0", "n1", "n0", "n2", "n1", "n1", "n0"]
    read = {name: await world.pull(name) for name in world.planes}
    for version, values in read.values():
        assert version == 0
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, x, strict=True))
    waiting: list[list[Tensor]] = []
    for number, name in enumerate(order):
        gradient = drawn(100 + number)
        assert await world.push(name, gradient, read[name][0]) == "taken"
        waiting.append(gradient)
        if len(waiting) == 2:
            # Of two that are equally old the first comes first, else the older one.
            x = [
                asysg.update(one, [gradient[index] for gradient in waiting], gamma=0.1)
                for index, one in enumerate(x)
            ]
            waiting = []
        version, values = read[name] = await world.pull(name)
        assert version == (number + 1) // 2
        for ours, theirs in zip(values, x, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    owners = {core.common.terms for core in world.cores.values()}
    assert len(owners) == 1
    versions = {core.owner.version for core in world.cores.values() if core.owner.parts}
    assert versions == {4}


async def test_one_gradient_at_a_time_is_gradient_descent_bit_by_bit(tmp_path: Path) -> None:
    world = World(tmp_path, 3, Rules(0.1))
    x = drawn(0)
    world.open("n1", x)
    for number in range(3):
        version, values = await world.pull("n1")
        assert version == number
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, x, strict=True))
        gradient = drawn(number + 1)
        assert await world.push("n1", gradient, version) == "taken"
        x = [asysg.update(one, [g], gamma=0.1) for one, g in zip(x, gradient, strict=True)]
    assert await world.push("n1", drawn(9), 0) == "too_old"
    world.close()


async def test_what_is_not_finite_is_neither_pushed_nor_begun_with(tmp_path: Path) -> None:
    world = World(tmp_path, 1, Rules(0.1))
    bucket, plane = world.buckets["n0"], world.planes["n0"]
    x, gradient = drawn(0), drawn(1)
    x[1][2, 3], gradient[0][7] = math.inf, math.nan
    LAYOUT.gather(x, bucket.data)
    assert plane.open(RUN, bucket) == "b"
    LAYOUT.gather(gradient, bucket.data)
    assert plane.begin_push(RUN, "t", bucket) == "a"
    x = drawn(2)
    world.open("n0", x)
    version, values = await world.pull("n0")
    assert version == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, x, strict=True))
    world.close()


def frame(what: int, name: bytes, part: int, epoch: int = 0) -> Header:
    return Header(FrameKind.STORE, run_hash(RUN), name, part=part, flags=what, contributors=epoch)


def test_frames_that_cannot_be_used_are_dropped() -> None:
    told: list[Any] = []
    plane = Storages("me", lambda run, event: told.append(event), lambda run: LAYOUT)
    plane.know(RUN)
    seed, name = b"s" * 16, b"g" * 16
    plane.handle(RUN, TakeSeed("other", seed, 3, 7, (0, 1)))
    plane._thread.submit(lambda: None).result()
    part = memoryview(bytes(LAYOUT.parts[0].nbytes))

    plane.on_frame("other", frame(SEED, seed, 10**4), part)  # no such part
    plane.on_frame("other", frame(SEED, seed, 0), part[:-1])  # not its length
    plane.on_frame("stranger", frame(SEED, seed, 0), part)  # not who seeds
    plane.on_frame("stranger", frame(SEED, seed, 1), part)
    plane.on_frame("other", frame(9, seed, 0), part)  # a part of nothing
    plane.on_frame("other", Header(FrameKind.STORE, run_hash("else"), seed, flags=SEED), part)
    plane.on_frame("other", frame(GRADIENT, name, 0, epoch=2), part)  # of an earlier store
    plane.on_frame("other", frame(GRADIENT, name, 1, epoch=2), part)
    plane.on_frame("other", frame(VALUES, name, 0), part)  # nobody pulls
    spoilt = memoryview(b"\xff" * LAYOUT.parts[0].nbytes)  # NaN in any float
    for index in (0, 1):  # no NaN gets into a shard
        plane.on_frame("other", frame(GRADIENT, name, index, epoch=3), spoilt)
        plane.on_frame("other", frame(SEED, seed, index), spoilt)
    assert told == []

    for index in (0, 1):
        plane.on_frame("other", frame(GRADIENT, name, index, epoch=3), part)
        plane.on_frame("other", frame(SEED, seed, index), part)
    assert [type(event).__name__ for event in told] == ["GradientArrived", "Seeded"]
    assert told[0] == GradientArrived("other", name)
    assert not any(isinstance(event, Collected) for event in told)
    plane.close()
