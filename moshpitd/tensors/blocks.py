"""Where everything of an exchange with neighbours lies in a bucket: blocks of one layout each. One
rule: a pure function of (bytes of the layout, slots, full), so that trainer and daemon agree.

| block | holds | written by |
|---|---|---|
| 0 | the message | trainer |
| 1 | the message as the neighbours decode it | daemon |
| 2 .. 1 + slots | the neighbours' messages, decoded | daemon |
| then, with `full` | what our messages before this one add up to | trainer |
| then, with `full` | the neighbours' | daemon |
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpitd.tensors.layout import ALIGNMENT_BYTES
from moshpitd.tensors.mapped import Tensor

MESSAGE, DECODED = 0, 1
FIRST_SLOT = 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """`nbytes` of one block, at `stride` from the one before it."""

    nbytes: int
    slots: int
    full: bool

    @property
    def stride(self) -> int:
        return -(-self.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def count(self) -> int:
        return FIRST_SLOT + self.slots + (1 + self.slots if self.full else 0)

    @property
    def total(self) -> int:
        return self.stride * self.count

    @property
    def own_full(self) -> int:
        return FIRST_SLOT + self.slots

    def slot(self, index: int, *, full: bool = False) -> int:
        return (self.own_full + 1 if full else FIRST_SLOT) + index

    def of(self, area: Tensor, block: int) -> Tensor:
        """A block of 1-D uint8 memory that holds all."""
        return area[block * self.stride : block * self.stride + self.nbytes]
