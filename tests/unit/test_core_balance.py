"""Who reduces which part: the closed form against the golden cases, brute force and hypothesis.

One rule: compare the objective, not the shares. Where the slowest link's own contribution is the
bottleneck many splits are optimal, and the closed form may pick any of them.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.core.balance import assign_reducers, load_shares

GOLDEN = Path(__file__).parents[1] / "golden" / "allreduce_load_balance.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["outputs"]["cases"]

rates = st.one_of(st.just(0.0), st.floats(0.01, 1e4), st.integers(1, 10).map(float))


def objective(bandwidths: list[float], shares: tuple[float, ...]) -> float:
    """Seconds per element on the slowest link: own contribution out, the others' parts in."""
    n = len(bandwidths)
    times = [(1 + (n - 2) * w) / b for b, w in zip(bandwidths, shares, strict=True) if b > 0]
    return max(times, default=0.0)


def best_by_bisection(bandwidths: list[float]) -> float:
    """The dumb twin: the least time T for which the shares w_i <= (T b_i - 1) / (n - 2) reach 1."""
    n = len(bandwidths)
    rated = [b for b in bandwidths if b > 0]
    if n <= 2:
        return max(1 / b for b in rated)
    low, high = max(1 / b for b in rated), (n - 1) / max(rated) + max(1 / b for b in rated)

    def room(time: float) -> float:
        return sum((time * b - 1) / (n - 2) for b in rated)

    if room(low) >= 1:
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if room(middle) >= 1 else (middle, high)
    return high


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["bandwidths"]))
def test_the_golden_cases_take_as_long_as_the_optimum(case: dict[str, list[float]]) -> None:
    shares = load_shares(case["bandwidths"])
    assert objective(case["bandwidths"], shares) == pytest.approx(case["time_per_element"])
    assert objective(case["bandwidths"], tuple(case["fractions"])) == pytest.approx(
        case["time_per_element"]
    )
    assert sum(shares) == pytest.approx(1.0)


@given(st.lists(rates, min_size=1, max_size=16))
def test_shares_are_a_split_that_no_other_split_beats(bandwidths: list[float]) -> None:
    shares = load_shares(bandwidths)
    if not any(bandwidths):
        assert shares == (0.0,) * len(bandwidths)
        return
    assert sum(shares) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, rate in zip(shares, bandwidths, strict=True) if rate == 0)
    if len(bandwidths) > 1:  # alone there is nothing to send
        best = best_by_bisection(bandwidths)
        assert objective(bandwidths, shares) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("bandwidths", list(product([0, 1, 2, 5], repeat=3)))
def test_brute_force_over_a_fine_lattice_finds_nothing_better(
    bandwidths: tuple[float, ...],
) -> None:
    if not any(bandwidths):
        return
    steps = 60
    found = min(
        objective(list(bandwidths), (a / steps, b / steps, (steps - a - b) / steps))
        for a in range(steps + 1)
        for b in range(steps + 1 - a)
        if all(r > 0 or w == 0 for r, w in zip(bandwidths, (a, b, steps - a - b), strict=True))
    )
    assert objective(list(bandwidths), load_shares(bandwidths)) <= found + 1e-9


@given(st.integers(1, 16), st.floats(0.1, 1e5))
def test_equal_links_share_equally(n: int, rate: float) -> None:
    assert load_shares([rate] * n) == pytest.approx((1 / n,) * n)


@given(st.lists(st.integers(0, 1 << 20), max_size=64), st.lists(rates, min_size=1, max_size=16))
def test_every_part_has_a_reducer_that_can_be_dialled(
    sizes: list[int], bandwidths: list[float]
) -> None:
    reducers = assign_reducers(sizes, bandwidths)
    if not any(bandwidths):
        assert reducers == ()
        return
    shares = load_shares(bandwidths)
    assert len(reducers) == len(sizes)
    assert all(shares[reducer] > 0 for reducer in reducers)


@given(st.integers(1, 400), st.lists(st.floats(1, 1e4), min_size=1, max_size=16))
def test_no_part_would_be_done_earlier_elsewhere(n: int, bandwidths: list[float]) -> None:
    """Largest quotients: moving one part never lowers the largest load per share."""
    shares = load_shares(bandwidths)
    reducers = assign_reducers([1000] * n, bandwidths)
    loads = [reducers.count(member) for member in range(len(shares))]
    able = [i for i, share in enumerate(shares) if share > 0]
    slowest = max(loads[i] / shares[i] for i in able)
    assert all((loads[i] + 1) / shares[i] >= slowest * (1 - 1e-9) for i in able)


@pytest.mark.parametrize(
    "bandwidths",
    [[float("inf"), 1.0], [float("inf")] * 3, [5e-324] * 3],
    ids=str,
)
def test_rates_that_nobody_can_have_still_give_a_split_or_none(bandwidths: list[float]) -> None:
    shares = load_shares(bandwidths)
    assert sum(shares) == pytest.approx(1.0) or not any(shares)
    assert len(assign_reducers([8, 8], bandwidths)) in (0, 2)


@pytest.mark.parametrize("bandwidths", [[float("nan"), 1.0], [1e308] * 3, [1e308, 1e308]], ids=str)
def test_odd_rates_still_give_a_split_or_none(bandwidths: list[float]) -> None:
    shares = load_shares(bandwidths)
    assert sum(shares) == pytest.approx(1.0) or not any(shares)
    assert len(assign_reducers([8, 8], bandwidths)) in (0, 2)
