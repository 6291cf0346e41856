"""Meetings in pairs on real daemons: `Meetings` of `client.primitives`. One rule: an update of this
trainer is never lost, whatever becomes of the daemon.

The parameters lie with the daemon, where neighbours meet them at any time; here is a copy as of the
last update. When the daemon is gone, updates are added to that copy, and the next daemon starts
with it. Averages that others made with the old daemon's values meanwhile are lost with them, as
with any peer that dies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from moshpitd.client.buckets import copies_of
from moshpitd.client.options import PASSING
from moshpitd.client.primitives import Tensors
from moshpitd.client.result import Result
from moshpitd.client.rounds import Telling, follow
from moshpitd.client.session import GRACE_S, Session
from moshpitd.client.sources import source_of
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.stubs import messages
from moshpitd.tensors.blocks import DECODED, Blocks

log = logging.getLogger("moshpitd.client")


class PairSession(Session):
    """A session whose parameters lie with the daemon. `start` and `add` in the place of
    `average`."""

    def meet(
        self, action: str, tensors: Tensors | None, timeout_s: float
    ) -> tuple[Result, str, dict[str, Tensor]]:
        """(result, the attachment's name, the copy that the daemon made for us). Errors as in
        `average`."""
        with self._turn:
            attachment = self._ready()
            bucket = attachment.bucket
            request = messages.MeetRequest(
                trainer=attachment.trainer, action=action, timeout_s=timeout_s
            )
            with Telling(self._keeper, attachment):
                if tensors is not None:
                    bucket.fill(list(tensors.values()))
                request.generation = bucket.generation
                result = follow(self._calls.meet(request, timeout_s + GRACE_S), None)
            if tensors is None:
                return result, attachment.trainer, {}
            blocks = Blocks(bucket.layout.nbytes, bucket.slots, full=False)
            copies = copies_of(bucket.layout, blocks.of(bucket.area, DECODED), tensors)
            return result, attachment.trainer, copies

    @property
    def life(self) -> str:
        """Names the present attachment; empty when there is none."""
        attachment = self._attached
        return attachment.trainer if attachment is not None and self.attached else ""


class DaemonMeetings:
    """Invariant: `_x` is what this trainer's parameters were after its last update."""

    def __init__(
        self,
        run: str,
        *,
        socket: str,
        like: Tensors,
        topology: str,
        timeout_s: float,
        heard: Callable[[Result], None],
    ) -> None:
        """`heard(result)` is called after every meeting that this trainer began."""
        self._timeout_s, self._run = timeout_s, run
        self._turn = threading.Lock()
        self._x: dict[str, Tensor] = {}
        self._life = ""  # of the attachment whose daemon holds our parameters
        self._heard = heard
        self._session = PairSession(
            run,
            source_of(None, {name: torch.zeros_like(value) for name, value in like.items()}),
            socket=socket,
            codec="float32",
            feedback=False,
            topology=topology,
            pairs=True,
        )
        self._session.start(sync=True)

    def start(self, tensors: Tensors) -> None:
        with self._turn:
            self._x = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            self._life = ""
            self._present()

    def add(self, update: Tensors) -> dict[str, Tensor]:
        with self._turn:
            if self._present():
                found = self._call("add", {name: update[name].detach() for name in self._x})
                if found is not None:
                    self._x = found[2]
                    return {name: value.clone() for name, value in self._x.items()}
            self._life = ""  # what it holds now is not known
            self._x = {name: value + update[name] for name, value in self._x.items()}
            return {name: value.clone() for name, value in self._x.items()}

    def meet(self) -> str:
        with self._turn:
            found = self._call("meet", None) if self._present() else None
            if found is None:
                return ""
            self._heard(found[0])
            met = found[0].status == "complete"
            return found[0].contributors[0] if met and found[0].contributors else ""

    def close(self) -> None:
        self._session.close()

    def _present(self) -> bool:
        """Whether a daemon holds our parameters, after giving them to one that is new."""
        life = self._session.life
        if life and life != self._life:
            found = self._call("start", self._x)
            self._life = found[1] if found is not None else ""
        return bool(life) and life == self._life

    def _call(
        self, action: str, tensors: Tensors | None
    ) -> tuple[Result, str, dict[str, Tensor]] | None:
        try:
            return self._session.meet(action, tensors, self._timeout_s)
        except DaemonUnavailable as error:
            log.warning("%s: no %s this time: %s", self._run, action, error)
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
            log.warning("%s: no %s this time: %s", self._run, action, error)
        return None
