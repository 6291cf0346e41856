"""`sim paper`: the averaging-quality experiment of the Moshpit paper, run with the code that ships.
One rule: every number that is shown is in the JSON, with the seeds that it comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moshpitd.cli.output import console, table, text
from moshpitd.cli.sim_work import PROCESSES, check_folder, check_range, spread, write_json
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.sim.paper import Case, Row
    from moshpitd.sim.published import Judged, Published, Verdict

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
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A CSV of published counts to hold ours against; exit 1 where one is beyond three"
            " combined standard errors. May be given again: the first with a row for it counts.",
        ),
    ] = None,
) -> None:
    """How many rounds N unreliable peers need until all hold the mean, by each method."""
    check_range("--seeds", seeds, 2, 100_000)
    check_range("--processes", processes, 1, 1024)
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    from moshpitd.sim.paper import PEERS, SIDES, as_json, cases, contraction
    from moshpitd.sim.published import as_json as verdict_as_json
    from moshpitd.sim.published import judge_all

    published = [row for path in against or () for row in _read(path)]
    jobs = [(case, seeds) for case in cases()]
    jobs.sort(key=lambda job: job[0].method != "moshpit_distinct")  # the long ones first
    rows = spread(run_one, jobs, title="averaging", processes=processes)
    rows.sort(key=lambda row: (row.n, row.p_fail, tuple(LABELS).index(row.method)))
    verdicts = judge_all(rows, published)
    beside = {id(one.row): {"against": verdict_as_json(one)} for one in verdicts}
    write_json(
        json_file,
        {
            "experiment": "rounds until the variance between peers is below 1e-9 (1e-4)",
            "grid": list(SIDES),
            "rekey": "distinct",
            "seeds": seeds,
            "against": [str(path) for path in against or ()],
            "rows": [as_json(row) | beside.get(id(row), {}) for row in rows],
            "contraction": [contraction(n, seeds=max(seeds, SEEDS)) for n in PEERS],
        },
    )
    if plot is not None:
        _draw(plot, rows)
    console().print(_table(rows, seeds))
    if against:
        _tell(verdicts, len(rows))


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
            (
                n,
                f"{p:g}",
                *(f"{it.iterations_1e9:.1f} ({it.iterations_1e4:.1f})" for it in counts),
                f"{found['allreduce', n, p].expected:.1f}",
            )
        )
    title = f"Rounds to a variance of 1e-9 (1e-4), at most 50, mean of {seeds} seeds"
    labels = (*LABELS.values(), "expected of it")
    return table(title, ("N#", "p#", *(f"{label}#" for label in labels)), lines)


def _read(path: Path) -> list[Published]:
    from moshpitd.sim.published import read

    try:
        found = read(path.read_text(encoding="utf-8").splitlines(), name=str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}", key="--against") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}", key="--against") from None
    if not any(row.method in LABELS for row in found):
        raise ConfigError(
            f"{path}: no row of a method that is run", key="--against", expected=", ".join(LABELS)
        )
    return found


def _tell(verdicts: list[Verdict], rows: int) -> None:
    """Every row beside the published one; exit 1 if they are too far apart."""
    title = "Rounds beside the published ones: what lies between, and how much may"
    sides = [f"{name}#" for to in ("1e-9", "1e-4") for name in (to, "published", "s.e.", "may be")]
    lines = [
        (
            one.row.n, f"{one.row.p_fail:g}", LABELS[one.row.method], *_cells(one.fine),
            *_cells(one.coarse), "holds" if one.holds else "DOES NOT HOLD",
        )
        for one in verdicts
    ]  # fmt: skip
    console().print(table(title, ("N#", "p#", "method", *sides, ""), lines))
    held = sum(one.holds for one in verdicts)
    without = rows - len(verdicts)
    console().print(
        text(f"{held} of {len(verdicts)} rows hold; {without} have no published row to hold to")
    )
    if held < len(verdicts):
        raise typer.Exit(1)


def _cells(one: Judged) -> tuple[str, ...]:
    return (
        f"{one.ours:.3f}", f"{one.reference:.2f}", f"{one.combined_se:.3f}", f"±{one.most:.3f}"
    )  # fmt: skip


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
