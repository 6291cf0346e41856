"""Error feedback: what a codec took away is added to what goes next. One rule: outcomes decide.

A lossy average of parameters erases every progress smaller than half a step, for ever; with the
error fed back it only comes later (ALGORITHMS 2.11, DESIGN 4; Karimireddy et al. 2019). Both the
sender of contributions and the reducer of results keep a residual e:

    c = x + e                 what is encoded (`encode`), or given as it is (`give`)
    e' = c - decode(payload)  `settle`, once the outcome of the part says that it was included
    e' = e                    `settle`, if it was not: nobody has seen c

So x + e - e' = decode(payload) in every included round, and the sum of what was decoded differs
from the sum of what was meant by the current e alone, however many rounds there were. What stays is
a jitter of the size of e in each result (half a step of the codec), not a drift. e is bounded for
codecs that promise a contraction, and for no others (`Codec.contraction`).

Between `encode` and `settle` both e and the e' that may follow it exist, because a takeover asks
for the same bytes again and an exclusion for the old e. Each part that travels lossy has memory for
both, side by side, and a byte says which of the two holds e: settling moves no values.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.tensors.codecs import Codec
from moshpitd.tensors.dtypes import DTYPES, dtype_name
from moshpitd.tensors.kernels import sum_into
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Area
from moshpitd.tensors.reduction import first_nonfinite
from moshpitd.tensors.slices import SLICE_BYTES, slice_bounds

# Every other dtype travels raw (see codecs.codec_for), so that nothing of it is ever left over.
LOSSY_DTYPE = "float32"
_STEP = SLICE_BYTES // DTYPES[LOSSY_DTYPE].itemsize
# Where e of a part is: in one of the two arrays (0, 1), or nowhere, because it is 0. The same may
# be said of the e' that is held; or there is none, or c went out and nobody knows what it was.
_ZERO, _NOTHING, _LOST = 2, 3, 4


class ErrorFeedback:
    """The residual of one bucket, on one side (sender or reducer).

    Invariant: e belongs to its part, whoever the members of a round are, so a change of the group
    moves nothing. Parts of other dtypes than float32 have no residual.

    Calls about different parts may come from different threads; those about one part must not
    overlap (the caller holds the part's lock). `state_dict`, `hand_over` and their like are for the
    time between rounds.

    Memory: twice the parts that travel lossy, on the side that loses, taken part by part when they
    are first written to: both halves of a part at once, one behind the other, so that huge pages
    hold nothing else. `dropped` counts parts whose residual was given up, by reason: half a step
    of the codec is then lost for good.
    """

    def __init__(self, layout: Layout) -> None:
        self.dropped: Counter[str] = Counter()
        self._parts = layout.parts
        self._region = next((r for r in layout.regions if r.dtype == LOSSY_DTYPE), None)
        self._lock = threading.Lock()  # only for taking memory
        self._area = self._new_area()
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}  # part -> both of its halves
        self._at = bytearray([_ZERO]) * len(layout.parts)  # part -> where e is
        self._held = bytearray([_NOTHING]) * len(layout.parts)  # part -> where an e' is held
        self._written = [bytearray(len(layout.parts)), bytearray(len(layout.parts))]
        self._nbytes = 0

    # -- in a round ---------------------------------------------------------------------------

    def encode(
        self,
        part: Part,
        values: Tensor,
        payload: Tensor,
        *,
        codec: Codec,
        seed: int = 0,
        decoded: Tensor | None = None,
    ) -> int:
        """Encode c = values + e and hold e' = c - decode(payload); returns the payload's length.

        `values` stay as they are; `decoded` is filled with what the payload decodes to. A pure
        function of (values, e, seed), and e does not change before `settle`: a repeat gives the
        same bytes. Errors as for `Codec.encode`; nothing is held then.
        """
        self._check(part, values)
        at = self._at[part.index]
        self._held[part.index] = _NOTHING
        where = 0 if at == _ZERO else 1 - at
        left, added = self._slot(part, where), None if at == _ZERO else self._slot(part, at)
        try:
            size = codec.encode_fed(
                values, payload, added=added, left=left, seed=seed, decoded=decoded
            )
        except TrainerError:
            if added is None:
                raise
            # The values were finite when they were handed over; what is not is their sum with e.
            # Without this the part would fail in every round from here on.
            self._forget(part, "not_finite")
            return self.encode(part, values, payload, codec=codec, seed=seed, decoded=decoded)
        self._held[part.index] = where
        return size

    def give(self, part: Part, values: Tensor, out: Tensor) -> float:
        """out = values + e, for what nothing is lost of on its way: e' = 0 is held. Returns the
        squared norm of `out`, or NaN where nobody looked."""
        self._check(part, values)
        at = self._at[part.index]
        if at == _ZERO:
            squared = sum_into(values, None, out)
            if self._held[part.index] != _NOTHING:  # coded for a reducer that died; ours now
                self._held[part.index] = _ZERO
            return squared
        squared = sum_into(values, self._slot(part, at), out)
        if not math.isfinite(squared) and first_nonfinite(out) is not None:
            self._forget(part, "not_finite")
            return sum_into(values, None, out)
        self._held[part.index] = _ZERO
        return squared

    def withdraw(self, part: Part) -> None:
        """What was encoded last turned out not to be the trainer's values. It was not sent, but the
        same part may have been before; then e is in what was sent, and its e' is not known."""
        self._held[part.index] = _LOST

    def held(self) -> list[Part]:
        """The parts that wait for their outcome."""
        return [part for part in self._parts if self._held[part.index] != _NOTHING]

    def settle(self, part: Part, *, included: bool) -> None:
        """The outcome of a part: e' replaces e if c was included, else it is forgotten."""
        held, self._held[part.index] = self._held[part.index], _NOTHING
        if not included or held == _NOTHING:
            return
        if held == _LOST:
            self._forget(part, "withdrawn")
        else:
            self._at[part.index] = held

    def has(self, part: Part) -> bool:
        """Is there a residual other than 0?"""
        return self._at[part.index] != _ZERO

    # -- between rounds -----------------------------------------------------------------------

    def norm(self) -> float:
        """l2 of the residual, without what is held. Reads all of it: for people, not per part."""
        total = 0.0
        for part in self._residual_parts():
            residual = self._slot(part, self._at[part.index])
            for start, stop in slice_bounds(part.numel, step=_STEP):
                piece = torch.linalg.vector_norm(residual[start:stop], dtype=torch.float64)
                total += float(piece.item()) ** 2
        return math.sqrt(total)

    @property
    def nbytes(self) -> int:
        """Bytes that were written to, in both arrays; 0 before the first lossy part."""
        return self._nbytes

    def hand_over(self) -> dict[str, Tensor]:
        """The residual as plain values by dtype, out of here: whoever takes it over owns it now."""
        handed = self.state_dict()
        self.clear()
        return handed

    def take_over(self, handed: Mapping[str, Tensor]) -> None:
        """e += what a leaving peer handed over. Its weight is the caller's matter: in an average
        e counts with the weight of whoever sends it, so scale it by (its weight / ours) before.

        TrainerError says what does not fit, before anything is added.
        """
        for values in self._checked(handed):
            for part in self._of_region():
                start, stop = self._bounds(part)
                self._add(part, values[start:stop])

    def clear(self, reason: str = "") -> None:
        """Forget everything and give the memory back: the parameters were replaced (a snapshot).
        With a reason, every part that had a residual counts as dropped."""
        if reason:
            self.dropped[reason] += sum(1 for _ in self._residual_parts())
        with self._lock:
            self._slots = {}
            self._area = self._new_area()
            self._nbytes = 0
            count = len(self._parts)
            self._at[:] = bytes([_ZERO]) * count
            self._held[:] = bytes([_NOTHING]) * count
            self._written = [bytearray(count), bytearray(count)]

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the residual by dtype; empty if it is 0. What is held is left out: a checkpoint
        is taken between rounds, or as if the round had not included us."""
        if self._region is None or not any(True for _ in self._residual_parts()):
            return {}
        whole = torch.zeros(self._region.numel, dtype=torch.float32)
        for part in self._residual_parts():
            start, stop = self._bounds(part)
            whole[start:stop] = self._slot(part, self._at[part.index])
        return {LOSSY_DTYPE: whole}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything by what `state_dict` gave, also of another cut of the same region.

        TrainerError says what does not fit; nothing has changed then.
        """
        checked = self._checked(state)
        self.clear()
        for values in checked:
            for part in self._of_region():
                start, stop = self._bounds(part)
                self._add(part, values[start:stop])

    # -- below --------------------------------------------------------------------------------

    def _add(self, part: Part, values: Tensor) -> None:
        if self._at[part.index] == _ZERO:
            if not bool(values.any().item()):
                return
            self._slot(part, 0).copy_(values)
            self._at[part.index] = 0
        else:
            self._slot(part, self._at[part.index]).add_(values)

    def _forget(self, part: Part, reason: str) -> None:
        self.dropped[reason] += 1
        self._at[part.index], self._held[part.index] = _ZERO, _NOTHING

    def _slot(self, part: Part, where: int) -> Tensor:
        """One of the part's halves."""
        slots = self._slots.get(part.index)
        if slots is None or not self._written[where][part.index]:
            with self._lock:
                slots = self._slots.get(part.index)
                if slots is None:
                    both = self._area.take(2 * part.nbytes).view(torch.float32)
                    slots = self._slots[part.index] = both[: part.numel], both[part.numel :]
                if not self._written[where][part.index]:
                    self._written[where][part.index] = 1
                    self._nbytes += part.nbytes
        return slots[where]

    def _new_area(self) -> Area:
        """Nothing is mapped before the first part asks."""
        return Area(2 * sum(part.nbytes for part in self._of_region()))

    def _of_region(self) -> Iterable[Part]:
        return (part for part in self._parts if part.dtype == LOSSY_DTYPE)

    def _residual_parts(self) -> Iterable[Part]:
        return (part for part in self._parts if self._at[part.index] != _ZERO)

    def _bounds(self, part: Part) -> tuple[int, int]:
        assert self._region is not None
        first = (part.offset_bytes - self._region.offset_bytes) // DTYPES[LOSSY_DTYPE].itemsize
        return first, first + part.numel

    def _check(self, part: Part, values: Tensor) -> None:
        if not 0 <= part.index < len(self._parts) or self._parts[part.index] != part:
            raise LocalProtocolError(f"residual: part {part.index} is none of this layout")
        if (
            part.dtype != LOSSY_DTYPE
            or values.shape != (part.numel,)
            or values.dtype != torch.float32
        ):
            raise LocalProtocolError(
                f"residual of part {part.index} ({part.dtype}): got {dtype_name(values.dtype)} "
                f"{list(values.shape)}, expected {LOSSY_DTYPE} [{part.numel}]"
            )

    def _checked(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        for dtype, values in state.items():
            numel = self._region.numel if self._region and dtype == LOSSY_DTYPE else 0
            if values.shape != (numel,) or dtype_name(values.dtype) != dtype or numel == 0:
                raise TrainerError(
                    f"residual {dtype!r}: {dtype_name(values.dtype)} {list(values.shape)}, "
                    f"expected {numel} elements of {LOSSY_DTYPE} as in this run's layout",
                    reason="schema_differs",
                )
            if first_nonfinite(values) is not None:
                raise TrainerError(
                    f"residual {dtype!r} holds NaN or infinity, expected finite values",
                    reason="not_finite",
                )
        return list(state.values())


class Residuals:
    """Both sides of one run at one node."""

    def __init__(self, layout: Layout) -> None:
        self.sender = ErrorFeedback(layout)
        self.reducer = ErrorFeedback(layout)

    def clear(self, reason: str) -> None:
        self.sender.clear(reason)
        self.reducer.clear(reason)

    @property
    def nbytes(self) -> dict[str, int]:
        return {"sender": self.sender.nbytes, "reducer": self.reducer.nbytes}

    @property
    def dropped(self) -> Counter[str]:
        """Parts whose residual was given up, by reason."""
        return self.sender.dropped + self.reducer.dropped


def feeds(codec: Codec, numel: int) -> bool:
    """Whether error feedback keeps its residual bounded with this codec, for parts of `numel`. One
    that promises nothing gets none."""
    promised = getattr(codec, "contraction", None)
    return promised is not None and promised(numel) > 0
