"""Sweeps of a run in which every trainer begins when it has computed, and of one in which all begin
together. One rule: it is judged by what the trainers are told.
"""

from __future__ import annotations

from collections import Counter

from moshpitd.core.effects import Effect, Finish
from moshpitd.core.events import Event
from moshpitd.core.params import Params
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import Node
from moshpitd.sim.world import World

FROM_S, UNTIL_S = 60.0, 95.0
"""Once eight sweeps or so have been made: by then who waits for whom has settled."""


def test_sweeps_at_their_own_pace_meet_somebody_in_each_of_three_lines() -> None:
    """60 peers on 4x4x4, each with two trainers that compute for some six seconds: before they told
    each other from sweep to sweep and waited for each other, 47 of 100 calls were complete; 71 with
    one window for who is alone in a line, 87 with two."""
    options = Options(
        seed=3, peers=60, trainers=2, parts=1, same_start=True, join_spread_s=0.2, rounds=0,
        compute_s=6.0, latency_s=0.001, jitter_sigma=0.0, goal=0, faults_s=UNTIL_S + 10.0,
        params=Params(max_group=4),
    )  # fmt: skip
    world, ends = World(options), Counter[str]()

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, Finish) and world.now > FROM_S:
            ends[str(item.outcome.status)] += 1

    world.watchers.append(watch)
    world.run_until(lambda: world.now > UNTIL_S, bound_s=UNTIL_S + 1.0)
    assert ends["complete"] > 0.8 * ends.total(), ends
