"""DIANA, VR-DIANA and ADIANA: unbiased codes of the difference to a learned gradient. One rule: the
parameters and h are equal on all trainers, h_i is each one's own and never leaves it but in codes.

On data that differs between trainers they converge linearly to the exact optimum, where quantized
gradients stay in a ball around it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, Slot, named
from moshpitd.client.optim.replicas import CHECK_EVERY, Replicated
from moshpitd.client.optim.shifts import Shifts, unbiased_coding
from moshpitd.client.primitives import EXACT, Coding, Mean
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import diana, marina
from moshpitd.tensors.rules.diana import Adiana, AdianaSteps, Snapshot

Closure = Callable[[], float]


class DIANA(Replicated):
    """DIANA (Mishchenko et al. 2019): m_i = Q(g_i - h_i), x -= lr (h + mean m_i), h_i += alpha m_i,
    h += alpha mean m_i. `alpha`: 1 / (1 + omega) of the codec if not given."""

    algorithm = "diana"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        codec: str = "natural",
        alpha: float | None = None,
        check_every: int = CHECK_EVERY,
    ) -> None:
        super().__init__(params, swarm, {"lr": lr}, check_every=check_every)
        self._coding = unbiased_coding(codec, self.algorithm)
        self._shifts = Shifts(self, alpha, codec)

    def _update(self, gradients: Gradients) -> bool:
        found = self._exchanged(gradients)
        for slot in self.slots():
            estimate = self._shifts.mean(slot) + found.tensors[slot.name]
            if found.contributors:
                slot.parameter.sub_(slot.group["lr"] * estimate)
        weight = self.weight(gradients)
        learned = self._shifts.learn(found, sound=gradients.sound, weight=weight)
        return found.whole and learned

    def choices(self) -> dict[str, Coding]:
        return {"message": self._coding, "shifts": EXACT}

    def _exchanged(self, gradients: Gradients) -> Mean:
        differences = named(
            self.slots(), lambda slot: gradients.values[slot.name] - self._shifts.own(slot)
        )
        return self.average(
            "message", differences, coding=self._coding, weight=self.weight(gradients)
        )

    def replicated_state(self) -> dict[str, Tensor]:
        return {**super().replicated_state(), **self._shifts.replicated()}

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "members": list(self._shifts.members)}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        self._shifts.members = tuple(extra["members"])


def gradients_at(
    optimizer: Replicated, point: Mapping[str, Tensor], closure: Closure
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) with the parameters at `point`; they are where they were afterwards."""
    before = {name: value.clone() for name, value in optimizer.parameters().items()}
    with torch.no_grad():
        optimizer.write(point)
    optimizer.zero_grad()
    try:
        with torch.enable_grad():
            loss = closure()
        found = {
            slot.name: torch.zeros_like(slot.parameter)
            if slot.parameter.grad is None
            else slot.parameter.grad.detach().clone()
            for slot in optimizer.slots()
        }
    finally:
        with torch.no_grad():
            optimizer.write(before)
    return loss, found


class VRDIANA(DIANA):
    """VR-DIANA (Horvath et al. 2019): DIANA on L-SVRG gradients, g_i(x) - g_i(w_i) + full_i(w_i),
    w_i <- x with probability `refresh` (1 / number of samples).

    `step(closure)` runs the closure twice, on one batch at x and at w_i, so it must not draw the
    batch itself; `full_gradient` is a closure over all of this trainer's data. With it random
    batches reach the exact optimum as well.
    """

    algorithm = "vr-diana"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        full_gradient: Closure,
        refresh: float,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not 0 < refresh <= 1:
            raise TrainerError(f"refresh {refresh}, expected a probability above 0")
        super().__init__(params, swarm, **options)
        self._full, self._refresh = full_gradient, refresh
        self._coins = random.Random(seed)

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """`closure` computes loss and gradients of one batch; it is needed."""
        if closure is None:
            raise TrainerError("vr-diana needs step(closure): it takes two gradients of one batch")
        x = {name: value.clone() for name, value in self.parameters().items()}
        if not all("point" in self.state[slot.parameter] for slot in self.slots()):
            self._take_snapshot(x)
        point, full = self.all_kept("point"), self.all_kept("full")
        loss, at_x = gradients_at(self, x, closure)
        _, at_point = gradients_at(self, point, closure)
        for slot in self.slots():
            snapshot = Snapshot(point[slot.name], full[slot.name])
            slot.parameter.grad = diana.lsvrg_gradient(
                at_x[slot.name], at_point[slot.name], snapshot
            )
        super().step()
        if self._coins.random() < self._refresh:
            self._take_snapshot(x)
        return loss

    def _take_snapshot(self, x: Mapping[str, Tensor]) -> None:
        _, full = gradients_at(self, x, self._full)
        self.keep("point", {name: value.clone() for name, value in x.items()})
        self.keep("full", full)


class ADIANA(Replicated):
    """ADIANA (Li et al. 2020), accelerated: two coded messages a step, at x and at w.

    `step(closure)` runs the closure twice; the model holds x, the point of the next gradient. The
    iterate that converges is y: `solution()` writes it into the model, at the end or to evaluate.
    `eta` is the step (at most about 1 / (2 L)), `mu` the strong convexity, `chance` w's to move.
    """

    algorithm = "adiana"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        eta: float,
        mu: float,
        chance: float = 0.5,
        seed: int = 0,
        codec: str = "natural",
        check_every: int = CHECK_EVERY,
    ) -> None:
        if not (eta > 0 and mu > 0 and 0 < chance <= 1):
            raise TrainerError(
                f"eta {eta}, mu {mu}, chance {chance}, expected all above 0, chance at most 1"
            )
        super().__init__(params, swarm, {"lr": eta}, check_every=check_every)
        self._coding = unbiased_coding(codec, self.algorithm)
        self._shifts = Shifts(self, None, codec)
        self._mu, self._chance, self._seed = mu, chance, seed

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """`closure` computes loss and full local gradients; it is needed."""
        if closure is None:
            raise TrainerError("adiana needs step(closure): it takes gradients at two points")
        x = {name: value.clone() for name, value in self.parameters().items()}
        loss, at_x = gradients_at(self, x, closure)
        _, at_w = gradients_at(self, {s.name: self._kept("w", s) for s in self.slots()}, closure)
        self._at_w = at_w
        for slot in self.slots():
            slot.parameter.grad = at_x[slot.name]
        super().step()
        return loss

    def _update(self, gradients: Gradients) -> bool:
        slots, own = list(self.slots()), self._shifts.own
        weight = self.weight(gradients)
        first = self.average(
            "first",
            named(slots, lambda slot: gradients.values[slot.name] - own(slot)),
            coding=self._coding,
            weight=weight,
        )
        second = self.average(
            "second",
            named(slots, lambda slot: self._at_w[slot.name] - own(slot)),
            coding=self._coding,
            weight=weight,
        )
        move = marina.coin(self._seed, self.version + 1, chance=self._chance)
        for slot in slots:
            state = diana.adiana_server(
                Adiana(
                    self._kept("y", slot), self._kept("z", slot), self._kept("w", slot),
                    self._shifts.mean(slot),
                ),
                slot.parameter.detach().clone(), [first.tensors[slot.name]],
                [second.tensors[slot.name]], steps=self._steps(slot), move=move,
            )  # fmt: skip
            self.state[slot.parameter] |= {"y": state.y, "z": state.z, "w": state.w}
            slot.parameter.copy_(diana.adiana_point(state, self._steps(slot)))
        learned = self._shifts.learn(second, sound=gradients.sound, weight=weight)
        return first.whole and second.whole and learned

    def choices(self) -> dict[str, Coding]:
        return {"first": self._coding, "second": self._coding, "shifts": EXACT}

    def solution(self) -> None:
        """y into the model. Training may go on afterwards only from a checkpoint."""
        with torch.no_grad():
            self.write({slot.name: self._kept("y", slot) for slot in self.slots()})

    def _steps(self, slot: Slot) -> AdianaSteps:
        return diana.adiana_steps(
            eta=slot.group["lr"], mu=self._mu, chance=self._chance,
            omega=1.0 / self._shifts.alpha - 1.0,
        )  # fmt: skip

    def _kept(self, key: str, slot: Slot) -> Tensor:
        """y, z and w begin at the parameters."""
        state = self.state[slot.parameter]
        if key not in state:
            state[key] = slot.parameter.detach().clone()
        found: Tensor = state[key]
        return found

    def replicated_state(self) -> dict[str, Tensor]:
        found = {**super().replicated_state(), **self._shifts.replicated()}
        for key in ("y", "z", "w"):
            found |= {f"{key}.{slot.name}": self._kept(key, slot) for slot in self.slots()}
        return found


__all__ = ["ADIANA", "DIANA", "VRDIANA"]
