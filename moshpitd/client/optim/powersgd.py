"""PowerSGD: the swarm's mean gradient in rank r, under any torch optimizer. One rule: what travels
are sums (P, then Q), so there is nothing to code and the group average is exact.

    optimizer = by_name("powersgd", model.parameters(), swarm, rank=2, lr=0.1, momentum=0.9)

Two group averages a step: "left" carries P of every matrix and the tensors that do not gain
(vectors, small matrices) as they are, "right" carries Q. Errors are this trainer's own and part of
its checkpoint; they are in the units of gradients, as in the paper, so a learning rate that falls
scales old errors with it. Q is replicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import Gradients, MakeOptimizer, set_gradients
from moshpitd.client.optim.mean_gradient import GradientAllReduce
from moshpitd.client.optim.replicas import CHECK_EVERY, NothingToApplyError
from moshpitd.client.primitives import EXACT, Mean
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import powersgd


class PowerSGD(GradientAllReduce):
    """x <- inner(x, P^ Q^T), rank(P^ Q^T) <= `rank`, warm-started, with error feedback.

    A matrix n x m costs rank (n + m) elements instead of n m; one that would not gain is averaged
    exactly. `seed` must be the same on all trainers.
    """

    algorithm = "powersgd"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        rank: int = 2,
        seed: int = 0,
        inner: MakeOptimizer = torch.optim.SGD,
        check_every: int = CHECK_EVERY,
        **options: Any,
    ) -> None:
        if rank < 1:
            raise TrainerError(f"rank {rank}, expected at least 1")
        if refused := {"codec", "feedback", "allow_no_ef"} & options.keys():
            raise TypeError(f"{sorted(refused)}: sums in low rank are not coded")
        super().__init__(params, swarm, inner=inner, check_every=check_every, **options)
        self._seed = seed
        self._matrices = {
            slot.name: index
            for index, slot in enumerate(self.slots())
            if powersgd.compresses(slot.parameter.shape, rank)
        }
        shapes = {name: tuple(value.shape) for name, value in self.parameters().items()}
        like = {
            name: powersgd.as_matrix(value[:1]) for name, value in self._chosen(self.parameters())
        }
        # Not in torch's state: an inner optimizer takes a state that is not empty for its own.
        self._q = {
            name: powersgd.start(shapes[name], rank, seed=self._draw(name)).to(like[name])
            for name in self._matrices
        }
        self._errors = {
            name: torch.zeros_like(powersgd.as_matrix(value))
            for name, value in self._chosen(self.parameters())
        }

    def _update(self, gradients: Gradients) -> bool:
        weight = self.weight(gradients)
        full = {
            name: powersgd.as_matrix(value) + self._errors[name]
            for name, value in self._chosen(gradients.values)
        }
        sent = {
            name: powersgd.left(full[name], self._q[name]) if name in full else value
            for name, value in gradients.values.items()
        }
        first = self.average("left", sent, coding=EXACT, weight=weight)
        mean = dict(first.tensors)
        good = first.whole
        if self._matrices:
            good = self._right(full, mean, weight=weight, first=first) and good
        set_gradients(self, mean)
        self.inner.step()
        self._primed = True
        return good

    def _right(
        self, full: dict[str, Tensor], mean: dict[str, Tensor], *, weight: int, first: Mean
    ) -> bool:
        """Q, and with it the gradients, into `mean`. Without the others' P this trainer's Q would
        be about other columns: it counts nothing then, and all of its M stays owed. Who met nobody
        at all is a swarm of one: it takes its own Q and owes what that leaves out."""
        own = {}
        for name in self._matrices:
            mean[name] = powersgd.orthonormal(mean[name])
            own[name] = powersgd.right(full[name], mean[name])
        alone = not first.contributors
        second = None if alone else self._mean_right(own, weight if first.whole else 0)
        inside = weight > 0 and first.whole and second is not None and not second.excluded
        for name in self._matrices:
            p, q = mean[name], own[name] if second is None else second.tensors[name]
            if alone or (inside and second is not None and name not in second.missing):
                self._errors[name] = full[name] - powersgd.restored(p, own[name])
            else:
                self._errors[name] = full[name]
            shape = self.parameters()[name].shape
            mean[name] = powersgd.restored(p, q).reshape(shape)
            self._q[name] = powersgd.revived(q, seed=self._draw(name))
        return second is not None and second.whole

    def _mean_right(self, own: dict[str, Tensor], weight: int) -> Mean | None:
        """None: nobody was there for the second half, so this update is missed."""
        try:
            found = self.average("right", own, coding=EXACT, weight=weight)
        except NothingToApplyError:
            return None
        return found if found.contributors else None

    def _chosen(self, values: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        return [(name, values[name]) for name in self._matrices]

    def _draw(self, name: str) -> int:
        """Another for every matrix and update, the same on all trainers. A digest, because torch's
        generator reads 32 bits of a seed and refuses more than 64."""
        words = f"{self._seed}/{self.version}/{self._matrices[name]}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "big")

    def replicated_state(self) -> dict[str, Tensor]:
        return {**super().replicated_state(), **{f"q.{name}": q for name, q in self._q.items()}}

    def _extra(self) -> dict[str, Any]:
        held = (("q", self._q), ("errors", self._errors))
        copied = {key: {name: v.clone() for name, v in kept.items()} for key, kept in held}
        return {**super()._extra(), **copied}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        super()._load_extra(extra)
        for held, key in ((self._q, "q"), (self._errors, "errors")):
            for name, value in extra[key].items():
                held[name] = value.to(held[name]).clone()
