"""How the outcome of a call is told: as its caller's options see it, and which of its rounds speaks
for it. One rule: pure functions of what happened.
"""

from __future__ import annotations

from dataclasses import replace

from moshpitd.core.events import Contributed
from moshpitd.core.outcome import OnPartial, Outcome, Reason, Status


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


def badness(outcome: Outcome) -> int:
    return (Status.COMPLETE, Status.ALONE, Status.PARTIAL, Status.FAILED).index(outcome.status)
