"""Frames over a pair of sockets: cut into segments, with round trips between them, checked where
nothing else vouches for the bytes.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Iterator
from itertools import count

import pytest

from moshpitd.errors import LinkBroken, RemoteProtocolError
from moshpitd.net import sockets
from moshpitd.net.channel import Channel
from moshpitd.net.frames import ASIDE, HEADER_BYTES, MORE, SEGMENT_BYTES, FrameKind, Header
from moshpitd.net.sockets import Wire
from moshpitd.net.streams import PlainStream

LIMIT = 4 << 20
LARGE = bytes(range(256)) * (3 * SEGMENT_BYTES // 256) + b"tail"


class Sealed(PlainStream):
    """Says of itself what only TLS may say."""

    sealed = True


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    channels = (
        Channel(PlainStream(Wire(left)), payload_bytes_max=LIMIT),
        Channel(PlainStream(Wire(right)), payload_bytes_max=LIMIT),
    )
    yield channels
    for channel in channels:
        channel.abandon()


def in_background(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


@pytest.mark.parametrize(
    "size", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, len(LARGE)]
)
def test_a_payload_of_any_number_of_segments_arrives_whole(
    pair: tuple[Channel, Channel], size: int
) -> None:
    left, right = pair
    sending = in_background(lambda: left.send(Header(FrameKind.RESULT, part=5), LARGE[:size]))
    received = right.receive()
    sending.join()
    assert received is not None
    assert received[0].part == 5
    assert received[1] == LARGE[:size]
    assert left.bytes_out == right.bytes_in == HEADER_BYTES + size


def test_round_trips_go_between_the_segments_of_a_large_frame(
    pair: tuple[Channel, Channel],
) -> None:
    left, right = pair
    numbers = count(1)
    asides: list[int] = []

    def ping() -> Header | None:
        number = next(numbers)
        return Header(FrameKind.PING, contributors=number) if number in (1, 2, 4) else None

    sending = in_background(lambda: left.send(Header(FrameKind.RESULT), LARGE, aside=ping))
    received = right.receive(aside=lambda header: asides.append(header.contributors))
    sending.join()
    assert received is not None
    assert received[1] == LARGE
    assert asides == [1, 2, 4]
    assert left.bytes_out == right.bytes_in == len(LARGE) + 4 * HEADER_BYTES


def test_what_becomes_urgent_waits_for_one_segment(pair: tuple[Channel, Channel]) -> None:
    """The flag is what compiled code looks at: without it nobody is asked between two segments."""
    left, right = pair
    asked: list[int] = []
    asides: list[int] = []
    urgent = bytearray(1)

    def ping() -> Header | None:
        asked.append(len(asides))
        if not urgent[0]:
            return None
        urgent[0] = 0
        return Header(FrameKind.PING, contributors=7)

    def send() -> None:
        left.send(Header(FrameKind.RESULT, part=1), LARGE, aside=ping, urgent=urgent)
        urgent[0] = 1
        left.send(Header(FrameKind.RESULT, part=2), LARGE, aside=ping, urgent=urgent)

    sending = in_background(send)
    for part in (1, 2):
        received = right.receive(aside=lambda header: asides.append(header.contributors))
        assert received is not None
        assert received[0].part == part
        assert received[1] == LARGE
    sending.join()
    assert asides == [7]
    if sockets.COMPILED:
        assert len(asked) == 2  # the one that it had for us, and then there was no other


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (b"\x07", "byte 7 between two segments"),
        (ASIDE + Header(FrameKind.RESULT).pack(length=0, crc=0), "RESULT inside another frame"),
        (ASIDE + Header(FrameKind.PING).pack(length=9, crc=0), "9 bytes of payload"),
    ],
)
def test_nothing_else_may_stand_between_segments(
    pair: tuple[Channel, Channel], between: bytes, words: str
) -> None:
    left, right = pair
    head = Header(FrameKind.RESULT).pack(length=len(LARGE), crc=zlib.crc32(LARGE))
    start = head + LARGE[:SEGMENT_BYTES] + between
    in_background(lambda: left.stream.write((memoryview(start),)))
    with pytest.raises(RemoteProtocolError, match=words):
        right.receive(aside=lambda header: None)


@pytest.mark.parametrize("end", [b"", MORE, MORE + b"half", ASIDE, ASIDE + b"half a header"])
def test_an_end_between_or_inside_segments_is_never_a_frame(
    pair: tuple[Channel, Channel], end: bytes
) -> None:
    left, right = pair
    head = Header(FrameKind.RESULT).pack(length=len(LARGE), crc=zlib.crc32(LARGE))
    start = head + LARGE[:SEGMENT_BYTES] + end

    def send() -> None:
        left.stream.write((memoryview(start),))
        left.abandon()

    in_background(send)
    with pytest.raises(LinkBroken, match="ended inside"):
        right.receive(aside=lambda header: None)


# -- who vouches for the bytes --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.SNAPSHOT, FrameKind.RESULT])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_crc_is_there_unless_the_stream_seals_what_is_used_up_here(
    pair: tuple[Channel, Channel], kind: FrameKind, sealed: bool
) -> None:
    left, right = pair
    if sealed:
        for channel in pair:
            channel.stream = Sealed(channel.stream.wire)
    left.send(Header(kind), b"values")
    received = right.receive()
    assert received is not None
    checked = not sealed or kind is FrameKind.RESULT
    assert received[0].checked is checked
    assert received[0].crc == (zlib.crc32(b"values") if checked else 0)


@pytest.mark.parametrize(
    ("kind", "sealed"),
    [(FrameKind.CONTRIBUTION, False), (FrameKind.RESULT, True), (FrameKind.RESULT, False)],
)
def test_a_frame_without_a_crc_is_refused_where_nothing_else_vouches(
    pair: tuple[Channel, Channel], kind: FrameKind, sealed: bool
) -> None:
    left, right = pair
    if sealed:
        right.stream = Sealed(right.stream.wire)
    left.stream.write((memoryview(Header(kind).pack(length=3, crc=None) + b"abc"),))
    with pytest.raises(RemoteProtocolError, match=f"{kind.name} without a crc32"):
        right.receive()


def test_a_crc_that_the_caller_knows_is_not_computed_again(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(Header(FrameKind.RESULT, crc=zlib.crc32(b"values")), b"values")
    received = right.receive()
    assert received is not None
    left.send(Header(FrameKind.RESULT, crc=1), b"values")  # a mistake of the caller's, to see it
    with pytest.raises(RemoteProtocolError, match="its header says 0x00000001"):
        right.receive()


def test_what_came_ahead_of_the_plain_stream_is_read_first() -> None:
    left, right = socket.socketpair()
    stream = PlainStream(Wire(right), b"ahead ")
    left.sendall(b"and after")
    room = memoryview(bytearray(15))
    assert stream.read_into(room[:3]) == 3
    assert stream.read_into(room[3:]) == 12
    assert bytes(room) == b"ahead and after"
    left.close()
    assert stream.read_into(room) == 0
    stream.wire.close()
