"""Delayed SGD: a mean gradient has `delay` steps to arrive, and no step waits for one that comes in
time. One rule: what is applied at step t was taken at step t - delay, on every trainer.

    optimizer = by_name("delayed-sgd", model.parameters(), swarm, delay=2, lr=0.1)

`delay` rounds are under way at once, each through an average of its own ("gradient0" ...), because
an average carries one round at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, sgd_options, sgd_step
from moshpitd.client.optim.replicas import (
    CHECK_EVERY,
    NothingToApplyError,
    OfAnUpdate,
    Replicated,
)
from moshpitd.client.primitives import Coding
from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules import delayed
from moshpitd.tensors.rules.common import require_unbiased


@dataclass(slots=True)
class _Underway:
    """A mean gradient that is on its way, or here before its time."""

    version: int
    pending: OfAnUpdate | None
    values: dict[str, Tensor]
    whole: bool = True

    def land(self) -> None:
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        try:
            found = pending.land()
            self.values, self.whole = found.tensors, found.whole
        except NothingToApplyError:  # a step of nothing, for all
            self.values = {name: torch.zeros_like(value) for name, value in self.values.items()}


class DelayedSGD(Replicated):
    """x_{t+1} = x_t - lr_t mean_i g_i(x_{t - delay}) (Agarwal and Duchi 2011); SGD's momentum and
    weight decay where the gradient is applied.

    `adaptive` divides the step by 1 + delay, which is stable at every delay where lr x curvature <=
    1.5; without it lr x curvature must stay below 2 sin(pi / (2 (2 delay + 1))). The first `delay`
    steps move nothing. At a comparison nothing is under way: what was is part of the equal state.
    """

    algorithm = "delayed-sgd"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        delay: int = 1,
        adaptive: bool = True,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        codec: str = "float32",
        allow_no_ef: bool = False,
        check_every: int = CHECK_EVERY,
    ) -> None:
        if delay < 0:
            raise TrainerError(f"delay {delay}, expected 0 steps or more")
        require_unbiased(
            codec,
            unbiased=codec_for(codec, "float32").unbiased,
            allow_no_ef=allow_no_ef,
            algorithm=self.algorithm,
        )
        options = sgd_options(lr, momentum, nesterov, weight_decay)
        super().__init__(params, swarm, options, check_every=check_every)
        self._coding = Coding(codec)
        self._delay, self._adaptive = delay, adaptive
        self._line: deque[_Underway] = deque()

    def choices(self) -> dict[str, Coding]:
        return {f"gradient{turn}": self._coding for turn in range(self._delay + 1)}

    def _update(self, gradients: Gradients) -> bool:
        name = f"gradient{self.version % (self._delay + 1)}"
        weight = self.weight(gradients)
        pending = self.begin(name, gradients.values, coding=self._coding, weight=weight)
        self._line.append(_Underway(self.version, pending, gradients.values))
        due = self.version - self._delay
        if due < 0:
            return True  # the beginning of the run, the same for all
        while self._line and self._line[0].version < due:
            self._line.popleft().land()  # of a version that others had passed already
        if not self._line or self._line[0].version != due:
            return False
        arrived = self._line.popleft()
        arrived.land()
        rate = delayed.adaptive_gamma(1.0, tau=self._delay) if self._adaptive else 1.0
        step = sgd_step(self, Gradients(arrived.values))
        for slot in self.slots():
            moved = delayed.delayed_step(slot.parameter, step[slot.name], gamma=rate)
            slot.parameter.copy_(moved)
        return arrived.whole

    def _compare(self) -> bool:
        self._arrive()
        return super()._compare()

    def _arrive(self) -> None:
        """Wait for all that is under way. Whoever joins then begins with the others, and not in a
        round that they had begun before. Who counted back has some twice, and keeps the later."""
        for one in self._line:
            one.land()
        while len(self._line) > self._delay:
            self._line.popleft()

    def replicated_state(self) -> dict[str, Tensor]:
        found = super().replicated_state()
        if any(slot.group["momentum"] for slot in self.slots()):
            momenta = self.all_kept("momentum_buffer")
            found |= {f"momentum.{name}": value for name, value in momenta.items()}
        while len(self._line) < self._delay:  # the beginning, or a newcomer: room for theirs
            zeros = {name: torch.zeros_like(value) for name, value in self.parameters().items()}
            self._line.appendleft(_Underway(-1, None, zeros))
        for age, one in enumerate(self._line):
            found |= {f"underway{age}.{name}": value for name, value in one.values.items()}
        return found

    def _restored(self) -> None:
        for age, one in enumerate(self._line):
            one.version, one.whole = self.version - self._delay + age, True

    # -- checkpoints ------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        """Waits for what is under way: it is part of what comes next."""
        with torch.no_grad():
            self._arrive()
        line = [
            (one.version, {name: value.clone() for name, value in one.values.items()}, one.whole)
            for one in self._line
        ]
        return {**super()._extra(), "line": line}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        self._line = deque(
            _Underway(int(version), None, self.placed(values), bool(whole))
            for version, values, whole in extra["line"]
        )
