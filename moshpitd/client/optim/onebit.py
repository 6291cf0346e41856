"""1-bit Adam and 1-bit LAMB: momentum in one bit per element, once the variance stands still. One
rule: after the freeze the variance is not touched, and all trainers hold equal bits.

The arithmetic is tensors/rules; the error feedback of both ends is the group average's own and part
of the checkpoint. After the freeze only elements that ever had a gradient travel (v != 0): a sign
has no zero, and one scale over sqrt(v) + eps would throw the others far away. That keeps rows of an
embedding that nobody used where they are, and they cost no bytes. Rows that come into use after the
freeze stay frozen: choose a later `freeze_step`, or make a new optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, Slot
from moshpitd.client.optim.replicas import CHECK_EVERY, Replicated
from moshpitd.client.primitives import EXACT, Coding, Mean
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import onebit_adam, onebit_lamb
from moshpitd.tensors.rules.onebit import momentum_mask
from moshpitd.tensors.rules.onebit_adam import Moments
from moshpitd.tensors.rules.onebit_lamb import Lamb, LambBounds

MOMENTUM, VARIANCE = "exp_avg", "exp_avg_sq"  # torch.optim.Adam's names


class FrozenVariance(Replicated):
    """What 0/1 Adam shares too: moments, the freeze, and the compressed average of live
    elements."""

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        freeze_step: int,
        codec: str,
        check_every: int,
    ) -> None:
        if freeze_step < 1:
            raise TrainerError(
                f"freeze_step {freeze_step}, expected at least 1: without warm-up there is no "
                "variance to divide by"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise TrainerError(f"betas {betas}, expected two numbers of [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, swarm, defaults, check_every=check_every)
        self._freeze_step = freeze_step
        self._coding = Coding(codec, feedback=True)
        self._warm_coding = EXACT

    @property
    def frozen(self) -> bool:
        """Whether the coming step's variance is that of the step before."""
        return self.version >= self._freeze_step

    def moments(self, slot: Slot) -> Moments:
        return Moments(self.kept(MOMENTUM, slot), self.kept(VARIANCE, slot), self.version)

    def put(self, slot: Slot, moments: Moments) -> None:
        self.state[slot.parameter][MOMENTUM] = moments.m
        self.state[slot.parameter][VARIANCE] = moments.v

    def replicated_state(self) -> dict[str, Tensor]:
        found = super().replicated_state()
        for key in (MOMENTUM, VARIANCE):
            found |= {f"{key}.{name}": value for name, value in self.all_kept(key).items()}
        return found

    def _compares(self) -> bool:
        """At the freeze as well: from there on the variance says which elements travel."""
        return super()._compares() or self.version == self._freeze_step

    def compressed_mean(
        self, values: Mapping[str, Tensor], *, name: str, weight: int
    ) -> tuple[dict[str, Tensor], bool]:
        """Live elements through the coded average, the others zero; and whether all have it. Only
        for a variance that stands still."""
        masks = {slot.name: momentum_mask(self.kept(VARIANCE, slot)) for slot in self.slots()}
        live = {key: values[key][mask] for key, mask in masks.items()}
        found = self.average(name, live, coding=self._coding, weight=weight)
        result = {}
        for key, mask in masks.items():
            whole = torch.zeros_like(values[key])
            whole[mask] = found.tensors[key]
            result[key] = whole
        return result, found.whole

    def _warm(self, gradients: Gradients) -> Mean:
        return self.average(
            "warm", gradients.values, coding=self._warm_coding, weight=self.weight(gradients)
        )


class OneBitAdam(FrozenVariance):
    """1-bit Adam (Tang et al. 2021): Adam on averaged gradients for `freeze_step` steps, then
    x <- x - lr m / (sqrt(v) + eps) with m the compressed average of b1 m + (1 - b1) g_i.

    As published there is no bias correction. `codec`: "sign-l1", or "sign-rms" to be bit-compatible
    with DeepSpeed (no contraction for sparse momenta). freeze_step: 15 to 25 % of the steps.
    `warm_codec`: how gradients travel until then; "float16" (with error feedback) halves that, as
    published runs in half precision do.
    """

    algorithm = "onebit-adam"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100_000,
        codec: str = "sign-l1",
        warm_codec: str = "float32",
        check_every: int = CHECK_EVERY,
    ) -> None:
        super().__init__(
            params, swarm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            freeze_step=freeze_step, codec=codec, check_every=check_every,
        )  # fmt: skip
        if warm_codec != EXACT.codec:
            self._warm_coding = Coding(warm_codec, feedback=True)

    def _update(self, gradients: Gradients) -> bool:
        if self.frozen:
            moved, shared = self._compressed(gradients)
        else:
            found = self._warm(gradients)
            shared = found.whole
            moved = {
                slot.name: onebit_adam.warmup(
                    self.moments(slot), found.tensors[slot.name], betas=slot.group["betas"]
                )
                for slot in self.slots()
            }
        for slot in self.slots():
            self.put(slot, moved[slot.name])
            group = slot.group
            slot.parameter.copy_(
                onebit_adam.apply(
                    slot.parameter, moved[slot.name],
                    lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
                )
            )  # fmt: skip
        return shared

    def _compressed(self, gradients: Gradients) -> tuple[dict[str, Moments], bool]:
        slots = list(self.slots())
        sent = {
            slot.name: onebit_adam.local_momentum(
                self.moments(slot), gradients.values[slot.name], betas=slot.group["betas"]
            )
            for slot in slots
        }
        reduced, shared = self.compressed_mean(sent, name="momentum", weight=self.weight(gradients))
        return {
            slot.name: onebit_adam.compressed(self.moments(slot), reduced[slot.name])
            for slot in slots
        }, shared


class OneBitLamb(FrozenVariance):
    """1-bit LAMB (Li et al. 2021): LAMB for `freeze_step` steps, then compressed momentum with the
    layers' frozen trust ratios, scaled by what a fresh variance says."""

    algorithm = "onebit-lamb"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100_000,
        bounds: LambBounds | None = None,
        codec: str = "sign-l1",
        check_every: int = CHECK_EVERY,
    ) -> None:
        super().__init__(
            params, swarm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            freeze_step=freeze_step, codec=codec, check_every=check_every,
        )  # fmt: skip
        self._bounds = bounds or LambBounds()
        self._by_tensor: dict[str, Tensor] = {}

    def _update(self, gradients: Gradients) -> bool:
        slots = list(self.slots())
        if self.frozen:
            return self._compressed(gradients, slots)
        found = self._warm(gradients)
        for slot in slots:
            x, lamb = onebit_lamb.lamb_warmup(
                slot.parameter, self._lamb(slot), found.tensors[slot.name], **self._options(slot)
            )
            self._keep_lamb(slot, x, lamb)
        if self.version + 1 == self._freeze_step:
            scales = onebit_lamb.united_scaling([self.kept(MOMENTUM, slot) for slot in slots])
            for slot, scale in zip(slots, scales, strict=True):
                self._numbers(slot)[0] = scale
        return found.whole

    def _compressed(self, gradients: Gradients, slots: list[Slot]) -> bool:
        sent = {
            slot.name: onebit_adam.local_momentum(
                self.moments(slot), gradients.values[slot.name], betas=slot.group["betas"]
            )
            * float(self._numbers(slot)[0])
            for slot in slots
        }
        reduced, shared = self.compressed_mean(sent, name="momentum", weight=self.weight(gradients))
        for slot in slots:
            x, lamb = onebit_lamb.lamb_compressed(
                slot.parameter, self._lamb(slot),
                reduced[slot.name] / float(self._numbers(slot)[0]), **self._options(slot),
            )  # fmt: skip
            self._keep_lamb(slot, x, lamb)
        return shared

    def _options(self, slot: Slot) -> dict[str, Any]:
        names = ("betas", "lr", "eps", "weight_decay")
        return {**{name: slot.group[name] for name in names}, "bounds": self._bounds}

    def _lamb(self, slot: Slot) -> Lamb:
        _, coefficient, factor = self._numbers(slot).tolist()
        return Lamb(self.moments(slot), self.kept("fresh", slot), coefficient, factor)

    def _keep_lamb(self, slot: Slot, x: Tensor, lamb: Lamb) -> None:
        slot.parameter.copy_(x)
        self.put(slot, lamb.moments)
        self.state[slot.parameter]["fresh"] = lamb.fresh.clone()
        numbers = self._numbers(slot)
        numbers[1], numbers[2] = lamb.coefficient, lamb.factor

    def _numbers(self, slot: Slot) -> Tensor:
        """(united scaling, coefficient, factor) of a tensor. In float64, and not in torch's state,
        which rounds to the parameter's dtype when it is loaded."""
        if slot.name not in self._by_tensor:
            self._by_tensor[slot.name] = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
        return self._by_tensor[slot.name]

    def replicated_state(self) -> dict[str, Tensor]:
        found = super().replicated_state()
        found |= {f"fresh.{name}": value for name, value in self.all_kept("fresh").items()}
        return found | {f"numbers.{slot.name}": self._numbers(slot) for slot in self.slots()}

    def _extra(self) -> dict[str, Any]:
        numbers = {name: found.tolist() for name, found in self._by_tensor.items()}
        return {**super()._extra(), "numbers": numbers}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        self._by_tensor = {
            name: torch.tensor(numbers, dtype=torch.float64)
            for name, numbers in extra["numbers"].items()
        }
