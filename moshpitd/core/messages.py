"""What peers say to each other. One rule: messages carry durations and sequence numbers, never
instants, because no two peers share a clock; and each is small, because parts of tensors travel on
bulk links and not here.

`net/wire.py` turns exactly these classes into bytes and checks every field against its type; what a
field *means* is checked by the state machine that handles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from moshpitd.core.outcome import Reason
from moshpitd.core.store_words import STORE_MESSAGES, StoreMessage


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """Which initial parameters a peer's parameters descend from. Between unconfirmed lineages of
    one version the lowest founder wins."""

    founder: str = ""
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Shape:
    """A grid of `sides`; the epoch counts proposals, 0 is the flat group every run starts with."""

    epoch: int = 0
    sides: tuple[int, ...] = field(default=(1,), metadata={"max": 8})


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer says of itself, in the directory (signed there) and inside matchmaking messages.

    `sequence` grows with every record a peer makes; of two records of one peer the higher one
    holds. `addresses` are where its bulk links can be dialled, empty if nowhere; `control` where
    its p2pd can.
    """

    peer_id: str
    sequence: int
    schema: bytes
    version: int
    lineage: Lineage
    round: int = 0
    coordinates: tuple[int, ...] = field(default=(0,), metadata={"max": 8})
    shape: Shape = Shape()
    addresses: tuple[str, ...] = field(default=(), metadata={"max": 16})
    control: tuple[str, ...] = field(default=(), metadata={"max": 16})
    up_mbps: float = 1000.0
    down_mbps: float = 1000.0
    codec: str = "float32"
    has_snapshot: bool = False
    schema_text: str = field(default="", metadata={"max": 4096})


# -- matchmaking


@dataclass(frozen=True, slots=True)
class Invite:
    """I lead a forming group under `key` and wait `waits_s` more: join me."""

    key: str
    attempt: int
    record: Record
    waits_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Take me into your group under `key`. I am committed until I say Leave or hear no answer.

    `followers`: those that a leader who gives way brings along; they will join by themselves.
    `knows`: whom else the sender knows, in a run of one group, where everybody shall be in it.
    """

    key: str
    attempt: int
    record: Record
    weight: float
    newcomer: bool
    followers: tuple[str, ...] = field(default=(), metadata={"max": 64})
    norm: float = 0.0
    knows: tuple[str, ...] = field(default=(), metadata={"max": 64})


@dataclass(frozen=True, slots=True)
class Accepted:
    """Your Join holds; expect Begin within `waits_s`."""

    key: str
    attempt: int
    waits_s: float


@dataclass(frozen=True, slots=True)
class Declined:
    """No, and why; `record` lets the other side learn what it lacks (a newer version, another
    lineage, a moved peer)."""

    key: str
    attempt: int
    reason: Reason
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Later:
    """I am alive and belong here, but my trainers have not contributed yet (or my last round still
    runs)."""

    key: str
    attempt: int
    record: Record


@dataclass(frozen=True, slots=True)
class Redirect:
    """I follow `leader`: talk to it."""

    key: str
    attempt: int
    leader: str


@dataclass(frozen=True, slots=True)
class Leave:
    """I take my Join back."""

    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Member:
    """One line of a group. `weight` 0 only for a newcomer."""

    peer_id: str
    attempt: int
    weight: float
    version: int
    newcomer: bool
    up_mbps: float
    down_mbps: float
    addresses: tuple[str, ...] = field(default=(), metadata={"max": 16})
    norm: float = 0.0  # of its contribution, as it says; 0: not known


@dataclass(frozen=True, slots=True)
class Group:
    """Everything that members must agree on; `group_id` is the hash of all of it, so equal ids
    imply equal lists."""

    group_id: bytes
    key: str
    leader: str
    nonce: int
    round: int
    shape: Shape
    schema: bytes
    lineage: Lineage
    codec: str
    members: tuple[Member, ...] = field(metadata={"max": 64})
    audit_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """The leader closes the group and the round begins. `silent` are those that it asked and that
    gave no answer: whoever else leads the next one need not wait for them again."""

    group: Group
    silent: tuple[str, ...] = ()


# -- the round


@dataclass(frozen=True, slots=True)
class NotMember:
    """`peer_id` is named in the group but is not in it: do not wait for it."""

    group_id: bytes
    peer_id: str


@dataclass(frozen=True, slots=True)
class Without:
    """My contribution to these parts will not come (empty = to none of the parts not yet
    delivered)."""

    group_id: bytes
    reason: Reason
    parts: tuple[int, ...] = field(default=(), metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class NoResult:
    """These parts, which I reduce, will have no result; all members keep local values there."""

    group_id: bytes
    reason: Reason
    epoch: int = 0
    parts: tuple[int, ...] = field(default=(), metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Parity:
    """My last message: a digest over the crc32 of every part's payload. From here on I need nothing
    more of you, unless the digests differ. `late`: see `lateness`; empty, all were in time."""

    group_id: bytes
    digest: bytes
    without_result: int
    late: tuple[int, ...] = field(default=(), metadata={"max": 64})


@dataclass(frozen=True, slots=True)
class Missing:
    """I have no result of these parts and expect none from `reducer`, for `reason`. You are the
    next in their order that I believe alive: take them over, at `epoch` or later."""

    group_id: bytes
    reducer: int
    reason: Reason
    epoch: int
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class TakeOver:
    """I reduce these parts from `epoch` on. Promise to take no result of a lower epoch for them,
    and say which you hold; the answer echoes `number`."""

    group_id: bytes
    number: int
    epoch: int
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Held:
    """A result that a member holds: its epoch, who is inside (a bit mask), its payload's crc32."""

    part: int
    epoch: int
    contributors: int
    crc: int


@dataclass(frozen=True, slots=True)
class Promise:
    """I take no result below `epoch` for `parts` any more; of those I hold `held`, of the others
    none. Parts of a TakeOver that are not named here I promised to a higher epoch."""

    group_id: bytes
    number: int
    epoch: int
    parts: tuple[int, ...] = field(metadata={"max": 65536})
    held: tuple[Held, ...] = field(default=(), metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Again:
    """Nobody holds a result of these parts: push your contributions to me, in `epoch`."""

    group_id: bytes
    epoch: int
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Resend:
    """Hand the results of these parts that you hold over to me; I call them `epoch`."""

    group_id: bytes
    epoch: int
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Crcs:
    """Our digests differ: the crc32 of each of my parts from `first` on, 4 bytes each, big endian,
    0 for a part without a result."""

    group_id: bytes
    first: int
    crcs: bytes


@dataclass(frozen=True, slots=True)
class Audit:
    """I check the reducer of these parts: push to me what you contributed to them."""

    group_id: bytes
    parts: tuple[int, ...] = field(metadata={"max": 65536})


@dataclass(frozen=True, slots=True)
class Audited:
    """I have checked the parts that I chose. The results of `wrong` are not the mean of what their
    contributors sent me."""

    group_id: bytes
    wrong: tuple[int, ...] = field(default=(), metadata={"max": 65536})


# -- an exchange with neighbours


@dataclass(frozen=True, slots=True)
class Letter:
    """My message to you in this round is my `sequence`th; `mass` is its push-sum weight. With
    `full`, what the messages before it add up to comes as well."""

    group_id: bytes
    sequence: int
    mass: float
    full: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """I hold your message whole (or, as a giver, know that you hold mine): our edge counts, if you
    say so too. `counts` false: it does not, for either of us. `ask`: tell me what you said."""

    group_id: bytes
    counts: bool
    ask: bool = False
    answer: bool = False


# -- meetings in pairs


@dataclass(frozen=True, slots=True)
class Pair:
    """My trainer is ready: may our parameters meet? Again: you may have taken my values under this
    nonce, and I have no answer."""

    nonce: bytes
    again: bool = False


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """Ready: send your values. Done: I had them, here is your difference. Neither: no, and nothing
    of this nonce was or will be applied here."""

    nonce: bytes
    ready: bool = False
    done: bool = False


# -- snapshots


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Send me your state; `nonce` names the transfer, on the bulk link too."""

    nonce: bytes
    record: Record


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Here it comes: `parts` parts on the bulk link, then `state_bytes` of opaque trainer state.
    `witnesses` were in my last group."""

    nonce: bytes
    version: int
    lineage: Lineage
    digest: bytes
    parts: int
    state_bytes: int
    witnesses: tuple[str, ...] = field(default=(), metadata={"max": 64})


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """No state from me now, and why."""

    nonce: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class DigestQuery:
    """Which digest has your snapshot of this version?"""

    nonce: bytes
    version: int


@dataclass(frozen=True, slots=True)
class DigestReply:
    """Empty digest: I hold no snapshot of that version any more."""

    nonce: bytes
    version: int
    digest: bytes


# -- presence


@dataclass(frozen=True, slots=True)
class Hello:
    """My record; sent to peers newly heard of, so that both sides know of each other without the
    directory."""

    record: Record
    answer: bool = False


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I am leaving (drain, stop, or my last trainer went): do not wait for me. `sequence` is that
    of our record, 0 without one: who holds a later one knows that we have come back since."""

    reason: Reason
    sequence: int = 0


Message: TypeAlias = (
    Invite
    | Join
    | Accepted
    | Declined
    | Later
    | Redirect
    | Leave
    | Begin
    | NotMember
    | Without
    | NoResult
    | Parity
    | SnapshotRequest
    | SnapshotOffer
    | SnapshotRefused
    | DigestQuery
    | DigestReply
    | Hello
    | Goodbye
    | Missing
    | TakeOver
    | Promise
    | Again
    | Resend
    | Crcs
    | Audit
    | Audited
    | Letter
    | Counts
    | Pair
    | PairAnswer
    | StoreMessage
)

# The position is the kind on the wire: append only.
MESSAGES: tuple[type, ...] = (
    Invite,
    Join,
    Accepted,
    Declined,
    Later,
    Redirect,
    Leave,
    Begin,
    NotMember,
    Without,
    NoResult,
    Parity,
    SnapshotRequest,
    SnapshotOffer,
    SnapshotRefused,
    DigestQuery,
    DigestReply,
    Hello,
    Goodbye,
    Missing,
    TakeOver,
    Promise,
    Again,
    Resend,
    Crcs,
    Audit,
    Audited,
    Letter,
    Counts,
    Pair,
    PairAnswer,
    *STORE_MESSAGES,
)
