"""`bench freeze`: daemons are stopped (SIGSTOP) in the middle of rounds and go on afterwards.

One rule: the same trials and the same verdict as in `bench death`; a frozen peer differs from a
dead one only in that nothing says so: its links stay up and are silent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BAR = 3.0
"""Of the undisturbed median: what an adaptive deadline reaches and a fixed maximum (25 s) does
not."""


def freeze(
    peers: Annotated[int, typer.Option(help="Daemons, and trainers; one group.")] = 4,
    params: Annotated[float, typer.Option(help="float32 parameters per peer.")] = 100e6,
    trials: Annotated[int, typer.Option(help="Rounds in which somebody freezes.")] = 5,
    codec: Annotated[str, typer.Option(help="How values travel.")] = "float16",
    seed: Annotated[int, typer.Option(help="Of who freezes, and when.")] = 1,
    undisturbed: Annotated[int, typer.Option(help="Rounds in which nobody does.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the trials there.")
    ] = None,
) -> None:
    """SIGSTOP a daemon in the middle of a round, and SIGCONT it when the survivors are through."""
    from moshpitd.cli.bench_death import perform

    report = perform(
        "freeze",
        peers=peers,
        params=params,
        trials=trials,
        kill=1,
        codec=codec,
        seed=seed,
        undisturbed=undisturbed,
        bar=(BAR, 0.0),
        json_file=json_file,
    )
    raise typer.Exit(0 if len(report["trials"]) == trials else 1)
