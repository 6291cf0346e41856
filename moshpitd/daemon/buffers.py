"""Buckets: mapped files in which trainers hand over tensors. One rule: a file is made whole or not.

A sparse file on a full tmpfs is a SIGBUS in whoever touches the missing page, so all blocks are
taken before anybody maps the file, and a file system without room is an error with one sentence.
The name carries the daemon that made it (pid and start time, because pids are reused) and the data
directory that it serves, so that the next daemon of that directory can remove what a killed one
left behind, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import logging
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from moshpitd.errors import TrainerError
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.kernels import copy_past
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import Tensor, tensor_of

log = logging.getLogger(__name__)

HEADER_BYTES = 4096  # one page, so that the tensors behind it are page-aligned
MAGIC = b"MPB1"
API = 1
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = 8
COPY_WITHIN_S = 2.0
SLOWEST_COPY = 250e6
"""So long a trainer in place waits for the copy of its result, and so long for each of so many
bytes. Machines copy ten to forty times as fast; whoever takes longer has other work in that queue,
such as a digest. Then this version is not offered to newcomers, as when a trainer is faster."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)

_NAME = re.compile(r"^moshpit-(?P<place>[0-9a-f]{12})-(?P<pid>\d+)-(?P<born>\d+)-\d+\.bucket$")
_serial = itertools.count(1)


@dataclass(slots=True)
class Deltas:
    """What a late trainer's bucket holds instead of its values, over the rounds of one call.

    `own` keeps the values of the parts under the rule "max": a maximum cannot be taken from a
    difference. They are step counters, so this is small.
    """

    generation: int
    parts: set[int] = field(default_factory=set)
    own: dict[int, Tensor] = field(default_factory=dict)


class Bucket:
    """One trainer's flat buffer: [header page][data], and with `blocks` more blocks like `data`.

    Invariant: what the daemon reads counts only if the generation is even and the same before and
    after. The mapping lives as long as anything refers to it, so that closing never pulls memory
    away from a running thread.
    """

    __slots__ = (
        "_copied", "_handed_over", "_mapping", "_placed", "area", "blocks", "data", "deltas",
        "in_place", "nbytes", "path", "result", "writes",
    )  # fmt: skip

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        *,
        nbytes: int,
        blocks: Blocks | None = None,
        in_place: bool = False,
    ) -> None:
        """`in_place`: `blocks` are two, and the trainer's tensors live in one of them."""
        self.path = path
        self.nbytes = nbytes
        self.data: Tensor = tensor_of(mapping, offset=HEADER_BYTES, nbytes=nbytes)
        self.blocks = blocks
        whole = nbytes if blocks is None else blocks.total
        self.area: Tensor = tensor_of(mapping, offset=HEADER_BYTES, nbytes=whole)
        self.in_place = in_place
        self.result = self.data  # where results go; in place, the block that the trainer is not in
        self.writes = 0  # times the daemon put values in place; a copy in progress watches it
        self._placed: set[int] = set()  # in place: the parts that lie in `result` in this call
        self._copied: threading.Event | None = None
        self.deltas: Deltas | None = None
        self._mapping = mapping
        self._handed_over: int | None = None

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.area.numel()

    @property
    def generation(self) -> int:
        """Counted by the trainer: odd while it fills the bucket, even when it is done."""
        return int(_GENERATION.unpack_from(self._mapping, _GENERATION_AT)[0])

    @property
    def expected(self) -> int:
        """The generation that a round which opens now has to find unchanged."""
        return self.generation if self._handed_over is None else self._handed_over

    def hand_over(self, generation: int) -> bool:
        """The trainer says that its values are in place as `generation`; False if they are not.
        In place, the generation says in which block as well."""
        self._handed_over = generation
        intact = self.intact(generation)
        if intact and self.in_place and self.blocks is not None:
            block = generation >> 1 & 1
            self.data = self.blocks.of(self.area, block)
            self.result = self.blocks.of(self.area, 1 - block)
            self.writes += 1  # who still copies it does not know what lies where any more
            self._placed.clear()
        return intact

    def hand_back(self) -> None:
        """The call is over; the trainer may fill the bucket again. What lies where stays known: if
        the trainer died, its round goes on with what it left."""
        self._handed_over = None
        self.deltas = self._copied = None

    # -- what lies where --------------------------------------------------------------------------

    def holding(self, part: int) -> Tensor:
        """The block that holds what this call has of a part: its result if there is one, else the
        contribution. But for a trainer in place both are `data`."""
        return self.result if part in self._placed else self.data

    def placed(self, part: int) -> None:
        """The part's result lies in `result`, whole."""
        if self.in_place:
            self._placed.add(part)

    @property
    def moved(self) -> bool:
        """Whether what this call came to lies in the other block than the contribution."""
        return bool(self._placed)

    def load(self, values: Tensor, parts: int) -> None:
        """All values anew: a snapshot. Outside a call both blocks of a trainer in place are its own
        business, and it has to ask again; whoever copies loses what is loaded then, too."""
        if self.in_place and self._handed_over is None:
            return
        self.writes += 1
        self.result.copy_(values)
        for part in range(parts):
            self.placed(part)

    def begin_copy(self) -> Callable[[], None]:
        """Somebody copies what it holds now, and calls what is returned when that is over."""
        self._copied = copied = threading.Event()
        return copied.set

    def settle(self, parts: Sequence[Part]) -> None:
        """In place, before the trainer hears of the end, for it goes on in these blocks at once:
        no part is missing in the block that it moves to, and the copy that was begun is made.
        Blocks."""
        generation, copied = self.expected, self._copied
        for part in parts if self._placed else ():
            if not self.intact(generation):
                return  # it gave up, and nothing here is ours
            if part.index not in self._placed:
                stop = part.offset_bytes + part.nbytes
                copy_past(
                    self.data[part.offset_bytes : stop], self.result[part.offset_bytes : stop]
                )
                self._placed.add(part.index)
        if copied is not None:
            copied.wait(COPY_WITHIN_S + self.nbytes / SLOWEST_COPY)

    def intact(self, generation: int) -> bool:
        """Whether the trainer has kept its hands off since `generation` was complete."""
        return generation % 2 == 0 and self.generation == generation

    def close(self) -> None:
        """Remove the file. The memory goes when the last thread that works on it lets go."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:  # not worth a daemon; the next one sweeps
            log.warning("cannot remove the bucket %s: %s", self.path, error.strerror)


def create_bucket(
    buffers_dir: Path,
    *,
    nbytes: int,
    data_dir: Path,
    blocks: Blocks | None = None,
    in_place: bool = False,
) -> Bucket:
    """Make and map a bucket of `nbytes` data bytes (with `blocks`: the first of them), all zero.

    Raises TrainerError: RESOURCE_EXHAUSTED when there is no room, FAILED_PRECONDITION when the
    directory cannot be used. Nothing half-made remains.
    """
    need = HEADER_BYTES + (nbytes if blocks is None else blocks.total)
    try:
        buffers_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _free_bytes(buffers_dir) < need:
            # Asked first, because filling a tmpfs to the brim to find out starves its other users.
            raise _no_room(buffers_dir, need, blocks)
        path = buffers_dir / _name(data_dir)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(buffers_dir, need, blocks) from error
        raise TrainerError(
            f"cannot make a bucket in {buffers_dir}: {error.strerror}; expected a directory that "
            "the daemon may write to (setting buffers_dir)",
            code="FAILED_PRECONDITION",
            reason="buffers_dir",
        ) from error
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, need)
        mapping = mmap.mmap(descriptor, need)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in _NO_ROOM:
            raise _no_room(buffers_dir, need, blocks) from error
        raise TrainerError(
            f"cannot make a bucket of {need} bytes at {path}: {error.strerror}; expected a file "
            "system that can allocate and map files, such as tmpfs (setting buffers_dir)",
            code="FAILED_PRECONDITION",
            reason="buffers_dir",
        ) from error
    finally:
        os.close(descriptor)
    mapping[:8] = MAGIC + API.to_bytes(4, "little")
    return Bucket(path, mapping, nbytes=nbytes, blocks=blocks, in_place=in_place)


async def make_bucket(
    in_thread: Callable[..., Awaitable[Any]],
    buffers_dir: Path,
    *,
    nbytes: int,
    data_dir: Path,
    blocks: Blocks | None = None,
    in_place: bool = False,
) -> Bucket:
    """The same in a thread. Whoever waits may be cancelled, because its trainer died: then no file
    is left that nobody would close."""
    make = partial(
        create_bucket, buffers_dir, nbytes=nbytes, data_dir=data_dir, blocks=blocks,
        in_place=in_place,
    )  # fmt: skip
    making = asyncio.ensure_future(in_thread(make))
    try:
        return cast(Bucket, await asyncio.shield(making))
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(made: asyncio.Future[Any]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def sweep(buffers_dir: Path, *, data_dir: Path) -> list[Path]:
    """Remove the buckets that dead daemons of `data_dir` left in `buffers_dir`; returns what went.

    Called once at start, by the daemon that holds the data directory's lock.
    """
    place = _place(data_dir)
    removed = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for path in sorted(buffers_dir.iterdir()):
            match = _NAME.match(path.name)
            if match is None or match["place"] != place:
                continue
            if _born(int(match["pid"])) == int(match["born"]) or not _is_ours(path):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _name(data_dir: Path) -> str:
    pid = os.getpid()
    return f"moshpit-{_place(data_dir)}-{pid}-{_born(pid)}-{next(_serial)}.bucket"


def _place(data_dir: Path) -> str:
    """Names a data directory. The inode is in it, because two containers that share /dev/shm may
    both keep their data under the same path, and neither can see whether the other's pid lives."""
    where = data_dir.resolve()
    status = where.stat() if where.exists() else None
    words = (where, status.st_dev if status else 0, status.st_ino if status else 0)
    return hashlib.blake2b(repr(words).encode(), digest_size=6).hexdigest()


def _born(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # Field 22; the second field is the program's name, which may hold spaces and brackets.
    return int(line[line.rindex(b")") + 2 :].split()[19])


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    # A tmpfs without a size limit reports no blocks at all: then only the allocation can tell.
    return status.f_bavail * status.f_frsize if status.f_blocks else 1 << 62


def _no_room(directory: Path, need: int, blocks: Blocks | None) -> TrainerError:
    free = _free_bytes(directory)
    what = "" if blocks is None else f" ({blocks.count} blocks of {blocks.nbytes})"
    return TrainerError(
        f"{directory} has no room for a bucket: {need} bytes needed{what}, {free} free; make that "
        "file system larger or point the setting buffers_dir to another one",
        code="RESOURCE_EXHAUSTED",
        reason="no_room",
    )
