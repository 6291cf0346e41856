"""What must be over by an instant. One rule: whoever stands still gets the time back, whoever dies
owes nothing any more."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, replace

from moshpitd.sim.nodes import Node


@dataclass(frozen=True, slots=True)
class Due:
    """Something that `node` has begun and has to end by `at` (world time)."""

    node: Node
    at: float
    what: str


class Deadlines:
    """Invariant: everything open is on the heap with its present deadline."""

    def __init__(self) -> None:
        self._open: dict[int, dict[Hashable, Due]] = {}
        self._heap: list[tuple[float, int, int, Hashable]] = []
        self._put = 0  # breaks ties: keys need not be comparable

    def expect(self, key: Hashable, due: Due) -> None:
        self._open.setdefault(due.node.index, {})[key] = due
        self._push(key, due)

    def met(self, node: Node, key: Hashable) -> None:
        self._open.get(node.index, {}).pop(key, None)

    def reword(self, node: Node, key: Hashable, what: str) -> None:
        """There is more to say about it; it is due as before."""
        due = self._open.get(node.index, {}).get(key)
        if due is not None:
            self._open[node.index][key] = replace(due, what=what)

    def drop(self, node: Node) -> None:
        """Its daemon is dead."""
        self._open.pop(node.index, None)

    def frozen(self, node: Node, seconds: float) -> None:
        """It stands still for so long, and everything it has open may take that much longer."""
        for key, due in list(self._open.get(node.index, {}).items()):
            later = Due(node, due.at + seconds, due.what)
            self._open[node.index][key] = later
            self._push(key, later)

    def late(self, now: float) -> Due | None:
        """The first thing that should be over and is not."""
        while self._heap and self._heap[0][0] < now:
            at, _, index, key = heapq.heappop(self._heap)
            due = self._open.get(index, {}).get(key)
            if due is not None and due.at <= at:
                return due
        return None

    def _push(self, key: Hashable, due: Due) -> None:
        self._put += 1
        heapq.heappush(self._heap, (due.at, self._put, due.node.index, key))
