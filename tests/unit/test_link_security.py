"""links.security: what leaves TLS after the proof of both PeerIDs, and who refuses whom."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from moshpitd.errors import Unreachable
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkLimits, LinkOptions, Security
from tests.kit.link_sides import LIMITS, PATIENCE_S, Side

SECRET = b"the values of a part " * 2000
PLAIN = LinkOptions(security=Security.AUTHENTICATED)
TLS = LinkOptions()


class Relay:
    """A stranger on the path: hands bytes on, writes them down, changes what `alter` names."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.alter: bytes | None = None
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._socks += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while chunk := source.recv(1 << 16):
                self.seen += chunk
                if self.alter is not None and self.alter in chunk:
                    chunk = chunk.replace(self.alter, self.alter.upper(), 1)
                sink.sendall(chunk)
        except OSError:
            pass
        for sock in (source, sink):
            hang_up(sock)

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            hang_up(sock)


def hang_up(sock: socket.socket) -> None:
    """close() alone says nothing while another thread reads the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@pytest.fixture
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / name) for name in "ab"]


@pytest.fixture
def sides(keys: list[Identity], request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    pair = tuple(
        Side(key, LIMITS, options) for key, options in zip(keys, request.param, strict=True)
    )
    yield pair  # type: ignore[misc]
    for side in pair:
        side.pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("link-")]


@pytest.fixture
def relay(sides: tuple[Side, Side]) -> Iterator[Relay]:
    made = Relay(sides[1].pool.port)
    yield made
    made.close()


def linked(sides: tuple[Side, Side], relay: Relay) -> None:
    here, there = sides
    here.pool.dial(there.id, [relay.address]).result(PATIENCE_S)
    there.wait(lambda: there.events)
    here.send(there, SECRET)


@pytest.mark.parametrize("sides", [(PLAIN, PLAIN), (TLS, TLS)], indirect=True)
def test_only_authenticated_links_can_be_read_on_the_way(
    sides: tuple[Side, Side], relay: Relay
) -> None:
    linked(sides, relay)
    sides[1].send(sides[0], SECRET)
    for side in sides:
        side.wait(lambda side=side: side.frames)  # type: ignore[misc]
        assert side.payloads() == [SECRET]
    sealed = sides[0].pool.options.security is Security.TLS
    assert (SECRET in bytes(relay.seen)) is not sealed
    assert [side.pool.stats()[0].sealed for side in sides] == [sealed, sealed]


@pytest.mark.parametrize("sides", [(PLAIN, PLAIN)], indirect=True)
def test_an_accident_on_an_authenticated_link_is_found_by_the_crc(
    sides: tuple[Side, Side], relay: Relay
) -> None:
    relay.alter = b"values"
    linked(sides, relay)
    sides[1].wait(sides[1].lost)
    assert "crc32" in sides[1].lost()[0]
    assert not sides[1].frames


@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize("sides", [(PLAIN, PLAIN)], indirect=True)
def test_frames_right_behind_the_end_of_tls_are_not_lost(
    sides: tuple[Side, Side], attempt: int
) -> None:
    """They may arrive together with the closing alert, in one read."""
    here, there = sides
    for side, other in ((here, there), (there, here)):
        side.pool.expect(other.id)
        for part in range(20):
            side.send(other, b"%d" % part * 50, part=part)
    here.dial(there).result(PATIENCE_S)
    for side in sides:
        side.wait(lambda side=side: len(side.frames) == 20)  # type: ignore[misc]
        assert side.payloads() == [b"%d" % part * 50 for part in range(20)]


@pytest.mark.parametrize("sides", [(TLS, PLAIN), (PLAIN, TLS)], indirect=True)
def test_another_setting_is_refused_in_words_on_both_sides(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = sides
    words = [
        f"links.security is {there.pool.options.security.word} at {there.id}",
        f"{here.pool.options.security.word} at {here.id}",
    ]
    for _ in range(2):
        with pytest.raises(Unreachable) as caught:
            here.dial(there).result(PATIENCE_S)
        assert all(word in str(caught.value) for word in words)
    for side, other in ((here, there), (there, here)):
        assert all(word in side.pool.misfits()[other.id] for word in words)
        assert not side.events
    assert len(caplog.records) == 2, "each side says it once, however often it is tried"


def test_a_misfit_is_forgotten_when_the_operators_agree(keys: list[Identity]) -> None:
    here, there = Side(keys[0], LIMITS, TLS), Side(keys[1], LIMITS, PLAIN)
    with pytest.raises(Unreachable):
        here.dial(there).result(PATIENCE_S)
    there.pool.close()
    again = Side(keys[1], LinkLimits(), TLS)
    here.dial(again).result(PATIENCE_S)
    assert not here.pool.misfits()
    for side in (here, again):
        side.pool.close()
