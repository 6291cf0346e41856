"""Pulls and pushes of the local API, carried through a run. One rule: a call ends with an answer of
the core, its own time, or its trainer; however it ends, nobody writes to its bucket after it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from moshpitd.core.store_words import (
    Rules,
    StoreAnswer,
    StoreCancelled,
    StoreEvent,
    StoreOpened,
    StorePullAsked,
    StorePushAsked,
)
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.runs import Run
from moshpitd.daemon.trainers import Trainer, checked_timeout
from moshpitd.rpc.status import not_finite, refusal

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
MAX_BATCH = 1024  # gradients of one update: each is held by every owner until it is full


class Plane(Protocol):
    """What is needed of `daemon.storage`. The first two block."""

    peer_id: str

    def open(self, run: str, bucket: Bucket) -> str | None: ...
    def begin_push(self, run: str, token: str, bucket: Bucket) -> str | None: ...
    def expect(
        self, run: str, token: str, bucket: Bucket | None
    ) -> asyncio.Future[StoreAnswer]: ...
    def give_up(self, run: str, token: str) -> None: ...


class Stores:
    """All runs' trainers."""

    def __init__(self, plane: Plane, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._plane, self._in_thread = plane, in_thread

    async def pull(self, run: Run, request: Any) -> int:
        """The version that the trainer's bucket holds then. At a trainer's first pull the bucket
        says what a store should begin with."""
        rules = checked_rules(request)
        timeout_s = checked_timeout(request.timeout_s)
        async with run.call(request.trainer, request.generation) as (trainer, _):
            if not trainer.worker:
                await self._open(run, trainer)
            # Every time: a trainer that was refused may ask again with the store's rules.
            run.driver.handle(StoreOpened(trainer.worker, rules))
            token = secrets.token_hex(8)
            event = StorePullAsked(token, trainer.worker)
            answer = await self._answer(run, trainer, event, token, timeout_s, pull=True)
            return answer.version

    async def push(self, run: Run, request: Any) -> str:
        """The verdict on the gradient in the bucket."""
        timeout_s = checked_timeout(request.timeout_s)
        async with run.call(request.trainer, request.generation) as (trainer, _):
            if not trainer.worker:
                return "not_pulled"
            token = secrets.token_hex(8)
            _refuse_spoilt(
                await self._in_thread(self._plane.begin_push, run.name, token, trainer.bucket)
            )
            event = StorePushAsked(token, trainer.worker, request.version)
            answer = await self._answer(run, trainer, event, token, timeout_s, pull=False)
            return answer.verdict.value

    async def _open(self, run: Run, trainer: Trainer) -> None:
        assert run.layout is not None  # it has a trainer
        strange = [spec.name for spec in run.layout.specs if spec.dtype not in FLOATS]
        if strange:
            raise refusal(
                "dtype_refused",
                f"{strange[0]!r} is no floating tensor, and a store has gradients of all it holds",
            )
        _refuse_spoilt(await self._in_thread(self._plane.open, run.name, trainer.bucket))
        trainer.worker = f"{self._plane.peer_id}/{trainer.name}"

    async def _answer(
        self, run: Run, trainer: Trainer, event: StoreEvent, token: str, timeout_s: float,
        *, pull: bool,
    ) -> StoreAnswer:  # fmt: skip
        future = self._plane.expect(run.name, token, trainer.bucket if pull else None)
        gone = asyncio.ensure_future(trainer.gone.wait())
        try:
            run.driver.handle(event)
            await asyncio.wait(
                (future, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not future.done():
                if gone.done():
                    raise refusal("unknown_trainer", f"trainer {trainer.name} was detached")
                raise refusal("store_timeout", f"no answer of the store within {timeout_s:g} s")
            answer = future.result()
        finally:
            gone.cancel()
            self._plane.give_up(run.name, token)
            if not future.done():
                run.driver.handle(StoreCancelled(token))
        if answer.refusal:
            raise refusal(answer.refusal, answer.detail)
        return answer


def _refuse_spoilt(tensor: str | None) -> None:
    """One NaN in a store is in everybody's parameters."""
    if tensor is not None:
        raise not_finite(tensor)


def checked_rules(request: Any) -> Rules:
    if not (math.isfinite(request.gamma) and 1 <= request.batch <= MAX_BATCH):
        raise refusal(
            "store_refused",
            f"gamma {request.gamma}, batch {request.batch}, expected a finite number and "
            f"1..{MAX_BATCH}",
        )
    return Rules(request.gamma, request.batch, request.max_staleness, request.block)
