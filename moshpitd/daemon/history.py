"""What happened to a run's rounds, for `rounds` and `status`. One rule: it is written from the
core's notes alone, so that it cannot say anything else than the metrics and the log."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moshpitd.core.effects import Note

KEPT = 256
"""Rounds that are remembered: an evening at one round a minute, about 200 KiB."""
EXCLUDED_KEPT = 64  # a group has no more members


@dataclass(frozen=True, slots=True)
class RoundLine:
    """One call of a trainer that came to an end; `ended_at` on this process's monotonic clock."""

    round: int
    status: str
    reason: str
    detail: str
    group_size: int
    participants: int
    version: int
    seconds: float
    phases: dict[str, float]
    bytes_sent: int
    bytes_received: int
    excluded: tuple[tuple[str, str], ...]
    group_id: bytes
    ended_at: float


@dataclass(slots=True)
class History:
    """Invariant: `lines` holds at most KEPT rounds, the newest last; `outcomes` counts all of them.

    `counters(group_id)` gives (bytes sent, bytes received) of a group of this run.
    """

    counters: Callable[[bytes], tuple[int, int]]
    lines: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=KEPT))
    outcomes: Counter[str] = field(default_factory=Counter)
    _round: int = 0
    _groups: list[bytes] = field(default_factory=list)
    _excluded: dict[str, str] = field(default_factory=dict)
    _bytes: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict)

    def note(self, note: Note) -> RoundLine | None:
        """Take a note in; the finished line when it ends a round."""
        match note.what:
            case "attempt_started":
                self._round = _integer(note.fields.get("round"))
            case "group_formed":
                self._groups.append(bytes.fromhex(str(note.fields.get("group", ""))))
            case "member_excluded" if len(self._excluded) < EXCLUDED_KEPT:
                self._excluded.setdefault(note.peer, note.reason)
            case "round_ended":
                return self._ended(note)
            case _:
                pass
        return None

    def bytes_of(self, group_id: bytes) -> tuple[int, int]:
        """(sent, received) in all rounds of the call that this group belongs to."""
        return self._bytes.get(group_id, (0, 0))

    def _ended(self, note: Note) -> RoundLine:
        counted = [self.counters(group) for group in self._groups]
        total = (sum(sent for sent, _ in counted), sum(received for _, received in counted))
        for group in self._groups:
            self._bytes[group] = total
        while len(self._bytes) > KEPT:
            self._bytes.popitem(last=False)
        fields = note.fields
        line = RoundLine(
            round=self._round,
            status=str(fields.get("outcome", "")),
            reason=note.reason,
            detail=note.detail,
            group_size=_integer(fields.get("group_size")),
            participants=_integer(fields.get("participants")),
            version=_integer(fields.get("version")),
            seconds=_number(fields.get("took")),
            phases=_phases(fields.get("seconds")),
            bytes_sent=total[0],
            bytes_received=total[1],
            excluded=tuple(self._excluded.items()),
            group_id=bytes.fromhex(str(fields.get("group", ""))),
            ended_at=time.monotonic(),
        )
        self.lines.append(line)
        self.outcomes[line.status] += 1
        self._groups.clear()
        self._excluded.clear()
        return line


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _phases(value: Any) -> dict[str, float]:
    return {str(k): _number(v) for k, v in value.items()} if isinstance(value, dict) else {}
