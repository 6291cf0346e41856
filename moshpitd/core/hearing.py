"""What we learn of the others, and whom of the running work it concerns.

One rule: a record changes what is known, never what was promised.
"""

from __future__ import annotations

from moshpitd.core import events as ev
from moshpitd.core.effects import LookUp, Send
from moshpitd.core.grid import PEERS_KEY, is_flat
from moshpitd.core.messages import Hello, Record
from moshpitd.core.outcome import Reason
from moshpitd.core.soundness import is_sane
from moshpitd.core.state import State
from moshpitd.core.swarm import first_difference
from moshpitd.core.work import Conductor


class Hearing:
    """Invariant: everything learned of a peer reaches the swarm before the work that runs."""

    def __init__(self, state: State, conductor: Conductor) -> None:
        self.state, self.conductor = state, conductor

    def record(self, record: Record, now: float, *, direct: bool) -> None:
        if self.state.swarm.hear(record, now, direct=direct):
            self.state.note("peer_heard", record.peer_id)
            if not direct and self.state.presence.present:
                # A look-up told us of it; this tells it of us, so that both sides know each other
                # at once, also one with another schema, which is to be told apart by both.
                self.state.effects.append(Send(record.peer_id, Hello(self.state.record)))
        attempt = self.conductor.work.attempt if self.conductor.work is not None else None
        place = self.state.place
        ours = record.schema == self.state.record.schema
        here = ours and record.round == place.round and place.meets(record)
        if attempt is not None and attempt.expected and here:
            attempt.add(record, now)  # it stands in our line this round
        entry = self.state.swarm.heard.get(record.peer_id)
        if entry is not None and record.schema == self.state.record.schema:
            entry.note = ""
        if (
            entry is not None
            and self.state.record.schema
            and record.schema != self.state.record.schema
            and not entry.note
        ):
            entry.note = first_difference(self.state.record.schema_text, record.schema_text)
            self.state.note("refused", record.peer_id, Reason.SCHEMA, detail=entry.note)

    def found(self, event: ev.Found, now: float) -> None:
        for record in event.records:
            if record.peer_id != self.state.peer_id and is_sane(record):
                self.record(record, now, direct=False)
        if event.key == PEERS_KEY:
            self.state.presence.found(now, ok=event.ok)
        work = self.conductor.work
        if work is None:
            return
        if work.attempt is not None and event.key == work.attempt.key:
            self.conductor.meeting.add_candidates(work.attempt, now)
            took = (
                self.state.presence.look_up_took
                if is_flat(self.state.place.shape)
                else now - work.attempt.started
            )
            work.attempt.found(now, look_up_took=took)
        if work.catch_up is not None and event.key == PEERS_KEY:
            work.catch_up.found(now)

    def announced(self, event: ev.Announced, now: float) -> None:
        if event.key == PEERS_KEY:
            self.state.presence.stored(now)
        attempt = self.conductor.work.attempt if self.conductor.work is not None else None
        if attempt is not None and event.key == attempt.key and event.key != PEERS_KEY:
            # Only now: of two peers that store before they look up, at least one finds the other.
            self.state.effects.append(LookUp(event.key))

    def lose(self, peer_id: str, reason: Reason, now: float) -> None:
        if self.state.swarm.lose(peer_id, reason):
            self.state.note("peer_lost", peer_id, reason)
        self.state.invites.pop(peer_id, None)
        if self.conductor.work is not None and self.conductor.work.attempt is not None:
            self.conductor.work.attempt.lost(peer_id, reason, now)
        if self.conductor.work is not None and self.conductor.work.catch_up is not None:
            self.conductor.work.catch_up.lost(peer_id, reason, now)
