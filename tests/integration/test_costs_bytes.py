"""The model's bytes against those of real daemons: what the nodes count, and what proxies between
them carried. One rule: the model knows the layout, the codec and the number of peers, no more."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from moshpitd.cli.demo_processes import free_ports
from moshpitd.client import Result, Session
from moshpitd.sim.costs.operations import butterfly, group_round
from moshpitd.sim.costs.payload import Payload, Traffic, group_traffic
from moshpitd.tensors.layout import Layout, specs_of
from moshpitd.testing import LocalSwarm
from moshpitd.testing.proxied_swarm import proxied_swarm
from tests.kit.swarm import Tensors, average, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PART_BYTES = 65_536
NUMEL = 600_000  # 37 parts: they divide evenly neither by 4 nor by 9
SLOW_MBPS = 5.0
"""What members say of themselves: less than any rate that they might measure here, because measured
ones lower it and with it the shares."""
TLS_RECORD = 22 / 16_384
"""What TLS 1.3 adds: header, content type and tag of a record."""


def tensors_of(count: int) -> list[Tensors]:
    return [{"w": torch.full((NUMEL,), float(i)), "step": torch.tensor(i)} for i in range(count)]


def modelled(peers: int, codec: str) -> tuple[Traffic, ...]:
    """Per member, in order of PeerIDs as in a group."""
    layout = Layout.from_specs(specs_of(tensors_of(1)[0]), PART_BYTES)
    return group_traffic(layout, codec, [SLOW_MBPS] * peers)


def check(sessions: list[Session], results: list[Result], codec: str) -> None:
    peers = len(sessions)
    assert [result.status for result in results] == ["complete"] * peers, str(results)
    assert [result.participants for result in results] == [peers] * peers, str(results)
    members = sorted(zip(sessions, results, strict=True), key=lambda pair: str(pair[0].peer_id))
    for (_, result), model in zip(members, modelled(peers, codec), strict=True):
        # The bar is 2 %; a round that loses nothing has no reason to differ at all.
        assert (result.bytes_sent, result.bytes_received) == (model.sent, model.received)
    # Together they have to be those of the textbook too: 2 (n-1)/n m each.
    textbook = butterfly(peers, Payload(NUMEL, codec))
    mean = sum(result.bytes_sent for result in results) / peers
    assert mean == pytest.approx(textbook.sent, rel=0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nine() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(
        9,
        averaging__part_bytes=PART_BYTES,
        averaging__codec="float32",
        network__up_mbps=SLOW_MBPS,
        network__down_mbps=SLOW_MBPS,
    ) as swarm:
        yield swarm


@pytest.mark.parametrize("count", [4, 9])
async def test_a_round_sends_what_the_model_says(nine: LocalSwarm, count: int) -> None:
    async with trainers(nine, f"n{count}", tensors_of(count)) as sessions:
        # One that came late to the first round has weight 0 in it: it sends no contribution.
        first = await average(nine, sessions)
        results = await average(nine, sessions)
        check(sessions, results, "float32")
        for index, result in enumerate(results):
            registry = nine.node(index).metrics.registry
            both = (first[index], result)
            for direction, counted in (
                ("sent", sum(one.bytes_sent for one in both)),
                ("received", sum(one.bytes_received for one in both)),
            ):
                said = {"run": f"n{count}", "direction": direction}
                kinds = [
                    registry.get_sample_value("moshpit_bytes_total", {**said, "kind": kind})
                    for kind in ("part", "result")
                ]
                # The counter knows the frames' headers too; the bar is 2 %.
                carried = sum(value or 0.0 for value in kinds)
                assert carried == pytest.approx(counted, rel=0.02)


async def test_a_lossy_codec_sends_what_the_model_says_and_the_wire_carries_it() -> None:
    async with (
        proxied_swarm(
            free_ports(2 * 4),
            averaging__part_bytes=PART_BYTES,
            averaging__codec="float16",
            network__up_mbps=SLOW_MBPS,
            network__down_mbps=SLOW_MBPS,
        ) as (swarm, network),
        trainers(swarm, "half", tensors_of(4)) as sessions,
    ):
        await average(swarm, sessions)  # links are made, snapshots are taken
        before = network.link_bytes
        results = await average(swarm, sessions)
        check(sessions, results, "float16")
        expected = sum(one.wire_sent for one in modelled(4, "float16")) * (1 + TLS_RECORD)
        carried = lambda: network.link_bytes - before  # noqa: E731
        await until(lambda: carried() >= 0.98 * expected, timeout_s=5, what="the last frames pass")
        assert carried() == pytest.approx(expected, rel=0.02)


async def test_a_sweep_sends_what_the_model_says() -> None:
    """2 d (M-1)/M m on a 3x3 grid."""
    async with (
        LocalSwarm(
            9,
            averaging__max_group=3,
            averaging__part_bytes=PART_BYTES,
            averaging__codec="float32",
        ) as swarm,
        trainers(swarm, "grid", tensors_of(9)) as sessions,
    ):
        nodes = [swarm.node(i) for i in range(9)]
        await until(
            lambda: all(len(node.peers("grid")) == 8 for node in nodes),
            timeout_s=20,
            what="every peer knows the other eight",
        )
        await average(swarm, sessions, rounds="sweep")  # nobody is a newcomer after it
        results = await average(swarm, sessions, rounds="sweep")
    assert [(result.status, result.rounds) for result in results] == [("complete", 2)] * 9
    once = group_round(9, 3, Payload(NUMEL))
    total = sum(result.bytes_sent for result in results)
    assert total == pytest.approx(9 * 2 * once.sent, rel=0.02)
    assert sum(result.bytes_received for result in results) == total
