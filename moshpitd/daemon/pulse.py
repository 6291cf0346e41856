"""Who of the members of our open rounds is heard from. One rule: it says what came, not what it
means.

A link that only waits for its turn is as quiet as a dead one. So while a round is open every member
is pinged, several times a second: a live link then always has something to say, and the core may
read silence as what it is. One thread does it for all rounds, and sleeps while there are none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from moshpitd.daemon.pacing import Links
from moshpitd.errors import LocalProtocolError, TransportError

log = logging.getLogger(__name__)

# A fifth of the shortest silence that a deadline may be made of, about a second; 5 pings of 52
# bytes per second and member are nothing beside a round.
EVERY_S = 0.2


# So long a link may take to come up: a dial has its own, shorter timeout, which the pool tells of;
# of a peer that should dial us nothing else is heard until it does.
LINKING_S = 5.0


@dataclass(slots=True)
class _Watched:
    run: str
    since: float
    counts: dict[str, int]  # peer -> bytes that had come from it at the last look


class Pulse:
    """Invariant: while a run has an open round it is told at every look who was heard since."""

    def __init__(
        self,
        links: Links,
        tell: Callable[[str, tuple[str, ...]], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        """`tell(run, peer_ids)` is called from the thread and must not block."""
        self._links = links
        self._tell = tell
        self._every_s = every_s
        self._changed = threading.Condition()  # guards what follows
        self._rounds: dict[bytes, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    def watch(self, run: str, group_id: bytes, peers: Iterable[str]) -> None:
        """A round with these other members begins; what came before it does not count."""
        with self._changed:
            if self._closing:
                return
            counts = {peer_id: self._links.heard(peer_id) for peer_id in peers}
            self._rounds[group_id] = _Watched(run, time.monotonic(), counts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def leave(self, group_id: bytes) -> None:
        """The round is over."""
        with self._changed:
            self._rounds.pop(group_id, None)

    def look(self) -> None:
        """Tell who was heard since the last look, and ask everybody again."""
        with self._changed:
            watched = list(self._rounds.values())
        told: dict[str, dict[str, None]] = {}
        asked: dict[str, None] = {}
        for one in watched:
            heard = told.setdefault(one.run, {})
            linking = time.monotonic() - one.since < LINKING_S
            for peer_id, before in one.counts.items():
                up = self._links.is_up(peer_id)
                count = one.counts[peer_id] = self._links.heard(peer_id)
                # A new link counts from 0 again, so less than before is news too.
                if (count and count != before) or (linking and not up):
                    heard[peer_id] = None
                if up:
                    asked[peer_id] = None
        for peer_id in asked:
            with suppress(TransportError, LocalProtocolError):
                self._links.ping(peer_id)
        for run, peers in told.items():
            self._tell(run, tuple(peers))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._rounds.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rounds or self._closing)
                if self._closing:
                    return
            try:
                self.look()
            except Exception:  # one look less; the thread is needed for the next
                log.exception("looking after the links failed")
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=self._every_s):
                    return
