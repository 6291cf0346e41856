"""Frames over one proven stream, read by one thread while another one writes.

One rule: a short or damaged frame is LinkBroken or RemoteProtocolError, never a frame.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

from moshpitd.errors import LinkBroken, RemoteProtocolError
from moshpitd.net.checksum import crc32
from moshpitd.net.frames import (
    ASIDE,
    HEADER_BYTES,
    MORE,
    SEAL_IS_ENOUGH,
    SEGMENT_BYTES,
    FrameKind,
    Header,
)
from moshpitd.net.openssl import NEVER
from moshpitd.net.streams import Stream

Payload: TypeAlias = bytes | bytearray | memoryview

# Text in a FAREWELL or a PeerID in a HELLO; longer ones are cut or refused.
TEXT_BYTES_MAX = 512
_ALWAYS = bytearray(b"\x01")
# What may stand between two segments of another frame.
_ASIDES = frozenset({FrameKind.PING, FrameKind.PONG})


class Channel:
    """A stream that carries whole frames both ways. `bytes_in` and `bytes_out` count whole frames,
    not TLS."""

    def __init__(self, stream: Stream, *, payload_bytes_max: int) -> None:
        self.stream = stream
        self.bytes_in = 0
        self.bytes_out = 0
        self.receiving = False
        self.payload_bytes_max = payload_bytes_max
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = lazy_memory(payload_bytes_max)

    def receive(
        self,
        timeout_s: float | None = None,
        *,
        payload_bytes_max: int | None = None,
        aside: Callable[[Header], None] | None = None,
    ) -> tuple[Header, memoryview] | None:
        """The next frame, or None at an end between two frames. The payload is valid until the next
        call. `aside` is called with each header that comes between the segments of the payload.

        For handshakes, `timeout_s` bounds each wait for the kernel and `payload_bytes_max` the
        frame; None waits for ever and takes what the channel takes.
        """
        got = self.stream.read_into(self._head, timeout_s)
        if got == 0:
            return None
        if got < HEADER_BYTES:
            raise LinkBroken(f"ended inside a frame header ({got} of {HEADER_BYTES} bytes)")
        header = Header.unpack(
            self._head, payload_bytes_max=payload_bytes_max or self.payload_bytes_max
        )
        if not header.checked and not (self.stream.sealed and header.kind in SEAL_IS_ENOUGH):
            raise RemoteProtocolError(f"{header.kind.name} without a crc32")
        payload = self._body[: header.length]
        self.receiving = header.length > 0
        if header.length > SEGMENT_BYTES:
            self.stream.wire.bound_window()
        self._receive_payload(payload, timeout_s, aside)
        self.receiving = False
        if header.checked and (crc := crc32(payload)) != header.crc:
            raise RemoteProtocolError(
                f"payload of part {header.part} has crc32 {crc:#010x}, "
                f"its header says {header.crc:#010x}"
            )
        self.bytes_in += HEADER_BYTES + header.length
        return header, payload

    def _receive_payload(
        self, payload: memoryview, timeout_s: float | None, aside: Callable[[Header], None] | None
    ) -> None:
        got, mark = self.stream.read_segments(payload, 0, timeout_s)
        while got < len(payload):
            if mark == ASIDE[0] and aside is not None:
                aside(self._receive_aside(timeout_s))
            elif mark >= 0:
                raise RemoteProtocolError(f"byte {mark} between two segments")
            else:
                raise LinkBroken(f"ended inside a payload ({got} of {len(payload)} bytes)")
            got, mark = self.stream.read_segments(payload, got, timeout_s)

    def _receive_aside(self, timeout_s: float | None) -> Header:
        head = memoryview(bytearray(HEADER_BYTES))
        if self.stream.read_into(head, timeout_s) < HEADER_BYTES:
            raise LinkBroken("ended inside a payload")
        header = Header.unpack(head, payload_bytes_max=0)
        if header.kind not in _ASIDES:
            raise RemoteProtocolError(f"{header.kind.name} inside another frame")
        self.bytes_in += HEADER_BYTES
        return header

    def send(
        self,
        header: Header,
        payload: Payload = b"",
        timeout_s: float | None = None,
        *,
        aside: Callable[[], Header | None] | None = None,
        urgent: bytearray | None = None,
    ) -> None:
        """Send one frame; returns when the kernel has all of it. `aside` is asked for headers that
        shall go between two segments: after each, or once `urgent[0]` is set.
        """
        view = memoryview(payload).cast("B")
        crc = None
        if not (self.stream.sealed and header.kind in SEAL_IS_ENOUGH):
            crc = header.crc or crc32(view)
        head = header.pack(length=len(view), crc=crc)
        write = self.stream.write_segments
        if urgent is None:
            urgent = NEVER if aside is None else _ALWAYS
        start = write(head, view, 0, urgent=urgent, timeout_s=timeout_s)
        while start < len(view):
            while aside is not None and (between := aside()) is not None:
                small = memoryview(ASIDE + between.pack(length=0, crc=0))
                self.stream.write((small,), timeout_s, urgent=True)
                self.bytes_out += HEADER_BYTES
            start = write(MORE, view, start, urgent=urgent, timeout_s=timeout_s)
        self.bytes_out += HEADER_BYTES + len(view)

    def send_text(self, header: Header, text: str, *, timeout_s: float | None = 1.0) -> None:
        """Send a HELLO or FAREWELL."""
        self.send(header, text.encode()[:TEXT_BYTES_MAX], timeout_s)

    def shut(self) -> None:
        """Wake both threads out of their waits; they find the channel ended. Safe from any
        thread.
        """
        self.stream.wire.shut()

    def close(self) -> None:
        """Give the descriptor back. Only when no thread uses the channel any more."""
        self.stream.wire.close()

    def abandon(self) -> None:
        """Shut and close at once, for a channel that only the calling thread has seen."""
        self.shut()
        self.close()


def lazy_memory(size: int) -> memoryview:
    """Zeroed memory whose pages cost nothing until they are touched; bytearray(size) touches them
    all.
    """
    return memoryview(mmap.mmap(-1, size))
