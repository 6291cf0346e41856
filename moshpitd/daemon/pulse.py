"""Who of the members of our open rounds is heard from. One rule: it says what came, not what it
means.

A link that only waits for its turn is as quiet as a dead one. So while a round is open every member
is pinged, several times a second: a live link then always has something to say, and the core may
read silence as what it is. One thread does it for all rounds, and sleeps while there are none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from moshpitd.daemon.pacing import Links
from moshpitd.errors import LocalProtocolError, TransportError

log = logging.getLogger(__name__)

# A fifth of the shortest silence that a deadline may be made of, about a second; 5 pings of 52
# bytes per second and member are nothing beside a round.
EVERY_S = 0.2


class Pulse:
    """Invariant: a peer is told of at most once per look and run, and only if bytes came since."""

    def __init__(
        self, links: Links, tell: Callable[[str, str], None], *, every_s: float = EVERY_S
    ) -> None:
        """`tell(run, peer_id)` is called from the thread and must not block."""
        self._links = links
        self._tell = tell
        self._every_s = every_s
        self._changed = threading.Condition()  # guards what follows
        self._rounds: dict[bytes, tuple[str, tuple[str, ...]]] = {}
        self._counts: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    def watch(self, run: str, group_id: bytes, peers: Iterable[str]) -> None:
        """A round of these other members begins; what came before it does not count."""
        with self._changed:
            if self._closing:
                return
            self._rounds[group_id] = (run, tuple(peers))
            for peer_id in self._rounds[group_id][1]:
                self._counts.setdefault(peer_id, self._links.heard(peer_id))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def leave(self, group_id: bytes) -> None:
        """The round is over."""
        with self._changed:
            self._rounds.pop(group_id, None)
            watched = {peer_id for _, peers in self._rounds.values() for peer_id in peers}
            for peer_id in [one for one in self._counts if one not in watched]:
                del self._counts[peer_id]

    def look(self) -> None:
        """Tell of whoever was heard since the last look, and ask everybody again."""
        with self._changed:
            runs: dict[str, dict[str, None]] = {}  # peer -> runs, in order
            for run, peers in self._rounds.values():
                for peer_id in peers:
                    runs.setdefault(peer_id, {})[run] = None
        for peer_id, names in runs.items():
            count = self._links.heard(peer_id)
            with self._changed:
                before = self._counts.get(peer_id)
                if before is not None:  # else its round ended meanwhile
                    self._counts[peer_id] = count
            # A new link counts from 0 again, so less than before is news too.
            if before is not None and count and count != before:
                for run in names:
                    self._tell(run, peer_id)
            if self._links.is_up(peer_id):
                with suppress(TransportError, LocalProtocolError):
                    self._links.ping(peer_id)

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
