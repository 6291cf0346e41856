"""Snapshots of one run: the donor copy and its transfers. One rule: what is served is whole.

The donor copy is a second set of parameters in the daemon's own memory, so that it can be served
while trainers use theirs. It holds the last finished result, or nothing when it could not be copied
whole. A newcomer stages what it receives in memory of the same size, which becomes its donor copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from moshpitd.core.events import (
    Digested,
    Event,
    SnapshotArrived,
    SnapshotFailed,
    SnapshotProgressed,
    SnapshotRefreshed,
    SnapshotSent,
)
from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.daemon.staging import STATE_CHUNK_BYTES, Incoming
from moshpitd.errors import TrainerError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW
from moshpitd.tensors.hashing import digest
from moshpitd.tensors.kernels import copy_past
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import Tensor, anonymous, bytes_of

MAX_STATE_BYTES = 64 << 20  # Params.max_state_bytes; checked here too, because memory is taken here
MAX_OUTGOING = 64  # Params.snapshot_slots' own bound
MAX_INCOMING = 2  # the core fetches one at a time; the second while the first is being dropped
# Longer than Params.snapshot_timeout_s: a newcomer that took nothing for so long has given up.
STALLED_S = 60.0


class Outgoing:
    """A transfer to a newcomer. Invariant: `copy` is not written to while this is registered."""

    __slots__ = ("cancelled", "copy", "moved_at", "nonce", "state", "to")

    def __init__(self, nonce: bytes, to: str, *, copy: Tensor, state: bytes) -> None:
        self.nonce = nonce
        self.to = to
        self.copy = copy
        self.state = state
        self.cancelled = False
        self.moved_at = time.monotonic()


class Snapshots:
    """Invariant: `_version` is set only while the donor copy holds exactly that version, whole."""

    def __init__(
        self,
        layout: Layout,
        *,
        run_hash: bytes,
        post: Callable[[Event], None],
        submit: Callable[[Callable[[], None]], None],
        drop_frame: Callable[[str], None],
    ) -> None:
        self.layout = layout
        self.post = post
        self.submit = submit
        self._drop_frame = drop_frame
        self.run_hash = run_hash
        self._lock = threading.Lock()  # the fields below; held for moments
        self._copying = threading.Lock()  # one writer of the donor copy at a time; held for a copy
        self._copy: Tensor | None = None
        self._version: int | None = None
        self._digest = b""
        self._state = b""
        self._outgoing: dict[bytes, Outgoing] = {}
        self._incoming: dict[bytes, Incoming] = {}

    # -- the donor copy ---------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Of the donor copy; None when there is none."""
        return self._version

    @property
    def state(self) -> bytes:
        """The trainer state: the last one put here, or received with a snapshot."""
        return self._state

    def set_state(self, state: bytes) -> None:
        if len(state) > MAX_STATE_BYTES:
            raise TrainerError(
                f"trainer state of {len(state)} bytes, expected at most {MAX_STATE_BYTES}",
                code="RESOURCE_EXHAUSTED",
                reason="state_too_large",
            )
        with self._lock:
            self._state = bytes(state)

    def initial(self, bucket: Bucket, version: int) -> bytes:
        """Take the tensors a trainer came with as the donor copy; returns their digest. Blocks.

        While a transfer of the present copy runs that copy stays, and only the digest is computed.
        """
        with self._copying:
            copied = self._copy_bucket(bucket, version, generation=bucket.generation)
            value = digest(self._copy if copied and self._copy is not None else bucket.data)
            with self._lock:
                if copied and self._version == version:
                    self._digest = value
            return value

    def refresh(self, bucket: Bucket, version: int) -> None:
        """Copy a bucket that holds the result of `version`; says so if nothing interfered."""
        generation, writes = bucket.generation, bucket.writes
        over = bucket.begin_copy()

        def copy() -> None:
            try:
                with self._copying:
                    done = self._copy_bucket(bucket, version, generation=generation, writes=writes)
            finally:
                over()  # a trainer in place waits for it, and trains on in that block
            if done:
                self.post(SnapshotRefreshed(version))

        self.submit(copy)

    def _copy_bucket(
        self, bucket: Bucket, version: int, *, generation: int, writes: int | None = None
    ) -> bool:
        """Under `_copying`. False: not copied, or what was copied is worth nothing."""
        writes = bucket.writes if writes is None else writes
        self._end_stalled()
        with self._lock:
            if self._outgoing:
                return False  # somebody is loading the older version; it stays whole
            self._version, self._digest = None, b""
            if self._copy is None:
                try:
                    self._copy = anonymous(self.layout.nbytes)
                except TrainerError:
                    return False  # no room for a donor copy: then others have to be donors
            target = self._copy
        for part in self.layout.parts:
            stop = part.offset_bytes + part.nbytes
            values = bucket.holding(part.index)[part.offset_bytes : stop]
            copy_past(values, target[part.offset_bytes : stop])
            if not bucket.intact(generation) or bucket.writes != writes:
                return False
        with self._lock:
            if self._copy is not target:
                return False  # a snapshot was loaded meanwhile, and that is the newer copy
            self._version = version
        return True

    def tell_digest(self, version: int) -> None:
        """Answer with the digest of the donor copy if it is of that version, else with nothing."""

        def compute() -> None:
            with self._copying:
                with self._lock:
                    copy = self._copy if self._version == version else None
                    known = self._digest if copy is not None else b""
                if copy is not None and not known:
                    known = digest(copy)
                    with self._lock:
                        if self._copy is copy and self._version == version:
                            self._digest = known
            self.post(Digested(version, known))

        self.submit(compute)

    # -- serving ----------------------------------------------------------------------------------

    def serve(self, nonce: bytes, to: str) -> Iterator[Frame] | None:
        """The frames of a transfer of the donor copy as it is; None (and an event) without one."""
        with self._lock:
            reason = None
            if self._copy is None or self._version is None:
                reason = Reason.NO_SNAPSHOT
            elif len(self._outgoing) >= MAX_OUTGOING or nonce in self._outgoing:
                reason = Reason.BUSY
            else:
                outgoing = Outgoing(nonce, to, copy=self._copy, state=self._state)
                self._outgoing[nonce] = outgoing
        if reason is not None:
            self.post(SnapshotFailed(nonce, reason))
            return None
        return self._frames(outgoing)

    def _frames(self, outgoing: Outgoing) -> Iterator[Frame]:
        def header(index: int) -> Header:
            return Header(
                FrameKind.SNAPSHOT,
                self.run_hash,
                outgoing.nonce,
                index,
                codec=RAW.code,
                contributors=len(outgoing.state),
            )

        for part in self.layout.parts:
            stop = part.offset_bytes + part.nbytes
            values = outgoing.copy[part.offset_bytes : stop]
            yield header(part.index), partial(self._payload, outgoing, bytes_of(values))
        state = memoryview(outgoing.state)
        for number, start in enumerate(range(0, len(state), STATE_CHUNK_BYTES)):
            chunk = state[start : start + STATE_CHUNK_BYTES]
            index = len(self.layout.parts) + number
            yield header(index), partial(self._payload, outgoing, chunk)
        # Asked for when the frame before it was handed to the kernel; sends nothing itself.
        yield header(len(self.layout.parts)), partial(self._sent, outgoing)

    def _payload(self, outgoing: Outgoing, values: memoryview, _: memoryview) -> memoryview:
        if outgoing.cancelled:
            raise Skipped
        outgoing.moved_at = time.monotonic()
        return values

    def _sent(self, outgoing: Outgoing, _: memoryview) -> memoryview:
        with self._lock:
            known = self._outgoing.pop(outgoing.nonce, None) is not None
        if known:
            self.post(SnapshotSent(outgoing.nonce))
        raise Skipped

    def _end_stalled(self) -> None:
        now = time.monotonic()
        with self._lock:
            stalled = [o.nonce for o in self._outgoing.values() if now - o.moved_at > STALLED_S]
        for nonce in stalled:
            self.fail(nonce, Reason.SILENT)

    # -- fetching ---------------------------------------------------------------------------------

    def fetch(self, nonce: bytes, donor: str, *, parts: int, state_bytes: int) -> Incoming | None:
        """Expect a transfer; None (and an event) if it cannot be what this run needs."""
        reason = None
        if parts != len(self.layout.parts) or not 0 <= state_bytes <= MAX_STATE_BYTES:
            reason = Reason.PART_SIZE
        with self._lock:
            if reason is None and (len(self._incoming) >= MAX_INCOMING or nonce in self._incoming):
                reason = Reason.BUSY
            if reason is None:
                incoming = Incoming(
                    self.layout,
                    nonce,
                    donor,
                    run_hash=self.run_hash,
                    state_bytes=state_bytes,
                    news=self,
                )
                self._incoming[nonce] = incoming
        if reason is not None:
            self.post(SnapshotFailed(nonce, reason))
            return None
        if incoming.complete:  # nothing but the schema: legal, if odd
            self.staged(incoming)
        return incoming

    def staged(self, incoming: Incoming) -> None:
        """Everything is there. A digest takes about a second per GB, so it is made elsewhere."""
        self.submit(partial(self._tell_arrival, incoming))

    def progressed(self, incoming: Incoming) -> None:
        self.post(SnapshotProgressed(incoming.nonce))

    def broken(self, incoming: Incoming, reason: Reason) -> None:
        self.fail(incoming.nonce, reason)

    def stray(self, reason: str) -> None:
        self._drop_frame(reason)

    def _tell_arrival(self, incoming: Incoming) -> None:
        if incoming.staging is None:
            incoming.staging = anonymous(0)
        incoming.digest = digest(incoming.staging)
        with self._lock:
            known = self._incoming.get(incoming.nonce) is incoming
        if known:
            self.post(SnapshotArrived(incoming.nonce, incoming.digest))

    def load(self, nonce: bytes, version: int, buckets: list[Bucket]) -> None:
        """Put the staged state into the buckets; the staging memory becomes the donor copy. Blocks.

        A transfer of the former copy that still runs keeps that memory until it is through. An
        empty nonce loads our own donor copy (a trainer that attached with something older).
        """
        if not nonce:
            self._load_copy(version, buckets)
            return
        with self._lock:
            incoming = self._incoming.pop(nonce, None)
        if incoming is None or not incoming.digest or incoming.staging is None:
            self.post(SnapshotFailed(nonce, Reason.NO_SNAPSHOT))
            return
        for bucket in buckets:
            bucket.load(incoming.staging, len(self.layout.parts))
        with self._lock:
            self._copy, self._version = incoming.staging, version
            self._digest = incoming.digest
            self._state = bytes(incoming.state)

    def _load_copy(self, version: int, buckets: list[Bucket]) -> None:
        with self._copying:  # a copy in progress is of a newer result: wait for it
            with self._lock:
                copy = (
                    self._copy if self._version is not None and self._version >= version else None
                )
            if copy is None:
                self.post(SnapshotFailed(b"", Reason.NO_SNAPSHOT))
                return
            for bucket in buckets:
                bucket.load(copy, len(self.layout.parts))

    # -- ends -------------------------------------------------------------------------------------

    def drop(self, nonce: bytes) -> bool:
        """Forget a transfer in either direction; True if there was one."""
        with self._lock:
            outgoing = self._outgoing.pop(nonce, None)
            incoming = self._incoming.pop(nonce, None)
        if outgoing is not None:
            outgoing.cancelled = True
        if incoming is not None:
            incoming.close()
        return outgoing is not None or incoming is not None

    def fail(self, nonce: bytes, reason: Reason) -> None:
        if self.drop(nonce):
            self.post(SnapshotFailed(nonce, reason))

    def transfers_with(self, peer_id: str) -> list[bytes]:
        """The nonces of what runs to or from a peer. A staged transfer needs its donor no more."""
        with self._lock:
            out = [o.nonce for o in self._outgoing.values() if o.to == peer_id]
            into = [
                i.nonce for i in self._incoming.values() if i.donor == peer_id and not i.complete
            ]
        return out + into

    def nonces(self) -> list[bytes]:
        with self._lock:
            return [*self._outgoing, *self._incoming]
