"""Moshpit SGD as a torch optimizer. One rule: between two averages it is the wrapped optimizer and
nothing else.

Each trainer i makes local steps on its own data, then the parameters of a group of peers are
replaced by their mean, weighted by the samples w_i that each one has seen since its last average
(Moshpit SGD, Ryabinin et al. 2021, algorithm 2; Local SGD, Stich 2019):

    x_i <- sum_j w_j x_j / sum_j w_j

With `overlap=True` the round runs while the trainer computes. Its result is an average of what the
parameters were when it began, so what comes in is the difference, and nothing that the trainer
learned meanwhile is lost (the delayed averaging of hivemind's "deltas instead of values"):

    x_i <- x_i + (average - contribution)

Momentum and other optimizer state stay local: they are about this trainer's gradients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, SupportsIndex, Unpack, overload

from torch.optim import Optimizer

from moshpitd.client.checks import MAX_WEIGHT, check_weight
from moshpitd.client.flight import Flight
from moshpitd.client.optim.schedule import schedule_of
from moshpitd.client.optim.wrapped import Wrapped
from moshpitd.client.options import PASSING, AverageOptions, check_options
from moshpitd.client.placing import no_overlap
from moshpitd.client.result import PartialAverage, Result
from moshpitd.client.session import Session
from moshpitd.errors import DaemonUnavailable, TrainerError

log = logging.getLogger("moshpitd.client")

KEY = "local_sgd"  # our entry in the wrapped optimizer's state_dict


class LocalSGD(Wrapped):
    """Wraps an optimizer whose parameters the session averages. Invariant: `samples` are those
    that no average has taken in yet.

    `every=H` averages after each H-th step; `every_s=T` after the first step that ends T seconds
    after the last round, so that uneven machines do not pace each other; whoever comes, or comes
    back, averages after its first step and waits for the others, who do not wait for it.
    `on_result(result)` hears of every finished average. While the daemon is away the trainer goes
    on locally: with `on_error="continue"` DaemonUnavailable never reaches the training loop (it is
    counted in `missed`), with "raise" it does. A TrainerError always does: a NaN in the model or a
    schema that differs is nothing that waiting would cure.

    With `overlap` a step never waits for a round: one that is due begins after the step and is
    landed after the first step at whose end its result is here; there is one in flight at most, and
    what comes due meanwhile begins when that one has landed. A round that fails adds nothing, and a
    part without a result adds 0. When a round loaded a snapshot the parameters become that, and the
    steps made since it began are gone with those before it. `land()` waits for the round in flight,
    for the end of training or before a checkpoint that shall hold it; `average()` does it too and
    is then a round of its own that waits. `flight` is the round that is not landed yet, or None.
    With a session in place, whose averages copy no parameters, it is refused (ConfigError).

    Like torch's own PostLocalSGDOptimizer it is an Optimizer for whoever asks (schedulers,
    GradScaler) but does not run Optimizer.__init__: all state is the wrapped one's. Hooks belong
    there too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        every: int | None = None,
        every_s: float | None = None,
        overlap: bool = False,
        on_error: Literal["continue", "raise"] = "continue",
        on_result: Callable[[Result], None] | None = None,
        **options: Unpack[AverageOptions],
    ) -> None:
        if on_error not in ("continue", "raise"):
            raise TrainerError(f"on_error {on_error!r}, expected 'continue' or 'raise'")
        check_options(options)
        if overlap and session.in_place:
            raise no_overlap(session.run)
        super().__init__(optimizer)
        self.session = session
        self.steps = 0
        self.samples = 0
        self.missed = 0
        self.last: Result | None = None
        self._overlap = overlap
        self.flight: Flight | None = None
        self._aboard = 0  # of `samples`, those whose steps the round in flight carries
        self._schedule = schedule_of(every, every_s)
        self._on_error, self._on_result, self._options = on_error, on_result, options

    @overload
    def step(self, closure: None = None, *, samples: float | SupportsIndex = 1) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], float], *, samples: float | SupportsIndex = 1
    ) -> float: ...

    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        samples: float | SupportsIndex = 1,
    ) -> float | None:
        """One local step; averages when it is time. `samples` is what the step counts in the
        weight: pass the batch size when batches differ between trainers. Left out everywhere, each
        step counts 1."""
        count = check_weight(samples)
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self.steps += 1
        # A trainer that was alone for weeks stops counting at the bound instead of being refused
        # for it.
        self.samples = min(self.samples + count, MAX_WEIGHT)
        if self.flight is not None and self.flight.done:
            self.land()
        if self.flight is None and self._schedule.due(
            steps=self.steps,
            now=time.monotonic(),
            attached=self.session.attached and not self.session.draining,
        ):
            if self._overlap:
                self._begin()
            else:
                self.average()
        return loss

    def average(self, **options: Unpack[AverageOptions]) -> Result | None:
        """Average now, whatever the schedule says, and wait for it; None when that was not
        possible. `options` override the constructor's (a last `average(min_participants=n)`,
        say)."""
        self.land()
        self._aboard = self.samples
        merged: AverageOptions = {**self._options, **options}
        return self._attempt(lambda: self.session.average(self._weight, **merged))

    @property
    def in_flight(self) -> bool:
        """Whether a round is under way whose result is not here yet."""
        return self.flight is not None and not self.flight.done

    def land(self) -> Result | None:
        """Wait for the round in flight and bring it in; None when there is none, or it failed."""
        flight = self.flight
        if flight is None:
            return None
        try:
            return self._attempt(flight.land)
        finally:
            if flight.done:  # else Ctrl-C ended the wait, and it still is in flight
                self.flight = None

    def _begin(self) -> None:
        self._aboard = self.samples

        def begin() -> None:
            self.flight = self.session.begin(self._weight, **self._options)

        self._attempt(begin)

    @property
    def _weight(self) -> int:
        # A trainer that made no step since still has parameters, and they weigh something: 0 is
        # for newcomers, whose parameters are nobody's training yet.
        return max(self.samples, 1)

    def _attempt(self, call: Callable[[], Result | None]) -> Result | None:
        """One call about a round; what fails and passes is counted, what the trainer did wrong is
        raised. A call without a result only began something."""
        result: Result | None = None
        begun = away = False
        try:
            result = call()
            begun = result is None
        except DaemonUnavailable:
            self.missed += 1
            away = True
            if self._on_error == "raise":
                raise
        except PartialAverage as error:
            result = error.result
            raise
        except TrainerError as error:
            if self._on_error == "raise" or error.reason not in PASSING:
                raise
            self.missed += 1
            log.warning("%s: no average this time: %s", self.session.run, error)
        finally:
            if away:
                self._schedule.away()
            elif not begun:
                together = result is not None and result.group_size > 1
                self._schedule.averaged(now=time.monotonic(), together=together)
            if result is not None:
                self._note(result)
        return result

    def _note(self, result: Result) -> None:
        self.last = result
        # Alone or refused, the samples are still in nobody's average, and so they are after a
        # delta (only the others' values came in). A loaded snapshot dropped them together with
        # their steps, also with those made since.
        taken_in = result.applied and result.status != "alone" and not result.delta
        if result.loaded_snapshot:
            self.samples = 0
        elif taken_in:
            self.samples = max(self.samples - self._aboard, 0)
        if self._on_result is not None:
            self._on_result(result)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "local_sgd" our counters and the session's version
        and lineage. A round in flight is no part of it: its samples still count as nobody's, and
        the parameters do not hold it either."""
        mine = {
            "steps": self.steps,
            "samples": self.samples,
            "session": self.session.state_dict(),
        }
        return {**self.optimizer.state_dict(), KEY: mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a plain optimizer's checkpoint as well. The session's part goes to
        `attach(state=...)`, because the daemon must hear of it before the first sync;
        `session_state` picks it out. A round in flight is given up: it is about the parameters
        before."""
        if self.flight is not None:
            self.session.give_up()
            self.flight = None
        theirs = {key: value for key, value in state_dict.items() if key != KEY}
        self.optimizer.load_state_dict(theirs)
        mine = state_dict.get(KEY, {})
        self._schedule.resumed()
        self.steps = int(mine.get("steps", 0))
        self.samples = int(mine.get("samples", 0))

    def __repr__(self) -> str:
        return f"LocalSGD({self.optimizer!r}, run={self.session.run!r}, {self._schedule})"


def session_state(state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """What `attach(state=...)` wants, out of a checkpoint that `LocalSGD.state_dict()` made."""
    mine = state_dict.get(KEY)
    return dict(mine["session"]) if mine else None
