"""The counts of the averaging experiment against tables of published ones (../shared/reference).
One rule: a difference is judged by what is known of both sides' spread, and what is not known is
estimated, never left out.

The tables give means of k seeds and no deviation. Two things are known of the variance behind such
a mean. If both sides draw from one distribution (that is what is judged), ours estimates it. And
counts are whole numbers: k of them with the mean m, f of it after the point, have at least the
sample variance f (1 - f) k / (k - 1), and exactly that if they lie on two neighbouring numbers. The
larger of the two stands for theirs, and the two samples are pooled, each with its k - 1: the
standard error of the difference is that of the two-sample t-test. So where all our runs need 10
rounds, and of their 20 one needs 9, no spread of our sample does not make their 0.05 impossible.
Of all-reduce the distribution is known, and its own variance takes the place of both.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moshpitd.errors import ConfigError
from moshpitd.sim.paper import SIDES, Row

ERRORS = 3.0
"""So many combined standard errors may lie between two means: 1 of 370 honest ones lies beyond."""
MOST = 0.8
"""Rounds, for Moshpit: no spread excuses more."""
GRID = "^".join((str(SIDES[0]), str(len(SIDES))))
"""Of rows that name a grid, those of ours count: random groups of 8 are there as `8^3`."""
EXACT = 1e-9  # rounds; what adding up decimals costs
COLUMNS = ("method", "N", "p_fail", "seeds", "iters_to_1e-9", "iters_to_1e-4")


@dataclass(frozen=True, slots=True)
class Published:
    """One row of a table: means of whole numbers over `seeds` runs."""

    method: str
    n: int
    p_fail: float
    seeds: int
    iterations_1e9: float
    iterations_1e4: float


@dataclass(frozen=True, slots=True)
class Judged:
    """One mean of ours beside theirs."""

    ours: float
    reference: float
    combined_se: float
    most: float  # what may lie between them

    @property
    def holds(self) -> bool:
        return abs(self.ours - self.reference) <= self.most + EXACT


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row beside the published one."""

    row: Row
    fine: Judged
    coarse: Judged

    @property
    def holds(self) -> bool:
        return self.fine.holds and self.coarse.holds


def read(lines: Iterable[str], *, name: str) -> list[Published]:
    """The rows of a table that can be compared; `name` is what errors call it."""
    table = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (table.fieldnames or ())]
    if missing:
        raise ConfigError(f"no column {missing[0]!r}", file=name, expected=", ".join(COLUMNS))
    found = []
    for line in table:
        if line.get("grid", GRID) != GRID:
            continue
        try:
            row = Published(
                line["method"], int(line["N"]), float(line["p_fail"]), int(line["seeds"]),
                float(line["iters_to_1e-9"]), float(line["iters_to_1e-4"]),
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {table.line_num}: {error}", file=name) from None
        if row.seeds < 2:
            raise ConfigError(
                f"line {table.line_num}: a mean of {row.seeds} runs", file=name, expected="2 runs"
            )
        found.append(row)
    return found


def judge_all(rows: Sequence[Row], published: Sequence[Published]) -> list[Verdict]:
    """Every row that a published one stands for, in order; of several the first counts."""
    known: dict[tuple[str, int, float], Published] = {}
    for one in published:
        known.setdefault((one.method, one.n, one.p_fail), one)
    cells = [(row, known.get((row.method, row.n, row.p_fail))) for row in rows]
    return [judge(row, theirs) for row, theirs in cells if theirs is not None]


def judge(row: Row, theirs: Published) -> Verdict:
    fine = _judged(row, row.iterations_1e9, row.se_1e9, theirs.iterations_1e9, theirs.seeds)
    coarse = _judged(row, row.iterations_1e4, row.se_1e4, theirs.iterations_1e4, theirs.seeds)
    return Verdict(row, fine, coarse)


def _judged(row: Row, ours: float, se: float, reference: float, seeds: int) -> Judged:
    if row.expected_sd is not None:
        variance = row.expected_sd**2
    else:
        mine = se * se * row.seeds
        yours = max(mine, least_variance(reference, seeds))
        variance = (mine * (row.seeds - 1) + yours * (seeds - 1)) / (row.seeds + seeds - 2)
    combined = math.sqrt(variance * (1.0 / row.seeds + 1.0 / seeds))
    most = ERRORS * combined
    if row.method == "moshpit_distinct":
        most = min(most, MOST)
    return Judged(ours, reference, combined, most)


def least_variance(mean: float, count: int) -> float:
    """The smallest sample variance that `count` whole numbers with this mean can have."""
    part = mean % 1.0
    return part * (1.0 - part) * count / (count - 1)


def as_json(verdict: Verdict) -> dict[str, Any]:
    found: dict[str, Any] = {"holds": verdict.holds}
    for target, one in (("1e9", verdict.fine), ("1e4", verdict.coarse)):
        found |= {
            f"reference_{target}": one.reference,
            f"combined_se_{target}": one.combined_se,
            f"most_{target}": one.most,
            f"holds_{target}": one.holds,
        }
    return found
