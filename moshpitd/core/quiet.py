"""For how long a link may be quiet before its peer counts as silent. One rule: learned per peer
from how quiet it has been while it was alive, within fixed bounds.

Links are pinged a few times a second while a round is open and the other side answers from a thread
of its own, so a peer that waits for somebody else is heard all the same, and one whose link crawls
is heard as long as anything of a part trickles in. What is left is a peer that is frozen, dead
without its connections closing, or cut off.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median

from moshpitd.core.params import Params

GAPS = 64  # rounds of seconds give a dozen gaps each: some rounds' worth, and old ones wear off
DEVIATIONS = 8.0  # of the median absolute deviation; 5.4 standard deviations if it were normal
ENOUGH = 5  # fewer gaps say nothing about a link


class Quiet:
    """Invariant: at most `max_candidates` peers, those heard last, with at most GAPS gaps each."""

    def __init__(self, params: Params) -> None:
        self._params = params
        self.listens = False  # somebody tells us whom we hear; then no round goes untold
        self._gaps: OrderedDict[str, deque[float]] = OrderedDict()
        self._limits: dict[str, float] = {}

    def heard(self, peer_id: str, gap_s: float) -> None:
        """The peer was heard `gap_s` after it had been heard before."""
        gaps = self._gaps.get(peer_id)
        if gaps is None:
            gaps = self._gaps[peer_id] = deque(maxlen=GAPS)
            if len(self._gaps) > self._params.max_candidates:
                self._limits.pop(self._gaps.popitem(last=False)[0], None)
        self._gaps.move_to_end(peer_id)
        gaps.append(gap_s)
        self._limits.pop(peer_id, None)

    def limit_s(self, peer_id: str) -> float:
        """median + k MAD of its gaps, within `silence_min_s` and `part_timeout_s`."""
        known = self._limits.get(peer_id)
        if known is not None:
            return known
        gaps = self._gaps.get(peer_id)
        if gaps is None or len(gaps) < ENOUGH:
            return self._params.silence_min_s
        middle = median(gaps)
        spread = median(abs(gap - middle) for gap in gaps)
        limit = max(self._params.silence_min_s, middle + DEVIATIONS * spread)
        self._limits[peer_id] = limit = min(limit, self._params.part_timeout_s)
        return limit
