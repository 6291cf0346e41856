"""One round of an exchange with neighbours, inside one group: row i of a mixing matrix, as it comes
to be.

The group is made by matchmaking as for an average, or follows the last one (`chain`), and its
ordered members, its key and its round are all that a schedule of `topologies` needs: so every
member knows the same matrix without a word about it. Each pushes its message to whom the matrix
names, once; nobody reduces and nobody takes over. What is agreed on is which edges count, edge by
edge:

- Who holds the other's message whole says `Counts`, and from then on cannot take it back by itself.
- An edge counts for whoever has said so and has heard the other say so. On an edge with one
  direction only the giver says so when it has heard the taker's, so its share is gone at most once.
- Who has not said so yet may drop the edge, at its deadline or when the other is gone, and says
  that. Who has waits for the other's word, asks again, and drops the edge only when the other
  cannot be reached or says nothing for `parity_timeout_s` after the end.

One rule: a share that is not known to have arrived stays with its sender. So on undirected graphs
an edge counts at both ends or at none, and on directed ones a share is never at both. What no
number of messages can exclude is a partition between the last two words: then the two ends of an
undirected edge differ by its share, and a directed share is lost; `sequence` tells the receivers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from moshpitd.core.effects import Close, Effect, Note, OpenEdges, Send
from moshpitd.core.events import (
    EdgeArrived,
    EdgeRefused,
    EdgesCoded,
    LinkLost,
    Listened,
    Mix,
)
from moshpitd.core.graph import OWN, PeerGraph
from moshpitd.core.messages import Counts, Group, Letter, Message, NotMember
from moshpitd.core.outcome import Heard, Outcome, Reason, Row, Status
from moshpitd.core.params import Params
from moshpitd.core.quiet import Quiet
from moshpitd.core.soundness import is_fair
from moshpitd.core.standing import LOOKS
from moshpitd.core.topologies import schedule_for

REMEMBERED = 128
"""Ended rounds of which we still answer whether an edge counts. Asking goes on for
`parity_timeout_s`, 2 s, in which we may be through a hundred rounds of 20 ms with others; who is
told that we know of no such round drops an edge that counts here."""


@dataclass(slots=True)
class Line:
    """One edge, or two of opposite directions, as we see it. `gives` and `gets` are the entries of
    the matrix, 0 where there is no such edge. Invariant: settled once, it stays so."""

    index: int
    peer_id: str
    gives: float
    gets: float
    slot: int
    moved_at: float  # when anything of its message came
    heard_at: float
    asked_at: float
    letter: Letter | None = None
    values: bool = False
    full: bool = False
    ours: bool = False  # we have said that it counts
    theirs: bool = False
    doubted: bool = False  # we stood still: only an answer to a question of ours is believed
    failed: bool = False  # a message to it could not be delivered, once
    here: bool = True  # it is in this exchange; where nobody said Begin, it has said something
    unheard: int = 0
    dropped: Reason | None = None

    @property
    def counts(self) -> bool:
        return self.ours and self.theirs and self.dropped is None

    @property
    def settled(self) -> bool:
        return self.dropped is not None or self.counts

    @property
    def whole(self) -> bool:
        return self.letter is not None and self.values and (self.full or not self.letter.full)


@dataclass(slots=True)
class Neighbours:
    """Invariant: until `finished` is set the round waits for something that has a deadline."""

    params: Params
    group: Group
    me: str
    part_sizes: tuple[int, ...]
    trainer: str
    mix: Mix
    started: float
    deadline_at: float
    quiet: Quiet
    own: PeerGraph | None = None  # the operator's topology, for who mixes by that
    follows: bool = False  # the last group: nobody said Begin, and who is in it shows here
    index: int = -1
    finished: Outcome | None = None
    parity_sent_at: float | None = None  # as a round has it: there is no such phase here
    coded: bool = False
    listened_at: float | None = None
    kept: float = 1.0  # W[me][me]
    here_by: float = 0.0  # until when whoever has said nothing is waited for
    lines: dict[str, Line] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        members = self.group.members
        self.index = next(i for i, member in enumerate(members) if member.peer_id == self.me)
        rows = rows_of(self.group, self.mix.topology, self.own)
        mine, now = rows[self.index], self.started
        self.here_by = now + self.params.window_s  # as long as matchmaking waits for the unready
        self.kept = mine.get(self.index, 0.0)
        slots = 0
        for index, member in enumerate(members):
            gives, gets = rows[index].get(self.index, 0.0), mine.get(index, 0.0)
            if index == self.index or not (gives or gets):
                continue
            line = Line(index, member.peer_id, gives, gets, slots if gets else -1, now, now, now)
            line.values = line.full = not self.part_sizes  # tensors without elements
            line.here = not self.follows
            self.lines[member.peer_id] = line
            slots += bool(gets)

    # -- what drives it

    def start(self, now: float) -> None:
        if self.quiet.listens:
            self.listened_at = now
        group_id, mix = self.group.group_id, self.mix
        knows = dict.fromkeys(mix.knows)
        takers = [line for line in self.lines.values() if line.gives]
        in_full = [line for line in takers if mix.full and line.peer_id not in knows]
        self.effects.append(
            OpenEdges(
                self.group,
                self.index,
                self.trainer,
                sources=tuple(line.index for line in self.lines.values() if line.gets),
                targets=tuple(line.index for line in takers),
                in_full=tuple(line.index for line in in_full),
            )
        )
        for line in self.lines.values() if self.follows else takers:  # a giver learns that we come
            letter = Letter(group_id, mix.sequence, mix.mass, line in in_full)
            self.effects.append(Send(line.peer_id, letter))

    def handle(self, event: object, now: float) -> None:
        if self.finished is not None:
            return
        self._at(now)
        match event:
            case EdgesCoded():
                self.coded = True
                if event.reason is not None:
                    self._give_up(event.reason, event.detail)
            case EdgeArrived():
                line = self._line(event.sender)
                if line is not None:
                    line.moved_at = line.heard_at = now
                    line.here = True
                    if event.left == 0 and event.full:
                        line.full = True
                    elif event.left == 0:
                        line.values = True
            case EdgeRefused():
                line = self._line(event.sender)
                if line is not None and not line.ours:
                    self._drop(line, event.reason)
            case Listened():
                self._on_listened(event, now)
            case LinkLost():
                self._broken(self.lines.get(event.peer), event.reason, now)
            case _:
                pass
        self._settle(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        if self.finished is not None:
            return
        self._at(now)
        if isinstance(message, NotMember):
            named = sender if message.peer_id == self.me else message.peer_id
            if sender in (named, self.group.leader) and (gone := self.lines.get(named)):
                self._drop(gone, Reason.NOT_MEMBER)
        elif (line := self.lines.get(sender)) is not None:
            line.heard_at, line.unheard, line.here = now, 0, True
            if isinstance(message, Letter) and line.letter is None and line.gets:
                if is_fair(message):
                    line.letter, line.moved_at = message, now
                else:
                    self._drop(line, Reason.REFUSED)
            elif isinstance(message, Counts):
                self._told(line, message, now)
        self._settle(now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """A control message could not be delivered, or the peer said goodbye."""
        line = self.lines.get(peer_id)
        if self.finished is not None or line is None or line.settled:
            return
        if line.ours and reason is Reason.UNREACHABLE and not line.failed:
            # On a busy machine a message may be late and not lost; what we have said may count
            # there. One more try, `answer_timeout_s` later.
            line.failed, line.asked_at = True, now
            return
        self._drop(line, reason)
        self._settle(now)

    def absent(self, peer_id: str, now: float) -> None:
        """It says elsewhere that it is looking for a group: it is not in this one."""
        line = self.lines.get(peer_id)
        if self.finished is None and line is not None and not line.here:
            self._drop(line, Reason.NOT_MEMBER)
            self._settle(now)

    def tick(self, now: float) -> None:
        if self.finished is not None:
            return
        self._at(now)
        for line in self._open():
            if not line.here and now >= self.here_by:
                self._drop(line, Reason.NOT_READY)
            elif line.gets and not line.ours and now >= line.moved_at + self.params.part_timeout_s:
                self._drop(line, Reason.SILENT)
            elif now >= self.deadline_at and not line.ours:
                self._drop(line, Reason.TIMEOUT)
            elif now >= self._end():
                self._drop(line, Reason.NO_ANSWER)
            elif line.ours and now >= line.asked_at + self.params.answer_timeout_s:
                self._ask(line, now)
        if not self.coded and now >= self._end():
            self._give_up(Reason.TIMEOUT, "the message was not encoded in time")
            self.coded = True
        self._settle(now)

    def deadline(self) -> float:
        times = [self._end()]
        for line in self._open():
            if line.ours:
                times.append(line.asked_at + self.params.answer_timeout_s)
            else:
                times.append(self.deadline_at if line.here else self.here_by)
                if line.gets:
                    times.append(line.moved_at + self.params.part_timeout_s)
        return min(times)

    def parts_done(self) -> int:
        """For progress: in parts of our own message, as far as the edges are settled."""
        settled = sum(1 for line in self.lines.values() if line.settled)
        return len(self.part_sizes) * settled // max(1, len(self.lines))

    # -- an edge

    def _told(self, line: Line, message: Counts, now: float) -> None:
        if message.ask and (line.ours or line.dropped is not None):
            self._say(line, counts=line.dropped is None, answer=True)
        if line.dropped is not None:
            return
        if not message.counts:
            # Also of an edge that counts here already: the other end has not used it.
            line.dropped = Reason.WITHDRAWN
            self._note(line)
        elif line.doubted and not message.answer:
            if line.ours:
                self._ask(line, now)
        else:
            line.theirs = True
            if not line.gets and not line.ours:
                line.ours = True
                self._say(line, counts=True, answer=True)

    def _broken(self, line: Line | None, reason: Reason, now: float) -> None:
        """The bulk link is gone, or nothing is heard on it. Control messages go another way."""
        if line is None or line.settled:
            return
        if line.ours:
            self._ask(line, now)
        else:
            self._drop(line, reason)

    def _ask(self, line: Line, now: float) -> None:
        line.asked_at = now
        self.effects.append(Send(line.peer_id, Counts(self.group.group_id, True, ask=True)))

    def _say(self, line: Line, *, counts: bool, answer: bool = False) -> None:
        self.effects.append(Send(line.peer_id, Counts(self.group.group_id, counts, answer=answer)))

    def _drop(self, line: Line, reason: Reason) -> None:
        if line.settled:
            return
        line.dropped = reason
        self._say(line, counts=False)
        self._note(line)

    def _note(self, line: Line) -> None:
        reason = line.dropped.value if line.dropped is not None else ""
        self.effects.append(Note("member_excluded", line.peer_id, reason))

    def _open(self) -> list[Line]:
        return [line for line in self.lines.values() if not line.settled]

    def _line(self, index: int) -> Line | None:
        line = next((line for line in self.lines.values() if line.index == index), None)
        return None if line is None or line.settled else line

    # -- time

    def _end(self) -> float:
        return self.deadline_at + self.params.parity_timeout_s

    def _at(self, now: float) -> None:
        """The first instant after we stood still blames nobody; and what was said to us meanwhile
        may have been taken back."""
        if self.listened_at is None or now - self.listened_at < self.params.silence_min_s:
            return
        slept_s, self.listened_at = now - self.listened_at, None
        self.effects.append(Note("woke", fields={"slept_s": slept_s}))
        self.deadline_at = max(self.deadline_at, now + self.params.answer_timeout_s)
        self.here_by = max(self.here_by, now + self.params.answer_timeout_s)
        for line in self._open():
            line.heard_at = line.moved_at = now
            line.unheard, line.theirs, line.doubted = 0, False, True
            if line.ours:
                self._ask(line, now)

    def _on_listened(self, event: Listened, now: float) -> None:
        self.listened_at, self.quiet.listens = now, True
        heard = dict.fromkeys(event.heard)
        for line in self._open():
            gap_s = now - line.heard_at
            if line.peer_id in heard:
                self.quiet.heard(line.peer_id, gap_s)
                line.heard_at, line.unheard = now, 0
                continue
            line.unheard += 1
            if line.unheard >= LOOKS and gap_s >= self.quiet.limit_s(line.peer_id):
                line.unheard = 0  # asked once per silence
                self._broken(line, Reason.SILENT, now)

    # -- the end

    def _give_up(self, reason: Reason, detail: str) -> None:
        """Our own message cannot be sent (any more)."""
        for line in self._open():
            self._drop(line, reason)
        if not any(line.counts for line in self.lines.values()):
            self._finish(self._outcome(Status.FAILED, reason, detail))

    def _settle(self, now: float) -> None:
        if self.finished is not None:
            return
        for line in self.lines.values():
            if line.whole and not line.ours and line.dropped is None:
                line.ours, line.asked_at = True, now
                if line.doubted:
                    self._ask(line, now)
                else:
                    self._say(line, counts=True)
        if self.coded and not self._open():
            partial = any(line.dropped is not None for line in self.lines.values())
            self._finish(self._outcome(Status.PARTIAL if partial else Status.COMPLETE))

    def _finish(self, outcome: Outcome) -> None:
        self.finished = outcome
        self.effects.append(Close(self.group.group_id))

    def _outcome(self, status: Status, reason: Reason | None = None, detail: str = "") -> Outcome:
        lines = list(self.lines.values())
        dropped = [line for line in lines if line.dropped is not None]
        heard = tuple(
            Heard(
                line.peer_id,
                line.gets,
                line.letter.mass,
                line.letter.sequence,
                line.letter.full,
                line.slot,
            )
            for line in lines
            if line.counts and line.gets and line.letter is not None
        )
        row = Row(
            own_share=self.kept + sum([line.gives for line in dropped], 0.0),
            heard=heard,
            unheard=tuple(line.peer_id for line in dropped),
        )
        accepted = status is not Status.FAILED
        return Outcome(
            status,
            reason,
            detail,
            accepted=accepted,
            group_size=len(self.group.members),
            participants=1 + len(heard) if accepted else 0,
            contributors=(self.me, *(one.peer_id for one in heard)) if accepted else (),
            excluded=tuple((line.peer_id, line.dropped) for line in dropped if line.dropped),
            parts=len(self.part_sizes),
            total_weight=1.0 + len(heard),
            group_id=self.group.group_id,
            row=row if accepted else None,
        )


class Verdicts:
    """Which edges of the last rounds counted, for neighbours that have not heard our last word."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, dict[str, bool]] = OrderedDict()

    def remember(self, ended: Neighbours) -> None:
        self._of[ended.group.group_id] = {
            line.peer_id: line.counts for line in ended.lines.values()
        }
        while len(self._of) > REMEMBERED:
            self._of.popitem(last=False)

    def answer(self, sender: str, message: Message) -> list[Effect] | None:
        """None: not of a round that is remembered."""
        lines = self._of.get(getattr(message, "group_id", b""))
        if lines is None or not isinstance(message, Counts):
            return None
        if not message.counts or message.answer:
            return []
        # Not only to a question: a taker that is late shall know that its giver has dropped it.
        if not message.ask and lines.get(sender):
            return []
        counts = lines.get(sender, False)
        return [Send(sender, Counts(message.group_id, counts, answer=True))]


def rows_of(group: Group, topology: str, own: PeerGraph | None = None) -> list[dict[int, float]]:
    """The matrix of the group's round, the same at every member: per target, source -> share."""
    if topology == OWN and own is not None:
        return own.rows([member.peer_id for member in group.members])
    seed = hashlib.blake2b(f"{group.key}/{topology}".encode(), digest_size=8).digest()
    schedule = schedule_for(topology, len(group.members), seed=int.from_bytes(seed, "big"))
    return schedule.sample(group.round).rows()


def most_neighbours(topology: str, max_group: int, own: PeerGraph | None = None) -> int:
    """How many messages a member of any group may have to take in one round: room for as many is
    what a trainer's bucket needs. Rounds repeat (shifts) or differ in whom, not in how many."""
    if topology == OWN and own is not None:
        return own.most_neighbours
    most = 1
    for peers in range(2, max_group + 1):
        for t in range(2):
            rows = schedule_for(topology, peers).sample(t).rows()
            most = max(most, *(sum(1 for s in row if s != i) for i, row in enumerate(rows)))
    return most
