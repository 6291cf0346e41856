"""One call of a trainer carried from its first step to its outcome: catch up if needed, then as
many rounds as were asked for, each of them matchmaking (`Attempt`) and exchange (`Round`).

One rule: exactly one machine runs at a time, and whatever it ends with leads to the next one or to
an Outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moshpitd.core import events as ev
from moshpitd.core.catchup import CatchUp, adopted
from moshpitd.core.chain import Chain
from moshpitd.core.effects import Finish, LoadSnapshot, RefreshSnapshot, Send
from moshpitd.core.ending import after_others, badness, goes_on, seen_by
from moshpitd.core.exchanges import Exchange, exchange_of, is_question
from moshpitd.core.lingering import Lingering
from moshpitd.core.matchmaking import Attempt
from moshpitd.core.meeting import Meeting
from moshpitd.core.messages import Group, Message, NotMember
from moshpitd.core.neighbours import Neighbours, Verdicts
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.state import State
from moshpitd.core.swarm import same_lineage

CATCH_UPS = 3
"""Catch-ups within one call: lineages that keep overtaking each other must not keep a trainer
waiting for ever."""


EARLY_KEPT = 64
"""Of the messages that wait for their group, as many stay over the beginning of another one that
follows without matchmaking: half of what there is room for, so that old ones do not keep out new.
"""

LINGERING = 4
"""Ended rounds whose results are kept for slower members; each holds up to a bucket of payloads."""


@dataclass(slots=True)
class Work:
    """One call on its way. Invariant: exactly one of catch_up, attempt, round is set, or the local
    window is open."""

    deadline_at: float
    started: float
    calls: list[ev.Contributed] = field(default_factory=list)
    late: list[ev.Contributed] = field(default_factory=list)
    syncs: list[ev.Synced] = field(default_factory=list)
    window_until: float | None = None
    catch_up: CatchUp | None = None
    attempt: Attempt | None = None
    round: Exchange | None = None
    rounds_left: int = 0  # 0 until the first attempt knows the grid
    rounds_done: int = 0
    weight: float = 0.0
    catch_ups: int = 0
    loaded: bool = False
    newcomer: bool = False
    phase_at: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    worst: Outcome | None = None
    told_again: dict[str, bool] = field(default_factory=dict)  # whose Begin was not delivered once
    skipped: bool = False  # this round was tried for a second time
    accepted: int = 0  # rounds whose result is in the bucket
    good: Outcome | None = None  # of the last of them
    version_before: int = 0
    cancelled: dict[str, bool] = field(default_factory=dict)

    @property
    def takers(self) -> list[ev.Contributed]:
        """Whoever is told the outcome and takes the result, on top of its values if it was late."""
        return self.calls + self.late


class Conductor:
    """Carries out the one call that runs. Invariant: `work` is None or has exactly one machine or
    an open local window."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.meeting = Meeting(state)
        self.work: Work | None = None
        self.lingering: list[Lingering] = []
        self.verdicts = Verdicts()
        self.chain = Chain(state)

    def tick(self, now: float) -> None:
        """Let go of the results that slower members were still reading."""
        if not self.lingering:
            return
        for ended in list(self.lingering):
            ended.tick(now)
            if ended.over:
                self.lingering.remove(ended)
            self.state.collect(ended.effects)

    def deadline(self) -> float | None:
        work = self.work
        if work is None and not self.lingering:
            return None
        times = [ended.until for ended in self.lingering]
        if work is None:
            return min(times)
        if work.window_until is not None:
            times.append(work.window_until)
        for machine in (work.catch_up, work.attempt, work.round):
            if machine is not None:
                times.append(machine.deadline())
        return min(times) if times else None

    def abandon(self, reason: Reason, now: float) -> None:
        """End what has not come to an exchange yet."""
        work = self.work
        if work is None or work.round is not None:
            return
        for machine in (work.attempt, work.catch_up):
            if machine is not None:
                machine.abandon(reason)
                self.state.collect(machine.effects)
        self.finish(Outcome(Status.FAILED, reason, accepted=False), now)

    def step(self, work: Work, now: float) -> bool:
        """Carry the work one step on; False when it waits."""
        if work.window_until is not None:
            if now < work.window_until:
                return False
            work.window_until = None
            self.start(work, now)
            return True
        if work.catch_up is not None:
            work.catch_up.tick(now)
            self.state.collect(work.catch_up.effects)
            if not work.catch_up.over:
                return False
            self._caught_up(work, work.catch_up, now)
            return True
        if work.attempt is not None:
            work.attempt.unsettled = self.meeting.unsettled()
            work.attempt.tick(now)
            self.state.collect(work.attempt.effects)
            may_catch_up = work.attempt.group is None and work.catch_ups < CATCH_UPS
            if may_catch_up and self.state.behind(now):
                work.attempt.abandon(Reason.LINEAGE)  # if it has not ended by itself
                self.state.collect(work.attempt.effects)
                self._end_phase(work, "matchmaking", now)
                work.attempt = None
                self.catch_up(work, now)
                return True
            if not work.attempt.over:
                return False
            self._attempted(work, work.attempt, now)
            return True
        if work.round is not None:
            work.round.tick(now)
            self.state.collect(work.round.effects)
            if work.round.finished is None:
                return False
            self._rounded(work, work.round, work.round.finished, now)
            return True
        return False

    def start(self, work: Work, now: float) -> None:
        stale = any(self.state.trainers.get(call.trainer) for call in work.calls)
        # A trainer that has yet to load our state holds another start and adds nothing.
        work.calls = [
            replace(c, weight=0) if self.state.trainers.get(c.trainer) else c for c in work.calls
        ]
        work.weight = float(sum(call.weight for call in work.calls))
        # Of several trainers the largest: a mean has no larger norm than that.
        self.state.norm = max((call.norm for call in work.calls), default=0.0)
        work.version_before = self.state.version
        if not self.state.caught_up or stale or self.state.behind(now):
            self.catch_up(work, now)
        else:
            self.attempt(work, now)

    def catch_up(self, work: Work, now: float) -> None:
        work.catch_ups += 1
        work.phase_at = now
        trainers = tuple(self.state.trainers)
        work.catch_up = catch_up = CatchUp(
            params=self.state.params,
            me=self.state.record,
            swarm=self.state.swarm,
            rng=self.state.rng,
            part_count=len(self.state.part_sizes),
            trainers=trainers,
            deadline_at=work.deadline_at,
            fresh=not self.state.caught_up,
        )
        known = self.state.presence.fresh(now)
        if not known:
            self.state.presence.look_up(now)
        catch_up.start(now, known=known)
        self.state.collect(catch_up.effects)

    def _caught_up(self, work: Work, catch_up: CatchUp, now: float) -> None:
        work.catch_up = None
        self._end_phase(work, "catch_up", now)
        winner = self.state.swarm.winning_lineage(
            self.state.lineage, self.state.version, self.state.record.schema
        )
        if catch_up.loaded and catch_up.offer is not None:
            offer = catch_up.offer
            if not same_lineage(offer.lineage, self.state.lineage):
                self.state.note("lineage_adopted", offer.lineage.founder)
            self.state.presence.update(
                version=offer.version,
                lineage=adopted(self.state.record, offer.lineage),
                has_snapshot=bool(self.state.trainers),
            )
            self.state.donor.holds(offer.version, (catch_up.donor,), offer.digest)
            self.state.newcomer = work.loaded = True
            # It lies over what earlier rounds of this call came to: none of them is spoken for.
            work.accepted, work.good, work.worst = 0, None, None
            self.state.had_company = True
            work.version_before = offer.version
            for trainer in self.state.trainers:
                self.state.trainers[trainer] = False
            # What the buckets hold now is the donor's; it must not count a second time.
            work.calls = [replace(call, weight=0) for call in work.calls]
            work.weight = 0.0
            self.state.tell_everybody()
        elif same_lineage(winner, self.state.lineage) and winner != self.state.lineage:
            # The same bits under a lower founder: everybody goes on to take us for one of theirs.
            self.state.presence.update(lineage=adopted(self.state.record, winner))
        self.state.caught_up = catch_up.failed is None
        stale = [trainer for trainer, is_stale in self.state.trainers.items() if is_stale]
        if stale and self.state.caught_up and self.state.donor.version is not None:
            self.state.effects.append(LoadSnapshot(b"", self.state.donor.version, tuple(stale)))
            # What they hold now is the donor copy, which may be older than our last round.
            self.state.presence.update(version=self.state.donor.version)
            work.version_before = self.state.version
            for trainer in stale:
                self.state.trainers[trainer] = False
            work.loaded = True
        if catch_up.failed is not None:
            outcome = Outcome(Status.FAILED, catch_up.failed, catch_up.sentence(), accepted=False)
            self.finish(outcome, now)
        elif not work.calls:
            self.finish(
                Outcome(Status.COMPLETE, accepted=work.loaded, participants=0, group_size=1), now
            )
        else:
            self.attempt(work, now)

    def attempt(self, work: Work, now: float) -> None:
        work.phase_at = now
        if self._follow(work, now):
            return
        self.state.sweeping = work.rounds_done > 0
        self.state.sweeps = not all(call.rounds for call in work.calls)
        reduces = bool(self.state.part_sizes) and not any(call.mix for call in work.calls)
        attempt = self.meeting.attempt(
            work.weight, reduces=reduces, deadline_at=work.deadline_at, now=now
        )
        if not work.rounds_left:
            asked = [call.rounds for call in work.calls]
            work.rounds_left = max(asked) if all(asked) else len(self.state.place.shape.sides)
        work.attempt = attempt

    def _follow(self, work: Work, now: float) -> bool:
        """Begin with the group that follows the last one, if we may: nobody has to be asked."""
        if self.chain.next is None:
            return False
        self.meeting.arrange(now)
        group = self.chain.take(work.calls, now) if not work.late else None
        if group is None:
            self.chain.doubt()
            return False
        self.state.note("attempt_started", key=group.key, round=group.round)
        work.rounds_left = 1
        self._end_phase(work, "matchmaking", now)
        self._begin(work, group, now)
        return True

    def _attempted(self, work: Work, attempt: Attempt, now: float) -> None:
        """Matchmaking is over: a group, or nobody."""
        work.attempt = None
        self._end_phase(work, "matchmaking", now)
        # A call that ended before its window says nothing about whom it would have waited for.
        first = not work.rounds_done and not work.skipped
        self.meeting.ended(attempt, now, in_time=now < work.deadline_at, first=first)
        group = attempt.group
        if group is None:
            early, self.state.early = self.state.early, []
            for sender, message in early:
                self._not_ours(sender, message)
            reason, said = attempt.ended or Reason.NO_PEERS, self.meeting.sentence(attempt)
            heard = len(attempt.candidates)
            self.state.note("attempt_ended", reason=reason, detail=said, heard=heard)
            # Where each comes when it is ready, another one may be about to come to this line.
            waits = attempt.own_pace and reason is Reason.NO_PEERS
            again = (self.meeting.moved_on(attempt) or waits) and not work.skipped
            if again and now < work.deadline_at:
                work.skipped = True
                self.attempt(work, now)
                return
            single = work.rounds_left == 1 and not work.rounds_done  # a sweep goes on regardless
            self.state.place.alone(early=single and attempt.candidates.still_to_come())
            failed: Reason | None = Reason.TIMEOUT if now >= work.deadline_at else None
            if reason is Reason.WEIGHT:
                failed = Reason.WEIGHT
            outcome = Outcome(
                Status.FAILED if failed else Status.ALONE,
                failed or Reason.NO_PEERS,
                said,
                accepted=failed is None,
                contributors=(self.state.peer_id,),
                total_weight=work.weight,
                parts=len(self.state.part_sizes),
            )
            self.meeting.scale.thin(1, attempt.expected, now)
            self.state.presence.hurry(now)  # what we know of the others may be old
            self.meeting.began(now)
            self._after_round(work, outcome, now)
            return
        self._begin(work, group, now, attempt)

    def _begin(self, work: Work, group: Group, now: float, attempt: Attempt | None = None) -> None:
        """The exchange of a group, found by `attempt` or following the last one."""
        for member in group.members:
            entry = self.state.swarm.heard.get(member.peer_id)
            if entry is not None:
                entry.missed = 0
        self.state.invites.clear()
        self.state.had_company = True
        current = exchange_of(
            self.state,
            group,
            calls=work.calls,
            late=work.late,
            deadline_at=work.deadline_at,
            now=now,
            follows=attempt is None,
        )
        work.round, work.phase_at = current, now
        work.told_again.clear()
        current.start(now)
        if attempt is not None and attempt.relayed:
            current.lost(group.leader, Reason.LINK_LOST, now)
        self.state.place.finished(group, current.index)
        early, self.state.early = self.state.early, []
        for sender, message in early:
            if getattr(message, "group_id", b"") == group.group_id:
                current.receive(sender, message, now)
            elif attempt is None and len(self.state.early) < EARLY_KEPT:
                self.state.early.append((sender, message))  # who rested is rounds ahead of us
            else:
                self._not_ours(sender, message)
        self.state.note(
            "group_formed",
            group=group.group_id.hex(),
            size=len(group.members),
            leader=group.leader,
            index=current.index,
            members=[member.peer_id for member in group.members],
        )
        self.state.collect(current.effects)
        if attempt is not None:
            self.chain.began(now)
            self.meeting.scale.thin(len(group.members), attempt.expected, now)
        self.state.sweeping = work.rounds_left > 1
        self.meeting.began(now)

    def _not_ours(self, sender: str, message: Message) -> None:
        """It came before a Begin that never came. Whoever waits for an answer shall know."""
        if is_question(message):
            no = NotMember(message.group_id, self.state.peer_id)
            self.state.effects.append(Send(sender, no))

    def _rounded(self, work: Work, current: Exchange, outcome: Outcome, now: float) -> None:
        """An exchange is over."""
        work.round = None
        if isinstance(current, Neighbours):
            # Messages are of their round only: no version counts them and no newcomer wants them.
            self.verdicts.remember(current)
            self.chain.ended(current, outcome, now)
            for peer_id, reason in outcome.excluded:
                if reason is Reason.NOT_READY:  # waited for as long as a leader waits
                    self.meeting.missed(peer_id, now)
            self._end_phase(work, "exchange", now)
            work.rounds_done += 1
            self._after_round(work, outcome, now)
            return
        if current.lingering is not None:
            self.lingering.append(current.lingering)
            for oldest in self.lingering[:-LINGERING]:
                oldest.until = now
            self.tick(now)
        parity_at = current.parity_sent_at if current.parity_sent_at is not None else now
        self._end_phase(work, "exchange", parity_at)
        work.seconds["parity"] = work.seconds.get("parity", 0.0) + max(0.0, now - parity_at)
        group = current.group
        for index in current.audits.strikes:
            self.state.strike(group.members[index].peer_id, Reason.AUDIT, now)
        if outcome.accepted:
            work.accepted, work.good = work.accepted + 1, outcome
            version = 1 + max(member.version for member in group.members)
            self.state.swarm.advanced([member.peer_id for member in group.members], version)
            if any(call.trainer in self.state.trainers for call in work.takers):
                self.state.presence.update(version=version)  # else nobody here holds it
            self.state.newcomer = False
            self.state.donor.witnesses = tuple(outcome.contributors)
            work.weight = current.mean_weight()
        elif work.accepted and current.st.left_traces():
            # The bucket holds some of a round that is not used, over what was averaged before.
            work.accepted = 0
            self.state.presence.update(version=work.version_before)
        work.rounds_done += 1
        self._after_round(work, outcome, now)

    def _after_round(self, work: Work, outcome: Outcome, now: float) -> None:
        work.rounds_left -= 1
        work.skipped = False
        if work.worst is None or badness(outcome) >= badness(work.worst):
            work.worst = outcome
        go_on = goes_on(outcome) and work.rounds_left > 0 and now < work.deadline_at
        if go_on and not self.state.draining and self.state.trainers:
            self.attempt(work, now)
            return
        if (
            outcome.status is Status.ALONE
            and not any(call.mix for call in work.calls)
            and not self.state.had_company
            and not self.state.swarm.living(self.state.record.schema)
        ):
            # A run of one peer: its own rounds are all the averages there are, so they count. Who
            # arrives later finds the higher version and loads it, instead of the lower PeerID
            # winning with a fresh start.
            self.state.presence.update(version=self.state.version + 1)
            self._refresh(work, work.worst)
        elif work.accepted and not work.worst.parts_without_result:
            self._refresh(work, work.worst)
        self.finish(work.worst, now)

    def _refresh(self, work: Work, outcome: Outcome) -> None:
        """The donor copy follows the result, from a bucket whose trainer lives and holds it."""
        for call in work.calls:
            if call.trainer in self.state.trainers and seen_by(call, outcome).accepted:
                self.state.effects.append(RefreshSnapshot(self.state.version, call.trainer))
                # In order: what is asked of the copy next meets the new one.
                self.state.donor.holds(self.state.version, self.state.donor.witnesses)
                return

    def finish(self, outcome: Outcome, now: float) -> None:
        work = self.work
        if work is None:
            return
        self.work = None
        if outcome.status is Status.FAILED and work.accepted and work.good is not None:
            outcome = after_others(outcome, work.good)
        outcome = replace(
            outcome,
            rounds=work.rounds_done,
            # Loaded values have to reach the trainer in any case.
            accepted=outcome.accepted or work.loaded,
            loaded_snapshot=work.loaded,
            seconds=tuple(work.seconds.items()),
        )
        if work.loaded and outcome.status is Status.FAILED and self.state.donor.version is not None:
            # The round that failed may have put some results over what was loaded.
            trainers = tuple(call.trainer for call in work.calls)
            self.state.effects.append(LoadSnapshot(b"", self.state.donor.version, trainers))
        took = {call.trainer: seen_by(call, outcome).accepted for call in work.takers}
        if work.accepted and not any(took.values()):
            # Nobody takes it, so nobody here holds that average.
            self.state.presence.update(version=work.version_before)
        elif work.accepted:
            left = [it for it in self.state.trainers if not took.get(it, True)]
            self.state.trainers |= dict.fromkeys(left, True)  # other values than their node's now
        outcome = replace(outcome, version=self.state.version)
        if work.calls:
            self.state.note(
                "round_ended",
                reason=outcome.reason or "",
                detail=outcome.detail,
                outcome=outcome.status.value,
                group=outcome.group_id.hex(),
                group_size=outcome.group_size,
                participants=outcome.participants,
                parts=outcome.parts if outcome.group_id else 0,
                without_result=len(outcome.parts_without_result),
                version=self.state.version,
                seconds=dict(outcome.seconds),
                took=now - work.started,
            )
        for call in work.takers:
            self.state.effects.append(Finish(call.token, call.trainer, seen_by(call, outcome)))
        for sync in work.syncs:
            self.state.effects.append(Finish(sync.token, sync.trainer, outcome))
        if self.state.draining:
            self.state.note("drained")

    def _end_phase(self, work: Work, phase: str, now: float) -> None:
        work.seconds[phase] = work.seconds.get(phase, 0.0) + max(0.0, now - work.phase_at)
        work.phase_at = now
