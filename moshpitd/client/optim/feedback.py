"""Error feedback with the step size inside: EF-SignSGD, EC-SGD and EC-SGD with DIANA's shifts. One
rule: what a codec left out of lr g is added to the next lr g, so a learning rate that changes
scales no old error.

The error is kept where the codec is, in the group average (`Coding.feedback`), and is part of the
checkpoint there. `two_sided` codes the mean as well, with an error of its own (dist-EF-SGD, Zheng
et al. 2019), which is what a group of daemons does; without it the mean comes back exactly, as in
the papers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, named, sgd_options, sgd_step
from moshpitd.client.optim.replicas import CHECK_EVERY, Replicated
from moshpitd.client.optim.shifts import Shifts, unbiased_coding
from moshpitd.client.primitives import EXACT, Coding
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules import errorfeedback


class ECSGD(Replicated):
    """EC-SGD: Delta_i = C(lr g_i + e_i), x <- x - mean Delta_i, e_i <- what is left. For any codec
    x - mean(e) is plain SGD's path. Momentum, before the codec, is this trainer's own."""

    algorithm = "ec-sgd"
    codec = "top-k"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        codec: str = "",
        two_sided: bool = True,
        check_every: int = CHECK_EVERY,
    ) -> None:
        options = sgd_options(lr, momentum, nesterov, weight_decay)
        super().__init__(params, swarm, options, check_every=check_every)
        chosen = codec or self.codec
        codec_for(chosen, "float32")  # an unknown name is an error here
        self._coding = Coding(chosen, result="" if two_sided else "float32", feedback=True)

    def _update(self, gradients: Gradients) -> bool:
        sent = sgd_step(self, gradients)
        found = self.average("step", sent, coding=self._coding, weight=self.weight(gradients))
        self.write(
            {
                name: errorfeedback.apply_mean(x, [found.tensors[name]])
                for name, x in self.parameters().items()
            }
        )
        return found.whole


class EFSignSGD(ECSGD):
    """EF-SignSGD (Karimireddy et al. 2019): EC-SGD with one bit per element and the scale
    ||v||_1 / d. Without feedback signSGD does not converge in general."""

    algorithm = "ef-signsgd"
    codec = "sign-l1"


class ECSGDDiana(Replicated):
    """EC-SGD with DIANA's learned shifts (Gorbunov et al. 2020): with full gradients it converges
    linearly to the exact optimum although every message is tiny.

    v_i = C(e_i + lr (g_i - h_i + h)), x -= mean v_i; q_i = Q(g_i - h_i), h_i += alpha q_i, h +=
    alpha mean q_i, used from the next step on. C may be biased, Q must not; alpha = 1 / (1 + omega
    of Q).
    """

    algorithm = "ec-sgd-diana"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        codec: str = "top-k",
        shift_codec: str = "natural",
        alpha: float | None = None,
        two_sided: bool = False,
        check_every: int = CHECK_EVERY,
    ) -> None:
        super().__init__(params, swarm, {"lr": lr}, check_every=check_every)
        codec_for(codec, "float32")
        self._coding = Coding(codec, result="" if two_sided else "float32", feedback=True)
        self._learning = unbiased_coding(shift_codec, self.algorithm)
        self._shifts = Shifts(self, alpha, shift_codec)

    def _update(self, gradients: Gradients) -> bool:
        own, mean = self._shifts.own, self._shifts.mean
        values = gradients.values
        sent = named(
            self.slots(),
            lambda slot: (
                slot.group["lr"]
                * (values[slot.name] - own(slot) + mean(slot) if gradients.sound else mean(slot))
            ),
        )
        weight = self.weight(gradients)
        step = self.average("step", sent, coding=self._coding, weight=weight)
        differences = named(self.slots(), lambda slot: values[slot.name] - own(slot))
        learned = self.average("learned", differences, coding=self._learning, weight=weight)
        self.write(
            {
                name: errorfeedback.apply_mean(x, [step.tensors[name]])
                for name, x in self.parameters().items()
            }
        )
        followed = self._shifts.learn(learned, sound=gradients.sound, weight=weight)
        return step.whole and learned.whole and followed

    def choices(self) -> dict[str, Coding]:
        return {"step": self._coding, "learned": self._learning, "shifts": EXACT}

    def replicated_state(self) -> dict[str, Tensor]:
        return {**super().replicated_state(), **self._shifts.replicated()}

    def _load_extra(self, extra: Any) -> None:
        super()._load_extra(extra)
        self._shifts.members = tuple(extra.get("members", ()))

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "members": list(self._shifts.members)}


__all__ = ["ECSGD", "ECSGDDiana", "EFSignSGD"]
