"""`moshpitd bench namespaces`, small: both systems move their bytes, and the figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moshpitd.cli.namespaces import missing


@pytest.mark.timeout(120)
def test_an_exchange_is_measured_beside_plain_tcp_of_the_same_bytes(tmp_path: Path) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    figures = tmp_path / "namespaces.json"
    command = [sys.executable, "-m", "moshpitd.cli.main", "bench", "namespaces"]
    command += ["--peers", "3", "--params", "3e5", "--rounds", "1", "--slow-mbps", "0"]
    command += ["--part-kib", "64", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = (told := json.loads(figures.read_text()))["cases"]
    assert case["shares"] == pytest.approx([1 / 3] * 3)
    # Two thirds of the vector go to others, a third comes back from each: 4/3 of 600 kB.
    assert case["ideal_s"] == pytest.approx(4 / 3 * 6e5 * 8 / 100e6, rel=1e-4)
    ours, plain = case["results"]
    assert (ours["system"], plain["system"]) == ("exchange", "plain tcp")
    assert ours["counted"] == plain["counted"] == 1
    assert plain["bytes_sent"] == pytest.approx(3 * 4 / 3 * 6e5, rel=1e-4)
    assert ours["bytes_sent"] == pytest.approx(plain["bytes_sent"], rel=0.02)
    assert case["ideal_s"] < plain["median_s"], "the cap holds"
    assert [bar["at_most"] for bar in told["bars"]] == [1.05]
    assert "ideal" in done.stdout
