"""The world's data plane: parts, results and snapshots really move, as float64 vectors. One rule:
it does what the effects say and nothing that they do not; who gave up on whom, and when, is the
Peer's business.

It stands where `daemon/exchange.py` stands on a node, and posts the same events.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from moshpitd.core.effects import (
    Average,
    Close,
    Digest,
    DropSnapshot,
    Effect,
    FetchSnapshot,
    LoadSnapshot,
    Open,
    Push,
    PushSnapshot,
    RefreshSnapshot,
)
from moshpitd.core.events import (
    Averaged,
    LinkLost,
    PartArrived,
    PartFailed,
    ResultArrived,
)
from moshpitd.core.outcome import Reason
from moshpitd.sim.checks import Checks
from moshpitd.sim.faults import Options, stream
from moshpitd.sim.network import Links
from moshpitd.sim.nodes import Node, Payload, Plane, Round, Vector
from moshpitd.sim.snapshots import Snapshots
from moshpitd.sim.wire import NOTICE_S, Outside, Wire


class Bulk:
    """All planes of a world. Invariant: a part arrives whole or not at all, and once."""

    def __init__(self, world: Outside, links: Links, checks: Checks, options: Options) -> None:
        self._world, self._links, self._checks, self._options = world, links, checks, options
        self._cut = stream(options.seed, "cut")
        self.cut = options.cut
        self._wire = Wire(world, links, options)
        self._wire.broken.append(self._link_broken)
        snapshots = self._snapshots = Snapshots(world, self._wire, checks, options)
        self._work: dict[type, Callable[[Node, Any], None]] = {
            Open: self._open, Push: self._push, Average: self._average, Close: self._close,
            FetchSnapshot: snapshots.fetch, PushSnapshot: snapshots.serve,
            DropSnapshot: snapshots.drop, LoadSnapshot: snapshots.load,
            RefreshSnapshot: snapshots.refresh, Digest: snapshots.digest,
        }  # fmt: skip

    def handle(self, node: Node, effect: Effect) -> None:
        self._work[type(effect)](node, effect)

    def died(self, node: Node, others: list[Node]) -> None:
        """The daemon of `node` is dead: whoever had a link to it learns it at once, or (vanished)
        when TCP does."""
        for other in others:
            if other is node or other.peer is None:
                continue
            delay = NOTICE_S if node.vanished else self._links.latency(node.index, other.index)
            for group_id, round_ in other.plane.rounds.items():
                if any(member.peer_id == node.peer_id for member in round_.group.members):
                    self._world.later(delay, self._link_broken, other, group_id, node)
            self._snapshots.other_died(other, node, delay)
        plane = node.plane
        node.plane = Plane(up_mbps=plane.up_mbps, down_mbps=plane.down_mbps)

    # -- rounds ------------------------------------------------------------------------------------

    def _open(self, node: Node, effect: Open) -> None:
        group = effect.group
        others = [self._world.node(member.peer_id) for member in group.members]
        round_ = Round(
            group=group,
            index=effect.index,
            reducers=effect.reducers,
            weight=effect.weight,
            value=_mix(node, effect.trainers),
            buckets=_buckets(node, [name for name, _ in effect.trainers]),
            late=_buckets(node, effect.late),
            trainers=(*[name for name, _ in effect.trainers], *effect.late),
            incarnations=[other.incarnation for other in others],
        )
        self._checks.opened(node, round_)
        node.plane.rounds[group.group_id] = round_
        reducers = set(effect.reducers)
        for index, other in enumerate(others):
            if index != effect.index and (index in reducers or effect.index in reducers):
                self._link(node, other, group.group_id)
        self._wire.release(node, group.group_id)

    def _link(self, node: Node, other: Node, group_id: bytes) -> None:
        lose = self._lose
        if other.peer is None or not (node.dialable or other.dialable):
            delay = self._wire.refused_s(node, other)
            self._world.later(delay, lose, node, group_id, other.peer_id, Reason.UNREACHABLE)
        elif self.cut > 0.0 and node.index < other.index and self._cut.random() < self.cut:
            delay = self._cut.uniform(0.0, 0.5)
            self._world.later(delay, lose, node, group_id, other.peer_id, Reason.LINK_LOST)
            self._world.later(delay, lose, other, group_id, node.peer_id, Reason.LINK_LOST)

    def _lose(self, node: Node, group_id: bytes, peer_id: str, reason: Reason) -> None:
        round_ = node.plane.rounds.get(group_id)
        if round_ is None:
            return
        for index, member in enumerate(round_.group.members):
            if member.peer_id == peer_id and index not in round_.lost:
                round_.lost.add(index)
                self._world.post(0.0, node, LinkLost(peer_id, reason))

    def _link_broken(self, node: Node, group_id: bytes, other: Node) -> None:
        self._lose(node, group_id, other.peer_id, Reason.LINK_LOST)

    def _push(self, node: Node, effect: Push) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is None or effect.to in round_.lost:
            return
        other = self._world.node(round_.group.members[effect.to].peer_id)
        stamp = (effect.group_id, round_.incarnations[effect.to])
        for part in effect.parts:
            if effect.result:
                payload = round_.payloads.get(part)
                if payload is None:
                    self._checks.fail(
                        f"pushes the result of part {part}, which it never averaged", node
                    )
                self._wire.send(
                    node, other, stamp, self._result_arrived, part, round_.index, payload
                )
            else:
                values = round_.value[self._options.slice_of(part)].copy()
                call = self._contribution_arrived
                self._wire.send(node, other, stamp, call, part, round_.index, values, effect.epoch)

    def _contribution_arrived(
        self, node: Node, group_id: bytes, part: int, sender: int, values: Vector, epoch: int
    ) -> None:
        round_ = self._round_of(
            node, group_id, self._contribution_arrived, part, sender, values, epoch
        )
        if round_ is None or sender in round_.lost or part in round_.payloads:
            return
        if (part, epoch, sender) in round_.arrived:
            return
        if epoch == 0 and round_.reducers[part] != round_.index:
            self._checks.fail(
                f"was sent part {part}, which member {round_.reducers[part]} reduces", node
            )
        round_.arrived.add((part, epoch, sender))
        weight = round_.group.members[sender].weight
        if part in round_.sums:
            round_.sums[part] += weight * values
        else:
            round_.sums[part] = weight * values
        round_.totals[part] = round_.totals.get(part, 0.0) + weight
        if weight > 0.0:
            round_.senders.setdefault(part, []).append(sender)
        self._world.post(0.0, node, PartArrived(group_id, part, sender, epoch))

    def _average(self, node: Node, effect: Average) -> None:
        self._world.later(self._wire.work_s(), self._averaged, node, node.incarnation, effect)

    def _averaged(self, node: Node, incarnation: int, effect: Average) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is None or node.incarnation != incarnation:
            return
        part = effect.part
        if part in round_.payloads:
            self._checks.fail(f"averages part {part} twice", node)
        sums, total = round_.sums.pop(part, None), round_.totals.get(part, 0.0)
        contributors = round_.senders.get(part, [])
        own = round_.weight * round_.value[self._options.slice_of(part)]
        if round_.weight > 0.0:
            contributors = [*contributors, round_.index]
        if not contributors:
            reason = Reason.NO_CONTRIBUTORS
            self._world.post(0.0, node, PartFailed(effect.group_id, part, reason, result=True))
            return
        mean: Vector = (own if sums is None else sums + own) / (total + round_.weight)
        payload = Payload(
            mean, tuple(sorted(contributors)), zlib.crc32(mean.tobytes()), effect.epoch
        )
        round_.payloads[part] = payload
        self._checks.averaged(node, round_, part, payload)
        self._place(node, round_, part, payload)
        event = Averaged(effect.group_id, part, payload.contributors, payload.crc, effect.epoch)
        self._world.post(0.0, node, event)

    def _result_arrived(
        self, node: Node, group_id: bytes, part: int, sender: int, payload: Payload
    ) -> None:
        round_ = self._round_of(node, group_id, self._result_arrived, part, sender, payload)
        if round_ is None or sender in round_.lost:
            return
        known = round_.results.get(part)
        if known is not None and known.epoch >= payload.epoch:
            return
        self._place(node, round_, part, payload)
        contributors = payload.contributors
        event = ResultArrived(group_id, part, sender, contributors, payload.crc, payload.epoch)
        self._world.post(0.0, node, event)

    def _place(self, node: Node, round_: Round, part: int, payload: Payload) -> None:
        self._checks.placed(node, round_)
        round_.results[part], round_.placed[part] = payload, self._world.now
        where = self._options.slice_of(part)
        for bucket in round_.buckets.values():
            bucket[where] = payload.values
        for bucket in round_.late.values():
            bucket[where] += payload.values - round_.value[where]

    def _close(self, node: Node, effect: Close) -> None:
        round_ = node.plane.rounds.pop(effect.group_id, None)
        if round_ is not None:
            node.plane.closed[effect.group_id] = self._world.now
            self._checks.closed(node, round_)

    def _round_of(
        self, node: Node, group_id: bytes, call: Callable[..., None], *args: Any
    ) -> Round | None:
        """The open round that a part belongs to; a part that comes before its Begin is held."""
        round_ = node.plane.rounds.get(group_id)
        if round_ is None:
            self._wire.hold(node, group_id, call, *args)
        return round_


def _buckets(node: Node, names: Iterable[str]) -> dict[str, Vector]:
    return {one.name: one.bucket for name in names for one in node.trainers if one.name == name}


def _mix(node: Node, trainers: tuple[tuple[str, int], ...]) -> Vector:
    """The local contributions averaged by weight; of a newcomer (all weights 0) any will do."""
    weights = dict(trainers)
    lent = [(one.bucket, weights[one.name]) for one in node.trainers if one.name in weights]
    total = float(sum(weight for _, weight in lent))
    if not lent:
        return np.zeros_like(node.trainers[0].bucket)
    if len(lent) == 1 or total == 0.0:
        return lent[0][0].copy()
    mixed = np.zeros_like(lent[0][0])
    for bucket, weight in lent:
        mixed += bucket * (weight / total)
    return mixed
