"""What all optimizers of this package that talk to a swarm have in common. One rule: `step` is the
only place that talks, and it talks on every step, whatever this trainer's gradients are worth.

An algorithm names its tensors by group and place ("0.3"), so that trainers that build the same
model agree on the names. A parameter without a gradient has a zero one: what is exchanged has one
schema for ever.

GradScaler: these optimizers take `grad_scale` and `found_inf` as torch's fused ones do. A trainer
whose gradients overflowed contributes nothing (weight 0) and takes what the others found. Not
stepping at all, as GradScaler would do by itself, would leave them waiting and it behind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from moshpitd.errors import TrainerError

KEY = "moshpitd"  # our entry in a state_dict, beside torch's "state" and "param_groups"


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter: its name in the swarm, and the group with its options."""

    name: str
    parameter: Tensor
    group: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gradients:
    """By name, unscaled. Not `sound`: at least one is infinite or NaN, and all are zeros here."""

    values: dict[str, Tensor]
    sound: bool = True


class SwarmOptimizer(Optimizer):
    """An optimizer of its own (not a wrapper): param groups, lr schedulers, hooks and state_dict
    are torch's. Subclasses say what a step is in `_advance` and keep per-parameter state in
    `self.state`, what is not per parameter in `_extra` / `_load_extra`."""

    replicated: ClassVar[bool] = False
    """Whether all trainers must hold equal parameters; see `optim.replicas`."""
    algorithm: ClassVar[str] = ""
    _step_supports_amp_scaling = True  # GradScaler then calls step with the two attributes below

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("lr", 0.0) < 0:
            raise TrainerError(f"lr {defaults['lr']}, expected 0 or more")
        self._frozen_schema = False
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before the first step only: what trainers exchange cannot grow afterwards."""
        if self._frozen_schema:
            raise TrainerError(
                "add_param_group after the first step: the swarm exchanges the tensors of then; "
                "make a new optimizer",
                reason="schema_changed",
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the swarm. A closure is called once."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._frozen_schema = True
        with torch.no_grad():
            self._advance(self._gradients())
        return loss

    @abstractmethod
    def _advance(self, gradients: Gradients) -> None:
        """A whole step, without autograd."""

    # -- for subclasses ---------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot]:
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield Slot(f"{number}.{place}", parameter, group)

    def parameters(self) -> dict[str, Tensor]:
        """The live parameters by name."""
        return {slot.name: slot.parameter.detach() for slot in self.slots()}

    def kept(self, key: str, slot: Slot) -> Tensor:
        """State of a parameter, zeros of its shape at first."""
        state = self.state[slot.parameter]
        if key not in state:
            state[key] = torch.zeros_like(slot.parameter, memory_format=torch.contiguous_format)
        found: Tensor = state[key]
        return found

    def keep(self, key: str, values: Mapping[str, Tensor]) -> None:
        for slot in self.slots():
            if slot.name in values:
                self.state[slot.parameter][key] = values[slot.name]

    def all_kept(self, key: str) -> dict[str, Tensor]:
        return {slot.name: self.kept(key, slot) for slot in self.slots()}

    def placed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, where the parameters of these names are: a checkpoint may lie elsewhere."""
        live = self.parameters()
        return {name: value.to(live[name], copy=True) for name, value in values.items()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Into the parameters, in place."""
        for slot in self.slots():
            slot.parameter.copy_(values[slot.name])

    def _gradients(self) -> Gradients:
        # There only while GradScaler calls, which reads `grad_scale` itself if it finds one.
        scale: Tensor | None = getattr(self, "grad_scale", None)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        found: dict[str, Tensor] = {}
        for slot in self.slots():
            grad = slot.parameter.grad
            if grad is None:
                found[slot.name] = torch.zeros_like(slot.parameter)
                continue
            if grad.is_sparse:
                raise TrainerError(f"the gradient of {slot.name} is sparse, expected a dense one")
            found[slot.name] = grad / scale.to(grad.device) if scale is not None else grad.detach()
        if overflow is not None and bool(overflow.item()):
            return Gradients({name: torch.zeros_like(g) for name, g in found.items()}, sound=False)
        return Gradients(found)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Torch's, and under "moshpitd" what belongs to no parameter: counters, and the error
        feedback of what was sent."""
        return {**super().state_dict(), KEY: {"algorithm": self.algorithm, **self._extra()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A plain optimizer's checkpoint is taken as well: its counters then start at 0."""
        mine = dict(state_dict.get(KEY, {}))
        made_by = mine.pop("algorithm", self.algorithm)
        if made_by != self.algorithm:
            raise TrainerError(
                f"a checkpoint of {made_by!r}, expected one of {self.algorithm!r}",
                reason="algorithm_differs",
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != KEY})
        if mine:
            self._load_extra(mine)

    def _extra(self) -> dict[str, Any]:
        return {}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        """Let go of the swarm. Further steps are an error of the caller."""


def sgd_direction(optimizer: SwarmOptimizer, slot: Slot, grad: Tensor) -> Tensor:
    """torch.optim.SGD's step over lr: g + wd x through momentum (dampening 0), maybe Nesterov.

    A group's `momentum`, `nesterov` and `weight_decay`; the buffer lies in the state as torch's
    does and is this trainer's own.
    """
    group = slot.group
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * slot.parameter
    momentum = group["momentum"]
    if not momentum:
        return grad
    buffer = optimizer.kept("momentum_buffer", slot)
    buffer.mul_(momentum).add_(grad)
    return grad + momentum * buffer if group["nesterov"] else buffer.clone()


def sgd_step(optimizer: SwarmOptimizer, gradients: Gradients) -> dict[str, Tensor]:
    """What SGD takes off every parameter: lr times the direction. Gradients that are worth nothing
    are zeros already; they come back as they are and touch no momentum."""
    if not gradients.sound:
        return gradients.values
    return named(
        optimizer.slots(),
        lambda slot: slot.group["lr"] * sgd_direction(optimizer, slot, gradients.values[slot.name]),
    )


def sgd_options(lr: float, momentum: float, nesterov: bool, weight_decay: float) -> dict[str, Any]:
    """The defaults of a param group that `sgd_direction` reads; wrong ones are refused here."""
    if momentum < 0 or weight_decay < 0 or (nesterov and not momentum):
        raise TrainerError(
            f"momentum {momentum}, weight_decay {weight_decay}, nesterov {nesterov}: expected 0 or "
            "more, and momentum where Nesterov's is asked for"
        )
    return {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}


def named(slots: Iterable[Slot], one: Callable[[Slot], Tensor]) -> dict[str, Tensor]:
    return {slot.name: one(slot) for slot in slots}


MakeOptimizer = Callable[..., Optimizer]
"""A torch optimizer's class, or anything that is called like one: (param_groups, **options)."""


def inner_optimizer(
    outer: SwarmOptimizer, make: MakeOptimizer, options: Mapping[str, Any]
) -> Optimizer:
    """A torch optimizer over the outer one's groups and state, which stay one thing: schedulers and
    checkpoints of the outer one reach it. Call `link` after a checkpoint was loaded."""
    inner = make(outer.param_groups, **options)
    outer.defaults = {**outer.defaults, **inner.defaults}
    link(outer, inner)
    return inner


def link(outer: SwarmOptimizer, inner: Optimizer) -> None:
    inner.param_groups, inner.state = outer.param_groups, outer.state


def set_gradients(optimizer: SwarmOptimizer, values: Mapping[str, Tensor]) -> None:
    for slot in optimizer.slots():
        if slot.parameter.grad is None:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
        slot.parameter.grad.copy_(values[slot.name])
