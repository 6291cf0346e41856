"""The world's data plane: parts, results and snapshots really move, as float64 vectors. One rule:
it does what the effects say and nothing that they do not; who gave up on whom, and when, is the
Peer's business.

It stands where `daemon/exchange.py` stands on a node, and posts the same events.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from moshpitd.core.effects import (
    Average,
    Await,
    Bar,
    Check,
    Close,
    Digest,
    DropSnapshot,
    Effect,
    FetchSnapshot,
    HandOver,
    Linger,
    LoadSnapshot,
    Open,
    OpenAudit,
    Push,
    PushAudit,
    PushSnapshot,
    RefreshSnapshot,
)
from moshpitd.core.events import (
    AuditArrived,
    Averaged,
    Barred,
    Checked,
    LinkLost,
    Listened,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.messages import Held
from moshpitd.core.outcome import Reason
from moshpitd.core.succession import Succession
from moshpitd.sim.checks import Checks
from moshpitd.sim.faults import Options, stream
from moshpitd.sim.network import Links
from moshpitd.sim.nodes import Node, Payload, Plane, Round, Vector
from moshpitd.sim.snapshots import Snapshots
from moshpitd.sim.wire import DIAL_TIMEOUT_S, NOTICE_S, Outside, Wire

LISTEN_S = 0.3
"""How often a node looks whom it heard. A daemon looks oftener; most rounds are over before."""


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
            Linger: self._linger, Bar: self._bar, HandOver: self._hand_over, Await: self._await,
            PushAudit: self._push_audit, OpenAudit: self._open_audit, Check: self._check,
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
            plane = other.plane
            if other is node or not (plane.rounds or plane.incoming or plane.outgoing):
                continue  # of ten thousand nearly all, between two rounds
            if other.peer is None:
                continue
            delay = NOTICE_S if node.vanished else self._links.latency(node.index, other.index)
            for group_id, round_ in plane.rounds.items():
                if any(member.peer_id == node.peer_id for member in round_.group.members):
                    self._world.later(delay, self._link_broken, other, group_id, node)
            self._snapshots.other_died(other, node, delay)
        lost = node.plane
        node.plane = Plane(up_mbps=lost.up_mbps, down_mbps=lost.down_mbps)

    # -- rounds ------------------------------------------------------------------------------------

    def _open(self, node: Node, effect: Open) -> None:
        group = effect.group
        others = [self._world.find(member.peer_id) for member in group.members]
        round_ = Round(
            group=group,
            index=effect.index,
            reducers=effect.reducers,
            weight=effect.weight,
            value=_mix(node, effect.trainers),
            buckets=_buckets(node, [name for name, _ in effect.trainers]),
            late=_buckets(node, effect.late),
            trainers=(*[name for name, _ in effect.trainers], *effect.late),
            incarnations=[other.incarnation if other else -1 for other in others],
            succession=Succession(group, effect.reducers),
        )
        self._checks.opened(node, round_)
        node.plane.rounds[group.group_id] = round_
        reducers = set(effect.reducers)
        for index, other in enumerate(others):
            if index == effect.index or (index not in reducers and effect.index not in reducers):
                continue
            if other is not None:
                self._link(node, other, group.group_id)
            else:  # whom a liar made up: at its address nobody answers to that name
                lost = (node, group.group_id, group.members[index].peer_id, Reason.UNREACHABLE)
                self._world.later(DIAL_TIMEOUT_S, self._lose, *lost)
        self._wire.release(node, group.group_id)
        self._world.later(LISTEN_S, self._listen, node, node.incarnation, group.group_id, others)

    def _listen(
        self, node: Node, incarnation: int, group_id: bytes, members: list[Node | None]
    ) -> None:
        """Whom this node hears: pinged links answer as long as the other daemon runs, and what is
        between the two carries the answer."""
        round_ = node.plane.rounds.get(group_id)
        if round_ is None or node.incarnation != incarnation:
            return
        heard = tuple(
            other.peer_id
            for index, other in enumerate(members)
            if other is not None
            and other.peer is not None
            and index != round_.index
            and index not in round_.lost
            and other.incarnation == round_.incarnations[index]
            and other.thaws_at is None
            and self._links.apart(node.index, other.index) is None
        )
        self._world.post(0.0, node, Listened(heard))
        self._world.later(LISTEN_S, self._listen, node, incarnation, group_id, members)

    def _link(self, node: Node, other: Node, group_id: bytes) -> None:
        lose = self._lose
        if self._wire.refuses(node, other):
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
                other = self._world.find(peer_id)
                if (
                    other is not None
                    and other.peer is not None
                    and other.incarnation == round_.incarnations[index]
                ):
                    self._checks.partings.broke(group_id, node.index, other.index)
                self._world.post(0.0, node, LinkLost(peer_id, reason))

    def _link_broken(self, node: Node, group_id: bytes, other: Node) -> None:
        self._lose(node, group_id, other.peer_id, Reason.LINK_LOST)

    def _receiver(self, round_: Round | None, index: int) -> Node | None:
        """Whom bytes for that member go to: nobody, when the round or the link is over."""
        if round_ is None or index in round_.lost:
            return None
        return self._world.find(round_.group.members[index].peer_id)

    def _push(self, node: Node, effect: Push) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        other = self._receiver(round_, effect.to)
        if round_ is None or other is None:
            return
        stamp = (effect.group_id, round_.incarnations[effect.to])
        if not effect.result and self._options.parts_overtake:
            if not round_.leaving:
                self._world.later(0.0, self._abreast, node, round_)
            round_.leaving.append((other, stamp, effect))
            return
        for part in effect.parts:
            if not effect.result:
                self._contribute(node, round_, other, stamp, part, effect.epoch)
                continue
            payload = round_.payloads.get((part, effect.epoch))
            if payload is None:
                self._checks.fail(
                    f"pushes the result of part {part}, which it never averaged", node
                )
            payload = _spoiled(node, payload)
            call, index = self._result_arrived, round_.index
            self._wire.send(node, other, stamp, call, part, index, payload, effect.epoch)

    def _abreast(self, node: Node, round_: Round) -> None:
        """Contributions to several reducers leave in turn, as the daemon's do."""
        leaving, round_.leaving = round_.leaving, []
        if node.plane.rounds.get(round_.group.group_id) is not round_:
            return
        turns = [
            ((index + 1) / len(effect.parts), lane, part)
            for lane, (_, _, effect) in enumerate(leaving)
            for index, part in enumerate(effect.parts)
        ]
        for _, lane, part in sorted(turns):
            other, stamp, effect = leaving[lane]
            self._contribute(node, round_, other, stamp, part, effect.epoch)

    def _contribute(
        self,
        node: Node,
        round_: Round,
        other: Node,
        stamp: tuple[bytes, int],
        part: int,
        epoch: int,
    ) -> None:
        if part in round_.results:
            return  # the bucket holds it by now
        values = round_.value[self._options.slice_of(part)].copy()
        values = values if node.liar is None else node.liar.pushes(values)
        call, index = self._contribution_arrived, round_.index
        self._wire.send(node, other, stamp, call, part, index, values, epoch)

    def _hand_over(self, node: Node, effect: HandOver) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        other = self._receiver(round_, effect.to)
        if round_ is None or other is None:
            return
        stamp = (effect.group_id, round_.incarnations[effect.to])
        for part in effect.parts:
            payload, call = _spoiled(node, round_.results[part]), self._result_arrived
            self._wire.send(node, other, stamp, call, part, round_.index, payload, effect.epoch)

    def _await(self, node: Node, effect: Await) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is not None:
            round_.awaited.update((effect.sender, part, effect.epoch) for part in effect.parts)

    # -- audits

    def _push_audit(self, node: Node, effect: PushAudit) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        other = self._receiver(round_, effect.to)
        if round_ is None or other is None:
            return
        stamp = (effect.group_id, round_.incarnations[effect.to])
        for part in effect.parts:
            values = round_.value[self._options.slice_of(part)].copy()
            self._wire.send(node, other, stamp, self._audit_arrived, part, round_.index, values)

    def _open_audit(self, node: Node, effect: OpenAudit) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is not None:
            round_.audits.update((part, {}) for part in effect.parts)

    def _audit_arrived(
        self, node: Node, group_id: bytes, part: int, sender: int, values: Vector
    ) -> None:
        round_ = node.plane.rounds.get(group_id)
        if round_ is not None and part in round_.audits:
            round_.audits[part][sender] = values
            self._world.post(0.0, node, AuditArrived(group_id, part, sender))

    def _check(self, node: Node, effect: Check) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is None:
            return
        part, members = effect.part, round_.group.members
        result = round_.results[part]
        given = {
            **round_.audits.pop(part),
            round_.index: round_.value[self._options.slice_of(part)],
        }
        inside = [(members[i].weight, given[i]) for i in result.contributors]
        total = sum([weight for weight, _ in inside], 0.0)
        added: Vector = np.sum([weight * values for weight, values in inside], axis=0)
        right = bool(np.allclose(added / total, result.values, rtol=1e-9, atol=1e-9))
        self._world.post(0.0, node, Checked(effect.group_id, part, right))

    def _bar(self, node: Node, effect: Bar) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is None:
            return
        parts = tuple(p for p in effect.parts if round_.bars.get(p, 0) <= effect.epoch)
        held = []
        for part in parts:
            round_.bars[part] = effect.epoch
            result = round_.results.get(part)
            if result is not None:
                mask = sum(1 << i for i in result.contributors)
                held.append(Held(part, result.epoch, mask, result.crc))
        event = Barred(
            effect.group_id, effect.epoch, parts, tuple(held), effect.asker, effect.number
        )
        self._world.post(0.0, node, event)

    def _contribution_arrived(
        self, node: Node, group_id: bytes, part: int, sender: int, values: Vector, epoch: int
    ) -> None:
        round_ = self._round_of(
            node, group_id, self._contribution_arrived, part, sender, values, epoch
        )
        key = (part, epoch)
        if round_ is None or sender in round_.lost or key in round_.payloads:
            return
        if (part, epoch, sender) in round_.arrived or epoch < round_.bars.get(part, 0):
            return
        assert round_.succession is not None
        if round_.succession.reducer(part, epoch) != round_.index:
            self._checks.fail(f"was sent part {part} of epoch {epoch}, which others reduce", node)
        if not np.isfinite(values).all():
            self._refuse(node, group_id, part, sender, epoch=epoch, result=False)
            return
        round_.arrived.add((part, epoch, sender))
        weight = round_.group.members[sender].weight
        if key in round_.sums:
            round_.sums[key] += weight * values
        else:
            round_.sums[key] = weight * values
        round_.totals[key] = round_.totals.get(key, 0.0) + weight
        if weight > 0.0:
            round_.senders.setdefault(key, []).append(sender)
        self._world.post(0.0, node, PartArrived(group_id, part, sender, epoch))

    def _average(self, node: Node, effect: Average) -> None:
        self._world.later(self._wire.work_s(), self._averaged, node, node.incarnation, effect)

    def _averaged(self, node: Node, incarnation: int, effect: Average) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is None or round_.lingers or node.incarnation != incarnation:
            return
        part, epoch = effect.part, effect.epoch
        if epoch < round_.bars.get(part, 0):
            return  # a bar came before it
        key = (part, epoch)
        if key in round_.payloads:
            self._checks.fail(f"averages part {part} of epoch {epoch} twice", node)
        sums, total = round_.sums.pop(key, None), round_.totals.get(key, 0.0)
        contributors = round_.senders.get(key, [])
        own = round_.weight * round_.value[self._options.slice_of(part)]
        if round_.weight > 0.0:
            contributors = [*contributors, round_.index]
        if not contributors:
            failed = PartFailed(
                effect.group_id, part, Reason.NO_CONTRIBUTORS, result=True, epoch=epoch
            )
            self._world.post(0.0, node, failed)
            return
        mean: Vector = (own if sums is None else sums + own) / (total + round_.weight)
        payload = Payload(mean, tuple(sorted(contributors)), zlib.crc32(mean.tobytes()), epoch)
        round_.payloads[key] = payload
        self._checks.averaged(node, round_, part, payload)
        self._place(node, round_, part, payload)
        event = Averaged(effect.group_id, part, payload.contributors, payload.crc, epoch)
        self._world.post(0.0, node, event)

    def _result_arrived(
        self, node: Node, group_id: bytes, part: int, sender: int, payload: Payload, epoch: int
    ) -> None:
        round_ = self._round_of(node, group_id, self._result_arrived, part, sender, payload, epoch)
        if round_ is None or sender in round_.lost:
            return
        # As `daemon/ledger.py` has it: the core may ask for another result of an epoch, never for
        # one below a promise, and what it asked for is answered once.
        key, known = (sender, part, epoch), round_.results.get(part)
        expected = key in round_.awaited
        assert round_.succession is not None
        if not expected and round_.succession.reducer(part, epoch) != sender:
            return
        if epoch < round_.bars.get(part, 0) or (known is not None and epoch < known.epoch):
            return
        if known is not None and epoch == known.epoch and not expected:
            return
        round_.awaited.discard(key)
        if not np.isfinite(payload.values).all():
            self._refuse(node, group_id, part, sender, epoch=epoch, result=True)
            return
        placed = replace(payload, epoch=epoch)
        self._place(node, round_, part, placed)
        event = ResultArrived(group_id, part, sender, placed.contributors, placed.crc, epoch)
        self._world.post(0.0, node, event)

    def _refuse(
        self, node: Node, group_id: bytes, part: int, sender: int, *, epoch: int, result: bool
    ) -> None:
        """The guard: what is not finite touches nothing."""
        reason = Reason.NOT_FINITE
        event = PartRefused(group_id, part, sender, reason, result=result, epoch=epoch)
        self._world.post(0.0, node, event)

    def _place(self, node: Node, round_: Round, part: int, payload: Payload) -> None:
        self._checks.placed(node, round_, part, payload)
        where = self._options.slice_of(part)
        before = round_.results[part].values if part in round_.results else round_.value[where]
        round_.results[part], round_.placed[part] = payload, self._world.now
        for bucket in round_.buckets.values():
            bucket[where] = payload.values
        for bucket in round_.late.values():
            bucket[where] += payload.values - before

    def _linger(self, node: Node, effect: Linger) -> None:
        round_ = node.plane.rounds.get(effect.group_id)
        if round_ is not None:
            round_.lingers = True

    def _close(self, node: Node, effect: Close) -> None:
        round_ = node.plane.rounds.pop(effect.group_id, None)
        if round_ is not None:
            self._wire.close(node, effect.group_id)
            self._checks.closed(node, round_)

    def _round_of(
        self, node: Node, group_id: bytes, call: Callable[..., None], *args: Any
    ) -> Round | None:
        """The open round that a part belongs to; a part that comes before its Begin is held."""
        round_ = node.plane.rounds.get(group_id)
        if round_ is None:
            self._wire.hold(node, group_id, call, *args)
        return None if round_ is not None and round_.lingers else round_


def _spoiled(node: Node, payload: Payload) -> Payload:
    """What a liar sends for a result."""
    if node.liar is None:
        return payload
    return replace(payload, values=node.liar.pushes(payload.values))


def _buckets(node: Node, names: Iterable[str]) -> dict[str, Vector]:
    return {one.name: one.bucket for name in names for one in node.trainers if one.name == name}


def _mix(node: Node, trainers: tuple[tuple[str, int], ...]) -> Vector:
    """The local contributions averaged by weight; of a newcomer (all weights 0) any will do."""
    weights = dict(trainers)
    lent = [(one.bucket, weights[one.name]) for one in node.trainers if one.name in weights]
    total = float(sum([weight for _, weight in lent]))
    if not lent:
        return np.zeros_like(node.trainers[0].bucket)
    if len(lent) == 1 or total == 0.0:
        return lent[0][0].copy()
    mixed = np.zeros_like(lent[0][0])
    for bucket, weight in lent:
        mixed += bucket * (weight / total)
    return mixed
