"""The verbs against a real gRPC server on a real socket, with a stand-in for the daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from moshpitd.cli import leave
from moshpitd.cli.main import app
from moshpitd.rpc.channel import SERVER_OPTIONS
from moshpitd.rpc.stubs import messages, services

STATUS = messages.StatusReply(
    peer_id="12D3KooWMe",
    version="0.1.0",
    uptime_s=4000.0,
    swarm_peers=5,
    addresses=["/ip4/10.0.0.4/tcp/31337/p2p/12D3KooWMe"],
    bootstrap=[messages.Bootstrap(address="/ip4/10.0.0.9/tcp/1", state="refused")],
    warnings=["bootstrap /ip4/10.0.0.9/tcp/1: refused, trying again"],
    runs=[
        messages.RunStatus(
            run="digits", version=7, trainers=2, phase="exchange", grid=[3, 3], coordinates=[0, 2]
        )
    ],
    bytes_sent=3 << 40,
)
PEER = messages.PeerLine(
    run="digits", peer_id="12D3KooWOther", state="lost", note="[bold]layer.4\x1b[2J", heard_s=3.0
)
ROUND = messages.RoundLine(
    run="digits",
    round=3,
    status="partial",
    reason="silent",
    group_size=4,
    phases={"exchange": 0.5},
    group_id=b"\xab",
    excluded=[messages.Excluded(peer_id="12D3KooWOther", reason="silent")],
)


class StandIn(services.DaemonServicer):
    """Answers as a daemon would and remembers what it was asked. A drain stops the server."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.asked: list[Any] = []
        self.stays = False
        self._server = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        services.add_DaemonServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def Status(self, request: Any, context: Any) -> Any:
        return STATUS

    def Peers(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return messages.PeersReply(peers=[PEER] if request.run in ("", "digits") else [])

    def Rounds(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return messages.RoundsReply(rounds=[ROUND])

    def Drain(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if not self.stays:
            threading.Thread(target=lambda: self._server.stop(grace=0.2)).start()
        return messages.DrainReply()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("MOSHPITD_SOCKET", str(tmp_path / "s.sock"))
    stand_in = StandIn(tmp_path / "s.sock")
    yield stand_in
    stand_in.stop()


RUN = """
import asyncio, sys, types
from moshpitd.errors import ConfigError
class Node:
    def __init__(self, settings): self.settings = settings
    async def start(self):
        if self.settings.averaging.max_group == 3: raise ConfigError("no", key="some.key")
        if self.settings.averaging.max_group == 4: raise ZeroDivisionError
        print("up", self.settings.averaging.max_group, flush=True)
    async def wait(self): await asyncio.Event().wait()
    async def drain(self, budget_s, why): print("drained", budget_s, why, flush=True)
    async def stop(self): print("stopped", flush=True)
sys.modules["moshpitd.daemon.node"] = types.SimpleNamespace(Node=Node)
from moshpitd.cli.main import app
app(["run", *sys.argv[1:]])
"""


def run_process(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """`moshpitd run` with a stand-in node, in a directory of its own and on no fixed port."""
    here = ["--data-dir", str(place / "d"), "--socket", str(place / "d" / "s"), "--http-port", "0"]
    here += ["--listen", "/ip4/127.0.0.1/tcp/0", "--link-listen", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", RUN, *here, *arguments]
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)


def test_run_until_sigterm(tmp_path: Path) -> None:
    with run_process(tmp_path, "--max-group", "5", "--set", "node.drain_budget_s=7") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up 5\n"
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "drained 7.0 SIGTERM\nstopped\n")
    assert "asked to leave signal=SIGTERM" in err


def test_run_that_cannot_start_exits_2_and_a_fault_of_ours_70(tmp_path: Path) -> None:
    for group, code, words in (("3", 2, "moshpitd: some.key: no\n"), ("4", 70, "ZeroDivision")):
        with run_process(tmp_path, "--max-group", group) as process:
            out, err = process.communicate(timeout=20)
        assert process.returncode == code
        assert words in err
        assert out == "stopped\n"


def test_run_warns_of_an_address_that_is_doubtful(tmp_path: Path) -> None:
    arguments = ("--announce", "/ip4/127.0.0.1/tcp/31337", "--max-group", "3")
    with run_process(tmp_path, *arguments, "--log-format", "json") as process:
        _, err = process.communicate(timeout=20)
    warning = json.loads(err.splitlines()[0])
    assert warning["level"] == "warning"
    assert "network.announce: /ip4/127.0.0.1/tcp/31337: a loopback address" in warning["event"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_status_as_a_table(daemon: StandIn) -> None:
    result = invoke("status")
    assert result.exit_code == 0, result.output
    for words in ("not in the swarm yet", "12D3KooWMe", "67 min", "3.3 TB", "3x3 at 0,2", "digits"):
        assert words in result.stdout, words
    assert "! bootstrap /ip4/10.0.0.9/tcp/1: refused, trying again" in result.stdout


def test_status_as_json_has_every_field(daemon: StandIn) -> None:
    reply = json.loads(invoke("status", "--json").stdout)
    assert reply.keys() == {field.name for field in messages.StatusReply.DESCRIPTOR.fields}
    assert reply["bytes_sent"] == 3 << 40
    assert reply["joined"] is False
    assert reply["runs"][0]["grid"] == [3, 3]


def test_peers(daemon: StandIn) -> None:
    text = invoke("peers").stdout
    assert "12D3KooWOther" in text
    assert r"[bold]layer.4\x1b[2J" in text
    [peer] = json.loads(invoke("peers", "--run", "digits", "--json").stdout)["peers"]
    assert peer["state"] == "lost"
    assert daemon.asked[-1].run == "digits"
    assert "no other peer is known" in invoke("peers", "--run", "mnist").stdout


def test_rounds(daemon: StandIn) -> None:
    text = invoke("rounds", "--last", "3").stdout
    assert "partial (silent)" in text
    assert daemon.asked[-1].last == 3
    [line] = json.loads(invoke("rounds", "--json").stdout)["rounds"]
    assert line["group_id"] == "ab"
    assert line["phases"] == {"exchange": 0.5}
    assert line["excluded"] == [{"peer_id": "12D3KooWOther", "reason": "silent"}]


def test_drain_waits_until_the_daemon_is_gone(daemon: StandIn) -> None:
    result = invoke("drain", "--budget", "3")
    assert result.exit_code == 0, result.output
    assert daemon.asked[-1].budget_s == 3.0
    assert invoke("status").exit_code == 1


def test_drain_takes_its_budget_from_the_settings(daemon: StandIn) -> None:
    assert invoke("drain", "--no-wait").exit_code == 0
    assert daemon.asked[-1].budget_s == 25.0


def test_a_daemon_that_does_not_go_is_told(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave, "STOP_S", 0.1)
    daemon.stays = True
    result = invoke("drain", "--budget", "0.1")
    assert result.exit_code == 1
    assert "still answers" in result.stderr


def test_a_daemon_that_died_and_left_its_socket(tmp_path: Path, daemon: StandIn) -> None:
    daemon.stop()
    (tmp_path / "s.sock").touch()
    result = invoke("status")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
