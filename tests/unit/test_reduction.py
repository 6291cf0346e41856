"""tensors/reduction. One rule: the twin is the weighted mean in exact fractions."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.dtypes import DTYPES
from moshpitd.tensors.reduction import PartAccumulator, examine, first_nonfinite, is_small
from moshpitd.tensors.slices import SLICE_BYTES

LARGEST = torch.finfo(torch.float32).max
LARGEST64 = torch.finfo(torch.float64).max
SLICE = SLICE_BYTES // 4
HEAVIEST = 2**32
WEIGHTS = st.integers(1, HEAVIEST)
FLOATS32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
MEANS = [name for name, row in DTYPES.items() if row.rule == "mean"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]


def reduce(
    contributions: list[Tensor], weights: list[float], dtype: str = "float32", *, quick: bool = True
) -> Tensor:
    """`quick`: by one pass where the values are small enough for it, as they are in a round."""
    part = PartAccumulator(contributions[0].numel(), dtype, DTYPES[dtype].rule)
    for values, weight in zip(contributions, weights, strict=True):
        part.add(values, weight, small=quick and is_small(examine(values)[1]))
    assert (part.count, part.total_weight) == (len(weights), sum(weights))
    out = torch.ones_like(contributions[0])
    part.mean(out)
    return out


def exact_mean(numbers: list[float], weights: list[int]) -> Fraction:
    total = sum(Fraction(x) * w for x, w in zip(numbers, weights, strict=True))
    return total / sum(weights)


def bound(numbers: list[float], unit: float) -> Fraction:
    """The module's stated bound, plus the step near zero."""
    largest = max(abs(Fraction(x)) for x in numbers)
    return 4 * (len(numbers) - 1) * largest * Fraction(unit) + Fraction(2) ** -140


@pytest.mark.parametrize("quick", [True, False])
@given(st.lists(st.tuples(FLOATS32, WEIGHTS), min_size=1, max_size=16))
@example([(LARGEST, 1), (-LARGEST, 1)])
@example([(LARGEST, HEAVIEST), (-LARGEST, 1), (LARGEST, HEAVIEST)])
@example([(2.0**-149, HEAVIEST), (2.0**-149, 1)])
@example([(1e8, 1), (1.0, 1)])
def test_the_mean_is_within_the_bound_of_the_true_mean(
    quick: bool, pairs: list[tuple[float, int]]
) -> None:
    numbers, weights = [x for x, _ in pairs], [w for _, w in pairs]
    got = reduce([torch.tensor([x]) for x in numbers], weights, quick=quick).item()
    assert abs(Fraction(got) - exact_mean(numbers, weights)) <= bound(numbers, 2.0**-24)


@pytest.mark.parametrize("quick", [True, False])
@given(st.lists(FLOATS32, min_size=1, max_size=16))
def test_equal_weights_have_the_tighter_bound(quick: bool, numbers: list[float]) -> None:
    n = len(numbers)
    got = reduce([torch.tensor([x]) for x in numbers], [640] * n, quick=quick).item()
    largest = max(abs(Fraction(x)) for x in numbers)
    error = abs(Fraction(got) - exact_mean(numbers, [1] * n))
    assert error <= Fraction(n + 14, 2) * largest * Fraction(2) ** -24 + Fraction(2) ** -140


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=False, allow_infinity=False), WEIGHTS), min_size=1, max_size=8
    )
)
@example([(LARGEST64, 1), (-LARGEST64, 3)])
def test_float64_is_reduced_in_float64(pairs: list[tuple[float, int]]) -> None:
    numbers, weights = [x for x, _ in pairs], [w for _, w in pairs]
    values = [torch.tensor([x], dtype=torch.float64) for x in numbers]
    got = reduce(values, weights, "float64").item()
    assert abs(Fraction(got) - exact_mean(numbers, weights)) <= bound(numbers, 2.0**-53)


def test_float64_beyond_float32() -> None:
    a = 1 + torch.arange(1000, dtype=torch.float64) * 1e-12
    b = 1 + torch.arange(1000, dtype=torch.float64) * 3e-12
    got = reduce([a, b], [1, 1], "float64")
    assert (got - (1 + torch.arange(1000, dtype=torch.float64) * 2e-12)).abs().max() < 1e-15
    assert reduce([a, a, a], [10, 20, 30], "float64").equal(a)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("dtype", MEANS)
@given(st.lists(WEIGHTS, min_size=1, max_size=16), st.randoms(use_true_random=False))
def test_identical_contributions_come_back_exactly(
    quick: bool, dtype: str, weights: list[int], rng
) -> None:
    info = torch.finfo(DTYPES[dtype].torch_dtype)
    numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-6, 4) for _ in range(20)]
    numbers += [info.max, info.min, info.tiny / 4, -info.tiny, 0.0]
    values = torch.tensor(numbers, dtype=DTYPES[dtype].torch_dtype)
    assert torch.equal(reduce([values] * len(weights), weights, dtype, quick=quick), values)


@pytest.mark.parametrize("dtype", MEANS)
@pytest.mark.parametrize("weight", [1, 3, HEAVIEST, 0.1])
def test_one_contribution_comes_back_bit_for_bit(dtype: str, weight: float) -> None:
    row = DTYPES[dtype]
    bits = torch.randint(0, 256, (row.itemsize * 5000,), dtype=torch.uint8)
    values = bits.view(row.torch_dtype)
    values = torch.where(torch.isfinite(values), values, torch.tensor(-0.0, dtype=row.torch_dtype))
    out = reduce([values], [weight], dtype)
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("numel", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 17])
@pytest.mark.parametrize("dtype", MEANS)
def test_every_slice_and_the_tail(quick: bool, numel: int, dtype: str) -> None:
    source = torch.Generator().manual_seed(numel)
    row = DTYPES[dtype]
    values = [torch.randn(numel, generator=source).to(row.torch_dtype) for _ in range(3)]
    got = reduce(values, [10, 20, 30], dtype, quick=quick)
    want = (values[0].double() * 10 + values[1].double() * 20 + values[2].double() * 30) / 60
    assert torch.allclose(got.double(), want, rtol=0, atol=10 * torch.finfo(row.torch_dtype).eps)


def test_a_heavy_small_value_survives_beside_a_light_large_one() -> None:
    for order in (1, -1):
        pairs = [(1e8, 1), (1.0, HEAVIEST)][::order]
        got = reduce([torch.tensor([x]) for x, _ in pairs], [w for _, w in pairs]).item()
        assert got == pytest.approx((1e8 + HEAVIEST) / (1 + HEAVIEST), rel=1e-6)


def test_an_overflowing_slice_keeps_its_neighbours_right() -> None:
    a, b = torch.randn(2, 2 * SLICE, generator=torch.Generator().manual_seed(3))
    a[5], b[5] = LARGEST, -LARGEST
    a[6], b[6] = -LARGEST, -LARGEST
    got = reduce([a, b], [1, 3])
    assert got[5].item() == pytest.approx(-LARGEST / 2, rel=2**-22)
    assert got[6] == -LARGEST
    rest = torch.ones(2 * SLICE, dtype=torch.bool)
    rest[5:7] = False
    assert torch.allclose(got[rest], (a * 0.25 + b * 0.75)[rest], rtol=0, atol=1e-6)


def test_the_worked_example_of_a_sweep() -> None:
    # DESIGN 4: x = 1, 2, 5, 9 with weights 1, 3, 1, 1; rows, then a column with mean weights.
    row1 = reduce([torch.tensor([1.0]), torch.tensor([2.0])], [1, 3])
    row2 = reduce([torch.tensor([5.0]), torch.tensor([9.0])], [1, 1])
    assert reduce([row1, row2], [2, 1]).item() == pytest.approx(3.5, abs=1e-6)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_integers_take_the_maximum(dtype: str, data: st.DataObject) -> None:
    info = torch.iinfo(DTYPES[dtype].torch_dtype)
    column = st.lists(st.integers(info.min, info.max), min_size=3, max_size=3)
    rows = data.draw(st.lists(column, min_size=1, max_size=5))
    values = [torch.tensor(row, dtype=DTYPES[dtype].torch_dtype) for row in rows]
    got = reduce(values, [7] * len(rows), dtype)
    assert got.tolist() == [max(column) for column in zip(*rows, strict=True)]


def test_bool_is_true_if_any_is() -> None:
    a, b = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    assert reduce([a, b], [1, 1], "bool").tolist() == [True, False, True]


def test_contributions_are_neither_kept_nor_changed() -> None:
    for dtype in ("float32", "int64"):
        a = torch.ones(10, dtype=DTYPES[dtype].torch_dtype)
        part = PartAccumulator(10, dtype, DTYPES[dtype].rule)
        part.add(a, 1)
        a.fill_(100)
        part.add(torch.full_like(a, 3), 1)
        assert (a == 100).all()
        first, second = torch.empty_like(a), torch.empty_like(a)
        part.mean(first)
        part.mean(second)
        assert first.tolist() == second.tolist() == [2 if dtype == "float32" else 3] * 10


def test_two_threads_may_add_to_one_part() -> None:
    part = PartAccumulator(SLICE, "float32", "mean")
    values = torch.linspace(-1, 1, SLICE)

    def add() -> None:
        for _ in range(20):
            part.add(values, 3)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = torch.empty(SLICE)
    part.mean(out)
    assert (part.count, part.total_weight) == (80, 240)
    assert torch.equal(out, values)


def test_what_an_accumulator_refuses() -> None:
    part = PartAccumulator(4, "float32", "mean")
    with pytest.raises(LocalProtocolError, match="no contribution"):
        part.mean(torch.empty(4))
    for wrong in (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        with pytest.raises(LocalProtocolError, match="expected"):
            part.add(wrong, 1)
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(LocalProtocolError, match="weight"):
            part.add(torch.zeros(4), weight)
    assert part.count == 0
    for dtype, rule in (("float32", "max"), ("int64", "mean"), ("complex64", "mean")):
        with pytest.raises(LocalProtocolError, match="no rule"):
            PartAccumulator(4, dtype, rule)


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", MEANS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 1, SLICE, 2 * SLICE + 4])
def test_the_first_bad_element_is_found(dtype: str, bad: float, at: int) -> None:
    values = torch.ones(2 * SLICE + 5, dtype=DTYPES[dtype].torch_dtype)
    assert first_nonfinite(values) is None
    values[at:] = bad
    assert first_nonfinite(values) == at


@pytest.mark.parametrize("dtype", MEANS)
def test_finite_values_whose_sum_overflows_are_finite(dtype: str) -> None:
    row = DTYPES[dtype]
    values = torch.full((SLICE + 3,), torch.finfo(row.torch_dtype).max, dtype=row.torch_dtype)
    assert first_nonfinite(values) is None
    values[-1] = float("nan")
    assert first_nonfinite(values) == SLICE + 2


def test_infinities_that_cancel_are_found() -> None:
    values = torch.zeros(100)
    values[40], values[60] = float("inf"), float("-inf")
    assert first_nonfinite(values) == 40


def test_nothing_to_find() -> None:
    assert first_nonfinite(torch.empty(0)) is None
    assert first_nonfinite(torch.tensor([2**62, -1])) is None
    assert first_nonfinite(torch.tensor([True])) is None


@given(st.lists(st.floats(width=32), max_size=30))
def test_first_nonfinite_against_the_plain_loop(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    plain = next((i for i, ok in enumerate(torch.isfinite(values).tolist()) if not ok), None)
    assert first_nonfinite(values) == plain


@pytest.mark.parametrize("dtype", [*MEANS, "int64"])
def test_taking_the_mean_gives_the_same_once(dtype: str) -> None:
    rows = [
        torch.arange(5).to(DTYPES[dtype].torch_dtype),
        torch.ones(5).to(DTYPES[dtype].torch_dtype),
    ]
    part, again = (PartAccumulator(5, dtype, DTYPES[dtype].rule) for _ in range(2))
    for values in rows:
        part.add(values, 1.0)
        again.add(values, 1.0)
    out = torch.empty_like(rows[0])
    part.mean(out)
    taken = again.take()
    assert taken.dtype == out.dtype
    assert torch.equal(taken, out)
    with pytest.raises(LocalProtocolError, match="no mean"):
        again.take()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, 400_000])
def test_one_look_gives_the_norm_and_finds_what_is_not_finite(
    dtype: torch.dtype, numel: int
) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    bad, squared = examine(values)
    assert bad is None
    assert squared == pytest.approx(float(values.double().square().sum()), rel=1e-4)
    if numel:
        values[numel // 2] = float("nan")
        assert examine(values)[0] == numel // 2
        values[numel // 2] = float("inf")
        assert examine(values)[0] == numel // 2


def test_large_finite_values_are_finite_and_have_a_norm_where_float64_can_tell() -> None:
    bad, squared = examine(torch.full((10,), 3e38))
    assert bad is None
    assert squared == pytest.approx(9e77, rel=1e-5)
    assert examine(torch.full((10,), 1e300, dtype=torch.float64)) == (None, float("inf"))
    assert examine(torch.tensor([1, 2, 3])) == (None, 0.0)


def test_what_is_not_small_is_never_added_in_one_pass() -> None:
    """Large values of opposite signs: their difference overflows, and one pass would not see."""
    a, b = torch.full((3,), LARGEST), torch.full((3,), -LARGEST)
    assert not is_small(examine(a)[1])
    assert torch.isfinite(reduce([a, b], [1, 1])).all()
    part = PartAccumulator(3, "float32", "mean")
    part.add(a, 1, small=False)
    part.add(b, 1, small=True)  # the first one was large, so this is not believed to help
    out = torch.empty(3)
    part.mean(out)
    assert torch.isfinite(out).all()
    assert is_small(examine(torch.full((1 << 18,), 2.0**50))[1])
    assert not is_small(examine(torch.tensor([2.0**64]))[1])
    assert not is_small(float("nan"))
