"""From rounds to figures: what was refused is in none, and what does not exist is null."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moshpitd.cli import bench_systems
from moshpitd.cli.bench_figures import Bar, ratio, refused, show_bars, summary, write_json
from moshpitd.cli.bench_latency import ratios
from moshpitd.cli.bench_systems import Measured, not_the_mean, not_whole
from moshpitd.cli.main import app
from moshpitd.errors import ConfigError


def rounds() -> list[Measured]:
    return [
        Measured(
            1.0, phases={"exchange": 0.6, "rest": 0.4}, cpu_s=2.0, bytes_sent=10, told_bytes=9
        ),
        Measured(
            3.0, phases={"exchange": 2.0, "rest": 1.0}, cpu_s=4.0, bytes_sent=12, told_bytes=9
        ),
        Measured(0.1, trouble="not the mean", cpu_s=9.0, bytes_sent=99, peak_rss_bytes=99),
    ]


def test_a_refused_round_is_shown_and_in_no_figure() -> None:
    found = summary("x", rounds())
    assert (found["median_s"], found["min_s"], found["max_s"]) == (2.0, 1.0, 3.0)
    assert (found["cpu_s"], found["bytes_sent"], found["told_bytes"]) == (3.0, 11, 9)
    assert found["phases"] == {"exchange": 1.3, "rest": 0.7}
    assert (found["rounds"], found["counted"], found["peak_rss_bytes"]) == (3, 2, 0)
    assert found["troubles"] == ["not the mean"]


def test_no_round_that_counts_is_no_figure() -> None:
    found = summary("x", rounds()[2:])
    assert all(found[key] is None for key in ("median_s", "min_s", "max_s", "cpu_s", "bytes_sent"))
    assert ratio(found["median_s"], 1.0) is ratio(1.0, found["median_s"]) is None


def test_a_ratio_is_our_median_over_theirs() -> None:
    assert ratio(2.0, 4.0) == 0.5
    results = [
        {"system": "moshpitd", "kind": "cold", "median_s": 0.2},
        {"system": "moshpitd", "kind": "warm", "median_s": 0.1},
        {"system": "hivemind", "kind": "cold", "median_s": 0.8},
        {"system": "hivemind", "kind": "warm", "median_s": None},
    ]
    assert ratios(results) == {"hivemind": {"cold": 0.25, "warm": None}}


def test_a_bar_without_a_figure_is_neither_met_nor_missed() -> None:
    assert [Bar("", value, 1.0).met for value in (0.5, 1.0, 1.1, None)] == [True, True, False, None]


def test_a_bar_that_rounds_were_refused_for_is_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary("x", rounds())
    bar = Bar("ours", 0.5, 1.0, refused(found, summary("y", rounds()[:2])))
    assert (bar.refused, bar.met) == (1, False)
    assert Bar.again(bar.as_dict()) == bar
    show_bars([bar])
    assert "MISSED, 1 of its rounds do not count" in capsys.readouterr().out


def test_only_complete_with_everybody_counts() -> None:
    whole = {"result": {"status": "complete", "participants": 2}}
    partial = {
        "result": {
            "status": "partial",
            "participants": 1,
            "group_size": 2,
            "reason": "silent",
            "detail": "",
            "excluded": {},
        }
    }
    assert not_whole([whole, whole]) == ""
    assert not_whole([whole, partial]) == "trainer 1: partial, 1 of 2, silent"
    assert not_whole([whole, {"error": "gone"}]) == "trainer 1: gone"
    assert not_the_mean([{"parts": 3, "inside": {"0,1": 3}}] * 2, 2) == ""
    assert "1 of 3 parts" in not_the_mean([{"parts": 3, "inside": {"0,1": 2, "0": 1}}], 2)


def test_the_report_is_written_or_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "f", {"a": 1})
    assert json.loads((tmp_path / "f").read_text()) == {"a": 1}
    with pytest.raises(ConfigError, match="--json"):
        write_json(tmp_path / "no" / "f", {})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["allreduce", "--peers", "1"], "--peers"),
        (["allreduce", "--against", "nccl"], "gloo or hivemind"),
        (["allreduce", "--against", "hivemind", "--codec", "int8"], "lose every part"),
        (["allreduce", "--params", "1e12"], "--params"),
        (["allreduce", "--peers", "16", "--params", "3.9e9"], "GB of memory"),
        (["allreduce", "--json", "/nowhere/at/all"], "no such directory"),
        (["latency", "--against", "gloo"], "hivemind or nothing"),
        (["latency", "--rounds", "61"], "--rounds"),
        (["codecs", "--passes", "0"], "--passes"),
        (["death", "--peers", "3", "--kill", "3"], "--kill"),
        (["freeze", "--trials", "0"], "--trials"),
        (["churn", "--daemons", "2"], "--daemons"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: list[str], complaint: str
) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2, done.output
    assert complaint in done.output


def test_without_a_checkout_there_is_no_hivemind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_systems, "BASELINE", tmp_path / "gone.py")
    done = CliRunner().invoke(app, ["bench", "latency"])
    assert done.exit_code == 2
    assert "source checkout" in done.output
