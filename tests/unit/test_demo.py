"""The demo without a daemon: what it refuses, how it reads its trainers, what it calls a pass."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from moshpitd.cli import demo
from moshpitd.cli.demo_algorithms import ROWS
from moshpitd.cli.demo_processes import Children, DemoFailed, Node, free_ports, tail
from moshpitd.cli.demo_screen import checks_table, peers_table
from moshpitd.cli.demo_story import JsonLines, Story
from moshpitd.cli.demo_verdict import Killed, Played, judge, report
from moshpitd.cli.main import app
from moshpitd.client.optim import by_name
from moshpitd.daemon.settings import Settings
from moshpitd.testing import ArithmeticSwarm

NAMES = ["peer A", "peer B", "peer C", "peer D"]


def line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, **fields}) + "\n"


def start(peer_id: str, *, step: int = 0, snapshot: bool = False) -> str:
    return line("start", peer_id=peer_id, loaded_snapshot=snapshot, step=step, version=0)


def average(step: int, *, size: int = 4, status: str = "complete", reason: str = "") -> str:
    numbers = {"step": step, "version": step // 8, "group_size": size, "loss": 0.1}
    sizes = {"bytes_sent": 100, "bytes_received": 50}
    return line("round", status=status, reason=reason, accuracy=0.9, **numbers, **sizes)


def end(*, accuracy: float = 0.97, contributors: list[str] | None = None) -> str:
    final = {
        "contributors": NAMES if contributors is None else contributors,
        "participants": 4,
        "status": "complete",
        "version": 20,
        "group_size": 4,
    }
    return line("end", accuracy=accuracy, together=True, final=final, step=160, version=20)


def told(tmp_path: Path, *lives: str) -> Story:
    story = Story(steps=160)
    for number, text in enumerate(lives):
        if number:
            story.killed()
        path = tmp_path / f"{time.monotonic_ns()}.jsonl"
        path.write_text(text)
        story.begin(JsonLines(path))
        story.look()
    return story


def played(tmp_path: Path) -> Played:
    """A demo in which everything holds; the last peer was killed."""
    rounds = "".join(average(8 * n) for n in range(1, 21))
    stories = [told(tmp_path, start(name) + rounds + end()) for name in NAMES[:3]]
    first = start(NAMES[3]) + average(8)
    second = start(NAMES[3], step=80, snapshot=True) + average(160) + end()
    stories.append(told(tmp_path, first, second))
    return Played(
        stories=stories,
        sides=(4,),
        grid=[4],
        alone=0.66,
        central=0.98,
        difference=0.0,
        killed=Killed(3, when_s=30.0, back_s=45.0),
        exit_codes=[0, 0, 0, 0],
        seconds=80.0,
    )


def test_a_line_counts_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = JsonLines(path)
    assert lines.new() == []
    path.write_text('{"event": "a"}\n{"eve')
    assert lines.new() == [{"event": "a"}]
    assert lines.new() == []
    with path.open("a") as file:
        file.write('nt": "b"}\n')
    assert lines.new() == [{"event": "b"}]


def test_a_story_adds_up_over_the_lives_of_a_peer(tmp_path: Path) -> None:
    alone = average(8, size=1, status="alone", reason="no_peers")
    story = told(
        tmp_path,
        start("me") + average(8) + alone,
        start("me", step=80, snapshot=True) + average(88, size=3) + line("missed", step=96) + end(),
    )
    summary = story.summary(2)
    assert summary["peer"] == 2
    assert summary["outcomes"] == {"complete": 2, "partial": 0, "alone": 1, "failed": 0}
    assert summary["reasons"] == {"alone: no_peers": 1}
    assert summary["group_sizes"] == {"1": 1, "3": 1, "4": 1}
    assert summary["bytes"] == {"sent": 300, "received": 150}
    assert (summary["rounds"], story.together, summary["missed"]) == (3, 2, 1)
    assert (story.state, story.took_snapshot, story.peer_ids) == ("done", True, ["me", "me"])


def test_a_demo_in_which_all_holds_passes(tmp_path: Path) -> None:
    found = report(played(tmp_path))
    assert found["passed"], found["checks"]
    assert found["accuracy"]["swarm"] == 0.97
    assert found["final_round"]["contributors"] == NAMES
    assert found["killed"] == {
        "peer": 3,
        "peer_id": NAMES[3],
        "when_s": 30.0,
        "back_s": 45.0,
        "took_snapshot": True,
        "same_peer_id": True,
    }
    json.dumps(found)


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"alone": 0.8}, "accuracy of one trainer alone"),
        ({"central": 1.0001}, "below one process with all data"),
        ({"difference": 1e-9}, "largest difference between parameters"),
        ({"exit_codes": [0, 0, 70, 0]}, "daemons left when asked (exit codes)"),
        ({"exit_codes": [0, 0, None, 0]}, "daemons left when asked (exit codes)"),
        ({"killed": Killed(3, when_s=30.0)}, "killed peer came back"),
        ({"sides": (2, 2)}, "grid, and largest group"),
    ],
)
def test_a_demo_in_which_one_thing_fails_fails(
    tmp_path: Path, changes: dict[str, Any], failing: str
) -> None:
    found = judge(replace(played(tmp_path), **changes))
    assert failing in [check.name for check in found if not check.passed]


def test_a_peer_that_is_not_in_the_last_average_is_found(tmp_path: Path) -> None:
    it = played(tmp_path)
    it.stories[1] = told(tmp_path, start(NAMES[1]) + end(contributors=NAMES[:3]))
    assert not report(it)["passed"]
    it.stories[1] = told(tmp_path, start(NAMES[1]) + average(8))  # gave up waiting
    assert not report(it)["passed"]


def test_another_identity_and_no_snapshot_are_found(tmp_path: Path) -> None:
    it = played(tmp_path)
    it.stories[3] = told(tmp_path, start("old") + average(8), start("new") + average(16) + end())
    names = [check.name for check in judge(it) if not check.passed]
    assert {"killed peer came back", "... with the swarm's state"} <= set(names)


def test_a_demo_without_a_kill_has_no_checks_of_one(tmp_path: Path) -> None:
    found = report(replace(played(tmp_path), killed=None))
    assert found["killed"] is None
    assert not [check for check in found["checks"] if "killed" in check["name"]]


def test_the_tables_can_be_drawn(tmp_path: Path) -> None:
    it = played(tmp_path)
    assert peers_table(it.stories).row_count == 4
    assert checks_table(judge(it)).row_count == len(judge(it))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "2"], "--peers: 2 is out of range"),
        (["--kill", "2"], "--kill: 2 is out of range"),
        (["--every", "4"], "--every: 4 is out of range"),
        (["--steps", "100"], "--steps: 100 is out of range (expected 160.."),
        (["--peers", "7", "--max-group", "3"], "7 peers do not fill a grid"),
        (["--json", "/nowhere/out.json"], "/nowhere/out.json: no such directory"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_folder_to_keep_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    result = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds old" in result.stderr


def test_the_sides_of_the_grid() -> None:
    assert demo._sides(4, 16) == (4,)
    assert demo._sides(9, 3) == (3, 3)
    assert demo._sides(8, 2) == (2, 2, 2)


def test_the_config_of_a_node_is_one_that_a_daemon_takes(tmp_path: Path) -> None:
    node = Node(0, tmp_path / "peer-0", tmp_path / "0.sock", (20001, 20002), Story(160))
    address = "/ip4/127.0.0.1/tcp/20003/p2p/12D3KooWBt5QSLFyMz7Z9bnNPXpBKTwuYwkfuAEoisMLVvh4zwz8"
    node.write_config(bootstrap=[address], max_group=3)
    settings = Settings.load(node.folder / "moshpitd.toml", environ={})
    assert settings.averaging.max_group == 3
    assert settings.network.bootstrap == [address]
    assert settings.network.link_listen == "127.0.0.1:20002"
    assert settings.paths().socket == tmp_path / "0.sock"
    assert node.status() is None


def test_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports[0]))


SLEEPERS = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
)


def wait_for(path: Path) -> int:
    until = time.monotonic() + 20
    while not path.read_text().strip() and time.monotonic() < until:
        time.sleep(0.02)
    return int(path.read_text())


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True  # dead, and its new parent has not noticed yet
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("ending", ["time.sleep(60)", "sys.exit(3)"])
def test_killing_ends_the_children_of_a_child_too(tmp_path: Path, ending: str) -> None:
    children = Children(tmp_path)
    child = children.start("it", ["-c", SLEEPERS + ending], tmp_path / "log")
    grandchild = wait_for(tmp_path / "log")
    if "exit" in ending:
        while child.code is None:
            time.sleep(0.02)
        assert child.code == 3
    children.kill_all()
    children.kill_all()
    assert gone(grandchild)
    assert child.code == (3 if "exit" in ending else -signal.SIGKILL)


def test_a_signal_during_a_start_is_answered_when_the_child_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    children, begin = Children(tmp_path), subprocess.Popen

    def born(*args: Any, **options: Any) -> Any:
        process = begin(*args, **options)
        signal.raise_signal(signal.SIGTERM)  # here an exception would leave nobody who knows it
        return process

    old = signal.signal(signal.SIGTERM, leave)
    try:
        monkeypatch.setattr(subprocess, "Popen", born)
        with pytest.raises(SystemExit) as ended:
            children.start("it", ["-c", "import time; time.sleep(60)"], tmp_path / "log")
    finally:
        assert signal.signal(signal.SIGTERM, old) is leave
        children.kill_all()
    assert ended.value.code == 128 + signal.SIGTERM
    assert [child.code for child in children.started] == [-signal.SIGKILL]


def test_a_child_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    children = Children(tmp_path)
    code = "import sys; print('the reason'); sys.exit(70)"
    child = children.start("the daemon of peer 1", ["-c", code], tmp_path / "log")
    while child.code is None:
        time.sleep(0.02)
    with pytest.raises(DemoFailed, match="the daemon of peer 1 ended with exit code 70") as failure:
        children.check()
    assert tail(failure.value.logs[0]) == ["the reason"]
    children.kill_all()


def test_our_settings_do_not_reach_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSHPITD_HTTP__PORT", "1")
    children = Children(tmp_path)
    code = "import os, moshpitd; print([k for k in os.environ if k.startswith('MOSHPITD_')])"
    child = children.start("it", ["-c", code], tmp_path / "log")
    while child.code is None:
        time.sleep(0.02)
    children.kill_all()
    assert tail(tmp_path / "log") == ["[]"]


def test_the_command_can_be_run_under_a_chosen_interpreter() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "moshpitd.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    assert "demo" in done.stdout


# ---- Algorithms by name.


def of_row(tmp_path: Path, name: str, **changes: Any) -> Played:
    found = replace(played(tmp_path), alone=None, central=None, row=ROWS[name])
    return replace(found, **changes)


def test_a_demo_by_name_has_its_own_bars(tmp_path: Path) -> None:
    found = report(of_row(tmp_path, "diloco"))
    assert found["passed"], found["checks"]
    assert (found["algorithm"], found["shards"]) == ("diloco", "skewed")
    names = [check["name"] for check in found["checks"]]
    assert "largest difference between replicas" in names
    assert "accuracy of one trainer alone" not in names
    assert not report(of_row(tmp_path, "diloco", difference=1e-9))["passed"]
    worse = of_row(tmp_path, "diloco")
    worse.stories[1].end["accuracy"] = 0.92
    failed = [check.name for check in judge(worse) if not check.passed]
    assert failed == ["accuracy of the swarm (its worst peer)"]
    lost = of_row(tmp_path, "diloco")
    lost.stories[3].took_snapshot = False
    assert [check.name for check in judge(lost) if not check.passed] == [
        "... with the swarm's state"
    ]
    asynchronous = of_row(tmp_path, "async-model-average")
    assert "largest difference between parameters" in [c.name for c in judge(asynchronous)]


def test_a_demo_in_pairs_counts_the_rounds_of_those_that_ask(tmp_path: Path) -> None:
    found = of_row(tmp_path, "ad-psgd")
    for story in found.stories:
        story.group_sizes.clear()
        story.group_sizes[2] = 1
    for story in found.stories[1:3]:  # who is met is alone in its own calls
        story.outcomes.clear()
        story.outcomes["alone"] = 480
    assert report(found)["passed"], judge(found)
    for story in found.stories:
        story.outcomes.clear()
    named = "rounds together (most of one that asks)"
    assert [check.name for check in judge(found) if not check.passed] == [named]


def test_a_demo_with_a_store_counts_versions_and_not_rounds(tmp_path: Path) -> None:
    found = of_row(tmp_path, "asysg-con")
    for story in found.stories:
        story.version = 1920
        story.end["gradients"] = 480
        story.outcomes.clear()
    assert report(found)["passed"], judge(found)
    found.stories[1].end["gradients"] = 1000  # more than half: whose are the others?
    named = "versions of the store, and gradients of a survivor"
    assert [check.name for check in judge(found) if not check.passed] == [named]
    found.stories[1].end["gradients"] = 0
    assert [check.name for check in judge(found) if not check.passed] == [named]


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_makes_its_optimizer(name: str) -> None:
    """Options are JSON on a trainer's command line: what cannot be is an error here already."""
    options = json.loads(json.dumps(dict(ROWS[name].options)))
    if "inner" in options:
        options["inner"] = getattr(torch.optim, options["inner"])
    if name == "gradient-averaging":
        assert options.keys() <= {"settle_every", "bucket_bytes", "overlap"}
        return
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = by_name(name, model.parameters(), ArithmeticSwarm(1).peer(0), **options)
    assert optimizer.algorithm == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithm", "adagrad"], "no demo of 'adagrad'"),
        (["--algorithm", "diloco", "--peers", "9", "--max-group", "3"], "one group"),
    ],
)
def test_algorithms_that_no_row_has_and_grids_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_names_of_all_demos() -> None:
    result = CliRunner().invoke(app, ["demo", "--algorithm", "list"])
    assert result.exit_code == 0
    assert {"moshpit-sgd", *ROWS} == set(result.stdout.split())
