"""Exchanges with neighbours between real daemons: the algorithms on them, and a neighbour that dies
with kill -9. Three nodes are in this process, the fourth is a process of its own.

Every step of every trainer leaves its row of the mixing matrix, and the number of each message in
it says which step of its sender it belongs to: so the matrix that came to be can be looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import nn

from moshpitd.client import attach
from moshpitd.client.optim import by_name
from moshpitd.client.primitives import Exchanged
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.testing import LocalSwarm
from tests.kit.processes import DaemonProcess
from tests.kit.rules import Quadratics
from tests.kit.swarm import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS = 4
FAST = ("averaging.window_s=2", "averaging.answer_timeout_s=1")  # as in LocalSwarm
ALGORITHMS: dict[str, dict[str, Any]] = {
    "d-psgd": {"lr": 0.2},
    "sgp": {"lr": 0.2},
    "choco-sgd": {"lr": 0.1, "codec": "int8", "gamma": 0.5},
}


@dataclass
class Daemons:
    swarm: LocalSwarm
    fourth: DaemonProcess

    def socket(self, peer: int) -> Path:
        return self.swarm.socket(peer) if peer < PEERS - 1 else self.fourth.socket


@dataclass
class Trained:
    """What one trainer did, step by step: parameters before each step and at the end."""

    peer_id: str = ""
    xs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    rows: list[Exchanged] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemons() -> AsyncIterator[Daemons]:
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as place:
        async with LocalSwarm(PEERS - 1) as swarm:
            address = swarm.node(0).status()["addresses"][0]
            fourth = DaemonProcess(Path(place) / "d", bootstrap=(address,), settings=FAST)
            fourth.start()
            try:
                await swarm.call(fourth.up)
                await until(
                    lambda: all(swarm.node(i).status()["swarm_peers"] == PEERS for i in range(3)),
                    timeout_s=30,
                    what="all four",
                )
                yield Daemons(swarm, fourth)
            finally:
                await swarm.call(fourth.kill)


def train(daemons: Daemons, name: str, peer: int, width: int, steps: int, into: Trained) -> None:
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=width)
    a, b = problem.a[peer].float(), problem.b[peer].float()
    x = nn.Parameter(torch.full((width,), float(peer)))
    with attach(f"{name}-{width}", tensors=[x], socket=daemons.socket(peer)) as session:
        into.peer_id = session.peer_id
        swarm = SwarmOfDaemons(session, timeout_s=20)
        optimizer: Any = by_name(name, [x], swarm, **ALGORITHMS[name])
        for _ in range(steps):
            x.grad = a * (x.detach() - b)
            into.xs.append(x.detach().clone())
            into.gradients.append(x.grad)
            optimizer.step()
            into.rows.append(optimizer.last)
            into.masses.append(getattr(optimizer, "mass", 1.0))
        into.xs.append(x.detach().clone())
        optimizer.close()


def edges(trained: list[Trained]) -> dict[tuple[str, int, str, int], float]:
    """(taker, its step, giver, the giver's step) -> share, of all messages that were taken."""
    return {
        (one.peer_id, step, message.peer, message.sequence): message.share
        for one in trained
        for step, row in enumerate(one.rows)
        for message in row.messages
    }


async def test_the_mean_moves_by_the_gradients_alone(daemons: Daemons) -> None:
    trained, lr = [Trained() for _ in range(PEERS)], ALGORITHMS["d-psgd"]["lr"]
    await asyncio.gather(
        *(
            daemons.swarm.call(train, daemons, "d-psgd", peer, 300, 6, trained[peer])
            for peer in range(PEERS)
        )
    )
    for t in range(6):
        before, after, moved = (
            torch.stack(each).double().mean(0)
            for each in (
                [one.xs[t] for one in trained],
                [one.xs[t + 1] for one in trained],
                [one.gradients[t] for one in trained],
            )
        )
        torch.testing.assert_close(after, before - lr * moved, rtol=1e-6, atol=1e-6)
    for one in trained:
        last = one.rows[-1]
        assert last.own_share == pytest.approx(1 / 3)
        assert [message.share for message in last.messages] == pytest.approx([1 / 3, 1 / 3])
        assert last.unheard == ()


async def test_a_neighbour_that_is_killed_costs_its_edges_and_nothing_else(
    daemons: Daemons,
) -> None:
    width, steps, killed_after = 400_000, 12, 4
    found = {name: [Trained() for _ in range(PEERS)] for name in ALGORITHMS}
    training = asyncio.gather(
        *(
            daemons.swarm.call(train, daemons, name, peer, width, steps, found[name][peer])
            for name, peer in itertools.product(ALGORITHMS, range(PEERS))
        )
    )
    victims = [each[-1] for each in found.values()]
    await until(
        lambda: all(len(one.rows) >= killed_after for one in victims) or training.done(),
        timeout_s=30,
        what="everybody trains",
    )
    await daemons.swarm.call(daemons.fourth.kill)
    await training

    for name, trained in found.items():
        living, victim = trained[:-1], trained[-1].peer_id
        ids = {one.peer_id for one in living}
        taken = edges(living)
        assert all(len(one.rows) == steps for one in living)
        assert any(giver == victim for _, _, giver, _ in taken), f"{name}: it was never there"
        if name != "sgp":  # undirected: rows of one, and every edge at both ends or at none
            for one in living:
                for row in one.rows:
                    total = row.own_share + sum(message.share for message in row.messages)
                    assert total == pytest.approx(1.0), name
            for (taker, step, giver, sent), share in taken.items():
                if giver != victim:
                    assert taken.get((giver, sent, taker, step)) == share, name
        else:  # directed: whatever a giver no longer has is with one taker
            last = max(
                step
                for one in living
                for step, row in enumerate(one.rows)
                if victim in row.unheard or any(m.peer == victim for m in row.messages)
            )
            for one in living:
                for step in range(last + 1, steps):
                    given = sum(
                        share
                        for (_, _, giver, sent), share in taken.items()
                        if (giver, sent) == (one.peer_id, step)
                    )
                    assert one.rows[step].own_share + given == pytest.approx(1.0)
        for one in living:
            final = one.rows[-1]
            assert {message.peer for message in final.messages} <= ids, name
            assert final.messages, f"{name}: the living go on with each other"
            assert bool(one.xs[-1].isfinite().all())
    masses = [one.masses[-1] for one in found["sgp"][:-1]]
    assert all(0.1 < mass < 3.0 for mass in masses), masses
