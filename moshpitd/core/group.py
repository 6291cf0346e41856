"""What a leader writes into Begin. One rule: a group is a pure function of the joins it is made of
and a nonce."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from moshpitd.core.messages import Group, Join, Member


def form_group(
    leader: Join,
    joins: Sequence[Join],
    *,
    nonce: int,
    codec: str,
    audit_fraction: float = 0.0,
) -> Group:
    """The group of a leader (described like a Join of its own) and of those that joined it.

    A newcomer whose snapshot is older than the group's latest member contributes nothing: it
    receives the average and is current whatever the snapshot's age. One that is current (a cold
    start) has trained like everybody else and counts.
    """
    members = sorted((_member(join) for join in (leader, *joins)), key=lambda m: m.peer_id)
    latest = max(member.version for member in members)
    group = Group(
        group_id=b"",
        key=leader.key,
        leader=leader.record.peer_id,
        nonce=nonce,
        round=leader.record.round,
        shape=leader.record.shape,
        schema=leader.record.schema,
        lineage=leader.record.lineage,
        codec=codec,
        members=tuple(
            replace(m, weight=0.0) if m.newcomer and m.version < latest else m for m in members
        ),
        audit_fraction=audit_fraction,
    )
    return replace(group, group_id=group_id_of(group))


def _member(join: Join) -> Member:
    record = join.record
    return Member(
        peer_id=record.peer_id,
        attempt=join.attempt,
        weight=join.weight,
        version=record.version,
        newcomer=join.newcomer,
        up_mbps=record.up_mbps,
        down_mbps=record.down_mbps,
        addresses=record.addresses,
        norm=join.norm,
    )


def group_id_of(group: Group) -> bytes:
    """Hash of everything members must agree on, so that equal ids imply equal lists (DESIGN:
    Groups)."""
    lines = [
        group.key,
        group.leader,
        str(group.nonce),
        str(group.round),
        f"{group.shape.epoch}:{group.shape.sides}",
        group.schema.hex(),
        f"{group.lineage.founder}:{group.lineage.digest.hex()}",
        group.codec,
        repr(float(group.audit_fraction)),
    ]
    lines += [
        f"{m.peer_id} {m.attempt} {float(m.weight)!r} {m.version} {int(m.newcomer)} "
        f"{float(m.up_mbps)!r} {float(m.down_mbps)!r} {','.join(m.addresses)} {float(m.norm)!r}"
        for m in group.members
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
