"""Where a peer stands: the grid's shape, its own cell, and the round number.

The shape carries an epoch. Peers adopt the highest epoch heard from two peers (from one where only
one other is known) and propose a new one only when the number of peers has left a band around the
number the shape was made for, three attempts in a row: two independent estimates of N agree on
ceil(sqrt N) too seldom to let everybody recompute it.

One rule: nothing here sends anything; a shape spreads because it stands in every record.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod

from moshpitd.core.grid import axis_of, cell, is_flat, meeting_key, rekey, sides_for
from moshpitd.core.messages import Group, Record, Shape
from moshpitd.core.params import Params
from moshpitd.core.swarm import Heard, Swarm

BAND = 0.15
"""Relative change of N that a shape tolerates: estimates from the directory are that noisy."""

PATIENCE = 3
"""Attempts in a row outside the band before a new shape is proposed: one bad look-up must not
reshape a swarm."""

TOLD = 32
"""Peers told of our cell before each round on a grid: some milliseconds of messages, against a
window of seconds that a line with a gap would wait for somebody who stands elsewhere."""

LONELY = 3
"""Attempts alone in a shape that nobody else has, before it is given up for one that two hold."""

EVERYONE = 64
"""Up to so many peers one directory answer names them all, so cells can be dealt by rank without
collisions."""

COLLISION_FRESH_S = 5.0
"""Only a record this fresh proves that two peers stand in one cell now; coordinates change every
round."""


@dataclass(slots=True)
class Place:
    """Invariant: one coordinate per side, each inside its side."""

    params: Params
    me: str
    shape: Shape = field(default_factory=Shape)
    coordinates: tuple[int, ...] = (0,)
    round: int = 0
    made_for: int = 1
    outside: int = 0
    lonely: int = 0  # attempts in a row that ended alone
    changes: list[Shape] = field(default_factory=list)

    def prepare(self, swarm: Swarm, schema: bytes, rng: random.Random, now: float) -> None:
        """Before an attempt: adopt or propose a shape, catch up with the round number, leave a
        shared cell."""
        live = swarm.live(schema)
        self._adopt(live, rng)
        self._propose(live, rng)
        heard = swarm.round_number(self.round, self.shape, schema)
        # Within a sweep the others may just be done earlier than our line, which waits for us; out
        # of step is who is a sweep behind, or found nobody where it was.
        if self.lonely or heard - self.round >= len(self.shape.sides):
            self.round = heard
        self._leave_shared_cell(live, rng, now)

    def key(self) -> str:
        return meeting_key(self.shape, self.coordinates, self.round)

    def expected(self) -> int:
        """Members of a full group under our key; 0 in the flat group."""
        return 0 if is_flat(self.shape) else self.shape.sides[axis_of(self.shape, self.round)]

    def small(self, swarm: Swarm, schema: bytes) -> bool:
        """A grid so small that everybody tells everybody where it stands."""
        return not is_flat(self.shape) and len(swarm.live(schema)) <= TOLD

    def unsettled(self, swarm: Swarm, schema: bytes) -> list[Heard]:
        """Live peers still in an earlier round or without our grid: their next cell is not
        known."""
        return [
            entry
            for entry in swarm.live(schema)
            if entry.record.shape != self.shape or entry.record.round < self.round
        ]

    def meets(self, record: Record) -> bool:
        """May that peer be under our key now?"""
        if is_flat(self.shape):
            return is_flat(record.shape)
        if record.shape != self.shape or len(record.coordinates) != len(self.coordinates):
            return False
        axis = axis_of(self.shape, self.round)
        return all(
            i == axis or a == b
            for i, (a, b) in enumerate(zip(self.coordinates, record.coordinates, strict=True))
        )

    def finished(self, group: Group, index: int) -> None:
        """A round is over: new coordinate, next axis. Also after an exchange that failed: all
        members drew the same way. Shape and round are our own; only the seed is the group's."""
        self.coordinates = rekey(
            self.coordinates,
            shape=self.shape,
            round_number=self.round,
            group_id=group.group_id,
            index=index,
            size=len(group.members),
        )
        self.round += 1
        self.lonely = 0

    def alone(self) -> None:
        """Nobody came: keep the cell, try the next axis."""
        self.round += 1
        self.lonely += 1

    def _adopt(self, live: list[Heard], rng: random.Random) -> None:
        if self.params.grid_sides:
            return
        voices: dict[Shape, int] = {}
        for entry in live:
            voices[entry.record.shape] = voices.get(entry.record.shape, 0) + 1
        needed = min(2, len(live))
        good = [it for it, n in voices.items() if n >= needed and _valid(it, self.params)]
        newer = [it for it in good if (it.epoch, it.sides) > (self.shape.epoch, self.shape.sides)]
        if newer:
            self._take(max(newer, key=lambda it: (it.epoch, it.sides)), live, rng)
        elif self.lonely >= LONELY and not voices.get(self.shape) and good:
            # We proposed a shape that nobody followed: the others' estimate did not leave the band.
            self._take(max(good, key=lambda it: (voices[it], it.epoch, it.sides)), live, rng)

    def _propose(self, live: list[Heard], rng: random.Random) -> None:
        peers = len(live) + 1
        if self.params.grid_sides:
            if self.shape.epoch == 0:
                self._take(Shape(1, self.params.grid_sides), live, rng)
            return
        if is_flat(self.shape) and peers <= self.params.max_group:
            self.outside = 0
            return
        first = self.shape.epoch == 0
        if not first and abs(peers - self.made_for) <= BAND * self.made_for:
            self.outside = 0
            return
        sides = sides_for(peers, self.params.max_group)
        self.outside += 1
        if first or self.outside >= PATIENCE:
            if sides == self.shape.sides:
                self.made_for, self.outside = peers, 0
                return
            self._take(Shape(self.shape.epoch + 1, sides), live, rng)

    def _take(self, shape: Shape, live: list[Heard], rng: random.Random) -> None:
        self.shape, self.made_for, self.outside = shape, len(live) + 1, 0
        self.lonely = 0
        self.changes.append(shape)
        cells = prod(shape.sides)
        ids = sorted([self.me, *(entry.record.peer_id for entry in live)])
        settled = [e for e in live if e.record.shape == shape]
        taken = {entry.record.coordinates: True for entry in settled}
        dealt = cell(ids.index(self.me), shape.sides)
        if len(ids) <= min(EVERYONE, cells) and dealt not in taken:
            self.coordinates = dealt  # those who deal at the same time deal the same way
        else:  # somebody stands there already, or there are too many to know: take a free cell
            self.coordinates = self._free_cell(settled, rng)

    def _leave_shared_cell(self, live: list[Heard], rng: random.Random, now: float) -> None:
        """Of two peers in one cell the higher PeerID moves, if a free cell is known."""
        if is_flat(self.shape):
            return
        for entry in live:
            record = entry.record
            if (
                record.shape == self.shape
                and record.round == self.round
                and record.coordinates == self.coordinates
                and record.peer_id < self.me
                and now - entry.direct_at <= COLLISION_FRESH_S
            ):
                self.coordinates = self._free_cell(
                    [e for e in live if e.record.shape == self.shape], rng
                )
                return

    def _free_cell(self, settled: list[Heard], rng: random.Random) -> tuple[int, ...]:
        cells = prod(self.shape.sides)
        taken = {entry.record.coordinates: True for entry in settled}
        for _ in range(32):  # a random cell of a grid that is not full is free within a few draws
            drawn = cell(rng.randrange(cells), self.shape.sides)
            if drawn not in taken:
                return drawn
        if cells <= 4096:
            free = [c for c in (cell(i, self.shape.sides) for i in range(cells)) if c not in taken]
            if free:
                return rng.choice(free)
        return cell(rng.randrange(cells), self.shape.sides)


def _valid(shape: Shape, params: Params) -> bool:
    return (
        bool(shape.sides)
        and len(shape.sides) <= 8
        and all(1 <= side <= params.max_group for side in shape.sides)
    )
