"""One link: a channel, its reader thread and its writer thread, from HELLO to its end.

One rule: a link ends in exactly one of two ways. Orderly: FAREWELL went both ways, so every frame
sent on it arrived. Or lost, with a reason: then the pool says so, because frames may be missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moshpitd.errors import LinkBroken, MoshpitError, Oversized, RemoteProtocolError
from moshpitd.net.channel import Channel, lazy_memory
from moshpitd.net.frames import CALLER_KINDS, FrameKind, Header
from moshpitd.net.outbox import Outbox, Waiting

log = logging.getLogger(__name__)

# The reason in the FAREWELL of a link that lost against another link to the same peer.
SUPERSEDED = "superseded"
# How long a superseded link may wait for the other one to show up at this end, and for its end.
SUPERSEDED_TIMEOUT_S = 5.0
# PONG overtakes everything, or round trips would measure the queue.
URGENT = -1_000_000


def admit_all(peer_id: str) -> str | None:
    """The default of LinkCallbacks.admit: everybody who proves a PeerID may link."""
    return None


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What the pool tells its user, always from a thread of its own and never under a lock.

    on_frame(peer_id, header, payload): runs in the reader thread, which waits meanwhile; that wait
    is the back-pressure. The payload is valid until the call returns. RemoteProtocolError ends the
    link. on_lost(peer_id, reason): the link ended and frames in either direction may be missing.
    on_up(peer_id): a link stands. Not repeated when one link replaces another without loss.
    on_send_failed(peer_id, header, error): this frame's payload function raised; the link lives on.
    admit(peer_id): None, or the reason why this peer may not link (a ban, strikes).
    """

    on_frame: Callable[[str, Header, memoryview], None]
    on_lost: Callable[[str, str], None]
    on_up: Callable[[str], None]
    on_send_failed: Callable[[str, Header, Exception], None]
    admit: Callable[[str], str | None] = admit_all


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of the pool. Sizes in bytes, times in seconds."""

    # A part is about 1 MiB; float64 data raw and its slack fit eight times over. Each link has two
    # buffers of this size, of which only the touched pages cost memory.
    payload_bytes_max: int = 8 << 20
    # One frame per part: 16 GiB in parts of 1 MiB to one peer, at about 200 bytes per waiting
    # frame.
    queue_frames_max: int = 16_384
    # A group has at most 64 members; the rest is for rounds that overlap and for snapshots.
    links_max: int = 256
    # Strangers that connect and say nothing hold a thread each, this many and this long at most.
    handshakes_max: int = 32
    handshake_timeout_s: float = 5.0
    dial_timeout_s: float = 5.0


class LinkOwner(Protocol):
    """What a link asks of its pool. All of it is called from the link's threads."""

    def frame_arrived(self, link: Link, header: Header, payload: memoryview) -> None: ...

    def send_failed(self, link: Link, header: Header, error: Exception) -> None: ...

    def link_ended(self, link: Link, reason: str | None) -> None:
        """`reason` None: orderly. Called once per link."""
        ...


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of one link. `rtt_s` is None until a ping came back; `dialled` says by which
    side.
    """

    peer_id: str
    dialled: bool
    age_s: float
    bytes_in: int
    bytes_out: int
    waiting_frames: int
    rtt_s: float | None


class Link:
    """`dialled` is True when this side dialled. `session` names the other side's pool instance."""

    def __init__(
        self, channel: Channel, outbox: Outbox, owner: LinkOwner, *, dialled: bool, session: bytes
    ) -> None:
        self.peer_id = channel.peer_id
        self.dialled = dialled
        self.session = session
        self.rtt_s: float | None = None
        self._channel = channel
        self._outbox = outbox
        self._owner = owner
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._farewell = "closing"
        self._said = self._heard = self._over = False
        self._running = 2

    def start(self, spawn: Callable[[str, Callable[[], None]], None]) -> None:
        """Start both threads through `spawn(name, target)`."""
        spawn(f"link-read-{self.peer_id[-6:]}", self._read_all)
        spawn(f"link-write-{self.peer_id[-6:]}", self._write_all)

    def retire(self, reason: str) -> None:
        """Say `reason` after the frame that is being sent, then end. The outbox has another owner
        by now.
        """
        with self._lock:
            self._farewell = reason

    def end(self, reason: str | None) -> None:
        """End this link now; only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._channel.shut()
        self._owner.link_ended(self, reason)

    @property
    def over(self) -> bool:
        return self._over

    def stats(self) -> LinkStats:
        return LinkStats(
            peer_id=self.peer_id,
            dialled=self.dialled,
            age_s=time.monotonic() - self._since,
            bytes_in=self._channel.bytes_in,
            bytes_out=self._channel.bytes_out,
            waiting_frames=len(self._outbox),
            rtt_s=self.rtt_s,
        )

    def _read_all(self) -> None:
        try:
            while True:
                received = self._channel.receive()
                if received is None:
                    raise LinkBroken("closed by the other side without a farewell")
                header, payload = received
                if header.kind is FrameKind.FAREWELL:
                    self._hear_farewell(bytes(payload).decode(errors="replace"))
                    return
                self._dispatch(header, payload)
        except RemoteProtocolError as error:
            self.end(error.reason)
        except MoshpitError as error:
            self.end(str(error))
        except Exception as error:
            # The receiver of frames failed, not the peer. Without this frame the round is
            # incomplete, so the link ends and both sides know.
            log.exception("a frame from %s could not be handled", self.peer_id)
            self.end(f"a frame could not be handled here: {error}")
        finally:
            self._thread_ended()

    def _dispatch(self, header: Header, payload: memoryview) -> None:
        if header.kind in CALLER_KINDS:
            self._owner.frame_arrived(self, header, payload)
        elif header.kind is FrameKind.PING:
            reply = Header(FrameKind.PONG, contributors=header.contributors)
            self._outbox.put(URGENT, reply, None)
        elif header.kind is FrameKind.PONG:
            sent_ns = header.contributors
            self.rtt_s = max(0.0, (time.monotonic_ns() - sent_ns) / 1e9)
        else:
            raise RemoteProtocolError(f"{header.kind.name} in the middle of a link")

    def _hear_farewell(self, reason: str) -> None:
        if reason != SUPERSEDED:
            self.end(f"the other side ended the link: {reason[:100]}")
            return
        # The other side took another link to us and sends nothing more here. It still reads: this
        # side goes on sending until that other link has come up here too, and then says farewell
        # itself.
        if not self._outbox.wait_for_other_owner(self, SUPERSEDED_TIMEOUT_S):
            self.end("superseded by a link that never came up here")
            return
        with self._lock:
            self._heard = True
            complete = self._said
        if complete:
            self.end(None)

    def _write_all(self) -> None:
        scratch: memoryview | None = None
        try:
            while (waiting := self._outbox.take(self)) is not None:
                if waiting.payload_fn is None:
                    self._channel.send(waiting.header)
                    continue
                if scratch is None:
                    scratch = lazy_memory(self._channel.payload_bytes_max)
                self._send_payload(waiting, scratch)
            # A superseded link is complete only with its farewell, however long its reader takes; a
            # link that closes for good says it if there is room.
            patience_s = None if self._farewell == SUPERSEDED else 1.0
            self._channel.send_text(FrameKind.FAREWELL, self._farewell, timeout_s=patience_s)
            with self._lock:
                self._said = True
                complete = self._heard
            if complete:
                self.end(None)
        except MoshpitError as error:
            self.end(str(error))
        except Exception as error:
            log.exception("the writer of the link to %s failed", self.peer_id)
            self.end(f"sending failed here: {error}")
        finally:
            self._thread_ended()

    def _send_payload(self, waiting: Waiting, scratch: memoryview) -> None:
        assert waiting.payload_fn is not None
        try:
            payload = memoryview(waiting.payload_fn(scratch)).cast("B")
            if len(payload) > len(scratch):
                raise Oversized(
                    f"payload of {len(payload)} bytes for part {waiting.header.part}, "
                    f"at most {len(scratch)} fit a frame"
                )
        # Encoding is the caller's code. Its failure costs this frame, not the link.
        except Exception as error:
            self._owner.send_failed(self, waiting.header, error)
            return
        self._channel.send(waiting.header, payload)

    def _thread_ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
            self._over = self._over or last
        if last:
            self._channel.close()
