"""One round's tensors at one member: contributions in, averages out. One rule: a part is in or not.

A contribution is decoded and checked before it touches the accumulator, a result before it touches
a bucket; both happen under the part's lock, in one call that cannot fail halfway. Which part is
closed when, and who is waited for, is the core's business and not decided here.

Everything here runs in link threads and in the exchange's pool, and touches the trainers' buckets
only through `local.LocalValues`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial

from moshpitd.core.effects import Open
from moshpitd.core.events import (
    Averaged,
    Event,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.local import LocalValues
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW, Codec, codec_for
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Scratch, Tensor, bytes_of, fresh, tensor_of, typed
from moshpitd.tensors.reduction import PartAccumulator, first_nonfinite

# Two parts share a lock only by chance; a lock per part would be 100,000 of them in a large model.
LOCKS = 64


class Round:
    """The data of one open group.

    Invariant: after `close` returned, no thread writes to a bucket on behalf of this round, so the
    trainers may have them back.
    """

    kinds = frozenset({FrameKind.CONTRIBUTION, FrameKind.RESULT})

    def __init__(
        self,
        opened: Open,
        layout: Layout,
        *,
        run_hash: bytes,
        buckets: dict[str, Bucket],
        scratch: Scratch,
        post: Callable[[Event], None],
        drop: Callable[[str], None],
        timed: Callable[[str, str, float], None],
    ) -> None:
        if len(opened.reducers) != len(layout.parts):
            raise LocalProtocolError(
                f"a round of {len(opened.reducers)} parts, expected {len(layout.parts)}"
            )
        self.group = opened.group
        self.group_id = opened.group.group_id
        self.index = opened.index
        self.bytes_sent = 0
        self.bytes_received = 0
        self._layout = layout
        self.run_hash = run_hash
        self._reducers = opened.reducers
        self._weight = opened.weight
        self._post_event = post
        self._drop = drop
        self._timed = timed
        self._indices = {member.peer_id: i for i, member in enumerate(self.group.members)}
        self._codecs = {r.dtype: codec_for(self.group.codec, r.dtype) for r in layout.regions}
        self._local = LocalValues(
            layout, trainers=opened.trainers, late=opened.late, buckets=buckets, scratch=scratch
        )
        self._scratch = scratch
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._counts = threading.Lock()
        self._closed = False
        # The following are keyed by part, touched under the part's lock, and filled as parts come.
        self._accumulators: dict[int, PartAccumulator] = {}
        self._seen: dict[int, int] = {}  # bit i: member i's contribution (or result) was looked at
        self._inside: dict[int, int] = {}  # bit i: member i is in the accumulator
        self._payloads: dict[int, tuple[Tensor, int]] = {}  # our results, and who is in them
        self._averaged = bytearray(len(layout.parts))
        self._applied = bytearray(len(layout.parts))

    def uses(self, bucket: Bucket) -> bool:
        return self._local.uses(bucket)

    # -- sending ----------------------------------------------------------------------------------

    def outgoing(self, parts: tuple[int, ...], *, result: bool) -> Iterator[Frame]:
        """The frames of a push, made one by one as the link gets to them.

        Parts go in ascending order to every member: then all senders reach a reducer's first part
        first, it is averaged while the others still travel, and few accumulators are open at once.
        """
        for index in parts:
            if not 0 <= index < len(self._layout.parts) or self._closed:
                continue
            part = self._layout.parts[index]
            code = self._codecs[part.dtype].code
            if not result:
                header = self._header(FrameKind.CONTRIBUTION, part, code)
                yield header, partial(self._contribution_payload, part)
            elif (stored := self._payloads.get(index)) is not None:
                header = self._header(FrameKind.RESULT, part, code, contributors=stored[1])
                yield header, partial(self._result_payload, stored[0])

    def _header(self, kind: FrameKind, part: Part, codec: int, *, contributors: int = 0) -> Header:
        return Header(
            kind, self.run_hash, self.group_id, part.index, codec=codec, contributors=contributors
        )

    def _contribution_payload(self, part: Part, room: memoryview) -> memoryview:
        """Encode our values of a part into the link's memory, or say why nothing is sent."""
        codec = self._codecs[part.dtype]
        with self._lock(part.index):
            if self._closed or self._applied[part.index]:
                raise Skipped  # closed without us; what is in the bucket now is the result
            failure = self._local.unusable()
            size = 0
            if failure is None:
                try:
                    values = self._local.contribution(part)
                    began = time.perf_counter()
                    size = codec.encode(values, tensor_of(room))
                    self._timed(codec.name, "encode", time.perf_counter() - began)
                    failure = self._local.unusable()
                except Exception as error:  # any failure of a codec costs this part, not the link
                    failure = _encode_failure(codec, error)
        if failure is not None:
            self._post(PartFailed(self.group_id, part.index, *failure))
            raise Skipped
        self._count(sent=size)
        return room[:size]

    def _result_payload(self, payload: Tensor, _: memoryview) -> memoryview:
        if self._closed:
            raise Skipped
        self._count(sent=payload.numel())
        return bytes_of(payload)

    # -- receiving --------------------------------------------------------------------------------

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """A frame of this group, in a link's reader thread. Never raises for what is in it."""
        sender = self._indices.get(peer_id)
        if sender is None:
            self._drop("not_a_member")
            return
        result = header.kind is FrameKind.RESULT
        if not 0 <= header.part < len(self._layout.parts) or header.epoch != 0:
            self._drop("no_such_part")
            return
        if (
            self._reducers[header.part] != (sender if result else self.index)
            or sender == self.index
        ):
            self._drop("wrong_reducer")
            return
        self._count(received=len(payload))
        part = self._layout.parts[header.part]
        with self._lock(part.index):
            done = self._applied if result else self._averaged
            if self._closed or done[part.index]:
                self._drop("part_closed")
                return
            if self._seen.get(part.index, 0) >> sender & 1:
                self._drop("repeated")
                return
            self._seen[part.index] = self._seen.get(part.index, 0) | 1 << sender
        refusal = self._refusal(sender, header, part, payload)
        if refusal is None:
            values, refusal = self._decoded(part, payload)
        if refusal is not None:
            reason, detail = refusal
            self._post(PartRefused(self.group_id, part.index, sender, reason, detail, result))
        elif result:
            self._put_result(sender, header, part, values)
        else:
            self._add(sender, part, values)

    def _refusal(
        self, sender: int, header: Header, part: Part, payload: memoryview
    ) -> tuple[Reason, str] | None:
        """What can be wrong with a frame before its payload is looked at."""
        codec = self._codecs[part.dtype]
        size = codec.payload_bytes(part.numel, part.dtype)
        if len(payload) != size:
            return Reason.PART_SIZE, f"{len(payload)} bytes, expected {size}"
        if header.codec != codec.code:
            return Reason.CODEC, f"codec {header.codec}, expected {codec.code} ({codec.name})"
        if header.kind is FrameKind.RESULT:
            # A member of weight 0 contributes nothing, so a result cannot have it inside.
            able = sum(1 << i for i, m in enumerate(self.group.members) if m.weight > 0)
            if header.contributors == 0 or header.contributors & ~able:
                return Reason.REFUSED, f"impossible contributors {header.contributors:#x}"
        elif not self.group.members[sender].weight > 0:
            return Reason.WEIGHT, "a member of weight 0 sent a contribution"
        return None

    def _decoded(self, part: Part, payload: memoryview) -> tuple[Tensor, tuple[Reason, str] | None]:
        """The payload as finite values, in this thread's scratch or where it lies."""
        codec = self._codecs[part.dtype]
        raw = tensor_of(payload)
        values = raw
        try:
            if codec is RAW and part.dtype != "bool":
                values = typed(raw, part.dtype)  # raw bytes are values already; bools are checked
            else:
                values = self._scratch.take("decoded", numel=part.numel, dtype=part.dtype)
                began = time.perf_counter()
                codec.decode(raw, values)
                self._timed(codec.name, "decode", time.perf_counter() - began)
        except Exception as error:  # whatever a payload does to a codec, it is the sender's
            return raw, (Reason.CODEC, f"{codec.name}: {error}")
        bad = first_nonfinite(values)
        if bad is not None:
            return raw, (Reason.NOT_FINITE, f"tensor {self._layout.tensor_at(part, bad)!r}")
        return values, None

    def _add(self, sender: int, part: Part, values: Tensor) -> None:
        with self._lock(part.index):
            if self._closed or self._averaged[part.index]:
                self._drop("part_closed")
                return
            self._accumulator(part).add(values, self.group.members[sender].weight)
            self._inside[part.index] = self._inside.get(part.index, 0) | 1 << sender
        self._post(PartArrived(self.group_id, part.index, sender))

    def _put_result(self, sender: int, header: Header, part: Part, values: Tensor) -> None:
        with self._lock(part.index):
            if self._closed:
                return
            self._put_in_place(part, values)
        contributors = _members(header.contributors)
        self._post(ResultArrived(self.group_id, part.index, sender, contributors, header.crc))

    # -- averaging --------------------------------------------------------------------------------

    def average(self, index: int) -> None:
        """Close a part that we reduce: later contributions are dropped, the result put in place."""
        part = self._layout.parts[index]
        with self._lock(index):
            if self._closed or self._averaged[index]:
                return
            self._averaged[index] = 1
            event = self._average(part)
        self._post(event)

    def _average(self, part: Part) -> Event:
        self._add_own(part)
        accumulator = self._accumulators.pop(part.index, None)
        inside = self._inside.pop(part.index, 0)
        if accumulator is None:
            return self._no_result(part, Reason.NO_CONTRIBUTORS, "")
        codec = self._codecs[part.dtype]
        payload = fresh(codec.payload_bytes(part.numel, part.dtype))
        values = self._scratch.take("mean", numel=part.numel, dtype=part.dtype)
        accumulator.mean(values)
        try:
            began = time.perf_counter()
            codec.encode(values, payload)
            self._timed(codec.name, "encode", time.perf_counter() - began)
            if codec is not RAW:
                # All members must hold the same bits, so we take what the others will decode.
                codec.decode(payload, values)
        except Exception as error:  # the part keeps its local values in all members
            return self._no_result(part, *_encode_failure(codec, error))
        bad = first_nonfinite(values)
        if bad is not None:
            # Finite contributions can still overflow a narrow type.
            name = self._layout.tensor_at(part, bad)
            return self._no_result(part, Reason.NOT_FINITE, f"the average of tensor {name!r}")
        self._put_in_place(part, values)
        self._payloads[part.index] = (payload, inside)
        crc = zlib.crc32(bytes_of(payload))
        return Averaged(self.group_id, part.index, _members(inside), crc)

    def _add_own(self, part: Part) -> None:
        if not self._weight > 0:
            return
        failure = self._local.unusable()
        if failure is None:
            # A copy, because a bucket that turns out to be modified after the addition would have
            # spoilt the part for everybody. It stays in the cache.
            own = self._scratch.take("own", numel=part.numel, dtype=part.dtype)
            own.copy_(self._local.contribution(part))
            failure = self._local.unusable()
        if failure is not None:
            self._post(PartFailed(self.group_id, part.index, *failure))
            return
        self._accumulator(part).add(own, self._weight)
        self._inside[part.index] = self._inside.get(part.index, 0) | 1 << self.index

    def _no_result(self, part: Part, reason: Reason, detail: str) -> PartFailed:
        return PartFailed(self.group_id, part.index, reason, detail, result=True)

    def _accumulator(self, part: Part) -> PartAccumulator:
        held = self._accumulators.get(part.index)
        if held is None:
            held = PartAccumulator(part.numel, part.dtype, part.rule)
            self._accumulators[part.index] = held
        return held

    def _put_in_place(self, part: Part, values: Tensor) -> None:
        """Lock held."""
        self._local.apply(part, values)
        self._applied[part.index] = 1

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the round; waits for the few parts being worked on, about a millisecond each."""
        self._closed = True
        for lock in self._locks:
            with lock:
                pass  # whoever held it saw the round open and is through; later ones see it closed
        self._local.finish(self._applied)
        self._accumulators.clear()
        self._payloads.clear()

    def _lock(self, part: int) -> threading.Lock:
        return self._locks[part % LOCKS]

    def _post(self, event: Event) -> None:
        if not self._closed:
            self._post_event(event)

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        with self._counts:
            self.bytes_sent += sent
            self.bytes_received += received


def _encode_failure(codec: Codec, error: Exception) -> tuple[Reason, str]:
    finite = not (isinstance(error, TrainerError) and error.reason == Reason.NOT_FINITE.value)
    return Reason.CODEC if finite else Reason.NOT_FINITE, f"{codec.name}: {error}"


def _members(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
