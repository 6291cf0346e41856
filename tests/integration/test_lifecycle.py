"""Signals, drain and exit codes: `serve` with a stand-in node and signals to this process, and one
real process for what ends a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from moshpitd.daemon import lifecycle
from moshpitd.daemon.lifecycle import EXIT_INTERNAL, EXIT_OK, serve
from moshpitd.errors import ConfigError, InternalError


def kill(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


class StandIn:
    """A node whose every phase does what the test says, and remembers the order."""

    def __init__(self, **phases: Callable[[], object]) -> None:
        self.phases = phases
        self.seen: list[str] = []

    async def _do(self, phase: str) -> None:
        self.seen.append(phase)
        action = self.phases.get(phase)
        outcome = action() if action else None
        if asyncio.iscoroutine(outcome):
            try:
                await outcome
            except asyncio.CancelledError:
                self.seen.append(f"{phase} cancelled")
                raise

    async def start(self) -> None:
        await self._do("start")

    async def wait(self) -> None:
        await self._do("wait")

    async def drain(self, budget_s: float, why: str) -> None:
        await self._do("drain")

    async def stop(self) -> None:
        await self._do("stop")


async def forever() -> None:
    await asyncio.Event().wait()


async def signalled(*numbers: signal.Signals) -> None:
    for number in numbers:
        kill(number)
    await forever()


def broken(error: Exception) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


async def test_a_node_that_ends_by_itself_is_stopped_and_exits_0() -> None:
    node = StandIn()
    assert await serve(node, drain_budget_s=1) == EXIT_OK
    assert node.seen == ["start", "wait", "stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    node = StandIn(wait=lambda: signalled(number))
    assert await serve(node, drain_budget_s=1) == EXIT_OK
    assert node.seen == ["start", "wait", "wait cancelled", "drain", "stop"]


async def test_the_second_signal_stops_at_once() -> None:
    node = StandIn(wait=lambda: signalled(signal.SIGTERM), drain=lambda: signalled(signal.SIGINT))
    assert await asyncio.wait_for(serve(node, drain_budget_s=3600), 10) == EXIT_OK
    assert node.seen[-3:] == ["drain", "drain cancelled", "stop"]


async def test_a_signal_during_the_start_stops_without_a_drain() -> None:
    node = StandIn(start=lambda: signalled(signal.SIGTERM))
    assert await serve(node, drain_budget_s=1) == EXIT_OK
    assert node.seen == ["start", "start cancelled", "stop"]


async def test_a_drain_that_forgets_its_budget_is_ended() -> None:
    node = StandIn(wait=lambda: signalled(signal.SIGTERM), drain=forever)
    assert await asyncio.wait_for(serve(node, drain_budget_s=0.01), 10) == EXIT_OK
    assert node.seen[-2:] == ["drain cancelled", "stop"]


async def test_a_config_error_of_the_start_is_the_caller_s_to_show() -> None:
    node = StandIn(start=broken(ConfigError("port 1 is in use", key="http.port")))
    with pytest.raises(ConfigError):
        await serve(node, drain_budget_s=1)
    assert node.seen == ["start", "stop"]


@pytest.mark.parametrize("error", [InternalError("broken invariant"), ZeroDivisionError()])
@pytest.mark.parametrize("phase", ["start", "wait", "drain"])
async def test_our_own_fault_is_logged_and_exits_70(
    error: Exception, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    phases: dict[str, Callable[[], object]] = {"wait": lambda: signalled(signal.SIGTERM)}
    node = StandIn(**(phases | {phase: broken(error)}))
    assert await serve(node, drain_budget_s=1) == EXIT_INTERNAL
    assert node.seen[-1] == "stop"
    assert type(error).__name__ in caplog.text


async def test_a_stop_that_fails_does_not_hide_how_it_ended() -> None:
    node = StandIn(stop=broken(RuntimeError("stop")))
    assert await serve(node, drain_budget_s=1) == EXIT_OK
    node = StandIn(start=broken(ConfigError("x")), stop=broken(RuntimeError("stop")))
    with pytest.raises(ConfigError):
        await serve(node, drain_budget_s=1)


async def test_the_signal_handlers_are_taken_away_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    await serve(StandIn(), drain_budget_s=1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_makes_the_node_on_a_uvloop() -> None:
    loops: list[str] = []

    def make() -> StandIn:
        loops.append(type(asyncio.get_running_loop()).__module__)
        return StandIn()

    assert lifecycle.run(make, drain_budget_s=1) == EXIT_OK
    assert loops == ["uvloop"]


HANGING = """
import asyncio, sys, threading
from moshpitd.daemon import lifecycle
lifecycle.STOP_BUDGET_S = 0.1
class Node:
    async def start(self):
        threading.Thread(target=threading.Event().wait).start()  # never joined
    async def wait(self): print("up", flush=True); await asyncio.Event().wait()
    async def drain(self, budget_s, why): pass
    async def stop(self): await asyncio.Event().wait()
sys.exit(lifecycle.run(Node, drain_budget_s=1))
"""


def test_a_stop_that_hangs_ends_the_process_all_the_same() -> None:
    argv = [sys.executable, "-c", HANGING]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "up\n"
        node.terminate()
        _, errors = node.communicate(timeout=20)
    assert node.returncode == EXIT_INTERNAL
    assert "stop took too long" in errors
