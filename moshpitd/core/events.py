"""What happened, told to a Peer. One rule: past tense, facts only; an event never says what to do
about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from moshpitd.core.messages import Held, Message, Record
from moshpitd.core.outcome import OnPartial, Reason
from moshpitd.core.store_words import StoreEvent


@dataclass(frozen=True, slots=True)
class Attached:
    """A trainer attached. The first one fixes the run's schema; `digest` is of its tensors,
    `version` a checkpoint's claim."""

    trainer: str
    schema: bytes
    schema_text: str
    part_sizes: tuple[int, ...]  # raw bytes of each part
    digest: bytes
    version: int = 0
    founder: str = ""  # lineage of a checkpoint or of an earlier session; empty = a fresh start
    founder_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """A trainer detached or died."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Synced:
    """A trainer asked to be brought up to date before it starts (the first step of an average,
    alone)."""

    trainer: str
    token: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Mix:
    """What a trainer wants of an exchange with neighbours, beside its values. `topology` is a name
    of core/topologies; `sequence` counts its messages, also those that reached nobody; neighbours
    not in `knows` get the values of `full` too."""

    topology: str
    sequence: int = 0
    mass: float = 1.0
    full: bool = False
    knows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contributed:
    """A trainer handed over its bucket (already checked to be finite). `weight` is an integer
    0..max_weight; `rounds` 0 means a sweep."""

    trainer: str
    token: str
    weight: int
    rounds: int = 1
    min_participants: int = 1
    on_partial: OnPartial = OnPartial.ACCEPT
    timeout_s: float = 60.0
    norm: float = 0.0  # Euclidean, of all floating values; 0: not known
    mix: Mix | None = None  # with neighbours instead of everybody


@dataclass(frozen=True, slots=True)
class ValuesKept:
    """A trainer's parameters are with the data plane, where others may meet them."""

    trainer: str


@dataclass(frozen=True, slots=True)
class MeetAsked:
    """A trainer wants its parameters to meet those of one neighbour."""

    trainer: str
    token: str
    topology: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PairArrived:
    """What the other one of a pair sent is here, whole. As the active one: and is applied."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class PairFailed:
    """What it sent cannot be used, and nothing is applied."""

    nonce: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    """The local API refused a trainer's contribution (not finite, bad weight): nobody should wait
    for this peer now."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The trainer gave up waiting for the call `token`."""

    token: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of `sender`, whose identity the link proved."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message could not be handed to `to`."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Announced:
    """Our record is in the directory under `key` (or, not ok, could not be stored)."""

    key: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The directory's answer for `key`, without our record. `ok` false: nobody could be asked."""

    key: str
    records: tuple[Record, ...]
    ok: bool = True


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The bulk link to `peer` ended or could not be made."""

    peer: str
    reason: Reason = Reason.LINK_LOST


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A contribution to a part that we reduce is in the accumulator, whole."""

    group_id: bytes
    part: int
    sender: int  # member index
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class PartRefused:
    """A contribution (or a result) failed the guard and touched nothing: a strike."""

    group_id: bytes
    part: int
    sender: int
    reason: Reason
    detail: str = ""
    result: bool = False
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Averaged:
    """A part that we reduce is closed: these members are in it, its payload has this crc32, our own
    copy is in place."""

    group_id: bytes
    part: int
    contributors: tuple[int, ...]
    crc: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A part's result came from its reducer and is in place in the bucket."""

    group_id: bytes
    part: int
    sender: int
    contributors: tuple[int, ...]
    crc: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Barred:
    """The answer to `Bar`: nothing below `epoch` touches these parts any more, and this is what
    their buckets hold. Parts that were barred at a higher epoch before are left out."""

    group_id: bytes
    epoch: int
    parts: tuple[int, ...]
    held: tuple[Held, ...] = ()
    asker: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class AuditArrived:
    """A contribution to a part that we check is here, whole."""

    group_id: bytes
    part: int
    sender: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A part that we check was compared. Not `right`: `detail` says by how much it differs."""

    group_id: bytes
    part: int
    right: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EdgesCoded:
    """Our message to the neighbours is encoded, and what it decodes to is in the bucket; or not,
    for `reason`."""

    group_id: bytes
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EdgeArrived:
    """A part of a neighbour's message is in its slot; `left` are still to come. `full`: of what its
    messages before add up to."""

    group_id: bytes
    sender: int
    left: int
    full: bool = False


@dataclass(frozen=True, slots=True)
class EdgeRefused:
    """A neighbour's message failed the guard: a strike."""

    group_id: bytes
    sender: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Listened:
    """From these peers bytes came since this was last said. Told every fraction of a second while a
    round is open, also when nobody was heard; links are pinged meanwhile, so a live one is never
    quiet."""

    heard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartFailed:
    """Our own work on a part failed (codec, modified bucket): as its reducer (`result`) or as its
    sender."""

    group_id: bytes
    part: int
    reason: Reason
    detail: str = ""
    result: bool = False
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """All parts and the trainer state of transfer `nonce` are in the staging buffer; `digest` is
    computed from them."""

    nonce: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotProgressed:
    """Bytes of transfer `nonce` arrived."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """Transfer `nonce` broke (as donor or as newcomer)."""

    nonce: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class SnapshotSent:
    """As donor: the last byte of transfer `nonce` was handed to the link."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Digested:
    """The digest of our snapshot of `version` (empty if it was replaced meanwhile)."""

    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotRefreshed:
    """The donor copy now holds `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class StateStored:
    """A trainer handed over `nbytes` of opaque state for newcomers."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Addressed:
    """Our own addresses or measured rates changed."""

    addresses: tuple[str, ...]
    control: tuple[str, ...]
    up_mbps: float
    down_mbps: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The operator or a preemption notice asked this peer to leave: finish what runs, begin nothing
    new. `preempted`: its machine will be taken away."""

    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Ticked:
    """`deadline()` has passed; nothing else happened."""


Event: TypeAlias = (
    Attached
    | TrainerGone
    | Synced
    | Contributed
    | ValuesKept
    | MeetAsked
    | PairArrived
    | PairFailed
    | ContributionRefused
    | Cancelled
    | Received
    | Undelivered
    | Announced
    | Found
    | LinkLost
    | PartArrived
    | PartRefused
    | Averaged
    | ResultArrived
    | Barred
    | AuditArrived
    | Checked
    | EdgesCoded
    | EdgeArrived
    | EdgeRefused
    | Listened
    | PartFailed
    | SnapshotArrived
    | SnapshotProgressed
    | SnapshotFailed
    | SnapshotSent
    | Digested
    | SnapshotRefreshed
    | StateStored
    | Addressed
    | Drained
    | Ticked
    | StoreEvent
)
