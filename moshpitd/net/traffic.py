"""What all links of a pool carried, by kind, and how fast. One rule: counts only grow, and what
strangers can invent (names of runs) is bounded.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from moshpitd.net.frames import HEADER_BYTES, NO_RUN, FrameKind, Header
from moshpitd.net.link import Look
from moshpitd.net.meter import Rate

# A node has at most 64 runs; frames of runs that it does not have are counted together after that.
RUNS_MAX = 128
# Peers whose totals are kept after their links ended: more than any group and its snapshots.
PEERS_MAX = 1024
# Busy time before a side tells its own rate: others give it parts by what it tells. A round of half
# a second on a crowded machine gives one sample, and one of 60 % of the line once split the work of
# two equal peers 1 to 8. Two seconds are eight samples, and the largest of them is what counts.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Moved:
    """The key of a count: whole frames with their headers."""

    run: bytes
    kind: FrameKind
    sent: bool


class Carrier(Protocol):
    """What is asked of a link; each is one key."""

    @property
    def peer_id(self) -> str: ...

    @property
    def bytes_heard(self) -> int: ...

    def look(self, now: float) -> Look: ...


class Traffic:
    """Thread-safe, except that one thread looks."""

    def __init__(self) -> None:
        self.up, self.down = Rate(settle_s=SETTLE_S), Rate(settle_s=SETTLE_S)
        self._lock = threading.Lock()
        self._moved: Counter[Moved] = Counter()
        self._runs: set[bytes] = {NO_RUN}
        self._heard: OrderedDict[str, int] = OrderedDict()  # on links that ended
        self._seen: dict[Carrier, tuple[int, int]] = {}
        self._delivered = self._received = 0

    def count(self, header: Header, payload_bytes: int, *, sent: bool) -> None:
        with self._lock:
            run = header.run
            if run not in self._runs:
                if len(self._runs) < RUNS_MAX:
                    self._runs.add(run)
                else:
                    run = NO_RUN
            self._moved[Moved(run, header.kind, sent)] += HEADER_BYTES + payload_bytes

    def moved(self) -> dict[Moved, int]:
        with self._lock:
            return dict(self._moved)

    def keep(self, link: Carrier) -> None:
        """A link ended: its total stays."""
        with self._lock:
            self._heard[link.peer_id] = self._heard.get(link.peer_id, 0) + link.bytes_heard
            self._heard.move_to_end(link.peer_id)
            if len(self._heard) > PEERS_MAX:
                self._heard.popitem(last=False)

    def heard_before(self, peer_id: str) -> int:
        with self._lock:
            return self._heard.get(peer_id, 0)

    def look(self, now: float, links: Iterable[Carrier]) -> bool:
        """Sample every link and all together; whether anything is on its way.

        What all links together carry tells of this side only while several are busy: the last one
        that is may be slow at its other end, and a fast peer whose last bytes trickle to a slow one
        must not take itself for slow.
        """
        sending = receiving = count = 0
        seen = {}
        for link in links:
            look = link.look(now)
            delivered, heard = self._seen.get(link, (look.delivered, look.heard))
            self._delivered += max(0, look.delivered - delivered)
            self._received += max(0, look.heard - heard)
            seen[link] = (look.delivered, look.heard)
            sending += look.sending
            receiving += look.receiving
            count += 1
        self._seen = seen
        enough = max(1, min(2, count))
        self.up.look(now, self._delivered, busy=sending >= enough)
        self.down.look(now, self._received, busy=receiving >= enough)
        return sending + receiving > 0
