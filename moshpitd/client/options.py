"""What an optimizer may be told about its averages. One rule: a wrong option is an error where it
was written, not eight steps later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from moshpitd.client.checks import average_request
from moshpitd.client.result import Progress

PASSING = frozenset({"bucket_busy", "bucket_modified"})
"""Refusals that the next round may not meet: an interrupted call's round still ran."""


class AverageOptions(TypedDict, total=False):
    """Handed to `Session.average` as they are."""

    rounds: int | Literal["sweep"]
    min_participants: int
    on_partial: Literal["accept", "skip", "raise"]
    timeout_s: float
    progress: Callable[[Progress], None]


def check_options(options: AverageOptions) -> None:
    """TrainerError for what no average could be asked with."""
    average_request(
        1,
        rounds=options.get("rounds", 1),
        min_participants=options.get("min_participants", 1),
        on_partial=options.get("on_partial", "accept"),
        timeout_s=options.get("timeout_s", 60.0),
    )
