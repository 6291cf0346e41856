"""The flight recorder: every note of the core, on disk, for the day on which something went wrong.

    data_dir/flight/flight-000007.msgpack   frames: u32 length, u32 crc32, msgpack

The first frame of a file says whose it is (a life is one process: a restart begins a new one), all
others are notes, each with the monotonic time that orders it and the wall time that a person
knows. `daemon/flight.py` reads and merges them.

One rule: recording never costs the daemon anything but memory that is bounded. A thread of its own
writes; a disk that is full or gone ends the recording with one warning and nothing else; what was
half written when the process died is a torn tail, which reading tolerates and counts.

There is no fsync: what a killed process wrote is safe in the page cache, and a machine that loses
power loses the seconds that the kernel had not written back. One fsync per note would cost a slow
disk more than a round takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from moshpitd.core.effects import Note
from moshpitd.daemon.logs import log_event

log = logging.getLogger(__name__)

FOLDER: Final = "flight"
FORMAT: Final = 1
_FRAME = struct.Struct("!II")  # length of the payload, its crc32
MAX_ENTRY_BYTES: Final = 1 << 18
"""A note names at most the 64 members of a group: 4 KiB. More than this is no note of ours."""
MAX_WORD: Final = 256  # characters; a PeerID has 52
MAX_DETAIL: Final = 4096  # characters; a sentence about a group of 64
MAX_WAITING_BYTES: Final = 4 << 20
"""Notes that wait for a slow disk, about 10,000; more are dropped, and how many is recorded."""
MAX_RUNS: Final = 64  # whose group is remembered; a node has no more
CLOSE_S: Final = 1.0  # how long the last notes may take at a stop; the disk may hang
_NAME = re.compile(r"flight-(\d{6,12})\.msgpack")


@dataclass(frozen=True, slots=True)
class Entry:
    """One note as it was recorded. `at` is the writer's monotonic clock, `wall` its wall clock;
    `group` is the group (hex) that the run was in, empty outside of one."""

    at: float
    wall: float
    run: str
    group: str
    note: Note


@dataclass(slots=True)
class Flight:
    """What one file holds. `torn` bytes at its end could not be read."""

    peer_id: str
    life: str
    software: str
    at: float
    wall: float
    entries: list[Entry] = field(default_factory=list)
    torn: int = 0


class Recorder:
    """Invariant: `record` never blocks, never raises, and holds at most MAX_WAITING_BYTES."""

    def __init__(
        self, folder: Path, *, peer_id: str, software: str, file_bytes: int, files: int
    ) -> None:
        self.stopped = ""
        """Why nothing is recorded any more, as a sentence; empty while all is well."""
        self.dropped = 0
        self._folder = folder
        self._header = {"format": FORMAT, "peer": peer_id, "life": secrets.token_hex(8)}
        self._header["software"] = software
        self._file_bytes, self._files = file_bytes, files
        self._groups: dict[str, str] = {}
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._closed = False
        self._file = -1
        self._written = 0
        self._thread = threading.Thread(target=self._write_on, name="flight", daemon=True)
        self._thread.start()

    def record(self, run: str, note: Note) -> None:
        """Take a note in; it is on its way to the disk when this returns."""
        if self.stopped:
            return
        frame = _frame([time.monotonic(), time.time(), run, self._group(run, note), *_plain(note)])
        with self._changed:
            if self._closed:
                return
            if self._waiting_bytes + len(frame) > MAX_WAITING_BYTES:
                self.dropped += 1
                return
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)
            self._changed.notify()

    def forget(self, run: str) -> None:
        """The run is over, with whatever group it was in."""
        self._groups.pop(run, None)

    def close(self) -> None:
        """Write what waits, within CLOSE_S, and end. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _group(self, run: str, note: Note) -> str:
        """The group that the note belongs to: the one that it names, else the one that runs."""
        named = note.fields.get("group")
        if note.what in ("attempt_started", "round_ended"):
            running = self._groups.pop(run, "")
            return named if isinstance(named, str) and named else running
        room = len(self._groups) < MAX_RUNS or run in self._groups
        if note.what == "group_formed" and isinstance(named, str) and room:
            self._groups[run] = named
        return named if isinstance(named, str) else self._groups.get(run, "")

    # -- the thread -------------------------------------------------------------------------------

    def _write_on(self) -> None:
        told = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    frames, self._waiting, self._waiting_bytes = self._waiting, [], 0
                    dropped, closed = self.dropped, self._closed
                if dropped > told:
                    lost = Note("flight_dropped", fields={"count": dropped - told})
                    frames.append(_frame([time.monotonic(), time.time(), "", "", *_plain(lost)]))
                    told = dropped
                for frame in frames:
                    self._write(frame)
                if closed:
                    return
        except OSError as error:
            self._stop(error)
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, frame: bytes) -> None:
        if self._file < 0 or self._written + len(frame) > self._file_bytes:
            self._rotate()
        left = memoryview(frame)
        while left:
            left = left[os.write(self._file, left) :]
        self._written += len(frame)

    def _rotate(self) -> None:
        """Begin a new file, whose number is above all others, and forget the oldest ones."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = flight_files(self._folder)
        number = 1 + max((_number(path) for path in old), default=0)
        for path in old[: max(0, len(old) + 1 - self._files)]:
            path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / f"flight-{number:06}.msgpack", flags, 0o600)
        self._written = 0
        clocks = {"at": time.monotonic(), "wall": time.time()}
        self._write(_frame(self._header | clocks))

    def _stop(self, error: OSError) -> None:
        why = (error.strerror or str(error)).lower()
        self.stopped = f"the flight recorder has stopped: {self._folder}: {why}"
        with self._changed:
            self._closed, self._waiting = True, []
        log_event(log, logging.WARNING, "flight recorder stopped", path=self._folder, reason=why)


def flight_files(folder: Path) -> list[Path]:
    """The recorder's files in `folder`, oldest first."""
    with contextlib.suppress(OSError):
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_number)
    return []


def read_flight(path: Path) -> Flight | None:
    """One file; None when not even its first frame is whole. Raises OSError."""
    content = path.read_bytes()
    payloads, torn = _payloads(content)
    if not payloads or not isinstance(header := payloads[0], dict):
        return None
    if header.get("format") != FORMAT:
        return None
    flight = Flight(
        peer_id=str(header.get("peer", "")),
        life=str(header.get("life", "")),
        software=str(header.get("software", "")),
        at=_number_of(header.get("at")),
        wall=_number_of(header.get("wall")),
        torn=torn,
    )
    for payload in payloads[1:]:
        entry = _entry(payload)
        if entry is not None:
            flight.entries.append(entry)
    return flight


def _payloads(content: bytes) -> tuple[list[Any], int]:
    """All whole frames, and how many bytes behind them are none."""
    payloads: list[Any] = []
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        # Zero bytes, as a file system leaves them after a power cut, are a frame of length 0.
        if not 0 < length <= MAX_ENTRY_BYTES or len(payload) < length:
            break
        if zlib.crc32(payload) != crc:
            break
        try:
            payloads.append(
                msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogatepass")
            )
        except (ValueError, msgpack.UnpackException):
            break
        at += _FRAME.size + length
    return payloads, len(content) - at


def _entry(payload: Any) -> Entry | None:
    """None for what a newer writer may have put there."""
    if not isinstance(payload, list) or len(payload) < 9 or not isinstance(payload[8], dict):
        return None
    run, group, what, peer, reason, detail = (str(word) for word in payload[2:8])
    fields = {str(key): value for key, value in payload[8].items()}
    note = Note(what, peer, reason, detail, fields)
    return Entry(_number_of(payload[0]), _number_of(payload[1]), run, group, note)


def _frame(payload: object) -> bytes:
    # Names may come from file names and peers: what is no text (a lone surrogate) must not raise.
    packed: bytes = msgpack.packb(payload, unicode_errors="surrogatepass")
    if len(packed) > MAX_ENTRY_BYTES and isinstance(payload, list):
        packed = msgpack.packb([*payload[:7], "too long to be recorded", {}])
    return _FRAME.pack(len(packed), zlib.crc32(packed)) + packed


def _plain(note: Note) -> list[object]:
    words = (note.what, note.peer, str(note.reason))
    return [*(word[:MAX_WORD] for word in words), note.detail[:MAX_DETAIL], _value(note.fields)]


def _value(value: object) -> object:
    """msgpack knows 64-bit integers and no sets; a note has neither, but it must not raise."""
    if isinstance(value, bool | float | bytes) or value is None:
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(inner) for inner in value]
    return str(value)


def _number(path: Path) -> int:
    matched = _NAME.fullmatch(path.name)
    return int(matched[1]) if matched else 0


def _number_of(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
