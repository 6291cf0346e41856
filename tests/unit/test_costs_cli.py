"""`moshpitd sim compare`: what it writes and how it refuses. One rule: numbers are only looked for
here; whether they are right is asked in test_costs.py."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moshpitd.cli.main import app


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["sim", "compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("compare")
    result = invoke(
        "--json", folder / "a.json", "--csv", folder / "a.csv", "--plot", folder / "a.png"
    )
    assert result.exit_code == 0, result.output
    return folder, result.stdout


def test_the_screen_shows_model_beside_figure_and_what_does_not_fit(
    written: tuple[Path, str],
) -> None:
    _, screen = written
    assert "2574 / 2590" in screen
    assert "53 of 60 within 15%" in screen
    assert screen.count("Horovod, latency_ms") == 5
    assert "! 184 / 244" in screen
    assert "never" in screen
    assert "Async < QAdam1bit < ByteGrad ~ LowPrecDecentralized < Decentralized < DDP" in screen
    assert "First to agree" in screen


def test_the_json_holds_all_of_it(written: tuple[Path, str]) -> None:
    folder, screen = written
    value = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    assert value["calibration"]["within_15_percent"] == 53
    assert len(value["calibration"]["rows"]) == 60
    assert len(value["scaling"]["rows"]) == 504
    never = [row for row in value["scaling"]["rows"] if row["seconds"] is None]
    assert {row["method"] for row in never} >= {"allreduce_ring", "allreduce_butterfly"}
    assert all(row["rounds"] >= 1 for row in value["scaling"]["rows"])
    for order in value["orders"]:
        assert order["sentence"] in screen
    assert len(value["first_to_agree"]) == 3 * 3 * 7
    assert {cell["winner"] for cell in value["fastest_training_step"]} == {
        "QAdam1bit",
        "LowPrecDecentralized",
    }


def test_the_csv_has_a_line_per_row(written: tuple[Path, str]) -> None:
    with (written[0] / "a.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sum(row["table"] == "calibration" for row in rows) == 60
    assert sum(row["table"] == "scaling" for row in rows) == 504
    first = rows[0]
    assert (first["system"], first["figure_epoch_s"], first["model_epoch_s"]) == (
        "DDP",
        "2590",
        "2574.4",
    )


def test_the_figure_is_a_picture(written: tuple[Path, str]) -> None:
    assert (written[0] / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_swarm_of_ones_own(tmp_path: Path) -> None:
    """Preempted every hour: groups go on, collectives hardly ever come to an end."""
    flags = "--peers 200 --parameters 125e6 --codec float16 --latency-ms 30 --up-mbps 50"
    flags += " --down-mbps 200 --compute-s 20 --sigma 0.3 --lifetime-min 60"
    result = invoke(*flags.split(), "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    assert "Your 200 peers" in result.stdout
    yours = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["yours"]
    seconds = {row["method"]: row["seconds"] for row in yours}
    assert next(iter(seconds)) == "moshpit"
    assert list(seconds.values()) == sorted(seconds.values())
    assert seconds["allreduce_butterfly"] > 100 * seconds["moshpit"]
    away = {row["method"]: row["p_fail"] for row in yours}
    assert away["moshpit"] == pytest.approx(0.0335, abs=0.001)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--peers 1", "nobody to agree with"),
        ("--peers 9 --codec int7", "unknown codec 'int7'"),
    ],
)
def test_a_swarm_that_cannot_be(flags: str, told: str) -> None:
    result = invoke(*flags.split())
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_figure_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "moshpitd.cli.sim_compare_plot", raising=False)
    monkeypatch.delattr("moshpitd.cli.sim_compare_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "moshpitd[plots]" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--json", "/no/such/folder/a.json"), "/no/such/folder/a.json: its folder does not exist"),
        (("--plot", "a.nothing"), "a.nothing: no figure has that ending (expected .eps"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_line(
    arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
