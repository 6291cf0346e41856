"""A trainer that is told when to average what. One rule: only `average` is timed, and it is the
client's own call: nothing but what a training loop would do lies between its two instants.

Instants are of the machine's monotonic clock, which all processes share, so that the bench can
compare those of several trainers.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from moshpitd.client import attach
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.errors import MoshpitError
from moshpitd.tensors.codecs import CODECS
from moshpitd.testing.bench.orders import Answer, Order, serve
from moshpitd.testing.bench.values import (
    Truth,
    block,
    fill,
    fingerprint,
    flat_tensor,
    look_inside,
    part_numel_of,
)


class Trainer:
    """One trainer of one daemon. Invariant: all values are in `_tensors`, and what is made of them
    to look at them is gone before anything is measured."""

    def __init__(self, socket: str, index: int, numel: int, *, in_place: bool = False) -> None:
        self._socket, self._index, self._numel, self._in_place = socket, index, numel, in_place
        flat, self._tensors = flat_tensor(numel)
        self._flat: Tensor | None = flat  # what the tensors are views of
        if in_place:  # views cannot move
            self._flat, self._tensors = None, [tensor.clone() for tensor in self._tensors]
        self._session: Session | None = None

    def orders(self) -> dict[str, Order]:
        return {
            "attach": self.attach,
            "fill": self.fill,
            "average": self.average,
            "sync": self.sync,
            "check": self.check,
            "detach": self.detach,
            "payload": self.payload,
        }

    def attach(self, order: dict[str, Any]) -> Answer:
        """To a new run, in which all begin with the same parameters: others would be of another
        lineage, which takes a snapshot and contributes nothing to its first round."""
        self.detach(order)
        self._fill(0, 0)
        began = time.monotonic()
        timeout_s = float(order["timeout_s"])
        self._session = attach(
            run=order["run"],
            tensors=self._tensors,
            socket=self._socket,
            sync=bool(order.get("sync", False)),
            in_place=self._in_place,
            timeout_s=timeout_s,
        )
        if not self._session.wait_attached(timeout_s):
            return {"error": f"no daemon at {self._socket} within {timeout_s:.0f} s"}
        return {"peer_id": self._session.peer_id, "began": began, "ended": time.monotonic()}

    def fill(self, order: dict[str, Any]) -> Answer:
        """Own values for a round; `same` gives all trainers those of the first."""
        peer = 0 if order.get("same") else self._index
        self._fill(peer, order["round"])
        return {}

    def average(self, order: dict[str, Any]) -> Answer:
        """Begin at the instant `at`."""
        session, timeout_s = self._live(), float(order["timeout_s"])
        time.sleep(max(0.0, float(order["at"]) - time.monotonic()))
        began = time.monotonic()
        try:
            result = session.average(int(order.get("weight", 1)), timeout_s=timeout_s)
        except MoshpitError as error:
            ended = time.monotonic()
            return {"began": began, "ended": ended, "error": f"{type(error).__name__}: {error}"}
        ended = time.monotonic()
        return {"began": began, "ended": ended, "result": told(result)}

    def sync(self, order: dict[str, Any]) -> Answer:
        """Wait for the daemon, then catch up with the swarm."""
        session, timeout_s = self._live(), float(order["timeout_s"])
        if not session.wait_attached(timeout_s):
            return {"error": f"no daemon at {self._socket} within {timeout_s:.0f} s"}
        return {"result": told(session.sync(timeout_s))}

    def check(self, order: dict[str, Any]) -> Answer:
        """Who is in each part, and the fingerprint of it all."""
        flat, numel = self._whole(), self._numel
        truth = Truth.of_round(order["round"], order["weights"], codec=order["codec"], numel=numel)
        found = look_inside(flat, truth, doubtful=order.get("doubtful", ()))
        return {
            "parts": found.parts,
            "inside": found.counts(),
            "unexplained": len(found.unexplained),
            "first_unexplained": found.unexplained[:1],
            "worst": found.worst,
            "sha256": fingerprint(flat) if order.get("fingerprint") else "",
        }

    def payload(self, order: dict[str, Any]) -> Answer:
        """What the codec says that all parts of these tensors come to, in bytes; 0 for a codec that
        is chosen link by link."""
        codec = CODECS.get(order["codec"])
        flat = self._whole()
        parts = flat.split(part_numel_of(flat))
        sizes = [codec.payload_bytes(part.numel(), "float32") for part in parts] if codec else []
        return {"bytes": sum(sizes)}

    def detach(self, order: dict[str, Any]) -> Answer:
        if self._session is not None:
            self._session.close()
            self._session = None
        return {}

    def _fill(self, peer: int, number: int) -> None:
        flat = torch.empty(self._numel) if self._flat is None else self._flat
        fill(flat, block(peer, number, of=self._numel))
        if self._flat is None:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, piece in zip(self._tensors, flat.split(sizes), strict=True):
                tensor.copy_(piece)

    def _whole(self) -> Tensor:
        return torch.cat(self._tensors) if self._flat is None else self._flat

    def _live(self) -> Session:
        if self._session is None:
            raise MoshpitError("told to average before it was told to attach")
        return self._session


def told(result: Result) -> Answer:
    """What the bench needs to know of a result."""
    return {
        "status": result.status,
        "reason": result.reason,
        "detail": result.detail,
        "accepted": result.accepted,
        "group_size": result.group_size,
        "participants": result.participants,
        "contributors": list(result.contributors),
        "excluded": result.excluded,
        "parts": result.parts,
        "parts_without_result": len(result.parts_without_result),
        "rounds": result.rounds,
        "version": result.version,
        "loaded_snapshot": result.loaded_snapshot,
        "newcomer": result.newcomer,
        "total_weight": result.total_weight,
        "group_id": result.group_id.hex(),
        "seconds": result.seconds,
        "bytes_sent": result.bytes_sent,
        "bytes_received": result.bytes_received,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--in-place", action="store_true", help="as attach(in_place=True)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.socket, options.index, options.numel, in_place=options.in_place)
    serve(trainer.orders())


if __name__ == "__main__":
    main()
