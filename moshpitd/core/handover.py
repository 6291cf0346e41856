"""Who would lose something for good if this peer left now, or forgot its run.

A round leaves its result with all its members, so a peer that averages holds nothing alone. What it
may hold alone is the newest state of the run: it trained alone for an hour and others have just
arrived, or all others are newcomers that have not caught up. One rule: a peer counts only if it
spoke itself and would take our state when it next asks; for nobody else is it worth staying.
"""

from __future__ import annotations

from collections.abc import Iterator

from moshpitd.core.messages import Record
from moshpitd.core.state import State
from moshpitd.core.swarm import same_lineage


def dependants(state: State) -> list[str]:
    """Peers that have yet to take our state and could have it from nobody else."""
    me, version = state.record, state.donor.version
    if version is None or not me.has_snapshot or state.draining:
        return []
    winner = state.swarm.winning_lineage(me.lineage, me.version, me.schema)
    if not same_lineage(winner, me.lineage):
        return []
    live = state.swarm.live(me.schema)
    if any(_holds(entry.record, me, version) for entry in live):
        return []
    spoke = [entry.record for entry in live if entry.direct_at > float("-inf")]
    return [record.peer_id for record in spoke if _would_take(record, me, state)]


def has_company(state: State, now: float) -> bool:
    """Has anybody of the run, who does not count as gone, been heard of lately?"""
    return next(_lately(state, now), None) is not None


def is_last_holder(state: State, now: float) -> bool:
    """Would what we keep of a run that nobody trains here be lost with it? What was never mixed
    with anybody's is of our own trainers alone; else it counts who was there when ours left."""
    version = state.donor.version
    if version is None or not state.had_company:
        return False
    return not any(_holds(record, state.record, version) for record in _lately(state, now))


def _lately(state: State, now: float) -> Iterator[Record]:
    since = now - state.params.heard_fresh_s
    live = state.swarm.live(state.record.schema)
    return (entry.record for entry in live if entry.heard_at >= since)


def _holds(record: Record, me: Record, version: int) -> bool:
    same = same_lineage(record.lineage, me.lineage)
    return same and record.has_snapshot and record.version >= version


def _would_take(record: Record, me: Record, state: State) -> bool:
    """As `catchup.needs_snapshot` will decide there."""
    if not same_lineage(record.lineage, me.lineage):
        return True
    behind = me.version - record.version
    return behind > state.params.max_version_lag or (record.version == 0 and behind > 0)
