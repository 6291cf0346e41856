"""How the commands speak: tables for people, JSON for scripts.

One rule: words that peers or trainers chose are printed as text, never as markup and never as
control characters of a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Without a terminal rich assumes 80 columns and folds PeerIDs; who pipes a table greps its lines.
PIPE_WIDTH = 200


def console() -> Console:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, soft_wrap=False, width=PIPE_WIDTH if piped else None)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message as plain values: every field is present, bytes as hex."""
    return {field.name: _plain(field, getattr(message, field.name)) for field in _fields(message)}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Columns whose name ends in a `#` are numbers and stand to the right."""
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn.add_column(
            name.removesuffix("#").strip(),
            justify="right" if name.endswith("#") else "left",
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*(text(value) for value in row))
    return drawn


def text(value: object, style: str = "") -> Text:
    return Text(clean(f"{value:.2f}" if isinstance(value, float) else str(value)), style=style)


def clean(words: str) -> str:
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def size(count: int) -> str:
    """Bytes for people: 1.4 MB (decimal, as networks count)."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Time for people: 12 s, 3 min, 5.2 h, 2.1 d."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def _fields(message: Any) -> Iterable[Any]:
    fields: Iterable[Any] = message.DESCRIPTOR.fields
    return fields


def _plain(field: Any, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_scalar(item, nested=kind is not None) for item in value]
    return _scalar(value, nested=kind is not None)


def _scalar(value: Any, *, nested: bool) -> Any:
    if nested:
        return as_dict(value)
    return value.hex() if isinstance(value, bytes) else value
