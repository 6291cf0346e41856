"""What a round costs a daemon beside time: memory of its own, and how soon it answers `status`.

One rule: the round that is looked at is not timed, because looking costs the looked-at.
"""

from __future__ import annotations

import time
from typing import Any

from moshpitd.cli.bench_figures import Bar
from moshpitd.cli.bench_meters import anonymous_bytes
from moshpitd.cli.bench_processes import Swarm, ask_all
from moshpitd.cli.bench_systems import CALL_TIMEOUT_S

SAMPLE_S = 0.02
SETTLED = 5
"""Rounds after which a daemon has all that it keeps between rounds: the donor's copy, rooms that
come back, scratch of its threads, the allocator's arenas. Most of it comes in the first two."""
GROWING = 5
"""Rounds after that in which it may not grow; with fewer, nothing is said."""
ALLOWANCE = 128 << 20
"""For what is in flight: buffers of links, accumulators that are open at once, scratch of threads,
rooms that wait for the next round."""
GROWTH = 16 << 20
"""Between two idle moments the allocator's arenas differ by a few MB; a leak of one part per round
and link would be more than this after ten rounds."""
STATUS_S = 0.05
STATUS_SAMPLES = 100
"""Below this the 99th percentile is the slowest answer of all."""
WATCHED_MAX = 8
"""Rounds: of tiny tensors, where one is over before the first look, not for ever."""


def at_rest(swarm: Swarm) -> list[int]:
    """By daemon: its own memory (without mapped files), without residuals. Those grow up to their
    stated size as parts change their reducers."""
    return [
        anonymous_bytes(pid) - _residual_bytes(node.status())
        for node, pid in zip(swarm.nodes, _pids(swarm), strict=True)
    ]


def watched(swarm: Swarm, number: int, settled: list[int]) -> dict[str, Any]:
    """Further rounds from `number` on: memory at rest and at its peak by daemon, what of it has a
    name, and the seconds of every `status` in them; as many rounds as the percentile needs.
    `settled` is `at_rest` after SETTLED rounds, or empty."""
    ask_all(swarm.trainers, "fill", round=number)
    rest = at_rest(swarm)
    idle = [anonymous_bytes(pid) for pid in _pids(swarm)]
    peak, answers = list(idle), list[float]()
    for turn in range(WATCHED_MAX):
        if turn:
            ask_all(swarm.trainers, "fill", round=number + turn)
        _watch(swarm, peak, answers)
        if len(answers) >= STATUS_SAMPLES:
            break
    return {
        "idle_anonymous_bytes": idle,
        "peak_anonymous_bytes": peak,
        "grown_bytes": [now - then for then, now in zip(settled, rest, strict=False)],
        "residual_bytes": [_residual_bytes(node.status()) for node in swarm.nodes],
        "status_seconds": answers,
    }


def _watch(swarm: Swarm, peak: list[int], answers: list[float]) -> None:
    """One round, looked at all the time."""
    pids = _pids(swarm)
    swarm.average(timeout_s=CALL_TIMEOUT_S)
    left = list(swarm.trainers)
    until = time.monotonic() + CALL_TIMEOUT_S + 30.0
    while left and time.monotonic() < until:
        for place, pid in enumerate(pids):
            peak[place] = max(peak[place], anonymous_bytes(pid))
        for node in swarm.nodes:
            began = time.monotonic()
            if node.status() is not None:
                answers.append(time.monotonic() - began)
        left = [trainer for trainer in left if trainer.heard(SAMPLE_S / len(left)) is None]


def memory_bars(memory: dict[str, Any], *, bucket: int, payload: int, peers: int) -> list[Bar]:
    """`bucket` and `payload`: bytes of all parts, as values and as they travel."""
    bars = []
    kept = bucket / peers + payload / peers + ALLOWANCE
    beyond = [
        (peak - idle) / (kept + residuals)
        for idle, peak, residuals in zip(
            memory["idle_anonymous_bytes"],
            memory["peak_anonymous_bytes"],
            memory["residual_bytes"],
            strict=True,
        )
    ]
    bars.append(
        Bar("peak memory of a round, of bucket/n + results + residuals + 128 MiB", max(beyond), 1.0)
    )
    if memory["grown_bytes"]:
        grown = max(memory["grown_bytes"]) / 1e6
        bars.append(Bar("memory grown over the rounds, MB", grown, GROWTH / 1e6))
    answers = sorted(memory["status_seconds"])
    if len(answers) >= STATUS_SAMPLES:
        slow = answers[int(len(answers) * 0.99)]
        bars.append(Bar("status in a round, 99th percentile, s", slow, STATUS_S))
    return bars


def _pids(swarm: Swarm) -> list[int]:
    return [node.daemon.process.pid for node in swarm.nodes if node.daemon is not None]


def _residual_bytes(status: Any) -> int:
    return sum(int(run.residual_bytes) for run in status.runs) if status is not None else 0
