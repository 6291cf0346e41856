"""The verbs of `moshpitd sim` as a person calls them. One rule: small runs; what the numbers must
be is tested where they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moshpitd.cli.main import app
from moshpitd.cli.sim_world import read_scenario, world_of
from moshpitd.sim.checks import Checks

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
PNG = b"\x89PNG"


def call(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["sim", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_paper_writes_every_row_and_the_figure(tmp_path: Path) -> None:
    rows_at, figure = tmp_path / "rows.json", tmp_path / "figure.png"
    shown = call("paper", "--seeds", 2, "--processes", 1, "--json", rows_at, "--plot", figure)
    found: dict[str, Any] = json.loads(rows_at.read_text(encoding="utf-8"))
    assert found["seeds"] == 2
    keys = {"method", "n", "p_fail", "iterations_1e9", "iterations_1e4", "se_1e9", "se_1e4"}
    assert all(keys <= row.keys() for row in found["rows"])
    cells = {(row["method"], row["n"], row["p_fail"]) for row in found["rows"]}
    assert len(cells) == len(found["rows"]) == 6 * 4 * 4
    (exact,) = (
        row["iterations_1e9"]
        for row in found["rows"]
        if (row["method"], row["n"], row["p_fail"]) == ("moshpit_distinct", 1024, 0.0)
    )
    assert exact == 2.0
    assert {line["n"] for line in found["contraction"]} == {512, 768, 900, 1024}
    assert figure.read_bytes().startswith(PNG)
    assert "Moshpit" in shown


def test_paper_holds_its_rows_against_published_ones(tmp_path: Path) -> None:
    """One seed more or less decides nothing here: all-reduce's deviation is known, and of gossip
    and an undisturbed full grid every run is like any other."""
    table, other, rows_at = (tmp_path / name for name in ("t.csv", "o.csv", "rows.json"))
    head = "method,N,p_fail,seeds,iters_to_1e-9,iters_to_1e-4\n"
    gossip = f"{head}gossip,512,0,20,50.0,50.0\nelse,512,0,20,1,1\n"
    table.write_text(f"{gossip}allreduce,512,0.005,20,12.65,12.65\n", encoding="utf-8")
    other.write_text(f"{head}gossip,512,0,20,1,1\nmoshpit_distinct,1024,0,20,2,2\n")
    words = ("paper", "--seeds", 2, "--processes", 1, "--json", rows_at, "--against")
    shown = call(*words, table, "--against", other)
    assert "3 of 3 rows hold; 93 have no published row" in shown
    found: dict[str, Any] = json.loads(rows_at.read_text(encoding="utf-8"))
    assert found["against"] == [str(table), str(other)]
    beside = {
        (row["method"], row["n"], row["p_fail"]): row["against"]
        for row in found["rows"]
        if "against" in row
    }
    assert set(beside) == {
        ("gossip", 512, 0.0), ("allreduce", 512, 0.005), ("moshpit_distinct", 1024, 0.0)
    }  # fmt: skip
    (drawn,) = (it for it in found["rows"] if (it["method"], it["n"], it["p_fail"]) == (
        "allreduce", 512, 0.005))  # fmt: skip
    assert drawn["against"]["reference_1e9"] == 12.65
    assert drawn["iterations_1e9"] == round(2 * drawn["iterations_1e9"]) / 2  # of two runs
    assert drawn["expected"] == pytest.approx(12.7797, abs=1e-4)
    spread = drawn["expected_sd"] * (1 / 2 + 1 / 20) ** 0.5
    assert drawn["against"]["combined_se_1e9"] == pytest.approx(spread)
    table.write_text(gossip.replace("50.0,50.0", "50.0,49.0"), encoding="utf-8")
    shown = call(*words, table, code=1)
    assert "0 of 1 rows hold" in shown
    assert "DOES NOT HOLD" in shown
    (gossips,) = (
        row["against"] for row in json.loads(rows_at.read_text())["rows"] if "against" in row
    )
    assert (gossips["holds"], gossips["holds_1e9"], gossips["holds_1e4"]) == (False, True, False)


def test_what_cannot_be_compared_with_is_refused_before_the_work(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    assert "No such file" in call("paper", "--against", table, code=2)
    table.write_text("method,N,p_fail,seeds,iters_to_1e-9,iters_to_1e-4\nsgp,512,0,20,9,9\n")
    assert "no row of a method that is run" in call("paper", "--against", table, code=2)
    table.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in call("paper", "--against", table, code=2)


def test_a_result_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    assert "no such directory" in call("paper", "--json", tmp_path / "no" / "rows.json", code=2)
    assert "--seeds" in call("paper", "--seeds", 1, code=2)


# -- run and soak ----------------------------------------------------------------------------------

WORLD = """
peers = 9
same_start = true
join_spread_s = 0.2
beat_s = 15.0
faults_s = 45.0
goal = 0
max_weight = 1
step_size = 1.0
parts = 1
[params]
max_group = 3
"""


def test_run_writes_the_figures_of_a_world(tmp_path: Path) -> None:
    world, figures, plot = (tmp_path / name for name in ("w.toml", "w.json", "w.png"))
    world.write_text(WORLD, encoding="utf-8")
    shown = call("run", world, "--seed", 3, "--json", figures, "--plot", plot)
    assert "every check held" in shown
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    assert found["violations"] == []
    assert (found["peers"], found["attempts"]) == (9, 18)  # beats at 15 s and 30 s
    assert (found["grouped_fraction"], found["fill_mean"]) == (1.0, 1.0)
    assert 0.0 < found["time_to_group_s"]["p50"] <= found["time_to_group_s"]["p99"] < 1.0
    assert 0.0 < found["rtt_s"]["p50"] < 0.2
    assert found["wall_s"] > 0.0
    (first, second) = (row for row in found["over_time"] if row["attempts"])
    assert first["sides"] == [3, 3]
    assert second["distortion_before"] > second["distortion_after"] > 0.0
    assert plot.read_bytes().startswith(PNG)
    again = tmp_path / "again.json"
    call("run", world, "--seed", 3, "--json", again)
    repeated = json.loads(again.read_text(encoding="utf-8"))
    assert repeated | {"wall_s": 0.0} == found | {"wall_s": 0.0}


def test_a_scenario_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    world = tmp_path / "w.toml"
    for text, words in (
        ("peer = 9", "peer: unknown"),
        ("peers = 9.5", "peers: 9.5 is a float"),
        ("peers = 0", "peers: 0 is out of range"),
        ("[params]\nwindow_s = 60.0", "window_s"),
        ("[params]\nwindows = 1", "params.windows: unknown"),
        ("[[resizes]]\nat_s = 5.0\npeers = 0", "resizes[0]"),
        ("seed = 4", "seed: unknown"),
        ("peers = ", "not TOML"),
    ):
        world.write_text(text, encoding="utf-8")
        shown = call("run", world, code=2)
        assert words in shown, shown
        assert "w.toml" in shown, shown
    assert "No such file" in call("run", tmp_path / "nowhere.toml", code=2)


def test_soak_names_the_seeds_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that always fails stands for a bug; every world is told of, with the way back."""
    world, verdicts, told = tmp_path / "w.toml", tmp_path / "soak.json", tmp_path / "told"
    world.write_text(WORLD, encoding="utf-8")
    assert "2 of 2 worlds kept every check" in call(
        "soak", world, "--seeds", 2, "--processes", 1, "--json", verdicts
    )
    assert json.loads(verdicts.read_text(encoding="utf-8"))["failed"] == []

    def unsound(checks: Checks, nodes: object) -> None:
        checks.fail("is not as it should be")

    monkeypatch.setattr(Checks, "at_the_end", unsound)
    words = ("--seeds", 2, "--first", 5, "--processes", 1, "--json", verdicts)
    shown = call("soak", world, *words, "--transcripts", told, code=1)
    for seed in (5, 6):
        assert f"moshpitd sim run {world} --seed {seed}" in shown
        assert "is not as it should be" in (told / f"seed-{seed}.txt").read_text(encoding="utf-8")
    found = json.loads(verdicts.read_text(encoding="utf-8"))
    assert found["failed"] == [5, 6]
    assert "seed 5 at" in found["worlds"][0]["violations"][0]
    shown = call("run", world, "--json", verdicts, code=1)
    assert "is not as it should be" in shown
    assert "is not as it should be" in json.loads(verdicts.read_text())["violations"][0]


def test_a_fault_of_the_simulator_costs_the_other_worlds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks a world without being a violation is told of with its seed and traceback."""
    world, told = tmp_path / "w.toml", tmp_path / "told"
    world.write_text(WORLD, encoding="utf-8")

    def broken(checks: Checks, nodes: object) -> None:
        raise KeyError("ghost")

    with monkeypatch.context() as patched:
        patched.setattr(Checks, "at_the_end", broken)
        words = ("--seeds", 2, "--processes", 1, "--transcripts", told)
        shown = call("soak", world, *words, code=1)
    assert "0 of 2 worlds kept every check" in shown
    for seed in (0, 1):
        assert f"seed {seed} at" in shown
        story = (told / f"seed-{seed}.txt").read_text(encoding="utf-8")
        assert "the simulator raised KeyError('ghost')" in story
        assert "Traceback" in story


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_that_ships_can_be_run(path: Path) -> None:
    options = world_of(read_scenario(path), 0, path)
    assert options.peers >= 60
    assert f"configs/sim/{path.name}" in path.read_text(encoding="utf-8")
