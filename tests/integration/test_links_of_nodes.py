"""The links' settings between real daemons: what an average makes of them, and what people see."""

from __future__ import annotations

import pytest
import torch

from moshpitd.rpc.stubs import messages
from moshpitd.testing import LocalSwarm
from tests.kit.swarm import Tensors, average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio

COUNT = 2_000_000  # 8 MB: parts of many segments, for every flow


def numbers(seed: int) -> Tensors:
    return {"w": torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))}


def told(swarm: LocalSwarm, index: int, name: str) -> dict[str, float]:
    """The samples of one metric of a node, by labels."""
    lines = swarm.node(index).metrics.render().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(name + "{"))
    return {labels: float(value) for labels, _, value in found}


async def averaged(swarm: LocalSwarm, run: str, rounds: int = 1) -> None:
    """Three rounds' worth of proof that every member holds the mean."""
    tensors = [numbers(0) for _ in range(3)]
    async with trainers(swarm, run, tensors) as sessions:
        for turn in range(rounds):
            values = [numbers(10 * turn + index) for index in range(3)]
            for own, value in zip(tensors, values, strict=True):
                own["w"].copy_(value["w"])
            results = await average(swarm, sessions)
            assert {result.status for result in results} == {"complete"}
            mean = sum(value["w"].double() for value in values) / 3
            torch.testing.assert_close(tensors[0]["w"].double(), mean, rtol=1e-6, atol=1e-6)
            assert same_bits(tensors)


async def test_authenticated_links_with_several_flows_average_and_say_what_they_are() -> None:
    async with LocalSwarm(
        3,
        averaging__codec="float32",
        links__security="authenticated",
        links__flows=3,
        network__trusted_network=True,
    ) as swarm:
        await averaged(swarm, "plain", rounds=3)
        pools = [swarm.node(index)._live()._links for index in range(3)]
        await until(
            lambda: all(one.flows == 3 and not one.sealed for p in pools for one in p.stats()),
            timeout_s=10,
            what="three flows for every link",
        )
        await averaged(swarm, "again")
        for index in range(3):
            warnings = " ".join(swarm.node(index).status()["warnings"])
            assert "links.security is authenticated" in warnings
            assert "nor protected against change" in warnings
            lines = swarm.node(index).status()["links"]
            assert [(one["cipher"], one["integrity"], one["flows"]) for one in lines] == [
                ("", False, 3)
            ] * 2


async def test_the_default_says_nothing_and_every_kind_is_counted() -> None:
    async with LocalSwarm(3, averaging__codec="float32") as swarm:
        await averaged(swarm, "sealed", rounds=2)
        assert "authenticated" not in " ".join(swarm.node(0).status()["warnings"])
        lines = swarm.node(0).status()["links"]
        assert len(lines) == 2
        for line in lines:
            assert line["integrity"]
            assert line["cipher"].startswith("TLS_")
            assert line["bytes_sent"] > 0 < line["bytes_received"]
        moved = told(swarm, 0, "moshpit_bytes_total")
        for kind in ("part", "result", "control"):
            for direction in ("sent", "received"):
                labels = f'{{direction="{direction}",kind="{kind}",run="sealed"}}'
                assert moved["moshpit_bytes_total" + labels] > 0, labels
        # Two rounds, two others: 2/3 of the vector there, 1/3 twice as a result, and headers.
        third = 2 * 4 * COUNT / 3
        sent = moved['moshpit_bytes_total{direction="sent",kind="part",run="sealed"}']
        assert sent == pytest.approx(2 * third, rel=0.25)


async def test_codec_auto_says_what_it_chose_and_why() -> None:
    async with LocalSwarm(3, averaging__codec="auto") as swarm:
        tensors = [numbers(index) for index in range(3)]
        async with trainers(swarm, "auto", tensors) as sessions:
            for _ in range(3):
                results = await average(swarm, sessions)
                assert {result.status for result in results} == {"complete"}
                assert same_bits(tensors)
            (run,) = swarm.node(0).status()["runs"]
            assert run["codec"] == "auto"
            others = {swarm.node(index).peer_id for index in (1, 2)}
            assert {one["peer_id"] for one in run["contributions"]} == others
            for one in run["contributions"]:
                assert one["codec"] in ("float16", "float32")
                assert one["reason"] in ("coding_pays", "raw_is_faster", "unmeasured")
                assert one["detail"]
            messages.StatusReply(**swarm.node(0).status())  # what a client is sent


async def test_peers_of_other_security_are_named_in_status() -> None:
    async with LocalSwarm(2, averaging__codec="float32") as swarm:
        await swarm.stop_node(1)
        await swarm.start(1, links__security="authenticated", network__trusted_network=True)
        await swarm.together()
        tensors = [numbers(0) for _ in range(2)]
        async with trainers(swarm, "apart", tensors) as sessions:
            await average(swarm, sessions, timeout_s=5, min_participants=1)
            for index in range(2):
                words = " ".join(swarm.node(index).status()["warnings"])
                assert "links.security is" in words
                assert "both must say the same" in words


async def test_a_cap_lowers_what_a_peer_is_given_to_reduce() -> None:
    async with LocalSwarm(2, averaging__codec="float32") as swarm:
        await swarm.add(limits__upload_mbps=100, limits__download_mbps=400)
        await swarm.together()
        addressed = swarm.node(2)._live().addressed()
        assert (addressed.up_mbps, addressed.down_mbps) == (100, 400)
        await averaged(swarm, "capped")
        moved = told(swarm, 2, "moshpit_bytes_total")
        labels = '{direction="sent",kind="result",run="capped"}'
        results = moved.get("moshpit_bytes_total" + labels, 0.0)
        assert results < 0.1 * 4 * COUNT, "a tenth of the rate, so hardly any part is its own"
