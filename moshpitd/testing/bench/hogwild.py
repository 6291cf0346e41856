"""A trainer of `bench asysg`: a small network on data of its own making, through AsySGIncon.

One rule: nothing is timed but steps. What the parameters were after some of them is kept, and the
loss of each is computed when all steps are done, so that looking costs the same as not looking.

Teacher and student are one-layer networks; every trainer draws its own batches of the same problem,
so two trainers see twice the samples in a second and the question is whether that is worth twice.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moshpitd.client import attach
from moshpitd.client.optim.distributed import SwarmOptimizer
from moshpitd.client.optim.registry import by_name
from moshpitd.client.session import Session
from moshpitd.testing.bench.orders import Answer, Order, serve

INPUTS, HIDDEN, BATCH = 256, 512, 128
"""A step of about 2 ms on one core: far more arithmetic than the 0.5 MB that it writes and reads,
as in any training that is worth two cores."""
LR = 0.002
"""Small, so that the loss is a matter of how many updates there were for the first seconds."""
TEST = 2048
KEEP_S = 0.02  # between two copies of the parameters; they are looked at afterwards


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


class Kept(NamedTuple):
    at: float
    cpu_s: float
    values: list[Tensor]


class Trainer:
    def __init__(self, socket: str, index: int) -> None:
        self._socket, self._index = socket, index
        self._teacher = network(1)
        self._model = network(2)
        self._session: Session | None = None
        self._optimizer: SwarmOptimizer | None = None

    def orders(self) -> dict[str, Order]:
        return {"open": self.open, "train": self.train, "close": self.close}

    def open(self, order: dict[str, Any]) -> Answer:
        self._model = network(2)
        params = list(self._model.parameters())
        self._session = attach(order["run"], tensors=params, socket=self._socket, sync=False)
        self._optimizer = by_name("asysg-incon", params, self._session, lr=LR)
        self._optimizer.start()  # type: ignore[attr-defined]
        return {}

    def train(self, order: dict[str, Any]) -> Answer:
        """From the instant `at` for `seconds`; the first trainer tells when which loss was met."""
        assert self._optimizer is not None
        source = torch.Generator().manual_seed(100 + self._index)
        kept: list[Kept] = []
        while time.monotonic() < float(order["at"]):
            time.sleep(0.001)
        began, cpu_began, steps, next_at = time.monotonic(), time.process_time(), 0, 0.0
        while (now := time.monotonic() - began) < float(order["seconds"]):
            if self._index == 0 and now >= next_at:
                cpu_s = time.process_time() - cpu_began
                values = [x.detach().clone() for x in self._model.parameters()]
                kept.append(Kept(now, cpu_s, values))
                next_at = now + KEEP_S
            x, y = self._batch(source, BATCH)
            self._optimizer.zero_grad()
            nn.functional.mse_loss(self._model(x), y).backward()
            self._optimizer.step()
            steps += 1
        return {"steps": steps, "losses": self._losses(kept)}

    def close(self, order: dict[str, Any]) -> Answer:
        if self._optimizer is not None and self._session is not None:
            self._optimizer.close()
            self._session.close()
        return {}

    def _batch(self, source: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=source)
        with torch.no_grad():
            return x, self._teacher(x)

    def _losses(self, kept: list[Kept]) -> list[tuple[float, float, float]]:
        """(seconds, processor seconds of this trainer, loss on the common test set)."""
        x, y = self._batch(torch.Generator().manual_seed(3), TEST)
        model, found = network(2), []
        with torch.no_grad():
            for one in kept:
                for parameter, value in zip(model.parameters(), one.values, strict=True):
                    parameter.copy_(value)
                found.append((one.at, one.cpu_s, float(nn.functional.mse_loss(model(x), y))))
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    serve(Trainer(options.socket, options.index).orders())


if __name__ == "__main__":
    main()
