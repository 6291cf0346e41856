"""What `sim run` and `sim soak` share: a world from a file or from its seed, run to its report or
to its violation. One rule: a failure is shown with all that is needed to see it again: seed,
scenario and commit.
"""

from __future__ import annotations

import copyreg
import gc
import os
import subprocess
import tomllib
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moshpitd.cli.sim_compiled import use_compiled
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.sim.faults import Options
    from moshpitd.sim.world import Report


@dataclass(frozen=True, slots=True)
class Verdict:
    """One seed: its report, or how it broke a property."""

    seed: int
    peers: int
    report: Report | None = None
    at_s: float = 0.0
    what: str = ""
    transcript: str = ""

    @property
    def sentence(self) -> str:
        return f"seed {self.seed} at {self.at_s:.3f} s: {self.what}"


def read_scenario(path: Path | None) -> dict[str, Any]:
    """The file's tables; without a file the world is what its seed draws."""
    if path is None:
        return {"drawn": True}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}", key="SCENARIO") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", key="SCENARIO") from None


def world_of(table: dict[str, Any], seed: int, path: Path | None) -> Options:
    use_compiled()
    from moshpitd.sim.scenario import scenario

    try:
        return scenario(table, seed=seed)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def run_seed(job: tuple[dict[str, Any], int, Path | None], *, last: bool = False) -> Verdict:
    """Run one world; for `soak` in a process of its own. `last`: the process ends after it, so that
    nobody needs to look for what it has left: of ten thousand peers that takes a while."""
    use_compiled()
    from moshpitd.sim.checks import Violation
    from moshpitd.sim.meters import Figures, Row
    from moshpitd.sim.world import Report, World

    for kind in (Report, Figures, Row):
        copyreg.pickle(kind, _as_call)
    table, seed, path = job
    world = World(world_of(table, seed, path))
    gc.disable()  # a search reads millions of records, and there are next to no cycles
    try:
        report = world.run()
    except Violation as found:
        return Verdict(seed, len(world.nodes), None, found.at, found.what, found.transcript)
    except Exception as error:  # the simulator's own fault must not cost the other seeds
        what = f"the simulator raised {error!r}"
        return Verdict(seed, len(world.nodes), None, world.now, what, traceback.format_exc())
    finally:
        if last:
            gc.freeze()
        gc.enable()
    return Verdict(seed, report.peers, report)


def _as_call(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """For pickle, on the way to another process: a compiled frozen object takes no values but those
    that it is made with."""
    return type(value), tuple(getattr(value, one.name) for one in fields(value))


def again(path: Path | None, seed: int) -> str:
    """The command that shows it again, and the commit it was seen at."""
    where = f"{path} " if path is not None else ""
    seen = f" (seen at commit {commit})" if (commit := commit_hash()) else ""
    return f"moshpitd sim run {where}--seed {seed}{seen}"


def commit_hash() -> str:
    """The commit of this checkout, + when files differ from it; "" where git or the history is not
    there."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=here,
            capture_output=True, text=True, timeout=10.0, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
