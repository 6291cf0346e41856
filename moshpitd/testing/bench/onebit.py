"""Who trains in `bench onebit`: trainers of 1-bit Adam over daemons, and one process that plays all
of them with torch's Adam. One rule: text, initial parameters, batches and learning rates are those
of `characters`, and what differs is how gradients are averaged and what becomes of them.

"adam" averages exactly. "naive" is what 1-bit Adam was made to replace: the same 1-bit codec with
error feedback at both ends, on the gradient, and Adam's variance from what comes out of it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moshpitd.client import attach
from moshpitd.client.optim.onebit import VARIANCE, OneBitAdam
from moshpitd.client.optim.registry import by_name
from moshpitd.client.optim.replicas import state_digest
from moshpitd.client.primitives import EXACT, Coding
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.layout import Layout
from moshpitd.testing.bench.characters import (
    BETAS,
    EPS,
    Batch,
    batches,
    held_out,
    loss_of,
    new_model,
    rate,
)
from moshpitd.testing.bench.orders import Answer, Order, serve
from moshpitd.testing.coding import Arithmetic, Brought, CodedAverage

CODEC, WARM_CODEC = "sign-l1", "float16"
MARKS = 40  # points of a loss curve
ATTEMPTS, ATTEMPT_S = 20, 10.0
"""Until all have met once: daemons that just joined hear of each other."""
CODINGS = {"adam": EXACT, "naive": Coding(CODEC, feedback=True)}


def alone(order: dict[str, Any]) -> Answer:
    """`peers` trainers in one process, by torch's Adam on the average of their gradients."""
    peers, steps = int(order["peers"]), int(order["steps"])
    model, draws = new_model(), [batches(index, peers) for index in range(peers)]
    adam = torch.optim.Adam(model.parameters(), lr=0.0, betas=BETAS, eps=EPS)
    arithmetic = Arithmetic(part=int(order["part_bytes"]) // 4)  # of float32, as the daemons'
    average = CodedAverage(order["how"], CODINGS[order["how"]], arithmetic)
    curve = Curve(model, steps)
    for step in range(steps):
        brought = {}
        for peer in range(peers):
            model.zero_grad()
            loss_of(model, *next(draws[peer])).backward()
            gradients = {name: own.grad for name, own in model.named_parameters()}
            brought[peer] = Brought(
                {k: g.clone() for k, g in gradients.items() if g is not None}, 1
            )
        mean = average.work(step, brought)[0].tensors
        for name, own in model.named_parameters():
            own.grad = mean[name]
        adam.param_groups[0]["lr"] = rate(step, steps)
        adam.step()
        curve.look(step)
    return {"losses": curve.losses}


class Curve:
    """Losses on the held out text, at `MARKS` equal distances; the last one at the end."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.losses: list[float] = []
        self._model, self._stretch, self._test = model, max(steps // MARKS, 1), held_out()

    def look(self, step: int) -> None:
        if (step + 1) % self._stretch == 0:
            with torch.no_grad():
                self.losses.append(float(loss_of(self._model, *self._test)))


class Trainer:
    """One of the swarm. Orders: `open`, then `train` until some step, as often as wanted."""

    def __init__(self, socket: str, index: int) -> None:
        self._socket, self._index = socket, index
        self._model = new_model()
        self._statuses = Counter[str]()
        self._session: Session | None = None
        self._optimizer: OneBitAdam | None = None
        self._batches: Iterator[Batch] = iter(())
        self._curve: Curve | None = None
        self._steps = 0

    def orders(self) -> dict[str, Order]:
        return {"open": self.open, "train": self.train, "close": self.close}

    def open(self, order: dict[str, Any]) -> Answer:
        """Attach, and meet all others once, so that no update is missed for who is not there yet.
        All begin with equal parameters, whose average is what they are."""
        peers, self._steps = int(order["peers"]), int(order["steps"])
        self._session = attach(order["run"], model=self._model, socket=self._socket)
        self._session.wait_attached(ATTEMPT_S)
        for _ in range(ATTEMPTS):
            result = self._session.average(timeout_s=ATTEMPT_S)
            if len(result.contributors) >= peers:
                break
        else:
            return {"error": f"met {result.contributors}, expected {peers} peers"}
        optimizer = by_name(
            OneBitAdam.algorithm, self._model.parameters(),
            # Runs open at their first average, where two may meet before all four have attached;
            # such a round is made again.
            SwarmOfDaemons(self._session, heard=self._hear, min_participants=peers),
            lr=0.0, betas=BETAS, eps=EPS, freeze_step=int(order["freeze_step"]),
            codec=CODEC, warm_codec=WARM_CODEC,
        )  # fmt: skip
        assert isinstance(optimizer, OneBitAdam)
        self._optimizer = optimizer
        self._batches = batches(self._index, peers)
        self._curve = Curve(self._model, self._steps) if self._index == 0 else None
        return {"float16_bytes": float16_bytes(self._session.layout, peers)}

    def train(self, order: dict[str, Any]) -> Answer:
        optimizer = self._optimizer
        assert optimizer is not None
        # By version, which all agree on: who missed an update counts on in step with the others,
        # and another learning rate than theirs would be another parameter.
        while (step := optimizer.version) < int(order["until"]):
            self._model.zero_grad()
            loss_of(self._model, *next(self._batches)).backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step, self._steps)
            optimizer.step()
            if self._curve is not None:
                self._curve.look(step)
        live = sum(int((optimizer.kept(VARIANCE, s) != 0).sum()) for s in optimizer.slots())
        return {
            "losses": self._curve.losses if self._curve is not None else [],
            "version": optimizer.version,
            "missed": optimizer.missed,
            "resyncs": optimizer.resyncs,
            "parameters": sum(own.numel() for own in self._model.parameters()),
            "live": live,
            "statuses": dict(self._statuses),
            "digest": state_digest(optimizer.parameters()),
        }

    def close(self, order: dict[str, Any]) -> Answer:
        if self._optimizer is not None and self._session is not None:
            self._optimizer.close()
            self._session.close()
        return {}

    def _hear(self, run: str, result: Result) -> None:
        self._statuses[f"{result.status}, {result.participants} inside"] += 1


def float16_bytes(layout: Layout, peers: int) -> int:
    """What one float16 group average of these float32 tensors makes all peers send: every part goes
    from all but its reducer to that one, and from there to all of them."""
    codec = codec_for(WARM_CODEC, "float32")
    sizes = [codec.payload_bytes(part.numel, part.dtype) for part in layout.parts]
    return 2 * (peers - 1) * sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", help="of the daemon; without it, `alone` is all that is done")
    parser.add_argument("--index", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.socket, options.index) if options.socket else None
    serve(trainer.orders() if trainer is not None else {"alone": alone})


if __name__ == "__main__":
    main()
