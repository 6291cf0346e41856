"""The same experiment with real Peers in the world, messages and all: they form the groups that
`GridWalk` predicts and end with the same values. One rule: the walk is told only who was in no
group; where everybody stands and whom it meets it has to find out itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from moshpitd.core.effects import Effect, Note, Open
from moshpitd.core.events import Event
from moshpitd.core.params import Params
from moshpitd.sim.baselines import average_groups
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import Node
from moshpitd.sim.walk import MAX_GROUP, GridWalk
from moshpitd.sim.world import World

BEAT_S = 20.0
"""Everybody contributes at once, and by the next beat every window and timeout is over."""

WARM = 8
"""Rounds within which everybody has a cell of its own."""

Groups = dict[tuple[int, ...], bytes]


@dataclass
class Swarm:
    """Peers on a pinned grid, in order of PeerID, each with one number."""

    world: World
    nodes: list[Node]
    start: np.ndarray
    warm: int = 0  # rounds before those that are looked at
    cells: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rounds: list[Groups] = field(default_factory=list)

    def watch(self, node: Node, item: Event | Effect) -> None:
        index = self.nodes.index(node)
        if isinstance(item, Open):
            names = [it.peer_id for it in self.nodes]
            members = tuple(names.index(member.peer_id) for member in item.group.members)
            self.rounds[-1][members] = item.group.group_id
        elif isinstance(item, Note) and item.what == "attempt_started":
            self.cells.setdefault(index, node.peer.state.place.coordinates)  # type: ignore[union-attr]

    def turn(self, out: Sequence[int]) -> None:
        """One round, in which those `out` are cut off from everybody."""
        begins = BEAT_S * (self.warm + len(self.rounds) + 1)
        self.world.run_until(lambda: self.world.now >= begins - 1.0, bound_s=2 * BEAT_S)
        for index in out:
            self.world.trouble.cut_off(self.nodes[index], BEAT_S - 1.5)
        self.rounds.append({})
        self.world.run_until(lambda: self.world.now >= begins + BEAT_S - 1.0, bound_s=2 * BEAT_S)

    def spread_out(self) -> None:
        """Rounds, two by two, until no two stand in one cell: who takes a cell before it knows
        everybody may have to leave it again, and the walk knows nothing of that."""
        while self.warm < WARM and not self._distinct():
            for _ in range(2):
                self.turn(())
            self.warm += len(self.rounds)
            self.rounds.clear()
        assert self._distinct()
        self.cells.clear()

    def _distinct(self) -> bool:
        if not self.warm:
            return False
        cells = [node.peer.state.place.coordinates for node in self.nodes]  # type: ignore[union-attr]
        return len(set(cells)) == len(cells)

    def values(self) -> np.ndarray:
        return np.array([node.trainers[0].values[0] for node in self.nodes])


def swarm(seed: int, peers: int, side: int) -> Swarm:
    options = Options(
        seed=seed, peers=peers, parts=1, elements=1, same_start=True, step_size=0.0, max_weight=1,
        params=replace(Params(), max_group=MAX_GROUP, grid_sides=(side, side)), rate_sigma=0.0,
        join_spread_s=0.2, beat_s=BEAT_S, faults_s=1e9,
    )  # fmt: skip
    world = World(options)
    world.run_until(lambda: world.now > 1.0, bound_s=3.0)  # all have attached, with one start
    nodes = sorted(world.nodes, key=lambda node: node.peer_id)
    for node in nodes:
        node.peer.state.caught_up = True  # type: ignore[union-attr]  # they synced when they attached
    found = Swarm(world, nodes, np.random.default_rng(seed).standard_normal(peers))
    world.watchers.append(found.watch)
    found.spread_out()
    for node, value in zip(nodes, found.start, strict=True):
        node.trainers[0].values[:] = value
    return found


def replayed(found: Swarm, side: int) -> tuple[np.ndarray, list[list[int]]]:
    """(values, who was in no group per round) by the walk, which must predict every group."""
    peers = len(found.nodes)
    walk = GridWalk(
        peers, (side, side), seed=0, cells=[found.cells[index] for index in range(peers)],
        name_group=lambda turn, key, members: found.rounds[turn].get(tuple(members), b"unheard of"),
    )  # fmt: skip
    values, absent = found.start, []
    for formed in found.rounds:
        inside = {index for members in formed for index in members}
        absent.append([index for index in range(peers) if index not in inside])
        groups = [tuple(group) for group in walk.turn(absent[-1])]
        assert sorted(groups) == sorted(formed)
        values = average_groups(values, groups)
    return values, absent


@pytest.mark.parametrize(
    ("peers", "side", "seed"), [(16, 4, 0), (20, 5, 1), (25, 5, 2), (30, 6, 0)]
)
def test_real_peers_meet_whom_the_walk_says(peers: int, side: int, seed: int) -> None:
    """Full grids and such with gaps; everybody is in a group in every round."""
    found = swarm(seed, peers, side)
    for _ in range(5):
        found.turn(())
    values, absent = replayed(found, side)
    assert absent == [[], [], [], [], []]
    np.testing.assert_allclose(found.values(), values, atol=1e-12)
    if peers == side * side:
        assert values.var() < 1e-30


HIGHEST = 15
"""Of 16: nobody asks it to lead, so only its line notices that it is out."""


def test_one_that_sits_out_keeps_its_cell_and_value_and_comes_back() -> None:
    found = swarm(3, 16, 4)  # nobody else draws its cell meanwhile
    for out in ([], [HIGHEST], [], []):
        found.turn(out)
    values, absent = replayed(found, 4)
    assert absent == [[], [HIGHEST], [], []]
    np.testing.assert_allclose(found.values(), values, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 4, 6])
def test_one_whose_cell_was_drawn_meanwhile_takes_the_free_one(seed: int) -> None:
    """Two would share a line that a third is missing from; the walk knows nothing of that."""
    found = swarm(seed, 16, 4)
    sizes = []
    for out in ([], [HIGHEST], [], []):
        found.turn(out)
        sizes.append(sorted(map(len, found.rounds[-1])))
    assert sizes == [[4, 4, 4, 4], [3, 4, 4, 4], [4, 4, 4, 4], [4, 4, 4, 4]]
    cells = [node.peer.state.place.coordinates for node in found.nodes]  # type: ignore[union-attr]
    assert len(set(cells)) == len(cells)
