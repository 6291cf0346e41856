"""One round: butterfly all-reduce over the parts of a bucket, inside one group.

Every part has one reducer. Senders push their contribution to it; when it has those of all senders
that can still come it closes the part, and pushes the average to all members. Whole parts only: a
contribution is in a part or not. A sender that dies or falls silent is left out of the parts it has
not finished; a reducer that does is followed by the next in the part's order (`takeover`). When a
member has all it can get it says so with `Parity`, and the round ends for it when it has heard
everybody's and they hold the same bits (`comparison`).

One rule: the core decides *when* a part is closed; *who* is in it is what the data plane reports
(`Averaged`), because a contribution may land between the two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from moshpitd.core.audit import Audits
from moshpitd.core.balance import assign_reducers
from moshpitd.core.comparison import Comparison
from moshpitd.core.effects import Close, Effect, Open, Send
from moshpitd.core.events import (
    AuditArrived,
    Averaged,
    Barred,
    Checked,
    LinkLost,
    Listened,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.lateness import Lateness, Offer
from moshpitd.core.lingering import Lingering
from moshpitd.core.messages import (
    Again,
    Audit,
    Audited,
    Begin,
    Crcs,
    Group,
    Message,
    Missing,
    NoResult,
    NotMember,
    Parity,
    Promise,
    Resend,
    TakeOver,
    Without,
)
from moshpitd.core.outcome import Outcome, Reason
from moshpitd.core.params import Params
from moshpitd.core.parts import Parts
from moshpitd.core.quiet import Quiet
from moshpitd.core.soundness import norm_limit
from moshpitd.core.standing import Standing
from moshpitd.core.succession import Succession, bandwidths_of
from moshpitd.core.takeover import Takeovers
from moshpitd.core.verdict import Lane, failed, mean_weight, verdict

GIVEN_UP = (Reason.SILENT, Reason.NO_ANSWER)
"""For these a member is out although it may live, and does not know."""


@dataclass(slots=True)
class Round:
    """Invariant: until `finished` is set the round waits for something that has a deadline."""

    params: Params
    group: Group
    me: str
    part_sizes: tuple[int, ...]
    trainers: tuple[tuple[str, int], ...]
    late: tuple[str, ...]
    started: float
    deadline_at: float
    quiet: Quiet
    offer: Offer
    rng: random.Random
    index: int = -1
    listened_at: float | None = None  # when the data plane last said whom it heard
    parity_sent_at: float | None = None
    finished: Outcome | None = None
    lingering: Lingering | None = None
    expired: bool = False
    opened: bool = False
    woke: bool = False
    st: Standing = field(init=False)
    takeovers: Takeovers = field(init=False)
    comparison: Comparison = field(init=False)
    audits: Audits = field(init=False)
    lateness: Lateness = field(init=False)
    parts: Parts = field(init=False)

    def __post_init__(self) -> None:
        members = self.group.members
        self.index = next(i for i, member in enumerate(members) if member.peer_id == self.me)
        reducers = assign_reducers(self.part_sizes, bandwidths_of(members))
        self.st = Standing(
            params=self.params,
            group=self.group,
            index=self.index,
            reducers=reducers,
            succession=Succession(self.group, reducers),
            lanes=[Lane(self.started, self.started) for _ in members],
            missing=len(reducers),
            now=self.started,
            now_reduces=list(reducers),
        )
        self.takeovers = Takeovers(self.st)
        self.comparison = Comparison(self.st)
        self.audits = Audits(self.st, self.rng)
        self.lateness = Lateness(self.st, self.offer, self.quiet, self.started)
        self.parts = Parts(self.st, self.takeovers, self.comparison)

    @property
    def effects(self) -> list[Effect]:
        return self.st.effects

    # -- what drives it

    def start(self, now: float) -> None:
        st, members = self.st, self.group.members
        if self.quiet.listens:
            # Told within a fraction of a second from here on, or we stood still from the start.
            self.listened_at = now
        if not any(member.weight > 0 for member in members):
            self._fail(Reason.NO_CONTRIBUTORS, "all weights are 0")
            return
        if self.part_sizes and not st.reducers:
            self._fail(Reason.NO_REDUCER, "no member can be dialled")
            return
        own = members[self.index].weight
        limit = norm_limit(members, self.params)
        opening = Open(self.group, self.index, st.reducers, self.trainers, self.late, own, limit)
        st.effects.append(opening)
        self.opened = bool(st.reducers)
        others = sum(1 << i for i, m in enumerate(members) if i != self.index and m.weight > 0)
        mine: list[int] = []
        parts_of: list[list[int]] = [[] for _ in members]
        for part, reducer in enumerate(st.reducers):
            parts_of[reducer].append(part)
            if reducer == self.index:
                mine.append(part)
            else:
                st.lanes[reducer].owes_results += 1
        if own > 0:
            offered = self.lateness.offered(parts_of)
            for to in st.others():
                st.push(to, tuple(offered[to]), result=False)
        for part in mine:
            st.collect(part, others)
        self._settle(now)

    def handle(self, event: object, now: float) -> None:
        if self.finished is not None:
            return
        st = self.st
        self._at(now)
        match event:
            case PartArrived():
                self._touch(event.sender, now)
                if event.epoch == st.epoch(event.part):
                    st.clear(event.part, event.sender)
                    self.lateness.arrived(event.sender)
            case PartRefused():
                self.parts.refused(event)
            case Averaged():
                self.parts.averaged(event)
            case ResultArrived():
                self._touch(event.sender, now)
                self.parts.arrived(event)
            case PartFailed():
                self.parts.failed(event)
            case Barred():
                self.takeovers.barred(event)
            case AuditArrived():
                self._touch(event.sender, now)
                self.audits.arrived(event)
            case Checked():
                self.audits.checked(event)
            case Listened():
                self._on_listened(event, now)
            case LinkLost():
                index = st.index_of(event.peer)
                if index is not None:
                    self._exclude(index, event.reason)
        self._settle(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        """A control message of this group; anything from outside the group is ignored."""
        st = self.st
        index = st.index_of(sender)
        if index is None or index == self.index or self.finished is not None:
            return
        self._at(now)
        if st.lanes[index].gone is not None and not isinstance(message, NotMember):
            # It is out, and what it wants done now would be done for nobody. It may not know.
            # Who takes parts over would wait for our promise, though: a link may break for one end.
            waits = isinstance(message, Resend) and st.lanes[index].gone in GIVEN_UP
            if waits or isinstance(message, TakeOver):
                st.effects.append(Send(sender, NotMember(self.group.group_id, sender)))
            return
        self._touch(index, now)
        match message:
            case NotMember():
                self._on_not_member(index, message)
            case Without():
                st.lanes[index].slow |= message.reason is Reason.SLOW
                for part in message.parts or tuple(st.awaiting):
                    st.clear(part, index)
                if not message.parts:
                    self._mute(index, message.reason)
            case NoResult():
                for part in message.parts:
                    if self.parts.reduces(index, part, message.epoch):
                        st.give_up(part, message.reason)
                st.detail(f"{self.st.cause(message.reason)} at its reducer {sender}")
            case Missing():
                self.takeovers.missing(index, message)
            case TakeOver():
                self.takeovers.asked(index, message)
            case Promise():
                self.takeovers.promised(index, message)
            case Again():
                self.takeovers.again(index, self.lateness.withhold(index, message))
            case Resend():
                self.takeovers.resend(index, message)
            case Parity():
                lane = st.lanes[index]
                lane.parity, lane.parity_without = message.digest, message.without_result
                self.lateness.told(index, message.late)
                self.comparison.parity(index)
            case Crcs():
                self.comparison.heard(index, message)
            case Audit():
                self.audits.asked(index, message)
            case Audited():
                self.audits.told_by(index, message)
        self._settle(now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """A control message could not be delivered, or the peer said goodbye."""
        index = self.st.index_of(peer_id)
        if index is not None and self.finished is None:
            self._at(now)
            self._exclude(index, reason)
            self._settle(now)

    def tick(self, now: float) -> None:
        if self.finished is not None:
            return
        self._at(now)
        self.takeovers.ask_again(now)
        for index in self.takeovers.overdue(now):
            self._exclude(index, Reason.NO_ANSWER)
        for index, lane in enumerate(self.st.lanes):
            owes = lane.owes_parts or lane.owes_results
            if not owes or lane.gone is not None or index == self.index:
                continue
            # Written like `deadline`, so that both round alike.
            gone_at = lane.progress_at + self.params.result_timeout_s
            if lane.owes_parts and lane.muted is None and now >= self.lateness.given_up_at(index):
                self._mute(index, self.lateness.give_up(index))
            if lane.owes_results and now >= gone_at:
                self._exclude(index, Reason.SILENT)
        if now >= self.deadline_at and self.parity_sent_at is None:
            self._expire()
        self._settle(now)

    def deadline(self) -> float:
        times = self.takeovers.deadlines()
        for index, lane in enumerate(self.st.lanes):
            owes = lane.owes_parts or lane.owes_results
            if not owes or lane.gone is not None or index == self.index:
                continue
            if lane.owes_parts and lane.muted is None:
                times.append(self.lateness.given_up_at(index))
            if lane.owes_results:
                times.append(lane.progress_at + self.params.result_timeout_s)
        if self.audits.until is not None:
            times.append(self.audits.until)
        elif self.parity_sent_at is None:
            times.append(self.deadline_at)
        elif self.comparison.until is not None:
            times.append(self.comparison.until)
        else:
            times.append(self._patience())
        return min(times)

    def mean_weight(self) -> float:
        return mean_weight(self.group, self.st.contributors(), parts=len(self.part_sizes))

    def parts_done(self) -> int:
        return len(self.part_sizes) - self.st.missing

    # -- members

    def _touch(self, index: int, now: float) -> None:
        if 0 <= index < len(self.st.lanes):
            lane = self.st.lanes[index]
            lane.progress_at = lane.heard_at = now
            lane.spoke = True

    def _at(self, now: float) -> None:
        """The instant of what is handled next. The first after we stood still blames nobody.

        Not the others were silent then, we were: frozen, or starved of the processor. Whoever gave
        us up has said so, or says it when it is asked, which an empty Resend does.
        """
        self.st.now = now
        if self.listened_at is None or now - self.listened_at < self.params.silence_min_s:
            return
        self.st.note("woke", slept_s=now - self.listened_at)
        self.listened_at, self.woke = None, True  # once, until we are told again whom we hear
        for lane in self.st.lanes:
            lane.heard_at = lane.progress_at = now
            lane.unheard = 0
        # Time for the answers, also when the call's own was up while we slept.
        self.deadline_at = max(self.deadline_at, now + self.params.answer_timeout_s)
        self.st.tell(Resend(self.group.group_id, 0, ()))

    def _on_listened(self, event: Listened, now: float) -> None:
        """Judge silence, and only here: a quiet link is one that we listened to and heard nothing
        from, not one that we had no time for."""
        self.listened_at, self.quiet.listens = now, True
        for index in self.st.heard(event.heard, self.quiet):
            self._exclude(index, Reason.SILENT)
        for index in self.lateness.judge(calm=not (self.takeovers.happened or self.woke)):
            self._mute(index, Reason.SLOW)

    def _on_not_member(self, index: int, message: NotMember) -> None:
        st = self.st
        named = st.index_of(message.peer_id)
        if named == self.index:
            # It has given us up. Nothing more comes from it, and what the others agree on is made
            # without us: when most say so, our round is stale.
            self._exclude(index, Reason.EXCLUDED)
        elif named is not None and index in (named, st.index_of(self.group.leader)):
            # Only the peer itself, or the leader that could not reach it, may say so.
            self._exclude(named, Reason.NOT_MEMBER)
        stale = (Reason.EXCLUDED, Reason.NOT_MEMBER) if self.woke else (Reason.EXCLUDED,)
        if sum(1 for lane in st.lanes if lane.gone in stale) > len(st.others()):
            self._fail(Reason.EXCLUDED, "the others went on without us: we were not heard")

    def _mute(self, index: int, reason: Reason) -> None:
        """Give up the member's outstanding contributions."""
        lane = self.st.lanes[index]
        if lane.muted is None:
            lane.muted = reason
            self.st.note(
                "member_excluded", peer=self.group.members[index].peer_id, reason=reason.value
            )
        for part in list(self.st.awaiting):
            self.st.clear(part, index)

    def _exclude(self, index: int, reason: Reason) -> None:
        """The member is out: nothing more comes from it, nothing more goes to it."""
        lane = self.st.lanes[index]
        if index == self.index or lane.gone is not None:
            return
        if reason in GIVEN_UP:
            # It may be frozen; when it wakes it shall know.
            peer_id = self.group.members[index].peer_id
            self.st.send(index, NotMember(self.group.group_id, peer_id))
        lane.gone = reason
        if self.group.members[index].peer_id == self.group.leader:
            # It may not have lived to say Begin to everybody.
            for other in self.st.others():
                if not self.st.lanes[other].spoke:
                    self.st.send(other, Begin(self.group))
        self._mute(index, reason)
        self.takeovers.gone(index, reason)
        self.comparison.gone(index)
        self.audits.gone(index)
        self.takeovers.leave(self.st.open_of(index), reason)

    def _expire(self) -> None:
        """The call's time is up: take what is here, and tell the others what they wait for in vain.

        Nobody is to blame, so nobody is cut off: results that are made now still go to everybody.
        """
        st = self.st
        st.tell(Without(self.group.group_id, Reason.TIMEOUT))
        # Once more: what we took over since would be averaged, and given up before it is.
        for index in st.owing(forget=self.expired):
            self._mute(index, Reason.TIMEOUT)
        for part in range(st.parts()):
            if st.is_open(part) and st.now_reduces[part] != self.index:
                st.give_up(part, Reason.TIMEOUT)
        if self.expired:  # the data plane has had its time too
            st.closing.clear()
            parts = tuple(p for p in range(st.parts()) if st.is_open(p))
            for part in parts:
                st.give_up(part, Reason.TIMEOUT)
                st.tell(NoResult(self.group.group_id, Reason.TIMEOUT, st.epoch(part), (part,)))
        self.expired = True
        self.deadline_at += self.params.parity_timeout_s

    # -- the end

    def _settle(self, now: float) -> None:
        st = self.st
        if self.finished is not None or st.missing or st.closing:
            return
        if self.audits.until is not None:
            self._finish(now)
            return
        if self.parity_sent_at is None:
            self._say_parity(now)
        comparison = self.comparison
        if comparison.until is None:
            if self.st.unheard() and now < self._patience() and not comparison.votes:
                return
            if not comparison.wanted():
                self._finish(now)
                return
            comparison.start(now)
        if comparison.open(now):
            return
        if not comparison.judged:
            last = self.deadline_at + (2 - self.expired) * self.params.parity_timeout_s
            for index in comparison.judge(now, last):
                st.lanes[index].parity = None  # it says Parity again when it has what it lacked
            if comparison.repairs:
                return
        comparison.close()
        if comparison.wanting:
            comparison.wanting = False
            self._say_parity(now)
        if self.st.unheard() and now < (comparison.until or now):
            return
        self._finish(now)

    def _finish(self, now: float) -> None:
        """Nothing more comes or changes, unless some of it is checked."""
        if self.group.audit_fraction > 0:
            if self.audits.until is None:
                self.audits.start(now)
            if not self.audits.over(now):
                return
        self._end(now, self._outcome())

    def _say_parity(self, now: float) -> None:
        if self.parity_sent_at is None:
            self.parity_sent_at = now
        self.comparison.say()

    def _patience(self) -> float:
        """How long the others' last messages are waited for. Longer when a reducer was lost: what
        we hold may be what a slower member needs of us."""
        assert self.parity_sent_at is not None
        wait = self.lateness.patience_s(self.parity_sent_at - self.started)
        if self.takeovers.happened:
            wait = self.params.part_timeout_s
        # Never for long after the call's end; its trainer waits for this.
        last = max(self.deadline_at, self.parity_sent_at + self.params.parity_timeout_s)
        return min(self.parity_sent_at + wait, last)

    def _outcome(self) -> Outcome:
        st = self.st
        return replace(
            verdict(
                self.group,
                index=self.index,
                reducers=st.now_reduces,
                lanes=st.lanes,
                contributors=st.contributors(),
                without=st.without,
                details=st.details,
            ),
            agreed=tuple(
                member.peer_id
                for i, member in enumerate(self.group.members)
                if i == self.index or self.comparison.agrees(i)
            ),
        )

    def _fail(self, reason: Reason, detail: str) -> None:
        """Nothing of this round is used."""
        if self.opened:
            self.st.tell(NotMember(self.group.group_id, self.me))
            self.st.effects.append(Close(self.group.group_id, kept=False))
        self.finished = failed(self.group, reason, detail, parts=len(self.part_sizes))

    def _end(self, now: float, outcome: Outcome) -> None:
        self.finished = outcome
        if not self.opened:
            return
        until = self.lateness.linger_until(now, self.deadline_at)
        self.lateness.learn(until=until)
        lingering = Lingering(self.st, until)
        if lingering.begins(now):
            self.lingering = lingering
        else:
            without = tuple(sorted(self.st.without))
            self.st.effects.append(Close(self.group.group_id, without=without))
