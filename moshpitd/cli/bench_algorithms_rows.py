"""From runs and measured steps to the rows of `bench algorithms`.

One rule: plain arithmetic on what was told; a row says where its seconds and bytes come from.

Without a measurement (`modelled`) a step takes its compute, and for every round that it waits for
the hops of that kind times the latency, and its bytes at the busiest node's rate. A round that
lands in a later step costs only what it takes longer than a step's compute. Bytes are scaled from
the small task.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moshpitd.cli.bench_algorithms_network import Cell
    from moshpitd.sim.costs.net import Net

HOPS = {"average": 4, "exchange": 1, "meeting": 2, "store": 2}
"""In a row: a group average is a round trip for each phase, a neighbour's message is one way."""
HALF = 0.5
"""Of the steps: what the exact mean gradient gets in that time is the budget of seconds."""
YARDSTICK = "gradient-allreduce"
MEASURED, MODELLED = "measured", "modelled"
COLUMNS = (
    "algorithm", "network", "lr", "seed", "samples", "bytes_per_step", "busiest_node_bytes",
    "seconds_per_step", "seconds_from", "loss_at_steps", "loss_at_seconds", "loss_std",
)  # fmt: skip


def rows_of(
    runs: Sequence[Mapping[str, Any]],
    nets: Sequence[Net],
    cells: Mapping[tuple[str, str], Cell],
    *,
    params: float,
    compute_s: float,
) -> list[dict[str, Any]]:
    """A row per algorithm, network and seed, for the runs at each one's best learning rate. `cells`
    by (network, algorithm)."""
    chosen = [run for run in runs if not run["tuning"]]
    ends: dict[str, list[float]] = {}
    for run in chosen:
        ends.setdefault(run["algorithm"], []).append(run["losses"][-1])
    rows = []
    for net in nets:
        steps = {
            run["algorithm"]: step_of(
                run, net, cells.get((net.name, run["algorithm"])), params=params,
                compute_s=compute_s,
            )
            for run in chosen
        }  # fmt: skip
        yardstick = next((run for run in chosen if run["algorithm"] == YARDSTICK), None)
        budget = 0.0
        if yardstick is not None:
            budget = HALF * yardstick["steps"] * steps[YARDSTICK]["seconds_per_step"]
        for run in chosen:
            step = steps[run["algorithm"]]
            row = {
                "algorithm": run["algorithm"],
                "network": net.name,
                "lr": run["lr"],
                "seed": run["seed"],
                "samples": run["samples"],
                **step,
                "loss_at_steps": run["losses"][-1],
                "loss_at_seconds": loss_at(run, budget / step["seconds_per_step"]),
                "loss_std": statistics.pstdev(ends[run["algorithm"]]),
            }
            rows.append({key: row[key] for key in COLUMNS})
    return rows


def step_of(
    run: Mapping[str, Any], net: Net, cell: Cell | None, *, params: float, compute_s: float
) -> dict[str, Any]:
    """Bytes and seconds of a step, and where they come from."""
    if cell is not None:
        return {
            "bytes_per_step": cell.bytes_per_step,
            "busiest_node_bytes": cell.busiest_node_bytes,
            "seconds_per_step": cell.seconds_per_step,
            "seconds_from": MEASURED,
        }
    scale = params / run["parameters"]
    return {
        "bytes_per_step": run["bytes_per_step"] * scale,
        "busiest_node_bytes": run["busiest_node_bytes"] * scale,
        "seconds_per_step": seconds_per_step(run, net, params=params, compute_s=compute_s),
        "seconds_from": MODELLED,
    }


def seconds_per_step(run: Mapping[str, Any], net: Net, *, params: float, compute_s: float) -> float:
    """Modelled, in the mean over steps. Bytes go with the rounds that are hidden where there are
    any: what such algorithms wait for are comparisons of a few bytes."""
    size: float = run["busiest_node_bytes"] * params / run["parameters"]
    carried = net.bandwidth_s(size, size)
    waited: float = sum(rate * HOPS[kind] for kind, rate in run["waited"].items()) * net.latency_s
    if not run["hidden"]:
        return compute_s + waited + carried
    rounds: float = sum(run["hidden"].values())
    hops: float = sum(rate * HOPS[kind] for kind, rate in run["hidden"].items())
    one = (hops * net.latency_s + carried) / rounds
    return compute_s + waited + rounds * max(0.0, one - compute_s)


def loss_at(run: Mapping[str, Any], step: float) -> float:
    """Between two points of the curve; its last one for whoever had more time than steps."""
    losses: Sequence[float] = run["losses"]
    at: float = step / run["steps"] * (len(losses) - 1)
    if at >= len(losses) - 1:
        return losses[-1]
    low = int(at)
    return losses[low] + (at - low) * (losses[low + 1] - losses[low])


def grid_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What each learning rate came to, seed 0."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        if run["seed"] == 0:
            found.setdefault(run["algorithm"], {})[f"{run['lr']:g}"] = run["losses"][-1]
    return found
