"""Residuals in the bucket of their run, for checkpoints. One rule: a residual lies in the bucket
where the elements it belongs to lie, so that no second layout is needed for it.

What is owed belongs to the run at this node and not to one trainer: trainers of a node are averaged
before anything is coded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.dtypes import DTYPES
from moshpitd.tensors.feedback import LOSSY_DTYPE, ErrorFeedback
from moshpitd.tensors.layout import Layout


def lossy_view(layout: Layout, data: Tensor) -> Tensor:
    """The elements of a bucket's data (1-D uint8) that may owe something: flat float32, a view."""
    for region in layout.regions:
        if region.dtype == LOSSY_DTYPE:
            start = region.offset_bytes
            stop = start + region.numel * DTYPES[LOSSY_DTYPE].itemsize
            return data[start:stop].view(torch.float32)
    return data[:0].view(torch.float32)


def write_residual(feedback: ErrorFeedback, layout: Layout, data: Tensor) -> bool:
    """False, and nothing is written, when nothing is owed. Takes a copy of the residual."""
    owed = feedback.state_dict()
    for values in owed.values():
        lossy_view(layout, data).copy_(values)
    return bool(owed)


def load_residual(feedback: ErrorFeedback, layout: Layout, data: Tensor | None) -> None:
    """What the data hold, or nothing, becomes what is owed. TrainerError for NaN."""
    held = {} if data is None else {LOSSY_DTYPE: lossy_view(layout, data)}
    feedback.load_state_dict(held)
