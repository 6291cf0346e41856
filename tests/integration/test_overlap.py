"""Averages between real daemons while the trainers go on: together they lose nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from moshpitd.client.optim import LocalSGD
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import trainers

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, STEPS = 3, 40


async def test_every_local_update_is_in_the_sum_of_all_trainers() -> None:
    """Averages of equal weights keep the sum, and so do their deltas; each step adds a known number
    to it. float64, so that rounding hides nothing."""
    values = [{"w": torch.zeros(300_000, dtype=torch.float64)} for _ in range(PEERS)]
    async with (
        LocalSwarm(PEERS) as swarm,
        trainers(swarm, "overlap", values) as sessions,
    ):

        def train(peer: int) -> tuple[int, int]:
            parameter = values[peer]["w"].requires_grad_(True)
            inner = torch.optim.SGD([parameter], lr=1.0)
            during = 0
            optimizer = LocalSGD(inner, sessions[peer], every=1, overlap=True, timeout_s=30)
            for _ in range(STEPS):
                parameter.grad = torch.full_like(parameter, -float(peer + 1))
                flying = optimizer.in_flight
                optimizer.step(samples=0)  # weighs 1 whatever it made since the last round
                during += flying and optimizer.in_flight
            result = optimizer.land()
            assert result is not None
            assert result.status in ("complete", "alone"), str(result)
            return during, optimizer.missed

        told = await asyncio.gather(*(swarm.call(train, peer) for peer in range(PEERS)))
    assert all(during > 0 for during, _ in told), "steps were made while a round was in flight"
    assert all(missed == 0 for _, missed in told)
    total = sum(own["w"].detach() for own in values)
    assert isinstance(total, torch.Tensor)
    expected = torch.full_like(total, float(STEPS * sum(range(1, PEERS + 1))))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
