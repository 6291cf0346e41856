"""What users' tests and ours share: a swarm of real daemons in one process, one of arithmetic only,
and what benches run.

One rule: a name is loaded when it is asked for (PEP 562). A swarm brings a whole daemon along,
1.3 s of a processor, which the trainer processes of a bench would pay in vain.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moshpitd.testing.arithmetic import ArithmeticSwarm
    from moshpitd.testing.local_swarm import LocalSwarm

__all__ = ["ArithmeticSwarm", "LocalSwarm"]

HOMES = {
    "ArithmeticSwarm": "moshpitd.testing.arithmetic",
    "LocalSwarm": "moshpitd.testing.local_swarm",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
