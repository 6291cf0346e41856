"""The driver with a real Peer and a pretended outside: order, timers, threads and failures."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field

import pytest

from moshpitd.core import events as ev
from moshpitd.core.effects import Effect, Note
from moshpitd.core.messages import Goodbye, Hello, Lineage, Message, Record
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.daemon.driver import DRAIN_AT_ONCE, SENT_AT_ONCE, WAITING_PER_PEER, Driver
from moshpitd.errors import Unreachable

FAST = Params(answer_timeout_s=0.1, window_s=0.3, settle_s=0.01, attempt_timeout_s=1.0)


@dataclass
class Outside:
    """Everything outside of a driver. `hold` keeps deliveries back; `gone` peers take nothing."""

    said: list[tuple[str, Message]] = field(default_factory=list)
    moved: list[Effect] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    directory: dict[str, list[Record]] = field(default_factory=dict)
    unreachable: bool = False
    gone: set[str] = field(default_factory=set)
    hold: asyncio.Event | None = None

    async def send(self, run: str, to: str, message: Message) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if to in self.gone:
            raise Unreachable(to)
        self.said.append((to, message))

    def at_once(self, run: str, to: str, message: Message) -> bool:
        return False

    async def announce(self, run: str, key: str, record: Record, *, ttl_s: float) -> bool:
        if self.unreachable:
            raise Unreachable("nobody")
        self.directory.setdefault(key, []).append(record)
        return True

    async def look_up(self, run: str, key: str) -> tuple[Record, ...] | None:
        if self.unreachable:
            raise Unreachable("nobody")
        return tuple(self.directory.get(key, ()))

    def move(self, run: str, effect: Effect) -> None:
        self.moved.append(effect)

    def noted(self, run: str, note: Note) -> None:
        self.notes.append(note)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


class Recorded(Peer):
    """A real peer that also keeps every event it was given."""

    def __init__(self, params: Params = FAST) -> None:
        super().__init__(params, "me", random.Random(0), run="r")
        self.events: list[ev.Event] = []

    def handle(self, event: ev.Event, now: float) -> None:
        self.events.append(event)
        super().handle(event, now)


def a_record(peer_id: str) -> Record:
    return Record(peer_id, 1, b"s", 0, Lineage("f", b"d"))


def attached() -> ev.Attached:
    return ev.Attached("t", b"s", "text", (4,), b"d")


async def ended(driver: Driver, event: ev.Event, token: str, timeout_s: float = 5.0) -> Outcome:
    future = driver.expect(token)
    driver.handle(event)
    return await asyncio.wait_for(future, timeout_s)


async def test_a_call_ends_alone_when_nobody_is_there() -> None:
    outside = Outside()
    driver = Driver(Recorded(), outside)
    driver.handle(attached())
    outcome = await ended(driver, ev.Contributed("t", "token", 1), "token")
    assert (outcome.status, outcome.accepted) == (Status.ALONE, True)
    assert [record.peer_id for record in outside.directory["peers"]] == ["me"]
    assert outside.failures == []
    await driver.close()


async def test_an_unreachable_directory_is_an_answer_and_no_error() -> None:
    outside = Outside(unreachable=True)
    peer = Recorded()
    driver = Driver(peer, outside)
    driver.handle(attached())
    outcome = await ended(driver, ev.Contributed("t", "token", 1), "token")
    assert outcome.status is Status.ALONE
    assert ev.Announced("peers", ok=False) in peer.events
    assert ev.Found("peers", (), ok=False) in peer.events
    await driver.close()


async def test_our_own_record_is_left_out_of_what_was_found() -> None:
    outside = Outside(directory={"peers": [a_record("me"), a_record("other")]})
    peer = Recorded()
    driver = Driver(peer, outside)
    driver.handle(attached())
    await ended(driver, ev.Synced("t", "token", 1.0), "token")
    (found,) = [event for event in peer.events if isinstance(event, ev.Found)]
    assert [record.peer_id for record in found.records] == ["other"]
    await driver.close()


async def test_messages_to_one_peer_keep_their_order() -> None:
    outside = Outside(hold=asyncio.Event())
    driver = Driver(Recorded(), outside)
    driver.handle(attached())
    for number in range(5):
        driver.handle(ev.Received("other", Hello(a_record("other"))))
        driver.handle(ev.Received(f"p{number}", Hello(a_record(f"p{number}"))))
    await asyncio.sleep(0)
    assert outside.said == []
    assert outside.hold is not None
    outside.hold.set()
    await driver.flush(1.0)
    to_other = [message for to, message in outside.said if to == "other"]
    assert len(to_other) >= 5
    assert {to for to, _ in outside.said} == {"other", *(f"p{number}" for number in range(5))}
    await driver.close()


async def test_a_few_messages_are_on_their_way_to_one_peer_at_once_and_begin_in_order() -> None:
    outside = Outside(hold=asyncio.Event())
    begun: list[Message] = []
    send = outside.send

    async def counted(run: str, to: str, message: Message) -> None:
        begun.append(message)
        await send(run, to, message)

    outside.send = counted  # type: ignore[method-assign]
    driver = Driver(Recorded(), outside)
    said = [Goodbye(reason) for reason in list(Reason)[:7]]
    for message in said:
        driver._send("other", message)
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == said[:SENT_AT_ONCE], "nobody was acknowledged, and no more than a few wait"
    assert outside.hold is not None
    outside.hold.set()
    await driver.flush(1.0)
    assert begun == said
    assert sorted(map(repr, outside.said)) == sorted(repr(("other", one)) for one in said)
    await driver.close()


async def test_what_cannot_be_delivered_comes_back_and_so_does_what_waits_behind_it() -> None:
    outside = Outside(gone={"other"}, hold=asyncio.Event())
    peer = Recorded()
    driver = Driver(peer, outside)
    driver.handle(attached())
    for _ in range(3):
        driver.handle(ev.Received("other", Hello(a_record("other"))))
    assert outside.hold is not None
    outside.hold.set()
    await driver.flush(1.0)
    undelivered = [event for event in peer.events if isinstance(event, ev.Undelivered)]
    assert len(undelivered) >= 3
    assert all(event.to == "other" for event in undelivered)
    assert outside.said == []
    await driver.close()


async def test_a_peer_that_takes_nothing_is_unreachable_at_a_bound() -> None:
    outside = Outside(hold=asyncio.Event())
    peer = Recorded()
    driver = Driver(peer, outside)
    driver.handle(attached())
    for _ in range(WAITING_PER_PEER + 10):
        driver.handle(ev.Received("other", Hello(a_record("other"))))
    assert sum(isinstance(event, ev.Undelivered) for event in peer.events) >= 8
    await driver.close()


async def test_posts_from_threads_arrive_in_their_order_and_wake_the_loop_rarely() -> None:
    outside = Outside()
    peer = Recorded()
    driver = Driver(peer, outside)
    loop = asyncio.get_running_loop()
    wakes = 0
    original = loop.call_soon_threadsafe

    def counted(*arguments: object, **named: object) -> object:
        nonlocal wakes
        wakes += 1
        return original(*arguments, **named)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
    count = 3 * DRAIN_AT_ONCE
    try:
        posting = threading.Thread(
            target=lambda: [driver.post(ev.PartArrived(b"g", part, 0)) for part in range(count)]
        )
        posting.start()
        posting.join()  # the loop is kept from draining meanwhile: one wake must do
    finally:
        del loop.call_soon_threadsafe
    for _ in range(10):
        await asyncio.sleep(0)
    assert [event.part for event in peer.events if isinstance(event, ev.PartArrived)] == list(
        range(count)
    )
    assert wakes == 1
    await driver.close()


async def test_the_timer_follows_the_deadline() -> None:
    outside = Outside(directory={"peers": [a_record("other")]}, gone=set())
    peer = Recorded()
    driver = Driver(peer, outside)
    driver.handle(attached())
    start = asyncio.get_running_loop().time()
    outcome = await ended(driver, ev.Contributed("t", "token", 1), "token")
    took_s = asyncio.get_running_loop().time() - start
    assert outcome.status is Status.ALONE  # the other one never answers
    assert took_s < 2.0
    ticks = sum(isinstance(event, ev.Ticked) for event in peer.events)
    assert 0 < ticks < 50
    await driver.close()


async def test_a_fault_of_the_core_ends_the_node_and_not_the_loop() -> None:
    class Broken(Recorded):
        def handle(self, event: ev.Event, now: float) -> None:
            raise RuntimeError("an invariant is broken")

    outside = Outside()
    driver = Driver(Broken(), outside)
    driver.handle(ev.Ticked())
    assert [str(error) for error in outside.failures] == ["an invariant is broken"]
    driver.handle(ev.Ticked())
    assert len(outside.failures) == 1
    await driver.close()


async def test_after_close_nothing_is_done_and_calls_are_over() -> None:
    outside = Outside(hold=asyncio.Event())
    driver = Driver(Recorded(), outside)
    driver.handle(attached())
    driver.handle(ev.Received("other", Hello(a_record("other"))))
    waiting = driver.expect("token")
    await driver.close()
    assert waiting.cancelled()
    driver.post(ev.Ticked())
    driver.handle(ev.Received("other", Goodbye(Reason.DRAINING)))
    await asyncio.sleep(0)
    assert outside.said == []
    with pytest.raises(asyncio.CancelledError):
        await waiting
