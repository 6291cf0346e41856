"""Frames of a group that is not open here yet. One rule: what nobody vouched for is bounded.

A member that hears Begin first sends before we know the group. Its frames wait here, a few MiB per
link; beyond that its link's reader waits, which is the sender's back-pressure. Neither is for ever,
because a group that we are never told about looks the same.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from moshpitd.net.frames import Header

# Per link: what arrives at 1 Gb/s in 32 ms; Begin travels to all members at the same moment.
LINK_BYTES = 4 << 20
# All links together: a swarm of strangers must not fill the memory 4 MiB at a time.
TOTAL_BYTES = 64 << 20
# Payloads may be empty, and each held frame costs a few hundred bytes besides its payload.
LINK_FRAMES = 4096
# How long a reader waits for its group to open when there is no more room.
WAIT_S = 5.0
# Longer than an attempt to form a group (Params.attempt_timeout_s); then nobody is coming.
KEEP_S = 20.0
# Groups that a reader waited for in vain; the next frame of one is not waited for again.
REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Held:
    peer_id: str
    header: Header
    payload: bytearray
    since: float


class EarlyFrames:
    """Not thread-safe: whoever owns one calls it under a lock of its own."""

    def __init__(self) -> None:
        self._held: deque[Held] = deque()  # oldest first
        self._bytes: dict[str, int] = {}
        self._frames: dict[str, int] = {}
        self._total = 0
        self._vain: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def hold(self, peer_id: str, header: Header, payload: memoryview) -> bool:
        """Keep a copy; False when there is no room for it."""
        now = time.monotonic()
        while self._held and now - self._held[0].since > KEEP_S:
            self._release(self._held.popleft())
        if (
            self._bytes.get(peer_id, 0) + len(payload) > LINK_BYTES
            or self._frames.get(peer_id, 0) >= LINK_FRAMES
            or self._total + len(payload) > TOTAL_BYTES
        ):
            return False
        self._held.append(Held(peer_id, header, bytearray(payload), now))
        self._bytes[peer_id] = self._bytes.get(peer_id, 0) + len(payload)
        self._frames[peer_id] = self._frames.get(peer_id, 0) + 1
        self._total += len(payload)
        return True

    def take(self, group: bytes) -> list[Held]:
        """The group opened (or never will): its frames, in order of arrival."""
        return self.pick(lambda held: held.header.group == group)

    def pick(self, chosen: Callable[[Held], bool]) -> list[Held]:
        """Those frames, in order of arrival, out of here."""
        taken = [held for held in self._held if chosen(held)]
        if taken:
            self._held = deque(held for held in self._held if not chosen(held))
            for held in taken:
                self._release(held)
        return taken

    def forget(self, peer_id: str) -> None:
        """The link is lost: what came on it is not to be completed."""
        self.pick(lambda held: held.peer_id == peer_id)
        for key in [key for key in self._vain if key[0] == peer_id]:
            del self._vain[key]

    def gave_up(self, peer_id: str, group: bytes) -> None:
        """A reader waited for this group and it did not open."""
        self._vain[peer_id, group] = None
        while len(self._vain) > REMEMBERED:
            self._vain.popitem(last=False)

    def worth_waiting(self, peer_id: str, group: bytes) -> bool:
        return (peer_id, group) not in self._vain

    def _release(self, held: Held) -> None:
        self._total -= len(held.payload)
        self._frames[held.peer_id] -= 1
        self._bytes[held.peer_id] -= len(held.payload)
        if not self._frames[held.peer_id]:
            del self._frames[held.peer_id], self._bytes[held.peer_id]
