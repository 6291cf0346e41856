"""Snapshots on their way from donor to newcomer, and the donor copies they are made of. One rule:
what arrives is what the donor copy was when its Peer said Push, whatever happens to it
meanwhile."""

from __future__ import annotations

import numpy as np

from moshpitd.core.effects import (
    Digest,
    DropSnapshot,
    FetchSnapshot,
    LoadSnapshot,
    PushSnapshot,
    RefreshSnapshot,
)
from moshpitd.core.events import (
    Digested,
    SnapshotArrived,
    SnapshotFailed,
    SnapshotProgressed,
    SnapshotRefreshed,
    SnapshotSent,
)
from moshpitd.core.outcome import Reason
from moshpitd.sim.checks import Checks
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import Node, Transfer, Vector, digest_of
from moshpitd.sim.wire import Outside, Wire


class Snapshots:
    """Invariant: a transfer is staged, loaded or dropped as a whole."""

    def __init__(self, world: Outside, wire: Wire, checks: Checks, options: Options) -> None:
        self._world, self._wire, self._checks, self._options = world, wire, checks, options
        wire.broken.append(self._link_broken)

    def other_died(self, node: Node, died: Node, delay: float) -> None:
        """`node` had transfers with `died`, and learns of it after `delay`."""
        for transfers in (node.plane.incoming, node.plane.outgoing):
            for nonce, transfer in transfers.items():
                if transfer.other == died.peer_id:
                    self._world.later(delay, self._break, node, nonce, Reason.LINK_LOST)

    def fetch(self, node: Node, effect: FetchSnapshot) -> None:
        donor = self._world.node(effect.donor)
        node.plane.incoming[effect.nonce] = Transfer(effect.donor, self._options.parts)
        if self._wire.refuses(node, donor):
            delay = self._wire.refused_s(node, donor)
            self._world.later(delay, self._break, node, effect.nonce, Reason.UNREACHABLE)
        self._wire.release(node, effect.nonce)

    def serve(self, node: Node, effect: PushSnapshot) -> None:
        other, plane = self._world.node(effect.to), node.plane
        if plane.copy is None or effect.nonce in plane.outgoing:
            reason = Reason.NO_SNAPSHOT if plane.copy is None else Reason.BUSY
            self._world.post(0.0, node, SnapshotFailed(effect.nonce, reason))
            return
        plane.outgoing[effect.nonce] = Transfer(effect.to, self._options.parts)
        self._checks.serving(node)
        if other.peer is None or not (node.dialable or other.dialable):
            delay = self._wire.refused_s(node, other)
            self._world.later(delay, self._break, node, effect.nonce, Reason.UNREACHABLE)
            return
        stamp = (effect.nonce, other.incarnation)
        departs = self._world.now
        for part in range(self._options.parts):
            piece = plane.copy[self._options.slice_of(part)].copy()
            departs = self._wire.send(node, other, stamp, self._piece_arrived, part, piece)
        self._world.later(departs - self._world.now, self._served, node, effect.nonce)

    def _served(self, node: Node, nonce: bytes) -> None:
        if node.plane.outgoing.pop(nonce, None) is not None:
            self._world.post(0.0, node, SnapshotSent(nonce))

    def _piece_arrived(self, node: Node, nonce: bytes, number: int, piece: Vector) -> None:
        transfer = node.plane.incoming.get(nonce)
        if transfer is None:
            self._wire.hold(node, nonce, self._piece_arrived, number, piece)
            return
        if number != len(transfer.staged):
            return  # a second copy of the transfer, because the request came twice
        transfer.staged.append(piece)
        if len(transfer.staged) < transfer.pieces:
            self._world.post(0.0, node, SnapshotProgressed(nonce))
        else:
            digest = digest_of(np.concatenate(transfer.staged))
            self._world.post(self._wire.work_s(), node, SnapshotArrived(nonce, digest))

    def _break(self, node: Node, nonce: bytes, reason: Reason) -> None:
        for transfers in (node.plane.incoming, node.plane.outgoing):
            transfer = transfers.get(nonce)
            if transfer is not None and len(transfer.staged) < transfer.pieces:
                del transfers[nonce]
                self._world.post(0.0, node, SnapshotFailed(nonce, reason))

    def drop(self, node: Node, effect: DropSnapshot) -> None:
        node.plane.incoming.pop(effect.nonce, None)
        node.plane.outgoing.pop(effect.nonce, None)
        node.plane.early.pop(effect.nonce, None)
        self._wire.close(node, effect.nonce)

    def load(self, node: Node, effect: LoadSnapshot) -> None:
        if effect.nonce:
            transfer = node.plane.incoming.pop(effect.nonce, None)
            if transfer is None or len(transfer.staged) < transfer.pieces:
                self._checks.fail("loads a snapshot that is not there whole", node)
            state = np.concatenate(transfer.staged)
        elif node.plane.copy is not None and node.plane.copy_version == effect.version:
            state = node.plane.copy  # our own, for a trainer that came later
        else:
            self._checks.fail(f"has no donor copy of version {effect.version} to load", node)
        for trainer in node.trainers:
            if trainer.name in effect.trainers:
                trainer.bucket[:] = state
        node.plane.copy, node.plane.copy_version = state, effect.version

    def refresh(self, node: Node, effect: RefreshSnapshot) -> None:
        # Copied now, not when the event arrives: from Finish on the bucket is the trainer's again.
        bucket = node.bucket(effect.trainer)
        if bucket is None:
            self._checks.fail(
                f"refreshes its snapshot from {effect.trainer}, which it does not have", node
            )
        node.plane.copy, node.plane.copy_version = bucket.copy(), effect.version
        self._world.post(self._wire.work_s(), node, SnapshotRefreshed(effect.version))

    def digest(self, node: Node, effect: Digest) -> None:
        plane = node.plane
        held = plane.copy is not None and plane.copy_version == effect.version
        digest = digest_of(plane.copy) if held and plane.copy is not None else b""
        self._world.post(self._wire.work_s(), node, Digested(effect.version, digest))

    def _link_broken(self, node: Node, nonce: bytes, other: Node) -> None:
        self._break(node, nonce, Reason.LINK_LOST)
