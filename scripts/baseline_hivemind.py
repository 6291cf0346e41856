"""hivemind's averagers on loopback: what `moshpitd bench` compares with.

Told line by line on stdin (`moshpitd.testing.bench.orders`): `attach` makes new averagers under a
new prefix, of which the directory knows nothing, `fill` gives each its values of a round and
`average` averages once. Averagers, their DHTs and their p2pds are processes of their own, as
hivemind makes them.

One rule: it ends when stdin ends, so that it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import time
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression
from hivemind.p2p import P2P

from moshpitd.testing.bench.orders import Answer, serve
from moshpitd.testing.bench.values import Truth, block, flat_tensor, look_inside

MATCHMAKING_S, REQUEST_TIMEOUT_S = 2.0, 1.0
"""A full group starts at once, so these bound only what goes wrong; longer ones make no round
faster."""
CODECS = {"float32": NoCompression, "float16": Float16Compression}
"""Of its own; its 8-bit ones lose every part with current numpy and report success."""


class Averagers:
    """Peers with a DHT process each, which stay; averagers come and go."""

    def __init__(self, peers: int, numel: int, codec: str) -> None:
        self._numel, self._codec = numel, codec
        root = DHT(start=True)
        self._dhts = [root]
        self._dhts += [
            DHT(initial_peers=root.get_visible_maddrs(), start=True) for _ in range(peers - 1)
        ]
        self._averagers: list[Any] = []

    def renew(self, order: dict[str, Any]) -> Answer:
        """New averagers under a new prefix; the seconds that took."""
        self._end_averagers()
        began = time.monotonic()
        prefix = secrets.token_hex(8)
        for dht in self._dhts:
            averager = DecentralizedAverager(
                flat_tensor(self._numel)[1],
                dht,
                prefix=prefix,
                target_group_size=len(self._dhts),
                min_matchmaking_time=MATCHMAKING_S,
                request_timeout=REQUEST_TIMEOUT_S,
                compression=CODECS[self._codec](),
                initial_group_bits="",
                start=True,
            )
            self._averagers.append(averager)
        return {"seconds": time.monotonic() - began}

    def fill(self, order: dict[str, Any]) -> Answer:
        for peer, averager in enumerate(self._averagers):
            own = block(peer, order["round"], of=self._numel)
            with averager.get_tensors() as tensors:
                at = 0
                for tensor in tensors:  # their order is the flat tensor's
                    _fill_from(tensor, own, at)
                    at += tensor.numel()
        return {}

    def average(self, order: dict[str, Any]) -> Answer:
        """One step of all: the first call and the last result."""
        timeout_s = order["timeout_s"]
        began = time.monotonic()
        controls = [one.step(wait=False, timeout=timeout_s) for one in self._averagers]
        sizes, trouble = [], ""
        for control in controls:
            try:
                gathered = control.result(timeout=timeout_s + 5.0)
                sizes.append(len(gathered) if gathered is not None else 0)
            except Exception as error:
                sizes.append(0)
                trouble = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        if any(size != len(self._averagers) for size in sizes):
            trouble = trouble or f"groups of {sizes}"
        return {"began": began, "ended": ended, "trouble": trouble}

    def check(self, order: dict[str, Any]) -> Answer:
        """What is not the mean, in words; empty when all is well."""
        weights = [1] * len(self._averagers)
        truth = Truth.of_round(order["round"], weights, codec=self._codec, numel=self._numel)
        everybody = tuple(range(len(weights)))
        for index, averager in enumerate(self._averagers):
            with averager.get_tensors() as tensors:
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            found = look_inside(flat, truth)
            wrong = [part for part, inside in enumerate(found.members) if inside != everybody]
            if wrong:
                return {"trouble": f"averager {index}: {len(wrong)} of {found.parts} are no mean"}
        return {"trouble": ""}

    def close(self) -> None:
        self._end_averagers()
        for dht in self._dhts:
            dht.shutdown()

    def _end_averagers(self) -> None:
        for averager in self._averagers:
            averager.shutdown()
        self._averagers.clear()


def _fill_from(tensor: torch.Tensor, own: torch.Tensor, at: int) -> None:
    """The values that the block, again and again, has from position `at` on."""
    done = 0
    while done < tensor.numel():
        start = (at + done) % own.numel()
        count = min(own.numel() - start, tensor.numel() - done)
        tensor[done : done + count] = own[start : start + count]
        done += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=256)
    parser.add_argument("--codec", choices=list(CODECS), default="float32")
    parser.add_argument("--sockets", help="a folder with a short name; default: /tmp")
    options = parser.parse_args()
    if options.sockets:
        # Every averager leaves a socket file behind, in /tmp: there nobody would remove them.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{options.sockets}/"
    torch.set_num_threads(1)
    with contextlib.closing(Averagers(options.peers, options.numel, options.codec)) as averagers:
        serve(
            {
                "attach": averagers.renew,
                "fill": averagers.fill,
                "average": averagers.average,
                "check": averagers.check,
            }
        )


if __name__ == "__main__":
    main()
