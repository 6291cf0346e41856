"""Messages as bytes: one version byte, then msgpack arrays in the order of the dataclasses' fields.

One rule: bytes from outside become a message whose every field has been checked against its type
and its bounds, or a `RemoteProtocolError`; nothing else leaves `decode`. The schema is the
dataclasses of core/messages.py themselves: there is no second description that could disagree.

Checked here is the form (types, finite floats, lengths). What a value means, the receiver decides.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import msgpack

from moshpitd.core.messages import MESSAGES, Message
from moshpitd.errors import InternalError, LocalProtocolError, Oversized, RemoteProtocolError

WIRE_VERSION = 1
# hivemind's unary calls carry about 2 MiB; half of that leaves room for everything around it.
MESSAGE_BYTES_MAX = 1 << 20
# Bounds where a field's metadata names none ("max").
TEXT_MAX = 256
BYTES_MAX = 64 * 1024
TUPLE_MAX = 4096
INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # what msgpack can carry

T = TypeVar("T")
# Takes a value and the name of its place; returns it in the other form or raises _Misfit.
_Convert: TypeAlias = Callable[[Any, str], Any]


class _Misfit(Exception):
    """A value does not fit its type; becomes a local or a remote error depending on whose it is."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and the run that it belongs to."""

    run: str
    message: Message


def encode(run: str, message: Message) -> bytes:
    """The bytes of a message. Raises LocalProtocolError if a field does not fit, Oversized over 1
    MiB.
    """
    kind = _KINDS.get(type(message))
    if kind is None:
        raise LocalProtocolError(f"{type(message).__name__} is not one of core's messages")
    try:
        _text(run, "run")
    except _Misfit as misfit:
        raise LocalProtocolError(str(misfit)) from None
    return _to_bytes([run, kind, _fields_out(message)], type(message).__name__)


def decode(data: bytes, *, peer: str = "") -> Envelope:
    """The message in bytes from `peer`, or RemoteProtocolError saying what is wrong where."""
    try:
        outer = _from_bytes(data)
        if len(outer) != 3:
            raise _Misfit(f"an envelope of {len(outer)} items, expected 3")
        run, kind, fields = outer
        _text(run, "run")
        if type(kind) is not int or not 0 <= kind < len(MESSAGES):
            raise _Misfit(f"unknown kind of message {str(kind)[:20]}")
        message: Message = _schema(MESSAGES[kind]).read(fields, MESSAGES[kind].__name__)
    except _Misfit as misfit:
        raise RemoteProtocolError(str(misfit), peer=peer) from None
    return Envelope(run, message)


def pack(value: Any) -> bytes:
    """The bytes of one dataclass outside of an envelope, such as a directory record."""
    return _to_bytes(_fields_out(value), type(value).__name__)


def unpack(kind: type[T], data: bytes, *, peer: str = "") -> T:
    """What `pack` made of a `kind`, checked like a message."""
    try:
        value = _schema(kind).read(_from_bytes(data), kind.__name__)
    except _Misfit as misfit:
        raise RemoteProtocolError(str(misfit), peer=peer) from None
    return typing.cast(T, value)


_KINDS: dict[type, int] = {kind: number for number, kind in enumerate(MESSAGES)}


def _fields_out(value: Any) -> list[Any]:
    try:
        written: list[Any] = _schema(type(value)).write(value, type(value).__name__)
    except _Misfit as misfit:
        raise LocalProtocolError(str(misfit)) from None
    return written


def _to_bytes(items: list[Any], name: str) -> bytes:
    try:
        data: bytes = bytes([WIRE_VERSION]) + msgpack.packb(items, use_bin_type=True)
    except (ValueError, TypeError) as error:
        raise LocalProtocolError(f"{name} cannot be encoded: {error}") from None
    if len(data) > MESSAGE_BYTES_MAX:
        raise Oversized(f"{name} takes {len(data)} bytes, at most {MESSAGE_BYTES_MAX} may be sent")
    return data


def _from_bytes(data: bytes) -> list[Any]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise _Misfit(f"{len(data)} bytes, at most {MESSAGE_BYTES_MAX} are allowed")
    if not data or data[0] != WIRE_VERSION:
        found = data[0] if data else "none"
        raise _Misfit(f"wire version {found}, expected {WIRE_VERSION}")
    try:
        # msgpack bounds lengths by what is there, and nesting; a claim of 4 Gi items costs nothing.
        items = msgpack.unpackb(memoryview(data)[1:], raw=False, use_list=True, strict_map_key=True)
    # A parser on bytes from outside: ValueError and its kin, TypeError, OverflowError,
    # RecursionError.
    except Exception as error:
        raise _Misfit(f"no msgpack: {str(error)[:80]}") from None
    if type(items) is not list:
        raise _Misfit("no array of fields")
    return items


# -- schemas from type hints -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Schema:
    """How values of one type are written and read."""

    write: _Convert
    read: _Convert


_SCHEMAS: dict[type, _Schema] = {}


def _schema(kind: type) -> _Schema:
    """The schema of a dataclass, made from its type hints once."""
    if kind not in _SCHEMAS:
        if not dataclasses.is_dataclass(kind):
            raise LocalProtocolError(f"{kind.__name__} is no dataclass, so it has no wire form")
        _SCHEMAS[kind] = _of_dataclass(kind)
    return _SCHEMAS[kind]


def _of_dataclass(kind: type) -> _Schema:
    """An array with exactly the fields of the dataclass."""
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    names = tuple(one.name for one in dataclasses.fields(kind))
    parts = tuple(_of_hint(hints[one.name], one.metadata) for one in dataclasses.fields(kind))

    def write(value: Any, where: str) -> list[Any]:
        if not _is_exactly(value, kind):
            raise _Misfit(f"{where}: {_name(value)}, expected {kind.__name__}")
        return [
            part.write(getattr(value, name), f"{where}.{name}")
            for name, part in zip(names, parts, strict=True)
        ]

    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(parts):
            count = f"{len(value)} fields" if type(value) is list else _name(value)
            raise _Misfit(f"{where}: {count}, expected {len(parts)} fields")
        items = [
            part.read(item, f"{where}.{name}")
            for name, part, item in zip(names, parts, value, strict=True)
        ]
        try:
            return kind(*items)
        except ValueError as error:
            raise _Misfit(f"{where}: {error}") from None

    return _Schema(write, read)


def _of_hint(hint: Any, metadata: Mapping[str, Any]) -> _Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [one for one in arguments if one is not types.NoneType]
        if len(inner) == 1 and len(arguments) == 2:
            return _optional(_of_hint(inner[0], metadata))
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_of_hint(arguments[0], {}), metadata.get("max", TUPLE_MAX))
    elif origin is tuple:
        return _fixed(tuple(_of_hint(one, {}) for one in arguments))
    elif hint in _PLAIN:
        return _PLAIN[hint](metadata)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return _enumeration(hint)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _schema(hint)
    raise InternalError(f"no wire form for a field of type {hint}")


def _optional(inner: _Schema) -> _Schema:
    return _Schema(
        lambda value, where: None if value is None else inner.write(value, where),
        lambda value, where: None if value is None else inner.read(value, where),
    )


def _sequence(inner: _Schema, most: int) -> _Schema:
    def convert(value: Any, where: str, kind: type, each: _Convert) -> list[Any]:
        if not _is_exactly(value, kind):
            raise _Misfit(f"{where}: {_name(value)}, expected a sequence")
        if len(value) > most:
            raise _Misfit(f"{where}: {len(value)} items, at most {most}")
        return [each(item, f"{where}[{index}]") for index, item in enumerate(value)]

    return _Schema(
        lambda value, where: convert(value, where, tuple, inner.write),
        lambda value, where: tuple(convert(value, where, list, inner.read)),
    )


def _fixed(inner: tuple[_Schema, ...]) -> _Schema:
    def check(value: Any, where: str, kind: type) -> None:
        if not _is_exactly(value, kind) or len(value) != len(inner):
            raise _Misfit(f"{where}: {_name(value)}, expected {len(inner)} items")

    def write(value: Any, where: str) -> list[Any]:
        check(value, where, tuple)
        return [one.write(item, where) for one, item in zip(inner, value, strict=True)]

    def read(value: Any, where: str) -> tuple[Any, ...]:
        check(value, where, list)
        return tuple(one.read(item, where) for one, item in zip(inner, value, strict=True))

    return _Schema(write, read)


def _enumeration(kind: type[Enum]) -> _Schema:
    plain = type(next(iter(kind)).value)

    def write(value: Any, where: str) -> Any:
        if not _is_exactly(value, kind):
            raise _Misfit(f"{where}: {_name(value)}, expected {kind.__name__}")
        return plain(value.value)

    def read(value: Any, where: str) -> Enum:
        try:
            if type(value) is not plain:
                raise ValueError
            return kind(value)
        except ValueError:
            raise _Misfit(f"{where}: {str(value)[:40]!r} is no {kind.__name__}") from None

    return _Schema(write, read)


def _text(value: Any, where: str, most: int = TEXT_MAX) -> str:
    if type(value) is not str:
        raise _Misfit(f"{where}: {_name(value)}, expected str")
    if len(value) > most:
        raise _Misfit(f"{where}: {len(value)} characters, at most {most}")
    return value


def _plain_text(metadata: Mapping[str, Any]) -> _Schema:
    most = metadata.get("max", TEXT_MAX)

    def check(value: Any, where: str) -> str:
        return _text(value, where, most)

    return _Schema(check, check)


def _plain_bytes(metadata: Mapping[str, Any]) -> _Schema:
    most = metadata.get("max", BYTES_MAX)

    def check(value: Any, where: str) -> bytes:
        if type(value) is not bytes:
            raise _Misfit(f"{where}: {_name(value)}, expected bytes")
        if len(value) > most:
            raise _Misfit(f"{where}: {len(value)} bytes, at most {most}")
        return value

    return _Schema(check, check)


def _plain_int(metadata: Mapping[str, Any]) -> _Schema:
    most = metadata.get("max", INT_MAX)

    def check(value: Any, where: str) -> int:
        # type(), not isinstance: True is an int to isinstance, and no count.
        if type(value) is not int:
            raise _Misfit(f"{where}: {_name(value)}, expected int")
        if not INT_MIN <= value <= most:
            raise _Misfit(f"{where}: {value} is out of range")
        return value

    return _Schema(check, check)


def _plain_float(metadata: Mapping[str, Any]) -> _Schema:
    def read(value: Any, where: str) -> float:
        if type(value) is not float:
            raise _Misfit(f"{where}: {_name(value)}, expected float")
        if not math.isfinite(value):
            raise _Misfit(f"{where}: {value} is not finite")
        return value

    def write(value: Any, where: str) -> float:
        # Python lets a whole number stand for a float; on the wire it is always written as one.
        try:
            return read(float(value) if type(value) is int else value, where)
        except OverflowError:
            raise _Misfit(f"{where}: too large for a float") from None

    return _Schema(write, read)


def _plain_bool(metadata: Mapping[str, Any]) -> _Schema:
    def check(value: Any, where: str) -> bool:
        if type(value) is not bool:
            raise _Misfit(f"{where}: {_name(value)}, expected bool")
        return value

    return _Schema(check, check)


_PLAIN: dict[Any, Callable[[Mapping[str, Any]], _Schema]] = {
    str: _plain_text,
    bytes: _plain_bytes,
    int: _plain_int,
    float: _plain_float,
    bool: _plain_bool,
}


def _is_exactly(value: Any, kind: type) -> bool:
    return type(value) is kind


def _name(value: Any) -> str:
    return type(value).__name__


# A field without a wire form is a mistake in core/messages.py; better found at import than in a
# round.
for _kind in MESSAGES:
    _schema(_kind)
