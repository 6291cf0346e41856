"""`bench churn`: the same training with and without faults, on the same daemons.

One rule: the machine must have time to spare: trainers are paced, and how busy it was is part of
the report, because on a machine without it every restart would slow down somebody else's step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PACE_S, EVERY_S = 0.5, 5.0
"""A step, and a round: twelve daemons on two cores then leave the machine more than half idle."""
MINUTES_MAX = 24 * 60.0


def churn(
    daemons: Annotated[int, typer.Option(help="Daemons, and trainers; one group.")] = 12,
    minutes: Annotated[float, typer.Option(help="Length of each of the two legs.")] = 5.0,
    faults: Annotated[int, typer.Option(help="In the second leg.")] = 12,
    params: Annotated[float, typer.Option(help="float32 parameters of the model.")] = 100e3,
    pace: Annotated[float, typer.Option(metavar="SECONDS", help="Time of a step.")] = PACE_S,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", help="From one round to the next.")
    ] = EVERY_S,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--wait", help="Rounds run while trainers compute, or they wait for each."
        ),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy configs and logs there.")
    ] = None,
) -> None:
    """Kill, freeze, drain and restart nodes of a swarm that trains; compare with a quiet leg."""
    import random

    from moshpitd.cli.bench_faults import compare, plan_faults
    from moshpitd.cli.bench_figures import check_writable, write_json
    from moshpitd.cli.bench_processes import Swarm, check_range, processes
    from moshpitd.cli.bench_supervisor import Held, Pace, Supervisor, end_and_look, strays
    from moshpitd.cli.output import console

    check_range("--daemons", daemons, 3, 16)
    check_range("--minutes", minutes, 0.2, MINUTES_MAX)
    check_range("--faults", faults, 0, 1000)
    check_range("--params", params, 1, 1e9)
    check_range("--pace", pace, 0.01, 60)
    check_range("--every", every, 0.1, 600)
    check_writable(json_file)
    out = console()

    def say(words: str) -> None:
        out.print(words, style="dim", markup=False)

    leg_s = minutes * 60.0
    plan = plan_faults(faults, nodes=daemons, leg_s=leg_s, rng=random.Random(seed))
    with processes(keep) as (children, folder):
        swarm = Swarm(children, folder, peers=daemons, numel=0)
        say(f"starting {daemons} daemons")
        swarm.start()
        supervisor = Supervisor(swarm, Pace(pace, every, int(params), overlap), say)
        say(f"leg 1: {minutes:g} min without faults")
        still = supervisor.leg("still", seconds=leg_s, faults=[])
        held = Held.now(swarm)
        say(f"leg 2: {minutes:g} min with {faults} faults")
        stormy = supervisor.leg("stormy", seconds=leg_s, faults=plan)
        leaks = [*strays(swarm), *Held.now(swarm).more_than(held)]
        leaks += end_and_look(swarm)
    report = compare(still, stormy, leaks, seed=seed)
    report |= {"daemons": daemons, "minutes": minutes, "pace_s": pace, "every_s": every}
    report["overlap"] = overlap
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if report["throughput_ratio"] is not None else 1)


def _show(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, words
    from moshpitd.cli.output import console, table, text

    out = console()
    out.print(
        text(
            f"{report['daemons']} daemons, {report['minutes']:g} min each leg; machine busy "
            f"{report['busy_undisturbed']:.0%} without faults, {report['busy']:.0%} with",
            "bold",
        )
    )
    whole, still = report["rounds_whole"], report["rounds_whole_undisturbed"]
    rows = [
        ("steps per second", report["steps_per_s_undisturbed"], report["steps_per_s"]),
        ("rounds of a trainer", report["rounds_undisturbed"], report["rounds"]),
        (
            "with everybody who had no fault",
            f"{still['whole']} of {still['seen']}",
            f"{whole['whole']} of {whole['seen']}",
        ),
        ("final loss", words(report["loss_undisturbed"]), words(report["loss"])),
    ]
    out.print(table("", ("surviving trainers", "without faults #", "with #"), rows))
    out.print(
        text(
            f"ratios: throughput {words(report['throughput_ratio'])}, rounds "
            f"{words(report['rounds_ratio'])}; {len(report['faults'])} faults"
        )
    )
    for short in whole["short"]:
        nodes = ", ".join(map(str, short["missing"]))
        said = f"the round that ended at {short['at_s']:.1f} s went without {nodes}"
        out.print(text(f"{said} (group {short['group_id'][:8]})", "red"))
    for leak in report["leaks"]:
        out.print(text(f"leaked: {leak}", "red"))
    show_bars([Bar(one["what"], one["value"], one["at_most"]) for one in report["bars"]])
