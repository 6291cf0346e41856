"""One transfer of a snapshot on its way in. One rule: it is complete, or nothing of it is used.

On the wire a transfer is SNAPSHOT frames with the nonce in the place of the group: the parts, raw
and in order, then the opaque trainer state in chunks that count on behind the parts. Every frame
says in `contributors` how many bytes of state there are.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from moshpitd.core.outcome import Reason
from moshpitd.errors import TrainerError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import Tensor, anonymous, tensor_of

STATE_CHUNK_BYTES = 1 << 20  # as large as a part, so that one frame size fits all
PROGRESS_INTERVAL_S = 0.1  # more would flood the core with an event per MiB


class News(Protocol):
    """Who hears what becomes of a transfer, from the reader thread."""

    def staged(self, incoming: Incoming) -> None: ...

    def progressed(self, incoming: Incoming) -> None: ...

    def broken(self, incoming: Incoming, reason: Reason) -> None: ...

    def stray(self, reason: str) -> None: ...


class Incoming:
    """Invariant: `missing` counts the parts and chunks that are not staged yet; when it is 0 or a
    frame was wrong, nothing is written any more."""

    kinds = frozenset({FrameKind.SNAPSHOT})

    def __init__(
        self,
        layout: Layout,
        nonce: bytes,
        donor: str,
        *,
        run_hash: bytes,
        state_bytes: int,
        news: News,
    ) -> None:
        self.run_hash = run_hash
        self.nonce = nonce
        self.donor = donor
        self.digest = b""
        self.state = bytearray(state_bytes)
        self.staging: Tensor | None = None
        self.missing = len(layout.parts) + -(-state_bytes // STATE_CHUNK_BYTES)
        self._layout = layout
        self._news = news
        self._seen = bytearray(self.missing)
        self._lock = threading.Lock()
        self._told_at = float("-inf")
        self._open = True

    @property
    def complete(self) -> bool:
        return self.missing == 0

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """A frame with our nonce, in the reader thread. A wrong one ends the transfer."""
        if peer_id != self.donor:
            self._news.stray("not_the_donor")
            return
        with self._lock:
            if not self._open:
                return
            failure = self._stage(header, payload)
            complete = failure is None and self.complete
            if failure is not None or complete:
                self._open = False  # nothing may change under the digest
            now = time.monotonic()
            tell = now - self._told_at >= PROGRESS_INTERVAL_S
            if tell:
                self._told_at = now
        if failure is not None:
            self._news.broken(self, failure)
            return
        if tell:
            self._news.progressed(self)
        if complete:
            self._news.staged(self)

    def close(self) -> None:
        with self._lock:
            self._open = False

    def _stage(self, header: Header, payload: memoryview) -> Reason | None:
        parts = self._layout.parts
        if header.contributors != len(self.state):
            # The donor's trainers put another state since it was offered: ask again.
            return Reason.SUPERSEDED
        if not 0 <= header.part < len(self._seen) or header.codec != RAW.code or header.epoch:
            return Reason.PART_SIZE
        if self._seen[header.part]:
            return None
        if header.part < len(parts):
            part = parts[header.part]
            if len(payload) != part.nbytes:
                return Reason.PART_SIZE
            if self.staging is None:
                try:
                    self.staging = anonymous(self._layout.nbytes)
                except TrainerError:
                    return Reason.NO_SNAPSHOT
            stop = part.offset_bytes + part.nbytes
            self.staging[part.offset_bytes : stop].copy_(tensor_of(payload))
        else:
            start = (header.part - len(parts)) * STATE_CHUNK_BYTES
            if len(payload) != min(STATE_CHUNK_BYTES, len(self.state) - start):
                return Reason.PART_SIZE
            self.state[start : start + len(payload)] = payload
        self._seen[header.part] = 1
        self.missing -= 1
        return None
