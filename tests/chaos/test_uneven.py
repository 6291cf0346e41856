"""S4: of eight peers one is on a link ten times slower, and another is stopped for a minute.

One rule: what a link carries is made by the proxies; what a daemon is told of it is what its
operator would write into the settings.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kit.fleet import Fleet

PEERS, SLOW, FROZEN = 8, 7, 6
FAST_BYTES_S, SLOW_BYTES_S = 20e6, 2e6
FLOATS = 1_500_000  # 6 MB: 0.3 s on a fast link, 3 s on the slow one
MINUTE_S = 60.0
GIVEN_UP_S = 8.0


def mbps(bytes_s: float) -> tuple[str, str]:
    rate = 8e-6 * bytes_s
    return f"network.up_mbps={rate}", f"network.down_mbps={rate}"


@pytest.mark.timeout(900)
def test_a_slow_link_and_a_stopped_daemon_do_not_pace_the_others(place: Path) -> None:
    own = {i: mbps(SLOW_BYTES_S if i == SLOW else FAST_BYTES_S) for i in range(PEERS)}
    with Fleet(place, PEERS, proxied=True, floats=FLOATS, own=own) as fleet:
        for i, path in enumerate(fleet.links):
            path.slow(0.0, SLOW_BYTES_S if i == SLOW else FAST_BYTES_S)
        fast = [i for i in range(PEERS) if i != SLOW]
        fast_s = sorted(fleet.whole_round(fast) for _ in range(3))[1]
        slow_s = []
        for _ in range(3):
            before = (fleet.links[SLOW].there.passed, fleet.links[SLOW].back.passed)
            slow_s.append(fleet.whole_round())
            down = fleet.links[SLOW].there.passed - before[0]
            up = fleet.links[SLOW].back.passed - before[1]
            print(
                f"fast {fast_s:.2f} s, with the slow one {slow_s[-1]:.2f} s, {up} up, {down} down"
            )
            # Its own contribution and its own copy of the result once, and nothing for others:
            # as an equal it would carry 1.75 times as much.
            assert up < 1.1 * 4 * FLOATS
            assert down < 1.1 * 4 * FLOATS
        assert sorted(slow_s)[1] < 1.3 * 4 * FLOATS / SLOW_BYTES_S + fast_s

        others = frozenset(range(PEERS)) - {FROZEN}
        asked = fleet.ask(timeout_s=2 * MINUTE_S)
        fleet.in_phase(FROZEN, "exchange")
        fleet.stop(FROZEN)
        frozen_at = time.monotonic()
        results = fleet.answers(asked, others)
        took_s = time.monotonic() - frozen_at
        assert took_s < slow_s[1] + GIVEN_UP_S, took_s
        number = fleet.round_number
        for i in others:
            assert results[i].accepted, str(results[i])
            assert results[i].parts_without_result == (), str(results[i])
            everybody = frozenset(range(PEERS))
            assert set(fleet.mixes(i)) <= {(number, everybody), (number, others)}
        assert fleet.same_bits(others)
        while time.monotonic() - frozen_at < MINUTE_S:
            fleet.whole_round(others)
        fleet.cont(FROZEN)
        stale = fleet.answers(asked, [FROZEN], within_s=60.0)[FROZEN]
        assert stale.version < fleet.sessions[0].version, str(stale)
        for _ in range(6):
            results = fleet.answers(fleet.ask())
            for i in others:
                assert {n for n, _ in fleet.mixes(i)} == {fleet.round_number}, str(results[i])
            if all(one.participants == PEERS for one in results.values()):
                break
        assert all(one.participants == PEERS for one in results.values()), str(results[FROZEN])
        assert fleet.same_bits()
        assert fleet.tracebacks() == []
