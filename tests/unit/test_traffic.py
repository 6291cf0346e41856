"""What a pool takes for its own rate, from looks at links that carry at rates of their own."""

from __future__ import annotations

import pytest

from moshpitd.net.link import Look
from moshpitd.net.meter import LOOK_S
from moshpitd.net.traffic import Traffic

MB = 1_000_000


class Carrying:
    """A link that sends at a rate while it has something."""

    def __init__(self, peer_id: str, *, bytes_per_s: float, count: float) -> None:
        self.peer_id = peer_id
        self.bytes_heard = 0
        self._rate, self._count = bytes_per_s, count
        self._delivered = 0.0

    def look(self, now: float) -> Look:
        self._delivered = min(self._count, self._delivered + self._rate * LOOK_S)
        return Look(int(self._delivered), 0, self._delivered < self._count, False)


def seen(*links: Carrying, seconds: float = 20.0) -> float | None:
    traffic = Traffic()
    for turn in range(int(seconds / LOOK_S)):
        traffic.look(turn * LOOK_S, links)
    return traffic.up.value


def test_a_fast_peer_does_not_take_itself_for_slow_because_one_other_is() -> None:
    """What it has for the fast one is gone within one look: nothing was measured, so it is as fast
    as its operator says."""
    fast = Carrying("fast", bytes_per_s=12 * MB, count=2 * MB)
    slow = Carrying("slow", bytes_per_s=3 * MB, count=30 * MB)
    assert seen(fast, slow) is None


def test_what_two_links_carry_together_is_told() -> None:
    links = [Carrying(name, bytes_per_s=6 * MB, count=30 * MB) for name in "ab"]
    assert seen(*links) == pytest.approx(12 * MB)


def test_with_a_single_link_there_is_nobody_to_tell_apart() -> None:
    assert seen(Carrying("only", bytes_per_s=6 * MB, count=30 * MB)) == pytest.approx(6 * MB)


def test_half_a_round_on_a_crowded_machine_is_no_rate_yet() -> None:
    """One sample below the line's rate would move parts away from this peer at once."""
    links = [Carrying(name, bytes_per_s=3 * MB, count=4 * MB) for name in "ab"]
    assert seen(*links) is None
