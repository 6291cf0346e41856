"""Threads that play peers and wait for each other in rounds. One rule: no clock. A round closes
when all who could still come are there, or when everybody waits and nobody can come any more.

The second is what a matchmaking window's end is in a real swarm: trainers that wait in different
rounds for each other would wait for ever. The round in which most are waiting closes then, of two
alike the one that was opened first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

C = TypeVar("C")  # what a peer brings to a round
R = TypeVar("R")  # what it takes away
T = TypeVar("T")

WATCHDOG_S = 120.0  # a lost wake-up shall fail a test, not hang it


class Crowd:
    """Who runs, and the lock that everything of one swarm shares."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lock = threading.Condition()
        self.present: set[int] = set()
        self._here = threading.local()
        self._rounds: list[Round] = []  # type: ignore[type-arg]  # in the order they were opened
        self._waiting = 0

    def play(self, parts: dict[int, Callable[[], T]]) -> dict[int, T | BaseException]:
        """Run each peer's part in a thread; what it returned or raised. A peer whose part has
        ended is waited for no more."""
        ends: dict[int, T | BaseException] = {}

        def run(peer: int, part: Callable[[], T]) -> None:
            try:
                ends[peer] = part()
            except BaseException as error:  # told to whoever called play
                ends[peer] = error
            finally:
                with self.lock:
                    self.present.discard(peer)
                    self._look()

        self.present = set(parts)
        threads = [
            threading.Thread(target=run, args=item, name=f"peer-{item[0]}", daemon=True)
            for item in parts.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WATCHDOG_S)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} has not ended within {WATCHDOG_S:g} s")
        return ends

    def _look(self) -> None:
        """With the lock: close the rounds that are complete, or the fullest when all wait."""
        for found in list(self._rounds):
            if self.present <= found.brought.keys():
                self._close(found)
        if not self._waiting:
            return
        while self._rounds and self._waiting >= max(len(self.present), 1):
            self._close(max(self._rounds, key=lambda found: len(found.brought)))

    def _close(self, found: Round) -> None:  # type: ignore[type-arg]
        self._rounds.remove(found)
        self._waiting -= found.waiting
        found.close()
        self.lock.notify_all()

    def enter(self, found: Round) -> None:  # type: ignore[type-arg]
        """With the lock: one more brought something to this round."""
        if found not in self._rounds:
            self._rounds.append(found)
        self._look()

    def wait(self, found: Round) -> None:  # type: ignore[type-arg]
        """With the lock: until the round is closed."""
        if not found.closed:
            found.waiting += 1
            self._waiting += 1
            self._look()
        while not found.closed:
            if not self.lock.wait(WATCHDOG_S):
                raise TimeoutError(f"round {found.number} has not closed")


class Round(Generic[C, R]):
    """One round of one primitive."""

    def __init__(self, number: int, work: Callable[[int, dict[int, C]], dict[int, R]]) -> None:
        self.number, self._work = number, work
        self.brought: dict[int, C] = {}
        self.results: dict[int, R] = {}
        self.error: BaseException | None = None
        self.closed = False
        self.waiting = 0

    def close(self) -> None:
        """In the thread of the last one; all others wait meanwhile."""
        try:
            self.results = self._work(self.number, dict(sorted(self.brought.items())))
        except BaseException as error:  # raised in every peer that takes part
            self.error = error
        self.closed = True


class Rounds(Generic[C, R]):
    """Rounds 0, 1, 2, ... of one primitive: `work(number, what each peer brought)`, peers in
    ascending order whatever the threads' order was, gives what each takes away."""

    def __init__(self, crowd: Crowd, work: Callable[[int, dict[int, C]], dict[int, R]]) -> None:
        self._crowd, self._work = crowd, work
        self._open: Round[C, R] = Round(0, work)

    def begin(self, peer: int, contribution: C) -> Ticket[R]:
        """Bring something; the round may close before anybody waits for it."""
        with self._crowd.lock:
            if self._open.closed:
                self._open = Round(self._open.number + 1, self._work)
            mine = self._open
            mine.brought[peer] = contribution
            self._crowd.enter(mine)
        return Ticket(self._crowd, peer, mine)

    def take_part(self, peer: int, contribution: C) -> R:
        return self.begin(peer, contribution).land()


class Ticket(Generic[R]):
    """A peer's claim to the result of a round: `client.primitives.Pending`."""

    def __init__(self, crowd: Crowd, peer: int, found: Round[Any, R]) -> None:
        self._crowd, self._peer, self._round = crowd, peer, found

    @property
    def done(self) -> bool:
        with self._crowd.lock:
            return self._round.closed

    def land(self) -> R:
        with self._crowd.lock:
            self._crowd.wait(self._round)
        if self._round.error is not None:
            raise self._round.error
        return self._round.results[self._peer]
