"""`sim`: the group of verbs that run the simulator. One rule: registration only; each verb has a
file of its own."""

from __future__ import annotations

import typer

from moshpitd.cli import sim_paper

app = typer.Typer(
    name="sim",
    help="Run the protocol in a deterministic world, without a network.",
    no_args_is_help=True,
)
app.command("paper")(sim_paper.paper)
