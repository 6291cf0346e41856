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
SETTLED = 2
"""Rounds after which a daemon has all that it keeps between rounds: the donor's copy after the
first, the second array of each residual after the second."""
ALLOWANCE = 128 << 20
"""For what is in flight: buffers of links, accumulators that are open at once, scratch of threads,
rooms that wait for the next round."""
GROWTH = 16 << 20
"""Between two idle moments the allocator's arenas differ by a few MB; a leak of one part per round
and link would be more than this after ten rounds."""
STATUS_S = 0.05
STATUS_SAMPLES = 100
"""Below this the 99th percentile is the slowest answer of all."""


def idle_bytes(swarm: Swarm) -> list[int]:
    """A daemon's own memory (proportional, without mapped files) by daemon."""
    return [anonymous_bytes(pid) for pid in _pids(swarm)]


def watched(swarm: Swarm, number: int, settled: list[int]) -> dict[str, Any]:
    """One more round: memory at rest and at its peak by daemon, what of it has a name, and the
    seconds of every `status` in it. `settled` is `idle_bytes` after SETTLED rounds, or empty."""
    pids = _pids(swarm)
    ask_all(swarm.trainers, "fill", round=number)
    idle = idle_bytes(swarm)
    peak, answers = list(idle), []
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
    return {
        "idle_anonymous_bytes": idle,
        "peak_anonymous_bytes": peak,
        "settled_anonymous_bytes": settled,
        "residual_bytes": [_residual_bytes(node.status()) for node in swarm.nodes],
        "status_seconds": answers,
    }


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
    if memory["settled_anonymous_bytes"]:
        grown = [
            now - then
            for then, now in zip(
                memory["settled_anonymous_bytes"], memory["idle_anonymous_bytes"], strict=True
            )
        ]
        bars.append(Bar("memory grown over the rounds, MB", max(grown) / 1e6, GROWTH / 1e6))
    answers = sorted(memory["status_seconds"])
    if len(answers) >= STATUS_SAMPLES:
        slow = answers[int(len(answers) * 0.99)]
        bars.append(Bar("status in a round, 99th percentile, s", slow, STATUS_S))
    return bars


def _pids(swarm: Swarm) -> list[int]:
    return [node.daemon.process.pid for node in swarm.nodes if node.daemon is not None]


def _residual_bytes(status: Any) -> int:
    return sum(int(run.residual_bytes) for run in status.runs) if status is not None else 0
