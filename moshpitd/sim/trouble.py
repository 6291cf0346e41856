"""Faults that leave a daemon alive: it stands still, is cut off, or lies. One rule: what is kept
from a daemon while it stands still is handed to it in order when it wakes up, as its kernel would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moshpitd.core.events import Event, Ticked
from moshpitd.sim.checks import Checks
from moshpitd.sim.faults import Options, stream
from moshpitd.sim.liars import Habits
from moshpitd.sim.network import Links
from moshpitd.sim.nodes import Node
from moshpitd.sim.plan import Partition, partitions


class Outside(Protocol):
    """What trouble needs of the world."""

    now: float
    nodes: list[Node]
    checks: Checks
    links: Links

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None: ...

    def tell(self, node: Node, event: Event, *, at_least: float = 0.0) -> None: ...

    def rearm(self, node: Node) -> None: ...


class Trouble:
    """Invariant: after `calm` nobody is frozen, cut off or lying."""

    def __init__(self, world: Outside, options: Options) -> None:
        self._world, self._options = world, options
        self._wakes = stream(options.seed, "wakes")
        self._number = 0

    def populate(self) -> None:
        """Put the partitions on the agenda and choose the liars."""
        for partition in partitions(self._options):
            self._world.later(partition.at - self._world.now, self._part, partition)
        for node in self._world.nodes:
            rng = stream(self._options.seed, "liar", node.index)
            if rng.random() < self._options.liars:
                node.liar = Habits(rng, node.peer_id, lies=self._options.lies)
                node.lied = True

    def calm(self) -> None:
        for node in self._world.nodes:
            node.liar = None
            self.thaw(node, node.incarnation)

    # -- standing still

    def freeze(self, node: Node, seconds: float) -> None:
        """The daemon gets no processor for so long; its trainers do."""
        if node.peer is None or node.thaws_at is not None:
            return
        node.story.append((self._world.now, f"-- frozen for {seconds:.3f} s --"))
        node.frozen_at, node.thaws_at = self._world.now, self._world.now + seconds
        self._world.checks.frozen(node, seconds)
        self._world.later(seconds, self.thaw, node, node.incarnation)

    def thaw(self, node: Node, incarnation: int) -> None:
        if node.thaws_at is None or node.incarnation != incarnation:
            return
        node.thaws_at = None
        node.story.append((self._world.now, "-- thawed --"))
        backlog, node.backlog = node.backlog, []
        # Timers that are overdue and sockets that are full: an event loop may turn to either first.
        if self._wakes.random() < 0.5:
            backlog.insert(0, (Ticked(), 0.0))
        for event, at_least in backlog:
            if node.incarnation == incarnation:
                self._world.tell(node, event, at_least=at_least)
        self._world.rearm(node)

    # -- cut off

    def cut_off(self, node: Node, seconds: float) -> None:
        """Nobody reaches this one, and it reaches nobody."""
        node.story.append((self._world.now, f"-- cut off for {seconds:.3f} s --"))
        self._part(Partition(self._world.now, self._world.now + seconds, (node.index,)))

    def _part(self, partition: Partition) -> None:
        self._number += 1
        self._world.links.split(self._number, partition)
        self._world.checks.partings.parted(partition)
        lasts = partition.until - self._world.now
        self._world.later(lasts, self._world.links.heal, self._number)
