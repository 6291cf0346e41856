"""A trainer as a real process: Ctrl-C, threads, signal handlers, child processes, forks, exit.

One rule: one process for all of it, because importing torch costs seconds.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fake_daemon import FakeDaemon, Round, nobody, progress, until

TRAINER = """
import json, os, signal, sys, threading, torch

before = {number: signal.getsignal(number) for number in signal.valid_signals()}

from moshpitd.client import attach
from moshpitd.client.optim import LocalSGD

def say(**words):
    print(json.dumps(words), flush=True)

def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found += open(f"/proc/self/task/{task}/children").read().split()
        except FileNotFoundError:
            pass  # that thread has just ended
    return found

session = attach("test", tensors=[torch.ones(3)], socket=sys.argv[1])
say(attached=session.attached)
try:
    session.average(progress=lambda event: say(phase=event.phase))
except KeyboardInterrupt:
    say(interrupted=True)

def other():
    with attach("test", tensors=[torch.ones(3)], socket=sys.argv[1]) as second:
        say(thread=second.average(weight=5).status)

worker = threading.Thread(target=other)
worker.start()
worker.join()
say(again=session.average().status)
now = {number: signal.getsignal(number) for number in signal.valid_signals()}
say(handlers_unchanged=before == now, children=children())

pid = os.fork()
if pid == 0:
    try:
        session.average()
    except Exception as error:
        say(in_child=type(error).__name__)
    sys.exit(0)  # runs the exit handlers of the parent's session, which must not detach it
os.waitpid(pid, 0)
say(after_fork=session.average().status)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def test_a_trainer_process_from_start_to_exit(daemon: FakeDaemon) -> None:
    rounds: list[Round] = []

    def blocks(call: Round) -> Iterator[Any]:
        rounds.append(call)
        yield progress("matchmaking")
        call.cancelled.wait(30)

    daemon.answer = blocks
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(daemon.socket)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def said() -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"it ended: {process.communicate(timeout=60)[1]}"
        return json.loads(line)

    try:
        assert said() == {"attached": True}
        assert said() == {"phase": "matchmaking"}
        process.send_signal(signal.SIGINT)
        assert said() == {"interrupted": True}
        assert rounds[0].cancelled.wait(10), "the daemon hears that nobody waits any more"
        daemon.answer = nobody
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in rest.splitlines()]
    assert lines == [
        {"thread": "alone"},
        {"again": "alone"},
        {"handlers_unchanged": True, "children": []},
        {"in_child": "DaemonUnavailable"},
        {"after_fork": "alone"},
    ], errors
    assert process.returncode == 0, errors
    assert len(daemon.detached) == 2, "both detach: one by `with`, one at exit, none in the fork"


def test_a_killed_trainer_is_noticed(daemon: FakeDaemon) -> None:
    source = (
        "import sys, time, torch\n"
        "from moshpitd.client import attach\n"
        "session = attach('test', tensors=[torch.ones(1)], socket=sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, str(daemon.socket)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        assert daemon.gone == []
    finally:
        process.kill()
        process.wait()
    until(lambda: len(daemon.gone) == 1, timeout_s=2.0, what="the Hold stream ends")
