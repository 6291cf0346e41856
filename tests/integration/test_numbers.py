"""Odd numbers of peers, a second peer for a run of one, and many rounds that fail."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from moshpitd.testing import LocalSwarm
from tests.kit.swarm import average, same_bits, trainers, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(7) as running:
        yield running


@pytest.mark.parametrize("count", [2, 3, 5, 7])
async def test_any_number_of_peers_has_the_exact_mean(swarm: LocalSwarm, count: int) -> None:
    tensors = [{"w": torch.zeros(100)} for _ in range(count)]
    async with trainers(swarm, f"n{count}", tensors) as sessions:
        for i, own in enumerate(tensors):
            own["w"].fill_(float(i * count))  # the mean is a whole number times count / 2: exact
        results = await average(swarm, sessions)
    assert [result.participants for result in results] == [count] * count, str(results)
    assert tensors[0]["w"][0].item() == pytest.approx(count * (count - 1) / 2)
    assert same_bits(tensors)


async def test_a_second_peer_joins_a_run_of_one_within_a_window(swarm: LocalSwarm) -> None:
    old = {"w": torch.full((10,), 7.0)}
    async with trainers(swarm, "hermit", [old], nodes=[3]) as (hermit,):
        for _ in range(20):
            assert (await swarm.call(hermit.average)).status == "alone"
        assert hermit.version == 20
        new = {"w": torch.zeros(10)}
        async with trainers(swarm, "hermit", [new], nodes=[4]) as (newcomer,):
            assert new["w"].tolist() == [7.0] * 10
            results = await average(swarm, [hermit, newcomer])
            assert [result.group_size for result in results] == [2, 2], str(results)
            assert [result.version for result in results] == [21, 21]


async def test_many_rounds_that_fail_leave_no_trace(swarm: LocalSwarm) -> None:
    def weight() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    tensors = [{"w": torch.zeros(1000)} for _ in range(2)]
    async with trainers(swarm, "failing", tensors, nodes=[5, 6]) as sessions:
        before = (0, 0, 0)
        for turn in range(120):
            await average(swarm, sessions, timeout_s=0.002)
            if turn == 20:  # by now every pool has its threads and every link is up
                before = weight()

        def settled() -> bool:
            return all(now <= then + 3 for then, now in zip(before, weight(), strict=True))

        # The tasks of the last rounds end within their deadlines.
        await until(settled, timeout_s=30.0, what=f"{before}, before: {weight()}")
        # Each has waited for the other in vain for so long that it does not at first.
        for _ in range(5):
            results = await average(swarm, sessions)
            if results[0].group_size == 2:
                break
        assert [result.group_size for result in results] == [2, 2], str(results)
