"""Any torch optimizer on the swarm's mean gradient, exact or coded: BAGUA's GradientAllReduce and
ByteGrad, and QSGD and NUQSGD data parallel. One rule: all trainers take the same mean, so that
equal parameters stay equal; which optimizer uses it is nobody's business here.

    optimizer = by_name("bytegrad", model.parameters(), swarm, inner=torch.optim.Adam, lr=1e-3)

A codec that is not unbiased loses the same part of every gradient again; without error feedback it
is refused here, but for the algorithms that are defined that way (ByteGrad).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import (
    Gradients,
    MakeOptimizer,
    inner_optimizer,
    link,
    set_gradients,
)
from moshpitd.client.optim.replicas import CHECK_EVERY, Replicated
from moshpitd.client.primitives import Coding
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules.common import require_unbiased


class GradientAllReduce(Replicated):
    """x <- inner(x, sum_i w_i g_i / sum_i w_i), w_i = `samples` (1 unless it is set).

    `inner` is a torch optimizer's class and gets all further options. `feedback` keeps the codec's
    errors and adds them to the next gradients; they are in the units of gradients, so a learning
    rate that falls scales old errors with it (EF-SGD proper is "ef-signsgd").
    """

    algorithm = "gradient-allreduce"
    codec = "float32"
    biased_by_definition = False

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        inner: MakeOptimizer = torch.optim.SGD,
        codec: str = "",
        feedback: bool = False,
        allow_no_ef: bool = False,
        check_every: int = CHECK_EVERY,
        **options: Any,
    ) -> None:
        chosen = codec or self.codec
        if not feedback:
            require_unbiased(
                chosen,
                unbiased=codec_for(chosen, "float32").unbiased,
                allow_no_ef=allow_no_ef or self.biased_by_definition,
                algorithm=self.algorithm,
            )
        super().__init__(params, swarm, {}, check_every=check_every)
        self._coding = Coding(chosen, feedback=feedback)
        self.inner = inner_optimizer(self, inner, options)
        self._primed = False

    def _update(self, gradients: Gradients) -> bool:
        found = self.average(
            "gradient", gradients.values, coding=self._coding, weight=self.weight(gradients)
        )
        set_gradients(self, found.tensors)
        self.inner.step()
        self._primed = True
        return found.whole

    def replicated_state(self) -> dict[str, Tensor]:
        """Parameters and whatever tensors the inner optimizer keeps."""
        if not self._primed:
            self._prime()
        found = super().replicated_state()
        for slot in self.slots():
            for key, value in sorted(self.state[slot.parameter].items()):
                if isinstance(value, Tensor):
                    found[f"{key}.{slot.name}"] = value
        return found

    def _prime(self) -> None:
        """A newcomer's optimizer has no state yet, but must know its shape to be given one: a dry
        step from zero gradients makes it."""
        before = {name: value.clone() for name, value in self.parameters().items()}
        set_gradients(self, {name: torch.zeros_like(value) for name, value in before.items()})
        self.inner.step()
        self.write(before)
        self._primed = True

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        link(self, self.inner)
        self._primed = bool(state_dict["state"])


class ByteGrad(GradientAllReduce):
    """BAGUA's centralized low precision: 8 bits a gradient both ways, no error feedback. `codec`:
    "minmax-uint8" (its range is per block of 1,024), or "bagua-minmax-uint8" as published."""

    algorithm = "bytegrad"
    codec = "minmax-uint8"
    biased_by_definition = True


class QSGD(GradientAllReduce):
    """QSGD data parallel (Alistarh et al. 2017): unbiased stochastic rounding to 8 bits, both
    ways."""

    algorithm = "qsgd"
    codec = "qsgd"


class NUQSGD(GradientAllReduce):
    """NUQSGD data parallel (Ramezani-Kebrya et al. 2021): levels 0, 2^-6 ... 1 of the norm, 4
    bits."""

    algorithm = "nuqsgd"
    codec = "nuqsgd"
