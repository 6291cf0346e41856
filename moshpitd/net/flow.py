"""One flow of a link: a channel, its reader thread and its writer thread.

One rule: a flow ends in exactly one of two ways. Orderly: FAREWELL went both ways, so every frame
sent on it arrived. Or lost, with a reason: then its link is lost, because frames may be missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from moshpitd.errors import LinkBroken, MoshpitError, Oversized, RemoteProtocolError
from moshpitd.net.channel import Channel, lazy_memory
from moshpitd.net.frames import CALLER_KINDS, FrameKind, Header
from moshpitd.net.meter import round_trip_s, unacknowledged
from moshpitd.net.outbox import URGENT, Outbox, Waiting
from moshpitd.net.sockets import NEAR_S
from moshpitd.net.tasks import give_way

log = logging.getLogger(__name__)

# The reason in the FAREWELL of a link that lost against another link to the same peer.
SUPERSEDED = "superseded"
# The reason in the FAREWELL of one flow of a link that stays.
REMOVED = "flow removed"
# How long a superseded link may wait for the other one to show up at this end, and for its end.
SUPERSEDED_TIMEOUT_S = 5.0


class Counts(NamedTuple):
    """Bytes so far: of whole frames in and out; as the kernel has handed over, and taken."""

    bytes_in: int
    bytes_out: int
    heard: int
    handed: int


class FlowOwner(Protocol):
    """What a flow asks of its link. All of it is called from the flow's threads."""

    def frame_arrived(self, header: Header, payload: memoryview) -> None: ...

    def send_failed(self, header: Header, error: Exception) -> None: ...

    def pong(self, sent_ns: int) -> None: ...

    def sent(self, header: Header, payload_bytes: int, seconds: float) -> None:
        """`seconds`: from the first byte until the kernel had taken the last."""
        ...

    def flow_ended(self, flow: Flow, reason: str | None) -> None:
        """`reason` None: orderly. Called once per flow."""
        ...


class Flow:
    """`number` 0 is the flow that a link began with; it lives as long as the link."""

    def __init__(
        self, channel: Channel, number: int, *, peer_id: str, outbox: Outbox, owner: FlowOwner
    ) -> None:
        self.number = number
        self._channel = channel
        self._peer_id = peer_id
        self._outbox = outbox
        self._owner = owner
        self._lock = threading.Lock()
        self._farewell = "closing"
        self._leaves = self._said = self._heard = self._over = self._busy = False
        self._running = 2

    def start(self, spawn: Callable[[str, Callable[[], None]], None]) -> None:
        """Start both threads through `spawn(name, target)`."""
        wire = self._channel.stream.wire
        wire.near = 0 < round_trip_s(wire.descriptor) < NEAR_S
        name = f"{self._peer_id[-6:]}-{self.number}"
        spawn(f"link-read-{name}", self._read_all)
        spawn(f"link-write-{name}", self._write_all)

    def retire(self, reason: str) -> None:
        """Say `reason` after the frame that is being sent, then end. For SUPERSEDED the outbox has
        another owner by now."""
        with self._lock:
            self._farewell = reason
            self._leaves = True
        self._outbox.wake()

    def end(self, reason: str | None) -> None:
        """End this flow now; only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._channel.shut()
        self._owner.flow_ended(self, reason)

    @property
    def over(self) -> bool:
        return self._over

    # -- what it has done so far ------------------------------------------------------------------

    def counts(self) -> Counts:
        wire = self._channel.stream.wire
        return Counts(
            self._channel.bytes_in, self._channel.bytes_out, wire.bytes_heard, wire.bytes_handed
        )

    def outstanding(self) -> tuple[int, bool]:
        """(bytes that the kernel holds, whether more are being handed to it)."""
        with self._lock:
            if self._running == 0:  # the descriptor's number may be somebody else's by now
                return 0, False
            return unacknowledged(self._channel.stream.wire.descriptor), self._busy

    def round_trip_s(self) -> float:
        with self._lock:
            return round_trip_s(self._channel.stream.wire.descriptor) if self._running else 0.0

    @property
    def receiving(self) -> bool:
        """In the middle of a frame."""
        return self._channel.receiving

    # -- reading ----------------------------------------------------------------------------------

    def _read_all(self) -> None:
        give_way()
        try:
            while True:
                received = self._channel.receive(aside=self._round_trip)
                if received is None:
                    raise LinkBroken("closed by the other side without a farewell")
                header, payload = received
                if header.kind is FrameKind.FAREWELL:
                    self._hear_farewell(bytes(payload).decode(errors="replace"))
                    return
                if header.kind in CALLER_KINDS:
                    self._owner.frame_arrived(header, payload)
                else:
                    self._round_trip(header)
        except RemoteProtocolError as error:
            self.end(error.reason)
        except MoshpitError as error:
            self.end(str(error))
        except Exception as error:
            # The receiver of frames failed, not the peer. Without this frame the round is
            # incomplete, so the link ends and both sides know.
            log.exception("a frame from %s could not be handled", self._peer_id)
            self.end(f"a frame could not be handled here: {error}")
        finally:
            self._thread_ended()

    def _round_trip(self, header: Header) -> None:
        if header.kind is FrameKind.PING:
            reply = Header(FrameKind.PONG, contributors=header.contributors)
            self._outbox.put(URGENT, reply, None)
        elif header.kind is FrameKind.PONG:
            self._owner.pong(header.contributors)
        else:
            raise RemoteProtocolError(f"{header.kind.name} in the middle of a link")

    def _hear_farewell(self, reason: str) -> None:
        if reason == REMOVED and self.number > 0:
            self.retire(REMOVED)
        elif reason != SUPERSEDED:
            self.end(f"the other side ended the link: {reason[:100]}")
            return
        # The other side took another link to us and sends nothing more here. It still reads: this
        # side goes on sending until that other link has come up here too, and then says farewell
        # itself.
        elif not self._outbox.wait_for_other_owner(self._owner, SUPERSEDED_TIMEOUT_S):
            self.end("superseded by a link that never came up here")
            return
        with self._lock:
            self._heard = True
            complete = self._said
        if complete:
            self.end(None)

    # -- writing ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        give_way()
        scratch: memoryview | None = None
        try:
            while (
                waiting := self._outbox.take(
                    self._owner, first=self.number == 0, leaves=lambda: self._leaves
                )
            ) is not None:
                if waiting.payload_fn is None:
                    self._channel.send(waiting.header)
                    continue
                if scratch is None:
                    scratch = lazy_memory(self._channel.payload_bytes_max)
                self._send_payload(waiting, scratch)
            # A flow that goes while its peer stays is complete only with its farewell, however long
            # its reader takes; a link that closes for good says it if there is room.
            patience_s = None if self._farewell in (SUPERSEDED, REMOVED) else 1.0
            self._channel.send_text(
                Header(FrameKind.FAREWELL), self._farewell, timeout_s=patience_s
            )
            with self._lock:
                self._said = True
                complete = self._heard
            if complete:
                self.end(None)
        except MoshpitError as error:
            self.end(str(error))
        except Exception as error:
            log.exception("the writer of the link to %s failed", self._peer_id)
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
            self._owner.send_failed(waiting.header, error)
            return
        self._busy = True
        began = time.perf_counter()
        self._channel.send(
            waiting.header,
            payload,
            aside=lambda: self._outbox.take_urgent(self._owner),
            urgent=self._outbox.urgent,
        )
        self._busy = False
        self._owner.sent(waiting.header, len(payload), time.perf_counter() - began)

    def _thread_ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
            self._over = self._over or last
        if last:
            self._channel.close()
