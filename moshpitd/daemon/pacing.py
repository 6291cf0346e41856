"""Frames that wait for a link, handed over a few at a time. One rule: iterators wait, not frames.

A link's own queue is bounded and refuses what goes beyond. A push names thousands of parts, a
snapshot hundreds of thousands; so they wait here as iterators that make each frame when the one
before it is being encoded, and the link never holds more than a handful of ours per peer.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from moshpitd.daemon.abreast import Abreast
from moshpitd.errors import LocalProtocolError, MoshpitError, TransportError
from moshpitd.net.frames import Header

PayloadFunction: TypeAlias = Callable[[memoryview], bytes | bytearray | memoryview]
Frame: TypeAlias = tuple[Header, PayloadFunction]

# Enough that the writer never finds its queue empty while the next frame is being made (about
# 10 us against 1 ms for sending one), and few enough that an urgent frame does not wait long.
FRAMES_AHEAD = 4
ROUND_PRIORITY = 0
SNAPSHOT_PRIORITY = 10  # a newcomer may wait; a round that waits costs every member


class Skipped(MoshpitError):
    """Raised by a payload function that has nothing to send any more. Not a failure."""


class Links(Protocol):
    """What the data plane needs of net.links.LinkPool."""

    def dial(self, peer_id: str, addresses: tuple[str, ...]) -> Future[None]: ...

    def expect(self, peer_id: str) -> None: ...

    def is_up(self, peer_id: str) -> bool: ...

    def send(
        self, peer_id: str, header: Header, payload_fn: PayloadFunction | None, *, priority: int = 0
    ) -> None: ...

    def discard(self, group: bytes) -> int: ...

    def takes(self, peer_id: str) -> float | None:
        """Bytes per second that the link takes while payloads are handed to it; None: unknown."""
        ...

    def ping(self, peer_id: str) -> None:
        """Ask for a round trip; TransportError or LocalProtocolError where that cannot be."""
        ...

    def heard(self, peer_id: str) -> int:
        """Bytes that came on the link to this peer so far; 0 without a link."""
        ...


def link(
    links: Links,
    peer_id: str,
    addresses: tuple[str, ...],
    *,
    dials: bool,
    failed: Callable[[str], None],
) -> None:
    """Have a link to this peer; `failed` is called from any thread if we dialled in vain."""
    if links.is_up(peer_id):
        return
    if not dials:
        links.expect(peer_id)
        return

    def dialled(future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not links.is_up(peer_id):
            failed(str(error))

    links.dial(peer_id, addresses).add_done_callback(dialled)


class _Lane:
    """What waits for one peer: streams by (priority, age), and per group the frames in the link."""

    __slots__ = ("ahead", "streams")

    def __init__(self) -> None:
        self.streams: list[tuple[int, int, bytes, Iterator[Frame]]] = []
        self.ahead: dict[bytes, int] = {}

    def next_frame(self) -> tuple[Frame, int] | None:
        while self.streams:
            priority, _, _, frames = self.streams[0]
            frame = next(frames, None)
            if frame is not None:
                return frame, priority
            heapq.heappop(self.streams)
        return None


class Pacer:
    """Invariant: at most FRAMES_AHEAD of our frames wait inside the link to a peer (not counting
    those of groups that were discarded, whose payload functions skip)."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._rounds: dict[bytes, Abreast] = {}
        self._numbers = itertools.count()

    def put(
        self,
        peer_id: str,
        group: bytes,
        frames: Iterator[Frame],
        *,
        priority: int,
        abreast: int = 0,
    ) -> None:
        """Send `frames` in order; those of lower priority numbers first. `abreast`: so many they
        are, and they keep pace with those to other peers of the group that are put so."""
        if abreast:
            with self._lock:
                together = self._rounds.setdefault(group, Abreast())
            together.join(peer_id, abreast)
            frames = _in_step(together, peer_id, frames)
        with self._lock:
            lane = self._lanes.setdefault(peer_id, _Lane())
            heapq.heappush(lane.streams, (priority, next(self._numbers), group, frames))
        self._fill(peer_id)

    def forget(self, peer_id: str) -> None:
        """The link is lost, and with it what waited in it."""
        with self._lock:
            self._lanes.pop(peer_id, None)
            rounds = list(self._rounds.values())
        for together in rounds:
            together.leave(peer_id)

    def discard(self, group: bytes) -> None:
        """Nothing of this group is sent any more, to anybody."""
        with self._lock:
            for lane in self._lanes.values():
                lane.streams = [stream for stream in lane.streams if stream[2] != group]
                heapq.heapify(lane.streams)
                lane.ahead.pop(group, None)
            peers = list(self._lanes)
            together = self._rounds.pop(group, None)
        if together is not None:
            together.end()
        self._links.discard(group)
        for peer_id in peers:
            self._fill(peer_id)

    def _fill(self, peer_id: str) -> None:
        # Under one lock from taking a frame to queueing it, or two threads could swap two frames,
        # and the end of a snapshot overtake its last chunk. `send` calls nothing back.
        with self._lock:
            lane = self._lanes.get(peer_id)
            if lane is None:
                return
            while sum(lane.ahead.values()) < FRAMES_AHEAD:
                taken = lane.next_frame()
                if taken is None:
                    break
                (header, payload_fn), priority = taken
                try:
                    self._links.send(
                        peer_id,
                        header,
                        self._paced(peer_id, lane, header.group, payload_fn),
                        priority=priority,
                    )
                except (TransportError, LocalProtocolError):
                    # No link any more, or its queue is full of others' frames: the pool's on_lost
                    # or the receiver's deadline speaks for what is missing.
                    self._lanes.pop(peer_id, None)
                    return
                lane.ahead[header.group] = lane.ahead.get(header.group, 0) + 1
            if not lane.streams and not lane.ahead:
                del self._lanes[peer_id]

    def _paced(
        self, peer_id: str, lane: _Lane, group: bytes, payload_fn: PayloadFunction
    ) -> PayloadFunction:
        def next_then_payload(room: memoryview) -> bytes | bytearray | memoryview:
            with self._lock:
                left = lane.ahead.get(group, 0) - 1
                if left > 0:
                    lane.ahead[group] = left
                else:
                    lane.ahead.pop(group, None)
            self._fill(peer_id)
            return payload_fn(room)

        return next_then_payload


def _in_step(together: Abreast, peer_id: str, frames: Iterator[Frame]) -> Iterator[Frame]:
    def paced(payload_fn: PayloadFunction) -> PayloadFunction:
        def in_step(room: memoryview) -> bytes | bytearray | memoryview:
            together.take(peer_id)
            payload = payload_fn(room)
            together.took(len(payload))
            return payload

        return in_step

    for header, payload_fn in frames:
        yield header, paced(payload_fn)
    together.leave(peer_id)
