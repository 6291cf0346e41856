"""Pulls and pushes of this node's trainers on their way through a store. One rule: a call is begun
anew, under a new number, whenever the store is; so an answer to an old number says nothing.

A push that was answered is never sent again, and one that was not keeps its sequence, by which a
store knows whether it is inside already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpitd.core.store_common import SILENT_S, Common, Copy, again_s
from moshpitd.core.store_words import (
    Collect,
    DropPull,
    Rules,
    SendGradient,
    StoreAnswer,
    StoreFetch,
    StoreGrant,
    StoreLeave,
    StorePull,
    StorePullAsked,
    StorePush,
    StorePushAsked,
    StoreVerdict,
    StoreWanted,
    name_of,
    owner_of,
)


@dataclass(slots=True)
class Call:
    """One trainer's call. `number` 0: not said to anybody yet."""

    token: str
    worker: str
    push: StorePushAsked | None = None
    sequence: int = 0
    number: int = 0
    granted: StoreGrant | None = None
    tries: int = 0
    next_at: float = float("-inf")
    heard_at: float = 0.0
    spoke: dict[str, float] = field(default_factory=dict)  # owners that a pull waits for


class Calls:
    """Invariant: `calls` are those that no answer was given to."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.calls: dict[str, Call] = {}  # by token
        self.rules: dict[str, Rules] = {}  # that each worker opened its store with
        self._numbers = 0
        self._sequences: dict[str, int] = {}

    def deadline(self) -> float | None:
        return min(call.next_at for call in self.calls.values()) if self.calls else None

    def asked(self, event: StorePullAsked | StorePushAsked, now: float) -> None:
        call = Call(event.token, event.worker, heard_at=now, next_at=now)
        if isinstance(event, StorePushAsked):
            call.push = event
            call.sequence = self._sequences[event.worker] = (
                self._sequences.get(event.worker, -1) + 1
            )
        self.calls[event.token] = call

    def cancel(self, token: str) -> None:
        call = self.calls.pop(token, None)
        if call is None:
            return
        self._drop(call)
        terms = self.common.terms
        if call.push is None and call.number and terms is not None:
            # What it was granted, or will be, would hold the others up until it pulls again.
            self.common.say(terms.ballot.coordinator, StoreLeave(call.worker, call.number))

    def closed(self, worker: str) -> None:
        """Whoever calls this tells the coordinator."""
        self._sequences.pop(worker, None)
        self.rules.pop(worker, None)
        for call in [call for call in self.calls.values() if call.worker == worker]:
            del self.calls[call.token]
            self._drop(call)

    def compare(self, rules: Rules) -> None:
        """Calls of trainers that asked for other rules than the store's end so: their gradients
        would be applied with a step, or at an age, that they did not choose."""
        for call in list(self.calls.values()):
            own = self.rules.get(call.worker, rules)
            if own != rules:
                self.cancel(call.token)
                detail = f"the store has {rules}, expected by this trainer: {own}"
                self.common.do(StoreAnswer(call.token, refusal="store_differs", detail=detail))

    def restart(self, now: float) -> None:
        """There is a new store, or none: whatever was said is void."""
        for call in self.calls.values():
            self._drop(call)
            call.number, call.tries, call.granted = 0, 0, None
            call.next_at = call.heard_at = now

    def tick(self, now: float, *, usable: bool) -> str:
        """Say what is due; who has been silent for too long, if anybody. Without a usable store
        only the time of the next look is set: whoever begins one is told by others."""
        for call in list(self.calls.values()):
            if now < call.next_at:
                continue
            call.next_at = now + again_s(call.tries)
            call.tries += 1
            if not usable:
                continue
            silent = self._silent(call, now)
            if silent:
                call.heard_at, call.tries = now, 0
                return silent
            self._say(call)
        return ""

    def stale(self, now: float) -> bool:
        """Whether a call has waited in vain; then all begin to wait anew."""
        found = any(now - call.heard_at > SILENT_S for call in self.calls.values())
        if found:
            for call in self.calls.values():
                call.heard_at, call.tries = now, 0
        return found

    # -- what comes back

    def waits(self, sender: str, number: int, now: float) -> None:
        call = self._call(number)
        if call is not None:
            call.heard_at = call.spoke[sender] = now

    def granted(self, grant: StoreGrant, now: float) -> None:
        call, common = self._call(grant.number), self.common
        if call is None or call.push is not None or call.granted is not None:
            return
        assert common.terms is not None  # whoever grants has terms, which the caller compared
        call.granted, call.tries, call.heard_at = grant, 0, now
        call.next_at = now + again_s(0)
        call.spoke = dict.fromkeys(common.terms.owners, now)
        owners = tuple(owner_of(part, common.terms.owners) for part in range(common.parts()))
        pull = name_of("pull", common.me, call.number)
        common.do(Collect(pull, grant.version, owners))
        self._fetch(call, grant, again=False)

    def gone(self, number: int, now: float) -> None:
        """We were too slow for that version."""
        call = self._call(number)
        if call is not None:
            self._drop(call)
            call.number, call.tries, call.granted = 0, 0, None
            call.next_at = call.heard_at = now

    def collected(self, pull: bytes) -> None:
        for call in self.calls.values():
            if call.granted is not None and name_of("pull", self.common.me, call.number) == pull:
                break
        else:
            return
        grant, terms = call.granted, self.common.terms
        assert terms is not None  # a new store would have taken the grant away
        del self.calls[call.token]
        self.common.copy = Copy(terms.ballot.epoch, grant.version, grant.applied)
        self.common.do(StoreAnswer(call.token, pull, version=grant.version))

    def wanted(self, wanted: StoreWanted, now: float) -> None:
        call = self._call(wanted.number)
        if call is not None and call.push is not None:
            call.heard_at = now
            self._send(call, wanted.owners)

    def decided(self, verdict: StoreVerdict) -> None:
        call = self._call(verdict.number)
        if call is not None and call.push is not None:
            del self.calls[call.token]
            self.common.do(StoreAnswer(call.token, verdict=verdict.verdict))

    # -- below

    def _call(self, number: int) -> Call | None:
        if number < 1:  # a call that was not said to anybody yet has 0
            return None
        return next((call for call in self.calls.values() if call.number == number), None)

    def _say(self, call: Call) -> None:
        common, terms = self.common, self.common.terms
        assert terms is not None  # a usable store has terms
        again = call.number != 0
        if not again:
            self._numbers += 1
            call.number = self._numbers
        coordinator = terms.ballot.coordinator
        if call.push is not None:
            if not again:
                self._send(call, terms.owners)
            push = StorePush(
                terms.ballot, call.worker, call.sequence, call.number, call.push.version, again
            )
            common.say(coordinator, push)
        elif call.granted is not None:
            self._fetch(call, call.granted, again=True)
        else:
            common.say(coordinator, StorePull(terms.ballot, call.worker, call.number))

    def _send(self, call: Call, owners: tuple[str, ...]) -> None:
        terms = self.common.terms
        assert terms is not None  # callers have looked
        name = self.common.gradient(call.worker, call.sequence, terms.ballot).name
        for owner in owners:
            parts = self.common.shard(owner)
            if parts:
                self.common.do(SendGradient(owner, call.token, name, terms.ballot.epoch, parts))

    def _fetch(self, call: Call, grant: StoreGrant, *, again: bool) -> None:
        terms = self.common.terms
        assert terms is not None  # callers have looked
        for owner in terms.owners:
            self.common.say(owner, StoreFetch(terms.ballot, call.number, grant.version, again))

    def _silent(self, call: Call, now: float) -> str:
        """Whom this call has asked in vain: the coordinator, and once it has answered, an owner."""
        terms, since = self.common.terms, now - SILENT_S
        if not call.number or terms is None:
            return ""
        if call.granted is None:
            return terms.ballot.coordinator if call.heard_at < since else ""
        late = [owner for owner, at in call.spoke.items() if at < since]
        return next((owner for owner in late if owner != self.common.me), "")

    def _drop(self, call: Call) -> None:
        if call.granted is not None:
            self.common.do(DropPull(name_of("pull", self.common.me, call.number)))
