"""How fast links carry bytes while they are busy. One rule: idle time and a first burst into a
buffer say nothing, so neither counts.

A rate is what was delivered between two looks that both found bytes on their way. The largest of
the last minute's is the capacity that was seen: a slow receiver makes a link look slow for as long
as it is the only one that still takes bytes, and that says nothing about this side.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
from collections import deque

# Between two looks. A round of a second has three; a shorter one is too short to tell.
LOOK_S = 0.25
# A rate is told from at least this much, the size of one part: below it the kernel's and TCP's own
# quanta show.
SAMPLE_BYTES_MIN = 1 << 20
# Busy time that is remembered. A member at a quarter of the others' rate makes a round of 10 s end
# with 7 s in which only its link is busy; several such rounds must not hide what was seen before.
KEEP_BUSY_S = 60.0
# How much of the difference each new sample moves the value: one odd sample moves it half way.
SMOOTHING = 0.5
# A payload below this fits what the kernel takes without waiting, and so tells nothing of the line.
TAKEN_BYTES_MIN = 64 << 10
# Weight of what was seen before at each payload: the last fifty or so count, 25 MB in parts of the
# usual size. The first ten after a pause may only fill the buffers of both kernels: with a memory
# of ten, codec auto took a busy loopback for fast and sent a fifth of its contributions raw.
TAKEN_MEMORY = 0.98


class Rate:
    """One direction, of one link or of all. `value` is bytes per second, None before the first
    sample, and as long as all samples together cover less than `settle_s` seconds."""

    def __init__(self, *, settle_s: float = 0.0) -> None:
        self.value: float | None = None
        self._settle_s = settle_s
        self._then: tuple[float, int] | None = None
        self._samples: deque[tuple[float, float]] = deque()  # (seconds, rate)
        self._kept_s = 0.0

    def look(self, now: float, delivered: int, *, busy: bool) -> None:
        """At `now`, `delivered` bytes had arrived in all; `busy`: more are on their way."""
        then, self._then = self._then, (now, delivered) if busy else None
        if then is None:
            return
        seconds, count = now - then[0], delivered - then[1]
        if not busy:
            return  # it ended somewhere in between: nobody knows when
        if count < SAMPLE_BYTES_MIN or seconds <= 0:
            self._then = then  # too little to tell: the sample grows
            return
        self._take(seconds, count / seconds)

    def _take(self, seconds: float, rate: float) -> None:
        self._samples.append((seconds, rate))
        self._kept_s += seconds
        while len(self._samples) > 1 and self._kept_s > KEEP_BUSY_S:
            self._kept_s -= self._samples.popleft()[0]
        if self.value is None and self._kept_s < self._settle_s:
            return
        seen = max(rate for _, rate in self._samples)
        self.value = seen if self.value is None else self.value + SMOOTHING * (seen - self.value)


class Taking:
    """How fast one flow takes payloads, encryption included and the making of payloads left out.
    Unlike `Rate` it says what a slow encoder does not use. Threads that add at the same moment may
    lose one sample of many; None before the first payload that is large enough."""

    def __init__(self) -> None:
        self._sum = (0.0, 0.0)  # bytes, seconds

    def add(self, count: int, seconds: float) -> None:
        if count >= TAKEN_BYTES_MIN:
            old, spent = self._sum
            self._sum = (old * TAKEN_MEMORY + count, spent * TAKEN_MEMORY + seconds)

    @property
    def rate(self) -> float | None:
        count, seconds = self._sum
        return count / seconds if seconds > 0 else None


def unacknowledged(descriptor: int) -> int:
    """Bytes that were handed to the kernel and have not arrived at the other end (Linux)."""
    try:
        raw = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0  # the socket ends
    count: int = struct.unpack("i", raw)[0]
    return count


def round_trip_s(descriptor: int) -> float:
    """The shortest round trip that TCP has seen lately; 0.0 where the kernel does not say."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            words = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
    except (OSError, AttributeError):
        return 0.0
    microseconds = int.from_bytes(words[_MIN_RTT], sys.byteorder)
    # The kernel's word for "not measured yet" is all ones.
    return 0.0 if microseconds in (0, 0xFFFFFFFF) else microseconds / 1e6


# tcpi_min_rtt in Linux' struct tcp_info: 8 bytes, 24 words of 4, 4 of 8, then segs_out, segs_in,
# notsent_bytes and this.
_MIN_RTT = slice(148, 152)

# One flow has at most about this much on its way at once: Linux lets a sender have 4 MiB
# (tcp_wmem), of which its own bookkeeping takes about half.
FLOW_BYTES = 2 << 20
# What one thread encrypts and sends on a slow core; measured 0.9 to 2.4 GB/s on fast ones.
FLOW_BYTES_PER_S = 500e6


def flows_wanted(*, bytes_per_s: float, rtt_s: float, cores: int, most: int) -> int:
    """How many flows a link of this rate needs: one per half window that is on its way, and one
    per thread's worth of work where half of the cores can do it."""
    for_window = 1 + int(bytes_per_s * rtt_s / (FLOW_BYTES / 2))
    for_work = min(1 + int(bytes_per_s / FLOW_BYTES_PER_S), max(1, cores // 2))
    return max(1, min(most, max(for_window, for_work)))
