"""A paced trainer for `bench churn`: linear regression of which each trainer sees two thirds.

One rule: it is a training loop as a person would write it; what the bench needs to know it writes
line by line, and SIGTERM ends it after its step.

Trainer i draws inputs in which only its own window of coordinates is not 0, so that alone it never
learns the rest: the loss on the common test set shows whether averaging works. Labels carry noise
of variance NOISE^2, which is the loss that the best model has.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moshpitd.client import Result, attach
from moshpitd.client.optim import LocalSGD

DIMENSIONS, NOISE = 256, 0.1
BATCH, LR = 64, 0.1
"""A window has 171 coordinates: SGD on the mean square is stable below 1 / (1 + 171 / 64) = 0.27. A
round with ten steps before it leaves 0.4 of what is still wrong, so that a minute is enough."""
TEST = 2048
TELL_S = 0.5  # between two lines about the step
FINAL_S = 30.0
"""The final loss is the mean over the last steps of this long. All trainers end at one instant of
the rounds' cycle, and right after an average the loss is lower than nine steps on: at one instant,
three undisturbed legs of one program ended at 0.0115 to 0.0140, which is nobody's noise but the
phase's. At rounds of 5 s these are six cycles."""


def truth() -> Tensor:
    return torch.randn(DIMENSIONS, generator=torch.Generator().manual_seed(7))


def window(index: int, of: int) -> Tensor:
    """1 for the two thirds of the coordinates that trainer `index` sees."""
    width = math.ceil(DIMENSIONS * 2 / 3)
    first = index * DIMENSIONS // of
    return torch.zeros(DIMENSIONS).index_fill_(
        0, torch.arange(first, first + width) % DIMENSIONS, 1.0
    )


def draw(source: torch.Generator, count: int, seen: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, DIMENSIONS, generator=source) * seen
    return x, x @ truth() + NOISE * torch.randn(count, generator=source)


class FinalLoss:
    """On the common test set, over the last `FINAL_S` seconds of steps."""

    def __init__(self) -> None:
        self._x, self._y = draw(torch.Generator().manual_seed(11), TEST, torch.ones(DIMENSIONS))
        self._kept: deque[tuple[float, float]] = deque()  # instant, loss

    def note(self, at: float, model: nn.Module) -> None:
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(model(self._x).squeeze(1), self._y))
        self._kept.append((at, loss))
        while at - self._kept[0][0] > FINAL_S:
            self._kept.popleft()

    @property
    def mean(self) -> float:
        return sum(loss for _, loss in self._kept) / len(self._kept)


class Teller:
    """Lines of JSON in a file; instants are of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")


def train(options: argparse.Namespace, say: Teller) -> None:
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    torch.manual_seed(0)
    model = nn.Linear(DIMENSIONS, 1, bias=False)
    # Large enough that a round moves something; nobody's gradient ever touches it.
    model.register_buffer("ballast", torch.zeros(options.numel))
    source = torch.Generator().manual_seed(1000 * options.life + options.index)
    seen = window(options.index, options.of)

    def told(result: Result) -> None:
        say(
            "round",
            status=result.status,
            reason=result.reason,
            participants=result.participants,
            group_size=result.group_size,
            contributors=list(result.contributors),
            group_id=result.group_id.hex(),
            seconds=result.seconds,
        )

    session = attach(options.run, model=model, socket=options.socket)
    optimizer = LocalSGD(
        torch.optim.SGD(model.parameters(), lr=LR),
        session,
        every_s=options.every,
        overlap=bool(options.overlap),
        on_result=told,
        timeout_s=60.0,
    )
    say("start", peer_id=session.peer_id, attached=session.attached)
    step, told_at, final = 0, 0.0, FinalLoss()
    while not leaving:
        began = time.monotonic()
        x, y = draw(source, BATCH, seen)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
        step += 1
        final.note(began, model)
        if began - told_at >= TELL_S:
            told_at = began
            say("step", step=step, missed=optimizer.missed)
        time.sleep(max(0.0, options.pace - (time.monotonic() - began)))
    optimizer.land()  # of a round that still runs beside the steps
    final.note(time.monotonic(), model)
    say("end", step=step, missed=optimizer.missed, loss=final.mean)
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--life", type=int, required=True, help="which start of it: other batches")
    parser.add_argument("--pace", type=float, required=True, help="least seconds per step")
    parser.add_argument("--every", type=float, required=True, help="seconds between two averages")
    parser.add_argument("--overlap", type=int, required=True, help="1: rounds run beside steps")
    parser.add_argument("--numel", type=int, required=True, help="further parameters to average")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options, Teller(options.json))


if __name__ == "__main__":
    main()
