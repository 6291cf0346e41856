"""Weighted reduction of one part, slice by slice. One rule: weights cannot overflow.

The mean is kept as a running mean, m += (w / W)(x - m), not as a sum that is divided at the end.
The factor is at most 1, so a weight of 2^32 cannot overflow float32; equal contributions give
x - m = 0 and therefore exactly themselves (up to the sign of zero), whatever the weights; and one
contribution is a plain copy, bit for bit. A sum has none of the three. Where x has more than half
of the weight the step starts from x instead, or x = 1 with weight 2^32 would drown beside m = 1e8.
(Rejected: a float64 sum. It rounds better, but takes twice the memory for a reducer's share and
ran at 6 instead of 10 GB/s.)

Rounding: at most 4 (n - 1) u max|x| for n contributions, and (n / 2 + 7) u max|x| for equal
weights, with u = 2^-24 (float64: 2^-53), before the rounding to the part's own dtype.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.dtypes import DTYPES, dtype_name
from moshpitd.tensors.kernels import address, native, takes
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.slices import SLICE_BYTES, scratch, slice_bounds

SMALL = 2.0**128
"""A squared norm below this: no value reaches 2^64, and no difference of two can overflow."""


class Coded(Protocol):
    """Values of a payload, as `tensors.codecs.compiled.Coded`."""

    numel: int

    def decode(self, out: Tensor, *, past: bool = False) -> None: ...

    def mix(self, mean: Tensor, *, share: float, rest: float) -> None: ...


class PartAccumulator:
    """Combines the contributions to one part by the part's rule ("mean" or "max").

    Invariant: between two calls the state is the result over exactly the `count` contributions
    added so far. A lock keeps it true when two reader threads add to one part.
    float16, bfloat16 and float32 accumulate in float32, float64 in float64, integers in themselves.
    Memory is taken at the first `add`, through `room(nbytes)` where it is given: a part nobody
    contributes to costs nothing.
    """

    __slots__ = (
        "_lock",
        "_room",
        "_row",
        "_small",
        "_state",
        "count",
        "numel",
        "rule",
        "total_weight",
    )

    def __init__(
        self, numel: int, dtype: str, rule: str, *, room: Callable[[int], Tensor] | None = None
    ) -> None:
        row = DTYPES.get(dtype)
        if row is None or rule != row.rule:
            raise LocalProtocolError(f"accumulator: no rule {rule!r} for dtype {dtype!r}")
        self.numel = numel
        self.rule = rule
        self.count = 0
        self.total_weight = 0.0
        self._row = row
        self._room = room
        self._state: Tensor | None = None
        self._small = True  # so were all contributions
        self._lock = threading.Lock()

    def add(self, values: Tensor, weight: float, *, small: bool = False) -> None:
        """Add one whole contribution: 1-D contiguous, the part's dtype and numel; weight > 0.

        The values must have passed `first_nonfinite`: a NaN in here is in the mean. `small`: none
        is above 2^64 (see `is_small`), so that no difference of two can overflow.
        """
        self._check(values)
        if not (math.isfinite(weight) and weight > 0):
            raise LocalProtocolError(f"accumulator: weight {weight!r}, expected finite and > 0")
        with self._lock:
            total = self.total_weight + weight
            self._small = self._small and small
            if self._state is None:
                self._state = self._begun(values.detach())
            elif self.rule == "max":
                torch.maximum(self._state, values, out=self._state)
            else:
                share, rest = weight / total, self.total_weight / total
                if self._small and values.dtype == self._state.dtype:
                    _mix_small(self._state, values.detach(), share=share, rest=rest)
                else:
                    _mix(self._state, values.detach(), share=share, rest=rest)
            self.total_weight = total
            self.count += 1

    def add_coded(self, values: Coded, weight: float) -> None:
        """`add` of float32 values that were never written down: finite and small."""
        if self._row.name != "float32" or values.numel != self.numel:
            raise LocalProtocolError(
                f"accumulator: got {values.numel} coded float32, expected {self.numel} of "
                f"{self._row.name}"
            )
        with self._lock:
            total = self.total_weight + weight
            share, rest = weight / total, self.total_weight / total
            if self._state is None:
                self._state = self._new()
                values.decode(self._state)
            elif self._small:
                values.mix(self._state, share=share, rest=rest)
            else:
                room = scratch(self.numel, torch.float32, self._state.device, name="coded")
                values.decode(room)
                _mix(self._state, room, share=share, rest=rest)
            self.total_weight = total
            self.count += 1

    def mean(self, out: Tensor) -> None:
        """Write the mean (the maximum under rule "max") to `out`: the part's dtype and numel.

        May be called again, also after further `add`s.
        """
        self._check(out)
        with self._lock:
            if self._state is None:
                raise LocalProtocolError("accumulator: no contribution, so there is no mean")
            out.copy_(self._state)

    def take(self) -> Tensor:
        """The mean (the maximum) as a tensor of the part's dtype, out of here and without a copy
        where that is possible. The accumulator is over: nothing may be added afterwards."""
        with self._lock:
            state, self._state = self._state, None
            if state is None:
                raise LocalProtocolError("accumulator: no contribution, so there is no mean")
            return state.to(self._row.torch_dtype)

    def _begun(self, values: Tensor) -> Tensor:
        if self._room is None:
            return values.to(self._row.accumulate_in, copy=True)
        return self._new().copy_(values)

    def _new(self) -> Tensor:
        wide = self._row.accumulate_in
        if self._room is None:
            return torch.empty(self.numel, dtype=wide)
        return self._room(self.numel * wide.itemsize).view(wide)

    def _check(self, values: Tensor) -> None:
        row = self._row
        if (
            values.dtype != row.torch_dtype
            or values.shape != (self.numel,)
            or not values.is_contiguous()
        ):
            raise LocalProtocolError(
                f"accumulator: got {dtype_name(values.dtype)} {list(values.shape)}, expected "
                f"contiguous {row.name} [{self.numel}]"
            )


def first_nonfinite(values: Tensor) -> int | None:
    """Index of the first NaN or infinity in a 1-D tensor, or None; integers are always finite.

    A finite sum proves that every element is finite, since NaN and infinities never leave a sum
    (inf - inf is NaN). A sum that is not finite proves nothing, because large finite values
    overflow it too; only then each element is looked at (30 against 1 GB/s).
    """
    if not values.dtype.is_floating_point or math.isfinite(_quick_norm(values)):
        return None
    # Half types are summed in float32; in their own range 70,000 ones would already overflow.
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    step = SLICE_BYTES // values.element_size()
    for start, stop in slice_bounds(values.numel(), step=step):
        piece = values[start:stop]
        if math.isfinite(piece.sum(dtype=wide).item()):
            continue
        bad = torch.isfinite(piece).logical_not_().nonzero()
        if bad.numel():
            return start + int(bad[0, 0].item())
    return None


def examine(values: Tensor) -> tuple[int | None, float]:
    """(index of the first NaN or infinity or None, squared Euclidean norm) of a 1-D tensor.

    One pass for both: the dot product with itself is finite only if every element is. float64
    values above 1e154 have the norm infinity: more than any bound. Integers: (None, 0.0).
    """
    if not values.dtype.is_floating_point:
        return None, 0.0
    total = _quick_norm(values)
    if math.isfinite(total):
        return None, total
    total = 0.0
    step = SLICE_BYTES // values.element_size()
    for start, stop in slice_bounds(values.numel(), step=step):
        piece = values[start:stop]
        wide = piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
        squared = torch.dot(wide, wide).item()
        if not math.isfinite(squared):
            bad = first_nonfinite(piece)
            if bad is not None:
                return start + bad, math.nan
            double = piece.double()  # seldom: finite, but the square is too large for float32
            squared = torch.dot(double, double).item()
        total += squared
    return None, total


def examine_bucket(layout: Layout, buffer: Tensor) -> tuple[str | None, float]:
    """(name of the tensor with the first NaN or infinity or None, squared Euclidean norm) of all
    that lies in a buffer of uint8 [layout.nbytes]; the norm counts only if nothing was found."""
    total = 0.0
    for region in layout.regions:
        element, squared = examine(layout.region_view(buffer, region))
        if element is not None:
            return layout.tensor_in(region, element), 0.0
        total += squared
    return None, total


def _quick_norm(values: Tensor) -> float:
    """The squared norm in one compiled pass, during which nobody waits for the interpreter; NaN if
    that cannot tell, or was not built."""
    if values.dtype != torch.float32 or not (takes(values) and values.is_contiguous()):
        return math.nan
    return native.squared_norm(address(values, values.numel()), values.numel())


def is_small(squared: float) -> bool:
    """Whether values of this squared norm (see `examine`) are all below 2^64 in magnitude."""
    return squared < SMALL


def _mix(mean: Tensor, values: Tensor, *, share: float, rest: float) -> None:
    """mean = rest * mean + share * values, in place; share + rest = 1."""
    step = SLICE_BYTES // mean.element_size()
    room = scratch(min(step, mean.numel()), mean.dtype, mean.device)
    same = values.dtype == mean.dtype
    for start, stop in slice_bounds(mean.numel(), step=step):
        piece, target = values[start:stop], mean[start:stop]
        gap = room[: stop - start]
        if same:
            torch.sub(piece, target, out=gap)
        else:  # a copy converts in place; a mixed subtraction would allocate a converted operand
            gap.copy_(piece).sub_(target)
        if not math.isfinite(gap.sum().item()) and not bool(torch.isfinite(gap).all().item()):
            _mix_far_apart(target, piece.to(mean.dtype), gap, share=share, rest=rest)
        elif share <= 0.5:
            target.add_(gap, alpha=share)
        else:
            target.copy_(piece).sub_(gap, alpha=rest)


def _mix_small(mean: Tensor, values: Tensor, *, share: float, rest: float) -> None:
    """The same in one pass instead of three: 11 against 29 us for 512 KiB in the cache. It cannot
    see a difference that overflows. From the side of the larger share, whose factor torch would
    round to 1."""
    if share <= 0.5:
        mean.lerp_(values, share)
    else:
        torch.lerp(values, mean, rest, out=mean)


def _mix_far_apart(
    target: Tensor, piece: Tensor, gap: Tensor, *, share: float, rest: float
) -> None:
    """The slice where a difference overflowed: only opposite signs can do that.

    There the two products of the other form have opposite signs too, so their sum cannot overflow.
    It does not return equal values exactly, so it is kept to the elements that need it.
    """
    usual = target + gap * share if share <= 0.5 else piece - gap * rest
    target.copy_(torch.where(torch.isfinite(gap), usual, target * rest + piece * share))
