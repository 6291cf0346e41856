"""Every message of the core survives its bytes, and any bytes are a message or a
RemoteProtocolError.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.core.messages import MESSAGES, Goodbye, Hello, Lineage, Message, Record, Without
from moshpitd.core.outcome import Reason
from moshpitd.errors import InternalError, LocalProtocolError, Oversized, RemoteProtocolError
from moshpitd.net import wire


def strategy_of(hint: Any, metadata: typing.Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a type hint, within small bounds (the exact bounds have tests of their own)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy_of(one, metadata) for one in arguments])
    if origin is tuple:
        return st.lists(strategy_of(arguments[0], {}), max_size=3).map(tuple)
    if hint is types.NoneType:
        return st.none()
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return messages_of(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
    }
    return plain[hint]


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {
        one.name: strategy_of(hints[one.name], one.metadata) for one in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


RECORD = Record(
    peer_id="12D3", sequence=3, schema=b"s" * 16, version=7, lineage=Lineage("12D3", b"d" * 16)
)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data(), run=st.text(max_size=256))
def test_round_trip(kind: type, data: st.DataObject, run: str) -> None:
    message: Message = data.draw(messages_of(kind))
    envelope = wire.decode(wire.encode(run, message))
    assert envelope == wire.Envelope(run, message)
    assert type(envelope.message) is kind


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(bytes([wire.WIRE_VERSION]) + data)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)  # fmt: skip


@given(st.integers(-1, len(MESSAGES)), json_like)
def test_any_msgpack(kind: int, fields: Any) -> None:
    body = msgpack.packb(["run", kind, fields])
    decodes_or_is_refused(bytes([wire.WIRE_VERSION]) + body)


@given(data=st.data())
def test_a_message_with_one_byte_changed(data: st.DataObject) -> None:
    message = data.draw(st.one_of([messages_of(kind) for kind in MESSAGES]))
    encoded = bytearray(wire.encode("run", message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(encoded))
    decodes_or_is_refused(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def decodes_or_is_refused(data: bytes) -> None:
    try:
        envelope = wire.decode(data, peer="12D3")
    except RemoteProtocolError:
        return
    # What was let in is a proper value: it can be sent on.
    wire.encode(envelope.run, envelope.message)


def fields_of(message: Any) -> list[Any]:
    outer = msgpack.unpackb(wire.encode("run", message)[1:])
    return typing.cast(list[Any], outer[2])


def decode_fields(kind: type, fields: Any) -> Any:
    body = msgpack.packb(["run", MESSAGES.index(kind), fields])
    return wire.decode(bytes([wire.WIRE_VERSION]) + body).message


def record_with(**changes: Any) -> list[Any]:
    names = [one.name for one in dataclasses.fields(Record)]
    fields = fields_of(Hello(RECORD))
    for name, value in changes.items():
        fields[0][names.index(name)] = value
    return fields


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": True}, "record.version: bool, expected int"),
        ({"version": 1.0}, "record.version: float, expected int"),
        ({"up_mbps": 5}, "up_mbps: int, expected float"),
        ({"up_mbps": math.nan}, "up_mbps: nan is not finite"),
        ({"down_mbps": math.inf}, "down_mbps: inf is not finite"),
        ({"schema": "text"}, "schema: str, expected bytes"),
        ({"schema": bytes(65537)}, "schema: 65537 bytes, at most 65536"),
        ({"peer_id": b"12D3"}, "peer_id: bytes, expected str"),
        ({"peer_id": "x" * 257}, "peer_id: 257 characters, at most 256"),
        ({"schema_text": "x" * 4097}, "at most 4096"),
        ({"coordinates": [0] * 9}, "coordinates: 9 items, at most 8"),
        ({"coordinates": 5}, "coordinates: int, expected a sequence"),
        ({"coordinates": ["0"]}, "coordinates[0]: str, expected int"),
        ({"has_snapshot": 1}, "has_snapshot: int, expected bool"),
        ({"lineage": ["12D3"]}, "lineage: 1 fields, expected 2"),
        ({"lineage": None}, "lineage: NoneType"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_form_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_fields(Hello, record_with(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["no such reason", 3, None, ["draining"], {"a": 1}])
def test_an_unknown_word_of_an_enumeration(value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="is no Reason"):
        decode_fields(Goodbye, [value, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "wire version none"),
        (b"\x02\x93", "wire version 2, expected 1"),
        (b"\x01", "no msgpack"),
        (b"\x01\xc0", "no array"),
        (b"\x01" + msgpack.packb([]), "envelope of 0 items"),
        (b"\x01" + msgpack.packb(["r", 999, []]), "unknown kind of message 999"),
        (b"\x01" + msgpack.packb(["r", True, []]), "unknown kind"),
        (b"\x01" + msgpack.packb([5, 0, []]), "run: int"),
        (b"\x01" + msgpack.packb(["r", 0, []]) + b"\x00", "no msgpack"),
        (b"\x01\xdd\xff\xff\xff\xff", "no msgpack"),
        (b"\x01" + b"\x91" * 100_000, "no msgpack"),
        (b"\x01" + b"\x81\x90\x00", "no msgpack"),
        (bytes(wire.MESSAGE_BYTES_MAX + 1), "1048577 bytes, at most 1048576"),
    ],
)
def test_what_is_no_envelope(data: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode(data)
    assert words in str(caught.value)


def test_our_own_mistakes_are_local() -> None:
    with pytest.raises(LocalProtocolError, match="surrogates"):  # a str, but no text
        wire.encode("\ud800", Goodbye(Reason.DRAINING))
    with pytest.raises(LocalProtocolError, match="version: str"):
        wire.encode("run", Hello(dataclasses.replace(RECORD, version=typing.cast(int, "7"))))
    with pytest.raises(LocalProtocolError, match="not finite"):
        wire.encode("run", Hello(dataclasses.replace(RECORD, up_mbps=math.nan)))
    with pytest.raises(LocalProtocolError, match="run"):
        wire.encode("x" * 257, Goodbye(Reason.DRAINING))
    with pytest.raises(LocalProtocolError, match="not one of"):
        wire.encode("run", typing.cast(Message, RECORD))
    with pytest.raises(LocalProtocolError, match="out of range"):
        wire.encode("run", Without(b"g", Reason.DRAINING, (2**64,)))


def test_a_whole_number_in_a_float_field_is_written_as_a_float() -> None:
    record = dataclasses.replace(RECORD, up_mbps=5)
    message = wire.decode(wire.encode("run", Hello(record))).message
    assert isinstance(message, Hello)
    assert type(message.record.up_mbps) is float


def test_the_total_is_bounded_both_ways() -> None:
    assert len(wire.encode("run", Without(b"g", Reason.DRAINING, tuple(range(65536))))) < 1 << 18
    with pytest.raises(Oversized, match="at most 1048576"):
        wire.pack(Pair(tuple([bytes(65_000)] * 17), Colour.RED))


class Colour(IntEnum):
    RED = 1
    GREEN = 2


@dataclass(frozen=True, slots=True)
class Pair:
    blocks: tuple[bytes, ...] = field(metadata={"max": 20})
    colour: Colour
    point: tuple[int, str] = (0, "")
    small: int = field(default=0, metadata={"max": 9})

    def __post_init__(self) -> None:
        if self.small < 0:
            raise ValueError("small is negative")


@dataclass(frozen=True, slots=True)
class Formless:
    table: dict[str, int]


def test_dataclasses_outside_of_the_messages() -> None:
    pair = Pair((b"a",), Colour.GREEN, (1, "x"), 9)
    assert wire.unpack(Pair, wire.pack(pair)) == pair
    assert wire.unpack(Record, wire.pack(RECORD)) == RECORD
    for fields, words in (
        ([[b"a"], 3, [1, "x"], 0], "no Colour"),
        ([[b"a"], True, [1, "x"], 0], "no Colour"),
        ([[b"a"], 1, [1], 0], "expected 2 items"),
        ([[b"a"], 1, [1, "x"], 10], "10 is out of range"),
        ([[b"a"], 1, [1, "x"], -1], "small is negative"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            wire.unpack(Pair, b"\x01" + msgpack.packb(fields))
    with pytest.raises(InternalError, match="no wire form"):
        wire.pack(Formless({}))
