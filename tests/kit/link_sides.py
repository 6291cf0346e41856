"""One side of a link for tests: a real pool that writes down what it was told. One rule: waiting is
for a condition, never for a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkCallbacks, LinkLimits, LinkOptions, LinkPool
from moshpitd.net.outbox import PayloadFunction

PATIENCE_S = 10.0
LIMITS = LinkLimits(payload_bytes_max=1 << 20, queue_frames_max=100, handshake_timeout_s=1.0)


class Side:
    """A pool that writes down what it was told. `gate` closed makes the reader thread wait."""

    def __init__(
        self,
        identity: Identity,
        limits: LinkLimits = LIMITS,
        options: LinkOptions | None = None,
    ) -> None:
        self.id = identity.peer_id
        self.identity = identity
        self.frames: list[tuple[str, Header, bytes]] = []
        self.events: list[tuple[str, str, str]] = []
        self.failed: list[tuple[Header, Exception]] = []
        self.banned: set[str] = set()
        self.frame_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()
        callbacks = LinkCallbacks(
            on_frame=self._frame,
            on_lost=lambda peer_id, reason: self._note("lost", peer_id, reason),
            on_up=lambda peer_id: self._note("up", peer_id, ""),
            on_send_failed=self._failed,
            admit=lambda peer_id: "banned" if peer_id in self.banned else None,
        )
        self.pool = LinkPool(identity, callbacks, host="127.0.0.1", limits=limits, options=options)
        self.address = f"127.0.0.1:{self.pool.port}"

    def _frame(self, peer_id: str, header: Header, payload: memoryview) -> None:
        self.gate.wait(PATIENCE_S)
        with self.changed:
            self.frames.append((peer_id, header, bytes(payload)))
            self.changed.notify_all()
        if self.frame_error is not None:
            raise self.frame_error

    def _note(self, what: str, peer_id: str, reason: str) -> None:
        with self.changed:
            self.events.append((what, peer_id, reason))
            self.changed.notify_all()

    def _failed(self, peer_id: str, header: Header, error: Exception) -> None:
        with self.changed:
            self.failed.append((header, error))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), (self.events, len(self.frames))

    def lost(self) -> list[str]:
        return [reason for what, _, reason in self.events if what == "lost"]

    def names(self) -> list[str]:
        return [what for what, _, _ in self.events]

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.frames]

    def dial(self, other: Side) -> Future[None]:
        """Done when the link stands here; the other side is a moment later."""
        return self.pool.dial(other.id, [other.address])

    def link(self, other: Side) -> None:
        """Dial, and wait for both sides."""
        self.dial(other).result(PATIENCE_S)
        other.wait(lambda: other.pool.is_up(self.id))

    def send(self, other: Side, content: bytes, *, priority: int = 0, part: int = 0) -> None:
        header = Header(FrameKind.CONTRIBUTION, part=part)
        self.pool.send(other.id, header, constant(content), priority=priority)


def constant(content: bytes) -> PayloadFunction:
    return lambda scratch: content
