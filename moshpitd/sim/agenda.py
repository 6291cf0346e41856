"""What is still to happen in the world, in order of time. One rule: of two things at one instant
the one that was put there first happens first, however it is kept.

In a world of ten thousand peers hundreds of thousands of things wait, most of them for seconds. One
heap of all would be gone through in memory that no cache holds, at every step; so only what happens
within the next slot of time is on a heap, and what comes later lies in one list per slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeAlias

PER_S = 32.0
"""Slots in a second: at ten thousand peers a slot has some thousand things, and a world that has
next to nothing to do wakes up as often as that."""

Item: TypeAlias = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Agenda:
    """Invariant: whatever is in `_later` is in a later slot than `_slot`, and so after everything
    on the heap."""

    def __init__(self) -> None:
        self._heap: list[Item] = []
        self._slot = -1
        self._later: dict[int, list[Item]] = {}
        self._slots: list[int] = []  # a heap of the keys of `_later`
        self._put = 0

    def put(self, at: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._put += 1
        slot = int(at * PER_S)
        if slot <= self._slot:
            heapq.heappush(self._heap, (at, self._put, call, args))
            return
        items = self._later.get(slot)
        if items is None:
            items = self._later[slot] = []
            heapq.heappush(self._slots, slot)
        items.append((at, self._put, call, args))

    def take(self, *, until: float) -> Item | None:
        """The next thing, if there is one and it happens by then."""
        heap = self._heap
        if not heap:
            if not self._slots:
                return None
            self._slot = heapq.heappop(self._slots)
            heap = self._heap = self._later.pop(self._slot)
            heapq.heapify(heap)
        return heapq.heappop(heap) if heap[0][0] <= until else None
