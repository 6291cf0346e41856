"""`bench overlap`: what a training step costs while a round is in flight, against no averaging.

One rule: the measured trainer has a core of its own, and everything else shares the other one; what
the ratio says is then what overlap takes from the trainer, and not how two processes share a core.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.output import console, table
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.demo_processes import Children, Node

RATIO_BAR, IN_FLIGHT_BAR, PARAMETERS_BAR = 1.05, 0.9, 10_000_000
START_S, MEASURE_S, POLL_S = 120.0, 900.0, 0.1
TRAINER = "moshpitd.testing.bench.overlap"


def overlap(
    peers: Annotated[int, typer.Option(min=2, max=16, help="Daemons, all on one core.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Hidden layers of 2048; 4: 13.7 M.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 128,
    steps: Annotated[int, typer.Option(min=2, help="Steps in a block.")] = 10,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks with, and without.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there.")
    ] = None,
) -> None:
    """Step time with overlap=True against no averaging at all."""
    from moshpitd.cli.bench_figures import check_writable, write_json

    check_writable(json_file)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(f"this process may use {len(cores)} core", expected="two or more")
    before = os.getloadavg()
    trainer = ["--layers", str(layers), "--batch", str(batch)]
    trainer += ["--steps", str(steps), "--blocks", str(blocks)]
    report = _report(_measured(peers, cores[0], cores[1], trainer), peers=peers)
    report["load"] = {"before": list(before), "after": list(os.getloadavg())}
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if report["passed"] else 1)


def _measured(peers: int, mine: int, others: int, trainer: list[str]) -> dict[str, Any]:
    """Start everything, wait for the measured trainer, end everything."""
    from moshpitd.cli.bench_processes import processes
    from moshpitd.cli.demo_processes import DemoFailed

    with processes() as (children, folder):
        nodes = _daemons(children, folder, peers, others)
        for node in nodes[1:]:
            where = ["--socket", str(node.socket), "--core", str(others)]
            own = ["-m", TRAINER, "partner", "--parent", str(os.getpid())]
            log = node.folder / "partner.log"
            children.start(f"the partner of {node.name}", [*own, *where, *trainer], log)
        told, log = folder / "measured.json", folder / "trainer.log"
        where = ["--socket", str(nodes[0].socket), "--core", str(mine), "--json", str(told)]
        child = children.start("the trainer", ["-m", TRAINER, "measure", *where, *trainer], log)
        _until(children, lambda: child.code is not None, MEASURE_S, "the trainer")
        if not told.exists():
            raise DemoFailed("the trainer told nothing", (log,))
        result: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return result


def _daemons(children: Children, folder: Path, peers: int, core: int) -> list[Node]:
    from moshpitd.cli.bench_processes import address_of, memory_folder
    from moshpitd.cli.demo_processes import Node, free_ports
    from moshpitd.cli.demo_story import Story

    ports, memory = free_ports(2 * peers), memory_folder(children)
    nodes: list[Node] = []
    for index in range(peers):
        own = (ports[2 * index], ports[2 * index + 1])
        node = Node(index, folder / f"peer-{index}", folder / f"{index}.sock", own, Story(0))
        more = {"node.buffers_dir": str(memory / str(index))} if memory else {}
        bootstrap = [address_of(nodes[0])] if nodes else []
        node.write_config(bootstrap=bootstrap, max_group=16, more=more)
        node.start_daemon(children)
        assert node.daemon is not None
        # Before it starts a thread or a process: they inherit it.
        os.sched_setaffinity(node.daemon.process.pid, {core})
        nodes.append(node)
        if index == 0:
            _until(children, lambda: address_of(nodes[0]) != "", START_S, "the first daemon")

    def joined() -> bool:
        found = [node.status() for node in nodes[1:]]
        return all(status is not None and status.joined for status in found)

    _until(children, joined, START_S, "the other daemons")
    for node in nodes:
        node.close()
    return nodes


def _until(children: Children, true: Callable[[], bool], timeout_s: float, what: str) -> None:
    from moshpitd.cli.demo_processes import DemoFailed

    until = time.monotonic() + timeout_s
    while not true():
        children.check()
        if time.monotonic() > until:
            logs = tuple(child.log for child in children.started)
            raise DemoFailed(f"{what}: not after {timeout_s:.0f} s", logs)
        time.sleep(POLL_S)
    children.check()


def _report(told: dict[str, Any], *, peers: int) -> dict[str, Any]:
    """The ratio is of whole blocks, so that the steps that begin and land a round count in full,
    and the median over the pairs of blocks, because other people's load comes in bursts."""
    off, on = told.pop("off_s"), told.pop("on_s")
    ratios = [sum(with_) / sum(without) for with_, without in zip(on, off, strict=True)]
    ratio = statistics.median(ratios)
    cpu_s = sum(told.pop("on_cpu_s")) / sum(told.pop("off_cpu_s"))
    checks = {
        "ratio": ratio <= RATIO_BAR,
        "in_flight": told["in_flight"] >= IN_FLIGHT_BAR,
        "parameters": told["parameters"] >= PARAMETERS_BAR,
    }
    return {
        **told,
        "peers": peers,
        "without_s": _figures(off),
        "with_s": _figures(on),
        "ratios": ratios,
        "ratio": ratio,
        # Of processor seconds of the trainer, all its threads: what other load changes least.
        "cpu_ratio": cpu_s,
        "checks": checks,
        "passed": all(checks.values()),
    }


def _figures(blocks: list[list[float]]) -> dict[str, float]:
    steps = [step for block in blocks for step in block]
    return {"median": statistics.median(steps), "min": min(steps), "max": max(steps)}


def _show(report: dict[str, Any]) -> None:
    rows = [
        (words, *(f"{report[key][name]:.4f}" for name in ("median", "min", "max")))
        for words, key in (("no averaging", "without_s"), ("overlap", "with_s"))
    ]
    title = f"seconds a step, {report['parameters']:,} parameters, batch {report['batch']}"
    out = console()
    out.print(table(title, ["", "median #", "min #", "max #"], rows))
    load = report["load"]
    for line in (
        f"ratio {report['ratio']:.3f} (bar {RATIO_BAR})",
        f"of its blocks {' '.join(f'{ratio:.3f}' for ratio in report['ratios'])}",
        f"of processor seconds {report['cpu_ratio']:.3f}",
        f"a round in flight {report['in_flight']:.0%} of the time (bar {IN_FLIGHT_BAR:.0%})",
        f"the daemon at work on it {report['daemon_at_work']:.0%}",
        f"rounds {report['rounds']}, {report['peers']} peers",
        f"load {load['before'][0]:.1f} before, {load['after'][0]:.1f} after",
    ):
        out.print(line)
