"""Both ways to TLS: Python's own OpenSSL, and the one that comes with cryptography.

One rule: the two speak to each other over a real pair of sockets, in every combination, because
peers need not have the same Python. What one of them cannot do, the other may not need.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from moshpitd.errors import LinkBroken, RemoteProtocolError
from moshpitd.net import openssl
from moshpitd.net.channel import Channel
from moshpitd.net.frames import SEGMENT_BYTES, FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.streams import PlainStream, TlsStream
from moshpitd.net.tls import Credentials, Proven, proven_peer_id

TIMEOUT_S = 30.0
PAYLOAD = random.Random(1).randbytes(3_000_001)

pytestmark = pytest.mark.skipif(openssl.SSL is None, reason="pyOpenSSL is not as expected")
WAYS = pytest.mark.parametrize(
    ("dials", "listens"), [(True, True), (True, False), (False, True)], ids=str
)


@contextmanager
def linked(folder: Path, dials: bool, listens: bool) -> Iterator[tuple[Proven, Proven]]:
    """Two ends that shook hands: (dialler's, listener's). True: cryptography's OpenSSL."""
    ours, theirs = socket.socketpair()
    pool = ThreadPoolExecutor(1)
    try:
        credentials = [
            of_identity(Identity.load_or_create(folder / name), faster)
            for name, faster in (("a", dials), ("b", listens))
        ]
        coming = pool.submit(credentials[1].accept, theirs, timeout_s=TIMEOUT_S)
        proven = credentials[0]._handshake(ours, server_side=False, timeout_s=TIMEOUT_S)
        yield proven, coming.result(TIMEOUT_S)
    finally:
        ours.close()
        theirs.close()
        pool.shutdown()


def of_identity(identity: Identity, faster: bool) -> Credentials:
    credentials = Credentials(identity)
    credentials._faster = credentials._made_faster() if faster else None
    return credentials


@pytest.fixture(autouse=True)
def unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moshpitd.net.tls.tune", lambda raw: None)  # options of TCP


def sent(stream: TlsStream | PlainStream, payload: bytes) -> None:
    view = memoryview(payload)
    for start in range(0, len(view), 262_144):
        stream.write((memoryview(b"!"), view[start : start + 262_144]))


def received(
    stream: TlsStream | PlainStream, count: int, patience_s: float | None = TIMEOUT_S
) -> bytes:
    whole, mark = bytearray(), memoryview(bytearray(1))
    room = memoryview(bytearray(262_144))
    while len(whole) < count:
        assert stream.read_into(mark, patience_s) == 1
        assert mark == b"!"
        piece = room[: min(262_144, count - len(whole))]
        assert stream.read_into(piece, patience_s) == len(piece)
        whole += piece
    return bytes(whole)


def both_ways(
    one: TlsStream | PlainStream,
    other: TlsStream | PlainStream,
    patience_s: float | None = TIMEOUT_S,
) -> None:
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(sent, one, PAYLOAD), pool.submit(sent, other, PAYLOAD)]
        there = pool.submit(received, other, len(PAYLOAD), patience_s)
        assert received(one, len(PAYLOAD), patience_s) == PAYLOAD
        assert there.result(TIMEOUT_S) == PAYLOAD
        for task in tasks:
            task.result(TIMEOUT_S)


@WAYS
def test_bytes_go_both_ways_at_once_and_both_ends_are_proven(
    dials: bool, listens: bool, tmp_path: Path
) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener):
        for proven, other in ((dialler, "b"), (listener, "a")):
            assert proven.peer_id == Identity.load_or_create(tmp_path / other).peer_id
            assert proven_peer_id(proven.certificate) == proven.peer_id
        assert dialler.stream.cipher == listener.stream.cipher != ""
        assert isinstance(dialler.stream._tls, openssl.Conversation) == dials
        both_ways(dialler.stream, listener.stream)


@WAYS
def test_without_a_bound_segments_are_moved_by_compiled_code_and_counted(
    dials: bool, listens: bool, tmp_path: Path
) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener):
        before = listener.stream.wire.bytes_heard
        assert before == dialler.stream.wire.bytes_handed > 0  # the handshake
        both_ways(dialler.stream, listener.stream, None)
        for proven, other in ((dialler, listener), (listener, dialler)):
            assert proven.stream.wire.bytes_heard == other.stream.wire.bytes_handed
            assert proven.stream.wire.bytes_heard > before + len(PAYLOAD)
        both_ways(dialler.stream, listener.stream)  # the two may take turns


@WAYS
@pytest.mark.parametrize("shut", ["here", "there"])
def test_whoever_waits_without_a_bound_is_let_go_when_the_socket_is_shut(
    dials: bool, listens: bool, shut: str, tmp_path: Path
) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener), ThreadPoolExecutor(2) as pool:
        dialler.stream.write((memoryview(b"abc"),))
        reading = pool.submit(listener.stream.read_into, memoryview(bytearray(5)))
        while listener.stream.wire.bytes_heard < dialler.stream.wire.bytes_handed:
            assert not reading.done()
        (listener if shut == "here" else dialler).stream.wire.shut()
        assert reading.result(TIMEOUT_S) == 3
        with pytest.raises(LinkBroken, match=r"(?i)pipe"):
            (listener if shut == "here" else dialler).stream.write((memoryview(b"x"),))


def test_records_are_read_one_by_one_where_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssl, "COMPILED", False)
    with linked(tmp_path, True, True) as (dialler, listener):
        both_ways(dialler.stream, listener.stream)


@WAYS
def test_the_plain_stream_begins_where_tls_ends(dials: bool, listens: bool, tmp_path: Path) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener), ThreadPoolExecutor(1) as pool:
        pool.submit(sent, dialler.stream, b"last").result(TIMEOUT_S)
        assert received(listener.stream, 4) == b"last"
        stripping = pool.submit(dialler.stream.strip, TIMEOUT_S)
        plain = listener.stream.strip(TIMEOUT_S)
        both_ways(plain, stripping.result(TIMEOUT_S))
        both_ways(plain, stripping.result(TIMEOUT_S), None)


@WAYS
@pytest.mark.parametrize("patience_s", [None, TIMEOUT_S])
def test_a_changed_byte_ends_the_stream(
    dials: bool, listens: bool, patience_s: float | None, tmp_path: Path
) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener):
        dialler.stream.write((memoryview(b"whole"),))
        room = memoryview(bytearray(5))
        assert listener.stream.read_into(room, TIMEOUT_S) == 5
        dialler.stream._tls.write(memoryview(b"broken"))
        sealed = bytearray(dialler.stream._outgoing.read())
        sealed[-1] ^= 1
        dialler.stream.wire.send((memoryview(sealed),), TIMEOUT_S)
        with pytest.raises(LinkBroken):
            listener.stream.read_into(room, patience_s)


@pytest.mark.parametrize("patience_s", [None, TIMEOUT_S])
def test_both_directions_say_why_a_stream_is_over(
    patience_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL says it to one thread only, and the other one may be the first to end the link."""
    with linked(tmp_path, True, True) as (dialler, listener), ThreadPoolExecutor(1) as pool:
        with dialler.stream._lock:
            dialler.stream._tls.write(memoryview(b"changed"))
        sealed = bytearray(dialler.stream._outgoing.read())
        sealed[-1] ^= 1
        dialler.stream.wire.send((memoryview(sealed),), TIMEOUT_S)
        conversation = listener.stream._tls
        assert isinstance(conversation, openssl.Conversation)
        refusal = conversation._refusal
        writing: list[Future[None]] = []

        def write() -> None:
            listener.stream.write((memoryview(b"x"),), patience_s)

        def refused(why: int) -> ssl.SSLError:
            if not writing:  # it waits until the reader knows what to say
                writing.append(pool.submit(write))
                time.sleep(0.1)
                assert not writing[0].done()
            return refusal(why)

        monkeypatch.setattr(conversation, "_refusal", refused)
        with pytest.raises(LinkBroken, match="bad record mac"):
            listener.stream.read_into(memoryview(bytearray(5)), patience_s)
        with pytest.raises(LinkBroken, match="bad record mac"):
            writing[0].result(TIMEOUT_S)
        for again_s in (None, TIMEOUT_S):
            with pytest.raises(LinkBroken, match="bad record mac"):
                listener.stream.write((memoryview(b"x"),), again_s)
            with pytest.raises(LinkBroken, match="bad record mac"):
                listener.stream.read_into(memoryview(bytearray(5)), again_s)


@WAYS
def test_the_end_of_the_socket_is_an_end_and_no_frame(
    dials: bool, listens: bool, tmp_path: Path
) -> None:
    with linked(tmp_path, dials, listens) as (dialler, listener):
        dialler.stream.write((memoryview(b"abc"),))
        dialler.stream.wire.shut()
        room = memoryview(bytearray(5))
        assert listener.stream.read_into(room, TIMEOUT_S) == 3


@pytest.mark.parametrize("faster", [True, False], ids=str)
def test_who_has_no_certificate_or_speaks_no_tls_is_refused(faster: bool, tmp_path: Path) -> None:
    credentials = of_identity(Identity.load_or_create(tmp_path / "a"), faster)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE

    def shake(raw: socket.socket) -> None:
        with nobody.wrap_socket(raw) as secured:
            secured.recv(1)

    for strangers in (shake, lambda raw: raw.sendall(b"GET / HTTP/1.1\r\n\r\n")):
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=_quietly, args=(strangers, theirs))
        thread.start()
        with pytest.raises(RemoteProtocolError, match=r"certificate|handshake"):
            credentials.accept(ours, timeout_s=TIMEOUT_S)
        thread.join()
        theirs.close()


@pytest.mark.parametrize("faster", [True, False], ids=str)
def test_a_certificate_that_no_parser_takes_proves_nobody(faster: bool, tmp_path: Path) -> None:
    """Version 8: OpenSSL lets it pass, cryptography raises something of its own."""
    credentials = of_identity(Identity.load_or_create(tmp_path / "a"), faster)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, begin, begin.replace(2050))
    sealed = bytearray(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER))
    sealed[sealed.index(b"\xa0\x03\x02\x01\x02") + 4] = 7
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    (tmp_path / "pem").write_text(ssl.DER_cert_to_PEM_cert(bytes(sealed)) + pem)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    stranger.load_cert_chain(tmp_path / "pem")
    with ThreadPoolExecutor(1) as pool:
        ours, theirs = socket.socketpair()
        theirs.settimeout(TIMEOUT_S)
        pool.submit(_quietly, lambda raw: stranger.wrap_socket(raw).recv(1), theirs)
        with pytest.raises(RemoteProtocolError, match="version"):
            credentials.accept(ours, timeout_s=TIMEOUT_S)
        assert ours.fileno() == -1


def test_who_comes_back_with_a_session_shakes_hands_anew(tmp_path: Path) -> None:
    listener = of_identity(Identity.load_or_create(tmp_path / "a"), True)
    dialler = of_identity(Identity.load_or_create(tmp_path / "b"), False)
    session: ssl.SSLSession | None = None
    for _ in range(2):
        ours, theirs = socket.socketpair()
        theirs.settimeout(TIMEOUT_S)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(listener.accept, ours, timeout_s=TIMEOUT_S)
            with dialler.client_context.wrap_socket(theirs, session=session) as secured:
                proven = coming.result(TIMEOUT_S)
                proven.stream.write((memoryview(b"x"),))
                assert secured.recv(1) == b"x"
                assert not secured.session_reused
                session = secured.session
            assert proven.peer_id == dialler.peer_id
        ours.close()


@pytest.mark.skipif(not openssl.COMPILED, reason="moshpitd._native is not built")
def test_buffers_that_do_not_fit_are_refused_before_anything_is_moved(tmp_path: Path) -> None:
    native: Any = vars(openssl)["_native"]
    count, room = bytearray(8), memoryview(bytearray(8))
    with linked(tmp_path, True, True) as (dialler, _):
        conversation = dialler.stream._tls
        assert isinstance(conversation, openssl.Conversation)
        wire = dialler.stream.wire.descriptor
        with pytest.raises(ValueError, match="8 aligned bytes"):
            conversation.receive(wire, room, room, bytearray(7))
        with pytest.raises(ValueError, match="no bytes"):
            conversation.receive(wire, room, room[:0], count)
        with pytest.raises(TypeError, match="read-write"):
            conversation.receive(wire, memoryview(b"read only"), room, count)
        with pytest.raises(ValueError, match="8 aligned bytes"):
            native.receive_segments(None, wire, room, 0, 8, room, bytearray(9))
        with pytest.raises(ValueError, match="nine addresses"):
            native.conversation(1, 2, 3, 4, 5, 6, 7, 8, 0)
        assert dialler.stream.wire.bytes_handed > 0 == int.from_bytes(count, "little")


def test_an_error_that_others_left_behind_is_not_this_links(tmp_path: Path) -> None:
    with linked(tmp_path, True, True) as (dialler, listener):
        openssl._lib.ERR_put_error(openssl._lib.ERR_LIB_EVP, 0, 1, openssl._ffi.NULL, 0)
        assert dialler.stream._tls.read(memoryview(bytearray(5))) == (0, True)
        assert openssl._lib.ERR_peek_error() == 0
        both_ways(dialler.stream, listener.stream)


def _quietly(strangers: Callable[[socket.socket], None], raw: socket.socket) -> None:
    with suppress(OSError):
        strangers(raw)


@WAYS
def test_a_payload_of_many_segments_goes_both_ways_with_words_between_them(
    dials: bool, listens: bool, tmp_path: Path
) -> None:
    payload = PAYLOAD * (1 + 3 * SEGMENT_BYTES // len(PAYLOAD))
    with (
        linked(tmp_path, dials, listens) as (dialler, listener),
        ThreadPoolExecutor(2) as pool,
    ):
        ends = [
            Channel(proven.stream, payload_bytes_max=2 * len(payload))
            for proven in (dialler, listener)
        ]
        words = [iter([Header(FrameKind.PING, contributors=number)]) for number in (1, 2)]
        heard: list[int] = []
        tasks = [
            pool.submit(
                end.send, Header(FrameKind.RESULT), payload, aside=partial(next, word, None)
            )
            for end, word in zip(ends, words, strict=True)
        ]
        there = [
            end.receive(aside=lambda header: heard.append(header.contributors)) for end in ends
        ]
        for task, received in zip(tasks, there, strict=True):
            task.result(TIMEOUT_S)
            assert received is not None
            assert received[1] == payload
        assert sorted(heard) == [1, 2]
