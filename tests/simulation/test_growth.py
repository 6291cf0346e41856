"""A swarm that grows and shrinks while rounds run (configs/sim/growth.toml, made small). One rule:
it is judged by the groups that formed and the values that came out, per beat.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

import pytest

from moshpitd.core.effects import Effect, Finish
from moshpitd.core.events import Event
from moshpitd.core.grid import sides_for
from moshpitd.core.mixing import random_groups_factor
from moshpitd.sim.meters import Row
from moshpitd.sim.nodes import Node
from moshpitd.sim.scenario import scenario
from moshpitd.sim.world import World

BEAT_S = 15.0
FOLLOWS = 3
"""Rounds after a change in which the old shape is still allowed."""
PLATEAU = 7
"""Rounds at one size: some to follow, some to look at."""
SIZES = (24, 90, 30)
OVER_S = 9.0
MAX_GROUP = 8
FACTOR = 2.0


def growing() -> dict[str, object]:
    changes = [
        {"at_s": BEAT_S * PLATEAU * number + 1.0, "peers": peers, "over_s": OVER_S}
        for number, peers in enumerate(SIZES)
        if number
    ]
    return {
        "peers": SIZES[0], "same_start": True, "join_spread_s": 1.0, "beat_s": BEAT_S,
        "faults_s": BEAT_S * (PLATEAU * len(SIZES) + 1) - 1.0, "goal": 0, "max_weight": 1,
        "step_size": 1.0, "latency_s": 0.04, "parts": 1, "elements": 2, "resizes": changes,
        "params": {"max_group": MAX_GROUP},
    }  # fmt: skip


@pytest.fixture(scope="module")
def run() -> tuple[list[Row], dict[str, list[float]]]:
    """The beats of a run, and for every peer that was there to the end when it met nobody."""
    world = World(scenario(growing(), seed=1))
    alone: dict[str, list[float]] = defaultdict(list)

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, Finish) and item.outcome.group_size == 1 and not node.gone:
            alone[node.peer_id].append(world.now)

    world.watchers.append(watch)
    report = world.run()
    assert report.figures is not None
    rows = [row for row in report.figures.rows if row.attempts]
    living = {node.peer_id for node in world.nodes if node.peer is not None}
    return rows, {peer: times for peer, times in alone.items() if peer in living}


def settled(rows: list[Row], number: int) -> list[Row]:
    """The beats of one size after the shape has had its time."""
    from_s = BEAT_S * PLATEAU * number
    until_s = from_s + BEAT_S * PLATEAU
    after = [row for row in rows if from_s < row.at_s <= until_s]
    return after[FOLLOWS if number else 1 :]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_shape_follows_within_three_rounds(
    run: tuple[list[Row], dict[str, list[float]]], number: int
) -> None:
    for row in settled(run[0], number):
        cells = prod(row.sides)
        assert 0.85 * SIZES[number] <= cells <= 1.3 * SIZES[number], row


@pytest.mark.parametrize("number", [0, 1, 2])
def test_distortion_contracts_as_the_new_shape_predicts(
    run: tuple[list[Row], dict[str, list[float]]], number: int
) -> None:
    """Per round as random groups of the lines' number do, within a factor of two; geometric mean
    over the rounds at this size, because one round of few groups is noisy."""
    rows, product = settled(run[0], number), 1.0
    for row in rows:
        peers = SIZES[number]
        lines = -(-peers // max(sides_for(peers, MAX_GROUP)))
        predicted = random_groups_factor(peers, lines)
        assert row.contraction is not None
        product *= row.contraction / predicted
    assert product ** (1.0 / len(rows)) <= FACTOR


def test_nobody_is_stuck(run: tuple[list[Row], dict[str, list[float]]]) -> None:
    """On the old shape a peer may meet nobody for as long as it is allowed; who is alone for longer
    has lost the swarm."""
    for peer, times in run[1].items():
        for first, last in zip(times, times[FOLLOWS:], strict=False):
            beats = round((last - first) / BEAT_S)
            assert beats > FOLLOWS, f"{peer} was alone at {first:.1f} .. {last:.1f} s"
