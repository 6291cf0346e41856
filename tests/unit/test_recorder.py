"""The flight recorder: what was noted comes back, whatever happened to the process or the disk."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moshpitd.core.effects import NOTES, Note
from moshpitd.daemon import recorder as module
from moshpitd.daemon.recorder import Entry, Recorder, flight_files, read_flight

GROUP = "ab" * 16
ROUND = (
    Note("attempt_started", fields={"key": "peers", "round": 3}),
    Note("group_formed", fields={"group": GROUP, "size": 2, "members": ["Qa", "Qb"]}),
    Note("member_excluded", "Qb", "silent"),
    Note(
        "round_ended", fields={"group": GROUP, "outcome": "partial", "seconds": {"exchange": 0.5}}
    ),
    Note("peer_lost", "Qb", "no_answer"),
)


def recorder(folder: Path, **options: int) -> Recorder:
    return Recorder(
        folder,
        peer_id="Qa",
        software="0.1",
        **({"file_bytes": 1 << 20, "files": 8} | options),
    )


def recorded(folder: Path) -> list[Entry]:
    flights = [read_flight(path) for path in flight_files(folder)]
    return [entry for flight in flights if flight is not None for entry in flight.entries]


def write_round(folder: Path) -> Path:
    """One file with the five notes of ROUND."""
    own = recorder(folder)
    for note in ROUND:
        own.record("digits", note)
    own.close()
    return flight_files(folder)[-1]


def test_every_note_comes_back_as_it_was(tmp_path: Path) -> None:
    own = recorder(tmp_path)
    notes = [
        Note(what, "Qm", "silent", "words", {"i": 1, "f": 0.5, "l": [1, "two"], "m": {"a": 1.0}})
        for what in NOTES
    ]
    before = time.monotonic(), time.time()
    for note in notes:
        own.record("digits", note)
    own.close()
    entries = recorded(tmp_path)
    assert [entry.note for entry in entries] == notes
    assert {entry.run for entry in entries} == {"digits"}
    assert all(before[0] <= entry.at <= time.monotonic() for entry in entries)
    assert all(before[1] - 1 <= entry.wall <= time.time() + 1 for entry in entries)
    (path,) = flight_files(tmp_path)
    flight = read_flight(path)
    assert flight is not None
    assert (flight.peer_id, flight.software, flight.torn) == ("Qa", "0.1", 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_note_carries_the_group_that_its_run_was_in(tmp_path: Path) -> None:
    own = recorder(tmp_path)
    for note in ROUND:
        own.record("digits", note)
        own.record("other", Note("peer_heard", "Qc"))
    own.record("digits", Note("takeover_started", fields={"group": "cd"}))
    own.close()
    groups = [entry.group for entry in recorded(tmp_path) if entry.run == "digits"]
    assert groups == ["", GROUP, GROUP, GROUP, "", "cd"]
    assert {entry.group for entry in recorded(tmp_path) if entry.run == "other"} == {""}


@pytest.mark.parametrize(
    "value", [1 << 70, {1, 2}, object(), "\ud800", float("nan"), b"\xff", None, Path("/x")]
)
def test_whatever_a_newer_core_notes_is_recorded_somehow(tmp_path: Path, value: object) -> None:
    own = recorder(tmp_path)
    own.record("digits", Note("newer", "p" * 10_000, "", "d" * 100_000, {"x": value}))
    own.record("digits", Note("vast", fields={"list": ["x" * 1000] * 1000}))
    own.close()
    newer, vast = recorded(tmp_path)
    assert (newer.note.what, vast.note.what) == ("newer", "vast")
    assert "x" in newer.note.fields
    assert vast.note.detail == "too long to be recorded"


def test_a_torn_tail_is_tolerated_and_counted_wherever_it_is_torn(tmp_path: Path) -> None:
    whole = write_round(tmp_path / "whole").read_bytes()
    torn = tmp_path / "torn" / "flight-000001.msgpack"
    torn.parent.mkdir()
    counts = []
    for size in range(len(whole)):
        torn.write_bytes(whole[:size])
        flight = read_flight(torn)
        counts.append(len(flight.entries) if flight is not None else -1)
        if flight is not None:
            ours = [entry.note for entry in flight.entries]
            assert ours == list(ROUND[: len(ours)])
    assert counts == sorted(counts)
    assert counts[-1] == len(ROUND) - 1
    assert counts[0] == -1
    torn.write_bytes(whole[:-1])
    flight = read_flight(torn)
    assert flight is not None
    assert flight.torn > 0


@pytest.mark.parametrize("tail", [bytes(4096), b"\xff" * 64, b"\0\0\0\x01\0\0\0\0\xc1"])
def test_rubbish_behind_the_last_note_is_no_note(tmp_path: Path, tail: bytes) -> None:
    path = write_round(tmp_path)
    path.write_bytes(path.read_bytes() + tail)
    flight = read_flight(path)
    assert flight is not None
    assert (len(flight.entries), flight.torn) == (len(ROUND), len(tail))


def test_a_flipped_bit_ends_the_reading_there(tmp_path: Path) -> None:
    path = write_round(tmp_path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    flight = read_flight(path)
    assert flight is not None
    assert len(flight.entries) == len(ROUND) - 1
    assert flight.torn > 0


def test_a_restart_continues_in_a_new_file(tmp_path: Path) -> None:
    first = write_round(tmp_path)
    first.write_bytes(first.read_bytes()[:-3])
    second = write_round(tmp_path)
    assert [path.name for path in flight_files(tmp_path)] == [first.name, second.name]
    lives = [flight.life for path in (first, second) if (flight := read_flight(path))]
    assert len(set(lives)) == 2
    assert len(recorded(tmp_path)) == 2 * len(ROUND) - 1


def test_files_are_rotated_by_size_and_count(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not ours")
    own = recorder(tmp_path, file_bytes=2000, files=3)
    for number in range(200):
        own.record("digits", Note("peer_heard", f"Q{number}"))
    own.close()
    files = flight_files(tmp_path)
    assert len(files) == 3
    assert all(path.stat().st_size <= 2000 for path in files)
    kept = [entry.note.peer for entry in recorded(tmp_path)]
    assert kept == [f"Q{number}" for number in range(200 - len(kept), 200)]
    assert len(kept) > 30
    assert other.read_text() == "not ours"


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flight").write_text("")
    own = recorder(tmp_path / "flight")
    for note in ROUND * 10:
        own.record("digits", note)
    own.close()
    for note in ROUND:
        own.record("digits", note)
    assert [record.getMessage() for record in caplog.records] == ["flight recorder stopped"]
    assert str(tmp_path / "flight") in own.stopped
    assert not own._thread.is_alive()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a tmpfs, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_recording_with_one_warning(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = recorder(small_disk)
    for number in range(5000):
        own.record("digits", Note("peer_heard", f"Q{number}"))
    own.close()
    assert [record.getMessage() for record in caplog.records] == ["flight recorder stopped"]
    assert os.strerror(errno.ENOSPC).lower() in own.stopped
    kept = [entry.note.peer for entry in recorded(small_disk)]
    assert kept == [f"Q{number}" for number in range(len(kept))]
    assert len(kept) > 100


def test_a_disk_that_stands_still_costs_bounded_memory_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, moves, write = threading.Event(), threading.Event(), os.write

    def slow(file: int, content: bytes) -> int:
        stuck.set()
        moves.wait(30)
        return write(file, content)

    monkeypatch.setattr(module.os, "write", slow)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 10_000)
    own = recorder(tmp_path)
    own.record("digits", Note("peer_heard", "Q0"))
    assert stuck.wait(30)  # from here on the thread takes nothing in
    for number in range(1, 1000):
        own.record("digits", Note("peer_heard", f"Q{number}"))
    held = len(own._waiting)
    assert 10_000 - 200 < own._waiting_bytes <= 10_000
    assert own.dropped == 999 - held > 0
    moves.set()
    own.close()
    entries = recorded(tmp_path)
    assert entries[-1].note == Note("flight_dropped", fields={"count": own.dropped})
    assert len(entries) - 1 == 1 + held


KILLED = """
import sys, itertools
from pathlib import Path
from moshpitd.core.effects import Note
from moshpitd.daemon.recorder import Recorder
own = Recorder(Path(sys.argv[1]), peer_id="Qa", software="0.1", file_bytes=1 << 16, files=100)
for number in itertools.count():
    own.record("digits", Note("peer_heard", f"Q{number}"))
"""


def test_kill_9_while_writing_loses_nothing_but_the_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(argv) as writer:
        try:
            ends = time.monotonic() + 60
            while sum(path.stat().st_size for path in flight_files(tmp_path)) < 20_000:
                assert time.monotonic() < ends, "nothing reached the disk"
                time.sleep(0.001)
        finally:
            writer.send_signal(signal.SIGKILL)
    kept = [entry.note.peer for entry in recorded(tmp_path) if entry.note.what == "peer_heard"]
    assert len(kept) > 100
    assert kept[:100] == [f"Q{number}" for number in range(100)]
    before = len(kept)
    write_round(tmp_path)
    assert len(recorded(tmp_path)) >= before + len(ROUND)
