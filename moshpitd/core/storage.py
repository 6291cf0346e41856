"""The parameter store of a run at one peer: a door to its three roles. One rule: a message counts
only under the terms of now; who says something of older ones is told the newer.

    coordinator  begins a store and orders updates   store_coordinator, store_order
    owner        has a shard and applies them        store_owner
    calls        pulls and pushes of our trainers    store_calls

What is promised while owners live: every pull is one consistent version, version k + 1 is version k
less gamma times the sum of M gradients, none read more than T versions before. When an owner is
lost the store goes on from the newest version that any survivor has pulled: what was applied or
taken after it is lost, and nothing is applied twice. Not promised: one store on two sides of a
partition; when they meet, the one with the higher ballot stays.
"""

from __future__ import annotations

from collections.abc import Callable

from moshpitd.core.effects import Send
from moshpitd.core.state import State
from moshpitd.core.store_calls import Calls
from moshpitd.core.store_common import SUSPECT_S, Common, Copy
from moshpitd.core.store_coordinator import Coordinator
from moshpitd.core.store_owner import Owner
from moshpitd.core.store_words import (
    Collected,
    DropStore,
    Gradient,
    GradientArrived,
    Seeded,
    ShardFailed,
    StoreAsk,
    StoreBehind,
    StoreBroken,
    StoreCancelled,
    StoreClosed,
    StoreEffect,
    StoreEvent,
    StoreFetch,
    StoreGone,
    StoreGrant,
    StoreHave,
    StoreHeld,
    StoreLeave,
    StoreMessage,
    StoreMissing,
    StoreOpened,
    StoreOrder,
    StorePull,
    StorePullAsked,
    StorePush,
    StorePushAsked,
    StoreReady,
    StoreTerms,
    StoreVerdict,
    StoreWait,
    StoreWanted,
)


class Storage:
    """Invariant: between two calls the inbox is empty: what we say to ourselves has been heard."""

    def __init__(
        self,
        me: str,
        *,
        live: Callable[[], list[str]],
        addresses: Callable[[str], tuple[str, ...]],
        parts: Callable[[], int],
    ) -> None:
        self.common = Common(me, live, addresses, parts)
        self.coordinator = Coordinator(self.common)
        self.owner = Owner(self.common)
        self.calls = Calls(self.common)

    @classmethod
    def of(cls, state: State) -> Storage:
        """Among the peers that a run's peer knows of."""

        def live() -> list[str]:
            return [heard.record.peer_id for heard in state.swarm.live(state.record.schema)]

        def addresses(peer: str) -> tuple[str, ...]:
            heard = state.swarm.heard.get(peer)
            return heard.record.addresses if heard is not None else ()

        return cls(
            state.peer_id, live=live, addresses=addresses, parts=lambda: len(state.part_sizes)
        )

    # -- the doors

    @property
    def idle(self) -> bool:
        """Nobody here uses a store, or is part of one."""
        common = self.common
        return common.promised.epoch == 0 and common.rules is None and not common.effects

    @property
    def on_duty(self) -> bool:
        """This peer coordinates a store, owns a shard or pulls from it, or is about to."""
        return self.common.terms is not None or self.coordinator.founding is not None

    def take_effects(self) -> list[Send | StoreEffect]:
        effects, self.common.effects = self.common.effects, []
        return effects

    def deadline(self) -> float | None:
        one, other = self.coordinator.deadline(), self.calls.deadline()
        if one is None or other is None:
            return other if one is None else one
        return min(one, other)

    def handle(self, event: StoreEvent, now: float) -> None:
        match event:
            case StoreOpened():
                self._opened(event)
            case StorePullAsked() | StorePushAsked():
                self.calls.asked(event, now)
                self._compare_rules()
            case StoreCancelled():
                self.calls.cancel(event.token)
            case StoreClosed():
                self._closed(event.worker)
            case ShardFailed():
                self.owner.failed(event.seed)
            case Seeded():
                self.owner.seeded(event.seed)
            case GradientArrived():
                self.owner.arrived(Gradient(event.peer, event.name))
            case Collected():
                self.calls.collected(event.pull)
        self.tick(now)

    def receive(self, sender: str, message: StoreMessage, now: float) -> None:
        self._heard(sender, message, now)
        self.tick(now)

    def lost(self, peer: str, now: float) -> None:
        """It cannot be reached, or has left."""
        if self.idle:
            return
        self.coordinator.lost(peer)
        self.owner.lost(peer)
        terms = self.common.terms
        if terms is not None and (
            peer in self.common.needed() or self.coordinator.founding is not None
        ):
            self._suspect(peer, now)
        self.tick(now)

    def reset(self, now: float) -> None:
        """Our last trainer is gone: this node is part of no store any more."""
        if self.idle:
            return
        self.coordinator.step_down()
        self.calls.restart(now)
        self.calls.rules.clear()
        self.common.terms = self.common.copy = self.common.rules = None
        self.common.do(DropStore())

    def tick(self, now: float) -> None:
        """Everything whose time has come, and what it leads to here."""
        common = self.common
        common.suspects = {p: until for p, until in common.suspects.items() if until > now}
        self._adopted(self.coordinator.conclude(now), now)
        for owner in self.coordinator.tick(now):
            self._suspect(owner, now)
        usable = not common.broken(now)
        due = any(call.next_at <= now for call in self.calls.calls.values())
        silent = self.calls.tick(now, usable=usable)
        if silent and silent != common.me:
            self._suspect(silent, now)
        elif usable and self.coordinator.ill_spread(now):
            self._found(now)
        elif due and not usable:
            if self.calls.stale(now):
                # Whoever has to begin a store does not; nor does it say anything.
                for peer in (common.winner(now), common.promised.coordinator):
                    if peer and peer != common.me and self.coordinator.founding is None:
                        common.suspects[peer] = now + SUSPECT_S
            self._mend(now)
        while common.inbox:
            self._heard(common.me, common.inbox.popleft(), now)

    # -- what others say

    def _heard(self, sender: str, message: StoreMessage, now: float) -> None:
        match message:
            case StoreAsk():
                self._asked(sender, message, now)
            case StoreHave():
                self._adopted(self.coordinator.promised(sender, message, now), now)
            case StoreTerms():
                self._told(sender, message, now)
            case StoreBroken():
                self._told_broken(sender, message, now)
            case StoreLeave():
                if message.worker.split("/")[0] == sender:
                    self.coordinator.forget(message.worker, message.number)
            case StoreWait():
                self.calls.waits(sender, message.number, now)
            case StoreGrant():
                if not self.common.broken(now):
                    self.calls.granted(message, now)
            case StoreGone():
                self.calls.gone(message.number, now)
            case StoreWanted():
                if not self.common.broken(now):
                    self.calls.wanted(message, now)
            case StoreVerdict():
                self.calls.decided(message)
            case _:
                self._of_terms(sender, message, now)

    def _of_terms(self, sender: str, message: StoreMessage, now: float) -> None:
        """What counts under one ballot only."""
        common = self.common
        ballot = getattr(message, "ballot", None)
        if ballot is None or not common.holds(ballot):
            terms = common.terms
            if terms is not None and common.holds(terms.ballot) and sender != common.me:
                common.say(sender, terms)
            return
        match message:
            case StoreMissing():
                self.owner.missing(sender)
            case StoreReady():
                self.coordinator.ready(sender, now)
            case StorePull() | StorePush() if message.worker.split("/")[0] != sender:
                return  # a worker is its own node's
            case StorePull():
                self.coordinator.pull(sender, message)
            case StorePush():
                self.coordinator.push(sender, message)
            case StoreFetch():
                self.owner.fetched(sender, message)
            case StoreHeld():
                self.coordinator.held(sender, message)
            case StoreOrder() if sender == ballot.coordinator:
                self.owner.ordered(message)
            case StoreBehind():
                if not self.coordinator.behind(sender, message):
                    self._suspect(sender, now)

    def _asked(self, sender: str, ask: StoreAsk, now: float) -> None:
        common = self.common
        terms = common.terms
        if (
            terms is not None
            and common.holds(terms.ballot)
            and (terms.ballot.epoch >= ask.ballot.epoch)
        ):
            common.say(sender, terms)
        elif not ask.ballot.epoch:
            common.say(sender, self.coordinator.have(ask.ballot))
        elif ask.ballot >= common.promised and ask.ballot.coordinator == sender:
            if ask.ballot > common.promised:
                common.promised = ask.ballot
                self.coordinator.step_down()
                self.calls.restart(now)
            common.say(sender, self.coordinator.have(ask.ballot))

    def _told(self, sender: str, terms: StoreTerms, now: float) -> None:
        common = self.common
        if common.terms is not None and terms.ballot == common.terms.ballot:
            if common.holds(terms.ballot) and sender == terms.ballot.coordinator:
                self.owner.again(terms)
        elif terms.ballot >= common.promised:
            self.coordinator.step_down()
            self._adopted(terms, now)
        elif common.terms is not None and common.holds(common.terms.ballot):
            common.say(sender, common.terms)

    def _told_broken(self, sender: str, broken: StoreBroken, now: float) -> None:
        common, terms = self.common, self.common.terms
        if terms is None or common.broken(now):
            self._mend(now)
        elif terms.ballot != broken.ballot or broken.owner not in common.needed():
            common.say(sender, terms)  # it does not know them yet
        elif broken.owner == common.me == terms.ballot.coordinator:
            self._found(now)
        else:
            self._suspect(broken.owner, now)

    # -- what follows

    def _found(self, now: float) -> None:
        """Begin a store. What we said that we hold must not change meanwhile: no pull that began
        under older terms may end."""
        self.calls.restart(now)
        self._adopted(self.coordinator.found(now), now)

    def _adopted(self, terms: StoreTerms | None, now: float) -> None:
        common = self.common
        if terms is None:
            return
        common.terms, common.promised = terms, terms.ballot
        if terms.seeder == common.me and common.copy is not None:
            # It is the beginning of this store now, and outranks what later versions of the one
            # before may still be somewhere.
            common.copy = Copy(terms.ballot.epoch, terms.version, terms.applied)
        self.owner.adopt(terms)
        self.calls.restart(now)
        self._compare_rules()

    def _compare_rules(self) -> None:
        """All trainers of a store give the same: those of one node, and of different ones."""
        terms = self.common.terms
        rules = terms.rules if terms is not None else self.common.rules
        if rules is not None:
            self.calls.compare(rules)

    def _opened(self, event: StoreOpened) -> None:
        common = self.common
        self.calls.rules[event.worker] = event.rules
        if common.rules is None:
            common.rules = event.rules
        if common.copy is None:
            common.copy = Copy(0, 0)

    def _closed(self, worker: str) -> None:
        self.calls.closed(worker)
        terms = self.common.terms
        if terms is not None:
            self.common.say(terms.ballot.coordinator, StoreLeave(worker))

    def _suspect(self, peer: str, now: float) -> None:
        """It owns nothing for a while; if it does now, there has to be a new store."""
        common = self.common
        if peer == common.me or peer in common.suspects:
            return
        common.suspects[peer] = now + SUSPECT_S
        self.coordinator.lost(peer)
        if peer in common.needed():
            self._mend(now)

    def _mend(self, now: float) -> None:
        """Begin a store if that is ours to do, else tell who has to."""
        common = self.common
        if self.coordinator.founding is not None or not common.broken(now):
            return
        winner = common.winner(now)
        if winner == common.me:
            self._found(now)
            return
        terms, able = common.terms, common.candidates(now)
        gone = [peer for peer in common.needed() if peer not in able]
        if terms is not None and gone:
            common.say(winner, StoreBroken(terms.ballot, gone[0]))
        else:
            common.say(winner, StoreBroken(common.promised, ""))
        asker = common.promised.coordinator  # it may have begun one and we did not hear of it
        if asker in able and asker not in (winner, common.me):
            common.say(asker, StoreBroken(common.promised, ""))
