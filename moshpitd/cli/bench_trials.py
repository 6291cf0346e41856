"""When whom to hurt, and what a trial proved: the pure part of `bench death` and `bench freeze`.

One rule: a verdict is computed from what the survivors hold and were told, and from nothing that
was planned; a trial whose victim was not hit inside the round is no trial.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moshpitd.cli.bench_figures import Bar, median
from moshpitd.cli.bench_meters import Moved

Place = Literal["first_third", "last_third", "after_first_result", "anywhere"]
FORCED_SHARE = 6  # one trial in six each for the places that a uniform draw might miss
EARLIEST, LATEST = 0.005, 0.985
"""Of the bytes: before it nobody has anything of the victim yet, after it the round may be over
before a signal arrives."""
MARGIN = 1.03  # TLS records and the handshake are counted, payloads are computed
WEIGHTS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
"""Of the contributions, by peer: primes, so that different members never weigh the same."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a victim is hit. `at`: share of the bytes it moves in an undisturbed round; with
    `after_first_result` share of those that remain once a result must have left it."""

    place: Place
    at: float


@dataclass(frozen=True, slots=True)
class Course:
    """What a peer moves in an undisturbed round: medians. `payload` is one bucket, encoded."""

    moved: Moved
    payload: int
    peers: int

    @property
    def result_left(self) -> int:
        """A peer that has sent more than this has sent a result.

        It sends contributions for all that it does not reduce, P (1 - r), and results for what it
        reduces to all others, P r (n - 1); together that is what it was seen to send, which gives
        r. Whatever goes beyond the contributions is a result.
        """
        others = self.peers - 1
        if others == 1:
            return math.ceil(self.moved.sent / 2 * MARGIN)  # both halves are the same then
        share = (self.moved.sent / self.payload - 1) / (others - 1)
        return math.ceil(self.payload * (1 - min(max(share, 0.0), 1.0)) * MARGIN)

    def fraction(self, moved: Moved) -> float:
        return moved.both / max(1, self.moved.both)

    def wait(self, moment: Moment, moved: Moved) -> float:
        """How far off the moment is, as a share of the round; at most 0 when it has come."""
        if moment.place == "after_first_result":
            rest = max(0, self.moved.sent - self.result_left)
            target = self.result_left + moment.at * rest
            return (target - moved.sent) / max(1, self.moved.sent)
        return moment.at - self.fraction(moved)


def plan_moments(trials: int, rng: random.Random) -> list[Moment]:
    """One for each trial, in random order: at least one in six each (rounded up, as far as there
    are trials) in the first third, in the last third, and after a first result has left."""
    forced = math.ceil(trials / FORCED_SHARE)
    places: list[Place] = []
    for place in ("first_third", "last_third", "after_first_result"):
        places += [place] * min(forced, trials - len(places))
    places += ["anywhere"] * (trials - len(places))
    rng.shuffle(places)
    return [draw_moment(place, rng) for place in places]


def draw_moment(place: Place, rng: random.Random) -> Moment:
    low, high = {
        "first_third": (EARLIEST, 1 / 3),
        "last_third": (2 / 3, LATEST),
        "after_first_result": (0.0, 0.9),
        "anywhere": (EARLIEST, LATEST),
    }[place]
    return Moment(place, rng.uniform(low, high))


def third_of(fraction: float) -> str:
    return ("first", "middle", "last")[min(2, int(fraction * 3))]


def hit(moment: Moment, *, fraction: float, after_first_result: bool) -> bool:
    """Whether the victim was hit where it was meant to be."""
    match moment.place:
        case "first_third":
            return third_of(fraction) == "first"
        case "last_third":
            return third_of(fraction) == "last"
        case "after_first_result":
            return after_first_result
    return True


@dataclass(slots=True)
class Trial:
    """What one trial came to. The JSON is its fields."""

    trial: int
    victims: list[int]
    place: str
    killed_at_byte_fraction: float  # of the first victim; of each in `fractions`
    fractions: list[float]
    third: str
    after_first_result: bool
    completed: bool = False
    bit_equal: bool = False
    weights_exact: bool = False
    retried: bool = False
    seconds: float = 0.0
    outcomes: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    inside: list[dict[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    redrawn: int = 0
    recovered_s: float | None = None


def judge(
    trial: Trial,
    answers: Mapping[int, Mapping[str, Any]],
    checks: Mapping[int, Mapping[str, Any]],
    *,
    peer_ids: Sequence[str],
    weights: Sequence[int],
) -> None:
    """Fill in the verdict. `answers` and `checks` are the survivors', by index."""
    trial.seconds = max(a["ended"] for a in answers.values()) - min(
        a["began"] for a in answers.values()
    )
    results = {index: answer.get("result") for index, answer in answers.items()}
    missing = [
        f"survivor {index}: {answers[index]['error']}" for index in results if not results[index]
    ]
    trial.problems += missing
    held = {index: result for index, result in results.items() if result}
    trial.outcomes = [_outcome_words(answer) for answer in answers.values()]
    for result in held.values():
        trial.excluded |= {_index(peer_ids, who): why for who, why in result["excluded"].items()}
    trial.inside = [dict(check["inside"]) for check in checks.values()]
    trial.completed = not missing and all(
        result["accepted"]
        and result["parts"] > 0
        and result["parts_without_result"] == 0
        and set(answers) <= set(_inside_all(checks[index]))
        for index, result in held.items()
    )
    prints = {check["sha256"] for check in checks.values()}
    trial.bit_equal = not missing and len(prints) == 1
    wrong = [
        words
        for index, result in held.items()
        if (words := wrong_weights(index, result, checks[index], peer_ids, weights))
    ]
    trial.problems += wrong
    trial.weights_exact = not missing and not wrong
    groups = {result["group_id"] for result in held.values()}
    trial.retried = len(groups) > 1 or any(
        result["rounds"] > 1 or result["group_size"] != len(peer_ids) for result in held.values()
    )


def wrong_weights(
    index: int,
    result: Mapping[str, Any],
    check: Mapping[str, Any],
    peer_ids: Sequence[str],
    weights: Sequence[int],
) -> str:
    """Why the weights that survivor `index` was told are not those in its mean; empty when they
    are: every part is the mean of some members with exactly their weights, a part without a result
    holds the local values, and the contributors reported are those inside every other part."""
    if check["unexplained"]:
        count, first = check["unexplained"], check["first_unexplained"]
        return f"survivor {index}: {count} parts are nobody's mean, the first is {first}"
    subsets = {_members(key): count for key, count in check["inside"].items()}
    # The mean of one member is its own values: what a part without a result keeps, and what one has
    # into which nobody else came. The contributors tell which it is.
    local = subsets.pop((index,), 0)
    without = result["parts_without_result"]
    if result["status"] == "alone":
        return f"survivor {index}: alone, but others are inside {subsets}" if subsets else ""
    if local < without:
        return f"survivor {index}: {local} local parts, told {without}"
    if local > without:
        subsets[(index,)] = local - without
    common = [i for i in range(len(peer_ids)) if subsets and all(i in one for one in subsets)]
    told = sorted(peer_ids.index(who) for who in result["contributors"] if who in peer_ids)
    if told != common:
        return f"survivor {index}: told that {told} are inside, found {common}"
    total = sum(weights[i] for i in told)
    if result["total_weight"] != total:
        return f"survivor {index}: told a weight of {result['total_weight']}, expected {total}"
    return ""


def bars_of(
    trials: Sequence[Trial], undisturbed_s: float | None, *, factor: float, slack_s: float
) -> list[Bar]:
    """What all trials together are held against."""
    slowest = max((one.seconds for one in trials), default=None)
    at_most = factor * undisturbed_s + slack_s if undisturbed_s is not None else 0.0
    words = f"{factor:g}x the undisturbed median" + (f" + {slack_s:g} s" if slack_s else "")

    def failing(name: str, wanted: bool) -> float | None:
        if not trials:
            return None
        return float(sum(getattr(one, name) is not wanted for one in trials))

    return [
        Bar("trials in which a part has no result on a survivor", failing("completed", True), 0.0),
        Bar("trials in which survivors differ in a bit", failing("bit_equal", True), 0.0),
        Bar("trials in which weights do not account", failing("weights_exact", True), 0.0),
        Bar("trials that retried the round", failing("retried", False), 0.0),
        Bar(f"seconds of the slowest trial ({words})", slowest, at_most),
    ]


def counts(trials: Sequence[Trial]) -> dict[str, int]:
    """How many trials hit where."""
    return {
        "first_third": sum(one.third == "first" for one in trials),
        "middle_third": sum(one.third == "middle" for one in trials),
        "last_third": sum(one.third == "last" for one in trials),
        "after_first_result": sum(one.after_first_result for one in trials),
    }


def median_s(trials: Sequence[Trial]) -> float | None:
    return median(one.seconds for one in trials)


def _outcome_words(answer: Mapping[str, Any]) -> str:
    result = answer.get("result")
    if not result:
        return str(answer.get("error", "nothing"))
    words = [f"{result['status']} {result['participants']} of {result['group_size']}"]
    if result["parts_without_result"]:
        words.append(f"{result['parts_without_result']} parts without a result")
    return ", ".join([*words, *filter(None, [result["reason"]])])


def _inside_all(check: Mapping[str, Any]) -> list[int]:
    """Who is in every part."""
    subsets = [_members(key) for key in check["inside"]]
    if not subsets or check["unexplained"]:
        return []
    return [i for i in subsets[0] if all(i in one for one in subsets)]


def _members(key: str) -> tuple[int, ...]:
    return tuple(int(word) for word in key.split(","))


def _index(peer_ids: Sequence[str], who: str) -> str:
    return str(peer_ids.index(who)) if who in peer_ids else who
