"""What `bench delay` measures with: a ring that averages exactly, and steps that all count. No
figure is held against anything here."""

from __future__ import annotations

import threading

import pytest
import torch

from moshpitd.cli.bench_delay import judged, results_of
from moshpitd.cli.demo_processes import free_ports
from moshpitd.testing.bench.delay import AVERAGE, NEIGHBOURS, Plan, Step, ideal_s, measure
from moshpitd.testing.bench.ring import RingMember, hops, ring
from moshpitd.testing.proxied_swarm import proxied_swarm
from moshpitd.testing.proxy import Proxies

DELAY_S = 0.001


@pytest.mark.parametrize(("count", "numel"), [(1, 5), (2, 5), (3, 100), (5, 3)])
def test_the_ring_averages_exactly(count: int, numel: int) -> None:
    """Whole numbers whose mean is one: float32 adds them without rounding, in any order."""
    draw = torch.Generator().manual_seed(count)
    first = [torch.randint(-1000, 1000, (numel,), generator=draw) * count for _ in range(count)]
    values = [one.float() for one in first]

    def average(member: RingMember, own: torch.Tensor) -> None:
        member.average(own)
        own.add_(count)  # the second must not see anything of the first
        member.average(own)

    with Proxies() as proxies:

        def path_to(target: str) -> tuple[str, int]:
            path = proxies.to(target)
            path.slow(DELAY_S)
            return "127.0.0.1", path.port

        with ring(count, path_to) as members:
            pairs = zip(members, values, strict=True)
            threads = [threading.Thread(target=average, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    expected = torch.stack(first).sum(0).div(count, rounding_mode="floor").float() + count
    for own in values:
        assert torch.equal(own, expected)


async def test_every_step_of_every_system_counts() -> None:
    told: list[Step] = []
    plan = Plan(delay_s=DELAY_S, numel=3000, steps=2, warm_up=3)
    async with proxied_swarm(free_ports(2 * 3)) as (swarm, network):
        await measure(swarm, network, plan, told.append)
    systems = list(ideal_s(3, DELAY_S))
    assert systems == ["ring all-reduce", *NEIGHBOURS, AVERAGE]
    assert ideal_s(3, DELAY_S)["ring all-reduce"] == pytest.approx(hops(3) * DELAY_S)
    for system in systems:
        mine = [step for step in told if step.system == system]
        assert [step.number for step in mine] == [-3, -2, -1, 0, 1]
        assert all(step.seconds > 0 for step in mine)
        assert [step.trouble for step in mine if step.number >= 0] == ["", ""], system


def test_the_verdict_is_of_steps_that_count() -> None:
    least = ideal_s(8, 0.02)
    told = [
        {"system": system, "seconds": seconds, "trouble": trouble}
        for system, seconds, trouble in (
            ("ring all-reduce", 0.25, ""),
            ("d-psgd", 0.0625, ""),
            ("d-psgd", 0.01, "trainer 3 heard 1 of 2 neighbours"),
            ("low-precision-decentralized", 0.11, ""),
        )
    ]
    results = results_of(told, least)
    assert [(one["system"], one["counted"], one["steps"]) for one in results] == [
        ("ring all-reduce", 1, 1),
        ("d-psgd", 1, 2),
        ("low-precision-decentralized", 1, 1),
        ("group average", 0, 0),
    ]
    verdict = judged(results)
    assert verdict["times_faster"]["d-psgd"] == pytest.approx(4.0)
    assert verdict["times_faster"]["group average"] is None
    assert [bar["met"] for bar in verdict["bars"]] == [True, False]
    assert not verdict["passed"]
    assert judged(results_of(told[:3], least))["passed"] is False, "no figure is no bar met"
