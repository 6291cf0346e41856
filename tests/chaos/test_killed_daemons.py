"""Daemons that are killed at any moment, and daemons that are all restarted in turn, while trainers
go on training.

One rule: a trainer's view is what is judged: its steps, its results, its parameters.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from moshpitd.client import DaemonUnavailable
from tests.kit.crew import Crew
from tests.kit.fleet import Fleet
from tests.kit.processes import wait_for

KILLS = 8
PAUSE_S = 12.0
"""No trainer stands still for longer: a window (2 s), a silence and what it leads to (8 s, as in
test_silent_links), and the machine's own business."""
ATTACHED_S = 60.0  # a daemon is seconds of a core to start, and somebody else has the core
TOGETHER_S = 60.0
NEAR = 0.1
"""Of the optima's spread: a trainer that never averaged would end 0.5 away, and one whose steps
while its daemon was away counted for nothing would leave the mean 0.1 to 0.2 off."""


@pytest.mark.timeout(900)
def test_daemons_killed_at_random_moments_of_rounds(place: Path) -> None:
    rng = random.Random(21)
    with Fleet(place, 4) as fleet:
        undisturbed_s, _ = fleet.measure()
        with Crew(fleet) as crew:
            crew.together(4, TOGETHER_S)
            for turn in range(KILLS):
                victim = rng.randrange(4)
                daemon = fleet.daemons[victim]
                others = [one for one in crew.trainers if one.index != victim]
                if turn % 2:
                    fleet.in_phase(victim, "exchange")
                time.sleep(rng.uniform(0.0, undisturbed_s))  # a moment is what is drawn
                killed_at = time.monotonic()
                daemon.kill()
                # Whoever lives is in a round of the three that live before the fourth is back.
                wait_for(
                    lambda others=others, at=killed_at: all(
                        any(r.participants == 3 for r in one.since(at)) for one in others
                    ),
                    TOGETHER_S,
                    "the three that live are in a round",
                )
                for one in others:
                    for result in one.since(killed_at):
                        assert result.accepted, (turn, one.index, str(result))
                        assert result.parts_without_result == (), (turn, one.index, str(result))
                daemon.start()
                session = fleet.sessions[victim]
                wait_for(lambda s=session: s.attached, ATTACHED_S, f"trainer {victim} is back")
                crew.together(4, TOGETHER_S)
            pauses = [one.pause_s() for one in crew.trainers]
            assert max(pauses) < PAUSE_S, pauses
            missed = sum(one.optimizer.missed for one in crew.trainers)
            assert missed > 0  # they did train without a daemon
        fleet.settle(fill=False)
        assert fleet.same_bits()
        assert crew.off() < NEAR, crew.off()
        assert fleet.tracebacks() == []


@pytest.mark.timeout(900)
def test_all_daemons_restarted_one_after_another_while_trainers_go_on(place: Path) -> None:
    with Fleet(place, 4) as fleet:
        with Crew(fleet) as crew:
            crew.together(4, TOGETHER_S)
            for i, daemon in enumerate(fleet.daemons):
                began = time.monotonic()
                daemon.signal(signal.SIGTERM)
                assert daemon.wait(30.0) == 0
                others = [one for one in crew.trainers if one.index != i]
                wait_for(
                    lambda others=others, at=began: all(
                        any(r.participants == 3 for r in one.since(at)) for one in others
                    ),
                    TOGETHER_S,
                    "the three that stay are in a round",
                )
                for one in others:
                    # It said that it leaves: nobody had to find out, and nothing is missing.
                    for result in one.since(began):
                        assert result.accepted, (i, one.index, str(result))
                        assert result.parts_without_result == (), (i, one.index, str(result))
                daemon.start()
                session = fleet.sessions[i]
                wait_for(lambda s=session: s.attached, ATTACHED_S, f"trainer {i} is back")
                crew.together(4, TOGETHER_S)
            pauses = [one.pause_s() for one in crew.trainers]
            assert max(pauses) < PAUSE_S, pauses
        fleet.settle(fill=False)
        assert fleet.same_bits()
        assert crew.off() < NEAR, crew.off()
        assert fleet.tracebacks() == []


ROLES = {"the leader": 0, "a reducer": 1, "a sender": 3}


@pytest.mark.timeout(900)
def test_whoever_is_killed_before_or_after_begin_the_outcome_is_the_same(place: Path) -> None:
    """S21. Node 0 leads and reduces, 1 and 2 reduce, 3 only sends: its link is a thousandth."""
    slow = ("network.up_mbps=1.0", "network.down_mbps=1.0")
    with Fleet(place, 4, own={3: slow}) as fleet:
        undisturbed_s, round_bytes = fleet.measure()
        everybody = frozenset(range(4))
        for role, victim in ROLES.items():
            others = sorted(everybody - {victim})
            last = 2  # the one that the group waits for
            for begun in (False, True):
                case = f"{role}, {'after' if begun else 'before'} Begin"
                if begun:
                    base = fleet.moved()
                    asked = fleet.ask()
                    fleet.wait_moved(base, round_bytes // 3)
                    fleet.daemons[victim].kill()
                else:
                    asked = fleet.ask(everybody - {last})
                    fleet.in_phase(victim, "matchmaking")
                    fleet.daemons[victim].kill()
                    asked |= fleet.join(last)
                killed_at = time.monotonic()
                results = fleet.answers(asked, others)
                took_s = time.monotonic() - killed_at
                assert took_s < 10.0 + 2 * undisturbed_s, (case, took_s)
                with pytest.raises(DaemonUnavailable):
                    fleet.answers(asked, [victim])
                for i in others:
                    assert results[i].accepted, (case, i, str(results[i]))
                    assert results[i].participants >= 3, (case, i, str(results[i]))
                    assert results[i].parts_without_result == (), (case, i, str(results[i]))
                    mixes = {members for _, members in fleet.mixes(i)}
                    assert mixes <= {everybody, frozenset(others)}, (case, i, mixes)
                assert fleet.same_bits(others), case
                assert set(fleet.mixes(victim)) == {(fleet.round_number, frozenset([victim]))}
                fleet.restart(victim)
                fleet.settle()
        assert fleet.tracebacks() == []
