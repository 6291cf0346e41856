"""A trainer of `bench delay`: one member of a ring all-reduce, and one trainer of every run that is
compared with it. One rule: only a step is timed, and nothing but the step lies between its two
instants.

Instants are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.optim import LocalSGD, by_name
from moshpitd.client.primitives import Exchanged
from moshpitd.testing.bench.orders import Answer, Order, serve
from moshpitd.testing.bench.ring import RingMember, following, listening, preceding

RING, AVERAGE = "ring all-reduce", "group average"
NEIGHBOURS = ("d-psgd", "low-precision-decentralized")
TIMEOUT_S = 30.0
"""Of a step. It takes a fraction of a second; the first may wait for a window of 2 s or two."""
LR = 1e-3


class System(Protocol):
    """One member of one system."""

    def step(self) -> str:
        """Why it does not count, or nothing."""
        ...

    def close(self) -> None: ...


class Ring:
    def __init__(self, member: RingMember, values: torch.Tensor, close: Callable[[], None]) -> None:
        self._member, self._values, self.close = member, values, close

    def step(self) -> str:
        self._member.average(self._values)
        return ""


class Neighbours:
    """An algorithm on a ring of neighbours, by its name."""

    def __init__(self, name: str, x: nn.Parameter, session: Session, peers: int) -> None:
        self._expected = min(2, peers - 1)
        self._session = session
        self._optimizer: Any = by_name(name, [x], session, topology="ring", lr=LR)

    def step(self) -> str:
        self._optimizer.step()
        found: Exchanged = self._optimizer.last
        if len(found.messages) == self._expected and not found.unheard:
            return ""
        return f"heard {len(found.messages)} of {self._expected} neighbours"

    def close(self) -> None:
        self._optimizer.close()
        self._session.close()


class GroupAverage:
    def __init__(self, x: nn.Parameter, session: Session, peers: int) -> None:
        self._session, self._peers = session, peers
        inner = torch.optim.SGD([x], lr=LR)
        self._optimizer = LocalSGD(inner, session, every=1, timeout_s=TIMEOUT_S)

    def step(self) -> str:
        self._optimizer.step()
        result = self._optimizer.last
        if result is None:
            return "had no average"
        whole = result.status == "complete" and result.participants == self._peers
        return "" if whole else str(result)

    def close(self) -> None:
        self._session.close()


class Trainer:
    """Orders: `listen`, `begin` when all listen, `step` as often as wanted, `end`."""

    def __init__(self, index: int, peers: int, numel: int) -> None:
        self._index, self._peers, self._numel = index, peers, numel
        self._systems: dict[str, System] = {}
        self._open = ExitStack()

    def orders(self) -> dict[str, Order]:
        return {"listen": self.listen, "begin": self.begin, "step": self.step, "end": self.end}

    def listen(self, order: dict[str, Any]) -> Answer:
        """Where the preceding member of the ring comes in."""
        self._listener = self._open.enter_context(listening(order["port"]))
        return {}

    def begin(self, order: dict[str, Any]) -> Answer:
        """Connect in the ring, and to one run for each of the others."""
        after = self._open.enter_context(following(order["following"]))
        before = self._open.enter_context(preceding(self._listener))
        member = RingMember(self._index, self._peers, following=after, preceding=before)
        values = torch.full((self._numel,), float(self._index))
        self._systems[RING] = Ring(member, values, self._open.close)
        for name in NEIGHBOURS:
            self._systems[name] = Neighbours(name, *self._attached(name, order), self._peers)
        own = self._attached(AVERAGE.replace(" ", "-"), order)
        self._systems[AVERAGE] = GroupAverage(*own, self._peers)
        return {}

    def _attached(self, run: str, order: dict[str, Any]) -> tuple[nn.Parameter, Session]:
        """All begin with the same parameters: others would be of another lineage."""
        x = nn.Parameter(torch.zeros(self._numel))
        x.grad = torch.randn(self._numel, generator=torch.Generator().manual_seed(self._index))
        socket = order["socket"]
        session = attach(run, tensors=[x], socket=socket, sync=False, timeout_s=TIMEOUT_S)
        if not session.wait_attached(TIMEOUT_S):
            raise TimeoutError(f"no daemon at {socket} within {TIMEOUT_S:g} s")
        return x, session

    def step(self, order: dict[str, Any]) -> Answer:
        """One step of `system`, from the instant `at`."""
        system = self._systems[order["system"]]
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        began = time.monotonic()
        trouble = system.step()
        ended = time.monotonic()
        trouble = trouble and f"trainer {self._index}: {trouble}"
        return {"began": began, "ended": ended, "trouble": trouble}

    def end(self, order: dict[str, Any]) -> Answer:
        while self._systems:
            self._systems.popitem()[1].close()
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moshpitd.testing.bench.delay")
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    serve(Trainer(args.index, args.peers, args.numel).orders())


if __name__ == "__main__":
    main()
