"""Work that `sim` spreads over processes: what becomes of them when somebody kills the one that
they work for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.processes import wait_for

PROGRAM = """
import os, pathlib, sys, time
from moshpitd.cli.sim_work import spread

def work(name):
    pathlib.Path(sys.argv[1], name).write_text(str(os.getpid()))
    time.sleep(60.0 if name == "long" else 0.0)

if __name__ == "__main__":
    spread(work, ["short", "long"], title="", processes=2)
"""


def is_there(pid: int) -> bool:
    """Not a zombie either: init may take a while to collect those whose parent is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_processes_end_with_the_one_that_they_work_for(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    told = [tmp_path / "short", tmp_path / "long"]
    parent = subprocess.Popen([sys.executable, str(program), str(tmp_path)])
    wait_for(lambda: all(one.exists() and one.read_text() for one in told), 30.0, "both began")
    workers = {int(one.read_text()) for one in told}
    assert all(is_there(pid) for pid in workers)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(is_there, workers)), 20.0, "both have ended")
