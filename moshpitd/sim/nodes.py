"""What lives in the world: nodes, their daemons and their trainers. One rule: plain state and no
behaviour beyond a node's clock; `world.py` moves it, `bulk.py` moves its tensors, `checks.py`
judges it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from moshpitd.core.effects import Effect, Push
from moshpitd.core.events import Event
from moshpitd.core.messages import Group, Lineage, Message
from moshpitd.core.outcome import Outcome
from moshpitd.core.params import Params
from moshpitd.core.succession import Succession

Vector: TypeAlias = npt.NDArray[np.float64]


def digest_of(vector: Vector) -> bytes:
    """What stands for a trainer's parameters in Attached, offers and Digested."""
    return blake2b(vector.tobytes(), digest_size=16).digest()


class Participant(Protocol):
    """The doors of `core.peer.Peer`; the checks are themselves tested with small broken ones."""

    @property
    def lineage(self) -> Lineage: ...

    def handle(self, event: Event, now: float) -> None: ...

    def take_effects(self) -> list[Effect]: ...

    def deadline(self) -> float | None: ...


class Liar(Protocol):
    """What a node whose daemon lies puts in place of what it means."""

    def says(self, to: str, message: Message) -> list[tuple[str, Message]]: ...

    def pushes(self, values: Vector) -> Vector: ...


MakePeer: TypeAlias = Callable[[Params, str, Random, int], Participant]
"""(params, peer id, generator, a number that grows with every life of that peer)."""


@dataclass(slots=True)
class Trainer:
    """A training process: owns `values`, lends `bucket` to its daemon while a call runs.

    Invariant: `values` changes only by a local step or by an accepted outcome. Each attachment has
    a `name` and a bucket of its own, so a round that outlives one never touches the next.
    """

    number: int
    values: Vector
    step: Vector  # what one local step adds
    compute_s: float
    rng: Random
    straggles: bool = False
    name: str = ""
    bucket: Vector = field(init=False)
    before: tuple[str, Vector] | None = None  # name and bucket of the attachment before
    attachments: int = 0
    alive: bool = True
    attached: bool = False
    token: str = ""  # of the open call
    calls: int = 0
    lone: int = 0  # calls in a row that ended without a group
    # What the last outcome said, kept for a re-attachment after the daemon died.
    version: int = 0
    lineage: Lineage = field(default_factory=Lineage)
    outcomes: list[Outcome] = field(default_factory=list)
    complete: int = 0  # complete outcomes since the counter was last reset (phase two)

    def __post_init__(self) -> None:
        self.bucket = self.values.copy()


@dataclass(slots=True)
class Round:
    """The data plane's side of one open group on one node."""

    group: Group
    index: int
    reducers: tuple[int, ...]
    weight: float
    value: Vector  # our contribution as it was at Open
    buckets: dict[str, Vector]  # trainer -> where results go
    late: dict[str, Vector]  # trainer -> where deltas go
    incarnations: list[int]  # of every member's node when the link was made
    bars: dict[int, int] = field(default_factory=dict)  # part -> nothing below this epoch
    sums: dict[tuple[int, int], Vector] = field(default_factory=dict)  # by (part, epoch)
    senders: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    totals: dict[tuple[int, int], float] = field(default_factory=dict)
    payloads: dict[tuple[int, int], Payload] = field(default_factory=dict)  # parts we reduced
    awaited: set[tuple[int, int, int]] = field(default_factory=set)  # (sender, part, epoch)
    audits: dict[int, dict[int, Vector]] = field(default_factory=dict)  # part -> sender -> values
    succession: Succession | None = None
    results: dict[int, Payload] = field(default_factory=dict)  # what stands in the bucket
    trainers: tuple[str, ...] = ()  # whose buckets these are
    placed: dict[int, float] = field(default_factory=dict)  # when each result came
    arrived: set[tuple[int, int, int]] = field(
        default_factory=set
    )  # membership only, never iterated
    lost: set[int] = field(default_factory=set)
    leaving: list[tuple[Node, tuple[bytes, int], Push]] = field(default_factory=list)
    lingers: bool = False  # the buckets went back, and nothing that comes is used
    settled: bool = False  # it has said Parity (or closed): nothing of it changes any more
    returned: set[str] = field(default_factory=set)  # trainers whose bucket is not its own any more


@dataclass(frozen=True, slots=True)
class Payload:
    """The average of one part as its reducer encoded it."""

    values: Vector
    contributors: tuple[int, ...]
    crc: int
    epoch: int = 0


@dataclass(slots=True)
class Transfer:
    """A snapshot on its way, seen from the newcomer (`staged`) or from the donor (`staged`
    empty)."""

    other: str
    pieces: int
    staged: list[Vector] = field(default_factory=list)


Early: TypeAlias = dict[bytes, list[tuple[Callable[..., None], tuple[Any, ...]]]]
"""Group or transfer -> what arrived for it before it was opened."""


@dataclass(slots=True)
class Plane:
    """A node's bulk side. `up_free` and `down_free` are the instants at which its wire is idle
    again."""

    up_mbps: float
    down_mbps: float
    up_free: float = 0.0
    down_free: float = 0.0
    queued: dict[bytes, float] = field(default_factory=dict)  # by group: its last part has left
    rounds: dict[bytes, Round] = field(default_factory=dict)
    copy_version: int = -1
    copy: Vector | None = None  # the donor copy
    incoming: dict[bytes, Transfer] = field(default_factory=dict)
    outgoing: dict[bytes, Transfer] = field(default_factory=dict)
    early: Early = field(default_factory=dict)
    closed: dict[bytes, float] = field(
        default_factory=dict
    )  # group or transfer -> when it was closed


@dataclass(slots=True)
class Node:
    """One machine. Invariant: whatever was addressed to an earlier `incarnation` of its daemon
    never reaches a later one, except a control message, which finds whoever answers under the
    PeerID."""

    index: int
    peer_id: str
    clock_offset: float
    dialable: bool
    trainers: list[Trainer]
    plane: Plane
    story: deque[tuple[float, Event | Effect | str]]
    peer: Participant | None = None  # None while the daemon is dead
    incarnation: int = 0
    died_at: float = -1.0
    vanished: bool = False  # died without closing its connections
    gone: bool = False  # leaving, or dead and never back
    frozen_at: float = -1.0
    thaws_at: float | None = None  # set while it stands still
    backlog: list[tuple[Event, float]] = field(default_factory=list)  # what it has yet to hear
    clock_rate: float = 1.0
    liar: Liar | None = None
    lied: bool = False
    clock: float = 0.0  # the last instant that its daemon was told
    timer: float | None = None  # world time of the armed timer
    ticked_at: float = -1.0
    ticks_there: int = 0

    def clock_at(self, now: float) -> float:
        """What its clock shows at the world's `now`."""
        return self.clock_offset + self.clock_rate * now

    def world_time(self, clock: float) -> float:
        """When its clock shows that."""
        return (clock - self.clock_offset) / self.clock_rate

    def trainer(self, name: str) -> Trainer | None:
        return next((trainer for trainer in self.trainers if trainer.name == name), None)

    def bucket(self, name: str) -> Vector | None:
        """The memory that the daemon shares with that trainer. A daemon that stood still while one
        died and came back has both to hear, and holds the old memory until then."""
        for trainer in self.trainers:
            if trainer.name == name:
                return trainer.bucket
            if trainer.before is not None and trainer.before[0] == name:
                return trainer.before[1]
        return None
