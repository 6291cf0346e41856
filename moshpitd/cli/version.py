"""`version`: which software this is, for bug reports.

One rule: read from package metadata; only the compiled passes are loaded, which nothing else tells.
"""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from moshpitd.cli.daemon_calls import Json
from moshpitd.cli.output import console, print_json, table

_PACKAGES = ("moshpitd", "torch", "hivemind", "libp2p", "grpcio", "protobuf", "uvloop")


def show_version(json: Json = False) -> None:
    """Show the versions of moshpitd and of what it stands on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    try:  # a processor that lacks the instructions refuses the file
        import_module("moshpitd._native")
        found["compiled passes"] = "built"
    except ImportError:
        found["compiled passes"] = "not built"
    if json:
        print_json(found)
        return
    drawn = table("", ("", ""), found.items())
    drawn.show_header = False
    console().print(drawn)
