"""The digits, trained by any algorithm of `moshpitd.client.optim`. One rule: the loop is the same
for all of them; what differs is a name and its options.

    python -m moshpitd.examples.digits_by_name --algorithm diloco --options '{"every": 8}' \\
        --socket /run/moshpitd/moshpitd.sock --index 0 --of 4

All begin together, from one trainer's initial parameters, and end together with one average of the
parameters. Progress is the algorithm's own: `version` where trainers count updates together, and
this trainer's steps where everybody goes at a pace of its own. With `--begin-at` a trainer comes
into a swarm that is under way and takes its state first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moshpitd.client import Result, Session, attach
from moshpitd.client.optim import GradientAveraging, LocalSGD, by_name
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.examples.digits import (
    EVERY,
    Batches,
    Say,
    accuracy,
    images,
    new_model,
    new_optimizer,
    of_round,
    shard,
    teller,
)

TOGETHER_S = 120.0
"""For all to be there, at the start and at the end: nine processes on two cores start in 30 s."""
ATTEMPT_S = 30.0  # of that, for one round
TELL_S = 0.5  # between two lines about the step, where no rounds tell
JOIN_S = 90.0  # until the others compare, and a newcomer is given their state


def plain_shard(count: int, index: int, of: int) -> Tensor:
    """Every `of`-th image: what papers mean by data that is distributed alike."""
    return torch.arange(index, count, of)


class WholeShard(Batches):
    """All of it in every step: for methods that compare gradients of one function at two points."""

    @property
    def count(self) -> int:
        return self.size

    def chosen(self) -> Tensor:
        return torch.arange(self.size)


class Heard:
    """What the daemon said of the rounds since it was asked last."""

    def __init__(self) -> None:
        self.last: Result | None = None
        self.statuses = Counter[str]()
        self._sent = self._received = 0

    def __call__(self, run: str, result: Result) -> None:
        self.last = result
        self.statuses[result.status] += 1
        self._sent += result.bytes_sent
        self._received += result.bytes_received

    def told(self) -> dict[str, Any]:
        """The last round, with the bytes of all of them; empty if there was none."""
        if self.last is None:
            return {}
        line = {
            **of_round(self.last),
            "bytes_sent": self._sent,
            "bytes_received": self._received,
        }
        self.last, self._sent, self._received = None, 0, 0
        return line


def make(
    name: str, model: nn.Module, session: Session, heard: Heard, options: dict[str, Any]
) -> Any:
    """The optimizer. Options are JSON, so a torch optimizer inside is given by its name."""

    def told(result: Result) -> None:
        heard("", result)

    if name == "gradient-averaging":
        return GradientAveraging(model, new_optimizer(model), session, on_result=told, **options)
    if name == "asysg-incon":  # within a node; between nodes Moshpit SGD
        # In a run of its own, or a straggler's round would take the others' last average for one.
        between = attach(f"{session.run}.nodes", model=model, socket=session.socket)
        within = by_name(name, model.parameters(), between, **options)
        return LocalSGD(within, between, every=EVERY, on_result=told)
    if "inner" in options:
        options = {**options, "inner": getattr(torch.optim, options["inner"])}
    return by_name(name, model.parameters(), SwarmOfDaemons(session, heard=heard), **options)


def train(args: argparse.Namespace, say: Say) -> None:
    x, y, test_x, test_y = images()
    mine = (
        shard(y, args.index, args.of)
        if args.shards == "skewed"
        else plain_shard(len(y), args.index, args.of)
    )
    model, heard = new_model(args.seed), Heard()
    batches = (WholeShard if args.full_batch else Batches)(x[mine], y[mine], args.seed)
    session = attach(args.run, model=model, socket=args.socket)
    if not args.begin_at:
        together(session, args.of)
    optimizer = make(args.algorithm, model, session, heard, json.loads(args.options))
    if hasattr(optimizer, "samples") and not isinstance(optimizer, LocalSGD):
        optimizer.samples = batches.count
    counts_together = hasattr(optimizer, "version")
    took_state = bool(session.synced and session.synced.loaded_snapshot)
    if args.begin_at and hasattr(optimizer, "catch_up"):
        took_state = caught_up(optimizer)
    if hasattr(optimizer, "start"):  # what holds the parameters is no trainer
        optimizer.start()
        took_state = bool(args.begin_at and getattr(optimizer, "version", 0))
    steps, told_at = args.begin_at, time.monotonic()

    def progress() -> int:
        return int(optimizer.version) if counts_together else steps

    say(
        "start",
        index=args.index,
        step=progress(),
        version=progress(),
        peer_id=session.peer_id,
        attached=session.attached,
        loaded_snapshot=took_state,
        accuracy=accuracy(model, test_x, test_y),
        samples=len(mine),
    )
    while progress() < args.steps:
        began = time.monotonic()
        batches.step(model, optimizer)
        steps += 1
        line = heard.told()
        if line:
            line |= {"version": progress(), "accuracy": accuracy(model, test_x, test_y)}
            say("round", step=progress(), loss=batches.loss, **line)
        elif began - told_at >= TELL_S:
            told_at = began
            say("step", step=progress(), loss=batches.loss)
        time.sleep(max(0.0, args.pace - (time.monotonic() - began)))
    if hasattr(optimizer, "land"):
        optimizer.land()
    state = equal_state(optimizer, model)
    if args.dump and state is not None:
        torch.save(state, args.dump)
    final = together(session, args.of)
    if args.dump and state is None:
        torch.save(model.state_dict(), args.dump)
    say(
        "end",
        step=progress(),
        version=progress(),
        peer_id=session.peer_id,
        accuracy=accuracy(model, test_x, test_y),
        missed=getattr(optimizer, "missed", 0),
        resyncs=getattr(optimizer, "resyncs", 0),
        gradients=steps - args.begin_at - getattr(optimizer, "refused", 0),
        counts=dict(heard.statuses),
        together=final is not None,
        final=None if final is None else {**of_round(final), "version": progress()},
    )
    if hasattr(optimizer, "close"):
        optimizer.close()
    session.close()


def together(session: Session, of: int) -> Result | None:
    """One average of the parameters with all in it; None when they were not there in time."""
    until = time.monotonic() + TOGETHER_S
    session.wait_attached(TOGETHER_S)
    while time.monotonic() < until:
        result = session.average(timeout_s=ATTEMPT_S)
        # Whoever loaded another's initial parameters counted nothing in that round.
        if len(result.contributors) >= of and result.status == "complete":
            return result
    return None


def caught_up(optimizer: Any) -> bool:
    """The others' state, at their next comparison."""
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        if optimizer.catch_up() and getattr(optimizer, "current", True):
            return True
    return False


def equal_state(optimizer: Any, model: nn.Module) -> dict[str, Tensor] | None:
    """What all trainers must hold alike, before any last average makes it so; None where they hold
    nothing alike by design."""
    if getattr(optimizer, "replicated", False):
        found: dict[str, Tensor] = optimizer.replicated_state()
        return found
    return model.state_dict() if isinstance(optimizer, GradientAveraging) else None


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(prog="python -m moshpitd.examples.digits_by_name")
    it.add_argument("--algorithm", required=True, help="a name of moshpitd.client.optim")
    it.add_argument("--options", default="{}", help="its options, as JSON")
    it.add_argument("--shards", choices=["skewed", "plain"], default="plain")
    it.add_argument("--full-batch", action="store_true", help="the whole shard in every step")
    it.add_argument("--socket", help="the daemon's socket (default: where daemons put it)")
    it.add_argument("--run", default="digits", help="name of the training job")
    it.add_argument("--index", type=int, default=0, help="which shard, 0 to of - 1")
    it.add_argument("--of", type=int, default=4, help="number of shards and trainers")
    it.add_argument("--seed", type=int, default=0, help="of the initial parameters and the batches")
    it.add_argument("--steps", type=int, default=400, help="of progress, until the end")
    it.add_argument("--begin-at", type=int, default=0, help="progress of the swarm that is joined")
    it.add_argument("--pace", type=float, default=0.0, help="least seconds per step")
    it.add_argument("--json", default="", metavar="FILE", help="append JSON lines; - is stdout")
    it.add_argument("--dump", default="", metavar="FILE", help="where the final state goes")
    return it


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    torch.set_num_threads(1)  # the model is tiny, and the trainers share the machine's cores
    train(args, teller(args.json))


if __name__ == "__main__":
    main()
