"""The file that the trainers of one run on this node write to together. One rule: it goes with the
last trainer that maps it; what they write is theirs, so the daemon never reads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.trainers import Trainer


async def join(
    others: Callable[[], Iterable[Trainer]], own: Bucket, make: Callable[[], Awaitable[Bucket]]
) -> Bucket:
    """The file of the others, or a new one. `own` is the bucket of who joins: closed if it cannot
    be."""
    try:
        # Asked after all waiting: the last one may have left, and its file with it.
        held = [one.shared for one in others() if one.shared is not None]
        return held[0] if held else await make()
    except BaseException:
        own.close()
        raise


def part(leaving: Trainer, others: Iterable[Trainer]) -> None:
    if leaving.shared is not None and not any(one.shared is not None for one in others):
        leaving.shared.close()
