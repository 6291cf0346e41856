"""A peer as owner of a shard: it applies what the coordinator orders, in the order of versions, and
shows any of the last few versions. One rule: it decides nothing; a shard at version k is the seed
and the first orders up to k, whatever order messages came in."""

from __future__ import annotations

from dataclasses import replace

from moshpitd.core.store_common import KEPT, Common
from moshpitd.core.store_words import (
    DropGradients,
    Gradient,
    LinkTo,
    SendSeed,
    SendValues,
    StoreBehind,
    StoreBroken,
    StoreFetch,
    StoreGone,
    StoreHeld,
    StoreMissing,
    StoreOrder,
    StoreReady,
    StoreTerms,
    StoreWait,
    TakeSeed,
    Update,
    name_of,
)

FETCHES = 1024  # pulls that wait here for an order; who finds no room asks again


class Owner:
    """Invariant: `version` counts the updates that the data plane was told to make."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.version = 0
        self.ready = False
        self.parts: tuple[int, ...] = ()
        self._orders: dict[int, StoreOrder] = {}
        self._fetches: dict[tuple[str, int], StoreFetch] = {}

    def adopt(self, terms: StoreTerms) -> None:
        """A new life of the store: what we had is forgotten."""
        common = self.common
        self.version, self.parts = terms.version, common.shard(common.me)
        self.ready = False
        self._orders, self._fetches = {}, {}
        for peer in terms.owners:
            if peer != common.me:
                common.do(LinkTo(peer, common.addresses(peer)))
        # Also with an empty shard: it takes away what an earlier life left here.
        common.do(
            TakeSeed(terms.seeder, terms.ballot.name, terms.ballot.epoch, terms.version, self.parts)
        )
        if terms.seeder == common.me:
            for peer in terms.owners:
                self._seed(peer)

    def again(self, terms: StoreTerms) -> None:
        """The coordinator repeats itself, so it has not heard that we are ready, or wants to know
        whether a worker of ours still is there."""
        if self.ready or self.common.me not in terms.owners:
            self.common.say(terms.ballot.coordinator, StoreReady(terms.ballot))
        elif self.parts:
            self.common.say(terms.seeder, StoreMissing(terms.ballot, self.parts))

    def missing(self, sender: str) -> None:
        """What we seed has not come there."""
        self._seed(sender)

    def seeded(self, seed: bytes) -> None:
        terms = self.common.terms
        if terms is None or terms.ballot.name != seed:
            return
        self.ready = True
        self.common.say(terms.ballot.coordinator, StoreReady(terms.ballot))

    def failed(self, seed: bytes) -> None:
        """Our shard cannot follow: it lacks a gradient that it had held."""
        terms = self.common.terms
        if terms is not None and terms.ballot.name == seed:
            self.ready = False
            self.common.say(terms.ballot.coordinator, StoreBroken(terms.ballot, self.common.me))

    def arrived(self, gradient: Gradient) -> None:
        terms = self.common.terms
        if terms is None or not self.parts:
            return
        held = StoreHeld(terms.ballot, gradient.peer, gradient.name)
        self.common.say(terms.ballot.coordinator, held)

    def ordered(self, order: StoreOrder) -> None:
        terms = self.common.terms
        assert terms is not None  # the caller has compared ballots
        if order.refused:
            self.common.do(DropGradients(order.refused))
        if order.gradients and order.version > self.version:
            self._orders[order.version] = order
        while (ready := self._orders.pop(self.version + 1, None)) is not None:
            self.version += 1
            self.common.do(Update(self.version, terms.rules.gamma, ready.gradients))
        for key, fetch in list(self._fetches.items()):
            if fetch.version <= self.version:
                del self._fetches[key]
                self.fetched(key[0], fetch)

    def fetched(self, sender: str, fetch: StoreFetch) -> None:
        common = self.common
        key = (sender, fetch.number)
        if fetch.again:
            common.say(sender, StoreWait(fetch.number))
        if not self.ready or fetch.version > self.version:
            if key in self._fetches:  # it asks again, so the order may be lost
                behind = StoreBehind(fetch.ballot, self.version)
                common.say(fetch.ballot.coordinator, behind)
            elif len(self._fetches) < FETCHES:
                self._fetches[key] = replace(fetch, again=False)
        elif fetch.version <= self.version - KEPT:
            common.say(sender, StoreGone(fetch.number))
        else:
            common.do(LinkTo(sender, common.addresses(sender)))
            pull = name_of("pull", sender, fetch.number)
            common.do(SendValues(sender, pull, fetch.version))

    def lost(self, peer: str) -> None:
        self._fetches = {key: one for key, one in self._fetches.items() if key[0] != peer}

    def _seed(self, peer: str) -> None:
        terms = self.common.terms
        assert terms is not None  # only called with terms of now
        copy, parts = self.common.copy, self.common.shard(peer)
        if copy is not None and copy.rank == (terms.ballot.epoch, terms.version) and parts:
            self.common.do(SendSeed(peer, terms.ballot.name, parts))
