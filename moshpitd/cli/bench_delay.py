"""`bench delay`: steps with neighbours beside a ring all-reduce, where every message takes a while.

One rule: daemons and trainers are processes of their own, as anywhere; all systems begin a step at
the same instant and go through the same proxies, in turn, step by step, so that other load meets
all of them. A step ends when the last trainer holds its parameters, and one in which anybody missed
anybody does not count. The median of the ring's steps is what the others are held against, and its
ideal is printed beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moshpitd.cli.bench_processes import Worker
    from moshpitd.cli.demo_processes import Children

TIMES_FASTER = 3.0
RING, AVERAGE = "ring all-reduce", "group average"
BARRED = ("d-psgd", "low-precision-decentralized")
SYSTEMS = (RING, *BARRED, AVERAGE)
CODEC = "float32"  # the ring and d-psgd send float32 too
PAUSE_S = 0.1
"""As trainers compute: the acknowledgements of one step are through before the next begins."""
WARM_UP = 5
"""Steps of each that are not measured: the first meet through the directory and open the links, and
the neighbours' replicas are exchanged in the second."""
STEP_S = 60.0  # one step on a busy machine; longer than what ends a step by itself
WORKER = "moshpitd.testing.bench.delay"


def delay(
    peers: Annotated[int, typer.Option(help="Daemons, with a trainer each.")] = 8,
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
    told = _measured(peers, delay_ms / 1e3, int(params), steps)
    report: dict[str, Any] = {
        "peers": peers,
        "delay_s": delay_ms / 1e3,
        "params": int(params),
        "load": {"before": before, "after": load()},
        "results": results_of(told, ideal_s(peers, delay_ms / 1e3)),
    }
    report |= judged(report["results"])
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if report["passed"] else 1)


def _measured(peers: int, delay_s: float, numel: int, steps: int) -> list[dict[str, Any]]:
    """Every measured step."""
    from moshpitd.cli.bench_processes import HEADSTART_S, ask_all, processes
    from moshpitd.cli.output import console

    told: list[dict[str, Any]] = []
    with (
        processes() as (children, folder),
        _trainers(children, folder, peers, delay_s, numel) as trainers,
    ):
        for number in range(-WARM_UP, steps):
            # Who goes first changes, so that nobody always follows the same other.
            shift = number % len(SYSTEMS)
            for system in (*SYSTEMS[shift:], *SYSTEMS[:shift]):
                time.sleep(PAUSE_S)
                at = time.monotonic() + HEADSTART_S
                patience_s = STEP_S + delay_s * 100
                ends = ask_all(trainers, "step", patience_s=patience_s, system=system, at=at)
                seconds = max(one["ended"] for one in ends) - min(one["began"] for one in ends)
                trouble = "; ".join(one["trouble"] for one in ends if one["trouble"])
                if number >= 0:
                    told.append({"system": system, "seconds": seconds, "trouble": trouble})
                note = f"refused: {trouble}" if trouble else f"{seconds:.3f} s"
                console().print(f"step {number}, {system}: {note}", style="dim", markup=False)
    return told


@contextmanager
def _trainers(
    children: Children, folder: Path, peers: int, delay_s: float, numel: int
) -> Iterator[list[Worker]]:
    """Trainers at daemons of their own, and in a ring; between any two of them is the delay."""
    from moshpitd.cli.bench_processes import (
        START_S,
        Place,
        Swarm,
        announced,
        ask_all,
        start_delay,
        start_worker,
    )
    from moshpitd.cli.demo_processes import free_ports
    from moshpitd.cli.demo_stage import LOCKSTEP

    ports = free_ports(6 * peers)
    real, seen = ports[: 3 * peers], ports[3 * peers :]  # daemons' two each, then the ring's
    proxy = start_delay(
        children, "the delay", folder / "delay.log",
        host="127.0.0.1", delay_s=delay_s, paths=zip(seen, real, strict=True),
    )  # fmt: skip
    own, rings, seen_rings = real[: 2 * peers], real[2 * peers :], seen[2 * peers :]
    swarm = Swarm(
        children, folder, peers=peers, numel=0, ports=own,
        settings={"averaging.codec": CODEC, **LOCKSTEP},
        places=[
            Place(settings=announced("127.0.0.1", *seen[at : at + 2]))
            for at in range(0, 2 * peers, 2)
        ],
    )  # fmt: skip
    size = ["--peers", str(peers), "--numel", str(numel)]
    trainers = [
        start_worker(
            children, f"trainer {index}", ["-m", WORKER, "--index", str(index), *size],
            folder / f"trainer-{index}.log",
        )
        for index in range(peers)
    ]  # fmt: skip
    try:
        for worker in (proxy, *trainers):
            worker.hear(START_S)
        swarm.start()
        for trainer, port in zip(trainers, rings, strict=True):
            trainer.ask("listen", port=port)
        for index, trainer in enumerate(trainers):
            following = ["127.0.0.1", seen_rings[(index + 1) % peers]]
            trainer.tell("begin", socket=str(swarm.nodes[index].socket), following=following)
        for trainer in trainers:
            trainer.good(trainer.hear(START_S), "begin")
        yield trainers
        ask_all(trainers, "end")
    finally:
        for worker in (proxy, *trainers):
            worker.close()
        swarm.close()


def ideal_s(peers: int, delay_s: float) -> dict[str, float]:
    """Nothing but messages in a row. The ring: reduce-scatter and all-gather. Neighbours, once they
    have met: the message, and the word that it counts. The average: Join to the leader, its Begin,
    contribution, result and digest."""
    found = {RING: 2 * (peers - 1), **dict.fromkeys(BARRED, 2), AVERAGE: 5}
    return {name: count * delay_s for name, count in found.items()}


def results_of(
    told: Sequence[Mapping[str, Any]], least: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One entry for each system, in the order of `least`."""
    from moshpitd.cli.bench_figures import median

    found = []
    for system, least_s in least.items():
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
