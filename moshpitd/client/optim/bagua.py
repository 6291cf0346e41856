"""BAGUA's cube: {centralized, decentralized} x {full, low precision} x {sync, async}, by name. One
rule: every corner is a class of its own, `CUBE` says which, and on what primitive it runs.

| cell | class | primitive |
|---|---|---|
| centralized, full, sync | `GradientAllReduce` | group average of gradients |
| centralized, low, sync | `ByteGrad`, `QAdam` | group average, 8-bit codec both ways |
| centralized, full, async | `AsyncModelAverage` | group average of snapshots, the delta is added |
| centralized, low, async | `AsyncLowPrecisionAverage` | the same, 8 bits with error feedback |
| decentralized, full, sync | `Decentralized` | exchange with neighbours, pairs |
| decentralized, low, sync | `LowPrecisionDecentralized` | exchange of differences, ring |
| decentralized, full, async | `AsyncDecentralized` | pairs that meet, atomic |
| decentralized, low, async | `AsyncLowPrecisionDecentralized` | differences, added a step later |

Buckets, flattening and the order of parts are the primitive's (a daemon's bucket is flat), and so
is the hierarchy: a daemon averages the trainers of its node first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.differences import DCD, ChocoSGD
from moshpitd.client.optim.distributed import (
    Gradients,
    MakeOptimizer,
    Slot,
    SwarmOptimizer,
    inner_optimizer,
    link,
    set_gradients,
)
from moshpitd.client.optim.gossip import ADPSGD, DPSGD
from moshpitd.client.optim.mean_gradient import ByteGrad, GradientAllReduce
from moshpitd.client.optim.replicas import CHECK_EVERY, Replicated
from moshpitd.client.primitives import (
    EXACT,
    Averages,
    Coding,
    GroupAverage,
    Mean,
    Pending,
    require_averages,
)
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import bagua
from moshpitd.tensors.rules.bagua import QAdamOptions

MOMENTUM, VARIANCE = "exp_avg", "exp_avg_sq"


class QAdam(Replicated):
    """QAdam as BAGUA codes it: Adam on exact mean gradients for `warmup_steps`, then momentum
    through an 8-bit average, no error feedback unless asked for; bias correction goes on.

    `off_by_one` is the open code's: the last step of the warm-up updates neither moment. `codec`:
    "bagua-minmax-uint8" is the published one, which refuses ranges that it would wrap around.
    """

    algorithm = "qadam"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
        off_by_one: bool = True,
        codec: str = "minmax-uint8",
        feedback: bool = False,
        check_every: int = CHECK_EVERY,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, swarm, defaults, check_every=check_every)
        self._warmup_steps, self._off_by_one = warmup_steps, off_by_one
        self._coding = Coding(codec, feedback=feedback)
        for slot in self.slots():
            self._options(slot)  # refuses what cannot be

    def _update(self, gradients: Gradients) -> bool:
        slots = list(self.slots())
        sent = {
            slot.name: bagua.gradient_with_decay(
                gradients.values[slot.name], slot.parameter, self._options(slot)
            )
            for slot in slots
        }
        weight = self.weight(gradients)
        if bagua.qadam_is_compressed(self._moments(slots[0]), self._options(slots[0])):
            momenta = {
                slot.name: bagua.qadam_local_momentum(
                    self._moments(slot), sent[slot.name], self._options(slot)
                )
                for slot in slots
            }
            found = self.average("momentum", momenta, coding=self._coding, weight=weight)
        else:
            found = self.average("warm", sent, coding=EXACT, weight=weight)
        for slot in slots:
            x, moments = bagua.qadam_step(
                slot.parameter, self._moments(slot), found.tensors[slot.name], self._options(slot)
            )
            slot.parameter.copy_(x)
            self.state[slot.parameter][MOMENTUM] = moments.m
            self.state[slot.parameter][VARIANCE] = moments.v
        return found.whole

    def _options(self, slot: Slot) -> QAdamOptions:
        group = slot.group
        return QAdamOptions(
            self._warmup_steps, group["lr"], tuple(group["betas"]), group["eps"],
            group["weight_decay"], self._off_by_one,
        )  # fmt: skip

    def _moments(self, slot: Slot) -> bagua.QAdam:
        return bagua.QAdam(self.kept(MOMENTUM, slot), self.kept(VARIANCE, slot), self.version)

    def replicated_state(self) -> dict[str, Tensor]:
        found = super().replicated_state()
        for key in (MOMENTUM, VARIANCE):
            found |= {f"{key}.{name}": value for name, value in self.all_kept(key).items()}
        return found


class Decentralized(DPSGD):
    """x <- the mean of a pair's x before the step, then the gradient step; the partner changes with
    every step (BAGUA's shift_one). topology="complete" is the open code's default "all", which is
    an all-reduce of parameters."""

    algorithm = "decentralized"

    def __init__(
        self, params: Any, swarm: object, *, topology: str = "pairs", **options: Any
    ) -> None:
        super().__init__(params, swarm, topology=topology, **options)


class LowPrecisionDecentralized(DCD):
    """A ring of 8-bit differences: x + (L + R - 2 x)/3 + the local step, coded as one difference;
    neighbours' replicas stay equal to what they stand for, bit for bit. With an exact codec it is
    D-PSGD on the ring."""

    algorithm = "low-precision-decentralized"

    def __init__(
        self, params: Any, swarm: object, *, codec: str = "minmax-uint8", **options: Any
    ) -> None:
        # Rounding to nearest in 255 steps of a block's range is fine enough to be biased.
        super().__init__(params, swarm, codec=codec, **{"allow_biased": True, **options})


class AsyncDecentralized(ADPSGD):
    """Pairs that meet whenever they like; no local update is lost, because an average and an update
    are each atomic."""

    algorithm = "async-decentralized"


class AsyncLowPrecisionDecentralized(ChocoSGD):
    """8-bit differences that travel during the next step; what they bring is added to wherever the
    parameters are by then, so no local update is lost."""

    algorithm = "async-low-precision-decentralized"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        codec: str = "minmax-uint8",
        gamma: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(params, swarm, codec=codec, gamma=gamma, **{"overlap": True, **options})


class AsyncModelAverage(SwarmOptimizer):
    """The inner optimizer steps locally; every `every` steps a snapshot s of the parameters goes to
    the group, and when its mean is there x += mean - s. A step never waits and loses nothing.

    `delay` lands the mean that many steps after it began, waiting if it must; left out, after the
    first step at which it is there. `warmup_steps` average gradients first. `inner` gets all
    further options. Trainers that leave are simply in no later group: nothing has to be negotiated.
    """

    algorithm = "async-model-average"
    coding = EXACT

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        inner: MakeOptimizer = torch.optim.SGD,
        every: int = 8,
        delay: int | None = None,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        if every < 1 or warmup_steps < 0 or (delay is not None and delay < 0):
            raise TrainerError(
                f"every {every}, delay {delay}, warmup_steps {warmup_steps}, expected at least 1, "
                "0 and 0 steps"
            )
        super().__init__(params, {})
        self._swarm: Averages = require_averages(swarm, self.algorithm)
        self.inner = inner_optimizer(self, inner, options)
        self._every, self._delay, self._warmup = every, delay, warmup_steps
        self._models: GroupAverage | None = None
        self._gradients_average: GroupAverage | None = None
        self._pending: tuple[Pending[Mean], dict[str, Tensor], int] | None = None
        self._owed: dict[str, Any] = {}
        self.steps = 0
        self.landed = 0
        """Averages that came in."""

    def _advance(self, gradients: Gradients) -> None:
        warm = self.steps < self._warmup
        values, sound = gradients.values, gradients.sound
        if warm:
            values, sound = self._warm(gradients)
        if sound:
            set_gradients(self, values)
            self.inner.step()
        self.steps += 1
        if warm:
            return
        self._bring_in()
        if self._pending is None and self.steps % self._every == 0:
            snapshot = {name: value.clone() for name, value in self.parameters().items()}
            pending = self._opened(snapshot).begin(snapshot)
            self._pending = pending, snapshot, self.steps
            if self._delay == 0:
                self._bring_in()

    def catch_up(self) -> bool:
        """For a trainer that joins, or was away: take the others' mean and count nothing. False:
        nobody came; call again."""
        with torch.no_grad():
            self._bring_in(wait=True)
            mine = {name: value.clone() for name, value in self.parameters().items()}
            found = self._opened(mine).average(mine, weight=0)
            if found.contributors:
                self.write(found.tensors)
            return bool(found.contributors)

    def land(self) -> None:
        """Wait for the average in flight, if any: at the end, or before a checkpoint that shall
        hold it."""
        with torch.no_grad():
            self._bring_in(wait=True)

    def _bring_in(self, *, wait: bool = False) -> None:
        if self._pending is None:
            return
        pending, snapshot, begun = self._pending
        due = pending.done if self._delay is None else self.steps - begun >= self._delay
        if not (due or wait):
            return
        self._pending = None
        found = pending.land()
        if not found.contributors:
            return
        self.landed += 1
        for name, x in self.parameters().items():
            if name not in found.missing:
                x += bagua.async_delta(
                    snapshot=snapshot[name], total=found.tensors[name], contributors=1
                )

    def _warm(self, gradients: Gradients) -> tuple[dict[str, Tensor], bool]:
        if self._gradients_average is None:
            self._gradients_average = self._swarm.averages(
                f"{self.algorithm}.warm", like=gradients.values
            )
        found = self._gradients_average.average(
            gradients.values, weight=1 if gradients.sound else 0
        )
        return found.tensors, gradients.sound or bool(found.contributors)

    def _opened(self, like: Mapping[str, Tensor]) -> GroupAverage:
        if self._models is None:
            self._models = self._swarm.averages(
                f"{self.algorithm}.model", like=like, coding=self.coding
            )
            self._models.load_state_dict(self._owed)
        return self._models

    def _extra(self) -> dict[str, Any]:
        owed = self._owed if self._models is None else self._models.state_dict()
        return {"steps": self.steps, "owed": owed}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.steps, self._owed = int(extra["steps"]), dict(extra["owed"])
        if self._models is not None:
            self._models.load_state_dict(self._owed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """An average in flight is about other parameters and is given up."""
        super().load_state_dict(state_dict)
        self._pending = None
        link(self, self.inner)

    def close(self) -> None:
        for opened in (self._models, self._gradients_average):
            if opened is not None:
                opened.close()


class AsyncLowPrecisionAverage(AsyncModelAverage):
    """The same with snapshots of 8 bits. They are parameters, so their error is fed back at both
    ends: without that every progress smaller than half a step of the codec is lost for ever."""

    algorithm = "async-low-precision-average"
    coding = Coding("minmax-uint8", feedback=True)


CUBE: dict[str, type[SwarmOptimizer]] = {
    kind.algorithm: kind
    for kind in (
        GradientAllReduce,
        ByteGrad,
        AsyncModelAverage,
        AsyncLowPrecisionAverage,
        Decentralized,
        LowPrecisionDecentralized,
        AsyncDecentralized,
        AsyncLowPrecisionDecentralized,
    )
}
"""The names are those of `tensors.rules.bagua.CELLS`, which says what each cell is."""
