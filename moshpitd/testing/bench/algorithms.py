"""What every algorithm learns and sends in one process, for `bench algorithms`. One rule: the same
initial parameters, the same batches in the same order, and the same number of samples for all.

The task is small and made here: a network of 32-48-6 learns the classes that a fixed random one of
the same shape gives to normal points, which four trainers have in equal, alike shares. Codecs,
shares and turns are the shipped ones on `ArithmeticSwarm`; bytes are its payloads, and what a step
waits for is counted where it waits. Each line that is told is one run: (algorithm, lr, seed). What
steps take on real daemons is measured with the same task by `testing.bench.by_name`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moshpitd.client.optim import ALGORITHMS, by_name
from moshpitd.client.primitives import EXACT, Coding, StoreOptions, Tensors
from moshpitd.testing.arithmetic import ArithmeticPeer, ArithmeticSwarm
from moshpitd.testing.coding import Cut

INPUTS, HIDDEN, CLASSES = 32, 48, 6
PER_HIDDEN = INPUTS + 1 + CLASSES  # parameters that a unit of the hidden layer comes to
SHARE, BATCH, TEST = 512, 32, 2048
MARKS = 20  # points of a loss curve
DIVERGED = 1e9  # a loss that is no number: JSON has no infinity

SGD_GRID = (0.1, 0.3, 1.0, 3.0)
ADAM_GRID = (0.001, 0.003, 0.01, 0.03)
ADAMS = ("onebit-adam", "zero-one-adam", "onebit-lamb", "qadam")
EVERY = 8
WARM_STEPS = 40  # of algorithms that have a warm-up
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit-adam": {"freeze_step": WARM_STEPS},
    "zero-one-adam": {"freeze_step": WARM_STEPS},
    "onebit-lamb": {"freeze_step": WARM_STEPS},
    "qadam": {"warmup_steps": WARM_STEPS},
    "async-model-average": {"every": EVERY, "delay": 1},
    "async-low-precision-average": {"every": EVERY, "delay": 1},
    "diloco": {"inner": torch.optim.SGD, "every": EVERY},
    "streaming-diloco": {"inner": torch.optim.SGD, "every": EVERY, "fragments": 4},
    "target-batch": {"target": 4 * 2 * BATCH},
    "marina": {"chance": 0.25},
    "pp-marina": {"chance": 0.25},
    "vr-diana": {"refresh": BATCH / SHARE},
    "adiana": {"mu": 0.01},
    "ec-sgd-diana": {"two_sided": True},  # a group of daemons agrees on one codec
    "asysg-con": {"batch": 4, "max_staleness": 4},
}
"""Beside the learning rate; everything else is each class's default."""
MOSHPIT, GRADIENTS = "moshpit-sgd", "gradient-averaging"
NAMES = (MOSHPIT, GRADIENTS, *ALGORITHMS)
"""The first two wrap a model and its session (`LocalSGD`, `GradientAveraging`), so they have no
name of `by_name`."""
SESSIONS = Coding("float16", feedback=True)
"""How a session's tensors travel by default."""
LR_NAMES = {"adiana": "eta"}


def grid_of(name: str) -> tuple[float, ...]:
    return ADAM_GRID if name in ADAMS else SGD_GRID


class Problem:
    """The data of all trainers, from one seed."""

    def __init__(self, seed: int, peers: int, hidden: int = HIDDEN) -> None:
        self.draw, self._hidden = torch.Generator().manual_seed(seed), hidden
        teacher = network(self.draw, hidden)
        self.shares = [self._points(teacher, SHARE) for _ in range(peers)]
        self.test = self._points(teacher, TEST)
        self.start = [value.clone() for value in network(self.draw, hidden).state_dict().values()]

    def _points(self, teacher: nn.Module, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=self.draw)
        with torch.no_grad():
            return x, teacher(x).argmax(1)

    def model(self) -> nn.Module:
        model = network(torch.Generator(), self._hidden)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), self.start, strict=True):
                parameter.copy_(value)
        return model

    def loss(self, models: list[nn.Module]) -> float:
        """Of the mean of all parameters, on points that nobody trains on."""
        mean = self.model()
        x, y = self.test
        with torch.no_grad():
            for own, *all_of_it in zip(
                mean.parameters(), *(model.parameters() for model in models), strict=True
            ):
                own.copy_(torch.stack([one.detach() for one in all_of_it]).mean(0))
            loss = float(nn.functional.cross_entropy(mean(x), y))
            return loss if math.isfinite(loss) else DIVERGED


def network(draw: torch.Generator, hidden: int = HIDDEN) -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[-1]
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / math.sqrt(fan_in))
    return model


class Tally:
    """What one trainer's steps waited for, and what they sent beside group averages."""

    def __init__(self) -> None:
        self.step = 0
        self.waited = Counter[str]()  # by kind: in the step that began it
        self.hidden = Counter[str]()  # landed in a later step
        self.sent = 0  # bytes of meetings and of the store

    def note(self, kind: str, begun: int) -> None:
        (self.waited if begun == self.step else self.hidden)[kind] += 1


class Counted:
    """A peer of the swarm, with a tally. Offers what it offers."""

    def __init__(self, peer: ArithmeticPeer, tally: Tally) -> None:
        self._peer, self._tally = peer, tally

    def averages(self, name: str, *, like: Tensors, coding: Coding = EXACT) -> Any:
        return _Watched(self._peer.averages(name, like=like, coding=coding), "average", self._tally)

    def neighbours(self, name: str, *, like: Tensors, topology: str, coding: Coding = EXACT) -> Any:
        found = self._peer.neighbours(name, like=like, topology=topology, coding=coding)
        return _Watched(found, "exchange", self._tally)

    def meetings(self, name: str, *, like: Tensors, topology: str) -> Any:
        found = self._peer.meetings(name, like=like, topology=topology)
        return _Watched(found, "meeting", self._tally, size=_size(like))

    def store(self, name: str, *, start: Tensors, options: StoreOptions) -> Any:
        found = self._peer.store(name, start=start, options=options)
        return _Watched(found, "store", self._tally, size=_size(start))

    def shared(self, name: str, *, start: Tensors) -> Any:
        return self._peer.shared(name, start=start)  # one node's memory: nothing travels


def _size(tensors: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


class _Watched:
    """One primitive. Calls that wait are noted; everything else is the primitive's."""

    def __init__(self, inner: Any, kind: str, tally: Tally, *, size: int = 0) -> None:
        self._inner, self._kind, self._tally, self._size = inner, kind, tally, size

    def begin(self, *given: Any, **named: Any) -> Any:
        pending, begun = self._inner.begin(*given, **named), self._tally.step
        return _Landing(pending, lambda: self._tally.note(self._kind, begun))

    def average(self, *given: Any, **named: Any) -> Any:
        return self.begin(*given, **named).land()

    def exchange(self, *given: Any, **named: Any) -> Any:
        return self.begin(*given, **named).land()

    def meet(self) -> str:
        met: str = self._inner.meet()
        if met:
            self._tally.sent += self._size
            self._tally.note(self._kind, -1)  # no step waits for it
        return met

    def pull(self) -> Any:
        self._tally.note(self._kind, self._tally.step)
        return self._inner.pull()

    def push(self, *given: Any, **named: Any) -> Any:
        self._tally.sent += self._size
        self._tally.note(self._kind, -1)
        return self._inner.push(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Landing:
    def __init__(self, pending: Any, landed: Callable[[], None]) -> None:
        self._pending, self._landed = pending, landed

    @property
    def done(self) -> bool:
        return bool(self._pending.done)

    def land(self) -> Any:
        self._landed()
        return self._pending.land()


def run(name: str, lr: float, seed: int, *, peers: int, steps: int) -> dict[str, Any]:
    """One run; the losses are at `MARKS` equal distances, the last one at the end."""
    # Every vector in as many pieces as there are peers: a model of real size has thousands of
    # parts, and each peer reduces its share of them.
    problem, swarm = Problem(seed, peers), ArithmeticSwarm(peers, seed=seed, cut=Cut.BAGUA)
    models = [problem.model() for _ in range(peers)]
    tallies = [Tally() for _ in range(peers)]
    batches = [batches_of(seed, peer) for peer in range(peers)]
    optimizers = [
        make(name, lr, problem, models[peer], peer, Counted(swarm.peer(peer), tallies[peer]))
        for peer in range(peers)
    ]
    stretch = max(steps // MARKS, 1)
    losses = [problem.loss(models)]

    def play(peer: int) -> None:
        x, y = problem.shares[peer]
        for _ in range(stretch):
            tallies[peer].step += 1
            chosen = torch.randint(SHARE, (BATCH,), generator=batches[peer])
            optimizers[peer].step(closure_of(models[peer], x[chosen], y[chosen]))

    for _ in range(MARKS):
        swarm.play(play)
        losses.append(problem.loss(models))
    made = stretch * MARKS
    sent = [swarm.bytes_sent(peer) + tallies[peer].sent for peer in range(peers)]
    return {
        "algorithm": name,
        "lr": lr,
        "seed": seed,
        "peers": peers,
        "parameters": sum(value.numel() for value in problem.start),
        "steps": made,
        "samples": made * BATCH * peers,
        "losses": losses,
        "bytes_per_step": sum(sent) / peers / made,
        "busiest_node_bytes": max(sent) / made,
        "waited": {kind: count / made for kind, count in tallies[0].waited.items()},
        "hidden": {kind: count / made for kind, count in tallies[0].hidden.items()},
    }


def batches_of(seed: int, peer: int) -> torch.Generator:
    """What a trainer's batches are drawn from, in order."""
    return torch.Generator().manual_seed(1000 * seed + peer)


class MoshpitSGD:
    """`LocalSGD` over SGD in arithmetic: the class itself wants a session, which has a clock."""

    def __init__(self, model: nn.Module, lr: float, swarm: Any) -> None:
        self._model, self._steps = model, 0
        self._inner = torch.optim.SGD(model.parameters(), lr=lr)
        self._average = swarm.averages(
            MOSHPIT, like=dict(model.named_parameters()), coding=SESSIONS
        )

    def step(self, closure: Callable[[], float]) -> None:
        self._inner.step(closure)
        self._steps += 1
        if self._steps % EVERY == 0:
            with torch.no_grad():
                own = dict(self._model.named_parameters())
                for name, value in self._average.average(own).tensors.items():
                    own[name].copy_(value)


def make(
    name: str,
    lr: float,
    problem: Problem,
    model: nn.Module,
    peer: int,
    swarm: Any,
    **more: Any,
) -> Any:
    """`swarm`: what `by_name` takes. `more` beats OPTIONS."""
    options: dict[str, Any] = {LR_NAMES.get(name, "lr"): lr, **OPTIONS.get(name, {}), **more}
    if name == MOSHPIT:
        return MoshpitSGD(model, lr, swarm)
    if name == GRADIENTS:  # a mean of gradients, then a step: in arithmetic the same thing
        name = "gradient-allreduce"
        options |= {"codec": SESSIONS.codec, "feedback": SESSIONS.feedback}
    if name == "vr-diana":
        options["full_gradient"] = closure_of(model, *problem.shares[peer])
    optimizer: Any = by_name(name, model.parameters(), swarm, **options)
    optimizer.samples = BATCH
    if hasattr(optimizer, "draw_from"):
        optimizer.draw_from(peer)
    if hasattr(optimizer, "start"):
        optimizer.start()
    return optimizer


def closure_of(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    def closure() -> float:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    return closure


def tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moshpitd.testing.bench.algorithms")
    parser.add_argument("--only", nargs="+", default=NAMES)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="which, of how many")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name for name in NAMES if name in args.only]
    unknown = [name for name in args.only if name not in NAMES]
    tell({"event": "names", "chosen": chosen, "unknown": unknown, "known": NAMES})
    which, of = args.share
    for name in () if unknown else chosen[which::of]:
        try:
            runs = [run(name, lr, 0, peers=args.peers, steps=args.steps) for lr in grid_of(name)]
            best = min(runs, key=lambda found: found["losses"][-1])
            more = [
                run(name, best["lr"], seed, peers=args.peers, steps=args.steps)
                for seed in range(1, args.seeds)
            ]
        except Exception as error:  # said, and the others go on
            tell({"algorithm": name, "error": f"{error}"})
            continue
        for found in runs:
            tell({**found, "tuning": found is not best})
        for found in more:
            tell({**found, "tuning": False})
    tell({"event": "end"})


if __name__ == "__main__":
    main()
