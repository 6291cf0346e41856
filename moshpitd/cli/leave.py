"""`drain`: ask the daemon to finish and go.

One rule: with --wait the command ends when the daemon has.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from moshpitd.cli.daemon_calls import Config, Socket, daemon
from moshpitd.errors import DaemonUnavailable

POLL_S = 0.2
STOP_S = 15.0  # beyond the budget: what a stop may take


def drain(
    budget_s: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", min=0.0, help="Default: drain_budget_s."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the daemon is gone.")] = True,
    socket: Socket = None,
    config: Config = None,
) -> None:
    """Finish what runs, hand over state, begin nothing new, and end the daemon."""
    from moshpitd.daemon.settings import Settings

    budget = Settings.load(config).node.drain_budget_s if budget_s is None else budget_s
    err = Console(stderr=True, highlight=False)
    with daemon(socket, config) as calls:
        calls.drain(budget)
        if not wait:
            return
        until = time.monotonic() + budget + STOP_S
        with err.status(f"draining, at most {budget:.0f} s ...") as shown:
            while time.monotonic() < until:
                try:
                    left_s = calls.status(timeout_s=2.0).drain_left_s
                except DaemonUnavailable:
                    return
                shown.update(f"draining, at most {left_s:.0f} s ...")
                time.sleep(POLL_S)
    err.print(f"moshpitd: the daemon still answers {STOP_S:.0f} s after its budget")
    raise typer.Exit(1)
