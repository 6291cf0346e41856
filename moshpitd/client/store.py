"""A parameter store on the daemons: `client.primitives.ParameterStore`. One rule: a pull comes back
with a snapshot or not at all, and a push that cannot be told to anybody is a refused one.

The trainer's daemon does the rest: parts are spread over the daemons of the run, and versions are
ordered by one of them. While there is no daemon a pull waits; when a new one has never heard of the
store, it is opened with what this trainer holds.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from moshpitd.client.keeper import Attachment
from moshpitd.client.options import PASSING as BUSY
from moshpitd.client.primitives import Pulled, StoreOptions, Tensors
from moshpitd.client.session import GRACE_S, Session
from moshpitd.client.sources import source_of
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.calls import Calls
from moshpitd.rpc.stubs import messages

log = logging.getLogger("moshpitd.client")

CALL_S = 30.0
"""Of one call. A pull that has to wait longer is made again; nothing is lost by that."""
PATIENCE_S = 300.0
"""For a daemon: longer than a restart with all that it may have to wait for, short enough that a
job whose daemon is gone for good ends in the same hour."""
AGAIN_S = 0.5  # between two looks for a daemon
PASSING = frozenset({"store_timeout", "unknown_trainer"}) | BUSY


class DaemonStore:
    """Invariant: `_values` is what this trainer last pulled, or what it began with."""

    def __init__(self, session: Session, start: Tensors, options: StoreOptions) -> None:
        self._session, self._options = session, options
        self._calls = Calls(session.socket)
        self._values = {name: x.detach().cpu().clone() for name, x in start.items()}
        self._told = ""  # the attachment that the store was opened with

    @classmethod
    def opened(
        cls, beside: Session, name: str, start: Tensors, options: StoreOptions, within_s: float
    ) -> DaemonStore:
        """`RUN.NAME` of the daemon that `beside` is attached to."""
        # What a run attaches with is its lineage: zeros, so that all trainers are of one, and the
        # store alone says what the parameters are.
        zeros = {key: torch.zeros_like(x, device="cpu") for key, x in start.items()}
        session = Session(f"{beside.run}.{name}", source_of(None, zeros), socket=beside.socket)
        session.start(sync=True)
        if beside.attached:
            session.wait_attached(within_s)
        return cls(session, start, options)

    def pull(self) -> Pulled:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                attachment = self._session.attachment()
                version = self._pull(attachment)
            except DaemonUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("%s: the store waits for a daemon: %s", self._session.run, error)
                self._session.wait_attached(AGAIN_S)
                time.sleep(AGAIN_S / 10)  # attached in name: its end is not noticed yet
                continue
            except TrainerError as error:
                if error.reason not in PASSING:
                    raise
                log.warning("%s: the store is asked again: %s", self._session.run, error)
                time.sleep(AGAIN_S / 10)  # as above
                continue
            layout = attachment.bucket.layout
            views = layout.views(attachment.bucket.data)
            self._values = {
                spec.name: view.clone() for spec, view in zip(layout.specs, views, strict=True)
            }
            return Pulled(dict(self._values), version)

    def push(self, gradient: Tensors, *, version: int) -> bool:
        try:
            attachment = self._session.attachment()
            if attachment.trainer != self._told:
                return False  # another life of the daemon, which has seen no pull of ours
            request = messages.StorePushRequest(
                trainer=attachment.trainer,
                generation=self._fill(attachment, gradient),
                timeout_s=CALL_S,
                version=version,
            )
            return self._calls.store_push(request, CALL_S + GRACE_S) == "taken"
        except DaemonUnavailable as error:
            log.warning("%s: a gradient is lost: %s", self._session.run, error)
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
        return False

    def close(self) -> None:
        self._session.close()
        self._calls.close()

    def _pull(self, attachment: Attachment) -> int:
        options = self._options
        request = messages.StorePullRequest(
            trainer=attachment.trainer,
            generation=self._fill(attachment, self._values),
            timeout_s=CALL_S,
            gamma=options.gamma,
            batch=options.batch,
            max_staleness=options.max_staleness,
            block=options.block,
        )
        version = self._calls.store_pull(request, CALL_S + GRACE_S)
        self._told = attachment.trainer
        return version

    def _fill(self, attachment: Attachment, values: Tensors) -> int:
        ordered: list[Tensor] = [values[spec.name] for spec in attachment.bucket.layout.specs]
        return attachment.bucket.fill(ordered)
