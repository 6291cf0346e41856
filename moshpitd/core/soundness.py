"""Could an honest peer have said this? Types are checked on the wire, meanings here. One rule: what
is not sound is not believed in part."""

from __future__ import annotations

from collections.abc import Sequence

from moshpitd.core.grid import is_flat
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Group, Join, Letter, Member, Record
from moshpitd.core.params import Params
from moshpitd.core.store_words import Applied, Rules, StoreHave, StoreMessage, StoreTerms

MAX_NORM = 3.4e38
"""The largest float32, and the largest norm that a member names: of float64 it may have more."""
MAX_MBPS = 1e9
"""A petabit per second: no link has it, and load balancing divides by sums of such rates."""

MAX_ROUND = (1 << 31) - 1
"""A round a second for 68 years; the local API and the status page show it in 32 bits, and so a
coordinate."""
MAX_MASS = 2.0**32
"""Push-sum weights add up to the number of peers, so no honest one comes near; and what a neighbour
says is multiplied, added and divided by."""
MAX_SEQUENCE = (1 << 63) - 1  # what the local API carries

MAX_COUNT = (1 << 62) - 1
"""Of versions, epochs, sequences: one more of any still fits a message, a frame and the local
API."""
MAX_BATCH = 1024  # as the local API has it


def is_sane(record: Record) -> bool:
    """Types are checked on the wire; this checks what the fields mean."""
    sides, coordinates = record.shape.sides, record.coordinates
    if not 0 < len(sides) == len(coordinates) <= 8:
        return False
    for coordinate, side in zip(coordinates, sides, strict=False):
        if not 0 <= coordinate < side <= MAX_ROUND:
            return False
    return (
        0 <= record.version < 1 << 62
        and 0 <= record.round <= MAX_ROUND
        and 0 <= record.shape.epoch < 1 << 31
        and 0 <= record.up_mbps <= MAX_MBPS
        and 0 <= record.down_mbps <= MAX_MBPS
        and len(record.schema) <= 32
    )


def is_fair(letter: Letter) -> bool:
    """Can a trainer go on with what travels beside a neighbour's message?"""
    return 0 <= letter.mass <= MAX_MASS and 0 <= letter.sequence <= MAX_SEQUENCE


def is_steady(message: StoreMessage) -> bool:
    """Can a store go on with this? Its roles count with what it says, divide by the batch and look
    for the owner of every part."""
    counts = [getattr(message, name, 0) for name in ("epoch", "number", "sequence")]
    version = getattr(message, "version", 0)
    counts.append(version + 1 if isinstance(message, StoreHave) else version)  # -1: none
    counts.append(getattr(getattr(message, "ballot", None), "epoch", 0))
    applied: tuple[Applied, ...] = getattr(message, "applied", ())
    rules: Rules | None = getattr(message, "rules", None)
    return (
        all(0 <= count <= MAX_COUNT for count in counts)
        and all(0 <= one.sequence <= MAX_COUNT for one in applied)
        and (rules is None or _can_be_kept(rules))
        and (not isinstance(message, StoreTerms) or bool(message.owners))
    )


def _can_be_kept(rules: Rules) -> bool:
    return 1 <= rules.batch <= MAX_BATCH and 0 <= rules.max_staleness < 1 << 32


def is_sound(group: Group, params: Params) -> bool:
    """Could an honest leader have written this? (Whether it is about us, the attempt decides.)"""
    heaviest = params.max_weight * params.max_trainers
    return (
        2 <= len(group.members) <= params.max_group
        and len({member.peer_id for member in group.members}) == len(group.members)
        and all(0 <= member.weight <= heaviest and member.version >= 0 for member in group.members)
        and all(0 <= member.norm <= MAX_NORM for member in group.members)
        and all(0 <= rate <= MAX_MBPS for m in group.members for rate in (m.up_mbps, m.down_mbps))
        and not outliers(group.members, params)
        and 1 <= len(group.shape.sides) <= 8
        and 0 <= group.round <= MAX_ROUND
    )


def quotes(group: Group, join: Join) -> bool:
    """Does the group say of us what we said when we joined? One flat group is like any other."""
    mine = [member for member in group.members if member.peer_id == join.record.peer_id]
    return (
        (group.shape == join.record.shape or (is_flat(group.shape) and is_flat(join.record.shape)))
        and group.key == join.key
        and len(mine) == 1
        and mine[0].attempt == join.attempt
        and (mine[0].weight == join.weight or (join.newcomer and mine[0].weight == 0.0))
        and group.group_id == group_id_of(group)
    )


def norm_limit(members: Sequence[Member], params: Params) -> float | None:
    """Largest norm of a contribution, or of a part of one, that the group takes; None: no bound.

    Relative to the median of what the members say of themselves, so a liar among three moves it no
    further than to an honest one's word.
    """
    norms = sorted(member.norm for member in members if member.norm > 0)
    if len(norms) < 3:
        return None  # of two, nobody can say which one is wrong
    median = norms[len(norms) // 2]
    if median >= MAX_NORM:
        return None  # most have more than can be said: how much more, nobody knows
    return params.max_norm_ratio * median


def outliers(members: Sequence[Member], params: Params) -> list[str]:
    """Members whose weight is so far above the group's median that they would overwrite
    everybody."""
    weights = sorted(member.weight for member in members if member.weight > 0)
    if len(weights) < 3:
        return []  # of two, nobody can say which one is wrong
    limit = params.max_weight_ratio * weights[len(weights) // 2]
    return [member.peer_id for member in members if member.weight > limit]
