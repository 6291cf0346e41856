"""Tasks that shall end, also those that lose a cancellation; threads that let others go first."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from moshpitd.net import tasks
from moshpitd.net.tasks import BEHIND, ended, give_way


async def test_a_task_that_loses_a_cancellation_ends_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.01)
    lost = 0

    async def asks_for_ever() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    task = asyncio.create_task(asks_for_ever())
    await asyncio.sleep(0)
    await ended([task])
    assert task.cancelled()
    assert lost == 2


async def test_what_tidies_up_is_left_to_it() -> None:
    tidied = asyncio.Event()

    async def tidies() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            tidied.set()

    async def fails() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("as it ends")

    both = [asyncio.create_task(tidies()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    await ended(both)
    assert tidied.is_set()
    assert all(task.done() for task in both)
    await ended(both)  # and nothing, once they are
    await ended([])


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")
def test_only_the_thread_that_asks_gives_way() -> None:
    found: list[int] = []
    policies: list[int] = []

    def look() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        policies.append(os.sched_getscheduler(0))

    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    policy = os.sched_getscheduler(0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    process = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [min(19, process + BEHIND)]
    assert policies == [os.SCHED_BATCH if policy == os.SCHED_OTHER else policy]
    assert os.sched_getscheduler(0) == policy
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == usual
