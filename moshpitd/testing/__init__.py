"""What users' tests and ours share: a swarm of real daemons in one process, and what benches run.

One rule: a name is loaded when it is asked for (PEP 562). A swarm brings a whole daemon along,
1.3 s of a processor, which the trainer processes of a bench would pay in vain.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moshpitd.testing.local_swarm import LocalSwarm

__all__ = ["LocalSwarm"]


def __getattr__(name: str) -> Any:
    if name == "LocalSwarm":
        return import_module("moshpitd.testing.local_swarm").LocalSwarm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
