"""Where and with whom the next attempt meets: our place on the grid, made known, and those that may
be under our key.

On a grid the next meeting is arranged as soon as the group of the last one is closed: from then on
everybody can compute where it stands next. Our record goes under the next key, those who are there
already are looked up and told of us, and whoever comes later finds us and tells us. So when the
trainer contributes again, the members of its line know each other, and one round trip makes the
group; matchmaking has cost the trainer nothing.

One rule: it prepares attempts and judges none; how one goes on is `matchmaking`, what follows from
its end is `work`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from moshpitd.core.candidates import sentence, spelled
from moshpitd.core.effects import Announce, LookUp, Send
from moshpitd.core.events import Found
from moshpitd.core.grid import is_flat
from moshpitd.core.headcount import SHAPE_KEY, Headcount
from moshpitd.core.matchmaking import Attempt
from moshpitd.core.messages import Hello, Record
from moshpitd.core.outcome import Reason
from moshpitd.core.placing import EVERYONE, Sight
from moshpitd.core.shards import depth_for, draw
from moshpitd.core.state import State

MISSED = 2
"""Windows in a row that a peer may be waited for in vain; after that its Later holds no group up.
"""

COUNT_EVERY_S = 5.0
"""Peers are counted at most so often: once per round, but not for rounds that follow each other in
milliseconds. A large run, whose number changes slowly, is counted every `found_fresh_s`."""

THIN = 0.6
"""A group of less than this share of its line makes us ask whether those we know still live."""


class Meeting:
    """Invariant: what an attempt is told of the others is what the swarm says of them."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.count = Headcount(state.params, state.peer_id)
        self.key = ""  # under which our next meeting is arranged; "" while the run is one group
        self.at: tuple[int, tuple[int, ...]] = (-1, ())  # round and coordinates for which it is
        self.arranged_at = 0.0
        self.found_at: float | None = None  # when the directory last said who else is there
        self.told: dict[str, bool] = {}  # who was told that we come
        self.took = 0.0
        self.counted_at = float("-inf")

    # -- before the attempt

    def arrange(self, now: float) -> None:
        """Take our next place and make it known, if anything about it is new."""
        state, place = self.state, self.state.place
        self.prepare(now)
        record = state.presence.update(
            round=place.round, coordinates=place.coordinates, shape=place.shape
        )
        if not state.presence.present:
            return
        key = "" if is_flat(place.shape) else place.key()
        if key and (key, place.round, place.coordinates) != (self.key, *self.at):
            if self.key and self.key != key:
                self.state.effects.append(Announce(self.key, record, 0.0))
            self.found_at, self.arranged_at = None, now
            self.told.clear()
            state.effects.append(Announce(key, record, state.params.ttl_s))
            if place.small(state.swarm, record.schema):
                for entry in state.swarm.live(record.schema):
                    state.effects.append(Send(entry.record.peer_id, Hello(record, answer=True)))
        self.key, self.at = key, (place.round, place.coordinates)
        self._count(now)

    def prepare(self, now: float) -> None:
        """Know where we stand: the shape, and with it where our record belongs."""
        state, place = self.state, self.state.place
        outside = place.outside
        sight = Sight(state.swarm, state.record.schema, self.count, state.rng)
        place.prepare(sight, now)
        peers = self.count.surveyed()
        if peers is not None:
            place.surveyed(peers, sight, now)
        elif place.survey_due:
            place.survey_due = False
            state.effects += [LookUp(key) for key in self.count.begin_survey()]
        if place.outside == 1 and place.outside != outside:
            state.presence.hurry()
        self._second()
        if place.proposal is not None:
            shape, since = place.proposal
            place.proposal = None
            said = replace(
                state.record, shape=shape, coordinates=(0,) * len(shape.sides), round=since
            )
            state.effects.append(Announce(SHAPE_KEY, said, state.params.ttl_s))
        if not place.changes:
            return
        for shape in place.changes:
            state.note("shape_adopted", epoch=shape.epoch, sides=list(shape.sides))
        place.changes.clear()
        state.presence.update(round=place.round, coordinates=place.coordinates, shape=place.shape)
        depth = 0 if is_flat(place.shape) else depth_for(prod(place.shape.sides))
        self.count.move(depth)
        state.presence.move(depth, now)
        state.presence.hurry()

    def _second(self) -> None:
        """One of the few that may propose this epoch says that it holds with what was proposed."""
        place = self.state.place
        if place.pending is None or self.state.peer_id in self.count.proposals:
            return
        if place.proposes(place.pending[0].epoch):
            self.count.proposals[self.state.peer_id] = place.proposal = place.pending

    def _count(self, now: float) -> None:
        """How many are we by now? A run that is one group knows."""
        place, presence = self.state.place, self.state.presence
        seldom_s = COUNT_EVERY_S if place.peers <= 2 * EVERYONE else self.state.params.found_fresh_s
        every_s = min(seldom_s, presence.every_s)
        if (is_flat(place.shape) and place.peers <= EVERYONE) or now < self.counted_at + every_s:
            return
        self.counted_at = now
        presence.look_up(now)
        if place.peers > EVERYONE:
            keys = (SHAPE_KEY, *self.count.to_count())
            self.state.effects += [LookUp(key) for key in keys]

    def announced(self, key: str) -> None:
        """Only now: of two peers that store before they look up, at least one finds the other."""
        if key == self.key and self.found_at is None:
            self.state.effects.append(LookUp(key))

    def found(self, event: Found, now: float) -> None:
        """The directory has answered, for whatever key; the records have been heard."""
        self.count.found(event.key, event.records, self.state.swarm, self.state.record)
        if event.key == self.key:
            if event.ok and self.found_at is None:
                self.took = now - self.arranged_at
            self.found_at = now
            for record in event.records:
                if record.peer_id not in self.told and self.is_here(record):
                    self.told[record.peer_id] = True
                    hello = Hello(self.state.record, answer=True)
                    self.state.effects.append(Send(record.peer_id, hello))

    def thin(self, size: int, expected: int, now: float) -> None:
        """A group came out at `size`: ask those we know whether they live, if it is far too small.

        Whoever does not answer or cannot be reached is lost, and no longer counts."""
        if not self.count.depth or not expected or size >= THIN * expected:
            return
        for peer_id in self.count.shard:
            entry = self.state.swarm.heard.get(peer_id)
            if entry is None or entry.lost is not None:
                continue
            if now - entry.direct_at > self.state.params.found_fresh_s:
                self.state.effects.append(Send(peer_id, Hello(self.state.record)))
        self.counted_at = float("-inf")

    # -- the attempt

    def attempt(self, weight: float, *, deadline_at: float, now: float) -> Attempt:
        """A new attempt under the key of the place where we stand now, started."""
        state = self.state
        self.arrange(now)
        state.attempts += 1
        key = state.place.key()
        flat = is_flat(state.place.shape)
        settle_s = state.params.settle_s
        if flat:
            looked_up = state.presence.fresh(now)
            settled_at = state.presence.found_at + max(settle_s, state.presence.look_up_took)
        else:
            looked_up = self.found_at is not None
            settled_at = (self.found_at or now) + max(settle_s, self.took)
        attempt = Attempt(
            params=state.params,
            me=state.record,
            key=key,
            number=state.attempts,
            weight=weight,
            newcomer=state.newcomer,
            norm=state.norm,
            nonce=state.rng.getrandbits(63),
            started=now,
            deadline_at=min(deadline_at, now + state.params.attempt_timeout_s),
            call_ends_at=deadline_at,
            expected=state.place.expected(),
            codec=state.codec,
            looked_up=looked_up,
            settle_until=settled_at,
        )
        state.note("attempt_started", key=key, round=state.place.round)
        self.add_candidates(attempt, now)
        for leader, (invited_key, until) in list(state.invites.items()):
            if until <= now:
                del state.invites[leader]
            elif invited_key == key and leader in attempt.candidates:
                attempt.waiting[leader] = until
        if flat and not attempt.looked_up:
            state.presence.look_up(now)
        elif looked_up and self._doubtful(attempt):
            # A Hello may have been lost: ask once more before we begin without somebody.
            attempt.looked_up = False
            state.effects.append(LookUp(key))
        attempt.unsettled = self.unsettled()
        attempt.lone_waits = not flat and not self._everybody_tells()
        attempt.start(now)
        state.collect(attempt.effects)
        return attempt

    def _doubtful(self, attempt: Attempt) -> bool:
        """On a large grid: does somebody seem to be missing from our line?"""
        if is_flat(self.state.place.shape) or self._everybody_tells():
            return False
        return len(attempt.candidates) + 1 < max(2, attempt.expected)

    def sentence(self, attempt: Attempt) -> str:
        """Why nobody was found, about everybody that is known: "heard 3 peers, 2 refused: schema
        differs, 1 unreachable"."""
        words = attempt.candidates.words()
        for peer_id, entry in self.state.swarm.heard.items():
            if peer_id in attempt.candidates:
                continue
            if entry.record.schema != self.state.record.schema:
                words.append(f"refused: {spelled(Reason.SCHEMA)}")
            elif entry.lost is not None:
                words.append(spelled(entry.lost))
            elif self.state.place.meets(entry.record):
                words.append("not asked")
            else:
                words.append("elsewhere on the grid")
        return sentence(words)

    def add_candidates(self, attempt: Attempt, now: float) -> None:
        """Everybody known that may come to our key; on a small grid also those that are in another
        round now. One of another lineage is still worth asking: it may hold ours by now."""
        place, ours = self.state.place, self.state.record
        anytime = is_flat(place.shape) or self._everybody_tells()
        here = [
            entry
            for entry in self.state.swarm.live(ours.schema)
            if (anytime or entry.record.round == place.round) and place.meets(entry.record)
        ]
        pieces = self._pieces(len(here) + 1)
        piece = self._piece(ours, pieces) if pieces > 1 else 0
        for entry in here:
            if pieces > 1 and self._piece(entry.record, pieces) != piece:
                continue
            if self.state.refuse(entry.record, now) is not Reason.STRIKES:
                attempt.add(entry.record, now, waited_for=entry.missed < MISSED)

    def is_here(self, record: Record) -> bool:
        """Does it stand under our key on the grid, in our round?"""
        place = self.state.place
        return (
            bool(self.key)
            and record.peer_id != self.state.peer_id
            and record.round == place.round
            and record.schema == self.state.record.schema
            and place.meets(record)
        )

    def unsettled(self) -> int:
        """Live peers that may yet turn up under our key. On a large grid whoever can has said so
        when the group before this meeting was closed."""
        if is_flat(self.state.place.shape):
            return 1
        if not self._everybody_tells():
            return 0
        late = self.state.place.unsettled(self.state.swarm, self.state.record.schema)
        return sum(1 for entry in late if entry.missed < MISSED)

    def _everybody_tells(self) -> bool:
        return self.state.place.small(self.state.swarm, self.state.record.schema)

    def _pieces(self, under_key: int) -> int:
        """Into how many groups those under one key are split: a power of two, so that peers that
        count a few more or less still agree."""
        pieces = 1
        while under_key > pieces * self.state.params.max_group:
            pieces *= 2
        return pieces

    def _piece(self, record: Record, pieces: int) -> int:
        return int(draw(record.peer_id, self.key, self.state.place.round) * pieces)
