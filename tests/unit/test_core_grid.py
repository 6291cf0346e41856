"""Grid keys and re-keying: the golden examples and the claims of the paper, one test each.

One rule: a test moves vectors with the core's own key and re-key functions and a mean of its own;
nothing is taken from the core but who meets whom.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.core.grid import (
    PEERS_KEY,
    axis_of,
    cell,
    cell_along,
    is_flat,
    meeting_key,
    rekey,
    sides_for,
)
from moshpitd.core.messages import Shape

GOLDEN = Path(__file__).parents[1] / "golden"

Cell = tuple[int, ...]


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return found


class Walk:
    """Peers on a grid that average with whoever has their key."""

    def __init__(self, values: list[list[float]], coordinates: list[Cell], shape: Shape) -> None:
        self.values, self.coordinates, self.shape = values, coordinates, shape

    def turn(self, number: int, *, rule: str, alive: list[int] | None = None) -> list[list[int]]:
        keys: dict[str, list[int]] = {}
        for i, coordinates in enumerate(self.coordinates):
            if alive is None or alive[i]:
                keys.setdefault(meeting_key(self.shape, coordinates, number), []).append(i)
        for key, group in keys.items():
            columns = zip(*(self.values[i] for i in group), strict=True)
            mean = [sum(column) / len(group) for column in columns]
            for index, i in enumerate(group):
                self.values[i] = list(mean)
                self.coordinates[i] = rekey(
                    self.coordinates[i],
                    shape=self.shape,
                    round_number=number,
                    group_id=f"{number} {key}".encode(),
                    index=index,
                    size=len(group),
                    rule=rule,
                )
        return sorted(keys.values())


def close(ours: list[list[float]], theirs: list[list[float]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-12)


def cells(values: list[list[int]]) -> list[Cell]:
    return [tuple(c) for c in values]


def test_the_golden_full_grid_is_walked_as_written() -> None:
    example = golden("moshpit_full_grid_3_2")
    inputs, outputs = example["inputs"], example["outputs"]
    walk = Walk([list(x) for x in inputs["X"]], cells(inputs["coords"]), Shape(1, (3, 3)))
    for number, expected in enumerate(outputs["per_round"]):
        assert axis_of(walk.shape, number) == expected["axis"]
        assert walk.turn(number, rule="position") == expected["groups"]
        close(walk.values, expected["values"])
        assert walk.coordinates == cells(expected["coords"])
    close(walk.values, [outputs["mean"]] * 9)


@pytest.mark.parametrize("rule", ["position", "static"])
def test_the_golden_partly_filled_grid_with_failures_is_walked_as_written(rule: str) -> None:
    example = golden("moshpit_partial_grid_failures")
    inputs, outputs = example["inputs"], example["outputs"]
    walk = Walk([list(x) for x in inputs["X"]], cells(inputs["coords"]), Shape(1, (3, 3)))
    for number, alive in enumerate(inputs["alive"]):
        groups = walk.turn(number, rule=rule, alive=alive)
        if rule == "static":
            close(walk.values, outputs["static_grid_values"][number])
        else:
            expected = outputs["per_round"][number]
            assert groups == expected["groups"]
            close(walk.values, expected["values"])
            assert walk.coordinates == cells(expected["coords"])


@pytest.mark.parametrize("rule", ["distinct", "position", "static"])
@pytest.mark.parametrize(("side", "dimensions"), [(2, 3), (3, 2), (4, 2), (3, 3)])
def test_a_full_grid_is_exact_after_d_rounds(side: int, dimensions: int, rule: str) -> None:
    shape = Shape(1, (side,) * dimensions)
    coordinates = list(product(range(side), repeat=dimensions))
    values = [[float(i * i % 17), float(i)] for i in range(len(coordinates))]
    total = [sum(column) for column in zip(*values, strict=True)]
    walk = Walk(values, coordinates, shape)
    met: set[tuple[int, int]] = set()
    for number in range(dimensions):
        groups = walk.turn(number, rule=rule)
        assert all(len(group) == side for group in groups)  # every group has M members
        pairs = {pair for group in groups for pair in combinations(group, 2)}
        assert not pairs & met  # nobody meets the same peer twice in d rounds
        met |= pairs
        sums = [sum(column) for column in zip(*walk.values, strict=True)]
        assert sums == pytest.approx(total)  # nothing is lost or made
    mean = [column / len(values) for column in total]
    close(walk.values, [mean] * len(values))


def test_a_full_grid_stays_full_sweep_after_sweep() -> None:
    walk = Walk([[0.0]] * 27, list(product(range(3), repeat=3)), Shape(1, (3, 3, 3)))
    for number in range(12):
        walk.turn(number, rule="distinct")
        assert len(set(walk.coordinates)) == 27


@given(st.integers(1, 20_000), st.integers(2, 64))
def test_sides_hold_everybody_and_stay_even(peers: int, max_group: int) -> None:
    sides = sides_for(peers, max_group)
    assert prod(sides) >= peers
    assert all(1 <= side <= max_group for side in sides)
    assert max(sides) - min(sides) <= 1
    if peers > max_group:
        assert max_group ** (len(sides) - 1) < peers  # no dimension too many
        smaller = list(sides)
        smaller[smaller.index(max(sides))] -= 1
        assert prod(smaller) < peers  # no side longer than needed


def test_up_to_one_group_the_grid_is_flat() -> None:
    assert sides_for(0, 16) == (1,)
    assert [sides_for(n, 16) for n in (1, 2, 16)] == [(1,), (2,), (16,)]
    assert sides_for(17, 16) == (5, 4)
    assert is_flat(Shape(0, (16,)))
    assert not is_flat(Shape(0, (4, 4)))
    assert meeting_key(Shape(0, (16,)), (3,), 5) == PEERS_KEY


@given(st.integers(1, 12), st.integers(1, 40), st.binary(max_size=8))
def test_new_coordinates_are_distinct_inside_a_group(side: int, size: int, group: bytes) -> None:
    shape = Shape(1, (7, side))
    drawn = [
        rekey((3, 0), shape=shape, round_number=1, group_id=group, index=i, size=size)[1]
        for i in range(size)
    ]
    assert all(0 <= c < side for c in drawn)
    if size == 1:
        assert drawn == [0]  # alone: it keeps its place
        return
    for start in range(0, size, side):  # larger than the axis: whole permutations, one by one
        block = drawn[start : start + side]
        assert len(set(block)) == len(block)


def test_who_ends_alone_moves_only_under_position() -> None:
    where = {"shape": Shape(1, (3, 3)), "round_number": 0, "group_id": b"g", "index": 0, "size": 1}
    assert rekey((2, 1), **where, rule="distinct") == (2, 1)  # type: ignore[arg-type]
    assert rekey((2, 1), **where, rule="static") == (2, 1)  # type: ignore[arg-type]
    assert rekey((2, 1), **where, rule="position") == (0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown re-keying rule"):
        rekey((2, 1), **{**where, "size": 2}, rule="best")  # type: ignore[arg-type]


def test_cells_are_counted_last_axis_fastest_and_wrap() -> None:
    assert [cell(i, (2, 3)) for i in range(7)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 0),
    ]  # fmt: skip


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 3))
def test_cells_are_dealt_line_by_line_along_an_axis(sides: list[int], number: int) -> None:
    shape, axis = Shape(1, tuple(sides)), number % len(sides)
    dealt = [cell_along(index, sides, axis) for index in range(prod(sides))]
    assert sorted(dealt) == list(product(*map(range, sides)))
    lines = [meeting_key(shape, coordinates, axis) for coordinates in dealt]
    side = sides[axis]
    for start in range(0, len(lines), side):
        assert len(set(lines[start : start + side])) == 1
