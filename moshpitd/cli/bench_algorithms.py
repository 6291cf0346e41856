"""`bench algorithms`: every training algorithm on one small task, by steps and by seconds.

One rule: what is learned and what is sent is counted in a run with the shipped arithmetic and
codecs; seconds come from the cost model of `sim` for two networks, and are called modelled.

A step takes its compute, and for every round that it waits for the hops of that kind times the
latency, and its bytes at the busiest node's rate. A round that lands in a later step costs only
what it takes longer than a step's compute. Bytes are scaled from the small task to `--params`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moshpitd.sim.costs.net import Net

HOPS = {"average": 4, "exchange": 1, "meeting": 2, "store": 2}
"""In a row: a group average is a round trip for each phase, a neighbour's message is one way."""
RUN_S = 240.0
"""For one line: the slowest algorithm tries four learning rates, at about a second per 100 steps of
four trainers, several times that on a busy machine."""
HALF = 0.5
"""Of the steps: what the exact mean gradient gets in that time is the budget of seconds."""
YARDSTICK = "gradient-allreduce"
COLUMNS = (
    "algorithm", "network", "lr", "seed", "samples", "bytes_per_step", "busiest_node_bytes",
    "seconds_per_step", "loss_at_steps", "loss_at_seconds", "loss_std",
)  # fmt: skip


def algorithms(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    peers: Annotated[int, typer.Option(help="Trainers.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each trainer.")] = 200,
    seeds: Annotated[int, typer.Option(help="Runs at the best learning rate.")] = 3,
    params: Annotated[float, typer.Option(help="Parameters that bytes are scaled to.")] = 1e8,
    compute: Annotated[float, typer.Option(metavar="SECONDS", help="Compute of a step.")] = 0.5,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write rows there, and FILE.csv beside it."),
    ] = None,
) -> None:
    """Compare all training algorithms: bytes, modelled seconds on two networks, and losses."""
    from moshpitd.cli.bench_figures import check_writable, write_json
    from moshpitd.cli.bench_processes import START_S, check_range, processes, start_worker
    from moshpitd.cli.output import console

    check_range("--peers", peers, 2, 16)
    check_range("--steps", steps, 20, 100_000)
    check_range("--seeds", seeds, 1, 100)
    check_range("--params", params, 1e3, 1e12)
    check_range("--compute", compute, 0.0, 3600.0)
    check_writable(json_file)
    names = list(dict.fromkeys([YARDSTICK, *only])) if only else []
    arguments = ["-m", "moshpitd.testing.bench.algorithms", *(["--only", *names] if names else [])]
    for key, value in (("--peers", peers), ("--steps", steps), ("--seeds", seeds)):
        arguments += [key, str(value)]
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with processes() as (children, folder):
        worker = start_worker(children, "the algorithms' process", arguments, folder / "log")
        while (line := worker.hear(START_S + RUN_S * steps / 200)).get("event") != "end":
            if "error" in line:
                failed[line["algorithm"]] = line["error"]
            else:
                runs.append(line)
    report: dict[str, Any] = {
        "peers": peers,
        "steps": steps,
        "parameters": params,
        "compute_s": compute,
        "grid": _grid(runs),
        "failed": failed,
        "rows": rows_of(runs, params=params, compute_s=compute),
    }
    console().print(_table(report))
    console().print(_grid_table(report["grid"]))
    write_json(json_file, report)
    if json_file is not None:
        _write_csv(json_file.with_name(json_file.name + ".csv"), report["rows"])
    raise typer.Exit(1 if failed else 0)


def networks() -> tuple[Net, ...]:
    """Volunteers at home, and machines of one cloud in several regions (the two settings of the
    scaling table)."""
    from moshpitd.sim.costs.net import Net

    return (
        Net("volunteers", latency_s=0.04, up_bits_per_s=20e6, down_bits_per_s=100e6),
        Net("cloud", latency_s=0.025, up_bits_per_s=1e9),
    )


def rows_of(
    runs: Sequence[Mapping[str, Any]], *, params: float, compute_s: float
) -> list[dict[str, Any]]:
    """A row per algorithm, network and seed, for the runs at each one's best learning rate."""
    chosen = [run for run in runs if not run["tuning"]]
    ends: dict[str, list[float]] = {}
    for run in chosen:
        ends.setdefault(run["algorithm"], []).append(run["losses"][-1])
    rows = []
    for net in networks():
        yardstick = [run for run in chosen if run["algorithm"] == YARDSTICK]
        budget = 0.0
        if yardstick:
            each = seconds_per_step(yardstick[0], net, params=params, compute_s=compute_s)
            budget = HALF * yardstick[0]["steps"] * each
        for run in chosen:
            scale = params / run["parameters"]
            each = seconds_per_step(run, net, params=params, compute_s=compute_s)
            rows.append(
                {
                    "algorithm": run["algorithm"],
                    "network": net.name,
                    "lr": run["lr"],
                    "seed": run["seed"],
                    "samples": run["samples"],
                    "bytes_per_step": run["bytes_per_step"] * scale,
                    "busiest_node_bytes": run["busiest_node_bytes"] * scale,
                    "seconds_per_step": each,
                    "loss_at_steps": run["losses"][-1],
                    "loss_at_seconds": loss_at(run, budget / each),
                    "loss_std": statistics.pstdev(ends[run["algorithm"]]),
                }
            )
    return rows


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


def _grid(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What each learning rate came to, seed 0."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        if run["seed"] == 0:
            found.setdefault(run["algorithm"], {})[f"{run['lr']:g}"] = run["losses"][-1]
    return found


def _table(report: Mapping[str, Any]) -> Any:
    from moshpitd.cli.output import size, table

    heads = ("algorithm", "network", "lr #", "busiest node #", "s per step #")
    first: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        first.setdefault((row["network"], row["algorithm"]), []).append(row)
    lines = []
    for (network, name), rows in first.items():
        at_steps = statistics.fmean(row["loss_at_steps"] for row in rows)
        at_seconds = statistics.fmean(row["loss_at_seconds"] for row in rows)
        one = rows[0]
        lines.append(
            (
                name, network, f"{one['lr']:g}", size(one["busiest_node_bytes"]),
                f"{one['seconds_per_step']:.2f}", f"{at_steps:.3f}",
                f"{one['loss_std']:.3f}", f"{at_seconds:.3f}",
            )
        )  # fmt: skip
    for name, why in report["failed"].items():
        lines.append((name, "-", "-", "-", "-", "-", "-", why))
    title = (
        f"{report['steps']} steps of {report['peers']} trainers; bytes for "
        f"{report['parameters']:g} parameters, seconds modelled"
    )
    return table(title, (*heads, "loss at steps #", "std #", "at seconds #"), lines)


def _grid_table(grid: Mapping[str, Mapping[str, float]]) -> Any:
    from moshpitd.cli.output import table

    lines = [
        (name, ", ".join(f"{lr}: {loss:.3f}" for lr, loss in losses.items()))
        for name, losses in grid.items()
    ]
    return table("tuning with seed 0", ("algorithm", "learning rate: loss at the end"), lines)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
