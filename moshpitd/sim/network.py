"""Who hears what, how late, and what the directory answers. One rule: it decides and remembers, but
schedules nothing; the world turns its delays into events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist

from moshpitd.core.messages import Record
from moshpitd.sim.faults import Options, stream

_NORMAL = NormalDist()
ANSWER_RECORDS = 2048
"""More records than that under one key are no answer at all: hivemind's unary messages end at about
2 MiB, and a record with its addresses and signature is about 1 KiB."""


class Links:
    """Delays and losses of control messages. Invariant: a link's base delay is a function of the
    seed and the two ends alone, so it costs nothing until it is used and no order of use changes
    it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._base: dict[tuple[int, int], float] = {}
        self._jitter = stream(options.seed, "jitter")
        self._loss = stream(options.seed, "loss")
        self.loss = options.loss

    def latency(self, one: int, other: int) -> float:
        """One-way base delay, the same in both directions."""
        pair = (one, other) if one < other else (other, one)
        base = self._base.get(pair)
        if base is None:
            name = f"{self._options.seed}/link/{pair[0]}/{pair[1]}"
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

    def fate(self) -> str:
        """What happens to one control message: "" (it arrives), "lost" or "reported" (lost, and the
        sender learns it)."""
        if self.loss <= 0.0 or self._loss.random() >= self.loss:
            return ""
        return "lost" if self._loss.random() < self._options.loss_silent else "reported"


@dataclass(slots=True)
class _Stored:
    record: Record
    visible_at: float
    expires_at: float


@dataclass(slots=True)
class _Slot:
    """What one peer stored under one key: the newest, and the one before it while the newest is not
    yet visible."""

    kept: list[_Stored] = field(default_factory=list)


class Directory:
    """key -> records with a ttl. Invariant: the later store wins, whatever the record says of
    itself, as in a DHT."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._slots: dict[str, dict[str, _Slot]] = {}
        self._duration = stream(options.seed, "directory", "duration")
        self._stale = stream(options.seed, "directory", "stale")
        self._hidden = stream(options.seed, "directory", "hidden")
        self._fails = stream(options.seed, "directory", "fails")
        self.stale, self.hidden, self.fails = options.stale, options.hidden, options.directory_fails

    def calm(self) -> None:
        """Phase two: from now on every operation works and answers are whole."""
        self.stale = self.hidden = self.fails = 0.0

    def duration(self) -> float:
        """How long one operation takes."""
        return self._options.directory_s * self._duration.lognormvariate(
            0.0, self._options.directory_sigma
        )

    def works(self) -> bool:
        return self.fails <= 0.0 or self._fails.random() >= self.fails

    def store(self, key: str, record: Record, *, ttl_s: float, now: float) -> None:
        """Of a ttl of 0: take it back."""
        if ttl_s <= 0.0:
            self._slots.get(key, {}).pop(record.peer_id, None)
            return
        late = 0.0
        if self.stale > 0.0 and self._stale.random() < self.stale:
            late = self._options.stale_s * self._stale.lognormvariate(0.0, 0.5)
        slots = self._slots.setdefault(key, {})
        slot = slots.get(record.peer_id)
        if slot is None:
            slot = slots[record.peer_id] = _Slot()
        seen = [stored for stored in slot.kept if stored.visible_at <= now][-1:]
        slot.kept = [*(seen if late else ()), _Stored(record, now + late, now + ttl_s)]

    def find(self, key: str, *, asker: str, now: float) -> tuple[Record, ...] | None:
        """Records under `key` but the asker's own, in order of their first store; None when they
        are too many for one answer."""
        slots = self._slots.get(key)
        if not slots:
            return ()
        if len(slots) > ANSWER_RECORDS:
            return None
        found: list[Record] = []
        dead: list[str] = []
        for peer_id, slot in slots.items():
            newest = slot.kept[-1]
            if newest.visible_at <= now < newest.expires_at:
                record = newest.record
            else:
                if all(stored.expires_at <= now for stored in slot.kept):
                    dead.append(peer_id)
                    continue
                shown = [s.record for s in slot.kept if s.visible_at <= now < s.expires_at]
                if not shown:
                    continue
                record = shown[-1]
            if peer_id == asker:
                continue
            if self.hidden > 0.0 and self._hidden.random() < self.hidden:
                continue
            found.append(record)
        for peer_id in dead:
            del slots[peer_id]
        return tuple(found)
