"""Benches with real processes: a killed one leaves nothing behind, and a death is judged truly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moshpitd.cli.bench_meters import (
    LinkMeter,
    MachineTime,
    Moved,
    cpu_s,
    members_of,
    processes_naming,
    tcp_sockets,
    wait_stopped,
)
from moshpitd.cli.bench_processes import processes
from tests.kit.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
BENCH = [sys.executable, "-m", "moshpitd.cli.main", "bench"]

# What a bench does, in small: a child that has a child, files in memory, and then it is killed.
WRITER = """
import sys, time
from pathlib import Path
from moshpitd.cli.demo_processes import Children
folder = Path(sys.argv[1])
children = Children(folder)
inner = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
child = children.start("child", ["-c", inner], folder / "log")
ended = children.start("ended", ["-c", "pass"], folder / "log")
ended.kill()
if sys.argv[2] == "orderly":
    children.kill_all()
print(child.process.pid, flush=True)
time.sleep(0 if sys.argv[2] == "orderly" else 1000)
"""


def environ(room: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(room)}


@pytest.fixture
def room() -> Iterator[Path]:
    """What a bench takes for /tmp. Short, because sockets lie in it; empty again afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Any]:
    """Starts the above on a folder; kills it at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], int]:
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), how],
            env=environ(tmp_path),
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_what_a_killed_bench_started_goes_with_it(writer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    process, group = writer(folder, "killed")
    wait_for(lambda: len(members_of([group])) == 2, 20.0, "the child has a child")
    os.killpg(group, signal.SIGSTOP)  # what is frozen goes as well
    assert folder.exists()
    process.kill()
    wait_for(lambda: not members_of([group]), 20.0, "the group is gone")
    wait_for(lambda: not folder.exists(), 20.0, "the folder is gone")


def test_after_an_orderly_end_the_will_is_revoked(writer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    process, group = writer(folder, "orderly")
    assert process.wait(20) == 0
    # Its child's child is init's to reap, which takes an instant.
    wait_for(lambda: not members_of([group]), 20.0, "the group is gone")
    assert folder.exists()  # its owner removes it, or keeps it
    wait_for(lambda: not processes_naming(str(tmp_path)), 20.0, "the executor has ended, too")


# -- meters ---------------------------------------------------------------------------------------


def test_the_kernel_tells_what_each_end_of_a_connection_moved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        meter = LinkMeter({0: port, 1: port + 1})
        meter.watch({1: os.getpid()})
        with socket.create_connection(("127.0.0.1", port)) as ours, server.accept()[0] as theirs:
            ours.sendall(b"x" * 1000)
            theirs.sendall(b"y" * 300)
            wait_for(lambda: len(ours.recv(4096)) == 300, 5.0, "the bytes arrived")
            # One end is at the port of node 0; the other is told apart as a file of node 1.
            wait_for(
                lambda: (
                    {
                        node: (one.sent // 10, one.received // 10)
                        for node, one in meter.read().items()
                    }
                    == {0: (30, 100), 1: (100, 30)}
                ),
                5.0,
                "both ends are counted",
            )
            ends = [one for one in tcp_sockets() if port in (one.local, one.remote)]
            assert len(ends) == 2
        # What a closed connection moved stays counted.
        assert meter.read()[0].received >= 1000
    assert (Moved(5, 3) - Moved(1, 1)).both == 6


def test_a_process_is_seen_to_work_and_to_stand_still() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True
    ) as process:
        try:
            before = MachineTime.now()
            wait_for(lambda: cpu_s([process.pid]) > 0.05, 20.0, "it works")
            assert 0.0 < MachineTime.now().load_since(before) <= 1.0
            os.kill(process.pid, signal.SIGSTOP)
            assert wait_stopped(process.pid, 5.0)
        finally:
            process.kill()


# -- the verbs ------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_death_is_judged_by_what_survivors_hold(tmp_path: Path, room: Path) -> None:
    """Three daemons, two of which die in turn: the others finish, agree, and account."""
    out = tmp_path / "out.json"
    options = ["--peers", "3", "--params", "1e6", "--trials", "2", "--redraws", "0"]
    began = time.monotonic()
    done = subprocess.run(
        [*BENCH, "death", *options, "--undisturbed", "3", "--json", str(out)],
        env=environ(room),
        capture_output=True,
        text=True,
        timeout=220,  # 25 s on two cores that are free; restarts import torch
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert len(report["trials"]) == 2
    assert report["undisturbed_median_s"] > 0
    for trial in report["trials"]:
        assert 0 < trial["killed_at_byte_fraction"] < 1.5
        assert trial["third"] in ("first", "middle", "last")
        assert 0 < trial["seconds"] < time.monotonic() - began
        assert trial["weights_exact"], trial
        # A round this small may lose its leader before everybody has heard that there is a group;
        # who was in one group finishes it, with the same bits.
        if not trial["retried"]:
            assert trial["completed"], trial
            assert trial["bit_equal"], trial
        survivors = 3 - len(trial["victims"])
        assert len(trial["outcomes"]) == len(trial["inside"]) == survivors
        # Every part is somebody's mean: the weights of whoever is inside, or the local values.
        assert all(sum(one.values()) == 16 for one in trial["inside"]), trial


def test_our_average_is_measured_beside_gloos(tmp_path: Path, room: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--peers", "2", "--params", "3e5", "--rounds", "2", "--codec", "int8"]
    done = subprocess.run(
        [*BENCH, "allreduce", *options, "--against", "gloo", "--json", str(out)],
        env=environ(room),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    keys = {"median_s", "min_s", "max_s", "cpu_s", "bytes_sent", "peak_rss_bytes", "phases"}
    for one in report["results"]:
        assert keys < one.keys()
        assert one["counted"] == 2
        assert one["median_s"] > 0
    assert [one["system"] for one in report["results"]] == ["moshpitd", "gloo"]
    assert report["in_place"] is True  # the other benches' trainers copy
    ours, theirs = (one["median_s"] for one in report["results"])
    assert report["ratios"]["gloo"] == pytest.approx(ours / theirs)
    assert report["results"][0]["told_bytes"] == report["bytes_formula"]
    memory = report["memory"]
    for at_rest, most in zip(
        memory["idle_anonymous_bytes"], memory["peak_anonymous_bytes"], strict=True
    ):
        assert 0 < at_rest <= most
    assert all(0 < seconds < 30 for seconds in memory["status_seconds"])
    assert [bar["met"] for bar in report["bars"] if bar["what"].startswith("peak memory")] == [True]


def test_a_codec_that_does_not_exist_is_refused(room: Path) -> None:
    done = subprocess.run(
        [*BENCH, "codecs", "--codec", "no-such-codec"],
        env=environ(room),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no-such-codec" in done.stderr


def test_processes_ends_what_it_began() -> None:
    with processes() as (children, folder):
        child = children.start("sleeper", ["-c", "import time; time.sleep(1000)"], folder / "log")
        assert child.code is None
    assert child.code is not None
    assert not folder.exists()
