"""S4: of eight peers one is on a link ten times slower, and another is stopped for a minute.

One rule: what a link carries is made by the proxies; what a daemon is told of it is what its
operator would write into the settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from moshpitd.client import Result
from tests.kit.fleet import Fleet

PEERS, SLOW, FROZEN = 8, 7, 6
EVERYBODY = frozenset(range(PEERS))
FAST = EVERYBODY - {SLOW}
FAST_BYTES_S, SLOW_BYTES_S = 20e6, 2e6
FLOATS = 1_500_000  # 6 MB: 0.3 s on a fast link, 3 s on the slow one
OWN_S = 4 * FLOATS / SLOW_BYTES_S
PACED_ROUNDS = 2  # until the reducers are believed
ROUNDS = 8
MINUTE_S = 60.0
GIVEN_UP_S = 8.0


def mbps(bytes_s: float) -> tuple[str, str]:
    rate = 8e-6 * bytes_s
    return f"network.up_mbps={rate}", f"network.down_mbps={rate}"


def a_round(fleet: Fleet, of: Iterable[int]) -> dict[int, Result]:
    return fleet.answers(fleet.ask(of))


def exchange_s(results: dict[int, Result]) -> float:
    """How long the round took, for all but the slow one."""
    return max(
        one.seconds["exchange"] + one.seconds["parity"] for i, one in results.items() if i != SLOW
    )


def as_it_should_be(fleet: Fleet, results: dict[int, Result]) -> bool:
    """All parts have a result and the same bits everywhere, each the mean of all or of all but the
    slow one. True if those say so who may be left out."""
    here = frozenset(results)
    number = fleet.round_number
    slow_id = fleet.daemons[SLOW].peer_id
    for i, result in results.items():
        assert result.accepted, (i, str(result))
        assert result.parts_without_result == (), (i, str(result))
        assert set(fleet.mixes(i)) <= {(number, here), (number, here - {SLOW})}, (i, str(result))
        assert set(result.excluded.items()) <= {(slow_id, "too_slow")}, (i, str(result))
    assert fleet.same_bits(here)
    return all(set(result.excluded) == {slow_id} for result in results.values())


@pytest.mark.timeout(900)
def test_a_slow_link_and_a_stopped_daemon_do_not_pace_the_others(place: Path) -> None:
    own = {i: mbps(SLOW_BYTES_S if i == SLOW else FAST_BYTES_S) for i in range(PEERS)}
    with Fleet(place, PEERS, proxied=True, floats=FLOATS, own=own) as fleet:
        for i, path in enumerate(fleet.links):
            path.slow(0.0, SLOW_BYTES_S if i == SLOW else FAST_BYTES_S)
        fast_s = sorted(exchange_s(a_round(fleet, FAST)) for _ in range(3))[1]
        for _ in range(PACED_ROUNDS):
            as_it_should_be(fleet, a_round(fleet, EVERYBODY))
        took, brought = [], 0
        for _ in range(ROUNDS):
            before = (fleet.links[SLOW].there.passed, fleet.links[SLOW].back.passed)
            results = a_round(fleet, EVERYBODY)
            took.append(exchange_s(results))
            assert as_it_should_be(fleet, results)
            brought += fleet.mixes(0).get((fleet.round_number, EVERYBODY), 0)
            down = fleet.links[SLOW].there.passed - before[0]
            up = fleet.links[SLOW].back.passed - before[1]
            print(f"fast {fast_s:.2f} s, with the slow one {took[-1]:.2f} s, {up} up, {down} down")
            # Its own copy of the result once, and what it can bring: nothing is sent in vain.
            assert up < 0.6 * 4 * FLOATS
            assert down < 1.1 * 4 * FLOATS
        # Nobody waits for the three seconds that it needs, once in and once out. What a death may
        # cost: a half more, and half a second.
        assert sorted(took)[ROUNDS // 2] < 1.5 * fast_s + 0.5 < OWN_S, (fast_s, took)
        assert brought > 0  # and it is not left out altogether

        others = EVERYBODY - {FROZEN}
        asked = fleet.ask(timeout_s=2 * MINUTE_S)
        fleet.in_phase(FROZEN, "exchange")
        fleet.stop(FROZEN)
        frozen_at = time.monotonic()
        results = fleet.answers(asked, FAST - {FROZEN})
        took_s = time.monotonic() - frozen_at
        assert took_s < fast_s + GIVEN_UP_S, took_s
        results |= fleet.answers(asked, [SLOW])
        for i in others:
            assert results[i].accepted, str(results[i])
            assert results[i].parts_without_result == (), str(results[i])
            inside = {members for number, members in fleet.mixes(i)}
            assert {EVERYBODY - one for one in inside} <= {
                frozenset(), frozenset({SLOW}), frozenset({FROZEN}), frozenset({SLOW, FROZEN})
            }  # fmt: skip
        assert fleet.same_bits(others)
        while time.monotonic() - frozen_at < MINUTE_S:
            as_it_should_be(fleet, a_round(fleet, others))
        fleet.cont(FROZEN)
        stale = fleet.answers(asked, [FROZEN], within_s=60.0)[FROZEN]
        assert stale.version < fleet.sessions[0].version, str(stale)
        for _ in range(6):
            results = a_round(fleet, EVERYBODY)
            for i in others:
                assert {n for n, _ in fleet.mixes(i)} == {fleet.round_number}, str(results[i])
            if all(one.participants >= PEERS - 1 for one in results.values()):
                break
        assert all(one.group_size == PEERS for one in results.values()), str(results[FROZEN])
        as_it_should_be(fleet, results)
        assert fleet.tracebacks() == []
