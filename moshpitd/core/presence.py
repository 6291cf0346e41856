"""How a peer is seen: its record, announced in time and kept true, and the list of the others
looked up now and then.

In a large run the record lies in one of many shards, and a few of the others are looked up with it.
What was learned at the start is looked up again soon, after `EAGER_S`, then half as often each
time, down to once per `refresh_s`; while the shape of a large run changes, every `EAGER_S`.

One rule: whatever changes in a record reaches the directory within `refresh_s`, or within a third
of it on a grid, where the round in it keeps the others in step; and never more often, but for a
change of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moshpitd.core.effects import Announce, Effect, LookUp
from moshpitd.core.grid import PEERS_KEY
from moshpitd.core.messages import Record
from moshpitd.core.params import Params

LOOK_UP = 4  # as many answers of one peer each does the longest look-up wait for

EAGER_S = 1.0
"""Interval of look-ups after a start or a new shape: ten times what one takes abroad."""

UNSETTLED_S = 4.0
"""A shape that is proposed is stored, found and adopted everywhere within this."""


@dataclass(slots=True)
class Presence:
    """Invariant: `record.sequence` grows whenever anything else in the record does."""

    params: Params
    record: Record
    present: bool = False
    keys: tuple[str, ...] = (PEERS_KEY,)  # where our record lies; the first is our shard
    announced: Record | None = None
    announced_at: float = float("-inf")
    found_at: float = float("-inf")
    asked_at: float | None = None  # a look-up of our shard is on its way since then
    look_up_took: float = 0.0
    answered_at: float = float("-inf")  # also if the answer was that it failed
    failed: int = 0  # look-ups in a row that failed
    every_s: float = EAGER_S
    unsettled_until: float = float("-inf")
    again_at: float = float("inf")  # a look-up that is due whatever was found before
    on_grid: bool = False
    storing: bool = False  # the first announcement is on its way; the first look-up waits for it
    effects: list[Effect] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Our shard: the run's peers, or our part of them."""
        return self.keys[0]

    @property
    def retell_s(self) -> float:
        return self.params.refresh_s / 3 if self.on_grid else self.params.refresh_s

    def update(self, **changes: object) -> Record:
        """Our record with these changes, under a new number if there are any."""
        record = self.record
        if any(getattr(record, name) != value for name, value in changes.items()):
            changes["sequence"] = record.sequence + 1
            self.record = replace(record, **changes)  # type: ignore[arg-type]
        return self.record

    def appear(self, now: float) -> None:
        """A first trainer attached: be seen from now on.

        Store, then look up: of two peers that do it in this order at least one finds the other.
        """
        self.present = self.storing = True
        self.every_s = EAGER_S
        # Another number than in any goodbye before, also where nothing else has changed.
        self.record = replace(self.record, sequence=self.record.sequence + 1)
        self._announce(now)

    def move(self, keys: tuple[str, ...], now: float) -> None:
        """The run is of another size: our record belongs under other keys now."""
        old = self.keys
        if keys == old:
            return
        self.keys, self.asked_at = keys, None
        self.storing = self.present and keys[0] != old[0]
        if self.present:
            self._withdraw([key for key in old if key not in keys])
            self._announce(now)

    def hurry(self, now: float) -> None:
        """Things change: look again soon."""
        self.every_s, self.unsettled_until = EAGER_S, now + UNSETTLED_S

    def look_again(self, at: float) -> None:
        """Those that are in step with us will have told so by then."""
        self.again_at = at

    def stored(self, now: float) -> None:
        if self.storing:
            self.storing = False
            self.look_up(now)

    def vanish(self) -> None:
        if self.present:
            self._withdraw(self.keys)
        self.present = self.storing = False
        self.asked_at = None
        self.announced, self.announced_at = None, float("-inf")

    def look_up(self, now: float) -> None:
        if self.asked_at is None and not self.storing:
            self.asked_at = now
            if now >= self.again_at:
                self.again_at = float("inf")
            self.effects.append(LookUp(self.key))

    def found(self, now: float, *, ok: bool) -> None:
        if self.asked_at is not None:
            # Those that announce meanwhile need as long to find us; not longer because somebody in
            # the directory stood still for us.
            self.look_up_took = min(now - self.asked_at, self.params.answer_timeout_s / 2)
        self.asked_at = None
        self.failed = 0 if ok else self.failed + 1
        self.answered_at = now
        if ok:
            self.found_at = now
            if now >= self.unsettled_until:
                self.every_s = min(2 * self.every_s, self.params.refresh_s)

    @property
    def _patience_s(self) -> float:
        """After this, a look-up that has not ended is made again."""
        return LOOK_UP * self.params.answer_timeout_s

    def fresh(self, now: float) -> bool:
        """Whether the last answer will do. As old as those that we get in the background may be, it
        will: a machine that stands still in the directory makes every look-up take seconds."""
        return now - self.found_at <= max(
            self.params.found_fresh_s, self.every_s + self._patience_s
        )

    def tick(self, now: float) -> None:
        if not self.present:
            return
        if self.asked_at is not None and now >= self.asked_at + self._patience_s:
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
        for key in self.keys:
            self.effects.append(Announce(key, self.record, self.params.ttl_s))

    def _withdraw(self, keys: Sequence[str]) -> None:
        """A ttl of 0 takes a record back."""
        for key in keys:
            self.effects.append(Announce(key, self.record, 0.0))

    def _announce_at(self) -> float:
        announced = self.announced
        if announced is self.record:  # the number grows with every change, so this is as good
            return self.announced_at + self.params.ttl_s / 3
        changed = announced is None or announced.sequence != self.record.sequence
        return self.announced_at + (self.retell_s if changed else self.params.ttl_s / 3)

    def _look_up_at(self) -> float:
        if self.asked_at is not None:
            return self.asked_at + self._patience_s
        if self.storing or self.answered_at == float("-inf"):
            return self.announced_at + self.params.answer_timeout_s
        return min(self.answered_at + self.every_s, self.again_at)
