"""The simulator as machine code: where `make fast` puts what mypyc makes of core/ and sim/, and
when that is used. One rule: compiled or not, a world comes to the same digest; so it is used
wherever it lies there and was made of exactly these sources, and nothing needs it.

The .py files stay what everybody reads, tests and changes. The compiled modules lie elsewhere, in
build/compiled of the checkout, and are put before them on the path of their two packages.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = PACKAGE.parent / "build" / "compiled"
ROOMS = ("core", "sim")
STAMP = "SOURCES"
"""In the folder: of which sources it was made, and for which Python."""

KEPT = frozenset({"__init__", "baselines", "paper", "published", "scenario", "walk"})
"""Not compiled: no world of many peers spends its time there."""

INTERPRETED = "MOSHPITD_INTERPRETED"
"""Set to anything, the compiled modules are left alone, by the processes of this one too."""


def sources() -> Iterator[Path]:
    """What is compiled, in an order that does not change."""
    for room in ROOMS:
        found = (PACKAGE / room).glob("*.py")
        yield from sorted(path for path in found if path.stem not in KEPT)


def stamp() -> str:
    """Of the sources as they are now, under this Python."""
    digest = blake2b(str(sysconfig.get_config_var("EXT_SUFFIX")).encode(), digest_size=16)
    for path in sources():
        text = path.read_bytes()
        digest.update(f"\n{path.parent.name}/{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def is_fresh() -> bool:
    try:
        return (FOLDER / STAMP).read_text(encoding="ascii").strip() == stamp()
    except OSError:
        return False


@cache
def use_compiled() -> bool:
    """Whether this process runs the compiled modules; to be asked before it imports any of them."""
    begun = any(name.startswith(("moshpitd.core.", "moshpitd.sim.")) for name in sys.modules)
    if begun or INTERPRETED in os.environ or not is_fresh():
        os.environ[INTERPRETED] = "1"  # what its processes send back must be of the same classes
        return False
    sys.path.append(str(FOLDER))  # where the modules look for the library that they share
    for room in ROOMS:
        import_module(f"moshpitd.{room}").__path__.insert(0, str(FOLDER / "moshpitd" / room))
    return True
