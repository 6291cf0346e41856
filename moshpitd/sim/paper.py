"""The averaging-quality experiment of the Moshpit paper (arXiv 2103.03239, figure 3 and its table).

N peers hold one standard normal number each. In every round each peer is there with probability
1 - p, independently; one that is not keeps its number and comes back. Counted are the rounds until
the mean squared deviation from the current mean is below 1e-9 (1e-4), at most 50.

One rule: Moshpit's row is the production's own grid code (`walk.GridWalk`), and the rows beside it
are the schedules that ship; nothing is drawn here but initial values and who sits out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moshpitd.core.mixing import random_groups_factor
from moshpitd.sim.baselines import (
    Mask,
    Vector,
    all_reduce,
    average_groups,
    gossip,
    push_sum,
    random_groups,
)
from moshpitd.sim.faults import stream
from moshpitd.sim.walk import GridWalk

PEERS = (512, 768, 900, 1024)
FAILURES = (0.0, 0.001, 0.005, 0.01)
SIDES = (32, 32)
GROUP = 32
"""Size of random groups: that of a full line of the grid."""
ROUNDS = 50
"""The paper's cap: who needs more counts as 50."""
FINE, COARSE = 1e-9, 1e-4
SEEDS = 60
"""Standard errors of the counts are then at most 0.12 rounds."""
PLOTTED = 10
"""Rounds in the paper's figure, and means that a row carries."""
FLOOR = 2.2e-16
"""A run that stopped early counts as that afterwards, as in the paper's figure."""

Step = Callable[[Vector, Mask, int], Vector]
"""(values, who is there, round number from 0) -> values after the round."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table before it is run."""

    method: str
    n: int
    p_fail: float


@dataclass(slots=True)
class Run:
    """One seed of a case. Invariant: `distortion[t]` is the deviation after t rounds."""

    fine: int
    coarse: int
    distortion: list[float]
    largest: int = 0  # group


@dataclass(frozen=True, slots=True)
class Row:
    """A case over all seeds; counts are means, `se_*` their standard errors."""

    method: str
    n: int
    p_fail: float
    seeds: int
    iterations_1e9: float
    iterations_1e4: float
    se_1e9: float
    se_1e4: float
    max_group: int
    distortion: list[float]  # arithmetic mean after 0, 1 .. rounds
    distortion_log: list[float]  # geometric mean
    # Of all-reduce, whose counts are known: their expectation, and the deviation of one run's.
    expected: float | None = None
    expected_sd: float | None = None


METHODS = (
    "moshpit_distinct",
    "random_groups",
    "pushsum_1peer",
    "pushsum_2peer",
    "gossip",
    "allreduce",
)
"""Named as in the reference tables that tests compare with; "distinct" is how cells are redrawn."""


def cases(peers: Sequence[int] = PEERS, failures: Sequence[float] = FAILURES) -> Iterator[Case]:
    for n in peers:
        for p in failures:
            for method in METHODS:
                yield Case(method, n, p)


def run_case(case: Case, *, seeds: int = SEEDS) -> Row:
    return tabulate(case, [run_seed(case, seed) for seed in range(seeds)])


def run_seed(case: Case, seed: int) -> Run:
    """Initial values and absences depend on (seed, n) alone, so every method meets the same: that
    of all-reduce is min(geometric((1 - p)^n), 50), drawn as the round in which nobody sits out."""
    rng = np.random.Generator(np.random.PCG64(stream(seed, "paper", case.n).getrandbits(64)))
    return run_drawn(case, seed, rng.standard_normal(case.n), lambda: rng.random(case.n))


def run_drawn(case: Case, seed: int, values: Vector, uniforms: Callable[[], Vector]) -> Run:
    """One run from these values; in each round the peers that draw less than p sit out."""
    step, largest = _step(case, seed)
    run = Run(ROUNDS, ROUNDS, [float(values.var())])
    for turn in range(ROUNDS):
        alive: Mask = uniforms() >= case.p_fail
        values = step(values, alive, turn)
        run.distortion.append(float(values.var()))
        if run.distortion[-1] < COARSE and run.coarse == ROUNDS:
            run.coarse = turn + 1
        if run.distortion[-1] < FINE:
            run.fine = turn + 1
            break
    run.largest = largest()
    return run


def tabulate(case: Case, runs: Sequence[Run]) -> Row:
    fine, coarse = [run.fine for run in runs], [run.coarse for run in runs]
    traces = np.full((len(runs), PLOTTED + 1), FLOOR)
    for trace, run in zip(traces, runs, strict=True):
        shown = run.distortion[: PLOTTED + 1]
        trace[: len(shown)] = np.maximum(shown, FLOOR)
    known = allreduce_rounds(case.n, case.p_fail) if case.method == "allreduce" else None
    return Row(
        method=case.method,
        n=case.n,
        p_fail=case.p_fail,
        seeds=len(runs),
        iterations_1e9=float(np.mean(fine)),
        iterations_1e4=float(np.mean(coarse)),
        se_1e9=standard_error(fine),
        se_1e4=standard_error(coarse),
        max_group=max(run.largest for run in runs),
        distortion=[float(mean) for mean in traces.mean(axis=0)],
        distortion_log=[float(mean) for mean in np.exp(np.log(traces).mean(axis=0))],
        expected=known[0] if known else None,
        expected_sd=known[1] if known else None,
    )


def allreduce_rounds(n: int, p_fail: float) -> tuple[float, float]:
    """Mean and standard deviation of min(G, 50) for G geometric with success (1 - p)^n: it ends in
    the first round with everybody there. E X = sum of P(X > k), E X^2 = sum of (2k + 1) P(X > k).
    """
    missed = 1.0 - (1.0 - p_fail) ** n
    mean = math.fsum(missed**k for k in range(ROUNDS))
    square = math.fsum((2 * k + 1) * missed**k for k in range(ROUNDS))
    return mean, math.sqrt(max(square - mean * mean, 0.0))


def standard_error(counts: Sequence[float]) -> float:
    return float(np.std(counts, ddof=1) / math.sqrt(len(counts))) if len(counts) > 1 else 0.0


def as_json(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(row, name) for name in Row.__slots__}
    return {name: value for name, value in plain.items() if value is not None}


# -- one round of each method ----------------------------------------------------------------------


def _step(case: Case, seed: int) -> tuple[Step, Callable[[], int]]:
    """What a round does, and (after the run) the largest group there was."""
    match case.method:
        case "moshpit_distinct":
            return _moshpit(case, seed)
        case "random_groups":
            number = stream(seed, "paper", "groups", case.n).getrandbits(32)

            def grouped(values: Vector, alive: Mask, turn: int) -> Vector:
                return random_groups(values, alive, turn=turn, size=GROUP, seed=number)[0]

            return grouped, lambda: GROUP
        case "pushsum_1peer" | "pushsum_2peer":
            return _push_sum(case, 1 if case.method == "pushsum_1peer" else 2), lambda: 0
        case "gossip":
            return lambda values, alive, turn: gossip(values, alive), lambda: 0
        case "allreduce":
            return lambda values, alive, turn: all_reduce(values, alive), lambda: case.n
    raise ValueError(f"unknown method {case.method!r}, expected one of {METHODS}")


def _moshpit(case: Case, seed: int) -> tuple[Step, Callable[[], int]]:
    walk = GridWalk(case.n, SIDES, seed=seed)
    sizes: list[int] = [0]

    def step(values: Vector, alive: Mask, turn: int) -> Vector:
        groups = walk.turn(frozenset(np.flatnonzero(~alive).tolist()))
        sizes.append(max(len(group) for group in groups))
        return average_groups(values, groups)

    return step, lambda: max(sizes)


def _push_sum(case: Case, peers_per_round: int) -> Step:
    held: list[Vector] = []

    def step(values: Vector, alive: Mask, turn: int) -> Vector:
        tops, weights = held or (values, np.ones(case.n))
        held[:] = push_sum(tops, weights, alive, turn=turn, peers_per_round=peers_per_round)
        quotient: Vector = held[0] / held[1]
        return quotient

    return step


# -- what one round of random groups takes off -----------------------------------------------------


def contraction(n: int, *, size: int = GROUP, seeds: int = SEEDS) -> dict[str, float]:
    """Distortion after one round of random groups over that before it, against (r-1)/(N-1)."""
    ratios, groups = [], 0
    everybody: Mask = np.ones(n, dtype=np.bool_)
    for seed in range(seeds):
        rng = np.random.Generator(np.random.PCG64(stream(seed, "contraction", n).getrandbits(64)))
        values: Vector = rng.standard_normal(n)
        mixed, groups = random_groups(values, everybody, turn=0, size=size, seed=seed)
        ratios.append(float(mixed.var() / values.var()))
    return {
        "n": n, "groups": groups, "seeds": seeds, "measured": float(np.mean(ratios)),
        "se": standard_error(ratios), "expected": random_groups_factor(n, groups),
    }  # fmt: skip
