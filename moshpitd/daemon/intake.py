"""Where a frame goes: to an open round or transfer, to the frames that wait for theirs, or nowhere.
One rule: nothing that a frame holds raises here; what cannot be used is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

from moshpitd.daemon.early import WAIT_S, EarlyFrames, Held
from moshpitd.net.frames import FrameKind, Header

log = logging.getLogger(__name__)

# Ids of rounds and transfers that are over: their stragglers are dropped and not held as early. A
# round a second for an hour; 16 bytes each and two counters.
CLOSED_REMEMBERED = 4096


class Target(Protocol):
    """An open round, or a transfer that is expected."""

    @property
    def run_hash(self) -> bytes: ...

    @property
    def kinds(self) -> frozenset[FrameKind]: ...

    def take(self, peer_id: str, header: Header, payload: memoryview) -> None: ...


class Intake:
    """Invariant: an id is open, or remembered as closed, or unknown; only unknown ones are held."""

    def __init__(
        self, drop: Callable[[str], None], submit: Callable[[Callable[[], None]], None]
    ) -> None:
        """`drop(reason)` counts a frame; `submit` runs a task in the pool."""
        self._drop = drop
        self._submit = submit
        self._changed = threading.Condition()  # guards all below; told when an id opens or closes
        self._hashes: set[bytes] = set()
        self._targets: dict[bytes, Target] = {}
        self._closed: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._early = EarlyFrames()
        self._closing = False

    def add_run(self, run_hash: bytes) -> None:
        with self._changed:
            self._hashes.add(run_hash)

    def remove_run(self, run_hash: bytes) -> None:
        with self._changed:
            self._hashes.discard(run_hash)

    def close(self) -> None:
        """Let go of every reader that waits."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def on_frame(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """In a reader thread; may make it wait for the group to open."""
        try:
            target = self._target(peer_id, header, payload)
            if target is not None:
                self._deliver(target, peer_id, header, payload)
        except Exception:
            log.exception("a frame from %s could not be handled", peer_id)
            self._drop("internal")

    def admit(self, group: bytes, target: Target) -> bool:
        """Frames of this id have somewhere to go from now on, also those that came early. False,
        and nothing has changed: it is open already, and a peer that chose it chose another's."""
        with self._changed:
            if group in self._targets:
                return False
            self._targets[group] = target
            self._closed.pop(group, None)
            early = self._early.take(group)
            self._changed.notify_all()

        def deliver(held: Held) -> None:
            self._deliver(target, held.peer_id, held.header, memoryview(held.payload))

        for held in early:
            self._submit(partial(deliver, held))
        return True

    def shut(self, group: bytes, *, counters: tuple[int, int] = (0, 0)) -> None:
        """Frames of this id are dropped from now on. `counters` are kept for whoever asks."""
        if not group:
            return
        with self._changed:
            self._targets.pop(group, None)
            self._early.take(group)
            self._closed[group] = counters
            while len(self._closed) > CLOSED_REMEMBERED:
                self._closed.popitem(last=False)
            self._changed.notify_all()

    def counters(self, group: bytes) -> tuple[int, int]:
        with self._changed:
            return self._closed.get(group, (0, 0))

    def link_lost(self, peer_id: str) -> None:
        with self._changed:
            self._early.forget(peer_id)

    def _target(self, peer_id: str, header: Header, payload: memoryview) -> Target | None:
        """Whom the frame is for; None when it is held for later or dropped."""
        group = header.group

        def known() -> bool:
            return group in self._targets or group in self._closed

        with self._changed:
            if header.run not in self._hashes:
                self._drop("unknown_run")
                return None
            if not known():
                if self._early.hold(peer_id, header, payload):
                    return None
                if self._early.worth_waiting(peer_id, group):
                    self._changed.wait_for(lambda: known() or self._closing, timeout=WAIT_S)
                    if not known():
                        self._early.gave_up(peer_id, group)
            target = self._targets.get(group)
            if target is None:
                self._drop("group_closed" if group in self._closed else "group_unknown")
            return target

    def _deliver(self, target: Target, peer_id: str, header: Header, payload: memoryview) -> None:
        # The ids are random, so a frame of the wrong kind or run is a mistake or a lie, not chance.
        if header.kind not in target.kinds:
            self._drop("wrong_kind")
        elif header.run != target.run_hash:
            self._drop("wrong_run")
        else:
            target.take(peer_id, header, payload)
