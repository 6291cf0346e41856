"""How fast this peer says it is. One rule: never more than the operator says, and no news of noise.

Others give us parts to reduce in proportion to what we tell them, so a rate that jumps moves load
back and forth, and a rate that is too low leaves a fast peer idle. A measured rate below the
configured one is told; above it only says that the configured one is true.
"""

from __future__ import annotations

# A record goes to the directory and to every peer that asks; below this a change is noise. Shares
# follow rates in proportion, so the slowest peer of a round is at most this much off.
STEP = 0.1
# Below this nothing works, and a rate of 0 means "cannot reduce" in a record.
LEAST_MBPS = 0.1


class Pace:
    """Both directions, in Mbit/s. Invariant: LEAST_MBPS <= what is told <= the limit."""

    def __init__(self, *, up_mbps: float, down_mbps: float) -> None:
        self._up = _Direction(up_mbps)
        self._down = _Direction(down_mbps)

    def up(self, bytes_per_s: float | None) -> float:
        """What to tell, given what was measured last; None: nothing yet."""
        return self._up.told(bytes_per_s)

    def down(self, bytes_per_s: float | None) -> float:
        return self._down.told(bytes_per_s)


class _Direction:
    def __init__(self, limit_mbps: float) -> None:
        self._limit = max(LEAST_MBPS, limit_mbps)
        self._told = self._limit

    def told(self, bytes_per_s: float | None) -> float:
        if bytes_per_s is not None:
            mbps = min(self._limit, max(LEAST_MBPS, bytes_per_s * 8 / 1e6))
            # The limit itself is told at once: a measured 99 % of it is the limit, with headers.
            if mbps > self._limit * (1 - STEP):
                mbps = self._limit
            if mbps == self._limit or abs(mbps - self._told) > STEP * self._told:
                self._told = mbps
        return self._told
