"""One round: butterfly all-reduce over the parts of a bucket, inside one group.

Every part has one reducer. Senders push their contribution to it; when it has those of all senders
that can still come it closes the part, and pushes the average to all members. Whole parts only: a
contribution is in a part or not. A sender that dies or falls silent is left out of the parts it has
not finished; a reducer that does leaves its parts without a result, and those keep local values.
When a member has all it can get it says so with `Parity`, and the round ends for it when it has
heard everybody's.

One rule: the core decides *when* a part is closed; *who* is in it is what the data plane reports
(`Averaged`), because a contribution may land between the two.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from moshpitd.core.balance import assign_reducers
from moshpitd.core.effects import Average, Close, Effect, Note, Open, Push, Send
from moshpitd.core.events import (
    Averaged,
    LinkLost,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.messages import Group, Message, NoResult, NotMember, Parity, Without
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.verdict import Lane, bits_of, inside_all, verdict


@dataclass(slots=True)
class Round:
    """Invariant: every part is open, or has a result, or is without one for a stated reason; the
    counters in `lanes` equal the open bits in `awaiting` and the missing results."""

    params: Params
    group: Group
    me: str
    part_sizes: tuple[int, ...]
    trainers: tuple[tuple[str, int], ...]
    late: tuple[str, ...]
    started: float
    deadline_at: float
    index: int = -1
    reducers: tuple[int, ...] = ()
    lanes: list[Lane] = field(default_factory=list)
    awaiting: dict[int, int] = field(
        default_factory=dict
    )  # my open parts -> bitmask of senders still expected
    closing: dict[int, bool] = field(default_factory=dict)  # my parts handed to the data plane
    contributors: dict[int, int] = field(default_factory=dict)  # parts with a result -> bitmask
    crcs: dict[int, int] = field(default_factory=dict)
    without: dict[int, Reason] = field(default_factory=dict)
    missing: int = 0  # parts that are neither in `contributors` nor in `without`
    details: list[str] = field(default_factory=list)
    parity_sent_at: float | None = None
    finished: Outcome | None = None
    linger_until: float | None = None
    expired: bool = False
    effects: list[Effect] = field(default_factory=list)

    # -- what drives it

    def start(self, now: float) -> None:
        members = self.group.members
        self.index = next(i for i, member in enumerate(members) if member.peer_id == self.me)
        self.lanes = [Lane(now) for _ in members]
        self.missing = len(self.part_sizes)
        if not any(member.weight > 0 for member in members):
            self._end(
                now,
                Outcome(Status.FAILED, Reason.NO_CONTRIBUTORS, "all weights are 0", accepted=False),
            )
            return
        rates = [min(m.up_mbps, m.down_mbps) if m.addresses else 0.0 for m in members]
        self.reducers = assign_reducers(self.part_sizes, rates)
        if not self.reducers and self.part_sizes:
            self._end(
                now,
                Outcome(
                    Status.FAILED, Reason.NO_REDUCER, "no member can be dialled", accepted=False
                ),
            )
            return
        self.effects.append(
            Open(
                self.group,
                self.index,
                self.reducers,
                self.trainers,
                self.late,
                members[self.index].weight,
            )
        )
        others = sum(1 << i for i, m in enumerate(members) if i != self.index and m.weight > 0)
        for part, reducer in enumerate(self.reducers):
            if reducer == self.index:
                self.awaiting[part] = others
            else:
                self.lanes[reducer].owes_results += 1
        for i in bits_of(others):
            self.lanes[i].owes_parts = len(self.awaiting)
        if members[self.index].weight > 0:
            for step in range(1, len(members)):
                # Everybody starts with its right-hand neighbour, so no reducer is flooded by all at
                # once.
                to = (self.index + step) % len(members)
                parts = tuple(part for part, reducer in enumerate(self.reducers) if reducer == to)
                if parts:
                    self.effects.append(Push(self.group.group_id, to, parts, result=False))
        if not others:
            for part in list(self.awaiting):
                self._average(part)
        self._settle(now)

    def handle(self, event: object, now: float) -> None:
        """A data-plane event of this group."""
        if self.finished is not None:
            return
        match event:
            case PartArrived():
                self._touch(event.sender, now)
                self._clear(event.part, event.sender)
            case PartRefused():
                self._on_refused(event)
            case Averaged():
                self._on_averaged(event, now)
            case ResultArrived():
                self._touch(event.sender, now)
                if self._open_result(event.part, event.sender):
                    self.lanes[event.sender].owes_results -= 1
                    self._result(event.part, event.contributors, event.crc)
                elif event.part in self.without and self.reducers[event.part] == event.sender:
                    # Its reducer was given up while the result was on its way. It is in the bucket
                    # now, so it counts: what is reported and what is held must not differ.
                    del self.without[event.part]
                    self.missing += 1
                    self._result(event.part, event.contributors, event.crc)
            case PartFailed():
                self._on_failed(event)
            case LinkLost():
                index = self._index_of(event.peer)
                if index is not None:
                    self._exclude(index, event.reason)
            case _:
                pass
        self._settle(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        """A control message of this group; anything from outside the group is ignored."""
        index = self._index_of(sender)
        if index is None or self.finished is not None:
            return
        self._touch(index, now)
        match message:
            case NotMember():
                named = self._index_of(message.peer_id)
                # Only the peer itself, or the leader that could not reach it, may say so.
                if (
                    named is not None
                    and named != self.index
                    and sender in (message.peer_id, self.group.leader)
                ):
                    self._exclude(named, Reason.NOT_MEMBER)
            case Without():
                for part in message.parts or tuple(self.awaiting):
                    self._clear(part, index)
                if not message.parts:
                    self._mute(index, message.reason)
            case NoResult():
                for part in message.parts:
                    if self._open_result(part, index):
                        self.lanes[index].owes_results -= 1
                        self._no_result(part, message.reason)
                self._detail(f"{self._cause(message.reason)} at its reducer {sender}")
            case Parity():
                lane = self.lanes[index]
                lane.parity, lane.parity_without = message.digest, message.without_result
            case _:
                pass
        self._settle(now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """A control message could not be delivered, or the peer said goodbye."""
        index = self._index_of(peer_id)
        if index is not None and self.finished is None:
            self._exclude(index, reason)
            self._settle(now)

    def tick(self, now: float) -> None:
        if self.finished is not None:
            return
        for index, lane in enumerate(self.lanes):
            if lane.gone is not None:
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

    def _expire(self) -> None:
        """The call's time is up: take what is here, and tell the others what they wait for in vain.

        Nobody is to blame, so nobody is cut off: results that are made now still go to everybody.
        """
        self._tell(Without(self.group.group_id, Reason.TIMEOUT))
        for index, lane in enumerate(self.lanes):
            if index != self.index and lane.owes_parts:
                self._mute(index, Reason.TIMEOUT)
            if lane.owes_results:
                self._give_up_results(index, Reason.TIMEOUT)
        if self.expired:  # the data plane has had its time too
            parts = tuple(self.closing)
            for part in parts:
                del self.closing[part]
                self._no_result(part, Reason.TIMEOUT)
            if parts:
                self._tell(NoResult(self.group.group_id, Reason.TIMEOUT, 0, parts))
        self.expired = True
        self.deadline_at += self.params.parity_timeout_s

    def deadline(self) -> float:
        if self.parity_sent_at is not None:
            return self.parity_sent_at + self.params.parity_timeout_s
        times = [self.deadline_at]
        for lane in self.lanes:
            if lane.gone is None and lane.owes_parts and lane.muted is None:
                times.append(lane.progress_at + self.params.part_timeout_s)
            if lane.gone is None and lane.owes_results:
                times.append(lane.progress_at + self.params.result_timeout_s)
        return min(times)

    def mean_weight(self) -> float:
        """A member's weight in the next round of a sweep: what was averaged, shared by all who now
        hold it. Keeping own weights is not exact (2x2 grid, x = 1,2,5,9, w = 1,3,1,1: 4.375 and
        3.0625 instead of 3.5)."""
        counted = inside_all(self.group, self.contributors, parts=len(self.part_sizes))
        total = sum(m.weight for i, m in enumerate(self.group.members) if counted >> i & 1)
        return total / len(self.group.members)

    def parts_done(self) -> int:
        return len(self.part_sizes) - self.missing

    # -- parts

    def _clear(self, part: int, sender: int) -> None:
        """`sender` is in the part, or will not be: stop waiting for it there."""
        bits = self.awaiting.get(part)
        if bits is None or not bits >> sender & 1:
            return
        bits &= ~(1 << sender)
        self.awaiting[part] = bits
        self.lanes[sender].owes_parts -= 1
        if not bits:
            self._average(part)

    def _average(self, part: int) -> None:
        if part in self.awaiting:
            del self.awaiting[part]
            self.closing[part] = True
            self.effects.append(Average(self.group.group_id, part))

    def _on_averaged(self, event: Averaged, now: float) -> None:
        if event.part not in self.closing:
            return
        del self.closing[event.part]
        self._result(event.part, event.contributors, event.crc)
        for step in range(1, len(self.lanes)):
            to = (self.index + step) % len(self.lanes)
            if self.lanes[to].gone is None:
                self.effects.append(Push(self.group.group_id, to, (event.part,), result=True))

    def _on_refused(self, event: PartRefused) -> None:
        if not 0 <= event.sender < len(self.lanes) or event.sender == self.index:
            return
        if event.result:
            if self._open_result(event.part, event.sender):
                self.lanes[event.sender].owes_results -= 1
                self._no_result(event.part, event.reason)
        else:
            self._clear(event.part, event.sender)
        self._detail(
            f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value
        )

    def _on_failed(self, event: PartFailed) -> None:
        detail = f" ({event.detail})" if event.detail else ""
        self._detail(f"part {event.part}: {self._cause(event.reason)}{detail}")
        if event.result:
            if event.part in self.closing:
                del self.closing[event.part]
                self._no_result(event.part, event.reason)
                self._tell(NoResult(self.group.group_id, event.reason, 0, (event.part,)))
        elif 0 <= event.part < len(self.reducers) and self.reducers[event.part] != self.index:
            to = self.group.members[self.reducers[event.part]].peer_id
            self.effects.append(Send(to, Without(self.group.group_id, event.reason, (event.part,))))

    def _open_result(self, part: int, sender: int) -> bool:
        return (
            0 <= part < len(self.reducers)
            and self.reducers[part] == sender != self.index
            and part not in self.contributors
            and part not in self.without
        )

    def _result(self, part: int, contributors: tuple[int, ...], crc: int) -> None:
        mask = 0
        for i in contributors:
            mask |= 1 << i
        self.contributors[part], self.crcs[part] = mask, crc
        self.missing -= 1

    def _no_result(self, part: int, reason: Reason) -> None:
        if part not in self.without and part not in self.contributors:
            self.without[part] = reason
            self.missing -= 1
            self._note("part_without_result", reason=reason.value, part=part)

    # -- members

    def _touch(self, index: int, now: float) -> None:
        if 0 <= index < len(self.lanes):
            self.lanes[index].progress_at = now

    def _mute(self, index: int, reason: Reason) -> None:
        """Give up the member's outstanding contributions."""
        lane = self.lanes[index]
        if lane.muted is None:
            lane.muted = reason
            self._note(
                "member_excluded", peer=self.group.members[index].peer_id, reason=reason.value
            )
        for part in list(self.awaiting):
            self._clear(part, index)

    def _exclude(self, index: int, reason: Reason) -> None:
        """The member is out: nothing more comes from it, nothing more goes to it."""
        lane = self.lanes[index]
        if index == self.index or lane.gone is not None:
            return
        lane.gone = reason
        self._mute(index, reason)
        self._give_up_results(index, reason)

    def _give_up_results(self, index: int, reason: Reason) -> None:
        if self.lanes[index].owes_results:
            for part, reducer in enumerate(self.reducers):
                if reducer == index and self._open_result(part, index):
                    self._no_result(part, reason)
            self.lanes[index].owes_results = 0

    def _index_of(self, peer_id: str) -> int | None:
        for i, member in enumerate(self.group.members):
            if member.peer_id == peer_id:
                return i
        return None

    # -- the end

    def _settle(self, now: float) -> None:
        if self.finished is not None or self.missing or self.closing:
            return
        if self.parity_sent_at is None:
            self.parity_sent_at = now
            self._tell(Parity(self.group.group_id, self._digest(), len(self.without)))
        if self._unheard() and now < self.parity_sent_at + self.params.parity_timeout_s:
            return
        self._end(now, self._outcome())

    def _outcome(self) -> Outcome:
        whole = not self.without
        for i, lane in enumerate(self.lanes):
            compared = whole and i != self.index and not lane.parity_without
            if compared and lane.parity not in (None, self._digest()):
                self._note("parity_differs", peer=self.group.members[i].peer_id)
        return verdict(
            self.group,
            index=self.index,
            reducers=self.reducers,
            lanes=self.lanes,
            contributors=self.contributors,
            without=self.without,
            details=self.details,
        )

    def _end(self, now: float, outcome: Outcome) -> None:
        if self.reducers and not self._linger(now):
            self.effects.append(Close(self.group.group_id))
        if not outcome.group_id:
            outcome = Outcome(
                outcome.status,
                outcome.reason,
                outcome.detail,
                accepted=outcome.accepted,
                group_size=len(self.group.members),
                participants=0,
                parts=len(self.part_sizes),
                group_id=self.group.group_id,
            )
        self.finished = outcome

    def _linger(self, now: float) -> bool:
        """May a slower member still be reading our results? Then they stay, without us waiting.

        Only with a result for every part of our own: then nothing can touch our bucket any more,
        which belongs to the trainer again from here on.
        """
        if self.without or self.missing or self.index not in self.reducers:
            return False
        if not self._unheard():
            return False
        self.linger_until = min(now + self.params.result_timeout_s, self.deadline_at)
        return self.linger_until > now

    def linger(self, now: float) -> bool:
        """False when the results may go: everybody was heard, is gone, or had its time."""
        if self.linger_until is None:
            return False
        if self._unheard() and now < self.linger_until:
            return True
        self.linger_until = None
        self.effects.append(Close(self.group.group_id))
        return False

    def overheard(self, sender: str, message: Message | None) -> None:
        """After the end: a last message of a member, or (None) the news that it is gone."""
        index = self._index_of(sender)
        if index is None:
            return
        if message is None:
            self.lanes[index].gone = self.lanes[index].gone or Reason.LINK_LOST
        elif isinstance(message, Parity):
            self.lanes[index].parity = message.digest

    def _unheard(self) -> bool:
        return any(
            lane.parity is None and lane.gone is None
            for i, lane in enumerate(self.lanes)
            if i != self.index
        )

    def _digest(self) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        for part in range(len(self.part_sizes)):
            state.update(self.crcs.get(part, 0).to_bytes(4, "big"))
        return state.digest()

    def _tell(self, message: Message) -> None:
        for i, member in enumerate(self.group.members):
            if i != self.index and self.lanes[i].gone is None:
                self.effects.append(Send(member.peer_id, message))

    def _cause(self, reason: Reason) -> str:
        """The reason in words that name what is to be looked at."""
        return f"{reason.value}, {self.group.codec}" if reason is Reason.CODEC else reason.value

    def _detail(self, sentence: str) -> None:
        if (
            len(self.details) < 8 and sentence not in self.details
        ):  # a few causes explain a round; thousands hide them
            self.details.append(sentence)

    def _note(self, what: str, *, peer: str = "", reason: str = "", **fields: object) -> None:
        self.effects.append(
            Note(what, peer, reason, fields={"group": self.group.group_id.hex(), **fields})
        )
