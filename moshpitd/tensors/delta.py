"""What a trainer gets that was late for a round: something to add. One rule: zeros change nothing.

Its own values are not in the average, so they must not be replaced by it. It gets
`average - contribution` of its node and adds that to wherever it has moved to meanwhile; a part
without a result is zeros. Over several rounds (a sweep) the deltas add up: the next round's
contribution is this round's average. For a part under the rule "max" the same addition has to end
in a maximum, so its delta is `max(result, own) - own` (wrapping arithmetic makes it exact, also
where the difference overflows the type); for bool, where + means "or", it is `result and not own`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.slices import QUIET_ELEMENTS, SLICE_BYTES, scratch, slice_bounds


def mean_delta(out: Tensor, *, result: Tensor, contribution: Tensor, onto: bool) -> None:
    """out = result - contribution, or out += that (`onto`). 1-D tensors of one floating dtype.

    Half types are computed in float32 and rounded once.
    """
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    step = SLICE_BYTES // wide.itemsize
    room = scratch(min(step, out.numel()), wide, out.device)
    for start, stop in slice_bounds(out.numel(), step=step):
        target = out[start:stop]
        moved = room[: stop - start].copy_(result[start:stop]).sub_(contribution[start:stop])
        target.copy_(moved.add_(target) if onto else moved)


def max_delta(out: Tensor, *, result: Tensor, own: Tensor) -> None:
    """What turns `own` into the maximum of both when added. `out` may not be one of them."""
    if out.dtype == torch.bool:
        torch.logical_not(own, out=out).logical_and_(result)
    else:
        torch.maximum(own, result, out=out).sub_(own)


def delta_in_place(own: Tensor, *, result: Tensor | None, rule: str) -> None:
    """own <- what turns own into the result when added; zeros where there is none (`result` None).

    For the trainer's side of an overlapped round: 1-D tensors, one dtype, `rule` as in the layout.
    Half types are subtracted in float32 and rounded once, which is what torch does.
    """
    for start, stop in slice_bounds(own.numel(), step=QUIET_ELEMENTS):
        mine = own[start:stop]
        if result is None:
            mine.zero_()
        elif rule == "mean":
            torch.sub(result[start:stop], mine, out=mine)
        else:
            mine.copy_(_to_maximum(mine, result[start:stop]))


def _to_maximum(own: Tensor, result: Tensor) -> Tensor:
    out = torch.empty_like(own)
    max_delta(out, result=result, own=own)
    return out
