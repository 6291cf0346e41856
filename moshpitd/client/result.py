"""What a trainer is told about an average. One rule: plain Python values, so that a result can be
kept, compared and printed when the daemon and its messages are long gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpitd.errors import TrainerError
from moshpitd.rpc.stubs import messages


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a running average is. `parts` is 0 until a group exists."""

    phase: str  # catch_up | matchmaking | exchange | parity
    group_size: int
    parts_done: int
    parts: int
    round: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A neighbour's message: its entry of the mixing matrix, and its slot in the bucket."""

    peer_id: str
    share: float
    mass: float
    sequence: int
    full: bool
    slot: int


@dataclass(frozen=True, slots=True)
class Row:
    """Of an exchange with neighbours. What was not delivered is in `own_share`."""

    own_share: float
    heard: tuple[Heard, ...]
    unheard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """How `average()` or `sync()` ended. Invariant: the model was written to iff `applied`.

    `contributors` are the PeerIDs whose values are in every part that has a result, `participants`
    their number; `excluded` maps the other members of the group to the reason of each.
    """

    status: str  # complete | partial | alone | failed
    reason: str = ""
    detail: str = ""
    accepted: bool = False
    group_size: int = 1
    participants: int = 1
    contributors: tuple[str, ...] = ()
    excluded: dict[str, str] = field(default_factory=dict)
    parts: int = 0
    parts_without_result: tuple[int, ...] = ()
    rounds: int = 0
    version: int = 0
    founder: str = ""
    founder_digest: bytes = b""
    loaded_snapshot: bool = False
    newcomer: bool = False
    total_weight: float = 0.0
    group_id: bytes = b""
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> duration
    bytes_sent: int = 0
    bytes_received: int = 0
    delta: bool = False
    moved: bool = False  # in place: the values lie in the bucket's other block
    row: Row | None = None

    @property
    def applied(self) -> bool:
        """The bucket's values went to the model. A loaded snapshot always does, also when the
        round after it was not accepted: the daemon counts its version from then on, and older
        values must not pass for it."""
        return self.accepted or self.loaded_snapshot

    def __str__(self) -> str:
        """One line for logs: "partial: 3 of 4, version 17, silent: ..."."""
        words = [f"{self.status}: {self.participants} of {self.group_size}, version {self.version}"]
        words += [self.reason] if self.reason else []
        words += [self.detail] if self.detail else []
        return ", ".join(words)


class PartialAverage(TrainerError):
    """Raised for `on_partial="raise"` when the result was not accepted; the model is unchanged."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__(
            f"the average is not acceptable: {result}", code="ABORTED", reason="partial"
        )


def result_of(message: messages.Result) -> Result:
    return Result(
        status=message.status,
        reason=message.reason,
        detail=message.detail,
        accepted=message.accepted,
        group_size=message.group_size,
        participants=message.participants,
        contributors=tuple(message.contributors),
        excluded={line.peer_id: line.reason for line in message.excluded},
        parts=message.parts,
        parts_without_result=tuple(message.parts_without_result),
        rounds=message.rounds,
        version=message.version,
        founder=message.founder,
        founder_digest=message.founder_digest,
        loaded_snapshot=message.loaded_snapshot,
        newcomer=message.newcomer,
        total_weight=message.total_weight,
        group_id=message.group_id,
        seconds=dict(message.seconds),
        bytes_sent=message.bytes_sent,
        bytes_received=message.bytes_received,
        delta=message.delta,
        moved=message.moved,
        row=_row_of(message.row) if message.HasField("row") else None,
    )


def _row_of(message: messages.Row) -> Row:
    heard = [
        Heard(one.peer_id, one.share, one.mass, one.sequence, one.full, one.slot)
        for one in message.heard
    ]
    return Row(message.own_share, tuple(heard), tuple(message.unheard))


def progress_of(message: messages.Progress) -> Progress:
    return Progress(
        phase=message.phase,
        group_size=message.group_size,
        parts_done=message.parts_done,
        parts=message.parts,
        round=message.round,
    )
