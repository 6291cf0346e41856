"""`sim soak`: many seeds, each a world of its own. One rule: a failing seed is named with the one
line that says why, at once, and costs the others nothing.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.output import console, text
from moshpitd.cli.sim_run import Scenario
from moshpitd.cli.sim_work import PROCESSES, check_folder, check_range, spread, write_json
from moshpitd.cli.sim_world import Verdict, again, commit_hash, read_scenario, run_seed, world_of

if TYPE_CHECKING:
    from collections.abc import Callable


def soak(
    scenario: Scenario = None,
    seeds: Annotated[int, typer.Option(help="How many worlds.")] = 100,
    first: Annotated[int, typer.Option(help="The seed of the first.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes to spread them over.")] = PROCESSES,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every seed's end there.")
    ] = None,
    transcripts: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write what the peers involved saw and did there."),
    ] = None,
) -> None:
    """Run many worlds with random faults and all checks on; exit 1 if one of them fails.

    Without a SCENARIO every seed draws its own world of 100 to 300 peers.
    """
    check_range("--seeds", seeds, 1, 1_000_000)
    check_range("--first", first, 0, 1 << 62)
    check_range("--processes", processes, 1, 1024)
    check_folder("--json", json_file)
    check_folder("--transcripts", transcripts)
    tables = read_scenario(scenario)
    world_of(tables, first, scenario)  # a mistake in the file is told before any process starts
    began = perf_counter()
    jobs = [(tables, seed, scenario) for seed in range(first, first + seeds)]

    def tell(bar_print: Callable[[Any], None], found: Verdict) -> None:
        if found.report is None:
            bar_print(text(found.sentence))
            if transcripts is not None:
                _keep(transcripts, found, scenario)

    verdicts = spread(run_seed, jobs, title="worlds", processes=processes, tell=tell)
    bad = [found for found in verdicts if found.report is None]
    write_json(json_file, _as_json(verdicts, perf_counter() - began))
    for found in bad:
        console().print(text(again(scenario, found.seed)))
    console().print(text(f"{len(verdicts) - len(bad)} of {len(verdicts)} worlds kept every check"))
    if bad:
        raise typer.Exit(1)


def _keep(folder: Path, found: Verdict, scenario: Path | None) -> None:
    folder.mkdir(exist_ok=True)
    story = f"{found.transcript}\n{found.sentence}\n{again(scenario, found.seed)}\n"
    (folder / f"seed-{found.seed}.txt").write_text(story, encoding="utf-8")


def _as_json(verdicts: list[Verdict], wall_s: float) -> dict[str, Any]:
    return {
        "commit": commit_hash(),
        "worlds": [
            {
                "seed": found.seed,
                "peers": found.peers,
                "digest": found.report.digest if found.report else "",
                "events": found.report.events if found.report else 0,
                "outcomes": found.report.outcomes if found.report else {},
                "violations": [] if found.report else [found.sentence],
            }
            for found in verdicts
        ],
        "failed": [found.seed for found in verdicts if found.report is None],
        "wall_s": wall_s,
    }
