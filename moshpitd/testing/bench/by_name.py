"""A trainer of `bench algorithms` on a real daemon: any algorithm by its name, told when to step.

One rule: the task, its initial parameters and the order of its batches are those of
`testing.bench.algorithms`, with a wider hidden layer; the step is the shipped class's own, and what
is timed is what a training loop would wait for.

A step in which a run's first round ended is told as `opening`: finding each other for the first
time is paid once in a run, not in every step of it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moshpitd.client import Result, Session, attach
from moshpitd.client.optim import GradientAveraging, LocalSGD
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.testing.bench.algorithms import (
    BATCH,
    EVERY,
    GRADIENTS,
    MOSHPIT,
    PER_HIDDEN,
    SHARE,
    WARM_STEPS,
    Problem,
    batches_of,
    closure_of,
    make,
)
from moshpitd.testing.bench.orders import Answer, Order, serve

ATTACH_S = 30.0  # milliseconds, and seconds on a machine that is busy with four of them
TIMEOUT_S = 30.0
"""Of a round, which takes a fraction of a second: a step that waits longer is a failure to tell."""
LR = 1e-3
"""Small, because what is timed must stay finite at any width; the learning rates of the losses are
tuned where the losses are."""
SOME_TAKE_PART = ("pp-marina",)  # rounds in which not all count are as they should be
FROZEN_AT = {
    "onebit-adam": "freeze_step", "zero-one-adam": "freeze_step", "onebit-lamb": "freeze_step",
    "qadam": "warmup_steps",
}  # fmt: skip
"""Algorithms with a warm-up, which is as large a part of the timed steps as of the run whose losses
are told."""


def options_of(name: str, *, before: int, timed: int, of: int) -> dict[str, Any]:
    """For `timed` steps that stand for a run `of` so many; `before` them are some that nobody
    times."""
    key = FROZEN_AT.get(name)
    return {key: before + max(1, round(min(1.0, WARM_STEPS / of) * timed))} if key else {}


class Trainer:
    """Orders: `begin` with an algorithm, `steps` as often as wanted, `end`."""

    def __init__(self, index: int, peers: int, params: int) -> None:
        self._index, self._peers = index, peers
        self._problem = Problem(0, peers, max(1, round(params / PER_HIDDEN)))
        self._session: Session | None = None
        self._optimizer: Any = None
        self._model = nn.Module()
        self._batches = torch.Generator()
        self._statuses = Counter[str]()
        self._seen: set[str] = set()
        self._opened = False

    def orders(self) -> dict[str, Order]:
        return {"begin": self.begin, "steps": self.steps, "end": self.end}

    def begin(self, order: dict[str, Any]) -> Answer:
        self.end(order)
        self._statuses, self._seen, self._opened = Counter(), set(), False
        self._model, self._batches = self._problem.model(), batches_of(0, self._index)
        session = attach(order["run"], model=self._model, socket=order["socket"], sync=False)
        self._session = session
        if not session.wait_attached(ATTACH_S):
            return {"error": f"no daemon at {order['socket']} within {ATTACH_S:.0f} s"}
        name = order["algorithm"]
        options = options_of(name, before=order["before"], timed=order["timed"], of=order["of"])
        self._optimizer = self._made(name, session, options)
        return {"parameters": sum(value.numel() for value in self._problem.start)}

    def _made(self, name: str, session: Session, options: dict[str, Any]) -> Any:
        def told(result: Result) -> None:
            self._hear(session.run, result)

        if name == MOSHPIT:
            inner = torch.optim.SGD(self._model.parameters(), lr=LR)
            return LocalSGD(inner, session, every=EVERY, on_result=told, timeout_s=TIMEOUT_S)
        if name == GRADIENTS:
            inner = torch.optim.SGD(self._model.parameters(), lr=LR)
            return GradientAveraging(self._model, inner, session, on_result=told)
        # A run opens at its first round, where two may meet before all have attached; such a round
        # is made again.
        least = 1 if name in SOME_TAKE_PART else self._peers
        swarm = SwarmOfDaemons(
            session, heard=self._hear, min_participants=least, timeout_s=TIMEOUT_S
        )
        return make(name, LR, self._problem, self._model, self._index, swarm, **options)

    def steps(self, order: dict[str, Any]) -> Answer:
        """`count` of them from the instant `at`; a gradient takes `compute_s` at least, as on an
        accelerator that waits for nobody."""
        x, y = self._problem.shares[self._index]
        seconds, openings, loss = [], [], 0.0
        self._statuses.clear()
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        for _ in range(order["count"]):
            chosen = torch.randint(SHARE, (BATCH,), generator=self._batches)
            closure = paced(closure_of(self._model, x[chosen], y[chosen]), order["compute_s"])
            self._opened = False
            began = time.monotonic()
            told = self._optimizer.step(closure)
            seconds.append(time.monotonic() - began)
            openings.append(self._opened)
            loss = loss if told is None else float(told)
        return {
            "seconds": seconds,
            "openings": openings,
            "loss": loss,
            "statuses": dict(self._statuses),
        }

    def end(self, order: dict[str, Any]) -> Answer:
        optimizer, session = self._optimizer, self._session
        self._optimizer = self._session = None
        for what in ("land", "close"):
            if hasattr(optimizer, what):
                getattr(optimizer, what)()
        if session is not None:
            session.close()
        return {}

    def _hear(self, run: str, result: Result) -> None:
        """In the thread that landed the round."""
        self._opened |= run not in self._seen
        self._seen.add(run)
        whole = result.status == "complete"
        self._statuses["complete" if whole else f"{result.status} {result.reason}".strip()] += 1


def paced(closure: Callable[[], float], seconds: float) -> Callable[[], float]:
    def gradient() -> float:
        until = time.monotonic() + seconds
        loss = closure()
        time.sleep(max(0.0, until - time.monotonic()))
        return loss

    return gradient


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moshpitd.testing.bench.by_name")
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--params", type=int, required=True, help="about so many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    serve(Trainer(args.index, args.peers, args.params).orders())


if __name__ == "__main__":
    main()
