"""One end of `moshpitd bench link`: a process that sends and receives over links or bare sockets.

One rule: every system moves the same bytes in the same pieces between the same two processes, and a
round ends when the receiver has said that all of it arrived.

The parent speaks JSON lines: the serving end first says where it listens, then each line on stdin
starts a round and is answered with its seconds and CPU seconds.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkCallbacks, LinkOptions, LinkPool, Security
from moshpitd.net.tls import Credentials

HOST = "127.0.0.1"
ROUND_TIMEOUT_S = 120.0
ACK = b"k"
RECEIVE_BYTES = 1 << 20  # what a bare receiver asks the kernel for at once


@dataclass(frozen=True, slots=True)
class Task:
    """What one end has to do: `system` is "plain socket", "tls socket" or "link" with the security
    in brackets, `payload_bytes` the size of a frame's payload, `flows` 0 for automatic."""

    system: str
    role: str
    payload_bytes: int
    flows: int


class End(Protocol):
    """One end of a pair. Both calls block until everything is at the other side, or here."""

    def address(self) -> dict[str, Any]: ...

    def meet(self, address: dict[str, Any]) -> None: ...

    def met(self) -> None:
        """Wait until the other end is there."""
        ...

    def send(self, count: int) -> None: ...

    def receive(self, count: int) -> None: ...

    def close(self) -> None: ...


class Links:
    """Two real pools. Contributions, because they are most of what travels."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task = task
        self._other = ""
        self._block = memoryview(os.urandom(task.payload_bytes))
        self._changed = threading.Condition()
        self._arrived = 0
        self._acks = 0
        self._lost = ""
        self._identity = Identity.load_or_create(folder / "key")
        callbacks = LinkCallbacks(
            on_frame=self._frame,
            on_lost=self._ended,
            on_up=self._up,
            on_send_failed=lambda peer_id, header, error: _give_up(f"not sent: {error}"),
        )
        security = next(one for one in Security if f"({one.word})" in task.system)
        options = LinkOptions(flows=task.flows, security=security)
        self._pool = LinkPool(self._identity, callbacks, host=HOST, options=options)

    def address(self) -> dict[str, Any]:
        return {"port": self._pool.port, "peer_id": self._identity.peer_id}

    def meet(self, address: dict[str, Any]) -> None:
        peer_id = address["peer_id"]
        self._pool.dial(peer_id, [f"{HOST}:{address['port']}"]).result(ROUND_TIMEOUT_S)

    def met(self) -> None:
        self._wait(lambda: bool(self._other))

    def send(self, count: int) -> None:
        with self._changed:
            acks = self._acks + 1
        for part in range(count):
            header = Header(FrameKind.CONTRIBUTION, part=part)
            self._pool.send(self._other, header, lambda _: self._block)
        self._wait(lambda: self._acks >= acks)

    def receive(self, count: int) -> None:
        self._wait(lambda: self._arrived >= count)
        with self._changed:
            self._arrived -= count
        self._pool.send(self._other, Header(FrameKind.RESULT), None)

    def close(self) -> None:
        self._pool.close()

    def _ended(self, _peer_id: str, reason: str) -> None:
        """Between two rounds it is only the other end that is done first."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def _up(self, peer_id: str) -> None:
        with self._changed:
            self._other = peer_id
            self._changed.notify_all()

    def _frame(self, _peer_id: str, header: Header, _payload: memoryview) -> None:
        with self._changed:
            if header.kind is FrameKind.CONTRIBUTION:
                self._arrived += 1
            else:
                self._acks += 1
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._lost, ROUND_TIMEOUT_S)
            if not condition():
                _give_up(self._lost or f"not done within {ROUND_TIMEOUT_S:g} s")


class Sockets:
    """The baseline: one connection per direction, because nobody may read and write one
    SSLSocket at once; `secure` wraps them as the ssl module's documentation does."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task = task
        self._block = memoryview(os.urandom(task.payload_bytes))
        self._secure = task.system == "tls socket"
        self._listener = socket.create_server((HOST, 0))
        credentials = Credentials(Identity.load_or_create(folder / "key"))
        self._contexts = (credentials.server_context, credentials.client_context)
        self._out: socket.socket
        self._in: socket.socket
        self._meeting: threading.Thread | None = None
        self._room = memoryview(bytearray(RECEIVE_BYTES))

    def address(self) -> dict[str, Any]:
        self._meeting = threading.Thread(target=self._accept, daemon=True)
        self._meeting.start()
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        self._in, self._out = (self._dressed(self._listener.accept()[0], 0) for _ in range(2))

    def meet(self, address: dict[str, Any]) -> None:
        where = (HOST, address["port"])
        self._out, self._in = (self._dressed(socket.create_connection(where), 1) for _ in range(2))

    def met(self) -> None:
        if self._meeting is not None:
            self._meeting.join()

    def _dressed(self, raw: socket.socket, context: int) -> socket.socket:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._secure:
            return raw
        secured: ssl.SSLSocket = self._contexts[context].wrap_socket(raw, server_side=context == 0)
        return secured

    def send(self, count: int) -> None:
        for _ in range(count):
            self._out.sendall(self._block)
        if self._out.recv(1) != ACK:
            _give_up("the receiver went")

    def receive(self, count: int) -> None:
        left = count * self._task.payload_bytes
        while left:
            got = self._in.recv_into(self._room[: min(left, RECEIVE_BYTES)])
            if got == 0:
                _give_up("the sender went")
            left -= got
        self._in.sendall(ACK)

    def close(self) -> None:
        for sock in (self._in, self._out, self._listener):
            sock.close()


def _give_up(why: str) -> None:
    sys.stderr.write(f"linkbench: {why}\n")
    sys.stderr.flush()
    os._exit(1)


def _round(end: End, order: dict[str, Any]) -> dict[str, float]:
    """Seconds from the start of sending to the receiver's word that all is there."""
    sends, receives, count = order["send"], order["receive"], order["count"]
    cpu_s, began = time.process_time(), time.perf_counter()
    receiving = threading.Thread(target=end.receive, args=(count,), daemon=True)
    if receives:
        receiving.start()
    if sends:
        end.send(count)
    seconds = time.perf_counter() - began
    if receives:
        receiving.join()
    return {"seconds": seconds, "cpu_s": time.process_time() - cpu_s}


def main() -> None:
    """Serve or dial as the first argument (JSON) says, then one round per line of stdin."""
    task = Task(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        links = task.system.startswith("link")
        end: End = Links(task, Path(folder)) if links else Sockets(task, Path(folder))
        if task.role == "serve":
            _say(end.address())
        else:
            end.meet(json.loads(sys.stdin.readline()))
            _say({})
        end.met()
        for line in sys.stdin:
            _say(_round(end, json.loads(line)))
        end.close()


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
