"""`bench algorithms`: every training algorithm on one small task, by steps and by seconds.

One rule: what is learned is counted in a run with the shipped arithmetic and codecs, the same
initial parameters, batches and samples for all; what a step takes is measured on real daemons at
two emulated networks. Where there can be none it comes from the cost model of `sim`, and every row
says which (`seconds_from`).
"""

from __future__ import annotations

import csv
import select
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.bench_algorithms_network import Cell, Plan
    from moshpitd.cli.bench_processes import Worker
    from moshpitd.sim.costs.net import Net

RUN_S = 240.0
"""For one line: the slowest algorithm tries four learning rates, at about a second per 100 steps of
four trainers, several times that on a busy machine."""
PROCESSES = 2  # that make the losses: one per core of the smallest machine that benches run on


def algorithms(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    networks: Annotated[
        str, typer.Option(metavar="NAMES", help="Which, with commas between.")
    ] = "lan,wan",
    modelled: Annotated[
        bool, typer.Option("--modelled", help="Do not measure: seconds from the cost model.")
    ] = False,
    peers: Annotated[int, typer.Option(help="Trainers.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each trainer, for the losses.")] = 200,
    seeds: Annotated[int, typer.Option(help="Runs at the best learning rate.")] = 3,
    timed: Annotated[int, typer.Option(help="Steps that are timed on the daemons.")] = 16,
    params: Annotated[float, typer.Option(help="Parameters of the model that is timed.")] = 250e3,
    compute: Annotated[float, typer.Option(metavar="SECONDS", help="Of a gradient.")] = 0.1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Compare all training algorithms: bytes and seconds on two networks, and losses."""
    from moshpitd.cli.bench_algorithms_network import Plan
    from moshpitd.cli.bench_algorithms_rows import grid_of, rows_of
    from moshpitd.cli.bench_figures import check_writable, load, write_json
    from moshpitd.cli.bench_processes import check_range
    from moshpitd.cli.output import console, text

    check_range("--peers", peers, 2, 16)
    check_range("--steps", steps, 20, 100_000)
    check_range("--seeds", seeds, 1, 100)
    check_range("--timed", timed, 8, 10_000)
    check_range("--params", params, 1e3, 1e8)
    check_range("--compute", compute, 0.0, 60.0)
    check_writable(json_file)
    check_writable(csv_file)
    nets = _nets(networks)
    plan = Plan(peers, int(params), steps=timed, of=steps, compute_s=compute)
    before, out = load(), console()
    why_not = _why_not(modelled)
    if why_not:
        out.print(text(f"seconds are modelled: {why_not}", "yellow"))
    with _bar() as bar:
        runs, failed = _losses(only or (), peers=peers, steps=steps, seeds=seeds, bar=bar)
        able = list(dict.fromkeys(run["algorithm"] for run in runs))
        cells = {} if why_not else _cells(nets, able, plan, failed, bar)
    report: dict[str, Any] = {
        "peers": peers,
        "steps": steps,
        "timed_steps": timed,
        "parameters": plan.params,
        "compute_s": compute,
        "networks": [_told(net) for net in nets],
        "not_measured": why_not,
        "load": {"before": before, "after": load()},
        "grid": grid_of(runs),
        "failed": failed,
        "measured": [
            {"network": net, "algorithm": name, **asdict(cell)}
            for (net, name), cell in cells.items()
        ],
        "rows": rows_of(runs, nets, cells, params=plan.params, compute_s=compute),
    }
    for net in nets:
        out.print(_table(report, net))
    for what, why in failed.items():
        out.print(text(f"{what}: {why}", "red"))
    out.print(_grid_table(report["grid"]))
    out.print(f"load {before:.1f} before, {report['load']['after']:.1f} after")
    write_json(json_file, report)
    if csv_file is not None:
        _write_csv(csv_file, report["rows"])
    raise typer.Exit(1 if failed else 0)


def _nets(chosen: str) -> list[Net]:
    from moshpitd.cli.bench_algorithms_network import networks

    known = {net.name: net for net in networks()}
    words = list(dict.fromkeys(filter(None, chosen.split(","))))
    for word in words or [chosen]:
        if word not in known:
            raise ConfigError(
                f"unknown network {word!r}", key="--networks", expected=", ".join(known)
            )
    return [known[word] for word in words]


def _why_not(modelled: bool) -> str:
    from moshpitd.cli.namespaces import missing

    if modelled:
        return "asked for"
    reason = missing()
    return f"no network namespaces here: {reason}" if reason else ""


def _bar() -> Any:
    """On stderr, so that what is printed on stdout can be piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _losses(
    only: Sequence[str], *, peers: int, steps: int, seeds: int, bar: Any
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All runs, in the order of the table, and who failed, why. Always with the one whose time is
    the budget of seconds."""
    from moshpitd.cli.bench_algorithms_rows import YARDSTICK
    from moshpitd.cli.bench_processes import START_S, processes, start_worker

    task = bar.add_task("losses", total=None)
    lines: list[dict[str, Any]] = []
    with processes() as (children, folder):
        workers = []
        for index in range(PROCESSES):
            arguments = ["-m", "moshpitd.testing.bench.algorithms"]
            arguments += ["--only", YARDSTICK, *only] if only else []
            arguments += ["--share", str(index), str(PROCESSES), "--peers", str(peers)]
            arguments += ["--steps", str(steps), "--seeds", str(seeds)]
            name = f"process {index} of the losses"
            workers.append(start_worker(children, name, arguments, folder / f"{index}.log"))
        told, *_ = [worker.hear(START_S) for worker in workers]
        if told["unknown"]:
            raise ConfigError(
                f"unknown algorithm {told['unknown'][0]!r}", key="--only",
                expected=", ".join(told["known"]),
            )  # fmt: skip
        names = told["chosen"]
        bar.update(task, total=len(names))
        for line in _heard(workers, RUN_S * max(1.0, steps / 200)):
            lines.append(line)
            bar.update(task, completed=len({line["algorithm"] for line in lines}))
    failed = {line["algorithm"]: line["error"] for line in lines if "error" in line}
    runs = [line for line in lines if "error" not in line]
    return sorted(runs, key=lambda run: names.index(run["algorithm"])), failed


def _heard(workers: Sequence[Worker], patience_s: float) -> Iterator[dict[str, Any]]:
    """What they tell, as it comes, until all have ended."""
    left = list(workers)
    while left:
        for worker in left:
            while (line := worker.heard()) is not None:  # what came along with the one before
                if line.get("event") == "end":
                    break
                yield line
            if line is not None:
                left.remove(worker)
                break
        else:
            descriptors = [worker.fileno for worker in left]
            ready, _, _ = select.select(descriptors, [], [], patience_s)
            if not ready:
                left[0].hear(0.0)  # nobody said anything for so long: it says so


def _cells(
    nets: Sequence[Net], names: Sequence[str], plan: Plan, failed: dict[str, str], bar: Any
) -> dict[tuple[str, str], Cell]:
    from moshpitd.cli.bench_algorithms_network import measure

    cells: dict[tuple[str, str], Cell] = {}
    for net in nets:
        task = bar.add_task(f"steps on {net.name}", total=len(names))

        def told(name: str, cell: Cell | str, net: Net = net, task: Any = task) -> None:
            if isinstance(cell, str):
                failed[f"{name} on {net.name}"] = cell
            else:
                cells[net.name, name] = cell
            bar.advance(task)

        measure(net, names, plan, told)
    return cells


def _told(net: Net) -> dict[str, Any]:
    return {
        "network": net.name,
        "up_mbps": net.up_bits_per_s / 1e6,
        "down_mbps": (net.down_bits_per_s or net.up_bits_per_s) / 1e6,
        "delay_s": net.latency_s,
    }


def _table(report: Mapping[str, Any], net: Net) -> Any:
    from moshpitd.cli.output import size, table

    heads = (
        "algorithm", "lr #", "sent per step #", "busiest node #", "s per step #", "",
        "loss at steps #", "std #", "at seconds #",
    )  # fmt: skip
    first: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if row["network"] == net.name:
            first.setdefault(row["algorithm"], []).append(row)
    lines = []
    for name, rows in first.items():
        at_steps = statistics.fmean(row["loss_at_steps"] for row in rows)
        at_seconds = statistics.fmean(row["loss_at_seconds"] for row in rows)
        one = rows[0]
        lines.append(
            (
                name, f"{one['lr']:g}", size(one["bytes_per_step"]),
                size(one["busiest_node_bytes"]), f"{one['seconds_per_step']:.3f}",
                one["seconds_from"], f"{at_steps:.3f}", f"{one['loss_std']:.3f}",
                f"{at_seconds:.3f}",
            )
        )  # fmt: skip
    told = _told(net)
    title = (
        f"{net.name}: {told['up_mbps']:g} Mbit/s up, {told['down_mbps']:g} down, "
        f"{told['delay_s'] * 1e3:g} ms one way; {report['peers']} trainers, "
        f"{report['parameters']:,} parameters, gradients of {report['compute_s']:g} s; losses "
        f"after {report['steps']} steps"
    )
    return table(title, heads, lines)


def _grid_table(grid: Mapping[str, Mapping[str, float]]) -> Any:
    from moshpitd.cli.output import table

    lines = [
        (name, ", ".join(f"{lr}: {loss:.3f}" for lr, loss in losses.items()))
        for name, losses in grid.items()
    ]
    return table("tuning with seed 0", ("algorithm", "learning rate: loss at the end"), lines)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from moshpitd.cli.bench_algorithms_rows import COLUMNS

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
