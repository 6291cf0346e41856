"""Decentralized SGD that sends compressed differences: CHOCO-SGD and DCD-PSGD, and BAGUA's low
precision cells on them. One rule: a peer's public copy changes only by what its neighbours decode.

Each trainer keeps a replica of every neighbour's public copy. That is more memory than CHOCO's one
sum s = W x^, and what it buys is churn: when a message is lost or the graph changes, only that
neighbour's copy is sent again, in full, and s is the sum over the replicas of now. Messages are
numbered. A gap means that a replica is wrong: it is dropped, its edge counts nothing, and the next
message to that neighbour carries our own copy in full, which tells it to do the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moshpitd.client.optim.distributed import (
    Gradients,
    SwarmOptimizer,
    sgd_options,
    sgd_step,
)
from moshpitd.client.primitives import (
    Coding,
    Exchanged,
    Message,
    NeighbourExchange,
    Neighbourhood,
    Pending,
    Tensors,
    require_neighbours,
)
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.rules import choco
from moshpitd.tensors.rules.choco import Arrival, Choco, Inbox


class Replicas:
    """What this peer knows of its neighbours' public copies. Invariant: a peer is in `copies` iff
    all its messages so far are in its copy; `knows` are those of them that know ours as well."""

    def __init__(self) -> None:
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.knows: set[str] = set()
        self._inboxes: dict[str, Inbox] = {}

    def take(self, found: Exchanged) -> list[tuple[float, dict[str, Tensor]]]:
        """(share, replica) of the neighbours whose replicas hold after this exchange."""
        usable = []
        for message in found.messages:
            if self._taken(message):
                usable.append((message.share, self.copies[message.peer]))
        heard = {message.peer for message in found.messages}
        for peer in [peer for peer in self.copies if peer not in heard]:
            # It missed our message, and we its: no edge, an edge that did not count, or away. Both
            # ends know, so the next message is in full at once and no edge is used at one end only.
            self.forget(peer)
        return usable

    def _taken(self, message: Message) -> bool:
        peer = message.peer
        if message.full is not None:
            known = peer in self.knows
            self.copies[peer] = _sum(message.full, message.tensors)
            self._inboxes[peer] = choco.resynced(message.sequence + 1)
            if not known:
                self.knows.add(peer)
                return True
            # A full copy that we did not need: it has lost ours, so that it cannot use this edge
            # now. Nor do we, and it gets ours in full next time.
            self.knows.discard(peer)
            return False
        arrival, inbox = choco.arrive(self._inboxes.get(peer, Inbox(broken=True)), message.sequence)
        if arrival is not Arrival.APPLY:
            self.forget(peer)
            return False
        self._inboxes[peer] = inbox
        self.copies[peer] = _sum(self.copies[peer], message.tensors)
        self.knows.add(peer)
        return True

    def forget(self, peer: str) -> None:
        self.copies.pop(peer, None)
        self._inboxes.pop(peer, None)
        self.knows.discard(peer)


class _Differences(SwarmOptimizer):
    """What both share."""

    def __init__(
        self,
        params: Any,
        swarm: object,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        topology: str,
        codec: str,
    ) -> None:
        super().__init__(params, sgd_options(lr, momentum, nesterov, weight_decay))
        codec_for(codec, "float32")  # an unknown name is an error here
        self._swarm: Neighbourhood = require_neighbours(swarm, self.algorithm)
        self._topology, self._coding = topology, Coding(codec)
        self._opened: NeighbourExchange | None = None
        self.replicas = Replicas()
        self.last: Exchanged | None = None

    @abstractmethod
    def _public(self) -> dict[str, Tensor]:
        """Our own public copy."""

    def _begin(self, difference: Tensors) -> Pending[Exchanged]:
        if self._opened is None:
            self._opened = self._swarm.neighbours(
                self.algorithm, like=difference, topology=self._topology, coding=self._coding
            )
        return self._opened.begin(
            difference, full=self._public(), knows=frozenset(self.replicas.knows)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Neighbours get our copy in full, and we theirs, in the next exchanges."""
        super().load_state_dict(state_dict)
        self.replicas = Replicas()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class ChocoSGD(_Differences):
    """CHOCO-SGD (Koloskova et al. 2019): q_i = C(x_i - lr g_i - x^_i) to all neighbours, x^ += q,
    x_i <- x_i - lr g_i + gamma sum_j w_ij (x^_j - x^_i). For any codec the mean of x moves by the
    gradients only.

    gamma: 1 for an exact codec; tuned values on a ring of 9 with d = 2,000: 0.04 for top-1 %, 0.34
    for 4-bit QSGD, 0.5 for signs. `start`: x^ = 0 ("zero"), or "equal" where all trainers start
    from equal parameters. With `overlap` the exchange runs during the next step and its part is
    added then.
    """

    algorithm = "choco-sgd"

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
        codec: str = "top-k",
        gamma: float = 0.04,
        start: str = "zero",
        overlap: bool = False,
    ) -> None:
        if not 0 < gamma <= 1 or start not in ("zero", "equal"):
            raise TrainerError(
                f"gamma {gamma}, start {start!r}, expected gamma in (0, 1] and 'zero' or 'equal'"
            )
        super().__init__(
            params, swarm, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
            topology=topology, codec=codec,
        )  # fmt: skip
        self._gamma, self._start, self._overlap = gamma, start, overlap
        self._pending: Pending[Exchanged] | None = None

    def _advance(self, gradients: Gradients) -> None:
        step = sgd_step(self, gradients)
        public = self._public()
        x = {name: value - step[name] for name, value in self.parameters().items()}
        if self._pending is not None:
            x = self._mixed(x, public, self._pending.land())
            public = self._public()
        pending = self._begin({name: value - public[name] for name, value in x.items()})
        if self._overlap:
            self._pending = pending
        else:
            x = self._mixed(x, public, pending.land())
        self.write(x)

    def _mixed(
        self, x: Mapping[str, Tensor], public: Mapping[str, Tensor], found: Exchanged
    ) -> dict[str, Tensor]:
        self.last = found
        usable = self.replicas.take(found)
        own_weight = 1.0 - sum(share for share, _ in usable)
        mixed, moved = {}, {}
        for name, value in x.items():
            state = Choco(value, public[name] + found.own[name], public[name])
            others = [(share, replica[name]) for share, replica in usable]
            state = choco.choco_resync(state, own_weight=own_weight, others=others)
            mixed[name] = value + self._gamma * (state.around - state.public)
            moved[name] = state.public
        self.keep("public", moved)
        return mixed

    def _public(self) -> dict[str, Tensor]:
        for slot in self.slots():
            state = self.state[slot.parameter]
            if "public" not in state:
                zero = self._start == "zero"
                x = slot.parameter.detach()
                state["public"] = torch.zeros_like(x) if zero else x.clone()
        return self.all_kept("public")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """An exchange in flight is about the parameters before and is given up."""
        super().load_state_dict(state_dict)
        self._pending = None


class DCD(_Differences):
    """DCD-PSGD (Tang et al. 2018): q_i = C(sum_j w_ij x_j - lr g_i - x_i), x_i += q_i, and every
    neighbour adds q_i to its replica of x_i. The parameters are the public copy, so the codec must
    be unbiased, or round finely: others are refused unless `allow_biased`.

    The first step mixes with nobody; replicas are exchanged with it.
    """

    algorithm = "dcd-psgd"

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
        codec: str = "qsgd",
        allow_biased: bool = False,
    ) -> None:
        super().__init__(
            params, swarm, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
            topology=topology, codec=codec,
        )  # fmt: skip
        wire = codec_for(codec, "float32")
        if not (wire.unbiased or allow_biased):
            raise ConfigError(
                f"{self.algorithm} writes what {codec!r} decodes into the parameters, and it is "
                "biased",
                key="codec",
                expected="an unbiased codec, choco-sgd, or allow_biased = true",
            )
        self._shares: list[tuple[float, dict[str, Tensor]]] = []

    def _advance(self, gradients: Gradients) -> None:
        step, x = sgd_step(self, gradients), self.parameters()
        own_weight = 1.0 - sum(share for share, _ in self._shares)
        difference = {
            name: choco.dcd_message(
                value,
                grad=step[name],
                eta=1.0,
                own_weight=own_weight,
                others=[(share, replica[name]) for share, replica in self._shares],
                compress=torch.clone,
            )
            for name, value in x.items()
        }
        found = self.last = self._begin(difference).land()
        self._shares = self.replicas.take(found)
        self.write({name: value + found.own[name] for name, value in x.items()})

    def _public(self) -> dict[str, Tensor]:
        return self.parameters()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._shares = []


def _sum(one: Tensors, other: Tensors) -> dict[str, Tensor]:
    return {name: value + other[name] for name, value in one.items()}
