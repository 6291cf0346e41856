"""`bench delay`: steps with neighbours beside a ring all-reduce, where every message takes a while.

One rule: all of them go through the same proxies of one process, in turn, step by step; the median
of the ring's steps is what the others are held against, and its ideal is printed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

TIMES_FASTER = 3.0
RING, BARRED = "ring all-reduce", ("d-psgd", "low-precision-decentralized")
WARM_UP = 5
"""Steps of each that are not measured: the first meet through the directory and open the links, and
the neighbours' replicas are exchanged in the second."""
STEP_S = 60.0  # one step on a busy machine; longer than what ends a step by itself
WORKER = "moshpitd.testing.bench.delay"


def delay(
    peers: Annotated[int, typer.Option(help="Nodes, in one process.")] = 8,
    delay_ms: Annotated[float, typer.Option("--delay-ms", help="Of every message, one way.")] = 20,
    params: Annotated[float, typer.Option(help="float32 parameters.")] = 100e3,
    steps: Annotated[int, typer.Option(help="Measured steps of each.")] = 15,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Steps of D-PSGD and of its low-precision form, a group average and a ring all-reduce."""
    from moshpitd.cli.bench_figures import check_writable, load, write_json
    from moshpitd.cli.bench_processes import check_range

    check_range("--peers", peers, 3, 16)
    check_range("--delay-ms", delay_ms, 0.0, 500.0)
    check_range("--params", params, 1e3, 1e7)
    check_range("--steps", steps, 1, 1000)
    check_writable(json_file)
    before = load()
    told, ideal_s = _measured(peers, delay_ms / 1e3, int(params), steps)
    report: dict[str, Any] = {
        "peers": peers,
        "delay_s": delay_ms / 1e3,
        "params": int(params),
        "load": {"before": before, "after": load()},
        "results": results_of(told, ideal_s),
    }
    report |= judged(report["results"])
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if report["passed"] else 1)


def _measured(
    peers: int, delay_s: float, numel: int, steps: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every measured step, and what each system takes at the least."""
    from moshpitd.cli.bench_processes import START_S, processes, start_worker
    from moshpitd.cli.demo_processes import free_ports
    from moshpitd.cli.output import console

    with processes() as (children, folder):
        arguments = ["-m", WORKER, "--ports", *map(str, free_ports(2 * peers))]
        arguments += ["--place", str(folder), "--delay-s", str(delay_s), "--numel", str(numel)]
        arguments += ["--steps", str(steps), "--warm-up", str(WARM_UP)]
        worker = start_worker(children, "the nodes' process", arguments, folder / "log")
        worker.hear(START_S)
        told: list[dict[str, Any]] = []
        while (line := worker.hear(STEP_S + delay_s * 100))["event"] == "step":
            if line["number"] >= 0:
                told.append(line)
            note = f"refused: {line['trouble']}" if line["trouble"] else f"{line['seconds']:.3f} s"
            words = f"step {line['number']}, {line['system']}: {note}"
            console().print(words, style="dim", markup=False)
        ideal_s: dict[str, float] = line["ideal_s"]
        return told, ideal_s


def results_of(
    told: Sequence[Mapping[str, Any]], ideal_s: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One entry for each system, in the order of `ideal_s`."""
    from moshpitd.cli.bench_figures import median

    found = []
    for system, least_s in ideal_s.items():
        mine = [one for one in told if one["system"] == system]
        good = [one["seconds"] for one in mine if not one["trouble"]]
        found.append(
            {
                "system": system,
                "ideal_s": least_s,
                "median_s": median(good),
                "min_s": min(good, default=None),
                "max_s": max(good, default=None),
                "steps": len(mine),
                "counted": len(good),
                "seconds": [round(seconds, 6) for seconds in good],
                "troubles": [one["trouble"] for one in mine if one["trouble"]],
            }
        )
    return found


def judged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many times faster than the ring each is, and the bars. A figure that does not exist is no
    bar met."""
    from moshpitd.cli.bench_figures import Bar, ratio

    by_name = {one["system"]: one["median_s"] for one in results}
    others = [name for name in by_name if name != RING]
    bars = [
        Bar(f"{name}, a step in the ring's", ratio(by_name[name], by_name[RING]), 1 / TIMES_FASTER)
        for name in BARRED
    ]
    return {
        "times_faster": {name: ratio(by_name[RING], by_name[name]) for name in others},
        "bars": [bar.as_dict() for bar in bars],
        "passed": all(bar.met for bar in bars),
    }


def _show(report: Mapping[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, words
    from moshpitd.cli.output import console, table, text

    rows = [
        (
            one["system"],
            *(words(one[key]) for key in ("ideal_s", "median_s", "min_s", "max_s")),
            words(report["times_faster"].get(one["system"])),
            f"{one['counted']} of {one['steps']}",
        )
        for one in report["results"]
    ]
    heads = ("", "ideal s #", "median s #", "min #", "max #", "times faster #", "counted #")
    load = report["load"]
    title = (
        f"{report['peers']} peers, {report['params']:,} float32, {report['delay_s'] * 1e3:g} ms "
        f"one way; load {load['before']:.1f} before, {load['after']:.1f} after"
    )
    out = console()
    out.print(table(title, heads, rows))
    for one in report["results"]:
        for trouble in one["troubles"]:
            out.print(text(f"{one['system']}, refused: {trouble}", "red"))
    show_bars([Bar(one["what"], one["value"], one["at_most"]) for one in report["bars"]])
