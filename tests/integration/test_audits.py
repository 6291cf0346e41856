"""Audits on real daemons: a reducer that tells everybody the same lie. One rule: whoever is lied to
keeps its own values, and only the auditor, who knows, blames anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moshpitd.client import Result
from moshpitd.daemon.averaging import Reducer
from moshpitd.daemon.views import peer_views
from moshpitd.tensors.layout import Part
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers

PART = 65_536  # float32 values in a part
PARTS = 6
NODES = 3


def fill(tensors: Sequence[dict[str, Tensor]], seed: int) -> list[Tensor]:
    for number, own in enumerate(tensors):
        rng = torch.Generator().manual_seed(seed * NODES + number)
        own["w"].copy_(torch.randn(PARTS * PART, generator=rng))
    return [own["w"].clone() for own in tensors]


def strikes(swarm: LocalSwarm, run: str, of: str) -> list[float]:
    """How much each other node holds against that one, and nothing against anybody else."""
    found = []
    for node in swarm.nodes:
        assert node is not None
        current = node.runs[run]
        views = peer_views(current, asyncio.get_running_loop().time())
        assert not [v for v in views if v["strikes"] and v["peer_id"] != of]
        found += [v["strikes"] for v in views if v["peer_id"] == of and node.peer_id != of]
    return found


@pytest.mark.parametrize("codec", ["float16", "int8"])
async def test_a_consistent_lie_reaches_nobody(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"averaging__audit_fraction": 1.0, "averaging__codec": codec}
    async with LocalSwarm(NODES, **settings) as swarm:
        tensors = [{"w": torch.zeros(PARTS * PART)} for _ in range(NODES)]
        async with trainers(swarm, "r", tensors) as sessions:
            for seed in range(3):
                fill(tensors, seed)
                results = await average(swarm, sessions)
                assert [one.status for one in results] == ["complete"] * NODES, results
                assert same_bits(tensors)
            liar = swarm.node(1).peer_id
            assert not any(strikes(swarm, "r", liar)), "nobody has lied yet"

            honest = Reducer._encoded

            def spoilt(self: Reducer, part: Part, mean: Tensor) -> tuple[Tensor, Tensor]:
                shared = self._shared
                if shared.group.members[shared.index].peer_id == liar:
                    mean = mean + 0.03 * mean.abs().max()
                return honest(self, part, mean)

            before = fill(tensors, 3)
            monkeypatch.setattr(Reducer, "_encoded", spoilt)
            results = await average(swarm, sessions)
            monkeypatch.undo()
            lied = check_told(results)
            mean = torch.stack(before).double().mean(0)
            for own, was in zip(tensors, before, strict=True):
                for part in range(PARTS):
                    piece = slice(part * PART, (part + 1) * PART)
                    if part in lied:
                        assert torch.equal(own["w"][piece], was[piece]), "not its own values"
                    else:
                        gap = (own["w"][piece].double() - mean[piece]).abs().max()
                        assert gap < 0.05, "no average of an honest reducer"
            found = strikes(swarm, "r", liar)
            assert any(found), "no auditor strikes"

            fill(tensors, 4)
            results = await average(swarm, sessions)
            assert [one.status for one in results] == ["complete"] * NODES, results
            assert same_bits(tensors)


def check_told(results: Sequence[Result]) -> tuple[int, ...]:
    """All say the same; returns the parts that have no result."""
    for one in results:
        assert (one.status, one.reason) == ("partial", "audit_failed"), str(one)
        assert one.parts_without_result == results[0].parts_without_result
        assert one.parts == PARTS
    assert any("differs by" in one.detail for one in results), results
    lied = results[0].parts_without_result
    assert 0 < len(lied) < PARTS
    return lied
