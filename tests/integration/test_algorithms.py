"""Algorithms by name on daemons that come and go: whoever was away is given the others' state, and
holds the same bits again. The long forms of these are `moshpitd demo --algorithm NAME`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client import Session, attach
from moshpitd.client.optim import by_name
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.testing import LocalSwarm
from tests.kit.rules import Quadratics

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, ROWS, COLUMNS = 3, 24, 16
BOUND = 600  # steps, for a survivor that waits for somebody who never comes
ALGORITHMS: dict[str, dict[str, Any]] = {
    "powersgd": {"lr": 0.2, "rank": 2, "check_every": 4},
    "diloco": {"inner": torch.optim.SGD, "lr": 0.1, "every": 2, "codec": "int8", "check_every": 2},
}
PROBLEM = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=ROWS * COLUMNS)


@dataclass
class End:
    """Where all stop: told by the one that comes back, as soon as it knows where the others are."""

    version: int | None = None


class Trainer:
    def __init__(self, swarm: LocalSwarm, name: str, peer: int, start: Tensor) -> None:
        self.peer = peer
        self.x = nn.Parameter(start.clone())
        self.session: Session = attach(name, tensors=[self.x], socket=swarm.socket(peer))
        assert self.session.wait_attached(30)
        daemons = SwarmOfDaemons(self.session, timeout_s=20)
        self.optimizer: Any = by_name(name, [self.x], daemons, **ALGORITHMS[name])

    def step(self) -> None:
        away = self.x.detach().flatten().double()
        self.x.grad = PROBLEM.grad(self.peer, away).float().reshape(ROWS, COLUMNS)
        self.optimizer.step()

    def until(self, end: End) -> None:
        for _ in range(BOUND):
            if end.version is not None and self.optimizer.version >= end.version:
                return
            self.step()

    def comes_back(self, end: End) -> None:
        while not (self.optimizer.catch_up() and self.optimizer.current):
            pass
        end.version = self.optimizer.version + 8
        self.until(end)

    def leave(self) -> None:
        self.optimizer.close()
        self.session.close()


@pytest.mark.parametrize("name", list(ALGORITHMS))
async def test_a_node_that_was_away_holds_the_same_bits_again(name: str) -> None:
    async with LocalSwarm(PEERS) as swarm:

        async def all_of(calls: list[Any]) -> None:
            await asyncio.gather(*(swarm.call(call, *given) for call, *given in calls))

        start = torch.zeros(ROWS, COLUMNS)
        trainers = [await swarm.call(Trainer, swarm, name, peer, start) for peer in range(PEERS)]
        await all_of([(trainer.until, End(4)) for trainer in trainers])
        *survivors, lost = trainers
        await swarm.stop_node(lost.peer)
        await swarm.call(lost.leave)
        await all_of([(trainer.until, End(8)) for trainer in survivors])
        await swarm.start(lost.peer)
        back = await swarm.call(Trainer, swarm, name, lost.peer, torch.ones(ROWS, COLUMNS))
        end = End()
        await all_of([(back.comes_back, end), *((one.until, end) for one in survivors)])
        states = [one.optimizer.replicated_state() for one in (*survivors, back)]
        await all_of([(one.leave,) for one in (*survivors, back)])
    assert back.optimizer.resyncs >= 1
    # Survivors may be resynced too: whoever a group met without, or could not vote, says so.
    assert {one.optimizer.version for one in (*survivors, back)} == {end.version}
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key
