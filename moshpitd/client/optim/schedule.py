"""When a trainer averages. One rule: a schedule is told the time and the steps, it never looks at
a clock. It is asked only when a round could begin now; what came due while one was in flight is
due still.

Steps are counted from the first one for ever: an average that failed does not shift the next. Time
cannot work like that. No two peers share a clock, and two trainers with fixed phases further apart
than the matchmaking window would miss each other for ever. What peers do share is the end of a
round, so that is where the next T seconds begin; whoever was in the round is in phase again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

from moshpitd.errors import TrainerError


class Schedule(Protocol):
    def due(self, *, steps: int, now: float) -> bool:
        """Whether to average now, after `steps` steps in all."""
        ...

    def averaged(self, *, now: float, together: bool) -> None:
        """An attempt ended; `together`: with other peers."""
        ...

    def resumed(self) -> None:
        """A checkpoint was loaded: the steps go on from another number."""
        ...


@dataclass(slots=True)
class EverySteps:
    """After every H-th step, or at the first one after it at which a round can begin."""

    every: int
    _turn: int | None = None  # multiples of `every` that were answered with "due"

    def due(self, *, steps: int, now: float) -> bool:
        turn = steps // self.every
        if self._turn is None:  # a loaded checkpoint begins in the middle of a turn
            self._turn = (steps - 1) // self.every
        due, self._turn = turn != self._turn, turn
        return due

    def averaged(self, *, now: float, together: bool) -> None:
        return

    def resumed(self) -> None:
        self._turn = None


@dataclass(slots=True)
class EverySeconds:
    """After the first step that ends T seconds or more after the last round ended.

    After an attempt that met nobody, half to all of T at random: of two peers that always waited T
    neither would ever drift into the other's window.
    """

    every_s: float
    rng: random.Random = field(default_factory=random.Random)
    _next: float | None = None

    def due(self, *, steps: int, now: float) -> bool:
        if self._next is None:  # training begins when the first step has been made
            self._next = now + self.every_s
        return now >= self._next

    def averaged(self, *, now: float, together: bool) -> None:
        self._next = now + self.every_s * (1.0 if together else self.rng.uniform(0.5, 1.0))

    def resumed(self) -> None:
        return


def schedule_of(every: object, every_s: object) -> Schedule:
    """The schedule for `LocalSGD(every=...)` or `LocalSGD(every_s=...)`: exactly one of the two."""
    if (every is None) == (every_s is None):
        raise TrainerError("give LocalSGD either every= (steps) or every_s= (seconds)")
    if every is not None:
        if not isinstance(every, int) or every < 1:
            raise TrainerError(f"every {every!r}, expected a number of steps, 1 or more")
        return EverySteps(every)
    if not isinstance(every_s, (int, float)) or not 0 < every_s < float("inf"):
        raise TrainerError(f"every_s {every_s!r}, expected a positive number of seconds")
    return EverySeconds(float(every_s))
