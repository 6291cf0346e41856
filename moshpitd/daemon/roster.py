"""The runs of a node: made when their first trainer comes, let go when nobody has trained them for
long, or when there is no room for another.

One rule: a run goes whole. Its name is in `runs`, or going, or free; who asks for one that is going
waits until it is gone, and gets a new run with nothing of the old one.

A run without trainers has left its peers already: they and the directory were told when its last
trainer went. What it still has is a copy of the parameters, what error feedback owes, and the
trainer state, all for a trainer that comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from moshpitd.daemon.logs import log_event
from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal

log = logging.getLogger(__name__)

MAX_RUNS = 64
"""Runs of one node: a peer each, and a copy of the last result, as large as its parameters."""
NAMED = 8  # runs of one kind that a refusal names: gRPC carries 8 KiB, and `status` lists them all
IDLE, LIMIT = "idle", "limit"
"""Why a run was let go: nobody had trained it for long; another one needed the room."""


class Tenant(Protocol):
    """What is asked of a run."""

    name: str

    @property
    def idle_since(self) -> float | None:
        """None while a trainer is attached, or on its way in."""
        ...

    def in_use(self, now: float) -> bool:
        """Others need what goes on in it, trainers or not."""
        ...

    def is_last_copy(self, now: float) -> bool:
        """What it keeps is known to be nowhere else."""
        ...


R = TypeVar("R", bound=Tenant)


class Roster(Generic[R]):
    """Invariant: at most `most` runs are here or going. `runs` is the node's own table, and nobody
    else takes a run out of it."""

    def __init__(
        self,
        runs: dict[str, R],
        *,
        idle_s: float,
        clock: Callable[[], float],
        end: Callable[[R, str], Awaitable[None]],
        failed: Callable[[BaseException], None],
        most: int = MAX_RUNS,
    ) -> None:
        """`end(run, why)` takes away all that there is of a run; `idle_s` 0: none is let go."""
        self.runs = runs
        self._idle_s, self._most, self._clock = idle_s, most, clock
        self._end, self._failed = end, failed
        self._going: dict[str, asyncio.Task[None]] = {}
        self._shut = False

    async def run(self, name: str, make: Callable[[], R]) -> R:
        """The run of that name, made if there is none; TrainerError if there is no room for it.
        Whoever asks for it begins to attach before it waits for anything: an idle run may go."""
        while (run := self.runs.get(name)) is None:
            if self._shut:
                raise refusal("draining", "the daemon is leaving and takes no new trainer")
            going = self._going.get(name)
            if going is None and len(self.runs) + len(self._going) >= self._most:
                going = next(iter(self._going.values()), None) or self._make_room()
            if going is None:
                run = self.runs[name] = make()
                break
            await asyncio.shield(going)  # others may wait for it too
        return run

    def look(self) -> None:
        """Let go of what has been idle for long enough."""
        now = self._clock()
        for run in list(self.runs.values()) if not self._shut else ():
            if self._left_s(run, now) == 0 and not run.in_use(now):
                self._let_go(run, IDLE)

    def idle(self, run: R) -> tuple[float, float]:
        """(seconds without a trainer, seconds until it is let go): 0 and 0 while it has one, -1 for
        never. What the others still need keeps it longer."""
        now, since = self._clock(), run.idle_since
        left_s = self._left_s(run, now)
        idle_s = 0.0 if since is None else max(0.0, now - since)
        return idle_s, 0.0 if since is None else -1.0 if left_s is None else left_s

    def shut(self) -> None:
        """The node leaves: no run is made or let go any more."""
        self._shut = True

    async def settled(self) -> None:
        """Wait for those that are going."""
        await asyncio.gather(*self._going.values(), return_exceptions=True)

    def _left_s(self, run: R, now: float) -> float | None:
        """None: it does not go by time."""
        if not self._idle_s or run.idle_since is None:
            return None
        return max(0.0, run.idle_since + self._idle_s - now)

    def _make_room(self) -> asyncio.Task[None]:
        now = self._clock()
        free = {
            run: run.idle_since
            for run in self.runs.values()
            if run.idle_since is not None and not run.in_use(now) and not run.is_last_copy(now)
        }
        if not free or not self._idle_s:
            raise self._full(now)
        return self._let_go(min(free, key=lambda run: free[run]), LIMIT)

    def _let_go(self, run: R, why: str) -> asyncio.Task[None]:
        idle_s, _ = self.idle(run)
        log_event(log, logging.INFO, "run forgotten", run=run.name, reason=why, idle_s=idle_s)
        del self.runs[run.name]
        going = self._going[run.name] = asyncio.create_task(self._go(run, why))
        return going

    async def _go(self, run: R, why: str) -> None:
        try:
            await self._end(run, why)
        except Exception as error:  # half of it may be left, and nobody can say which half
            log.exception("run %s: letting go of it failed", run.name)
            self._failed(error)
        finally:
            del self._going[run.name]

    def _full(self, now: float) -> TrainerError:
        """Who holds the room, and what may be done about it."""
        trained, kept, used = list[R](), list[R](), list[R]()
        for run in self.runs.values():
            idle = run.idle_since is not None
            (trained if not idle else used if run.in_use(now) else kept).append(run)
        words, ways = [], []
        if trained:
            words.append(f"{_names(trained)} with trainers")
            ways.append("end the trainers of one of them")
        if used:
            words.append(f"{_names(used)} without, but in use by other peers")
        if kept and not self._idle_s:
            words.append(f"{_names(kept)} without, kept because runs.idle_s is 0")
            ways.append("set runs.idle_s")
        elif kept:
            left_s = min(self._left_s(run, now) or 0.0 for run in kept)
            words.append(
                f"{_names(kept)} without, kept because no other peer is known to hold what was "
                f"averaged there (the first goes in {left_s:.0f} s, runs.idle_s = {self._idle_s:g})"
            )
            ways.append("wait")
        way = ", ".join([*ways, "or use another daemon"]) if ways else "use another daemon"
        held = "; ".join(words)
        return refusal(
            "too_many_runs",
            f"{len(self.runs)} runs here, expected at most {self._most}: {held}. To do: {way}",
        )


def _names(runs: Sequence[Tenant]) -> str:
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return ", ".join(run.name for run in runs[:NAMED]) + more
