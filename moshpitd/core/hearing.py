"""What we learn of the others, and whom of the running work it concerns.

One rule: a record changes what is known, never what was promised.
"""

from __future__ import annotations

from collections.abc import Sequence

from moshpitd.core import events as ev
from moshpitd.core.effects import Send
from moshpitd.core.messages import Hello, Record
from moshpitd.core.outcome import Reason
from moshpitd.core.placing import TOLD
from moshpitd.core.shards import SHARD_FULL, hash_of
from moshpitd.core.soundness import is_sane
from moshpitd.core.state import State
from moshpitd.core.swarm import first_difference
from moshpitd.core.work import Conductor

ENOUGH = 24
"""Members of our shard that are remembered: their medians are everybody's, within a round."""


class Hearing:
    """Invariant: everything learned of a peer reaches the swarm before the work that runs."""

    def __init__(self, state: State, conductor: Conductor) -> None:
        self.state, self.conductor, self.meeting = state, conductor, conductor.meeting

    def record(self, record: Record, now: float, *, direct: bool, few: bool = True) -> None:
        """A record that is sane. `few`: it came alone, or with so few others that all are told of
        us."""
        if self.state.swarm.hear(record, now, direct=direct):
            self.state.note("peer_heard", record.peer_id)
            if not direct and few and self.state.presence.present:
                # A look-up told us of it; this tells it of us, so that both sides know each other
                # at once, also one with another schema, which is to be told apart by both.
                self.state.effects.append(Send(record.peer_id, Hello(self.state.record)))
                self.state.swarm.heard[record.peer_id].greeted_at = now
        elif (
            not direct and self.state.swarm.is_lost(record.peer_id) and self.state.presence.present
        ):
            # We gave it up, and it has said something since, or shortly before: is it there?
            self.state.effects.append(Send(record.peer_id, Hello(self.state.record)))
        attempt = self.conductor.work.attempt if self.conductor.work is not None else None
        if attempt is not None and self.meeting.is_here(record, just_now=direct):
            attempt.add(record, now)  # it stands in our line this round
        self._compare(record)

    def _compare(self, record: Record) -> None:
        """Say once in which tensor a peer of another schema differs."""
        entry = self.state.swarm.heard.get(record.peer_id)
        if entry is None:
            return
        if record.schema == self.state.record.schema:
            entry.note = ""
        elif self.state.record.schema and not entry.note:
            entry.note = first_difference(self.state.record.schema_text, record.schema_text)
            self.state.note("refused", record.peer_id, Reason.SCHEMA, detail=entry.note)

    def found(self, event: ev.Found, now: float) -> None:
        swarm = self.state.swarm
        work = self.conductor.work
        attempt = work.attempt if work is not None else None
        ours = event.key == self.state.presence.key
        resting = work is None or work.round is None  # in a long exchange all are quiet
        if ours and event.ok and resting:
            swarm.expire((record.peer_id for record in event.records), now)
        if ours or event.key in (self.meeting.key, attempt.key if attempt is not None else ""):
            few = len(event.records) <= TOLD and not self.meeting.scale.count.depth
            # Under a key of the grid lies also who stood there a few rounds ago.
            oldest = 0 if ours else self.state.place.round
            for record in self._sample(event.records):
                if record.round >= oldest and swarm.is_news(record) and is_sane(record):
                    self.record(record, now, direct=False, few=few)
        if ours:
            self.state.presence.found(now, ok=event.ok)
        self.meeting.found(event, now)
        if work is not None and work.attempt is not None and event.key == work.attempt.key:
            self.meeting.add_candidates(work.attempt, now)
            if not work.attempt.looked_up:
                took = self.state.presence.look_up_took if ours else now - work.attempt.started
                work.attempt.found(now, look_up_took=took)
        if work is not None and work.catch_up is not None and ours:
            work.catch_up.found(now)
        if work is None or work.attempt is None:
            self.meeting.arrange(now, idle=work is None)

    def _sample(self, records: tuple[Record, ...]) -> tuple[Record, ...]:
        """Of a long answer, as many as are worth remembering: those that will be in our shard,
        which are other ones for other peers."""
        keep = ENOUGH if self.meeting.scale.count.depth else SHARD_FULL
        keep = min(keep, self.state.params.max_candidates // 2)
        if len(records) <= keep:
            return records
        own = hash_of(self.state.peer_id)
        # Most are too far away at first sight: sorting a thousand of them is dear.
        beyond = 64 - max(0, (len(records) // (2 * keep)).bit_length() - 1)
        near: Sequence[Record] = records
        if beyond < 64:
            near = [it for it in records if not (hash_of(it.peer_id) ^ own) >> beyond]
            if len(near) < keep:
                near = records
        return tuple(sorted(near, key=lambda it: hash_of(it.peer_id) ^ own)[:keep])

    def announced(self, event: ev.Announced, now: float) -> None:
        if event.key == self.state.presence.key:
            self.state.presence.stored(now)
        self.meeting.announced(event.key)

    def lose(self, peer_id: str, reason: Reason, now: float) -> None:
        if self.state.swarm.lose(peer_id, reason):
            self.state.note("peer_lost", peer_id, reason)
        self.state.invites.pop(peer_id, None)
        self.conductor.chain.lost(peer_id)
        if self.conductor.work is not None and self.conductor.work.attempt is not None:
            self.conductor.work.attempt.lost(peer_id, reason, now)
        if self.conductor.work is not None and self.conductor.work.catch_up is not None:
            self.conductor.work.catch_up.lost(peer_id, reason, now)
