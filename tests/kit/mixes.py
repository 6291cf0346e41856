"""Numbers by which a value says whose mean it is. Trainer i fills its whole tensor with a number of
its own, another one in each round; the means of any two different sets of trainers differ.

One rule: what a tensor holds is read from its values alone.
"""

from __future__ import annotations

from itertools import combinations
from typing import TypeAlias

import torch

Mix: TypeAlias = tuple[int, frozenset[int]]
"""(round, the trainers whose equally weighted mean a value is). One of them: as it was filled."""

NUMBERS = (855, 3875, 2530, 339, 3822, 3323, 619, 797)
"""The means of any two of the 255 subsets are at least APART from each other (found by trying)."""
PER_ROUND = 8192
CYCLE = 12
"""Rounds until numbers return: the largest, 98304, is exact to 1/128 in float32."""
APART = 0.25
"""Between two means of one round at least; ten roundings of float32 are 0.08."""
NEAR = 0.1


def _subsets(items: list[int]) -> list[tuple[int, ...]]:
    return [some for size in range(1, len(items) + 1) for some in combinations(items, size)]


def fill_value(trainer: int, round_number: int) -> float:
    return float(NUMBERS[trainer] + PER_ROUND * (round_number % CYCLE))


def mixes(tensor: torch.Tensor, trainers: int, newest: int, rounds: int = 1) -> dict[Mix, int]:
    """Whose means the tensor holds, and in how many elements: of the `rounds` rounds up to
    `newest`. AssertionError for a value that is none."""
    assert rounds < CYCLE
    known: list[tuple[float, Mix]] = []
    for number in range(newest - rounds + 1, newest + 1):
        for some in _subsets(list(range(trainers))):
            mean = sum(fill_value(i, number) for i in some) / len(some)
            known.append((mean, (number, frozenset(some))))
    found: dict[Mix, int] = {}
    values, counts = tensor.unique(return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        mean, mix = min(known, key=lambda one: abs(one[0] - value))
        assert abs(mean - value) <= NEAR, f"{value} in {count} elements is nobody's mean"
        found[mix] = found.get(mix, 0) + count
    return found
