"""The frames that one member of a round sends. One rule: what is sent is looked at last.

A push names thousands of parts and each is encoded just before its bytes leave, so whatever was
decided meanwhile (the part was closed, barred, overwritten, the round is over) still counts: then
the frame is skipped. A contribution is encoded from the bucket every time it is sent, to the same
bytes; that is possible only until a result is in place there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from moshpitd.core.events import PartFailed
from moshpitd.core.messages import Held
from moshpitd.core.outcome import Reason
from moshpitd.daemon.auditing import Auditor
from moshpitd.daemon.averaging import Result
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.daemon.shared import Shared, encode_failure
from moshpitd.net.frames import FrameKind
from moshpitd.tensors.codecs import RAW, Codec
from moshpitd.tensors.feedback import LOSSY_DTYPE
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import Tensor, bytes_of, tensor_of

# In front of the values that are handed over: the crc32 of the payload they were decoded from.
LABEL = struct.Struct("!Q")


class Sender:
    """Invariant: no frame carries a contribution read from a bucket that holds a result."""

    def __init__(
        self,
        shared: Shared,
        result_of: Callable[[int, int], Result | None],
        auditor: Auditor,
    ) -> None:
        """`result_of(part, epoch)`: our stored result of that epoch."""
        self._shared = shared
        self._auditor = auditor
        self._result_of = result_of
        self._sent_as: dict[int, Codec] = {}  # part -> what its contribution travels with

    def push(
        self,
        parts: Iterable[int],
        *,
        result: bool,
        epoch: int,
        to: str = "",
        takes: float | None = None,
    ) -> Iterator[Frame]:
        """The frames of a push, made one by one as the link gets to them. `takes`: bytes per second
        of the link to the peer `to`, for a run that chooses between raw and coded.

        Parts go in ascending order to every member: then all senders reach a reducer's first part
        first, it is averaged while the others still travel, and few accumulators are open at once.
        """
        shared = self._shared
        raw = not result and self._raw_is_faster(to, takes)
        for part in self._known(parts):
            code = shared.codecs[part.dtype].code
            if not result:
                codec = self._codec(part, raw=raw)
                header = shared.header(
                    FrameKind.CONTRIBUTION, part.index, epoch=epoch, codec=codec.code
                )
                yield header, partial(self._contribution, part, epoch, codec)
            elif (stored := self._result_of(part.index, epoch)) is not None:
                header = shared.header(
                    FrameKind.RESULT, part.index,
                    epoch=epoch, codec=code, contributors=stored.inside, crc=stored.crc,
                )  # fmt: skip
                yield header, partial(self._result, part, epoch, stored.payload)

    def hand_over(self, parts: Iterable[int], *, epoch: int) -> Iterator[Frame]:
        """The results in our bucket, as values: of most we never had a payload, or not any more."""
        for part in self._known(parts):
            held = self._shared.ledger.held(part.index)
            if held is None:
                self._shared.drop("nothing_to_hand_over")
                continue
            header = self._shared.header(
                FrameKind.HANDOVER, part.index,
                epoch=epoch, codec=RAW.code, contributors=held.contributors,
            )  # fmt: skip
            yield header, partial(self._values, part, epoch, held)

    def _known(self, parts: Iterable[int]) -> Iterator[Part]:
        every = self._shared.layout.parts
        for index in parts:
            if 0 <= index < len(every) and not self._shared.closed:
                yield every[index]

    def _raw_is_faster(self, to: str, takes: float | None) -> bool:
        choices, codec = self._shared.choices, self._shared.codecs.get(LOSSY_DTYPE)
        if choices is None or codec is None or codec is RAW:
            return False
        sizes = [part.numel for part in self._shared.layout.parts if part.dtype == LOSSY_DTYPE]
        usual = max(sizes, default=0)
        ratio = codec.payload_bytes(usual, LOSSY_DTYPE) / max(
            1, RAW.payload_bytes(usual, LOSSY_DTYPE)
        )
        return choices.make(to, codec.name, ratio, link=takes).codec == RAW.name

    def _codec(self, part: Part, *, raw: bool) -> Codec:
        """How a part's contribution travels in this round: as when it was first sent, whoever it
        goes to now, or two reducers would have different values of us and one residual for both."""
        usual = self._shared.codecs[part.dtype]
        return self._sent_as.setdefault(part.index, RAW if raw else usual)

    def _contribution(self, part: Part, epoch: int, codec: Codec, room: memoryview) -> memoryview:
        """Encode our values of a part into the link's memory, or say why nothing is sent."""
        shared = self._shared
        with shared.lock(part.index):
            ledger = shared.ledger
            if (
                shared.closed
                or ledger.held(part.index) is not None  # closed without us: that is in the bucket
                or epoch < ledger.bar(part.index)  # its reducer's result would be refused here
            ):
                raise Skipped
            failure = shared.local.unusable()
            size = 0
            if failure is None:
                try:
                    values = shared.local.contribution(part)
                    size = shared.encode(part, values, tensor_of(room), result=False, codec=codec)
                    failure = shared.local.unusable()
                    feedback = shared.feedback(part, result=False)
                    if failure is not None and feedback is not None:
                        feedback.withdraw(part)
                except Exception as error:  # any failure of a codec costs this part, not the link
                    failure = encode_failure(codec, error)
            if failure is not None:
                shared.post(PartFailed(shared.group_id, part.index, *failure, epoch=epoch))
                raise Skipped
            self._auditor.keep(part, codec, tensor_of(room[:size]))
        shared.count(sent=size)
        return room[:size]

    def _result(self, part: Part, epoch: int, payload: Tensor, _: memoryview) -> memoryview:
        if self._shared.closed or epoch < self._shared.ledger.bar(part.index):
            raise Skipped
        self._shared.count(sent=payload.numel())
        return bytes_of(payload)

    def _values(self, part: Part, epoch: int, held: Held, room: memoryview) -> memoryview:
        """The label and the raw values of what is in place."""
        shared = self._shared
        size = LABEL.size + part.nbytes
        with shared.lock(part.index):
            # A later epoch or the next round is in place: whoever asked has lost the part.
            if shared.closed or shared.overtaken or shared.ledger.held(part.index) is not held:
                raise Skipped
            LABEL.pack_into(room, 0, held.crc)
            if not shared.local.read_result(part, tensor_of(room[LABEL.size : size])):
                shared.post(
                    PartFailed(
                        shared.group_id, part.index, Reason.BUCKET_MODIFIED,
                        "the trainer took the bucket with the result back", True, epoch,
                    )
                )  # fmt: skip
                raise Skipped
        shared.count(sent=size)
        return room[:size]
