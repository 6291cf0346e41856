"""Daemons that are stopped for a minute in the middle of a round, and go on. integration/ has the
same for some seconds.

One rule: the minute is real; everything else ends by its own deadline.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kit.fleet import Fleet
from tests.kit.frozen import freeze_and_thaw

MINUTE_S = 60.0
MAX_LAG = 8  # the default of max_version_lag
GIVEN_UP_S = 8.0
"""Silence of 1.2 s, what it leads to, and the machine's own business; less than `part_timeout_s`
(10 s), the fixed bound."""


@pytest.mark.timeout(300)
async def test_a_daemon_that_freezes_for_a_minute_is_left_out_and_catches_up(place: Path) -> None:
    await freeze_and_thaw(place, frozen_s=MINUTE_S, rounds=10)


@pytest.mark.parametrize("behind", [MAX_LAG - 4, MAX_LAG + 2])
def test_the_others_are_not_paced_and_the_woken_one_takes_a_snapshot_if_it_is_far_behind(
    behind: int, place: Path
) -> None:
    """Within max_version_lag its own values count in the next average; beyond it they are given up
    for a snapshot."""
    with Fleet(place, 4) as fleet:
        undisturbed_s, round_bytes = fleet.measure()
        survivors = frozenset(range(3))
        base = fleet.moved()
        asked = fleet.ask(timeout_s=2 * MINUTE_S)
        fleet.wait_moved(base, round_bytes // 2)
        fleet.stop(3)
        frozen_at = time.monotonic()
        results = fleet.answers(asked, survivors)
        took_s = time.monotonic() - frozen_at
        assert took_s < 3 * undisturbed_s + GIVEN_UP_S, took_s
        number = fleet.round_number
        for i in survivors:
            assert results[i].accepted, str(results[i])
            assert results[i].parts_without_result == (), str(results[i])
            assert set(fleet.mixes(i)) <= {(number, frozenset(range(4))), (number, survivors)}
        assert fleet.same_bits(survivors)
        slept = [fleet.whole_round(survivors) for _ in range(behind)]
        # Waited for in vain in two windows at most, then it no longer holds anybody up.
        assert sorted(slept)[-3] < 3 * undisturbed_s + 1.0, slept
        newest = fleet.sessions[0].version
        time.sleep(max(0.0, MINUTE_S - (time.monotonic() - frozen_at)))  # the minute itself

        fleet.cont(3)
        stale = fleet.answers(asked, [3], within_s=60.0)[3]
        assert stale.version < newest
        # No stale part in anybody, from here on: everybody's next values are of the next round.
        loaded = False
        for _ in range(6):
            results = fleet.answers(fleet.ask())
            loaded = loaded or results[3].loaded_snapshot
            for i in survivors:
                assert {n for n, _ in fleet.mixes(i)} == {fleet.round_number}, str(results[i])
            if all(one.participants == 4 for one in results.values()):
                break
        assert all(one.participants == 4 for one in results.values()), str(results[3])
        assert results[3].version == results[0].version > newest
        assert loaded == (behind > MAX_LAG)
        assert fleet.same_bits()
        assert fleet.tracebacks() == []
