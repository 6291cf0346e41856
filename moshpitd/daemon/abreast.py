"""The contributions of one round leave for all its reducers at one pace.

TCP shares a line as it likes: of three connections one may get hardly anything for a second. Its
reducer then returns its results when the others have nothing left to send, over connections that
have yet to find out how fast they may be (lines of 100 and 25 Mbit/s: 6 of 7 s, where all abreast
take 5.8). So a lane that is a few frames ahead of another waits before it encodes its next one.

One rule: this is a courtesy, not a duty. Nobody waits long for one frame, nor for a lane that
stands still by its own measure, that is through or that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

AHEAD = 2
"""Frames: one is being written while the other lane's is, and one makes up for turns."""
PATIENCE_S = 0.1
"""For one frame. The writer that waits answers no ping meanwhile, and silence begins at 1.2 s."""
FAST_BYTES_PER_S = 50e6
"""Of all lanes of a round together. Where more leaves, machines are the limit and no line is: a
processor that waits is lost (100 M parameters, four daemons on two cores: 0.95 and 1.1 s)."""
STALL_S, STALLS = 0.25, 3.0
"""A lane stands still after so long without a frame, and so many times what its frames took. A
frozen peer costs the other lanes that long; a line may take seconds for every frame."""


@dataclass(slots=True)
class _Lane:
    count: int  # frames in all
    began: float
    last: float  # when the latest was taken
    taken: int = 0

    def stands(self, now: float) -> bool:
        usual = (self.last - self.began) / max(1, self.taken)
        return now - self.last > max(STALL_S, STALLS * usual)


class Abreast:
    """The lanes of one round, by peer. Called from the links' writer threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self._began = clock()
        self._bytes = 0

    def join(self, peer_id: str, count: int) -> None:
        """A lane of so many frames begins."""
        now = self._clock()
        with self._changed:
            self._lanes[peer_id] = _Lane(count, now, now)

    def leave(self, peer_id: str) -> None:
        """It is through, or its link is lost."""
        with self._changed:
            self._lanes.pop(peer_id, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing of this round is sent any more."""
        with self._changed:
            self._lanes.clear()
            self._changed.notify_all()

    def ahead(self, peer_id: str) -> bool:
        """Is there a lane that this one should wait for? They are compared by what share of their
        frames is through: a lane of fewer may be slower."""
        mine = self._lanes.get(peer_id)
        if mine is None:
            return False
        now = self._clock()
        if self._bytes > FAST_BYTES_PER_S * (now - self._began):
            return False
        return any(
            (mine.taken - AHEAD) * lane.count > lane.taken * mine.count
            for lane in self._lanes.values()
            if lane is not mine and lane.taken < lane.count and not lane.stands(now)
        )

    def take(self, peer_id: str, patience_s: float = PATIENCE_S) -> None:
        """The lane's next frame is about to be encoded."""
        with self._changed:
            self._changed.wait_for(lambda: not self.ahead(peer_id), patience_s)
            lane = self._lanes.get(peer_id)
            if lane is not None:
                lane.taken += 1
                lane.last = self._clock()
                self._changed.notify_all()

    def took(self, count: int) -> None:
        """A frame of so many bytes is about to leave."""
        with self._changed:
            self._bytes += count
