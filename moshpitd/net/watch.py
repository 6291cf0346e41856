"""The watch over a pool's links: it measures them while they carry something and gives each the
flows that it needs. One rule: only the side that dialled a link adds flows to it or takes them
away, because only it is known to be able to dial.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from moshpitd.errors import LinkBroken, ProtocolError, Unreachable
from moshpitd.net.frames import Header
from moshpitd.net.link import Link
from moshpitd.net.meter import LOOK_S, flows_wanted
from moshpitd.net.traffic import Traffic

log = logging.getLogger(__name__)

# Flows of one link. Beyond this the threads cost more than the windows bring, and a peer that asks
# for more is refused.
FLOWS_MAX = 8
# A link that had nothing to carry for so long goes back to one flow.
IDLE_S = 60.0
# After a flow that could not be added, most often because the other side has not adopted the link
# yet. A try costs both sides about a millisecond.
PAUSE_S = 1.0
# A process that may use fewer cores than the machine has shall not count the others.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Watched(Protocol):
    """What the watch needs of the pool."""

    def all_links(self) -> tuple[list[Link], list[Link]]:
        """(all that live, those that are sent on)."""
        ...

    def add_flow(self, link: Link) -> bool:
        """Dial one more; False if the link takes none. Raises as a dial does."""
        ...


class Watch:
    """`flows`: as many for every link; 0: as its rate and round trip want it."""

    def __init__(
        self,
        pool: Watched,
        *,
        flows: int,
        closing: threading.Event,
        spawn: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self.traffic = Traffic()
        self._pool = pool
        self._flows = flows
        self._closing = closing
        self._spawn = spawn
        self._moving = threading.Event()
        self._not_before: dict[Link, float] = {}  # touched by the watching thread and `_add` only

    def count(self, header: Header, payload_bytes: int, *, sent: bool) -> None:
        """A whole frame went or came; from any thread."""
        self.traffic.count(header, payload_bytes, sent=sent)
        if not self._moving.is_set():
            self._moving.set()

    def wake(self) -> None:
        """Look again now, or find the pool closing."""
        self._moving.set()

    def run(self) -> None:
        """Until the pool closes."""
        while not self._closing.is_set():
            moving = self._moving.wait(IDLE_S)
            links, active = self._pool.all_links()
            ours = [link for link in active if link.dialled_at is not None]
            if moving:
                self._moving.clear()
                self._look(links, ours)
                self._closing.wait(LOOK_S)
            elif self._flows == 0:
                for link in ours:
                    link.shrink()

    def _look(self, links: Sequence[Link], ours: Sequence[Link]) -> None:
        now = time.monotonic()
        if self.traffic.look(now, links):
            self._moving.set()  # a frame may take longer than the time between two looks
        self._not_before = {link: at for link, at in self._not_before.items() if not link.over}
        for link in ours:
            wanted = self._flows or flows_wanted(
                bytes_per_s=max(link.up.value or 0.0, link.down.value or 0.0),
                rtt_s=link.round_trip_s(),
                cores=CORES,
                most=FLOWS_MAX,
            )
            if wanted > link.width and now >= self._not_before.get(link, 0.0):
                self._not_before[link] = now + PAUSE_S
                self._spawn(f"link-dial-{link.peer_id[-6:]}", partial(self._add, link, wanted))

    def _add(self, link: Link, wanted: int) -> None:
        try:
            while link.width < wanted and not self._closing.is_set():
                if not self._pool.add_flow(link):
                    return
            self._not_before[link] = 0.0
        except (Unreachable, LinkBroken, ProtocolError) as error:
            log.info("no further flow to %s: %s", link.peer_id, error)
        except Exception:
            log.exception("adding a flow to the link to %s failed", link.peer_id)
