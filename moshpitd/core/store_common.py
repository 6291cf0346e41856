"""What the roles of a peer in a store share: the terms of now, what it promised and what it holds.
One rule: state and questions only; which role answers what is in `storage`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moshpitd.core.effects import Send
from moshpitd.core.store_words import (
    Applied,
    Ballot,
    Gradient,
    Rules,
    StoreEffect,
    StoreMessage,
    StoreTerms,
    name_of,
    owner_of,
    shard_of,
)

AGAIN_S, AGAIN_MAX_S = 2.0, 30.0
"""When something unanswered is said again, doubling: control messages take milliseconds, but what
they wait for may be a gradient on a slow line."""
SILENT_S = 15.0
"""An owner that says nothing for so long while it is asked is replaced. A pull that has to wait is
told so, and a death is mostly a closed link, long before."""
SUSPECT_S = 30.0
"""For how long who was replaced owns nothing: or a peer that half of the others cannot reach would
be put in and out with every message."""
SPREAD_S = 5.0
"""How old a store is before it begins anew because somebody came: trainers mostly come together."""
KEPT = 4
"""Versions of a shard that its owner keeps, so that a pull finds all shards at the one it was told.
A pull that takes longer than three updates starts anew."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The newest whole snapshot that this node holds: of two, the later epoch's, then version's."""

    epoch: int
    version: int
    applied: tuple[Applied, ...] = ()

    @property
    def rank(self) -> tuple[int, int]:
        return self.epoch, self.version


@dataclass(slots=True)
class Common:
    """`live` are the other peers that train the same tensors and are not known to be gone."""

    me: str
    live: Callable[[], list[str]]
    addresses: Callable[[str], tuple[str, ...]]
    parts: Callable[[], int]
    effects: list[Send | StoreEffect] = field(default_factory=list)
    inbox: deque[StoreMessage] = field(default_factory=deque)  # what we say to ourselves
    terms: StoreTerms | None = None
    promised: Ballot = field(default_factory=Ballot)
    copy: Copy | None = None
    rules: Rules | None = None  # of our own trainers
    suspects: dict[str, float] = field(default_factory=dict)  # peer -> until when

    def say(self, to: str, message: StoreMessage) -> None:
        if to == self.me:
            self.inbox.append(message)
        else:
            self.effects.append(Send(to, message))

    def do(self, effect: StoreEffect) -> None:
        self.effects.append(effect)

    def candidates(self, now: float) -> list[str]:
        """Who may own something, ourselves among them, in an order that all agree on."""
        able = [peer for peer in self.live() if self.suspects.get(peer, now) <= now]
        return sorted({self.me, *able})

    def winner(self, now: float) -> str:
        """Who has to begin the next store."""
        return owner_of(0, self.candidates(now))

    def broken(self, now: float) -> bool:
        """There is no store, or one that cannot be used."""
        if self.terms is None or self.promised > self.terms.ballot:
            return True
        able = self.candidates(now)
        return any(peer not in able for peer in self.needed())

    def needed(self) -> tuple[str, ...]:
        """Without these the store of now is none."""
        terms = self.terms
        return (*terms.owners, terms.ballot.coordinator) if terms is not None else ()

    def owners(self, members: list[str]) -> tuple[str, ...]:
        """Who of them owns anything."""
        return tuple(sorted({owner_of(part, members) for part in range(self.parts())}))

    def holds(self, ballot: Ballot) -> bool:
        """Whether these are the terms of now."""
        return (
            self.terms is not None
            and self.terms.ballot == ballot
            and self.promised == self.terms.ballot
        )

    def shard(self, peer: str) -> tuple[int, ...]:
        owners = self.terms.owners if self.terms is not None else ()
        return shard_of(peer, owners, self.parts())

    def gradient(self, worker: str, sequence: int, ballot: Ballot) -> Gradient:
        """What a push is called; worker is PEER/TRAINER. Another one in every life of the store,
        because owners and their shards differ."""
        name = name_of("gradient", worker, sequence, ballot.epoch, ballot.coordinator)
        return Gradient(worker.split("/")[0], name)


def again_s(tries: int) -> float:
    return float(min(AGAIN_MAX_S, AGAIN_S * 2 ** min(tries, 10)))
