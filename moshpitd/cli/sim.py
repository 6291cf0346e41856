"""`moshpitd sim`: the simulator's verbs. One rule: only registration; each verb has a file."""

from __future__ import annotations

import typer

from moshpitd.cli import sim_compare

app = typer.Typer(help="Simulate swarms and compare algorithms, without a network.")
app.command("compare")(sim_compare.compare)
