"""The compiled passes over memory (moshpitd/_native.c), where they were built. One rule: they give
the bits of the torch code beside them, so nobody but a clock can tell which of the two ran.

A part is one call, during which the interpreter is free for others; the same part in torch is some
twenty calls, after each of which a thread waits for its turn. Not built (no compiler, another
processor), `BUILT` is False and the torch code runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError

try:
    from moshpitd import _native as native

    BUILT = hasattr(native, "half_bound")  # not in one that was built of an older source
except ImportError:
    native = None  # type: ignore[assignment]
    BUILT = False

__all__ = ["BUILT", "CPU", "address", "copy_past", "native", "sum_into", "takes"]

CPU = torch.device("cpu")  # where all of it is
# Below this the caches hold both sides, and what is copied may be read there at once.
PAST_BYTES = 256 << 10


def takes(*tensors: Tensor | None) -> bool:
    """Whether the compiled code can work on these: built, and all in the host's memory."""
    return BUILT and all(one is None or one.device.type == "cpu" for one in tensors)


def address(values: Tensor | None, numel: int, dtype: torch.dtype = torch.float32) -> int:
    """Of the first of `numel` elements in a row; 0 for None. What is not so is a mistake of ours,
    and would be written over the memory of others."""
    if values is None:
        return 0
    if values.dtype != dtype or values.numel() < numel or not values.is_contiguous():
        raise LocalProtocolError(
            f"compiled code: got {values.dtype} {list(values.shape)}, expected contiguous "
            f"{dtype} of at least {numel}"
        )
    return values.data_ptr()


def sum_into(values: Tensor, added: Tensor | None, out: Tensor) -> float:
    """out = values + added, or a copy (1-D, equal length and dtype); returns its squared norm,
    which is not finite if a value is not, or NaN where nobody looked (all but float32)."""
    if takes(values, added, out) and values.is_contiguous() and values.dtype == torch.float32:
        numel = out.numel()
        where = (address(values.detach(), numel), address(added, numel), address(out, numel))
        return native.sum_into(*where, numel)
    if added is None:
        out.copy_(values)
    else:
        torch.add(values, added, out=out)
    return math.nan


def copy_past(source: Tensor, target: Tensor, *, non_blocking: bool = False) -> None:
    """source -> target of the same shape, in this thread and past the caches where that can be: for
    what is not read again soon. They do not overlap. `non_blocking` is for torch's copy."""
    nbytes = target.numel() * target.element_size()
    # A class of its own may keep its values elsewhere, and what is known to be zero keeps none (its
    # address is 0): what they are worth only torch's copy knows.
    if (
        nbytes >= PAST_BYTES
        and type(source) is Tensor
        and type(target) is Tensor
        and takes(source, target)
        and source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
        and not source.is_neg()
        and not source.is_conj()
        and source.data_ptr() != 0
    ):
        native.copy_past(target.data_ptr(), source.data_ptr(), nbytes)
    else:
        target.copy_(source, non_blocking=non_blocking)
