"""How far a result may be from the mean of what went into it. One rule: an honest one is within.

A bound is made of what every codec promises (`Codec.error_bound`), of the rounding of accumulators,
and of what a reducer may owe from earlier rounds; never of what a run gave. Bounds are counted per
block of the codec, or a layer of small values would hide behind a layer of large ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.codecs import Codec
from moshpitd.tensors.feedback import feeds
from moshpitd.tensors.layout import Part

# A codec that may change a value by more than an eighth of the largest beside it (qsgd: 0.18, the
# sparse ones and signs: all of it) lets a reducer lie by as much: its results cannot be judged.
USEFUL = 1 / 8

# Per value and addition, of two accumulators: the reducer's and the auditor's (see `reduction`).
_STEPS = 2 * 4
# dtype -> unit roundoff of what it accumulates in, of itself where that is narrower, and the
# smallest step of the narrow type.
_UNITS = {
    "float64": (2.0**-53, 0.0, 0.0),
    "float32": (2.0**-24, 0.0, 0.0),
    "float16": (2.0**-24, 2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-24, 2.0**-8, 2.0**-133),
}


def auditable(codec: Codec) -> bool:
    return codec.error_bound(1.0) <= USEFUL


def width(codec: Codec, numel: int) -> int:
    """Values per bound: a block of the codec, the whole part where nothing shares a scale."""
    return codec.block if codec.block > 1 else max(1, numel)


def peaks(values: Tensor, width: int) -> Tensor:
    """The largest magnitude in every `width` values, as float64."""
    whole = values.numel() // width * width
    found = values[:whole].view(-1, width).abs().amax(1) if whole else values[:0]
    if whole < values.numel():
        found = torch.cat([found, values[whole:].abs().amax().view(1)])
    return found.to(torch.float64)


def rounding(codec: Codec, largest: Tensor) -> Tensor:
    """What coding may change where these are the largest magnitudes *after* it.

    The bound of an auditable codec is a straight line in the magnitude with a slope k <= 1/8, and
    magnitudes before are at most 1 / (1 - k) <= 1 + 2k times those after.
    """
    least = codec.error_bound(0.0)
    slope = codec.error_bound(1.0) - least
    before = largest + 2 * (largest * slope + least)
    return before * slope + least


class Owed:
    """What a reducer of a part may owe: the largest rounding of its results so far, in one run.

    A reducer's residual may be as old as the last round in which it reduced the part, when values
    may have been larger (gradients fall). So nothing here is ever forgotten. Calls about one part
    come under that part's lock.
    """

    def __init__(self) -> None:
        self._bounds: dict[int, tuple[int, Tensor]] = {}  # part -> values per bound, bounds

    def of(self, part: Part, width: int) -> Tensor | None:
        """None: nothing that was rounded was seen here."""
        known = self._bounds.get(part.index)
        if known is None or known[0] == width:
            return None if known is None else known[1]
        return known[1].max().repeat(-(-part.numel // width))  # of another codec: the worst of all

    def add(self, part: Part, width: int, bounds: Tensor) -> None:
        before = self.of(part, width)
        more = bounds if before is None else torch.maximum(before, bounds)
        self._bounds[part.index] = (width, more)


class Expected:
    """The mean of a part as an auditor makes it, and what a result may differ from it.

    Not thread-safe: the caller holds the part's lock.
    """

    def __init__(self, part: Part, codec: Codec) -> None:
        """`codec` is that of the result."""
        self._part = part
        self._codec = codec
        self._width = width(codec, part.numel)
        self._largest: Tensor | None = None
        self._loose: Tensor | None = None
        self._count = 0

    def add(self, values: Tensor, weight: float, *, exact: bool) -> None:
        """A contribution. Not `exact`: the reducer may have had it with the codec's rounding and we
        without, or the other way round."""
        if not values.is_floating_point() or not values.numel():
            return
        here = peaks(values, self._width)
        self._count += 1
        self._largest = here if self._largest is None else torch.maximum(self._largest, here)
        if not exact:
            loose = rounding(self._codec, here) * weight
            self._loose = loose if self._loose is None else self._loose + loose

    def differs(
        self, mean: Tensor, result: Tensor, *, total_weight: float, owed: Owed
    ) -> tuple[bool, int, float, float]:
        """(whether beyond the bound, the worst value's index, by how much, the bound there)."""
        part = self._part
        if not result.is_floating_point() or self._largest is None:
            apart = (result != mean).to(torch.float64)  # a maximum is exact
            if not part.numel:
                return False, 0, 0.0, 0.0
            worst = int(apart.argmax().item())
            return bool(apart[worst].item()), worst, float(apart[worst].item()), 0.0
        bounds = self._bounds(result, total_weight, owed)
        apart = (result.to(torch.float64) - mean.to(torch.float64)).abs()
        each = bounds.repeat_interleave(self._width)[: part.numel]
        worst = int((apart - each).argmax().item())
        by, bound = float(apart[worst].item()), float(each[worst].item())
        return not by <= bound, worst, by, bound

    def _bounds(self, result: Tensor, total_weight: float, owed: Owed) -> Tensor:
        assert self._largest is not None
        unit, narrow, least = _UNITS[self._part.dtype]
        added = max(0, self._count - 1)
        bounds = self._largest * (_STEPS * added * unit + 2 * narrow) + least
        coded = rounding(self._codec, peaks(result, self._width))
        bounds = bounds + coded
        if self._loose is not None:
            bounds = bounds + self._loose / total_weight
        if self._part.dtype == "float32" and feeds(self._codec, self._part.numel):
            before = owed.of(self._part, self._width)
            bounds = bounds + (coded if before is None else torch.maximum(before, coded))
            if before is not None:  # the sum of mean and residual is rounded once
                bounds = bounds + 2 * unit * (self._largest + before)
        return bounds
