"""What DIANA's relatives share: shifts h_i that learn each trainer's own gradient. One rule: h is
the mean of the h_i of those who are in the group, so both change by the very same decoded messages.

Messages are coded one way: the mean of what was decoded comes back exactly (`result="float32"`),
because h + mean m_i with a rounded mean would leave h beside mean h_i for ever. When the members of
the group change, h is averaged anew from the h_i, with the weights of the messages; all members see
that in the same round. Whoever comes has had no members yet, and so does the same.
"""

from __future__ import annotations

from torch import Tensor

from moshpitd.client.optim.distributed import Slot
from moshpitd.client.optim.replicas import Replicated
from moshpitd.client.primitives import EXACT, Coding, Mean
from moshpitd.errors import TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules.common import require_unbiased
from moshpitd.tensors.rules.diana import diana_alpha

OWN, MEAN = "shift", "mean_shift"


def unbiased_coding(codec: str, algorithm: str) -> Coding:
    """Up as `codec`, back exactly; a biased codec is refused, whatever its name."""
    unbiased = codec_for(codec, "float32").unbiased
    require_unbiased(codec, unbiased=unbiased, allow_no_ef=False, algorithm=algorithm)
    return Coding(codec, result="float32", own=True)


class Shifts:
    """h_i in the state as "shift", h as "mean_shift"; zeros at the start."""

    def __init__(self, optimizer: Replicated, alpha: float | None, codec: str) -> None:
        if alpha is not None and not 0 <= alpha <= 1:
            raise TrainerError(f"alpha {alpha}, expected a number of [0, 1]")
        self._optimizer, self._codec, self._alpha = optimizer, codec, alpha
        self.members: tuple[str, ...] = ()

    @property
    def alpha(self) -> float:
        """1 / (1 + omega), the largest that the theory allows, unless it was given."""
        if self._alpha is not None:
            return self._alpha
        numel = sum(slot.parameter.numel() for slot in self._optimizer.slots())
        return diana_alpha(codec_for(self._codec, "float32").omega(numel))

    def own(self, slot: Slot) -> Tensor:
        return self._optimizer.kept(OWN, slot)

    def mean(self, slot: Slot) -> Tensor:
        return self._optimizer.kept(MEAN, slot)

    def learn(self, found: Mean, *, sound: bool, weight: int) -> bool:
        """h_i += alpha m_i, h += alpha mean m; or h anew when others are in the group now. False:
        what the others hold now was missed."""
        if not found.contributors:
            return True
        for slot in self._optimizer.slots():
            if sound and not found.excluded:
                self.own(slot).add_(found.own[slot.name], alpha=self.alpha)
            self.mean(slot).add_(found.tensors[slot.name], alpha=self.alpha)
        if found.contributors == self.members:
            return True
        shifts = self._optimizer.all_kept(OWN)
        anew = self._optimizer.average("shifts", shifts, coding=EXACT, weight=weight)
        if anew.contributors:
            self._optimizer.keep(MEAN, anew.tensors)
        self.members = anew.contributors  # if one of them missed it, all do it again
        return anew.whole

    def replicated(self) -> dict[str, Tensor]:
        kept = self._optimizer.all_kept(MEAN)
        return {f"{MEAN}.{name}": value for name, value in kept.items()}
