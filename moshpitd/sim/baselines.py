"""The methods that Moshpit is compared with, on arrays of many peers. One rule: a function moves
values by one round and decides nothing that a schedule of `core.topologies` decides, which tests
hold it against: the daemon, these arrays and a table in a README mean the same thing by a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moshpitd.core.mixing import GroupMixing
from moshpitd.core.topologies import OnePeerExponential, RandomGroups

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def all_reduce(values: Vector, alive: Mask) -> Vector:
    """Everybody gets the mean, if everybody is there; else nothing changes."""
    return np.full_like(values, values.mean()) if alive.all() else values


def gossip(values: Vector, alive: Mask) -> Vector:
    """`Ring`: self, left and right with a third each; what would go to a dead neighbour stays.

    (The paper's code renormalises rows instead, which loses the mean; both need over 50 rounds.)
    """
    if len(values) < 3:
        return all_reduce(values, alive)  # two neighbours that are one and the same, or none
    pair = alive & np.roll(alive, -1)  # is the link from i to i + 1 up?
    flow = np.where(pair, np.roll(values, -1) - values, 0.0) / 3.0
    mixed: Vector = values + flow - np.roll(flow, 1)
    return mixed


def push_sum(
    values: Vector, weights: Vector, alive: Mask, *, turn: int, peers_per_round: int
) -> tuple[Vector, Vector]:
    """`OnePeerExponential` with push-sum weights (Stochastic Gradient Push): numerators and
    denominators; a share from or to the dead stays with its sender. The value is their quotient."""
    peers = len(values)
    shifts = OnePeerExponential(peers, peers_per_round).shifts(turn)
    steps = list(dict.fromkeys(shift % peers for shift in shifts if shift % peers))
    share = 1.0 / (1 + len(steps))
    kept = np.full(peers, share)
    moved = []
    for step in steps:
        sends = alive & np.roll(alive, -step)
        kept += np.where(sends, 0.0, share)
        moved.append((step, sends))

    def mix(column: Vector) -> Vector:
        mixed: Vector = column * kept
        for step, sends in moved:
            mixed += np.roll(np.where(sends, column * share, 0.0), step)
        return mixed

    return mix(values), mix(weights)


def random_groups(
    values: Vector, alive: Mask, *, turn: int, size: int, seed: int
) -> tuple[Vector, int]:
    """`RandomGroups` among the living; also returns how many groups there were."""
    dead = np.flatnonzero(~alive).tolist()
    mixing = RandomGroups(len(values), size, seed).sample(turn, dead)
    assert isinstance(mixing, GroupMixing)
    groups = mixing.groups
    return average_groups(values, groups), len(groups)


def average_groups(values: Vector, groups: Iterable[Sequence[int]]) -> Vector:
    """The mean of its group for every member; whoever is in none keeps its value."""
    mixed = values.copy()
    for group in groups:
        where = list(group)
        mixed[where] = values[where].mean()
    return mixed
