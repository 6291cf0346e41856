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
from moshpitd.net.frames import Header

# Writes the payload into the scratch memory that it is given (as large as the largest payload) and
# returns the part of it that it used, or returns a buffer of its own that nobody changes meanwhile.
PayloadFunction: TypeAlias = Callable[[memoryview], Payload]


@dataclass(order=True, slots=True)
class Waiting:
    """A frame to be sent; the lower priority first, within a priority the older one."""

    priority: int
    number: int
    header: Header = field(compare=False)
    payload_fn: PayloadFunction | None = field(compare=False)


class Outbox:
    """The queue of one peer. At most one link owns it; only that link's writer takes from it.

    The queue outlives a link that a better one replaces, so nothing queued is lost between the two.
    """

    def __init__(self, *, frames_max: int) -> None:
        self._frames_max = frames_max
        self._changed = threading.Condition()
        self._queue: list[Waiting] = []
        self._numbers = itertools.count()
        self._owner: object | None = None
        self._closed = False

    def put(self, priority: int, header: Header, payload_fn: PayloadFunction | None) -> None:
        """Queue a frame. Raises LocalProtocolError when the bound is reached: the caller paces
        itself.
        """
        with self._changed:
            if len(self._queue) >= self._frames_max:
                raise LocalProtocolError(
                    f"{len(self._queue)} frames wait for one peer, at most {self._frames_max} may"
                )
            entry = Waiting(priority, next(self._numbers), header, payload_fn)
            heapq.heappush(self._queue, entry)
            self._changed.notify_all()

    def take(self, owner: object) -> Waiting | None:
        """Wait for the next frame. None: `owner` does not own this outbox any more and shall
        end.
        """
        with self._changed:
            while True:
                if self._owner is not owner or self._closed:
                    return None
                if self._queue:
                    return heapq.heappop(self._queue)
                self._changed.wait()

    def hand_to(self, owner: object | None) -> None:
        """From now on `owner` sends; the one before it gets None from `take`."""
        with self._changed:
            self._owner = owner
            self._changed.notify_all()

    def wait_for_other_owner(self, owner: object, timeout_s: float) -> bool:
        """Wait until somebody else than `owner` owns this outbox; False when nobody did in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._owner is not owner, timeout=timeout_s
            )

    def discard(self, group: bytes | None = None) -> int:
        """Forget the waiting frames of one group, or all of them. Returns how many."""
        with self._changed:
            kept = (
                [] if group is None else [one for one in self._queue if one.header.group != group]
            )
            count = len(self._queue) - len(kept)
            heapq.heapify(kept)
            self._queue = kept
            return count

    def close(self) -> None:
        """Wake everybody; nothing is sent any more."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._queue)
