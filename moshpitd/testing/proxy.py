"""A network between two ends of a TCP connection: delay, a rate, and the ways in which it breaks.

    with Proxies() as proxies:
        path = proxies.to("127.0.0.1:31337")          # path.address is what others shall dial
        path.there.delay_s = path.back.delay_s = 0.02  # one way each
        path.there.bytes_per_s = 1e6
        path.freeze()                                 # half-open: silence, and no end
        path.cut()                                    # every connection is reset

`netem` is not in every kernel and needs root; this needs neither. "There" is towards the target,
"back" is from it. One rule: bytes are never lost, changed or reordered while a connection lives; a
proxy makes a network slow or dead, never wrong.

It has a thread and a loop of its own, so that neither a test that blocks nor the loop of the nodes
delays what is on its way. What is on its way is bounded (`IN_FLIGHT_BYTES`), beyond that nothing is
read, as in a full router. A delay is exact to about a millisecond; the handshake of TCP itself is
not delayed, because a kernel answers it before anybody is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType

CHUNK_BYTES = 64 << 10
IN_FLIGHT_BYTES = 64 << 20
"""Per direction of a connection: 10 Gb/s at 50 ms. A window that is too small would be a second
limit beside `bytes_per_s`."""
QUEUE_S = 0.25
"""What may stand before a slow wire, in time: a router's buffer. Were it longer, a connection that
came first would keep all others silent for as long as its bytes take."""
START_TIMEOUT_S = 10.0

CallerOf = Callable[[int, int], int | None]
"""Who dialled, from the dialler's port and ours: a number that the test gave it, or None."""


@dataclass(slots=True)
class Way:
    """One direction of a path, shared by its connections. May be changed while bytes are under way:
    what is read from then on is treated anew."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    passed: int = 0  # bytes that went all the way
    _free_at: float = 0.0  # when the wire has carried what is on it

    def full_s(self, now: float) -> float:
        """How long nothing more may enter."""
        return max(0.0, self._free_at - now - QUEUE_S)

    def due(self, size: int, now: float) -> float:
        """When `size` bytes that enter now come out at the other end."""
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        return self._free_at + self.delay_s


class Path:
    """What lies in front of one listening address. All methods may be called from any thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: tuple[str, int],
        caller_of: CallerOf | None = None,
    ) -> None:
        self.there, self.back = Way(), Way()
        self.target = target
        self.port = 0
        self._loop = loop
        self._server: asyncio.Server | None = None
        self._caller_of = caller_of
        self._frozen = False
        self._silenced: frozenset[int] = frozenset()
        self._accepting = True
        self._calls: set[_Connection] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def multiaddr(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}"

    @property
    def connections(self) -> int:
        """Open ones, frozen ones too."""
        return len(self._calls)

    def slow(self, delay_s: float, bytes_per_s: float = float("inf")) -> None:
        """The same delay and rate both ways."""
        for way in (self.there, self.back):
            way.delay_s, way.bytes_per_s = delay_s, bytes_per_s

    def freeze(self) -> None:
        """Half-open: nothing more comes out at either end, nothing ends, and new connections are
        accepted into the same silence. A machine that lost power looks like this."""
        self._run(self._set_frozen, True)

    def thaw(self) -> None:
        """What waited goes on, in order."""
        self._run(self._set_frozen, False)

    def silence(self, callers: Collection[int]) -> None:
        """As `freeze`, for the connections of these callers and of nobody else: those that stand
        and those to come. Each call replaces the one before; with nobody, what waited goes on."""
        self._run(self._set_silenced, frozenset(callers))

    def cut(self) -> None:
        """Reset every connection at both ends. New ones are accepted: see `refuse`."""
        self._run(self._abort_all)

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections at once; those that stand go on."""
        self._accepting = not refusing

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        async def call() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(START_TIMEOUT_S)

    # -- on the proxy's own loop -------------------------------------------------------------------

    async def open(self, port: int, host: str) -> None:
        self._server = await asyncio.start_server(self._accepted, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._abort_all()

    def _set_frozen(self, frozen: bool) -> None:
        self._frozen = frozen
        self._hold_all()

    def _set_silenced(self, callers: frozenset[int]) -> None:
        self._silenced = callers
        self._hold_all()

    def _hold_all(self) -> None:
        for call in self._calls:
            call.hold(self._frozen or call.caller in self._silenced)

    def _abort_all(self) -> None:
        for call in list(self._calls):
            call.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._accepting:
            _reset(writer)
            return
        caller = None
        if self._caller_of is not None:
            source = writer.get_extra_info("peername")[1]
            caller = await asyncio.to_thread(self._caller_of, source, self.port)
            if caller is None or writer.is_closing():  # it has hung up already
                _reset(writer)
                return
        try:
            onward = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)  # a refusal beyond the proxy can only be shown as a reset before it
            return
        if writer.is_closing():
            _reset(onward[1])
            return
        call = _Connection((reader, writer), onward, self.there, self.back, caller)
        call.hold(self._frozen or caller in self._silenced)
        self._calls.add(call)
        try:
            await call.carry()
        finally:
            self._calls.discard(call)


class Proxies:
    """Any number of paths on one thread. Leaving the block resets whatever still stands."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self.paths: list[Path] = []

    def to(
        self,
        target: str,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        caller_of: CallerOf | None = None,
    ) -> Path:
        """A path to `target` ("host:port"), which need not listen yet. `port` 0: any free one;
        `host`: where it listens. With `caller_of` a connection whose caller it does not know is
        reset."""
        target_host, _, number = target.rpartition(":")
        path = Path(self._loop, (target_host, int(number)), caller_of)
        opening = asyncio.run_coroutine_threadsafe(path.open(port, host), self._loop)
        opening.result(START_TIMEOUT_S)
        self.paths.append(path)
        return path

    def __enter__(self) -> Proxies:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for path in self.paths:
            await path.close()
        # Not cancelled but waited for: asyncio's servers report a cancelled handler as an error.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=START_TIMEOUT_S / 2)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """One accepted connection and the one made for it. Invariant: what came in at one end before
    its end comes out at the other before the other's end."""

    def __init__(
        self, near: Ends, far: Ends, there: Way, back: Way, caller: int | None = None
    ) -> None:
        self.caller = caller
        self._writers = (near[1], far[1])
        self._tasks: list[asyncio.Task[None]] = []
        self._moving = asyncio.Event()
        self._moving.set()
        self._flows = (
            _Flow(near[0], far[1], there, self._moving),
            _Flow(far[0], near[1], back, self._moving),
        )
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a delay of its own else

    def hold(self, frozen: bool) -> None:
        if frozen:
            self._moving.clear()
        else:
            self._moving.set()

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            _reset(writer)

    async def carry(self) -> None:
        """Until both ends have ended, or one is gone for good: then so is the other."""
        work = [one for flow in self._flows for one in (flow.take(), flow.give())]
        self._tasks = [asyncio.create_task(one) for one in work]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class _Flow:
    """Bytes one way: read, wait, write."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    way: Way
    moving: asyncio.Event
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    size: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.way.full_s(loop.time()))
            chunk = await self.reader.read(CHUNK_BYTES)
            async with self.changed:
                while self.size > IN_FLIGHT_BYTES:
                    await self.changed.wait()
                self.waiting.append((self.way.due(len(chunk), loop.time()), chunk))
                self.size += len(chunk)
                self.changed.notify_all()
            if not chunk:
                return

    async def give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self.changed:
                while not self.waiting:
                    await self.changed.wait()
                due, chunk = self.waiting.popleft()
                self.size -= len(chunk)
                self.changed.notify_all()
            wait_s = due - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self.moving.wait()
            if not chunk:
                with contextlib.suppress(OSError):
                    self.writer.write_eof()
                return
            self.writer.write(chunk)
            await self.writer.drain()
            self.way.passed += len(chunk)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST: the other side learns at once, and that it was no orderly end."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
