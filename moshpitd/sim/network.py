"""Who hears what, how late, and what the directory answers. One rule: it decides and remembers, but
schedules nothing; the world turns its delays into events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist

from moshpitd.core.messages import Record
from moshpitd.sim.faults import Options, stream
from moshpitd.sim.plan import Partition

_NORMAL = NormalDist()
SAMPLED = 4096
"""Enough for a median."""

AFTER_S = 1e-6
"""What is said after another thing comes so much after it: more than sums of times are off by."""

ANSWER_RECORDS = 2048
"""More records than that under one key are no answer at all: hivemind's unary messages end at about
2 MiB, and a record with its addresses and signature is about 1 KiB."""


class Links:
    """Delays and losses of control messages. Invariant: a link's base delay is a function of the
    seed and the two ends alone, so it costs nothing until it is used and no order of use changes
    it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._base: dict[int, float] = {}
        self._jitter = stream(options.seed, "jitter")
        self._loss = stream(options.seed, "loss")
        self._duplicates = stream(options.seed, "duplicates")
        self._held = stream(options.seed, "held")
        self._unreached = stream(options.seed, "unreached")
        self._apart: dict[int, tuple[Partition, frozenset[int]]] = {}  # partitions that are on
        self._oneway: dict[tuple[int, int], bool] = {}
        self.loss, self.duplicates, self.held = options.loss, options.duplicates, options.held
        self.oneway = options.oneway

    def calm(self) -> None:
        """Phase two: from now on every message arrives, once."""
        self.loss = self.duplicates = self.held = self.oneway = 0.0
        self._apart.clear()

    def latency(self, one: int, other: int) -> float:
        """One-way base delay, the same in both directions."""
        low, high = (one, other) if one < other else (other, one)
        pair = low << 32 | high  # a number takes a third of the room of a pair
        base = self._base.get(pair)
        if base is None:
            name = f"{self._options.seed}/link/{low}/{high}"
            number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
            spread = _NORMAL.inv_cdf((number + 0.5) / 2.0**64)
            base = self._options.latency_s * math.exp(self._options.latency_sigma * spread)
            self._base[pair] = base
        return base

    def delay(self, one: int, other: int) -> float:
        """Delay of one control message."""
        jitter = self._options.jitter_sigma
        factor = self._jitter.lognormvariate(0.0, jitter) if jitter else 1.0
        return self.latency(one, other) * factor

    def delays(self, first: float) -> list[float]:
        """When the copies of a message arrive that would take `first`: usually one."""
        if self.held > 0.0 and self._held.random() < self.held:
            first += self._held.uniform(0.0, self._options.held_s)
        if self.duplicates > 0.0 and self._duplicates.random() < self.duplicates:
            return [first, first + self._duplicates.uniform(0.0, self._options.held_s)]
        return [first]

    # -- who reaches whom

    def split(self, number: int, partition: Partition) -> None:
        self._apart[number] = (partition, frozenset(partition.apart))

    def heal(self, number: int) -> None:
        self._apart.pop(number, None)

    @property
    def parted(self) -> bool:
        return bool(self._apart)

    def apart(self, one: int, other: int) -> Partition | None:
        """The partition between these two that lasts longest."""
        between = [
            partition
            for partition, side in self._apart.values()
            if (one in side) is not (other in side)
        ]
        return max(between, key=lambda it: it.until) if between else None

    def lonely(self, index: int) -> bool:
        """Is it cut off from all others?"""
        return any(partition.apart == (index,) for partition, _ in self._apart.values())

    def reaches(self, one: int, other: int) -> bool:
        """Does what `one` sends get to `other`? Not always the same both ways."""
        if self._apart and self.apart(one, other) is not None:
            return False
        if self.oneway <= 0.0:
            return True
        blocked = self._oneway.get((one, other))
        if blocked is None:
            rng = stream(self._options.seed, "oneway", one, other)
            blocked = self._oneway[one, other] = rng.random() < self._options.oneway
        return not blocked

    def blocked(self, one: int, other: int) -> bool:
        """Was either kept from reaching the other, as far as they tried, while that was so?"""
        return self._oneway.get((one, other), False) or self._oneway.get((other, one), False)

    def is_told(self) -> bool:
        """Does the sender of a message that reached nobody learn it?"""
        return self._unreached.random() >= self._options.loss_silent

    # -- losses

    def fate(self) -> str:
        """What happens to one control message: "" (it arrives), "lost" or "reported" (lost, and the
        sender learns it)."""
        if self.loss <= 0.0 or self._loss.random() >= self.loss:
            return ""
        return "lost" if self._loss.random() < self._options.loss_silent else "reported"


@dataclass(slots=True)
class _Stored:
    record: Record
    stored_at: float
    visible_at: float
    expires_at: float


@dataclass(slots=True)
class _Slot:
    """What one peer stored under one key: the newest, and the one before it while the newest is not
    yet visible."""

    kept: list[_Stored] = field(default_factory=list)


@dataclass(slots=True)
class _Whole:
    """All that is to be seen under one key, in order of the first store, and until when nothing of
    it expires."""

    records: dict[str, Record]
    until: float


class Directory:
    """key -> records with a ttl. Invariant: what a peer says later under a key wins, whatever the
    record says of itself, as in a DHT, where it has the later expiry."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._slots: dict[str, dict[str, _Slot]] = {}
        self._whole: dict[str, _Whole] = {}  # keys under which nothing is late
        self._duration = stream(options.seed, "directory", "duration")
        self._stale = stream(options.seed, "directory", "stale")
        self._hidden = stream(options.seed, "directory", "hidden")
        self._fails = stream(options.seed, "directory", "fails")
        self._cut = stream(options.seed, "directory", "cut")
        self.stale, self.hidden, self.fails = options.stale, options.hidden, options.directory_fails
        self._due: dict[tuple[str, str], float] = {}  # (key, peer) -> when its last store is done
        self.longest = 0.0  # operation so far
        self.sampled: list[float] = []  # durations of the first SAMPLED operations

    def calm(self) -> None:
        """Phase two: from now on every operation works and answers are whole."""
        self.stale = self.hidden = self.fails = 0.0

    def duration(self) -> float:
        """How long one operation takes."""
        spread = self._duration.lognormvariate(0.0, self._options.directory_sigma)
        took = self._options.directory_s * spread
        self.longest = max(self.longest, took)
        if len(self.sampled) < SAMPLED:
            self.sampled.append(took)
        return took

    def storing(self, key: str, peer_id: str, now: float) -> float:
        """How long this store takes: a goodbye never comes before what it takes back."""
        due = max(now + self.duration(), self._due.get((key, peer_id), 0.0) + AFTER_S)
        self._due[key, peer_id] = due
        return due - now

    def works(self) -> bool:
        return self.fails <= 0.0 or self._fails.random() >= self.fails

    def store(self, key: str, record: Record, *, ttl_s: float, now: float) -> None:
        """Of a ttl of 0: take it back."""
        if self._due.get((key, record.peer_id), math.inf) <= now + AFTER_S / 2:
            del self._due[key, record.peer_id]
        whole = self._whole.get(key)
        if ttl_s <= 0.0:
            self._slots.get(key, {}).pop(record.peer_id, None)
            if whole is not None:
                whole.records.pop(record.peer_id, None)
            return
        late = 0.0
        if self.stale > 0.0 and self._stale.random() < self.stale:
            late = self._options.stale_s * self._stale.lognormvariate(0.0, 0.5)
        slots = self._slots.setdefault(key, {})
        slot = slots.get(record.peer_id)
        if slot is None:
            slot = slots[record.peer_id] = _Slot()
        seen = [stored for stored in slot.kept if stored.visible_at <= now][-1:]
        if late:
            self._whole.pop(key, None)
        elif whole is not None:
            whole.records[record.peer_id] = record
            whole.until = min(whole.until, now + ttl_s)
        # Of what stood there before only the newest matters, and only while this one is not seen.
        before = seen if late else ()
        slot.kept = [*before, _Stored(record, now, now + late, now + ttl_s)]

    def crowd(self, key: str, now: float) -> int:
        """How many have a record under `key` now."""
        return sum(it.kept[-1].expires_at > now for it in self._slots.get(key, {}).values())

    def find(
        self,
        key: str,
        *,
        asker: str,
        now: float,
        unseen: Callable[[str, float], bool] | None = None,
    ) -> tuple[Record, ...] | None:
        """Records under `key` but the asker's own, in order of their first store; None when they
        are too many for one answer.

        `unseen(peer, stored at)`: behind a partition. An answer that is too long for the option's
        limit is cut, each time elsewhere.
        """
        slots = self._slots.get(key)
        if not slots:
            return ()
        if len(slots) > ANSWER_RECORDS:
            return None
        whole = self._whole.get(key) if unseen is None else None
        if whole is None or now >= whole.until:
            shown = self._shown(key, slots, now, unseen)
        else:
            shown = whole.records
        if asker in shown:
            shown = shown.copy()
            del shown[asker]
        found = tuple(shown.values())
        if self.hidden > 0.0:
            found = tuple(it for it in found if self._hidden.random() >= self.hidden)
        most = self._options.directory_answer
        if most and len(found) > most:
            start = self._cut.randrange(len(found))
            found = (*found[start:], *found[:start])[:most]
        return found

    def _shown(
        self,
        key: str,
        slots: dict[str, _Slot],
        now: float,
        unseen: Callable[[str, float], bool] | None,
    ) -> dict[str, Record]:
        """What is there to be seen; it is kept up from now on if that is all."""
        found: dict[str, Record] = {}
        dead: list[str] = []
        whole, until = unseen is None, math.inf
        for peer_id, slot in slots.items():
            newest = slot.kept[-1]
            if newest.visible_at <= now < newest.expires_at and unseen is None:
                found[peer_id] = newest.record
                until = min(until, newest.expires_at)
                continue
            if all(stored.expires_at <= now for stored in slot.kept):
                dead.append(peer_id)
                continue
            whole = False
            shown = [
                s.record
                for s in slot.kept
                if s.visible_at <= now < s.expires_at
                and not (unseen is not None and unseen(peer_id, s.stored_at))
            ]
            if shown:
                found[peer_id] = shown[-1]
        for peer_id in dead:
            del slots[peer_id]
        if whole:
            self._whole[key] = _Whole(found, until)
        else:
            self._whole.pop(key, None)
        return found
