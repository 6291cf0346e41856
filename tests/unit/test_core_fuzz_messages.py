"""Every kind of message that the wire lets through, with the worst values that it lets through, at
peers in the middle of everything: nothing raises, nothing hangs, and what is said can be sent.

The messages are made from their types, so a new kind is tried without a word here.

One rule: `wire.decode(wire.encode(...))` is what a stranger can make us hear.
"""

from __future__ import annotations

import random
import types
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import (
    MESSAGES,
    Counts,
    Group,
    Letter,
    Message,
    NotMember,
    Pair,
    PairAnswer,
    Record,
)
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.store_words import (
    STORE_MESSAGES,
    Ballot,
    Rules,
    Seeded,
    StoreOpened,
    StorePullAsked,
    TakeSeed,
)
from moshpitd.errors import LocalProtocolError
from moshpitd.net import wire

NAMES = ("a", "b", "c")
NUMBERS = (0, 0, 1, 1, 2, 3, 7, -1, -(2**63), 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1)
REALS = (0.0, 1.0, 1.0, -1.0, 1e308, -1e308, 5e-324, 3.0, 1e9)
STEPS = 60
WAYS = ("round", "mix", "pairs", "store", "idle")
KINDS: dict[str, tuple[type, ...]] = {
    "mix": (Letter, Counts, NotMember),
    "pairs": (Pair, PairAnswer),
    "store": STORE_MESSAGES,
}
"""Half of what is said is of these, or what matters would be seldom."""


class Storm:
    """Three peers that hear each other, and a stranger's lies between. There is no data plane, so
    what they are in lasts."""

    def __init__(self, way: str, seed: int) -> None:
        self.rng, self.now = random.Random(f"{way}/{seed}"), 0.0
        self.kinds = KINDS.get(way, MESSAGES)
        self.peers = {
            name: Peer(Params(), name, random.Random(f"{seed}/{name}"), run="r") for name in NAMES
        }
        self.todo: deque[Callable[[], None]] = deque()
        self.words = ["peers", "a/t", "b/t", "", "x" * 256, "stranger", *NAMES, *NAMES]
        self.ids = [b"g" * 16, b"", b"n" * 16]
        for name in NAMES:
            self.tell(name, ev.Attached("t", b"s", "", (8, 8, 8), b"d"))
            self.tell(name, ev.Addressed(("h:1",), (), 10.0, 10.0))
        self.go_on()
        for name in NAMES:
            self.begin(way, name)
        for _ in range(40 if way in ("round", "mix") else 1):
            self.go_on()
            if all(peer.phase != "matchmaking" for peer in self.peers.values()):
                break
            self.pass_time()

    def begin(self, way: str, name: str) -> None:
        token = f"call of {name}"
        if way == "round":
            self.tell(name, ev.Contributed("t", token, 1, timeout_s=50.0))
        elif way == "mix":
            self.tell(name, ev.Contributed("t", token, 1, timeout_s=50.0, mix=ev.Mix("ring")))
        elif way == "pairs":
            self.tell(name, ev.ValuesKept("t"))
            self.tell(name, ev.MeetAsked("t", token, "ring", 20.0))
        elif way == "store":
            self.tell(name, StoreOpened(f"{name}/t", Rules(0.1, 1, 0, True)))
            self.tell(name, StorePullAsked(token, f"{name}/t"))

    def tell(self, name: str, event: ev.Event) -> None:
        peer = self.peers[name]
        self.now += 0.001
        peer.handle(event, self.now)
        peer.deadline()
        peer.progress()
        for effect in peer.take_effects():
            self.perform(name, effect)

    def perform(self, name: str, effect: ef.Effect) -> None:
        for word in ("nonce", "group_id", "seed", "pull"):
            found = getattr(effect, word, None) or getattr(
                getattr(effect, "group", None), word, None
            )
            if isinstance(found, bytes) and found not in self.ids:
                self.ids.append(found)
        match effect:
            case ef.Send():
                wire.encode("r", effect.message)
                if effect.to in self.peers:
                    self.later(effect.to, ev.Received(name, effect.message))
                else:
                    self.later(name, ev.Undelivered(effect.to, effect.message))
            case ef.LookUp():
                present = [p for p in self.peers.values() if p.state.presence.present]
                records = tuple(p.record for p in present if p.peer_id != name)
                self.later(name, ev.Found(effect.key, records))
            case ef.Announce():
                self.later(name, ev.Announced(effect.key, True))
            case TakeSeed() if effect.seeder == name and effect.parts:
                self.later(name, Seeded(effect.seed))
            case _:
                pass

    def later(self, name: str, event: ev.Event) -> None:
        self.todo.append(lambda: self.tell(name, event))

    def go_on(self, steps: int = 400) -> None:
        for _ in range(steps):
            if not self.todo:
                return
            self.todo.popleft()()
        self.todo.clear()

    def pass_time(self) -> None:
        times = [at for peer in self.peers.values() if (at := peer.deadline()) is not None]
        self.now = max(self.now + 0.01, min(times))
        for name in NAMES:
            self.tell(name, ev.Ticked())

    def lie(self) -> None:
        sender, target = self.rng.choice([*NAMES, "stranger"]), self.rng.choice(NAMES)
        if sender != target:
            self.tell(target, ev.Received(sender, self.message(sender)))

    # -- messages out of their types

    def message(self, sender: str) -> Message:
        while True:
            try:
                kinds = MESSAGES if self.rng.random() < 0.5 else self.kinds
                data = wire.encode("r", self.made(self.rng.choice(kinds), sender))
            except LocalProtocolError:
                continue
            return wire.decode(data).message

    def made(self, kind: type, sender: str) -> Any:
        hints = typing.get_type_hints(kind)
        drawn = {
            one.name: self.value(hints[one.name], one.name, sender)
            for one in fields(kind)  # type: ignore[arg-type]
        }
        return kind(**drawn)

    def value(self, hint: Any, name: str, sender: str) -> Any:
        rng, inner = self.rng, typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            some = next(one for one in inner if one is not type(None))
            return None if rng.random() < 0.3 else self.value(some, name, sender)
        if typing.get_origin(hint) is tuple:
            return tuple(
                self.value(inner[0], name, sender) for _ in range(rng.choice([0, 1, 1, 3]))
            )
        if hint is bool:
            return rng.random() < 0.5
        if hint is int:
            return rng.choice(NUMBERS)
        if hint is float:
            return rng.choice(REALS)
        if hint is str:
            return sender if name == "peer_id" and rng.random() < 0.7 else rng.choice(self.words)
        if hint is bytes:
            if name == "schema":
                return rng.choice([b"s", b"s", b"", b"x" * 40])
            return rng.choice(self.ids[-6:])
        if issubclass(hint, Enum):
            return rng.choice(list(hint))
        return self.known(hint, sender) if rng.random() < 0.6 else self.made(hint, sender)

    def known(self, kind: type, sender: str) -> Any:
        """One that is in use, or almost."""
        peers = list(self.peers.values())
        if kind is Record and sender in self.peers:
            return self.peers[sender].record
        if kind is Ballot and (terms := [p.storage.common.terms for p in peers]):
            held = [one.ballot for one in terms if one is not None]
            return self.rng.choice(held) if held else Ballot(1, sender)
        works = [p.work for p in peers if p.work is not None]
        groups = [work.round.group for work in works if work.round is not None]
        if kind is Group and groups:
            one = self.rng.choice(fields(Group))
            changed = self.value(typing.get_type_hints(Group)[one.name], one.name, sender)
            group = replace(self.rng.choice(groups), **{one.name: changed})
            return replace(group, group_id=group_id_of(group))
        return self.made(kind, sender)


@pytest.mark.parametrize("way", WAYS)
def test_no_message_that_the_wire_lets_through_ends_a_peer(way: str) -> None:
    for seed in range(25):
        storm = Storm(way, seed)
        for _ in range(STEPS):
            choice = storm.rng.random()
            if choice < 0.1:
                storm.pass_time()
            elif choice < 0.3:
                storm.go_on(40)
            else:
                storm.lie()


def test_the_peers_are_in_the_middle_of_something() -> None:
    """Else the storm proves nothing."""
    found = {}
    for way in WAYS:
        storm = Storm(way, 0)
        works = [peer.work for peer in storm.peers.values() if peer.work is not None]
        rounds = [type(work.round).__name__ for work in works if work.round is not None]
        stores = sum(1 for p in storm.peers.values() if p.storage.common.terms is not None)
        meetings = sum(1 for p in storm.peers.values() if p.pairs.meeting is not None)
        found[way] = (rounds, stores, meetings)
    assert found == {
        "round": (["Round"] * 3, 0, 0),
        "mix": (["Neighbours"] * 3, 0, 0),
        "pairs": ([], 0, 1),
        "store": ([], 3, 0),
        "idle": ([], 0, 0),
    }
