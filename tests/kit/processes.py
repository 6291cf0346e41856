"""Daemons and trainers as real processes, each the leader of a group of its own.

One rule: only what was started here is ended, by its pid, and nothing of its group outlives `end`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moshpitd.errors import DaemonUnavailable
from moshpitd.net.identity import Identity
from moshpitd.rpc.calls import Calls
from tests.kit.http import get

UP_WITHIN_S = 120.0
"""torch, hivemind and libp2p are seconds of a core to import; five at once share two cores."""
RUN = ("-m", "moshpitd.cli.main")
SKEWED = """
import time
real = time.time
time.time = lambda: real() + ({ahead_s})
from moshpitd.cli.main import app
app(prog_name="moshpitd")
"""
"""A daemon whose wall clock is off, for everything that is Python. Production has no such door."""


class DaemonProcess:
    """`moshpitd run` in `home`, on loopback, with a socket short enough for the kernel.

    `settings` are further assignments for --set. With `http` it also answers there. `announce` and
    `link_announce`: where others dial it instead, such as a proxy.
    """

    def __init__(
        self,
        home: Path,
        *,
        port: int = 0,
        link_port: int = 0,
        announce: str = "",
        link_announce: str = "",
        bootstrap: tuple[str, ...] = (),
        http: int = 0,
        settings: Sequence[str] = (),
        clock_ahead_s: float = 0.0,
    ) -> None:
        self.home, self.port, self.bootstrap, self.http = home, port, bootstrap, http
        self.link_port, self.announce, self.link_announce = link_port, announce, link_announce
        self.socket, self.log, self.buffers = home / "s", home / "log", home / "buffers"
        self._settings, self._clock_ahead_s = settings, clock_ahead_s
        home.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def argv(self) -> list[str]:
        how = RUN if not self._clock_ahead_s else ("-c", SKEWED.format(ahead_s=self._clock_ahead_s))
        argv = [sys.executable, *how, "run", "--http-port", str(self.http)]
        argv += ["--data-dir", str(self.home), "--socket", str(self.socket)]
        argv += ["--listen", f"/ip4/127.0.0.1/tcp/{self.port}"]
        argv += ["--link-listen", f"127.0.0.1:{self.link_port}"]
        argv += ["--announce", self.announce] if self.announce else []
        argv += ["--link-announce", self.link_announce] if self.link_announce else []
        for assignment in (
            f"node.buffers_dir={self.buffers}",
            "notices.provider=none",
            *self._settings,
        ):
            argv += ["--set", assignment]
        for address in self.bootstrap:
            argv += ["--bootstrap", address]
        return argv

    def start(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MOSHPITD_")}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def started(self) -> bool:
        """It was, at least once; `pid` is that of its last life."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def peer_id(self) -> str:
        return Identity.load_or_create(self.home / "identity.key").peer_id

    def status(self) -> Any:
        """What the daemon says of itself; None while it does not answer."""
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the daemon ended with {code}:\n{self.log.read_text()[-3000:]}"
        return self._ask(lambda calls: calls.status(timeout_s=2.0))

    def peers(self, run: str) -> dict[str, Any]:
        """Every other peer of the run, by id; empty while the daemon does not answer."""
        reply = self._ask(lambda calls: calls.peers(run=run))
        return {line.peer_id: line for line in reply.peers} if reply is not None else {}

    def drain(self, budget_s: float) -> None:
        self._ask(lambda calls: calls.drain(budget_s))

    def up(self) -> None:
        """Wait until it answers."""
        wait_for(lambda: self.status() is not None, UP_WITHIN_S, "the daemon answers")

    def ready(self) -> bool:
        """/readyz says so."""
        try:
            return get(f"http://127.0.0.1:{self.http}/readyz")[0] == 200
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """To the daemon itself and nobody else of its group."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """kill -9, of the daemon alone: its p2pd is its own affair."""
        self.signal(signal.SIGKILL)
        self.wait(10.0)

    def end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, question: Callable[[Calls], Any]) -> Any:
        if not self.socket.exists():
            return None
        calls = Calls(self.socket)
        try:
            return question(calls)
        except DaemonUnavailable:
            return None
        finally:
            calls.close()


TRAINER = """
import json, sys, time
import torch
from moshpitd.client import DaemonUnavailable, attach
said = json.loads(sys.argv[1])

def tell(**fields):
    print(json.dumps(fields), flush=True)

w = torch.full((said["floats"],), said["value"])
session = attach(said["run"], tensors={"w": w}, socket=said["socket"])
tell(what="attached", attached=session.attached, w=w[0].item(), version=session.version)
for line in sys.stdin:
    ask = json.loads(line)
    if "fill" in ask:
        w.fill_(ask["fill"])
    before = w[0].item()
    try:
        result = session.average(ask.get("weight", 1), timeout_s=ask.get("timeout_s", 60.0))
    except DaemonUnavailable as error:
        tell(what="unavailable", why=str(error), unchanged=bool((w == before).all()))
    else:
        tell(
            what="averaged", status=result.status, reason=result.reason, version=result.version,
            participants=result.participants, loaded=result.loaded_snapshot, w=w[0].item(),
            contributors=list(result.contributors), without=len(result.parts_without_result),
            even=bool((w == w[0]).all()), seconds=sum(result.seconds.values()),
        )
session.close()
"""


class TrainerProcess:
    """A trainer that averages when it is told to, one JSON line each way.

    One float32 tensor `w`, every element `value`.
    """

    def __init__(self, socket: Path, run: str, *, floats: int = 1000, value: float = 0.0) -> None:
        said = {"socket": str(socket), "run": run, "floats": floats, "value": value}
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, json.dumps(said)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.heard: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def attached(self) -> dict[str, Any]:
        """Wait for its first words."""
        return self.answer(0)

    def ask(self, **options: Any) -> int:
        """Average once; the number of the answer that will come."""
        assert self._process.stdin is not None
        number = len(self.heard)
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        return number

    def answer(self, number: int, timeout_s: float = UP_WITHIN_S) -> dict[str, Any]:
        wait_for(lambda: len(self.heard) > number, timeout_s, f"the trainer's answer {number}")
        return self.heard[number]

    def average(self, timeout_s: float = UP_WITHIN_S, **options: Any) -> dict[str, Any]:
        """Average once and wait for what came of it."""
        return self.answer(self.ask(**options), timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard.append(json.loads(line))


def processes_with(word: str | Path) -> list[tuple[int, str]]:
    """(pid, command line) of running processes that name `word`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:
            continue  # it ended while we looked
        if str(word).encode() in line:
            found.append((int(folder.name), line.replace(b"\0", b" ").decode(errors="replace")))
    return found


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for something that other processes do; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start
