"""Where a peer stands: the grid's shape, its own cell, and the round number.

The shape carries an epoch. A peer adopts the highest epoch that two peers hold, or one peer and its
own count of the run: that is a second witness. It proposes a new one only when the number of peers
has left a band around the number the shape was made for, three rounds in a row or by far: two
independent estimates of N agree on ceil(sqrt N) too seldom to let everybody recompute it. In a
large run only a few, drawn by hash, propose at all, and after a survey of more shards. What they
propose holds from their next round on: by then everybody has seen it, so all change between two
rounds.

One rule: nothing here sends anything; a shape spreads because it stands in every record.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2, prod

from moshpitd.core.grid import axis_of, cell, is_flat, meeting_key, rekey, sides_for
from moshpitd.core.headcount import Headcount
from moshpitd.core.messages import Group, Record, Shape
from moshpitd.core.params import Params
from moshpitd.core.shards import draw, position
from moshpitd.core.swarm import Heard, Swarm

BAND = 0.15
"""Relative change of N that a shape tolerates: estimates from the directory are that noisy."""

PATIENCE = 3
"""Rounds in a row outside the band before a new shape is proposed: one bad look-up must not
reshape a swarm."""

RECOUNT_S = 5.0
"""While no rounds go by, that much time counts as one."""

FAR = 0.4
"""A change this large is no noise of a count of 120 peers (four standard deviations): no patience
is needed."""

WITNESS = 0.35
"""How far a shape's cells may be from our own count for the count to confirm a single voice."""

ELECTED = 4.0
"""Peers expected to propose one epoch of a large run: one may die or fail its survey; it doubles
with every round in which nobody did."""

MARGIN = 0.95
"""Cells per peer counted in a survey: a grid a little too small is as even as one a little too
large, and its lines are full."""

TOLD = 32
"""Peers told of our cell before each round on a grid: some milliseconds of messages, against a
window of seconds that a line with a gap would wait for somebody who stands elsewhere."""

LONELY = 3
"""Attempts alone in a shape that nobody else has, before it is given up for one that two hold."""

EVERYONE = 64
"""Up to so many peers one directory answer names them all, so cells can be dealt by rank without
collisions."""

FRESH = 2.0
"""Refreshes after which a record that has not changed proves nothing of its peer's round."""

COLLISION_FRESH_S = 5.0
"""Only a record this fresh proves that two peers stand in one cell now; coordinates change every
round."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a place is chosen by: the others, as far as they are known and counted."""

    swarm: Swarm
    schema: bytes
    count: Headcount
    rng: random.Random


@dataclass(slots=True)
class Place:
    """Invariant: one coordinate per side, each inside its side."""

    params: Params
    me: str
    shape: Shape = field(default_factory=Shape)
    coordinates: tuple[int, ...] = (0,)
    round: int = 0
    peers: int = 1  # at the last preparation, ourselves among them
    made_for: int = 1
    outside: int = 0
    counted_at: int = -1  # round in which `outside` was last counted...
    counted: float = float("-inf")  # ...and when
    taken_at: float = float("-inf")  # when the shape was adopted
    sparse: int = 0  # below half fill: how often the cells can be halved before they are
    lonely: int = 0  # attempts in a row that ended alone
    survey_due: bool = False
    pending: tuple[Shape, int] | None = None  # what will hold, and from which round on
    proposal: tuple[Shape, int] | None = None  # ours, to be stored where all look
    changes: list[Shape] = field(default_factory=list)

    def prepare(self, sight: Sight, now: float) -> None:
        """Before a meeting is arranged: adopt or propose a shape, catch up with the round number,
        leave a shared cell."""
        self.peers = sight.count.peers(sight.swarm, sight.schema)
        self._adopt(sight, now)
        self._propose(sight, now)
        self._fall_into_step(sight, now)
        self._leave_shared_cell(sight, now)
        self.sparse = self._sparse()

    def key(self) -> str:
        if self.sparse:
            number = self._random_group(self.me)
            return f"random/{self.shape.epoch}/{self.round}/{self.sparse}.{number}"
        return meeting_key(self.shape, self.coordinates, self.round)

    def expected(self) -> int:
        """Members of a full group under our key; 0 in the flat group, where all are known."""
        if is_flat(self.shape):
            return 0
        if self.sparse:
            return max(self.shape.sides)
        return self.shape.sides[axis_of(self.shape, self.round)]

    def small(self, swarm: Swarm, schema: bytes) -> bool:
        """A grid so small that everybody tells everybody where it stands."""
        known = swarm.living(schema)
        return not is_flat(self.shape) and known <= TOLD and self.peers <= TOLD + 1

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
        shape = record.shape
        if is_flat(self.shape):
            return is_flat(shape)
        if shape is not self.shape and shape != self.shape:
            return False
        if self.sparse:
            return self._random_group(record.peer_id) == self._random_group(self.me)
        axis = axis_of(self.shape, self.round)
        ours, theirs = self.coordinates, record.coordinates
        return ours[:axis] == theirs[:axis] and ours[axis + 1 :] == theirs[axis + 1 :]

    def finished(self, group: Group, index: int) -> None:
        """A group has begun: new coordinate, next axis. Also if its exchange fails: all members
        drew the same way. Shape and round are our own; only the seed is the group's."""
        if not group.key.startswith("random/"):
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

    def skip_to(self, rounds: Sequence[int]) -> None:
        """Those we wanted to meet are in these rounds by now."""
        self.round = max(self.round, sorted(rounds)[len(rounds) // 2])

    def surveyed(self, peers: int, sight: Sight, now: float) -> None:
        """The survey that was due is done."""
        self.peers = peers
        if self._far(peers) or self.outside >= PATIENCE:
            self._reshape(max(1, round(MARGIN * peers)), sight, now)

    def _fall_into_step(self, sight: Sight, now: float) -> None:
        """Go to the round where most others are, if we are out of step with them.

        Within a sweep the others may just be done earlier than our line, which waits for us; out of
        step is who is a sweep behind or ahead, or found nobody where it was. Going back is as good
        as going on: a round number only says which axis is free. Records that have not changed for
        long say nothing: their peers may be gone.
        """
        sweep = len(self.shape.sides)
        median = sight.swarm.census(sight.schema).median_round(self.round, self.shape)
        if is_flat(self.shape) or (not self.lonely and abs(median - self.round) < sweep):
            return
        since = now - FRESH * self.params.refresh_s
        rounds = sorted(
            entry.record.round
            for entry in sight.swarm.live(sight.schema)
            if entry.heard_at >= since and entry.record.shape == self.shape
        )
        heard = rounds[len(rounds) // 2] if rounds else self.round
        ahead = self.round - heard
        if ahead <= (-1 if self.lonely else -sweep) or (
            ahead >= (2 if self.lonely else sweep) and len(rounds) > 1
        ):
            self.round = heard

    # -- shapes

    def _adopt(self, sight: Sight, now: float) -> None:
        if self.params.grid_sides:
            return
        census = sight.swarm.census(sight.schema)
        voices = census.voices()
        needed = min(2, sight.swarm.living(sight.schema))
        ours = (self.shape.epoch, self.shape.sides)
        good = [it for it, n in voices.items() if n >= needed and _valid(it, self.params)]
        known = [(it.epoch, it.sides) for it in voices]  # without ours: nobody is left where we are
        newer = [
            it
            for it in voices
            if (it.epoch, it.sides) > ours
            and (it in good or self._witnessed(it))
            and (ours not in known or census.rounds[it][0] <= self.round)
        ]
        newer += self._proposed(sight.count)
        if newer:
            newest = max(newer, key=lambda it: (it.epoch, it.sides))
            self._take(newest, sight, now)
        elif (
            self.lonely >= LONELY and not voices.get(self.shape) and good and self.peers <= EVERYONE
        ):
            # We proposed a shape that nobody followed: the others' estimate did not leave the band.
            best = max(good, key=lambda it: (voices[it], it.epoch, it.sides))
            self._take(best, sight, now)

    def _proposed(self, count: Headcount) -> list[Shape]:
        """Newer shapes that have been proposed and hold by now."""
        voices: dict[Shape, int] = {}
        latest: tuple[Shape, int] | None = None
        for shape, since in count.proposals.values():
            if shape.epoch < self.shape.epoch or shape == self.shape:
                continue
            voices[shape] = voices.get(shape, 0) + 1
            if (shape.epoch, shape.sides) <= (self.shape.epoch, self.shape.sides):
                continue
            if not (voices[shape] >= 2 or self._witnessed(shape)) or not _valid(shape, self.params):
                continue
            if latest is None or (shape.epoch, shape.sides) > (latest[0].epoch, latest[0].sides):
                latest = (shape, since)
        self.pending = latest
        return [latest[0]] if latest is not None and self.round >= latest[1] else []

    def _witnessed(self, shape: Shape) -> bool:
        """Does our own count say the same as that shape? Only where it is a count of many."""
        if self.peers <= EVERYONE or not _valid(shape, self.params):
            return False
        return abs(prod(shape.sides) - self.peers) <= WITNESS * self.peers

    def _propose(self, sight: Sight, now: float) -> None:
        if self.params.grid_sides:
            if self.shape.epoch == 0:
                self._take(Shape(1, self.params.grid_sides), sight, now)
            return
        if self.pending is not None or not self._outgrown(now):
            return
        many = self.peers > EVERYONE
        if many and not self.proposes(self.shape.epoch + 1):
            return
        if sight.count.depth:
            self.survey_due = True
        else:
            self._reshape(self.peers, sight, now)

    def _outgrown(self, now: float) -> bool:
        """Has the number of peers left the band for long enough?"""
        first = self.shape.epoch == 0
        within = (is_flat(self.shape) and self.peers <= self.params.max_group) or (
            not first and abs(self.peers - self.made_for) <= BAND * self.made_for
        )
        # Just after a change many records lie under other keys still: absence proves nothing.
        if self.peers < self.made_for and now < self.taken_at + self.params.refresh_s:
            within = within or self.peers > EVERYONE or self.made_for > EVERYONE
        if within:
            self.outside = 0
            return False
        if self.counted_at != self.round or now >= self.counted + RECOUNT_S or not self.outside:
            self.outside, self.counted_at, self.counted = self.outside + 1, self.round, now
        return first or self.outside >= PATIENCE or self._far(self.peers)

    def _far(self, peers: int) -> bool:
        """Only a count of many peers can be this sure after one look."""
        return max(peers, self.made_for) > EVERYONE and not (
            1 - FAR < peers / self.made_for < 1 + FAR
        )

    def proposes(self, epoch: int) -> bool:
        """Are we one of the few that speak for this epoch?"""
        patience = 1 if self._far(self.peers) or epoch <= 1 else PATIENCE
        doublings = min(16, max(0, self.outside - patience))
        return draw(self.me, epoch) * self.peers < ELECTED * (1 << doublings)

    def _reshape(self, peers: int, sight: Sight, now: float) -> None:
        sides = sides_for(peers, self.params.max_group)
        if sides == self.shape.sides:
            self.made_for, self.outside = self.peers, 0
            return
        shape = Shape(self.shape.epoch + 1, sides)
        if self.peers <= EVERYONE:
            self._take(shape, sight, now)
            return
        self.proposal = (shape, self.round + 1 if self.round else 0)
        sight.count.proposals[self.me] = self.proposal
        self.outside = 0
        self._adopt(sight, now)

    def _take(self, shape: Shape, sight: Sight, now: float) -> None:
        live, count = sight.swarm.live(sight.schema), sight.count
        cells = prod(shape.sides)
        self.shape, self.outside, self.lonely, self.survey_due = shape, 0, 0, False
        self.pending = None
        self.taken_at = now
        # Our own count is the measure of later changes, if it can be that of this shape at all.
        fits = self.peers <= EVERYONE or abs(cells - self.peers) <= WITNESS * self.peers
        self.made_for = self.peers if fits else cells
        self.changes.append(shape)
        if self.peers > EVERYONE:
            self.coordinates = cell(
                int(position(self.me, count.shard, count.depth) * cells), shape.sides
            )
            return
        ids = sorted([self.me, *(entry.record.peer_id for entry in live)])
        settled = [e for e in live if e.record.shape == shape]
        taken = {entry.record.coordinates: True for entry in settled}
        dealt = cell(ids.index(self.me), shape.sides)
        if len(ids) <= min(EVERYONE, cells) and dealt not in taken:
            self.coordinates = dealt  # those who deal at the same time deal the same way
        else:  # somebody stands there already, or there are too many to know: take a free cell
            self.coordinates = self._free_cell(settled, sight.rng)

    # -- cells

    def _sparse(self) -> int:
        """A grid less than half full has more holes than lines: random groups mix faster. By powers
        of two, so that peers whose counts differ a little still agree."""
        if is_flat(self.shape) or self.params.grid_sides or self.peers <= EVERYONE:
            return 0
        return max(0, int(log2(prod(self.shape.sides) / self.peers)))

    def _random_group(self, peer_id: str) -> int:
        groups = max(1, (prod(self.shape.sides) >> self.sparse) // max(self.shape.sides))
        return int(draw(peer_id, self.shape.epoch, self.round) * groups)

    def _leave_shared_cell(self, sight: Sight, now: float) -> None:
        """Of two peers in one cell the higher PeerID moves, if a free cell is known."""
        if is_flat(self.shape) or self.peers > EVERYONE:
            return
        live = sight.swarm.live(sight.schema)
        for entry in live:
            record = entry.record
            if (
                record.coordinates == self.coordinates
                and record.round == self.round
                and record.shape == self.shape
                and record.peer_id < self.me
                and now - entry.direct_at <= COLLISION_FRESH_S
            ):
                settled = [e for e in live if e.record.shape == self.shape]
                self.coordinates = self._free_cell(settled, sight.rng)
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
