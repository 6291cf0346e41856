"""MARINA and PP-MARINA: codes of how the gradient changed, and a full gradient now and then. One
rule: the coin of an update is a function of (seed, version), so nobody has to be told it.

The estimate g adds up messages, so whoever missed one holds a wrong g until the next full round:
trainers are compared at every full round, which is the natural point to come back at.
"""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, named
from moshpitd.client.optim.replicas import CHECK_EVERY, NothingToApplyError, Replicated
from moshpitd.client.optim.shifts import unbiased_coding
from moshpitd.client.primitives import EXACT, Coding, Mean
from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules import marina


class MARINA(Replicated):
    """MARINA (Gorbunov et al. 2021): on heads (probability p) g = mean of the trainers' gradients,
    on tails g += mean Q(grad_i(x) - grad_i(x before)); x -= lr g. For full local gradients.

    `chance`: p, 1 / (1 + omega of the codec) if not given. Bytes per update on average: p d + (1-p)
    |Q|.
    """

    algorithm = "marina"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        codec: str = "natural",
        chance: float | None = None,
        seed: int = 0,
        check_every: int = CHECK_EVERY,
    ) -> None:
        if chance is not None and not 0 < chance <= 1:
            raise TrainerError(f"chance {chance}, expected a probability above 0")
        super().__init__(params, swarm, {"lr": lr}, check_every=check_every)
        self._coding = unbiased_coding(codec, self.algorithm)
        self._codec, self._chance, self._seed = codec, chance, seed
        self._informed = False  # whether there is a gradient of the point before

    @property
    def chance(self) -> float:
        if self._chance is not None:
            return self._chance
        numel = sum(slot.parameter.numel() for slot in self.slots())
        return marina.marina_chance(codec_for(self._codec, "float32").omega(numel))

    def heads(self, version: int) -> bool:
        """Whether that update is one of full gradients; the first is."""
        return marina.coin(self._seed, version, chance=self.chance)

    def _update(self, gradients: Gradients) -> bool:
        heads = self.heads(self.version)
        found = self._full(gradients) if heads else self._differences(gradients)
        for slot in self.slots():
            g = marina.marina_estimate(
                self.kept("estimate", slot), [found.tensors[slot.name]], heads=heads
            )
            if heads or found.contributors:
                self.state[slot.parameter]["estimate"] = g
            if gradients.sound:
                self.state[slot.parameter]["before"] = gradients.values[slot.name].clone()
            step = self.kept("estimate", slot)
            slot.parameter.copy_(marina.marina_step(slot.parameter, step, gamma=slot.group["lr"]))
        self._informed = gradients.sound
        return found.whole

    def _full(self, gradients: Gradients) -> Mean:
        return self.average("full", gradients.values, coding=EXACT, weight=self.weight(gradients))

    def _differences(self, gradients: Gradients) -> Mean:
        differences = named(
            self.slots(), lambda slot: gradients.values[slot.name] - self.kept("before", slot)
        )
        # Without the gradient of the point before there is no difference to tell.
        weight = self.weight(gradients) if self._informed else 0
        return self.average("difference", differences, coding=self._coding, weight=weight)

    def choices(self) -> dict[str, Coding]:
        return {"full": EXACT, "difference": self._coding}

    def _compares(self) -> bool:
        """At every full round as well."""
        return super()._compares() or self.heads(self.version - 1)

    def _restored(self) -> None:
        self._informed = False  # of the point before we had another one

    def replicated_state(self) -> dict[str, Tensor]:
        estimates = self.all_kept("estimate")
        mine = {f"estimate.{name}": value for name, value in estimates.items()}
        return {**super().replicated_state(), **mine}

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "informed": self._informed}

    def _load_extra(self, extra: Any) -> None:
        super()._load_extra(extra)
        self._informed = bool(extra["informed"])


class PPMARINA(MARINA):
    """PP-MARINA: on tails a trainer takes part with probability `taking_part`, by a coin of its
    own; the others count nothing and hear the result. Full rounds are everybody's."""

    algorithm = "pp-marina"

    def __init__(
        self, params: Any, swarm: object, *, taking_part: float = 0.5, **options: Any
    ) -> None:
        if not 0 < taking_part <= 1:
            raise TrainerError(f"taking_part {taking_part}, expected a probability above 0")
        super().__init__(params, swarm, **options)
        self._taking_part, self._coins = taking_part, random.Random()

    def draw_from(self, seed: int) -> None:
        """For tests and repeated runs: this trainer's own coins, different on every trainer."""
        self._coins = random.Random(seed)

    def _differences(self, gradients: Gradients) -> Mean:
        informed = self._informed
        self._informed = informed and self._coins.random() < self._taking_part
        try:
            return super()._differences(gradients)
        except NothingToApplyError:  # nobody took part: the estimate stays, and it is a step
            zeros = {name: value.new_zeros(value.shape) for name, value in gradients.values.items()}
            return Mean(zeros, zeros, contributors=("nobody",))
