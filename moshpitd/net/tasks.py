"""Tasks that are over when we say so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 6.0
"""Between two cancellations: what tidies up at the first one ends a p2pd, in at most 5 s, and shall
not be disturbed. A daemon gives its whole stop 10 s."""


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
