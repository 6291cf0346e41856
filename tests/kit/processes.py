"""Daemons as real processes, each the leader of a group of its own.

One rule: only what was started here is ended, by its pid, and nothing of its group outlives `end`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moshpitd.errors import DaemonUnavailable
from moshpitd.rpc.calls import Calls

UP_WITHIN_S = 120.0
"""torch, hivemind and libp2p are seconds of a core to import; five at once share two cores."""


class DaemonProcess:
    """`moshpitd run` in `home`, on loopback, with a socket short enough for the kernel."""

    def __init__(self, home: Path, *, port: int = 0, bootstrap: tuple[str, ...] = ()) -> None:
        self.home, self.port, self.bootstrap = home, port, bootstrap
        self.socket, self.log = home / "s", home / "log"
        home.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "moshpitd.cli.main", "run", "--http-port", "0"]
        argv += ["--data-dir", str(self.home), "--socket", str(self.socket)]
        argv += ["--listen", f"/ip4/127.0.0.1/tcp/{self.port}", "--link-listen", "127.0.0.1:0"]
        argv += ["--set", f"node.buffers_dir={self.home / 'buffers'}"]
        for address in self.bootstrap:
            argv += ["--bootstrap", address]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MOSHPITD_")}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def status(self) -> Any:
        """What the daemon says of itself; None while it does not answer."""
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the daemon ended with {code}:\n{self.log.read_text()[-3000:]}"
        if not self.socket.exists():
            return None
        calls = Calls(self.socket)
        try:
            return calls.status(timeout_s=2.0)
        except DaemonUnavailable:
            return None
        finally:
            calls.close()

    def up(self) -> None:
        """Wait until it answers."""
        wait_for(lambda: self.status() is not None, UP_WITHIN_S, "the daemon answers")

    def end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for something that other processes do; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - start
