"""Tensors that live in the bucket (`attach(..., in_place=True)`): an average copies none of them.
One rule: the daemon only reads the block that they are in and only writes to the other one, so
whatever becomes of a call or of the daemon, the model is what it was until it is moved over.

The bucket has two blocks (`tensors.blocks` without slots). A call contributes the block as it lies
there; its generation says which one (0 or 2 modulo 4), and until the call ends it is even. In
between it is odd, which tells the daemon that the values may change at any moment. When a result is
accepted every tensor is made a view of the other block. The parameters stay the same objects, so an
optimizer's state stays theirs.

The memory is a mapped file: a forked process shares the tensors instead of getting a copy of them,
and the daemon's `buffers_dir` should be in memory (tmpfs), or training is written to a disk.

Each tensor has a storage of its own in the mapping: torch.save and copy.deepcopy take whole
storages, and of one parameter that should be one parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moshpitd.client.buckets import Bucket
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.rpc.stubs import messages
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import tensor_of

log = logging.getLogger("moshpitd.client")


class PlacedBucket(Bucket):
    """Invariant: the generation is even from `fill` to `take_back` and odd otherwise; `data` is the
    block that the tensors are in, `result` the other one."""

    in_place = True

    def __init__(self, path: str, *, layout: Layout, data_offset: int, nbytes: int) -> None:
        super().__init__(path, layout=layout, data_offset=data_offset, nbytes=nbytes)
        blocks = Blocks(layout.nbytes, slots=0, full=False)
        if nbytes != data_offset + blocks.total:
            raise TrainerError(
                f"{path} has {nbytes} bytes, expected {data_offset + blocks.total}: daemon and "
                "client library are of different ages",
                code="FAILED_PRECONDITION",
                reason="api_differs",
            )
        self._block = 0
        self._entered = False
        self._told = False
        self.data, self.result = (blocks.of(self.area, block) for block in range(2))
        self._views = [self._views_of(block, blocks) for block in range(2)]
        self._write(self._generation + 1)

    def fill(
        self, tensors: Sequence[Tensor], *, beside: tuple[Sequence[Tensor], Tensor] | None = None
    ) -> int:
        """Hand over the block as it is; returns its generation. Tensors (spec order) that are not
        in it are moved in first, with their values: all of them at first, later those whose storage
        was replaced. TrainerError for one that cannot live here; nothing has moved then."""
        views = self._views[self._block]
        strays = [i for i, one in enumerate(tensors) if not _is_view(one, views[i])]
        if strays:
            names = [spec.name for spec in self.layout.specs]
            check_movable(dict(zip(names, tensors, strict=True)))
            self._tell([names[i] for i in strays])
            for i in strays:
                with torch.no_grad():
                    views[i].copy_(tensors[i].detach())
                _point(tensors[i], views[i])
            self._entered = True
        handed = self._generation + 1
        self._write(handed + (2 * self._block - handed) % 4)
        return self._generation

    def take_back(self, generation: int) -> None:
        """The call with this generation is over, however it ended: what is in the block is the
        trainer's again. What still runs for it in the daemon touches neither block any more."""
        if self._generation == generation:
            self._write(generation + 1)

    def copy_to(
        self, tensors: Sequence[Tensor], *, skip: Iterable[int] = (), moved: bool = False
    ) -> None:
        """Move the tensors to where the result is, if it is in the other block. The parts `skip`
        come with them as they are: what is held must be what was reported."""
        if not moved:
            return
        for index in skip:
            part = self.layout.parts[index]
            self.layout.part_view(self.result, part).copy_(self.layout.part_view(self.data, part))
        self._block = 1 - self._block
        self.data, self.result = self.result, self.data
        for tensor, view in zip(tensors, self._views[self._block], strict=True):
            _point(tensor, view)

    def move_out(self, tensors: Mapping[str, Tensor]) -> None:
        """To memory of their own: the bucket's would be held as long as one of them is in it."""
        for spec, view in zip(self.layout.specs, self._views[self._block], strict=True):
            tensor = tensors.get(spec.name)
            if tensor is not None and _is_view(tensor, view):
                _point(tensor, view.clone())

    def _views_of(self, block: int, blocks: Blocks) -> list[Tensor]:
        area = blocks.of(self.area, block)
        first = self.data_offset + block * blocks.stride
        found = []
        for view in self.layout.views(area):
            at = first + (view.data_ptr() - area.data_ptr() if view.numel() else 0)
            flat = tensor_of(self._map, offset=at, nbytes=view.nbytes)
            found.append(flat.view(view.dtype).view(view.shape))
        return found

    def _tell(self, strays: Sequence[str]) -> None:
        if self._entered and not self._told:
            self._told = True
            log.warning(
                "%d tensors are not where they were put (the first: %r), as after .to() or "
                "load_state_dict(assign=True); they are copied into the bucket again, each time",
                len(strays), strays[0],
            )  # fmt: skip


def bucket_of(reply: messages.AttachReply, layout: Layout, *, run: str, in_place: bool) -> Bucket:
    """The bucket that the daemon made. One that is too old for `in_place` made an ordinary one."""
    path, at, size = reply.bucket_path, reply.data_offset, reply.bucket_bytes
    if in_place and reply.in_place:
        return PlacedBucket(path, layout=layout, data_offset=at, nbytes=size)
    if in_place:
        log.warning("%s: the daemon is too old for in_place: averages are copied as ever", run)
    return Bucket(path, layout=layout, data_offset=at, nbytes=size, slots=reply.slots)


def check_movable(tensors: Mapping[str, Tensor], beside: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Raises TrainerError (bad_tensor) for one that cannot become a view of a bucket; `beside`:
    others that must not share memory with them, because they would stay behind."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise _refused(name, f"on {tensor.device}", "one on the CPU, or in_place=False")
        if not tensor.is_contiguous():
            raise _refused(name, f"of strides {tensor.stride()}", "a contiguous one")
        if tensor.requires_grad and not tensor.is_leaf:
            raise _refused(name, "computed from others (not a leaf)", "a leaf, such as a parameter")
        if tensor._is_view():
            raise _refused(name, "a view, and what it is a view of would stay behind", ".clone()")
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*tensors.items(), *beside):
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        at = tensor.untyped_storage().data_ptr()
        other, owner = owners.setdefault(at, (name, tensor))
        if owner is not tensor:
            expected = "memory of its own (.clone()), or the same tensor under both names"
            raise _refused(name, f"in the same memory as {other!r}", expected)


def all_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Also those that a checkpoint leaves out: whatever may share memory with what is averaged."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def no_overlap(run: str) -> ConfigError:
    return ConfigError(
        f"run {run!r} is in place: the daemon reads the tensors themselves, and with overlap they "
        "would change meanwhile",
        key="overlap",
        expected="False, or a session without in_place",
    )


def _refused(name: str, what: str, expected: str) -> TrainerError:
    return refusal("bad_tensor", f"in_place: tensor {name!r} is {what}, expected {expected}")


def _is_view(tensor: Tensor, view: Tensor) -> bool:
    """Whether it is exactly what we made it."""
    return (
        tensor.device.type == "cpu"
        and tensor.data_ptr() == view.data_ptr()
        and tensor.stride() == view.stride()
        and tensor.shape == view.shape
        and tensor.dtype == view.dtype
    )


def _point(tensor: Tensor, view: Tensor) -> None:
    """Make it this memory. A graph that saved it before is refused by autograd then, as after any
    change in place."""
    tensor.data = view
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
