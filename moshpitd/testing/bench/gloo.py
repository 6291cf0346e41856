"""One rank of torch's gloo all-reduce over plain TCP: what `bench allreduce` compares with.

One rule: only the all-reduce is timed, as its own users would time it; the division by the number
of ranks is not, which is in its favour.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from moshpitd.testing.bench.orders import Answer, Order, serve
from moshpitd.testing.bench.values import Truth, block, fill, look_inside


class Rank:
    """One member of the process group; its tensor is one flat one, which suits gloo best."""

    def __init__(self, rank: int, of: int, numel: int, port: int) -> None:
        self._rank, self._of = rank, of
        self._flat = torch.zeros(numel)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = f"tcp://127.0.0.1:{port}"

    def orders(self) -> dict[str, Order]:
        return {
            "attach": self.attach,
            "fill": self.fill,
            "average": self.average,
            "check": self.check,
        }

    def attach(self, order: dict[str, Any]) -> Answer:
        dist.init_process_group(
            "gloo", init_method=self._store, rank=self._rank, world_size=self._of
        )
        return {}

    def fill(self, order: dict[str, Any]) -> Answer:
        fill(self._flat, block(self._rank, order["round"], of=self._flat.numel()))
        return {}

    def average(self, order: dict[str, Any]) -> Answer:
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(self._flat)
        ended = time.monotonic()
        self._flat.div_(self._of)
        return {"began": began, "ended": ended}

    def check(self, order: dict[str, Any]) -> Answer:
        numel = self._flat.numel()
        truth = Truth.of_round(order["round"], [1] * self._of, codec="float32", numel=numel)
        found = look_inside(self._flat, truth)
        return {
            "parts": found.parts,
            "inside": found.counts(),
            "unexplained": len(found.unexplained),
            "worst": found.worst,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    serve(Rank(options.rank, options.of, options.numel, options.port).orders())


if __name__ == "__main__":
    main()
