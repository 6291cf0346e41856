"""Rates from looks at counters, and how many flows they ask for."""

from __future__ import annotations

import contextlib
import socket

import pytest

from moshpitd.net.meter import (
    KEEP_BUSY_S,
    LOOK_S,
    SAMPLE_BYTES_MIN,
    Rate,
    flows_wanted,
    round_trip_s,
    unacknowledged,
)

MB = 1_000_000


class Link:
    """A link that carries at a rate for a time, looked at every LOOK_S."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.now = 50.0
        self.delivered = 0

    def carry(self, bytes_per_s: float, seconds: float) -> Link:
        for _ in range(int(seconds / LOOK_S) + 1):
            self.rate.look(self.now, self.delivered, busy=True)
            self.now += LOOK_S
            self.delivered += int(bytes_per_s * LOOK_S)
        self.rate.look(self.now, self.delivered, busy=False)
        return self

    def rest(self, seconds: float) -> Link:
        self.now += seconds
        self.rate.look(self.now, self.delivered, busy=False)
        return self


def test_a_steady_rate_is_told() -> None:
    assert Link().carry(10 * MB, 2).rate.value == pytest.approx(10 * MB)


def test_idle_time_between_rounds_changes_nothing() -> None:
    link = Link()
    for _ in range(5):
        link.carry(10 * MB, 1).rest(100)
    assert link.rate.value == pytest.approx(10 * MB)


def test_one_tiny_round_tells_nothing() -> None:
    """Less than a sample in all, or gone before the second look."""
    assert Link().carry(SAMPLE_BYTES_MIN / 10, 1).rate.value is None
    link = Link()
    link.rate.look(link.now, 0, busy=True)
    link.rate.look(link.now + LOOK_S, 50 * MB, busy=False)
    assert link.rate.value is None


def test_a_slow_link_gets_the_time_that_a_sample_needs() -> None:
    assert Link().carry(0.2 * MB, 30).rate.value == pytest.approx(0.2 * MB, rel=0.05)


def test_the_slow_end_of_a_round_does_not_hide_what_was_seen() -> None:
    """One member at a quarter of the rate is the only one that still takes bytes."""
    link = Link()
    for _ in range(3):
        link.carry(12 * MB, 2).carry(3 * MB, 7)
    assert link.rate.value == pytest.approx(12 * MB)


def test_a_lasting_change_is_followed() -> None:
    link = Link().carry(12 * MB, 5).carry(3 * MB, KEEP_BUSY_S + 10)
    assert link.rate.value == pytest.approx(3 * MB, rel=0.01)
    assert link.carry(12 * MB, 3).rate.value == pytest.approx(12 * MB, rel=0.05)


def test_one_odd_sample_moves_it_half_way() -> None:
    link = Link().carry(10 * MB, 5)
    assert link.carry(30 * MB, LOOK_S).rate.value == pytest.approx(20 * MB)


@pytest.mark.parametrize(
    ("megabytes_per_s", "rtt_ms", "cores", "expected"),
    [
        (0, 0, 2, 1),
        (125, 0.2, 2, 1),  # gigabit in one room
        (125, 100, 2, 8),  # gigabit across an ocean: 12 MB on their way
        (12, 100, 2, 2),
        (3, 50, 16, 1),
        (1250, 0.1, 2, 1),  # two cores are busy with one flow
        (1250, 0.1, 16, 3),
        (5000, 0.1, 64, 8),
    ],
)
def test_flows_follow_rate_and_round_trip(
    megabytes_per_s: float, rtt_ms: float, cores: int, expected: int
) -> None:
    wanted = flows_wanted(
        bytes_per_s=megabytes_per_s * MB, rtt_s=rtt_ms / 1000, cores=cores, most=8
    )
    assert wanted == expected


def test_the_kernel_is_asked_for_what_has_not_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        near.setblocking(False)
        handed = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                handed += near.send(bytes(1 << 16))
        held = unacknowledged(near.fileno())
        assert 0 < held < handed, "some lies in the receiver's kernel, the rest here"
        assert 0 < round_trip_s(near.fileno()) < 1
        near.close()
        far.close()
    assert unacknowledged(10**6) == 0
    assert round_trip_s(10**6) == 0.0
