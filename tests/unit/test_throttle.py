"""Caps: whoever asks, and however often, no more than the cap passes, and nobody is forgotten."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkOptions, LinkPool
from moshpitd.net.throttle import BURST_S, Throttle, throttle
from tests.kit.link_sides import PATIENCE_S, Side

RATE = 1e6


class Clock:
    """Stands still unless somebody waits; `wait` is what an Event offers."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def capped(clock: Clock) -> Throttle:
    return Throttle(RATE, closing=clock, clock=clock)  # type: ignore[arg-type]


def test_no_cap_is_no_throttle() -> None:
    assert throttle(0.0, threading.Event()) is None
    made = throttle(8.0, threading.Event())
    assert made is not None
    assert made.bytes_per_s == RATE


@given(st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 0.2)), min_size=1, max_size=60))
def test_never_more_than_the_cap_and_a_burst(asked: list[tuple[int, float]]) -> None:
    """Over every stretch of time, also after pauses."""
    clock = Clock()
    bucket = capped(clock)
    passed: list[tuple[float, int]] = []
    for count, pause in asked:
        clock.now += pause
        bucket.wait(count)
        passed.append((clock.now, count))
    for first in range(len(passed)):
        total = 0
        for at, count in passed[first:]:
            allowed = (at - passed[first][0] + BURST_S) * RATE + count
            assert total <= allowed + 1e-6 * RATE
            total += count


@given(st.integers(10, 200))
def test_a_steady_sender_gets_all_of_its_rate(pieces: int) -> None:
    clock = Clock()
    bucket = capped(clock)
    for _ in range(pieces):
        bucket.wait(20_000)
    assert clock.now - 100.0 <= pieces * 20_000 / RATE


def test_reservations_are_served_in_order_and_urgent_ones_do_not_wait() -> None:
    bucket = capped(Clock())
    waits = [bucket.reserve(50_000) for _ in range(4)]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    steps = [later - earlier for earlier, later in pairwise(waits[1:])]
    assert steps == pytest.approx([0.05, 0.05])


def test_both_caps_hold_for_all_links_of_a_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The pool's own throttles count every byte that its links carry, of all peers together."""
    folder = tmp_path_factory.mktemp("keys")
    hub, *others = (
        Side(
            Identity.load_or_create(folder / name),
            options=LinkOptions(upload_mbps=400, download_mbps=400) if name == "a" else None,
        )
        for name in "abc"
    )
    for other in others:
        hub.link(other)
        hub.send(other, bytes(300_000))
        other.send(hub, bytes(300_000))
    for other in others:
        other.wait(lambda other=other: other.frames)  # type: ignore[misc]
    hub.wait(lambda: len(hub.frames) == 2)
    for bucket in caps(hub.pool):
        assert bucket._free_at > bucket._clock() - PATIENCE_S
        assert bucket.taken >= 2 * 300_000
    for side in (hub, *others):
        side.pool.close()


def caps(pool: LinkPool) -> tuple[Throttle, ...]:
    return tuple(one for one in pool._caps if one is not None)
