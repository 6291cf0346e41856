"""The HTTP side over a real socket: /metrics, /healthz, /readyz, the page, and a port in use."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest

from moshpitd.daemon.http import HttpServer
from moshpitd.daemon.metrics import NodeMetrics
from moshpitd.errors import ConfigError


class Shown:
    """What a node would show; the test changes it."""

    def __init__(self) -> None:
        self.state: tuple[bool, Sequence[str]] = (True, ())
        self.view: dict[str, object] = {"peer_id": "12D3KooWMe"}
        self.metrics = NodeMetrics("0.1.0")

    def server(self, port: int = 0, host: str = "127.0.0.1") -> HttpServer:
        return HttpServer(
            host=host,
            port=port,
            metrics=self.metrics.render,
            ready=lambda: self.state,
            view=lambda: self.view,
        )


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
async def server(shown: Shown) -> AsyncIterator[HttpServer]:
    server = shown.server()
    await server.start()
    yield server
    await server.stop()


async def get(server: HttpServer, path: str) -> tuple[int, str, aiohttp.typedefs.LooseHeaders]:
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text(), response.headers


async def test_metrics(server: HttpServer, shown: Shown) -> None:
    shown.metrics.set_trainers("digits", 2)
    status, text, headers = await get(server, "/metrics")
    assert status == 200
    assert 'moshpit_trainers{run="digits"} 2.0' in text
    assert headers["Content-Type"].startswith("text/plain; version=")


async def test_health_and_readiness(server: HttpServer, shown: Shown) -> None:
    assert (await get(server, "/healthz"))[:2] == (200, "ok\n")
    assert (await get(server, "/readyz"))[:2] == (200, "ready\n")
    shown.state = (False, ("bootstrap /ip4/8.8.8.8/tcp/1: refused, trying again",))
    status, text, _ = await get(server, "/readyz")
    assert status == 503
    assert text == "not ready\nbootstrap /ip4/8.8.8.8/tcp/1: refused, trying again\n"
    assert (await get(server, "/healthz"))[0] == 200


async def test_the_page(server: HttpServer, shown: Shown) -> None:
    shown.state = (False, ("bootstrap a: timeout, trying again",))
    status, text, headers = await get(server, "/")
    assert status == 200
    assert "12D3KooWMe" in text
    assert "bootstrap a: timeout, trying again" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]


async def test_nothing_can_be_changed(server: HttpServer) -> None:
    for path in ("/", "/metrics", "/readyz"):
        url = f"http://127.0.0.1:{server.port}{path}"
        async with aiohttp.ClientSession() as session, session.post(url) as response:
            assert response.status == 405
    assert (await get(server, "/nothing"))[0] == 404


async def test_a_view_that_fails_is_one_500_and_the_server_goes_on(shown: Shown) -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("secret detail")

    server = HttpServer(
        host="127.0.0.1",
        port=0,
        metrics=shown.metrics.render,
        ready=lambda: shown.state,
        view=broken,
    )
    await server.start()
    try:
        status, text, _ = await get(server, "/")
        assert status == 500
        assert "secret" not in text
        assert (await get(server, "/healthz"))[0] == 200
    finally:
        await server.stop()


async def test_a_port_in_use_names_port_and_key(shown: Shown) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = shown.server(port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: port in use") as caught:
            await server.start()
        await server.stop()
    assert caught.value.key == "http.port"


async def test_an_address_that_is_not_ours(shown: Shown) -> None:
    with pytest.raises(ConfigError) as caught:
        await shown.server(host="8.8.8.8").start()
    assert caught.value.key == "http.host"


async def test_stop_twice_and_the_port_is_free_again(shown: Shown) -> None:
    server = shown.server()
    await server.start()
    port = server.port
    await server.stop()
    await server.stop()
    again = shown.server(port)
    await again.start()
    await again.stop()
