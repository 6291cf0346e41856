"""The parts that one member of a round reduces. One rule: a contribution is in whole or not at all.

What is added belongs to one epoch of the part; a bar ends it, and what was added below is dropped
with it. A part whose accumulator fails is without a result and says so.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

from moshpitd.core.events import Averaged, Event, PartArrived, PartFailed
from moshpitd.core.messages import Held
from moshpitd.core.outcome import Reason
from moshpitd.daemon.auditing import Auditor
from moshpitd.daemon.shared import Shared, encode_failure, members_in
from moshpitd.net.checksum import crc32
from moshpitd.tensors.codecs import RAW
from moshpitd.tensors.codecs.compiled import Coded
from moshpitd.tensors.kernels import sum_into
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import Rooms, Tensor, bytes_of, untyped
from moshpitd.tensors.reduction import PartAccumulator, first_nonfinite, is_small

log = logging.getLogger(__name__)


class _Open:
    """A part in the making: `inside` are the members in its accumulator, all of one epoch."""

    __slots__ = ("accumulator", "epoch", "inside")

    def __init__(self, part: Part, epoch: int, rooms: Rooms) -> None:
        self.epoch = epoch
        self.inside = 0
        self.accumulator = PartAccumulator(part.numel, part.dtype, part.rule, room=rooms.take)


class Result(NamedTuple):
    """What we made of a part: its payload, a mask of who is inside, and the payload's crc32, which
    is not computed again for each member that it goes to."""

    payload: Tensor
    inside: int
    epoch: int
    crc: int


class Reducer:
    """Invariant: what is open of a part is of its bar's epoch, and it has no result of that."""

    def __init__(self, shared: Shared, auditor: Auditor) -> None:
        self._shared = shared
        self._auditor = auditor
        # Keyed by part, touched under the part's lock, and filled as parts come.
        self._open: dict[int, _Open] = {}
        self._results: dict[int, Result] = {}

    def add(
        self, sender: int, part: Part, epoch: int, values: Tensor | Coded, *, small: bool
    ) -> None:
        """A checked contribution; dropped if its part was closed or barred while it was looked at.
        `small` as for accumulators; what is not is decoded."""
        shared = self._shared
        with shared.lock(part.index):
            if not (shared.takes and shared.ledger.is_open(part.index, epoch)):
                shared.drop("part_closed")
                return
            try:
                weight = shared.group.members[sender].weight
                self._add(sender, part, epoch, values, weight, small=small)
            except Exception as error:
                log.exception("a contribution to part %d could not be added", part.index)
                self._spoilt(part, epoch, error)
            else:
                shared.post(PartArrived(shared.group_id, part.index, sender, epoch))

    def average(self, index: int, epoch: int) -> None:
        """Close a part: later contributions of its epoch are dropped, the result put in place.

        Not if it was barred above `epoch`, or a result of it is here: the core knows of both.
        """
        shared = self._shared
        part = shared.layout.parts[index]
        with shared.lock(index):
            if not (shared.takes and shared.ledger.shut(index, epoch)):
                return
            try:
                event = self._average(part, epoch)
            except Exception as error:
                log.exception("part %d could not be averaged", index)
                event = self._no_result(part, epoch, Reason.CODEC, f"averaging: {error}")
            shared.post(event)

    def result(self, index: int, epoch: int) -> Result | None:
        """Our result of that epoch."""
        stored = self._results.get(index)
        return stored if stored is not None and stored.epoch == epoch else None

    def barred(self, index: int, epoch: int) -> None:
        """Lock held: what is below this epoch will never be asked for again."""
        opened = self._open.get(index)
        if opened is not None and opened.epoch < epoch:
            del self._open[index]
        stored = self._results.get(index)
        if stored is not None and stored.epoch < epoch:
            del self._results[index]

    def clear(self) -> None:
        self._open.clear()
        self._results.clear()

    def _add(
        self,
        sender: int,
        part: Part,
        epoch: int,
        values: Tensor | Coded,
        weight: float,
        *,
        small: bool = False,
    ) -> None:
        opened = self._open.get(part.index)
        if opened is None or opened.epoch != epoch:
            opened = self._open[part.index] = _Open(part, epoch, self._shared.rooms)
        if isinstance(values, Coded):
            opened.accumulator.add_coded(values, weight)
        else:
            opened.accumulator.add(values, weight, small=small)
        opened.inside |= 1 << sender

    def _spoilt(self, part: Part, epoch: int, error: Exception) -> None:
        """An addition that failed may have stopped halfway: then nothing there is a mean."""
        self._open.pop(part.index, None)
        self._shared.ledger.shut(part.index, epoch)
        self._shared.post(self._no_result(part, epoch, Reason.CODEC, f"adding: {error}"))

    def _average(self, part: Part, epoch: int) -> Event:
        shared = self._shared
        held = shared.ledger.held(part.index)
        if held is not None:
            # Our own values are overwritten; whoever asks for a re-push was told that we hold it.
            detail = f"a result of epoch {held.epoch} is in place"
            return self._no_result(part, epoch, Reason.SUPERSEDED, detail)
        self._add_own(part, epoch)
        opened = self._open.pop(part.index, None)
        if opened is None or opened.epoch != epoch or not opened.inside:
            return self._no_result(part, epoch, Reason.NO_CONTRIBUTORS, "")
        codec, mean = shared.codecs[part.dtype], opened.accumulator.take()
        try:
            payload, values = self._encoded(part, mean)
        except Exception as error:  # the part keeps its local values in all members
            return self._no_result(part, epoch, *encode_failure(codec, error))
        bad = None if isinstance(values, Coded) else first_nonfinite(values)
        if bad is not None:
            # Finite contributions can still overflow a narrow type.
            name = shared.layout.tensor_at(part, bad)
            return self._no_result(
                part, epoch, Reason.NOT_FINITE, f"the average of tensor {name!r}"
            )
        crc = shared.made[part.index] = crc32(bytes_of(payload))
        shared.put_in_place(part, values, Held(part.index, epoch, opened.inside, crc))
        if not isinstance(values, Coded):
            self._auditor.placed(part, values)
        self._results[part.index] = Result(payload, opened.inside, epoch, crc)
        return Averaged(shared.group_id, part.index, members_in(opened.inside), crc, epoch)

    def _encoded(self, part: Part, mean: Tensor) -> tuple[Tensor, Tensor | Coded]:
        """(payload, its values): all members must hold the same bits, so we take what the others
        will decode. Where nothing is lost the accumulator's memory is both, and stays. Finite
        values may stay coded, to be written down once, where they belong."""
        shared = self._shared
        codec = shared.codecs[part.dtype]
        if codec is RAW:
            shared.encode(part, mean, untyped(mean), result=True)
            return untyped(mean), mean
        payload = shared.rooms.take(codec.payload_bytes(part.numel, part.dtype))
        if shared.stays_coded(part, payload) and not self._auditor.on:  # it wants to see values
            shared.encode(part, mean, payload, result=True)
            found = shared.coded(codec, part, payload)
            if found is not None and math.isfinite(found.squared):
                return payload, found
            values = shared.scratch.take("mean", numel=part.numel, dtype=part.dtype)
            codec.decode(payload, values)
            return payload, values
        values = shared.scratch.take("mean", numel=part.numel, dtype=part.dtype)
        shared.encode(part, mean, payload, result=True, decoded=values)
        return payload, values

    def _add_own(self, part: Part, epoch: int) -> None:
        shared = self._shared
        if not shared.weight > 0:
            return
        failure = shared.local.unusable()
        if failure is None:
            # A copy, because a bucket that turns out to be modified after the addition would have
            # spoilt the part for everybody. It stays in the cache.
            own = shared.scratch.take("own", numel=part.numel, dtype=part.dtype)
            feedback = shared.feedback(part, result=False)
            values = shared.local.contribution(part)
            if feedback is None:
                squared = sum_into(values, None, own)
            else:  # nothing is lost of what does not travel, and what was lost before is in it
                squared = feedback.give(part, values, own)
            failure = shared.local.unusable()
            if failure is not None and feedback is not None:
                feedback.withdraw(part)
        if failure is not None:
            shared.post(PartFailed(shared.group_id, part.index, *failure, epoch=epoch))
            return
        self._add(shared.index, part, epoch, own, shared.weight, small=is_small(squared))
        self._auditor.keep(part, RAW, untyped(own))

    def _no_result(self, part: Part, epoch: int, reason: Reason, detail: str) -> PartFailed:
        group_id = self._shared.group_id
        return PartFailed(group_id, part.index, reason, detail, result=True, epoch=epoch)
