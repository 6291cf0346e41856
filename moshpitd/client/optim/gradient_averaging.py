"""Moshpit gradient averaging: every step is made with the swarm's mean gradient.

    g <- sum_i w_i g_i / sum_i w_i     d rounds on a grid of d dimensions: exact if it is full
    x <- optimizer(x, g)               the same on every trainer

With one local step per average (tau = 1), a full grid and nobody lost this is synchronous
mini-batch SGD: bit for bit, but for the order in which the group adds. One rule: trainers that hold
the same parameters and take the same mean hold the same parameters again; whoever may have missed
one counts for next to nothing until an average of the parameters has made it equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, SupportsIndex, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from moshpitd.client.checks import MAX_WEIGHT, check_weight
from moshpitd.client.optim.gradient_buckets import (
    BUCKET_BYTES,
    GradientBucket,
    in_backward_order,
)
from moshpitd.client.optim.wrapped import Wrapped
from moshpitd.client.options import PASSING, AverageOptions, check_options
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.errors import DaemonUnavailable, TrainerError

log = logging.getLogger("moshpitd.client")

KEY = "gradient_averaging"  # our entry in the wrapped optimizer's state_dict
CURRENT = 1 << 10
"""How much more a trainer that holds the swarm's parameters weighs than one that may not. Not
infinitely: where all of them missed something, what they have is still the best there is."""
SETTLE_EVERY = 50
"""Averages of gradients between two of parameters. At 2 % of the traffic it bounds what a lost
update can grow to."""


class GradientAveraging(Wrapped):
    """Wraps an optimizer that steps with averaged gradients. Invariant: outside backward and `step`
    no gradient is on its way, unless a backward was not followed by a step.

    `session` is the parameters' own (`attach(run, model=...)`): a newcomer got the swarm's from it,
    and every `settle_every` averages they are averaged through it, which heals whoever missed an
    update; 0 turns that off. Gradients travel in buckets of about `bucket_bytes`, in the order of
    backward, each as soon as it is full; see `gradient_buckets` for what a bucket costs.

    `samples` is what the next gradient counts, for example the batch's size; it must be set before
    backward. To change gradients after averaging (clipping), call `synchronize()` first; `step`
    does it otherwise. Accumulate over several backwards with `no_sync()` around all but the last.
    With `overlap=False` nothing starts before `step`, which is what GradScaler needs: gradients are
    averaged after they were unscaled, because every trainer has a scale of its own.

    A bucket whose round failed keeps the local gradient. That is a step of its own, so this trainer
    is `current` no more: its gradients and parameters count next to nothing until the parameters
    have been averaged. DaemonUnavailable is raised with `on_error="raise"` only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        session: Session,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        settle_every: int = SETTLE_EVERY,
        on_error: Literal["continue", "raise"] = "continue",
        on_result: Callable[[Result], None] | None = None,
        **options: Unpack[AverageOptions],
    ) -> None:
        super().__init__(optimizer)
        if on_error not in ("continue", "raise"):
            raise TrainerError(f"on_error {on_error!r}, expected 'continue' or 'raise'")
        if bucket_bytes < 1 or settle_every < 0:
            raise TrainerError(
                f"bucket_bytes {bucket_bytes}, settle_every {settle_every}, expected at least 1 "
                "byte and 0 averages or more"
            )
        self._options: AverageOptions = {"rounds": "sweep", **options}
        check_options(self._options)
        self.session = session
        self.samples: float | SupportsIndex = 1
        self.missed = 0
        # A snapshot is of the last average of parameters, and the others have stepped since.
        self.current = session.synced is not None and not session.synced.loaded_snapshot
        self._unknown = session.synced is None
        self.settled: Result | None = None
        self._overlap, self._settle_every = overlap, settle_every
        self._on_error, self._on_result = on_error, on_result
        self._accumulating = False
        self._buckets = self._make(model, bucket_bytes)
        self._hooks = [h for b in self._buckets for h in b.hook(self._backward, self._full)]
        self._in_backward = self._averaged = False
        self._turn = self._turns()

    def _make(self, model: nn.Module, bucket_bytes: int) -> list[GradientBucket]:
        parts = in_backward_order(model.named_parameters(), bucket_bytes)
        if not parts:
            raise TrainerError("the model has no parameter that requires a gradient")
        buckets = [
            GradientBucket(f"{self.session.run}.grad{at}", part, self.session.socket)
            for at, part in enumerate(parts)
        ]
        # At once: each looks for the others of its run, and that is waiting more than work.
        with ThreadPoolExecutor(len(buckets)) as pool:
            list(pool.map(GradientBucket.start, buckets))
        return buckets

    @property
    def version(self) -> int:
        """Averages of gradients that the swarm has made: its clock, the same on all trainers."""
        return self._buckets[0].session.version

    # -- a step -----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average what is not averaged yet, then step. Optimizers that call their closure several
        times get an averaged gradient each time."""
        if closure is None:
            self.synchronize()
            loss = self.optimizer.step()
        else:

            def averaged() -> float:
                found = closure()
                self.synchronize()
                return found

            loss = self.optimizer.step(averaged)
        self._settle()
        return loss

    def synchronize(self) -> None:
        """Wait until all gradients are averages. A second call before the next backward does
        nothing."""
        self._in_backward = False  # also after one that raised
        if self._averaged:
            return
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket)
        good = True
        try:
            for bucket in self._buckets:
                good = self._landed(bucket) and good
        finally:
            self.current = self.current and good
        self._averaged = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up; the first one outside sends the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A batch that was given up after its backward: what is on its way comes home first."""
        self._in_backward = False
        for bucket in self._buckets:
            if bucket.launched:
                self._landed(bucket)
                self.current = False  # the others made a step with it
        super().zero_grad(set_to_none)

    def _backward(self) -> None:
        """In a hook: whether this is a backward that we know of."""
        if not self._in_backward:
            self._in_backward, self._averaged = True, False
            # Runs when this backward is over; DDP and FSDP find its end in the same way.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._in_backward = False
        for bucket in self._buckets:
            bucket.expect_all()

    def _full(self, bucket: GradientBucket) -> None:
        if self._overlap and not self._accumulating:
            self._launch(bucket)

    def _launch(self, bucket: GradientBucket) -> None:
        weight = check_weight(self.samples)
        bucket.launch(self._weight(weight), **self._options)

    def _weight(self, samples: int) -> int:
        return min(samples * (CURRENT if self.current else 1), MAX_WEIGHT)

    def _landed(self, bucket: GradientBucket) -> bool:
        """Whether this trainer has now the same gradient as the others."""
        try:
            result = bucket.land()
        except DaemonUnavailable:
            self.missed += 1
            if self._on_error == "raise":
                raise
            return False
        except TrainerError as error:
            if self._on_error == "raise" or error.reason not in PASSING:
                raise
            self.missed += 1
            log.warning("%s: no mean gradient this time: %s", bucket.session.run, error)
            return False
        if self._on_result is not None:
            self._on_result(result)
        return result.accepted and not result.parts_without_result and result.status != "alone"

    # -- equal parameters -------------------------------------------------------------------------

    def _turns(self) -> int:
        """The swarm's clock: versions are common to all, steps are not."""
        every = self._settle_every
        return self._buckets[0].session.version // every if every else 0

    def _settle(self) -> None:
        turn = self._turns()
        if turn == self._turn and not self._unknown:
            return
        try:
            if self._unknown:
                # The daemon was not there at the start: whose parameters hold is to be asked yet.
                result = self.session.sync()
                self._unknown, self.current = False, not result.loaded_snapshot
                return
            self._turn = turn
            result = self.session.average(self._weight(1), **self._options)
        except DaemonUnavailable:
            self.missed += 1
            if self._on_error == "raise":
                raise
            return
        self.settled = result
        if result.applied and not result.parts_without_result and result.group_size > 1:
            self.current = True

    # -- checkpoints and the end ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "gradient_averaging" the session's version and
        lineage. The gradients' own runs need none: whoever comes back takes their state."""
        mine = {"current": self.current, "session": self.session.state_dict()}
        return {**self.optimizer.state_dict(), KEY: mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a plain optimizer's checkpoint as well. The session's part goes to
        `attach(state=...)`, as with LocalSGD."""
        theirs = {key: value for key, value in state_dict.items() if key != KEY}
        self.optimizer.load_state_dict(theirs)

    def close(self) -> None:
        """Detach the gradients' sessions and let go of the model. The parameters' session is the
        caller's."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            bucket.close()

    def __repr__(self) -> str:
        return (
            f"GradientAveraging({self.optimizer!r}, run={self.session.run!r}, "
            f"{len(self._buckets)} buckets)"
        )
