"""Random valid messages and events against real Peers: nothing raises, nobody is in two groups,
every call ends.

Types and lengths are right, as net/wire.py promises; everything else may be a lie: ids, numbers,
times, who says it. Faults are drawn from the seed too, and then they stop and everybody must come
to an end.

One rule: what is forged here is what a stranger could send; a lie that is known to break the core
has its own xfail test elsewhere and is left out here by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import (
    Accepted,
    Begin,
    Declined,
    DigestQuery,
    DigestReply,
    Goodbye,
    Group,
    Hello,
    Invite,
    Join,
    Later,
    Leave,
    Lineage,
    Member,
    Message,
    NoResult,
    NotMember,
    Parity,
    Record,
    Redirect,
    Shape,
    SnapshotOffer,
    SnapshotRefused,
    SnapshotRequest,
    Without,
)
from moshpitd.core.outcome import OnPartial, Reason
from moshpitd.core.params import Params
from tests.kit.hands import SCHEMA, Hands

STEPS = 120
GRIDS = [Params(), Params(max_group=2), Params(max_group=2, grid_sides=(2, 2)), Params(max_group=3)]


class Liar:
    """Forges messages and events out of what it overheard."""

    def __init__(self, hands: Hands, rng: random.Random) -> None:
        self.hands, self.rng = hands, rng
        self.names = [*hands.nodes, "stranger"]

    def number(self) -> int:
        return self.rng.choice([0, 0, 1, 1, 2, 3, 7, 1000, 1 << 40])

    def seconds(self) -> float:
        return self.rng.choice([0.0, 0.1, 1.0, 5.0, -3.0, 1e9, float("nan"), float("inf")])

    def weight(self) -> float:
        return self.rng.choice([0.0, 1.0, 1.0, 2.5, -1.0, 2.0**32, 1e300, float("nan")])

    def name(self) -> str:
        return self.rng.choice(self.names)

    def reason(self) -> Reason:
        return self.rng.choice(list(Reason))

    def parts(self) -> tuple[int, ...]:
        return tuple(
            self.rng.choice([0, 1, 2, 3, 9, 1 << 30]) for _ in range(self.rng.randrange(4))
        )

    def nonce(self) -> bytes:
        known = [e.nonce for _, e in self.hands.effects[-80:] if isinstance(e, ef.FetchSnapshot)]
        return self.rng.choice([*known, b"n" * 16])

    def group_id(self) -> bytes:
        known = [e.group.group_id for _, e in self.hands.effects[-80:] if isinstance(e, ef.Open)]
        return self.rng.choice([*known, b"g" * 16])

    def key(self) -> str:
        keys = [n.fields["key"] for _, n in self.hands.notes if n.what == "attempt_started"][-4:]
        return str(self.rng.choice([*keys, "peers"]))

    def shape(self) -> Shape:
        # Shapes in a forged Begin are left out: test_core_matchmaking has them as xfail.
        return self.rng.choice([Shape(), Shape(1, (2, 2)), Shape(9, (3, 3)), Shape(2, (12,))])

    def record(self, sender: str) -> Record:
        node = self.hands.nodes.get(sender)
        record = node.peer.record if node else Record(sender, 1, SCHEMA, 0, Lineage("s", b"s"))
        rng = self.rng
        changes: list[Callable[[], dict[str, object]]] = [
            lambda: {"version": self.number()},
            lambda: {"round": self.number()},
            lambda: {"sequence": self.number()},
            lambda: {
                "lineage": Lineage(self.name(), rng.choice([b"", b"x", record.lineage.digest]))
            },
            lambda: {"schema": rng.choice([b"", b"other"])},
            lambda: {"coordinates": rng.choice([(), (0, 0), (1,), (-1,)])},
            lambda: {"shape": Shape(3, (2, 2)), "coordinates": (1, 1)},
            lambda: {"addresses": ()},
            lambda: {"up_mbps": rng.choice([0.0, 1e-3, 1e9, -1.0, float("nan")])},
            lambda: {"has_snapshot": True},
            lambda: {"peer_id": self.name()},
        ]
        for _ in range(rng.choice([0, 0, 1, 2])):
            record = replace(record, **rng.choice(changes)())  # type: ignore[arg-type]
        return record

    def member(self) -> Member:
        addresses = self.rng.choice([(), ("h:1",)])
        rate = self.rng.choice([0.0, 1.0, 1e9])
        return Member(
            self.name(), self.number(), self.weight(), self.number(), False, rate, rate, addresses
        )

    def begin(self) -> Begin:
        told = self.hands.said(Begin)
        if told and self.rng.random() < 0.5:
            return self.rng.choice(told)  # type: ignore[return-value]
        members = tuple(self.member() for _ in range(self.rng.randrange(4)))
        return Begin(
            Group(
                self.group_id(), self.key(), self.name(), 1, self.number(), self.shape(), SCHEMA,
                Lineage(), "float32", members,
            )
        )  # fmt: skip

    def message(self, sender: str) -> Message:
        key, number, record = self.key(), self.number(), self.record(sender)
        rng = self.rng
        return rng.choice(
            [
                lambda: Invite(key, number, record, self.seconds()),
                lambda: Join(
                    key, number, record, self.weight(), rng.random() < 0.5, (self.name(),)
                ),
                lambda: Accepted(key, number, rng.choice([0.0, 1.0, -3.0, 1e9, float("inf")])),
                lambda: Declined(key, number, self.reason(), rng.choice([None, record])),
                lambda: Later(key, number, record),
                lambda: Redirect(key, number, self.name()),
                lambda: Leave(key, number),
                self.begin,
                lambda: NotMember(self.group_id(), self.name()),
                lambda: Without(self.group_id(), self.reason(), self.parts()),
                lambda: NoResult(self.group_id(), self.reason(), 0, self.parts()),
                lambda: Parity(self.group_id(), b"d", number),
                lambda: SnapshotRequest(self.nonce(), record),
                lambda: SnapshotRefused(self.nonce(), self.reason()),
                lambda: DigestQuery(self.nonce(), number),
                lambda: DigestReply(self.nonce(), number, rng.choice([b"", b"d"])),
                lambda: SnapshotOffer(b"n" * 16, number, Lineage(), b"d", number, number),
                lambda: Hello(record, rng.random() < 0.5),
                lambda: Goodbye(self.reason()),
            ]
        )()

    def event(self, target: str) -> ev.Event:
        rng, sender = self.rng, self.name()
        group, part = self.group_id(), rng.choice([0, 1, 2, 3, 99])
        opened = self.hands.nodes[target].opened[-1:]
        mine = {it.index for it in opened}  # the data plane knows itself from others
        member = rng.choice([index for index in (0, 1, 2, 60) if index not in mine])
        return rng.choice(
            [
                lambda: ev.Undelivered(sender, self.message(sender)),
                lambda: ev.Found(rng.choice([self.key(), "peers"]), (self.record(sender),)),
                lambda: ev.Found("peers", (), False),
                lambda: ev.Announced(self.key(), rng.random() < 0.5),
                lambda: ev.LinkLost(sender, self.reason()),
                lambda: ev.PartRefused(group, part, member, self.reason(), "", rng.random() < 0.5),
                lambda: ev.PartFailed(group, part, self.reason(), "", False),
                lambda: ev.SnapshotProgressed(self.nonce()),
                lambda: ev.SnapshotFailed(self.nonce(), self.reason()),
                lambda: ev.SnapshotSent(self.nonce()),
                lambda: ev.StateStored(self.number()),
                lambda: ev.Addressed(rng.choice([(), ("h:1",)]), (), 10.0, 10.0),
                lambda: ev.ContributionRefused("t"),
                lambda: ev.Cancelled("none"),
                lambda: ev.TrainerGone("nobody"),
                lambda: ev.Ticked(),
            ]
        )()


class Storm:
    """One seed: so many peers, so much trouble, then quiet."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"storm/{seed}")
        params = self.rng.choice(GRIDS)
        count = self.rng.randrange(2, 6)
        self.hands = Hands(count, seed=seed, shuffle=True, params=params)
        same = self.rng.random() < 0.7
        for index, name in enumerate(self.hands.nodes):
            self.hands.attach(name, [0.0 if same else float(index)] * 4)
        self.liar = Liar(self.hands, self.rng)
        self.drained: set[str] = set()
        self.lying = self.rng.choice([0.0, 0.2, 0.6])
        self.losing = self.rng.choice([0.0, 0.0, 0.05, 0.3])
        self.hands.drop = lambda sender, to, what: self.rng.random() < self.losing

    def blow(self) -> None:
        for _ in range(STEPS):
            self.hands.step(self.rng.randrange(12))
            alive = [name for name, node in self.hands.nodes.items() if node.alive]
            name = self.rng.choice(alive)
            if self.rng.random() < self.lying:
                self.lie(name)
            self.live(name, alive)

    def lie(self, name: str) -> None:
        if self.rng.random() < 0.7:
            sender = self.rng.choice([n for n in self.liar.names if n != name])
            event: ev.Event = ev.Received(sender, self.liar.message(sender))
        else:
            event = self.liar.event(name)
        self.hands.tell(name, event)

    def live(self, name: str, alive: list[str]) -> None:
        hands, rng = self.hands, self.rng
        dice = rng.random()
        if dice < 0.35:
            busy = any(hands.calls[token][0] == name for token in hands.open_calls())
            if "t" in hands.nodes[name].values and not busy and name not in self.drained:
                hands.contribute(
                    name,
                    weight=rng.choice([0, 1, 1, 5, 1 << 32]),
                    rounds=rng.choice([0, 1, 1, 2]),
                    min_participants=rng.choice([1, 1, 2]),
                    on_partial=rng.choice(list(OnPartial)),
                    timeout_s=rng.choice([0.5, 3.0, 20.0, 60.0]),
                )
        elif dice < 0.40 and hands.open_calls():
            hands.cancel(rng.choice(hands.open_calls()))
        elif dice < 0.43 and "t" in hands.nodes[name].values and not hands.nodes[name].exchanges:
            hands.detach(name)
        elif dice < 0.50 and "t" not in hands.nodes[name].values:
            hands.attach(name, [rng.uniform(-1, 1)] * 4, version=rng.choice([0, 0, 3]))
        elif dice < 0.503 and len(alive) > 1:
            hands.kill(name)
        elif dice < 0.504:
            self.drained.add(name)
            hands.tell(name, ev.Drained())
        elif dice < 0.80:
            hands.run(until_s=hands.now + rng.choice([0.1, 1.0, 4.0, 15.0]))


@pytest.mark.parametrize("seed", range(60))
def test_a_storm_of_lies_and_losses_ends_every_call_in_time(seed: int) -> None:
    storm = Storm(seed)
    storm.blow()
    storm.losing = storm.lying = 0.0
    storm.hands.finish(within_s=300.0)
    slack = storm.hands.params.parity_timeout_s + 0.001
    for token, (name, _, deadline) in storm.hands.calls.items():
        if token in storm.hands.ended_at:
            late = storm.hands.ended_at[token] - deadline
            assert late <= slack, f"{token} of {name} ended {late} s late" + storm.hands.tail()


def test_the_same_seed_is_the_same_run_byte_for_byte() -> None:
    runs = []
    for _ in range(2):
        storm = Storm(7)
        storm.blow()
        runs.append(storm.hands.transcript)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50
