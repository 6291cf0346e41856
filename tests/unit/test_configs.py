"""configs/moshpitd.toml documents every setting; every live key in it is that setting's default.

One rule: the file can be deleted without changing anything. A key that has no default, or a
different one on every machine, stands there as a comment (`# key = ...`), so that nobody has to
read the source to learn that it exists.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "moshpitd" / "daemon" / "settings.py"
CONFIG = ROOT / "configs" / "moshpitd.toml"


def disagreements(settings: type[BaseModel], text: str) -> list[str]:
    """One sentence for each key of the file that Settings does not know or has another value for,
    and for each setting that the file does not mention."""
    defaults = dict(_defaults(settings))
    written = dict(_leaves(tomllib.loads(text), defaults))
    unknown = [f"{key}: Settings has no such key" for key in written.keys() - defaults.keys()]
    wrong = [
        f"{key}: {value!r} in the file, the default is {defaults[key]!r}"
        for key, value in written.items()
        if key in defaults and value != defaults[key]
    ]
    mentioned = set(re.findall(r"^#?\s*\[*([A-Za-z0-9_]+)\]*\s*(?:=|$)", text, re.MULTILINE))
    silent = [
        f"{key}: not documented"
        for key in defaults.keys() - written.keys()
        if key.rpartition(".")[2] not in mentioned
    ]
    return sorted(unknown + wrong + silent)


def _defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default as TOML would read it); None where a value is required."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _defaults(field.annotation, f"{key}.")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield key, TypeAdapter(Any).dump_python(default, mode="json")


def _leaves(table: dict[str, Any], known: dict[str, Any], prefix: str = "") -> Iterator[Any]:
    """(dotted key, value); a table is one leaf where Settings has one field for all of it."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value


class Links(BaseModel):
    port: int = 4001
    host: str | None = None


class Example(BaseModel):
    data_dir: Path = Path("/var/lib/x")
    name: str
    bootstrap: tuple[str, ...] = ()
    links: Links = Field(default_factory=Links)


COMPLETE = """
data_dir = "/var/lib/x"
# name = "this-node"
bootstrap = []
[links]
port = 4001
# host = "0.0.0.0"
"""


def test_a_complete_file_passes() -> None:
    assert disagreements(Example, COMPLETE) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("port = 4001", "port = 4002", "links.port: 4002 in the file, the default is 4001"),
        ("bootstrap = []", "", "bootstrap: not documented"),
        ('# host = "0.0.0.0"', "", "links.host: not documented"),
        ("port = 4001", "port = 4001\nprot = 1", "links.prot: Settings has no such key"),
    ],
)
def test_a_wrong_file_is_found(old: str, new: str, complaint: str) -> None:
    assert disagreements(Example, COMPLETE.replace(old, new)) == [complaint]


@pytest.mark.skipif(
    not SETTINGS.exists(), reason="this checkout has no moshpitd/daemon/settings.py"
)
def test_every_key_of_the_documented_config_is_its_default() -> None:
    settings = importlib.import_module("moshpitd.daemon.settings").Settings
    complaints = disagreements(settings, CONFIG.read_text(encoding="utf-8"))
    assert not complaints, "\n" + "\n".join(complaints)
