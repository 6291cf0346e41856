"""Exchanges with neighbours between real daemons: the algorithms on them, and a neighbour that dies
with kill -9. Three nodes are in this process, the fourth is a process of its own.

Every step of every trainer leaves its row of the mixing matrix, and the number of each message in
it says which step of its sender it belongs to: so the matrix that came to be can be looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    "gossip": {"lr": 0.2},
    "decentralized": {"lr": 0.2},
    "dcd-psgd": {"lr": 0.1},
    "low-precision-decentralized": {"lr": 0.1},
}
KILLED = ("d-psgd", "sgp", "choco-sgd")


@dataclass
class Daemons:
    swarm: LocalSwarm
    fourth: DaemonProcess

    def socket(self, peer: int) -> Path:
        return self.swarm.socket(peer) if peer < PEERS - 1 else self.fourth.socket


@dataclass
class Trained:
    """What one trainer did: where it began and ended, the sum of its gradients, and of each step
    its row without the values."""

    peer_id: str = ""
    first: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    last: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    moved: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    rows: list[Exchanged] = field(default_factory=list)
    mass: float = 1.0

    def met(self, neighbours: int = 1) -> int:
        """In how many steps it took so many messages, or more."""
        return sum(1 for row in self.rows if len(row.messages) >= neighbours)


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
                await swarm.call(fourth.end)


def train(
    daemons: Daemons, name: str, peer: int, width: int, into: Trained, go_on: Callable[[int], bool]
) -> None:
    """While `go_on(steps so far)`."""
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=width)
    a, b = problem.a[peer].float(), problem.b[peer].float()
    x = nn.Parameter(torch.full((width,), float(peer)))
    with attach(f"{name}-{width}", tensors=[x], socket=daemons.socket(peer)) as session:
        into.peer_id = session.peer_id
        swarm = SwarmOfDaemons(session, timeout_s=20)
        optimizer: Any = by_name(name, [x], swarm, **ALGORITHMS[name])
        into.first, into.moved = x.detach().double(), torch.zeros(width, dtype=torch.float64)
        while go_on(len(into.rows)):
            x.grad = a * (x.detach() - b)
            into.moved += x.grad
            optimizer.step()
            into.mass = getattr(optimizer, "mass", 1.0)
            into.rows.append(light(optimizer.last))
        into.last = x.detach().double()
        optimizer.close()


def light(row: Exchanged) -> Exchanged:
    """Without the values, of which a hundred steps of twelve trainers would be gigabytes."""
    messages = tuple(replace(one, tensors={}, full=None) for one in row.messages)
    return replace(row, own={}, messages=messages)


def before(ends_at: dict[str, int], name: str, steps: int) -> bool:
    """Until it is said when to end, and then that."""
    return steps < ends_at.get(name, 10_000)


def edges(trained: list[Trained]) -> dict[tuple[str, int, str, int], float]:
    """(taker, its step, giver, the giver's step) -> share, of all messages that were taken."""
    return {
        (one.peer_id, step, message.peer, message.sequence): message.share
        for one in trained
        for step, row in enumerate(one.rows)
        for message in row.messages
    }


async def run_on(
    daemons: Daemons, name: str, peers: Sequence[int], width: int, met: Callable[[Trained], bool]
) -> list[Trained]:
    """Until all have met as they should. Who is there first has nobody to meet, and its steps alone
    are many: so it is not steps that are counted."""
    trained, until_s = [Trained() for _ in peers], time.monotonic() + 20.0

    def go_on(_: int) -> bool:
        return time.monotonic() < until_s and not all(met(one) for one in trained)

    await asyncio.gather(
        *(
            daemons.swarm.call(train, daemons, name, peer, width, one, go_on)
            for peer, one in zip(peers, trained, strict=True)
        )
    )
    assert all(met(one) for one in trained), name
    return trained


def moves_by_gradients_alone(trained: list[Trained], lr: float) -> None:
    """The mean over all, from before the first step to after the last: trainers need not be in the
    same step when they meet."""
    first, last, moved = (
        torch.stack(each).mean(0)
        for each in (
            [one.first for one in trained],
            [one.last for one in trained],
            [one.moved for one in trained],
        )
    )
    torch.testing.assert_close(last, first - lr * moved, rtol=1e-4, atol=1e-4)


async def test_the_mean_moves_by_the_gradients_alone(daemons: Daemons) -> None:
    trained = await run_on(daemons, "d-psgd", range(PEERS), 300, lambda one: one.met(2) >= 3)
    moves_by_gradients_alone(trained, ALGORITHMS["d-psgd"]["lr"])
    for one in trained:
        whole = [row for row in one.rows if len(row.messages) == 2]
        assert whole[-1].own_share == pytest.approx(1 / 3)
        assert [message.share for message in whole[-1].messages] == pytest.approx([1 / 3] * 2)


async def test_exchanges_follow_one_another_without_a_word_through_p2pd(daemons: Daemons) -> None:
    """Nobody is asked for a group, and what is said of an edge goes on its link: some steps in a
    row in which the control plane carries nothing of this run, from or to anybody."""
    steps, peers, width = 5, range(PEERS - 1), 500
    run, carried = f"d-psgd-{width}", list[int]()

    def so_far() -> int:
        counts = [daemons.swarm.node(peer)._live().control_bytes for peer in peers]
        return sum(n for each in counts for (name, _), n in [*each.items()] if name.startswith(run))

    def quiet() -> bool:
        return any(a == b for a, b in zip(carried, carried[steps:], strict=False))

    trained, until_s = [Trained() for _ in peers], time.monotonic() + 20.0

    def go_on(peer: int, _: int) -> bool:
        if peer == 0:
            carried.append(so_far())
        return time.monotonic() < until_s and not quiet()

    await asyncio.gather(
        *(
            daemons.swarm.call(
                train, daemons, "d-psgd", peer, width, trained[peer], partial(go_on, peer)
            )
            for peer in peers
        )
    )
    assert quiet(), carried
    assert all(one.met(2) >= steps for one in trained)
    moves_by_gradients_alone(trained, ALGORITHMS["d-psgd"]["lr"])


async def test_pairs_that_meet_at_any_time_keep_the_sum(daemons: Daemons) -> None:
    """AD-PSGD: nobody waits for a round, and the sum over peers moves by the gradients alone."""
    lr, width, steps = 0.05, 3000, 12
    problem = Quadratics.random(torch.Generator().manual_seed(0), workers=PEERS, numel=width)
    together = threading.Barrier(PEERS)

    def meet(peer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = nn.Parameter(torch.full((width,), float(peer)))
        with attach("ad-psgd", tensors=[x], socket=daemons.socket(peer)) as session:
            swarm = SwarmOfDaemons(session, timeout_s=20)
            optimizer: Any = by_name("ad-psgd", [x], swarm, lr=lr)
            # Attaching has brought all to one peer's start.
            start, moved, met = x.detach().clone(), torch.zeros(width, dtype=torch.float64), 0
            optimizer.start()
            together.wait(30)
            for _ in range(steps):
                x.grad = problem.grad(peer, x.detach().double()).float()
                moved += x.grad.double()
                optimizer.step()
                met += bool(optimizer.met)
            together.wait(30)  # nobody meets any more: what lies there is what it came to
            nothing = {name: 0 * value for name, value in optimizer.parameters().items()}
            (final,) = optimizer._meetings.add(nothing).values()
            optimizer.close()
        return start.double() - lr * moved, final.double(), met

    ends = await asyncio.gather(*(daemons.swarm.call(meet, peer) for peer in range(PEERS)))
    by_gradients, values = (torch.stack([end[i] for end in ends]) for i in (0, 1))
    torch.testing.assert_close(values.mean(0), by_gradients.mean(0), rtol=1e-5, atol=1e-5)
    assert sum(met for _, _, met in ends) >= steps / 2, "two are active, and meet nearly always"
    apart = (values - values.mean(0)).norm() / (by_gradients - by_gradients.mean(0)).norm()
    assert apart < 0.9


async def test_a_neighbour_that_is_killed_costs_its_edges_and_nothing_else(
    daemons: Daemons,
) -> None:
    width, more = 200_000, 5
    found = {name: [Trained() for _ in range(PEERS)] for name in KILLED}
    ends_at: dict[str, int] = {}
    training = asyncio.gather(
        *(
            daemons.swarm.call(
                train,
                daemons,
                name,
                peer,
                width,
                found[name][peer],
                partial(before, ends_at, name),
            )
            for name, peer in itertools.product(KILLED, range(PEERS))
        )
    )
    victims = [each[-1] for each in found.values()]
    await until(
        lambda: training.done() or all(one.met() >= 3 for one in victims),
        timeout_s=30,
        what="the fourth has met its neighbours three times with each algorithm",
    )
    await daemons.swarm.call(daemons.fourth.kill)
    at_kill = {name: [len(one.rows) for one in trained] for name, trained in found.items()}

    def go_on_together() -> bool:
        return all(
            any(row.messages for row in one.rows[steps + 1 :])
            for name, trained in found.items()
            for one, steps in zip(trained[:-1], at_kill[name], strict=False)
        )

    # Steps alone are fast, so a number of them is no time in which anybody could be met.
    await until(
        lambda: training.done() or go_on_together(), timeout_s=30, what="the living meet again"
    )
    for name, trained in found.items():
        ends_at[name] = max(len(one.rows) for one in trained[:-1]) + more
    await training

    for name, trained in found.items():
        living, victim = trained[:-1], trained[-1].peer_id
        ids = {one.peer_id for one in living}
        taken = edges(living)
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
            # From the first step that began after the kill: the victim may have taken one before.
            for one, steps in zip(living, at_kill[name], strict=False):
                for step in range(steps + 1, len(one.rows)):
                    given = sum(
                        share
                        for (_, _, giver, sent), share in taken.items()
                        if (giver, sent) == (one.peer_id, step)
                    )
                    assert one.rows[step].own_share + given == pytest.approx(1.0)
        for one, steps in zip(living, at_kill[name], strict=False):
            later = [message.peer for row in one.rows[steps + 1 :] for message in row.messages]
            assert later, f"{name}: the living go on with each other"
            assert set(later) <= ids, f"{name}: the dead say nothing"
            assert bool(one.last.isfinite().all())
    masses = [one.mass for one in found["sgp"][:-1]]
    assert all(0.1 < mass < 3.0 for mass in masses), masses


async def test_three_are_enough_for_every_way_to_mix(daemons: Daemons) -> None:
    """An odd number: of pairs one rests. The fourth daemon is dead by now."""
    for name in ("gossip", "decentralized", "dcd-psgd", "low-precision-decentralized"):
        trained = await run_on(daemons, name, range(PEERS - 1), 2000, lambda one: one.met() >= 2)
        if name in ("gossip", "decentralized"):
            moves_by_gradients_alone(trained, ALGORITHMS[name]["lr"])
            assert all(len(row.messages) <= 1 for one in trained for row in one.rows), name
        assert all(bool(one.last.isfinite().all()) for one in trained), name
