"""What size the run has, and what follows from it: the shape of the grid, and under which keys our
record lies and the others' are looked for.

One rule: it looks as often as things change, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from moshpitd.core.crowd import EVERYONE
from moshpitd.core.effects import Announce, LookUp, Send
from moshpitd.core.events import Found
from moshpitd.core.grid import is_flat
from moshpitd.core.headcount import SHAPE_KEY, Headcount
from moshpitd.core.messages import Hello
from moshpitd.core.placing import SECONDED, TOLD, Sight
from moshpitd.core.shards import MAX_DEPTH, SHARD_FULL, STEP, depth_for, keys_of, shard_of
from moshpitd.core.state import State

COUNT_EVERY_S = 5.0
"""Peers are counted at most so often: once per round, but not for rounds that follow each other in
milliseconds. A large run, whose number changes slowly, is counted every `found_fresh_s`."""

OVERFULL = 4 * SHARD_FULL
"""More records than that in our shard, and the run has outgrown its shape by far: reading them
again every second would be a burden for everybody."""

UNREADABLE = 2
"""Look-ups in a row that fail before that: one is lost now and then."""

THIN = 0.75
"""A group of less than this share of what our count promises makes us ask whether those we know
still live: nine of ten may be a gap, seven are not."""


class Scale:
    """Invariant: the keys of our record are those of the shape that stands in it, or, while that
    shard cannot be read, it and a deep one."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.count = Headcount(state.params, state.peer_id)
        self.looked_at = float("-inf")
        self.spread_at = float("-inf")  # when other shards than ours were looked up
        self.shapes_at = float("-inf")  # when the directory last said which shapes are proposed

    def prepare(self, now: float) -> None:
        """Know where we stand: the shape, and with it where our record belongs."""
        state, place = self.state, self.state.place
        outside = place.crowd.outside
        sight = Sight(
            state.swarm,
            state.record.schema,
            self.count,
            state.rng,
            state.sweeping,
            state.sweeps,
            state.presence.found_at,
        )
        place.prepare(sight, now)
        peers = self.count.surveyed(state.swarm)
        if peers is not None:
            place.surveyed(peers, sight, now)
        elif place.survey_due:
            place.survey_due = False
            state.effects += [LookUp(key) for key in self.count.begin_survey(self._fits)]
        crowd = place.crowd
        if crowd.outside > outside and (crowd.peers < crowd.made_for or not crowd.many):
            self._ask(now)  # some have left: who else? Of few, are all of them there?
        changing = not crowd.steady or crowd.outside > outside
        if changing and place.many():
            state.presence.hurry(now)
        self._speak()
        if not place.changes:
            return
        for shape in place.changes:
            state.note("shape_adopted", epoch=shape.epoch, sides=list(shape.sides))
        place.changes.clear()
        state.presence.update(round=place.round, coordinates=place.coordinates, shape=place.shape)
        self._move(now)
        if place.many():
            state.presence.hurry(now)

    def look(self, now: float) -> None:
        """How many are we by now, and is a shape proposed? A run that is one group knows."""
        place, presence = self.state.place, self.state.presence
        deep = self.count.key != presence.key
        # Whoever looks deeper than its shape says counts few where it looks, and needs another one.
        many = place.many() or self.count.depth > 0
        if not many and is_flat(place.shape):
            return
        seldom_s = COUNT_EVERY_S if place.peers <= 2 * EVERYONE else self.state.params.found_fresh_s
        if now < self.looked_at + min(seldom_s, presence.every_s):
            return
        self.looked_at = now
        if now >= presence.answered_at + min(seldom_s, presence.every_s):
            presence.look_up(now)
        if not many:
            return
        keys = [SHAPE_KEY, self.count.key] if deep else [SHAPE_KEY]
        if now >= self.spread_at + max(COUNT_EVERY_S, 2 * presence.every_s):
            self.spread_at = now
            keys += self.count.to_count()
        self.state.effects += [LookUp(key) for key in keys]

    def found(self, event: Found, now: float) -> None:
        if event.ok:  # of no answer it does not follow that nobody is there
            self.count.found(event.key, event.records, self.state.swarm, self.state.record)
            if event.key == SHAPE_KEY:
                self.shapes_at = now
        presence = self.state.presence
        if event.key != presence.key:
            return
        if event.ok:
            self._ask_missing(event, now)
        if len(event.records) > OVERFULL:
            self._deeper(now)
            presence.move(keys_of(self.state.peer_id, self.count.depth), now)
        elif event.ok and self.count.key != presence.key:
            self._move(now)
        elif presence.failed >= UNREADABLE and self.count.depth < STEP:
            # It may hold more records than one answer can, or there may be no answers at all: look
            # deeper, but do not leave.
            self._deeper(now)
            self._deeper(now)
            presence.move((presence.key, self.count.key), now)

    def _ask_missing(self, event: Found, now: float) -> None:
        """Of those that belong into our shard, who is not there any more has left, or was missed
        by this answer: ask the ones that have been quiet."""
        if event.key != self.count.key:
            return  # we look elsewhere by now
        depth, since = self.count.depth, now - self.state.params.refresh_s
        ours = shard_of(self.state.peer_id, depth) if depth else 0
        quiet = [
            entry.record.peer_id
            for entry in self.state.swarm.live(self.state.record.schema)
            if entry.heard_at < since
            and (not depth or shard_of(entry.record.peer_id, depth) == ours)
        ]
        if quiet:
            named = {record.peer_id: True for record in event.records}
            missing = [peer_id for peer_id in quiet if peer_id not in named][:TOLD]
            hello = Hello(self.state.record)
            self.state.effects += [Send(peer_id, hello) for peer_id in missing]

    def _deeper(self, now: float) -> None:
        """Our shard is far too full for the shape that we know. Until a shape comes that fits, we
        look and are looked for deeper, in steps on which all agree."""
        self.count.move(min(MAX_DEPTH, (self.count.depth // STEP + 1) * STEP))
        self.looked_at = self.spread_at = float("-inf")
        self.state.presence.hurry(now)

    def thin(self, size: int, expected: int, now: float) -> None:
        """A group came out at `size`: ask those we know whether they live, if it is far too small.

        Whoever does not answer or cannot be reached is lost, and no longer counts.
        """
        place = self.state.place
        promised = expected * min(1.0, place.peers / prod(place.shape.sides))
        if expected and size < THIN * promised:
            self._ask(now)

    def _ask(self, now: float) -> None:
        """Do those that the directory names in our shard still live?"""
        for peer_id in self.count.shard:
            entry = self.state.swarm.heard.get(peer_id)
            if entry is None or entry.lost is not None:
                continue
            if now - entry.direct_at > self.state.params.found_fresh_s:
                self.state.effects.append(Send(peer_id, Hello(self.state.record)))
        self.looked_at = float("-inf")

    def _speak(self) -> None:
        """Say which shape we propose, or that we hold with one that was proposed, if we are one of
        the few that may."""
        state, place = self.state, self.state.place
        held = place.pending or (place.shape, place.round)
        told = self.count.proposals.get(state.peer_id)
        news = held[0].epoch > 0 and (told is None or told[0] != held[0])
        # Also where few are left: those that still hold with the shape of many look here.
        many = place.many() or self.count.depth > 0
        may = place.proposal is None and news and many and place.seconds(held[0].epoch)
        # Who counts few takes itself for one of the few: enough voices are enough. So listen first:
        # where thousands arrive, a quarter of them would fill the key until nobody can read it.
        listened = place.pending is not None or self.shapes_at > place.crowd.taken_at
        if may and listened and self.count.seconded(held[0]) < SECONDED:
            place.proposal = held
            self.count.propose(state.peer_id, held)
        if place.proposal is None:
            return
        shape, since = place.proposal
        place.proposal = None
        said = replace(state.record, shape=shape, coordinates=(0,) * len(shape.sides), round=since)
        state.effects.append(Announce(SHAPE_KEY, said, state.params.ttl_s))

    def _move(self, now: float) -> None:
        """Our record goes where everybody of this shape looks for it."""
        depth = self._fits
        self.count.move(depth)
        self.state.presence.move(keys_of(self.state.peer_id, depth), now)

    @property
    def _fits(self) -> int:
        """How deep the records of a run of our shape lie."""
        shape = self.state.place.shape
        return 0 if is_flat(shape) else depth_for(prod(shape.sides))
