"""What the parameter store of a run says and does: its messages, events and effects, and the two
formulas that everybody computes alike. One rule: words only; what they mean is in `storage`.

A ballot (epoch, coordinator) names one life of the store. A shard is the parts that one owner has;
`owner_of` says whose a part is, and the coordinator is the owner of part 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

OWNERS = 64  # as many as a group has members at most
WORKERS = 1024
"""Whose gradients the store can tell apart; more are refused, because each costs a line in every
grant."""


def owner_of(part: int, owners: Sequence[str]) -> str:
    """Rendezvous hashing: a peer more or less moves only the parts that it wins or had."""
    return max(owners, key=lambda peer: (_draw(f"{part}/{peer}"), peer))


def shard_of(peer: str, owners: Sequence[str], parts: int) -> tuple[int, ...]:
    """The parts that `peer` owns."""
    if peer not in owners:
        return ()
    return tuple(part for part in range(parts) if owner_of(part, owners) == peer)


def name_of(*words: object) -> bytes:
    """16 bytes for a frame's header: of a gradient, a pull or a seed."""
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=16).digest()


def _draw(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class Verdict(Enum):
    """What became of a push."""

    TAKEN = "taken"
    TOO_OLD = "too_old"
    NOT_PULLED = "not_pulled"


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """Of two, the higher one holds."""

    epoch: int = 0
    coordinator: str = ""

    @property
    def name(self) -> bytes:
        return name_of("seed", self.epoch, self.coordinator)


@dataclass(frozen=True, slots=True)
class Rules:
    """What all trainers of a store agree on; see `client.primitives.StoreOptions`."""

    gamma: float
    batch: int = 1
    max_staleness: int = 0
    block: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """The last gradient of a worker that is inside a version."""

    worker: str
    sequence: int


# -- messages


@dataclass(frozen=True, slots=True)
class StoreAsk:
    """I am about to begin `ballot`. Promise to take part in nothing before it, and say what you
    hold; who knows of a store that is no older answers with its terms. Epoch 0 only asks."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class StoreHave:
    """I promise. The newest whole snapshot that I have is `version` of `epoch`; version -1: none,
    and then my trainers have not said either what a store should begin with."""

    ballot: Ballot
    epoch: int
    version: int
    applied: tuple[Applied, ...] = field(default=(), metadata={"max": WORKERS})
    rules: Rules | None = None


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """The store of this ballot: its owners, and who has the values that it begins with."""

    ballot: Ballot
    owners: tuple[str, ...] = field(metadata={"max": OWNERS})
    version: int
    seeder: str
    rules: Rules
    applied: tuple[Applied, ...] = field(default=(), metadata={"max": WORKERS})


@dataclass(frozen=True, slots=True)
class StoreMissing:
    """These parts of the seed have not come."""

    ballot: Ballot
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class StoreReady:
    """I have all of my shard."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class StorePull:
    """Which version may this worker read?"""

    ballot: Ballot
    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class StoreWait:
    """I have heard you, and cannot answer yet."""

    number: int


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """This one, which holds these gradients."""

    number: int
    version: int
    applied: tuple[Applied, ...] = field(default=(), metadata={"max": WORKERS})


@dataclass(frozen=True, slots=True)
class StoreFetch:
    """Send me your shard of that version. `again`: it has not come, say at least that you live."""

    ballot: Ballot
    number: int
    version: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class StoreGone:
    """I no longer have that version."""

    number: int


@dataclass(frozen=True, slots=True)
class StorePush:
    """A gradient read at `version` is on its way to the owners. `again`: it was sent a while ago,
    tell me who still lacks it."""

    ballot: Ballot
    worker: str
    sequence: int
    number: int
    version: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class StoreHeld:
    """I have my shard of that gradient, which `peer` sent."""

    ballot: Ballot
    peer: str
    gradient: bytes


@dataclass(frozen=True, slots=True)
class StoreWanted:
    """These owners have not said that they hold it."""

    number: int
    owners: tuple[str, ...] = field(metadata={"max": OWNERS})


@dataclass(frozen=True, slots=True)
class StoreVerdict:
    """What became of your push."""

    number: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Gradient:
    """By the peer that sent it and its name."""

    peer: str
    name: bytes


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Version `version` is the one before less gamma times the sum of these, in this order.
    `refused` will never be in any."""

    ballot: Ballot
    version: int
    gradients: tuple[Gradient, ...] = field(default=(), metadata={"max": 4096})
    refused: tuple[Gradient, ...] = field(default=(), metadata={"max": 4096})


@dataclass(frozen=True, slots=True)
class StoreBehind:
    """I am at `version` and somebody asks me for a later one: say the orders again."""

    ballot: Ballot
    version: int


@dataclass(frozen=True, slots=True)
class StoreBroken:
    """I cannot reach that owner: begin anew without it."""

    ballot: Ballot
    owner: str


@dataclass(frozen=True, slots=True)
class StoreLeave:
    """This worker will not push what it pulled: with the pull of this number or before it, or (0)
    ever."""

    worker: str
    number: int = 0


StoreMessage: TypeAlias = (
    StoreAsk
    | StoreHave
    | StoreTerms
    | StoreMissing
    | StoreReady
    | StorePull
    | StoreWait
    | StoreGrant
    | StoreFetch
    | StoreGone
    | StorePush
    | StoreHeld
    | StoreWanted
    | StoreVerdict
    | StoreOrder
    | StoreBehind
    | StoreBroken
    | StoreLeave
)
# The position is the kind on the wire, behind all others: append only.
STORE_MESSAGES: tuple[type, ...] = (
    StoreAsk, StoreHave, StoreTerms, StoreMissing, StoreReady, StorePull, StoreWait, StoreGrant,
    StoreFetch, StoreGone, StorePush, StoreHeld, StoreWanted, StoreVerdict, StoreOrder, StoreBehind,
    StoreBroken, StoreLeave,
)  # fmt: skip


# -- events


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """A trainer has said what a store should begin with; the data plane has it as version 0."""

    worker: str
    rules: Rules


@dataclass(frozen=True, slots=True)
class StorePullAsked:
    token: str
    worker: str


@dataclass(frozen=True, slots=True)
class StorePushAsked:
    """The data plane has the gradient under `token`."""

    token: str
    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class StoreCancelled:
    """The trainer waits no more."""

    token: str


@dataclass(frozen=True, slots=True)
class StoreClosed:
    """A worker is gone."""

    worker: str


@dataclass(frozen=True, slots=True)
class Seeded:
    """All parts of our shard of that seed are here."""

    seed: bytes


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """All parts of our shard of that gradient are here."""

    peer: str
    name: bytes


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """An update names a gradient that is not here: our shard of that seed is worth nothing."""

    seed: bytes


@dataclass(frozen=True, slots=True)
class Collected:
    """All parts of the version that a pull waits for are here."""

    pull: bytes


StoreEvent: TypeAlias = (
    StoreOpened
    | StorePullAsked
    | StorePushAsked
    | StoreCancelled
    | StoreClosed
    | Seeded
    | GradientArrived
    | ShardFailed
    | Collected
)
STORE_EVENTS = (
    StoreOpened, StorePullAsked, StorePushAsked, StoreCancelled, StoreClosed, Seeded,
    GradientArrived, ShardFailed, Collected,
)  # fmt: skip


# -- effects, which the data plane carries out one after the other


@dataclass(frozen=True, slots=True)
class LinkTo:
    """Parts will travel between us and that peer."""

    peer: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendSeed:
    """Parts of our newest copy, to their new owner."""

    to: str
    seed: bytes
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeSeed:
    """Our shard is what `seeder` sends under that name, and is `version` then. What we had is
    forgotten."""

    seeder: str
    seed: bytes
    epoch: int
    version: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Parts of what the trainer handed over under `token`, to their owner in that epoch."""

    to: str
    token: str
    name: bytes
    epoch: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Our shard: x <- x - gamma sum of these gradients, which is `version`."""

    version: int
    gamma: float
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class DropGradients:
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class SendValues:
    """Our shard of `version`, to a peer that pulls."""

    to: str
    pull: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Every part of `version` will come from its owner, under that name."""

    pull: bytes
    version: int
    owners: tuple[str, ...]  # by part


@dataclass(frozen=True, slots=True)
class DropPull:
    pull: bytes


@dataclass(frozen=True, slots=True)
class DropStore:
    """This node is part of the store no more."""


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """To the trainer's call `token`. What was collected for `pull`, if that is not empty, is
    `version`: the trainer's, and our newest copy. `refusal` is a word of the API's table."""

    token: str
    pull: bytes = b""
    verdict: Verdict = Verdict.TAKEN
    version: int = 0
    refusal: str = ""
    detail: str = ""


StoreEffect: TypeAlias = (
    LinkTo
    | SendSeed
    | TakeSeed
    | SendGradient
    | Update
    | DropGradients
    | SendValues
    | Collect
    | DropPull
    | DropStore
    | StoreAnswer
)
STORE_EFFECTS = (
    LinkTo, SendSeed, TakeSeed, SendGradient, Update, DropGradients, SendValues, Collect, DropPull,
    DropStore, StoreAnswer,
)  # fmt: skip
