"""`run`: the daemon in the foreground.

One rule: what the operator got wrong is told before the heavy imports (torch and libp2p take
seconds), in one line, with exit code 2.
"""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML file.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where identity and state are kept.")] = None,
    socket: Annotated[str | None, typer.Option(help="Unix socket of the local API.")] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="A peer of the swarm. May be repeated."),
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option(metavar="MULTIADDR", help="Control address. Repeatable.")
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="Control address that others dial. Repeatable."),
    ] = None,
    link_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where bulk links arrive.")
    ] = None,
    link_announce: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Where others dial bulk links. Repeatable."),
    ] = None,
    max_group: Annotated[int | None, typer.Option(help="Largest group.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Status page; 0: none.")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning, error.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="text, json.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting. Repeatable."),
    ] = None,
) -> None:
    """Run the daemon of this node until SIGTERM (drains first; a second one stops at once)."""
    from moshpitd.daemon import lifecycle, logs
    from moshpitd.daemon.claims import claim
    from moshpitd.daemon.settings import Settings

    flags = {
        "node.data_dir": data_dir,
        "node.socket": socket,
        "network.bootstrap": bootstrap,
        "network.listen": listen,
        "network.announce": announce,
        "network.link_listen": link_listen,
        "network.link_announce": link_announce,
        "averaging.max_group": max_group,
        "http.port": http_port,
        "log.level": log_level,
        "log.format": log_format,
    }
    given = {key: value for key, value in flags.items() if value not in (None, [])}
    settings = Settings.load(config, flags=_assigned(assignments or []) | given)
    logs.configure(level=settings.log.level, form=settings.log.format)
    log = logging.getLogger("moshpitd")
    for finding in settings.findings():
        log.warning("%s", finding)
    claim(settings).release()  # the node takes it again; here a second daemon fails at once

    # Before torch is imported. Parts are 1 MiB and many threads encode them at once; torch's own
    # threads on top cost a third of a round (4 nodes, 100 MB, float16: 1.0 s against 0.7 s).
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from moshpitd.daemon.node import Node

    # 300,000 objects of imported modules that never go: a full collection over them stops all
    # threads for 0.17 s in the middle of a round; without them for 2 us.
    gc.collect()
    gc.freeze()
    code = lifecycle.run(lambda: Node(settings), drain_budget_s=settings.node.drain_budget_s)
    raise typer.Exit(code)


def _assigned(assignments: list[str]) -> dict[str, Any]:
    """The values of --set, each read as the type of its key."""
    from moshpitd.daemon.settings import Settings
    from moshpitd.daemon.settings_sources import flag_value
    from moshpitd.errors import ConfigError

    flags: dict[str, Any] = {}
    for assignment in assignments:
        dotted, equals, value = assignment.partition("=")
        section, dot, key = dotted.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(
                f"{assignment!r} assigns nothing",
                file="command line",
                key="--set",
                expected="SECTION.KEY=VALUE, e.g. http.port=0",
            )
        flags[dotted.strip()] = flag_value(Settings, dotted.strip(), value.strip())
    return flags
