"""Who is too slow for the others, and what follows: a round is not paced by the slowest link.

Every part waits for everybody's contribution, so one member on a link ten times slower would make
the round ten times longer for all. A reducer knows when most members had delivered everything, and
what their lines still had to carry then; whoever takes far longer to deliver than they need for the
whole round is told so in the reducers' Parity. Told by most of them twice in a row, it offers only
as many parts as it can bring in the others' time, others in each round, and says at once which will
not come (`Without`), so that nobody waits for them and nothing is sent in vain. What it offers
grows again while it is in time. The reducer's own bound is for those that are slow and do not know
it: as long beyond the others as a silent one is waited for, and they are left out of the parts that
they have not delivered.

One rule: being late is no fault. It is judged only against what most others need of the same round,
seen from the same reducer, only when we listen (a starved judge finds nobody late), and never
sooner than silence would be; results still go to whoever is late, and it gets no strike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from moshpitd.core.messages import Again, Without
from moshpitd.core.outcome import Reason
from moshpitd.core.quiet import DEVIATIONS, Quiet
from moshpitd.core.standing import LOOKS, Standing, chunks
from moshpitd.core.verdict import Lane

IN_A_ROW = 2
"""Rounds in which most reducers must find us late before we offer less, and in which a member's
last message must be missing before it is not waited for: once is a stall, of a machine or ours."""
SLACK = 1.25
"""Of the others' time, for a member that is known to be slow: it has offered what it can bring in
that time, and a quarter more is what its first tries to offer more may cost the others."""
SLACK_S = 0.2
"""At least so long a slow member's last message is waited for: a look's time, and a round trip."""
SLACK_LOOKS = 2
"""Looks after most were done before a slow member is left out: the first may come at once."""
SPARE = 1 / 3
"""Of the time between `part_timeout_s` and `result_timeout_s`, for whose parts are on their way."""
GROWTH = 0.125
"""What is offered grows by so much after a round in time, by twice as much after the next: back at
everything within seven rounds from a tenth, and a slow link is tried rarely."""
MOST, SOME = 1 / 2, 1 / 4  # of the reducers that our parts went to
MOST_AHEAD = 4.0
"""Of the time in which a member delivered, for all that its line has to carry: 2 where all reduce
alike, 3 where half of them do. Where few reduce nearly all, what it took to begin would count more
than its line."""
WHOLE = 1000  # shares are told in thousandths


class Offer:
    """What this peer learned of its own pace, and of the others' as listeners, in a run's rounds.

    Invariant: 0 < share <= 1; at most `most` peers are remembered, those met last."""

    def __init__(self, most: int) -> None:
        self.share = 1.0
        self._late = self._in_time = 0  # rounds in a row
        self._unheard: dict[str, int] = {}  # peer -> rounds in a row that ended without its Parity
        self._busy: dict[str, float] = {}  # peer -> until when it takes what we hold
        self._most = most

    def learn(self, reports: Sequence[int], *, asked: int, parts: int) -> None:
        """A round is over: of `asked` reducers these found us late, each with the share (in
        thousandths) of what we offered that would have been in time. We offer of `parts` parts."""
        if not asked or not parts:
            return
        # Who offers everything believes most only; who does not is at its limit and listens closer.
        if len(reports) > asked * (MOST if self.share == 1.0 else SOME):
            self._late, self._in_time = self._late + 1, 0
            if self.share < 1.0:
                in_time = (sum(reports) + WHOLE * (asked - len(reports))) / asked
                self.share = max(self.share * in_time / WHOLE, 1.0 / parts)
            elif self._late >= IN_A_ROW:
                self.share = max(median(reports) / WHOLE, 1.0 / parts)
        else:
            self._late = 0
            self.share = min(1.0, self.share * (1.0 + GROWTH * 2**self._in_time))
            self._in_time = self._in_time + 1 if self.share < 1.0 else 0

    def heard(self, peer_id: str) -> None:
        """A round with this peer has ended for us, after its last message."""
        self._unheard.pop(peer_id, None)
        self._busy.pop(peer_id, None)

    def left(self, peer_id: str, *, until: float) -> None:
        """It has ended for us before; until then the peer takes what we hold."""
        missed, _ = self._unheard.pop(peer_id, 0), self._busy.pop(peer_id, None)
        self._unheard[peer_id], self._busy[peer_id] = missed + 1, until
        for known in (self._unheard, self._busy):
            if len(known) > self._most:
                del known[next(iter(known))]

    def done(self, peer_id: str) -> None:
        """It says that it has everything of a round that was over for us."""
        self._busy.pop(peer_id, None)

    def lags(self, peer_id: str) -> bool:
        """Are rounds over for us before they are for this peer, as a rule?"""
        return self._unheard.get(peer_id, 0) >= IN_A_ROW

    def busy(self, peer_id: str, now: float) -> bool:
        """Does it still take the results of a round that is over for us?"""
        return now < self._busy.get(peer_id, now)


@dataclass(slots=True)
class Lateness:
    """Invariant: a member is found late at most once a round, with the share it had in time."""

    st: Standing
    offer: Offer
    quiet: Quiet
    started: float
    looks: int = 0  # since most were done
    judged_at: float | None = None  # when we listened last
    found: dict[int, int] = field(default_factory=dict)  # member -> its share in thousandths
    withheld: dict[int, bool] = field(default_factory=dict)  # parts that we do not contribute to
    asked: dict[int, bool] = field(default_factory=dict)  # members that our parts went to
    parts: int = 0  # of others, that we could contribute to
    reduces: Counter[int] = field(init=False)  # member -> parts, by assignment

    def __post_init__(self) -> None:
        self.reduces = Counter(self.st.reducers)

    # -- our own contribution

    def offered(self, parts_of: list[list[int]]) -> list[list[int]]:
        """Of the parts of each member those that we contribute to; everybody is told of the rest.

        They follow each other, and begin elsewhere in every round: in time all parts get some.
        """
        st = self.st
        self.asked = {i: True for i, ps in enumerate(parts_of) if ps and i != st.index}
        self.parts = sum(len(parts_of[i]) for i in self.asked)
        # Of two neither can be slower than most.
        contributors = sum(one.weight > 0 for one in st.group.members)
        count = max(1, int(self.offer.share * self.parts + 1e-9))
        if count >= self.parts or contributors <= 2:
            return parts_of
        theirs = sorted(p for i, ps in enumerate(parts_of) if i != st.index for p in ps)
        first = int.from_bytes(st.group_id[:8], "big") % self.parts
        turned = theirs[first:] + theirs[:first]
        self.withheld = dict.fromkeys(sorted(turned[count:]), True)
        st.lanes[st.index].slow = True
        for chunk in chunks(list(self.withheld)):
            st.tell(Without(st.group_id, Reason.SLOW, chunk))
        st.note("offers_less", reason=Reason.SLOW.value, parts=self.parts, offered=count)
        kept = [[p for p in parts if p not in self.withheld] for parts in parts_of]
        self.asked = {i: True for i in self.asked if kept[i]}
        return kept

    def withhold(self, sender: int, again: Again) -> Again:
        """Somebody took these parts over and wants our contribution: what we did not offer to the
        first does not come now either. Returns what is left."""
        rest = tuple(part for part in again.parts if part in self.withheld)
        if rest:
            self.st.send(sender, Without(self.st.group_id, Reason.SLOW, rest))
            kept = tuple(part for part in again.parts if part not in self.withheld)
            again = replace(again, parts=kept)
        return again

    # -- the others' contributions to what we reduce

    def arrived(self, sender: int) -> None:
        """A contribution of this member is here. The last one, and it is late?"""
        st = self.st
        if not 0 <= sender < len(st.lanes):
            return
        lane = st.lanes[sender]
        lane.part_at = st.now
        lane.first_at = lane.first_at if lane.parts_in else st.now
        lane.parts_in += 1
        lane.ahead = self._ahead(sender, lane)
        if lane.owes_parts:
            return
        needed = self._needed_s(but=sender)
        if needed is not None and self._late(sender, lane, needed, self.started):
            self._find(sender, lane, needed)

    def judge(self, *, calm: bool) -> list[int]:
        """Members that are left out of what they have not delivered. Not `calm`: somebody died and
        parts are on their way to other reducers, or we stood still; then no time says anything."""
        st = self.st
        self.judged_at = st.now
        needed = self._needed_s() if calm and st.awaiting else None
        if needed is None:
            self.looks = 0
            return []
        self.looks += 1
        late = []
        for index in self._contributors():
            lane = st.lanes[index]
            if not lane.owes_parts or lane.muted is not None or lane.unheard:
                continue  # a quiet link is another matter
            # Of whom nothing came yet we do not know that it has begun.
            begun = lane.first_at if lane.parts_in else None
            since = self.started if lane.slow else begun
            if since is not None and self._late(index, lane, needed, since, leave_out=True):
                self._find(index, lane, needed)
                late.append(index)
        return late

    def given_up_at(self, index: int) -> float:
        """When a member of which nothing whole comes is not waited for any more.

        `part_timeout_s` after the last, if it is not heard. Who is heard may be sending: a part
        takes its time on a line that those for all others share. It is given up when `judge` would
        leave out one that has begun; at the latest after SPARE of the time that then is left until
        the others give us up, because the result has to get to all of them too.
        """
        st, lane = self.st, self.st.lanes[index]
        silent_s, useless_s = st.params.part_timeout_s, st.params.result_timeout_s
        at = lane.progress_at + silent_s
        if st.now < at or not self._heard(lane):
            return at
        last, needed = at + SPARE * (useless_s - silent_s), self._needed_s()
        if needed is None:
            return last
        return max(at, min(last, self.started + self._bound_s(silent_s)))

    def give_up(self, index: int) -> Reason:
        """It is not waited for any more. Who is heard is told that it is late, or it would be left
        out of the next rounds like of this one, whatever it offers."""
        lane = self.st.lanes[index]
        if not self._heard(lane):
            return Reason.SILENT
        needed = self._needed_s()
        if needed is not None:
            self._find(index, lane, needed)
        return Reason.SLOW

    def _heard(self, lane: Lane) -> bool:
        """Do we listen, and does its link say that it lives?"""
        if self.judged_at is None or lane.unheard >= LOOKS:
            return False
        return self.st.now - self.judged_at < self.st.params.silence_min_s

    def _bound_s(self, patience: float, but: int = -1) -> float:
        """For who is not known to be slow, when most have delivered: `slow_ratio` times what the
        round would take the others, because with it in it takes so long for them too."""
        needed = self._needed_s(but, whole=True) or 0.0
        return max(needed * self.st.params.slow_ratio, needed + patience)

    def _contributors(self) -> list[int]:
        return [i for i in self.st.others() if self.st.group.members[i].weight > 0]

    def _ahead(self, index: int, lane: Lane) -> float:
        """What the line of a member that has just delivered has to carry in this round, in what it
        has carried so far: the results of its own parts go to everybody, and wait for whoever is
        slow. Of what went to others we see as much as went to us."""
        its = self.reduces[index]
        offers, others = len(self.st.reducers) - its, len(self.st.lanes) - 1
        carried = offers + others * max(0, its - lane.owes_results)
        return min(MOST_AHEAD, max(1.0, (offers + others * its) / max(1, carried)))

    def _needed_s(self, but: int = -1, *, whole: bool = False) -> float | None:
        """How long most members (with ourselves) needed to deliver to us all that they offer, or
        need for the `whole` round at that pace; None while most have not delivered. A few that are
        far slower than those do not stretch it."""
        contributors = self._contributors()
        lanes = [self.st.lanes[i] for i in contributors if i != but]
        done = sorted(
            (lane.part_at - self.started) * (lane.ahead if whole else 1.0)
            for lane in lanes
            if lane.parts_in and not lane.owes_parts and not lane.slow
        )
        most = max(1, (len(contributors) + 1) // 2)
        if len(done) < most:
            return None
        middle = median(done)
        spread = median(abs(one - middle) for one in done)
        return max(done[most - 1], min(done[-1], middle + DEVIATIONS * spread))

    def _late(
        self, index: int, lane: Lane, needed: float, since: float, *, leave_out: bool = False
    ) -> bool:
        """`leave_out`: not to be told of, but out of this round. Four daemons that start on two
        cores are three times apart in their first round, and none of them is slow; so that takes as
        long as one that sends nothing is waited for."""
        took, params = self.st.now - since, self.st.params
        if lane.slow:
            return self.looks >= SLACK_LOOKS and took > SLACK * needed
        patience = params.part_timeout_s
        if not leave_out:
            patience = self.quiet.limit_s(self.st.group.members[index].peer_id)
        return self.looks >= LOOKS and took > self._bound_s(patience, but=index)

    def _find(self, index: int, lane: Lane, needed: float) -> None:
        if index in self.found:
            return
        offered = lane.parts_in + lane.owes_parts
        in_time = lane.parts_in / offered * needed / max(needed, self.st.now - self.started)
        self.found[index] = min(WHOLE - 1, int(WHOLE * in_time))
        whole = len(self.st.lanes)
        self.st.late = tuple(self.found.get(i, WHOLE) for i in range(whole))

    # -- the end

    def told(self, sender: int, late: tuple[int, ...]) -> None:
        """A member's last message says whom it found late."""
        st = self.st
        st.lanes[sender].says_late = late
        for index, share in enumerate(late[: len(st.lanes)]):
            if 0 <= share < WHOLE:
                st.lanes[index].named = True

    def patience_s(self, exchange_s: float) -> float:
        """How long the last messages are waited for that are still missing."""
        st, usual, missing = self.st, self.st.params.parity_timeout_s, False
        for i, lane in enumerate(st.lanes):
            if i == st.index or lane.gone is not None or lane.parity is not None:
                continue
            if not self._lags(i):
                return usual
            missing = True
        return min(usual, max(SLACK_S, (SLACK - 1.0) * exchange_s)) if missing else usual

    def linger_until(self, now: float, deadline_at: float) -> float:
        """For how long our results stay for those that have not said that they have them: whoever
        is slow may need its whole call."""
        missing = [i for i in self.st.others() if self.st.lanes[i].parity is None]
        if any(self._lags(i) for i in missing):
            return deadline_at
        return min(now + self.st.params.result_timeout_s, deadline_at)

    def _lags(self, index: int) -> bool:
        peer_id = self.st.group.members[index].peer_id
        lane = self.st.lanes[index]
        return lane.slow or lane.named or self.offer.lags(peer_id)

    def learn(self, *, until: float) -> None:
        """The round has ended here; our results stay until then."""
        st = self.st
        for index in st.others():
            peer_id = st.group.members[index].peer_id
            if st.lanes[index].parity is not None:
                self.offer.heard(peer_id)
            else:  # of others its word may have got lost
                self.offer.left(peer_id, until=until if self._lags(index) else st.now)
        spoke = [st.lanes[i] for i in self.asked if st.lanes[i].parity is not None]
        shares = [lane.says_late[st.index] for lane in spoke if st.index < len(lane.says_late)]
        reports = [share for share in shares if 0 <= share < WHOLE]
        self.offer.learn(reports, asked=len(spoke), parts=self.parts)
