"""Reaching the daemon of this machine from a command.

One rule: no daemon is one sentence that says how to start one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moshpitd.errors import DaemonUnavailable

if TYPE_CHECKING:
    from moshpitd.rpc.calls import Calls

Socket = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", help="Unix socket of the daemon's local API."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Settings file that the daemon runs with."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[str, typer.Option("--run", metavar="RUN", help="Only this run.")]


@contextmanager
def daemon(socket: Path | None, config: Path | None) -> Iterator[Calls]:
    """The calls of the daemon at `socket`, else at the socket that the settings name."""
    from moshpitd.rpc.calls import Calls  # grpc takes a tenth of a second to import

    path = socket or _configured(config)
    calls = Calls(path)
    try:
        yield calls
    except DaemonUnavailable:
        if path.exists():
            raise
        raise DaemonUnavailable(
            f"no daemon at {path}: start one with `moshpitd run`, or name its socket with --socket"
        ) from None
    finally:
        calls.close()


def _configured(config: Path | None) -> Path:
    from moshpitd.daemon.settings import Settings

    return Settings.load(config).paths().socket
