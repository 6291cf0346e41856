"""The socket under a stream: its caps, its counts, and one call for as much as is asked of it.

One rule: what the kernel says in the end is a LinkBroken with its sentence.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import sys
from collections.abc import Sequence

from moshpitd.errors import LinkBroken
from moshpitd.net.frames import SEGMENT_BYTES
from moshpitd.net.openssl import NEVER
from moshpitd.net.throttle import Throttle

try:
    from moshpitd import _native as native

    COMPILED = hasattr(native, "receive_segments")  # not in one that was built of an older source
except ImportError:
    COMPILED = False

# What one call asks of the kernel. A segment is also what is encrypted in one go: it must fit the
# second-level cache twice; smaller pieces pay for more calls, larger ones hold the lock longer than
# the 0.1 ms that the other direction may wait.
SLICE_BYTES = SEGMENT_BYTES
# A round trip below this is one within a machine or a rack. There the kernel would let megabytes
# wait for a reader (its buffer grows with the rate), and what waited has left the caches when it is
# copied. So much may be on its way: 2 GB/s at that round trip, about what a thread takes.
NEAR_S = 0.0005
NEAR_WINDOW_BYTES = 1 << 20
_FAILED = 3  # of a compiled call: the kernel says why
NOTHING = memoryview(b"")
NO_ROOM = memoryview(bytearray(1))  # of a line that needs none


class Silent(LinkBroken):
    """A wait took longer than its bound."""


class Wire:
    """A blocking socket with its caps. `bytes_heard` is what the kernel has handed over,
    `bytes_handed` what it has taken: counts in memory, because compiled code adds to them while a
    segment is on its way."""

    def __init__(self, raw: socket.socket) -> None:
        raw.settimeout(None)
        self._socket = raw
        self.heard, self.handed = bytearray(8), bytearray(8)
        self.up: Throttle | None = None
        self.down: Throttle | None = None
        self.near = False  # the other end is less than NEAR_S away

    @property
    def bytes_heard(self) -> int:
        return int.from_bytes(self.heard, sys.byteorder)

    @property
    def bytes_handed(self) -> int:
        return int.from_bytes(self.handed, sys.byteorder)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def bound_window(self) -> None:
        """Before a large payload. Every time, as the kernel forgets it when its buffer grows."""
        if self.near:
            with contextlib.suppress(OSError, AttributeError):  # Linux has it
                self._socket.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, NEAR_WINDOW_BYTES
                )

    def receive(self, view: memoryview, timeout_s: float | None) -> int:
        """At least one byte, or 0 at the end of the stream."""
        most = SLICE_BYTES if self.down is None else self.down.piece_bytes
        try:
            if timeout_s is not None:
                self._wait(select.POLLIN, timeout_s)
            count = self._socket.recv_into(view, min(len(view), most))
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None
        add(self.heard, count)
        if self.down is not None:
            self.down.wait(count)  # what waits in the kernel meanwhile slows the sender down
        return count

    def fill(self, view: memoryview, timeout_s: float | None) -> int:
        """Fill the view; less only at the end of the stream."""
        if COMPILED and timeout_s is None and self.down is None:
            return self.fill_segments(view, 0, max(1, len(view)))[0]
        got = 0
        while got < len(view) and (count := self.receive(view[got:], timeout_s)):
            got += count
        return got

    def fill_segments(self, view: memoryview, got: int, segment: int) -> tuple[int, int]:
        """`Stream.read_segments`, compiled."""
        got, mark, how, why = native.receive_segments(
            None, self.descriptor, view, got, segment, NO_ROOM, self.heard
        )
        if how == _FAILED:
            raise LinkBroken(cause(OSError(why, os.strerror(why))))
        return got, mark

    def send_segments(
        self,
        head: memoryview | bytes,
        body: memoryview,
        start: int,
        segment: int,
        urgent: bytearray,
    ) -> int:
        """`Stream.write_segments`, compiled. OSError is why the kernel did not take it."""
        start, _, why = native.send_segments(
            None, self.descriptor, head, body, start, segment, urgent, NO_ROOM, self.handed
        )
        if why:
            raise OSError(why, os.strerror(why))
        return start

    def send(
        self, pieces: Sequence[memoryview], timeout_s: float | None, *, urgent: bool = False
    ) -> None:
        try:
            if self.up is None:
                self._send(pieces, timeout_s)
                return
            for piece in pieces:
                for start in range(0, len(piece), self.up.piece_bytes):
                    part = piece[start : start + self.up.piece_bytes]
                    if urgent:
                        self.up.reserve(len(part))
                    else:
                        self.up.wait(len(part))
                    self._send((part,), timeout_s)
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None

    def _send(self, pieces: Sequence[memoryview], timeout_s: float | None) -> None:
        if COMPILED and timeout_s is None and len(pieces) <= 2:
            head, body, *_ = *pieces, NOTHING, NOTHING
            self.send_segments(head, body, 0, max(1, len(body)), NEVER)
            return
        rest = [piece for piece in pieces if piece]
        while rest:
            if timeout_s is None:
                count = self._socket.sendmsg(rest)
            else:
                self._wait(select.POLLOUT, timeout_s)
                try:
                    count = self._socket.sendmsg(rest, (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            add(self.handed, count)
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if rest and count:
                rest[0] = rest[0][count:]

    def _wait(self, event: int, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        # The flags do not matter: after an error or a hang-up the next call says what it was.
        if not poller.poll(timeout_s * 1000):
            raise Silent(f"silent for {timeout_s:g} s")

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def add(count: bytearray, more: int) -> None:
    """One thread writes a count; whoever reads it sees the one before or the one after."""
    count[:] = (int.from_bytes(count, sys.byteorder) + more).to_bytes(8, sys.byteorder)


def cause(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "closed by the other side"
    if isinstance(error, TimeoutError):
        return "nothing acknowledged (TCP timeout)"
    text = error.strerror if isinstance(error, OSError) else None
    return str(text or error)
