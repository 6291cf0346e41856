"""Those whom an attempt may meet, and what they have said so far. One rule: state only;
`matchmaking` decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from moshpitd.core.messages import Join, Record
from moshpitd.core.outcome import Reason


class Answer(Enum):
    """What a candidate has said so far."""

    UNASKED = auto()
    ASKED = auto()
    LATER = auto()
    JOINED = auto()
    DECLINED = auto()
    ELSEWHERE = auto()  # follows another leader
    LOST = auto()


OPEN = (Answer.UNASKED, Answer.ASKED, Answer.LATER, Answer.ELSEWHERE)
"""Answers after which a peer may still lead us."""


SENT_ON = 8
"""Times that one may send us on before we ask it at once again no more: two or three when some
vanish as a group forms. It follows somebody who is lost for as long as it does not see that itself,
and two that ask and send on as fast as messages travel said 467,000 Joins in 36 s."""

HOPS = 64
"""Of those that sent us on, the last: four circles of a whole group."""

REST_S = 0.7
"""After that it is asked so often; it gives up who has vanished in three of them."""


@dataclass(slots=True)
class Candidate:
    record: Record
    answer: Answer = Answer.UNASKED
    asked_at: float = 0.0
    join: Join | None = None
    reason: Reason | None = None
    again: bool = False  # what we asked was said a second time
    leader: str = ""  # whom it follows, if ELSEWHERE
    sent_on: int = 0  # times that it named a leader
    rests_until: float = 0.0  # not asked before
    waited_for: bool = True  # False: it made others wait in vain; its Later holds nobody up


@dataclass(slots=True)
class Following:
    leader: str
    since: float
    again_at: float = 0.0  # when we say our Join again, if nothing comes
    accepted: bool = False
    until: float = 0.0


@dataclass(slots=True)
class Candidates:
    """Everybody known under the key. Invariant: a Join is kept exactly for those that JOINED."""

    known: dict[str, Candidate] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # heard of, and lost before the attempt
    hops: list[str] = field(default_factory=list)  # who sent us on, since somebody accepted us

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self.known

    def __getitem__(self, peer_id: str) -> Candidate:
        return self.known[peer_id]

    def __len__(self) -> int:
        return len(self.known)

    def get(self, peer_id: str) -> Candidate | None:
        return self.known.get(peer_id)

    def items(self) -> list[tuple[str, Candidate]]:
        return list(self.known.items())

    def add(self, record: Record, *, waited_for: bool = True) -> None:
        """A peer that may meet us under this key."""
        known = self.known.get(record.peer_id)
        if known is None:
            self.known[record.peer_id] = Candidate(record, waited_for=waited_for)
            return
        # One that was in an earlier round when we asked declined as moved; it may be here now.
        moved = known.reason is Reason.MOVED and record.round > known.record.round
        known.record = record
        if known.answer is Answer.LOST or (known.answer is Answer.DECLINED and moved):
            known.answer, known.reason = Answer.UNASKED, None

    def joined(self) -> list[str]:
        return [p for p, c in self.known.items() if c.answer is Answer.JOINED]

    def joins(self) -> list[Join]:
        return [c.join for c in self.known.values() if c.answer is Answer.JOINED and c.join]

    def asked_at(self, *, once: bool = False) -> list[float]:
        """When each answer that is outstanding was asked for. `once`: and not a second time."""
        return [
            c.asked_at
            for c in self.known.values()
            if c.answer is Answer.ASKED and not (once and c.again)
        ]

    def silent(self, for_s: float, now: float) -> list[str]:
        """Those that were asked once and have not answered for so long."""
        return [
            p
            for p, c in self.known.items()
            if c.answer is Answer.ASKED and not c.again and now >= c.asked_at + for_s
        ]

    def may_come(self) -> bool:
        """Is there anybody whom a leader has to wait for?"""
        return any(
            c.answer in (Answer.UNASKED, Answer.ASKED)
            or (c.answer is Answer.LATER and c.waited_for)
            for c in self.known.values()
        )

    def can_reduce(self, me: Record, needed: bool) -> bool:
        """Can we or one that joined be dialled, if it is needed? Without a reducer there is no
        round. (With nobody here there is none anyway.)"""
        records = [join.record for join in self.joins()] if needed else []
        return not records or any(record.addresses for record in (me, *records))

    def still_to_come(self) -> bool:
        """Is there anybody who is not ready yet, and seldom made others wait in vain?"""
        return any(c.answer is Answer.LATER and c.waited_for for c in self.known.values())

    def moved(self) -> bool:
        """Has somebody of our line gone on to another key?"""
        return any(c.reason is Reason.MOVED for c in self.known.values())

    def may_lead(self, peer_id: str, now: float) -> bool:
        candidate = self.known.get(peer_id)
        if candidate is None or now < candidate.rests_until:
            return False
        return candidate.answer in (Answer.UNASKED, Answer.LATER)

    def leads(self, peer_id: str) -> None:
        """It accepted us: it is no follower of ours, and the way to it was no circle."""
        self.mark(peer_id, Answer.ELSEWHERE, None)
        self.hops.clear()

    def circle(self, sender: str, me: str) -> bool:
        """Several that have joined each other and send each other on go round for as long as they
        are ready; all see the same circle, and the lowest of it is to lead. Is that us, now that
        `sender` has sent us on?"""
        before = self.hops[::-1].index(sender) + 1 if sender in self.hops else 0
        loop = self.hops[-before:] if before > 1 else []  # else one that sends us on twice
        self.hops = [*self.hops[1 - HOPS :], sender]
        if not loop or me > min(loop):
            return False
        self.hops.clear()
        return True

    def sends_on(self, sender: str, leader: str, now: float) -> bool:
        """`sender` follows `leader`, or has asked it. Should we go there?"""
        self.follows(sender, leader)
        known = self.known.get(leader)
        if known is None:
            return False
        if known.answer is Answer.JOINED:
            self.mark(sender, Answer.ASKED, None, now)  # it comes along with its leader
            return False
        candidate, tired = self.known.get(sender), False
        if candidate is not None:
            # Two that ask who is not ready in turns send each other there for as long as it is not;
            # and who is above those that go round (`circle`) waits until they are done.
            candidate.sent_on += 1
            tired = candidate.sent_on > SENT_ON
            if tired:
                candidate.rests_until = now + REST_S
        lost = known.answer in (Answer.LOST, Answer.DECLINED)
        if lost or tired:  # of one that is lost it may be about to hear, and then looks for others
            self.mark(sender, Answer.LATER, None)
        # One that was elsewhere when we asked is here now: its follower says so.
        return known.reason is Reason.MOVED if lost else not tired

    def rested_at(self, now: float) -> list[float]:
        """When those that rest may be asked again."""
        return [c.rests_until for c in self.known.values() if c.rests_until > now]

    def lowest_unasked_below(self, peer_id: str) -> str | None:
        below = [p for p, c in self.known.items() if p < peer_id and c.answer is Answer.UNASKED]
        return min(below) if below else None

    def unanswered(self) -> tuple[str, ...]:
        """Those that were asked twice and said nothing within an answer's time."""
        return tuple(p for p, c in self.known.items() if c.reason is Reason.NO_ANSWER)

    def waited_in_vain(self) -> list[str]:
        return [p for p, c in self.known.items() if c.answer is Answer.LATER]

    def mark(self, peer_id: str, answer: Answer, reason: Reason | None, now: float = 0.0) -> None:
        candidate = self.known.get(peer_id)
        if candidate is not None:
            candidate.answer, candidate.reason, candidate.join = answer, reason, None
            candidate.asked_at, candidate.again = now, False

    def joins_with(self, peer_id: str, join: Join, now: float) -> bool:
        """The peer joined us, and brings those that follow it; False if one of them, or somebody
        else that it knows, is news to us."""
        candidate = self.known[peer_id]
        candidate.answer, candidate.join, candidate.reason = Answer.JOINED, join, None
        for other in self.known.values():
            if other.answer is Answer.ELSEWHERE and other.leader == peer_id:
                # It comes along with its leader.
                other.answer, other.asked_at, other.again = Answer.ASKED, now, False
        for follower in join.followers:
            known = self.known.get(follower)
            if known is not None and known.answer is not Answer.JOINED:
                known.answer, known.asked_at, known.again = Answer.ASKED, now, False
        return all(it in self.known or it in self.gone for it in (*join.followers, *join.knows))

    def follows(self, peer_id: str, leader: str) -> None:
        self.mark(peer_id, Answer.ELSEWHERE, None)
        if peer_id in self.known:
            self.known[peer_id].leader = leader

    def leaderless(self, leader: str) -> None:
        """Whoever followed `leader` is looking for one again, like us."""
        for candidate in self.known.values():
            if candidate.answer is Answer.ELSEWHERE and candidate.leader == leader:
                candidate.answer, candidate.leader = Answer.UNASKED, ""

    def nobody_elsewhere(self) -> None:
        """Our leader is lost: those that it had may be had again."""
        for candidate in self.known.values():
            if candidate.answer is Answer.ELSEWHERE:
                candidate.answer = Answer.UNASKED

    def seen(self, peer_id: str) -> None:
        """It stands under our key now. That it was under another one when we asked must not keep us
        from following our leader to it."""
        candidate = self.known[peer_id]
        if candidate.answer in (Answer.DECLINED, Answer.LOST):
            candidate.answer, candidate.reason = Answer.LATER, None

    def words(self) -> list[str]:
        """What became of each, in the words that a person reads."""
        return [_said(candidate) for candidate in self.known.values()]


def _said(candidate: Candidate) -> str:
    match candidate.answer:
        case Answer.DECLINED if candidate.reason is not None:
            return f"refused: {spelled(candidate.reason)}"
        case Answer.LOST if candidate.reason is not None:
            return spelled(candidate.reason)
        case Answer.LATER:
            return "not ready"
        case Answer.ELSEWHERE:
            return "with another leader"
        case Answer.JOINED:
            return "joined"
        case _:
            return "not answered yet"


def spelled(reason: Reason) -> str:
    return reason.value.replace("_", " ")


def sentence(words: Sequence[str]) -> str:
    """ "heard 3 peers, 2 refused: schema differs, 1 unreachable"."""
    if not words:
        return "heard no other peer"
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    order = sorted(counts, key=lambda word: (not word.startswith("refused"), -counts[word], word))
    said = ", ".join(f"{counts[word]} {word}" for word in order)
    return f"heard {len(words)} peer{'s' if len(words) > 1 else ''}, {said}"
