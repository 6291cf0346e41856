"""Training by talking to neighbours: D-PSGD, random pairs, Stochastic Gradient Push, AD-PSGD.

One rule: the mean over all peers moves by the local updates and by nothing else; the arithmetic is
`tensors.rules`, the mixing matrix is the swarm's. Parameters differ between trainers all the time,
so nothing here is `replicated`, and a trainer that joins starts from a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from moshpitd.client.optim.distributed import (
    Gradients,
    SwarmOptimizer,
    named,
    sgd_direction,
    sgd_options,
    sgd_step,
)
from moshpitd.client.primitives import (
    Exchanged,
    Meetings,
    NeighbourExchange,
    Neighbourhood,
    require_neighbours,
)
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import dpsgd, pushsum
from moshpitd.tensors.rules.pushsum import PushSum

Order = Literal["mix-then-step", "adapt-then-combine"]


class DPSGD(SwarmOptimizer):
    """x_i <- sum_j W_ij x_j - lr g_i(x_i) (Lian et al. 2017), or with `adapt-then-combine`
    x_i <- sum_j W_ij (x_j - lr g_j(x_j)).

    `topology` must be undirected (ring, torus, pairs, random-matching, complete ...): on a directed
    one the mean drifts as soon as a peer dies, and `StochasticGradientPush` is the right one.
    Momentum and weight decay as in torch.optim.SGD; the momentum is this trainer's own. `every`:
    steps per exchange; the others are local.
    """

    algorithm = "d-psgd"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        topology: str = "ring",
        order: Order = "mix-then-step",
        every: int = 1,
    ) -> None:
        if every < 1:
            raise TrainerError(f"every {every}, expected at least 1 step between two exchanges")
        if order not in ("mix-then-step", "adapt-then-combine"):
            raise TrainerError(f"order {order!r}, expected mix-then-step or adapt-then-combine")
        super().__init__(params, sgd_options(lr, momentum, nesterov, weight_decay))
        self._swarm: Neighbourhood = require_neighbours(swarm, self.algorithm)
        self._topology, self._order, self._every = topology, order, every
        self.steps = 0
        self._exchange: NeighbourExchange | None = None
        self.last: Exchanged | None = None

    def _advance(self, gradients: Gradients) -> None:
        adapts = self._order == "adapt-then-combine"
        updates = sgd_step(self, gradients)
        before = self.parameters()
        sent = {
            name: dpsgd.adapt(x, grad=updates[name], gamma=1.0) if adapts else x
            for name, x in before.items()
        }
        self.steps += 1
        mixed = self._mixed(sent) if self.steps % self._every == 0 else sent
        if not adapts:
            mixed = {
                name: dpsgd.mix_then_step(x, grad=updates[name], gamma=1.0)
                for name, x in mixed.items()
            }
        self.write(mixed)

    def _mixed(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._exchange is None:
            self._exchange = self._swarm.neighbours(
                self.algorithm, like=sent, topology=self._topology
            )
        found = self.last = self._exchange.exchange(sent)
        weights = [found.own_share, *(message.share for message in found.messages)]
        return {
            name: dpsgd.mix(
                [found.own[name], *(message.tensors[name] for message in found.messages)], weights
            )
            for name in sent
        }

    def _extra(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.steps = int(extra["steps"])

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


class GossipSGD(DPSGD):
    """D-PSGD on random pairs: each round everybody meets one other, drawn anew (randomized gossip).
    With an odd number one rests. Any other topology of groups will do as well."""

    algorithm = "gossip"

    def __init__(
        self, params: Any, swarm: object, *, topology: str = "random-matching", **options: Any
    ) -> None:
        super().__init__(params, swarm, topology=topology, **options)


class StochasticGradientPush(SwarmOptimizer):
    """SGP (Assran et al. 2019) with push-sum weights: honest on any directed graph, under churn.

    State (x, w); the model holds z = x / w, where gradients are taken. x -= lr g(z); then shares of
    (x, w) go to the out-neighbours and what arrives is added up. sum w stays the number of peers,
    also when some are dead: a share that cannot be delivered stays with its sender.
    """

    algorithm = "sgp"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        topology: str = "one-peer-exponential",
    ) -> None:
        super().__init__(params, sgd_options(lr, momentum, nesterov, weight_decay))
        self._swarm: Neighbourhood = require_neighbours(swarm, self.algorithm)
        self._topology = topology
        self._exchange: NeighbourExchange | None = None
        self.mass = 1.0
        """The push-sum weight w of this trainer."""
        self.last: Exchanged | None = None

    def _advance(self, gradients: Gradients) -> None:
        biased: dict[str, Tensor] = {}
        for slot in self.slots():
            if "biased" not in self.state[slot.parameter]:
                self.state[slot.parameter]["biased"] = slot.parameter.detach() * self.mass
            state = PushSum(self.kept("biased", slot), self.mass)
            if gradients.sound:
                direction = sgd_direction(self, slot, gradients.values[slot.name])
                state = pushsum.local_step(state, grad=direction, gamma=slot.group["lr"])
            biased[slot.name] = state.x
        if self._exchange is None:
            self._exchange = self._swarm.neighbours(
                self.algorithm, like=biased, topology=self._topology
            )
        found = self.last = self._exchange.exchange(biased, mass=self.mass)
        mixed: dict[str, PushSum] = {}
        for name in biased:
            own = PushSum(found.own[name] * found.own_share, self.mass * found.own_share)
            parts = [
                PushSum(message.tensors[name] * message.share, message.mass * message.share)
                for message in found.messages
            ]
            mixed[name] = pushsum.absorb(own, parts)
        self.mass = next(iter(mixed.values())).weight
        self.keep("biased", {name: one.x for name, one in mixed.items()})
        self.write({name: one.z for name, one in mixed.items()})

    def _extra(self) -> dict[str, Any]:
        return {"mass": self.mass}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.mass = float(extra["mass"])

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


class ADPSGD(SwarmOptimizer):
    """AD-PSGD (Lian et al. 2018): an active peer averages with one passive neighbour, atomically,
    and applies a gradient that was taken at the copy before; nobody waits for a round.

    The parameters live in the swarm's `Meetings`, where others may average them at any time; the
    model is this trainer's copy of them as of its last step. The sum over peers changes by -lr g
    and by nothing else. Passive peers (even ranks) only answer.
    """

    algorithm = "ad-psgd"

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        topology: str = "ring",
    ) -> None:
        super().__init__(params, sgd_options(lr, momentum, nesterov, weight_decay))
        self._swarm: Neighbourhood = require_neighbours(swarm, self.algorithm)
        self._topology = topology
        self._meetings: Meetings | None = None
        self.met = ""
        """Whom the last step averaged with; empty for a passive peer."""

    def start(self) -> None:
        """Make this trainer's parameters known, so that others can meet them. The first step does
        it otherwise."""
        if self._meetings is None:
            like = self.parameters()
            self._meetings = self._swarm.meetings(
                self.algorithm, like=like, topology=self._topology
            )
            self._meetings.start(like)

    def _advance(self, gradients: Gradients) -> None:
        self.start()
        assert self._meetings is not None  # the line above
        self.met = self._meetings.meet()
        update = gradients.values
        if gradients.sound:
            update = named(
                self.slots(),
                lambda slot: (
                    -slot.group["lr"] * sgd_direction(self, slot, gradients.values[slot.name])
                ),
            )
        self.write(self._meetings.add(update))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The model's parameters of now are what others meet from now on."""
        super().load_state_dict(state_dict)
        if self._meetings is not None:
            self._meetings.start(self.parameters())

    def close(self) -> None:
        if self._meetings is not None:
            self._meetings.close()
