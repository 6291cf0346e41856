"""How the outcome of a call is told: as its caller's options see it, and which of its rounds speaks
for it. One rule: pure functions of what happened.
"""

from __future__ import annotations

from dataclasses import replace

from moshpitd.core.events import Contributed
from moshpitd.core.outcome import DISPUTED, OnPartial, Outcome, Reason, Status


def seen_by(call: Contributed, outcome: Outcome) -> Outcome:
    """The outcome as this caller's options see it."""
    if not outcome.accepted or outcome.loaded_snapshot:
        return outcome
    if outcome.participants < call.min_participants:
        reason = outcome.reason if outcome.status is Status.ALONE else Reason.TOO_FEW
        return replace(outcome, accepted=False, reason=reason)
    if outcome.status is Status.PARTIAL and call.on_partial is not OnPartial.ACCEPT:
        return replace(outcome, accepted=False)
    return outcome


def after_others(outcome: Outcome, good: Outcome) -> Outcome:
    """A round of a sweep came to nothing, and the average of an earlier one is in the bucket: that
    one's members are those who hold it, and it is worth as much as they are many."""
    return replace(good, status=Status.PARTIAL, reason=outcome.reason, detail=outcome.detail)


def goes_on(outcome: Outcome) -> bool:
    """May a sweep go on after this round? Where nobody could reduce nothing was touched, and in the
    next line somebody may."""
    if outcome.status is Status.FAILED:
        return outcome.reason is Reason.NO_REDUCER
    return outcome.reason not in DISPUTED


def badness(outcome: Outcome) -> int:
    return (Status.COMPLETE, Status.ALONE, Status.PARTIAL, Status.FAILED).index(outcome.status)
