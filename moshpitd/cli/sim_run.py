"""`sim run`: one world in the deterministic simulator, as figures or as the transcript of what went
wrong. One rule: everything in the JSON but `compiled` and `wall_s` depends on scenario, seed and
code alone.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.output import console, table
from moshpitd.cli.sim_compiled import use_compiled
from moshpitd.cli.sim_work import busy, check_folder, write_json
from moshpitd.cli.sim_world import Verdict, again, commit_hash, read_scenario, run_seed

if TYPE_CHECKING:
    from moshpitd.sim.meters import Figures
    from moshpitd.sim.world import Report

Scenario = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SCENARIO]",
        help="A world to run, e.g. configs/sim/growth.toml. Without one: what the seed draws.",
    ),
]


def run(
    scenario: Scenario = None,
    seed: Annotated[int, typer.Option(help="All randomness comes from it.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the run over time there.")
    ] = None,
) -> None:
    """Run one world of many peers with all checks on; exit 1 if one of them fails."""
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    tables = read_scenario(scenario)
    began = perf_counter()
    with busy("running the world"):
        verdict = run_seed((tables, seed, scenario), last=True)
    wall_s = perf_counter() - began
    write_json(json_file, as_json(verdict, wall_s))
    if verdict.report is None:
        sys.stderr.write(f"{verdict.transcript}\n{verdict.sentence}\n{again(scenario, seed)}\n")
        raise typer.Exit(1)
    if plot is not None:
        _draw(plot, verdict.report)
    _show(verdict.report, wall_s)


def as_json(verdict: Verdict, wall_s: float) -> dict[str, Any]:
    report, figures = verdict.report, verdict.report.figures if verdict.report else None
    return {
        "seed": verdict.seed,
        "commit": commit_hash(),
        "digest": report.digest if report else "",
        "peers": verdict.peers,
        "events": report.events if report else 0,
        "world_s": report.ended_s if report else verdict.at_s,
        "attempts": figures.attempts if figures else 0,
        "grouped_fraction": figures.grouped_fraction if figures else None,
        "fill_mean": figures.fill_mean if figures else None,
        "time_to_group_s": {
            "p50": figures.time_to_group_p50_s if figures else None,
            "p99": figures.time_to_group_p99_s if figures else None,
        },
        "rtt_s": {"p50": figures.rtt_p50_s if figures else None},
        "look_up_s": {"p50": figures.look_up_p50_s if figures else None},
        "outcomes": report.outcomes if report else {},
        "group_sizes": report.group_sizes if report else {},
        "notes": report.notes if report else {},
        "over_time": _rows(figures) if figures else [],
        "violations": [] if report else [verdict.sentence],
        "compiled": use_compiled(),
        "wall_s": wall_s,
    }


def _rows(figures: Figures) -> list[dict[str, Any]]:
    return [asdict(row) for row in figures.rows]


def _show(report: Report, wall_s: float) -> None:
    figures = report.figures
    assert figures is not None
    out, p99 = console(), _s(figures.time_to_group_p99_s)
    lines = [
        ("peers", f"{report.peers}"),
        ("world time", f"{report.ended_s:.1f} s"),
        ("events", f"{report.events:,}"),
        ("attempts to meet", f"{figures.attempts:,}"),
        ("of them in a group", _share(figures.grouped_fraction)),
        ("fill of the groups", _share(figures.fill_mean)),
        ("time to a group", f"{_s(figures.time_to_group_p50_s)} (p99 {p99})"),
        ("round trip, look-up", f"{_s(figures.rtt_p50_s)}, {_s(figures.look_up_p50_s)}"),
        ("calls", ", ".join(f"{n:,} {how}" for how, n in report.outcomes.items())),
        ("digest", report.digest),
        ("took", f"{wall_s:.1f} s{' (compiled)' if use_compiled() else ''}"),
    ]  # fmt: skip
    out.print(table(f"Seed {report.seed}: every check held", ("", ""), lines))
    rows = [row for row in figures.rows if row.attempts]
    if len(rows) > 1:
        found = [
            (
                f"{row.at_s:.0f}", row.live, "x".join(map(str, row.sides)), row.attempts,
                _share(row.grouped_fraction), _share(row.fill), _s(row.time_to_group_s),
                _number(row.contraction), _number(row.predicted),
            )
            for row in rows
        ]  # fmt: skip
        names = ("at s#", "daemons#", "grid", "attempts#", "grouped#", "fill#", "to a group#")
        out.print(table("", (*names, "distortion x#", "predicted x#"), found))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.1f} %"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _draw(path: Path, report: Report) -> None:
    from moshpitd.cli.sim_plot import save_figure

    figures = report.figures
    assert figures is not None
    rows = [row for row in figures.rows if row.attempts]
    at = [row.at_s for row in rows]

    def fill(figure: Any) -> None:
        (live, share), (time, distortion) = figure.subplots(2, 2, sharex=True)
        live.plot(at, [row.live for row in rows], marker=".", label="daemons alive")
        cells = [_cells(row.sides) for row in rows]
        live.plot(at, cells, drawstyle="steps-post", label="cells of the grid")
        live.set_ylabel("peers")
        share.plot(at, _percent([row.grouped_fraction for row in rows]), label="in a group")
        share.plot(at, _percent([row.fill for row in rows]), label="fill of groups")
        share.set_ylabel("%")
        share.set_ylim(0, 105)
        time.plot(at, [row.time_to_group_s for row in rows], marker=".", label="median")
        time.set_ylabel("time to a group (s)")
        distortion.plot(at, [row.contraction for row in rows], marker=".", label="measured")
        distortion.plot(at, [row.predicted for row in rows], marker=".", label="predicted")
        distortion.set_ylabel("distortion after / before")
        if any(row.contraction for row in rows):
            distortion.set_yscale("log")
        for axis in (live, share, time, distortion):
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
        for axis in (time, distortion):
            axis.set_xlabel("world time (s)")
        figure.suptitle(f"{report.peers} peers, seed {report.seed}")

    save_figure(path, fill, size=(11.0, 7.0))


def _percent(shares: list[float | None]) -> list[float | None]:
    return [None if share is None else 100.0 * share for share in shares]


def _cells(sides: tuple[int, ...]) -> float | None:
    if len(sides) < 2:
        return None  # one flat group
    cells = 1
    for side in sides:
        cells *= side
    return float(cells)
