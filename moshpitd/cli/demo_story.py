"""What the trainers tell, line by line, and what it adds up to for one peer.

One rule: every figure of the report comes from here, that is, from what a trainer was told by its
daemon; nothing is assumed because it was planned.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["waiting", "starting", "training", "finishing", "done", "killed", "restarting"]


class JsonLines:
    """New lines of a file that another process appends to. A line counts when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                block = file.read()
        except FileNotFoundError:
            return []
        complete = block[: block.rfind(b"\n") + 1]
        self._read += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


@dataclass(slots=True)
class Story:
    """One peer over all its lives: the counts add up, the rest is what was heard last."""

    steps: int  # local steps that are planned
    lines: JsonLines | None = None
    state: State = "waiting"
    peer_ids: list[str] = field(default_factory=list)  # one per life that started
    step: int = 0
    version: int = 0
    group: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")
    took_snapshot: bool = False  # the present life began with the swarm's parameters
    missed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    group_sizes: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    end: dict[str, Any] = field(default_factory=dict)

    def begin(self, lines: JsonLines) -> None:
        """A trainer was started that will tell there."""
        self.lines, self.state = lines, "starting"

    def killed(self) -> None:
        self.look()
        self.lines, self.state = None, "killed"
        self.took_snapshot = False

    def look(self) -> bool:
        """Take in what was told since; False when that is nothing."""
        new = self.lines.new() if self.lines is not None else []
        for line in new:
            self._hear(line)
        return bool(new)

    @property
    def rounds(self) -> int:
        """Averages that were asked for and came to an end."""
        return self.outcomes.total()

    @property
    def together(self) -> int:
        """Rounds in company."""
        return self.outcomes["complete"] + self.outcomes["partial"]

    @property
    def started(self) -> bool:
        return self.state in ("training", "finishing", "done")

    def summary(self, peer: int) -> dict[str, Any]:
        """The peer's part of the report."""
        return {
            "peer": peer,
            "peer_id": self.peer_ids[-1] if self.peer_ids else "",
            "rounds": self.rounds,
            "outcomes": {
                word: self.outcomes[word] for word in ("complete", "partial", "alone", "failed")
            },
            "reasons": dict(self.reasons),
            "group_sizes": {str(size): n for size, n in sorted(self.group_sizes.items())},
            "bytes": {"sent": self.sent, "received": self.received},
            "version": self.version,
            "steps": self.step,
            "missed": self.missed,
            "accuracy": self.end.get("accuracy"),
        }

    def _hear(self, line: dict[str, Any]) -> None:
        self.step = line.get("step", self.step)
        self.version = line.get("version", self.version)
        self.loss = line.get("loss", self.loss)
        self.accuracy = line.get("accuracy", self.accuracy)
        match line["event"]:
            case "start":
                self.peer_ids.append(line["peer_id"])
                self.took_snapshot = line["loaded_snapshot"]
                self.state = "training"
            case "round":
                self._hear_round(line)
            case "missed":
                self.missed += 1
            case "end":
                self.end, self.state = line, "done"

    def _hear_round(self, line: dict[str, Any]) -> None:
        status, reason = line["status"], line["reason"]
        self.outcomes[status] += 1
        if reason:
            self.reasons[f"{status}: {reason}"] += 1
        self.group = line["group_size"]
        self.group_sizes[self.group] += 1
        self.sent += line["bytes_sent"]
        self.received += line["bytes_received"]
        if self.step >= self.steps:
            self.state = "finishing"
