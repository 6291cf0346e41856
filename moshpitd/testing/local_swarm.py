"""A swarm of real daemons in this process, for tests and for trying things out.

    async with LocalSwarm(4) as swarm:
        session = await swarm.call(attach, "digits", model=model, socket=swarm.sockets[0])
        result = await swarm.call(session.average)

Real p2pd processes, a real DHT, TLS links on the loopback, gRPC on Unix sockets; only the process
border is missing. Client calls block, so `call` runs them in threads, off the loop of the nodes.

One rule: everything lives in one temporary directory, and leaving the block leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from moshpitd.daemon.node import Node
from moshpitd.daemon.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

TOGETHER_WITHIN_S = 30.0
CALLERS = 64
"""Blocking calls at once. asyncio's own pool has cores + 4 threads, and nine trainers that wait for
each other in six threads wait for ever."""
PLACE = Path("/tmp")
"""Short, because the path of a Unix socket may have 107 bytes."""
FAST = {"window_s": 2.0, "answer_timeout_s": 1.0}
"""A window for uneven trainers only costs time where all of them run on one machine."""


class LocalSwarm:
    """`count` nodes, bootstrapped at the first. `overrides` are settings by dotted key, in keyword
    form with two underscores: `averaging__max_group=3`.

    Invariant: `nodes[i]` is started or None; `sockets[i]` stays the same over its restarts.
    """

    def __init__(self, count: int, *, place: Path = PLACE, **overrides: Any) -> None:
        """Its folder lies in `place`."""
        self._count, self._place = count, place
        self._overrides = {key.replace("__", "."): value for key, value in overrides.items()}
        self.folder = Path()
        self.nodes: list[Node | None] = []
        self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="trainer")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call, such as those of the client library, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._callers, partial(function, *args, **kwargs))

    async def __aenter__(self) -> LocalSwarm:
        self.folder = Path(tempfile.mkdtemp(prefix="moshpit-", dir=self._place))
        try:
            for _ in range(self._count):
                await self.add()
            await self.together()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def sockets(self) -> list[Path]:
        """Of every node, the stopped ones too."""
        return [self.socket(index) for index in range(len(self.nodes))]

    def socket(self, index: int) -> Path:
        return self.folder / str(index) / "api.sock"

    def node(self, index: int) -> Node:
        """A running node."""
        node = self.nodes[index]
        if node is None:
            raise LookupError(f"node {index} is stopped")
        return node

    async def add(self, **overrides: Any) -> Node:
        """One more node; returns when it is started, which is before it has joined."""
        self.nodes.append(None)
        return await self.start(len(self.nodes) - 1, **overrides)

    async def start(self, index: int, **overrides: Any) -> Node:
        """Start (again) node `index`, with the identity it had."""
        own = {key.replace("__", "."): value for key, value in overrides.items()}
        node = Node(self.settings(index, own))
        await node.start()
        self.nodes[index] = node
        return node

    async def stop_node(self, index: int) -> None:
        """Stop one node in order; its folder stays."""
        node, self.nodes[index] = self.nodes[index], None
        if node is not None:
            await node.stop()

    def settings(self, index: int, own: dict[str, Any]) -> Settings:
        """What node `index` runs with."""
        home = self.folder / str(index)
        flags: dict[str, Any] = {
            "node.data_dir": str(home),
            "node.buffers_dir": str(home / "buffers"),
            "node.socket": str(self.socket(index)),
            "network.listen": ["/ip4/127.0.0.1/tcp/0"],
            "network.link_listen": "127.0.0.1:0",
            "network.bootstrap": self.bootstrap(but=index),
            "http.port": 0,
            "notices.provider": "none",  # a test says itself when a machine goes
        }
        flags |= {f"averaging.{key}": value for key, value in FAST.items()}
        return Settings.load(environ={}, flags=flags | self._overrides | own)

    def bootstrap(self, *, but: int) -> list[str]:
        """The address of the first running node other than `but`."""
        for index, node in enumerate(self.nodes):
            if node is not None and index != but:
                return node.status()["addresses"][:1]  # type: ignore[no-any-return]
        return []

    async def together(self, timeout_s: float = TOGETHER_WITHIN_S) -> None:
        """Wait until every running node has all the others in its routing table."""
        running = [node for node in self.nodes if node is not None]
        deadline = time.monotonic() + timeout_s
        while any(node.status()["swarm_peers"] < len(running) for node in running):
            if time.monotonic() > deadline:
                sizes = [node.status()["swarm_peers"] for node in running]
                raise TimeoutError(
                    f"not together within {timeout_s:g} s: the {len(running)} nodes see {sizes}"
                )
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop every node and remove the folder."""
        nodes = [node for node in self.nodes if node is not None]
        self.nodes = [None] * len(self.nodes)
        await asyncio.gather(*(node.stop() for node in nodes), return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self._callers.shutdown(wait=False)
