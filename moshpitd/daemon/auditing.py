"""The tensors of audits: a second member makes some parts once more, and compares. One rule: only
what cannot be explained by rounding is called wrong; what cannot be judged is right.

Results overwrite the buckets they were made from, and which parts are checked is decided after
that. So, in groups that audit, a copy of what we contributed to each part is kept until the round
is over: the payload of what we sent, and raw values of what we reduce ourselves. That is a bucket
in the group's codec for the parts of others and raw for our own. Nothing is kept otherwise, and
nothing of parts whose codec says too little of its error.

What an audit cannot see: a reducer may choose its own contribution, as every member may, and name
one that explains its result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from moshpitd.core.events import AuditArrived, Checked
from moshpitd.core.outcome import Reason
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.daemon.shared import Shared, members_in
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW, Codec
from moshpitd.tensors.deviation import Expected, Owed, auditable, peaks, rounding, width
from moshpitd.tensors.feedback import LOSSY_DTYPE, feeds
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import Tensor, bytes_of, fresh, untyped
from moshpitd.tensors.reduction import PartAccumulator

log = logging.getLogger(__name__)

Decode = Callable[[Codec, Part, memoryview], tuple[Tensor, tuple[Reason, str] | None]]


class _Check:
    """A part that we check: `looked` are members whose audit came, `inside` those added."""

    __slots__ = ("accumulator", "expected", "inside", "looked", "spoilt")

    def __init__(self, part: Part, codec: Codec) -> None:
        self.accumulator = PartAccumulator(part.numel, part.dtype, part.rule)
        self.expected = Expected(part, codec)
        self.looked = 0
        self.inside = 0
        self.spoilt = ""  # why it cannot be judged


class Auditor:
    """Both sides of the audits of one round at one member. Invariant: what is kept of a part is
    what we contributed to it last, in the bytes or values in which the others got it."""

    def __init__(self, shared: Shared, owed: Owed, decoded: Decode) -> None:
        """`decoded(codec, part, payload)`: finite values in this thread's scratch, or a refusal."""
        self._shared = shared
        self._owed = owed
        self._decoded = decoded
        self.on = shared.group.audit_fraction > 0
        # Keyed by part, touched under the part's lock (`_checks` is filled by the loop, before the
        # others are asked).
        self._kept: dict[int, tuple[Codec, Tensor]] = {}
        self._checks: dict[int, _Check] = {}
        self._rounded: dict[int, tuple[int, Tensor]] = {}  # of results in place, until they count

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""
        return sum(payload.numel() for _, payload in list(self._kept.values()))

    # -- during the round, under the part's lock --------------------------------------------------

    def keep(self, part: Part, codec: Codec, payload: Tensor) -> None:
        """What we contribute, as 1-D uint8; copied."""
        if not self.on or not auditable(self._codec(part)):
            return
        known = self._kept.get(part.index)
        if known is None or known[1].numel() != payload.numel():
            room = fresh(payload.numel())
        else:
            room = known[1]  # the same bytes again, or those of an epoch that was barred
        room.copy_(payload)
        self._kept[part.index] = (codec, room)

    def placed(self, part: Part, values: Tensor) -> None:
        """A result is in place: whoever rounded it may owe that much from now on."""
        codec = self._codec(part)
        if (
            self.on
            and codec is not RAW
            and part.dtype == LOSSY_DTYPE
            and auditable(codec)
            and feeds(codec, part.numel)
        ):
            step = width(codec, part.numel)
            self._rounded[part.index] = (step, rounding(codec, peaks(values, step)))

    def close(self, *, kept: bool = True, without: Iterable[int] = ()) -> None:
        """The round is over, and nothing is asked any more. A result that was not used does not
        count: else one exposed lie of large values would make every later bound wide."""
        local = frozenset(without)
        rounded, self._rounded = self._rounded, {}
        for index, (step, bounds) in rounded.items() if kept else ():
            if index not in local:
                with self._shared.lock(index):
                    self._owed.add(self._shared.layout.parts[index], step, bounds)
        self._kept = {}
        self._checks = {}

    # -- for an auditor ---------------------------------------------------------------------------

    def frames(self, parts: Iterable[int]) -> Iterator[Frame]:
        """What we contributed, once more."""
        shared = self._shared
        for index in parts:
            if not 0 <= index < len(shared.layout.parts) or shared.closed:
                continue
            if not auditable(self._codec(shared.layout.parts[index])):
                continue  # whoever asks knows that there is nothing to compare
            kept = self._kept.get(index)
            if kept is None:
                shared.drop("nothing_to_audit")
                continue
            codec, payload = kept
            header = shared.header(FrameKind.AUDIT, index, epoch=0, codec=codec.code)
            yield header, partial(self._payload, payload)

    def _payload(self, payload: Tensor, _: memoryview) -> memoryview:
        if self._shared.closed:
            raise Skipped
        self._shared.count(sent=payload.numel())
        return bytes_of(payload)

    # -- as the auditor ---------------------------------------------------------------------------

    def open(self, parts: Iterable[int]) -> None:
        """On the loop, so that it is done before anybody is asked for anything."""
        shared = self._shared
        for index in parts:
            part = shared.layout.parts[index]
            codec = self._codec(part)
            self._checks[index] = _Check(part, codec)
            held = shared.ledger.held(index)
            if held is not None and not auditable(codec):  # nobody sends what cannot be compared
                for sender in members_in(held.contributors & ~(1 << shared.index)):
                    shared.post(AuditArrived(shared.group_id, index, sender))

    def take(self, sender: int, header: Header, part: Part, payload: memoryview) -> None:
        """An AUDIT frame, in a link's reader thread."""
        shared = self._shared
        with shared.lock(part.index):
            check, held = self._checks.get(part.index), shared.ledger.held(part.index)
            if shared.closed or check is None or held is None:
                shared.drop("audit_unasked")
                return
            if sender == shared.index or not held.contributors >> sender & 1:
                shared.drop("audit_unasked")
                return
            if check.looked >> sender & 1:
                shared.drop("repeated")
                return
            check.looked |= 1 << sender
        try:
            spoilt = self._use(check, sender, header.codec, part, payload)
        except Exception as error:  # our own failure: the core must not wait, and nobody is blamed
            log.exception("an audit of part %d could not be used", part.index)
            spoilt = str(error)
        with shared.lock(part.index):
            if spoilt:
                check.spoilt = f"what {shared.group.members[sender].peer_id} sent: {spoilt}"
            shared.post(AuditArrived(shared.group_id, part.index, sender))

    def check(self, index: int) -> None:
        """In the pool: it reads the part a few times."""
        shared = self._shared
        part = shared.layout.parts[index]
        with shared.lock(index):
            if shared.closed:
                return
            check = self._checks.pop(index, None)
            try:
                right, detail = self._verdict(part, check)
            except Exception as error:
                log.exception("part %d could not be audited", index)
                right, detail = True, f"cannot be audited: {error}"
            shared.post(Checked(shared.group_id, index, right, detail))

    def _use(
        self, check: _Check, sender: int, code: int, part: Part, payload: memoryview
    ) -> str | None:
        """Add what was sent; or why it cannot be."""
        codec = next((c for c in (RAW, self._codec(part)) if c.code == code), None)
        if codec is None:
            return f"codec {code}, expected {self._codec(part).code} or {RAW.code}"
        size = codec.payload_bytes(part.numel, part.dtype)
        if len(payload) != size:
            return f"{len(payload)} bytes, expected {size}"
        values, refusal = self._decoded(codec, part, payload)
        if refusal is not None:
            return f"{refusal[0].value}: {refusal[1]}"
        with self._shared.lock(part.index):
            weight = self._shared.group.members[sender].weight
            self._add(check, sender, codec, part, values, weight)
        return None

    def _add(
        self, check: _Check, member: int, codec: Codec, part: Part, values: Tensor, weight: float
    ) -> None:
        """Lock held. The reducer adds its own values as they are and gets the others' coded. After
        a takeover it may have been the other way round when the result was made."""
        ledger = self._shared.ledger
        held = ledger.held(part.index)
        reduces = held is not None and ledger.reducer(part.index, held.epoch) == member
        usual = RAW if reduces else self._codec(part)
        check.expected.add(values, weight, exact=codec is usual)
        check.accumulator.add(values, weight)
        check.inside |= 1 << member

    def _verdict(self, part: Part, check: _Check | None) -> tuple[bool, str]:
        """Lock held. (right, what was found)."""
        shared, codec = self._shared, self._codec(part)
        held = shared.ledger.held(part.index)
        if not auditable(codec):
            return True, f"codec {codec.name} cannot be audited: its error has no useful bound"
        if check is None or held is None:
            return True, "cannot be audited: there is nothing to compare"
        if check.spoilt:
            return True, f"cannot be audited: {check.spoilt}"
        if held.contributors >> shared.index & 1:
            kept = self._kept.get(part.index)
            if kept is None:
                return True, "cannot be audited: our own contribution is not here"
            values, refusal = self._decoded(kept[0], part, bytes_of(kept[1]))
            if refusal is not None:
                return True, f"cannot be audited: our own contribution: {refusal[1]}"
            self._add(check, shared.index, kept[0], part, values, shared.weight)
        if check.inside != held.contributors:
            missing = members_in(held.contributors & ~check.inside)
            return True, f"cannot be audited: nothing of members {list(missing)}"
        result = shared.scratch.take("audited", numel=part.numel, dtype=part.dtype)
        if not shared.local.read_result(part, untyped(result)):
            return True, "cannot be audited: the trainer took the bucket back"
        total = check.accumulator.total_weight
        differs, worst, by, bound = check.expected.differs(
            check.accumulator.take(), result, total_weight=total, owed=self._owed
        )
        where = shared.layout.tensor_at(part, worst) if part.numel else ""
        return not differs, (
            f"tensor {where!r} differs by {by:.4g} from the mean of its contributors, "
            f"allowed {bound:.4g} with codec {codec.name}"
        )

    def _codec(self, part: Part) -> Codec:
        return self._shared.codecs[part.dtype]
