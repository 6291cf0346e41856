"""Where and with whom the next attempt meets: our place on the grid, made known, and those that may
be under our key.

One rule: it prepares attempts and judges none; how one goes on is `matchmaking`, what follows from
its end is `work`.
"""

from __future__ import annotations

from moshpitd.core.effects import Announce, Send
from moshpitd.core.grid import is_flat
from moshpitd.core.matchmaking import Attempt
from moshpitd.core.messages import Hello
from moshpitd.core.outcome import Reason
from moshpitd.core.state import State

MISSED = 2
"""Windows in a row that a peer may be waited for in vain; after that its Later holds no group up.
"""


class Meeting:
    """Invariant: what an attempt is told of the others is what the swarm says of them."""

    def __init__(self, state: State) -> None:
        self.state = state

    def attempt(self, weight: float, *, deadline_at: float, now: float) -> Attempt:
        """A new attempt under the key of the place where we stand now, started."""
        self.state.place.prepare(self.state.swarm, self.state.record.schema, self.state.rng, now)
        for shape in self.state.place.changes:
            self.state.note("shape_adopted", epoch=shape.epoch, sides=list(shape.sides))
        self.state.place.changes.clear()
        record = self.state.presence.update(
            round=self.state.place.round,
            coordinates=self.state.place.coordinates,
            shape=self.state.place.shape,
        )
        self.state.attempts += 1
        key = self.state.place.key()
        flat = is_flat(self.state.place.shape)
        attempt = Attempt(
            params=self.state.params,
            me=record,
            key=key,
            number=self.state.attempts,
            weight=weight,
            newcomer=self.state.newcomer,
            nonce=self.state.rng.getrandbits(63),
            started=now,
            deadline_at=min(deadline_at, now + self.state.params.attempt_timeout_s),
            call_ends_at=deadline_at,
            expected=self.state.place.expected(),
            codec=self.state.codec,
            looked_up=flat and self.state.presence.fresh(now),
            settle_until=self.state.presence.found_at
            + max(self.state.params.settle_s, self.state.presence.look_up_took),
        )
        self.state.note("attempt_started", key=key, round=self.state.place.round)
        self.add_candidates(attempt, now)
        for leader, (invited_key, until) in list(self.state.invites.items()):
            if until <= now:
                del self.state.invites[leader]
            elif invited_key == key and leader in attempt.candidates:
                attempt.waiting[leader] = until
        if flat:
            if not attempt.looked_up:
                self.state.presence.look_up(now)
        else:
            self.state.effects.append(Announce(key, record, self.state.params.ttl_s))
            if self.state.place.small(self.state.swarm, record.schema):
                for entry in self.state.swarm.live(record.schema):
                    self.state.effects.append(
                        Send(entry.record.peer_id, Hello(record, answer=True))
                    )
        attempt.unsettled = self.unsettled()
        attempt.start(now)
        self.state.collect(attempt.effects)
        return attempt

    def add_candidates(self, attempt: Attempt, now: float) -> None:
        for entry in self.state.swarm.live(self.state.record.schema):
            record = entry.record
            if (
                not self.state.place.meets(record)
                or self.state.refuse(record, now) is Reason.STRIKES
            ):
                continue  # one of another lineage is still worth asking: it may hold ours by now
            attempt.add(record, now, waited_for=entry.missed < MISSED)

    def unsettled(self) -> int:
        place, schema = self.state.place, self.state.record.schema
        if not place.small(self.state.swarm, schema):
            return 1
        late = place.unsettled(self.state.swarm, schema)
        return sum(1 for entry in late if entry.missed < MISSED)
