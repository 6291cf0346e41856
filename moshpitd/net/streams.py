"""Bytes over one proven connection, read by one thread while another one writes: TLS or plain.

One rule: no lock is held while the kernel is waited for. An SSL object must not be used by two
threads at once, and CPython releases the GIL inside it without a lock of its own; so it works on
memory here, under a lock, and only ciphertext meets the socket. That also pays in calls: a TLS
socket asks the kernel twice per record of 16 KiB to read and once to write, this asks once per
256 KiB. Measured one way over loopback, both ends on 2 cores: 1.5 to 2.9 GB/s on a quiet machine,
0.4 to 1.2 GB/s where others wanted the cores too, an ssl.SSLSocket 1.0 and 0.2 to 0.3 GB/s.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from moshpitd.errors import LinkBroken
from moshpitd.net import openssl
from moshpitd.net.frames import MORE, SEGMENT_BYTES
from moshpitd.net.openssl import NEVER
from moshpitd.net.sockets import COMPILED, NOTHING, SLICE_BYTES, Silent, Wire, cause

# What a compiled call reads of TLS at a time: what a cache holds is copied and opened there (per
# GB, both ends: 0.45 s of processor time against 0.49 with 256 KiB).
PIECE_BYTES = 64 << 10


class Stream(Protocol):
    """One reading and one writing thread at a time. What fails is LinkBroken."""

    wire: Wire
    sealed: bool
    """Every byte is authenticated by the stream itself."""

    @property
    def cipher(self) -> str:
        """What does it; empty if nothing does."""
        ...

    @abstractmethod
    def read_into(self, view: memoryview, timeout_s: float | None = None) -> int:
        """Fill the view; less only at the end of the stream. `timeout_s` bounds each wait."""
        ...

    @abstractmethod
    def write(
        self,
        pieces: Sequence[memoryview],
        timeout_s: float | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Hand all of it to the kernel: a segment and small change. `urgent` waits for no cap."""
        ...

    def read_segments(
        self, view: memoryview, got: int, timeout_s: float | None = None
    ) -> tuple[int, int]:
        """Fill the view behind its first `got` bytes, which are whole segments, and take the byte
        MORE before each that follows another. (up to where it is filled, -1), or the value of
        another byte that stood there; less than all and -1: the stream ended.

        Here one by one: with caps, in a handshake, and where nothing was compiled.
        """
        mark = memoryview(bytearray(1))
        while got < len(view):
            if got and self.read_into(mark, timeout_s) == 0:
                break
            if got and mark != MORE:
                return got, mark[0]
            here = view[got : got + SEGMENT_BYTES]
            count = self.read_into(here, timeout_s)
            got += count
            if count < len(here):
                break
        return got, -1

    def write_segments(
        self,
        head: bytes,
        body: memoryview,
        start: int,
        *,
        urgent: bytearray = NEVER,
        timeout_s: float | None = None,
    ) -> int:
        """Hand over `head` and the segment of the body that begins at `start`, then, each behind
        its MORE, those that follow, at most until `urgent[0]` is set; here only the first. Returns
        where to go on."""
        piece = body[start : start + SEGMENT_BYTES]
        self.write((memoryview(head), piece), timeout_s)
        return start + len(piece)


class PlainStream(Stream):
    """The socket as it is. `ahead` was read before this was made and comes first."""

    sealed = False
    cipher = ""

    def __init__(self, wire: Wire, ahead: bytes = b"") -> None:
        self.wire = wire
        self._ahead = memoryview(ahead)

    def read_into(self, view: memoryview, timeout_s: float | None = None) -> int:
        got = min(len(self._ahead), len(view))
        if got:
            view[:got] = self._ahead[:got]
            self._ahead = self._ahead[got:]
        return got + self.wire.fill(view[got:], timeout_s)

    def write(
        self,
        pieces: Sequence[memoryview],
        timeout_s: float | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        self.wire.send(pieces, timeout_s, urgent=urgent)

    def read_segments(
        self, view: memoryview, got: int, timeout_s: float | None = None
    ) -> tuple[int, int]:
        if not COMPILED or self._ahead or timeout_s is not None or self.wire.down is not None:
            return super().read_segments(view, got, timeout_s)
        return self.wire.fill_segments(view, got, SEGMENT_BYTES)

    def write_segments(
        self,
        head: bytes,
        body: memoryview,
        start: int,
        *,
        urgent: bytearray = NEVER,
        timeout_s: float | None = None,
    ) -> int:
        if not COMPILED or timeout_s is not None or self.wire.up is not None:
            return super().write_segments(head, body, start, urgent=urgent, timeout_s=timeout_s)
        try:
            return self.wire.send_segments(head, body, start, SEGMENT_BYTES, urgent)
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None


class TlsStream(Stream):
    """TLS over a socket. Invariant: the lock is held whenever the SSL object or its two memories
    are touched, and never during a call on the socket."""

    sealed = True

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext | openssl.Context, *, server_side: bool
    ) -> None:
        self.wire = Wire(raw)
        self._incoming: ssl.MemoryBIO | openssl.Incoming
        self._outgoing: ssl.MemoryBIO | openssl.Outgoing
        self._tls: ssl.SSLObject | openssl.Conversation
        if isinstance(context, openssl.Context):
            self._tls = made = context.wrap(server_side=server_side)
            self._incoming, self._outgoing = made.incoming, made.outgoing
        else:
            self._incoming, self._outgoing = read, written = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(read, written, server_side=server_side)
        self._compiled: openssl.Conversation | None = None
        self._lock: AbstractContextManager[object] = threading.Lock()
        if isinstance(self._tls, openssl.Conversation) and self._tls.mutex is not None:
            self._compiled, self._lock = self._tls, self._tls.mutex
        self._room = memoryview(bytearray(SLICE_BYTES))
        self._small_room = self._room[:PIECE_BYTES]

    def handshake(self, timeout_s: float) -> bytes:
        """Shake hands in `timeout_s` altogether; returns the other side's certificate (DER), empty
        if it sent none. Raises ssl.SSLError, Silent and LinkBroken."""
        self._converse(self._tls.do_handshake, timeout_s)
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def cipher(self) -> str:
        chosen = self._tls.cipher()
        return chosen[0] if chosen is not None else ""

    def strip(self, timeout_s: float) -> PlainStream:
        """Leave TLS where both sides say so: each sends its closing alert, authenticated, and what
        follows it is plain. Only while no other thread uses this stream; it is of no use after.
        """
        try:
            self._converse(self._tls.unwrap, timeout_s)
        except (OSError, ValueError) as error:
            raise LinkBroken(f"leaving TLS: {cause(error)}") from None
        # OpenSSL takes records one by one, so what came behind the alert still lies here.
        return PlainStream(self.wire, self._incoming.read())

    def _converse(self, step: Callable[[], object], timeout_s: float) -> None:
        """Repeat a step of TLS until it needs nothing more from the other side."""
        deadline = time.monotonic() + timeout_s
        over = False
        while not over:
            try:
                step()
                over = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                with contextlib.suppress(LinkBroken):
                    self._flush(deadline)  # the alert tells the other side why
                raise
            self._flush(deadline)
            if not over and self._fill(_left(deadline)) == 0:
                raise LinkBroken("closed by the other side")

    def read_into(self, view: memoryview, timeout_s: float | None = None) -> int:
        wire = self.wire
        if self._compiled is not None and timeout_s is None and wire.down is None:
            try:
                room, heard = self._small_room, wire.heard
                got, _ = self._compiled.receive(wire.descriptor, view, room, heard)
                return got
            except (OSError, ValueError) as error:
                raise LinkBroken(cause(error)) from None
        got, wanted = 0, len(view)
        while got < wanted:
            try:
                with self._lock:
                    count, more = _read(self._tls, view[got:])
            except (OSError, ValueError) as error:
                raise LinkBroken(cause(error)) from None
            got += count
            if got < wanted and not (more and self._fill(timeout_s)):
                break
        return got

    def write(
        self,
        pieces: Sequence[memoryview],
        timeout_s: float | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        wire = self.wire
        try:
            if (
                self._compiled is not None
                and timeout_s is None
                and wire.up is None
                and len(pieces) <= 2
            ):
                head, body, *_ = *pieces, NOTHING, NOTHING
                self._compiled.send(wire.descriptor, head, body, wire.handed)
                return
            with self._lock:
                for piece in pieces:
                    rest = piece
                    while rest:  # into memory, so it takes all; its interface does not promise it
                        rest = rest[self._tls.write(rest) :]
                sealed = self._outgoing.read()
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None
        self.wire.send((memoryview(sealed),), timeout_s, urgent=urgent)

    def read_segments(
        self, view: memoryview, got: int, timeout_s: float | None = None
    ) -> tuple[int, int]:
        wire = self.wire
        if self._compiled is None or timeout_s is not None or wire.down is not None:
            return super().read_segments(view, got, timeout_s)
        try:
            return self._compiled.receive(
                wire.descriptor, view, self._small_room, wire.heard, got=got, segment=SEGMENT_BYTES
            )
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None

    def write_segments(
        self,
        head: bytes,
        body: memoryview,
        start: int,
        *,
        urgent: bytearray = NEVER,
        timeout_s: float | None = None,
    ) -> int:
        wire = self.wire
        if self._compiled is None or timeout_s is not None or wire.up is not None:
            return super().write_segments(head, body, start, urgent=urgent, timeout_s=timeout_s)
        try:
            return self._compiled.send(
                wire.descriptor, head, body, wire.handed,
                start=start, segment=SEGMENT_BYTES, urgent=urgent,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise LinkBroken(cause(error)) from None

    def _fill(self, timeout_s: float | None) -> int:
        count = self.wire.receive(self._room, timeout_s)
        if count:
            with self._lock:
                self._incoming.write(self._room[:count])
        return count

    def _flush(self, deadline: float) -> None:
        if sealed := self._outgoing.read():
            self.wire.send((memoryview(sealed),), _left(deadline))


def _read(tls: ssl.SSLObject | openssl.Conversation, view: memoryview) -> tuple[int, bool]:
    """(how much of the view was filled, whether more may come)."""
    if isinstance(tls, openssl.Conversation):
        return tls.read(view)
    got = 0
    while got < len(view):
        try:  # at most one record; typeshed knows neither the buffer's type nor what comes back
            count: Any = tls.read(len(view) - got, view[got:])
        except ssl.SSLWantReadError:
            break
        if count == 0:
            return got, False
        got += int(count)
    return got, True


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise Silent("out of time")
    return left_s
