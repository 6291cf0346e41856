"""What the outside should do, asked by a Peer. One rule: effects are carried out in the order they
were emitted; the driver adds nothing of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from moshpitd.core.messages import Group, Message, Record
from moshpitd.core.outcome import Outcome
from moshpitd.core.store_words import StoreEffect


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `message` to `to`; answer `Undelivered` if that fails."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Announce:
    """Store our record under `key` for `ttl_s`, or take it back if that is 0; answer
    `Announced`."""

    key: str
    record: Record
    ttl_s: float


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the directory for `key`; answer `Found`."""

    key: str


@dataclass(frozen=True, slots=True)
class Open:
    """A round begins: prepare accumulators for the parts we reduce and links to the other members.

    `reducers[part]` is a member index. `trainers` are the local contributions (trainer, weight)
    that are averaged into ours; `late` are trainers that get the result as a delta. With
    `values_from_snapshot` our values are the staged state.
    """

    group: Group
    index: int
    reducers: tuple[int, ...]
    trainers: tuple[tuple[str, int], ...]
    late: tuple[str, ...]
    weight: float
    norm_limit: float | None = None  # of a part of a contribution or result; larger is refused


@dataclass(frozen=True, slots=True)
class OpenEdges:
    """An exchange with neighbours begins: the messages of the members `sources` go to slots 0, 1 ..
    of the trainer's bucket, ours goes to `targets`, and what our messages before add up to, as raw
    values, to `in_full` of them. Answer `EdgesCoded`, and `EdgeArrived` as parts come."""

    group: Group
    index: int
    trainer: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    in_full: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenPair:
    """Two peers take the mean of their parameters: expect what `peer` sends as `nonce`, whole.

    Active: it is a difference; add it to our values, once for a nonce, then answer `PairArrived`.
    Else it is the peer's values: stage them and answer `PairArrived`. Or `PairFailed`. `dialled`:
    we can be."""

    nonce: bytes
    peer: str
    addresses: tuple[str, ...]
    trainer: str
    active: bool
    dialled: bool = True


@dataclass(frozen=True, slots=True)
class PushPair:
    """Active: send our values. Else put the mean in the place of ours, unless that was done, and
    send what the peer has to add."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class ClosePair:
    """Forget what is staged or kept for this meeting; nothing of it is applied any more."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Push:
    """Encode our contribution to `parts` (or send the stored results) and stream them to member
    `to`."""

    group_id: bytes
    to: int
    parts: tuple[int, ...]
    result: bool
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Average:
    """Close the part: mean of what is in the accumulator (our own contribution too), encode, put in
    place, keep the payload; answer `Averaged` or `PartFailed`."""

    group_id: bytes
    part: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """From now on nothing below `epoch` touches these parts: no result, no contribution, and no
    average of ours that is not in place yet. Answer `Barred` with what is in place; it echoes
    `asker` (a member index) and `number`."""

    group_id: bytes
    epoch: int
    parts: tuple[int, ...]
    asker: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send the results in our bucket to member `to`, as values and under `epoch`, each with who is
    inside and its payload's crc32 (frames of kind HANDOVER)."""

    group_id: bytes
    to: int
    parts: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Await:
    """We asked member `sender` to hand these parts over: what it sends under `epoch` replaces what
    is in place, whoever reduces the parts."""

    group_id: bytes
    sender: int
    parts: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class PushAudit:
    """Send what we contributed to these parts, as it was, to member `to` once more."""

    group_id: bytes
    to: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenAudit:
    """We check these parts: add up what their contributors push as audits; answer `AuditArrived`
    for each."""

    group_id: bytes
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """All that we asked for the part is here: compare its mean with what is in place, within the
    codec's bound; answer `Checked`."""

    group_id: bytes
    part: int


@dataclass(frozen=True, slots=True)
class Linger:
    """The buckets go back, or to the next round: nothing that comes for this group is taken any
    more. What we made of its parts and what is queued can still be sent, until `Close`."""

    group_id: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """The round is over for us: free accumulators, payloads and queued pushes of this group.

    `kept` false: nothing of the round is used. `without` are parts that keep local values, whatever
    result is in place there: members could not agree on one.
    """

    group_id: bytes
    kept: bool = True
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Expect transfer `nonce` from `donor`: open a link to it and stage what arrives."""

    nonce: bytes
    donor: str
    addresses: tuple[str, ...]
    parts: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class PushSnapshot:
    """Stream our snapshot as transfer `nonce` to `to` (open a link to `addresses`); answer
    `SnapshotSent` or `SnapshotFailed`."""

    nonce: bytes
    to: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Forget transfer `nonce` and what was staged for it."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The staged state of `nonce` is confirmed: put it into the buckets of `trainers` and make it
    our donor copy of `version`."""

    nonce: bytes
    version: int
    trainers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefreshSnapshot:
    """Copy the bucket of `trainer`, which holds the result of `version`, to the donor copy; answer
    `SnapshotRefreshed`."""

    version: int
    trainer: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Compute the digest of our donor copy of `version`; answer `Digested`."""

    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The call `token` is over."""

    token: str
    trainer: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth counting, logging, recording or checking. `what` is one of NOTES; fields are
    plain values."""

    what: str
    peer: str = ""
    reason: str = ""
    detail: str = ""
    fields: dict[str, object] = field(default_factory=dict)


# what -> when it is emitted. Metrics, the flight recorder and the simulator's checks read these and
# nothing else.
NOTES = {
    "attempt_started": "matchmaking began (key, round)",
    "group_formed": "a group began here (group, size, leader, index)",
    "attempt_ended": "matchmaking ended without a group (reason, heard, sentence)",
    "member_excluded": "a member fell out of the running round (peer, reason)",
    "offers_less": "we are slow and contribute to some parts only (parts, offered)",
    "takeover_started": "we take over parts of a reducer (reason, epoch, parts)",
    "part_taken_over": "nobody held a result of a part: contributions are pushed again (part)",
    "part_repaired": "our result of a part was another than the majority's (part)",
    "audit_failed": "a part's result is not the mean of its contributors (part, its reducer)",
    "woke": "this daemon stood still for longer than a silence may last (slept_s)",
    "part_without_result": "a part keeps local values (part, reason)",
    "round_ended": "a round is over (outcome, sizes, parts, seconds per phase, version)",
    "parity_differs": "a member reports other bits (peer)",
    "peer_heard": "a peer is known that was not (peer)",
    "peer_lost": "a peer is forgotten (peer, reason)",
    "strike": "a peer broke the protocol (peer, reason)",
    "refused": "a peer was refused (peer, reason, detail)",
    "shape_adopted": "the grid has a new shape (epoch, sides)",
    "lineage_adopted": "our parameters now descend from another start (founder)",
    "snapshot_started": "a snapshot is being fetched (donor)",
    "snapshot_loaded": "a snapshot was loaded (donor, version)",
    "snapshot_failed": "a snapshot could not be had from a donor (donor, reason)",
    "snapshot_served": "a snapshot was sent to a newcomer (peer)",
    "drained": "nothing runs any more after a drain",
}

Effect: TypeAlias = (
    Send
    | Announce
    | LookUp
    | Open
    | OpenEdges
    | OpenPair
    | PushPair
    | ClosePair
    | Push
    | Average
    | Bar
    | HandOver
    | Await
    | PushAudit
    | OpenAudit
    | Check
    | Linger
    | Close
    | FetchSnapshot
    | PushSnapshot
    | DropSnapshot
    | LoadSnapshot
    | RefreshSnapshot
    | Digest
    | Finish
    | Note
    | StoreEffect
)
