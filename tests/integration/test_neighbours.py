"""Exchanges with neighbours between real daemons: rows of a mixing matrix, and the algorithms on
them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import nn

from moshpitd.client import attach
from moshpitd.client.optim import by_name
from moshpitd.client.primitives import Coding, Exchanged
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.testing import LocalSwarm
from tests.kit.rules import Quadratics

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, WIDTH = 4, 300
_names = itertools.count()


@pytest.fixture
def run() -> str:
    return f"run-{next(_names)}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(PEERS) as running:
        yield running


async def test_the_mean_moves_by_the_gradients_alone(swarm: LocalSwarm, run: str) -> None:
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=WIDTH)
    a, b, lr, steps = problem.a.float(), problem.b.float(), 0.2, 6

    def train(peer: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        x = nn.Parameter(torch.full((WIDTH,), float(peer)))
        with attach(run, tensors=[x], socket=swarm.socket(peer)) as session:
            optimizer = by_name("d-psgd", [x], SwarmOfDaemons(session, timeout_s=20), lr=lr)
            xs, gradients = [x.detach().clone()], []
            for _ in range(steps):
                x.grad = a[peer] * (x.detach() - b[peer])
                gradients.append(x.grad.clone())
                optimizer.step()
                xs.append(x.detach().clone())
            optimizer.close()
        return xs, gradients, optimizer

    ends = await asyncio.gather(*(swarm.call(train, peer) for peer in range(PEERS)))
    for t in range(steps):
        before = torch.stack([xs[t] for xs, _, _ in ends]).double().mean(0)
        after = torch.stack([xs[t + 1] for xs, _, _ in ends]).double().mean(0)
        moved = torch.stack([gradients[t] for _, gradients, _ in ends]).double().mean(0)
        torch.testing.assert_close(after, before - lr * moved, rtol=1e-6, atol=1e-6)
    for _, _, optimizer in ends:
        assert optimizer.last.own_share == pytest.approx(1 / 3)
        assert len(optimizer.last.messages) == 2
        assert optimizer.last.unheard == ()
