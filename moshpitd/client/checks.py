"""What a trainer may ask for. One rule: a bad argument is refused here, by name, before any
traffic; the daemon checks the same again, because not every trainer uses this library."""

from __future__ import annotations

import math
from contextlib import suppress
from operator import index
from typing import SupportsIndex

from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.rpc.stubs import messages

MAX_WEIGHT = 1 << 32  # Params.max_weight: more samples between two averages are a mistake
MAX_ROUNDS = 64  # a sweep of a grid has at most 8 dimensions; this is room for whoever mixes longer
ON_PARTIAL = ("accept", "skip", "raise")


def average_request(
    weight: float | SupportsIndex,
    *,
    rounds: int | str,
    min_participants: int,
    on_partial: str,
    timeout_s: float,
) -> messages.AverageRequest:
    """The checked request; trainer and generation are filled in when there is an attachment."""
    return messages.AverageRequest(
        weight=check_weight(weight),
        rounds=_check_rounds(rounds),
        min_participants=_check_participants(min_participants),
        on_partial=_check_on_partial(on_partial),
        timeout_s=check_timeout(timeout_s),
    )


def check_weight(weight: float | SupportsIndex) -> int:
    """An integer 0..2^32, or TrainerError. Counts that arithmetic made floats of (30.0) are
    integers."""
    value = -1
    if isinstance(weight, float):
        value = int(weight) if weight.is_integer() else -1
    else:
        with suppress(TypeError):
            value = index(weight)
    if not 0 <= value <= MAX_WEIGHT:
        raise refusal("weight_out_of_range", f"weight {weight!r}, expected an integer 0..2^32")
    return value


def _check_rounds(rounds: object) -> int:
    if rounds == "sweep":
        return 0
    if not isinstance(rounds, int) or not 1 <= rounds <= MAX_ROUNDS:
        raise refusal("rounds_out_of_range", f"rounds {rounds!r}, expected 1..64 or 'sweep'")
    return rounds


def _check_participants(count: object) -> int:
    if not isinstance(count, int) or not 1 <= count < 1 << 32:
        raise refusal(
            "participants_out_of_range", f"min_participants {count!r}, expected 1 or more"
        )
    return count


def _check_on_partial(choice: object) -> str:
    if not isinstance(choice, str) or choice not in ON_PARTIAL:
        words = ", ".join(ON_PARTIAL)
        raise refusal("unknown_on_partial", f"on_partial {choice!r}, expected one of {words}")
    return choice


def check_timeout(timeout_s: object) -> float:
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise refusal(
            "timeout_out_of_range",
            f"timeout_s {timeout_s!r}, expected a positive number of seconds",
        )
    return float(timeout_s)


def check_version(version: object) -> int:
    if not isinstance(version, int) or not 0 <= version < 1 << 63:
        raise TrainerError(f"version {version!r}, expected a count of averages, 0 or more")
    return version
