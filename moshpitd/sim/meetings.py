"""What must hold of matchmaking (DESIGN 6), judged from outside: an attempt ends in time, in a
group or with a sentence, and two that could have met do not both end alone.

One rule: it knows what peers said and when, and what the links let through, never what a Peer
thinks; where a fault may excuse a missed meeting, none is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from moshpitd.core.effects import Announce, Effect, Note, Send
from moshpitd.core.grid import PEERS_KEY
from moshpitd.core.messages import Declined, Record
from moshpitd.core.outcome import Reason
from moshpitd.sim.faults import Options
from moshpitd.sim.network import Directory, Links
from moshpitd.sim.nodes import Node

JITTER = 3.0
"""Round trips are taken for so many spreads longer than their median."""
WAITED = (Reason.NO_PEERS, Reason.TIMEOUT)
"""Attempts that ended so have looked for somebody until the end; others were called off."""


OF_ATTEMPTS = frozenset(("attempt_started", "group_formed", "attempt_ended"))
"""Notes that tell of one; most others are of peers that were heard."""


class Fail(Protocol):
    def __call__(self, what: str, *nodes: Node) -> object: ...


@dataclass(slots=True)
class Attempt:
    """One peer's search for a group under one key."""

    node: Node
    key: str
    round: Any
    started: float
    ended: float = math.inf
    disturbed: bool = False  # it stood still meanwhile
    record: Record | None = None
    crowd: int = 0  # under a key of the grid when it began


class Meetings:
    """Invariant: at most one attempt is open per node."""

    def __init__(
        self, options: Options, links: Links, directory: Directory, now: Callable[[], float]
    ) -> None:
        self._options, self._links, self._directory, self._now = options, links, directory, now
        self.quiet_since = 0.0 if options.everybody_can_meet() else math.inf
        """From then on every message arrives and every answer of the directory is whole."""
        self._open: dict[int, Attempt] = {}
        self._alone: dict[tuple[str, object], list[Attempt]] = {}
        self._refused: dict[tuple[int, int], float] = {}
        self._records: dict[int, Record] = {}

    def died(self, node: Node) -> None:
        self._open.pop(node.index, None)
        self._records.pop(node.index, None)

    def frozen(self, node: Node) -> None:
        if node.index in self._open:
            self._open[node.index].disturbed = True

    def said(self, node: Node, effect: Effect, to: Node | None) -> None:
        if isinstance(effect, Send):
            message = effect.message
            record = getattr(message, "record", None)
            if record is None or record is self._records.get(node.index):
                pass  # nearly always
            elif isinstance(record, Record) and record.peer_id == node.peer_id:
                self._records[node.index] = record
            if isinstance(message, Declined) and to is not None:
                self._refused[node.index, to.index] = self._now()
        elif isinstance(effect, Announce):
            self._records[node.index] = effect.record

    def noted(self, node: Node, note: Note, fail: Fail) -> None:
        if note.what == "attempt_started":
            key = str(note.fields.get("key", ""))
            # In the flat run everybody has one key whatever its round.
            number = None if key == PEERS_KEY else note.fields.get("round")
            self._open[node.index] = Attempt(
                node, key, number, self._now(), disturbed=node.thaws_at is not None,
                crowd=0 if number is None else self._directory.crowd(key, self._now()),
            )  # fmt: skip
        elif note.what in ("group_formed", "attempt_ended"):
            attempt = self._open.pop(node.index, None)
            if attempt is None:
                fail(f"notes {note.what} without an attempt", node)
                return
            self._took(attempt, fail)
            if note.what == "attempt_ended":
                if not note.reason or not note.detail:
                    fail("ends an attempt without a reason and a sentence", node)
                self._ended_alone(attempt, note.reason, fail)

    def _took(self, attempt: Attempt, fail: Fail) -> None:
        attempt.ended = self._now()
        attempt.record = self._records.get(attempt.node.index)
        bound = self._options.params.attempt_timeout_s / attempt.node.clock_rate + 1e-3
        took = attempt.ended - attempt.started
        if took > bound and not attempt.disturbed:
            fail(f"ends an attempt after {took:.3f} s, the bound is {bound:.3f} s", attempt.node)

    def _ended_alone(self, attempt: Attempt, reason: str, fail: Fail) -> None:
        if reason not in WAITED or attempt.disturbed or attempt.record is None:
            return
        if attempt.started < self.quiet_since or attempt.node.gone or attempt.node.lied:
            return
        before = self._alone.setdefault((attempt.key, attempt.round), [])
        horizon = attempt.ended - 2.0 * self._options.params.attempt_timeout_s
        before[:] = [other for other in before if other.ended > horizon]
        for other in before:
            if self._should_have_met(attempt, other):
                both = min(attempt.ended, other.ended) - max(attempt.started, other.started)
                fail(
                    f"both end alone under {attempt.key} after {both:.3f} s together",
                    attempt.node, other.node,
                )  # fmt: skip
        before.append(attempt)

    def _should_have_met(self, one: Attempt, other: Attempt) -> bool:
        a, b = one.node, other.node
        if a is b or b.gone or one.record is None or other.record is None:
            return False
        if max(one.crowd, other.crowd) > self._options.params.max_group:
            return False  # so many share a key only in groups by hash
        if not (self._links.reaches(a.index, b.index) and self._links.reaches(b.index, a.index)):
            return False
        alike = (
            one.record.shape == other.record.shape
            and one.record.lineage.digest == other.record.lineage.digest
        )
        since = min(one.started, other.started)
        refused = max(
            self._refused.get((a.index, b.index), -1.0), self._refused.get((b.index, a.index), -1.0)
        )
        if not alike or refused >= since or not (a.dialable or b.dialable):
            return False  # two behind NATs have no reducer: they may not begin with each other
        trip = 2.0 * self._links.latency(a.index, b.index)
        trip *= math.exp(JITTER * self._options.jitter_sigma)
        # Of two that store and then look up one finds the other: an operation each.
        need = 2.0 * self._directory.longest + 4.0 * trip + self._options.params.settle_s
        return min(one.ended, other.ended) - max(one.started, other.started) >= need
