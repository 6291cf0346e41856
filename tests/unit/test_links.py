"""Real sockets on the loopback: nothing short, damaged or foreign is ever delivered, nothing is
lost in silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p.security.tls.certificate import create_cert_template

from moshpitd.errors import (
    ConfigError,
    LocalProtocolError,
    Oversized,
    RemoteProtocolError,
    Unreachable,
)
from moshpitd.net.channel import Channel
from moshpitd.net.frames import SEGMENT_BYTES, WIRE_VERSION, FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkLimits
from moshpitd.net.outbox import PayloadFunction
from moshpitd.net.tls import (
    UNSENT_BYTES,
    Credentials,
    listen,
    parse_address,
    probe,
    proven_peer_id,
    tune,
)
from tests.kit.link_sides import LIMITS, PATIENCE_S, Side, constant


@dataclass
class Net:
    """`small` and `large` by PeerID, and a `third` key without a pool."""

    small: Side
    large: Side
    third: Identity


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    made = [Identity.load_or_create(folder / name) for name in "abc"]
    return sorted(made, key=lambda identity: identity.peer_id)


@pytest.fixture
def net(identities: list[Identity]) -> Iterator[Net]:
    made = Net(Side(identities[0]), Side(identities[1]), identities[2])
    yield made
    for side in (made.small, made.large):
        side.gate.set()
        side.pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("link-")]


def raw_channel(net: Net, *, greet: bool = True) -> Channel:
    """A link to `large` made by hand with the third identity, to send what no pool would send."""
    proven = Credentials(net.third).connect(net.large.address, expected=net.large.id, timeout_s=5)
    channel = Channel(proven.stream, payload_bytes_max=1 << 20)
    if greet:
        channel.send_text(Header(FrameKind.HELLO, run=b"sessionX"), net.large.id)
        received = channel.receive(5.0)
        assert received is not None
        assert received[0].kind is FrameKind.HELLO
    return channel


def send_raw(channel: Channel, content: bytes) -> None:
    channel.stream.write((memoryview(content),), 5.0)


# -- the healthy way ------------------------------------------------------------------------------


def test_frames_travel_both_ways_whole(net: Net) -> None:
    net.small.link(net.large)
    header = Header(
        FrameKind.RESULT, b"run-hash", b"group-id-16bytes", part=7, epoch=3, codec=2, flags=1,
        contributors=2**63 | 1,
    )  # fmt: skip
    net.small.pool.send(net.large.id, header, constant(b"x" * 1_000_000))
    net.large.send(net.small, b"back")
    net.large.wait(lambda: net.large.frames)
    net.small.wait(lambda: net.small.frames)
    peer_id, arrived, payload = net.large.frames[0]
    assert (peer_id, payload) == (net.small.id, b"x" * 1_000_000)
    assert (arrived.run, arrived.group, arrived.part, arrived.epoch) == (
        header.run, header.group, 7, 3,
    )  # fmt: skip
    assert (arrived.codec, arrived.flags, arrived.contributors) == (2, 1, 2**63 | 1)
    assert net.small.payloads() == [b"back"]
    [stats] = net.small.pool.stats()
    assert stats.dialled
    assert stats.bytes_out > 1_000_000


def test_payload_is_made_in_the_scratch_memory_right_before_sending(net: Net) -> None:
    made_in: list[str] = []

    def fill(scratch: memoryview) -> memoryview:
        made_in.append(threading.current_thread().name)
        scratch[:5] = b"later"
        return scratch[:5]

    net.small.pool.expect(net.large.id)
    net.small.pool.send(net.large.id, Header(FrameKind.SNAPSHOT), fill)
    assert not made_in
    net.large.dial(net.small).result(PATIENCE_S)
    net.large.wait(lambda: net.large.frames)
    assert net.large.payloads() == [b"later"]
    assert made_in[0].startswith("link-write")


def test_lower_priorities_go_first(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    started, go = threading.Event(), threading.Event()

    def hold(scratch: memoryview) -> bytes:
        started.set()
        go.wait(PATIENCE_S)
        return b"first"

    net.small.pool.send(net.large.id, Header(FrameKind.RESULT), hold)
    started.wait(PATIENCE_S)
    for priority, content in ((5, b"late"), (1, b"a"), (1, b"b"), (0, b"now")):
        net.small.send(net.large, content, priority=priority)
    go.set()
    net.large.wait(lambda: len(net.large.frames) == 5)
    assert net.large.payloads() == [b"first", b"now", b"a", b"b", b"late"]


def test_a_blocked_reader_stops_the_sender(net: Net) -> None:
    encoded: list[int] = []
    block = bytes(1 << 20)

    def encode(number: int) -> PayloadFunction:
        def make(scratch: memoryview) -> bytes:
            encoded.append(number)
            return block

        return make

    net.large.gate.clear()
    net.small.dial(net.large).result(PATIENCE_S)
    for number in range(90):
        header = Header(FrameKind.CONTRIBUTION, part=number)
        net.small.pool.send(net.large.id, header, encode(number))
    deadline, before = time.monotonic() + PATIENCE_S, -1
    while len(encoded) != before and time.monotonic() < deadline:
        before = len(encoded)
        threading.Event().wait(0.2)
    # The kernel's buffers are full (some MB); the rest was not even encoded.
    assert 0 < before < 60
    [stats] = net.small.pool.stats()
    assert stats.waiting_frames >= 30
    net.large.gate.set()
    net.large.wait(lambda: len(net.large.frames) == 90)
    assert [header.part for _, header, _ in net.large.frames] == list(range(90))


def test_ping_measures_a_round_trip(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    net.small.pool.ping(net.large.id)
    deadline = time.monotonic() + PATIENCE_S
    while net.small.pool.stats()[0].rtt_s is None and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    rtt_s = net.small.pool.stats()[0].rtt_s
    assert rtt_s is not None
    assert 0 < rtt_s < 1


def test_discard_forgets_one_group_only(net: Net) -> None:
    net.small.pool.expect(net.large.id)
    for group in (b"A" * 16, b"B" * 16, b"A" * 16):
        header = Header(FrameKind.RESULT, group=group)
        net.small.pool.send(net.large.id, header, constant(group))
    assert net.small.pool.discard(b"A" * 16) == 2
    net.large.dial(net.small).result(PATIENCE_S)
    net.large.wait(lambda: net.large.frames)
    assert net.large.payloads() == [b"B" * 16]


@pytest.mark.parametrize("attempt", range(10))
def test_two_dials_that_cross_end_in_one_link_without_loss(net: Net, attempt: int) -> None:
    for side, other in ((net.small, net.large), (net.large, net.small)):
        side.pool.expect(other.id)
        for number in range(40):
            side.send(other, b"%d" % number * 2000, part=number)
    dials = [net.small.dial(net.large), net.large.dial(net.small)]
    for dial in dials:
        dial.result(PATIENCE_S)
    for side, other in ((net.small, net.large), (net.large, net.small)):
        for number in range(40, 60):
            side.send(other, b"%d" % number * 2000, part=number)
    for side in (net.small, net.large):
        side.wait(lambda side=side: len(side.frames) == 60)  # type: ignore[misc]
        assert sorted(header.part for _, header, _ in side.frames) == list(range(60))
        assert side.names() == ["up"]
        assert len(side.pool.stats()) == 1


# -- who may link ---------------------------------------------------------------------------------


def test_wrong_peer_id_at_the_address_is_refused_by_the_dialler(net: Net) -> None:
    dial = net.small.pool.dial(net.third.peer_id, [net.large.address])
    with pytest.raises(Unreachable, match=f"wrong PeerID: {net.large.id}"):
        dial.result(PATIENCE_S)
    assert not net.small.events
    assert not net.large.events


def test_wrong_peer_id_in_the_greeting_is_refused_by_the_listener(net: Net) -> None:
    channel = raw_channel(net, greet=False)
    channel.send_text(Header(FrameKind.HELLO), net.small.id)
    received = channel.receive(5.0)
    assert received is not None
    assert received[0].kind is FrameKind.FAREWELL
    assert bytes(received[1]).startswith(b"wrong PeerID")
    channel.abandon()
    assert not net.large.events


def test_a_banned_peer_is_refused_and_told(net: Net) -> None:
    net.large.banned.add(net.small.id)
    with pytest.raises(Unreachable, match="refused there: banned"):
        net.small.dial(net.large).result(PATIENCE_S)
    assert not net.large.events


def test_oneself_is_not_dialled(net: Net) -> None:
    with pytest.raises(Unreachable, match="itself"):
        net.small.dial(net.small).result(PATIENCE_S)


def client_context(certificate: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_a_client_without_certificate_gets_no_link(net: Net) -> None:
    with (
        socket.create_connection(("127.0.0.1", net.large.pool.port), timeout=5) as raw,
        client_context(False).wrap_socket(raw) as secured,
    ):
        assert ended(secured)
    assert not net.large.events


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except OSError:
        return True


def self_signed(folder: Path) -> tuple[bytes, Path]:
    """A certificate like libp2p's, but without the proof of an identity."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = create_cert_template().public_key(key.public_key()).sign(key, hashes.SHA256())
    path = folder / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    assert isinstance(made, x509.Certificate)
    return made.public_bytes(serialization.Encoding.DER), path


def test_a_certificate_that_proves_nothing_gets_no_link(net: Net, tmp_path: Path) -> None:
    der, path = self_signed(tmp_path)
    with pytest.raises(RemoteProtocolError, match="proves no PeerID"):
        proven_peer_id(der)
    context = client_context(True)
    context.load_cert_chain(path)
    with (
        socket.create_connection(("127.0.0.1", net.large.pool.port), timeout=5) as raw,
        context.wrap_socket(raw) as secured,
    ):
        assert ended(secured)
    assert not net.large.events


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(600)])
def test_a_stranger_that_speaks_no_tls_is_cut_off(net: Net, content: bytes) -> None:
    with socket.create_connection(("127.0.0.1", net.large.pool.port), timeout=5) as raw:
        raw.sendall(content)
        while not ended(raw):
            pass
    assert not net.large.events
    net.small.dial(net.large).result(PATIENCE_S)


def test_probe_says_who_is_there_and_leaves_nothing(net: Net) -> None:
    credentials = Credentials(net.third)
    peer_id, certificate = probe(credentials, net.large.address)
    assert peer_id == net.large.id
    assert probe(credentials, net.large.address)[1] == certificate
    assert not net.large.events


def test_dead_addresses_are_named_with_their_causes(net: Net) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        closed = listen("127.0.0.1", 0)
        refusing = closed.getsockname()[1]
        closed.close()
        limits = LinkLimits(dial_timeout_s=0.3)
        side = Side(net.third, limits)
        dial = side.pool.dial(
            net.large.id, [f"127.0.0.1:{refusing}", f"127.0.0.1:{silent.getsockname()[1]}", "x:0"]
        )
        with pytest.raises(Unreachable) as caught:
            dial.result(PATIENCE_S)
        side.pool.close()
    text = str(caught.value)
    assert f"{refusing}: refused" in text
    assert "no TLS handshake within 0.3 s" in text
    assert "'x:0' is no address" in text


# -- how links end --------------------------------------------------------------------------------

CUT_PAYLOAD = Header(FrameKind.CONTRIBUTION).pack(length=1000, crc=0) + bytes(999)
BAD_FRAMES = {
    "inside a frame header (10 of 52": Header(FrameKind.CONTRIBUTION).pack(length=9, crc=0)[:10],
    "inside a payload (999 of 1000": CUT_PAYLOAD,
    "crc32": Header(FrameKind.CONTRIBUTION).pack(length=3, crc=1) + b"abc",
    "announces 4294967295 bytes": Header(FrameKind.CONTRIBUTION).pack(length=2**32 - 1, crc=0),
    "version 9": b"\x09" + Header(FrameKind.CONTRIBUTION).pack(length=0, crc=0)[1:],
    "unknown kind 200": bytes([WIRE_VERSION, 200])
    + Header(FrameKind.CONTRIBUTION).pack(length=0, crc=0)[2:],
    "HELLO in the middle": Header(FrameKind.HELLO).pack(length=0, crc=0),
    "without a farewell": b"",
}


@pytest.mark.parametrize("reason", BAD_FRAMES)
def test_a_bad_frame_ends_the_link_and_is_never_delivered(net: Net, reason: str) -> None:
    channel = raw_channel(net)
    channel.send(Header(FrameKind.CONTRIBUTION, part=1), b"good")
    send_raw(channel, BAD_FRAMES[reason])
    if "inside" in reason or "without" in reason:
        channel.abandon()
    net.large.wait(net.large.lost)
    assert reason in net.large.lost()[0]
    assert net.large.payloads() == [b"good"]
    assert net.large.pool.stats() == []
    channel.abandon()


def test_a_frame_that_the_user_refuses_ends_the_link(net: Net) -> None:
    net.large.frame_error = RemoteProtocolError("unknown group")
    net.small.dial(net.large).result(PATIENCE_S)
    net.small.send(net.large, b"?")
    net.large.wait(net.large.lost)
    net.small.wait(net.small.lost)
    assert net.large.lost() == ["unknown group"]


def test_a_payload_that_cannot_be_made_costs_one_frame(net: Net) -> None:
    def broken(scratch: memoryview) -> bytes:
        raise ValueError("codec")

    net.small.dial(net.large).result(PATIENCE_S)
    net.small.pool.send(net.large.id, Header(FrameKind.RESULT, part=1), broken)
    net.small.pool.send(net.large.id, Header(FrameKind.RESULT, part=2), constant(bytes(2 << 20)))
    net.small.send(net.large, b"fine")
    net.large.wait(lambda: net.large.frames)
    assert net.large.payloads() == [b"fine"]
    assert [header.part for header, _ in net.small.failed] == [1, 2]
    assert isinstance(net.small.failed[0][1], ValueError)
    assert isinstance(net.small.failed[1][1], Oversized)
    assert net.small.names() == ["up"]


def test_too_many_waiting_frames_are_refused(net: Net) -> None:
    net.small.pool.expect(net.large.id)
    for _ in range(LIMITS.queue_frames_max):
        net.small.send(net.large, b"")
    with pytest.raises(LocalProtocolError, match="at most 100"):
        net.small.send(net.large, b"")


def test_a_peer_never_dialled_is_unreachable(net: Net) -> None:
    with pytest.raises(Unreachable, match="no link"):
        net.small.send(net.large, b"")


def test_drop_tells_the_other_side_only(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    net.large.wait(lambda: net.large.events)
    net.small.pool.drop(net.large.id)
    net.large.wait(net.large.lost)
    assert not net.small.lost()
    assert not net.small.pool.is_up(net.large.id)
    with pytest.raises(Unreachable):
        net.small.send(net.large, b"")
    net.small.dial(net.large).result(PATIENCE_S)
    net.large.wait(lambda: net.large.names() == ["up", "lost", "up"])


def test_a_restarted_peer_replaces_its_old_link_and_the_loss_is_told(net: Net) -> None:
    """The old process vanished with its host: this side has heard nothing of it when the new one
    dials.
    """
    ghost = raw_channel(net)
    net.large.wait(lambda: net.large.names() == ["up"])
    again = Side(net.third)
    again.dial(net.large).result(PATIENCE_S)
    net.large.wait(lambda: net.large.names() == ["up", "lost", "up"])
    assert net.large.lost() == ["replaced by a newer link"]
    again.send(net.large, b"new")
    net.large.wait(lambda: net.large.frames)
    assert net.large.payloads() == [b"new"]
    again.pool.close()
    ghost.abandon()


def test_closing_says_farewell(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    net.large.wait(lambda: net.large.events)
    net.small.pool.close()
    net.large.wait(net.large.lost)
    assert net.large.lost() == ["the other side ended the link: closing"]
    with pytest.raises(Unreachable, match="closed"):
        net.small.dial(net.large).result(PATIENCE_S)


def test_a_full_pool_admits_only_whom_it_expects(identities: list[Identity]) -> None:
    full = Side(identities[0], LinkLimits(links_max=1, payload_bytes_max=1 << 20))
    one, two = Side(identities[1]), Side(identities[2])
    one.dial(full).result(PATIENCE_S)
    with pytest.raises(Unreachable, match="1 links are in use"):
        two.dial(full).result(PATIENCE_S)
    full.pool.expect(two.id)
    two.dial(full).result(PATIENCE_S)
    for side in (full, one, two):
        side.pool.close()


# -- addresses
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:9", ("::1", 9)),
        ("host.example:1", ("host.example", 1)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "h:0", "h:65536", "h:-1", "h:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(Unreachable):
        parse_address(text)


def test_a_port_in_use_is_a_config_error(net: Net) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{net.small.pool.port}"):
        listen("127.0.0.1", net.small.pool.port)


def test_the_kernel_takes_no_more_ahead_than_urgent_frames_may_wait_for() -> None:
    """Nobody reads: what was sent lies at the other end, and the rest is bounded here."""
    with listen("127.0.0.1", 0) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            tune(near)
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(SEGMENT_BYTES))
            answer = fcntl.ioctl(near, SIOCOUTQNSD, bytes(4))
            unsent = int.from_bytes(answer, sys.byteorder)
            # One buffer of the kernel's more than the bound: it is asked before each.
            assert unsent <= UNSENT_BYTES + (64 << 10)


SIOCOUTQNSD = 0x894B  # linux/sockios.h: bytes that were not sent yet
