"""The trainers' side: who is attached, what they asked for, and in which order it is done.

Several trainers of one node that contribute within the local window go to the swarm as one
contribution. One rule: one call at a time; what comes while it runs waits in `queue`, or, if the
call has not reached its exchange, gets the result as a delta.
"""

from __future__ import annotations

from moshpitd.core import events as ev
from moshpitd.core.effects import Finish, Send
from moshpitd.core.messages import Goodbye, Lineage
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.state import State
from moshpitd.core.work import Conductor, Work


class Calls:
    """Invariant: a trainer has at most one call in `queue` or in the running work."""

    def __init__(self, state: State, conductor: Conductor) -> None:
        self.state, self.conductor = state, conductor
        self.queue: list[ev.Contributed | ev.Synced] = []
        self.due: dict[str, float] = {}  # token -> when a call that still waits has waited enough

    def deadline(self) -> float | None:
        waiting = self._waiting()
        return min(self.due[call.token] for call in waiting) if waiting else None

    def tick(self, now: float) -> None:
        """A call ends by its own timeout also when its turn never came."""
        waiting = self._waiting()
        if not waiting:
            return
        for call in [call for call in waiting if self.due[call.token] <= now]:
            self.on_cancelled(call.token, now)
            self._fail(call, Reason.TIMEOUT)

    def _waiting(self) -> list[ev.Contributed | ev.Synced]:
        work = self.conductor.work
        if not self.queue and (work is None or not work.late):
            return self.queue
        # In an exchange the bucket of a late one is lent: it ends with the exchange, which began
        # before it and ends in time.
        late = work.late if work is not None and work.round is None else []
        return [*self.queue, *late]

    def _fail(self, call: ev.Contributed | ev.Synced, reason: Reason) -> None:
        self.due.pop(call.token, None)
        outcome = Outcome(Status.FAILED, reason, accepted=False, version=self.state.version)
        self.state.effects.append(Finish(call.token, call.trainer, outcome))

    def on_attached(self, event: ev.Attached, now: float) -> None:
        first = not self.state.trainers
        if not first and event.schema != self.state.record.schema:
            return  # the local API refused it with the first difference; its calls find no trainer
        if self.state.outdates(event.schema, event.version):
            self.state.trainers[event.trainer] = True
        else:
            founder = event.founder or self.state.peer_id
            lineage = Lineage(founder, event.founder_digest or event.digest)
            if lineage != self.state.lineage or event.version != self.state.version:
                self.state.caught_up = False
            self.state.presence.update(
                schema=event.schema,
                schema_text=event.schema_text,
                version=event.version,
                lineage=lineage,
            )
            self.state.part_sizes = event.part_sizes
            self.state.donor.part_count = len(event.part_sizes)
            self.state.donor.holds(event.version, (), event.digest)
            self.state.trainers[event.trainer] = False
        if first and not self.state.draining:
            self.state.presence.update(has_snapshot=self.state.donor.version is not None)
            self.state.presence.appear(now)
            self.state.tell_everybody()

    def on_trainer_gone(self, trainer: str, now: float) -> None:
        if self.state.trainers.pop(trainer, None) is None:
            return
        for call in [call for call in self.queue if call.trainer == trainer]:
            self.queue.remove(call)
            self.due.pop(call.token, None)
        work = self.conductor.work
        if work is not None and work.window_until is not None:
            work.calls = [call for call in work.calls if call.trainer != trainer]
            if not work.calls:
                self.conductor.work = None
        elif work is not None:
            work.syncs = [call for call in work.syncs if call.trainer != trainer]
        if not self.state.trainers:
            self._leave(Reason.NO_TRAINER, now)

    def _leave(self, reason: Reason, now: float) -> None:
        """Nobody here to train, or a drain: stop being waited for, stop being a donor, let the
        running exchange end."""
        self.conductor.chain.stop()
        self.conductor.chain.doubt()
        if self.state.presence.present:
            for entry in self.state.swarm.live(self.state.record.schema):
                self.state.effects.append(
                    Send(entry.record.peer_id, Goodbye(reason, self.state.record.sequence))
                )
        self.state.presence.vanish()
        self.state.presence.update(has_snapshot=False)
        gone = reason is Reason.NO_TRAINER
        self.conductor.abandon(Reason.TRAINER_GONE if gone else Reason.DRAINING, now)

    def on_contributed(self, event: ev.Contributed, now: float) -> None:
        refusal = self._refusal_of(event)
        if refusal is not None:
            self._fail(event, refusal)
            return
        self.due[event.token] = now + event.timeout_s
        self.state.refused_until = float("-inf")
        work = self.conductor.work
        if work is None:
            self.conductor.work = work = Work(now + event.timeout_s, now, [event], phase_at=now)
            others = sum(1 for trainer in self.state.trainers if trainer != event.trainer)
            work.window_until = now + (self.state.params.local_window_s if others else 0.0)
        elif work.window_until is not None:
            work.calls.append(event)
            work.deadline_at = min(work.deadline_at, now + event.timeout_s)
        elif (
            work.calls
            and work.round is None
            and not work.rounds_done
            and not self.state.trainers[event.trainer]
        ):
            work.late.append(event)  # it gets the result as a delta on top of what it holds by then
            return
        else:
            self.queue.append(event)
            return
        if len(work.calls) >= len(self.state.trainers):
            work.window_until = now

    def _refusal_of(self, event: ev.Contributed) -> Reason | None:
        if event.trainer not in self.state.trainers:
            return Reason.TRAINER_GONE
        if self.state.draining:
            return Reason.DRAINING
        weight = event.weight
        if type(weight) is not int or not 0 <= weight <= self.state.params.max_weight:
            return Reason.WEIGHT
        work = self.conductor.work
        active = [*self.queue, *(work.calls + work.late + work.syncs if work is not None else [])]
        return Reason.BUSY if any(call.trainer == event.trainer for call in active) else None

    def on_synced(self, event: ev.Synced, now: float) -> None:
        due = self.due.setdefault(event.token, now + event.timeout_s)
        if event.trainer not in self.state.trainers or self.state.draining:
            gone = event.trainer not in self.state.trainers
            self._fail(event, Reason.TRAINER_GONE if gone else Reason.DRAINING)
        elif self.conductor.work is None:
            self.conductor.work = Work(due, now, syncs=[event], phase_at=now)
            self.conductor.catch_up(self.conductor.work, now)
        elif (
            self.conductor.work.syncs
            and not self.conductor.work.calls
            and not self.state.trainers[event.trainer]
        ):
            self.conductor.work.syncs.append(event)
        else:
            self.queue.append(event)

    def on_cancelled(self, token: str, now: float) -> None:
        self.queue = [call for call in self.queue if call.token != token]
        work = self.conductor.work
        if work is None:
            return
        work.syncs = [call for call in work.syncs if call.token != token]
        work.late = [call for call in work.late if call.token != token]
        if work.round is not None:
            return
        if work.attempt is None:
            work.calls = [call for call in work.calls if call.token != token]
            work.weight = float(sum(call.weight for call in work.calls))
        else:
            # Its weight is promised to a leader: the contribution stays, only nobody waits for it.
            work.cancelled[token] = True
        if not work.syncs and all(call.token in work.cancelled for call in work.calls):
            late, work.late = work.late, []
            self.conductor.abandon(Reason.WITHDRAWN, now)
            self.queue = [*late, *self.queue]

    def on_drained(self, now: float, *, preempted: bool) -> None:
        self.state.draining = True
        self._leave(Reason.PREEMPTED if preempted else Reason.DRAINING, now)
        queue, self.queue = self.queue, []
        for call in queue:
            self._fail(call, Reason.DRAINING)
        if self.conductor.work is None:
            self.state.note("drained")

    def next_call(self, now: float) -> None:
        call = self.queue.pop(0)
        if isinstance(call, ev.Synced):
            self.on_synced(call, now)
            return
        work = Work(self.due[call.token], now, [call], phase_at=now, window_until=now)
        self.conductor.work = work
        waiting = [other for other in self.queue if isinstance(other, ev.Contributed)]
        work.calls += waiting
        self.queue = [other for other in self.queue if not isinstance(other, ev.Contributed)]
