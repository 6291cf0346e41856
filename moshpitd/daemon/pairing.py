"""The data plane of meetings in pairs: the parameters that trainers leave here, and the halves of
means that come and go. One rule: whoever changes parameters holds their lock for the whole change,
so an average and a trainer's update come one after the other, in any order.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from moshpitd.core.effects import ClosePair, OpenPair, PushPair
from moshpitd.core.events import PairArrived, PairFailed
from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.ongoing import Ongoing, run_hash
from moshpitd.daemon.pacing import ROUND_PRIORITY, Frame, Skipped
from moshpitd.daemon.plane import Plane
from moshpitd.errors import RemoteProtocolError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.blocks import DECODED, FIRST_SLOT, MESSAGE
from moshpitd.tensors.codecs import RAW
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Tensor, bytes_of, fresh, tensor_of, untyped
from moshpitd.tensors.pairs import add_in_place, can_add, settle
from moshpitd.tensors.reduction import examine

log = logging.getLogger(__name__)

APPLIED_REMEMBERED = 64
"""Nonces whose difference was added here: one that comes twice is added once."""


@dataclass(slots=True)
class Values:
    """A trainer's parameters, in the first slot of its bucket. In front of them lie what it brings
    and a copy that it may read."""

    layout: Layout
    bucket: Bucket
    lock: threading.Lock = field(default_factory=threading.Lock)
    applied: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def block(self, block: int) -> Tensor:
        blocks = self.bucket.blocks
        assert blocks is not None  # attached for meetings
        return blocks.of(self.bucket.area, block)

    def start(self) -> None:
        with self.lock:
            self.block(FIRST_SLOT).copy_(self.block(MESSAGE))
            self.block(DECODED).copy_(self.block(MESSAGE))

    def add(self) -> None:
        with self.lock:
            add_in_place(self.layout, self.block(FIRST_SLOT), self.block(MESSAGE))
            self.block(DECODED).copy_(self.block(FIRST_SLOT))

    def add_once(self, nonce: bytes, difference: Tensor) -> bool:
        """As the active one. False, and nothing is added: the sum would not be finite."""
        with self.lock:
            if nonce in self.applied:
                return True
            if not can_add(self.layout, self.block(FIRST_SLOT), difference):
                return False
            add_in_place(self.layout, self.block(FIRST_SLOT), difference)
            self.applied[nonce] = None
            while len(self.applied) > APPLIED_REMEMBERED:
                self.applied.popitem(last=False)
            return True

    def settle(self, theirs: Tensor) -> bool:
        """As the passive one. False, and nothing has changed: it would not be finite."""
        with self.lock:
            return settle(self.layout, self.block(FIRST_SLOT), theirs)

    def copy(self) -> Tensor:
        with self.lock:
            return self.block(FIRST_SLOT).clone()


class PairPlane:
    """Invariant: an id is open from its OpenPair to its ClosePair. Called on the daemon's loop, but
    `start` and `add`, which block."""

    def __init__(self, plane: Plane, peer_id: str) -> None:
        self._plane, self._peer_id = plane, peer_id
        self._values: dict[tuple[str, str], Values] = {}
        self._open: dict[bytes, Half] = {}

    # -- the trainer

    def start(self, name: str, trainer: str) -> None:
        """What it brought are its parameters from now on. Blocks."""
        run = self._plane.run(name)
        bucket = run.buckets.get(trainer)
        if bucket is None:  # it is gone
            return
        values = Values(run.layout, bucket)
        values.start()
        for key in [key for key in list(self._values) if key[0] == name]:
            self._values.pop(key, None)  # a trainer of before, which is gone
        self._values[name, trainer] = values
        if run.buckets.get(trainer) is not bucket:  # gone meanwhile
            self.gone(name, trainer)

    def gone(self, name: str, trainer: str) -> None:
        """With a trainer goes the memory of its parameters."""
        self._values.pop((name, trainer), None)

    def add(self, name: str, trainer: str) -> bool:
        """Add what it brought; False if it never started. Blocks."""
        values = self._values.get((name, trainer))
        if values is None:
            return False
        values.add()
        return True

    def end(self, run: str) -> None:
        """The run is over."""
        for nonce in [one for one, half in self._open.items() if half.run == run]:
            self.close(nonce)
        for key in [key for key in list(self._values) if key[0] == run]:
            self._values.pop(key, None)

    # -- what the core asks for

    def handle(self, run: Ongoing, effect: OpenPair | PushPair | ClosePair) -> None:
        match effect:
            case OpenPair():
                self._begin(run, effect)
            case PushPair():
                half = self._open.get(effect.nonce)
                if half is not None:
                    self._plane.submit(partial(self._push, half))
            case ClosePair():
                self.close(effect.nonce)

    def close(self, nonce: bytes) -> None:
        half = self._open.pop(nonce, None)
        if half is not None:
            half.close()
            self._plane.pulse.leave(nonce)
            self._plane.intake.shut(nonce, counters=(half.sent, half.received))
            self._plane.pacer.discard(nonce)

    def _begin(self, run: Ongoing, effect: OpenPair) -> None:
        plane = self._plane
        values = self._values.get((run.name, effect.trainer))
        if values is None:
            plane.post(run.name, PairFailed(effect.nonce, Reason.NO_TRAINER))
            return
        if effect.active and effect.nonce in values.applied:
            plane.post(run.name, PairArrived(effect.nonce))
            return
        half = Half(effect, run.name, values, plane)
        if not plane.intake.admit(effect.nonce, half):
            # The id of a round that runs here, or of another meeting: its frames stay its own.
            plane.post(run.name, PairFailed(effect.nonce, Reason.REFUSED))
            return
        self._open[effect.nonce] = half
        plane.pulse.watch(run.name, effect.nonce, [effect.peer])
        # The smaller PeerID dials, unless the other one cannot be dialled.
        ours = self._peer_id < effect.peer
        dials = bool(effect.addresses) if ours else not effect.dialled
        plane.link(run, effect.peer, effect.addresses, dials=dials)

    def _push(self, half: Half) -> None:
        """In the pool, because it copies or averages all values."""
        frames = half.outgoing()
        if frames is not None:
            self._plane.pacer.put(half.peer, half.nonce, frames, priority=ROUND_PRIORITY)


class Half:
    """One meeting at one of the two: a target of the intake. Invariant: after `close` nothing is
    applied here."""

    kinds = frozenset({FrameKind.NEIGHBOUR})

    def __init__(self, effect: OpenPair, run: str, values: Values, plane: Plane) -> None:
        self.run, self.run_hash, self.nonce = run, run_hash(run), effect.nonce
        self.peer, self.active = effect.peer, effect.active
        self.sent = self.received = 0
        self._values, self._layout, self._plane = values, values.layout, plane
        self._staged = fresh(values.layout.nbytes)
        self._changed = threading.Condition()  # guards all below
        self._left = set(range(len(values.layout.parts)))
        self._claimed: set[int] = set()
        self._settled = self._closed = False

    def outgoing(self) -> Iterator[Frame] | None:
        """What goes to the other one; None when this is over."""
        if self.active:
            return self._frames(self._values.copy())
        with self._changed:
            if self._closed or self._left:
                return None
            if not self._settled and not self._values.settle(self._staged):
                self._unusable()
                return None
            self._settled = True
        return self._frames(self._staged)

    def close(self) -> None:
        with self._changed:
            self._closed = True

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """A frame of this meeting, in a link's reader thread."""
        with self._changed:
            known = 0 <= header.part < len(self._layout.parts)
            if peer_id != self.peer or not known or self._closed or header.part in self._claimed:
                self._plane.drop("not_a_pair" if peer_id != self.peer else "part_closed")
                return
            self._claimed.add(header.part)
        part = self._layout.parts[header.part]
        out = self._layout.part_view(self._staged, part)
        try:
            RAW.decode(tensor_of(payload), out)
            sound = header.codec == RAW.code and examine(out)[0] is None
        except RemoteProtocolError:
            sound = False
        with self._changed:
            if self._over():
                return
            if not sound:
                self._unusable()
                return
            self.received += part.nbytes
            self._left.discard(part.index)
            if self._left:
                return
            if self.active and not self._values.add_once(self.nonce, self._staged):
                self._unusable()
                return
            self._plane.post(self.run, PairArrived(self.nonce))

    def _unusable(self) -> None:
        """Lock held. Nothing of it is applied, and nothing more is taken."""
        self._closed = True
        self._plane.post(self.run, PairFailed(self.nonce, Reason.NOT_FINITE))

    def _over(self) -> bool:
        """A method, because it may have changed since it was looked at last."""
        return self._closed

    def _frames(self, values: Tensor) -> Iterator[Frame]:
        for part in self._layout.parts:
            header = Header(
                FrameKind.NEIGHBOUR, self.run_hash, self.nonce, part.index, codec=RAW.code
            )
            yield header, self._payload(part, values)

    def _payload(self, part: Part, values: Tensor) -> Callable[[memoryview], memoryview]:
        def payload(_: memoryview) -> memoryview:
            if self._closed:
                raise Skipped
            view = untyped(self._layout.part_view(values, part))
            self.sent += part.nbytes
            return bytes_of(view)

        return payload
