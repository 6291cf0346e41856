"""Asynchronous SGD without rounds, AsySG-con and AsySG-incon (arXiv 1506.08272). One rule: a
gradient counts only where it was taken, so one that was not taken at what the store or the memory
held is dropped and never applied.

`con`: parameters in a store over the network, read as consistent snapshots; a gradient says which
version it was read at, and at most T versions lie between. `incon`: parameters in memory that the
trainers of one node share, read and written without a lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import (
    Gradients,
    Slot,
    SwarmOptimizer,
    sgd_direction,
    sgd_options,
)
from moshpitd.client.primitives import (
    Memories,
    ParameterStore,
    SharedParameters,
    StoreOptions,
    Stores,
    require_memories,
    require_stores,
)
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import asysg

MAX_STALENESS = 16
"""T. It costs nothing while it is of the order of the trainers (theorem 1), of which a flat group
has up to 16; above that the bound only catches those that fell behind."""


class AsySGCon(SwarmOptimizer):
    """x_{k+1} = x_k - lr sum of `batch` gradients, each read at most `max_staleness` versions ago.

    A step pushes the gradient of the snapshot that the model holds and pulls the next one. At the
    bound a gradient is refused (`refused` counts them), or with `block` nobody gets so far ahead:
    a pull then waits, and whoever stops training calls `close`. max_staleness=0 is mini-batch SGD
    with step lr * batch on the mean. `lr`, `batch` and both bounds are the store's: all trainers
    give the same. A scheduler's factor travels inside the gradient.
    """

    algorithm = "asysg-con"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        batch: int = 1,
        max_staleness: int = MAX_STALENESS,
        block: bool = False,
    ) -> None:
        if lr <= 0:
            raise TrainerError(f"lr {lr}, expected more than 0: it is the store's step")
        if batch < 1 or max_staleness < 0:
            raise TrainerError(
                f"batch {batch}, max_staleness {max_staleness}, expected at least 1 and 0"
            )
        options = sgd_options(lr, 0.0, False, weight_decay)
        super().__init__(params, {key: options[key] for key in ("lr", "weight_decay")})
        self._swarm: Stores = require_stores(swarm, self.algorithm)
        self._options = StoreOptions(lr, batch, max_staleness, block)
        self._store: ParameterStore | None = None
        self.version: int | None = None
        """Which version the model holds; None before the first pull and after a checkpoint."""
        self.refused = 0
        """Gradients that were too old, and so wasted."""

    def start(self) -> None:
        """Take the store's parameters, which are ours if we open it. The first step does it
        otherwise, and its gradient counts only if the store held the same parameters."""
        if self.version is None:
            with torch.no_grad():
                self._start()

    def _advance(self, gradients: Gradients) -> None:
        current = self.version is not None or self._start()
        assert self._store is not None  # opened by the line above
        if current and gradients.sound:
            assert self.version is not None  # whoever is current has pulled
            pushed = self._store.push(self._scaled(gradients), version=self.version)
            self.refused += not pushed
        self._pull()

    def _start(self) -> bool:
        """Open and pull; whether the model held the same parameters already."""
        before = {name: x.clone() for name, x in self.parameters().items()}
        if self._store is None:
            self._store = self._swarm.store(self.algorithm, start=before, options=self._options)
        self._pull()
        return same(before, self.parameters())

    def _pull(self) -> None:
        assert self._store is not None  # callers have opened it
        pulled = self._store.pull()
        self.write(pulled.tensors)
        self.version = pulled.version

    def _scaled(self, gradients: Gradients) -> dict[str, Tensor]:
        found = {}
        for slot in self.slots():
            grad, group = gradients.values[slot.name], slot.group
            if group["weight_decay"]:
                grad = grad + group["weight_decay"] * slot.parameter
            factor = group["lr"] / self._options.gamma
            found[slot.name] = grad if factor == 1.0 else factor * grad
        return found

    def _extra(self) -> dict[str, Any]:
        return {"refused": self.refused}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.refused = int(extra["refused"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The store's parameters stay what they are; a store that is not open yet is opened with
        the model's of then, so a job that resumes goes on from its checkpoint."""
        super().load_state_dict(state_dict)
        self.version = None

    def close(self) -> None:
        """Nobody waits for this trainer's gradient any more."""
        if self._store is not None:
            self._store.close()


class AsySGIncon(SwarmOptimizer):
    """x[block] -= lr g[block], in memory that all trainers of this node write to at any time.

    A step writes and then copies the memory into the model, so that one gradient is taken at one
    x^, torn as it may be. `blocks` cuts the parameters into as many blocks of elements, one of
    which is written per step, drawn from `seed` or chosen by `choose(step)`; the paper writes one
    element, 1 writes them all, which costs least per sample. Momentum is this trainer's own.
    Increments are not atomic: of two at once one may be lost, now and then, element by element.

    With `follow` parameters may be changed between steps, and the change goes into the memory with
    the next one: one trainer of each node, `LocalSGD(AsySGIncon(..., follow=True), session, ...)`,
    brings in what nodes learn from each other. It costs a copy of the parameters.
    """

    algorithm = "asysg-incon"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        blocks: int = 1,
        seed: int = 0,
        choose: Callable[[int], int] | None = None,
        follow: bool = False,
    ) -> None:
        if blocks < 1:
            raise TrainerError(f"{blocks} blocks, expected at least 1")
        super().__init__(params, sgd_options(lr, momentum, nesterov, weight_decay))
        self._swarm: Memories = require_memories(swarm, self.algorithm)
        draws = random.Random(seed)
        self._choose = choose or (lambda step: draws.randrange(blocks))
        self._blocks = blocks
        self._memory: SharedParameters | None = None
        self._current = False  # the model holds what the memory held when it was last read
        self._follow = follow
        self._read: dict[str, Tensor] = {}  # what was read last, where changes are followed
        self.steps = 0

    def start(self) -> None:
        """Take the memory's parameters, which are ours if we are the first on this node. The first
        step does it otherwise, and its gradient counts only if the memory held the same."""
        if not self._current:
            with torch.no_grad():
                self._start()

    def _advance(self, gradients: Gradients) -> None:
        current = self._current or self._start()
        assert self._memory is not None  # opened by the line above
        if self._read:
            self._memory.add(self._moved())
        if current and gradients.sound:
            self._memory.add(self._writes(gradients))
            self.steps += 1
        self._look()

    def _start(self) -> bool:
        """Open and read; whether the model held the same parameters already."""
        before = {name: x.clone() for name, x in self.parameters().items()}
        if self._memory is None:
            self._memory = self._swarm.shared(self.algorithm, start=before)
        self._look()
        self._current = True
        return same(before, self.parameters())

    def _look(self) -> None:
        assert self._memory is not None  # callers have opened it
        self._memory.read(self.parameters())
        if self._follow:
            self._read = {name: x.detach().clone() for name, x in self.parameters().items()}

    def _moved(self) -> dict[str, asysg.BlockUpdate]:
        """What others did to the parameters since they were read."""
        return {
            name: asysg.BlockUpdate(0, (x.detach() - self._read[name]).reshape(-1))
            for name, x in self.parameters().items()
            if not torch.equal(x, self._read[name])
        }

    def _writes(self, gradients: Gradients) -> dict[str, asysg.BlockUpdate]:
        found = {}
        for slot, start, stop in self._block(self._choose(self.steps)):
            step = sgd_direction(self, slot, gradients.values[slot.name]).reshape(-1)
            found[slot.name] = asysg.block_update(
                [step], start=start, stop=stop, gamma=slot.group["lr"]
            )
        return found

    def _block(self, number: int) -> Iterator[tuple[Slot, int, int]]:
        """The elements of a block, tensor by tensor: blocks are cut from all elements in a row."""
        slots = list(self.slots())
        total = sum(slot.parameter.numel() for slot in slots)
        first, end = (total * edge // self._blocks for edge in (number, number + 1))
        at = 0
        for slot in slots:
            numel = slot.parameter.numel()
            start, stop = max(first - at, 0), min(end - at, numel)
            if start < stop:
                yield slot, start, stop
            at += numel

    def _extra(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.steps = int(extra["steps"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The memory keeps its parameters, if others opened it; see `AsySGCon.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._current, self._read = False, {}

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Bit for bit, so that a gradient taken at one is a gradient taken at the other."""
    return all(torch.equal(x, theirs[name]) for name, x in ours.items())
