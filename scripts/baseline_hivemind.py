"""hivemind's averagers on loopback, one round per request: what bench_latency compares with.

Reads one word per line on stdin ("cold" or "warm"), answers each with one line of JSON. cold: new
averagers under a new prefix, so that the directory knows nothing of them; warm: the next round of
the last ones. Several "warm" follow one "cold".

One rule: it ends when stdin ends, so that it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.p2p import P2P

STEP_TIMEOUT_S = 30.0
MATCHMAKING_S, REQUEST_TIMEOUT_S = 2.0, 1.0
"""A full group starts at once, so these bound only what goes wrong; longer ones make no round
faster."""


class Averagers:
    """Peers with a DHT process each, which stay; averagers come and go."""

    def __init__(self, peers: int, numel: int) -> None:
        self._numel = numel
        root = DHT(start=True)
        self._dhts = [root]
        self._dhts += [
            DHT(initial_peers=root.get_visible_maddrs(), start=True) for _ in range(peers - 1)
        ]
        self._averagers: list[Any] = []

    def renew(self) -> float:
        """New averagers under a new prefix; the seconds that took."""
        self._end_averagers()
        began = time.perf_counter()
        prefix = secrets.token_hex(8)
        for dht in self._dhts:
            averager = DecentralizedAverager(
                [torch.zeros(self._numel)],
                dht,
                prefix=prefix,
                target_group_size=len(self._dhts),
                min_matchmaking_time=MATCHMAKING_S,
                request_timeout=REQUEST_TIMEOUT_S,
                start=True,
            )
            self._averagers.append(averager)
        return time.perf_counter() - began

    def round(self) -> dict[str, Any]:
        """One step of all: seconds from the first call to the last result."""
        for value, averager in enumerate(self._averagers):
            with averager.get_tensors() as tensors:
                tensors[0].fill_(float(value))
        began = time.perf_counter()
        controls = [one.step(wait=False, timeout=STEP_TIMEOUT_S) for one in self._averagers]
        sizes, trouble = [], ""
        for control in controls:
            try:
                gathered = control.result(timeout=STEP_TIMEOUT_S + 5.0)
                sizes.append(len(gathered) if gathered is not None else 0)
            except Exception as error:
                sizes.append(0)
                trouble = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        if any(size != len(self._averagers) for size in sizes):
            return {"seconds": seconds, "trouble": trouble or f"groups of {sizes}"}
        return {"seconds": seconds, "trouble": self._wrong()}

    def close(self) -> None:
        self._end_averagers()
        for dht in self._dhts:
            dht.shutdown()

    def _wrong(self) -> str:
        """What is not the mean, in words; empty when all is well."""
        mean = (len(self._averagers) - 1) / 2
        for index, averager in enumerate(self._averagers):
            with averager.get_tensors() as tensors:
                if not torch.allclose(tensors[0], torch.full_like(tensors[0], mean)):
                    return f"averager {index} has {tensors[0][0].item()}, expected {mean}"
        return ""

    def _end_averagers(self) -> None:
        for averager in self._averagers:
            averager.shutdown()
        self._averagers.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=256)
    parser.add_argument("--sockets", help="a folder with a short name; default: /tmp")
    options = parser.parse_args()
    if options.sockets:
        # Every averager leaves a socket file behind, in /tmp: there nobody would remove them.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{options.sockets}/"
    torch.set_num_threads(1)
    averagers = Averagers(options.peers, options.numel)
    try:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            attach_s = averagers.renew() if line.strip() == "cold" else 0.0
            print(json.dumps({**averagers.round(), "attach_s": attach_s}), flush=True)
    finally:
        averagers.close()


if __name__ == "__main__":
    main()
