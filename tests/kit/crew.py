"""Trainers that train: one thread each on the sessions of a fleet, a step every few hundredths of a
second, an average every so many steps, whatever happens to the daemons.

    with Crew(fleet) as crew:
        fleet.daemons[1].kill()
        ...
    crew.check()

Trainer i walks towards an optimum of its own, so the mean of all optima is where they can only get
by averaging. One rule: nothing here catches what the client library lets through; a trainer that
saw an exception has failed.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType

import torch

from moshpitd.client import Result
from moshpitd.client.optim import LocalSGD
from tests.kit.fleet import Fleet
from tests.kit.mixes import NUMBERS

STEP_S = 0.02
EVERY = 20  # steps to an average: as long as a round of a fleet's tensors takes on a loaded machine
RATE = 0.02  # the share of the way to its optimum that a step goes


class Trainer(threading.Thread):
    """Invariant: `steps` are the instants at which its steps ended, in order."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        super().__init__(name=f"trainer-{index}", daemon=True)
        self.index = index
        self.steps: list[float] = []
        self.results: list[tuple[float, Result]] = []
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self._w = fleet.tensors[index]
        self.optimizer = LocalSGD(
            torch.optim.SGD([self._w], lr=RATE),
            fleet.sessions[index],
            every=EVERY,
            on_result=lambda result: self.results.append((time.monotonic(), result)),
        )

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._w.grad = self._w - float(NUMBERS[self.index])
                self.optimizer.step()
                self.steps.append(time.monotonic())
                self.stopping.wait(STEP_S)
        except BaseException as error:
            self.error = error

    def pause_s(self) -> float:
        """The longest time without a step, up to now."""
        return max(b - a for a, b in itertools.pairwise([*self.steps, time.monotonic()]))

    def since(self, instant: float) -> list[Result]:
        return [result for at, result in list(self.results) if at > instant]


class Crew:
    """All trainers of a fleet. Leaving the block lets each finish its step."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.trainers = [Trainer(fleet, i) for i in range(len(fleet.tensors))]

    def __enter__(self) -> Crew:
        for one in self.trainers:
            one.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self.trainers:
            one.stopping.set()
        for one in self.trainers:
            one.join(120.0)
        if error is None:
            self.check()

    def check(self) -> None:
        """Nobody saw an exception, and nobody hangs."""
        for one in self.trainers:
            assert not one.is_alive(), f"trainer {one.index} hangs"
            if one.error is not None:
                raise AssertionError(f"trainer {one.index} saw it") from one.error

    def together(self, count: int, timeout_s: float) -> None:
        """Wait until each has had an average with `count` participants since now."""
        since, end = time.monotonic(), time.monotonic() + timeout_s
        waiting = list(self.trainers)
        while waiting:
            waiting = [
                one
                for one in waiting
                if not any(result.participants == count for result in one.since(since))
            ]
            lacking = {one.index: [str(r) for r in one.since(since)][-3:] for one in waiting}
            assert time.monotonic() < end, (
                f"not within {timeout_s:g} s in one of {count}: {lacking}"
            )
            time.sleep(0.1)

    def off(self) -> float:
        """How far the fleet's parameters are from the mean of all optima, as a share of the
        optima's spread."""
        optima = torch.tensor([float(NUMBERS[i]) for i in range(len(self.trainers))])
        held = torch.stack([tensor.double().mean() for tensor in self.fleet.tensors])
        return float((held - optima.mean()).abs().max() / (optima.max() - optima.min()))
