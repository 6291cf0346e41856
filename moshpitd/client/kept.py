"""What a trainer contributed to a round that runs while it goes on, and then what it has to add.

One rule: the training thread pays one pass over memory when a round begins (`take`) and one when it
lands (`add_to`); everything else is done by the flight's own thread, in slices so small that torch
runs each in that thread alone and gives the interpreter back after microseconds.

    x_live <- x_live + (average - contribution)

so whatever the optimizer did to x_live since the contribution was taken stays in it. A part without
a result adds 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from moshpitd.client.buckets import Bucket
from moshpitd.tensors.delta import delta_in_place
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.slices import copy_quietly


class Holds(Enum):
    """What the buffer means to whoever lands the round."""

    CONTRIBUTION = "the values as they went out: nothing to do"
    DELTA = "to be added"
    VALUES = "to replace what the trainer has: a snapshot"


class Kept:
    """One buffer of the bucket's size. Invariant: it belongs to the training thread, except from
    the start of a flight to its end, when it belongs to the flight."""

    def __init__(self, layout: Layout, *, pinned: bool) -> None:
        """`pinned`: for tensors on a GPU, whose copies then run at the speed of the bus."""
        self.layout = layout
        self.holds = Holds.CONTRIBUTION
        self._data = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._views = layout.views(self._data)

    # -- in the training thread -------------------------------------------------------------------

    def take(self, tensors: Sequence[Tensor]) -> None:
        """The contribution: tensors in spec order, of any strides and devices."""
        self.holds = Holds.CONTRIBUTION
        with torch.no_grad():
            self.layout.gather(tensors, self._data)

    def land(self, tensors: Sequence[Tensor]) -> None:
        """Bring what the round brought into the tensors, in place."""
        with torch.no_grad():
            if self.holds is Holds.DELTA:
                self._add_to(tensors)
            elif self.holds is Holds.VALUES:
                self.layout.scatter(self._data, tensors)

    def _add_to(self, tensors: Sequence[Tensor]) -> None:
        here: list[Tensor] = []
        moves: list[Tensor] = []
        for tensor, delta in zip(tensors, self._views, strict=True):
            own = tensor.detach()
            if own.dtype is torch.bool:
                own.logical_or_(delta.to(own.device))  # torch has no + for bools
            elif own.device.type == "cpu":
                here.append(own)
                moves.append(delta)
            else:
                # Pinned, so the next copy is on its way while this one is added.
                own.add_(delta.to(own.device, non_blocking=True))
        if here:
            # One call for all: for a model of many small tensors the interpreter is the cost.
            torch._foreach_add_(here, moves)

    # -- in the flight's thread -------------------------------------------------------------------

    def hand_to(self, bucket: Bucket) -> int:
        """Copy the contribution into the bucket; returns its even generation."""
        return bucket.fill_from(self._data)

    def subtract_from(self, bucket: Bucket, *, without_result: Sequence[int]) -> None:
        """Become average - contribution, with zeros for the parts without a result."""
        skip = frozenset(without_result)
        for part in self.layout.parts:
            own = self.layout.part_view(self._data, part)
            result = self.layout.part_view(bucket.data, part)
            delta_in_place(own, result=None if part.index in skip else result, rule=part.rule)
        self.holds = Holds.DELTA

    def become(self, bucket: Bucket, holds: Holds) -> None:
        """Take over what the daemon left in the bucket as it is."""
        copy_quietly(bucket.data[: self.layout.nbytes], self._data)
        self.holds = holds
