"""Scenarios S1, S2, S5 and S22: nodes that start together, with dead ways in, in numbers that fit
no grid, and with addresses that nobody can dial.

One rule: a wait is a condition with a bound from the scenario, never a pause; the time that nodes
start apart is part of the situation.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from moshpitd.daemon.node import Node
from moshpitd.errors import ConfigError
from moshpitd.net.identity import Identity
from moshpitd.rpc.calls import Calls
from moshpitd.testing import LocalSwarm
from tests.kit.http import get
from tests.kit.ports import address_of, free_port
from tests.kit.swarm import average, same_bits, trainers, until

START_WITHIN_S = 0.2
TOGETHER_S = 30.0


def listen_on(port: int) -> dict[str, object]:
    return {"network__listen": [f"/ip4/127.0.0.1/tcp/{port}"]}


def status_of(path: Path) -> tuple[int, list[str]]:
    """What `moshpitd status` asks for: peers in the swarm, and what became of the ways in."""
    calls = Calls(path)
    try:
        reply = calls.status()
    finally:
        calls.close()
    return reply.swarm_peers, [one.state for one in reply.bootstrap]


@pytest.mark.parametrize("repetition", range(2))
async def test_five_that_start_within_200_ms_are_one_swarm(repetition: int) -> None:
    """S1: all have the same bootstrap address, the seed too; it starts first or last. (Twenty times
    with a process each: chaos/test_scenarios.)
    """
    rng = random.Random(repetition)
    port = free_port()
    async with LocalSwarm(0) as swarm:
        seed = Identity.load_or_create(swarm.folder / "seed.key")
        way = {"network__bootstrap": [address_of(seed, port)]}
        own = {"node__identity": str(swarm.folder / "seed.key")} | listen_on(port)
        starts = [partial(swarm.add, **way) for _ in range(4)]
        starts.insert(4 if repetition % 2 else 0, partial(swarm.add, **way, **own))
        gaps = [0.0, *sorted(rng.uniform(0, START_WITHIN_S) for _ in range(4))]

        async def later(gap_s: float, start: partial[object]) -> None:
            await asyncio.sleep(gap_s)
            await start()

        await asyncio.gather(*(later(*one) for one in zip(gaps, starts, strict=True)))
        await swarm.together(TOGETHER_S)
        await until(
            lambda: all(node is not None and node.ready() == (True, ()) for node in swarm.nodes),
            timeout_s=TOGETHER_S,
            what="everybody has seen the configured address",
        )
        replies = [await swarm.call(status_of, path) for path in swarm.sockets]
    assert [count for count, _ in replies] == [5] * 5
    assert sorted(states for _, states in replies) == [[], *[["ok"]] * 4]  # the seed is its own


async def test_a_daemon_that_has_a_peer_goes_on_until_it_has_seen_every_address() -> None:
    """S1: two that found each other would otherwise stay a swarm of their own for ever."""
    port = free_port()
    async with LocalSwarm(0) as swarm:
        seed = Identity.load_or_create(swarm.folder / "seed.key")
        late = address_of(seed, port)
        first = await swarm.add(network__bootstrap=[late])
        known = first.status()["addresses"][0]
        second = await swarm.add(network__bootstrap=[known, late])
        await until(lambda: second.joined and first.joined, timeout_s=10, what="they are two")
        assert second.status()["bootstrap"] == [
            {"address": known, "state": "ok"},
            {"address": late, "state": "refused"},
        ]
        third = await swarm.add(
            node__identity=str(swarm.folder / "seed.key"),
            network__bootstrap=[],
            **listen_on(port),
        )
        for node in (first, second):
            await until(
                lambda node=node: node.status()["bootstrap"][-1]["state"] == "ok",  # type: ignore[misc]
                timeout_s=10,
                what="the late address is seen",
            )
        await swarm.together(TOGETHER_S)
        assert third.status()["swarm_peers"] == 3


@contextmanager
def black_hole() -> Iterator[int]:
    """A port whose backlog is full: further connections are swallowed, as a black hole does."""
    with ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(hole.getsockname())
        yield hole.getsockname()[1]


async def test_dead_ways_in_are_one_line_each_until_one_comes_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S2: one refuses, one swallows everything, one is somebody else. The same words in the log
    (one line per address, however often it is tried), on /readyz and in status; no traceback.
    """
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "moshpitd.net.bootstrap")  # says every try
    refusing, http = free_port(), free_port()
    with black_hole() as hole:
        async with LocalSwarm(0) as swarm:
            seed = Identity.load_or_create(swarm.folder / "seed.key")
            other = Identity.load_or_create(swarm.folder / "other.key")
            stranger = await swarm.add(network__bootstrap=[])
            somebody = stranger.status()["addresses"][0]
            addresses = [
                address_of(seed, refusing),
                address_of(other, hole),
                somebody.replace(stranger.peer_id, other.peer_id),
            ]
            causes = ["refused", "timeout", "wrong PeerID"]
            node = await swarm.add(network__bootstrap=addresses, http__port=http)

            def states() -> list[str]:
                return [one["state"] for one in node.status()["bootstrap"]]

            await until(
                lambda: all(map(str.startswith, states(), causes)), timeout_s=20, what="causes"
            )
            url = f"http://127.0.0.1:{http}/readyz"
            code, words = await swarm.call(get, url)
            assert code == 503
            for address, state in zip(addresses, states(), strict=True):
                assert f"bootstrap {address}: {state}, trying again" in words
            tries = len(caplog.records)
            await until(
                lambda: sum("failed" in r.msg for r in caplog.records[tries:]) >= 2,
                timeout_s=20,
                what="the wrong peer is tried twice more",
            )
            lines = {
                address: [
                    record.getMessage()
                    for record in caplog.records
                    if record.levelno >= logging.WARNING and address in record.getMessage()
                ]
                for address in addresses
            }
            for address, cause in zip(addresses, causes, strict=True):
                assert len(lines[address]) == 1, lines[address]
                assert cause in lines[address][0]
                assert "\n" not in lines[address][0]
            shown = [record for record in caplog.records if record.levelno >= logging.INFO]
            assert not [record for record in shown if record.exc_info], "a traceback"

            await swarm.add(
                node__identity=str(swarm.folder / "seed.key"),
                network__bootstrap=[],
                **listen_on(refusing),
            )
            await until(lambda: node.joined, timeout_s=10, what="it joins by itself")
            await until(lambda: states()[0] == "ok", timeout_s=10, what="the address is seen")
            code, words = await swarm.call(get, url)
            assert code == 200
            assert addresses[0] not in words
            assert f"bootstrap {addresses[1]}: timeout" in words


@pytest.mark.parametrize("count", [5, 7])
async def test_numbers_that_fit_no_grid_still_mix_doubly_stochastically(count: int) -> None:
    """S5: groups of at most three. However they fall, the sum over the peers stays what it was
    (columns), a constant stays a constant (rows), and the spread goes down to nothing.
    """
    # Who is left over waits for a window in every round, so it is short here.
    async with LocalSwarm(count, averaging__max_group=3, averaging__window_s=1.1) as swarm:
        tensors = [
            {"w": torch.zeros(4, dtype=torch.float64), "one": torch.ones(3)} for _ in range(count)
        ]
        async with trainers(swarm, "odd", tensors) as sessions:
            nodes = [swarm.node(i) for i in range(count)]
            await until(
                lambda: all(len(node.peers("odd")) == count - 1 for node in nodes),
                timeout_s=20,
                what="everybody knows everybody",
            )
            for i, own in enumerate(tensors):
                own["w"].fill_(float(2**i))
            total = float(2**count - 1)
            spread = float(2 ** (count - 1) - 1)
            for _ in range(4):
                results = await average(swarm, sessions, timeout_s=30)
                for result in results:
                    assert result.status in ("complete", "alone"), str(result)
                    assert result.group_size <= 3
                    assert result.participants == result.group_size
                values = [own["w"][0].item() for own in tensors]
                assert sum(values) == pytest.approx(total, rel=1e-12)
                assert max(values) - min(values) <= spread * (1 + 1e-12)
                assert all(torch.equal(own["one"], torch.ones(3)) for own in tensors)
                groups: dict[bytes, list[dict[str, torch.Tensor]]] = {}
                for own, result in zip(tensors, results, strict=True):
                    if result.status == "complete":
                        groups.setdefault(result.group_id, []).append(own)
                assert groups, "nobody met anybody"
                for members in groups.values():
                    assert len(members) == 1 or same_bits(members)
                spread = max(values) - min(values)
            assert spread < 0.35 * 2 ** (count - 1)


# -- S22 ----------------------------------------------------------------------------------------

FAR = "/ip4/198.51.100.7/tcp/31337/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"network.announce": ["/ip4/203.0.113.5/tcp/0"]}, "port 0"),
        ({"network.link_announce": ["203.0.113.5:0"]}, "port 0"),
        ({"network.announce": ["/ip4/0.0.0.0/tcp/31337"]}, "every interface"),
        (
            {"network.announce": ["/ip4/127.0.0.1/tcp/31337"], "network.bootstrap": [FAR]},
            "would dial itself",
        ),
        (
            {"network.link_announce": ["127.0.0.1:31338"], "network.bootstrap": [FAR]},
            "would dial itself",
        ),
    ],
)
async def test_an_address_that_cannot_work_is_refused_before_anything_starts(
    own: dict[str, object], words: str
) -> None:
    async with LocalSwarm(0) as swarm:
        with pytest.raises(ConfigError) as refused:
            swarm.settings(0, own)
        (key, *_), value = own.keys(), next(iter(own.values()))
        assert isinstance(value, list)
        assert refused.value.key == key
        assert value[0] in str(refused.value)
        assert words in str(refused.value)


def test_the_command_refuses_it_with_exit_code_2_and_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "moshpitd.cli.main", "run", "--data-dir", str(tmp_path)]
    argv += ["--announce", "/ip4/203.0.113.5/tcp/0"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "/ip4/203.0.113.5/tcp/0" in line
    assert "port 0" in line
    assert list(tmp_path.iterdir()) == []


async def test_a_loopback_node_in_a_swarm_elsewhere_says_so() -> None:
    """Every address here is loopback, the bootstrap peer is not: a warning in log and status."""
    async with LocalSwarm(0) as swarm:
        node = await swarm.add(network__bootstrap=[FAR])
        keys = [warning.partition(":")[0] for warning in node.status()["warnings"]]
        assert keys == ["network.listen", "network.link_listen"]
        assert all("not be dialled" in warning for warning in node.status()["warnings"])


async def test_an_address_that_nobody_can_dial_is_told_by_those_who_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S22: well formed, announced, and nobody is there. Others were asked to dial it; the log and
    status say which address and why, and who can be dialled says nothing.
    """
    caplog.set_level(logging.WARNING)
    dead = f"127.0.0.1:{free_port()}"
    async with LocalSwarm(2) as swarm:
        node = await swarm.add(network__link_announce=[dead])

        def told() -> list[str]:
            return [one for one in node.status()["warnings"] if "no peer could dial" in one]

        await until(lambda: told(), timeout_s=10, what="the others have tried")
        assert told() == [f"no peer could dial our links: {dead}: refused"]
        lines = [getattr(record, "moshpit_fields", {}).get("warning") for record in caplog.records]
        assert lines.count(told()[0]) == 1
        for good in (swarm.node(0), swarm.node(1)):
            assert not [one for one in good.status()["warnings"] if "dial" in one]


async def test_a_join_string_is_one_that_others_can_use() -> None:
    """On all interfaces: none of its addresses is loopback or port 0, and it works. On loopback
    only: there is none.
    """
    async with LocalSwarm(0) as swarm:
        here = await swarm.add(network__bootstrap=[])
        assert here.status()["join"] == ""
        wide = await swarm.add(network__listen=["/ip4/0.0.0.0/tcp/0"], network__bootstrap=[])
        join = wide.status()["join"]
        addresses = join.removeprefix("moshpitd run ").split("--bootstrap ")[1:]
        if not addresses:
            assert join == ""  # a machine with nothing but a loopback has nothing to offer
            return
        for address in addresses:
            assert "/127." not in address
            assert "/0.0.0.0/" not in address
            assert "/tcp/0/" not in address
        joining: Node = await swarm.add(network__bootstrap=[addresses[0].strip()])
        await until(lambda: joining.joined, timeout_s=10, what="somebody joined with it")
