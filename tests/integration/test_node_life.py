"""Nodes that start before their swarm, come back, refuse what they must, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.client import attach
from moshpitd.daemon import buffers
from moshpitd.daemon.node import Node
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_trainers_train_alone_until_the_bootstrap_peer_appears() -> None:
    port, http = free_port(), free_port()
    async with LocalSwarm(0) as swarm:
        # The seed's address is known before the seed lives: its identity is made and it is stopped.
        seed = await swarm.add(network__listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        address = seed.status()["addresses"][0]
        await swarm.stop_node(0)

        start = time.monotonic()
        node = await swarm.add(network__bootstrap=[address], http__port=http)
        assert time.monotonic() - start < 5.0
        mine = {"w": torch.full((10,), 1.0)}
        async with trainers(swarm, "early", [mine], nodes=[1]) as (early,):
            result = await swarm.call(early.average)
            assert (result.status, result.participants) == ("alone", 1)
            await until(
                lambda: node.status()["bootstrap"] == [{"address": address, "state": "refused"}],
                timeout_s=5,
                what="the cause is known",
            )
            code, words = await swarm.call(get, f"http://127.0.0.1:{http}/readyz")
            assert code == 503
            assert f"bootstrap {address}: refused, trying again" in words

            # Without a bootstrap address of its own it waits to be found.
            await swarm.start(
                0, network__listen=[f"/ip4/127.0.0.1/tcp/{port}"], network__bootstrap=[]
            )
            took_s = await until(lambda: node.joined, timeout_s=10, what="the node has joined")
            assert took_s < 10.0
            await until(
                lambda: node.ready() == (True, ()), timeout_s=2, what="the address counts as seen"
            )
            code, words = await swarm.call(get, f"http://127.0.0.1:{http}/readyz")
            assert (code, words) == (200, "ready\n")
            other = {"w": torch.full((10,), 3.0)}
            async with trainers(swarm, "early", [other], nodes=[0]) as (late,):
                assert late.synced is not None
                assert late.synced.loaded_snapshot  # the one that trained alone has the run's state
                results = await average(swarm, [early, late])
                assert [one.participants for one in results if one.group_size == 2], str(results)
                assert same_bits([mine, other])


@pytest.mark.parametrize("seed_starts", ["first", "last"])
async def test_five_that_start_together_find_each_other(seed_starts: str) -> None:
    port = free_port()
    async with LocalSwarm(0) as swarm:
        listen = {"network__listen": [f"/ip4/127.0.0.1/tcp/{port}"], "network__bootstrap": []}
        seed = await swarm.add(**listen)
        address = seed.status()["addresses"][0]
        await swarm.stop_node(0)
        starts = [partial(swarm.start, 0, **listen)]
        starts += [partial(swarm.add, network__bootstrap=[address]) for _ in range(4)]
        if seed_starts == "last":
            starts.append(starts.pop(0))
        began = []
        for start in starts:
            began.append(asyncio.create_task(start()))
            await asyncio.sleep(0.05)
        await asyncio.gather(*began)
        await swarm.together(30.0)


async def test_every_page_of_a_node_answers() -> None:
    http = free_port()
    tensors = [{"w": torch.ones(3)}]
    async with (
        LocalSwarm(1, http__port=http) as swarm,
        trainers(swarm, "paged", tensors) as (session,),
    ):
        await swarm.call(session.average)
        for path, words in (
            ("/healthz", "ok"),
            ("/readyz", "ready\nno bootstrap address configured"),
            ("/metrics", 'moshpit_version{run="paged"} 1.0'),
            ("/", "paged"),
        ):
            code, text = await swarm.call(get, f"http://127.0.0.1:{http}{path}")
            assert code == 200
            assert words in text, path


async def test_a_restarted_daemon_is_the_same_peer_and_its_trainer_comes_back() -> None:
    async with LocalSwarm(3) as swarm:
        tensors = [{"w": torch.zeros(100)} for _ in range(3)]
        async with trainers(swarm, "restarted", tensors) as sessions:
            for i, own in enumerate(tensors):
                own["w"].fill_(float(i))
            results = await average(swarm, sessions)
            assert [result.participants for result in results] == [3, 3, 3]
            was = swarm.node(2).peer_id
            await swarm.stop_node(2)
            results = await average(swarm, sessions[:2])
            assert [result.participants for result in results] == [2, 2], str(results)

            node = await swarm.start(2)
            assert node.peer_id == was
            assert await swarm.call(sessions[2].wait_attached, 10.0)
            await swarm.together()
            await swarm.call(sessions[2].sync)
            results = await average(swarm, sessions)
            assert [result.group_size for result in results] == [3, 3, 3], str(results)
            assert same_bits(tensors)


async def test_what_is_in_use_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async with LocalSwarm(1) as swarm:
        for own, words in (
            ({}, "data directory .* in use by the daemon with pid"),
            ({"node.data_dir": str(tmp_path / "a")}, "socket .* in use by the daemon with pid"),
            (
                {
                    "node.data_dir": str(tmp_path / "b"),
                    "node.socket": str(tmp_path / "b.sock"),
                    "node.identity": str(swarm.folder / "0" / "copy.key"),
                },
                "identity in use: the daemon with pid",
            ),
        ):
            key = swarm.folder / "0" / "identity.key"
            (swarm.folder / "0" / "copy.key").write_bytes(key.read_bytes())
            os.chmod(swarm.folder / "0" / "copy.key", 0o600)
            second = Node(swarm.settings(0, own))
            with pytest.raises(ConfigError, match=words):
                await second.start()
        # and the first goes on
        async with trainers(swarm, "unharmed", [{"w": torch.ones(2)}]) as (session,):
            assert (await swarm.call(session.average)).status == "alone"


def folders() -> set[str]:
    return {name for name in os.listdir("/tmp") if "moshpit" in name}


def children() -> set[str]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = stat.read_text()
        except OSError:
            continue
        if int(line[line.rindex(")") + 2 :].split()[1]) == os.getpid():
            found.add(line.split()[0])
    return found


async def test_a_stopped_swarm_leaves_nothing() -> None:
    before = folders()
    async with (
        LocalSwarm(2) as swarm,
        trainers(swarm, "left", [{"w": torch.full((5,), float(i))} for i in range(2)]) as sessions,
    ):
        await average(swarm, sessions)
        assert len(children()) >= 2
        await swarm.stop_node(1)  # with a trainer attached
        data = swarm.folder / "1"
        left = {path.name for path in data.rglob("*") if not path.is_dir()}
        kept = {name for name in left if not name.startswith("flight-")}  # what it recorded
        assert kept <= {"identity.key", "lock"}, left
    assert not children()
    names = {thread.name for thread in threading.enumerate()}
    ours = {name for name in names if name.startswith(("link-", "average", "snapshot", "node"))}
    assert not ours
    assert folders() <= before


async def test_a_trainer_that_attaches_while_its_node_stops_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing may look after it later: its run is closed by then."""
    enters, may_go_on = threading.Event(), threading.Event()
    make = buffers.create_bucket

    def held_up(*arguments: Any, **options: Any) -> Any:
        enters.set()
        assert may_go_on.wait(20)
        return make(*arguments, **options)

    async with LocalSwarm(1) as swarm:
        monkeypatch.setattr(buffers, "create_bucket", held_up)
        late = partial(attach, "late", tensors=[torch.zeros(5)], socket=swarm.socket(0))
        attaching = asyncio.create_task(swarm.call(late))
        try:
            await until(enters.is_set, timeout_s=20, what="a bucket is being made")
            run = swarm.node(0).runs["late"]
            stopping = asyncio.create_task(swarm.stop_node(0))
            await until(lambda: run.draining, timeout_s=20, what="the node stops")
            may_go_on.set()
            await stopping
            assert not run.trainers
        finally:
            may_go_on.set()
            with contextlib.suppress(TrainerError):  # its bucket went before it was mapped
                await swarm.call((await attaching).close)
