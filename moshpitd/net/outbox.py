"""What waits to be sent to one peer, whether or not a link to it is up.

One rule: frames wait here as functions, not as bytes. A payload is encoded in the writer thread
right before it goes out, so a queue of a thousand parts costs a thousand small records.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from moshpitd.errors import LocalProtocolError
from moshpitd.net.channel import Payload
from moshpitd.net.frames import FrameKind, Header

# Writes the payload into the scratch memory that it is given (as large as the largest payload) and
# returns the part of it that it used, or returns a buffer of its own that nobody changes meanwhile.
PayloadFunction: TypeAlias = Callable[[memoryview], Payload]

# PONG overtakes everything, or round trips would measure the queue.
URGENT = -1_000_000

# A donor's memory is free again when the frame behind its last one is asked for, so these frames
# follow one another on one flow. Of all others any flow may take the next.
ONE_BY_ONE = frozenset({FrameKind.SNAPSHOT})


@dataclass(order=True, slots=True)
class Waiting:
    """A frame to be sent; the lower priority first, within a priority the older one."""

    priority: int
    number: int
    header: Header = field(compare=False)
    payload_fn: PayloadFunction | None = field(compare=False)


class Outbox:
    """The queue of one peer. At most one link owns it; only that link's writers take from it.

    The queue outlives a link that a better one replaces, so nothing queued is lost between the two.
    """

    def __init__(self, *, frames_max: int) -> None:
        self._frames_max = frames_max
        self._changed = threading.Condition()
        self._any: list[Waiting] = []  # heaps
        self._one_by_one: list[Waiting] = []
        self._numbers = itertools.count()
        self._owner: object | None = None
        self._closed = False
        self.urgent = bytearray(1)
        """[0] is set while a frame waits that overtakes one being sent: compiled code looks there
        between two segments."""

    def put(self, priority: int, header: Header, payload_fn: PayloadFunction | None) -> None:
        """Queue a frame. Raises LocalProtocolError when the bound is reached: the caller paces
        itself.
        """
        with self._changed:
            waiting = len(self._any) + len(self._one_by_one)
            if waiting >= self._frames_max:
                raise LocalProtocolError(
                    f"{waiting} frames wait for one peer, at most {self._frames_max} may"
                )
            entry = Waiting(priority, next(self._numbers), header, payload_fn)
            queue = self._one_by_one if header.kind in ONE_BY_ONE else self._any
            heapq.heappush(queue, entry)
            if priority <= URGENT:
                self.urgent[0] = 1
            self._changed.notify_all()

    def take(
        self, owner: object, *, first: bool = True, leaves: Callable[[], bool] = lambda: False
    ) -> Waiting | None:
        """Wait for the next frame for one of the owner's flows; only the `first` flow gets those
        that go one by one. None: that flow `leaves`, or `owner` does not own this outbox any more.
        """
        with self._changed:
            while True:
                if self._owner is not owner or self._closed or leaves():
                    return None
                queues = [self._any, self._one_by_one] if first else [self._any]
                ready = [queue for queue in queues if queue]
                if ready:
                    taken = heapq.heappop(min(ready, key=lambda queue: queue[0]))
                    self._look()
                    return taken
                self._changed.wait()

    def take_urgent(self, owner: object) -> Header | None:
        """A waiting frame that overtakes a frame being sent; None if there is none."""
        if not self._any or self._any[0].priority > URGENT:
            return None  # looked at without the lock: whoever comes a moment later goes next time
        with self._changed:
            if self._owner is not owner or not self._any:
                return None
            first = self._any[0]
            if first.priority > URGENT or first.payload_fn is not None:
                return None
            header = heapq.heappop(self._any).header
            self._look()
            return header

    def _look(self) -> None:
        """Lock held: is what waits first still urgent?"""
        self.urgent[0] = bool(self._any) and self._any[0].priority <= URGENT

    def hand_to(self, owner: object | None) -> None:
        """From now on `owner` sends; the one before it gets None from `take`."""
        with self._changed:
            self._owner = owner
            self._changed.notify_all()

    def wake(self) -> None:
        """Ask every waiting flow again whether it leaves."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_other_owner(self, owner: object, timeout_s: float) -> bool:
        """Wait until somebody else than `owner` owns this outbox; False when nobody did in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._owner is not owner, timeout=timeout_s
            )

    def discard(self, group: bytes) -> int:
        """Forget the waiting frames of one group. Returns how many."""
        with self._changed:
            before = len(self._any) + len(self._one_by_one)
            for queue in (self._any, self._one_by_one):
                queue[:] = [one for one in queue if one.header.group != group]
                heapq.heapify(queue)
            self._look()
            return before - len(self._any) - len(self._one_by_one)

    def close(self) -> None:
        """Wake everybody; nothing is sent any more."""
        with self._changed:
            self._closed = True
            self._any.clear()
            self._one_by_one.clear()
            self._look()
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._any) + len(self._one_by_one)
