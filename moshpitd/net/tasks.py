"""Tasks that are over when we say so, and threads that let others go first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Any

AGAIN_S = 6.0
"""Between two cancellations: what tidies up at the first one ends a p2pd, in at most 5 s, and shall
not be disturbed. A daemon gives its whole stop 10 s."""

BEHIND = 3
"""Steps of nice, half the weight of a thread that has none: `status` in a round of 400 MB, 99th
percentile of some 100 calls, 0.07 s instead of 0.13 to 0.17; a round is not slower by itself, and
trainers on the same cores come first."""


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until all are done, whatever they end with.

    Once is not always enough: `asyncio.wait_for` up to Python 3.11 forgets a cancellation that
    arrives together with what it waits for, and hivemind's calls wait in it. A loop around such a
    call then goes on, and who waits for it waits for ever.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        over, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in over:
            if not task.cancelled():
                task.exception()  # asked for, or asyncio reports it when the task is collected


def give_way() -> None:
    """Let this thread have a processor after those that answer people and keep time, where a system
    has priorities for threads (Linux). For those that move values: there are several per peer, and
    on few cores a call of `status` waited for a turn of each of them.

    As a batch thread it also lets who runs go on when something arrives for it: who runs may hold
    the interpreter, and then everybody in that process waits for it to come back."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, thread, usual + BEHIND)
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # an operator may have chosen another
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
