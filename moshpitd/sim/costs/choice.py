"""Which algorithm on which network, worked out from the model. One rule: an order is computed here,
never typed; what is typed is only the question, as a network and a swarm.

Two algorithms within the model's own error (15 %) of each other are a tie and told as one ("~").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from moshpitd.sim.costs import calibration, scaling
from moshpitd.sim.costs.events import pair_steps, server_steps
from moshpitd.sim.costs.net import Lognormal, Net
from moshpitd.sim.costs.operations import (
    asynchronous,
    butterfly,
    group_round,
    neighbours,
    parameter_server,
    ring,
)
from moshpitd.sim.costs.payload import Payload
from moshpitd.sim.costs.steps import Circumstances, closed_form

TIE = calibration.TOLERANCE

SLOW_LINK_GBPS = 1.0
"""Bandwidth-bound: BERT-large's gradients take twenty times as long as its compute."""
LONG_LINK_MS = 5.0
"""Latency-bound: the far end of the published sweep, at 100 Gb/s."""

STRAGGLING = Lognormal(1.0, 1.0)
"""One step in forty takes seven times the median: shared or throttled machines."""
STRAGGLING_PEERS = 64
STRAGGLING_PAYLOAD = Payload(1_000_000, "float16")
"""Small, so that what is compared is the waiting."""
WATCHED_S = 200.0
"""Of world time, for the methods that have no closed form."""
GROUP = 16  # core's default max_group

FAILING = 0.01
FAILING_PEERS = 1024

LINKS_MOST = 64
"""Links that one node can hold in a group: `Params.max_group` ends there."""


@dataclass(frozen=True, slots=True)
class Place:
    """An algorithm and what it takes there; inf: never."""

    algorithm: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Order:
    """An answer: fastest first. "Seconds `what`" is what they are of."""

    question: str
    setting: str
    what: str
    places: tuple[Place, ...]

    @property
    def sentence(self) -> str:
        """ "a < b ~ c < d": `~` where the step from one to the next is within the error."""
        words = [self.places[0].algorithm]
        for before, place in zip(self.places, self.places[1:], strict=False):
            tie = place.seconds <= before.seconds * (1.0 + TIE) or math.isinf(before.seconds)
            words += ["~" if tie else "<", place.algorithm]
        return " ".join(words)

    def seconds(self, algorithm: str) -> float:
        """Of one algorithm in it."""
        return next(place.seconds for place in self.places if place.algorithm == algorithm)


def orders() -> list[Order]:
    """The rule table: what limits a swarm, and the order that follows."""
    return [
        _training(
            "bandwidth-bound",
            calibration.cluster(gbps=SLOW_LINK_GBPS),
            f"BERT-large, 16 servers, {SLOW_LINK_GBPS:g} Gb/s, nothing added to the latency",
        ),
        _training(
            "latency-bound",
            calibration.cluster(latency_ms=LONG_LINK_MS),
            f"BERT-large, 16 servers, 100 Gb/s, {LONG_LINK_MS:g} ms one way",
        ),
        _straggling(),
        _agreeing("no failures", failure=0.0),
        _agreeing("failures", failure=FAILING),
    ]


def _training(question: str, net: Net, setting: str) -> Order:
    found = [
        Place(system.name, calibration.training_step(system, net).seconds)
        for system in calibration.SYSTEMS
    ]
    return Order(question, setting, "per training step", _sorted(found))


def _straggling() -> Order:
    """Seconds per step where waiting is all that counts."""
    peers, payload = STRAGGLING_PEERS, STRAGGLING_PAYLOAD
    net = Net("datacenter", 50e-6, 10e9)
    around = Circumstances(STRAGGLING)
    closed = {
        "asynchronous averaging": asynchronous(peers, payload),
        "D-PSGD ring": neighbours(peers, payload, degree=2),
        # Groups are arranged while the trainer computes, so only the wait inside one is left.
        f"Moshpit groups of {GROUP}": replace(group_round(peers, GROUP, payload), gathers=False),
        "butterfly all-reduce": butterfly(peers, payload),
        "ring all-reduce": ring(peers, payload),
        "parameter server": parameter_server(peers, payload),
    }
    found = [
        Place(name, closed_form(operation, net, around).seconds)
        for name, operation in closed.items()
    ]
    for name, run in (("AD-PSGD", pair_steps), ("AsySG", server_steps)):
        came = run(peers, payload, net, compute=STRAGGLING, seconds=WATCHED_S)
        found.append(Place(name, peers / came.steps_per_s))
    setting = f"{peers} peers, 10 Gb/s, compute lognormal with sigma {STRAGGLING.sigma:g}"
    return Order("stragglers", setting, "per step of all peers", _sorted(found))


def _agreeing(question: str, *, failure: float) -> Order:
    volunteers = scaling.SETTINGS[-1]
    rows = scaling.table([volunteers], peers=[FAILING_PEERS], failures=[failure])
    places = [Place(row.method, row.seconds) for row in rows]
    away = f"each away in {failure:.0%} of the rounds" if failure else "always there"
    setting = f"{FAILING_PEERS} {volunteers.name}, {away}"
    return Order(question, setting, f"until distortion is {scaling.TARGET:g}", _sorted(places))


def _sorted(places: Iterable[Place]) -> tuple[Place, ...]:
    return tuple(sorted(places, key=lambda place: place.seconds))


# -- maps ------------------------------------------------------------------------------------------

MAP_GBPS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MAP_MS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class TrainingCell:
    """The fastest synchronous system of the calibration for a link."""

    gbps: float
    latency_ms: float
    winner: str
    step_s: float


def training_map(
    gbps: Sequence[float] = MAP_GBPS, latencies_ms: Sequence[float] = MAP_MS
) -> list[TrainingCell]:
    """Who trains BERT-large fastest on which link. Async is left out: it is fastest everywhere,
    because it never waits, and what it pays for that is not in seconds."""
    systems = [system for system in calibration.SYSTEMS if not system.operation().background]
    cells = []
    for rate in gbps:
        for latency in latencies_ms:
            net = calibration.cluster(gbps=rate, latency_ms=latency)
            found = [
                Place(system.name, calibration.training_step(system, net).seconds)
                for system in systems
            ]
            best = _sorted(found)[0]
            cells.append(TrainingCell(rate, latency, best.algorithm, best.seconds))
    return cells


@dataclass(frozen=True, slots=True)
class AveragingCell:
    """The fastest way to agree, and the fastest that needs at most `LINKS_MOST` links per node."""

    network: str
    p_fail: float
    peers: int
    winner: str
    seconds: float
    winner_few_links: str
    seconds_few_links: float


def averaging_map(rows: Sequence[scaling.Row]) -> list[AveragingCell]:
    """Who agrees first, from rows of `scaling.table`."""
    cells = []
    for network, failure, peers in dict.fromkeys((r.network, r.p_fail, r.peers) for r in rows):
        here = [r for r in rows if (r.network, r.p_fail, r.peers) == (network, failure, peers)]
        best = min(here, key=_seconds)
        few = min((r for r in here if _links(r) <= LINKS_MOST), key=_seconds)
        cells.append(
            AveragingCell(
                network, failure, peers, best.method, best.seconds, few.method, few.seconds
            )
        )
    return cells


_seconds: Callable[[scaling.Row], float] = lambda row: row.seconds  # noqa: E731


def _links(row: scaling.Row) -> int:
    method = next(one for one in scaling.METHODS if one.name == row.method)
    operation = method.operation(row.peers, Payload(1))
    # A ring sends on one link and receives on another.
    return operation.connections + (row.method == "allreduce_ring")
