"""The pure part of `bench churn`: the plan of faults, and what two legs add up to."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from moshpitd.cli.bench_faults import (
    FREEZE_S,
    KINDS,
    RECOVERY_S,
    Diary,
    Fault,
    Leg,
    compare,
    plan_faults,
)
from moshpitd.testing.bench import learner

NAMES = ["A", "B", "C", "D"]


@pytest.mark.parametrize("seed", range(20))
def test_faults_spare_half_of_the_nodes_and_let_victims_rest(seed: int) -> None:
    plan = plan_faults(12, nodes=12, leg_s=300.0, rng=random.Random(seed))
    assert len(plan) == 12
    assert {fault.kind for fault in plan} == set(KINDS)
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert all(fault.node >= 6 for fault in plan)
    assert all(FREEZE_S[0] <= f.for_s <= FREEZE_S[1] for f in plan if f.kind == "freeze")
    for node in range(6, 12):
        own = [fault for fault in plan if fault.node == node]
        for earlier, later in pairwise(own):
            assert later.at_s >= earlier.at_s + earlier.for_s + RECOVERY_S
    assert plan == plan_faults(12, nodes=12, leg_s=300.0, rng=random.Random(seed))


def diary(*, steps_per_s: float = 2.0, rounds: int = 10, inside: str = "ABCD") -> Diary:
    """A hundred seconds from instant 1000 on."""
    it = Diary()
    it.hear({"event": "start", "at": 990.0})
    for second in range(0, 101, 5):
        step = round(second * steps_per_s)
        it.hear({"event": "step", "at": 1000.0 + second, "step": step, "missed": 0})
    for number in range(rounds):
        at = 1001.0 + number * 99 / max(1, rounds)
        it.hear(average(at, f"g{number}", inside))
    it.hear({"event": "end", "at": 1100.5, "step": 201, "missed": 0, "loss": 0.02})
    return it


def average(at: float, group: str, inside: str, status: str = "complete") -> dict[str, Any]:
    return {
        "event": "round",
        "at": at,
        "status": status,
        "participants": len(inside),
        "contributors": list(inside),
        "group_id": group,
    }


def leg(*diaries: Diary, done: list[tuple[Fault, float, float]] | None = None) -> Leg:
    return Leg(1000.0, 1100.0, list(diaries), NAMES, done or [], busy=0.3)


def test_two_equal_legs_have_ratios_of_one() -> None:
    quiet = leg(*(diary() for _ in NAMES))
    found = compare(quiet, quiet, [], seed=1)
    assert found["throughput_ratio"] == found["rounds_ratio"] == 1.0
    assert found["loss"] == found["loss_undisturbed"] == 0.02
    assert found["leaks"] == found["faults"] == []
    assert [bar["met"] for bar in found["bars"] if bar["value"] is not None] == [True] * 5


def test_steps_that_survivors_lose_show() -> None:
    slow = leg(*(diary(steps_per_s=1.8, rounds=8) for _ in NAMES))
    found = compare(leg(*(diary() for _ in NAMES)), slow, ["a socket"], seed=1)
    assert found["throughput_ratio"] == pytest.approx(0.9)
    assert found["rounds_ratio"] == pytest.approx(0.8)
    missed = [bar["what"] for bar in found["bars"] if bar["met"] is False]
    assert any("steps" in words for words in missed)
    assert any("rounds lost" in words for words in missed)
    assert any("leaked" in words for words in missed)


def test_a_trainer_that_was_killed_or_frozen_is_no_survivor() -> None:
    done = [
        (Fault("kill_trainer", 2, 10.0), 1010.0, 1020.0),
        (Fault("kill_daemon", 3, 30.0), 1030.0, 1040.0),
    ]
    stormy = leg(diary(), diary(), diary(steps_per_s=0.5), diary(), done=done)
    found = compare(leg(*(diary() for _ in NAMES)), stormy, [], seed=1)
    assert found["survivors"] == [0, 1, 3]
    assert found["throughput_ratio"] == 1.0
    assert found["faults"][1]["kind"] == "kill_daemon"
    assert (found["faults"][1]["began_s"], found["faults"][1]["over_s"]) == (30.0, 40.0)


def test_a_round_lacks_nobody_who_had_no_fault() -> None:
    done = [(Fault("kill_daemon", 3, 30.0), 1030.0, 1040.0)]
    during, after = average(1045.0, "x", "ABC"), average(1080.0, "y", "ABC")
    first, second = diary(rounds=0), diary(rounds=0)
    for line in (during, after):
        first.hear(line)
        second.hear(line)  # seen by two, counted once
    found = leg(first, second, diary(), diary(), done=done).whole_rounds()
    assert (found["whole"], found["seen"]) == (1, 2)
    (short,) = found["short"]
    assert (short["at_s"], short["missing"], short["hurt"]) == (80.0, [3], [])


def test_a_second_life_counts_for_rounds_and_not_for_steps() -> None:
    it = diary(rounds=1)
    it.hear({"event": "start", "at": 1050.0})
    it.hear({"event": "step", "at": 1060.0, "step": 3, "missed": 0})
    it.hear(average(1061.0, "later", "ABCD"))
    assert it.steps_per_s(1000.0, 1100.0) == 2.0
    assert len(it.together(1000.0, 1100.0)) == 2
    it.hear(average(1062.0, "alone", "A", status="alone"))
    assert len(it.together(1000.0, 1100.0)) == 2


def test_the_final_loss_is_one_of_whole_cycles_and_not_of_an_instant() -> None:
    """A model that drifts for nine steps after every average, and an end right after one."""
    best = torch.nn.Linear(learner.DIMENSIONS, 1, bias=False)
    cycle = [learner.truth() + 0.05 * drift for drift in range(10)]
    ends = []
    for end in (200, 209):
        final = learner.FinalLoss()
        for step in range(end + 1):
            with torch.no_grad():
                best.weight.copy_(cycle[step % 10])
            final.note(0.5 * step, best)
        ends.append(final.mean)
    near, far = ends
    assert abs(near - far) < 0.1 * near, "at their instants they are the best and the worst"
