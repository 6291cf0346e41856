"""What happens to the children of a demo or a bench that is killed and cannot end them itself.

One rule: the executor outlives whoever wrote the will, does nothing while its writer lives, and
ends only groups and removes only folders that are named in it.

SIGKILL cannot be caught, and Linux's parent-death signal does not reach far enough: it kills the
daemon but not what a daemon has started, and it leaves the mapped files in /dev/shm. So a small
process in a session of its own reads the will from a pipe; the end of the pipe is the death of the
writer. It costs 15 ms and 8 MB.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


class LastWill:
    """The writer's side. Invariant: what is written is alive; `ended` comes before a pid can mean
    somebody else."""

    def __init__(self) -> None:
        # Isolated, and by its path: nothing of the environment, no package, no site is loaded.
        self._executor = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is the writer's to answer
        )

    @property
    def pid(self) -> int:
        return self._executor.pid

    def started(self, group: int) -> None:
        """The process group `group` shall not outlive us."""
        self._write(f"group {group}")

    def ended(self, group: int) -> None:
        self._write(f"ended {group}")

    def folder(self, path: Path) -> None:
        """Shall be removed when we cannot; whoever removes it first need not say so."""
        self._write(f"folder {path}")

    def close(self) -> None:
        """Nothing is left to execute. Safe to call twice."""
        stdin = self._executor.stdin
        assert stdin is not None
        if not stdin.closed:
            self._write("revoked")
            stdin.close()
        self._executor.wait()

    def _write(self, line: str) -> None:
        stdin = self._executor.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:  # somebody ended the executor; the writer still clears up itself
            return


def execute(lines: Iterable[str]) -> None:
    """Read the will to its end, then carry out what it says then."""
    groups: dict[int, None] = {}  # in the order in which they were started
    folders: dict[str, None] = {}
    for line in lines:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups[int(rest)] = None
        elif word == "ended":
            groups.pop(int(rest), None)
        elif word == "folder":
            folders[rest] = None
        elif word == "revoked":
            return
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)  # also reaches what is stopped
        except (ProcessLookupError, PermissionError):
            continue
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    execute(sys.stdin)
