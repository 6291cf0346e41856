"""What error feedback owes is part of a checkpoint: trainers that go on from one, on daemons that
went on without them, repeat what they did then, bit for bit."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client import attach
from moshpitd.client.optim import by_name
from moshpitd.client.optim.replicas import VERSION
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import TrainerError
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, BEFORE, AFTER = 2, 3, 3
RUN = "checkpoints.ec-sgd.step"
NUMEL = 300_000  # two parts, so that either peer may reduce one
EQUAL = {"limits__upload_mbps": 50.0, "limits__download_mbps": 50.0}
"""Far below what was ever measured here, so that who reduces which part is the same each time: what
a reducer owes stays with the node that reduced."""


def gradient(peer: int, step: int) -> Tensor:
    """Peer 1 has nothing to say: a mean with zeros has the same bits in any order of adding."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(NUMEL, generator=draw) if peer == 0 else torch.zeros(NUMEL)


class Trained:
    """One trainer's life: attach, make steps, leave."""

    def __init__(self, swarm: LocalSwarm, peer: int, saved: dict[str, Any] | None) -> None:
        self.peer = peer
        self.x = nn.Parameter(torch.zeros(NUMEL) if saved is None else saved["x"].clone())
        self.session = attach("checkpoints", tensors=[self.x], socket=swarm.socket(peer))
        assert self.session.wait_attached(30)
        daemons = SwarmOfDaemons(self.session, timeout_s=30, min_participants=PEERS)
        self.optimizer: Any = by_name("ec-sgd", [self.x], daemons, codec="sign-l1", lr=0.5)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
        like = {**self.optimizer.parameters(), VERSION: torch.tensor([0])}
        self.optimizer._opened("step", like, self.optimizer._coding)  # a step opens it otherwise

    def meets(self, swarm: LocalSwarm) -> bool:
        """Whoever steps before its node has heard of the other is alone, as often as it tries."""
        state = swarm.node(self.peer).runs[RUN].driver.peer.state
        return bool(state.swarm.live(state.record.schema))

    def steps(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            self.x.grad = gradient(self.peer, step)
            self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        state = {"x": self.x.detach(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(state)

    def leave(self) -> Tensor:
        self.optimizer.close()
        self.session.close()
        return self.x.detach().clone()


async def test_trainers_go_on_from_a_checkpoint_bit_for_bit() -> None:
    def first(trained: Trained) -> tuple[dict[str, Any], Tensor]:
        trained.steps(0, BEFORE)
        saved = trained.saved()
        trained.steps(BEFORE, AFTER)
        return saved, trained.leave()

    def again(trained: Trained) -> Tensor:
        trained.steps(BEFORE, AFTER)
        return trained.leave()

    async def both(swarm: LocalSwarm, function: Any, saved: list[Any]) -> list[Any]:
        made = [swarm.call(Trained, swarm, peer, saved[peer]) for peer in range(PEERS)]
        trained = await asyncio.gather(*made)
        for one in trained:
            await until(lambda one=one: one.meets(swarm), timeout_s=30, what="each knows the other")
        return list(await asyncio.gather(*(swarm.call(function, one) for one in trained)))

    async with LocalSwarm(PEERS, **EQUAL) as swarm:
        lives = await both(swarm, first, [None] * PEERS)
        saved = [state for state, _ in lives]
        owed = [state["optimizer"]["moshpitd"]["owed"]["step"] for state in saved]
        assert any("sender" in one for one in owed), "what nobody owes cannot be lost"
        assert any("reducer" in one for one in owed)
        ends = await both(swarm, again, saved)
        without = copy.deepcopy(saved)
        for state in without:
            state["optimizer"]["moshpitd"]["owed"]["step"] = {}
        forgotten = await both(swarm, again, without)
    assert torch.equal(lives[0][1], lives[1][1])
    for end, (_, wanted) in zip(ends, lives, strict=True):
        assert torch.equal(end, wanted)
    assert not torch.equal(forgotten[0], ends[0]), "the checkpoint's debts do matter"


async def test_debts_of_other_tensors_are_refused() -> None:
    async with LocalSwarm(1) as swarm:

        def ask() -> None:
            x = nn.Parameter(torch.zeros(8))
            with attach("alone", tensors=[x], socket=swarm.socket(0)) as session:
                optimizer: Any = by_name("ec-sgd", [x], session, codec="sign-l1")
                x.grad = torch.ones(8)
                optimizer.step()
                state = optimizer.state_dict()
                owed = state["moshpitd"]["owed"]["step"]
                wrong = {"sender": torch.ones(8), "reducer": torch.zeros(9)}
                state["moshpitd"]["owed"] = {"step": wrong}
                with pytest.raises(TrainerError, match="residual of 9 elements") as refused:
                    optimizer.load_state_dict(state)
                assert refused.value.reason == "schema_differs"
                left = optimizer.state_dict()["moshpitd"]["owed"]["step"]
                assert left.keys() == owed.keys(), "not even the side that was right"
                assert all(torch.equal(left[side], owed[side]) for side in owed)
                optimizer.close()

        await swarm.call(ask)
