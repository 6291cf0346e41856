"""The ring all-reduce that `bench delay` compares with: one bucket, reduce-scatter and all-gather,
2 (n - 1) messages in a row. One rule: nothing in it is slower than it must be: connections stand,
what arrives is received into where it belongs, and no member waits for anything but its message.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moshpitd.tensors.mapped import bytes_of

PATIENCE_S = 30.0
"""For a neighbour's message. It is there a delay after it was sent; a member that is gone must not
keep the bench for ever."""

Address = Sequence[Any]  # host and port, also as JSON has it


class RingMember:
    """Member `index` of `count`. Invariant: between two calls nothing is on its way.

    All members call with tensors of one size, each in a thread or a process of its own. A piece is
    sent whole before the next is received: what lies between two members (kernels, a proxy) has to
    take one, a `count`-th of the tensor.
    """

    def __init__(
        self, index: int, count: int, *, following: socket.socket, preceding: socket.socket
    ) -> None:
        self._index, self._count = index, count
        self._following, self._preceding = following, preceding
        self._arrived = torch.zeros(0)

    def average(self, values: Tensor) -> None:
        """Replace a flat float32 tensor by the mean over all members, the same bits at each."""
        pieces, here = values.tensor_split(self._count), self._index
        if self._arrived.numel() < pieces[0].numel():
            self._arrived = torch.zeros(pieces[0].numel())
        for hop in range(self._count - 1):
            self._send(pieces[(here - hop) % self._count])
            summed = pieces[(here - hop - 1) % self._count]
            summed.add_(self._receive(self._arrived[: summed.numel()]))
        pieces[(here + 1) % self._count].div_(self._count)
        for hop in range(self._count - 1):
            self._send(pieces[(here - hop + 1) % self._count])
            self._receive(pieces[(here - hop) % self._count])

    def _send(self, piece: Tensor) -> None:
        self._following.sendall(bytes_of(piece))

    def _receive(self, into: Tensor) -> Tensor:
        left = bytes_of(into)
        while left:
            got = self._preceding.recv_into(left)
            if got == 0:
                raise ConnectionError("the preceding member of the ring ended")
            left = left[got:]
        return into


def hops(count: int) -> int:
    """Messages in a row until everybody has everything."""
    return 2 * (count - 1)


def listening(port: int = 0) -> socket.socket:
    """Where the preceding member comes in; close it."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(PATIENCE_S)
    return listener


def following(address: Address) -> socket.socket:
    """The connection to the following member, dialled at `address`; close it."""
    host, port = address
    return _ready(socket.create_connection((host, port), timeout=PATIENCE_S))


def preceding(listener: socket.socket) -> socket.socket:
    """The connection that the preceding member has dialled; close it."""
    return _ready(listener.accept()[0])


def _ready(end: socket.socket) -> socket.socket:
    end.settimeout(PATIENCE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end
