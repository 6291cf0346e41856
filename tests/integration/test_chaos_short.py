"""The cases of chaos/ that are worth the most, once each and small, on one fleet of three daemons.

One rule: every test but the last leaves all three in one round, for the next; the long forms with
their figures are in chaos/.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moshpitd.client import DaemonUnavailable, Result
from tests.kit.fleet import Fleet

EVERYBODY = frozenset(range(3))
GIVEN_UP_S = 8.0
"""1.2 s of silence, a takeover, a loaded machine; `part_timeout_s`, the fixed bound, is 10 s."""
AGAIN_S = 10.0  # S21: in a group again, with the leader lost before Begin

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with (
        tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name,
        Fleet(Path(name), 3, proxied=True) as fleet,
    ):
        yield fleet


def whole_parts_of(fleet: Fleet, results: dict[int, Result], survivors: frozenset[int]) -> None:
    """Every part has a result, it is the mean of all or of the survivors, and they agree."""
    for i in survivors:
        assert results[i].accepted, str(results[i])
        assert results[i].parts_without_result == (), str(results[i])
        assert {members for _, members in fleet.mixes(i)} <= {EVERYBODY, survivors}
    assert fleet.same_bits(survivors)


def test_a_peer_whose_links_fall_silent_in_a_round(fleet: Fleet) -> None:
    undisturbed_s, round_bytes = fleet.measure()
    survivors = frozenset([0, 1])
    base = fleet.moved()
    asked = fleet.ask()
    fleet.wait_moved(base, round_bytes // 3)
    fleet.silence([2], survivors)
    began = time.monotonic()
    try:
        results = fleet.answers(asked, survivors)
        assert time.monotonic() - began < 3 * undisturbed_s + GIVEN_UP_S
        whole_parts_of(fleet, results, survivors)
        assert fleet.answers(asked)[2].status != "complete"
        assert all(2 in members for _, members in fleet.mixes(2))
    finally:
        fleet.heal()
    fleet.settle()


def test_the_leader_killed_before_begin(fleet: Fleet) -> None:
    survivors = frozenset([1, 2])
    asked = fleet.ask([0, 1])
    fleet.in_phase(1, "matchmaking")
    fleet.daemons[0].kill()
    killed_at = time.monotonic()
    asked |= fleet.join(2)
    results = fleet.answers(asked, survivors)
    assert time.monotonic() - killed_at < AGAIN_S
    whole_parts_of(fleet, results, survivors)
    assert [results[i].participants for i in survivors] == [2, 2]
    with pytest.raises(DaemonUnavailable):
        fleet.answers(asked, [0])
    fleet.restart(0)
    fleet.settle()


def test_a_reducer_killed_in_the_exchange(fleet: Fleet) -> None:
    undisturbed_s, round_bytes = fleet.measure()
    survivors = frozenset([0, 2])
    base = fleet.moved()
    asked = fleet.ask()
    fleet.wait_moved(base, round_bytes // 2)
    fleet.daemons[1].kill()
    killed_at = time.monotonic()
    results = fleet.answers(asked, survivors)
    assert time.monotonic() - killed_at < 3 * undisturbed_s + GIVEN_UP_S
    whole_parts_of(fleet, results, survivors)
    fleet.whole_round(survivors)
    assert fleet.tracebacks() == []
