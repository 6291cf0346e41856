"""Keeps the trainer attached while daemons come and go. One rule: it never touches a tensor, so
that the training loop may run, block in a round or be interrupted whatever this thread does.

The daemon's presence is one open `Hold` stream: it ends when either side dies, without any ping.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moshpitd.client.buckets import Bucket
from moshpitd.errors import DaemonUnavailable, MoshpitError, TrainerError
from moshpitd.rpc.calls import Calls, EventStream
from moshpitd.rpc.stubs import messages

log = logging.getLogger("moshpitd.client")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
"""A daemon under a supervisor is back within seconds; a connect to a Unix socket where nobody
listens costs a system call, so there is no reason to be more patient than this."""
DETACH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """One life of the trainer inside one life of the daemon. Invariant: never reused after
    `lost`."""

    trainer: str
    bucket: Bucket
    hold: EventStream[messages.HoldEvent]
    peer_id: str
    joined: bool
    codec: str
    shared_path: str = ""


class Keeper:
    """Holds the current attachment, or none and the reason. Invariant: one thread attaches at a
    time, and all fields change under the one condition."""

    def __init__(self, calls: Calls, attach: Callable[[], Attachment], run: str) -> None:
        self._calls, self._attach, self._run = calls, attach, run
        self._changed = threading.Condition()
        self._current: Attachment | None = None
        self._why: MoshpitError = DaemonUnavailable("not attached yet")
        self._closed = False
        self._draining = False
        self._pid = os.getpid()
        # Not the module's functions: seeding those is the trainer's business, and drawing from
        # them ours to avoid.
        self._random = random.Random()
        self._thread = threading.Thread(target=self._keep, name="moshpitd-keeper", daemon=True)

    def start(self) -> None:
        """Try once in the calling thread, then go on in the background. Raises TrainerError only:
        a daemon that refuses these tensors is worth hearing of at once, one that is not there yet
        is normal."""
        try:
            self._publish(self._attach())
        except DaemonUnavailable as error:
            self._why = error
            log.warning("%s: training locally, attaching in the background: %s", self._run, error)
        self._thread.start()

    def current(self) -> Attachment:
        """The attachment; raises what stands in its way (DaemonUnavailable, or the TrainerError of
        the last try)."""
        if os.getpid() != self._pid:
            raise DaemonUnavailable("this process was forked from the one that attached")
        with self._changed:
            if self._current is None:
                raise self._why
            return self._current

    @property
    def attached(self) -> bool:
        with self._changed:
            return self._current is not None

    @property
    def draining(self) -> bool:
        """The daemon said that it is leaving; it will take no further rounds."""
        with self._changed:
            return self._draining

    def wait(self, timeout_s: float) -> bool:
        """Wait until attached; False when that did not happen in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._current is not None, timeout_s)

    def lost(self, attachment: Attachment, why: MoshpitError) -> None:
        """The caller found the attachment dead (or wants a new one): attach again in the
        background."""
        with self._changed:
            if self._current is attachment:
                self._current, self._why = None, why
                self._changed.notify_all()
        attachment.hold.cancel()

    def close(self) -> None:
        """Detach and end the thread. In a forked child: only forget, because the stream is the
        parent's."""
        if os.getpid() != self._pid:
            self._closed = True
            return
        with self._changed:
            if self._closed:
                return
            attachment, self._current, self._closed = self._current, None, True
            self._why = DaemonUnavailable("this session is closed")
            self._changed.notify_all()
        if attachment is not None:
            try:
                self._calls.detach(attachment.trainer, DETACH_TIMEOUT_S)
            except MoshpitError as error:
                # The end of the Hold stream says the same to a daemon that is still alive.
                log.debug("%s: detach: %s", self._run, error)
            attachment.hold.cancel()
        self._calls.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(DETACH_TIMEOUT_S)

    # -- the thread -------------------------------------------------------------------------------

    def _keep(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            with self._changed:
                attachment, closed = self._current, self._closed
            if closed:
                return
            if attachment is not None:
                if self._watch(attachment):
                    delay_s = FIRST_DELAY_S
            elif self._again():
                continue
            # Also after a stream that was lost: a daemon that dies at every attach is not hammered.
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._closed, delay_s * self._random.uniform(0.5, 1)
                ):
                    return
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _watch(self, attachment: Attachment) -> bool:
        """Block until the Hold stream ends; whether it had begun to hold at all."""
        held = False
        why: MoshpitError = DaemonUnavailable("the daemon ended the attachment")
        try:
            for event in attachment.hold:
                held = True
                if event.state == "draining":
                    with self._changed:
                        self._draining = True
                    log.warning("%s: the daemon is draining", self._run)
        except MoshpitError as error:
            why = error
        with self._changed:
            if self._current is attachment:
                self._current, self._why = None, why
                self._changed.notify_all()
            closed = self._closed
        if not closed:
            log.warning("%s: lost the daemon, training locally: %s", self._run, why)
        return held

    def _again(self) -> bool:
        try:
            attachment = self._attach()
        except MoshpitError as error:
            with self._changed:
                told = isinstance(error, TrainerError) and str(error) != str(self._why)
                if not self._closed:
                    self._why = error
            if told:
                # Kept trying all the same: a full tmpfs gets room, another model's trainer goes
                # away.
                log.error("%s: the daemon refuses this trainer: %s", self._run, error)
            return False
        self._publish(attachment)
        log.info("%s: attached again as %s", self._run, attachment.trainer)
        return True

    def _publish(self, attachment: Attachment) -> None:
        with self._changed:
            if self._closed:
                attachment.hold.cancel()
                return
            self._current, self._draining = attachment, False
            self._changed.notify_all()
