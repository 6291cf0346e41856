"""0/1 Adam: 1-bit Adam that also refreshes its variance rarely and exchanges rarely. One rule:
trainers are equal at exchanges, and only there are they compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, Slot
from moshpitd.client.optim.onebit import VARIANCE, FrozenVariance
from moshpitd.client.optim.replicas import CHECK_EVERY
from moshpitd.tensors.rules import onebit_adam
from moshpitd.tensors.rules.onebit import momentum_mask
from moshpitd.tensors.rules.onebit_adam import Journey, Moments, ZeroOneClock, ZeroOnePolicy


class ZeroOneAdam(FrozenVariance):
    """0/1 Adam (Lu et al. 2022): the variance is refreshed ever more rarely before `freeze_step`
    (1-bit gradients between), and afterwards trainers make local steps between ever rarer exchanges
    of one bit per element.

    Between exchanges trainers differ by design; they are compared at exchanges only.
    `variance_scaler`, `local_scaler` and `local_clipper` as in `rules.onebit_adam.ZeroOnePolicy`.
    """

    algorithm = "zero-one-adam"

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
        variance_scaler: int = 16,
        local_scaler: int = 32_678,
        local_clipper: int = 16,
        codec: str = "sign-l1",
        check_every: int = CHECK_EVERY,
    ) -> None:
        super().__init__(
            params, swarm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            freeze_step=freeze_step, codec=codec, check_every=check_every,
        )  # fmt: skip
        self._policy = ZeroOnePolicy(freeze_step, variance_scaler, local_scaler, local_clipper)
        self.clock = ZeroOneClock()
        self._counters = torch.zeros(5, dtype=torch.int64)
        self._lrs: dict[int, float] = {}  # by group, since the last exchange
        self._exchanged = True
        self._due = False

    def _advance(self, gradients: Gradients) -> None:
        """Compared at the first exchange after it is due: in between nobody is equal."""
        self._try_update(gradients)
        self._due = self._due or self._compares()
        if self._due and self._exchanged:
            self._due = False
            self._compare()

    def _update(self, gradients: Gradients) -> bool:
        clock, policy = self.clock, self._policy
        try:
            if clock.frozen(policy):
                return self._local_step(gradients)
            return self._before_freeze(gradients, refresh=clock.refreshes_variance(policy))
        finally:
            self.clock = clock.tick(policy)

    def _before_freeze(self, gradients: Gradients, *, refresh: bool) -> bool:
        weight = self.weight(gradients)
        if refresh:
            found = self._warm(gradients)
            mean, shared = found.tensors, found.whole
        else:
            # All elements, because which are live still changes; the others' share is dropped.
            found = self.average("gradient", gradients.values, coding=self._coding, weight=weight)
            mean, shared = found.tensors, found.whole
            for slot in self.slots():
                mean[slot.name] *= momentum_mask(self.kept(VARIANCE, slot))
        for slot in self.slots():
            moments = onebit_adam.zero_one_before_freeze(
                self.moments(slot), mean[slot.name], betas=slot.group["betas"], refresh=refresh
            )
            self._move(slot, moments)
        return shared

    def _move(self, slot: Slot, moments: Moments) -> None:
        group = slot.group
        self.put(slot, moments)
        slot.parameter.copy_(
            onebit_adam.apply(
                slot.parameter, moments,
                lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
            )
        )  # fmt: skip

    def _local_step(self, gradients: Gradients) -> bool:
        for slot in self.slots():
            state, group = self.state[slot.parameter], slot.group
            if "origin" not in state:
                state["origin"] = slot.parameter.detach().clone()
            if not gradients.sound:
                continue
            x, moments, _ = onebit_adam.zero_one_local(
                slot.parameter, self.moments(slot), Journey(state["origin"]),
                gradients.values[slot.name], betas=group["betas"], lr=group["lr"],
                eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip
            # An element that never had a gradient goes nowhere, also while nobody looks.
            mask = momentum_mask(moments.v)
            slot.parameter.copy_(torch.where(mask, x, slot.parameter))
            self.put(slot, moments)
        for number, group in enumerate(self.param_groups):
            self._lrs[number] = self._lrs.get(number, 0.0) + group["lr"]
        self._exchanged = self.clock.exchanges(self._policy)
        return self._exchange() if self._exchanged else True

    def _exchange(self) -> bool:
        slots = list(self.slots())
        moves = {
            slot.name: (slot.parameter - self.state[slot.parameter]["origin"])
            * (self.kept(VARIANCE, slot).sqrt() + slot.group["eps"])
            for slot in slots
        }
        # Errors of before the freeze are in units of gradients: this is an average of its own.
        shared, whole = self.compressed_mean(moves, name="move", weight=1)
        for slot in slots:
            state = self.state[slot.parameter]
            lrs = self._lrs[int(slot.name.split(".")[0])]
            x, moments, journey = onebit_adam.zero_one_exchange(
                slot.parameter, self.moments(slot), Journey(state["origin"], lrs or 1.0),
                reduce=lambda _, name=slot.name: shared[name],  # type: ignore[misc]
                eps=slot.group["eps"],
            )  # fmt: skip
            self.put(slot, moments)
            slot.parameter.copy_(x)
            state["origin"] = journey.origin.clone()
        self._lrs = {}
        return whole

    def replicated_state(self) -> dict[str, Tensor]:
        clock = self.clock
        self._counters.copy_(
            torch.tensor(
                [clock.step, clock.variance_interval, clock.refreshes,
                 clock.local_interval, clock.local_steps]
            )
        )  # fmt: skip
        return {**super().replicated_state(), "clock": self._counters}

    def _restored(self) -> None:
        self.clock = ZeroOneClock(*self._counters.tolist())
        self._lrs = {}
        for slot in self.slots():
            if "origin" in self.state[slot.parameter] or self.clock.frozen(self._policy):
                self.state[slot.parameter]["origin"] = slot.parameter.detach().clone()

    def _extra(self) -> dict[str, Any]:
        self.replicated_state()
        mine = {"clock": self._counters.tolist(), "lrs": dict(self._lrs), "due": self._due}
        return {**super()._extra(), **mine}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        self.clock = ZeroOneClock(*extra["clock"])
        self._lrs, self._due = dict(extra["lrs"]), bool(extra["due"])
