"""Worlds that broke a property once, from seeds.toml. One rule: an entry says why it is there; one
that is not repaired yet is left out, and says what is wrong. A slow one takes many seconds and runs
in `make sim` only: what it showed has a test of its own among the unit tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from moshpitd.sim.faults import Options
from moshpitd.sim.scenario import scenario
from moshpitd.sim.world import World

FILE = Path(__file__).with_name("seeds.toml")
WORLDS = Path(__file__).parents[2] / "configs" / "sim"
SEEDS: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["seed"]
CLOSED = [
    pytest.param(entry, marks=pytest.mark.chaos if entry.get("slow") else ())
    for entry in SEEDS
    if not entry.get("open")
]


def _options(entry: dict[str, Any]) -> Options:
    """Of a table, or of a file of configs/sim by its name."""
    world = entry["world"]
    if isinstance(world, str):
        world = tomllib.loads((WORLDS / world).read_text(encoding="utf-8"))
    return scenario(world, seed=entry["seed"])


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['seed']} ({entry['reason'].split(':')[0]})"


@pytest.mark.parametrize("entry", CLOSED, ids=_name)
def test_what_was_repaired_stays_repaired(entry: dict[str, Any]) -> None:
    report = World(_options(entry)).run()
    if "alone" in entry:
        assert report.outcomes.get("alone", 0) == entry["alone"]


def test_every_entry_is_a_world_with_a_reason() -> None:
    for entry in SEEDS:
        assert len(entry["reason"].split()) >= 2, entry
        assert entry.keys() <= {"seed", "open", "slow", "reason", "world", "alone"}, entry
        assert _options(entry).seed == entry["seed"]
