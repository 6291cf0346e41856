"""Structured logs: one line per event, `word key=value ...` for people or JSON for collectors.

One rule: whatever a peer or a trainer sends, a line stays one line, of bounded length, and a flood
of one event costs a counter and not a disk.

The message of a record is a constant word or sentence and its values are fields:
`log_event(log, logging.WARNING, "link lost", peer=peer, reason=reason)`. Records of other
libraries, which format values into the message, pass through the same formatters.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

from moshpitd.core.effects import Note

MAX_VALUE = 512  # characters of one field: an address list fits, a pasted tensor does not
MAX_MESSAGE = 2048
MAX_TRACE = 8192  # characters of a traceback; its end names the error, so the beginning is cut
MAX_FIELDS = 32
FLOOD_BURST = 50  # lines of one event at once: a group of 64 forms quietly enough
FLOOD_PER_S = 5.0
FLOOD_EVENTS = 512  # events counted separately; more would make the table itself a leak

_FIELDS = "moshpit_fields"

# Notes that are not here are debug: they come with every part or attempt.
NOTE_LEVELS = {
    "group_formed": logging.INFO,
    "member_excluded": logging.WARNING,
    "part_without_result": logging.WARNING,
    "offers_less": logging.INFO,
    "takeover_started": logging.WARNING,
    "part_repaired": logging.ERROR,
    "audit_failed": logging.ERROR,
    "woke": logging.WARNING,
    "round_ended": logging.INFO,
    "parity_differs": logging.ERROR,
    "peer_heard": logging.INFO,
    "peer_lost": logging.INFO,
    "strike": logging.WARNING,
    "refused": logging.WARNING,
    "shape_adopted": logging.INFO,
    "lineage_adopted": logging.WARNING,
    "snapshot_started": logging.INFO,
    "snapshot_loaded": logging.INFO,
    "snapshot_failed": logging.WARNING,
    "snapshot_served": logging.INFO,
    "drained": logging.INFO,
}


def configure(
    *,
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> logging.Handler:
    """Send every log record of this process to `stream` (stderr) in our form, and nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(Flood())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    return handler


def adopt(*names: str, level: int = logging.WARNING) -> None:
    """Take away the handlers that libraries give their loggers at import: their lines are ours."""
    for name in names:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(level)


def log_event(logger: logging.Logger, level: int, event: str, **values: object) -> None:
    """One line. `event` is constant; everything that varies is a value."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={_FIELDS: values}, stacklevel=2)


def log_note(logger: logging.Logger, run: str, note: Note) -> None:
    """One line for a note of the core, at the level that `NOTE_LEVELS` gives it."""
    level = NOTE_LEVELS.get(note.what, logging.DEBUG)
    if not logger.isEnabledFor(level):
        return
    named = {"peer": note.peer, "reason": note.reason, "detail": note.detail}
    values: dict[str, object] = {"run": run, **{k: v for k, v in named.items() if v}}
    values |= {key: _plain(value) for key, value in note.fields.items() if key not in values}
    logger.log(level, "%s", note.what, extra={_FIELDS: values}, stacklevel=2)


_LEVELS = {
    getattr(logging, name): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}


def _level(record: logging.LogRecord) -> str:
    """The standard name: importing hivemind renames WARNING to WARN for the whole process."""
    return _LEVELS.get(record.levelno, record.levelname)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  round_ended run=digits outcome=complete`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        words = [stamp, f"{_level(record):<7}", _one_line(record.getMessage(), MAX_MESSAGE)]
        words += [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        trace = _trace(self, record)
        return " ".join(words) + (f" trace={_quoted(trace, MAX_TRACE)}" if trace else "")


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _level(record).lower(),
            "logger": record.name,
            "event": _cut(record.getMessage(), MAX_MESSAGE),
        }
        for key, value in _fields(record).items():
            line.setdefault(key, _json_value(value))
        if trace := _trace(self, record):
            line["trace"] = trace
        return json.dumps(line, allow_nan=False)


class Flood(logging.Filter):
    """Lets `FLOOD_BURST` lines of one event through, then `FLOOD_PER_S`; the next line that passes
    says how many did not. Errors always pass. Invariant: at most FLOOD_EVENTS buckets are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[tuple[str, str], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        # Ours log "%s" with a constant word; others' templates are as constant.
        event = record.getMessage() if record.msg == "%s" else str(record.msg)
        key = (record.name, event[:MAX_VALUE])
        now = time.monotonic()
        left, then, kept_back = self._buckets.pop(key, (float(FLOOD_BURST), now, 0))
        left = min(float(FLOOD_BURST), left + (now - then) * FLOOD_PER_S)
        passes = left >= 1.0
        while len(self._buckets) >= FLOOD_EVENTS:
            self._buckets.pop(next(iter(self._buckets)))
        self._buckets[key] = (left - 1.0, now, 0) if passes else (left, now, kept_back + 1)
        if passes and kept_back:
            setattr(record, _FIELDS, {**getattr(record, _FIELDS, {}), "not_logged": kept_back})
        return passes


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    values: Mapping[str, object] = getattr(record, _FIELDS, {})
    return values if len(values) <= MAX_FIELDS else dict(list(values.items())[:MAX_FIELDS])


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = formatter.formatException(record.exc_info) if record.exc_info else ""
    return text if len(text) <= MAX_TRACE else f"...{text[3 - MAX_TRACE :]}"


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _json_value(value: object) -> object:
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN and no infinity
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in list(value.items())[:MAX_FIELDS]}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value[:MAX_FIELDS]]
    return _cut(str(_plain(value)), MAX_VALUE)


def _quoted(value: object, limit: int = MAX_VALUE) -> str:
    text = _one_line(f"{value:.6g}" if isinstance(value, float) else str(_plain(value)), limit)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=') else text


def _one_line(text: str, limit: int) -> str:
    """Nothing in it may end the line or move a terminal's cursor: peers are not trusted."""
    text = _cut(text, limit)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
