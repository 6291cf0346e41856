"""Mapped memory seen as tensors, and tensors seen as bytes. One rule: nothing is copied here.

The daemon may not import torch, and needs none of it: it gets a bucket's bytes as a tensor from
here, hands views of it to the layout, the codecs and the accumulators, and gives a payload's bytes
to a link. A view keeps the mapping below it alive, so memory is unmapped when the last view goes.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors.dtypes import DTYPES

__all__ = [
    "Area",
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
HUGE_PAGE_BYTES = 2 << 20
# What an area takes at once: no more than a small layout needs, and never so much that a kernel
# that does not overcommit would refuse it.
AREA_BYTES = 64 << 20
# Rooms of a part and of its payload are cut from so much: eight or sixteen of them.
ROOMS_CUT_BYTES = 8 << 20
ALIGNED_BYTES = 64  # a line of the cache, and what the widest stores want


def tensor_of(
    buffer: mmap.mmap | bytearray | memoryview, *, offset: int = 0, nbytes: int | None = None
) -> Tensor:
    """A 1-D uint8 tensor over `nbytes` bytes (default: all that follow) of a writable buffer."""
    count = len(buffer) - offset if nbytes is None else nbytes
    if count == 0:  # torch refuses an empty buffer, and an empty layout is allowed
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=count)


def anonymous(nbytes: int, *, what: str = "a copy of the parameters") -> Tensor:
    """Fresh zeroed memory that no file names; it goes with the process, however that ends.

    In huge pages where the kernel has them: to touch a GB for the first time takes 0.05 s then and
    0.35 s in pages of 4 KiB, which was more than half of a daemon's work in its first two rounds.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a kernel built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return tensor_of(memory)
    except (OSError, OverflowError) as error:
        raise TrainerError(
            f"no memory for {what}: {nbytes} bytes needed ({error})",
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


class Area:
    """Zeroed memory for what is kept until all of it goes, one piece behind the other.

    Only the pages count that somebody wrote, and with huge ones these are 2 MiB: things that are
    written at the same time have to be neighbours, wherever they belong.
    """

    def __init__(self, expected_bytes: int) -> None:
        """`expected_bytes`: of all pieces; more is no error."""
        self._step = max(1, min(AREA_BYTES, expected_bytes))
        self._rest = anonymous(0)

    def take(self, nbytes: int) -> Tensor:
        """1-D uint8, zeros. Not for two threads at once."""
        need = -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if self._rest.numel() < need:
            self._rest = anonymous(max(need, self._step), what="what codecs left over")
        piece, self._rest = self._rest[:nbytes], self._rest[need:]
        return piece


class _Block:
    """Rooms of one size that lie in one mapping. The kernel gets it back as a whole, when the last
    of them goes; so they are kept together or not at all."""

    __slots__ = ("free", "kept", "room_bytes")

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.free: list[_Room] = []
        self.kept = True


class Rooms:
    """Memory for accumulators and payloads that comes back by itself when nobody refers to it.

    A page that is new to the process costs a fault and a clearing: 0.35 ms per MB, a twelfth of a
    daemon's work in a round, and every round took them anew. Nobody hands a room back, because a
    payload may still be on its way to a slow member when its round is over.

    Invariant: a room is lent to one holder, and at most `keep_bytes` wait for the next. Nothing of
    a block waits once a part of it was given up: one room would hold all of it in memory.
    """

    def __init__(self, *, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        # What came back and is not sorted in yet. A collection of garbage may end a lease anywhere,
        # also in the middle of what the lock protects; then whoever holds it sorts that in too.
        self._back: deque[tuple[_Block, _Room]] = deque()
        # Blocks with rooms that wait, those last that something came back to last.
        self._by_age: OrderedDict[_Block, None] = OrderedDict()
        self._by_size: dict[int, OrderedDict[_Block, None]] = {}
        self.waiting_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """1-D uint8, not initialised; as long as it or a view of it lives nobody else gets it."""
        with self._lock:
            found = self._found(nbytes)
        self._sort_in()
        block, room = self._made(nbytes) if found is None else found
        lease = room[:]  # every tensor and memoryview over it keeps this object alive
        weakref.finalize(lease, self._come_back, block, room).atexit = False
        return torch.from_numpy(lease)

    def _found(self, nbytes: int) -> tuple[_Block, _Room] | None:
        """Lock held. The last one that came back: a cache may hold it still."""
        blocks = self._by_size.get(nbytes)
        if blocks is None:
            return None
        block = next(reversed(blocks))
        room = block.free.pop()
        self.waiting_bytes -= nbytes
        if not block.free:
            self._forget(block)
        return block, room

    def _made(self, nbytes: int) -> tuple[_Block, _Room]:
        """Many of a size at once, in huge pages; a small or a large one alone."""
        block = _Block(nbytes)
        need = max(ALIGNED_BYTES, -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        count = min(ROOMS_CUT_BYTES, self._keep_bytes) // need
        if count < 2 or nbytes < ROOMS_CUT_BYTES // 64:
            return block, np.empty(nbytes, np.uint8)
        whole = anonymous(count * need, what="parts and payloads").numpy()
        for start in range(need, count * need, need):
            self._back.append((block, whole[start : start + nbytes]))
        self._sort_in()
        return block, whole[:nbytes]

    def _come_back(self, block: _Block, room: _Room) -> None:
        self._back.append((block, room))
        self._sort_in()

    def _sort_in(self) -> None:
        """Not while another one is at it: who lets the lock go looks again, so nothing is left."""
        while self._back and self._lock.acquire(blocking=False):
            try:
                while self._back:
                    self._wait(*self._back.popleft())
            finally:
                self._lock.release()

    def _wait(self, block: _Block, room: _Room) -> None:
        """Lock held."""
        if not block.kept:
            return
        block.free.append(room)
        self.waiting_bytes += room.nbytes
        for blocks in (self._by_age, self._by_size.setdefault(room.nbytes, OrderedDict())):
            blocks[block] = None
            blocks.move_to_end(block)
        while self.waiting_bytes > self._keep_bytes:
            oldest = next(iter(self._by_age))
            self._forget(oldest)
            self.waiting_bytes -= len(oldest.free) * oldest.room_bytes
            oldest.kept = False
            oldest.free.clear()

    def _forget(self, block: _Block) -> None:
        """Lock held: nothing of it waits."""
        del self._by_age[block]
        blocks = self._by_size[block.room_bytes]
        del blocks[block]
        if not blocks:
            del self._by_size[block.room_bytes]


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
