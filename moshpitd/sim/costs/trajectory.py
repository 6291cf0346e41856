"""Distortion against modelled seconds: one drawn run of an algorithm. One rule: who mixes with
whom is the daemon's schedule, what a round costs is the closed form's; only the waiting, and who is
away, is drawn, peer by peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moshpitd.core.grid import sides_for
from moshpitd.core.mixing import EdgeMixing, Mixing, MixingSchedule
from moshpitd.core.topologies import schedule_for
from moshpitd.sim.costs.distortion import Population
from moshpitd.sim.costs.net import Floats
from moshpitd.sim.costs.operations import Operation, butterfly, group_round, neighbours
from moshpitd.sim.costs.payload import Payload
from moshpitd.sim.costs.scaling import MAX_GROUP, Setting
from moshpitd.sim.costs.steps import Circumstances, step


@dataclass(frozen=True, slots=True)
class Point:
    """Mean time of the peers after a round, and how far they are apart then."""

    seconds: float
    distortion: float


def drawn(
    schedule: MixingSchedule,
    operation: Operation,
    setting: Setting,
    *,
    rounds: int,
    failure: float = 0.0,
    seed: int = 0,
) -> list[Point]:
    """From the start on, which is (0, 1). A peer waits for its own group or neighbours, and works
    on while it is away; a collective that misses somebody has waited in vain."""
    rng = np.random.default_rng(seed)
    population = Population.drawn(schedule, rng)
    around = Circumstances(window_s=setting.window_s)
    moving_s = step(operation, setting.net, around, wait_s=0.0).seconds
    clocks = np.zeros(schedule.peers)
    points = [Point(0.0, population.distortion)]
    for t in range(rounds):
        away = np.flatnonzero(rng.random(schedule.peers) < failure).tolist()
        clocks = clocks + setting.compute.draw(rng, schedule.peers)
        if operation.everybody and away:
            clocks = np.full_like(clocks, clocks.max() + moving_s)
        else:
            clocks = _met(population.mix(t, away), clocks, moving_s)
        points.append(Point(float(clocks.mean()), population.distortion))
    return points


def _met(mixing: Mixing, clocks: Floats, moving_s: float) -> Floats:
    """When each peer is through: with the slowest that it needed, plus the transfer."""
    after = clocks.copy()
    if isinstance(mixing, EdgeMixing):
        for edge in mixing.edges:
            after[edge.target] = max(after[edge.target], clocks[edge.source])
        return after + moving_s
    for group in mixing.groups:
        members = list(group)
        after[members] = clocks[members].max() + moving_s
    return after


def race(
    setting: Setting, payload: Payload, *, peers: int, failure: float, rounds: int, seed: int = 0
) -> dict[str, list[Point]]:
    """The methods that get anywhere, side by side. Names are those of `scaling.METHODS`."""
    sides = sides_for(peers, MAX_GROUP)
    pair = neighbours(peers, payload, degree=1)
    runs: dict[str, tuple[MixingSchedule, Operation]] = {
        "allreduce_butterfly": (schedule_for("complete", peers), butterfly(peers, payload)),
        "one_peer_exp": (schedule_for("one-peer-exponential", peers), pair),
        "random_matching": (schedule_for("random-matching", peers, seed=seed), pair),
        "random_groups": (
            schedule_for("random-groups", peers, seed=seed, group_size=MAX_GROUP),
            group_round(peers, min(peers, MAX_GROUP), payload),
        ),
        "moshpit": (
            schedule_for("moshpit", peers, seed=seed, sides=sides),
            group_round(peers, max(sides), payload),
        ),
    }
    return {
        name: drawn(schedule, operation, setting, rounds=rounds, failure=failure, seed=seed)
        for name, (schedule, operation) in runs.items()
    }
