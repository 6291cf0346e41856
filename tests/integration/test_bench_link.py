"""`moshpitd bench link`, small: all systems move the same bytes, and the figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(60)
def test_every_system_and_direction_is_measured_and_compared(tmp_path: Path) -> None:
    figures = tmp_path / "link.json"
    command = [sys.executable, "-m", "moshpitd.cli.main", "bench", "link", "--mb", "8"]
    command += ["--rounds", "2", "--flows", "2", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(figures.read_text())
    systems = {"plain socket", "tls socket", "link (tls)", "link (authenticated)"}
    assert {(one["system"], one["direction"]) for one in told["results"]} == {
        (system, direction) for system in systems for direction in ("one way", "both ways")
    }
    for one in told["results"]:
        assert one["bytes_sent"] == (8 << 20) * (2 if one["direction"] == "both ways" else 1)
        assert 0 < one["min_s"] <= one["median_s"] <= one["max_s"]
        assert one["system"] in done.stdout
    assert len(told["ratios"]) == 8
    assert all(ratio > 0 for ratio in told["ratios"].values())
    assert "lost" not in done.stderr
