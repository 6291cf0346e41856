"""Logs: one bounded line per event, whatever is in it; a flood is counted and not written."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from moshpitd.core.effects import NOTES, Note
from moshpitd.daemon import logs
from moshpitd.daemon.logs import FLOOD_BURST, MAX_FIELDS, MAX_TRACE, MAX_VALUE, log_event, log_note

LOG = logging.getLogger("moshpitd.test")


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    LOG.handlers.clear()


def written(form: str = "text", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level=level, form=form, stream=stream)  # type: ignore[arg-type]
    return stream


def test_text_is_one_line_with_the_values_behind_the_event() -> None:
    stream = written()
    log_event(LOG, logging.WARNING, "link lost", peer="Qm1", seconds=0.123456789, empty="", n=3)
    [line] = stream.getvalue().splitlines()
    assert line.endswith('WARNING link lost peer=Qm1 seconds=0.123457 empty="" n=3')


def test_json_is_one_object_per_line() -> None:
    stream = written("json")
    log_event(LOG, logging.INFO, "ev", a=1, b=2.5, c="x y", d=b"\x01", e=[1, "z"], f=None, g=True)
    line = json.loads(stream.getvalue())
    assert line["event"] == "ev"
    assert line["level"] == "info"
    assert line["logger"] == "moshpitd.test"
    assert [line[k] for k in "abcdefg"] == [1, 2.5, "x y", "01", [1, "z"], None, True]
    assert line["time"].endswith("+00:00")


def test_json_stays_json_for_nan_and_for_a_field_called_like_ours() -> None:
    stream = written("json")
    log_event(LOG, logging.INFO, "loss", value=float("nan"), far=float("inf"), time="mine")
    line = json.loads(stream.getvalue())
    assert (line["value"], line["far"]) == ("nan", "inf")
    assert line["time"] != "mine"


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_peer_sends_cannot_make_a_second_line_or_move_a_cursor(form: str) -> None:
    stream = written(form)
    evil = "a\nERROR forged\r\x1b[2J\u2028\x00\ud800"
    log_event(LOG, logging.INFO, "said", text=evil)
    LOG.info("plain %s", evil)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert not any(c in line for line in lines for c in "\r\x1b\x00\u2028")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_is_bounded(form: str) -> None:
    stream = written(form)
    many = {f"k{i}": "x" * 10_000 for i in range(1000)}
    log_event(LOG, logging.INFO, "e" * 10_000, **many)
    assert len(stream.getvalue()) < (MAX_FIELDS + 8) * (MAX_VALUE + 16)
    log_event(LOG, logging.INFO, "list", values=list(range(100_000)), table={"a": many})
    assert len(stream.getvalue()) < 4 * (MAX_FIELDS + 8) * (MAX_VALUE + 16)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_is_part_of_the_line_and_its_end_is_kept(form: str) -> None:
    stream = written(form)
    try:
        raise ValueError("x" * 3 * MAX_TRACE + " the end")
    except ValueError:
        LOG.exception("broke")
    [line] = stream.getvalue().splitlines()
    assert "the end" in line
    assert len(line) < 2 * MAX_TRACE


def test_records_of_other_libraries_pass_through_the_same_formatters() -> None:
    stream = written("json")
    other = logging.getLogger("someone.else")
    handler = logging.StreamHandler(io.StringIO())
    other.addHandler(handler)
    other.propagate = False
    logs.adopt("someone.else")
    other.warning("%d things in %s", 3, "there")
    other.info("not at this level")
    assert json.loads(stream.getvalue())["event"] == "3 things in there"
    assert other.handlers == []


def test_a_flood_is_counted_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("moshpitd.daemon.logs.time.monotonic", lambda: now[0])
    stream = written()
    for i in range(1000):
        log_event(LOG, logging.WARNING, "strike", peer=i)
    log_event(LOG, logging.WARNING, "another")
    LOG.error("errors %s", "always")
    assert len(stream.getvalue().splitlines()) == FLOOD_BURST + 2
    now[0] += 1.0
    log_event(LOG, logging.WARNING, "strike", peer="last")
    assert stream.getvalue().splitlines()[-1].endswith(f"peer=last not_logged={1000 - FLOOD_BURST}")


def test_the_flood_table_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moshpitd.daemon.logs.FLOOD_EVENTS", 8)
    flood = logs.Flood()
    for i in range(100):
        record = logging.LogRecord("x", logging.INFO, "", 0, f"event {i}", (), None)
        assert flood.filter(record)
    assert len(flood._buckets) == 8


def test_levels() -> None:
    stream = written(level="warning")
    log_event(LOG, logging.INFO, "quiet")
    log_event(LOG, logging.WARNING, "loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_notes_are_events_with_their_fields() -> None:
    stream = written()
    note = Note("round_ended", fields={"outcome": "complete", "group": b"\x0a", "run": "forged"})
    log_note(LOG, "digits", note)
    log_note(LOG, "digits", Note("peer_lost", peer="Qm1", reason="silent"))
    log_note(LOG, "digits", Note("attempt_started"))  # debug: it comes with every attempt
    first, second = stream.getvalue().splitlines()
    assert first.endswith("round_ended run=digits outcome=complete group=0a")
    assert second.endswith("peer_lost run=digits peer=Qm1 reason=silent")


def test_every_level_is_of_a_note_that_exists() -> None:
    assert logs.NOTE_LEVELS.keys() <= NOTES.keys()


def test_a_library_that_renames_a_level_does_not_rename_ours() -> None:
    logging.addLevelName(logging.WARNING, "WARN")  # what importing hivemind does
    try:
        record = logging.LogRecord("a", logging.WARNING, __file__, 1, "late", None, None)
        assert " WARNING late" in logs.TextLines().format(record)
        assert json.loads(logs.JsonLines().format(record))["level"] == "warning"
    finally:
        logging.addLevelName(logging.WARNING, "WARNING")
