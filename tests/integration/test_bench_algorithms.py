"""What `bench algorithms` measures with, part by part: a trainer on two real daemons that is told
when to step, and a line between two namespaces that is delayed and counted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from moshpitd.cli.namespaces import Line, missing, namespaces, sent_bytes
from moshpitd.testing import LocalSwarm
from moshpitd.testing.bench.by_name import Trainer

PEERS, STEPS = 2, 9
ECHO = """
import socket
with socket.create_server(("127.0.0.1", 5000)) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as one:
            while block := one.recv(1 << 16):
                one.sendall(block)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 4001), 10) as one:
    one.sendall(b"x"); one.recv(1)
    began = time.monotonic()
    one.sendall(b"x"); one.recv(1)
    print(time.monotonic() - began)
    one.sendall(bytes(100_000)); left = 100_000
    while left: left -= len(one.recv(left))
"""


@pytest.mark.parametrize("name", ["moshpit-sgd", "gradient-averaging", "d-psgd", "onebit-adam"])
async def test_a_trainer_steps_when_it_is_told(name: str) -> None:
    async with LocalSwarm(PEERS) as swarm:
        trainers = [Trainer(index, PEERS, 2000) for index in range(PEERS)]

        async def ask(do: str, **order: Any) -> list[dict[str, Any]]:
            asking = (
                swarm.call(one.orders()[do], {"socket": str(path), **order})
                for one, path in zip(trainers, swarm.sockets, strict=True)
            )
            return await asyncio.gather(*asking)

        begun = await ask("begin", run="r", algorithm=name, before=0, timed=STEPS, of=200)
        assert begun == [{"parameters": 51 * 39 + 6}] * PEERS
        told = await ask("steps", count=STEPS, compute_s=0.0, at=time.monotonic())
        await ask("end")
    for one in told:
        assert len(one["seconds"]) == STEPS
        assert any(one["openings"]), "a run's first round is told apart"
        assert not one["openings"][-1], "and none after it"
        assert 0.0 < one["loss"] < 10.0
        assert one["statuses"]["complete"] >= 1


def test_a_line_is_delayed_and_its_bytes_are_counted() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    delayed = [sys.executable, "-m", "moshpitd.testing.bench.delayed", "--delay-s", "0.03"]
    with namespaces([Line(100.0, 100.0)] * 2) as (here, there):
        delayed += ["--host", here.host, "--path", "4001", "127.0.0.1:5000"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (
            subprocess.Popen([*here.within, sys.executable, "-c", ECHO], **pipes) as echo,
            subprocess.Popen([*here.within, *delayed], **pipes) as proxy,
        ):
            try:
                assert echo.stdout is not None
                assert proxy.stdout is not None
                assert echo.stdout.readline() == b"ready\n"
                assert json.loads(proxy.stdout.readline())["ready"]
                before = sent_bytes(there)
                asking = [*there.within, sys.executable, "-c", ASK, here.host]
                told = subprocess.run(asking, capture_output=True, check=True, timeout=20)
                assert float(told.stdout) >= 2 * 0.03, "there and back"
                sent = sent_bytes(there) - before
            finally:
                echo.kill()
                proxy.kill()
    assert 100_000 < sent < 150_000, "what was sent, with headers and acknowledgements"
