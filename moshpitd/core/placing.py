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

from moshpitd.core.crowd import BAND, EVERYONE, PATIENCE, Crowd
from moshpitd.core.grid import (
    axis_of,
    cell,
    cell_along,
    is_flat,
    meeting_key,
    rank,
    rekey,
    sides_for,
)
from moshpitd.core.headcount import Headcount
from moshpitd.core.messages import Group, Record, Shape
from moshpitd.core.params import Params
from moshpitd.core.shards import SHARD_AIM, STEP, draw, position
from moshpitd.core.swarm import Heard, Swarm

SECONDED = 16.0
"""Peers expected to speak for an epoch where all look: enough to be two voices at once, few enough
for one answer."""

EPOCHS_AHEAD = 8
"""A single voice may not lift the epoch by more: a counter that is used up cannot be changed any
more. A newcomer to an old run hears two voices."""

ELECTED = 4.0
"""Peers expected to propose one epoch of a large run: one may die or fail its survey; it doubles
with every round in which nobody did."""

TIGHT = 0.95
"""Cells per peer counted in a survey: a grid a little too small is as even as one a little too
large, and its lines are full..."""

LOOSE = 1.05
"""...but where its sides come near the largest group, a line that gets a few more is split in two
halves, and some room is better."""

HEADROOM = 2
"""How near that is: lines of 15 vary by about two."""

SAMPLED = 0.9
"""Cells per peer where a survey counts a sample: of several that are proposed the grid with the
most cells holds, so the largest of some four counts decides, each right within 4 %. With 0.95 one
that was 6 % too high gave 10,022 peers 11,000 cells, where lines are filled to 0.91 at best..."""

ROOM = 4
"""...but only where a line holds so many more: lines of 11 that are dealt anew vary by three."""

TOLD = 32
"""Peers told of our cell before each round on a grid: some milliseconds of messages, against a
window of seconds that a line with a gap would wait for somebody who stands elsewhere."""

SHARDS = 8
"""So many make ranks uncertain: 110 peers in four know each other's, 1,000 that arrive do not."""

LONELY = 3
"""Attempts alone in a shape that nobody else has, before it is given up for one that two hold."""

FRESH = 2.0
"""Refreshes after which a record that has not changed proves nothing of its peer's round."""

VOICES = 3
"""The fewest that have a median."""

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
    sweeping: bool = False  # in the middle of a sweep, whose rounds belong together
    sweeps: bool = False  # our trainers ask for sweeps
    found_at: float = float("-inf")  # when the directory last said who is in our shard


@dataclass(slots=True)
class Place:
    """Invariant: one coordinate per side, each inside its side."""

    params: Params
    me: str
    shape: Shape = field(default_factory=Shape)
    coordinates: tuple[int, ...] = (0,)
    round: int = 0
    crowd: Crowd = field(init=False)
    sparse: int = 0  # below half fill: how often the cells can be halved before they are
    past: list[tuple[float, int]] = field(default_factory=list)  # (when, round) lately
    met: bool = False  # we were in a group
    lonely: int = 0  # attempts in a row that ended alone
    survey_due: bool = False
    pending: tuple[Shape, int] | None = None  # what will hold, and from which round on
    proposal: tuple[Shape, int] | None = None  # ours, to be stored where all look
    changes: list[Shape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crowd = Crowd(self.params)

    @property
    def peers(self) -> int:
        """By our count at the last preparation, ourselves among them."""
        return self.crowd.peers

    def prepare(self, sight: Sight, now: float) -> None:
        """Before a meeting is arranged: adopt or propose a shape, catch up with the round number,
        leave a shared cell."""
        self.crowd.look(sight.count.peers(sight.swarm, sight.schema), now)
        self._adopt(sight, now)
        self._propose(sight, now)
        self._fall_into_step(sight, now)
        if sight.sweeps and not sight.sweeping:
            # All begin with the same axis, so that those who are ready meet whenever that is.
            self.round += -self.round % len(self.shape.sides)
        self._leave_shared_cell(sight, now)
        # Whoever counts too few just after a change would be alone in a random group.
        self.sparse = 0 if self.crowd.settling(now) else self._sparse()

    def key(self) -> str:
        if self.sparse:
            number = self._random_group(self.me)
            return f"random/{self.shape.epoch}/{self.round}/{self.sparse}.{number}"
        return meeting_key(self.shape, self.coordinates, self.round)

    def many(self) -> bool:
        """Too many peers for everybody to know everybody? So says our count, or the shape: between
        two shapes a count may find next to nobody where it looks."""
        return max(self.peers, prod(self.shape.sides)) > EVERYONE

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

    def in_step(self, record: Record) -> bool:
        """Is the same axis free in its round and in ours? Random groups are of one round only."""
        return not self.sparse and (record.round - self.round) % len(self.shape.sides) == 0

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
        self.lonely, self.met = 0, True

    def alone(self, *, early: bool = False) -> None:
        """Nobody came: keep the cell, try the next axis; unless we were `early`: our line has this
        round before it, and finds us in it then."""
        self.round += not early
        self.lonely += 1

    def skip_to(self, rounds: Sequence[int]) -> None:
        """Those we wanted to meet are in these rounds by now."""
        self.round = max(self.round, sorted(rounds)[len(rounds) // 2])

    def surveyed(self, peers: int, sight: Sight, now: float) -> None:
        """The survey that was due is done."""
        if self._serves(peers, sight):
            self.crowd.settle()  # our own shards hold more or fewer than others
        elif self.crowd.far(peers) or self.crowd.outside >= PATIENCE:
            self._reshape(self._aim(peers, sampled=sight.count.depth > STEP), sight, now)

    def _serves(self, peers: int, sight: Sight) -> bool:
        """Is our shape within the band for so many peers?

        Where all shards were counted: around the number. Of a sample: from so far below what we
        would make for them to so far above one cell for each; where few in our shard live, that may
        be our shard. There is less than a cell per peer when a shape is made, and of a large run
        somebody's shards always hold a quarter more than others, so that it asks.
        """
        cells = prod(self.shape.sides)
        if sight.count.depth <= STEP:
            return abs(peers - cells) <= BAND * peers
        fewest = (1 - BAND) * self._aim(peers, sampled=True)
        return fewest <= cells <= (1 + BAND) * (1 + sight.count.doubt(sight.swarm)) * peers

    def _aim(self, peers: int, *, sampled: bool) -> int:
        """For how many cells a shape is to be made, after a survey that says so many peers."""
        most = self.params.max_group
        if sampled:
            sides = sides_for(aim := round(peers * SAMPLED), most)
            if max(sides) * peers <= (most - ROOM) * prod(sides):
                return aim
        if max(sides_for(aim := round(peers * TIGHT), most)) > most - HEADROOM:
            aim = round(peers * LOOSE)
        return max(1, aim)

    def _fall_into_step(self, sight: Sight, now: float) -> None:
        """Go to the round where most others are, if we are out of step with them.

        Within a sweep the others may just be done earlier than our line, which waits for us; out of
        step is who is a sweep behind or ahead, or found nobody where it was. Going back is as good
        as going on: a round number only says which axis is free. Records that have not changed for
        long say nothing: their peers may be gone.
        """
        step, since = len(self.shape.sides), now - FRESH * self.params.refresh_s
        while len(self.past) > 1 and self.past[1][0] <= since:
            del self.past[0]
        if not self.met:  # a newcomer goes where those are that have met, however few they are
            self.round = self._met_ahead(sight)
        if not self.past or self.past[-1][1] != self.round:
            self.past.append((now, self.round))
        median = sight.swarm.census(sight.schema).median_round(self.round, self.shape)
        if is_flat(self.shape):
            return
        told = self._told(sight, since)
        if len(told) >= VOICES:
            self.round = told[len(told) // 2]
            return
        if median == self.round:
            return
        if self.lonely or not (sight.sweeping or self._company(sight)):
            step = 1  # nobody waits for us here
        if abs(median - self.round) < step:
            return
        ours = self.shape
        rounds = sorted(
            entry.record.round
            for entry in sight.swarm.live(sight.schema)
            if entry.heard_at >= since
            and (entry.record.shape is ours or entry.record.shape == ours)
        )
        heard = rounds[len(rounds) // 2] if rounds else self.round
        behind = heard - self.round
        # What we heard may be as old as `since`: ahead is who was ahead of it then already.
        ahead = min(self.past[0][1], self.round) - heard if len(rounds) > 1 else 0
        if behind >= step or ahead >= max(2, step):
            self.round = heard
            self.past.clear()

    def _met_ahead(self, sight: Sight) -> int:
        """Where most of those are that have met, of those beyond the next round: one ahead may just
        be earlier. Whoever has met holds a version; who stays alone goes on too, without."""
        if sight.swarm.census(sight.schema).rounds.get(self.shape, [0])[-1] <= self.round + 1:
            return self.round
        here = [e.record for e in sight.swarm.live(sight.schema) if e.record.shape == self.shape]
        met = sorted(it.round for it in here if it.version and it.round > self.round + 1)
        return met[len(met) // 2] if met else self.round

    def _told(self, sight: Sight, since: float) -> list[int]:
        """Rounds of those in our shard, if the directory has named them at a time when whoever
        began a round as early as we did ours had stored that. Who has not met asks who has."""
        waited_s = self.params.window_s if self.lonely else 0.0  # so long ago the others began
        told_at = self.past[-1][0] + self.params.refresh_s / 2 - waited_s
        if sight.sweeping or sight.found_at <= told_at:
            return []
        ours = self.shape
        return sorted(
            entry.record.round
            for entry in map(sight.swarm.heard.get, sight.count.shard)
            if entry is not None
            and entry.lost is None
            and entry.heard_at >= since
            and (self.met or entry.record.version)
            and (entry.record.shape is ours or entry.record.shape == ours)
        )

    def _company(self, sight: Sight) -> bool:
        """Does anybody stand in our line in our round?"""
        for entry in sight.swarm.live(sight.schema):
            if entry.record.round == self.round and self.meets(entry.record):
                return True
        return False

    # -- shapes

    def _adopt(self, sight: Sight, now: float) -> None:
        if self.params.grid_sides:
            return
        census = sight.swarm.census(sight.schema)
        proposed = self._proposed(sight.count)
        ours = rank(self.shape)
        ahead = [
            it
            for it in census.rounds
            if it is not self.shape and it.epoch >= self.shape.epoch and rank(it) > ours
        ]
        if not proposed and not self.lonely and not ahead:
            return  # nearly always: all stand where we do
        voices = census.voices()
        needed = min(2, sight.swarm.living(sight.schema))
        good = [it for it, n in voices.items() if n >= needed and self._valid(it)]
        # Nobody else is where we are, or only newcomers like us: no round is finished there.
        left = self.shape not in voices or not self.met
        newer = [
            it
            for it in ahead
            if (it in good or self._witnessed(it)) and (left or census.rounds[it][0] <= self.round)
        ]
        newer += proposed
        if not newer and self.lonely:  # they have changed, and we missed when
            newer = [it for it in good if rank(it) > ours]
        if newer:
            newest = max(newer, key=rank)
            self.round = max(self.round, *census.rounds.get(newest, [0])[:1])
            self._take(newest, sight, now)
        elif self.lonely >= LONELY and not voices.get(self.shape) and good and not self.crowd.many:
            # We proposed a shape that nobody followed: the others' estimate did not leave the band.
            best = max(good, key=lambda it: (voices[it], rank(it)))
            self._take(best, sight, now)

    def _proposed(self, count: Headcount) -> list[Shape]:
        """Newer shapes that have been proposed and hold by now."""
        latest: tuple[Shape, int] | None = None
        for shape, rounds in count.voices(self.shape).items():
            newest = self.shape if latest is None else latest[0]
            if rank(shape) <= rank(newest) or not self._valid(shape):
                continue
            if self._witnessed(shape):
                latest = (shape, rounds[0])
            elif len(rounds) >= 2:
                latest = (shape, rounds[1])
        self.pending = latest
        return [latest[0]] if latest is not None and self.round >= latest[1] else []

    def _witnessed(self, shape: Shape) -> bool:
        """Does our own count say the same as that shape? Only where it is a count of many."""
        near = shape.epoch <= self.shape.epoch + EPOCHS_AHEAD
        return self.crowd.many and near and self._valid(shape) and self.crowd.fits(shape)

    def _valid(self, shape: Shape) -> bool:
        most, sides = self.params.max_group, shape.sides
        return 0 < len(sides) <= 8 and all(1 <= side <= most for side in sides)

    def _propose(self, sight: Sight, now: float) -> None:
        if self.params.grid_sides:
            if self.shape.epoch == 0:
                self._take(Shape(1, self.params.grid_sides), sight, now)
            return
        many = self.crowd.many
        if self.pending is not None or (many and not self.crowd.steady):
            return
        if not self.crowd.outgrown(self.shape, self.round, now):
            return
        if many and not self._proposes(self.shape.epoch + 1):
            return
        if sight.count.depth:
            self.survey_due = True
        else:
            self._reshape(self.peers, sight, now)

    def seconds(self, epoch: int) -> bool:
        """Are we one of those that say where all look that they hold with this epoch?"""
        return draw(self.me, epoch) * self.peers < SECONDED

    def _proposes(self, epoch: int) -> bool:
        """Are we one of the few that propose this epoch?"""
        patience = 1 if self.crowd.far(self.peers) or epoch <= 1 else PATIENCE
        doublings = min(16, max(0, self.crowd.outside - patience))
        return draw(self.me, epoch) * self.peers < ELECTED * (1 << doublings)

    def _reshape(self, peers: int, sight: Sight, now: float) -> None:
        sides = sides_for(peers, self.params.max_group)
        if sides == self.shape.sides:
            self.crowd.settle()
            return
        shape = Shape(self.shape.epoch + 1, sides)
        if not self.crowd.many:
            self._take(shape, sight, now)
            return
        # Before anybody's first round there is no between; and where the shape is far off, there is
        # nothing to spare.
        latest = sight.swarm.round_number(self.round, self.shape, sight.schema)
        at_once = not latest or self.crowd.far(self.peers)
        self.proposal = (shape, 0 if at_once else latest + 1)
        sight.count.propose(self.me, self.proposal)
        self.crowd.outside = 0
        self._adopt(sight, now)

    def _take(self, shape: Shape, sight: Sight, now: float) -> None:
        live, count = sight.swarm.live(sight.schema), sight.count
        cells = prod(shape.sides)
        self.shape, self.lonely, self.survey_due, self.pending = shape, 0, False, None
        self.crowd.take(shape, now)
        self.changes.append(shape)
        if self.crowd.many:
            index = int(position(self.me, count.shard, count.depth) * cells)
            # Of many shards neighbours by hash begin in one line: while all arrive, each knows its
            # rank to within some cells, so seldom in which line it is. Where ranks are right, later
            # or of few, a line out of all shards is more even than one out of a shard too full.
            begins = not self.round and cells > SHARDS * SHARD_AIM
            along = axis_of(shape, 0) if begins else len(shape.sides) - 1
            self.coordinates = cell_along(index, shape.sides, along)
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
        if is_flat(self.shape) or self.params.grid_sides or not self.crowd.many:
            return 0
        return max(0, int(log2(prod(self.shape.sides) / self.peers)))

    def _random_group(self, peer_id: str) -> int:
        groups = max(1, (prod(self.shape.sides) >> self.sparse) // max(self.shape.sides))
        return int(draw(peer_id, self.shape.epoch, self.round) * groups)

    def _leave_shared_cell(self, sight: Sight, now: float) -> None:
        """Of two peers in one cell the higher PeerID moves, if a free cell is known."""
        if is_flat(self.shape) or self.crowd.many:
            return
        live = sight.swarm.live(sight.schema)
        for entry in live:
            record = entry.record
            if (
                record.coordinates == self.coordinates
                and record.round == self.round
                and record.shape == self.shape
                and record.peer_id < self.me
                and now - entry.heard_at <= COLLISION_FRESH_S
            ):
                settled = [e for e in live if e.record.shape == self.shape]
                if len({e.record.coordinates for e in settled}) < prod(self.shape.sides):
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
