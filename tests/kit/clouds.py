"""Metadata servers of the three clouds, as aiohttp servers on loopback.

Each answers as its cloud documents it, until the test makes it ill: `broken` is a list of moods,
one per request: a status (503), "hang", or "reset". One rule: they check what a client must send,
and refuse what the real ones refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from email.utils import formatdate
from types import TracebackType
from typing import Any

from aiohttp import web

Mood = int | str


class Cloud:
    """The common part. `asked` has every path that was asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: list[Mood] = []
        self.clock_ahead_s = 0.0  # of the server's own clock, which its Date header shows
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._hanging = asyncio.Event()

    async def __aenter__(self) -> Any:
        app = web.Application(middlewares=[self._moody])
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hanging.set()
        assert self._runner is not None
        await self._runner.cleanup()

    def recover(self) -> None:
        """Be well from now on; what hangs is answered."""
        self.broken = []
        self._hanging.set()

    @web.middleware
    async def _moody(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        mood = self.broken.pop(0) if self.broken else None
        if mood == "hang":
            await self._hanging.wait()
        if mood == "reset":
            assert request.transport is not None
            request.transport.abort()
        if isinstance(mood, int):
            return web.Response(status=mood, text="ill")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        raise NotImplementedError

    def _dated(self, text: str = "", status: int = 200, **headers: str) -> web.Response:
        date = formatdate(time.time() + self.clock_ahead_s, usegmt=True)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(text=text, status=status, headers={"Date": date} | named)


class AwsMetadata(Cloud):
    """IMDSv2. `action` and `rebalance` are None (404) or the text of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.action: str | None = None
        self.rebalance: str | None = None
        self.tokens: list[str] = []

    def expire(self) -> None:
        """No token that was given out is valid any more."""
        self.tokens = ["nobody has this one", *[""] * len(self.tokens)]

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/latest/api/token":
            ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return self._dated("bad request", 400)
            if "X-Forwarded-For" in request.headers:
                return self._dated("forbidden", 403)
            self.tokens.append(f"token-{len(self.tokens)}")
            return self._dated(self.tokens[-1])
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens[-1:]:
            return self._dated("unauthorized", 401)
        texts = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }
        text = texts.get(request.path)
        return self._dated("not found", 404) if text is None else self._dated(text)


class GcpMetadata(Cloud):
    """The metadata server of Compute Engine. `preempt()` wakes whoever waits for a change."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted = False
        self.waited: list[str] = []  # the query of each question that waited
        self.flavored = True
        self._changed = asyncio.Event()

    def preempt(self) -> None:
        self.preempted = True
        self.wake()

    def wake(self) -> None:
        """Answer whoever waits, and nobody waits any more."""
        self._changed.set()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return self._dated("missing header", 403)
        flavor = {"Metadata_Flavor": "Google"} if self.flavored else {}
        if request.path == "/computeMetadata/v1/instance/id":
            return self._dated("4711", **flavor)
        if request.path != "/computeMetadata/v1/instance/preempted":
            return self._dated("not found", 404, **flavor)
        if request.query.get("wait_for_change") == "true":
            self.waited.append(request.query_string)
            if request.query.get("last_etag") == self._etag():
                timeout_s = float(request.query.get("timeout_sec", "60"))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), timeout_s)
        text = "TRUE" if self.preempted else "FALSE"
        return self._dated(text, ETag=self._etag(), **flavor)

    def _etag(self) -> str:
        return "e1" if self.preempted else "e0"


class AzureMetadata(Cloud):
    """The instance metadata service. `events` is the list of scheduled events."""

    def __init__(self, name: str = "node_3") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []

    def schedule(self, kind: str, not_before: str, *machines: str) -> None:
        self.events.append(
            {
                "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines or (self.name,)),
                "EventStatus": "Scheduled" if not_before else "Started",
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return self._dated("bad request", 400)
        if request.path == "/metadata/instance/compute/name":
            return self._dated(self.name)
        if request.path == "/metadata/scheduledevents":
            answer = {"DocumentIncarnation": len(self.events), "Events": self.events}
            return self._dated(json.dumps(answer))
        return self._dated("not found", 404)
