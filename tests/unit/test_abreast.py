"""The lanes of a round keep pace: who is ahead waits, but for nobody that stands, nor for long."""

from __future__ import annotations

import threading

import pytest

from moshpitd.daemon.abreast import AHEAD, FAST_BYTES_PER_S, STALL_S, Abreast

LONG_S = 60.0  # a wait that the test ends, not its bound


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def two(first: int, second: int) -> tuple[Clock, Abreast]:
    clock = Clock()
    together = Abreast(clock=clock)
    together.join("a", first)
    together.join("b", second)
    return clock, together


def takes(together: Abreast, peer_id: str, count: int) -> None:
    for _ in range(count):
        together.take(peer_id, 0.0)


def test_a_lane_waits_when_it_is_some_frames_ahead() -> None:
    _, together = two(10, 10)
    takes(together, "a", AHEAD)
    assert not together.ahead("a")
    takes(together, "a", 1)
    assert together.ahead("a")
    assert not together.ahead("b")
    takes(together, "b", 1)
    assert not together.ahead("a")


def test_a_lane_of_fewer_frames_may_be_slower() -> None:
    _, together = two(100, 10)
    takes(together, "b", 1)
    takes(together, "a", 10 + AHEAD)
    assert not together.ahead("a")
    takes(together, "a", 1)
    assert together.ahead("a")


@pytest.mark.parametrize("how", ["through", "gone", "over", "alone"])
def test_nobody_waits_for_a_lane_that_sends_nothing_more(how: str) -> None:
    _, together = two(10, 1)
    takes(together, "a", AHEAD + 1)
    assert together.ahead("a")
    if how == "through":
        takes(together, "b", 1)
    elif how == "gone":
        together.leave("b")
    elif how == "over":
        together.end()
    else:
        together.leave("a")
    assert not together.ahead("a")


def test_nobody_waits_for_a_lane_that_stands_still_until_it_goes_on() -> None:
    clock, together = two(20, 20)
    takes(together, "a", 8)
    assert together.ahead("a")
    clock.now += STALL_S + 0.01
    assert not together.ahead("a")
    takes(together, "b", 1)
    assert together.ahead("a")


def test_what_stands_still_is_judged_by_the_lane_s_own_pace() -> None:
    clock, together = two(20, 20)
    for _ in range(3):
        clock.now += 2.0
        takes(together, "b", 1)
    takes(together, "a", 8)
    clock.now += 5.0
    assert together.ahead("a")
    clock.now += 2.0
    assert not together.ahead("a")


def test_where_no_line_is_the_limit_nobody_waits() -> None:
    clock, together = two(20, 20)
    clock.now += 0.125
    takes(together, "a", AHEAD + 1)
    together.took(int(FAST_BYTES_PER_S * 0.125))
    assert together.ahead("a")
    together.took(1)
    assert not together.ahead("a")
    clock.now += 0.125
    assert together.ahead("a")


@pytest.mark.parametrize("how", ["goes on", "is lost", "is over"])
def test_a_writer_that_waits_is_let_go(how: str) -> None:
    _, together = two(10, 10)
    takes(together, "a", AHEAD + 1)
    writer = threading.Thread(target=together.take, args=("a", LONG_S), daemon=True)
    writer.start()
    if how == "goes on":
        takes(together, "b", 1)
    elif how == "is lost":
        together.leave("b")
    else:
        together.end()
    writer.join(LONG_S / 2)
    assert not writer.is_alive()


def test_a_wait_has_an_end() -> None:
    _, together = two(10, 10)
    takes(together, "a", AHEAD + 5)  # of no patience at all
    assert together.ahead("a")
    together.take("a", 0.01)
    together.take("stranger")
