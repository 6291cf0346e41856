"""What a run looked like: attempts and groups, how full and how fast, and how values drew together.
One rule: it reads what happened and decides nothing; whether a figure is good enough is the
caller's business.

Time is cut into stretches: one per beat where trainers contribute on a beat, else of STRETCH_S.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from moshpitd.core.effects import Note
from moshpitd.core.grid import axis_of, is_flat
from moshpitd.core.messages import Group
from moshpitd.core.mixing import random_groups_factor
from moshpitd.sim.faults import Options
from moshpitd.sim.network import Directory, Links
from moshpitd.sim.nodes import Node, Trainer, Vector

STRETCH_S = 5.0


@dataclass(slots=True)
class Stretch:
    """What happened from `at` to the next one's."""

    at: float
    live: int = 0  # daemons at its end
    ended: int = 0  # attempts
    grouped: int = 0  # of them, in a group
    sizes: list[int] = field(default_factory=list)  # of the groups that began
    fills: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # to a group
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)  # sides, by group
    # (node, trainer) -> values when it contributed, and (values, group) when it was done.
    before: dict[tuple[int, int], Vector] = field(default_factory=dict)
    after: dict[tuple[int, int], tuple[Vector, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A stretch in figures. None: nothing to take it from."""

    at_s: float
    live: int
    attempts: int
    grouped_fraction: float | None
    group_size: float | None
    fill: float | None
    time_to_group_s: float | None
    sides: tuple[int, ...]
    distortion_before: float | None = None
    distortion_after: float | None = None
    contraction: float | None = None
    predicted: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """All of a run."""

    attempts: int
    grouped_fraction: float | None
    fill_mean: float | None
    time_to_group_p50_s: float | None
    time_to_group_p99_s: float | None
    rtt_p50_s: float | None
    look_up_p50_s: float | None
    rows: tuple[Row, ...]


class Meters:
    """Invariant: every attempt that ended is counted once, in the stretch in which it ended."""

    def __init__(
        self, options: Options, links: Links, directory: Directory, now: Callable[[], float]
    ) -> None:
        self._options, self._links, self._directory, self._now = options, links, directory, now
        self._length = options.beat_s or STRETCH_S
        self._weighs = options.beat_s > 0.0 and options.max_weight == 1
        self._stretches: dict[int, Stretch] = {}
        self._asked: dict[int, float] = {}  # node -> when its call began, until its first attempt
        self._since: dict[int, float] = {}  # node -> from when its attempt counts
        self._contributed: dict[str, tuple[int, tuple[int, int]]] = {}  # token -> stretch, whose
        self._groups: set[bytes] = set()  # membership only
        self._trips: list[float] = []

    @property
    def length(self) -> float:
        return self._length

    def sample(self, live: int) -> None:
        """The end of a stretch is near."""
        self._here().live = live

    def contributed(self, node: Node, trainer: Trainer) -> None:
        self._asked.setdefault(node.index, self._now())
        if self._weighs:
            whose = (node.index, trainer.number)
            self._here().before[whose] = trainer.bucket.copy()
            self._contributed[trainer.token] = (self._number(), whose)

    def finished(self, trainer: Trainer, token: str, group_id: bytes) -> None:
        number, whose = self._contributed.pop(token, (-1, (0, 0)))
        if number >= 0:
            self._stretches[number].after[whose] = (trainer.bucket.copy(), group_id)

    def noted(self, node: Node, note: Note) -> None:
        index, now = node.index, self._now()
        if note.what == "attempt_started":
            # The first of a call is waited for since the call began.
            self._since[index] = self._asked.pop(index, now)
        elif note.what in ("group_formed", "attempt_ended") and index in self._since:
            here, since = self._here(), self._since.pop(index)
            here.ended += 1
            if note.what == "group_formed":
                here.grouped += 1
                here.times.append(now - since)

    def opened(self, node: Node, group: Group, leader: Node | None, live: int) -> None:
        if leader is not None and leader is not node:
            self._trips.append(2.0 * self._links.latency(node.index, leader.index))
        if group.group_id in self._groups:
            return
        self._groups.add(group.group_id)
        here, size = self._here(), len(group.members)
        here.sizes.append(size)
        here.shapes[group.shape.sides if not is_flat(group.shape) else (1,)] += 1
        here.fills.append(min(1.0, size / self._full(group, live)))

    def _full(self, group: Group, live: int) -> int:
        """Members of that group if everybody who belongs to it were in it."""
        if is_flat(group.shape):
            return max(1, min(live, self._options.params.max_group))
        return group.shape.sides[axis_of(group.shape, group.round)]

    def figures(self) -> Figures:
        rows = [self._stretches[number] for number in sorted(self._stretches)]
        ended, times = sum(it.ended for it in rows), [t for it in rows for t in it.times]
        fills = [fill for it in rows for fill in it.fills]
        return Figures(
            attempts=ended,
            grouped_fraction=sum(it.grouped for it in rows) / ended if ended else None,
            fill_mean=statistics.fmean(fills) if fills else None,
            time_to_group_p50_s=quantile(times, 0.5),
            time_to_group_p99_s=quantile(times, 0.99),
            rtt_p50_s=quantile(self._trips, 0.5),
            look_up_p50_s=quantile(self._directory.sampled, 0.5),
            rows=tuple(self._row(it) for it in rows),
        )

    def _row(self, it: Stretch) -> Row:
        sides = it.shapes.most_common(1)[0][0] if it.shapes else ()
        return Row(
            at_s=it.at,
            live=it.live,
            attempts=it.ended,
            grouped_fraction=it.grouped / it.ended if it.ended else None,
            group_size=statistics.fmean(it.sizes) if it.sizes else None,
            fill=statistics.fmean(it.fills) if it.fills else None,
            time_to_group_s=quantile(it.times, 0.5),
            sides=sides,
            **_drawn_together(it, sides, sweeps=self._options.rounds == 0),
        )

    def _number(self) -> int:
        return int(self._now() / self._length + 1e-9)

    def _here(self) -> Stretch:
        number = self._number()
        if number not in self._stretches:
            self._stretches[number] = Stretch(number * self._length)
        return self._stretches[number]


def sweep_factor(sides: Sequence[int], missing: float) -> float:
    """What is left of the variance after a sweep of a full grid in which a peer is missing from a
    round with probability `missing`: d p / M^(d-1) + p^d (ALGORITHMS 1.4, leading order)."""
    dimensions = len(sides)
    side = prod(sides) ** (1.0 / dimensions)
    return float(dimensions * missing / side ** (dimensions - 1) + missing**dimensions)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value at that share of the sorted ones."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def variance(values: Sequence[Vector]) -> float:
    """Mean squared deviation from the mean, over all elements."""
    return float(np.mean(np.var(np.array(values), axis=0)))


def _drawn_together(
    it: Stretch, sides: tuple[int, ...], *, sweeps: bool
) -> dict[str, float | None]:
    """Distortion of those that contributed in it and were done, and what was to be expected: of one
    round that of random groups, as many as there were; of a sweep that of a full grid."""
    whose = [who for who in it.before if who in it.after]
    if len(whose) < 2:
        return {}
    before = variance([it.before[who] for who in whose])
    after = variance([it.after[who][0] for who in whose])
    groups = {it.after[who][1] for who in whose} - {b""}
    alone = sum(not it.after[who][1] for who in whose)
    missing = 1.0 - it.grouped / it.ended if it.ended else 0.0
    return {
        "distortion_before": before,
        "distortion_after": after,
        "contraction": after / before if before > 0.0 else None,
        "predicted": (
            sweep_factor(sides or (len(whose),), missing)
            if sweeps
            else random_groups_factor(len(whose), len(groups) + alone)
        ),
    }
