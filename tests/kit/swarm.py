"""What the integration tests share: trainers on real daemons, all at once. One rule: every blocking
call runs in a thread of the swarm, so that the nodes' loop is never held up by a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from moshpitd.client import Result, Session, attach
from moshpitd.testing import LocalSwarm

Tensors = dict[str, torch.Tensor]


@asynccontextmanager
async def trainers(
    swarm: LocalSwarm,
    run: str,
    tensors: Sequence[Tensors],
    *,
    nodes: Sequence[int] = (),
    **options: Any,
) -> AsyncIterator[list[Session]]:
    """One trainer per dict of tensors, on nodes 0, 1, ... (or as `nodes` says), all at once."""
    where = nodes or range(len(tensors))
    sessions = await asyncio.gather(
        *(
            swarm.call(attach, run, tensors=own, socket=swarm.socket(node), **options)
            for own, node in zip(tensors, where, strict=True)
        )
    )
    try:
        yield list(sessions)
    finally:
        await asyncio.gather(*(swarm.call(session.close) for session in sessions))


async def average(
    swarm: LocalSwarm, sessions: Sequence[Session], weights: Sequence[int] = (), **options: Any
) -> list[Result]:
    """All at once."""
    weights = weights or [1] * len(sessions)
    return list(
        await asyncio.gather(
            *(
                swarm.call(session.average, weight, **options)
                for session, weight in zip(sessions, weights, strict=True)
            )
        )
    )


def same_bits(tensors: Sequence[Tensors]) -> bool:
    """Whether all hold the same bytes."""
    return all(
        torch.equal(own[name].reshape(-1).view(torch.uint8), first.reshape(-1).view(torch.uint8))
        for name, first in tensors[0].items()
        for own in tensors[1:]
    )


async def until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Wait for something that others do; a bound, not a pause. Returns how long it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - start
