"""How a peer is seen: its record, announced in time and kept true, and the list of the others
looked up now and then.

One rule: whatever changes in a record reaches the directory within `refresh_s`, and never more
often.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moshpitd.core.effects import Announce, Effect, LookUp
from moshpitd.core.grid import PEERS_KEY
from moshpitd.core.messages import Record
from moshpitd.core.params import Params


@dataclass(slots=True)
class Presence:
    """Invariant: `record.sequence` grows whenever anything else in the record does."""

    params: Params
    record: Record
    present: bool = False
    announced: Record | None = None
    announced_at: float = float("-inf")
    found_at: float = float("-inf")
    asked_at: float | None = None  # a look-up of the peers' key is on its way since then
    look_up_took: float = 0.0
    storing: bool = False  # the first announcement is on its way; the first look-up waits for it
    effects: list[Effect] = field(default_factory=list)

    def update(self, **changes: object) -> Record:
        """Our record with these changes, under a new number if there are any."""
        changed = replace(self.record, **changes)  # type: ignore[arg-type]
        if changed != self.record:
            self.record = replace(changed, sequence=self.record.sequence + 1)
        return self.record

    def appear(self, now: float) -> None:
        """A first trainer attached: be seen from now on.

        Store, then look up: of two peers that do it in this order at least one finds the other.
        """
        self.present = self.storing = True
        self._announce(now)

    def stored(self, now: float) -> None:
        if self.storing:
            self.storing = False
            self.look_up(now)

    def vanish(self) -> None:
        self.present = self.storing = False
        self.asked_at = None
        self.announced, self.announced_at = None, float("-inf")

    def look_up(self, now: float) -> None:
        if self.asked_at is None and not self.storing:
            self.asked_at = now
            self.effects.append(LookUp(PEERS_KEY))

    def found(self, now: float, *, ok: bool) -> None:
        if self.asked_at is not None:
            self.look_up_took = now - self.asked_at
        self.asked_at = None
        if ok:
            self.found_at = now

    def fresh(self, now: float) -> bool:
        return now - self.found_at <= self.params.found_fresh_s

    def tick(self, now: float) -> None:
        if not self.present:
            return
        if self.asked_at is not None and now >= self.asked_at + 4 * self.params.answer_timeout_s:
            self.asked_at = None  # the directory never answered; it may later, which does no harm
        if now >= self._announce_at():
            self._announce(now)
        if now >= self._look_up_at():
            self.storing = False  # the store has had its time: look up all the same
            self.look_up(now)

    def deadline(self) -> float | None:
        if not self.present:
            return None
        return min(self._announce_at(), self._look_up_at())

    def _announce(self, now: float) -> None:
        self.announced, self.announced_at = self.record, now
        self.effects.append(Announce(PEERS_KEY, self.record, self.params.ttl_s))

    def _announce_at(self) -> float:
        # The number grows with every change, so it says the same as comparing the records.
        changed = self.announced is None or self.announced.sequence != self.record.sequence
        return self.announced_at + (self.params.refresh_s if changed else self.params.ttl_s / 3)

    def _look_up_at(self) -> float:
        if self.asked_at is not None:
            return self.asked_at + 4 * self.params.answer_timeout_s
        if self.storing or self.found_at == float("-inf"):
            return self.announced_at + self.params.answer_timeout_s
        return self.found_at + self.params.refresh_s
