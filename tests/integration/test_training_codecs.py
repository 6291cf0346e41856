"""LocalSGD through real daemons under the codecs for parameters. One rule: the same training, the
same loss, within 3 %.

Each trainer pulls towards an optimum of its own, so the average of every step matters. The
parameters lie around 8 and a step moves them by about 0.001: float16 has steps of 0.008 there,
bfloat16 of 0.06, int8 of 0.07. Without error feedback none of the three moves at all.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from moshpitd.client import optim
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import same_bits, trainers

pytestmark = pytest.mark.asyncio

NUMEL, STEPS, RATE, TRAINERS = 64, 150, 1e-3, 2
UNFED = {"averaging__error_feedback": False, "averaging__allow_no_error_feedback": True}


def optima() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [8 + 2 * torch.rand(NUMEL, generator=generator) for _ in range(TRAINERS)]


CURVATURE = torch.linspace(1, 3, NUMEL)


def loss(x: torch.Tensor, optimum: torch.Tensor) -> torch.Tensor:
    return (CURVATURE * (x - optimum).square()).mean() / 2


async def final_loss(**settings: object) -> float:
    """Of the average, against the optimum of both trainers together."""
    tensors = [{"x": torch.full((NUMEL,), 8.0, requires_grad=True)} for _ in range(TRAINERS)]
    async with (
        LocalSwarm(TRAINERS, averaging__window_s=8.0, **settings) as swarm,
        trainers(swarm, "training", tensors) as sessions,
    ):

        def train(number: int) -> None:
            x, optimum = tensors[number]["x"], optima()[number]
            steps = optim.LocalSGD(torch.optim.SGD([x], lr=RATE), sessions[number], every=1)
            for _ in range(STEPS):
                steps.zero_grad()
                # As a sum over the elements: lr is about each of them.
                (loss(x, optimum) * NUMEL).backward()
                steps.step()
                result = steps.last
                assert result is not None
                assert (result.status, result.participants) == ("complete", TRAINERS), str(result)

        await asyncio.gather(*(swarm.call(train, number) for number in range(TRAINERS)))
        assert same_bits(tensors)
        mean = torch.stack(optima()).mean(0)
        return float(loss(tensors[0]["x"].detach(), mean).item())


async def test_the_loss_is_that_of_float32_with_feedback_only() -> None:
    exact = await final_loss(averaging__codec="float32")
    start = float(loss(torch.full((NUMEL,), 8.0), torch.stack(optima()).mean(0)).item())
    assert exact < 0.7 * start
    for codec in ("float16", "bfloat16", "int8"):
        assert await final_loss(averaging__codec=codec) == pytest.approx(exact, rel=0.03), codec
    assert await final_loss(averaging__codec="bfloat16", **UNFED) == pytest.approx(start, rel=0.03)
