"""The compiled simulator is used when it is of these sources, and comes to the same digests. One
rule: what needs a compiler's output runs only where somebody has made it (`make fast`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moshpitd.cli import sim_compiled
from moshpitd.cli.sim_compiled import INTERPRETED, STAMP, is_fresh, sources, stamp

ROOT = Path(__file__).parents[2]
built = pytest.mark.skipif(not is_fresh(), reason="nothing compiled of these sources: `make fast`")

WORLD = """
drawn = true
peers = 24
faults_s = 20.0

[params]
max_group = 4
"""

OVERFULL = """
from random import Random
from moshpitd.cli.sim_compiled import use_compiled
assert use_compiled()
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.sim.faults import Options
from moshpitd.sim.sizes import overgrown
peer = Peer(Params(), "a", Random(1), run="r")
assert overgrown(peer, Options()) is None
for number in range(10_000):
    peer.state.invites[str(number)] = ("key", 1.0)
print(overgrown(peer, Options()))
"""


def run_python(*words: str, interpreted: bool) -> str:
    env = {name: value for name, value in os.environ.items() if name != INTERPRETED}
    if interpreted:
        env[INTERPRETED] = "1"
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, check=True, capture_output=True, text=True
    ).stdout


def figures(folder: Path, verb: str, *options: str, interpreted: bool) -> dict[str, Any]:
    world, found = folder / "world.toml", folder / f"{interpreted}.json"
    world.write_text(WORLD, encoding="ascii")
    words = ("sim", verb, str(world), "--json", str(found), *options)
    run_python("-m", "moshpitd.cli.main", *words, interpreted=interpreted)
    shown: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return shown


@built
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_compiled_run_comes_to_the_same_in_every_figure(tmp_path: Path, seed: int) -> None:
    plain = figures(tmp_path, "run", "--seed", str(seed), interpreted=True)
    compiled = figures(tmp_path, "run", "--seed", str(seed), interpreted=False)
    assert (plain.pop("compiled"), compiled.pop("compiled")) == (False, True)
    del plain["wall_s"], compiled["wall_s"]
    assert plain == compiled
    assert plain["events"] > 1_000


@built
def test_compiled_reports_come_back_from_other_processes(tmp_path: Path) -> None:
    options = ("--seeds", "2", "--processes", "2")
    plain, compiled = (figures(tmp_path, "soak", *options, interpreted=it) for it in (True, False))
    assert plain["worlds"] == compiled["worlds"]
    assert all(world["digest"] for world in compiled["worlds"])


@built
def test_a_compiled_peer_that_keeps_too_much_is_found() -> None:
    found = run_python("-c", OVERFULL, interpreted=False).strip()
    assert found.endswith("state.invites', 10000)")  # which of the ways there is taken may differ


def test_what_was_made_of_other_sources_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_compiled, "FOLDER", tmp_path)
    assert not is_fresh()  # nothing there
    (tmp_path / STAMP).write_text(f"{stamp()}\n", encoding="ascii")
    assert is_fresh()
    copy = tmp_path / "moshpitd"
    for path in sources():
        there = copy / path.parent.name / path.name
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())
    monkeypatch.setattr(sim_compiled, "PACKAGE", copy)
    assert is_fresh()  # the same text elsewhere
    with (copy / "core" / "peer.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert not is_fresh()


def test_what_is_compiled_is_there_and_says_which_modules() -> None:
    names = {f"{path.parent.name}.{path.stem}" for path in sources()}
    assert {"core.peer", "core.messages", "sim.world", "sim.agenda"} <= names
    assert not names & {"core.__init__", "sim.paper"}
    assert set(sim_compiled.KEPT) <= {path.stem for path in (ROOT / "moshpitd/sim").glob("*.py")}
