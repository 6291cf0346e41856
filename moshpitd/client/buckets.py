"""The file that trainer and daemon share. One rule: an odd generation in its header means "being
filled", and nobody but the client writes the generation.

Layout of the file: one header page, then the data of `tensors.layout`. The daemon makes it with
posix_fallocate, so that a full tmpfs is an error at attach and never a SIGBUS here.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.rpc.stubs import API
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import tensor_of
from moshpitd.tensors.slices import copy_quietly

MAGIC = b"MPB1"
HEADER = struct.Struct("<4sIQ")  # magic, api, generation
GENERATION = struct.Struct("<Q")
GENERATION_AT = 8


class Bucket:
    """One mapped bucket. Invariant: outside `fill` the generation is even, and only a fill changes
    the data here.

    Between the Average call and its result the data belongs to the daemon; the session keeps the
    client's hands off it, and the generation shows the daemon if anything else did not.
    """

    in_place = False  # whether the tensors live here: see `client.placing`

    def __init__(
        self, path: str, *, layout: Layout, data_offset: int, nbytes: int, slots: int = 0
    ) -> None:
        """`slots`: of an exchange with neighbours, whose blocks follow in `area`."""
        self.path, self.layout, self.slots = path, layout, slots
        self.data_offset, self.nbytes = data_offset, nbytes
        self._map = _mapped(path, nbytes)
        magic, api, generation = HEADER.unpack_from(self._map)
        need = data_offset + layout.nbytes
        if magic != MAGIC or api != API or nbytes < need or data_offset < HEADER.size:
            raise TrainerError(
                f"{path}: magic {magic!r}, api {api}, {nbytes} bytes; expected {MAGIC!r}, {API}, "
                f"at least {need} bytes: daemon and client library are of different ages",
                code="FAILED_PRECONDITION",
                reason="api_differs",
            )
        self._generation: int = generation + generation % 2
        self.data = tensor_of(self._map, offset=data_offset, nbytes=layout.nbytes)
        self.result = self.data  # where the daemon leaves what a call came to
        self.area = tensor_of(self._map, offset=data_offset, nbytes=nbytes - data_offset)

    @property
    def filled(self) -> bool:
        """Somebody has filled it to the end. For files that several trainers map."""
        generation = int(GENERATION.unpack_from(self._map, GENERATION_AT)[0])
        return generation > 0 and generation % 2 == 0

    def fill(
        self, tensors: Sequence[Tensor], *, beside: tuple[Sequence[Tensor], Tensor] | None = None
    ) -> int:
        """Copy the trainer's tensors (spec order; any strides, any device) in, and others `beside`
        them to a block of their own; returns the even generation."""
        self._write(self._generation + 1)
        try:
            with torch.no_grad():
                self.layout.gather(tensors, self.data)
                if beside is not None:
                    self.layout.gather(*beside)
        finally:
            # Also after an error: half-filled data is never sent, because no call carries this
            # number.
            self._write(self._generation + 1)
        return self._generation

    def fill_from(self, data: Tensor) -> int:
        """Copy data that is laid out already (1-D uint8) in; returns the even generation. For a
        thread beside the training loop: it takes no cores but its own."""
        self._write(self._generation + 1)
        try:
            copy_quietly(data, self.data[: data.numel()])
        finally:
            self._write(self._generation + 1)
        return self._generation

    def take_back(self, generation: int) -> None:
        """The call with this generation is over. Of values that were copied in nothing is to be
        taken back: the next fill says it."""

    def move_out(self, tensors: Mapping[str, Tensor]) -> None:
        """The trainer leaves. Nothing of it lives here."""

    def copy_to(
        self, tensors: Sequence[Tensor], *, skip: Iterable[int] = (), moved: bool = False
    ) -> None:
        """Overwrite the tensors in place, but for the parts `skip`. `moved` as the daemon says.

        Parts without a result are skipped although they hold local values: a result that its
        reducer was given up for may still land there, and what is held must be what was reported.
        """
        with torch.no_grad():
            self.layout.scatter(self.data, tensors, skip_parts=frozenset(skip))

    def add_to(self, tensors: Sequence[Tensor]) -> None:
        """Add a delta (`average - contribution`, 0 where there is no result) to the tensors in
        place."""
        with torch.no_grad():
            for tensor, delta in zip(tensors, self.layout.views(self.result), strict=True):
                own = tensor.detach()
                moved = delta.to(own.device)
                if own.dtype is torch.bool:
                    own.logical_or_(moved)  # the maximum of two bools; torch has no + for them
                else:
                    own.add_(moved)

    @property
    def generation(self) -> int:
        return self._generation

    def _write(self, generation: int) -> None:
        self._generation = generation
        GENERATION.pack_into(self._map, GENERATION_AT, generation)


def copies_of(layout: Layout, block: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a block of a bucket (1-D uint8) holds, by the names of `like`, which are in the order of
    the layout, and on the devices of these: who mixes with it computes where its model is."""
    views = layout.views(block)
    return {
        name: view.to(tensor.device, copy=True)
        for (name, tensor), view in zip(like.items(), views, strict=True)
    }


def _mapped(path: str, nbytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise refusal(
            "bucket_unreachable",
            f"{path}: {error.strerror}; the daemon made this file, so if it runs in a container, "
            "mount its buffers_dir under the same path here",
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != nbytes or size < HEADER.size:
            raise refusal("bucket_unreachable", f"{path} has {size} bytes, expected {nbytes}")
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
