"""Steps of `bench algorithms` on real daemons, one per network namespace, over emulated lines.

One rule: seconds are those of the slowest trainer's own steps and bytes those that the kernel
counted on the lines, headers included; what cannot be measured is said with its reason, and nothing
here computes a figure instead.

A line is capped by `tc` in both directions; its delay, where it has one, is a proxy's in front of
every node (`testing.bench.delayed`). Trainers are outside and speak to their daemon's Unix socket.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moshpitd.cli.bench_processes import Swarm, Worker
    from moshpitd.cli.demo_processes import Children
    from moshpitd.cli.namespaces import Namespace
    from moshpitd.sim.costs.net import Net

WARM_UP = 8
"""Steps before those that are timed, without pace: daemons hear of the run, links open, replicas of
neighbours are exchanged, and what averages every 8 steps has done so once."""
PART_BYTES = 1 << 16
"""Small, because a model of real size has thousands of parts, of which every peer reduces its
share."""
NAMES_PER_SITE = 15
"""Algorithms that the same daemons see. A daemon has 64 runs at most and keeps those that it had;
an algorithm takes up to three, some of them twice: 27 algorithms once filled it."""
CONTROL, LINKS = 4001, 4002  # ports of the proxies; a namespace's ports are its own
BEGIN_S = 60.0
STEP_S = (
    5.0  # twenty times a step of the slowest algorithm on the slower network, on a busy machine
)
PATIENCE_S = 100.0  # beside that: three rounds that time out
STAY_AT_ONE_NODE = ("asysg-incon",)  # memory of one node: all trainers are at the first daemon
WORKER = "moshpitd.testing.bench.by_name"


def networks() -> tuple[Net, ...]:
    """What a room of machines has, where compute and the daemons are what is waited for, and what
    machines of two regions or good lines at home have, where latency and bytes are. Payload is
    given 0.9 of a line by the model, and what it is by the kernel."""
    from moshpitd.sim.costs.net import Net

    return (
        Net("lan", latency_s=0.0, up_bits_per_s=1e9),
        Net("wan", latency_s=0.02, up_bits_per_s=100e6),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    peers: int
    params: int  # of the model, about
    steps: int  # that are timed
    of: int  # steps of the run that they stand for
    compute_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """What one algorithm took on one network, per step. `openings` of the steps are not in it."""

    seconds_per_step: float
    bytes_per_step: float
    busiest_node_bytes: float
    openings: int
    losses: tuple[
        float, float
    ]  # of the first trainer: its last batch in the warm-up, and at the end
    statuses: dict[str, int]  # how rounds ended, all trainers together

    @classmethod
    def of(
        cls, warm: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]], sent: list[int]
    ) -> Cell:
        """The pace is the slowest trainer's: where all wait for each other it is everybody's."""
        steps = len(told[0]["seconds"])
        statuses: dict[str, int] = {}
        for one in told:
            for word, count in one["statuses"].items():
                statuses[word] = statuses.get(word, 0) + count
        return cls(
            seconds_per_step=max(pace(one["seconds"], one["openings"]) for one in told),
            bytes_per_step=statistics.fmean(sent) / steps,
            busiest_node_bytes=max(sent) / steps,
            openings=max(sum(one["openings"]) for one in told),
            losses=(warm[0]["loss"], told[0]["loss"]),
            statuses=statuses,
        )


def pace(seconds: Sequence[float], openings: Sequence[bool]) -> float:
    """Mean of the steps in which no run met for the first time; of all if there are no others."""
    kept = [one for one, opening in zip(seconds, openings, strict=True) if not opening]
    return statistics.fmean(kept or seconds)


def measure(
    net: Net, names: Sequence[str], plan: Plan, told: Callable[[str, Cell | str], None]
) -> None:
    """Tells of each algorithm what it took, or why there is no figure."""
    for start in range(0, len(names), NAMES_PER_SITE):
        _measure(net, names[start : start + NAMES_PER_SITE], plan, told)


def _measure(
    net: Net, names: Sequence[str], plan: Plan, told: Callable[[str, Cell | str], None]
) -> None:
    from moshpitd.cli.demo_processes import DemoFailed

    with _site(net, plan) as site:
        for name in names:
            try:
                cell = site.play(name, plan)
            except DemoFailed as failure:
                told(name, str(failure))
                site.anew()
            else:
                told(name, cell)


@contextmanager
def _site(net: Net, plan: Plan) -> Iterator[_Site]:
    """Namespaces with a daemon each, up and joined, and their trainers."""
    from moshpitd.cli import namespaces as kernel
    from moshpitd.cli.bench_processes import Swarm, processes
    from moshpitd.cli.demo_stage import LOCKSTEP

    mbps = net.up_bits_per_s / 1e6
    lines = [kernel.Line(mbps, (net.down_bits_per_s or net.up_bits_per_s) / 1e6)] * plan.peers
    # The namespaces last longer than the processes in them: `processes` ends first.
    with kernel.namespaces(lines) as places, processes() as (children, folder):
        swarm = Swarm(
            children, folder, peers=plan.peers, numel=0,
            settings={**LOCKSTEP, "averaging.part_bytes": PART_BYTES},
            places=[_place(one, delayed=net.latency_s > 0) for one in places],
        )  # fmt: skip
        if net.latency_s > 0:
            _delay(children, folder, swarm, places, net.latency_s)
        site = _Site(net, swarm, places, folder, plan)
        try:
            swarm.start()
            site.anew()
            yield site
        finally:
            site.close()
            swarm.close()


def _place(namespace: Namespace, *, delayed: bool) -> Any:
    """With a proxy in front the daemon listens behind it, and others are told of the proxy."""
    from moshpitd.cli.bench_namespaces import place_of
    from moshpitd.cli.bench_processes import Place, announced

    place = place_of(namespace)
    if not delayed:
        return place
    seen = announced(namespace.host, CONTROL, LINKS)
    return Place(place.within, "", {**place.settings, **seen})


def _delay(
    children: Children,
    folder: Path,
    swarm: Swarm,
    places: Sequence[Namespace],
    delay_s: float,
) -> None:
    """A proxy in each namespace, in front of the daemon that will listen behind it."""
    from moshpitd.cli.bench_processes import START_S, start_delay

    proxies = [
        start_delay(
            children, f"the delay of {node.name}", folder / f"delay-{node.index}.log",
            host=place.host, delay_s=delay_s, within=place.within,
            paths=zip((CONTROL, LINKS), node.ports, strict=True),
        )
        for node, place in zip(swarm.nodes, places, strict=True)
    ]  # fmt: skip
    for proxy in proxies:
        proxy.hear(START_S)


class _Site:
    """One network's swarm. Invariant: all trainers are idle between two algorithms."""

    def __init__(
        self, net: Net, swarm: Swarm, places: Sequence[Namespace], folder: Path, plan: Plan
    ) -> None:
        self._net, self._swarm, self._places = net, swarm, places
        self._folder, self._plan = folder, plan
        self._trainers: list[Worker] = []
        self._lives = 0

    def anew(self) -> None:
        """New trainers: one that hangs in a call answers nothing any more."""
        from moshpitd.cli.bench_processes import START_S, start_worker

        for trainer in self._trainers:
            trainer.child.kill()
        self._lives += 1
        arguments = ["-m", WORKER, "--peers", str(self._plan.peers)]
        arguments += ["--params", str(self._plan.params)]
        self._trainers = [
            start_worker(
                self._swarm.children,
                f"trainer {node.index}",
                [*arguments, "--index", str(node.index)],
                self._folder / f"trainer-{node.index}.log",
            )
            for node in self._swarm.nodes
        ]
        for trainer in self._trainers:
            trainer.hear(START_S)

    def play(self, name: str, plan: Plan) -> Cell:
        nodes = self._swarm.nodes
        here = [nodes[0]] * len(nodes) if name in STAY_AT_ONE_NODE else nodes
        for trainer, node in zip(self._trainers, here, strict=True):
            trainer.tell(
                "begin", run=f"{name}-{self._lives}", socket=str(node.socket), algorithm=name,
                before=WARM_UP, timed=plan.steps, of=plan.of,
            )  # fmt: skip
        for trainer in self._trainers:
            trainer.good(trainer.hear(BEGIN_S), "begin")
        warm = self._steps(WARM_UP, 0.0)
        before = self._sent()
        told = self._steps(plan.steps, plan.compute_s)
        sent = [after - early for after, early in zip(self._sent(), before, strict=True)]
        self._ask("end", BEGIN_S)
        return Cell.of(warm, told, sent)

    def _steps(self, count: int, compute_s: float) -> list[dict[str, Any]]:
        from moshpitd.cli.bench_processes import HEADSTART_S

        at = time.monotonic() + HEADSTART_S
        patience_s = PATIENCE_S + count * (STEP_S + 2 * compute_s)  # gradients at two points
        return self._ask("steps", patience_s, count=count, compute_s=compute_s, at=at)

    def _ask(self, do: str, patience_s: float, **order: Any) -> list[dict[str, Any]]:
        from moshpitd.cli.bench_processes import ask_all

        return ask_all(self._trainers, do, patience_s=patience_s, **order)

    def _sent(self) -> list[int]:
        from moshpitd.cli.namespaces import sent_bytes

        return [sent_bytes(place) for place in self._places]

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.close()
