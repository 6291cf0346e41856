"""Drives one core Peer on the real clock: events in, effects out, one timer.

One rule: no protocol is decided here. An event is handed to the peer with this loop's time, its
effects are carried out in the order in which they came, and what they meet outside goes back as
events. Everything runs on the loop but `post`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeAlias

from moshpitd.core.effects import Announce, Effect, Finish, LookUp, Note, Send
from moshpitd.core.events import (
    Announced,
    Event,
    Found,
    Ticked,
    Undelivered,
)
from moshpitd.core.messages import Message, Record
from moshpitd.core.outcome import Outcome
from moshpitd.core.peer import Peer
from moshpitd.errors import MoshpitError
from moshpitd.net.tasks import ended

log = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Awaitable[None]]

WAITING_PER_PEER = 256
"""Messages that wait for one destination. A round sends a handful; a peer that takes none for so
long is unreachable, whatever its connection says."""
SENT_AT_ONCE = 4
"""Messages on their way to one destination: what a leader says between two answers of a follower,
and one more."""
DRAIN_AT_ONCE = 100
"""Posted events that are handled before the loop may do something else, such as answer `status`:
8 ms of them in a round (75 us of processor time each, measured on a busy machine)."""
SENDING = "sending"  # name of the tasks that `flush` waits for
TICK_AT_LEAST_S = 0.001
"""A deadline that has passed is served after this: a mistake in one must not stop the loop."""


class Outside(Protocol):
    """What a driver needs of its node."""

    async def send(self, run: str, to: str, message: Message) -> None:
        """Deliver, or raise MoshpitError."""
        ...

    def at_once(self, run: str, to: str, message: Message) -> bool:
        """Put it on a link that is up, if it may go there. What is lost with the link is not told
        of but by the link's own end."""
        ...

    async def announce(self, run: str, key: str, record: Record, *, ttl_s: float) -> bool:
        """Store our record; whether at least one peer (or we, alone) holds it."""
        ...

    async def look_up(self, run: str, key: str) -> tuple[Record, ...] | None:
        """Everybody's record; None when nobody could be asked."""
        ...

    def move(self, run: str, effect: Effect) -> None:
        """Carry out an effect of the data plane."""
        ...

    def noted(self, run: str, note: Note) -> None: ...

    def failed(self, error: BaseException) -> None:
        """An invariant of ours is broken: the daemon has to end."""
        ...


class Driver:
    """Invariant: an event is handled only when the effects of the one before it are carried out."""

    def __init__(self, peer: Peer, outside: Outside) -> None:
        self.peer = peer
        self.run = peer.run
        self._outside = outside
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()  # on the loop
        self._posted: deque[Event] = deque()  # from threads
        self._drain_scheduled = False
        self._handling = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._outgoing: dict[str, deque[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: dict[str, asyncio.Future[Outcome]] = {}

    # -- events -----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Hand over an event, on the loop. One that arises while another is handled waits."""
        if self._closed:
            return
        self._events.append(event)
        if not self._handling:
            self._handle_all()

    def post(self, event: Event) -> None:
        """The same from any thread. A thousand posts wake the loop once."""
        self._posted.append(event)
        # Two threads may both see False and schedule two drains; the second finds nothing. Nobody
        # sees True in vain: the drain clears it before it looks.
        if not self._drain_scheduled:
            self._drain_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                return  # the loop is closed: the daemon is over and the event says nothing any more

    def expect(self, token: str) -> asyncio.Future[Outcome]:
        """The end of the call `token`, to be asked for before its event is handed over."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._finishing[token] = future
        future.add_done_callback(lambda _: self._finishing.pop(token, None))
        return future

    async def flush(self, timeout_s: float) -> None:
        """Wait until every message that is on its way has been delivered or given up."""
        deadline = self._loop.time() + timeout_s
        while self._outgoing and not self._closed:
            sending = [task for task in self._tasks if task.get_name() == SENDING]
            left_s = deadline - self._loop.time()
            if not sending or left_s <= 0:
                return
            await asyncio.wait(sending, timeout=left_s)

    async def settled(self, timeout_s: float) -> None:
        """Wait until nothing is on its way at all: messages, announcements, look-ups."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def now(self) -> float:
        """The clock that the peer sees."""
        return self._loop.time()

    async def close(self) -> None:
        """Stop driving: nothing is handled or sent any more, calls that wait are cancelled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in list(self._finishing.values()):
            future.cancel()
        await ended(self._tasks)

    def _drain(self) -> None:
        self._drain_scheduled = False
        for _ in range(min(len(self._posted), DRAIN_AT_ONCE)):
            self._events.append(self._posted.popleft())
        if self._posted and not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)
        if self._closed:
            self._events.clear()
        elif not self._handling:
            self._handle_all()

    def _handle_all(self) -> None:
        self._handling = True
        try:
            while self._events and not self._closed:
                self.peer.handle(self._events.popleft(), self._loop.time())
                for effect in self.peer.take_effects():
                    self._perform(effect)
        except Exception as error:
            # `handle` does not raise for anything from outside, so this is a mistake of ours, and
            # what the peer's state is now nobody knows.
            log.exception("run %s: the state machine failed", self.run)
            self._closed = True
            self._outside.failed(error)
        finally:
            self._handling = False
        self._arm()

    def _arm(self) -> None:
        deadline = None if self._closed else self.peer.deadline()
        if self._timer is not None:
            if deadline == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            at = max(deadline, self._loop.time() + TICK_AT_LEAST_S)
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Ticked())

    # -- effects ----------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.to, effect.message)
            case Announce():
                self._spawn(partial(self._announce, effect))
            case LookUp():
                self._spawn(partial(self._look_up, effect.key))
            case Note():
                self._outside.noted(self.run, effect)
            case Finish():
                future = self._finishing.get(effect.token)
                if future is not None and not future.done():
                    future.set_result(effect.outcome)
            case _:
                self._outside.move(self.run, effect)

    def _send(self, to: str, message: Message) -> None:
        """One sender per destination keeps the order; no destination waits for another."""
        if self._outside.at_once(self.run, to, message):
            return
        queue = self._outgoing.get(to)
        if queue is None:
            self._outgoing[to] = deque([message])
            self._spawn(partial(self._send_all, to), name=SENDING)
        elif len(queue) < WAITING_PER_PEER:
            queue.append(message)
        else:
            self.handle(Undelivered(to, message))

    async def _send_all(self, to: str) -> None:
        """A few at a time, begun in order: a message need not wait for the acknowledgement of the
        one before it. Invite, Accepted and Begin one by one cost a leader's followers three round
        trips instead of one; the core takes messages of one peer in any order (DECISIONS 9)."""
        queue = self._outgoing[to]
        sending: dict[asyncio.Task[None], Message] = {}
        try:
            while queue or sending:
                while queue and len(sending) < SENT_AT_ONCE:
                    message = queue.popleft()
                    task = self._loop.create_task(self._outside.send(self.run, to, message))
                    sending[task] = message
                done, _ = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                lost = []
                for task in [task for task in sending if task in done]:
                    message = sending.pop(task)
                    error = task.exception()
                    if isinstance(error, MoshpitError):
                        log.debug("run %s: %s not sent: %s", self.run, _name(message), error)
                        lost.append(message)
                    elif error is not None:
                        raise error
                if lost:
                    # Those behind would meet the same; waiting for each would delay the news.
                    lost += queue
                    queue.clear()
                for message in lost:
                    self.handle(Undelivered(to, message))
        finally:
            for task in sending:
                task.cancel()
            del self._outgoing[to]

    async def _announce(self, effect: Announce) -> None:
        ok = False
        try:
            ok = await self._outside.announce(
                self.run, effect.key, effect.record, ttl_s=effect.ttl_s
            )
        except MoshpitError as error:
            log.debug("run %s: not announced under %s: %s", self.run, effect.key, error)
        self.handle(Announced(effect.key, ok))

    async def _look_up(self, key: str) -> None:
        records: tuple[Record, ...] | None = None
        try:
            records = await self._outside.look_up(self.run, key)
        except MoshpitError as error:
            log.debug("run %s: no look-up of %s: %s", self.run, key, error)
        own = self.peer.peer_id
        found = tuple(record for record in records or () if record.peer_id != own)
        self.handle(Found(key, found, ok=records is not None))

    def _spawn(self, work: Work, *, name: str | None = None) -> None:
        task = self._loop.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Work) -> None:
        # A function, because a task may be cancelled before it begins, and a coroutine that nobody
        # ever awaited is a warning.
        try:
            await work()
        except Exception as error:
            log.exception("run %s: a task of the driver failed", self.run)
            self._outside.failed(error)


def _name(message: Message) -> str:
    return type(message).__name__
