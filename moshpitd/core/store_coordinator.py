"""A peer as coordinator: it begins a store, says who may read which version, and orders updates.
One rule: a gradient is ordered once all owners hold it, so every shard can follow every order.

A store begins with a promise from everybody who can be reached to take part in nothing older, and
with the newest snapshot that any of them holds. What was applied after it is lost; what is inside
it is known by worker and sequence, so that a gradient which is pushed again is not applied again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from moshpitd.core.store_common import SILENT_S, SPREAD_S, Common, again_s
from moshpitd.core.store_order import Ordering, Waiting
from moshpitd.core.store_words import (
    OWNERS,
    WORKERS,
    Applied,
    Ballot,
    Gradient,
    StoreAsk,
    StoreBehind,
    StoreGrant,
    StoreHave,
    StoreHeld,
    StoreOrder,
    StorePull,
    StorePush,
    StoreTerms,
    StoreVerdict,
    StoreWait,
    StoreWanted,
    Verdict,
)

T = TypeVar("T")

ASK_S = 5.0
"""For a promise: a message there and back takes milliseconds, seconds on a machine that swaps. Who
is dead is known sooner, mostly; who is only later is in no store until the next one begins."""
TERMS_TRIES = 6
"""How often an owner is told its terms, over about two minutes, before it is replaced: its seed may
be gigabytes on a slow line."""
ORDERS = 256  # that can be said again; who lacks older ones needs a new store
GRADIENTS = 4096
"""That are held somewhere and not yet decided on: a few for each of `WORKERS`."""


@dataclass(slots=True)
class Founding:
    """Invariant: who is in `waiting` has not answered, and `haves` are promises to `ballot`."""

    ballot: Ballot
    waiting: dict[str, bool]
    until: float
    haves: dict[str, StoreHave] = field(default_factory=dict)


@dataclass(slots=True)
class Office:
    """What the coordinator of one ballot knows."""

    terms: StoreTerms
    ordering: Ordering
    applied: dict[str, int]
    unready: dict[str, bool]
    next_at: float  # when the unready are told again
    heard: dict[str, float]  # whom we need, when they last said that they are with us
    asked_at: float
    began_at: float
    spread: tuple[str, ...] = ()  # the candidates of which nobody but the owners would own anything
    tries: int = 0
    history: deque[StoreOrder] = field(default_factory=lambda: deque(maxlen=ORDERS))
    holders: dict[Gradient, dict[str, bool]] = field(default_factory=dict)
    pushes: dict[Gradient, tuple[str, StorePush]] = field(default_factory=dict)
    pulls: dict[str, tuple[str, StorePull]] = field(default_factory=dict)  # not granted yet
    grants: dict[str, StoreGrant] = field(default_factory=dict)  # the last one of each worker
    left: dict[str, int] = field(default_factory=dict)  # the last pull that was given up, by worker
    verdicts: dict[str, tuple[int, Verdict]] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Somebody waits for something."""
        return bool(self.unready or self.pulls or self.pushes)

    def lacking(self, gradient: Gradient) -> tuple[str, ...]:
        """Owners that cannot apply it: they do not hold it, or have no shard to apply it to."""
        held = self.holders.get(gradient, {})
        return tuple(
            owner for owner in self.terms.owners if owner not in held or owner in self.unready
        )


class Coordinator:
    """Invariant: `office` is of the terms of now, or None; not while we are founding."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.founding: Founding | None = None
        self.office: Office | None = None

    def deadline(self) -> float | None:
        if self.founding is not None:
            return self.founding.until
        if self.office is not None and self.office.pending:
            return self.office.next_at
        return None

    # -- beginning

    def found(self, now: float, *, looked: bool = False) -> StoreTerms | None:
        """Begin a store; its terms if nobody else has to be asked. Who knows of none looks first
        (epoch 0 asks for no promise), so that a newcomer disturbs nobody."""
        common = self.common
        known = common.terms.ballot.epoch if common.terms is not None else 0
        epoch = max(known, common.promised.epoch)
        ballot = Ballot(epoch + 1 if epoch or looked else 0, common.me)
        others = [peer for peer in common.candidates(now) if peer != common.me][: OWNERS - 1]
        if ballot.epoch:
            common.promised, self.office = ballot, None
        self.founding = Founding(ballot, dict.fromkeys(others, True), now + ASK_S)
        self.founding.haves[common.me] = self.have(ballot)
        for peer in others:
            common.say(peer, StoreAsk(ballot))
        return self.conclude(now)

    def have(self, ballot: Ballot) -> StoreHave:
        copy, rules = self.common.copy, self.common.rules
        if self.common.terms is not None:
            rules = self.common.terms.rules
        if copy is None:
            return StoreHave(ballot, 0, -1, (), rules)
        return StoreHave(ballot, copy.epoch, copy.version, copy.applied, rules)

    def step_down(self) -> None:
        """Somebody has a higher ballot."""
        self.founding = self.office = None

    def promised(self, sender: str, have: StoreHave, now: float) -> StoreTerms | None:
        founding = self.founding
        if founding is None or have.ballot != founding.ballot:
            return None
        if founding.waiting.pop(sender, False):
            founding.haves[sender] = have
        return self.conclude(now)

    def conclude(self, now: float) -> StoreTerms | None:
        """The terms, when all have answered or their time is over."""
        founding, common = self.founding, self.common
        if founding is None or (founding.waiting and now < founding.until):
            return None
        self.founding = None
        if not founding.ballot.epoch:
            return self.found(now, looked=True)
        haves = founding.haves
        # Our own of equally good ones: nothing has to travel to us.
        seeder = max(
            haves,
            key=lambda peer: (haves[peer].epoch, haves[peer].version, peer == common.me, peer),
        )
        best = haves[seeder]
        if best.version < 0 or best.rules is None:
            return None  # nobody knows what to begin with; whoever does will ask us again
        members = sorted(haves)
        owners = common.owners(members)
        terms = StoreTerms(founding.ballot, owners, best.version, seeder, best.rules, best.applied)
        self.office = Office(
            terms,
            Ordering(terms.rules, terms.version),
            {one.worker: one.sequence for one in terms.applied},
            dict.fromkeys(owners, True),
            now + again_s(0),
            dict.fromkeys(owners, now),
            now,
            now,
        )
        for peer in members:
            if peer != common.me:
                common.say(peer, terms)
        return terms

    def ill_spread(self, now: float) -> bool:
        """Others should own parts by now, and a new store would lose nothing: we hold the newest
        version, and nothing that was taken waits for the next one."""
        office, copy = self.office, self.common.copy
        if office is None or office.unready or office.ordering.waiting or copy is None:
            return False
        current = (office.terms.ballot.epoch, office.ordering.version)
        if copy.rank != current or now - office.began_at < SPREAD_S:
            return False
        able = tuple(self.common.candidates(now))
        if able == office.spread:
            return False
        if self.common.owners([*able]) == office.terms.owners:
            office.spread = able  # a thousand parts are not hashed at every event
            return False
        return True

    def ready(self, sender: str, now: float) -> None:
        office = self.office
        if office is not None and sender in office.heard:
            office.heard[sender] = now
        if office is not None and office.unready.pop(sender, False) and not office.unready:
            for gradient in [one for one in office.pushes if not office.lacking(one)]:
                self._decide(gradient)
            self._serve()

    def tick(self, now: float) -> list[str]:
        """Say again what was not answered; owners to give up."""
        office = self.office
        if office is None or not office.pending or now < office.next_at:
            return []
        office.tries = office.tries + 1 if office.unready else 0
        office.next_at = now + again_s(office.tries)
        if office.tries > TERMS_TRIES:
            return list(office.unready)
        if now - office.asked_at > SILENT_S / 2:  # nobody was asked lately
            office.heard = dict.fromkeys(office.heard, now)
        office.asked_at = now
        # When all are ready and something waits all the same: they may be gone, or may have been
        # told of a store that began without us, and then they say so.
        owners, others = office.terms.owners, self._holding_up(office)
        office.heard = {peer: office.heard.get(peer, now) for peer in (*owners, *others)}
        for peer in office.unready or (*owners, *others):
            self.common.say(peer, office.terms)
        silent = [peer for peer, at in office.heard.items() if now - at > SILENT_S]
        for peer in silent:
            if peer not in owners:
                self.lost(peer)
        return [peer for peer in silent if peer in owners]

    def _holding_up(self, office: Office) -> list[str]:
        """Peers that own nothing and have a worker whose gradient others may have to wait for."""
        peers = dict.fromkeys(worker.split("/")[0] for worker in office.ordering.pulled)
        return [one for one in peers if one != self.common.me and one not in office.terms.owners]

    # -- the store at work

    def pull(self, sender: str, pull: StorePull) -> None:
        office = self.office
        if office is None:
            return
        if pull.number <= office.left.get(pull.worker, 0):
            return  # said again just before it was given up, and overtaken
        last = office.grants.get(pull.worker)
        if last is not None and pull.number <= last.number:
            if pull.number == last.number:
                self.common.say(sender, last)
            return
        if pull.worker not in office.pulls and len(office.pulls) >= WORKERS:
            return
        office.pulls[pull.worker] = (sender, pull)
        self._serve()
        if pull.worker in office.pulls:
            self.common.say(sender, StoreWait(pull.number))

    def push(self, sender: str, push: StorePush) -> None:
        office, common = self.office, self.common
        if office is None:
            return
        sequence, verdict = office.verdicts.get(push.worker, (-1, Verdict.TAKEN))
        if push.sequence <= office.applied.get(push.worker, -1):
            common.say(sender, StoreVerdict(push.number, Verdict.TAKEN))
        elif push.sequence <= sequence:
            if push.sequence == sequence:
                common.say(sender, StoreVerdict(push.number, verdict))
        else:
            gradient = common.gradient(push.worker, push.sequence, push.ballot)
            if gradient not in office.pushes and len(office.pushes) >= GRADIENTS:
                return
            office.pushes[gradient] = (sender, push)
            lacking = office.lacking(gradient)
            if not lacking:
                self._decide(gradient)
            elif push.again:
                common.say(sender, StoreWanted(push.number, lacking))

    def held(self, sender: str, held: StoreHeld) -> None:
        office = self.office
        if office is None or sender not in office.terms.owners:
            return
        gradient = Gradient(held.peer, held.gradient)
        if gradient not in office.holders:
            while len(office.holders) >= GRADIENTS:
                office.holders.pop(next(iter(office.holders)))
            office.holders[gradient] = {}
        office.holders[gradient][sender] = True
        if gradient in office.pushes and not office.lacking(gradient):
            self._decide(gradient)

    def behind(self, sender: str, behind: StoreBehind) -> bool:
        """Say the later orders again; False if they are not known any more."""
        office = self.office
        if office is None or behind.version >= office.ordering.version:
            return True
        later = [order for order in office.history if order.version > behind.version]
        for order in later:
            self.common.say(sender, order)
        return bool(later) and later[0].version == behind.version + 1

    def forget(self, worker: str, number: int = 0) -> None:
        """Nobody waits for what it pulled: it is gone, or has given up the pull of that number."""
        office = self.office
        if office is None:
            return
        if number:
            _keep(office.left, worker, max(number, office.left.get(worker, 0)))
            asked, granted = office.pulls.get(worker), office.grants.get(worker)
            if (asked is not None and asked[1].number > number) or (
                granted is not None and granted.number > number
            ):
                return  # it has pulled again since
        else:
            office.left.pop(worker, None)
        office.pulls.pop(worker, None)
        office.ordering.forget(worker)
        self._advance()

    def lost(self, peer: str) -> None:
        """With a peer go all its workers."""
        if self.founding is not None:
            self.founding.waiting.pop(peer, None)
        office = self.office
        if office is None:
            return
        for worker in [*office.ordering.pulled, *office.pulls]:
            if worker.split("/")[0] == peer:
                self.forget(worker)

    def _decide(self, gradient: Gradient) -> None:
        office = self.office
        assert office is not None  # callers have one
        sender, push = office.pushes.pop(gradient)
        office.holders.pop(gradient, None)
        verdict = office.ordering.push(Waiting(push.worker, push.version, push.sequence, gradient))
        _keep(office.verdicts, push.worker, (push.sequence, verdict))
        self.common.say(sender, StoreVerdict(push.number, verdict))
        if verdict is not Verdict.TAKEN:
            for owner in office.terms.owners:
                refused = StoreOrder(office.terms.ballot, 0, (), (gradient,))
                self.common.say(owner, refused)
        self._advance()

    def _advance(self) -> None:
        office = self.office
        assert office is not None  # callers have one
        for batch in office.ordering.advance():
            for one in batch.gradients:
                _keep(office.applied, one.worker, one.sequence)
            gradients = tuple(one.gradient for one in batch.gradients)
            order = StoreOrder(office.terms.ballot, batch.version, gradients)
            office.history.append(order)
            for owner in office.terms.owners:
                self.common.say(owner, order)
        self._serve()

    def _serve(self) -> None:
        """Grant what may be read now, in the order in which it was asked for."""
        office = self.office
        assert office is not None  # callers have one
        if office.unready:
            return
        for worker, (sender, pull) in list(office.pulls.items()):
            version = office.ordering.pull(worker)
            if version is None:
                continue
            del office.pulls[worker]
            applied = tuple(Applied(*item) for item in office.applied.items())
            grant = StoreGrant(pull.number, version, applied)
            _keep(office.grants, worker, grant)
            self.common.say(sender, grant)


def _keep(table: dict[str, T], worker: str, value: T) -> None:
    """The last word on a worker, and only of those `WORKERS` that were last heard of: names cost
    whoever invents them nothing."""
    table.pop(worker, None)
    table[worker] = value
    if len(table) > WORKERS:
        del table[next(iter(table))]
