"""The command line without a daemon: help, exit codes, one line per error, and what is imported."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moshpitd.cli import output
from moshpitd.cli.main import app, exit_code
from moshpitd.errors import ConfigError, DaemonUnavailable, InternalError, TrainerError

VERBS = ("run", "status", "peers", "rounds", "drain", "demo", "version")
MOSHPITD = (sys.executable, "-c", "from moshpitd.cli.main import app; app(prog_name='moshpitd')")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOSHPITD_SOCKET", str(tmp_path / "s.sock"))
    monkeypatch.setenv("HOME", str(tmp_path))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def failed(code: int, *arguments: str) -> str:
    """The one line on stderr."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("moshpitd: ")
    return str(result.stderr)


def test_help_answers_within_half_a_second_and_names_every_verb() -> None:
    """Of a processor: what else the machine does meanwhile is not its doing."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*MOSHPITD, "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert all(re.search(rf"\b{verb}\b", done.stdout) for verb in VERBS)
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ("pydantic_settings", "grpc", "torch", "hivemind", "libp2p", "aiohttp")),
        (["run", "--help"], ("pydantic_settings", "grpc", "torch", "hivemind", "libp2p")),
        (["version"], ("grpc", "torch", "hivemind", "libp2p")),
        (["status"], ("torch", "hivemind", "libp2p", "aiohttp", "prometheus_client")),
        (["run", "--http-port", "-1"], ("torch", "hivemind", "libp2p")),
    ],
)
def test_what_is_not_imported(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom moshpitd.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_every_verb_has_help() -> None:
    for verb in VERBS:
        result = invoke(verb, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_no_daemon_is_one_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    for verb in ("status", "peers", "rounds", "drain"):
        line = failed(1, verb)
        assert f"no daemon at {tmp_path / 's.sock'}" in line
        assert "moshpitd run" in line
    assert "no daemon at /nowhere/x" in failed(1, "status", "--socket", "/nowhere/x", "--json")


def test_a_configured_socket_is_found_through_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[node]\nsocket = '/nowhere/configured'\n")
    assert "/nowhere/configured" in failed(1, "status", "--config", str(config))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http-port", "99999"], "command line: http.port: 99999 is refused"),
        (["--bootstrap", "10.0.0.1:1"], "10.0.0.1:1: not a multiaddr"),
        (["--announce", "/ip4/0.0.0.0/tcp/1"], "/ip4/0.0.0.0/tcp/1: 0.0.0.0 means every interface"),
        (["--max-group", "1"], "averaging.max_group: 1 is out of range (expected 2..64)"),
        (["--log-level", "loud"], "log.level: 'loud' is refused"),
        (["--set", "averaging.codec=top-k"], "averaging.allow_no_error_feedback = true"),
        (["--set", "averaging.window_s=soon"], "'soon' is refused (expected a valid number)"),
        (["--set", "averaging.windows=1"], "unknown key (expected window_s?)"),
        (["--set", "nonsense"], "--set: 'nonsense' assigns nothing"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: no such file or directory"),
        (["--data-dir", "/proc/moshpitd"], "node.data_dir: /proc/moshpitd: no such file"),
    ],
)
def test_run_refuses_what_the_operator_got_wrong(arguments: list[str], words: str) -> None:
    assert words.lower() in failed(2, "run", *arguments).lower()


def test_a_broken_file_names_file_and_key(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[averaging]\nmax_gruop = 4\n")
    line = failed(2, "run", "-c", str(config))
    assert f"{config}: averaging.max_gruop: unknown key (expected max_group?)" in line
    assert str(config) in failed(2, "status", "-c", str(config))


def test_a_flag_beats_the_set_of_the_same_key() -> None:
    line = failed(2, "run", "--set", "http.port=5", "--http-port", "-1")
    assert "-1 is refused" in line


def test_exit_codes() -> None:
    assert exit_code(ConfigError("x")) == 2
    assert exit_code(InternalError("x")) == 70
    assert exit_code(DaemonUnavailable("x")) == 1
    assert exit_code(TrainerError("x")) == 1


def test_usage_errors_exit_2() -> None:
    assert invoke("run", "--bogus").exit_code == 2
    assert invoke("nonsense").exit_code == 2
    assert invoke().exit_code == 2


def test_version_as_json_is_for_bug_reports() -> None:
    found = json.loads(invoke("version", "--json").stdout)
    assert {"moshpitd", "python", "torch", "hivemind"} <= found.keys()
    assert "torch" in invoke("version").stdout


def test_sizes_and_durations_for_people() -> None:
    assert [output.size(n) for n in (0, 999, 1_400_000, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1.4 MB",
        "5.0 TB",
    ]
    assert [output.duration(s) for s in (3, 180, 7200, 400_000)] == [
        "3 s",
        "3 min",
        "2.0 h",
        "4.6 d",
    ]


def test_what_a_peer_says_cannot_move_the_cursor_or_become_markup() -> None:
    drawn = output.table("", ("note",), [("\x1b[2J[red]x[/red]\nforged",)])
    out = output.console()
    with out.capture() as captured:
        out.print(drawn)
    assert "\x1b[2J" not in captured.get()
    assert r"\x1b[2J[red]x[/red]\nforged" in captured.get()


def test_a_message_becomes_plain_values_with_every_field() -> None:
    kind = SimpleNamespace(GetOptions=lambda: SimpleNamespace(map_entry=True))
    fields = [
        SimpleNamespace(name="peer", message_type=None, is_repeated=False),
        SimpleNamespace(name="digest", message_type=None, is_repeated=False),
        SimpleNamespace(name="phases", message_type=kind, is_repeated=True),
    ]
    message = SimpleNamespace(
        DESCRIPTOR=SimpleNamespace(fields=fields), peer="", digest=b"\x01", phases={"exchange": 0.5}
    )
    assert output.as_dict(message) == {"peer": "", "digest": "01", "phases": {"exchange": 0.5}}
