"""A daemon for the client's tests: a real gRPC server on a real Unix socket with real bucket
files, and no swarm.

One rule: it checks what the daemon checks (generation, weight, schema, finite values) with the same
words, so that a client that passes here fails nowhere else for these reasons. What a round does is
the test's: `answer` gets the round and yields its events.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from moshpitd.client.buckets import GENERATION, GENERATION_AT, HEADER, MAGIC
from moshpitd.errors import TrainerError
from moshpitd.rpc.channel import SERVER_OPTIONS
from moshpitd.rpc.status import refusal, to_status
from moshpitd.rpc.stubs import API, messages, services
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.layout import Layout, TensorSpec
from moshpitd.tensors.mapped import tensor_of

PAGE = 4096
FOUNDER = "12D3KooWFake"


@dataclass
class Trainer:
    """One attachment: its bucket and what the client said of itself."""

    request: Any
    layout: Layout
    path: Path
    data: torch.Tensor
    mapping: Any
    gone: threading.Event = field(default_factory=threading.Event)
    state: bytes = b""
    blocks: list[torch.Tensor] = field(default_factory=list)  # of a trainer in place

    @property
    def generation(self) -> int:
        return int(GENERATION.unpack_from(self.mapping, GENERATION_AT)[0])

    def views(self) -> dict[str, torch.Tensor]:
        views = self.layout.views(self.data)
        return {spec.name: view for spec, view in zip(self.layout.specs, views, strict=True)}


@dataclass
class Round:
    """What an answer works with: the request, the values in the bucket, and whether anybody still
    waits."""

    trainer: Trainer
    request: Any
    cancelled: threading.Event

    def views(self) -> dict[str, torch.Tensor]:
        return self.trainer.views()


Answer = Callable[[Round], Iterator[Any]]


def result(status: str = "complete", **fields: Any) -> Any:
    fields = {"accepted": status in ("complete", "partial", "alone"), "founder": FOUNDER} | fields
    return messages.RoundEvent(result=messages.Result(status=status, **fields))


def progress(phase: str, **fields: Any) -> Any:
    return messages.RoundEvent(progress=messages.Progress(phase=phase, **fields))


def with_a_peer_at_zero(call: Round) -> Iterator[Any]:
    """A group of two: the other peer has weight 1 and zeros everywhere."""
    yield progress("matchmaking")
    yield progress("exchange", group_size=2, parts_done=1, parts=len(call.trainer.layout.parts))
    weight = call.request.weight
    for view in call.views().values():
        if view.is_floating_point():
            view.mul_(weight / (weight + 1))
    yield result(
        group_size=2,
        participants=2,
        version=call.trainer.request.version + 1,
        total_weight=weight + 1,
        contributors=[FOUNDER, "12D3KooWOther"],
        seconds={"exchange": 0.01},
    )


def nobody(call: Round) -> Iterator[Any]:
    version = call.trainer.request.version
    yield result("alone", participants=1, group_size=1, reason="no_peers", version=version)


class FakeDaemon(services.DaemonServicer):
    """Start, stop and start again: every life forgets its trainers and their buckets, as a killed
    daemon does."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "fake.sock"
        self.buffers = folder
        self.trainers: dict[str, Trainer] = {}
        self.calls: list[Any] = []  # every Average and Sync request
        self.detached: list[str] = []
        self.gone: list[str] = []  # trainers whose Hold ended, in any way
        self.answer: Answer = with_a_peer_at_zero
        self.sync_answer: Answer = nobody
        self.refuse_attach: TrainerError | None = None
        self.knows_in_place = True
        self.draining = threading.Event()
        self.life = 0
        self._server: Any = None

    def start(self) -> FakeDaemon:
        self.life += 1
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(32), options=SERVER_OPTIONS)
        services.add_DaemonServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def stop(self) -> None:
        """As abrupt as a kill: calls break, nothing is finished."""
        for trainer in self.trainers.values():
            trainer.gone.set()
            trainer.path.unlink(missing_ok=True)
        self._server.stop(grace=None).wait()
        self.socket.unlink(missing_ok=True)
        self.trainers.clear()

    def only_trainer(self) -> Trainer:
        (trainer,) = self.trainers.values()
        return trainer

    # -- the service ------------------------------------------------------------------------------

    def Attach(self, request: Any, context: Any) -> Any:
        with _refusing(context):
            if self.refuse_attach is not None:
                raise self.refuse_attach
            specs = [TensorSpec(t.name, tuple(t.shape), t.dtype) for t in request.tensors]
            layout = Layout.from_specs(specs)
            for other in self.trainers.values():
                difference = other.layout.first_difference(specs)
                if other.request.run == request.run and difference:
                    raise refusal("schema_differs", f"run {request.run!r}: {difference}")
            name = uuid.uuid4().hex
            trainer = self._bucket(name, request, layout)
            self.trainers[name] = trainer
            shared = self._shared(request.run, layout) if request.shared else ""
        return messages.AttachReply(
            trainer=name,
            bucket_path=str(trainer.path),
            bucket_bytes=len(trainer.mapping),
            in_place=bool(trainer.blocks),
            data_offset=PAGE,
            part_bytes=layout.part_bytes,
            peer_id=FOUNDER,
            joined=True,
            codec="float32",
            shared_path=shared,
        )

    def Hold(self, request: Any, context: Any) -> Iterator[Any]:
        with _refusing(context):
            trainer = self._trainer(request.trainer)
        context.add_callback(lambda: (self.gone.append(request.trainer), trainer.gone.set()))
        yield messages.HoldEvent(state="held")
        told = False
        while not trainer.gone.wait(0.01):
            if self.draining.is_set() and not told:
                told = True
                yield messages.HoldEvent(state="draining")

    def Detach(self, request: Any, context: Any) -> Any:
        self.detached.append(request.trainer)
        trainer = self.trainers.pop(request.trainer, None)
        if trainer is not None:
            trainer.gone.set()
            trainer.path.unlink(missing_ok=True)
        return messages.DetachReply()

    def Average(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._round(request, context, self.answer)

    def Sync(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._round(request, context, self.sync_answer)

    def PutState(self, request: Any, context: Any) -> Any:
        with _refusing(context):
            self._trainer(request.trainer).state = request.state
        return messages.PutStateReply()

    def GetState(self, request: Any, context: Any) -> Any:
        with _refusing(context):
            return messages.GetStateReply(state=self._trainer(request.trainer).state)

    # -- below ------------------------------------------------------------------------------------

    def _round(self, request: Any, context: Any, answer: Answer) -> Iterator[Any]:
        self.calls.append(request)
        cancelled = threading.Event()
        context.add_callback(cancelled.set)
        with _refusing(context):
            trainer = self._trainer(request.trainer)
            if request.generation % 2 or request.generation != trainer.generation:
                raise refusal("bucket_modified", f"generation {trainer.generation}")
            if trainer.blocks:
                trainer.data = trainer.blocks[request.generation >> 1 & 1]
            for name, view in trainer.views().items():
                if view.is_floating_point() and not view.isfinite().all():
                    raise refusal("not_finite", f"tensor {name!r} holds a NaN or an infinity")
            if not trainer.blocks:
                yield from answer(Round(trainer, request, cancelled))
                return
            block = request.generation >> 1 & 1
            trainer.data = trainer.blocks[1 - block]
            trainer.data.copy_(trainer.blocks[block])
            for event in answer(Round(trainer, request, cancelled)):
                if event.HasField("result"):
                    event.result.moved = event.result.status != "alone" and not event.result.delta
                yield event

    def _trainer(self, name: str) -> Trainer:
        if name not in self.trainers:
            raise refusal("unknown_trainer", f"no trainer {name!r} is attached")
        return self.trainers[name]

    def _shared(self, run: str, layout: Layout) -> str:
        """One file per run and life of the daemon; kept until then, as nobody counts here."""
        path = self.buffers / f"{run}-{self.life}.shared"
        if not path.exists():
            HEADER.pack_into(_mapped(path, PAGE + layout.nbytes), 0, MAGIC, API, 0)
        return str(path)

    def _bucket(self, name: str, request: Any, layout: Layout) -> Trainer:
        path = self.buffers / f"{name}.bucket"
        size, blocks = layout.nbytes, Blocks(layout.nbytes, slots=0, full=False)
        in_place = request.in_place and self.knows_in_place
        mapping = _mapped(path, PAGE + (blocks.total if in_place else size))
        HEADER.pack_into(mapping, 0, MAGIC, API, 0)
        area = tensor_of(mapping, offset=PAGE)
        both = [blocks.of(area, block) for block in range(2)] if in_place else []
        return Trainer(request, layout, path, area[:size], mapping, blocks=both)


def _mapped(path: Path, nbytes: int) -> Any:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


class _refusing:
    """A TrainerError in the body leaves as our servicer sends it."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TrainerError):
            status = to_status(error)
            self._context.set_trailing_metadata(status.trailing_metadata)
            self._context.abort(status.code, status.details)


def until(condition: Callable[[], bool], *, timeout_s: float = 10.0, what: str = "") -> None:
    """Wait for something that another thread does; a bound, not a pause."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)
