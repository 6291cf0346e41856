"""Real daemons over a network with an injected delay against the simulator's prediction. One rule:
the time that this machine needs by itself is measured in the same rounds, undelayed ones between
delayed ones, so that its load is in both and in neither's way."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from moshpitd.cli.demo_processes import free_ports
from moshpitd.sim.costs.net import Net
from moshpitd.sim.costs.rehearsal import rehearse
from moshpitd.tensors.layout import Layout, specs_of
from moshpitd.testing import LocalSwarm
from moshpitd.testing.proxied_swarm import Network, proxied_swarm
from tests.kit.swarm import average, trainers

pytestmark = pytest.mark.asyncio(loop_scope="module")

DELAY_S = 0.02
LOOPBACK_BITS_PER_S = 20e9  # what its bytes take is in the undelayed rounds already
TOLERANCE = 0.25
ROUNDS = 9
PAUSE_S = 0.1
"""As trainers compute: the last message of a round is acknowledged before the next begins."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four() -> AsyncIterator[tuple[LocalSwarm, Network]]:
    async with proxied_swarm(free_ports(2 * 4)) as both:
        yield both


@pytest.mark.parametrize("numel", [256, 500_000])
async def test_a_round_over_20_ms_takes_what_the_simulator_predicts(
    four: tuple[LocalSwarm, Network], numel: int
) -> None:
    swarm, network = four
    tensors = [{"w": torch.full((numel,), float(i))} for i in range(4)]
    seconds: dict[float, list[float]] = {0.0: [], DELAY_S: []}
    async with trainers(swarm, f"delayed-{numel}", tensors) as sessions:
        await average(swarm, sessions)  # links and records are made
        for turn in range(2 * ROUNDS):
            delay_s = DELAY_S * (turn % 2)
            network.slow(delay_s)
            await swarm.call(time.sleep, PAUSE_S)
            began = time.monotonic()
            results = await average(swarm, sessions)
            seconds[delay_s].append(time.monotonic() - began)
            assert [result.status for result in results] == ["complete"] * 4, str(results)
        network.slow(0.0)
    layout = Layout.from_specs(specs_of(tensors[0]))
    net = Net("20 ms", DELAY_S, LOOPBACK_BITS_PER_S)
    by_itself, measured = (statistics.median(seconds[delay_s]) for delay_s in (0.0, DELAY_S))
    predicted = by_itself + rehearse(net, layout, "float32", peers=4).seconds
    print(
        f"{numel}: {by_itself:.4f} s by itself, measured {measured:.4f}, predicted {predicted:.4f}"
    )
    assert measured == pytest.approx(predicted, rel=TOLERANCE)
