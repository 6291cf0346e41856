"""When a trainer averages. One rule: a schedule is told the time and the steps, it never looks at
a clock. It is asked only when a round could begin now; what came due while one was in flight is
due still.

Steps are counted from the first one for ever: an average that failed does not shift the next. Time
cannot work like that. No two peers share a clock, and two trainers with fixed phases further apart
than the matchmaking window would miss each other for ever. What peers do share is the end of a
round, so that is where the next T seconds begin; whoever was in the round is in phase again. Who
comes to them, for the first time or again, averages at once and waits for the others' next round:
T seconds of its own later they would all wait for it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from moshpitd.errors import TrainerError


class Schedule(Protocol):
    def due(self, *, steps: int, now: float, attached: bool) -> bool:
        """Whether to average now, after `steps` steps in all; `attached`: to a daemon."""
        ...

    def averaged(self, *, now: float, together: bool) -> None:
        """An attempt ended; `together`: with other peers."""
        ...

    def away(self) -> None:
        """An attempt found no daemon."""
        ...

    def resumed(self) -> None:
        """A checkpoint was loaded: the steps go on from another number."""
        ...


@dataclass(slots=True)
class EverySteps:
    """After every H-th step, or at the first one after it at which a round can begin."""

    every: int
    _turn: int | None = None  # multiples of `every` that were answered with "due"

    def due(self, *, steps: int, now: float, attached: bool) -> bool:
        turn = steps // self.every
        if self._turn is None:  # a loaded checkpoint begins in the middle of a turn
            self._turn = (steps - 1) // self.every
        due, self._turn = turn != self._turn, turn
        return due

    def averaged(self, *, now: float, together: bool) -> None:
        return

    def away(self) -> None:
        return

    def resumed(self) -> None:
        self._turn = None


@dataclass(slots=True)
class EverySeconds:
    """After the first step that ends T seconds or more after the last round ended.

    The first one is due after the first step, and so is the one after the daemon was away; one that
    met nobody is made again at once, because the others may have been about to come. After any
    other that met nobody, half to all of T at random: of two peers that always waited T neither
    would ever drift into the other's window.
    """

    every_s: float
    rng: random.Random = field(default_factory=random.Random)
    _next: float = -math.inf
    _away: bool = False
    _comes: bool = True  # and has made no attempt yet

    def due(self, *, steps: int, now: float, attached: bool) -> bool:
        if self._away and not attached:  # tried already, and nobody is back
            return False
        return now >= self._next

    def averaged(self, *, now: float, together: bool) -> None:
        if together:
            self._next = now + self.every_s
        elif not self._comes:
            self._next = now + self.every_s * self.rng.uniform(0.5, 1.0)
        self._away = self._comes = False

    def away(self) -> None:
        self._next, self._away, self._comes = -math.inf, True, True

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
