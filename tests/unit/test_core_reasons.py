"""Every Reason has a scene that produces it: the other files' tests say when, this one that none is
forgotten.

One rule: a new Reason fails here until it has a scene, or stands in a list with its reason.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import Hello, Invite, Join, Lineage, NotMember, SnapshotRequest
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from tests.kit.hands import Hands, record_of
from tests.unit.test_core_lateness import eight

DATA_PLANE = {
    # The core only hands these on; exchange and the local API make them, and their tests do.
    Reason.NOT_FINITE,
    Reason.BUCKET_MODIFIED,
    Reason.CODEC,
    Reason.NORM,
}


def ready(count: int, **options: object) -> Hands:
    hands = Hands(count, **options)  # type: ignore[arg-type]
    hands.attach_all()
    return hands


def asked(hands: Hands, to: str = "p00", sender: str = "p01", **changes: object) -> Hands:
    record = record_of(hands.nodes[sender].peer, **changes)
    hands.tell(to, ev.Received(sender, Invite("peers", 1, record, 1.0)))
    hands.settle()
    return hands


def no_trainer() -> Hands:
    hands = ready(2)
    hands.detach("p00")
    return asked(hands)


def not_ready() -> Hands:
    hands = ready(2)
    hands.start(1, min_participants=2)
    hands.finish()
    return hands


def draining() -> Hands:
    hands = ready(2)
    hands.tell("p00", ev.Drained())
    return asked(hands)


def preempted() -> Hands:
    hands = ready(2)
    hands.tell("p00", ev.Drained(preempted=True))
    hands.settle()
    return hands


def moved() -> Hands:
    hands = ready(2)
    record = hands.nodes["p01"].peer.record
    hands.tell("p00", ev.Received("p01", Join("grid/9", 1, record, 1.0, False)))
    hands.settle()
    return hands


def strikes() -> Hands:
    hands = ready(2)
    for _ in range(4):
        asked(hands, coordinates=())
    return asked(hands)


def refused() -> Hands:
    hands = ready(2)
    hands.tell("p00", ev.ContributionRefused("t"))
    return asked(hands)


def weight() -> Hands:
    hands = ready(1)
    hands.contribute("p00", weight=-1)
    hands.settle()
    return hands


def dead_member(how: str) -> Hands:
    hands = ready(2)
    hands.drop = lambda sender, to, what: isinstance(what, tuple) and sender == "p01"
    hands.start(timeout_s=4.0 if how == "timeout" else 60.0)
    while not hands.nodes["p00"].opened:
        hands.step(1)
    if how == "dies":
        hands.kill("p01")
    elif how == "unreachable":
        hands.nodes["p01"].alive = False
        hands.tell("p00", ev.Undelivered("p01", Hello(hands.nodes["p00"].peer.record)))
    hands.finish()
    return hands


def no_answer() -> Hands:
    hands = ready(2)
    hands.drop = lambda sender, to, what: isinstance(what, Join | Invite)
    hands.start()
    hands.finish()
    return hands


def not_member() -> Hands:
    hands = ready(4)
    tokens = hands.start(3)
    hands.settle()
    hands.hold = lambda sender, to, message: type(message).__name__ == "Leave"
    hands.cancel(tokens["p01"])
    hands.contribute("p03")
    hands.finish()
    return hands


def withdrawn() -> Hands:
    hands = ready(3)
    tokens = hands.start(2)
    hands.settle()
    hands.cancel(tokens["p00"])
    hands.finish()
    return hands


def too_slow() -> Hands:
    wires = eight()
    for _ in range(3):
        wires.round()
    return wires


def no_reducer() -> Hands:
    hands = Hands(0)
    for name in ("p00", "p01"):
        hands.add(name, dialable=False)
    hands.attach_all()
    hands.start()
    hands.finish()
    return hands


def no_contributors() -> Hands:
    hands = ready(2)
    hands.start(weight=0)
    hands.finish()
    return hands


def too_few() -> Hands:
    hands = ready(2)
    hands.start(min_participants=3)
    hands.finish()
    return hands


def no_donor() -> Hands:
    hands = ready(3)
    for name in ("p00", "p01"):
        record = record_of(
            hands.nodes[name].peer, sequence=99, has_snapshot=False, lineage=Lineage("a", b"x")
        )
        hands.tell("p02", ev.Received(name, Hello(record, answer=True)))
    hands.sync("p02")
    hands.finish()
    return hands


def trainer_gone() -> Hands:
    hands = ready(1)
    hands.contribute("p00", trainer="nobody")
    hands.settle()
    return hands


def busy() -> Hands:
    hands = ready(2)  # p01 is idle, so the first call waits
    hands.contribute("p00")
    hands.contribute("p00")
    hands.finish()
    return hands


def requested(hands: Hands) -> None:
    record = hands.nodes["p01"].peer.record
    hands.tell("p00", ev.Received("p01", SnapshotRequest(b"n" * 16, record)))
    hands.settle()


def no_snapshot() -> Hands:
    hands = Hands(1)
    hands.add("p01")
    hands.attach("p01")
    hands.attach("p00")
    hands.settle()
    hands.nodes["p00"].peer.state.donor.version = None
    requested(hands)
    return hands


def digest() -> Hands:
    hands = Hands(2)
    hands.attach_all({"p01": [5.0] * 4})
    hands.snapshot_fault = {"p00": "corrupt"}
    hands.sync("p01")
    hands.finish()
    return hands


def superseded() -> Hands:
    hands = ready(2)
    hands.nodes["p00"].peer.handle(ev.SnapshotRefreshed(9), hands.now)
    requested(hands)  # its copy is not of version 9: Digested is empty
    return hands


def part_size() -> Hands:
    hands = Hands(2)
    hands.attach_all({"p01": [5.0] * 4})
    hands.tell("p00", ev.StateStored(1 << 40))
    hands.sync("p01")
    hands.finish()
    return hands


def parity() -> Hands:
    hands = ready(2)
    hands.lie = lambda name, to, part, value: value + 1.0
    hands.start()
    hands.finish()
    return hands


def excluded() -> Hands:
    hands = ready(2)
    hands.start()
    while not hands.nodes["p01"].opened:
        hands.step(1)
    group = hands.nodes["p01"].opened[-1].group.group_id
    hands.drop = lambda sender, to, what: True
    hands.tell("p01", ev.Received("p00", NotMember(group, "p01")))
    hands.settle()
    return hands


def audit() -> Hands:
    hands = Hands(3, params=Params(audit_fraction=1.0))
    hands.attach_all()
    hands.spoil = lambda name, part, mean: mean + 1.0
    hands.start()
    hands.finish()
    return hands


SCENES: dict[Reason, Callable[[], Hands]] = {
    Reason.NO_TRAINER: no_trainer,
    Reason.NOT_READY: not_ready,
    Reason.DRAINING: draining,
    Reason.PREEMPTED: preempted,
    Reason.SCHEMA: lambda: asked(ready(2), schema=b"other"),
    Reason.LINEAGE: lambda: asked(ready(2), lineage=Lineage("x", b"x")),
    Reason.MOVED: moved,
    Reason.STRIKES: strikes,
    Reason.REFUSED: refused,
    Reason.VERSION: lambda: asked(ready(5), version=99),
    Reason.WEIGHT: weight,
    Reason.UNREACHABLE: lambda: dead_member("unreachable"),
    Reason.NO_ANSWER: no_answer,
    Reason.LINK_LOST: lambda: dead_member("dies"),
    Reason.SILENT: lambda: dead_member("silent"),
    Reason.NOT_MEMBER: not_member,
    Reason.WITHDRAWN: withdrawn,
    Reason.SLOW: too_slow,
    Reason.PART_SIZE: part_size,
    Reason.PARITY: parity,
    Reason.AUDIT: audit,
    Reason.EXCLUDED: excluded,
    Reason.NO_PEERS: lambda: withdrawn(),
    Reason.NO_REDUCER: no_reducer,
    Reason.NO_CONTRIBUTORS: no_contributors,
    Reason.TIMEOUT: lambda: dead_member("timeout"),
    Reason.TOO_FEW: too_few,
    Reason.NO_DONOR: no_donor,
    Reason.TRAINER_GONE: trainer_gone,
    Reason.BUSY: busy,
    Reason.NO_SNAPSHOT: no_snapshot,
    Reason.DIGEST: digest,
    Reason.SUPERSEDED: superseded,
}


def test_every_reason_has_a_scene_or_stands_in_a_list() -> None:
    assert set(SCENES) | DATA_PLANE == set(Reason)
    assert not set(SCENES) & (DATA_PLANE)


@pytest.mark.parametrize("reason", list(SCENES), ids=lambda reason: reason.value)
def test_the_scene_of_a_reason_produces_it(reason: Reason) -> None:
    hands = SCENES[reason]()
    assert reason in hands.reasons(), hands.tail()
    assert all(isinstance(e, ef.Effect) for _, e in hands.effects)
