"""The averaging-quality experiment against the reference tables (tests/golden/moshpit_*.csv).

One rule: few seeds, all cells; `moshpitd sim paper` runs the same code with 60. A reference mean
comes from 20 seeds and its deviation is not in the table, so ours stands for both, but never less
than what a mean of whole numbers must have.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moshpitd.core.mixing import Mixing
from moshpitd.core.topologies import OnePeerExponential, RandomGroups, Ring
from moshpitd.sim import baselines
from moshpitd.sim.paper import (
    FAILURES,
    FINE,
    PEERS,
    ROUNDS,
    Case,
    Row,
    allreduce_rounds,
    contraction,
    run_case,
    run_seed,
)

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCE_SEEDS = 20
FEW = 6
CELLS = [(n, p) for n in PEERS for p in FAILURES]


@cache
def reference(method: str, n: int, p: float) -> tuple[float, float]:
    for name in ("moshpit_extra_baselines", "moshpit_reference_iters_to_target"):
        with (GOLDEN / f"{name}.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                here = line["method"], int(line["N"]), float(line["p_fail"])
                if here == (method, n, p) and line.get("grid", "32^2") == "32^2":
                    return float(line["iters_to_1e-9"]), float(line["iters_to_1e-4"])
    raise LookupError(f"no row for {method} {n} {p}")


def agrees(row: Row) -> None:
    """Within three combined standard errors and 0.8 rounds of the reference."""
    theirs = reference(row.method, row.n, row.p_fail)
    ours = (row.iterations_1e9, row.se_1e9), (row.iterations_1e4, row.se_1e4)
    for (mean, error), expected in zip(ours, theirs, strict=True):
        whole = expected % 1.0
        least = math.sqrt(whole * (1.0 - whole))  # of whole numbers with that mean
        deviation = max(error * math.sqrt(row.seeds), least)
        combined = deviation * math.sqrt(1.0 / row.seeds + 1.0 / REFERENCE_SEEDS)
        told = f"{row.method} {row.n} {row.p_fail}: {mean:.2f}, reference {expected}"
        assert abs(mean - expected) <= 3.0 * combined + 1e-12, f"{told}, error {combined:.3f}"
        assert row.method != "moshpit_distinct" or abs(mean - expected) <= 0.8, told


@pytest.mark.parametrize(("n", "p"), CELLS)
def test_moshpit_needs_as_many_rounds_as_the_reference(n: int, p: float) -> None:
    agrees(run_case(Case("moshpit_distinct", n, p), seeds=FEW))


def test_on_a_full_grid_without_failures_two_rounds_are_exact() -> None:
    row = run_case(Case("moshpit_distinct", 1024, 0.0), seeds=FEW)
    assert (row.iterations_1e9, row.iterations_1e4, row.se_1e9) == (2.0, 2.0, 0.0)
    assert row.max_group == 32
    run = run_seed(Case("moshpit_distinct", 1024, 0.0), 0)
    assert run.distortion[2] < 1e-30


@pytest.mark.parametrize("method", ["random_groups", "pushsum_1peer", "pushsum_2peer", "gossip"])
@pytest.mark.parametrize(("n", "p"), CELLS)
def test_the_others_need_as_many_rounds_as_the_reference(method: str, n: int, p: float) -> None:
    agrees(run_case(Case(method, n, p), seeds=REFERENCE_SEEDS))


@pytest.mark.parametrize(("n", "p"), CELLS)
def test_all_reduce_ends_in_the_first_round_with_everybody_there(n: int, p: float) -> None:
    """min(geometric((1-p)^n), 50), seed by seed and in the mean."""
    success, seeds = (1.0 - p) ** n, 200
    chances = [success * (1.0 - success) ** (k - 1) for k in range(1, ROUNDS)]
    chances.append((1.0 - success) ** (ROUNDS - 1))
    expected = sum(k * chance for k, chance in enumerate(chances, start=1))
    assert allreduce_rounds(n, p) == pytest.approx(expected, abs=1e-9)
    counts = []
    for seed in range(seeds):
        run = run_seed(Case("allreduce", n, p), seed)
        counts.append(run.fine)
        assert len(set(run.distortion[: run.fine])) == 1, "something moved before that round"
        assert run.distortion[run.fine] < FINE or run.fine == ROUNDS
    variance = sum((k - expected) ** 2 * chance for k, chance in enumerate(chances, start=1))
    assert abs(sum(counts) / seeds - expected) <= 3.0 * math.sqrt(variance / seeds)
    row = run_case(Case("allreduce", n, p), seeds=2)
    assert row.iterations_1e9 == row.iterations_1e4 == allreduce_rounds(n, p)


@pytest.mark.parametrize("n", PEERS)
def test_random_groups_contract_by_r_less_one_over_n_less_one(n: int) -> None:
    found = contraction(n, seeds=400)
    assert abs(found["measured"] - found["expected"]) <= 3.0 * found["se"]
    assert found["se"] < 0.03 * found["expected"]


# -- arrays against the schedules that ship --------------------------------------------------------


def mixed(values: np.ndarray, mixing: Mixing) -> np.ndarray:
    return np.array([sum(w * values[i] for i, w in row.items()) for row in mixing.rows()])


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("turn", range(4))
def test_the_arrays_do_what_the_schedules_say(n: int, turn: int) -> None:
    rng = np.random.default_rng(n * 10 + turn)
    values, alive = rng.standard_normal(n), rng.random(n) >= 0.3
    dead = np.flatnonzero(~alive).tolist()
    np.testing.assert_allclose(
        baselines.gossip(values, alive) if n > 2 else mixed(values, Ring(n).sample(turn, dead)),
        mixed(values, Ring(n).sample(turn, dead)),
        atol=1e-14,
    )
    for per_round in (1, 2):
        mixing = OnePeerExponential(n, per_round).sample(turn, dead)
        tops, weights = baselines.push_sum(
            values, np.ones(n), alive, turn=turn, peers_per_round=per_round
        )
        np.testing.assert_allclose(tops, mixed(values, mixing), atol=1e-14)
        np.testing.assert_allclose(weights, mixed(np.ones(n), mixing), atol=1e-14)
        assert weights.sum() == pytest.approx(n)
    grouped, count = baselines.random_groups(values, alive, turn=turn, size=3, seed=5)
    mixing = RandomGroups(n, 3, 5).sample(turn, dead)
    np.testing.assert_allclose(grouped, mixed(values, mixing), atol=1e-14)
    assert count == len(mixing.groups)
