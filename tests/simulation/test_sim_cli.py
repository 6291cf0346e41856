"""The verbs of `moshpitd sim` as a person calls them. One rule: small runs; what the numbers must
be is tested where they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from moshpitd.cli.main import app

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


def test_a_result_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    assert "no such directory" in call("paper", "--json", tmp_path / "no" / "rows.json", code=2)
    assert "--seeds" in call("paper", "--seeds", 1, code=2)
