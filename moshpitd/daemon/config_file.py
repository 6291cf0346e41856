"""The documented configs/moshpitd.toml, made from the settings themselves.

One rule: words, values and ranges come from `Settings` and `core.Params`, so the file cannot drift;
a test compares. Write it anew with `python -m moshpitd.daemon.config_file > configs/moshpitd.toml`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moshpitd.core.params import Params
from moshpitd.daemon.settings import Settings
from moshpitd.daemon.settings_sources import ENV_NESTED, ENV_PREFIX

WIDTH = 96
_HEADER = f"""\
Settings of moshpitd. Every key is here with its default value: a file needs only what differs.

  moshpitd run --config moshpitd.toml

Each key is also an environment variable ({ENV_PREFIX}HTTP{ENV_NESTED}PORT=0) and a flag (--set
http.port=0; the common ones have flags of their own, see `moshpitd run --help`). Flags beat the
environment, the environment beats the file. A key that is not listed here is an error."""
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("multiple_of", "a multiple of"))


def render() -> str:
    """The text of configs/moshpitd.toml."""
    lines = list(_comment(_HEADER))
    words = _core_words()
    for name, field in Settings.model_fields.items():
        section: BaseModel = field.get_default()
        lines += ["", "", *_comment(inspect.getdoc(type(section)) or ""), f"[{name}]"]
        for key, described in type(section).model_fields.items():
            lines += [
                "",
                *_comment(_describe(described, words.get(key, "") if name == "averaging" else "")),
            ]
            lines.append(f"{key} = {_toml(getattr(section, key))}")
    return "\n".join(lines) + "\n"


def _describe(field: FieldInfo, core_words: str) -> str:
    if core_words:
        return core_words  # Params.check has the bounds, and the words the reasons
    bounds = ", ".join(
        f"{word} {value}"
        for attribute, word in _BOUNDS
        for rule in field.metadata
        if (value := getattr(rule, attribute, None)) is not None
    )
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    allowed = ", ".join(_toml(choice) for choice in choices) or bounds
    return f"{field.description}\n({allowed})" if allowed else field.description or ""


def _core_words() -> dict[str, str]:
    """The string below each field of Params: what the field means and why it has that value."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Params))).body[0]
    found: dict[str, str] = {}
    if isinstance(body, ast.ClassDef):
        for node, after in zip(body.body, body.body[1:], strict=False):
            match node, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as words)),
                ):
                    found[name] = words
    return found


def _comment(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n"):
        for line in textwrap.wrap(paragraph, WIDTH, break_long_words=False) or [""]:
            yield f"# {line}".rstrip()


def _toml(value: Any) -> str:
    """TOML's spelling of a default, which JSON shares for strings, booleans, numbers and lists."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1_000_000:
        return f"{value:_}"
    return json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(render())
