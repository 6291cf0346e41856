"""How an attempt to average ends, as values. One rule: nothing that a peer, the network or a
trainer does raises; it becomes one of these words, and every word has a test that produces it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The four ends of `average()`."""

    COMPLETE = (
        "complete"  # every part has a result and every member's contribution is in every part
    )
    PARTIAL = "partial"  # a part has no result, or a member is missing from one
    ALONE = "alone"  # nobody to average with: the input is the answer
    FAILED = "failed"  # nothing changed; `reason` says why


class Reason(StrEnum):
    """Why a peer, a part or a round was refused, left out or given up."""

    # matchmaking: answers between peers
    NO_TRAINER = "no_trainer"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    PREEMPTED = "preempted"
    SCHEMA = "schema_differs"
    LINEAGE = "lineage_differs"
    MOVED = "moved"
    STRIKES = "too_many_strikes"
    REFUSED = "contribution_refused"
    VERSION = "version_out_of_range"
    WEIGHT = "weight_out_of_range"
    # how a peer falls out of an attempt or a round
    UNREACHABLE = "unreachable"
    NO_ANSWER = "no_answer"
    LINK_LOST = "link_lost"
    SILENT = "silent"
    NOT_MEMBER = "not_member"
    WITHDRAWN = "withdrawn"
    SLOW = "too_slow"
    # why a part has no result, or a contribution is not in it
    CODEC = "codec_failed"
    NOT_FINITE = "not_finite"
    PART_SIZE = "wrong_part_size"
    BUCKET_MODIFIED = "bucket_modified"
    PARITY = "parity_differs"
    AUDIT = "audit_failed"
    NORM = "norm_out_of_range"
    EXCLUDED = "excluded_meanwhile"
    # why a whole attempt ends without a group
    NO_PEERS = "no_peers"
    NO_REDUCER = "no_reducer"
    NO_CONTRIBUTORS = "no_contributors"
    TIMEOUT = "timeout"
    TOO_FEW = "too_few_participants"
    NO_DONOR = "no_donor"
    TRAINER_GONE = "trainer_gone"
    BUSY = "bucket_busy"
    # snapshots
    NO_SNAPSHOT = "no_snapshot"
    DIGEST = "digest_differs"
    SUPERSEDED = "superseded"


DISPUTED = (Reason.PARITY, Reason.AUDIT)
"""Without a result for these, a part keeps local values whatever comes for it later, and a sweep
ends: it is not to be averaged further."""


class OnPartial(StrEnum):
    """What the caller wants done with a partial result."""

    ACCEPT = "accept"
    SKIP = "skip"  # keep the local values, report it
    RAISE = "raise"  # the same, and the client raises


@dataclass(frozen=True, slots=True)
class Heard:
    """A neighbour's message that counts: its entry of the mixing matrix, what travelled beside the
    values, and where they lie in the bucket. `full`: what the messages before add up to lies there
    too."""

    peer_id: str
    share: float
    mass: float
    sequence: int
    full: bool
    slot: int


@dataclass(frozen=True, slots=True)
class Row:
    """Our row of one round's mixing matrix, as it came to be. A share that did not arrive is in
    `own_share`; `unheard` are the neighbours that the matrix named and whose edge does not
    count."""

    own_share: float = 1.0
    heard: tuple[Heard, ...] = ()
    unheard: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `average()` reports. Invariant: `accepted` means that the bucket's values are to be
    copied back.

    `contributors` are the peers inside every part that has a result, in member order;
    `participants` is their number. `excluded` names the members missing from a part, and those that
    left parts they reduced without a result, with the reason. `agreed` are the members that said
    they hold the same bits as we do, ourselves included: two members in each other's `agreed` do.
    """

    status: Status
    reason: Reason | None = None
    detail: str = ""
    accepted: bool = True
    group_size: int = 1
    participants: int = 1
    contributors: tuple[str, ...] = ()
    excluded: tuple[tuple[str, Reason], ...] = ()
    agreed: tuple[str, ...] = ()
    parts: int = 0
    parts_without_result: tuple[int, ...] = ()
    rounds: int = 0
    version: int = 0
    loaded_snapshot: bool = False
    newcomer: bool = False
    total_weight: float = 0.0
    group_id: bytes = b""
    seconds: tuple[
        tuple[str, float], ...
    ] = ()  # phase -> duration: catch_up, matchmaking, exchange, parity
    row: Row | None = None  # of an exchange with neighbours
