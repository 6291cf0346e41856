"""Params: what does not nest or lies out of range is refused with the key's name.

One rule: the pairs that must nest are written down here a second time, from the reasons in the
fields' own words.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moshpitd.core.params import Params
from moshpitd.errors import ConfigError

NESTED = [
    ("settle_s", "window_s"),
    ("answer_timeout_s", "window_s"),
    ("window_s", "attempt_timeout_s"),
    ("part_timeout_s", "result_timeout_s"),
    ("result_timeout_s", "round_timeout_s"),
    ("parity_timeout_s", "round_timeout_s"),
    ("found_fresh_s", "ttl_s"),
    ("refresh_s", "ttl_s"),
]


def test_the_defaults_are_sound() -> None:
    Params().check()


@pytest.mark.parametrize(("inner", "outer"), NESTED)
@pytest.mark.parametrize("excess", [0.0, 1.0])
def test_timeouts_nest_strictly(inner: str, outer: str, excess: float) -> None:
    params = replace(Params(), **{inner: getattr(Params(), outer) + excess})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=outer) as caught:
        params.check()
    assert caught.value.key in {name for pair in NESTED for name in pair}


@pytest.mark.parametrize(
    "name", [f.name for f in fields(Params) if f.name.endswith(("_s", "_bytes", "_ratio"))]
)
@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e13])
def test_durations_and_sizes_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Params(), **{name: value}).check()  # type: ignore[arg-type]
    assert caught.value.key == name


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_group", 2, 64),
        ("snapshot_slots", 1, 64),
        ("max_version_lag", 1, 1 << 20),
        ("max_candidates", 2, 1 << 16),
        ("max_trainers", 1, 1 << 10),
    ],
)
def test_counts_have_both_bounds(name: str, low: int, high: int) -> None:
    replace(Params(), **{name: low}).check()  # type: ignore[arg-type]
    replace(Params(), **{name: high}).check()  # type: ignore[arg-type]
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError) as caught:
            replace(Params(), **{name: value}).check()  # type: ignore[arg-type]
        assert caught.value.key == name


def test_a_pinned_side_fits_a_group() -> None:
    Params(grid_sides=(16, 16)).check()
    for sides in ((17,), (4, 0), (4, -1)):
        with pytest.raises(ConfigError) as caught:
            Params(grid_sides=sides).check()
        assert caught.value.key == "grid_sides"
