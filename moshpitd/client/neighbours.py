"""An exchange with neighbours on real daemons: `NeighbourExchange` of `client.primitives`. One
rule: whatever a daemon or a peer does, a trainer gets a row of a mixing matrix: where nothing came
and nothing went, the row that keeps its own value.

One exchange is one run, `RUN.NAME.TOPOLOGY`, so that trainers who would mix by different matrices
never meet. The run's bucket has a block for the message, one for what the neighbours decode of it,
and one for each neighbour's (`tensors.blocks`). Messages belong to their round: the run has no
versions, no snapshots and no error feedback, and a newcomer is a neighbour at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.client.buckets import copies_of
from moshpitd.client.options import PASSING
from moshpitd.client.primitives import Coding, Exchanged, Message, Tensors
from moshpitd.client.result import Result
from moshpitd.client.rounds import Telling, follow
from moshpitd.client.session import GRACE_S, Session
from moshpitd.client.sources import source_of
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.stubs import messages
from moshpitd.tensors.blocks import DECODED, Blocks
from moshpitd.tensors.layout import Layout

log = logging.getLogger("moshpitd.client")


class NeighbourSession(Session):
    """A session whose run exchanges with neighbours; `exchange` in the place of `average`."""

    def exchange(
        self, request: messages.ExchangeRequest, tensors: Tensors, full: Tensors | None
    ) -> tuple[Result, Blocks, Layout, Tensor]:
        """The result, and where the blocks are: valid until the next call. Errors as in
        `average`."""
        with self._turn:
            attachment = self._ready()
            bucket = attachment.bucket
            blocks = Blocks(bucket.layout.nbytes, bucket.slots, self._full)
            if bucket.area.numel() < blocks.total:
                raise TrainerError(
                    f"{bucket.path}: {bucket.area.numel()} bytes, expected {blocks.total} for "
                    f"{blocks.count} blocks",
                    code="FAILED_PRECONDITION",
                    reason="api_differs",
                )
            with Telling(self._keeper, attachment):
                room = blocks.of(bucket.area, blocks.own_full) if full is not None else None
                request.generation = bucket.fill(
                    list(tensors.values()),
                    beside=None if full is None or room is None else (list(full.values()), room),
                )
                request.trainer = attachment.trainer
                stream = self._calls.exchange(request, request.timeout_s + GRACE_S)
                result = follow(stream, None)
            return result, blocks, bucket.layout, bucket.area


class _Block(Protocol):
    """A copy of the tensors of a neighbour's slot, or of our own message as they decode it."""

    def __call__(self, slot: int | None, *, full: bool) -> dict[str, Tensor]: ...


class DaemonExchange:
    """One on its way: `client.primitives.Pending`."""

    def __init__(self, future: Future[Exchanged]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def land(self) -> Exchanged:
        return self._future.result()


class DaemonNeighbours:
    """Invariant: one exchange at a time, and each has its own number, whatever becomes of it."""

    def __init__(
        self,
        run: str,
        *,
        socket: str,
        like: Tensors,
        topology: str,
        coding: Coding,
        timeout_s: float,
        heard: Callable[[Result], None],
    ) -> None:
        """`heard(result)` is called after every exchange."""
        self._names, self._run, self._timeout_s = [*like], run, timeout_s
        self._like = {name: torch.zeros_like(value) for name, value in like.items()}
        self._socket, self._topology, self._codec = socket, topology, coding.codec
        self._session: NeighbourSession | None = None
        self._heard = heard
        self._sequence = 0
        self._turn = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def exchange(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> Exchanged:
        return self._round(_copies(tensors), mass, full, knows)

    def begin(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> DaemonExchange:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="moshpitd-exchange")
        sent, whole = _copies(tensors), None if full is None else _copies(full)
        work = partial(self._round, sent, mass, whole, frozenset(knows))
        return DaemonExchange(self._thread.submit(work))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, *, full: bool) -> NeighbourSession:
        """At the first exchange, which tells whether there is to be room for full copies."""
        if self._session is None:
            self._session = NeighbourSession(
                self._run,
                source_of(None, self._like),
                socket=self._socket,
                codec=self._codec,
                feedback=False,
                topology=self._topology,
                full=full,
            )
            self._session.start(sync=True)
        return self._session

    def _round(
        self, sent: dict[str, Tensor], mass: float, full: Tensors | None, knows: Collection[str]
    ) -> Exchanged:
        if [*sent] != self._names:
            raise TrainerError(
                f"{self._run}: tensors {[*sent][:3]}..., expected {self._names[:3]}...",
                reason="schema_changed",
            )
        with self._turn:
            request = messages.ExchangeRequest(
                sequence=self._sequence,
                mass=mass,
                full=full is not None,
                knows=sorted(knows),
                timeout_s=self._timeout_s,
            )
            self._sequence += 1
            try:
                session = self._open(full=full is not None)
                result, blocks, layout, area = session.exchange(request, sent, full)
            except DaemonUnavailable as error:
                log.warning("%s: no exchange this time: %s", self._run, error)
                return Exchanged(1.0, sent)
            except TrainerError as error:
                if error.reason not in PASSING:
                    raise
                log.warning("%s: no exchange this time: %s", self._run, error)
                return Exchanged(1.0, sent)
            self._heard(result)
            return self._read(result, sent, partial(_tensors, sent, layout, blocks, area))

    def _read(self, result: Result, sent: dict[str, Tensor], block: _Block) -> Exchanged:
        row = result.row
        if row is None or not result.accepted:
            if result.status == "failed":
                log.warning("%s: no exchange this time: %s", self._run, result)
            return Exchanged(1.0, sent)
        found = []
        for heard in row.heard:
            full = block(heard.slot, full=True) if heard.full else None
            found.append(
                Message(
                    peer=heard.peer_id,
                    share=heard.share,
                    tensors=block(heard.slot, full=False),
                    mass=heard.mass,
                    sequence=heard.sequence,
                    full=full,
                )
            )
        return Exchanged(row.own_share, block(None, full=False), tuple(found), row.unheard)


def _tensors(
    like: Tensors, layout: Layout, blocks: Blocks, area: Tensor, slot: int | None, *, full: bool
) -> dict[str, Tensor]:
    block = DECODED if slot is None else blocks.slot(slot, full=full)
    return copies_of(layout, blocks.of(area, block), like)


def _copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
