"""What error feedback owes, for a trainer's checkpoint. One rule: it is read and replaced between
rounds only (`Run.between_rounds` gives bucket, layout and residuals), through the trainer's own
bucket (`tensors.owing`)."""

from __future__ import annotations

import asyncio

from moshpitd.daemon.runs import Run
from moshpitd.rpc.status import refusal
from moshpitd.tensors.owing import load_residual, write_residual


async def give_residual(run: Run, trainer: str, generation: int, *, reducer: bool) -> bool:
    """Fill a trainer's bucket with what is owed on one side. False: nothing is owed, nothing was
    written."""
    with run.between_rounds(trainer, generation) as (bucket, layout, residuals):
        if residuals is None:
            return False
        side = residuals.reducer if reducer else residuals.sender
        bucket.writes += 1  # a donor copy that is made now is of other values
        return await asyncio.to_thread(write_residual, side, layout, bucket.data)


def take_residual(run: Run, trainer: str, generation: int, *, reducer: bool, nothing: bool) -> None:
    """Replace what is owed on one side by what a trainer's bucket holds, or by nothing.

    On the loop and not in a thread: no round can open meanwhile.
    """
    with run.between_rounds(trainer, generation) as (bucket, layout, residuals):
        if residuals is not None:
            side = residuals.reducer if reducer else residuals.sender
            load_residual(side, layout, None if nothing else bucket.data)
        elif not nothing:
            raise refusal(
                "no_feedback",
                f"run {run.name!r} keeps no error feedback, expected one that does",
            )
