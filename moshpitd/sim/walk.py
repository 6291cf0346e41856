"""Many peers on a pinned grid, round by round, without messages or time. One rule: who meets whom
is decided by the production's `Place`, one per peer, and by nothing here.

This is what is left of a swarm when matchmaking always works: the averaging-quality experiment of
the Moshpit paper needs millions of peer-rounds, and a test shows that real Peers in the world form
the same groups and hold the same values (tests/simulation/test_paper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from random import Random

from moshpitd.core.grid import cell
from moshpitd.core.group import group_id_of
from moshpitd.core.headcount import Headcount
from moshpitd.core.messages import Group, Lineage, Member
from moshpitd.core.params import Params
from moshpitd.core.placing import Place, Sight
from moshpitd.core.swarm import Swarm
from moshpitd.sim.faults import stream

MAX_GROUP = 64
"""The largest that Params allows. Lines of a grid 32 wide grow to 37 peers when some sit out, and
the experiment lets them average all together."""

NameGroup = Callable[[int, str, Sequence[int]], bytes]
"""(round, key, members) -> group id, the seed of the members' next coordinates."""


class GridWalk:
    """Invariant: a peer that sits a round out, or meets nobody, keeps its cell."""

    def __init__(
        self,
        peers: int,
        sides: tuple[int, ...],
        *,
        seed: int,
        cells: Sequence[tuple[int, ...]] = (),
        name_group: NameGroup | None = None,
    ) -> None:
        """Everybody starts in `cells`, by default in distinct random ones."""
        self.round = 0
        self._names = [f"{index:06d}" for index in range(peers)]
        self._members = [Member(name, 1, 1.0, 0, False, 1e3, 1e3) for name in self._names]
        self._nonces = stream(seed, "walk", "nonce")
        self._name_group = name_group or self._production_id
        params = Params(max_group=MAX_GROUP, grid_sides=sides)
        params.check()
        self.places = [Place(params, name) for name in self._names]
        for place in self.places:
            alone = Sight(Swarm(params, place.me), b"", Headcount(params, place.me), Random(0))
            place.prepare(alone, 0.0)  # takes the pinned shape
        for place, start in zip(self.places, cells or _cells(peers, sides, seed), strict=True):
            place.coordinates = start

    def turn(self, out: Collection[int] = ()) -> list[list[int]]:
        """One round without those `out`: the groups that averaged, also those of one."""
        meeting: dict[str, list[int]] = {}
        for index, place in enumerate(self.places):
            if index in out:
                place.alone()
            else:
                meeting.setdefault(place.key(), []).append(index)
        for key, members in meeting.items():
            if len(members) == 1:
                self.places[members[0]].alone()
                continue
            group_id = self._name_group(self.round, key, members)
            group = self._group(key, members, group_id)
            for position, index in enumerate(members):
                self.places[index].finished(group, position)
        self.round += 1
        return list(meeting.values())

    def _group(
        self, key: str, members: Sequence[int], group_id: bytes = b"", nonce: int = 0
    ) -> Group:
        return Group(
            group_id=group_id,
            key=key,
            leader=self._names[members[0]],
            nonce=nonce,
            round=self.round,
            shape=self.places[members[0]].shape,
            schema=b"",
            lineage=Lineage(),
            codec="float32",
            members=tuple(self._members[index] for index in members),
        )

    def _production_id(self, number: int, key: str, members: Sequence[int]) -> bytes:
        return group_id_of(self._group(key, members, nonce=self._nonces.getrandbits(63)))


def _cells(peers: int, sides: tuple[int, ...], seed: int) -> list[tuple[int, ...]]:
    """Distinct random cells."""
    chosen = stream(seed, "walk", "cells").sample(range(prod(sides)), peers)
    return [cell(index, sides) for index in chosen]
