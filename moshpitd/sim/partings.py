"""Who could really not reach whom, and when. One rule: only what the network and the nodes did to
their connections counts (partitions, one-way pairs, broken links, daemons that stood still), never
whom a Peer says that it has lost, so that nobody is excused by its own account.

A lost control message parts nobody: it is asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moshpitd.sim.network import Links
from moshpitd.sim.plan import Partition


@dataclass(slots=True)
class _Spell:
    """From `at` to `until` (world time) these nodes and all others did not reach each other."""

    at: float
    until: float
    apart: frozenset[int]


class Partings:
    """Invariant: what is over for longer than any round is kept all the same; a world has some
    hundreds of faults, and they are looked at only when two members differ."""

    def __init__(self, links: Links, now: Callable[[], float]) -> None:
        self._links, self._now = links, now
        self._spells: list[_Spell] = []
        self._broken: dict[tuple[bytes, int, int], float] = {}
        self._unreached: dict[tuple[int, int], float] = {}  # when it last heard so
        self._whole_since = math.inf

    def parted(self, partition: Partition) -> None:
        """The network is cut in two."""
        self._spells.append(_Spell(self._now(), partition.until, frozenset(partition.apart)))

    def frozen(self, node: int, seconds: float) -> None:
        """A daemon stands still: nobody reaches it, and it reaches nobody."""
        self._spells.append(_Spell(self._now(), self._now() + seconds, frozenset((node,))))

    def broke(self, group_id: bytes, one: int, other: int) -> None:
        """The link that these two had, or wanted, in that group, while both lived."""
        self._broken[group_id, one, other] = self._now()

    def unreached(self, one: int, other: int) -> None:
        """`one` hears now that what it sent to `other`, which lives, could not be delivered."""
        self._unreached[one, other] = self._now()

    def calm(self) -> None:
        """From now on everybody reaches everybody."""
        self._whole_since = self._now()
        for spell in self._spells:
            spell.until = min(spell.until, self._now())

    def between(self, group_id: bytes, one: int, other: int, since: float, until: float) -> bool:
        """Was there an instant from `since` to `until` at which these two were parted?"""
        for a, b in ((one, other), (other, one)):
            if since <= self._broken.get((group_id, a, b), -1.0) <= until:
                return True
            if self._unreached.get((a, b), -1.0) >= since:
                return True
        if since < self._whole_since and self._links.blocked(one, other):
            return True
        return any(
            spell.at <= until
            and spell.until >= since
            and (one in spell.apart) is not (other in spell.apart)
            for spell in self._spells
        )
