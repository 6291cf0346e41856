"""Meetings in pairs (AD-PSGD): an active peer and a passive one take the mean of their parameters,
whenever the active one's trainer is ready, while everybody else trains.

The parameters lie with the data plane. The active peer's values go to the passive one, which moves
half of the way and sends back what the active peer has to add: the exact opposite, so that the sum
of the two stays what it was, whatever either adds meanwhile. The passive peer keeps that difference
until the same active peer comes again. So an answer that was lost is asked for at the next meeting
of the two, under the same nonce, before anything else happens between them.

One rule: a pair's halves are both applied, each once, or neither, as long as both peers live. Who
is active follows from the rank among the peers that are known (`topologies.is_active`); two peers
that know different ones may both think so, and answering never waits, so nobody waits in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpitd.core import events as ev
from moshpitd.core.effects import ClosePair, Finish, OpenPair, PushPair, Send
from moshpitd.core.graph import OWN
from moshpitd.core.messages import Hello, Pair, PairAnswer
from moshpitd.core.mixing import EdgeMixing
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.state import State
from moshpitd.core.topologies import is_active, passive_neighbours, schedule_for

SERVED_AT_ONCE = 4
"""Meetings that a passive peer takes part in at once, each with a copy of the parameters: its
actives are its neighbours on a graph, and who is refused goes on alone and comes again."""
KEPT = 8
"""Differences that are kept for actives whose answer may have been lost, the oldest forgotten: one
copy of the parameters each. Forgotten ones are a meeting of which one half is missing."""
NONCE_BYTES = 16  # what a frame's header has room for


@dataclass(slots=True)
class Meeting:
    """Ours, as the active peer."""

    token: str
    trainer: str
    partner: str
    nonce: bytes
    topology: str
    again: bool
    ends_at: float
    answer_by: float
    answered: bool = False


@dataclass(slots=True)
class Served:
    """One that another began. `done`: our half is applied and theirs is kept for them."""

    active: str
    until: float
    done: bool = False


class Pairs:
    """Invariant: at most one meeting of our own; `unsure` are partners that may have applied their
    half of a meeting whose other half we have not."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.trainer = ""  # whose parameters we hold
        self.meeting: Meeting | None = None
        self.unsure: dict[str, bytes] = {}
        self.serving: dict[bytes, Served] = {}

    # -- the trainer

    def kept(self, trainer: str) -> None:
        """Its parameters are here: others may meet them."""
        self._forget()
        self.trainer = trainer

    def gone(self, trainer: str, now: float) -> None:
        if trainer == self.trainer:
            self._end(Reason.TRAINER_GONE)
            self._forget()
            self.trainer = ""

    def asked(self, event: ev.MeetAsked, now: float) -> None:
        if event.trainer != self.trainer or self.meeting is not None or self.state.draining:
            reason = Reason.DRAINING if self.state.draining else Reason.NO_TRAINER
            failed = Outcome(Status.FAILED, reason, accepted=False, participants=0)
            self.state.effects.append(Finish(event.token, event.trainer, failed))
            return
        ends_at = now + min(event.timeout_s, self.state.params.result_timeout_s)
        self._begin(event.token, event.topology, ends_at, now)

    def cancelled(self, token: str) -> None:
        if self.meeting is not None and self.meeting.token == token:
            self._end(Reason.WITHDRAWN)

    # -- what others say

    def receive(self, sender: str, message: Pair | PairAnswer, now: float) -> None:
        if isinstance(message, Pair):
            self._invited(sender, message, now)
        else:
            self._answered(sender, message, now)

    def lost(self, peer_id: str, reason: Reason) -> None:
        """Its link, or a message to it."""
        for nonce, served in list(self.serving.items()):
            if served.active == peer_id and not served.done:
                self._close(nonce)
        if self.meeting is not None and self.meeting.partner == peer_id:
            self._end(reason)

    # -- the data plane

    def arrived(self, nonce: bytes) -> None:
        meeting, served = self.meeting, self.serving.get(nonce)
        if served is not None:
            if not served.done:
                served.done = True
                self.state.effects.append(PushPair(nonce))
            done = [key for key, one in self.serving.items() if one.done]
            for key in done[:-KEPT]:
                self._close(key)
            return
        # Applied already; also when we have stopped waiting for it meanwhile.
        self.unsure = {peer: known for peer, known in self.unsure.items() if known != nonce}
        if meeting is not None and meeting.nonce == nonce:
            self._end(None)

    def failed(self, nonce: bytes, reason: Reason, now: float) -> None:
        """What came cannot be used; nothing of it was."""
        meeting, served = self.meeting, self.serving.get(nonce)
        if served is not None:
            if reason is not Reason.NO_TRAINER:  # our own values are gone, which is nobody's fault
                self.state.strike(served.active, reason, now)
            self._close(nonce)
            self.state.effects.append(Send(served.active, PairAnswer(nonce)))
        elif meeting is not None and meeting.nonce == nonce:
            if reason is not Reason.NO_TRAINER:
                self.state.strike(meeting.partner, reason, now)
            self.unsure.pop(meeting.partner, None)
            self._end(reason)

    # -- time

    def deadline(self) -> float | None:
        if self.meeting is None and not self.serving:
            return None
        times = [served.until for served in self.serving.values() if not served.done]
        if self.meeting is not None:
            waits = self.meeting.ends_at if self.meeting.answered else self.meeting.answer_by
            times.append(min(waits, self.meeting.ends_at))
        return min(times) if times else None

    def tick(self, now: float) -> None:
        if self.meeting is None and not self.serving:
            return
        for nonce, served in list(self.serving.items()):
            if not served.done and now >= served.until:
                self._close(nonce)
        meeting = self.meeting
        if meeting is None:
            return
        if now >= meeting.ends_at:
            self._end(Reason.TIMEOUT)
        elif not meeting.answered and now >= meeting.answer_by:
            self._end(Reason.NO_ANSWER)

    # -- below

    def _begin(self, token: str, topology: str, ends_at: float, now: float) -> None:
        state = self.state
        partner = self._partner(topology)
        if partner is None:
            alone = Outcome(Status.ALONE, Reason.NO_PEERS, contributors=(state.peer_id,))
            state.effects.append(Finish(token, self.trainer, alone))
            return
        known = self.unsure.get(partner)
        nonce = known or state.rng.getrandbits(128).to_bytes(16, "big")
        again = known is not None
        answer_by = now + state.params.answer_timeout_s
        self.meeting = Meeting(
            token, self.trainer, partner, nonce, topology, again, ends_at, answer_by
        )
        addresses = state.swarm.heard[partner].record.addresses
        dialled = bool(state.record.addresses)
        opening = OpenPair(nonce, partner, addresses, self.trainer, active=True, dialled=dialled)
        state.effects += [opening, Send(partner, Pair(nonce, again=again))]

    def _partner(self, topology: str) -> str | None:
        """One of our passive neighbours among those that are known to be there."""
        state = self.state
        others = [entry.record.peer_id for entry in state.swarm.live(state.record.schema)]
        if topology == OWN and state.own is not None:
            ways = state.own.partners(state.peer_id, others)
            return state.rng.choice(ways) if ways else None
        names = sorted([state.peer_id, *others])
        rank = names.index(state.peer_id)
        mixing = schedule_for(topology, len(names)).sample(0)
        if isinstance(mixing, EdgeMixing):
            choice = [names[other] for other in passive_neighbours(rank, mixing)]
        else:  # a group: everybody is everybody's neighbour
            choice = names[::2] if is_active(rank) else []
        return state.rng.choice(choice) if choice else None

    def _invited(self, sender: str, message: Pair, now: float) -> None:
        served = self.serving.get(message.nonce)
        if served is None and not self._may_come(sender, message.nonce, now):
            self.state.effects.append(Send(sender, PairAnswer(message.nonce)))
            return
        busy = sum(1 for one in self.serving.values() if not one.done) >= SERVED_AT_ONCE
        say = self.state.effects
        if served is not None and served.active == sender and served.done:
            say += [Send(sender, PairAnswer(message.nonce, done=True)), PushPair(message.nonce)]
        elif served is not None or message.again or busy or not self.trainer or self.state.draining:
            # Half of a message that comes again may be of other values: it is begun anew instead.
            if served is not None and served.active == sender:
                self._close(message.nonce)
            say.append(Send(sender, PairAnswer(message.nonce)))
        else:
            for nonce, one in list(self.serving.items()):
                if one.active == sender:  # it has what it lacked, or it would have asked for it
                    self._close(nonce)
            until = now + self.state.params.part_timeout_s
            self.serving[message.nonce] = Served(sender, until)
            entry = self.state.swarm.heard.get(sender)
            addresses = entry.record.addresses if entry is not None else ()
            say += [
                OpenPair(
                    message.nonce,
                    sender,
                    addresses,
                    self.trainer,
                    active=False,
                    dialled=bool(self.state.record.addresses),
                ),
                Send(sender, PairAnswer(message.nonce, ready=True)),
            ]

    def _may_come(self, sender: str, nonce: bytes, now: float) -> bool:
        """Who has struck out is not met. A stranger could not: what it does is on no record. It is
        asked who it is, and comes again."""
        entry = self.state.swarm.heard.get(sender)
        if entry is None or entry.record.schema != self.state.record.schema:
            if self.state.presence.present:
                self.state.effects.append(Send(sender, Hello(self.state.record)))
            return False
        ours = self.meeting is not None and self.meeting.nonce == nonce
        if len(nonce) != NONCE_BYTES or ours:
            self.state.strike(sender, Reason.REFUSED, now)
            return False
        return self.state.swarm.strikes(sender, now) < self.state.params.max_strikes

    def _answered(self, sender: str, message: PairAnswer, now: float) -> None:
        meeting = self.meeting
        if meeting is None or (sender, message.nonce) != (meeting.partner, meeting.nonce):
            return
        if message.done:
            meeting.answered = True
        elif message.ready and not meeting.again and not meeting.answered:
            meeting.answered = True
            self.unsure[sender] = meeting.nonce
            while len(self.unsure) > self.state.params.max_candidates:
                del self.unsure[next(iter(self.unsure))]  # who is not met again for so long
            self.state.effects.append(PushPair(meeting.nonce))
        elif not message.ready:
            # It has applied nothing of this nonce, and will not.
            self.unsure.pop(sender, None)
            if meeting.again:
                self.state.effects.append(ClosePair(meeting.nonce))
                self.meeting = None
                self._begin(meeting.token, meeting.topology, meeting.ends_at, now)
            else:
                self._end(Reason.REFUSED)

    def _end(self, reason: Reason | None) -> None:
        meeting, self.meeting = self.meeting, None
        if meeting is None:
            return
        self.state.effects.append(ClosePair(meeting.nonce))
        met = reason is None
        self.state.effects.append(
            Finish(
                meeting.token,
                meeting.trainer,
                Outcome(
                    Status.COMPLETE if met else Status.ALONE,
                    reason,
                    group_size=2 if met else 1,
                    participants=2 if met else 1,
                    contributors=(meeting.partner,) if met else (),
                    group_id=meeting.nonce if met else b"",
                ),
            )
        )

    def _close(self, nonce: bytes) -> None:
        del self.serving[nonce]
        self.state.effects.append(ClosePair(nonce))

    def _forget(self) -> None:
        for nonce in list(self.serving):
            self._close(nonce)
        self.unsure.clear()
