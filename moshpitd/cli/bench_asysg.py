"""`bench asysg`: two trainers of one node on shared memory, against one: seconds to the same loss.

One rule: every trainer has a core of its own and one thread; the daemon, which only made the file,
may run anywhere. The two are measured in turn, so that other load meets both.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.output import console, table
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.bench_processes import Worker

BAR = 1.6
HEADSTART_S = 0.2  # from telling the trainers until they begin together
ANSWER_S = 300.0  # computing hundreds of losses on a busy machine
TRAINER = "moshpitd.testing.bench.hogwild"


def asysg(
    pairs: Annotated[int, typer.Option(min=1, help="How often one, then two are measured.")] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long each trains.")] = 10.0,
    target: Annotated[
        float, typer.Option(min=0.001, max=0.99, help="The loss to meet, of that at the start.")
    ] = 0.1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there.")
    ] = None,
) -> None:
    """Seconds to a fixed loss with AsySG-incon: two trainers against one, on two cores."""
    from moshpitd.cli.bench_figures import check_writable, write_json
    from moshpitd.cli.bench_processes import processes

    check_writable(json_file)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(f"this process may use {len(cores)} core", expected="two or more")
    before = os.getloadavg()
    with processes() as (children, folder):
        workers = _workers(children, folder, cores)
        measured = [
            (_time_of(workers[:1], f"one-{k}", seconds, target),
             _time_of(workers, f"two-{k}", seconds, target))
            for k in range(pairs)
        ]  # fmt: skip
        for worker in workers:
            worker.close()
    report = _report(measured, target)
    report["load"] = {"before": list(before), "after": list(os.getloadavg())}
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if report["passed"] else 1)


def _workers(children: Any, folder: Path, cores: list[int]) -> list[Worker]:
    """One daemon, and a trainer on each of two cores."""
    from moshpitd.cli.bench_processes import START_S, Swarm, address_of, start_worker

    swarm = Swarm(children, folder, peers=1, numel=0)
    node = swarm.nodes[0]
    node.write_config(bootstrap=[], max_group=16, more={})
    node.start_daemon(children)
    workers = []
    for index in (0, 1):
        own = ["--socket", str(node.socket), "--index", str(index), "--core", str(cores[index])]
        log = folder / f"trainer-{index}.log"
        name = f"trainer {index}"
        workers.append(
            start_worker(children, name, ["-m", TRAINER, *own], log, OMP_NUM_THREADS="1")
        )
    swarm.wait(lambda: address_of(node) != "", node.name)
    for worker in workers:
        worker.hear(START_S)
    return workers


def _time_of(workers: list[Worker], run: str, seconds: float, target: float) -> dict[str, Any]:
    from moshpitd.cli.bench_processes import ask_all

    for worker in workers:  # the first opens the memory
        worker.ask("open", run=run)
    at = time.monotonic() + HEADSTART_S
    patience_s = seconds + ANSWER_S
    told = ask_all(workers, "train", at=at, seconds=seconds, patience_s=patience_s)
    ask_all(workers, "close")
    losses = told[0]["losses"]
    wanted = target * losses[0][2]
    return {
        "seconds": _met([(at, loss) for at, _, loss in losses], wanted),
        # Of the first trainer alone: what a machine with other work to do says least wrongly.
        "cpu_seconds": _met([(cpu_s, loss) for _, cpu_s, loss in losses], wanted),
        "steps": sum(one["steps"] for one in told),
        "loss_first": losses[0][2],
        "loss_last": losses[-1][2],
        "losses": losses,
    }


def _met(losses: list[tuple[float, float]], target: float) -> float:
    """When the loss was down at `target`, between two looks on a logarithmic scale."""
    for (t0, high), (t1, low) in itertools.pairwise(losses):
        if low <= target < high:
            return t0 + (t1 - t0) * math.log(high / target) / math.log(high / low)
    return math.inf


def _report(measured: list[tuple[dict[str, Any], dict[str, Any]]], target: float) -> dict[str, Any]:
    ratios = _ratios(measured, "seconds")
    ratio = statistics.median(ratios)
    return {
        "target": target,
        "one": [one for one, _ in measured],
        "two": [two for _, two in measured],
        "ratios": ratios,
        "ratio": ratio,
        "cpu_ratio": statistics.median(_ratios(measured, "cpu_seconds")),
        "bar": BAR,
        "passed": BAR <= ratio < math.inf,
    }


def _ratios(measured: list[tuple[dict[str, Any], dict[str, Any]]], key: str) -> list[float]:
    found = [one[key] / two[key] for one, two in measured]
    return [0.0 if math.isnan(ratio) else ratio for ratio in found]  # neither got there


def _show(report: dict[str, Any]) -> None:
    rows = [
        (
            f"{count} {words}",
            f"{one['seconds']:.2f}",
            f"{one['cpu_seconds']:.2f}",
            str(one["steps"]),
            f"{one['loss_first']:.3f}",
            f"{one['loss_last']:.4f}",
        )
        for pair in zip(report["one"], report["two"], strict=True)
        for count, words, one in zip((1, 2), ("trainer", "trainers"), pair, strict=True)
    ]
    title = f"seconds to {report['target']:g} of the first loss, AsySG-incon"
    out = console()
    out.print(
        table(
            title, ["", "seconds #", "processor #", "steps #", "first loss #", "last loss #"], rows
        )
    )
    load = report["load"]
    out.print(f"ratio {report['ratio']:.2f} (bar {BAR}); pairs "
              + " ".join(f"{ratio:.2f}" for ratio in report["ratios"]))  # fmt: skip
    out.print(f"of the first trainer's processor seconds {report['cpu_ratio']:.2f}")
    out.print(f"load {load['before'][0]:.1f} before, {load['after'][0]:.1f} after")
