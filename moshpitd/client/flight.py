"""One average that runs while the trainer goes on. One rule: it writes to the model inside `land`,
in the thread that called it, at most once; before that it works on its own copy.

A flight's thread does what would hold the trainer up: it hands the contribution to the daemon,
waits for the answer, and turns the result into what is to be added.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from moshpitd.client.buckets import Bucket
from moshpitd.client.kept import Holds, Kept
from moshpitd.client.result import PartialAverage, Progress, Result
from moshpitd.client.rounds import Begin, Stream, follow
from moshpitd.errors import DaemonUnavailable


@dataclass(frozen=True, slots=True)
class Plan:
    """What a flight needs of its session. `telling` is entered around all talk with the daemon."""

    trainer: str
    bucket: Bucket
    begin: Begin
    telling: AbstractContextManager[None]
    progress: Callable[[Progress], None] | None
    arrived: Callable[[Flight, Result], None]
    land: Callable[[Flight], None]
    raise_partial: bool
    snapshots: bool
    kept: Kept | None = None  # the contribution; None: the tensors themselves stay as they are
    generation: int = 0  # of the bucket, when the contribution lies there already


class Flight:
    """Made by `Session.begin`. Invariant: one of `result` and `error` is set when it is done."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.began = self.ended = time.monotonic()
        """Seconds of this machine's clock; `ended` is when the result was ready to be landed."""
        self._done = threading.Event()
        self._stream: Stream | None = None
        self._given_up = False
        self._lock = threading.Lock()  # of the two fields above
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._fly, name="moshpitd-flight", daemon=True)

    def start(self) -> None:
        """Called once, by the session."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `land` would return at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the result, not touching the model; False when it did not come in time."""
        if os.getpid() != self._pid:
            raise DaemonUnavailable("this process was forked from the one that began the round")
        return self._done.wait(timeout_s)

    def land(self) -> Result:
        """Wait, and bring the result into the model: `live += average - contribution`, or the
        average itself when the tensors were to stay as they are. Raises what `average` raises; the
        model is unchanged then. A second call tells the same again and changes nothing."""
        self._plan.land(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None  # the invariant
        if self._plan.raise_partial and not self.result.accepted:
            raise PartialAverage(self.result)
        return self.result

    def cancel(self) -> None:
        """Wait no longer. The daemon may still finish the round for the others."""
        with self._lock:
            self._given_up = True
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def end(self, timeout_s: float) -> None:
        """Cancel, and wait until the thread has let go of bucket and copy."""
        self.cancel()
        if self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._plan.bucket.take_back(self._plan.generation)

    def bring_in(self, tensors: Sequence[Tensor]) -> None:
        """For the session, which holds the turn: write what the round brought to the tensors."""
        result, plan = self.result, self._plan
        if result is None or not self._brings(result):
            return
        if plan.kept is not None:
            plan.kept.land(tensors)
        else:
            bring_in(result, plan.bucket, tensors)

    def _brings(self, result: Result) -> bool:
        if self._plan.snapshots:
            return result.applied
        # Values that are of this step only: an older average of others is no substitute for them.
        stale = result.loaded_snapshot and result.status == "alone"
        return result.accepted and not stale

    # -- the thread -------------------------------------------------------------------------------

    def _fly(self) -> None:
        plan = self._plan
        try:
            with plan.telling:
                generation = plan.generation
                if plan.kept is not None:
                    generation = plan.kept.hand_to(plan.bucket)
                try:
                    result = follow(self._stream_of(generation), plan.progress)
                except DaemonUnavailable as error:
                    if not self._given_up:
                        raise
                    self.error = error  # our own doing: no reason to think the daemon gone
                    return
            self._digest(result)
            plan.arrived(self, result)
            self.result = result
        except BaseException as error:  # told to whoever lands
            self.error = error
        finally:
            plan.bucket.take_back(plan.generation)
            self.ended = time.monotonic()
            self._done.set()

    def _stream_of(self, generation: int) -> Stream:
        with self._lock:
            if self._given_up:
                raise DaemonUnavailable("the round was given up before it began")
            self._stream = self._plan.begin(self._plan.trainer, generation)
            return self._stream

    def _digest(self, result: Result) -> None:
        """Turn the bucket into what is to be added. After this the bucket is free."""
        kept = self._plan.kept
        if kept is None or not self._brings(result):
            return
        if result.delta:
            kept.become(self._plan.bucket, Holds.DELTA)
        elif result.loaded_snapshot:
            # The steps made meanwhile began at parameters that are given up: another start's, or
            # ones that the swarm left behind. They go with them, as do those before the round.
            kept.become(self._plan.bucket, Holds.VALUES)
        else:
            kept.subtract_from(self._plan.bucket, without_result=result.parts_without_result)


def bring_in(result: Result, bucket: Bucket, tensors: Sequence[Tensor]) -> None:
    """Write a result to tensors that still are what was contributed."""
    if result.delta:
        bucket.add_to(tensors)
    else:
        # A loaded snapshot fills every part, whatever the round after it came to.
        skip = () if result.loaded_snapshot else result.parts_without_result
        bucket.copy_to(tensors, skip=skip, moved=result.moved)
