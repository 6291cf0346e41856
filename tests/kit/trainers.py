"""What the tests of the shipped optimizers share: one vector per peer, gradients that are given.

One rule: a test sets `grad` and calls `step`, as a training loop would; nothing reaches inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moshpitd.client.optim.distributed import SwarmOptimizer
from moshpitd.client.optim.registry import by_name
from moshpitd.core.mixing import Edge, EdgeMixing, Mixing
from moshpitd.tensors.rules.signs import Scale, encode_signs
from moshpitd.testing.arithmetic import ArithmeticSwarm
from moshpitd.testing.coding import Coder

Gradient = Callable[[int, int, Tensor], Tensor]
"""(peer, step, x) -> gradient."""


@dataclass
class Trainer:
    """One peer's vector and its optimizer; `path` is the vector after every step."""

    peer: int
    x: nn.Parameter
    optimizer: SwarmOptimizer
    steps: int = 0
    path: list[Tensor] = field(default_factory=list)

    def step(self, gradient: Gradient) -> None:
        self.x.grad = gradient(self.peer, self.steps, self.x.detach()).clone()
        self.optimizer.step()
        self.steps += 1
        self.path.append(self.x.detach().clone())


class Team:
    """All peers of a swarm under one algorithm."""

    def __init__(
        self, swarm: ArithmeticSwarm, algorithm: str, starts: Sequence[Tensor], **options: Any
    ) -> None:
        self.swarm, self.algorithm, self.options = swarm, algorithm, options
        self.trainers = [self.trainer(peer, start) for peer, start in enumerate(starts)]

    def trainer(self, peer: int, start: Tensor) -> Trainer:
        x = nn.Parameter(start.clone())
        return Trainer(peer, x, by_name(self.algorithm, [x], self.swarm.peer(peer), **self.options))

    def step(self, gradient: Gradient, steps: int = 1, peers: Sequence[int] | None = None) -> None:
        """All at once; `peers` leaves the others dead meanwhile."""

        def play(peer: int) -> None:
            for _ in range(steps):
                self.trainers[peer].step(gradient)

        self.swarm.play(play, peers)

    @property
    def xs(self) -> list[Tensor]:
        return [trainer.x.detach().clone() for trainer in self.trainers]

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.xs).mean(0)

    def equal(self) -> bool:
        return all(torch.equal(x, self.xs[0]) for x in self.xs)


@dataclass(frozen=True)
class Fixed:
    """A schedule that always mixes by one matrix (rows: target, columns: source)."""

    w: list[list[float]]

    @property
    def peers(self) -> int:
        return len(self.w)

    def sample(self, t: int, dead: Any = ()) -> Mixing:
        edges = tuple(
            Edge(source, target, weight)
            for target, row in enumerate(self.w)
            for source, weight in enumerate(row)
            if weight and source != target
        )
        own = tuple(self.w[peer][peer] for peer in range(self.peers))
        return EdgeMixing(self.peers, edges, own).without(dead)


# ---- Codecs of the wire in float64, where no codec of the wire goes: for worked examples.


def sign_coder(scale: Scale) -> Coder:
    return lambda values, draw: encode_signs(values, scale).values()


SIGNS = {"sign-l1": sign_coder(Scale.L1), "sign-rms": sign_coder(Scale.RMS)}
