"""Bytes between nodes: when a part that is sent leaves, and when and whether it arrives. One rule:
a part arrives whole or not at all, and never at a daemon other than the one that the link was made
to.

The simplest that still orders things rightly: every node's uplink and downlink carry one part at a
time, and a link adds its delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moshpitd.core.events import Event
from moshpitd.sim.faults import Options
from moshpitd.sim.network import Links
from moshpitd.sim.nodes import Early, Node

DIAL_TIMEOUT_S = 5.0
"""A dial into nothing gives up then: three retransmitted SYNs."""
NOTICE_S = 30.0
"""When TCP notices that a vanished peer acknowledges nothing (TCP_USER_TIMEOUT)."""
EARLY_S = 60.0
"""Parts for a group that never opens are held for so long; a link would be closed by then."""
MEMORY_BYTES_PER_S = 2e9
"""Encoding, averaging and copying, next to the wire: DESIGN 11's slices, rounded down."""


class Outside(Protocol):
    """What the data plane needs of the world."""

    now: float

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None: ...

    def post(self, delay: float, node: Node, event: Event) -> None: ...

    def node(self, peer_id: str) -> Node: ...

    def find(self, peer_id: str) -> Node | None: ...


class Wire:
    """Invariant: what was queued behind something that never left never leaves either."""

    def __init__(self, world: Outside, links: Links, options: Options) -> None:
        self._world, self._links, self._options = world, links, options
        self.broken: list[Callable[[Node, bytes, Node], None]] = []
        """Told (sender, key, receiver) when a link turns out to lead to a daemon that is dead."""

    def send(
        self,
        node: Node,
        other: Node,
        stamp: tuple[bytes, int],
        call: Callable[..., None],
        *args: Any,
    ) -> float:
        """Queue one part from `node` to `other`; returns when its last byte leaves. `stamp` names
        the group or transfer and the incarnation that the link was made to."""
        bits, now = 8.0 * self._options.part_bytes, self._world.now
        departs = max(now, node.plane.up_free) + bits / (node.plane.up_mbps * 1e6)
        node.plane.up_free = node.plane.queued[stamp[0]] = departs
        here = departs + self._links.latency(node.index, other.index)
        sender = (node, node.incarnation, departs)
        if self._options.parts_overtake:
            self._world.later(here - now, self._land, sender, other, stamp, call, args)
            return departs
        arrives = self._taken(other, here)
        self._world.later(arrives - now, self._arrive, sender, other, stamp, call, args)
        return departs

    def close(self, node: Node, key: bytes) -> None:
        """What is queued for this round or transfer does not leave, and what comes now does not
        wait for it. (What was queued behind it leaves when it would have.)"""
        plane, now = node.plane, self._world.now
        plane.closed[key] = now
        plane.queued.pop(key, None)
        plane.queued = {one: departs for one, departs in plane.queued.items() if departs > now}
        plane.up_free = max(plane.queued.values(), default=min(plane.up_free, now))

    def _taken(self, other: Node, here: float) -> float:
        """When a part that is at the far end of the link at `here` is through the downlink."""
        took = 8.0 * self._options.part_bytes / (other.plane.down_mbps * 1e6)
        other.plane.down_free = max(here, other.plane.down_free + took)
        return other.plane.down_free

    def _land(
        self,
        sender: tuple[Node, int, float],
        other: Node,
        stamp: tuple[bytes, int],
        *rest: Any,
    ) -> None:
        """At the other end of the link: through its downlink in the order in which parts get there,
        or one that a slow sender has queued would hold up all that are sent later."""
        if _unsent(sender, stamp[0]):
            return
        now = self._world.now
        self._world.later(self._taken(other, now) - now, self._arrive, sender, other, stamp, *rest)

    def _arrive(
        self,
        sender: tuple[Node, int, float],
        other: Node,
        stamp: tuple[bytes, int],
        call: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        (node, incarnation, departs), (key, linked_to) = sender, stamp
        if _unsent(sender, key):
            return
        if other.peer is None:
            return  # `died` has told the sender, or will
        if (stuck := self._stuck_s(node, other, departs)) > 0.0:
            lost = stuck > NOTICE_S
            if node.incarnation == incarnation and not lost:
                again = ((node, incarnation, departs), other, stamp, call, args)
                self._world.later(stuck, self._arrive, *again)
            elif lost:
                for told in self.broken:
                    told(node, key, other)
                    told(other, key, node)
            return
        if other.incarnation != linked_to:
            delay = self._links.latency(node.index, other.index)
            for told in self.broken:
                self._world.later(delay, told, node, key, other)
            return
        call(other, key, *args)

    def hold(self, node: Node, key: bytes, call: Callable[..., None], *args: Any) -> None:
        if key in node.plane.closed:
            return
        if key not in node.plane.early:
            self._world.later(EARLY_S, _forget, node.plane.early, key)
        node.plane.early.setdefault(key, []).append((call, args))

    def release(self, node: Node, key: bytes) -> None:
        for call, args in node.plane.early.pop(key, []):
            call(node, key, *args)

    def _stuck_s(self, node: Node, other: Node, departs: float) -> float:
        """How much longer a part is on its way that should be here now: one end stands still, or a
        partition is between them. Beyond NOTICE_S the link is given up."""
        now = self._world.now
        if node.thaws_at is not None and departs > node.frozen_at:
            return max(node.thaws_at - now, 1e-6)
        if other.thaws_at is not None:
            return max(other.thaws_at - now, 1e-6)
        between = self._links.apart(node.index, other.index) if self._links.parted else None
        if between is None:
            return 0.0
        return between.until - now + self._links.latency(node.index, other.index)

    def refuses(self, node: Node, other: Node) -> bool:
        """Can neither of these two open a link to the other?"""
        there = other.dialable and self._links.reaches(node.index, other.index)
        back = node.dialable and self._links.reaches(other.index, node.index)
        return other.peer is None or not (there or back)

    def refused_s(self, node: Node, other: Node) -> float:
        """How long it takes `node` to find out that it gets no link to `other`."""
        apart = self._links.apart(node.index, other.index) is not None
        if apart or (other.peer is None and other.vanished):
            return DIAL_TIMEOUT_S
        return 2.0 * self._links.latency(node.index, other.index)

    def work_s(self) -> float:
        """Encoding, averaging or copying one part."""
        return self._options.part_bytes / MEMORY_BYTES_PER_S


def _unsent(sender: tuple[Node, int, float], key: bytes) -> bool:
    """Was it still queued when its daemon died, or did Close take it out?"""
    node, incarnation, departs = sender
    if node.incarnation != incarnation:
        return departs > node.died_at
    return departs > node.plane.closed.get(key, departs)


def _forget(early: Early, key: bytes) -> None:
    early.pop(key, None)
