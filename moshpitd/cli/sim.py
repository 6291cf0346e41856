"""`moshpitd sim`: the simulator's verbs. One rule: only registration; each verb has a file."""

from __future__ import annotations

import typer

from moshpitd.cli import sim_compare, sim_paper, sim_run, sim_soak

app = typer.Typer(
    name="sim",
    help="Run the protocol in a deterministic world, without a network.",
    no_args_is_help=True,
)
app.command("run")(sim_run.run)
app.command("soak")(sim_soak.soak)
app.command("compare")(sim_compare.compare)
app.command("paper")(sim_paper.paper)
