"""The `moshpitd` command.

One rule: at the top of this room only typer, rich and stdlib; every other room is imported by the
verb that needs it, so that --help and a typing mistake answer at once.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from moshpitd.cli import bench, demo, leave, look, replay, run, sim, version
from moshpitd.errors import ConfigError, InternalError, MoshpitError

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERNAL = 1, 2, 70


class Verbs(TyperGroup):
    """Turns our errors into one line on stderr and an exit code, for every verb alike."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoshpitError as error:
            sys.stderr.write(f"moshpitd: {' '.join(str(error).split())}\n")
            raise typer.Exit(exit_code(error)) from None


def exit_code(error: MoshpitError) -> int:
    """2: change a setting or a flag. 70: a bug of ours. 1: it did not work this time."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_INTERNAL if isinstance(error, InternalError) else EXIT_FAILED


app = typer.Typer(
    cls=Verbs,
    name="moshpitd",
    help="Average PyTorch parameters with a swarm of preemptible nodes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("status")(look.status)
app.command("peers")(look.peers)
app.command("rounds")(look.rounds)
app.command("drain")(leave.drain)
app.command("replay")(replay.replay)
app.command("version")(version.show_version)
app.command("demo")(demo.demo)
app.add_typer(bench.app)
app.add_typer(sim.app)

if __name__ == "__main__":
    # `python -m moshpitd.cli.main`: the same command under a chosen interpreter, for `demo`.
    app(prog_name="moshpitd")
