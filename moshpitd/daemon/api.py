"""The local API: gRPC on a Unix socket that only this user may open, with health and reflection.

One rule: nothing is decided here. Requests become calls of a run, and what comes back becomes
messages; a `TrainerError` leaves as `rpc.status` says, and any other exception is a mistake of
ours, logged here and answered with INTERNAL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moshpitd.core.outcome import Row
from moshpitd.daemon.buffers import HEADER_BYTES
from moshpitd.daemon.owed import give_residual, take_residual
from moshpitd.daemon.runs import Run
from moshpitd.daemon.stores import Stores
from moshpitd.daemon.trainers import Ask, Attachment, Ended, Progressed, Step
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.rpc.channel import SERVER_OPTIONS, target
from moshpitd.rpc.status import refusal, to_status
from moshpitd.rpc.stubs import API, SERVICE, messages, services
from moshpitd.tensors.layout import TensorSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
GRACE_S = 0.5  # calls that still run at a stop; their trainers reconnect
MAX_DRAIN_S = 86_400.0


class Served(Protocol):
    """What the API needs of its node."""

    @property
    def peer_id(self) -> str: ...
    @property
    def joined(self) -> bool: ...
    @property
    def draining(self) -> asyncio.Event: ...
    @property
    def stores(self) -> Stores: ...

    async def run(self, name: str, codec: str = "", *, feedback: bool = True) -> Run: ...
    def run_of(self, trainer: str) -> Run: ...
    def begin_drain(self, budget_s: float) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def peers(self, run: str = "") -> list[dict[str, Any]]: ...
    def rounds(self, run: str = "", last: int = 0) -> list[dict[str, Any]]: ...


class ApiServer:
    """Serves one node at one socket. The right to the path was claimed before (`claims`)."""

    def __init__(self, node: Served, path: Path, *, drain_budget_s: float) -> None:
        self._path = path
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        services.add_DaemonServicer_to_server(Servicer(node, drain_budget_s), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Raises ConfigError when the socket cannot be bound."""
        # The file is made inside this call, by this thread; a mode set afterwards would leave a
        # moment in which everybody may connect.
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(target(self._path))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot bind {self._path}: {error}", key="node.socket", expected="a free path"
            ) from None
        finally:
            os.umask(before)
        os.chmod(self._path, 0o600)
        await self._server.start()
        for name in (SERVICE, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(GRACE_S)
        self._path.unlink(missing_ok=True)


def _refusing(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """A TrainerError of the method becomes a status with its reason."""

    @functools.wraps(method)
    async def guarded(self: Servicer, request: Any, context: Any) -> T:
        try:
            return await method(self, request, context)
        except TrainerError as error:
            status = to_status(error)
            await context.abort(status.code, status.details, status.trailing_metadata)
            raise  # never reached: abort raises
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            log.exception("a call of the local API failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"a fault of the daemon: {error}")
            raise

    return guarded


class Servicer(services.DaemonServicer):
    """The methods of proto/moshpitd/v1/daemon.proto, in its order."""

    def __init__(self, node: Served, drain_budget_s: float) -> None:
        self._node = node
        self._drain_budget_s = drain_budget_s

    @_refusing
    async def Attach(self, request: Any, context: Any) -> Any:
        if request.api != API:
            raise refusal(
                "api_differs", f"the client speaks API {request.api}, this daemon speaks {API}"
            )
        specs = tuple(TensorSpec(t.name, tuple(t.shape), t.dtype) for t in request.tensors)
        attachment = Attachment(
            specs, request.version, request.founder, request.founder_digest,
            request.client[:200], request.topology, request.full, request.pairs, request.shared,
            request.in_place,
        )  # fmt: skip
        run = await self._node.run(request.run, request.codec, feedback=not request.no_feedback)
        trainer = await run.attach(attachment)  # at once: see Roster.run
        assert run.layout is not None
        return messages.AttachReply(
            trainer=trainer.name,
            bucket_path=str(trainer.bucket.path),
            bucket_bytes=trainer.bucket.file_bytes,
            data_offset=HEADER_BYTES,
            part_bytes=run.layout.part_bytes,
            peer_id=self._node.peer_id,
            version=run.driver.peer.version,
            joined=self._node.joined,
            codec=run.codec,
            slots=trainer.bucket.blocks.slots if trainer.bucket.blocks is not None else 0,
            shared_path=str(trainer.shared.path) if trainer.shared is not None else "",
            in_place=trainer.bucket.in_place,
        )

    @_refusing
    async def Hold(self, request: Any, context: Any) -> None:
        run = self._node.run_of(request.trainer)
        trainer = run.trainer(request.trainer)
        trainer.held = True
        waits = {
            asyncio.ensure_future(trainer.gone.wait()),
            leaving := asyncio.ensure_future(self._node.draining.wait()),
        }
        try:
            await context.write(messages.HoldEvent(state="held"))
            while not trainer.gone.is_set():
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if leaving in done:
                    await context.write(messages.HoldEvent(state="draining"))
        finally:
            # However it ended, the trainer is gone: it detached, it died, or the daemon stops.
            for one in waits:
                one.cancel()
            run.leave(request.trainer)

    @_refusing
    async def Detach(self, request: Any, context: Any) -> Any:
        with contextlib.suppress(TrainerError):  # gone already is as good
            self._node.run_of(request.trainer).leave(request.trainer, detached=True)
        return messages.DetachReply()

    @_refusing
    async def Sync(self, request: Any, context: Any) -> None:
        run = self._node.run_of(request.trainer)
        steps = run.sync(
            request.trainer, timeout_s=request.timeout_s, generation=request.generation
        )
        await _stream(steps, context)

    @_refusing
    async def Average(self, request: Any, context: Any) -> None:
        run = self._node.run_of(request.trainer)
        ask = Ask.checked(request, run.driver.peer.params)
        await _stream(run.average(request.trainer, ask), context)

    @_refusing
    async def Exchange(self, request: Any, context: Any) -> None:
        run = self._node.run_of(request.trainer)
        await _stream(run.exchange(request.trainer, request), context)

    @_refusing
    async def Meet(self, request: Any, context: Any) -> None:
        run = self._node.run_of(request.trainer)
        await _stream(run.meet(request.trainer, request), context)

    @_refusing
    async def PutState(self, request: Any, context: Any) -> Any:
        await self._node.run_of(request.trainer).put_state(request.trainer, request.state)
        return messages.PutStateReply()

    @_refusing
    async def GetState(self, request: Any, context: Any) -> Any:
        state = self._node.run_of(request.trainer).get_state(request.trainer)
        return messages.GetStateReply(state=state)

    @_refusing
    async def StorePull(self, request: Any, context: Any) -> Any:
        run = self._node.run_of(request.trainer)
        return messages.StorePullReply(version=await self._node.stores.pull(run, request))

    @_refusing
    async def StorePush(self, request: Any, context: Any) -> Any:
        run = self._node.run_of(request.trainer)
        return messages.StorePushReply(verdict=await self._node.stores.push(run, request))

    @_refusing
    async def GetResiduals(self, request: Any, context: Any) -> Any:
        run = self._node.run_of(request.trainer)
        found = await give_residual(
            run, request.trainer, request.generation, reducer=request.reducer
        )
        return messages.ResidualsReply(nothing=not found)

    @_refusing
    async def PutResiduals(self, request: Any, context: Any) -> Any:
        run = self._node.run_of(request.trainer)
        take_residual(
            run, request.trainer, request.generation, reducer=request.reducer,
            nothing=request.nothing,
        )  # fmt: skip
        return messages.ResidualsReply(nothing=request.nothing)

    @_refusing
    async def Status(self, request: Any, context: Any) -> Any:
        return messages.StatusReply(**self._node.status())

    @_refusing
    async def Peers(self, request: Any, context: Any) -> Any:
        return messages.PeersReply(peers=self._node.peers(request.run))

    @_refusing
    async def Rounds(self, request: Any, context: Any) -> Any:
        return messages.RoundsReply(rounds=self._node.rounds(request.run, request.last))

    @_refusing
    async def Drain(self, request: Any, context: Any) -> Any:
        budget_s = request.budget_s or self._drain_budget_s
        if not 0 < budget_s <= MAX_DRAIN_S:
            raise refusal(
                "timeout_out_of_range",
                f"budget_s {budget_s}, expected more than 0 and at most {MAX_DRAIN_S:g} seconds",
            )
        self._node.begin_drain(budget_s)
        return messages.DrainReply()


async def _stream(steps: AsyncGenerator[Step, None], context: Any) -> None:
    """Send progress and the result; when the trainer gives up, the call ends at once."""
    async with contextlib.aclosing(steps) as open_steps:
        async for step in open_steps:
            if isinstance(step, Progressed):
                event = messages.RoundEvent(progress=_progress(step))
            else:
                event = messages.RoundEvent(result=_result(step))
            await context.write(event)


def _progress(step: Progressed) -> Any:
    return messages.Progress(
        phase=step.phase,
        group_size=step.group_size,
        parts_done=step.parts_done,
        parts=step.parts,
        round=step.round,
    )


def _result(ended: Ended) -> Any:
    outcome = ended.outcome
    return messages.Result(
        status=outcome.status.value,
        reason=outcome.reason.value if outcome.reason is not None else "",
        detail=outcome.detail,
        accepted=outcome.accepted,
        group_size=outcome.group_size,
        participants=outcome.participants,
        contributors=outcome.contributors,
        excluded=[
            messages.Excluded(peer_id=peer, reason=reason.value)
            for peer, reason in outcome.excluded
        ],
        parts=outcome.parts,
        parts_without_result=outcome.parts_without_result,
        rounds=outcome.rounds,
        version=outcome.version,
        founder=ended.lineage.founder,
        founder_digest=ended.lineage.digest,
        loaded_snapshot=outcome.loaded_snapshot,
        newcomer=outcome.newcomer,
        total_weight=outcome.total_weight,
        group_id=outcome.group_id,
        seconds=dict(outcome.seconds),
        bytes_sent=ended.bytes_sent,
        bytes_received=ended.bytes_received,
        delta=ended.delta,
        moved=ended.moved,
        row=_row(outcome.row) if outcome.row is not None else None,
    )


def _row(row: Row) -> Any:
    return messages.Row(
        own_share=row.own_share,
        heard=[
            messages.Heard(
                peer_id=one.peer_id,
                share=one.share,
                mass=one.mass,
                sequence=one.sequence,
                full=one.full,
                slot=one.slot,
            )
            for one in row.heard
        ],
        unheard=row.unheard,
    )
