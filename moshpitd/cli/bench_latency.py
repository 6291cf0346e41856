"""`bench latency`: what a round costs beside its bytes, cold and warm, beside hivemind's.

cold: every round is the first of a new run, of which nobody knows anything (attached without a
sync, so that the call itself announces, looks up, agrees on a lineage, finds a group and averages).
warm: the next rounds of one run. The systems take turns, round by round.

One rule: only a round in which every trainer was told "complete, with everybody", and holds the
right values, counts; any other is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from moshpitd.cli.bench_systems import Measured, System

Kind = Literal["cold", "warm"]
KINDS: tuple[Kind, ...] = ("cold", "warm")
NUMEL = 256
PAUSE_S = 0.05  # the last messages of one round must not fall into the next
ROUNDS_MAX = 60  # a daemon keeps at most 64 runs, and every cold round is one
COLD_AT_MOST = {4: 0.25, 8: 0.4}  # seconds, by peers


def latency(
    peers: Annotated[int, typer.Option(help="Daemons, and trainers; one group.")] = 4,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each kind.")] = 15,
    against: Annotated[
        str, typer.Option(metavar="SYSTEM", help="hivemind, or nothing.")
    ] = "hivemind",
    synced: Annotated[
        bool, typer.Option("--synced", help="Attach with a sync, which the call need not do then.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Time rounds of tiny tensors, from the trainers' calls to the averages in their memory."""
    from moshpitd.cli.bench_figures import check_writable, load, write_json
    from moshpitd.cli.bench_processes import Swarm, check_range, processes
    from moshpitd.cli.bench_systems import Hivemind, Ours, check_baseline
    from moshpitd.errors import ConfigError

    check_range("--peers", peers, 2, 16)
    check_range("--rounds", rounds, 1, ROUNDS_MAX)
    if against not in ("hivemind", "nothing"):
        raise ConfigError(
            f"{against!r} is unknown", key="--against", expected="hivemind or nothing"
        )
    if against == "hivemind":
        check_baseline("float32")
    check_writable(json_file)
    with processes() as (children, folder):
        swarm = Swarm(
            children, folder, peers=peers, numel=NUMEL, settings={"averaging.codec": "float32"}
        )
        systems: list[System] = [Ours(swarm, codec="float32", synced=synced)]
        if against == "hivemind":
            systems.append(Hivemind(children, folder, peers=peers, numel=NUMEL))
        try:
            for system in systems:
                system.start()
            results = _measure(systems, rounds)
        finally:
            for system in systems:
                system.close()
    report = {
        "peers": peers,
        "numel": NUMEL,
        "synced": synced,
        "load": load(),
        "results": results,
        "ratios": ratios(results),
    }
    report["bars"] = _bars(report)
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if all(one["counted"] for one in results) else 1)


def _measure(systems: Sequence[System], rounds: int) -> list[dict[str, Any]]:
    """All systems in turn, round by round."""
    measured: dict[tuple[str, Kind], list[Measured]] = {}
    number = 0
    for kind in KINDS:
        for turn in range(rounds):
            # Who goes first changes, so that neither always follows the other's last messages.
            for system in systems if turn % 2 == 0 else list(reversed(systems)):
                number += 1
                attach_s = system.renew() if kind == "cold" else 0.0
                one = system.measure(number, same=kind == "cold")
                one.attach_s = attach_s
                measured.setdefault((system.name, kind), []).append(one)
                time.sleep(PAUSE_S)
    order = [(system.name, kind) for system in systems for kind in KINDS]
    return [_summary(name, kind, measured[name, kind]) for name, kind in order]


def _summary(name: str, kind: Kind, rounds: list[Measured]) -> dict[str, Any]:
    from moshpitd.cli.bench_figures import median, summary

    return {
        **summary(name, rounds),
        "kind": kind,
        # The first of all also opens the connections between the peers, which then stay.
        "first_s": rounds[0].seconds,
        "first_phases": rounds[0].phases,
        "attach_s": median(one.attach_s for one in rounds if one.attach_s),
    }


def ratios(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Our median over theirs, by system and kind."""
    from moshpitd.cli.bench_figures import ratio

    ours = {one["kind"]: one["median_s"] for one in results if one["system"] == "moshpitd"}
    found: dict[str, dict[str, float | None]] = {}
    for one in results:
        if one["system"] != "moshpitd":
            by_kind = found.setdefault(one["system"], {})
            by_kind[one["kind"]] = ratio(ours[one["kind"]], one["median_s"])
    return found


def _bars(report: dict[str, Any]) -> list[dict[str, Any]]:
    from moshpitd.cli.bench_figures import Bar, refused

    at_most = COLD_AT_MOST.get(report["peers"])
    if at_most is None:
        return []
    cold = next(one for one in report["results"] if one["kind"] == "cold")
    what = f"{report['peers']} peers, cold, seconds"
    return [Bar(what, cold["median_s"], at_most, refused(cold)).as_dict()]


def _show(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, words
    from moshpitd.cli.output import console, table, text

    out = console()
    keys = ("median_s", "min_s", "max_s", "first_s", "attach_s", "cpu_s")
    rows = [
        (
            one["system"],
            one["kind"],
            *(words(one[key]) for key in keys),
            f"{one['counted']} of {one['rounds']}",
        )
        for one in report["results"]
    ]
    heads = ("", "", "median s #", "min #", "max #", "first #", "attach #", "CPU s #", "counted #")
    title = f"{report['peers']} peers, {report['numel']} float32, load {report['load']:.1f}"
    out.print(table(title, heads, rows))
    for one in report["results"]:
        for what, phases in (("", one["phases"]), (", the first", one["first_phases"])):
            if phases and (not what or one["kind"] == "cold"):
                each = ", ".join(f"{name} {words(value)}" for name, value in phases.items())
                out.print(text(f"{one['system']}, {one['kind']}{what}: {each}"))
        for trouble in one["troubles"]:
            out.print(text(f"{one['system']}, {one['kind']}, refused: {trouble}", "red"))
    for name, by_kind in report["ratios"].items():
        each = ", ".join(f"{kind} {words(value)}" for kind, value in by_kind.items())
        out.print(text(f"ours / {name}: {each}"))
    show_bars([Bar.again(one) for one in report["bars"]])
