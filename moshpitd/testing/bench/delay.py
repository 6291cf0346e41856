"""What a step takes over a network with a delay, for `bench delay`: neighbours, a group average and
a ring all-reduce over the same proxies, in one process.

One rule: all systems begin a step at the same instant, it ends when the last trainer holds its
parameters, and systems take turns step by step, so that other load meets all of them. A step in
which anybody missed anybody does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.optim import LocalSGD, by_name
from moshpitd.client.primitives import Exchanged
from moshpitd.testing.bench.ring import Address, RingMember, hops, ring
from moshpitd.testing.local_swarm import LocalSwarm
from moshpitd.testing.proxied_swarm import Network, proxied_swarm

RING, AVERAGE = "ring all-reduce", "group average"
NEIGHBOURS = ("d-psgd", "low-precision-decentralized")
CODEC = "float32"
"""Of the group average: the ring and d-psgd send float32 too."""
TIMEOUT_S = 30.0
"""Of a step. It takes a fraction of a second; the first may wait for a window of 2 s or two."""
PAUSE_S = 0.1
"""As trainers compute: the acknowledgements of one step are through before the next begins."""


@dataclass(frozen=True, slots=True)
class Plan:
    delay_s: float  # one way
    numel: int
    steps: int  # that are measured, of each system
    warm_up: int  # before them: connections, records, the neighbours' replicas


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all trainers. `trouble`: why it does not count."""

    system: str
    number: int  # from 0; the warm-up's are below 0
    seconds: float
    trouble: str = ""


class System(Protocol):
    name: str

    def step(self, peer: int) -> str:
        """One step of one trainer, in its thread; why it does not count, or nothing."""
        ...


class Ring:
    name = RING

    def __init__(self, members: Sequence[RingMember], numel: int) -> None:
        self._members = members
        self._values = [torch.full((numel,), float(peer)) for peer in range(len(members))]

    def step(self, peer: int) -> str:
        self._members[peer].average(self._values[peer])
        return ""


@dataclass(slots=True)
class Trainer:
    """One trainer's parameters, their gradient and its session."""

    x: nn.Parameter
    session: Session

    @classmethod
    def at(cls, socket: Path, run: str, peer: int, numel: int) -> Trainer:
        """All begin with the same parameters: others would be of another lineage."""
        x = nn.Parameter(torch.zeros(numel))
        x.grad = torch.randn(numel, generator=torch.Generator().manual_seed(peer))
        session = attach(run, tensors=[x], socket=socket, sync=False, timeout_s=TIMEOUT_S)
        if not session.wait_attached(TIMEOUT_S):
            raise TimeoutError(f"no daemon at {socket} within {TIMEOUT_S:g} s")
        return cls(x, session)


class Neighbours:
    """An algorithm on a ring of neighbours, by its name."""

    def __init__(self, name: str, trainers: Sequence[Trainer]) -> None:
        self.name = name
        self._expected = min(2, len(trainers) - 1)
        self.optimizers: list[Any] = [
            by_name(name, [one.x], one.session, topology="ring", lr=1e-3) for one in trainers
        ]

    def step(self, peer: int) -> str:
        self.optimizers[peer].step()
        found: Exchanged = self.optimizers[peer].last
        if len(found.messages) == self._expected and not found.unheard:
            return ""
        return f"trainer {peer} heard {len(found.messages)} of {self._expected} neighbours"


class GroupAverage:
    name = AVERAGE

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self._optimizers = [
            LocalSGD(torch.optim.SGD([one.x], lr=1e-3), one.session, every=1, timeout_s=TIMEOUT_S)
            for one in trainers
        ]

    def step(self, peer: int) -> str:
        self._optimizers[peer].step()
        result = self._optimizers[peer].last
        if result is None:
            return f"trainer {peer} had no average"
        whole = result.status == "complete" and result.participants == len(self._optimizers)
        return "" if whole else f"trainer {peer}: {result}"


@asynccontextmanager
async def systems_on(
    swarm: LocalSwarm, network: Network, numel: int
) -> AsyncIterator[list[System]]:
    """All that are compared, on the nodes of `swarm` and the paths of `network`."""
    count = len(swarm.nodes)

    async def trainers(run: str) -> list[Trainer]:
        making = (
            swarm.call(Trainer.at, socket, run, peer, numel)
            for peer, socket in enumerate(swarm.sockets)
        )
        return list(await asyncio.gather(*making))

    def path_to(target: str) -> Address:
        return "127.0.0.1", network.to(target).port

    made = {name: await trainers(name) for name in (*NEIGHBOURS, AVERAGE.replace(" ", "-"))}
    by_neighbours = [Neighbours(name, made[name]) for name in NEIGHBOURS]
    with ring(count, path_to) as members:
        try:
            yield [Ring(members, numel), *by_neighbours, GroupAverage([*made.values()][-1])]
        finally:
            for system in by_neighbours:
                for optimizer in system.optimizers:
                    await swarm.call(optimizer.close)
            for one in made.values():
                await asyncio.gather(*(swarm.call(trainer.session.close) for trainer in one))


async def measure(
    swarm: LocalSwarm, network: Network, plan: Plan, tell: Callable[[Step], None]
) -> None:
    """Every system in turn, step by step. What is set up is not delayed, every step is."""
    async with systems_on(swarm, network, plan.numel) as systems:
        network.slow(plan.delay_s)
        for number in range(-plan.warm_up, plan.steps):
            # Who goes first changes, so that nobody always follows the same other.
            shift = number % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                await asyncio.sleep(PAUSE_S)
                tell(await one_step(swarm, system, number))
        network.slow(0.0)


async def one_step(swarm: LocalSwarm, system: System, number: int) -> Step:
    gate = threading.Barrier(len(swarm.nodes))

    def timed(peer: int) -> tuple[float, float, str]:
        gate.wait(TIMEOUT_S)
        began = time.monotonic()
        trouble = system.step(peer)
        return began, time.monotonic(), trouble

    told = await asyncio.gather(*(swarm.call(timed, peer) for peer in range(len(swarm.nodes))))
    seconds = max(ended for _, ended, _ in told) - min(began for began, _, _ in told)
    return Step(system.name, number, seconds, "; ".join(filter(None, (one[2] for one in told))))


def ideal_s(peers: int, delay_s: float) -> dict[str, float]:
    """Nothing but messages in a row. Neighbours, once they have met: the message, and the word that
    it counts. The average: Join to the leader, its Begin, contribution, result and digest."""
    found = {RING: hops(peers), **dict.fromkeys(NEIGHBOURS, 2), AVERAGE: 5}
    return {name: count * delay_s for name, count in found.items()}


# -- the process ----------------------------------------------------------------------------------


async def run(ports: Sequence[int], plan: Plan, place: Path) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def leave_with_stdin() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # a buffered reader's lock outlives the thread
            continue
        loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=leave_with_stdin, daemon=True).start()
    async with proxied_swarm(ports, place=place, averaging__codec=CODEC) as (swarm, network):
        tell({"event": "ready"})
        await measure(swarm, network, plan, _tell_step)
    tell({"event": "end", "ideal_s": ideal_s(len(ports) // 2, plan.delay_s)})


def _tell_step(step: Step) -> None:
    tell(
        {
            "event": "step",
            "system": step.system,
            "number": step.number,
            "seconds": step.seconds,
            "trouble": step.trouble,
        }
    )


def tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moshpitd.testing.bench.delay")
    parser.add_argument("--ports", type=int, nargs="+", required=True, help="two for each node")
    parser.add_argument("--place", type=Path, required=True, help="for the folder of the swarm")
    parser.add_argument("--delay-s", type=float, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(args.delay_s, args.numel, args.steps, args.warm_up)
    asyncio.run(run(args.ports, plan, args.place))


if __name__ == "__main__":
    main()
