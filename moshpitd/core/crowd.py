"""How many the run has by our own count, against the number that its shape was made for.

Counts are noisy, and wrong while everybody moves: what grows at every look is waited out, absence
proves nothing just after a change, and a new number has to hold for three rounds unless it is far
off.

One rule: it judges numbers; which shape follows is `placing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moshpitd.core.messages import Shape
from moshpitd.core.params import Params

BAND = 0.15
"""Relative change of N that a shape tolerates: estimates from the directory are that noisy."""

PATIENCE = 3
"""Rounds in a row outside the band before a new shape is proposed: one bad look-up must not
reshape a swarm."""

RECOUNT_S = 5.0
"""While no rounds go by, that much time counts as one; and the interval of the slower trend."""

FAR = 0.4
"""A change this large is no noise of a count of 120 peers (four standard deviations): no patience
is needed."""

WITNESS = 0.35
"""How far a shape's cells may be from our own count for the count to confirm a single voice."""

MEASURE = 0.25
"""How far they may be for our count to be the measure of later changes: a grid has up to a tenth
more cells than peers, and three shards tell N within a tenth."""

TREND_S = 0.8
"""Two counts less far apart show no trend: the look-ups of a run that changes come every second."""

STEADY = 0.25
"""Relative difference of two counts in a row that are not a trend."""

FELL = 0.1
"""Relative difference to the count of `RECOUNT_S` before at which a fall is over: two answers that
do not come take about that long."""

EVERYONE = 64
"""Up to so many peers one directory answer names them all, so cells can be dealt by rank without
collisions."""


@dataclass(slots=True)
class Crowd:
    """Invariant: `outside` counts rounds in a row in which `peers` left the band."""

    params: Params
    peers: int = 1  # at the last look, ourselves among them
    made_for: int = 1
    measured: bool = True  # False: `made_for` was taken while everybody moved
    steady: bool = True
    outside: int = 0
    counted: tuple[int, float] = (-1, float("-inf"))  # round and time of the last such count
    taken_at: float = float("-inf")  # when the shape was adopted
    trend: tuple[tuple[float, int], ...] = ((float("-inf"), 0),)  # (when, peers), two of them
    slow: tuple[tuple[float, int], ...] = ((float("-inf"), 0),)  # the same at longer intervals

    @property
    def many(self) -> bool:
        return self.peers > EVERYONE

    def look(self, peers: int, now: float) -> None:
        """A new count. It is steady if it agrees with the one before: while everybody arrives at
        once, the first numbers are too small to be worth a shape."""
        self.peers = peers
        if now >= self.trend[-1][0] + TREND_S:
            self.trend = (self.trend[-1], (now, peers))
        if now >= self.slow[-1][0] + RECOUNT_S:
            self.slow = (self.slow[-1], (now, peers))
        self.steady = abs(self.trend[0][1] - peers) <= STEADY * peers

    def take(self, shape: Shape, now: float) -> None:
        """We are on this shape from now on."""
        self.outside, self.taken_at, self.measured = 0, now, False
        self.measure(shape)

    def measure(self, shape: Shape) -> None:
        """Our own count is the measure of later changes, if it can be that of this shape at all.
        Taken anew until all have had time to move to where they are counted."""
        cells = prod(shape.sides)
        self.made_for = self.peers if self._near(cells, MEASURE) or not shape.epoch else cells

    def settle(self) -> None:
        """The shape is right for the number that we count now."""
        self.made_for, self.outside = self.peers, 0

    def fits(self, shape: Shape) -> bool:
        """Can a shape with so many cells have been made for the number that we count?"""
        return self._near(prod(shape.sides), WITNESS)

    def _near(self, cells: int, share: float) -> bool:
        return abs(cells - self.peers) <= share * self.peers

    def settling(self, now: float) -> bool:
        """Just after a change many records lie under other keys still: absence proves nothing."""
        return now < self.taken_at + self.params.refresh_s

    def outgrown(self, shape: Shape, round_number: int, now: float) -> bool:
        """Has the number of peers left the band for long enough?"""
        settling = self.settling(now)
        if not self.measured:
            self.measure(shape)
            self.measured = not settling
        within = self.peers <= self.params.max_group and len(shape.sides) == 1
        if shape.epoch:
            within = within or abs(self.peers - self.made_for) <= BAND * self.made_for
        if settling and self.peers < self.made_for and max(self.peers, self.made_for) > EVERYONE:
            within = True
        if within:
            self.outside = 0
            return False
        number, at = self.counted
        if number != round_number or now >= at + RECOUNT_S or not self.outside:
            self.outside, self.counted = self.outside + 1, (round_number, now)
        if not shape.epoch:
            return True
        # Peers that came have been seen; of those that left we learn by asking in vain, and as long
        # as that goes on the number is too high.
        if self.peers < self.made_for and abs(self.slow[0][1] - self.peers) > FELL * self.peers:
            return False
        return self.outside >= PATIENCE or self.far(self.peers)

    def far(self, peers: int) -> bool:
        """Is it no noise? Only a count of many peers can be this sure after one look."""
        return max(peers, self.made_for) > EVERYONE and not (
            1 - FAR < peers / self.made_for < 1 + FAR
        )
