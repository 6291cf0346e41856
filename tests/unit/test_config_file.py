"""configs/moshpitd.toml documents every key and holds its default."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

from moshpitd.daemon.config_file import render
from moshpitd.daemon.settings import Settings

FILE = Path(__file__).parents[2] / "configs" / "moshpitd.toml"


def test_loading_it_equals_the_defaults() -> None:
    assert Settings.load(FILE, environ={}) == Settings()


def test_no_key_is_missing() -> None:
    written = tomllib.loads(FILE.read_text(encoding="utf-8"))
    assert written == Settings().model_dump()


def test_every_key_has_a_comment_above_it() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    for above, line in pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("#"), line


def test_it_is_what_the_settings_generate() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), (
        "run: python -m moshpitd.daemon.config_file > configs/moshpitd.toml"
    )
