"""DiLoCo and Streaming DiLoCo: any torch optimizer locally, and an outer optimizer over what all
moved. One rule: the anchor and the outer momentum are equal on all trainers; parameters are only
between an outer step and the next local one.

    optimizer = by_name("diloco", model.parameters(), swarm, every=100,
                        inner=torch.optim.AdamW, lr=4e-4)

The local optimizer's state stays local (as in the paper), so a trainer that joins brings none. A
trainer that meets nobody takes the outer step with its own movement: it trains on alone, and the
next comparison brings it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.checks import MAX_WEIGHT, check_weight
from moshpitd.client.optim.distributed import (
    Gradients,
    MakeOptimizer,
    Slot,
    inner_optimizer,
    link,
    set_gradients,
)
from moshpitd.client.optim.replicas import CHECK_EVERY, OfAnUpdate, Replicated
from moshpitd.client.primitives import Coding
from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules import diloco


@dataclass(frozen=True, slots=True)
class Outer:
    """When outer steps are taken, of what, and how long they are."""

    every: int
    lr: float
    momentum: float
    nesterov: bool
    codec: str
    feedback: bool | None = None
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0

    def coding(self) -> Coding:
        """A codec that is biased gets error feedback, unless it was said otherwise."""
        unbiased = codec_for(self.codec, "float32").unbiased
        fed = not unbiased if self.feedback is None else self.feedback
        return Coding(self.codec, feedback=fed)


class OuterSteps(Replicated):
    """What both algorithms are. Invariant: at most one fragment is in flight, the one whose turn
    `version` says it is."""

    def __init__(
        self,
        params: Any,
        swarm: object,
        outer: Outer,
        *,
        inner: MakeOptimizer,
        options: Mapping[str, Any],
        check_every: int,
    ) -> None:
        if not (outer.lr > 0 and 0 <= outer.momentum < 1):
            raise TrainerError(
                f"outer_lr {outer.lr}, outer_momentum {outer.momentum}, expected above 0, and 0 to "
                "below 1"
            )
        super().__init__(params, swarm, {}, check_every=check_every)
        self._outer, self._coding = outer, outer.coding()
        slots = list(self.slots())
        chosen = diloco.fragments(len(slots), outer.fragments)
        self._fragments = [[slots[index] for index in fragment] for fragment in chosen]
        self._spacing = diloco.check_schedule(
            every=outer.every, count=outer.fragments, overlap=outer.overlap, alpha=outer.alpha
        )
        self.inner = inner_optimizer(self, inner, options)
        # Not in torch's state: an inner optimizer takes a state that is not empty for its own.
        self._anchor = {slot.name: slot.parameter.detach().clone() for slot in slots}
        self._buffer = {name: torch.zeros_like(value) for name, value in self._anchor.items()}
        self._counted = [0] * outer.fragments  # samples since each fragment's last outer step
        self._flight: tuple[OfAnUpdate, int] | None = None  # and the step at which it began
        self._brought = 0  # resyncs that the parameters have heard of
        self.steps = 0
        """Local ones."""

    # -- a step -----------------------------------------------------------------------------------

    def _advance(self, gradients: Gradients) -> None:
        if gradients.sound:
            set_gradients(self, gradients.values)
            self.inner.step()
            count = check_weight(self.samples)
            self._counted = [min(held + count, MAX_WEIGHT) for held in self._counted]
        self.steps += 1
        self._land_if_due(gradients)
        if self.steps % self._spacing == 0:
            self._leave()
            self._land_if_due(gradients)

    def _leave(self) -> None:
        turn = self.version % len(self._fragments)
        sent = {
            slot.name: diloco.outer_gradient(self._anchor[slot.name], slot.parameter)
            for slot in self._fragments[turn]
        }
        weight, self._counted[turn] = self._counted[turn], 0
        name = "outer" if len(self._fragments) == 1 else f"outer{turn}"
        flight = self.begin(name, sent, coding=self._coding, weight=weight)
        self._flight = flight, self.steps

    def _land_if_due(self, gradients: Gradients) -> None:
        if self._flight is not None and self.steps - self._flight[1] >= self._outer.overlap:
            super()._advance(gradients)

    def land(self) -> None:
        """Take in the fragment in flight, if any, before its time: at the end of training."""
        if self._flight is not None:
            with torch.no_grad():
                super()._advance(Gradients({}))

    def _update(self, gradients: Gradients) -> bool:
        assert self._flight is not None  # looked at by whoever advances
        flight, self._flight = self._flight[0], None
        found = flight.land()
        outer = self._outer
        for slot in self._fragments[self.version % len(self._fragments)]:
            name = slot.name
            self._anchor[name], self._buffer[name] = diloco.outer_step(
                self._anchor[name], self._buffer[name], found.tensors[name],
                lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov,
            )  # fmt: skip
            self._take(slot, outer.alpha)
        return found.whole

    def _take(self, slot: Slot, alpha: float) -> None:
        slot.parameter.copy_(diloco.mixed(slot.parameter, self._anchor[slot.name], alpha=alpha))

    # -- equal state ------------------------------------------------------------------------------

    def replicated_state(self) -> dict[str, Tensor]:
        """Anchors and outer momenta; parameters differ between trainers by design."""
        found = {f"x.{name}": value for name, value in self._anchor.items()}
        return found | {f"momentum.{name}": value for name, value in self._buffer.items()}

    def _restored(self) -> None:
        if self.resyncs == self._brought:
            return  # it was right, and its local steps since are its own
        self._brought, self._flight = self.resyncs, None
        self.steps = self._outer.overlap % self._spacing  # where the others are who just landed
        self._counted = [0] * len(self._counted)
        for slot in self.slots():
            self._take(slot, 0.0)

    # -- checkpoints ------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        return {
            **super()._extra(),
            "steps": self.steps,
            "counted": list(self._counted),
            "anchor": {name: value.clone() for name, value in self._anchor.items()},
            "momentum": {name: value.clone() for name, value in self._buffer.items()},
        }

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        self.steps, self._counted = int(extra["steps"]), [int(n) for n in extra["counted"]]
        for held, key in ((self._anchor, "anchor"), (self._buffer, "momentum")):
            for name, value in extra[key].items():
                held[name] = value.to(held[name]).clone()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A fragment in flight is about other parameters and is given up; `land()` before saving
        where it shall be inside. A plain optimizer's checkpoint anchors where the model is now."""
        super().load_state_dict(state_dict)
        self._flight = None
        link(self, self.inner)
        if "moshpitd" not in state_dict:
            for name, value in self.parameters().items():
                self._anchor[name] = value.clone()


class DiLoCo(OuterSteps):
    """Every `every` local steps: D = mean_i (anchor - x_i), weighted by the samples since the last
    time; m <- mu m + D, anchor <- anchor - lr (D + mu m), x_i <- anchor (Douillard et al. 2023).

    `version` counts outer steps. With outer_lr=1 and outer_momentum=0 this is Local SGD, and
    mini-batch SGD for every=1. `codec` is any codec; one that is biased gets error feedback at both
    ends, unless `feedback` says otherwise. All further options are the inner optimizer's.
    """

    algorithm = "diloco"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        inner: MakeOptimizer = torch.optim.AdamW,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_nesterov: bool = True,
        codec: str = "float32",
        feedback: bool | None = None,
        check_every: int = CHECK_EVERY,
        **options: Any,
    ) -> None:
        outer = Outer(every, outer_lr, outer_momentum, outer_nesterov, codec, feedback)
        super().__init__(
            params, swarm, outer, inner=inner, options=options, check_every=check_every
        )


class StreamingDiLoCo(OuterSteps):
    """DiLoCo in `fragments` that take their outer steps in turn, each result landing `overlap`
    steps after it left, x <- alpha x + (1 - alpha) anchor (Douillard et al. 2025).

    The largest burst falls to 1 / fragments of DiLoCo's, and no step waits if a round takes less
    than `overlap` steps. `codec`: outer gradients in 4 bits, by default with levels at powers of
    two as the paper's E3M0 has them. `version` counts fragments that landed.
    """

    algorithm = "streaming-diloco"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        inner: MakeOptimizer = torch.optim.AdamW,
        every: int = 100,
        fragments: int = 2,
        overlap: int = 1,
        alpha: float = 0.5,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        outer_nesterov: bool = True,
        codec: str = "nuqsgd",
        feedback: bool | None = None,
        check_every: int = CHECK_EVERY,
        **options: Any,
    ) -> None:
        outer = Outer(
            every, outer_lr, outer_momentum, outer_nesterov, codec, feedback, fragments, overlap,
            alpha,
        )  # fmt: skip
        super().__init__(
            params, swarm, outer, inner=inner, options=options, check_every=check_every
        )
