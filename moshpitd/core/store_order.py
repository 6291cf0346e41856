"""In which order gradients are applied, and who may read when: the staleness bound. One rule: this
is `tensors.rules.asysg.Store` without its tensors, and a test holds the two against each other.

Pure bookkeeping of one coordinator: workers and gradients are names here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moshpitd.core.store_words import Gradient, Rules, Verdict


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gradient that is held by all owners and in no version yet."""

    worker: str
    read: int
    sequence: int
    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Batch:
    """One update."""

    version: int
    gradients: tuple[Waiting, ...]


@dataclass(slots=True)
class Ordering:
    """Invariants: every gradient of a batch has version - 1 - read <= max_staleness; a worker has
    at most one pull outstanding."""

    rules: Rules
    version: int
    pulled: dict[str, int] = field(default_factory=dict)  # worker -> version read; block only
    waiting: list[Waiting] = field(default_factory=list)

    def pull(self, worker: str) -> int | None:
        """The version it may read; None: ask again after the next update."""
        if not self.rules.block:
            return self.version
        self.pulled.pop(worker, None)
        outstanding = [*self.pulled.values(), *(one.read for one in self.waiting)]
        if not self._in_time([*outstanding, self.version], first=self.version):
            return None
        self.pulled[worker] = self.version
        return self.version

    def push(self, new: Waiting) -> Verdict:
        """Take it, or say why not. A version from the future is one of a store that was lost."""
        if not 0 <= self.version - new.read <= self.rules.max_staleness:
            self.pulled.pop(new.worker, None)
            return Verdict.TOO_OLD
        if self.rules.block and self.pulled.get(new.worker) != new.read:
            return Verdict.NOT_PULLED
        self.pulled.pop(new.worker, None)
        self.waiting.append(new)
        return Verdict.TAKEN

    def forget(self, worker: str) -> None:
        """Nobody waits for its pull any more; what arrived whole stays. Call `advance` then."""
        self.pulled.pop(worker, None)

    def advance(self) -> list[Batch]:
        """Batches of M gradients, oldest first, as many as the bound allows."""
        batches = []
        while self._may_advance():
            # Stable: of equal age, in the order of arrival.
            ordered = sorted(self.waiting, key=lambda one: one.read)
            chosen = tuple(ordered[: self.rules.batch])
            self.waiting = [one for one in self.waiting if one not in chosen]
            self.version += 1
            batches.append(Batch(self.version, chosen))
        return batches

    def _may_advance(self) -> bool:
        waiting = sorted(one.read for one in self.waiting)
        size = self.rules.batch
        if len(waiting) < size:
            return False
        return self._in_time([*self.pulled.values(), *waiting[size:]], first=self.version + 1)

    def _in_time(self, reads: Sequence[int], *, first: int) -> bool:
        """Whether gradients read at these versions can all be applied within T, from the update at
        version `first` on: the test of earliest deadlines."""
        return all(
            first + index // self.rules.batch - read <= self.rules.max_staleness
            for index, read in enumerate(sorted(reads))
        )
