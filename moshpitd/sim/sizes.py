"""How much a Peer remembers, and says at once. One rule: it counts entries and believes none of
them, so that a bound is judged without the Peer's own account of itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from moshpitd.sim.faults import Options

CONTAINERS = (list, dict, set, deque, tuple)


def overgrown(peer: object, options: Options) -> tuple[str, int] | None:
    """(where, how many) of the first container in it that is larger than Params allow."""
    params = options.params
    limit = max(params.max_candidates, options.parts * params.max_group)
    seen: list[object] = []
    pending: list[tuple[tuple[Any, ...], object]] = [((type(peer).__name__,), peer)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, CONTAINERS):
            if len(value) > limit:
                return _spelled(path), len(value)
            inner = value.values() if isinstance(value, dict) else value
            pending += [((path, "[]"), one) for one in inner if _is_worth_it(one)]
        else:
            parts = [((path, name), it) for name, it in _parts(value) if _is_worth_it(it)]
            if parts and not any(value is other for other in seen):
                seen.append(value)
                pending += parts
    return None


def _spelled(path: tuple[Any, ...]) -> str:
    """(((Peer,), state), []) is Peer.state[]: put into words only where it is needed."""
    if len(path) == 1:
        return str(path[0])
    before, name = path
    return _spelled(before) + (name if name == "[]" else f".{name}")


_GROWS: dict[type, bool] = {}
_SLOTS: dict[type, tuple[str, ...]] = {}


def _is_worth_it(value: object) -> bool:
    """Containers, and objects of ours that change; what cannot change has been checked when it was
    received."""
    kind = type(value)
    known = _GROWS.get(kind)
    if known is None:
        made = getattr(kind, "__dataclass_params__", None)
        ours = kind.__module__.startswith("moshpitd.") and (made is None or not made.frozen)
        known = _GROWS[kind] = ours or issubclass(kind, CONTAINERS)
    return known


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    kind = type(value)
    if kind not in _SLOTS:
        _SLOTS[kind] = tuple(n for one in kind.__mro__ for n in _own_slots(one))
    for name in _SLOTS[kind]:
        it = getattr(value, name, None)
        if it is not None:
            yield name, it
    yield from getattr(value, "__dict__", {}).items()


def _own_slots(kind: type) -> tuple[str, ...]:
    """What that class adds to its parents'; a compiled one says it under another name."""
    own = kind.__dict__
    found: tuple[str, ...] = own.get("__slots__", own.get("__mypyc_attrs__", ()))
    return found


def over_bound(message: object) -> str | None:
    """The first tuple of a message, at any depth, that is longer than its field allows."""
    for name, limit, nested in _bounds(type(message)):
        value = getattr(message, name)
        if limit is not None and len(value) > limit:
            return f"{type(message).__name__}.{name} with {len(value)} entries, allowed are {limit}"
        if nested:
            for inner in value if isinstance(value, tuple) else (value,):
                if is_dataclass(inner) and (broken := over_bound(inner)) is not None:
                    return broken
    return None


_BOUNDS: dict[type, list[tuple[str, int | None, bool]]] = {}


def _bounds(kind: type) -> list[tuple[str, int | None, bool]]:
    """(field, limit, may hold messages) of those fields that have a bound or may hold something
    that does."""
    known = _BOUNDS.get(kind)
    if known is None:
        known = []
        for one in fields(kind) if is_dataclass(kind) else ():
            limit = one.metadata.get("max")
            nested = any(word in str(one.type) for word in ("Record", "Group", "Member", "Shape"))
            if limit is not None or nested:
                known.append((one.name, limit, nested))
        _BOUNDS[kind] = known
    return known
