"""Several flight recorders put together: one clock, one timeline, and why somebody was left out.

Every daemon orders its own notes by its own monotonic clock, and no two machines share one. What
two of them do share are moments: a group forms, and ends, at all its members within a message's
way. The median over such moments is the offset between two clocks; the spread around it says how
much the order of notes of different peers is worth.

One rule: nothing is guessed silently. A clock that could only be taken from the wall says so, and
so does a story that a log does not tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moshpitd.core.effects import Note
from moshpitd.daemon.recorder import Entry, flight_files, read_flight

SHARED: Final = ("group_formed", "round_ended")
"""Notes that all members of a group write at nearly one moment."""
SAME_BOOT_S: Final = 1.0
"""Two lives of one peer whose wall and monotonic clocks differ by the same amount, give or take so
much, ran since the same boot and share the monotonic clock."""
QUIET_S: Final = 1.0
"""A log that says nothing for so long while the others went on is worth a word."""
STOPPED: Final = "daemon_stopped"
LEAVING: Final = ("daemon_draining", "drained")


@dataclass(frozen=True, slots=True)
class Clock:
    """What turns a life's monotonic time into the common one: common = at + shift.

    `offset_s` is how far that machine's wall clock is ahead of the reference's; half of all
    `moments` that were shared lie within `spread_s` of it.
    """

    shift: float
    offset_s: float
    spread_s: float
    moments: int
    how: str  # "reference", "shared rounds", "another life of this peer" or "wall clock"


@dataclass(slots=True)
class Life:
    """One process of one peer. Invariant: `entries` are in the order of `at`."""

    peer_id: str
    name: str
    software: str
    skew: float  # wall minus monotonic when it began
    entries: list[Entry] = field(default_factory=list)
    torn: int = 0

    def moments(self) -> dict[tuple[str, str], float]:
        """(what, group) -> when, of the notes that others wrote at the same moment."""
        found: dict[tuple[str, str], float] = {}
        for entry in self.entries:
            if entry.note.what in SHARED and entry.group:
                found.setdefault((entry.note.what, entry.group), entry.at)
        return found

    @property
    def stopped(self) -> bool:
        return bool(self.entries) and self.entries[-1].note.what == STOPPED


@dataclass(frozen=True, slots=True)
class Line:
    """A note in common time (seconds of the reference's wall clock)."""

    at: float
    life: Life
    entry: Entry

    @property
    def peer_id(self) -> str:
        return self.life.peer_id

    @property
    def note(self) -> Note:
        return self.entry.note


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`peer_id` fell out of a round, as `by` saw it; `story` is what its own log says."""

    at: float
    peer_id: str
    by: str
    reason: str
    detail: str
    story: str


@dataclass(frozen=True, slots=True)
class RoundLog:
    """Everything that the logs say about one group. `ended` holds (outcome, reason) per peer."""

    group: str
    run: str
    leader: str
    members: tuple[str, ...]
    began: float
    over: float
    ended: Mapping[str, tuple[str, str]]
    excluded: tuple[Exclusion, ...]
    lines: tuple[Line, ...]


class Logs:
    """The recordings of all lives that were found, on one clock."""

    def __init__(self, lives: Iterable[Life]) -> None:
        self.lives = list(lives)
        self.clocks: dict[str, Clock] = _aligned(self.lives)
        self._lines = sorted(
            (
                Line(entry.at + self.clocks[life.name].shift, life, entry)
                for life in self.lives
                for entry in life.entries
            ),
            key=lambda line: line.at,
        )

    @classmethod
    def read(cls, places: Iterable[Path]) -> Logs:
        """From data directories, flight directories, or folders that hold several of them."""
        lives: dict[str, Life] = {}
        for path in _files(places):
            flight = read_flight(path)
            if flight is None:
                name = f"{path.parent}"
                lives.setdefault(name, Life("", name, "", 0.0)).torn += path.stat().st_size
                continue
            skew = flight.wall - flight.at
            life = lives.setdefault(
                flight.life, Life(flight.peer_id, flight.life, flight.software, skew)
            )
            life.entries += flight.entries
            life.torn += flight.torn
        for life in lives.values():
            life.entries.sort(key=lambda entry: entry.at)
        return cls(lives.values())

    @property
    def torn(self) -> int:
        """Bytes that could not be read; a few hundred are a process that was killed."""
        return sum(life.torn for life in self.lives)

    @property
    def dropped(self) -> int:
        """Notes that a slow disk cost."""
        notes = (line.note for line in self._lines)
        counts = (note.fields.get("count") for note in notes if note.what == "flight_dropped")
        return sum(count for count in counts if isinstance(count, int))

    def groups(self, run: str = "") -> list[str]:
        """Every group that anybody recorded, in the order in which they formed."""
        found: dict[str, None] = {}
        for line in self._lines:
            if line.note.what == "group_formed" and run in ("", line.entry.run):
                found.setdefault(line.entry.group)
        return list(found)

    def round(self, group: str) -> RoundLog:
        """All that is known of a group that `groups` names."""
        own = [line for line in self._lines if line.entry.group == group]
        formed = [line for line in own if line.note.what == "group_formed"]
        fields = formed[0].note.fields
        members = tuple(dict.fromkeys(_texts(fields.get("members")))) or tuple(
            dict.fromkeys(line.peer_id for line in formed)
        )
        run = formed[0].entry.run
        began = min(self._attempted(line) for line in formed)
        over = max(line.at for line in own)
        lines = tuple(
            line for line in self._lines if began <= line.at <= over and _belongs(line, run, group)
        )
        ended = {
            line.peer_id: (str(line.note.fields.get("outcome", "")), line.note.reason)
            for line in own
            if line.note.what == "round_ended"
        }
        out = tuple(
            Exclusion(
                line.at,
                line.note.peer,
                line.peer_id,
                line.note.reason,
                line.note.detail,
                self.story(line.note.peer, group, line.at),
            )
            for line in own
            if line.note.what == "member_excluded"
        )
        leader = str(fields.get("leader", ""))
        return RoundLog(group, run, leader, members, began, over, ended, out, lines)

    def story(self, peer_id: str, group: str, at: float) -> str:
        """What the log of an excluded peer says about itself around `at`, in one sentence."""
        own = list(self._of(peer_id))
        if not own:
            return "no log of it was given"
        before = [line for line in own if line.at <= at]
        after = [line for line in own if line.at > at]
        leaving = [line for line in before if line.note.what in LEAVING]
        if leaving:
            why = leaving[-1].note.reason
            return f"it was leaving since {at - leaving[-1].at:.2f} s{f' ({why})' if why else ''}"
        if not before:
            return "its log begins later"
        last = before[-1]
        if last.life.entries[-1] is last.entry:
            how = "it stopped" if last.life.stopped else "killed, or still running"
            return f"its log ends {at - last.at:.2f} s before, with {last.note.what} ({how})"
        ended = [e for e in before if e.entry.group == group and e.note.what == "round_ended"]
        if ended:
            outcome, reason = ended[-1].note.fields.get("outcome", ""), ended[-1].note.reason
            return f"it had ended the round itself: {outcome}{f' ({reason})' if reason else ''}"
        if not any(line.entry.group == group for line in before):
            return "it never had this group"
        silent_s = after[0].at - last.at
        if silent_s >= QUIET_S:
            return (
                f"it was silent for {silent_s:.2f} s (frozen, overloaded or cut off), "
                f"then went on with {after[0].note.what}"
            )
        return f"it was at work: {last.note.what} {at - last.at:.2f} s before"

    def _of(self, peer_id: str) -> Iterator[Line]:
        return (line for line in self._lines if line.peer_id == peer_id)

    def _attempted(self, formed: Line) -> float:
        """When the matchmaking began that led to this group at this peer."""
        before = [
            line
            for line in self._of(formed.peer_id)
            if line.note.what in ("attempt_started", "group_formed")
            and line.entry.run == formed.entry.run
            and line.at < formed.at
        ]
        begun = before and before[-1].note.what == "attempt_started"
        return before[-1].at if begun else formed.at


def _belongs(line: Line, run: str, group: str) -> bool:
    """A round is its own notes, what happened in the run besides, and what befell the daemons."""
    return line.entry.group == group or (line.entry.group == "" and line.entry.run in ("", run))


def _files(places: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for place in places:
        folders = [place, *sorted(path for path in place.rglob("*") if path.is_dir())]
        for path in (path for folder in folders for path in flight_files(folder)):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _aligned(lives: list[Life]) -> dict[str, Clock]:
    """A clock for every life, starting from the one that shares the most moments with others."""
    moments = {life.name: life.moments() for life in lives}
    clocks: dict[str, Clock] = {}

    def shared(life: Life, others: Iterable[Life]) -> list[float]:
        """For each moment that an aligned life saw too: its common time minus our time."""
        mine = moments[life.name]
        return [
            at + clocks[other.name].shift - mine[moment]
            for other in others
            if other.name in clocks
            for moment, at in moments[other.name].items()
            if moment in mine
        ]

    def sharing(life: Life) -> int:
        others = (moments[other.name].keys() for other in lives if other is not life)
        return sum(len(moments[life.name].keys() & keys) for keys in others)

    waiting = list(lives)
    while waiting:
        if not clocks:
            life = max(waiting, key=lambda life: (sharing(life), len(life.entries)))
            clocks[life.name] = Clock(life.skew, 0.0, 0.0, 0, "reference")
        else:
            life = max(waiting, key=lambda life: len(shared(life, lives)))
            clocks[life.name] = _clock(life, shared(life, lives), lives, clocks)
        waiting.remove(life)
    return clocks


def _clock(life: Life, shifts: list[float], lives: list[Life], clocks: dict[str, Clock]) -> Clock:
    if shifts:
        shift = statistics.median(shifts)
        # The median: a member that froze ends its round seconds after the others.
        spread_s = statistics.median(abs(one - shift) for one in shifts)
        return Clock(shift, life.skew - shift, spread_s, len(shifts), "shared rounds")
    for other in lives:
        known = clocks.get(other.name)
        same_boot = other.peer_id == life.peer_id and abs(other.skew - life.skew) < SAME_BOOT_S
        if known is not None and same_boot and life.peer_id:
            how = "another life of this peer"
            return Clock(known.shift, life.skew - known.shift, known.spread_s, 0, how)
    return Clock(life.skew, 0.0, 0.0, 0, "wall clock")


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []
