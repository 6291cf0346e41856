"""Mapped memory seen as tensors, and tensors seen as bytes. One rule: nothing is copied here.

The daemon may not import torch, and needs none of it: it gets a bucket's bytes as a tensor from
here, hands views of it to the layout, the codecs and the accumulators, and gives a payload's bytes
to a link. A view keeps the mapping below it alive, so memory is unmapped when the last view goes.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors.dtypes import DTYPES

__all__ = ["Scratch", "Tensor", "anonymous", "bytes_of", "fresh", "tensor_of", "typed", "untyped"]


def tensor_of(
    buffer: mmap.mmap | bytearray | memoryview, *, offset: int = 0, nbytes: int | None = None
) -> Tensor:
    """A 1-D uint8 tensor over `nbytes` bytes (default: all that follow) of a writable buffer."""
    count = len(buffer) - offset if nbytes is None else nbytes
    if count == 0:  # torch refuses an empty buffer, and an empty layout is allowed
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=count)


def anonymous(nbytes: int) -> Tensor:
    """Fresh zeroed memory that no file names; it goes with the process, however that ends."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return tensor_of(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError) as error:
        raise TrainerError(
            f"no memory for a copy of the parameters: {nbytes} bytes needed ({error})",
            code="RESOURCE_EXHAUSTED",
            reason="no_room",
        ) from error


def fresh(nbytes: int) -> Tensor:
    """Uninitialised memory for one payload, as 1-D uint8."""
    return torch.empty(nbytes, dtype=torch.uint8)


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, for a socket."""
    return memoryview(untyped(values).numpy().data)


def typed(buffer: Tensor, dtype: str) -> Tensor:
    """A uint8 tensor seen as `dtype`; its length must be a multiple of the item size."""
    return buffer.view(DTYPES[dtype].torch_dtype)


def untyped(values: Tensor) -> Tensor:
    """A contiguous 1-D tensor seen as its bytes."""
    return values.detach().view(torch.uint8)


class Scratch(threading.local):
    """Uninitialised memory of one thread, by name; it grows to the largest part that thread saw.

    Separate from `tensors.slices.scratch`, which the accumulators use underneath: a part's decoded
    values must survive the call that adds them.
    """

    def __init__(self) -> None:
        self._store: dict[str, Tensor] = {}

    def take(self, name: str, *, numel: int, dtype: str) -> Tensor:
        """1-D tensor of `dtype`; valid until this thread takes the same name again."""
        nbytes = numel * DTYPES[dtype].itemsize
        held = self._store.get(name)
        if held is None or held.numel() < nbytes:
            held = self._store[name] = torch.empty(nbytes, dtype=torch.uint8)
        return typed(held[:nbytes], dtype)
