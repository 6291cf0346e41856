"""How we answer those who want to meet us: an Invite or a Join, and the Begin of a leader.

One rule: nothing is promised here; what commits us goes through the attempt that runs.
"""

from __future__ import annotations

from moshpitd.core.chain import is_stale
from moshpitd.core.effects import Send
from moshpitd.core.exchanges import Exchange
from moshpitd.core.messages import (
    Begin,
    Declined,
    Group,
    Invite,
    Join,
    Later,
    Leave,
    NotMember,
    Record,
)
from moshpitd.core.neighbours import Neighbours
from moshpitd.core.outcome import Reason
from moshpitd.core.soundness import is_sound
from moshpitd.core.state import State
from moshpitd.core.swarm import same_lineage
from moshpitd.core.work import Conductor


class Asking:
    """Invariant: every Invite and Join gets exactly one answer."""

    def __init__(self, state: State, conductor: Conductor) -> None:
        self.state, self.conductor = state, conductor

    def asked(self, sender: str, message: Invite | Join, now: float) -> None:
        if isinstance(message, Join) and self._begun_with(sender, message):
            return
        work = self.conductor.work
        current = work.round if work is not None else None
        exchange = current if isinstance(current, Neighbours) else None
        if exchange is not None and not is_stale(exchange.group, sender, message):
            exchange.absent(sender, now)
        refusal = self.state.refuse(message.record, now)
        heaviest = self.state.params.max_weight * self.state.params.max_trainers
        if isinstance(message, Join) and not 0 <= message.weight <= heaviest:
            refusal = Reason.WEIGHT
            self.state.strike(sender, Reason.WEIGHT, now)
        if refusal is None and message.key != self.state.place.key():
            refusal = Reason.MOVED
        if refusal is Reason.LINEAGE and self._will_follow(message.record):
            # We take its state before we next average: it should wait for us.
            self.state.effects.append(
                Send(sender, Later(message.key, message.attempt, self.state.record))
            )
            return
        if refusal is not None:
            self.state.note("refused", sender, refusal)
            self.state.effects.append(
                Send(sender, Declined(message.key, message.attempt, refusal, self.state.record))
            )
            return
        attempt = work.attempt if work is not None else None
        if attempt is not None and attempt.key == message.key:
            attempt.receive(sender, message, now)
            return
        if current is None or isinstance(current, Neighbours):
            self.conductor.chain.asked(sender, message, current)
        if (
            isinstance(message, Invite)
            and len(self.state.invites) < self.state.params.max_candidates
        ):
            self.state.invites[sender] = (message.key, now + message.waits_s)
        self.state.effects.append(
            Send(sender, Later(message.key, message.attempt, self.state.record))
        )

    def _will_follow(self, record: Record) -> bool:
        winner = self.state.swarm.winning_lineage(
            self.state.lineage, self.state.version, self.state.record.schema
        )
        return same_lineage(record.lineage, winner)

    def _begun_with(self, sender: str, message: Join) -> bool:
        """It joined a group that has begun and says so again: our Begin was lost on the way."""
        work = self.conductor.work
        current = work.round if work is not None else None
        if current is None or (isinstance(current, Neighbours) and current.follows):
            return False  # a group that follows another has no Begin
        group = current.group
        if group.leader != self.state.peer_id:
            return False
        if all((m.peer_id, m.attempt) != (sender, message.attempt) for m in group.members):
            return False
        self.state.effects.append(Send(sender, Begin(group)))
        return True

    def begun(self, sender: str, begin: Begin, now: float) -> None:
        group = begin.group
        work = self.conductor.work
        attempt = work.attempt if work is not None else None
        if (
            work is not None
            and work.round is not None
            and work.round.group.group_id == group.group_id
        ):
            return  # the same Begin twice
        if all(member.peer_id != self.state.peer_id for member in group.members):
            self.state.strike(sender, Reason.NOT_MEMBER, now)
            return
        sound = (
            is_sound(group, self.state.params)
            and group.schema == self.state.record.schema
            and same_lineage(group.lineage, self.state.lineage)
            and group.codec == self.state.codec
        )
        if attempt is not None and sound and attempt.accept_begin(sender, group):
            latest = max(member.version for member in group.members)
            if latest - self.state.version <= self.state.params.max_version_lag:
                attempt.enter(group, relayed=sender != group.leader)
                self.conductor.meeting.unanswered(begin.silent, since=attempt.started)
                self.state.collect(attempt.effects)
                return
            self.state.strike(sender, Reason.VERSION, now)
            attempt.abandon(Reason.VERSION)
        for member in group.members[: self.state.params.max_group]:
            if member.peer_id != self.state.peer_id:
                self.state.effects.append(
                    Send(member.peer_id, NotMember(group.group_id, self.state.peer_id))
                )

    def left_late(self, current: Exchange, sender: str, message: Leave, now: float) -> None:
        """Its Leave crossed our Begin: it will not take part, and the others should know at
        once."""
        group = current.group
        if group.leader != self.state.peer_id or group.key != message.key:
            return
        if any(m.peer_id == sender and m.attempt == message.attempt for m in group.members):
            current.lost(sender, Reason.NOT_MEMBER, now)
            self.disown(group, sender)

    def disown(self, group: Group, peer_id: str) -> None:
        for member in group.members:
            if member.peer_id not in (self.state.peer_id, peer_id):
                self.state.effects.append(Send(member.peer_id, NotMember(group.group_id, peer_id)))
