"""What users' tests and ours share: a swarm of real daemons in one process."""

from __future__ import annotations

from moshpitd.testing.local_swarm import LocalSwarm

__all__ = ["LocalSwarm"]
