"""One attempt to find a group under one key.

Everybody who is ready asks the lowest PeerID that may be ready too; who finds nobody to ask leads
and invites the rest. A Join commits: a peer that has joined a leader is in no other group until it
leaves, is declined, or hears nothing. Two leaders that find each other merge: the higher one gives
way and brings its followers along. A leader closes the group when every peer it knows under the key
has joined, declined or failed to answer, at `max_group`, or at the end of its window. Peers that
are alive but not ready (Later) are what the window is for, and who can be dialled where none can.

One rule: every wait in here has an end, and the attempt itself ends by `deadline` in a group or
with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpitd.core.candidates import OPEN, Answer, Candidates, Following
from moshpitd.core.effects import Effect, Send
from moshpitd.core.group import form_group
from moshpitd.core.messages import (
    Accepted,
    Begin,
    Declined,
    Group,
    Invite,
    Join,
    Later,
    Leave,
    Message,
    Record,
    Redirect,
)
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.soundness import outliers, quotes

Reply = Accepted | Declined | Later | Redirect
OF_AN_INVITE = 0
"""Attempt number that an Invite carries and its answers echo; those of Joins start at 1."""

ALIVE_S = 1.0
"""A waiting leader repeats Accepted this often, so a dead one is noticed in two of them."""

AGAIN_S = 0.7
"""A Join, an Invite or a sign of life that is overdue by so much is asked for again: a message lost
in a hundred must not cost its peer the round, and an answer from abroad is here by then."""

SLACK_S = 0.25
"""Added to a leader's announced wait before its followers give it up: Begin needs one trip, clocks
run unevenly."""


@dataclass(slots=True)
class Attempt:
    """Invariant: `following` and a non-empty set of joined candidates exclude each other once the
    leader accepted us."""

    params: Params
    me: Record
    key: str
    number: int
    weight: float
    newcomer: bool
    nonce: int
    started: float
    deadline_at: float
    call_ends_at: float = float("inf")
    expected: int = 0  # members of a full line of the grid; 0 in a flat group, where all are known
    unsettled: int = 1  # live peers of no known cell in this round; 1 where nobody counts
    lone_waits: bool = False  # not all that may come are known: with nobody here, wait the window
    own_pace: bool = False  # ... also when some have moved on: others come whenever they are ready
    reduces: bool = True  # the group will need a reducer
    norm: float = 0.0
    codec: str = "float32"
    looked_up: bool = False
    settle_until: float = 0.0
    candidates: Candidates = field(default_factory=Candidates)
    waiting: dict[str, float] = field(default_factory=dict)  # leaders that invited us -> till when
    following: Following | None = None
    lost_leader: str = ""  # whom we followed, until it was lost
    relayed: bool = False  # a member told us of the group, because its leader is gone
    invited: dict[str, float] = field(default_factory=dict)
    window_end: float = 0.0
    clock: float = 0.0
    alive_at: float = 0.0  # when we last told our followers that we still wait
    group: Group | None = None
    ended: Reason | None = None
    effects: list[Effect] = field(default_factory=list)
    look_up_by: float = 0.0

    # -- what drives it

    def start(self, now: float) -> None:
        self.window_end = min(now + self.params.window_s, self.deadline_at)
        self.look_up_by = now + 2 * self.params.answer_timeout_s
        self._decide(now)

    def add(self, record: Record, now: float, *, waited_for: bool = True) -> None:
        """A peer that may meet us under this key."""
        self.candidates.add(record, waited_for=waited_for)

    def found(self, now: float, *, look_up_took: float) -> None:
        """The directory has answered. Peers that announced while we looked up reach us within one
        more look-up."""
        self.looked_up = True
        self.settle_until = now + max(self.params.settle_s, look_up_took)
        self._decide(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        """A message under our key from a peer that is compatible with us."""
        if self.over:
            return
        match message:
            case Invite():
                self._on_invite(sender, message, now)
            case Join():
                self._on_join(sender, message, now)
            case Leave():
                self._on_no(sender, Answer.DECLINED, Reason.WITHDRAWN, now)
            case Accepted() | Declined() | Later() | Redirect() if self._answers(sender, message):
                self._on_answer(sender, message, now)
            case _:
                pass

    def _answers(self, sender: str, message: Reply) -> bool:
        """Is this about what we asked last? An answer to an Invite that we followed by a Join, or
        to a Join of an earlier attempt, would take back something on one side only."""
        followed = self.following is not None and self.following.leader == sender
        if message.attempt == OF_AN_INVITE:
            candidate = self.candidates.get(sender)
            return not followed and candidate is not None and candidate.answer is not Answer.JOINED
        if message.attempt != self.number:
            return False
        return followed or isinstance(message, Accepted)

    def _on_answer(self, sender: str, message: Reply, now: float) -> None:
        match message:
            case Accepted():
                self._on_accepted(sender, now)
            case Declined():
                self._on_no(sender, Answer.DECLINED, message.reason, now)
            case Later():
                self._on_no(sender, Answer.LATER, Reason.NOT_READY, now)
            case Redirect():
                self._on_redirect(sender, message.leader, now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """The peer cannot be reached, or says goodbye."""
        if not self.over:
            self._lose(peer_id, reason, now)
            self._decide(now)

    def accept_begin(self, sender: str, group: Group) -> bool:
        """Are we in it? Only if we follow its leader, and the line about us says what we said. A
        member may pass on what a leader did not live to say to everybody."""
        leader = self.following.leader if self.following is not None else ""
        if self.over or not group.leader or group.leader not in (leader, self.lost_leader):
            return False
        if sender != group.leader and all(member.peer_id != sender for member in group.members):
            return False
        if group.leader != leader and self.candidates.joined():  # others rely on us by now
            return False
        return quotes(group, self._own_join())

    def enter(self, group: Group, *, relayed: bool) -> None:
        """The Begin that was accepted. If its leader was lost to us, whom we joined since goes on
        without us."""
        if self.following is not None and self.following.leader != group.leader:
            self._send(self.following.leader, Leave(self.key, self.number))
        for join in self.candidates.joins():  # its Begin was faster than its Accepted
            no = Declined(self.key, join.attempt, Reason.WITHDRAWN, self.me)
            self._send(join.record.peer_id, no)
        self.group, self.relayed = group, relayed

    def abandon(self, reason: Reason) -> None:
        """Stop here: tell the leader we follow, or our followers, and end with `reason`."""
        if self.over:
            return
        if self.following is not None:
            self._send(self.following.leader, Leave(self.key, self.number))
        for peer_id, candidate in self.candidates.items():
            if candidate.answer is Answer.JOINED and candidate.join is not None:
                # A weight that is out of range is ours, not theirs.
                told = Reason.WITHDRAWN if reason is Reason.WEIGHT else reason
                no = Declined(self.key, candidate.join.attempt, told, self.me)
                self._send(peer_id, no)
        self.ended = reason

    def tick(self, now: float) -> None:
        self.clock = now
        if self.over:
            return
        self._ask_again(now)
        for peer_id, candidate in self.candidates.items():
            # Written like `deadline`, so that both round alike.
            if (
                candidate.answer is Answer.ASKED
                and now >= candidate.asked_at + self.params.answer_timeout_s
            ):
                self._lose(peer_id, Reason.NO_ANSWER, now)
        following = self.following
        if following is not None and following.accepted and now >= following.until:
            self._send(following.leader, Leave(self.key, self.number))
            self._lose(following.leader, Reason.SILENT, now)
        if now >= self.deadline_at:
            # A leader whose own call is over cannot take part in what it would begin.
            if self.leading and self.candidates.joined() and now < self.call_ends_at:
                self._begin()
            else:
                self.abandon(Reason.TIMEOUT)
            return
        self._decide(now)
        if self.group is None and self.leading and now >= self.alive_at + ALIVE_S:
            self.alive_at = now
            for join in self.candidates.joins():
                accepted = Accepted(self.key, join.attempt, self._waits(now))
                self._send(join.record.peer_id, accepted)

    def deadline(self) -> float:
        """The next instant at which something ends."""
        times = [self.deadline_at]
        times += [at + self.params.answer_timeout_s for at in self.candidates.asked_at()]
        if self.following is not None:
            times.append(self.following.again_at)
            if self.following.accepted:
                times.append(self.following.until)
        else:
            times += [at + AGAIN_S for at in self.candidates.asked_at(once=True)]
            if self.candidates.joined():
                times.append(self.alive_at + ALIVE_S)
            times += [self.window_end, *self.candidates.rested_at(self.clock)]
            if self._heard_by() > self.clock:  # once it is over, only the window is left
                times.append(self._heard_by())
        return min(times)

    @property
    def over(self) -> bool:
        return self.group is not None or self.ended is not None

    @property
    def leading(self) -> bool:
        return self.following is None

    # -- answers

    def _on_invite(self, sender: str, message: Invite, now: float) -> None:
        self.add(message.record, now)
        self.waiting[sender] = now + message.waits_s
        if self.following is not None:
            if self.following.leader != sender:
                self.candidates.seen(sender)
                self._send(sender, Redirect(self.key, message.attempt, self.following.leader))
            elif self.following.accepted:
                self._say_join(sender)  # it has lost sight of us
            return
        if self.candidates[sender].answer in (
            Answer.LATER,
            Answer.DECLINED,
            Answer.ELSEWHERE,
            Answer.LOST,
        ):
            self.candidates[sender].answer = Answer.UNASKED  # an invitation is news
        if self.candidates.joined() and sender > self.me.peer_id:
            # Two leaders: the lower one stays. The other side gives way when it hears our
            # invitation.
            self._invite(sender, now)
            return
        if self.candidates[sender].answer is not Answer.JOINED:
            self._join(sender, now)

    def _on_join(self, sender: str, message: Join, now: float) -> None:
        if self.following is not None:
            if self.following.leader != sender:
                self.add(message.record, now)
                self.candidates.seen(sender)
                self._send(sender, Redirect(self.key, message.attempt, self.following.leader))
                return
            if self.following.accepted or self.me.peer_id > sender:
                return  # our Joins crossed: the lower PeerID leads, and that is the other side
            self.following = None
        self.add(message.record, now)
        self.waiting.pop(sender, None)
        if not self.candidates.joins_with(sender, message, now):
            # Somebody is not in our directory answer yet: its Join is one Redirect away, or its
            # own look-up about to end, after which it tells us. So listen a little longer.
            self.settle_until = max(self.settle_until, now + 4 * self.params.settle_s)
        if not self.candidates.joined()[1:]:
            self.alive_at = now
            if not self.expected:
                # The window is for those that are ready together, and begins with the second of
                # them: who came long before would close it on the first of the others.
                self.window_end = min(now + self.params.window_s, self.deadline_at)
        self._send(sender, Accepted(self.key, message.attempt, self._waits(now)))
        self._decide(now)

    def _on_accepted(self, sender: str, now: float) -> None:
        if self.following is None or self.following.leader != sender:
            self.lost_leader = "" if sender == self.lost_leader else self.lost_leader  # for good
            self._send(sender, Leave(self.key, self.number))
            return
        # It leads: nobody to wait for beyond its own signs of life.
        self.candidates.leads(sender)
        self.following.accepted = True
        self.following.until = min(now + 2 * ALIVE_S + SLACK_S, self.deadline_at)
        self.following.again_at = now + ALIVE_S + SLACK_S
        for join in self.candidates.joins():
            follower = join.record.peer_id
            self._send(follower, Redirect(self.key, join.attempt, sender))
            self.candidates.follows(follower, sender)

    def _on_no(self, sender: str, answer: Answer, reason: Reason, now: float) -> None:
        if reason is Reason.WEIGHT:
            self.abandon(Reason.WEIGHT)  # we are the one that would overwrite everybody
            return
        if sender not in self.candidates:
            return
        self.candidates.mark(sender, answer, reason)
        self.waiting.pop(sender, None)
        if self.following is not None and self.following.leader == sender:
            self._unfollow(now)
        self._decide(now)

    def _on_redirect(self, sender: str, leader: str, now: float) -> None:
        if leader == self.me.peer_id:
            self.candidates.mark(sender, Answer.ASKED, None, now)  # its Join is on the way
            return
        followed = self.following is not None and self.following.leader == sender
        if self.following is not None and not followed:
            return
        there = self.candidates.sends_on(sender, leader, now)
        if followed:
            self.following = None
            if there and not self.candidates.circle(sender, self.me.peer_id):
                self._join(leader, now)
                return
        elif there and self.candidates[leader].answer in OPEN:
            if leader < self.me.peer_id or not self.candidates.joined():
                self._join(leader, now)
                return
            self.candidates[leader].answer = Answer.UNASKED
        self._decide(now)

    # -- decisions

    def _decide(self, now: float) -> None:
        if self.over or self.following is not None:
            return
        joined = self.candidates.joined()
        if len(joined) + 1 >= self.params.max_group:
            self._begin()
            return
        if not joined:
            leader = self._someone_to_ask(now)
            if leader is not None:
                self._join(leader, now)
                return
        for peer_id, candidate in self.candidates.items():
            if candidate.answer is Answer.UNASKED or (
                candidate.answer is Answer.LATER and peer_id not in self.invited
            ):
                self._invite(peer_id, now)
        self._close_if_complete(now)

    def _someone_to_ask(self, now: float) -> str | None:
        """A leader that waits for us, else the lowest PeerID below ours that may be ready."""
        waiting = [p for p, until in self.waiting.items() if now < until]
        leaders = [p for p in waiting if self.candidates.may_lead(p, now)]
        return min(leaders) if leaders else self.candidates.lowest_unasked_below(self.me.peer_id)

    def _close_if_complete(self, now: float) -> None:
        joined = self.candidates.joined()
        if now >= self.window_end:
            self._begin() if joined else self.abandon(Reason.NO_PEERS)
            return
        if now < self._heard_by():
            return
        if self.candidates.may_come() or not self.candidates.can_reduce(self.me, self.reduces):
            return
        if not joined and self.lone_waits and (self.own_pace or not self.candidates.moved()):
            return
        if len(joined) + 1 < self.expected and self.unsettled:
            return  # one of them may stand in our line when its round is over, and find us here
        self._begin() if joined else self.abandon(Reason.NO_PEERS)

    def _heard_by(self) -> float:
        """When we have heard of all who are there. A look-up is waited for less long with company:
        it knows others, and somebody in the directory may stand still."""
        if self.looked_up:
            return self.settle_until
        return self.look_up_by - (self.params.answer_timeout_s if self.candidates.joined() else 0.0)

    def _begin(self) -> None:
        joins = self.candidates.joins()
        group = self._form(joins)
        heavy = outliers(group.members, self.params)
        if self.me.peer_id in heavy:
            self.abandon(Reason.WEIGHT)
            return
        for join in [join for join in joins if join.record.peer_id in heavy]:
            joins.remove(join)
            no = Declined(self.key, join.attempt, Reason.WEIGHT, self.me)
            self._send(join.record.peer_id, no)
        self.group = group = self._form(joins) if heavy else group
        begin = Begin(group, self.candidates.unanswered())
        for join in joins:
            self._send(join.record.peer_id, begin)

    def _form(self, joins: list[Join]) -> Group:
        mine, audited = self._own_join(), self.params.audit_fraction
        return form_group(mine, joins, nonce=self.nonce, codec=self.codec, audit_fraction=audited)

    # -- small steps

    def _join(self, leader: str, now: float) -> None:
        self.following = Following(leader, now, again_at=now + AGAIN_S)
        self.candidates.mark(leader, Answer.ASKED, None, now)
        self._say_join(leader)

    def _say_join(self, leader: str) -> None:
        one_group = not self.expected and len(self.candidates) < self.params.max_group
        knows = tuple(it for it in self.candidates.known if one_group and it != leader)
        self._send(leader, self._own_join(tuple(self.candidates.joined()), knows))

    def _own_join(self, followers: tuple[str, ...] = (), knows: tuple[str, ...] = ()) -> Join:
        own = (self.key, self.number, self.me, self.weight, self.newcomer)
        return Join(*own, followers, self.norm, knows)

    def _ask_again(self, now: float) -> None:
        """Say once more what may have been lost; both sides take it for the same."""
        if self.following is not None:
            if now >= self.following.again_at:
                self.following.again_at = now + AGAIN_S
                self._say_join(self.following.leader)
            return
        for peer_id in self.candidates.silent(AGAIN_S, now):
            self.candidates[peer_id].again = True
            self._say_invite(peer_id, now)

    def undelivered(self, to: str, message: Message, now: float) -> bool:
        """A message of ours was not delivered; True if it was said again. A peer that is there but
        was missed once answers now, one that is gone is found out a round trip later."""
        candidate = self.candidates.get(to)
        if self.over or candidate is None or candidate.again:
            return False
        match message:
            case Join() if self.following is not None and self.following.leader == to:
                self._say_join(to)
            case Invite() if self.following is None and candidate.answer is Answer.ASKED:
                self._say_invite(to, now)
            case Accepted() if candidate.answer is Answer.JOINED:
                self.candidates.mark(to, Answer.ASKED, None, now)  # until it joins again
                self._say_invite(to, now)
            case _:
                return False
        candidate.again = True
        return True

    def _invite(self, peer_id: str, now: float) -> None:
        candidate = self.candidates[peer_id]
        if candidate.answer is Answer.UNASKED:
            candidate.answer, candidate.asked_at, candidate.again = Answer.ASKED, now, False
        self.invited[peer_id] = now
        self._say_invite(peer_id, now)

    def _say_invite(self, peer_id: str, now: float) -> None:
        self._send(
            peer_id, Invite(self.key, OF_AN_INVITE, self.me, max(0.0, self.window_end - now))
        )

    def _unfollow(self, now: float) -> None:
        """The leader is lost: those left over have a little time to find each other."""
        if self.following is not None:
            self.lost_leader = self.following.leader
        self.following = None
        until = max(self.window_end, now + self.params.answer_timeout_s)
        self.window_end = min(self.deadline_at, until)
        self.candidates.nobody_elsewhere()

    def _lose(self, peer_id: str, reason: Reason, now: float) -> None:
        """The peer is gone; whoever followed it is looking for a leader again, like us."""
        self.candidates.mark(peer_id, Answer.LOST, reason)
        self.waiting.pop(peer_id, None)
        self.candidates.leaderless(peer_id)
        if self.following is not None and self.following.leader == peer_id:
            self._unfollow(now)

    def _waits(self, now: float) -> float:
        return max(self.params.settle_s, self.window_end - now)

    def _send(self, to: str, message: Message) -> None:
        self.effects.append(Send(to, message))
