"""Caps on what all links together send or receive. One rule: threads wait here, bytes never do.

A token bucket as a virtual clock (GCRA): whoever wants to send reserves the next free stretch of
time and sleeps until it begins, so threads are served in the order in which they ask and nobody has
to be woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moshpitd.net.frames import SEGMENT_BYTES

# What may pass at once after a pause: long enough for the scheduler's lateness (some ms), short
# enough that a router's queue of 100 ms never fills.
BURST_S = 0.05
# One piece of a large frame: with several flows a thread waits a few of these.
PIECE_S = 0.02
PIECE_BYTES_MIN = 4096


class Throttle:
    """`bytes_per_s` in one direction, shared by all threads; `taken` so far. Invariant: over any
    time t at most (t + BURST_S) * bytes_per_s and one piece pass."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        closing: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.piece_bytes = max(PIECE_BYTES_MIN, min(SEGMENT_BYTES, int(bytes_per_s * PIECE_S)))
        self._closing = closing
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()
        self.taken = 0

    def reserve(self, count: int) -> float:
        """Take room for `count` bytes; seconds until it is there."""
        with self._lock:
            self.taken += count
            now = self._clock()
            wait_s = max(0.0, self._free_at - BURST_S - now)
            self._free_at = max(self._free_at, now) + count / self.bytes_per_s
            return wait_s

    def wait(self, count: int) -> None:
        """Sleep until `count` bytes may pass, or the pool closes."""
        wait_s = self.reserve(count)
        if wait_s > 0:
            self._closing.wait(wait_s)


def throttle(mbps: float, closing: threading.Event) -> Throttle | None:
    """None for 0, which means no cap."""
    return Throttle(mbps * 1e6 / 8, closing=closing) if mbps > 0 else None
