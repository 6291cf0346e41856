"""Mapped memory seen as tensors, and tensors seen as bytes. One rule: nothing is copied here.

The daemon may not import torch, and needs none of it: it gets a bucket's bytes as a tensor from
here, hands views of it to the layout, the codecs and the accumulators, and gives a payload's bytes
to a link. A view keeps the mapping below it alive, so memory is unmapped when the last view goes.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors.dtypes import DTYPES

__all__ = [
    "Rooms",
    "Scratch",
    "Tensor",
    "anonymous",
    "bytes_of",
    "fresh",
    "tensor_of",
    "typed",
    "untyped",
]


_Room: TypeAlias = npt.NDArray[np.uint8]
# Rooms that a search looks at: a run has two or three sizes of them (a part's, its payload's, those
# of the last part), so one that fits is among the first few or there is none.
ROOMS_TRIED = 16


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


class Rooms:
    """Memory for accumulators and payloads that comes back by itself when nobody refers to it.

    A page that is new to the process costs a fault and a clearing: 0.35 ms per MB, a twelfth of a
    daemon's work in a round, and every round took them anew. Nobody hands a room back, because a
    payload may still be on its way to a slow member when its round is over.

    Invariant: a room is lent to one holder, and at most `keep_bytes` wait for the next.
    """

    def __init__(self, *, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        # Reentrant, because a collection of garbage may end a lease in the middle of `take`.
        self._lock = threading.RLock()
        self._free: deque[_Room] = deque()
        self.waiting_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """1-D uint8, not initialised; as long as it or a view of it lives nobody else gets it."""
        room = self._found(nbytes)
        if room is None:
            room = np.empty(nbytes, np.uint8)
        lease = room[:]  # every tensor and memoryview over it keeps this object alive
        weakref.finalize(lease, self._back, room).atexit = False
        return torch.from_numpy(lease)

    def _found(self, nbytes: int) -> _Room | None:
        with self._lock:
            for _ in range(min(len(self._free), ROOMS_TRIED)):
                room = self._free.popleft()
                if room.nbytes == nbytes:
                    self.waiting_bytes -= nbytes
                    return room
                self._free.append(room)
        return None

    def _back(self, room: _Room) -> None:
        with self._lock:
            self._free.append(room)
            self.waiting_bytes += room.nbytes
            while self.waiting_bytes > self._keep_bytes:
                self.waiting_bytes -= self._free.popleft().nbytes


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
