"""Any 52 bytes are a header or a RemoteProtocolError, and a header survives its bytes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.errors import LocalProtocolError, RemoteProtocolError
from moshpitd.net.frames import HEADER_BYTES, FrameKind, Header

LIMIT = 1 << 20

headers = st.builds(
    Header,
    kind=st.sampled_from(FrameKind),
    run=st.binary(min_size=8, max_size=8),
    group=st.binary(min_size=16, max_size=16),
    part=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**16 - 1),
    codec=st.integers(0, 255),
    flags=st.integers(0, 255),
    contributors=st.integers(0, 2**64 - 1),
    length=st.integers(0, LIMIT),
    crc=st.integers(0, 2**32 - 1),
    checked=st.just(True),
) | st.builds(Header, kind=st.sampled_from(FrameKind), crc=st.just(0), checked=st.just(False))


def packed(header: Header) -> bytes:
    return header.pack(length=header.length, crc=header.crc if header.checked else None)


@given(headers)
def test_round_trip(header: Header) -> None:
    raw = packed(header)
    assert len(raw) == HEADER_BYTES
    assert Header.unpack(raw, payload_bytes_max=LIMIT) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_a_remote_error(raw: bytes) -> None:
    try:
        header = Header.unpack(raw, payload_bytes_max=LIMIT)
    except RemoteProtocolError:
        return
    assert header.length <= LIMIT
    assert packed(header) == raw


@given(headers, st.integers(0, 7 * 8 - 1))
def test_damage_in_the_first_bytes_is_seen_or_changes_the_value(header: Header, bit: int) -> None:
    raw = bytearray(packed(header))
    raw[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(RemoteProtocolError):
        assert Header.unpack(raw, payload_bytes_max=LIMIT) != header


def test_four_gibibytes_are_refused_by_the_header_alone() -> None:
    raw = Header(FrameKind.RESULT).pack(length=2**32 - 1, crc=0)
    with pytest.raises(RemoteProtocolError, match="4294967295 bytes"):
        Header.unpack(raw, payload_bytes_max=LIMIT)


@pytest.mark.parametrize(
    "header",
    [
        Header(FrameKind.RESULT, run=b"short"),
        Header(FrameKind.RESULT, group=b""),
        Header(FrameKind.RESULT, part=-1),
        Header(FrameKind.RESULT, epoch=65536),
        Header(FrameKind.RESULT, contributors=2**64),
    ],
)
def test_our_own_mistakes_are_local_errors(header: Header) -> None:
    with pytest.raises(LocalProtocolError):
        header.pack(length=0, crc=0)
