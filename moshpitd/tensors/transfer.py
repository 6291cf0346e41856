"""Copies between a trainer's tensors and a bucket in host memory. One rule: after a call returns,
the bytes are there; no copy is left in flight on a device.

Tensors on the host are copied directly. Tensors on a device go directly only into a pinned bucket;
else they pass through two pinned halves, so that the copy over the bus and the copy in host memory
overlap (a pageable target makes the driver do the same with one small half, and wait each time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.tensors.kernels import copy_past
from moshpitd.tensors.slices import slice_bounds

HALF_BYTES = 16 * 1024 * 1024  # large enough that launching a copy is noise beside the copy


class Fence(Protocol):
    """A mark in a device's queue of work that the host can wait for."""

    def mark(self) -> None: ...

    def wait(self) -> None: ...


class HostFence:
    """The fence of a device whose copies are finished when they return: the CPU."""

    def mark(self) -> None:
        return

    def wait(self) -> None:
        return


class CudaFence:
    """A CUDA event on the device's current stream (the one that the trainer's kernels are on)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def mark(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()  # returns at once if nothing was marked yet


@dataclass(frozen=True, slots=True)
class Staging:
    """Two equal host buffers, a fence each. Invariant: a half is reused only after its fence."""

    halves: tuple[Tensor, Tensor]
    fences: tuple[Fence, Fence]

    @classmethod
    def for_device(cls, device: torch.device, *, half_bytes: int = HALF_BYTES) -> Staging:
        """Pinned halves for a CUDA device; plain ones for the CPU (the stand-in that tests use)."""
        pinned = device.type == "cuda"
        halves = [torch.empty(half_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        fences: list[Fence] = [CudaFence(device) if pinned else HostFence() for _ in range(2)]
        return cls((halves[0], halves[1]), (fences[0], fences[1]))

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """source (1-D contiguous, on the device) -> target (1-D, host, same dtype and numel)."""
        landing: tuple[Tensor, Tensor, Fence] | None = None
        for half, fence, start, stop in self._turns(source):
            half.copy_(source[start:stop], non_blocking=True)
            fence.mark()
            if landing is not None:
                _land(*landing)
            landing = (half, target[start:stop], fence)
        if landing is not None:
            _land(*landing)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """source (1-D on the host) -> target (1-D contiguous, on the device)."""
        for half, fence, start, stop in self._turns(source):
            fence.wait()
            half.copy_(source[start:stop])
            target[start:stop].copy_(half, non_blocking=True)
            fence.mark()
        for fence in self.fences:
            fence.wait()

    def _turns(self, values: Tensor) -> list[tuple[Tensor, Fence, int, int]]:
        step = self.halves[0].numel() // values.element_size()
        turns = []
        for turn, (start, stop) in enumerate(slice_bounds(values.numel(), step=step)):
            half = self.halves[turn % 2][: (stop - start) * values.element_size()]
            turns.append((half.view(values.dtype), self.fences[turn % 2], start, stop))
        return turns


class Carrier:
    """Carries tensors into and out of one bucket; makes a staging per device when first needed.

    `staging` forces all copies through it, whatever the device.
    """

    def __init__(self, buffer: Tensor, staging: Staging | None = None) -> None:
        self._buffer = buffer
        self._forced = staging
        self._stagings: dict[torch.device, Staging] = {}
        self._pinned: bool | None = None
        self._touched: set[torch.device] = set()

    def collect(self, tensor: Tensor, view: Tensor) -> None:
        """tensor (any strides, any device) -> view of the bucket, of the same shape and dtype."""
        tensor = tensor.detach()
        if self._direct(tensor.device):
            if torch.get_num_threads() == 1:  # else torch's team of threads is faster
                copy_past(tensor, view, non_blocking=True)
            else:
                view.copy_(tensor, non_blocking=True)
        else:
            self._staging(tensor.device).to_host(tensor.contiguous().view(-1), view.view(-1))

    def deliver(self, view: Tensor, tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """The given element ranges of the view -> tensor, in place; other elements stay."""
        tensor = tensor.detach()
        flat_view = view.view(-1)
        if list(ranges) == [(0, tensor.numel())] and self._direct(tensor.device):
            tensor.copy_(view, non_blocking=True)
            return
        # A non-contiguous tensor has no flat view to write ranges into: fill a dense twin first.
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        flat = dense.view(-1)
        for start, stop in ranges:
            if self._direct(tensor.device):
                flat[start:stop].copy_(flat_view[start:stop], non_blocking=True)
            else:
                staging = self._staging(tensor.device)
                staging.to_device(flat_view[start:stop], flat[start:stop])
        if dense is not tensor:
            tensor.copy_(dense)

    def finish(self) -> None:
        """Wait for the direct copies; the staged ones are complete already."""
        for device in self._touched:
            torch.cuda.current_stream(device).synchronize()
        self._touched.clear()

    def _direct(self, device: torch.device) -> bool:
        if self._forced is not None:
            return False
        if device.type == "cpu":
            return True
        if self._pinned is None:
            self._pinned = self._buffer.is_pinned()
        if self._pinned:
            self._touched.add(device)
        return self._pinned

    def _staging(self, device: torch.device) -> Staging:
        if self._forced is not None:
            return self._forced
        held = self._stagings.get(device)
        if held is None:
            held = self._stagings[device] = Staging.for_device(device)
        return held


def _land(half: Tensor, target: Tensor, fence: Fence) -> None:
    fence.wait()
    target.copy_(half)
