"""The arithmetic of two peers that take the mean of their parameters, on buckets. One rule: what
one adds is the exact negative of what the other adds, so the sum stays (tensors/rules/adpsgd).

Parts under the rule "max" (integers and bools) are left as they are: a mean of two at a time has no
maximum that all would come to.
"""

from __future__ import annotations

from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Tensor
from moshpitd.tensors.reduction import first_nonfinite
from moshpitd.tensors.rules.adpsgd import average_delta


def add_in_place(layout: Layout, values: Tensor, update: Tensor) -> None:
    """values += update; both 1-D uint8 of `layout`."""
    for part in _means(layout):
        layout.part_view(values, part).add_(layout.part_view(update, part))


def can_add(layout: Layout, values: Tensor, update: Tensor) -> bool:
    """Whether all of the sum is finite: that of two finite numbers may not be."""
    return all(
        first_nonfinite(layout.part_view(values, part) + layout.part_view(update, part)) is None
        for part in _means(layout)
    )


def settle(layout: Layout, own: Tensor, other: Tensor) -> bool:
    """own <- the mean of both; `other` becomes what the other side has to add to its own. False,
    and `own` is as it was: some difference overflows."""
    for part in _means(layout):
        mine, theirs = layout.part_view(own, part), layout.part_view(other, part)
        theirs.copy_(average_delta(theirs, mine))
        if first_nonfinite(theirs) is not None:
            return False
    for part in _means(layout):
        layout.part_view(own, part).sub_(layout.part_view(other, part))
    return True


def _means(layout: Layout) -> list[Part]:
    return [part for part in layout.parts if part.rule == "mean"]
