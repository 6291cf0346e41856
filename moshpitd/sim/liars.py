"""A daemon that lies. One rule: what it sends still has the form that `net/wire` lets through
(types, lengths, finite floats), because nothing else reaches a Peer; what it means may be anything.

Each liar has a few habits, so that a failure points at one kind of lie and not at noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any, TypeAlias

import numpy as np

from moshpitd.core.group import group_id_of
from moshpitd.core.messages import (
    Begin,
    Goodbye,
    Join,
    Leave,
    Lineage,
    Message,
    NoResult,
    NotMember,
    Parity,
    Record,
    Shape,
    SnapshotOffer,
    Without,
)
from moshpitd.core.outcome import Reason
from moshpitd.sim.nodes import Vector

NUMBERS = (-1, 0, 1, 2, 9, 1000, 1 << 40, (1 << 62) - 1)
FLOATS = (-1.0, 0.0, 1e-9, 1.0, 1e9, 1e300)
REMEMBERED = 32
"""Messages and names that a liar plays with; enough to reach back several rounds."""

Said: TypeAlias = list[tuple[str, Message]]


class Habits:
    """Invariant: `says` and `pushes` draw from the liar's own stream and from nothing else."""

    def __init__(self, rng: Random, me: str, *, lies: float) -> None:
        self._rng, self._me, self._lies = rng, me, lies
        self._heard: list[tuple[str, Message]] = []
        kinds: list[Callable[[str, Message], Said]] = [
            self._boast, self._wander, self._overweigh, self._forge, self._slander, self._scramble,
            self._repeat, self._hush, self._swindle,
        ]  # fmt: skip
        self._kinds = rng.sample(kinds, rng.randint(1, 3))
        self._spoils = rng.random() < 0.4

    def says(self, to: str, message: Message) -> Said:
        """What goes out in place of `message` to `to`."""
        self._heard.append((to, message))
        del self._heard[:-REMEMBERED]
        if self._rng.random() >= self._lies:
            return [(to, message)]
        return self._rng.choice(self._kinds)(to, message)

    def pushes(self, values: Vector) -> Vector:
        """A contribution or a result on its way out; a lie in it is a number that is none, because
        a plausible one cannot be told from a bad trainer."""
        if not self._spoils or self._rng.random() >= self._lies:
            return values
        spoiled = values.copy()
        spoiled[self._rng.randrange(len(values))] = self._rng.choice((np.nan, np.inf, -np.inf))
        return spoiled

    # -- kinds of lies

    def _boast(self, to: str, message: Message) -> Said:
        """Further than it is, or with a past that it does not have."""
        far = self._rng.choice((1, 3, 9, 1 << 40))

        def more(record: Record) -> Record:
            change: dict[str, Any] = self._rng.choice(
                (
                    {"version": record.version + far},
                    {"round": record.round + far},
                    {"sequence": record.sequence + far},
                    {"lineage": Lineage("", record.lineage.digest)},
                    {"lineage": Lineage("", b"liar")},
                    {"has_snapshot": True, "version": record.version + far},
                )
            )
            return replace(record, **change)

        return [(to, _with_record(message, more))]

    def _wander(self, to: str, message: Message) -> Said:
        """Where it does not stand."""

        def elsewhere(record: Record) -> Record:
            shape = self._rng.choice(
                (record.shape, Shape(record.shape.epoch + 1, (2, 2)), Shape(1 << 30, (64,) * 8))
            )
            place = tuple(self._rng.randrange(side) for side in shape.sides)
            return replace(record, shape=shape, coordinates=self._rng.choice((place, place, (-1,))))

        return [(to, _with_record(message, elsewhere))]

    def _overweigh(self, to: str, message: Message) -> Said:
        if isinstance(message, Join):
            return [(to, replace(message, weight=self._rng.choice((0.0, -1.0, 2.0**32, 1e300))))]
        return [(to, message)]

    def _forge(self, to: str, message: Message) -> Said:
        """Another group than the one it opens itself."""
        if not isinstance(message, Begin):
            return [(to, message)]
        group, rng = message.group, self._rng
        members = list(group.members)
        match rng.randrange(5):
            case 0:
                del members[rng.randrange(len(members))]
            case 1:
                members.append(replace(members[0], peer_id=rng.choice(("ghost", self._me))))
            case 2:
                at = rng.randrange(len(members))
                members[at] = replace(members[at], weight=rng.choice(FLOATS))
            case 3:
                at = rng.randrange(len(members))
                members[at] = replace(members[at], version=rng.choice(NUMBERS))
            case _:
                members.reverse()
        forged = replace(group, members=tuple(members[:64]))
        if rng.random() < 0.7:
            forged = replace(forged, group_id=group_id_of(forged))
        return [(to, Begin(forged))]

    def _slander(self, to: str, message: Message) -> Said:
        """About others, in the group that it just spoke of."""
        group_id = getattr(message, "group_id", None)
        if not isinstance(group_id, bytes):
            return [(to, message)]
        reason, parts = self._rng.choice(list(Reason)), self._parts()
        lie: Message = self._rng.choice(
            (
                NotMember(group_id, self._other()),
                Without(group_id, reason, parts),
                NoResult(group_id, reason, 0, parts),
                Parity(group_id, b"liar", 0),
                Goodbye(reason),
            )
        )
        return [(to, lie), (to, message)]

    def _scramble(self, to: str, message: Message) -> Said:
        return [(to, self._scrambled(message))]

    def _repeat(self, to: str, message: Message) -> Said:
        """Something that it said before, perhaps to somebody else."""
        before, old = self._rng.choice(self._heard)
        return [(to, message), (self._rng.choice((to, before)), old)]

    def _hush(self, to: str, message: Message) -> Said:
        return [(to, Leave(message.key, message.attempt))] if isinstance(message, Join) else []

    def _swindle(self, to: str, message: Message) -> Said:
        """As a donor."""
        if isinstance(message, SnapshotOffer):
            bad: dict[str, Any] = self._rng.choice(
                (
                    {"digest": b"liar" * 4},
                    {"version": message.version + 9},
                    {"parts": self._rng.choice(NUMBERS)},
                    {"state_bytes": 1 << 40},
                    {"witnesses": (self._me, "ghost")},
                )
            )
            return [(to, replace(message, **bad))]
        return [(to, message)]

    # -- pieces

    def _other(self) -> str:
        return self._rng.choice(self._heard)[0]

    def _parts(self) -> tuple[int, ...]:
        return tuple(self._rng.choice(NUMBERS) for _ in range(self._rng.randrange(4)))

    def _scrambled(self, value: Any) -> Any:
        """One field of a message, at any depth, is something else of the same type."""
        one = self._rng.choice(fields(value))
        return replace(value, **{one.name: self._another(getattr(value, one.name))})

    def _another(self, value: Any) -> Any:
        rng = self._rng
        if isinstance(value, bool):
            return not value
        if isinstance(value, Reason):
            return rng.choice(list(Reason))
        if isinstance(value, int):
            return rng.choice((*NUMBERS, value + 1))
        if isinstance(value, float):
            return rng.choice(FLOATS)
        if isinstance(value, str):
            return rng.choice(("", "peers", self._other()))
        if isinstance(value, bytes):
            return rng.choice((b"", b"liar", value[::-1]))
        if isinstance(value, tuple):
            return rng.choice((value[:-1], value[::-1], ()))
        return self._scrambled(value) if is_dataclass(value) else value


def _with_record(message: Message, change: Callable[[Record], Record]) -> Message:
    record = getattr(message, "record", None)
    if not isinstance(record, Record):
        return message
    changed: dict[str, Any] = {"record": change(record)}
    return replace(message, **changed)
