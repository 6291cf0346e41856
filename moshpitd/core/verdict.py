"""What a round came to. One rule: a pure function of who is in which part, and of what kept the
others out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moshpitd.core.messages import Group
from moshpitd.core.outcome import Outcome, Reason, Status


@dataclass(slots=True)
class Lane:
    """What one other member still owes us, and when it last gave something."""

    progress_at: float  # it gave something
    heard_at: float = 0.0  # a byte came from it
    unheard: int = 0  # looks in a row that found nothing of it
    spoke: bool = False  # it is in the round: something of it came
    gone: Reason | None = None  # out of the round altogether
    muted: Reason | None = None  # its contributions are given up, its results are still welcome
    owes_parts: int = 0
    owes_results: int = 0
    parity: bytes | None = None
    parity_without: int = 0
    slow: bool = False  # it takes far longer than the others, as it says itself
    named: bool = False  # as another member says
    first_at: float = 0.0  # its first contribution to a part of ours was here
    part_at: float = 0.0  # and its last so far
    ahead: float = 1.0  # all that its line carries in the round, of what it had carried by then
    parts_in: int = 0
    says_late: tuple[int, ...] = ()  # whom it found late


def verdict(
    group: Group,
    *,
    index: int,
    reducers: Sequence[int],
    lanes: Sequence[Lane],
    contributors: Mapping[int, int],
    without: Mapping[int, Reason],
    details: Sequence[str],
) -> Outcome:
    """The outcome for member `index`.

    `contributors[part]` is the bitmask of the members inside a part's result, `without[part]` the
    reason why there is none. Complete means: a result everywhere, with everybody of weight inside.
    """
    members = group.members
    expected = sum(1 << i for i, m in enumerate(members) if m.weight > 0)
    inside = inside_all(group, contributors, parts=len(reducers))
    in_vain = {reducers[part]: True for part in without}
    excluded = tuple(
        (members[i].peer_id, lane.gone or lane.muted or _missing(lane))
        for i, lane in enumerate(lanes)
        if (expected & ~inside) >> i & 1 or (i in in_vain and i != index)
    )
    missing = tuple(sorted(without))
    reason: Reason | None = None
    if missing:
        status = Status.PARTIAL if contributors else Status.FAILED
        reason = without[missing[0]]
        few = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        details = [*details, f"{len(missing)} of {len(reducers)} parts have no result: {few}"]
    elif inside != expected:
        status, reason = Status.PARTIAL, excluded[0][1]
    else:
        status = Status.COMPLETE
    return Outcome(
        status=status,
        reason=reason,
        detail="; ".join(details),
        accepted=status is not Status.FAILED,
        group_size=len(members),
        participants=inside.bit_count(),
        contributors=tuple(members[i].peer_id for i in bits_of(inside)),
        excluded=excluded,
        parts=len(reducers),
        parts_without_result=missing,
        newcomer=members[index].newcomer,
        total_weight=sum([members[i].weight for i in bits_of(inside)], 0.0),
        group_id=group.group_id,
    )


def failed(group: Group, reason: Reason, detail: str, *, parts: int) -> Outcome:
    """Nothing of the round is used."""
    return Outcome(
        Status.FAILED,
        reason,
        detail,
        accepted=False,
        group_size=len(group.members),
        participants=0,
        parts=parts,
        group_id=group.group_id,
    )


def _missing(lane: Lane) -> Reason:
    """Why a member that we did not give up is not in every part."""
    return Reason.SLOW if lane.slow else Reason.WITHDRAWN


def inside_all(group: Group, contributors: Mapping[int, int], *, parts: int) -> int:
    """Bitmask of the members whose contribution is in every part that has a result."""
    inside = sum(1 << i for i, m in enumerate(group.members) if m.weight > 0)
    for mask in contributors.values():
        inside &= mask
    return inside if contributors or not parts else 0


def mean_weight(group: Group, contributors: Mapping[int, int], *, parts: int) -> float:
    """A member's weight in the next round of a sweep: what was averaged, shared by all who now
    hold it. Keeping own weights is not exact (2x2 grid, x = 1,2,5,9, w = 1,3,1,1: 4.375 and 3.0625
    instead of 3.5)."""
    counted = inside_all(group, contributors, parts=parts)
    total = sum([m.weight for i, m in enumerate(group.members) if counted >> i & 1], 0.0)
    return total / len(group.members)


def bits_of(mask: int) -> list[int]:
    """Positions of the set bits, lowest first."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
