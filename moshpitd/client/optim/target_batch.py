"""One step per `target` samples of the whole swarm, however many trainers there are and however
fast each is. One rule: when to step is decided from numbers that all members of a group got alike.

    optimizer = by_name("target-batch", model.parameters(), swarm, target=4096,
                        inner=torch.optim.AdamW, lr=1e-3)
    for x, y in loader:
        loss(...).backward()
        optimizer.samples = len(x)
        optimizer.step()         # adds the gradient; every now and then the swarm steps
        optimizer.zero_grad()

Each `step` adds the gradient at its samples' weight. Meanwhile a tiny average goes round: its mean
of accumulated samples times its contributors is what the swarm has. Once that is `target`, all that
were in it average what they have by then, weighted by samples, and make one step of the inner
optimizer: the batch of a step is at least the target, and a fast trainer has more of it. A newcomer
shortens the way to the next step and changes nothing of what a step is (hivemind's
target_batch_size; the recipe of Moshpit's ALBERT run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moshpitd.client.checks import MAX_WEIGHT, check_weight
from moshpitd.client.optim.distributed import Gradients, MakeOptimizer, set_gradients
from moshpitd.client.optim.mean_gradient import GradientAllReduce
from moshpitd.client.optim.replicas import CHECK_EVERY
from moshpitd.client.primitives import EXACT, Mean, Pending
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules.accumulation import Accumulated


class TargetBatch(GradientAllReduce):
    """x <- inner(x, sum_i sum_k n_ik g_ik / sum n_ik) once the swarm has `target` samples.

    `version` counts steps of the swarm. `ask_every`: micro-batches between two looks at what the
    others have; a look that is on its way costs no waiting, unless it takes that long again.
    `codec` and `feedback` as in "gradient-allreduce".
    """

    algorithm = "target-batch"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        target: int = 4096,
        ask_every: int = 1,
        inner: MakeOptimizer = torch.optim.SGD,
        check_every: int = CHECK_EVERY,
        **options: Any,
    ) -> None:
        if target < 1 or ask_every < 1:
            raise TrainerError(
                f"target {target}, ask_every {ask_every}, expected at least 1 sample and 1 "
                "micro-batch"
            )
        super().__init__(params, swarm, inner=inner, check_every=check_every, **options)
        self._target, self._ask_every = target, ask_every
        self._held = Accumulated()
        self._asked: tuple[Pending[Mean], int] | None = None
        self.steps = 0
        """Micro-batches of this trainer."""

    @property
    def accumulated(self) -> int:
        """Samples of this trainer that no step has taken in yet."""
        return self._held.samples

    def _advance(self, gradients: Gradients) -> None:
        if gradients.sound:
            room = MAX_WEIGHT - self._held.samples
            count = min(check_weight(self.samples), room)
            if count:
                self._held.add(gradients.values, count)
        self.steps += 1
        if self._asked is None:
            if self.steps % self._ask_every == 0:
                self._ask()
        elif self.steps - self._asked[1] >= self._ask_every:
            if self._reached():
                super()._advance(gradients)
            self._ask()

    def _ask(self) -> None:
        have = torch.tensor([float(self._held.samples)], dtype=torch.float64)
        self._asked = self._begin("progress", {"samples": have}, EXACT, 1), self.steps

    def _reached(self) -> bool:
        """Whether the swarm has its batch. Alone, this trainer is the swarm."""
        assert self._asked is not None
        found = self._asked[0].land()
        self._asked = None
        swarm = float(found.tensors["samples"]) * max(len(found.contributors), 1)
        return swarm >= self._target - 0.5  # a mean of integers, times their number

    def _update(self, gradients: Gradients) -> bool:
        mean, samples = self._held.taken(gradients.values)
        found = self.average("gradient", mean, coding=self._coding, weight=samples)
        set_gradients(self, found.tensors)
        self.inner.step()
        self._primed = True
        return found.whole

    # -- checkpoints ------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        """What is accumulated is inside; a look that is on its way is made again."""
        held = {name: value.clone() for name, value in self._held.mean.items()}
        return {**super()._extra(), "held": held, "samples": self._held.samples}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        held = self.placed(extra["held"])
        self._held, self._asked = Accumulated(held, int(extra["samples"])), None
