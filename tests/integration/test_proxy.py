"""The proxy itself: what it delays, limits and breaks, on plain sockets. One rule: a delay is
measured from below, because a loaded machine may always be later."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moshpitd.testing import proxy
from moshpitd.testing.proxy import Path, Proxies
from tests.kit.fake_daemon import until

DELAY_S = 0.05
SOON_S = 10.0  # for what has to come
NEVER_S = 0.3  # for what must not come


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets, and ends a connection when its other side does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(raw: socket.socket) -> None:
        with raw:
            try:
                while chunk := raw.recv(1 << 16):
                    raw.sendall(chunk)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(raw,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(SOON_S)


@pytest.fixture
def path(echo: int) -> Iterator[Path]:
    with Proxies() as proxies:
        yield proxies.to(f"127.0.0.1:{echo}")


def dial(path: Path) -> socket.socket:
    return socket.create_connection(("127.0.0.1", path.port), timeout=SOON_S)


def receive(raw: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count and (chunk := raw.recv(count - len(got))):
        got += chunk
    return bytes(got)


def test_everything_arrives_unchanged_and_in_order(path: Path) -> None:
    sent = bytes(i * 7 % 251 for i in range(3_000_000))
    with dial(path) as raw:
        threading.Thread(target=raw.sendall, args=(sent,), daemon=True).start()
        assert receive(raw, len(sent)) == sent
    # A way counts a piece after it has handed it on, so the last one may not be counted yet.
    until(lambda: path.back.passed >= len(sent), timeout_s=SOON_S, what="all is counted")
    assert (path.there.passed, path.back.passed) == (len(sent), len(sent))


def test_each_way_has_its_own_delay(path: Path) -> None:
    with dial(path) as raw:
        for there, back in ((DELAY_S, DELAY_S), (DELAY_S, 0.0), (0.0, 2 * DELAY_S)):
            path.there.delay_s, path.back.delay_s = there, back
            began = time.monotonic()
            raw.sendall(b"x")
            assert receive(raw, 1) == b"x"
            assert time.monotonic() - began >= there + back - 0.002


def test_a_delay_is_not_a_queue(path: Path) -> None:
    """Forty messages under way at once take one delay, not forty: the bound is half of forty."""
    path.slow(DELAY_S)
    with dial(path) as raw:
        began = time.monotonic()
        for _ in range(40):
            raw.sendall(b"x" * 1000)
            time.sleep(0.001)
        assert len(receive(raw, 40_000)) == 40_000
        assert time.monotonic() - began < 20 * DELAY_S


def test_a_rate_is_shared_by_all_connections(path: Path) -> None:
    path.there.bytes_per_s = 1e6
    with dial(path) as one, dial(path) as other:
        began = time.monotonic()
        for raw in (one, other):
            threading.Thread(target=raw.sendall, args=(bytes(150_000),), daemon=True).start()
        assert len(receive(one, 150_000)) + len(receive(other, 150_000)) == 300_000
        assert time.monotonic() - began >= 0.3 - 0.002


def test_an_end_goes_through_and_what_follows_it_back_too(path: Path) -> None:
    path.slow(DELAY_S)
    with dial(path) as raw:
        raw.sendall(b"last words")
        raw.shutdown(socket.SHUT_WR)
        assert receive(raw, 100) == b"last words"


def test_frozen_is_silence_without_an_end(path: Path) -> None:
    with dial(path) as raw:
        raw.sendall(b"before")
        assert receive(raw, 6) == b"before"
        path.freeze()
        raw.sendall(b"during")
        raw.settimeout(NEVER_S)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        with dial(path) as late:
            late.sendall(b"nobody answers")
            late.settimeout(NEVER_S)
            with pytest.raises(TimeoutError):
                late.recv(1)
            assert path.connections == 2
            path.thaw()
            for one, words in ((raw, b"during"), (late, b"nobody answers")):
                one.settimeout(SOON_S)
                assert receive(one, len(words)) == words


def test_a_cut_is_a_reset_and_the_next_connection_works(path: Path) -> None:
    with dial(path) as raw:
        raw.sendall(b"x")
        assert receive(raw, 1) == b"x"
        path.cut()
        with pytest.raises(ConnectionResetError):
            raw.recv(1)
    with dial(path) as raw:
        raw.sendall(b"y")
        assert receive(raw, 1) == b"y"


def test_refused_connections_are_reset_and_standing_ones_live(path: Path) -> None:
    with dial(path) as raw:
        raw.sendall(b"x")
        assert receive(raw, 1) == b"x"
        path.refuse()
        # The reset may be here before the dial has returned.
        with pytest.raises(ConnectionResetError), dial(path) as refused:
            refused.recv(1)
        raw.sendall(b"y")
        assert receive(raw, 1) == b"y"
        path.refuse(False)
        with dial(path) as again:
            again.sendall(b"z")
            assert receive(again, 1) == b"z"


def test_a_target_that_does_not_listen_resets() -> None:
    with Proxies() as proxies, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        path = proxies.to(f"127.0.0.1:{port}")
        with pytest.raises(ConnectionResetError), dial(path) as raw:
            raw.recv(1)


def test_what_is_on_its_way_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen path takes what fits into kernels and its own bound, then the sender waits."""
    monkeypatch.setattr(proxy, "IN_FLIGHT_BYTES", 1 << 20)
    with dial(path) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        path.freeze()
        raw.settimeout(NEVER_S)
        with pytest.raises(TimeoutError):
            raw.sendall(bytes(64 << 20))
