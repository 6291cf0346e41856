"""Recordings of several peers on one clock: order, offsets, and why somebody was left out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moshpitd.cli.main import app
from moshpitd.cli.replay import say
from moshpitd.core.effects import NOTES, Note
from moshpitd.daemon.flight import Life, Line, Logs
from moshpitd.daemon.recorder import Entry, Recorder

MEMBERS = ["12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb", "12D3KooWcccccccc"]
A, B, C = MEMBERS
WALL = 1_700_000_000.0  # the true time at which every story begins


class Machine:
    """A peer's machine: a monotonic clock that began at boot, and a wall clock that is off."""

    def __init__(self, peer_id: str, *, booted: float, ahead_s: float) -> None:
        self.life = Life(peer_id, f"life of {peer_id}", "0.1", WALL - booted + ahead_s)
        self._booted, self._ahead_s = booted, ahead_s

    def notes(self, at: float, what: str, peer: str = "", reason: str = "", **fields: Any) -> None:
        """`at` is the true time, in seconds after WALL."""
        group = fields.pop("of", "")
        entry = Entry(
            self._booted + at, WALL + self._ahead_s + at, "digits", group,
            Note(what, peer, reason, "", fields),
        )  # fmt: skip
        self.life.entries.append(entry)


def three() -> list[Machine]:
    """Machines that agree on nothing."""
    return [
        Machine(A, booted=5_000.0, ahead_s=0.0),
        Machine(B, booted=90.0, ahead_s=90.0),
        Machine(C, booted=1e6, ahead_s=-90.0),
    ]


def play(machines: list[Machine], group: str, at: float, *, jitter: random.Random) -> None:
    """A healthy round: formed and ended at all within a few milliseconds."""
    for machine in machines:
        late = jitter.uniform(0, 0.01)
        machine.notes(at - 0.2 + late, "attempt_started", round=1)
        members = {"members": MEMBERS, "leader": A, "group": group, "size": 3}
        machine.notes(at + late, "group_formed", of=group, **members)
        end = {"group": group, "outcome": "complete"}
        machine.notes(at + 1 + late, "round_ended", of=group, **end)


def lives(machines: list[Machine]) -> list[Life]:
    return [machine.life for machine in machines]


def test_clocks_are_aligned_by_what_both_saw() -> None:
    machines = three()
    for turn in range(5):
        play(machines, f"{turn:02x}", 10.0 * turn, jitter=random.Random(turn))
    logs = Logs(lives(machines))
    clocks = {life.peer_id: logs.clocks[life.name] for life in logs.lives}
    reference = next(peer for peer, clock in clocks.items() if clock.how == "reference")
    for peer, ahead_s in ((A, 0.0), (B, 90.0), (C, -90.0)):
        true = ahead_s - {A: 0.0, B: 90.0, C: -90.0}[reference]
        assert clocks[peer].offset_s == pytest.approx(true, abs=0.01)
        assert clocks[peer].spread_s < 0.02
        assert clocks[peer].moments >= (0 if peer == reference else 10)
    assert logs.groups() == ["00", "01", "02", "03", "04"]


def test_notes_of_all_stand_in_the_order_in_which_they_happened() -> None:
    machines = three()
    a, b, c = machines
    play(machines, "00", 0.0, jitter=random.Random(0))
    for turn in range(20):
        at = 2.0 + 0.1 * turn
        machines[turn % 3].notes(at, "peer_heard", f"Q{turn}", of="01")
    a.notes(1.9, "group_formed", of="01", members=MEMBERS, leader=B)
    told = Logs([c.life, b.life, a.life]).round("01")
    heard = [line.note.peer for line in told.lines if line.note.what == "peer_heard"]
    assert heard == [f"Q{turn}" for turn in range(20)]
    assert (told.run, told.leader, told.members) == ("digits", B, tuple(MEMBERS))


def test_a_clock_that_no_event_ties_says_so() -> None:
    machines = three()
    play(machines[:2], "00", 0.0, jitter=random.Random(0))
    machines[2].notes(3.0, "peer_heard", A)
    logs = Logs(lives(machines))
    assert logs.clocks[machines[2].life.name].how == "wall clock"


def test_two_lives_since_one_boot_share_a_clock() -> None:
    machines = three()
    play(machines, "00", 0.0, jitter=random.Random(0))
    second = Machine(B, booted=90.0, ahead_s=90.3)  # its wall clock was set meanwhile
    second.life.name = "second life"
    second.notes(5.0, "peer_heard", A)
    logs = Logs([*lives(machines), second.life])
    assert logs.clocks["second life"].how == "another life of this peer"
    assert logs.clocks["second life"].shift == logs.clocks[machines[1].life.name].shift


def excluded(machines: list[Machine], given: list[Life]) -> tuple[str, str]:
    """A and B leave C out of group 01 at second 12; (reason, story) as A saw it."""
    for machine in machines[:2]:
        fields = {"members": MEMBERS, "leader": A, "group": "01"}
        machine.notes(10.0, "group_formed", of="01", **fields)
        machine.notes(12.0, "member_excluded", C, "silent", of="01")
        machine.notes(13.0, "round_ended", of="01", outcome="partial", group="01")
    told = Logs(given).round("01")
    by_a = next(one for one in told.excluded if one.by == A)
    assert len(told.excluded) == 2
    assert by_a.at - told.began == pytest.approx(2.0, abs=0.02)
    assert told.ended[A] == ("partial", "")
    return by_a.reason, by_a.story


def begun() -> list[Machine]:
    machines = three()
    for turn in range(3):
        play(machines, f"a{turn}", 2.0 * turn, jitter=random.Random(turn))
    return machines


def test_the_story_of_a_killed_member() -> None:
    machines = begun()
    machines[2].notes(10.0, "group_formed", of="01", members=MEMBERS, leader=A, group="01")
    reason, story = excluded(machines, lives(machines))
    assert reason == "silent"
    assert story.startswith("its log ends 2.0")
    assert "with group_formed (killed, or still running)" in story


def test_the_story_of_a_frozen_member() -> None:
    machines = begun()
    machines[2].notes(10.0, "group_formed", of="01", members=MEMBERS, leader=A, group="01")
    machines[2].notes(70.0, "peer_heard", A)
    _, story = excluded(machines, lives(machines))
    assert "silent for 60.0" in story
    assert "went on with peer_heard" in story


def test_the_story_of_a_member_that_left() -> None:
    machines = begun()
    machines[2].notes(9.0, "daemon_draining", reason="aws: spot terminate")
    machines[2].notes(10.0, "group_formed", of="01", members=MEMBERS, leader=A, group="01")
    machines[2].notes(13.0, "daemon_stopped")
    _, story = excluded(machines, lives(machines))
    assert story.startswith("it was leaving since 3.0")
    assert "(aws: spot terminate)" in story


def test_the_story_of_a_member_that_ended_the_round_itself() -> None:
    machines = begun()
    machines[2].notes(10.0, "group_formed", of="01", members=MEMBERS, leader=A, group="01")
    machines[2].notes(11.0, "round_ended", reason="timeout", of="01", outcome="failed", group="01")
    machines[2].notes(14.0, "attempt_started", round=7)
    _, story = excluded(machines, lives(machines))
    assert story == "it had ended the round itself: failed (timeout)"


def test_the_story_of_a_member_that_never_had_the_group() -> None:
    machines = begun()
    machines[2].notes(10.0, "attempt_started", round=4)
    machines[2].notes(14.0, "attempt_ended", reason="no_answer")
    assert excluded(machines, lives(machines))[1] == "it never had this group"


def test_the_story_without_a_log() -> None:
    machines = begun()
    assert excluded(machines, lives(machines[:2]))[1] == "no log of it was given"


def test_a_round_has_what_befell_its_run_meanwhile_and_nothing_of_other_rounds() -> None:
    machines = begun()
    machines[0].notes(2.5, "peer_lost", "Qz", "no_answer")
    machines[1].life.entries.append(
        Entry(92.6, 0.0, "other", "", Note("peer_lost", "Qother"))  # in another run
    )
    machines[1].life.entries.sort(key=lambda entry: entry.at)
    told = Logs(lives(machines)).round("a1")
    assert {line.entry.group for line in told.lines} == {"", "a1"}
    assert [line.note.peer for line in told.lines if line.note.what == "peer_lost"] == ["Qz"]
    assert sum(line.note.what == "attempt_started" for line in told.lines) == 3


def record(place: Path) -> None:
    """Two peers on this machine: a round in which B leaves C out."""
    for peer in (A, B):
        own = Recorder(
            place / peer[-1] / "flight", peer_id=peer, software="0.1", file_bytes=1 << 20, files=2
        )
        formed = {"group": "c0ffee", "members": MEMBERS, "leader": A, "size": 3}
        own.record("digits", Note("attempt_started", fields={"round": 1}))
        own.record("digits", Note("group_formed", fields=formed))
        own.record("digits", Note("member_excluded", C, "link_lost"))
        own.record("digits", Note("takeover_started", C, fields={"part": 3, "epoch": 1}))
        own.record("digits", Note("round_ended", fields={"group": "c0ffee", "outcome": "partial"}))
        own.close()


def replayed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_replay_tells_a_round_as_json(tmp_path: Path) -> None:
    record(tmp_path)
    result = replayed(str(tmp_path / "a"), str(tmp_path / "b"), "--round", "last", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["round"]["group"] == "c0ffee"
    assert told["round"]["members"] == MEMBERS
    assert told["round"]["ended"][A] == {"outcome": "partial", "reason": ""}
    (first, _) = told["round"]["excluded"]
    assert (first["peer_id"], first["reason"]) == (C, "link_lost")
    assert first["story"] == "no log of it was given"
    whats = [line["what"] for line in told["round"]["timeline"]]
    assert whats.count("takeover_started") == 2
    assert [clock["aligned_by"] for clock in told["clocks"]] == ["reference", "shared rounds"]
    assert told["torn_bytes"] == told["dropped"] == 0


def test_replay_draws_a_round_and_names_who_was_left_out(tmp_path: Path) -> None:
    record(tmp_path)
    result = replayed(str(tmp_path), "--round", "c0f")
    assert result.exit_code == 0, result.output
    assert "left out" in result.stdout
    assert "link_lost" in result.stdout
    assert "takeover started cccccccc  part=3 epoch=1" in result.stdout
    assert "clock ahead s" in result.stdout


def test_replay_without_a_round_lists_all(tmp_path: Path) -> None:
    record(tmp_path)
    result = replayed(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "c0ffee" in result.stdout
    assert json.loads(replayed(str(tmp_path), "--json").stdout)["rounds"][0]["run"] == "digits"
    assert json.loads(replayed(str(tmp_path), "--run", "x", "--json").stdout)["rounds"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is no directory"),
        (["empty"], "no flight recording"),
        (["a", "--round", "ffff"], "'ffff' names 0 rounds of 1"),
    ],
)
def test_replay_says_what_it_cannot_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    record(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    result = replayed(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_torn_file_is_counted_and_the_rest_is_told(tmp_path: Path) -> None:
    record(tmp_path)
    (path,) = (tmp_path / "b" / "flight").iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    told = json.loads(replayed(str(tmp_path), "--round", "last", "--json").stdout)
    assert told["torn_bytes"] > 0
    assert told["round"]["ended"].keys() == {A}


def test_every_note_has_words() -> None:
    for what in (*NOTES, "something_new"):
        note = Note(what, A, "silent", "a sentence", {"part": 3, "seconds": {"x": 0.5}})
        words = say(Line(0.0, Life(B, "life", "0.1", 0.0), Entry(0.0, 0.0, "digits", "", note)))
        assert what.replace("_", " ") in words
        assert "part=3 seconds={x: 0.500}" in words
