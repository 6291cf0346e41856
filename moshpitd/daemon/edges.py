"""The data plane of exchanges with neighbours. One rule: which edges count is the core's business;
here a message is encoded once, pushed to whom the core named, and taken from whom it named.

Our message is encoded part by part, by whoever needs a part first: a writer thread that is about to
send it, or the pool, which goes through all of them. What it decodes to is put beside it in the
bucket, because algorithms have to use the bits that their neighbours use. What arrives is decoded
straight into the neighbour's slot: it belongs to the trainer only when the core says that it
counts, so nothing is undone when it does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial

from moshpitd.core.effects import Close, ClosePair, Effect, OpenEdges, OpenPair, PushPair
from moshpitd.core.events import EdgeArrived, EdgeRefused, EdgesCoded, Event
from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.ongoing import Ongoing, run_hash
from moshpitd.daemon.pacing import ROUND_PRIORITY, Frame, Skipped
from moshpitd.daemon.pairing import PairPlane
from moshpitd.daemon.plane import Plane
from moshpitd.daemon.shared import seed_of
from moshpitd.errors import ConfigError, MoshpitError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.blocks import DECODED
from moshpitd.tensors.codecs import RAW, Codec, codec_for
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Tensor, bytes_of, fresh, tensor_of, untyped
from moshpitd.tensors.reduction import examine

log = logging.getLogger(__name__)

FULL = 1
"""In a frame's flags: a part of what the messages before add up to, and not of the message."""


class EdgePlane:
    """Invariant: an id is in `open` from its OpenEdges to its Close. Called on the daemon's loop,
    `end` excepted."""

    def __init__(self, plane: Plane, peer_id: str) -> None:
        self._plane, self._peer_id = plane, peer_id
        self._open: dict[bytes, Edges] = {}
        self.pairs = PairPlane(plane, peer_id)

    def handle(self, run: Ongoing, effect: Effect) -> bool:
        """Carry out what is ours; False for what is not."""
        match effect:
            case OpenEdges():
                self._begin(run, effect)
            case Close():
                return self._close(effect.group_id)
            case OpenPair() | PushPair() | ClosePair():
                self.pairs.handle(run, effect)
            case _:
                return False
        return True

    def _begin(self, run: Ongoing, effect: OpenEdges) -> None:
        plane, group = self._plane, effect.group
        bucket = run.buckets.get(effect.trainer)
        blocks = None if bucket is None else bucket.blocks
        if bucket is None or blocks is None or len(effect.sources) > blocks.slots:
            words = f"{len(effect.sources)} neighbours and no room for as many messages"
            plane.post(run.name, EdgesCoded(group.group_id, Reason.TRAINER_GONE, words))
            return
        try:
            edges = Edges(effect, run.layout, bucket, run.name, plane)
        except ConfigError as error:  # the group, made elsewhere, names a codec we do not have
            log.error("run %s: an exchange cannot be opened: %s", run.name, error)
            plane.post(run.name, EdgesCoded(group.group_id, Reason.CODEC, str(error)))
            return
        self._open[group.group_id] = edges
        members = group.members
        others = [*dict.fromkeys((*effect.sources, *effect.targets))]
        plane.pulse.watch(run.name, group.group_id, [members[i].peer_id for i in others])
        for index in others:
            member, own = members[index], members[effect.index]
            # The smaller PeerID dials, unless the other one cannot be dialled.
            ours = self._peer_id < member.peer_id
            dials = bool(member.addresses) if ours else not own.addresses
            plane.link(run, member.peer_id, member.addresses, dials=dials)
        plane.intake.admit(group.group_id, edges)
        for index in effect.targets:
            frames = edges.frames(in_full=index in effect.in_full)
            plane.pacer.put(members[index].peer_id, group.group_id, frames, priority=ROUND_PRIORITY)
        plane.submit(edges.encode_all)

    def _close(self, group_id: bytes) -> bool:
        """Whether it was one of ours. Nothing is written to the bucket afterwards."""
        edges = self._open.pop(group_id, None)
        if edges is None:
            return False
        edges.close()
        self._plane.pulse.leave(group_id)
        self._plane.intake.shut(group_id, counters=edges.moved)
        self._plane.pacer.discard(group_id)
        return True

    def end(self, run: str) -> None:
        """The run is over."""
        for group_id in [one for one, edges in self._open.items() if edges.run == run]:
            self._close(group_id)
        self.pairs.end(run)


class Edges:
    """One exchange at one member: a target of the intake. Invariant: nothing is posted, sent or
    written once `close` has returned."""

    kinds = frozenset({FrameKind.NEIGHBOUR})

    def __init__(
        self, effect: OpenEdges, layout: Layout, bucket: Bucket, run: str, plane: Plane
    ) -> None:
        blocks = bucket.blocks
        assert blocks is not None  # looked at by who opens
        self.run, self.run_hash = run, run_hash(run)
        self._group, self._index = effect.group, effect.index
        self._layout, self._bucket, self._blocks = layout, bucket, blocks
        self._generation = bucket.expected
        self._plane = plane
        self._codecs = {
            region.dtype: codec_for(effect.group.codec, region.dtype) for region in layout.regions
        }
        members = effect.group.members
        self._sources = {
            members[index].peer_id: (index, slot) for slot, index in enumerate(effect.sources)
        }
        self._coding = threading.Lock()  # guards the next
        self._payloads: list[Tensor | None] = [None] * len(layout.parts)
        self._changed = threading.Condition()  # guards all below
        self._left: dict[tuple[int, bool], set[int]] = {}
        self._claimed: dict[tuple[int, bool], set[int]] = {}
        self._working = 0
        self._closed = False
        self._failed = False
        self._sent = self._received = 0
        for index in effect.sources:
            for full in (False, True):
                self._left[index, full] = set(range(len(layout.parts)))
                self._claimed[index, full] = set()

    @property
    def moved(self) -> tuple[int, int]:
        """(bytes sent, bytes received) of payloads."""
        return self._sent, self._received

    # -- sending

    def encode_all(self) -> None:
        """In the pool: what no writer thread has needed yet, and then the news."""
        try:
            for part in self._layout.parts:
                if self._closed:
                    return
                self._payload(part)
        except MoshpitError as error:
            self._fail(error)
            return
        self._post(EdgesCoded(self._group.group_id))

    def frames(self, *, in_full: bool) -> Iterator[Frame]:
        """To one neighbour, made one by one as the link gets to them."""
        for part in self._layout.parts:
            codec = self._codecs[part.dtype]
            yield self._header(part, codec, flags=0), partial(self._message, part)
        for part in self._layout.parts if in_full and self._blocks.full else ():
            yield self._header(part, RAW, flags=FULL), partial(self._own_full, part)

    def _header(self, part: Part, codec: Codec, *, flags: int) -> Header:
        return Header(
            FrameKind.NEIGHBOUR, self.run_hash, self._group.group_id, part.index,
            codec=codec.code, flags=flags,
        )  # fmt: skip

    def _message(self, part: Part, _: memoryview) -> memoryview:
        if self._closed or self._failed:
            raise Skipped
        try:
            payload = self._payload(part)
        except MoshpitError as error:
            self._fail(error)
            raise Skipped from error
        self._count(sent=payload.numel())
        return bytes_of(payload)

    def _own_full(self, part: Part, _: memoryview) -> memoryview:
        values = untyped(self._view(self._blocks.own_full, part))
        if self._closed or not self._bucket.intact(self._generation):
            raise Skipped
        self._count(sent=values.numel())
        return bytes_of(values)

    def _payload(self, part: Part) -> Tensor:
        """The part encoded; what it decodes to is in the bucket then."""
        with self._coding:
            if self._closed:  # while we waited for the lock: the bucket is the trainer's again
                raise Skipped
            known = self._payloads[part.index]
            if known is not None:
                return known
            values, decoded = self._view(0, part), self._view(DECODED, part)
            codec, began = self._codecs[part.dtype], time.perf_counter()
            if codec is RAW:
                decoded.copy_(values)
                payload = untyped(decoded)
            else:
                room = fresh(codec.payload_bytes(part.numel, part.dtype))
                seed = seed_of(self._group.group_id, part.index, self._index, result=False)
                payload = room[: codec.encode(values, room, seed=seed)]
                codec.decode(payload, decoded)
            if not self._bucket.intact(self._generation):
                raise MoshpitError("the trainer changed its bucket during the call")
            self._plane.timed(codec.name, "encode", time.perf_counter() - began)
            self._payloads[part.index] = payload
            return payload

    def _fail(self, error: MoshpitError) -> None:
        with self._changed:
            if self._failed or self._closed:
                return
            self._failed = True
        intact = self._bucket.intact(self._generation)
        reason = Reason.CODEC if intact else Reason.BUCKET_MODIFIED
        self._post(EdgesCoded(self._group.group_id, reason, str(error)))

    # -- receiving

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """A frame of this group, in a link's reader thread. Never raises for what is in it."""
        source = self._sources.get(peer_id)
        full = bool(header.flags & FULL)
        if source is None or (full and not self._blocks.full):
            self._plane.drop("not_a_neighbour")
            return
        index, slot = source
        if not 0 <= header.part < len(self._layout.parts):
            self._plane.drop("no_such_part")
            return
        with self._changed:
            claimed = self._claimed[index, full]
            if self._closed or header.part in claimed:
                self._plane.drop("part_closed")
                return
            claimed.add(header.part)
            self._working += 1
        try:
            part = self._layout.parts[header.part]
            refusal = self._use(part, header, payload, slot=slot, full=full)
            self._tell(index, part, full=full, refusal=refusal)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _use(
        self, part: Part, header: Header, payload: memoryview, *, slot: int, full: bool
    ) -> Reason | None:
        codec = RAW if full else self._codecs[part.dtype]
        if len(payload) != codec.payload_bytes(part.numel, part.dtype):
            return Reason.PART_SIZE
        if header.codec != codec.code:
            return Reason.CODEC
        out = self._view(self._blocks.slot(slot, full=full), part)
        began = time.perf_counter()
        try:
            codec.decode(tensor_of(payload), out)
        except Exception:  # whatever a payload does to a codec, it is the sender's
            return Reason.CODEC
        self._plane.timed(codec.name, "decode", time.perf_counter() - began)
        return Reason.NOT_FINITE if examine(out)[0] is not None else None

    def _tell(self, index: int, part: Part, *, full: bool, refusal: Reason | None) -> None:
        group_id = self._group.group_id
        if refusal is not None:
            self._post(EdgeRefused(group_id, index, refusal))
            return
        self._count(received=part.nbytes)
        with self._changed:
            left = self._left[index, full]
            left.discard(part.index)
            # Under the lock: the last one to be told is the last one.
            if not self._closed:
                event = EdgeArrived(group_id, index, len(left), full)
                self._plane.post(self.run, event)

    # -- both

    def close(self) -> None:
        """Waits for the few parts being worked on, about a millisecond each."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._working == 0)
        with self._coding:
            pass  # whoever held it is through; later ones see it closed

    def _view(self, block: int, part: Part) -> Tensor:
        return self._layout.part_view(self._blocks.of(self._bucket.area, block), part)

    def _post(self, event: Event) -> None:
        if not self._closed:
            self._plane.post(self.run, event)

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        with self._changed:
            self._sent += sent
            self._received += received
