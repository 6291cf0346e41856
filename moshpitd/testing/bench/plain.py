"""One member of a plain TCP all-to-all: what `bench namespaces` compares the exchange with.

One rule: it moves the bytes of a butterfly all-reduce and does nothing else: no encryption, no
arithmetic, and nobody waits for anybody's part before sending a result.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from moshpitd.core.balance import load_shares
from moshpitd.testing.bench.orders import Answer, Order, serve

PIECE_BYTES = 256 << 10  # what our links hand to the kernel at once
CONNECT_S = 20.0


class Member:
    """Invariant: one connection to every other member, by index."""

    def __init__(self, index: int, host: str) -> None:
        self._index = index
        self._listener = socket.create_server((host, 0))
        self._others: dict[int, socket.socket] = {}

    def orders(self) -> dict[str, Order]:
        return {
            "address": self.address,
            "connect": self.connect,
            "exchange": self.exchange,
            "plan": self.plan,
        }

    def address(self, order: dict[str, Any]) -> Answer:
        host, port = self._listener.getsockname()[:2]
        return {"address": [host, port]}

    def connect(self, order: dict[str, Any]) -> Answer:
        """The smaller index dials and says who it is."""
        addresses: list[tuple[str, int]] = [tuple(one) for one in order["addresses"]]
        for index in range(self._index + 1, len(addresses)):
            dialled = socket.create_connection(addresses[index], timeout=CONNECT_S)
            dialled.sendall(bytes([self._index]))
            self._others[index] = dialled
        self._listener.settimeout(CONNECT_S)
        for _ in range(self._index):
            accepted, _ = self._listener.accept()
            self._others[accepted.recv(1)[0]] = accepted
        for other in self._others.values():
            other.settimeout(None)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    def exchange(self, order: dict[str, Any]) -> Answer:
        """`bytes` to each and `expect` from each, all at once, from the instant `at` on."""
        threads = [
            threading.Thread(target=work, args=(other, order[what][index]))
            for index, other in self._others.items()
            for work, what in ((_send, "bytes"), (_receive, "expect"))
        ]
        time.sleep(max(0.0, float(order["at"]) - time.monotonic()))
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"began": began, "ended": time.monotonic()}

    def plan(self, order: dict[str, Any]) -> Answer:
        """Who sends how much to whom, with the optimal shares."""
        return plan(order["up_mbps"], order["down_mbps"], int(order["payload_bytes"]))


def plan(up_mbps: Sequence[float], down_mbps: Sequence[float], payload_bytes: int) -> Answer:
    """`bytes[i][j]`: from i to j, its contribution to j's parts and the results of i's own.
    `ideal_s`: the slowest line, if nothing but these bytes went over it."""
    shares = load_shares([min(pair) for pair in zip(up_mbps, down_mbps, strict=True)])
    members = range(len(shares))
    counts = [
        [round((shares[i] + shares[j]) * payload_bytes) if i != j else 0 for j in members]
        for i in members
    ]
    ideal_s = max(
        sum(counts[i]) * 8 / 1e6 / min(up_mbps[i], down_mbps[i]) for i in members
    )  # as much in as out
    return {"bytes": counts, "shares": shares, "ideal_s": ideal_s}


def _send(other: socket.socket, count: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    while count:
        size = min(count, PIECE_BYTES)
        other.sendall(piece[:size])
        count -= size


def _receive(other: socket.socket, count: int) -> None:
    room = memoryview(bytearray(PIECE_BYTES))
    while count:
        got = other.recv_into(room[: min(count, PIECE_BYTES)])
        if got == 0:
            raise ConnectionError("the other member ended")
        count -= got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    serve(Member(options.index, options.host).orders())


if __name__ == "__main__":
    main()
