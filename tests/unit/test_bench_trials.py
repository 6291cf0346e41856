"""The pure part of `bench death`: moments, and verdicts over made-up survivors."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moshpitd.cli.bench_meters import Moved
from moshpitd.cli.bench_trials import (
    WEIGHTS,
    Course,
    Moment,
    Trial,
    bars_of,
    counts,
    draw_moment,
    hit,
    judge,
    plan_moments,
    third_of,
    wrong_weights,
)

NAMES = ["A", "B", "C", "D"]
MIB = 1 << 20


@pytest.mark.parametrize("trials", [1, 2, 3, 6, 7, 30])
def test_a_sixth_of_the_trials_is_forced_into_each_place(trials: int) -> None:
    moments = plan_moments(trials, random.Random(3))
    assert len(moments) == trials
    places = [moment.place for moment in moments]
    for place in ("first_third", "last_third", "after_first_result"):
        if trials >= 3:
            assert places.count(place) >= trials / 6, place
    for moment in moments:
        if moment.place in ("first_third", "last_third"):
            assert hit(moment, fraction=moment.at, after_first_result=False)


def test_the_same_seed_plans_the_same_moments() -> None:
    assert plan_moments(30, random.Random(5)) == plan_moments(30, random.Random(5))
    assert plan_moments(30, random.Random(5)) != plan_moments(30, random.Random(6))


def test_moments_anywhere_cover_the_round() -> None:
    rng = random.Random(1)
    thirds = {third_of(draw_moment("anywhere", rng).at) for _ in range(100)}
    assert thirds == {"first", "middle", "last"}
    assert third_of(1.0) == third_of(1.2) == "last"


def course(reduced: float, *, peers: int = 4, payload: int = 200 * MIB) -> Course:
    """Of a peer that reduces this share of the parts."""
    sent = round(payload * (1 - reduced) + payload * reduced * (peers - 1))
    received = round(payload * reduced * (peers - 1) + payload * (1 - reduced))
    return Course(Moved(sent, received), payload, peers)


@pytest.mark.parametrize("reduced", [0.0, 0.1, 0.25, 0.5])
def test_a_result_has_left_only_when_more_was_sent_than_all_contributions(reduced: float) -> None:
    it = course(reduced)
    contributions = it.payload * (1 - reduced)
    assert contributions < it.result_left < contributions * 1.04
    alone = course(0.5, peers=2)
    assert alone.result_left > alone.payload / 2


def test_a_moment_comes_when_its_bytes_have_moved() -> None:
    it = course(0.25)
    half = Moment("anywhere", 0.5)
    assert it.wait(half, Moved()) == 0.5
    assert it.wait(half, Moved(it.moved.sent // 2, it.moved.received // 2)) <= 1e-6
    late = Moment("after_first_result", 0.0)
    assert it.wait(late, Moved(it.result_left - MIB, 0)) > 0
    assert it.wait(late, Moved(it.result_left, 0)) <= 0


def result(*, inside: str = "ABC", weights: Any = WEIGHTS, **fields: Any) -> dict[str, Any]:
    told = {
        "status": "partial",
        "reason": "link_lost",
        "accepted": True,
        "group_size": 4,
        "participants": len(inside),
        "contributors": list(inside),
        "excluded": {"D": "link_lost"},
        "parts": 10,
        "parts_without_result": 0,
        "rounds": 1,
        "total_weight": float(sum(weights[NAMES.index(name)] for name in inside)),
        "group_id": "01",
    }
    return {"began": 10.0, "ended": 11.0, "result": {**told, **fields}}


def check(inside: dict[str, int] | None = None, **fields: Any) -> dict[str, Any]:
    found = {"inside": inside or {"0,1,2": 4, "0,1,2,3": 6}, "sha256": "same", "unexplained": 0}
    return {**found, "parts": 10, "first_unexplained": [], **fields}


def judged(answers: dict[int, Any], checks: dict[int, Any]) -> Trial:
    trial = Trial(1, [3], "anywhere", 0.5, [0.5], "middle", False)
    judge(trial, answers, checks, peer_ids=NAMES, weights=WEIGHTS[:4])
    return trial


def all_well() -> tuple[dict[int, Any], dict[int, Any]]:
    return {i: result() for i in range(3)}, {i: check() for i in range(3)}


def test_survivors_who_finish_agree_and_account_pass() -> None:
    trial = judged(*all_well())
    assert (trial.completed, trial.bit_equal, trial.weights_exact, trial.retried) == (
        True,
        True,
        True,
        False,
    )
    assert (trial.seconds, trial.excluded, trial.problems) == (1.0, {"3": "link_lost"}, [])


def test_a_part_without_a_result_is_not_completed_but_may_account() -> None:
    answers, checks = all_well()
    answers[0] = result(parts_without_result=2)
    checks[0] = check({"0": 2, "0,1,2": 8}, sha256="other")
    trial = judged(answers, checks)
    assert (trial.completed, trial.bit_equal, trial.weights_exact) == (False, False, True)


def test_a_survivor_that_fails_fails_everything() -> None:
    answers, checks = all_well()
    answers[1] = {"began": 10.0, "ended": 12.0, "error": "DaemonUnavailable: gone"}
    trial = judged(answers, checks)
    assert (trial.completed, trial.bit_equal, trial.weights_exact) == (False, False, False)
    assert trial.problems == ["survivor 1: DaemonUnavailable: gone"]


def test_a_survivor_that_is_missing_from_a_part_is_not_completed() -> None:
    answers, checks = all_well()
    checks = {i: check({"0,1": 1, "0,1,2,3": 9}) for i in checks}
    answers = {i: result(inside="AB") for i in answers}
    trial = judged(answers, checks)
    assert not trial.completed
    assert trial.weights_exact


@pytest.mark.parametrize(
    "fields",
    [{"group_size": 3}, {"rounds": 2}, {"group_id": "02"}],
    ids=lambda one: next(iter(one)),
)
def test_a_second_round_is_a_retry(fields: dict[str, Any]) -> None:
    answers, checks = all_well()
    answers[2] = result(**fields)
    assert judged(answers, checks).retried


@pytest.mark.parametrize(
    ("told", "found", "words"),
    [
        ({"total_weight": 16.0}, {}, "told a weight of 16.0, expected 15"),
        ({"contributors": ["A", "B", "C", "D"]}, {}, "told that [0, 1, 2, 3] are inside"),
        ({}, {"unexplained": 1, "first_unexplained": [7]}, "1 parts are nobody's mean"),
        ({}, {"inside": {"0": 1, "0,1,2": 9}}, "told that [0, 1, 2] are inside, found [0]"),
        ({"parts_without_result": 1}, {}, "0 local parts, told 1"),
    ],
)
def test_weights_that_do_not_account_are_told(
    told: dict[str, Any], found: dict[str, Any], words: str
) -> None:
    told_result = result(**told)["result"]
    assert words in wrong_weights(0, told_result, check(**found), NAMES, WEIGHTS[:4])


def test_a_result_with_only_oneself_inside_is_a_result() -> None:
    told = result(inside="A")["result"]
    assert wrong_weights(0, told, check({"0": 3, "0,3": 1}), NAMES, WEIGHTS[:4]) == ""


def test_one_who_was_left_alone_holds_its_own_values() -> None:
    alone = result(status="alone", contributors=["A"])["result"]
    assert wrong_weights(0, alone, check({"0": 10}), NAMES, WEIGHTS[:4]) == ""
    assert wrong_weights(0, alone, check({"0": 9, "0,1": 1}), NAMES, WEIGHTS[:4])


def test_one_bad_trial_misses_its_bar() -> None:
    good, bad = judged(*all_well()), judged(*all_well())
    assert all(bar.met for bar in bars_of([good], 1.0, factor=1.5, slack_s=0.5))
    bad.bit_equal, bad.seconds = False, 2.1
    missed = [bar.what for bar in bars_of([good, bad], 1.0, factor=1.5, slack_s=0.5) if not bar.met]
    assert len(missed) == 2
    assert "differ in a bit" in missed[0]
    assert "slowest" in missed[1]
    assert counts([good, bad]) == {
        "first_third": 0,
        "middle_third": 2,
        "last_third": 0,
        "after_first_result": 0,
    }


def test_no_trial_meets_no_bar() -> None:
    assert [bar.met for bar in bars_of([], 1.0, factor=1.5, slack_s=0.5)] == [None] * 5
