"""What `bench overlap` makes of its blocks."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from moshpitd.cli.bench_overlap import _report
from moshpitd.cli.main import app


def told(**fields: Any) -> dict[str, Any]:
    return {
        "parameters": 13_000_000,
        "batch": 8,
        "off_s": [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]],
        "on_s": [[1.0, 1.06], [1.0, 3.0], [2.0, 2.1]],
        "off_cpu_s": [2.0, 2.0, 4.0],
        "on_cpu_s": [2.1, 2.1, 4.2],
        "in_flight": 0.95,
        "daemon_at_work": 0.9,
        "rounds": {"complete": 3},
    } | fields


def test_a_landing_counts_and_a_burst_of_other_load_does_not() -> None:
    report = _report(told(), peers=4)
    assert report["ratios"] == pytest.approx([1.03, 2.0, 1.025])
    assert report["ratio"] == pytest.approx(1.03)
    assert report["cpu_ratio"] == pytest.approx(1.05)
    assert report["passed"]
    assert report["with_s"] == {"median": 1.53, "min": 1.0, "max": 3.0}


@pytest.mark.parametrize(
    ("fields", "failed"),
    [
        ({"on_s": [[1.1, 1.1], [1.1, 1.1], [2.2, 2.2]]}, "ratio"),
        ({"in_flight": 0.5}, "in_flight"),
        ({"parameters": 9_000_000}, "parameters"),
    ],
)
def test_a_bar_that_is_missed_is_named(fields: Any, failed: str) -> None:
    report = _report(told(**fields), peers=4)
    assert [name for name, good in report["checks"].items() if not good] == [failed]
    assert not report["passed"]


def test_the_verb_is_there() -> None:
    found = CliRunner().invoke(app, ["bench", "overlap", "--help"])
    assert found.exit_code == 0
    assert "overlap=True" in found.output
