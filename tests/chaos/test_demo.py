"""The demo as a person runs it: real daemons and trainers as processes, and one node is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "moshpitd.cli.main", "demo", "--peers", "3"]


def processes_with(word: str) -> list[str]:
    """Command lines of running processes that name `word`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:
            continue  # it ended while we looked
        if word.encode() in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.fixture
def room() -> Iterator[Path]:
    """What the demo takes for /tmp. Short, because sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def environ(room: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(room)}


def test_three_peers_of_which_one_is_killed(tmp_path: Path, room: Path) -> None:
    out, kept = tmp_path / "out.json", tmp_path / "kept"
    options = ["--kill", "1", "--steps", "400", "--json", str(out), "--keep", str(kept)]
    done = subprocess.run(
        [*DEMO, *options],
        env=environ(room),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_with(str(kept)) == []
    report: dict[str, Any] = json.loads(out.read_text())
    assert all(check["passed"] for check in report["checks"])
    assert report["max_parameter_difference"] == 0.0
    assert len(report["final_round"]["contributors"]) == 3
    killed = report["killed"]
    assert killed["peer"] == 2
    assert killed["when_s"] < killed["back_s"] < report["seconds"]
    assert killed["took_snapshot"]
    assert killed["same_peer_id"]
    for peer in report["peers"]:
        assert peer["rounds"] == sum(peer["outcomes"].values()) == sum(peer["group_sizes"].values())
        assert peer["bytes"]["sent"] > 0
        assert peer["peer_id"] in report["final_round"]["contributors"]
    for folder in sorted(kept.glob("peer-*")):
        assert "Traceback" not in (folder / "daemon.log").read_text()
    assert list(room.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(
    tmp_path: Path, room: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*DEMO, "--kill", "0"], env=environ(room), stdout=file, stderr=file
        )
        until = time.monotonic() + 120
        while "trainers start" not in log.read_text() and time.monotonic() < until:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        assert len(processes_with(str(room))) >= 6  # three daemons, their p2pds, and trainers
        process.send_signal(number)
        assert process.wait(30) != 0
    assert processes_with(str(room)) == []
    assert list(room.iterdir()) == []
