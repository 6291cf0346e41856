"""One round's tensors at one member: contributions in, averages out. One rule: a part is in or not.

A contribution is decoded and checked before it touches the accumulator, a result before it touches
a bucket; both happen under the part's lock, in one call that cannot fail halfway. Which part is
closed when, and who is waited for, is the core's business and not decided here.

Everything here runs in link threads and in the exchange's pool, and touches the trainers' buckets
only through `local.LocalValues`. What a frame may do at all is asked of `ledger.Ledger`, once
before it is decoded and again, under the same lock, when it is used.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator

from moshpitd.core.effects import Await, Bar, HandOver, Open, OpenAudit, Push, PushAudit
from moshpitd.core.events import Barred, Event, PartRefused, ResultArrived
from moshpitd.core.messages import Held
from moshpitd.core.outcome import Reason
from moshpitd.daemon.auditing import Auditor
from moshpitd.daemon.averaging import Reducer
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import Choices
from moshpitd.daemon.early import EarlyFrames
from moshpitd.daemon.early import Held as HeldFrame
from moshpitd.daemon.ledger import AHEAD
from moshpitd.daemon.pacing import Frame
from moshpitd.daemon.sending import LABEL, Sender
from moshpitd.daemon.shared import Shared, members_in
from moshpitd.net.checksum import crc32
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW, Codec
from moshpitd.tensors.codecs.compiled import Coded
from moshpitd.tensors.deviation import Owed
from moshpitd.tensors.feedback import Residuals
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Rooms, Scratch, Tensor, tensor_of, typed
from moshpitd.tensors.reduction import examine, is_small

log = logging.getLogger(__name__)


class Round:
    """The data of one open group.

    Invariant: after `linger` or `close` returned, no thread writes to a bucket on behalf of this
    round, so the trainers may have them back, and the next round of a sweep may have them.
    """

    kinds = frozenset(
        {FrameKind.CONTRIBUTION, FrameKind.RESULT, FrameKind.HANDOVER, FrameKind.AUDIT}
    )

    def __init__(
        self,
        opened: Open,
        layout: Layout,
        *,
        run_hash: bytes,
        buckets: dict[str, Bucket],
        scratch: Scratch,
        rooms: Rooms,
        post: Callable[[Event], None],
        drop: Callable[[str], None],
        timed: Callable[[str, str, float], None],
        owed: Owed,
        residuals: Residuals | None = None,
        choices: Choices | None = None,
    ) -> None:
        self.group = opened.group
        self.group_id = opened.group.group_id
        self.run_hash = run_hash
        self._shared = shared = Shared(
            opened,
            layout,
            run_hash=run_hash,
            buckets=buckets,
            scratch=scratch,
            rooms=rooms,
            post=post,
            drop=drop,
            timed=timed,
            residuals=residuals,
            choices=choices,
        )
        self._auditor = Auditor(shared, owed, self._decoded)
        self._reducer = Reducer(shared, self._auditor)
        self._sender = Sender(shared, self._reducer.result, self._auditor)
        self._indices = {member.peer_id: i for i, member in enumerate(self.group.members)}
        self._ahead = EarlyFrames()
        self._ahead_lock = threading.Lock()  # taken under a part's lock, never the other way round

    def uses(self, bucket: Bucket) -> bool:
        return self._shared.local.uses(bucket)

    @property
    def moved(self) -> tuple[int, int]:
        """(bytes sent, bytes received) of payloads."""
        return self._shared.bytes_sent, self._shared.bytes_received

    # -- what the core asks for -------------------------------------------------------------------

    def frames(
        self, effect: Push | HandOver | PushAudit, *, takes: float | None = None
    ) -> Iterator[Frame]:
        """What an effect sends; `takes` is what is known of the link: see `Sender.push`."""
        match effect:
            case Push():
                return self._sender.push(
                    effect.parts,
                    result=effect.result,
                    epoch=effect.epoch,
                    to=self.group.members[effect.to].peer_id,
                    takes=takes,
                )
            case HandOver():
                return self.hand_over(effect.parts, epoch=effect.epoch)
            case PushAudit():
                return self._auditor.frames(effect.parts)

    def outgoing(self, parts: Iterable[int], *, result: bool, epoch: int = 0) -> Iterator[Frame]:
        return self._sender.push(parts, result=result, epoch=epoch)

    def hand_over(self, parts: Iterable[int], *, epoch: int) -> Iterator[Frame]:
        return self._sender.hand_over(parts, epoch=epoch)

    def average(self, index: int, epoch: int = 0) -> None:
        self._reducer.average(index, epoch)

    def check(self, index: int) -> None:
        self._auditor.check(index)

    def expect(self, effect: Await | OpenAudit) -> None:
        """What our core asks others for from now on may come."""
        match effect:
            case Await():
                self._shared.ledger.expect(effect.sender, effect.parts, effect.epoch)
            case OpenAudit():
                self._auditor.open(effect.parts)

    def bar(self, effect: Bar) -> None:
        """Let nothing below its epoch touch these parts from now on, and say what they hold."""
        shared, epoch = self._shared, effect.epoch
        barred: list[int] = []
        held: list[Held] = []
        for index in effect.parts:
            if not 0 <= index < len(shared.layout.parts):
                continue
            with shared.lock(index):
                if shared.closed:
                    return
                if not shared.ledger.raise_bar(index, epoch):
                    continue
                self._reducer.barred(index, epoch)
                barred.append(index)
                here = shared.ledger.held(index)
                # What a trainer took back cannot be handed over, and so it is not held.
                if here is not None and shared.local.has_result():
                    held.append(here)
        shared.post(
            Barred(self.group_id, epoch, tuple(barred), tuple(held), effect.asker, effect.number)
        )
        self._catch_up(frozenset(barred))

    def linger(self) -> None:
        """The buckets go back; what is made and queued can still be sent. Waits as `close` does."""
        self._shared.linger()
        with self._ahead_lock:
            self._ahead = EarlyFrames()

    def settle(self) -> None:
        """The next round begins, while this one only lingers: it was used, and whole."""
        self._shared.overtake()
        self._auditor.close()

    def close(self, *, kept: bool = True, without: Iterable[int] = ()) -> None:
        """End the round; waits for the few parts being worked on, about a millisecond each."""
        self._shared.close(kept=kept, without=without)
        self._auditor.close(kept=kept, without=without)
        self._reducer.clear()
        with self._ahead_lock:
            self._ahead = EarlyFrames()

    # -- receiving --------------------------------------------------------------------------------

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """A frame of this group, in a link's reader thread. Never raises for what is in it."""
        shared = self._shared
        sender = self._indices.get(peer_id)
        if sender is None:
            shared.drop("not_a_member")
            return
        if not 0 <= header.part < len(shared.layout.parts):
            shared.drop("no_such_part")
            return
        shared.count(received=len(payload))
        part = shared.layout.parts[header.part]
        if header.kind is FrameKind.AUDIT:
            self._auditor.take(sender, header, part, payload)
            return
        result = header.kind is not FrameKind.CONTRIBUTION
        expected = False
        with shared.lock(part.index):
            if not shared.takes:
                shared.drop("part_closed")
                return
            if result:
                dropped, expected = shared.ledger.result(part.index, header.epoch, sender)
            else:
                dropped = shared.ledger.contribution(part.index, header.epoch, sender)
            if dropped == AHEAD and self._hold(peer_id, header, payload):
                return
        if dropped is not None:
            shared.drop(dropped)
            return
        try:
            self._use(sender, header, part, payload, expected=expected)
        except Exception as error:  # our own failure, but the core must not wait for this part
            log.exception("part %d of %s could not be used", part.index, peer_id)
            self._refuse(sender, header, Reason.CODEC, f"using it: {error}")

    def _use(
        self, sender: int, header: Header, part: Part, payload: memoryview, *, expected: bool
    ) -> None:
        refusal = self._refusal(sender, header, part, payload)
        crc = header.crc
        if header.kind is FrameKind.HANDOVER and refusal is None:
            (crc,) = LABEL.unpack_from(payload)
            payload = payload[LABEL.size :]
            refusal = self._mislabelled(part, payload, crc)
        if refusal is None:
            codec = self._codec(header, part)
            # An auditor wants to see the values of a result.
            whole = header.kind is not FrameKind.CONTRIBUTION and self._auditor.on
            values, refusal, squared = self._examined(codec, part, payload, whole=whole)
        if refusal is not None:
            self._refuse(sender, header, *refusal)
        elif header.kind is FrameKind.CONTRIBUTION:
            self._reducer.add(sender, part, header.epoch, values, small=is_small(squared))
        else:
            held = Held(part.index, header.epoch, header.contributors, crc)
            self._put_result(sender, part, values, held, expected=expected)

    def _refuse(self, sender: int, header: Header, reason: Reason, detail: str) -> None:
        result = header.kind is not FrameKind.CONTRIBUTION
        self._shared.post(
            PartRefused(self.group_id, header.part, sender, reason, detail, result, header.epoch)
        )

    def _codec(self, header: Header, part: Part) -> Codec:
        """What is handed over is raw values, whatever the group's codec; a contribution may be, as
        its sender finds it faster. A result is what all members hold, so it has no choice."""
        agreed = self._shared.codecs[part.dtype]
        raw = header.kind is FrameKind.HANDOVER or (
            header.kind is FrameKind.CONTRIBUTION and header.codec == RAW.code != agreed.code
        )
        return RAW if raw else agreed

    def _refusal(
        self, sender: int, header: Header, part: Part, payload: memoryview
    ) -> tuple[Reason, str] | None:
        """What can be wrong with a frame before its payload is looked at."""
        codec = self._codec(header, part)
        label = LABEL.size if header.kind is FrameKind.HANDOVER else 0
        size = label + codec.payload_bytes(part.numel, part.dtype)
        if len(payload) != size:
            return Reason.PART_SIZE, f"{len(payload)} bytes, expected {size}"
        if header.codec != codec.code:
            return Reason.CODEC, f"codec {header.codec}, expected {codec.code} ({codec.name})"
        members = self.group.members
        if header.kind is not FrameKind.CONTRIBUTION:
            # A member of weight 0 contributes nothing, so a result cannot have it inside.
            able = sum(1 << i for i, m in enumerate(members) if m.weight > 0)
            if header.contributors == 0 or header.contributors & ~able:
                return Reason.REFUSED, f"impossible contributors {header.contributors:#x}"
        elif not members[sender].weight > 0:
            return Reason.WEIGHT, "a member of weight 0 sent a contribution"
        return None

    def _mislabelled(self, part: Part, payload: memoryview, crc: int) -> tuple[Reason, str] | None:
        """Where the group's codec loses nothing, values and payload are the same bytes."""
        if crc >> 32:
            return Reason.REFUSED, f"label {crc:#x} is no crc32"
        if self._shared.codecs[part.dtype] is RAW and crc32(payload) != crc:
            return Reason.REFUSED, f"the values are not those of crc32 {crc:#010x}"
        return None

    def _decoded(
        self, codec: Codec, part: Part, payload: memoryview
    ) -> tuple[Tensor, tuple[Reason, str] | None]:
        """The payload as finite values, in this thread's scratch or where it lies."""
        values, refusal, _ = self._examined(codec, part, payload, whole=True)
        assert not isinstance(values, Coded)
        return values, refusal

    def _examined(
        self, codec: Codec, part: Part, payload: memoryview, *, whole: bool
    ) -> tuple[Tensor | Coded, tuple[Reason, str] | None, float]:
        """The same with the values' squared norm; not `whole`: they may stay coded."""
        shared = self._shared
        raw = tensor_of(payload)
        values: Tensor | Coded = raw
        try:
            found = None if whole else shared.coded(codec, part, raw)
            if found is not None and is_small(found.squared):
                values, bad, squared = found, None, found.squared
            elif codec is RAW and part.dtype != "bool":
                here = typed(raw, part.dtype)  # raw bytes are values already; bools are checked
                bad, squared = examine(here)
                values = here
            else:
                room = shared.scratch.take("decoded", numel=part.numel, dtype=part.dtype)
                bad, squared = shared.decode(part, raw, room)
                values = room
        except Exception as error:  # whatever a payload does to a codec, it is the sender's
            return raw, (Reason.CODEC, f"{codec.name}: {error}"), math.nan
        if bad is not None:
            bad_name = shared.layout.tensor_at(part, bad)
            return raw, (Reason.NOT_FINITE, f"tensor {bad_name!r}"), math.nan
        limit = shared.norm_limit
        # Of float64 above 1e154 the square is infinite, and so above any limit there is.
        if limit is not None and squared > limit * limit:
            name = shared.layout.tensor_at(part, 0)
            norm = f"{math.sqrt(squared):.3g}" if math.isfinite(squared) else "above 1e154"
            words = f"norm {norm} from tensor {name!r} on, at most {limit:.3g}"
            return raw, (Reason.NORM, words), squared
        return values, None, squared

    def _put_result(
        self, sender: int, part: Part, values: Tensor | Coded, held: Held, *, expected: bool
    ) -> None:
        shared = self._shared
        with shared.lock(part.index):
            if not shared.takes:
                return
            if not shared.ledger.may_place(part.index, held.epoch, expected=expected):
                shared.drop("below_bar")  # barred, or replaced, while this was decoded
                return
            shared.put_in_place(part, values, held)
            if not isinstance(values, Coded):
                self._auditor.placed(part, values)
            self._reducer.barred(part.index, held.epoch + 1)  # ours of that part is worth nothing
            contributors = members_in(held.contributors)
            shared.post(
                ResultArrived(self.group_id, part.index, sender, contributors, held.crc, held.epoch)
            )

    # -- frames of an epoch that the core has not told us of --------------------------------------

    def _hold(self, peer_id: str, header: Header, payload: memoryview) -> bool:
        """Part's lock held, so that a bar that comes now finds it."""
        with self._ahead_lock:
            return self._ahead.hold(peer_id, header, payload)

    def _catch_up(self, parts: frozenset[int]) -> None:
        """Take what waited for this bar; what waits for a higher one goes on waiting."""

        def due(held: HeldFrame) -> bool:
            header = held.header
            return header.part in parts and header.epoch <= self._shared.ledger.bar(header.part)

        with self._ahead_lock:
            frames = self._ahead.pick(due)
        for held in frames:
            self.take(held.peer_id, held.header, memoryview(held.payload))
