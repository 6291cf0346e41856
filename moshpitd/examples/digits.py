"""Handwritten digits, learned by trainers that each see mostly their own classes. One rule: every
idea fits a screen.

    python -m moshpitd.examples.digits --socket /run/moshpitd/moshpitd.sock --index 0 --of 4

The data is scikit-learn's bundled `load_digits` (1,797 images of 8 x 8), so nothing is downloaded.
The other things this file can do are the yardsticks: `alone` (one shard only), `central` (one
process, all data, as many samples as all trainers together) and `compare` (largest difference
between parameter files). With `--json FILE` every line is JSON; `-` is stdout.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from moshpitd.client import DaemonUnavailable, Result, Session, attach
from moshpitd.client.optim import LocalSGD

# Tuned in a simulation without daemons (10 seeds; 4 trainers, average every 8 steps, 480 steps):
# swarm 0.969 to 0.981, central 0.983 to 0.986, alone 0.48 to 0.72. At lr 0.1 without momentum the
# swarm needs 1,600 steps for 0.95.
LR, MOMENTUM, HIDDEN, BATCH = 0.2, 0.9, 128, 32
STEPS, EVERY = 480, 8
SKEW = 0.95  # share of a class that goes to its owner
TEST = 360  # a fifth of the images, the same for everybody

Say = Callable[..., None]


# -- data: one common test set, and shards that are skewed by label -------------------------------


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train x, train y, test x, test y); x in 0..1, the same split in every process."""
    bunch = load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32) / 16
    y = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[TEST:], y[TEST:], x[:TEST], y[:TEST]


def shard(y: Tensor, index: int, of: int) -> Tensor:
    """Which images trainer `index` has. Class c belongs to trainer c mod `of`; 95 % of it go
    there, the rest to the others. Every image is in one shard, so the swarm together sees what
    `central` sees."""
    draw = torch.Generator().manual_seed(1)
    owner = y % of
    elsewhere = (owner + torch.randint(1, max(of, 2), (len(y),), generator=draw)) % of
    stays = torch.rand(len(y), generator=draw) < SKEW
    return torch.nonzero(torch.where(stays, owner, elsewhere) == index).flatten()


# -- a model and its plain training loop ----------------------------------------------------------


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


class Batches:
    """Random batches of a shard, and one step on the next of them."""

    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:
        self._x, self._y = x, y
        self._draw = torch.Generator().manual_seed(seed)
        self.size = len(y)
        self.loss = float("nan")  # of the last step, for whoever tells about it

    @property
    def count(self) -> int:
        """Images in a batch."""
        return BATCH

    def chosen(self) -> Tensor:
        """The images of the next batch."""
        return torch.randint(self.size, (BATCH,), generator=self._draw)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        chosen = self.chosen()
        loss = nn.functional.cross_entropy(model(self._x[chosen]), self._y[chosen])
        optimizer.zero_grad()
        loss.backward()
        self.loss = loss.item()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(dim=1) == y).double().mean())


def train_alone(*, index: int, of: int, seed: int, steps: int) -> float:
    """Accuracy of one trainer on its own shard: what the swarm has to beat."""
    x, y, test_x, test_y = images()
    mine = shard(y, index, of)
    return _train(x[mine], y[mine], test_x, test_y, seed=seed, steps=steps)


def train_central(*, of: int, seed: int, steps: int) -> float:
    """Accuracy of one process with all data and as many samples as `of` trainers see: what can be
    had."""
    return _train(*images(), seed=seed, steps=steps * of)


def _train(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, *, seed: int, steps: int) -> float:
    model = new_model(seed)
    optimizer, batches = new_optimizer(model), Batches(x, y, seed)
    for _ in range(steps):
        batches.step(model, optimizer)
    return accuracy(model, tx, ty)


# -- the same loop in a swarm: three more lines, the rest is telling about it ---------------------


def train_in_swarm(args: argparse.Namespace, say: Say) -> None:
    x, y, test_x, test_y = images()
    mine = shard(y, args.index, args.of)
    model = new_model(args.seed)
    finished = torch.zeros(1)  # rides along in every average; see `all_through`
    model.register_buffer("finished", finished)
    batches = Batches(x[mine], y[mine], args.seed)
    counts = Counter[str]()

    def told(result: Result) -> None:
        counts[result.status] += 1
        counts["bytes_sent"] += result.bytes_sent
        counts["bytes_received"] += result.bytes_received
        reached = accuracy(model, test_x, test_y)
        say("round", step=step, loss=batches.loss, accuracy=reached, **of_round(result))

    session = attach(args.run, model=model, socket=args.socket)
    together = args.final_participants or args.of
    optimizer = LocalSGD(
        new_optimizer(model),
        session,
        every=args.every,
        on_result=told,
        # A group of a grid is not everybody; a sweep of all its dimensions mixes all trainers.
        rounds="sweep" if together < args.of else 1,
    )
    step = step_of_the_swarm(session)
    say(
        "start",
        index=args.index,
        step=step,
        version=session.version,
        peer_id=session.peer_id,
        attached=session.attached,
        loaded_snapshot=bool(session.synced and session.synced.loaded_snapshot),
        accuracy=accuracy(model, test_x, test_y),
        samples=len(mine),
    )
    final: Result | None = None
    give_up = float("inf")
    while final is None and time.monotonic() < give_up:
        began, missed, before = time.monotonic(), optimizer.missed, optimizer.last
        step += 1
        finished.fill_(float(step >= args.steps))
        batches.step(model, optimizer)
        if step % args.every == 0:
            leave_step(session, step)
        if optimizer.missed > missed:
            say("missed", step=step, loss=batches.loss, version=session.version)
        if step >= args.steps:
            give_up = min(give_up, time.monotonic() + args.final_timeout)
        if optimizer.last is not before and all_through(optimizer.last, together, finished):
            final = optimizer.last
        time.sleep(max(0.0, args.pace - (time.monotonic() - began)))
    say(
        "end",
        step=step,
        version=session.version,
        peer_id=session.peer_id,
        accuracy=accuracy(model, test_x, test_y),
        missed=optimizer.missed,
        counts=dict(counts),
        together=final is not None,
        final=None if final is None else of_round(final),
    )
    if args.dump:
        torch.save(model.state_dict(), args.dump)
    session.close()


def step_of_the_swarm(session: Session) -> int:
    """Where a newcomer begins: at the step that the donor of its parameters was at. 0 for a
    founder."""
    if session.synced is None or not session.synced.loaded_snapshot:
        return 0
    try:
        return int(json.loads(session.get_state() or b"{}").get("step", 0))
    except DaemonUnavailable:
        return 0


def leave_step(session: Session, step: int) -> None:
    """Opaque trainer state: goes to a newcomer together with the parameters."""
    try:
        session.put_state(json.dumps({"step": step}).encode())
    except DaemonUnavailable:
        return  # the next one will do


def all_through(result: Result | None, together: int, finished: Tensor) -> bool:
    """Whether that average is the last one: complete, and all in it have made their steps.

    It is the same average for everybody, found without any further talk, because the mean of the
    flags is 1 for all members of a group or for none (in a grid: as long as all sweep together).
    Who is through trains on until then: if it stood still, the one step of a straggler would weigh
    more than all that the others know.
    """
    if result is None or result.participants < together:
        return False
    if result.status not in ("complete", "alone"):  # alone is everybody where `together` is 1
        return False
    return finished.item() > 0.999  # a mean of ones, rounded


def of_round(result: Result) -> dict[str, Any]:
    return {
        "version": result.version,
        "status": result.status,
        "reason": result.reason,
        "group_size": result.group_size,
        "participants": result.participants,
        "contributors": list(result.contributors),
        "excluded": result.excluded,
        "loaded_snapshot": result.loaded_snapshot,
        "newcomer": result.newcomer,
        "seconds": result.seconds,
        "bytes_sent": result.bytes_sent,
        "bytes_received": result.bytes_received,
    }


# -- comparing, and the command line --------------------------------------------------------------


def max_difference(dumps: Sequence[str | Path]) -> float:
    """Largest difference of any parameter between any of the files and the first one; 0.0 = the
    same bits."""
    first, *others = [torch.load(dump, weights_only=True) for dump in dumps]
    return max(
        ((a - other[name]).abs().max().item() for other in others for name, a in first.items()),
        default=0.0,
    )


def teller(path: str) -> Say:
    """Lines of JSON to a file (or "-"), or without one, words for a person."""
    began = time.monotonic()

    def say(event: str, **fields: Any) -> None:
        fields = {"event": event, "at_s": round(time.monotonic() - began, 3), **fields}
        if path == "-":
            print(json.dumps(fields), flush=True)
            return
        if path:
            with open(path, "a", encoding="utf-8") as file:
                print(json.dumps(fields), file=file)
            return
        shown = ("step", "version", "loss", "accuracy", "status", "group_size", "participants")
        words = [f"{key} {fields[key]:.4g}" for key in shown if isinstance(fields.get(key), float)]
        words += [f"{key} {fields[key]}" for key in shown if isinstance(fields.get(key), str | int)]
        print(f"{event}: {', '.join(words)}", flush=True)

    return say


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(prog="python -m moshpitd.examples.digits", description=__doc__)
    it.add_argument(
        "what", nargs="?", default="swarm", choices=["swarm", "alone", "central", "compare"]
    )
    it.add_argument("--socket", help="the daemon's socket (default: where daemons put it)")
    it.add_argument("--run", default="digits", help="name of the training job")
    it.add_argument("--index", type=int, default=0, help="which shard, 0 to of - 1")
    it.add_argument("--of", type=int, default=4, help="number of shards and trainers")
    it.add_argument("--seed", type=int, default=0, help="of the initial parameters and the batches")
    it.add_argument("--steps", type=int, default=STEPS, help="local steps")
    it.add_argument("--every", type=int, default=EVERY, help="local steps between two averages")
    it.add_argument("--pace", type=float, default=0.0, help="least seconds per step")
    it.add_argument(
        "--final-participants", type=int, default=0, help="of the last average (default: all)"
    )
    it.add_argument(
        "--final-timeout", type=float, default=120.0, help="seconds to wait for the others"
    )
    it.add_argument(
        "--json", default="", metavar="FILE", help="append JSON lines here; - is stdout"
    )
    it.add_argument("--dump", default="", metavar="FILE", help="where the final parameters go")
    it.add_argument(
        "--dumps", nargs="+", default=[], metavar="FILE", help="what `compare` compares"
    )
    return it


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    torch.set_num_threads(1)  # the model is tiny, and the demo's trainers share the machine's cores
    say = teller(args.json)
    if args.what == "alone":
        reached = train_alone(index=args.index, of=args.of, seed=args.seed, steps=args.steps)
        say("alone", accuracy=reached, step=args.steps)
    elif args.what == "central":
        reached = train_central(of=args.of, seed=args.seed, steps=args.steps)
        say("central", accuracy=reached, step=args.steps * args.of)
    elif args.what == "compare":
        say("compare", max_difference=max_difference(args.dumps), files=len(args.dumps))
    else:
        train_in_swarm(args, say)


if __name__ == "__main__":
    main()
