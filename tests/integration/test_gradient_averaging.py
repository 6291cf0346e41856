"""Moshpit gradient averaging on a full 2 x 2 grid of daemons: the synchronous mean, exactly."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from moshpitd.client import attach
from moshpitd.client.optim import GradientAveraging
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, STEPS = 4, 3


def new_model() -> nn.Sequential:
    """Whole numbers all the way: sums and halves of them are exact in float32 in every order, so
    that "up to summation order" leaves no room at all."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape, generator=draw))
    return model


def batch(peer: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + peer)
    return torch.randint(-2, 3, (1, 4), generator=draw).float()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def synchronous() -> list[torch.Tensor]:
    """What one process makes of all shards together."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for peer in range(PEERS):
            backward(model, batch(peer, step))
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(PEERS)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


async def test_tau_1_on_a_full_grid_is_the_synchronous_mean_bit_for_bit() -> None:
    models = [new_model() for _ in range(PEERS)]
    async with LocalSwarm(PEERS, averaging__max_group=2, averaging__codec="float32") as swarm:

        def begin(peer: int) -> GradientAveraging:
            model = models[peer]
            session = attach("mean", model=model, socket=swarm.socket(peer))
            inner = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
            return GradientAveraging(model, inner, session, bucket_bytes=1, timeout_s=30)

        optimizers = await asyncio.gather(*(swarm.call(begin, peer) for peer in range(PEERS)))
        runs = ["mean", *(f"mean.grad{at}" for at in range(3))]
        await until(
            lambda: all(len(swarm.node(i).peers(run)) == 3 for i in range(PEERS) for run in runs),
            timeout_s=20,
            what="every peer knows the other three in every run",
        )

        def train(peer: int) -> None:
            for step in range(STEPS):
                optimizers[peer].zero_grad()
                backward(models[peer], batch(peer, step))
                optimizers[peer].step()

        await asyncio.gather(*(swarm.call(train, peer) for peer in range(PEERS)))
        grids = [run["grid"] for run in swarm.node(0).status()["runs"] if "grad" in run["run"]]
        for optimizer in optimizers:
            await swarm.call(optimizer.close)  # in a thread: the daemons' loop is this one
            await swarm.call(optimizer.session.close)
    assert [(optimizer.missed, optimizer.current) for optimizer in optimizers] == [(0, True)] * 4
    assert grids == [[2, 2]] * 3
    for model in models:
        for p, expected in zip(model.parameters(), synchronous(), strict=True):
            assert torch.equal(p.detach(), expected)
