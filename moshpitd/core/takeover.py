"""A reducer is dead, silent or wrong: the next in each part's order takes the part over.

It asks everybody who is not known dead. Who answers promises to take no result of a lower epoch for
the part any more, and says which it holds. If somebody holds one, that is the part's result: it is
fetched and handed to those that lack it. Only if nobody does are contributions pushed again. So two
members that stay in touch never hold two different results, whoever died when, and also if the
suspect was only slow: it is asked like everybody else.

One rule: a part goes from one reducer to the next only by `Bar` at its members' data planes; what a
member holds is what its data plane says in `Barred`, never what the core believed before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpitd.core.effects import Await, Bar, HandOver
from moshpitd.core.events import Barred
from moshpitd.core.messages import Again, Held, Missing, Promise, Resend, TakeOver
from moshpitd.core.outcome import Reason
from moshpitd.core.standing import Standing, chunks
from moshpitd.core.verdict import bits_of

MAX_TURNS = 4
"""How often the succession of a part may be gone through before the part is given up: a reducer
that was only slow may come back once or twice, but a part must not travel for ever. Every member
that is out may have cost a turn more, by dying before it handed over what it held."""


@dataclass(slots=True)
class Query:
    """We take `parts` over at `epoch`, and `waiting` (a bit mask, ourselves included) have not said
    what they hold."""

    number: int
    epoch: int
    parts: dict[int, bool]  # ordered; False: somebody promised it to a higher epoch
    waiting: int
    again_at: float  # who has not answered by then is asked once more
    until: float  # and by then it is out
    held: dict[int, dict[int, Held]] = field(default_factory=dict)  # part -> member -> what it has


@dataclass(slots=True)
class Fetch:
    """A result that we asked `holder` for; when it is here, it goes to those that lack it."""

    epoch: int
    holder: int
    held: dict[int, Held]  # who holds what
    since: float


class Takeovers:
    """Invariant: of a part that we take over, exactly one of these is true: a query of ours is
    open for it, we fetch its result, we collect for it, or it is decided."""

    def __init__(self, standing: Standing) -> None:
        self._st = standing
        self._queries: dict[int, Query] = {}
        self._fetches: dict[int, Fetch] = {}
        self._numbers = 0
        self.happened = False

    # -- a part has lost its reducer

    def leave(self, parts: list[int], reason: Reason) -> None:
        """Nothing comes any more from those who reduce these parts: turn to the next in order."""
        st = self._st
        ours: dict[int, list[int]] = {}
        theirs: dict[tuple[int, int, int], list[int]] = {}
        for part in parts:
            if not st.is_open(part):
                continue
            left = st.now_reduces[part]
            able = [i for i in range(len(st.lanes)) if i != left and st.alive(i)]
            following = st.succession.following(part, st.epoch(part), able)
            if following is None or self._too_far(following[0]):
                st.give_up(part, reason)
                continue
            epoch, member = following
            st.assign(part, member, epoch)
            if member == st.index:
                ours.setdefault(epoch, []).append(part)
            else:
                theirs.setdefault((member, left, epoch), []).append(part)
        for (member, left, epoch), some in theirs.items():
            self.happened = True
            for chunk in chunks(some):
                st.send(member, Missing(st.group_id, left, reason, epoch, chunk))
        for epoch, some in ours.items():
            self._take(epoch, some, reason)

    def missing(self, sender: int, message: Missing) -> None:
        """A member lacks results and believes us to be the next in order."""
        st = self._st
        mine: list[int] = []
        for part in message.parts:
            if not 0 <= part < st.parts() or part in st.without:
                continue
            if st.succession.reducer(part, message.epoch) != st.index:
                continue
            if message.epoch > st.epoch(part):
                mine.append(part)
            elif st.now_reduces[part] == st.index and part in st.results:
                # Taken over and decided before; what we sent it must have crossed its question.
                st.effects.append(HandOver(st.group_id, sender, (part,), st.epoch(part)))
        self.happened = True
        self._take(message.epoch, mine, message.reason)

    def _take(self, epoch: int, parts: list[int], reason: Reason) -> None:
        st = self._st
        if not parts:
            return
        self.happened = True
        asked = st.others()
        for chunk in chunks(parts):
            self._numbers += 1
            for part in chunk:
                st.assign(part, st.index, epoch)
                self._fetches.pop(part, None)
            waiting = 1 << st.index
            for i in asked:
                waiting |= 1 << i
            # Silence and broken links are told sooner; this is for one that lives and says nothing.
            until = st.now + st.params.part_timeout_s
            again_at = st.now + st.params.answer_timeout_s
            asked_for = dict.fromkeys(chunk, True)
            query = Query(self._numbers, epoch, asked_for, waiting, again_at, until)
            self._queries[query.number] = query
            st.note("takeover_started", reason=reason.value, epoch=epoch, parts=len(chunk))
            st.effects.append(Bar(st.group_id, epoch, chunk, st.index, query.number))
            st.tell(TakeOver(st.group_id, query.number, epoch, chunk))

    # -- what a member does for the one that takes over

    def asked(self, sender: int, message: TakeOver) -> None:
        """Promise, if nobody of a higher epoch was promised already."""
        st = self._st
        parts: list[int] = []
        for part in message.parts:
            if not 0 <= part < st.parts() or message.epoch < st.epoch(part):
                continue
            if st.succession.reducer(part, message.epoch) != sender:
                continue
            if part in st.without and part not in st.results:
                continue  # given up here, and reported so: no promise that we would keep
            st.assign(part, sender, message.epoch)
            self._fetches.pop(part, None)
            parts.append(part)
        self.happened = True
        if parts:
            bar = Bar(st.group_id, message.epoch, tuple(parts), sender, message.number)
            st.effects.append(bar)
        else:
            st.send(sender, Promise(st.group_id, message.number, message.epoch, ()))

    def barred(self, event: Barred) -> None:
        """The data plane's answer, for our own query or for somebody's."""
        st = self._st
        for part in event.parts:
            if st.closing.get(part, event.epoch) < event.epoch:
                del st.closing[part]  # an average that the bar came before
        for held in event.held:
            known = st.results.get(held.part)
            if known is None or known.epoch < held.epoch:
                st.put(held)
        promise = Promise(st.group_id, event.number, event.epoch, event.parts, event.held)
        if event.asker == st.index:
            self.promised(st.index, promise)
        else:
            st.send(event.asker, promise)

    def again(self, sender: int, message: Again) -> None:
        """Nobody holds these parts: our contribution once more."""
        st = self._st
        parts = tuple(
            part
            for part in message.parts
            if st.is_open(part)
            and st.now_reduces[part] == sender
            and st.epoch(part) == message.epoch
        )
        if st.group.members[st.index].weight > 0:
            st.push(sender, parts, result=False, epoch=message.epoch)

    def resend(self, sender: int, message: Resend) -> None:
        """Hand over what we hold; the data plane sends only what is in place."""
        st = self._st
        parts = tuple(part for part in message.parts if part in st.results)
        if parts:
            st.effects.append(HandOver(st.group_id, sender, parts, message.epoch))

    # -- what comes back to the one that takes over

    def promised(self, sender: int, message: Promise) -> None:
        query = self._queries.get(message.number)
        if query is None or query.epoch != message.epoch or not query.waiting >> sender & 1:
            return
        query.waiting &= ~(1 << sender)
        said = dict.fromkeys(message.parts)
        for part in query.parts:
            if part not in said:
                query.parts[part] = False
        for held in message.held:
            if held.part in query.parts and held.epoch <= query.epoch:
                query.held.setdefault(held.part, {})[sender] = held
        self._decide(query)

    def ask_again(self, now: float) -> None:
        """A question or its answer may have got lost; a member that has gone has not."""
        st = self._st
        for query in self._queries.values():
            if now >= query.again_at:
                query.again_at = now + st.params.answer_timeout_s
                question = TakeOver(st.group_id, query.number, query.epoch, tuple(query.parts))
                for i in bits_of(query.waiting & ~(1 << st.index)):
                    st.send(i, question)

    def overdue(self, now: float) -> list[int]:
        """Members that have not answered, or not handed over what they said they hold."""
        late: dict[int, bool] = {}
        for query in self._queries.values():
            if now >= query.until:
                late.update((i, True) for i in bits_of(query.waiting & ~(1 << self._st.index)))
        for fetch in self._fetches.values():
            if now >= self._fetched_by(fetch):
                late[fetch.holder] = True
        return list(late)

    def deadlines(self) -> list[float]:
        if not self._queries and not self._fetches:
            return []
        own = 1 << self._st.index
        open_ = [query for query in self._queries.values() if query.waiting & ~own]
        times = [min(query.again_at, query.until) for query in open_]
        return times + [self._fetched_by(fetch) for fetch in self._fetches.values()]

    def _fetched_by(self, fetch: Fetch) -> float:
        since = max(fetch.since, self._st.lanes[fetch.holder].progress_at)
        return since + self._st.params.part_timeout_s

    def gone(self, index: int, reason: Reason) -> None:
        """A member is out: nobody waits for its answer or for what it holds.

        What it was asked to hand over may come all the same, when a partition heals; by then its
        epoch may have no other result. So we ask afresh, for our next turn: the bar keeps it out.
        """
        st = self._st
        for query in list(self._queries.values()):
            query.waiting &= ~(1 << index)
            self._decide(query)
        turns: dict[int, list[int]] = {}
        for part, fetch in list(self._fetches.items()):
            if fetch.holder != index:
                continue
            del self._fetches[part]
            epoch = fetch.epoch + len(st.lanes)
            if self._too_far(epoch):
                st.give_up(part, reason)
            else:
                turns.setdefault(epoch, []).append(part)
        for epoch, parts in turns.items():
            self._take(epoch, parts, reason)

    def failed(self, part: int, holder: int, epoch: int) -> None:
        """What `holder` handed over cannot be used, and it comes once: the next, or afresh."""
        fetch = self._fetches.get(part)
        if fetch is not None and (fetch.holder, fetch.epoch) == (holder, epoch):
            del self._fetches[part]
            fetch.held.pop(holder, None)
            self._resolve(epoch, {part: fetch.held})

    def arrived(self, part: int) -> None:
        """A result is in place; if it is one that we fetched, it goes to those that lack it."""
        fetch = self._fetches.pop(part, None)
        if fetch is not None and self._ours(part, fetch.epoch):
            self._spread(fetch.epoch, {part: fetch.held})

    def _too_far(self, epoch: int) -> bool:
        lanes = self._st.lanes
        return epoch >= (MAX_TURNS + sum(lane.gone is not None for lane in lanes)) * len(lanes)

    def _ours(self, part: int, epoch: int) -> bool:
        """False when somebody of a higher epoch took it from us meanwhile."""
        return self._st.epoch(part) == epoch and self._st.now_reduces[part] == self._st.index

    def _decide(self, query: Query) -> None:
        if query.waiting or query.number not in self._queries:
            return
        del self._queries[query.number]
        current = [part for part in query.parts if self._ours(part, query.epoch)]
        ours = {part: query.held.get(part, {}) for part in current if query.parts[part]}
        self._resolve(query.epoch, ours)
        # Somebody promised the others to a higher epoch: we are an ordinary member there.
        self.leave([part for part in current if not query.parts[part]], Reason.SUPERSEDED)

    def _resolve(self, epoch: int, parts: dict[int, dict[int, Held]]) -> None:
        """For each part: the result of the highest epoch that a live member holds; from ourselves
        if we hold it; and if nobody does, afresh."""
        st = self._st
        fetch: dict[int, list[int]] = {}
        spread: dict[int, dict[int, Held]] = {}
        afresh: list[int] = []
        for part, held in parts.items():
            able = {i: one for i, one in held.items() if i == st.index or st.alive(i)}
            if not able:
                afresh.append(part)
                continue
            best = max(able, key=lambda i: (able[i].epoch, i == st.index, -i))
            if best == st.index:
                spread[part] = able
            else:
                fetch.setdefault(best, []).append(part)
                self._fetches[part] = Fetch(epoch, best, able, st.now)
        for holder, some in fetch.items():
            for chunk in chunks(some):
                st.effects.append(Await(st.group_id, holder, chunk, epoch))
                st.send(holder, Resend(st.group_id, epoch, chunk))
        self._spread(epoch, spread)
        self._collect(epoch, [part for part in afresh if st.is_open(part)])

    def _spread(self, epoch: int, parts: dict[int, dict[int, Held]]) -> None:
        """We hold these parts' results: hand them to whoever holds none or another."""
        st = self._st
        for i in st.others():
            lacking = [
                part
                for part, held in parts.items()
                if (ours := st.results.get(part)) is not None
                and ((theirs := held.get(i)) is None or not _same(theirs, ours))
            ]
            if lacking:
                st.effects.append(HandOver(st.group_id, i, tuple(lacking), epoch))

    def _collect(self, epoch: int, parts: list[int]) -> None:
        """Nobody holds a result: everybody who can pushes its contribution again, to us."""
        st = self._st
        if not parts:
            return
        senders = 0
        for i in st.others():
            if st.group.members[i].weight > 0 and st.lanes[i].muted is None:
                senders |= 1 << i
        for chunk in chunks(parts):
            for i in bits_of(senders):
                st.send(i, Again(st.group_id, epoch, chunk))
        for part in parts:
            st.note("part_taken_over", part=part, epoch=epoch)
            st.collect(part, senders)


def _same(one: Held, other: Held) -> bool:
    return (one.crc, one.contributors) == (other.crc, other.contributors)
