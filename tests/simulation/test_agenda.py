"""The world's agenda against one heap of everything. One rule: whatever is put where and when, both
give the same things in the same order."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from moshpitd.sim.agenda import PER_S, Agenda


def nothing() -> None:
    """What happens does not matter here."""


@pytest.mark.parametrize("seed", range(20))
def test_things_happen_in_the_order_of_a_heap(seed: int) -> None:
    rng, agenda, heap = Random(seed), Agenda(), list[tuple[float, int]]()
    now, put = 0.0, 0
    for _ in range(2_000):
        for _ in range(rng.randrange(3)):
            put += 1
            # At once, at the same instant as others, within a slot, many slots later, long ago.
            after = rng.choice((0.0, 0.5, rng.random() / PER_S, rng.expovariate(0.1), -1.0))
            agenda.put(now + after, nothing, (put,))
            heapq.heappush(heap, (now + after, put))
        until = now + rng.choice((0.01, 100.0))
        item = agenda.take(until=until)
        if not heap or heap[0][0] > until:
            assert item is None
            continue
        assert item is not None
        assert (item[0], item[3][0]) == heapq.heappop(heap)
        now = item[0]
    while heap:
        item = agenda.take(until=1e9)
        assert item is not None
        assert (item[0], item[3][0]) == heapq.heappop(heap)
    assert agenda.take(until=1e9) is None
