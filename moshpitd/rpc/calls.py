"""The local API as blocking calls with our errors. One rule: what leaves here is a message, a
`TrainerError` or a `DaemonUnavailable`, so that neither the trainer's nor the operator's side
knows gRPC."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import grpc

from moshpitd.rpc.channel import sync_channel
from moshpitd.rpc.status import from_call
from moshpitd.rpc.stubs import messages, services

Reply = TypeVar("Reply")


class EventStream(Generic[Reply]):
    """A stream of replies. Invariant: however the loop over it is left, the daemon hears that it
    was."""

    def __init__(self, call: Any, socket: str) -> None:
        self._call, self._socket = call, socket

    def __iter__(self) -> Iterator[Reply]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise from_call(error, socket=self._socket) from error
        finally:
            # Also when Ctrl-C or an error in the loop's body ends it: the round must not wait for
            # us.
            self._call.cancel()

    def cancel(self) -> None:
        """End the call from another thread; the iterating one gets `DaemonUnavailable`."""
        self._call.cancel()


class Calls:
    """One channel to one daemon. Thread-safe, as gRPC's channels are. Every wait has a bound
    except `hold`."""

    def __init__(self, socket: str | os.PathLike[str]) -> None:
        self.socket = os.path.abspath(os.fspath(socket))
        self._channel = sync_channel(self.socket)
        # The generated stub has no types; the table of its methods is in the .proto.
        self._stub: Any = services.DaemonStub(self._channel)

    def close(self) -> None:
        """Ends running calls too."""
        self._channel.close()

    def attach(self, request: messages.AttachRequest, timeout_s: float) -> messages.AttachReply:
        return cast(messages.AttachReply, self._unary(self._stub.Attach, request, timeout_s))

    def hold(self, trainer: str) -> EventStream[messages.HoldEvent]:
        return self._stream(self._stub.Hold, messages.HoldRequest(trainer=trainer), None)

    def detach(self, trainer: str, timeout_s: float) -> None:
        self._unary(self._stub.Detach, messages.DetachRequest(trainer=trainer), timeout_s)

    def sync(
        self, request: messages.SyncRequest, timeout_s: float
    ) -> EventStream[messages.RoundEvent]:
        return self._stream(self._stub.Sync, request, timeout_s)

    def average(
        self, request: messages.AverageRequest, timeout_s: float
    ) -> EventStream[messages.RoundEvent]:
        return self._stream(self._stub.Average, request, timeout_s)

    def exchange(
        self, request: messages.ExchangeRequest, timeout_s: float
    ) -> EventStream[messages.RoundEvent]:
        return self._stream(self._stub.Exchange, request, timeout_s)

    def meet(
        self, request: messages.MeetRequest, timeout_s: float
    ) -> EventStream[messages.RoundEvent]:
        return self._stream(self._stub.Meet, request, timeout_s)

    def put_state(self, trainer: str, state: bytes, timeout_s: float) -> None:
        request = messages.PutStateRequest(trainer=trainer, state=state)
        self._unary(self._stub.PutState, request, timeout_s)

    def get_state(self, trainer: str, timeout_s: float) -> bytes:
        request = messages.GetStateRequest(trainer=trainer)
        reply = cast(messages.GetStateReply, self._unary(self._stub.GetState, request, timeout_s))
        return reply.state

    def get_residuals(
        self, request: messages.ResidualsRequest, timeout_s: float
    ) -> messages.ResidualsReply:
        return cast(
            messages.ResidualsReply, self._unary(self._stub.GetResiduals, request, timeout_s)
        )

    def put_residuals(self, request: messages.ResidualsRequest, timeout_s: float) -> None:
        self._unary(self._stub.PutResiduals, request, timeout_s)

    def status(self, timeout_s: float = 5.0) -> messages.StatusReply:
        request = messages.StatusRequest()
        return cast(messages.StatusReply, self._unary(self._stub.Status, request, timeout_s))

    def peers(self, run: str = "", timeout_s: float = 5.0) -> messages.PeersReply:
        request = messages.PeersRequest(run=run)
        return cast(messages.PeersReply, self._unary(self._stub.Peers, request, timeout_s))

    def rounds(self, run: str = "", last: int = 0, timeout_s: float = 5.0) -> messages.RoundsReply:
        request = messages.RoundsRequest(run=run, last=last)
        return cast(messages.RoundsReply, self._unary(self._stub.Rounds, request, timeout_s))

    def drain(self, budget_s: float, timeout_s: float = 5.0) -> None:
        self._unary(self._stub.Drain, messages.DrainRequest(budget_s=budget_s), timeout_s)

    def store_pull(self, request: messages.StorePullRequest, timeout_s: float) -> int:
        return int(cast(Any, self._unary(self._stub.StorePull, request, timeout_s)).version)

    def store_push(self, request: messages.StorePushRequest, timeout_s: float) -> str:
        return str(cast(Any, self._unary(self._stub.StorePush, request, timeout_s)).verdict)

    def _unary(self, method: Callable[..., Any], request: object, timeout_s: float) -> object:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_call(error, socket=self.socket) from error

    def _stream(
        self, method: Callable[..., Any], request: object, timeout_s: float | None
    ) -> EventStream[Any]:
        return EventStream(method(request, timeout=timeout_s), self.socket)
