"""The HTTP side of a node: /metrics, /healthz, /readyz and a status page.

One rule: read-only. Nothing here changes the daemon, and what it shows comes from three callables,
so that a test needs no node.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from moshpitd.daemon.logs import log_event
from moshpitd.daemon.metrics import CONTENT_TYPE
from moshpitd.daemon.page import render
from moshpitd.errors import ConfigError

log = logging.getLogger(__name__)

Ready = Callable[[], tuple[bool, Sequence[str]]]
View = Callable[[], Mapping[str, Any]]

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # The page has no script, no image and no form; whatever a peer's words contain, none can start.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
}


class HttpServer:
    """Serves one node.

    `metrics()` gives the text of /metrics, `ready()` (ready, sentences), `view()` the fields of
    StatusReply with `peers` and `rounds` beside them, as plain values.
    """

    def __init__(
        self, *, host: str, port: int, metrics: Callable[[], bytes], ready: Ready, view: View
    ) -> None:
        self._host, self._wanted_port = host, port
        self._metrics, self._ready, self._view = metrics, ready, view
        self._runner: web.AppRunner | None = None
        self.port = port
        """The port in use; differs from the wanted one only if that was 0, which means any."""

    async def start(self) -> None:
        """Raises `ConfigError` when the address cannot be had."""
        app = web.Application(middlewares=[_guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._wanted_port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            # asyncio wraps the reason in a sentence of its own and sometimes keeps no errno.
            in_use = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"{self._host}:{self._wanted_port}: {'port in use' if in_use else error}",
                key="http.port" if in_use else "http.host",
                expected="a free port, or 0 for no HTTP"
                if in_use
                else "an address of this machine",
            ) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Safe to call twice, and before `start`."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics_text(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, _request: web.Request) -> web.Response:
        # The loop that would hang is the one that answers.
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, sentences = self._ready()
        text = "\n".join(("ready" if ready else "not ready", *sentences)) + "\n"
        return web.Response(text=text, status=200 if ready else 503)

    async def _page(self, _request: web.Request) -> web.Response:
        ready, sentences = self._ready()
        html = render(self._view(), ready=ready, sentences=sentences)
        return web.Response(text=html, content_type="text/html", charset="utf-8")


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A view that fails is one 500 and one line in the log, without a traceback for the browser."""
    try:
        response = await handler(request)
    except web.HTTPException as answer:
        response = answer
    except Exception:
        log_event(log, logging.ERROR, "page failed", path=request.path)
        log.exception("traceback of %s", request.path)
        response = web.Response(text="this page failed; the log says why\n", status=500)
    response.headers.update(_HEADERS)
    if isinstance(response, web.HTTPException):
        raise response
    return response
