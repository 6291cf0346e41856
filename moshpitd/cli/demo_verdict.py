"""What the demo proved: the report, and each expectation with its value, its bar and a verdict.

One rule: a bar is a number that stands here with its reason; the exit code is `passed` of all of
them and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moshpitd.cli.demo_algorithms import DEFAULT, Row
from moshpitd.cli.demo_story import Story

SWARM_AT_LEAST = 0.95
"""Accuracy with four shards that are 95 % own classes: 0.964 to 0.981 without daemons, exact
averages."""
ANY_ALGORITHM_AT_LEAST = 0.93
"""Of whichever was asked for by name; in exact arithmetic without deaths they reach 0.95 to 0.98
(each row's options are chosen so), and a swarm that did not mix ends at 0.48 to 0.72."""
CENTRAL_WITHIN = 0.03
"""Of one process that has all data; measured 0.005 to 0.025."""
ALONE_AT_MOST = 0.75
"""One skewed shard reaches 0.48 to 0.72: what the swarm gives is not in any trainer's own data."""
ROUNDS_AT_LEAST = 20
DIFFERENCE_FLAT = 0.0
"""A reducer overwrites its own copy with what it sends: all members of a group hold the same
bits."""
DIFFERENCE_GRID = 1e-5
"""A sweep is exact in arithmetic, but each group of its last round adds the same numbers in an
order of its own; parameters are about 1, a float32 step there is 1.2e-7."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    value: str
    bar: str
    passed: bool


@dataclass(slots=True)
class Killed:
    """The node that was killed. Times are seconds since the demo began; None until it happened."""

    peer: int
    when_s: float | None = None
    back_s: float | None = None


@dataclass(slots=True)
class Played:
    """Everything that was observed. Invariant: `stories` are in the order of the peers."""

    stories: list[Story]
    sides: tuple[int, ...]  # of the planned grid; one side for a flat group
    grid: list[int]  # as the daemons report it
    alone: float | None  # None: that was not asked for
    central: float | None
    difference: float
    killed: Killed | None
    exit_codes: list[int | None]  # of the daemons, when they were asked to leave
    seconds: float = 0.0
    row: Row | None = None  # of the algorithm that was asked for by name


def report(played: Played) -> dict[str, Any]:
    """The JSON of the demo."""
    checks = judge(played)
    finals = [story.end.get("final") or {} for story in played.stories]
    first = finals[0]
    return {
        "passed": all(check.passed for check in checks),
        "algorithm": DEFAULT if played.row is None else played.row.name,
        "shards": "skewed" if played.row is None else played.row.shards,
        "peers": [story.summary(index) for index, story in enumerate(played.stories)],
        "grid": played.grid if len(played.sides) > 1 else [],
        "accuracy": {
            "swarm": _swarm(played),
            "swarm_each": [story.end.get("accuracy") for story in played.stories],
            "alone": played.alone,
            "central": played.central,
        },
        "killed": _killed(played),
        "max_parameter_difference": played.difference,
        "final_round": {
            "contributors": first.get("contributors", []),
            "participants": first.get("participants", 0),
            "status": first.get("status", ""),
            "version": first.get("version", 0),
            "group_sizes": [final.get("group_size", 0) for final in finals],
        },
        "seconds": round(played.seconds, 1),
        "checks": [asdict(check) for check in checks],
    }


def judge(played: Played) -> list[Check]:
    swarm, row = _swarm(played), played.row
    least = SWARM_AT_LEAST if row is None else ANY_ALGORITHM_AT_LEAST
    checks = [
        Check(
            "accuracy of the swarm (its worst peer)",
            f"{swarm:.3f}",
            f">= {least}",
            swarm >= least,
        ),
        *_check_yardsticks(played, swarm),
        *(_check_store(played) if row is not None and row.store else _check_rounds(played)),
        _check_final(played),
        _check_equal(played),
    ]
    return checks + _checks_of_the_killed(played) + [_check_exits(played)]


def _check_rounds(played: Played) -> list[Check]:
    # Of a pair one asks and the other is met while it computes: its own calls are alone by design.
    pairs = played.row is not None and played.row.together == 2
    rounds = (max if pairs else min)(story.together for story in _survivors(played))
    return [
        Check(
            f"rounds together ({'most of one that asks' if pairs else 'fewest of a survivor'})",
            str(rounds),
            f">= {ROUNDS_AT_LEAST}",
            rounds >= ROUNDS_AT_LEAST,
        ),
        _check_shape(played),
    ]


def _check_store(played: Played) -> list[Check]:
    """Every gradient that was taken is a version: of one store if there are more of these than any
    trainer made itself."""
    own = [int(story.end.get("gradients", 0)) for story in _survivors(played)]
    versions = min(story.version for story in _survivors(played))
    shared = min(own) >= ROUNDS_AT_LEAST and versions > 2 * max(own)
    return [
        Check(
            "versions of the store, and gradients of a survivor",
            f"{versions}, {min(own)} to {max(own)}",
            f"more than 2 x the most, and >= {ROUNDS_AT_LEAST} each",
            shared,
        )
    ]


def _check_yardsticks(played: Played, swarm: float) -> list[Check]:
    if played.central is None or played.alone is None:
        return []
    return [
        Check(
            "below one process with all data",
            f"{played.central - swarm:.3f} (it has {played.central:.3f})",
            f"<= {CENTRAL_WITHIN}",
            played.central - swarm <= CENTRAL_WITHIN,
        ),
        Check(
            "accuracy of one trainer alone",
            f"{played.alone:.3f}",
            f"<= {ALONE_AT_MOST}",
            played.alone <= ALONE_AT_MOST,
        ),
    ]


def _check_equal(played: Played) -> Check:
    """Replicas are compared before the last average, the others after it."""
    bar = DIFFERENCE_FLAT if len(played.sides) == 1 else DIFFERENCE_GRID
    replicas = played.row is not None and played.row.equal
    return Check(
        "largest difference between " + ("replicas" if replicas else "parameters"),
        f"{played.difference:g}",
        f"<= {bar:g}" if bar else "0",
        played.difference <= bar,
    )


def _check_shape(played: Played) -> Check:
    largest = max(max(story.group_sizes, default=0) for story in played.stories)
    shape = "x".join(map(str, played.grid))
    wanted = "x".join(map(str, played.sides))
    if len(played.sides) == 1:
        size = played.row.together if played.row is not None else 0
        words = f"{size}: a pair" if size else f"{played.sides[0]}: everybody"
        return Check("largest group", str(largest), words, largest == (size or played.sides[0]))
    return Check(
        "grid, and largest group",
        f"{shape}, {largest}",
        f"{wanted}, {max(played.sides)}",
        played.grid == list(played.sides) and largest == max(played.sides),
    )


def _check_final(played: Played) -> Check:
    """The last average: the same for all, with all of them in it."""
    finals = [story.end.get("final") for story in played.stories]
    names = {story.peer_ids[-1] for story in played.stories if story.peer_ids}
    held = [final for final in finals if final is not None]
    if len(played.sides) == 1:
        whole = [final for final in held if set(final["contributors"]) == names]
    else:
        whole = [final for final in held if final["participants"] == max(played.sides)]
    complete = all(final["status"] == "complete" for final in held)
    values = sorted({final["participants"] for final in held})
    passed = complete and len(whole) == len(finals) and len(names) == len(finals)
    value = f"{len(whole)} of {len(finals)} peers; contributors {values}"
    wanted = len(names) if len(played.sides) == 1 else f"{max(played.sides)} in each group"
    return Check("in the final average", value, f"all, complete; {wanted}", passed)


def _checks_of_the_killed(played: Played) -> list[Check]:
    killed = _killed(played)
    if killed is None or played.killed is None:
        return []
    story, row = played.stories[played.killed.peer], played.row
    back = killed["back_s"] is not None
    seconds = f"after {killed['back_s'] - killed['when_s']:.1f} s" if back else "not back"
    state = Check(
        "... with the swarm's state",
        "taken" if killed["took_snapshot"] else "not taken",
        "taken",
        killed["took_snapshot"],
    )
    return [
        Check(
            "killed peer came back",
            f"{seconds}, {'the same' if killed['same_peer_id'] else 'another'} PeerID",
            "the same PeerID",
            back and killed["same_peer_id"],
        ),
        *([state] if row is None or row.rejoins else []),
        Check(
            "... and finished with the others",
            f"step {story.step}, {'together' if story.end.get('together') else 'not together'}",
            "together",
            bool(story.end.get("together")),
        ),
    ]


def _check_exits(played: Played) -> Check:
    codes = sorted({str(code) for code in played.exit_codes})
    passed = all(code == 0 for code in played.exit_codes)
    return Check("daemons left when asked (exit codes)", ", ".join(codes), "0", passed)


def _swarm(played: Played) -> float:
    return min(float(story.end.get("accuracy", 0.0)) for story in played.stories)


def _survivors(played: Played) -> list[Story]:
    return [story for i, story in enumerate(played.stories) if not _was_killed(played, i)]


def _was_killed(played: Played, index: int) -> bool:
    return played.killed is not None and played.killed.peer == index


def _killed(played: Played) -> dict[str, Any] | None:
    killed = played.killed
    if killed is None or killed.when_s is None:
        return None
    story = played.stories[killed.peer]
    ids: Sequence[str] = story.peer_ids
    return {
        "peer": killed.peer,
        "peer_id": ids[0] if ids else "",
        "when_s": round(killed.when_s, 1),
        "back_s": round(killed.back_s, 1) if killed.back_s is not None else None,
        "took_snapshot": story.took_snapshot,
        "same_peer_id": len(ids) == 2 and ids[0] == ids[1],
    }
