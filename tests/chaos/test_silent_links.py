"""Links that are half open: connections stand, bytes are accepted, and nothing comes out. Of one
peer, between two, and between two halves of a group that meet again.

One rule: the network is made silent, on control and bulk links alike, and nobody is told.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.kit.fleet import Fleet

GIVEN_UP_S = 8.0
"""A silent peer is out after 1.2 s of silence (`silence_min_s`), its parts are taken over, and
somebody else may be waited for in turn. Below `part_timeout_s` (10 s) and far below
`result_timeout_s` (25 s), the fixed bounds."""
LATE = 3  # silences that may come after the end of their round
MET_S = 90.0
"""p2pd gives a dead connection up after half a minute, and waits up to 20 s between two dials."""


@pytest.fixture
def four(place: Path) -> Fleet:
    return Fleet(place, 4, proxied=True)


def distortion(fleet: Fleet) -> float:
    """Mean square distance of the trainers' parameters from their mean."""
    held = torch.stack([tensor.double() for tensor in fleet.tensors])
    return float((held - held.mean(0)).square().sum(1).mean())


def test_a_peer_whose_links_fall_silent_is_left_out_at_the_adaptive_deadline(four: Fleet) -> None:
    with four as fleet:
        undisturbed_s, round_bytes = fleet.measure()
        everybody, survivors = frozenset(range(4)), frozenset(range(3))
        shares, late = [0.8, 0.3], 0
        while shares:
            share = shares.pop()
            base = fleet.moved()
            asked = fleet.ask()
            fleet.wait_moved(base, int(share * round_bytes))
            fleet.silence([3], survivors)
            began = time.monotonic()
            results = fleet.answers(asked, survivors)
            took_s = time.monotonic() - began
            assert took_s < 3 * undisturbed_s + GIVEN_UP_S, took_s
            number = fleet.round_number
            for i in survivors:
                assert results[i].accepted, str(results[i])
                assert results[i].parts_without_result == ()
                # Whole parts, of all or of those that stayed; nothing else, and nothing local.
                assert set(fleet.mixes(i)) <= {(number, everybody), (number, survivors)}
            assert fleet.same_bits(survivors)
            alone = fleet.answers(asked, [3])[3]
            if alone.status == "complete":
                # On a crowded machine the links may fall silent after the last part: once more.
                assert set(fleet.mixes(3)) == {(number, everybody)}
                late += 1
                assert late <= LATE, "the round is always over before its links fall silent"
                shares.append(share)
                fleet.heal()
                fleet.settle(rounds=10)
                continue
            # Means of whoever it heard, in whole parts; it cannot know what the others came to.
            assert all(3 in members for _, members in fleet.mixes(3))
            fleet.whole_round(survivors)
            fleet.heal()
            began = time.monotonic()
            while fleet.settle(rounds=10) and time.monotonic() - began > MET_S:
                pytest.fail(f"not together again within {MET_S:g} s")
            fleet.whole_round()
        assert fleet.tracebacks() == []


def test_a_silent_link_between_two_costs_the_others_nothing(four: Fleet) -> None:
    """1 and 2 do not hear each other; 0 and 3 hear both."""
    with four as fleet:
        undisturbed_s, round_bytes = fleet.measure()
        base = fleet.moved()
        asked = fleet.ask()
        fleet.wait_moved(base, round_bytes // 3)
        fleet.silence([1], [2])
        for _ in range(5):
            began = time.monotonic()
            results = fleet.answers(asked)
            took_s = time.monotonic() - began
            assert took_s < 3 * undisturbed_s + GIVEN_UP_S, took_s
            for i in (0, 3):
                assert results[i].accepted, str(results[i])
                assert results[i].parts_without_result == ()
                for _, members in fleet.mixes(i):
                    assert {0, 3} <= members
                    assert len(members) >= 3, members
            assert fleet.same_bits([0, 3])
            asked = fleet.ask()
        fleet.answers(asked)
        fleet.heal()
        fleet.settle()
        fleet.whole_round()
        assert fleet.tracebacks() == []


@pytest.mark.parametrize("count", [4, 6])
def test_both_halves_of_a_partition_go_on_and_meet_again(count: int, place: Path) -> None:
    with Fleet(place, count, proxied=True) as fleet:
        undisturbed_s, round_bytes = fleet.measure()
        halves = [range(0, count, 2), range(1, count, 2)]
        base = fleet.moved()
        asked = fleet.ask()
        fleet.wait_moved(base, round_bytes // 3)
        fleet.silence(*halves)
        began = time.monotonic()
        results = fleet.answers(asked)
        took_s = time.monotonic() - began
        assert took_s < 3 * undisturbed_s + GIVEN_UP_S, took_s
        for half in halves:
            for i in half:
                # Means of whoever was heard, in whole parts, and nothing that is nobody's mean.
                assert all(i in members for _, members in fleet.mixes(i)), str(results[i])
        # Each side trains on with its own contributors.
        for _ in range(3):
            for half in halves:
                fleet.settle(half)
                for i in half:
                    assert set(fleet.mixes(i)) == {(fleet.round_number, frozenset(half))}
        versions = [fleet.sessions[half[0]].version for half in halves]
        before = distortion(fleet)
        truth = torch.stack([tensor.double() for tensor in fleet.tensors]).mean(0)
        assert before > 1.0

        fleet.heal()
        began = time.monotonic()
        while True:
            results = fleet.answers(fleet.ask(fill=False))
            if all(one.participants == count for one in results.values()):
                break
            assert distortion(fleet) <= before * (1 + 1e-6)
            assert time.monotonic() - began < MET_S, {i: str(r) for i, r in results.items()}
        assert fleet.same_bits()
        assert distortion(fleet) == 0.0
        assert (fleet.tensors[0] - truth).abs().max() < 0.1
        assert results[0].version > max(versions)
        assert fleet.tracebacks() == []
