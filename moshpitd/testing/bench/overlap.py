"""The trainers of `moshpitd bench overlap`. One rule: with and without averaging the same process
makes the same steps on the same model, in blocks that take turns, so that whatever else the machine
does meets both alike.

`measure` tells what its steps took; `partner` is somebody to average with, and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.flight import Flight
from moshpitd.client.optim import LocalSGD
from moshpitd.errors import DaemonUnavailable, TrainerError

log = logging.getLogger("moshpitd.bench")

WIDTH, INPUTS, CLASSES = 2048, 512, 16  # three layers of this width: 9.48 M; four: 13.68 M
LR, MOMENTUM = 1e-3, 0.9
TIMEOUT_S = 60.0
PRIORITY = -15  # of `measure`, where that is allowed: what else runs here shall wait for it


def new_model(layers: int) -> nn.Module:
    """The same parameters in every process: other ones would be another lineage, which begins with
    a snapshot."""
    torch.manual_seed(0)
    inner: list[nn.Module] = []
    for _ in range(layers - 1):
        inner += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, CLASSES))


class Loop:
    """A plain training loop on random data."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self._batch = model, batch
        self._draw = torch.Generator().manual_seed(1)

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """One step; what it took."""
        began = time.perf_counter()
        x = torch.randn(self._batch, INPUTS, generator=self._draw)
        y = torch.randint(CLASSES, (self._batch,), generator=self._draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        optimizer.step()
        return time.perf_counter() - began


class Blocks:
    """What the blocks with overlap, and those without, took."""

    def __init__(self) -> None:
        self.off: list[list[float]] = []
        self.on: list[list[float]] = []
        self.off_cpu_s: list[float] = []  # of the whole process, a block
        self.on_cpu_s: list[float] = []
        self.wall_s = self.flying_s = self.working_s = 0.0
        self.statuses: dict[str, int] = {}

    def told(self) -> dict[str, Any]:
        return {
            "off_s": self.off,
            "on_s": self.on,
            "off_cpu_s": self.off_cpu_s,
            "on_cpu_s": self.on_cpu_s,
            # From begin to landing, and from begin until the result was here.
            "in_flight": self.flying_s / self.wall_s,
            "daemon_at_work": self.working_s / self.wall_s,
            "rounds": self.statuses,
        }


def measure(args: argparse.Namespace) -> None:
    model = new_model(args.layers)
    loop = Loop(model, args.batch)
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    session = attach(args.run, model=model, socket=args.socket, sync=False)
    if not session.wait_attached(TIMEOUT_S):
        raise DaemonUnavailable(f"no daemon at {args.socket} within {TIMEOUT_S:g} s")
    session.average(timeout_s=TIMEOUT_S)  # connections, and the pages of the bucket
    blocks = Blocks()
    optimizer = LocalSGD(inner, session, every=1, overlap=True, timeout_s=TIMEOUT_S)
    _without(loop, inner, args.steps, Blocks())  # both warm up
    _with_overlap(loop, optimizer, args.steps, Blocks())
    for _ in range(args.blocks):
        _without(loop, inner, args.steps, blocks)
        _with_overlap(loop, optimizer, args.steps, blocks)
    parameters = sum(p.numel() for p in model.parameters())
    told = {"parameters": parameters, "batch": args.batch, **blocks.told()}
    Path(args.json).write_text(json.dumps(told), encoding="utf-8")
    session.close()


def _without(loop: Loop, inner: torch.optim.Optimizer, steps: int, blocks: Blocks) -> None:
    cpu_s = time.process_time()
    blocks.off.append([loop.step(inner) for _ in range(steps)])
    blocks.off_cpu_s.append(time.process_time() - cpu_s)


def _with_overlap(loop: Loop, optimizer: LocalSGD, steps: int, blocks: Blocks) -> None:
    """A block with a round in flight whenever one can be."""
    flights: list[Flight] = []

    def count(result: Any) -> None:
        blocks.statuses[result.status] = blocks.statuses.get(result.status, 0) + 1

    optimizer._on_result = count
    loop.step(optimizer)  # begins a flight that is in the air when the block begins
    began, cpu_s = time.monotonic(), time.process_time()
    took = []
    landed: list[float] = []
    for _ in range(steps):
        flight = optimizer.flight
        took.append(loop.step(optimizer))
        if flight is not None and (not flights or flights[-1] is not flight):
            flights.append(flight)
        if flight is not None and optimizer.flight is not flight:
            landed.append(time.monotonic())
    ended = time.monotonic()
    blocks.on_cpu_s.append(time.process_time() - cpu_s)
    blocks.on.append(took)
    blocks.wall_s += ended - began
    landed += [ended] * (len(flights) - len(landed))
    for flight, down in zip(flights, landed, strict=True):
        start = max(flight.began, began)
        blocks.flying_s += down - start
        blocks.working_s += (min(flight.ended, down) if flight.done else down) - start
    optimizer.land()


def partner(args: argparse.Namespace) -> None:
    """Average without end, until the daemon or the bench goes."""
    model = new_model(args.layers)
    session = attach(args.run, model=model, socket=args.socket, sync=False)
    session.wait_attached(TIMEOUT_S)
    while os.getppid() == args.parent:
        _one_round(session)


def _one_round(session: Session) -> None:
    try:
        session.average(timeout_s=TIMEOUT_S)
    except DaemonUnavailable:
        session.wait_attached(1.0)
    except TrainerError as error:
        log.warning("no average: %s", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["measure", "partner"])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--run", default="overlap")
    parser.add_argument("--core", type=int, required=True, help="the only core to run on")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--blocks", type=int, default=5, help="with and without, each")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid to live with")
    parser.add_argument("--json", default="", help="where `measure` tells")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    if args.role == "measure":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        measure(args)
    else:
        partner(args)


if __name__ == "__main__":
    main()
