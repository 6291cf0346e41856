"""`sim paper`: the averaging-quality experiment of the Moshpit paper, run with the code that ships.
One rule: every number that is shown is in the JSON, with the seeds that it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moshpitd.cli.output import console, table
from moshpitd.cli.sim_work import PROCESSES, check_folder, check_range, spread, write_json

if TYPE_CHECKING:
    from moshpitd.sim.paper import Case, Row

PANELS = ((1024, 0.0), (1024, 0.005), (768, 0.005))
"""(N, p) of the paper's three figures."""
LABELS = {
    "moshpit_distinct": "Moshpit",
    "random_groups": "random groups",
    "pushsum_1peer": "push-sum, 1 peer",
    "pushsum_2peer": "push-sum, 2 peers",
    "gossip": "gossip (ring)",
    "allreduce": "all-reduce",
}
SEEDS = 60


def paper(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all rows there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the paper's figure there.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = SEEDS,
    processes: Annotated[int, typer.Option(help="Processes to spread them over.")] = PROCESSES,
) -> None:
    """How many rounds N unreliable peers need until all hold the mean, by each method."""
    check_range("--seeds", seeds, 2, 100_000)
    check_range("--processes", processes, 1, 1024)
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    from moshpitd.sim.paper import PEERS, SIDES, as_json, cases, contraction

    jobs = [(case, seeds) for case in cases()]
    jobs.sort(key=lambda job: job[0].method != "moshpit_distinct")  # the long ones first
    rows = spread(run_one, jobs, title="averaging", processes=processes)
    rows.sort(key=lambda row: (row.n, row.p_fail, tuple(LABELS).index(row.method)))
    write_json(
        json_file,
        {
            "experiment": "rounds until the variance between peers is below 1e-9 (1e-4)",
            "grid": list(SIDES),
            "rekey": "distinct",
            "seeds": seeds,
            "rows": [as_json(row) for row in rows],
            "contraction": [contraction(n, seeds=max(seeds, SEEDS)) for n in PEERS],
        },
    )
    if plot is not None:
        _draw(plot, rows)
    console().print(_table(rows, seeds))


def run_one(job: tuple[Case, int]) -> Row:
    """One case in a process of its own."""
    from moshpitd.sim.paper import run_case

    return run_case(job[0], seeds=job[1])


def _table(rows: list[Row], seeds: int) -> object:
    found = {(row.method, row.n, row.p_fail): row for row in rows}
    lines = []
    for n, p in dict.fromkeys((row.n, row.p_fail) for row in rows):
        counts = [found[method, n, p] for method in LABELS]
        lines.append(
            (n, f"{p:g}", *(f"{it.iterations_1e9:.1f} ({it.iterations_1e4:.1f})" for it in counts))
        )
    title = f"Rounds to a variance of 1e-9 (1e-4), at most 50, mean of {seeds} seeds"
    return table(title, ("N#", "p#", *(f"{label}#" for label in LABELS.values())), lines)


def _draw(path: Path, rows: list[Row]) -> None:
    from moshpitd.cli.sim_plot import save_figure

    found = {(row.method, row.n, row.p_fail): row for row in rows}

    def fill(figure: object) -> None:
        axes = figure.subplots(1, len(PANELS), sharey=True)  # type: ignore[attr-defined]
        for axis, (n, p) in zip(axes, PANELS, strict=True):
            for method, label in LABELS.items():
                trace = found[method, n, p].distortion
                axis.plot(range(len(trace)), trace, marker=".", label=label)
            axis.set_yscale("log")
            axis.set_title(f"{n} peers, failure rate {p:g}")
            axis.set_xlabel("averaging rounds")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("mean squared error")
        axes[-1].legend(fontsize="small")

    save_figure(path, fill, size=(13.0, 4.0))
