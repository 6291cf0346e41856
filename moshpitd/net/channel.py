"""Frames over one proven TLS socket, read by one thread while another one writes.

One rule: OpenSSL sees one thread at a time. An SSL object must not be read and written at once by
two threads, and CPython 3.11 releases the GIL in both calls without a lock of its own. So the
socket never blocks inside OpenSSL: both sides take the lock only for as long as bytes move, and
wait for the kernel outside of it.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import ssl
import threading
import zlib
from typing import TypeAlias

from moshpitd.errors import LinkBroken, RemoteProtocolError
from moshpitd.net.frames import HEADER_BYTES, NO_RUN, FrameKind, Header
from moshpitd.net.tls import Proven

Payload: TypeAlias = bytes | bytearray | memoryview

# One SSL_write under the lock: 16 TLS records, about 0.2 ms. Larger slices make the reader wait,
# smaller ones pay for more calls.
WRITE_SLICE_BYTES = 256 * 1024
# A payload this small is sent in one TLS record with its header.
JOIN_BYTES = 8 * 1024
# Text in a FAREWELL or a PeerID in a HELLO; longer ones are cut or refused.
TEXT_BYTES_MAX = 512


class Channel:
    """A socket that carries whole frames both ways. A short or damaged frame is LinkBroken or
    RemoteProtocolError, never a frame. `bytes_in` and `bytes_out` count frames, not TLS."""

    def __init__(self, proven: Proven, *, payload_bytes_max: int) -> None:
        self.peer_id = proven.peer_id
        self.bytes_in = 0
        self.bytes_out = 0
        self._socket = proven.socket
        self.payload_bytes_max = payload_bytes_max
        self._ssl_lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(self._socket.fileno(), select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._socket.fileno(), select.POLLOUT)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = lazy_memory(payload_bytes_max)
        self._socket.setblocking(False)

    def receive(
        self, timeout_s: float | None = None, *, payload_bytes_max: int | None = None
    ) -> tuple[Header, memoryview] | None:
        """The next frame, or None at an end between two frames. The payload is valid until the next
        call.

        For handshakes, `timeout_s` bounds each wait for the kernel and `payload_bytes_max` the
        frame; None waits for ever and takes what the channel takes.
        """
        got = self._read(self._head, timeout_s)
        if got == 0:
            return None
        if got < HEADER_BYTES:
            raise LinkBroken(f"ended inside a frame header ({got} of {HEADER_BYTES} bytes)")
        header = Header.unpack(
            self._head, payload_bytes_max=payload_bytes_max or self.payload_bytes_max
        )
        payload = self._body[: header.length]
        got = self._read(payload, timeout_s)
        if got < header.length:
            raise LinkBroken(f"ended inside a payload ({got} of {header.length} bytes)")
        crc = zlib.crc32(payload)
        if crc != header.crc:
            raise RemoteProtocolError(
                f"payload of part {header.part} has crc32 {crc:#010x}, "
                f"its header says {header.crc:#010x}"
            )
        self.bytes_in += HEADER_BYTES + header.length
        return header, payload

    def send(self, header: Header, payload: Payload = b"", timeout_s: float | None = None) -> None:
        """Send one frame; returns when the kernel has all of it."""
        view = memoryview(payload).cast("B")
        head = header.pack(length=len(view), crc=zlib.crc32(view))
        if len(view) <= JOIN_BYTES:
            self._write(memoryview(head + bytes(view)), timeout_s)
        else:
            self._write(memoryview(head), timeout_s)
            self._write(view, timeout_s)
        self.bytes_out += HEADER_BYTES + len(view)

    def send_text(
        self, kind: FrameKind, text: str, *, run: bytes = NO_RUN, timeout_s: float | None = 1.0
    ) -> None:
        """Send a HELLO or FAREWELL."""
        self.send(Header(kind, run=run), text.encode()[:TEXT_BYTES_MAX], timeout_s)

    def shut(self) -> None:
        """Wake both threads out of their waits; they find the channel ended. Safe from any
        thread.
        """
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would also drop its SSL object under the other thread's feet.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. Only when no thread uses the channel any more: numbers are
        reused.
        """
        with self._ssl_lock, contextlib.suppress(OSError):
            self._socket.close()

    def abandon(self) -> None:
        """Shut and close at once, for a channel that only the calling thread has seen."""
        self.shut()
        self.close()

    def _read(self, view: memoryview, timeout_s: float | None) -> int:
        got = 0
        while got < len(view):
            try:
                with self._ssl_lock:
                    count = self._socket.recv_into(view[got:])
            except ssl.SSLWantReadError:
                _wait(self._readable, timeout_s)
                continue
            except ssl.SSLWantWriteError:  # an answer of TLS itself (key update) found no room
                _wait(self._writable, timeout_s)
                continue
            except (OSError, ValueError) as error:
                raise LinkBroken(_cause(error)) from None
            if count == 0:
                break
            got += count
        return got

    def _write(self, view: memoryview, timeout_s: float | None) -> None:
        for start in range(0, len(view), WRITE_SLICE_BYTES):
            rest = view[start : start + WRITE_SLICE_BYTES]
            while rest:
                # OpenSSL wants a write that found no room repeated with the very same bytes.
                try:
                    with self._ssl_lock:
                        count = self._socket.send(rest)
                except ssl.SSLWantWriteError:
                    _wait(self._writable, timeout_s)
                    continue
                except ssl.SSLWantReadError:
                    _wait(self._readable, timeout_s)
                    continue
                except (OSError, ValueError) as error:
                    raise LinkBroken(_cause(error)) from None
                rest = rest[count:]


def lazy_memory(size: int) -> memoryview:
    """Zeroed memory whose pages cost nothing until they are touched; bytearray(size) touches them
    all.
    """
    return memoryview(mmap.mmap(-1, size))


def _wait(poller: select.poll, timeout_s: float | None) -> None:
    # The flags do not matter: after an error or a hang-up the next call on the socket says what it
    # was.
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise LinkBroken(f"silent for {timeout_s:g} s")


def _cause(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "closed by the other side"
    if isinstance(error, TimeoutError):
        return "nothing acknowledged (TCP timeout)"
    text = error.strerror if isinstance(error, OSError) else None
    return str(text or error)
