"""Nine daemons and groups of three: a 3x3 grid, exact after a sweep of two rounds."""

from __future__ import annotations

import pytest
import torch

from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_nine_peers_in_groups_of_three_have_the_exact_mean_after_a_sweep() -> None:
    values = [float(3**i % 101) for i in range(9)]
    weights = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    tensors = [{"w": torch.zeros(50, dtype=torch.float64)} for _ in values]
    async with (
        LocalSwarm(9, averaging__max_group=3) as swarm,
        trainers(swarm, "grid", tensors) as sessions,
    ):
        nodes = [swarm.node(i) for i in range(9)]
        await until(
            lambda: all(len(node.peers("grid")) == 8 for node in nodes),
            timeout_s=20,
            what="every peer knows the other eight",
        )
        for own, value in zip(tensors, values, strict=True):
            own["w"].fill_(value)
        results = await average(swarm, sessions, weights, rounds="sweep")
        grids = [node.status()["runs"][0]["grid"] for node in nodes]
    assert grids == [[3, 3]] * 9
    for result in results:
        assert (result.status, result.rounds) == ("complete", 2), str(result)
        assert (result.group_size, result.participants) == (3, 3)
    for own in tensors:
        torch.testing.assert_close(
            own["w"], torch.full((50,), expected, dtype=torch.float64), rtol=1e-12, atol=0
        )
    # Members of one last group hold the same bits; between groups the order of additions differs.
    last = {}
    for own, result in zip(tensors, results, strict=True):
        last.setdefault(result.group_id, []).append(own)
    assert sorted(len(members) for members in last.values()) == [3, 3, 3]
    assert all(same_bits(members) for members in last.values())
