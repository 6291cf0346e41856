"""Worlds that broke a property once, from seeds.toml. One rule: an entry says why it is there; one
that is not repaired yet is left out, and says what is wrong. A slow one is of hundreds of peers and
runs in `make sim` only: what it showed has a test of its own among the unit tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from moshpitd.sim.scenario import scenario
from moshpitd.sim.world import World

FILE = Path(__file__).with_name("seeds.toml")
SEEDS: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["seed"]
CLOSED = [
    pytest.param(entry, marks=pytest.mark.chaos if entry.get("slow") else ())
    for entry in SEEDS
    if not entry.get("open")
]


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['seed']} ({entry['reason'].split(':')[0]})"


@pytest.mark.parametrize("entry", CLOSED, ids=_name)
def test_what_was_repaired_stays_repaired(entry: dict[str, Any]) -> None:
    report = World(scenario(entry["world"], seed=entry["seed"])).run()
    if "alone" in entry:
        assert report.outcomes.get("alone", 0) == entry["alone"]


def test_every_entry_is_a_world_with_a_reason() -> None:
    for entry in SEEDS:
        assert len(entry["reason"].split()) >= 2, entry
        assert entry.keys() <= {"seed", "open", "slow", "reason", "world", "alone"}, entry
        assert scenario(entry["world"], seed=entry["seed"]).seed == entry["seed"]
