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

from dataclasses import dataclass, field, replace

from moshpitd.core.balance import assign_reducers
from moshpitd.core.comparison import Comparison
from moshpitd.core.effects import Close, Effect, Open
from moshpitd.core.events import (
    Averaged,
    Barred,
    LinkLost,
    Listened,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.lingering import Lingering
from moshpitd.core.messages import (
    Again,
    Crcs,
    Group,
    Held,
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
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.quiet import Quiet
from moshpitd.core.standing import Standing
from moshpitd.core.succession import Succession, bandwidths_of
from moshpitd.core.takeover import Takeovers
from moshpitd.core.verdict import Lane, inside_all, verdict


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
    index: int = -1
    listened_at: float | None = None  # when the data plane last said whom it heard
    parity_sent_at: float | None = None
    finished: Outcome | None = None
    lingering: Lingering | None = None
    expired: bool = False
    opened: bool = False
    st: Standing = field(init=False)
    takeovers: Takeovers = field(init=False)
    comparison: Comparison = field(init=False)

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

    @property
    def effects(self) -> list[Effect]:
        return self.st.effects

    # -- what drives it

    def start(self, now: float) -> None:
        st, members = self.st, self.group.members
        if not any(member.weight > 0 for member in members):
            self._fail(Reason.NO_CONTRIBUTORS, "all weights are 0")
            return
        if self.part_sizes and not st.reducers:
            self._fail(Reason.NO_REDUCER, "no member can be dialled")
            return
        own = members[self.index].weight
        opening = Open(self.group, self.index, st.reducers, self.trainers, self.late, own)
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
            for to in st.others():
                st.push(to, tuple(parts_of[to]), result=False)
        for part in mine:
            st.collect(part, others)
        self._settle(now)

    def handle(self, event: object, now: float) -> None:
        """A data-plane event of this group."""
        if self.finished is not None:
            return
        st = self.st
        st.now = now
        match event:
            case PartArrived():
                self._touch(event.sender, now)
                if event.epoch == st.epoch(event.part):
                    st.clear(event.part, event.sender)
            case PartRefused():
                self._on_refused(event)
            case Averaged():
                self._on_averaged(event)
            case ResultArrived():
                self._touch(event.sender, now)
                self._on_result(event)
            case PartFailed():
                self._on_failed(event)
            case Barred():
                self.takeovers.barred(event)
            case Listened():
                self._on_listened(event, now)
            case LinkLost():
                index = st.index_of(event.peer)
                if index is not None:
                    self._exclude(index, event.reason)
            case _:
                pass
        self._settle(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        """A control message of this group; anything from outside the group is ignored."""
        st = self.st
        index = st.index_of(sender)
        if index is None or index == self.index or self.finished is not None:
            return
        if st.lanes[index].gone is not None and not isinstance(message, NotMember):
            return  # it is out, and what it wants done now would be done for nobody
        st.now = now
        self._touch(index, now)
        match message:
            case NotMember():
                self._on_not_member(index, message)
            case Without():
                for part in message.parts or tuple(st.awaiting):
                    st.clear(part, index)
                if not message.parts:
                    self._mute(index, message.reason)
            case NoResult():
                for part in message.parts:
                    if self._reduces(index, part, message.epoch):
                        st.give_up(part, message.reason)
                st.detail(f"{self._cause(message.reason)} at its reducer {sender}")
            case Missing():
                self.takeovers.missing(index, message)
            case TakeOver():
                self.takeovers.asked(index, message)
            case Promise():
                self.takeovers.promised(index, message)
            case Again():
                self.takeovers.again(index, message)
            case Resend():
                self.takeovers.resend(index, message)
            case Parity():
                lane = st.lanes[index]
                lane.parity, lane.parity_without = message.digest, message.without_result
                self.comparison.parity(index)
            case Crcs():
                self.comparison.heard(index, message)
            case _:
                pass
        self._settle(now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """A control message could not be delivered, or the peer said goodbye."""
        index = self.st.index_of(peer_id)
        if index is not None and self.finished is None:
            self.st.now = now
            self._exclude(index, reason)
            self._settle(now)

    def tick(self, now: float) -> None:
        if self.finished is not None:
            return
        self.st.now = now
        self.takeovers.ask_again(now)
        for index in self.takeovers.overdue(now):
            self._exclude(index, Reason.NO_ANSWER)
        for index, lane in enumerate(self.st.lanes):
            if lane.gone is not None or index == self.index:
                continue
            # Written like `deadline`, so that both round alike.
            muted_at = lane.progress_at + self.params.part_timeout_s
            gone_at = lane.progress_at + self.params.result_timeout_s
            if lane.owes_parts and lane.muted is None and now >= muted_at:
                self._mute(index, Reason.SILENT)
            if lane.owes_results and now >= gone_at:
                self._exclude(index, Reason.SILENT)
        if now >= self.deadline_at and self.parity_sent_at is None:
            self._expire()
        self._settle(now)

    def deadline(self) -> float:
        times = self.takeovers.deadlines()
        for index, lane in enumerate(self.st.lanes):
            if lane.gone is not None or index == self.index:
                continue
            if lane.owes_parts and lane.muted is None:
                times.append(lane.progress_at + self.params.part_timeout_s)
            if lane.owes_results:
                times.append(lane.progress_at + self.params.result_timeout_s)
        if self.parity_sent_at is None:
            times.append(self.deadline_at)
        elif self.comparison.until is not None:
            times.append(self.comparison.until)
        else:
            times.append(self._patience())
        return min(times)

    def mean_weight(self) -> float:
        """A member's weight in the next round of a sweep: what was averaged, shared by all who now
        hold it. Keeping own weights is not exact (2x2 grid, x = 1,2,5,9, w = 1,3,1,1: 4.375 and
        3.0625 instead of 3.5)."""
        counted = inside_all(self.group, self.st.contributors(), parts=len(self.part_sizes))
        total = sum(m.weight for i, m in enumerate(self.group.members) if counted >> i & 1)
        return total / len(self.group.members)

    def parts_done(self) -> int:
        return len(self.part_sizes) - self.st.missing

    # -- parts

    def _reduces(self, index: int, part: int, epoch: int) -> bool:
        st = self.st
        return (
            st.is_open(part)
            and st.now_reduces[part] == index != self.index
            and st.epoch(part) == epoch
        )

    def _on_averaged(self, event: Averaged) -> None:
        st = self.st
        if st.closing.get(event.part) != event.epoch:
            return
        del st.closing[event.part]
        if not st.is_open(event.part):
            return
        st.put(_held(event))
        if event.epoch == st.epoch(event.part):
            for to in st.others():
                st.push(to, (event.part,), result=True, epoch=event.epoch)

    def _on_result(self, event: ResultArrived) -> None:
        st = self.st
        if not 0 <= event.part < st.parts() or event.sender == self.index:
            return
        known = st.results.get(event.part)
        if known is not None and known.epoch > event.epoch:
            return
        st.put(_held(event))
        self.takeovers.arrived(event.part)
        self.comparison.arrived(event.part)

    def _on_refused(self, event: PartRefused) -> None:
        """The data plane would not have what a member sent."""
        st = self.st
        if not 0 <= event.sender < len(st.lanes) or event.sender == self.index:
            return
        st.detail(f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value)
        if not event.result:
            st.clear(event.part, event.sender)
            return
        if event.epoch == st.epoch(event.part):
            self.comparison.failed(event.part)
        self.takeovers.failed([event.part], event.sender)
        if self._reduces(event.sender, event.part, event.epoch):
            self.takeovers.leave([event.part], event.reason)

    def _on_failed(self, event: PartFailed) -> None:
        st = self.st
        detail = f" ({event.detail})" if event.detail else ""
        st.detail(f"part {event.part}: {self._cause(event.reason)}{detail}")
        if event.result:
            mine = event.part in st.awaiting and event.epoch == st.epoch(event.part)
            if mine or st.closing.get(event.part) == event.epoch:
                st.closing.pop(event.part, None)
                st.give_up(event.part, event.reason)
                st.tell(NoResult(self.group.group_id, event.reason, event.epoch, (event.part,)))
        elif 0 <= event.part < st.parts():
            # Ours to reduce: then the data plane leaves us out of it by itself.
            st.send(
                st.now_reduces[event.part],
                Without(self.group.group_id, event.reason, (event.part,)),
            )

    # -- members

    def _touch(self, index: int, now: float) -> None:
        if 0 <= index < len(self.st.lanes):
            lane = self.st.lanes[index]
            lane.progress_at = lane.heard_at = now

    def _on_listened(self, event: Listened, now: float) -> None:
        """Judge silence, and only here: a quiet link is one that we listened to and heard nothing
        from, not one that we had no time for."""
        before, self.listened_at = self.listened_at, now
        if before is not None and now - before >= self.params.silence_min_s:
            # Not the others were silent, we were: frozen, or starved of the processor. Whoever gave
            # us up has said so or will; nobody else is to blame for this time.
            self.st.note("woke", slept_s=now - before)
            for lane in self.st.lanes:
                lane.heard_at = lane.progress_at = now
            return
        for index in self.st.heard(event.heard, self.quiet):
            self._exclude(index, Reason.SILENT)

    def _on_not_member(self, index: int, message: NotMember) -> None:
        st = self.st
        named = st.index_of(message.peer_id)
        if named == self.index:
            # It has given us up. Nothing more comes from it, and what the others agree on is made
            # without us: when most say so, our round is stale.
            self._exclude(index, Reason.EXCLUDED)
            out = sum(1 for lane in st.lanes if lane.gone is Reason.EXCLUDED)
            if out > len(st.others()):
                self._fail(Reason.EXCLUDED, "the others went on without us: we were not heard")
        elif named is not None and index in (named, st.index_of(self.group.leader)):
            # Only the peer itself, or the leader that could not reach it, may say so.
            self._exclude(named, Reason.NOT_MEMBER)

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
        if reason in (Reason.SILENT, Reason.NO_ANSWER):
            # It may be frozen; when it wakes it shall know.
            peer_id = self.group.members[index].peer_id
            self.st.send(index, NotMember(self.group.group_id, peer_id))
        lane.gone = reason
        self._mute(index, reason)
        self.takeovers.gone(index)
        self.comparison.gone(index)
        self.takeovers.leave(self.st.open_of(index), reason)

    def _expire(self) -> None:
        """The call's time is up: take what is here, and tell the others what they wait for in vain.

        Nobody is to blame, so nobody is cut off: results that are made now still go to everybody.
        """
        st = self.st
        st.tell(Without(self.group.group_id, Reason.TIMEOUT))
        for index, lane in enumerate(st.lanes):
            if index != self.index and lane.owes_parts:
                self._mute(index, Reason.TIMEOUT)
        for part in range(st.parts()):
            if st.is_open(part) and st.now_reduces[part] != self.index:
                st.give_up(part, Reason.TIMEOUT)
        if self.expired:  # the data plane has had its time too
            parts = tuple(p for p in range(st.parts()) if st.is_open(p))
            st.closing.clear()
            for part in parts:
                st.give_up(part, Reason.TIMEOUT)
            if parts:
                st.tell(NoResult(self.group.group_id, Reason.TIMEOUT, 0, parts))
        self.expired = True
        self.deadline_at += self.params.parity_timeout_s

    # -- the end

    def _settle(self, now: float) -> None:
        st = self.st
        if self.finished is not None or st.missing or st.closing:
            return
        if self.parity_sent_at is None:
            self._say_parity(now)
        comparison = self.comparison
        if comparison.until is None:
            if self.st.unheard() and now < self._patience() and not comparison.votes:
                return
            if not comparison.wanted():
                self._end(now, self._outcome())
                return
            comparison.start(now)
        if comparison.open(now):
            return
        if not comparison.judged:
            for index in comparison.judge(now):
                st.lanes[index].parity = None  # it says Parity again when it has what it lacked
            if comparison.repairs:
                return
        comparison.close()
        if comparison.wanting:
            comparison.wanting = False
            self._say_parity(now)
        if self.st.unheard() and now < (comparison.until or now):
            return
        self._end(now, self._outcome())

    def _say_parity(self, now: float) -> None:
        if self.parity_sent_at is None:
            self.parity_sent_at = now
        self.st.tell(Parity(self.group.group_id, self.st.digest(), len(self.st.without)))

    def _patience(self) -> float:
        """How long the others' last messages are waited for. Longer when a reducer was lost: what
        we hold may be what a slower member needs of us."""
        assert self.parity_sent_at is not None
        more = self.takeovers.happened
        wait = self.params.part_timeout_s if more else self.params.parity_timeout_s
        return self.parity_sent_at + wait

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
        self.finished = Outcome(
            Status.FAILED,
            reason,
            detail,
            accepted=False,
            group_size=len(self.group.members),
            participants=0,
            parts=len(self.part_sizes),
            group_id=self.group.group_id,
        )

    def _end(self, now: float, outcome: Outcome) -> None:
        self.finished = outcome
        if not self.opened:
            return
        lingering = Lingering(self.st, min(now + self.params.result_timeout_s, self.deadline_at))
        if lingering.wanted() and now < lingering.until:
            self.lingering = lingering
        else:
            without = tuple(sorted(self.st.without))
            self.st.effects.append(Close(self.group.group_id, without=without))

    def _cause(self, reason: Reason) -> str:
        """The reason in words that name what is to be looked at."""
        return f"{reason.value}, {self.group.codec}" if reason is Reason.CODEC else reason.value


def _held(event: Averaged | ResultArrived) -> Held:
    mask = 0
    for i in event.contributors:
        mask |= 1 << i
    return Held(event.part, event.epoch, mask, event.crc)
