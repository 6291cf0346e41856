"""Optimizers by name on real daemons: group averages with a codec each, error feedback included."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.optim import by_name
from moshpitd.client.optim.distributed import SwarmOptimizer
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import TrainerError
from moshpitd.testing import ArithmeticSwarm, LocalSwarm
from tests.kit.rules import Quadratics
from tests.kit.trainers import Team

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEERS, WIDTH = 3, 512
FAMILIES: dict[str, dict[str, Any]] = {
    "gradient-allreduce": {"lr": 0.4},
    "bytegrad": {"lr": 0.4},
    "onebit-adam": {"lr": 0.03, "freeze_step": 6, "check_every": 8, "betas": (0.9, 0.99)},
    "async-low-precision-average": {"lr": 0.4, "every": 2, "delay": 1},
}
SHIFTED: dict[str, dict[str, Any]] = {
    "diana": {"lr": 0.3, "codec": "natural"},
    "marina": {"lr": 0.3, "codec": "natural", "chance": 0.5},
    "ef-signsgd": {"lr": 0.3},
}
STEPS = 16


def in_arithmetic(
    name: str, a: torch.Tensor, b: torch.Tensor, *, server: int
) -> list[torch.Tensor]:
    """The same on an ArithmeticSwarm: the same codecs on the same parts, no network. Peer 0 serves
    the one part there, and its own contribution does not travel; on daemons it may be any."""
    team = Team(ArithmeticSwarm(PEERS), name, [torch.zeros(WIDTH)] * PEERS, **FAMILIES[name])
    of = [(server + peer) % PEERS for peer in range(PEERS)]
    team.step(lambda i, k, x: a[of[i]] * (x - b[of[i]]), steps=STEPS)
    if name.startswith("async"):
        team.swarm.play(lambda peer: team.trainers[peer].optimizer.land())  # type: ignore[attr-defined]
    return team.xs


async def test_families_of_group_averages_train_on_daemons() -> None:
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=WIDTH)
    a, b = problem.a.float(), problem.b.float()

    def train(name: str, peer: int, swarm: LocalSwarm) -> tuple[torch.Tensor, SwarmOptimizer, int]:
        x = nn.Parameter(torch.zeros(WIDTH))
        session = attach(name, tensors=[x], socket=swarm.socket(peer))
        assert session.wait_attached(30)
        daemons = SwarmOfDaemons(session, timeout_s=30, min_participants=PEERS)
        optimizer = by_name(name, [x], daemons, **FAMILIES[name])
        for _ in range(STEPS):
            x.grad = a[peer] * (x.detach() - b[peer])
            optimizer.step()
        if name.startswith("async"):
            optimizer.land()  # type: ignore[attr-defined]
        optimizer.close()
        session.close()
        return x.detach(), optimizer, daemons.bytes_sent

    twins = {
        name: [
            torch.stack(in_arithmetic(name, a, b, server=server)).mean(0) for server in range(PEERS)
        ]
        for name in FAMILIES
    }
    async with LocalSwarm(PEERS) as swarm:
        sent, off = {}, {}
        for name in FAMILIES:
            ends = await asyncio.gather(
                *(swarm.call(train, name, peer, swarm) for peer in range(PEERS))
            )
            sent[name] = ends[0][2]
            xs = torch.stack([x for x, _, _ in ends])
            off[name] = [float((xs.mean(0) - twin).norm() / twin.norm()) for twin in twins[name]]
            for x, optimizer, _ in ends:
                if optimizer.replicated:
                    assert torch.equal(x, xs[0]), name
                    assert optimizer.missed == 0  # type: ignore[attr-defined]
        codecs = {run["run"]: run["codec"] for run in swarm.node(0).status()["runs"]}
    # Daemons add in another order, and a sign near zero may turn.
    assert max(min(each) for each in off.values()) < 0.02, off
    assert codecs["onebit-adam.onebit-adam.momentum"] == "sign-l1"
    assert codecs["bytegrad.bytegrad.gradient"] == "minmax-uint8"
    assert codecs["gradient-allreduce.gradient-allreduce.gradient"] == "float32"
    assert 3.5 < sent["gradient-allreduce"] / sent["bytegrad"] < 4.5
    assert sent["onebit-adam"] < 0.6 * sent["gradient-allreduce"], "10 of 16 steps in one bit"


async def test_shifts_and_error_feedback_find_the_optimum_on_daemons() -> None:
    """Codes that were drawn elsewhere are other codes, so here the optimum is the witness."""
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=WIDTH)
    a, b, best = problem.a.float(), problem.b.float(), problem.optimum().float()

    def train(name: str, peer: int, swarm: LocalSwarm) -> tuple[torch.Tensor, int]:
        x = nn.Parameter(torch.zeros(WIDTH))
        session = attach(name, tensors=[x], socket=swarm.socket(peer))
        assert session.wait_attached(30)
        daemons = SwarmOfDaemons(session, timeout_s=30, min_participants=PEERS)
        optimizer = by_name(name, [x], daemons, **SHIFTED[name])
        for _ in range(STEPS):
            x.grad = a[peer] * (x.detach() - b[peer])
            optimizer.step()
        optimizer.close()
        session.close()
        return x.detach(), optimizer.missed  # type: ignore[attr-defined]

    async with LocalSwarm(PEERS) as swarm:
        for name in SHIFTED:
            ends = await asyncio.gather(
                *(swarm.call(train, name, peer, swarm) for peer in range(PEERS))
            )
            assert [missed for _, missed in ends] == [0] * PEERS, name
            assert all(torch.equal(x, ends[0][0]) for x, _ in ends), name
            off = float((ends[0][0] - best).norm() / best.norm())
            assert off < (0.5 if name == "ef-signsgd" else 0.1), name


async def test_what_daemons_cannot_do_is_said_at_the_start() -> None:
    async with LocalSwarm(1) as swarm:

        def ask() -> None:
            x = nn.Parameter(torch.zeros(4))
            with attach("alone", tensors=[x], socket=swarm.socket(0)) as session:
                x.grad = torch.ones(4)
                with pytest.raises(TrainerError, match="topology 'star', expected one of ring"):
                    by_name("d-psgd", [x], session, topology="star").step()
                swarm_of_one, value = SwarmOfDaemons(session), {"x": torch.ones(4)}
                one, two = (
                    swarm_of_one.neighbours("n", like=value, topology="ring") for _ in range(2)
                )
                alone = one.exchange(value)
                assert (alone.own_share, alone.messages, alone.unheard) == (1.0, (), ())
                assert torch.equal(alone.own["x"], value["x"])
                with pytest.raises(TrainerError, match="expected one trainer of it on a node"):
                    two.exchange(value)
                one.close()
                two.close()
                for codec, reason in (("gzip", "codec_refused"), ("int8", "codec_differs")):
                    other = Session("alone", lambda: {"0": x}, socket=swarm.socket(0), codec=codec)
                    with pytest.raises(TrainerError) as refused:
                        other.start(sync=True)
                    assert refused.value.reason == reason
                    other.close()

        await swarm.call(ask)
