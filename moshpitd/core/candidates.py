"""Those whom an attempt may meet, and what they have said so far. One rule: state only;
`matchmaking` decides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from moshpitd.core.messages import Join, Record
from moshpitd.core.outcome import Reason


class Answer(Enum):
    """What a candidate has said so far."""

    UNASKED = auto()
    ASKED = auto()
    LATER = auto()
    JOINED = auto()
    DECLINED = auto()
    ELSEWHERE = auto()  # follows another leader
    LOST = auto()


OPEN = (Answer.UNASKED, Answer.ASKED, Answer.LATER, Answer.ELSEWHERE)
"""Answers after which a peer may still lead us."""


@dataclass(slots=True)
class Candidate:
    record: Record
    answer: Answer = Answer.UNASKED
    asked_at: float = 0.0
    join: Join | None = None
    reason: Reason | None = None
    leader: str = ""  # whom it follows, if ELSEWHERE
    waited_for: bool = True  # False: it made others wait in vain; its Later holds nobody up


@dataclass(slots=True)
class Following:
    leader: str
    since: float
    accepted: bool = False
    until: float = 0.0


def sentence(candidates: Collection[Candidate]) -> str:
    """What became of them: "heard 3 peers: 2 declined (schema_differs), 1 lost (unreachable)"."""
    if not candidates:
        return "heard no other peer"
    words: dict[str, int] = {}
    for candidate in candidates:
        word = candidate.answer.name.lower()
        if candidate.reason is not None:
            word += f" ({candidate.reason.value})"
        words[word] = words.get(word, 0) + 1
    return f"heard {len(candidates)} peers: " + ", ".join(
        f"{n} {word}" for word, n in words.items()
    )
