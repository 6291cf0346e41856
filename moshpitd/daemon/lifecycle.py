"""From `moshpitd run` to the exit code: signals, drain, stop.

One rule: however it ends, `stop` has run and the exit code says whose turn it is: 0 left as asked,
2 the operator's, 70 ours (the supervisor restarts it).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import uvloop

from moshpitd.daemon.logs import log_event
from moshpitd.errors import ConfigError

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
STOP_BUDGET_S = 10.0  # a stop that hangs longer is abandoned: the kernel frees what is left
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Runnable(Protocol):
    """What `serve` needs of a node.

    `wait` returns when the node has ended by itself (drained through the API or by a notice of the
    cloud) and raises what broke it; `drain` returns when nothing useful is left to do or the budget
    is used up, and joins a drain that runs already; `stop` may be called in any state, also after a
    start that failed or was cancelled.
    """

    async def start(self) -> None: ...
    async def wait(self) -> None: ...
    async def drain(self, budget_s: float, why: str) -> None: ...
    async def stop(self) -> None: ...


def run(make_node: Callable[[], Runnable], *, drain_budget_s: float) -> int:
    """Run one node on an event loop of its own until it ends; returns the exit code.

    `make_node` is called on the loop. A `ConfigError` is the caller's to show; all else is logged.
    """

    async def life() -> int:
        return await serve(make_node(), drain_budget_s=drain_budget_s)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(life())


async def serve(node: Runnable, *, drain_budget_s: float) -> int:
    """Start `node`, wait for its end or a signal, drain, stop.

    The first SIGTERM or SIGINT drains within `drain_budget_s`, the second stops now; during the
    start the first one stops, because there is nothing to finish yet.
    """
    signals = _Signals()
    with signals.caught():
        try:
            if not await _unless(signals.first, node.start()):
                log_event(log, logging.INFO, "stopped before the start was complete")
                return EXIT_OK
            if await _unless(signals.first, node.wait()):
                return EXIT_OK
            log_event(log, logging.INFO, "asked to leave", signal=signals.name)
            drained = _within(node.drain(drain_budget_s, signals.name), drain_budget_s)
            if not await _unless(signals.second, drained):
                log_event(log, logging.WARNING, "second signal: stopping without a drain")
            return EXIT_OK
        except ConfigError:
            raise
        except Exception:
            log.exception("the daemon ends: a fault of its own")
            return EXIT_INTERNAL
        finally:
            await _stop(node)


class _Signals:
    """Counts signals. Invariant: `first` is set before `second`, and both stay set."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""

    def caught(self) -> contextlib.AbstractContextManager[object]:
        loop = asyncio.get_running_loop()
        stack = contextlib.ExitStack()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._arrived, number)
            stack.callback(loop.remove_signal_handler, number)
        return stack

    def _arrived(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        else:
            self.name = number.name
            self.first.set()


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` to its end (True), unless `event` is set first: then cancel it (False)."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, alarm), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for one in (task, alarm):
            one.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)


async def _within(drain: Coroutine[Any, Any, None], budget_s: float) -> None:
    """A drain keeps its own budget; this is for one that does not."""
    try:
        await asyncio.wait_for(drain, budget_s + 1.0)
    except TimeoutError:
        log_event(log, logging.WARNING, "drain over budget, stopping", budget_s=budget_s)


async def _stop(node: Runnable) -> None:
    """Stop, and never let a fault in it hide the error that led here."""
    try:
        await asyncio.wait_for(node.stop(), STOP_BUDGET_S)
    except TimeoutError:
        log_event(log, logging.ERROR, "stop took too long, leaving", budget_s=STOP_BUDGET_S)
        # Returning would join the very threads that hang. Locks, sockets and p2pd go with us.
        logging.shutdown()
        os._exit(EXIT_INTERNAL)
    except Exception:
        log.exception("stop failed")
