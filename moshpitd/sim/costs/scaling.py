"""From 16 to 100,000 peers: seconds until they agree to 1e-4, per algorithm and kind of network.
One rule: seconds are rounds (`distortion`) times a round (`steps`), and each factor is somebody's
whole job.

Limits, all in favour of those they touch: one peer per round and random matching carry no
matchmaking; bandwidth is equal within a network; the grid is taken as well filled; a parameter
server never fails; gossip does not lose speed to failures. Every round waits for its slowest
member's compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moshpitd.core.grid import sides_for
from moshpitd.sim.costs.churn import Churn
from moshpitd.sim.costs.distortion import (
    group_rounds,
    moshpit_rounds,
    one_peer_rounds,
    ring_rounds,
)
from moshpitd.sim.costs.net import Lognormal, Net
from moshpitd.sim.costs.operations import (
    Operation,
    butterfly,
    group_round,
    neighbours,
    parameter_server,
    ring,
)
from moshpitd.sim.costs.payload import Payload
from moshpitd.sim.costs.steps import Circumstances, closed_form

PARAMETERS = 17_700_000
"""ALBERT-large; 35 MB as float16."""
MAX_GROUP = 32
TARGET = 1e-4
PEERS = (16, 64, 256, 1024, 4096, 16384, 100_000)
FAILURES = (0.0, 0.001, 0.01)
STABLE = Churn()
NEVER_S = 1e11
"""3,000 years. What takes longer is told as "never"."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A kind of network with the machines on it. `compute` is a peer's work between two rounds."""

    net: Net
    compute: Lognormal
    window_s: float

    @property
    def name(self) -> str:
        return self.net.name


SETTINGS: tuple[Setting, ...] = (
    Setting(Net("datacenter", 50e-6, 10e9), Lognormal(0.05, 0.5), window_s=0.2),
    Setting(Net("cloud_regions", 0.025, 1e9), Lognormal(1.0, 0.5), window_s=3.0),
    Setting(Net("volunteers", 0.04, 20e6, 100e6), Lognormal(1.0, 0.5), window_s=3.0),
)


@dataclass(frozen=True, slots=True)
class Method:
    """An averaging algorithm: rounds to `TARGET` for (peers, failure), and one round of it."""

    name: str
    rounds: Callable[[int, float], int]
    operation: Callable[[int, Payload], Operation]


METHODS: tuple[Method, ...] = (
    Method("allreduce_ring", lambda n, p: 1, lambda n, m: ring(n, m)),
    Method("allreduce_butterfly", lambda n, p: 1, lambda n, m: butterfly(n, m)),
    Method("ps", lambda n, p: 1, lambda n, m: parameter_server(n, m)),
    Method(
        "gossip_ring",
        lambda n, p: ring_rounds(n, target=TARGET),
        lambda n, m: neighbours(n, m, degree=2),
    ),
    Method(
        "one_peer_exp",
        lambda n, p: one_peer_rounds(n, failure=p, target=TARGET),
        lambda n, m: neighbours(n, m, degree=1),
    ),
    Method(
        "random_matching",
        lambda n, p: group_rounds(n, size=2, failure=p, target=TARGET),
        lambda n, m: neighbours(n, m, degree=1),
    ),
    Method(
        "random_groups",
        lambda n, p: group_rounds(n, size=MAX_GROUP, failure=p, target=TARGET),
        lambda n, m: group_round(n, min(n, MAX_GROUP), m),
    ),
    Method(
        "moshpit",
        lambda n, p: moshpit_rounds(sides_for(n, MAX_GROUP), failure=p, target=TARGET),
        lambda n, m: group_round(n, max(sides_for(n, MAX_GROUP)), m),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm at one size. `seconds` inf: longer than `NEVER_S`."""

    network: str
    p_fail: float
    peers: int
    method: str
    rounds: int
    round_s: float
    seconds: float


def of_swarm(setting: Setting, payload: Payload, *, peers: int, churn: Churn = STABLE) -> list[Row]:
    """Every method for one swarm, fastest first. Who is away how often follows from each method's
    own round and the lifetime of peers."""
    around = Circumstances(setting.compute, window_s=setting.window_s)
    rows = []
    for method in METHODS:
        once = closed_form(method.operation(peers, payload), setting.net, around).seconds
        failure = churn.failure(once)
        rows.append(row(method, setting, payload, peers=peers, failure=failure))
    return sorted(rows, key=lambda one: one.seconds)


def row(method: Method, setting: Setting, payload: Payload, *, peers: int, failure: float) -> Row:
    """Expected seconds until distortion is `TARGET` of what it was."""
    around = Circumstances(setting.compute, failure=failure, window_s=setting.window_s)
    round_s = closed_form(method.operation(peers, payload), setting.net, around).seconds
    rounds = method.rounds(peers, failure)
    seconds = rounds * round_s
    if seconds > NEVER_S:
        seconds = math.inf
    return Row(setting.name, failure, peers, method.name, rounds, round_s, seconds)


def table(
    settings: Sequence[Setting] = SETTINGS,
    *,
    peers: Sequence[int] = PEERS,
    failures: Sequence[float] = FAILURES,
    payload: Payload | None = None,
) -> list[Row]:
    """All methods at all sizes on all networks, in that nesting."""
    payload = payload or Payload(PARAMETERS, "float16")
    return [
        row(method, setting, payload, peers=count, failure=failure)
        for setting in settings
        for failure in failures
        for count in peers
        for method in METHODS
    ]
