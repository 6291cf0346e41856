"""What people are shown, as plain values with the names of the API's messages. One rule: status,
the page and the command line read these functions only, so that they cannot disagree."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from moshpitd.core.outcome import Status
from moshpitd.daemon.history import RoundLine
from moshpitd.daemon.metrics import NodeMetrics
from moshpitd.daemon.runs import Run


def run_view(run: Run, idle: tuple[float, float]) -> dict[str, Any]:
    """The fields of RunStatus; `idle` as of `Roster.idle`."""
    peer, outcomes = run.driver.peer, run.history.outcomes
    layout, lines = run.layout, run.history.lines
    return {
        "run": run.name,
        "version": peer.version,
        "trainers": len(run.trainers),
        "peers": sum(1 for _, _, state, _ in peer.peers() if state != "lost"),
        "phase": peer.phase,
        "round": peer.round,
        "grid": list(peer.shape),
        "coordinates": list(peer.coordinates),
        "schema": layout.schema_digest.hex() if layout is not None else "",
        "codec": run.codec,
        "last_outcome": _outcome(lines[-1]) if lines else "",
        "rounds_complete": outcomes[Status.COMPLETE],
        "rounds_partial": outcomes[Status.PARTIAL],
        "rounds_alone": outcomes[Status.ALONE],
        "rounds_failed": outcomes[Status.FAILED],
        "founder": peer.lineage.founder,
        "residual_bytes": sum(run.residual_bytes().values()),
        "contributions": [
            {"peer_id": peer_id, "codec": one.codec, "reason": one.reason, "detail": one.detail}
            for peer_id, one in run.choices().items()
        ],
        "parameters": sum(spec.numel for spec in layout.specs) if layout is not None else 0,
        "idle_s": idle[0],
        "forgotten_in_s": idle[1],
    }


def peer_views(run: Run, now: float) -> list[dict[str, Any]]:
    """The fields of PeerLine for everybody that this run knows; `now` is the loop's time."""
    swarm = run.driver.peer.state.swarm
    return [
        {
            "run": run.name,
            "peer_id": record.peer_id,
            "state": state,
            "version": record.version,
            "round": record.round,
            "coordinates": list(record.coordinates),
            "addresses": list(record.addresses),
            "heard_s": max(0.0, now - heard_at),
            "strikes": swarm.strikes(record.peer_id, now),
            "note": note,
        }
        for record, heard_at, state, note in run.driver.peer.peers()
    ]


def round_views(runs: Iterable[Run], last: int = 0) -> list[dict[str, Any]]:
    """The fields of RoundLine for the last rounds of these runs together, oldest first; `last` 0:
    all that are kept."""
    now = time.monotonic()
    lines = sorted(
        ((line, run.name) for run in runs for line in run.history.lines),
        key=lambda entry: entry[0].ended_at,
    )
    return [
        {
            "run": name,
            "round": line.round,
            "status": line.status,
            "reason": line.reason,
            "group_size": line.group_size,
            "participants": line.participants,
            "version": line.version,
            "seconds": line.seconds,
            "phases": dict(line.phases),
            "bytes_sent": line.bytes_sent,
            "bytes_received": line.bytes_received,
            "excluded": [{"peer_id": peer, "reason": why} for peer, why in line.excluded],
            "group_id": line.group_id,
            "ago_s": max(0.0, now - line.ended_at),
            "detail": line.detail,
        }
        for line, name in lines[-last if last else 0 :]
    ]


def set_gauges(metrics: NodeMetrics, run: Run) -> None:
    """How the run is now, for Prometheus."""
    peer = run.driver.peer
    metrics.set_trainers(run.name, len(run.trainers))
    metrics.set_peers(run.name, Counter(state for _, _, state, _ in peer.peers()))
    metrics.set_residual_bytes(run.name, run.residual_bytes())
    metrics.set_choices(run.name, run.choices().values())
    median, _ = peer.state.swarm.median_version(peer.version, peer.lineage, peer.record.schema)
    metrics.set_version(run.name, peer.version, lag=max(0, median - peer.version))


def software() -> str:
    """The version of this package."""
    try:
        return metadata.version("moshpitd")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a source tree that was never installed


def _outcome(line: RoundLine) -> str:
    return f"{line.status} ({line.reason})" if line.reason else line.status
