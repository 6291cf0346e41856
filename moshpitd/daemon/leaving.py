"""The node's way out: what a drain waits for, until when, and why it began.

A drain may be asked for several times: by a notice of the cloud, a moment later by the SIGTERM that
follows it, and by an operator. One rule: it is one drain; the first reason is told, and the
earliest deadline holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from moshpitd.daemon.logs import log_event

log = logging.getLogger(__name__)


class Departing(Protocol):
    """What a drain needs of a run."""

    @property
    def name(self) -> str: ...

    async def depart(self, *, preempted: bool) -> None:
        """Begin nothing new; returns when nothing useful is left to do. When cancelled, it has said
        goodbye all the same."""
        ...

    def unfinished(self) -> str:
        """What keeps it, in words; empty when nothing does."""
        ...


class Leaving:
    """Invariant: `begun` stays set, and the deadline only comes closer."""

    def __init__(self, runs: Callable[[], Iterable[Departing]]) -> None:
        self.begun = asyncio.Event()
        self.why = ""
        self.preempted = False
        self._runs = runs
        self._ends_at = float("inf")
        self._timeout: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def left_s(self) -> float:
        """What is left of the budget; 0 when no drain has begun."""
        if not self.begun.is_set():
            return 0.0
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    def begin(self, budget_s: float, why: str, *, preempted: bool = False) -> bool:
        """Leave within `budget_s`; True if this began the drain, False if it runs already."""
        self._ends_at = min(self._ends_at, asyncio.get_running_loop().time() + budget_s)
        log_event(log, logging.INFO, "draining", reason=why, budget_s=round(budget_s, 1))
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._ends_at)
        if self._task is not None:
            return False
        self.why, self.preempted = why, preempted
        self.begun.set()
        self._task = asyncio.create_task(self._leave())
        return True

    async def over(self) -> None:
        """Wait for the end of the drain that `begin` began. Cancelling the wait leaves it alone."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Give up what is left of the drain."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _leave(self) -> None:
        runs = list(self._runs())
        try:
            async with asyncio.timeout_at(self._ends_at) as self._timeout:
                await asyncio.gather(*(run.depart(preempted=self.preempted) for run in runs))
        except TimeoutError:
            left = ", ".join(f"{run.name}: {run.unfinished()}" for run in runs if run.unfinished())
            log_event(log, logging.WARNING, "drain over budget, leaving", unfinished=left)
