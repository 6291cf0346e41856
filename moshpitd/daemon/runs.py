"""One run on this node: its trainers, their buckets, and their calls on the way to the core.

One rule: what a trainer asks is checked before the core hears of it; the core only sees calls that
can be carried out, and their ends reach the trainer that asked.

A trainer becomes known to the core with its first call, because only then are its tensors in the
bucket and have a digest. Until then it has a bucket and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from moshpitd.core.effects import Note
from moshpitd.core.events import (
    Attached,
    Cancelled,
    Contributed,
    ContributionRefused,
    Drained,
    Event,
    MeetAsked,
    StateStored,
    Synced,
    TrainerGone,
    ValuesKept,
)
from moshpitd.core.handover import dependants, is_last_holder
from moshpitd.core.outcome import Outcome, Status
from moshpitd.core.store_words import StoreClosed
from moshpitd.daemon import sharing
from moshpitd.daemon.buffers import make_bucket
from moshpitd.daemon.choosing import Choice
from moshpitd.daemon.driver import Driver
from moshpitd.daemon.ground import Ground
from moshpitd.daemon.history import History, RoundLine
from moshpitd.daemon.logs import log_event
from moshpitd.daemon.trainers import (
    Ask,
    Attachment,
    Ended,
    Progressed,
    Step,
    Trainer,
    blocks_of,
    checked_action,
    checked_mix,
    checked_timeout,
    refusal_of,
    schema_of,
    schema_text,
)
from moshpitd.rpc.status import not_finite, refusal
from moshpitd.tensors.layout import Layout

log = logging.getLogger(__name__)

HOLD_WITHIN_S = 10.0
"""A trainer that attached and does not hold is gone: it died between the two calls."""
PROGRESS_S = 0.1
FLUSH_S = 5.0
"""How long the goodbyes of a drain may take: a peer that takes none for so long is gone itself."""


class Run:
    """Invariant: all trainers in `trainers` have the schema of `layout`; from the first trainer on
    the exchange knows the run, and until `end` keeps its last result when all trainers are gone."""

    def __init__(self, name: str, ground: Ground, driver: Driver, history: History) -> None:
        self.name = name
        self.driver = driver
        self.history = history
        self.layout: Layout | None = None
        self.trainers: dict[str, Trainer] = {}
        self.draining = False
        self._ground = ground
        self._arriving = 0  # trainers whose attaching is under way
        self._taken_along = True  # the last trainer that left said so itself
        self._left_at = driver.now()  # when the last trainer left, or did not come after all
        self._attaching = asyncio.Lock()
        self._introducing = asyncio.Lock()
        self._drained = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}  # by token
        self._owed = 0  # peers that a drain stays for

    # -- coming and going -------------------------------------------------------------------------

    async def attach(self, attachment: Attachment) -> Trainer:
        """A bucket for a trainer; TrainerError when its tensors or the room do not fit."""
        self._arriving += 1  # before anything is waited for: the run must not be let go meanwhile
        try:
            return await self._attach(attachment)
        finally:
            self._arriving -= 1
            self._left_at = self.driver.now()

    @property
    def idle_since(self) -> float | None:
        """On the loop's clock; None while a trainer is attached, or on its way in."""
        return None if self.trainers or self._arriving else self._left_at

    def in_use(self, now: float) -> bool:
        """Others need what goes on here, trainers or not."""
        return self.driver.peer.under_way(now)

    def is_last_copy(self, now: float) -> bool:
        """Of a run without trainers: what it keeps is known to be nowhere else. A trainer that
        detached has its parameters itself; one that died counts on us."""
        return not self._taken_along and is_last_holder(self.driver.peer.state, now)

    async def end(self, within_s: float) -> None:
        """Let go of everything, once nobody is attached; the run is of no use afterwards. What the
        others are being told, and the directory, has so long."""
        await self.driver.settled(within_s)
        await self.driver.close()
        if self.layout is not None:  # in a thread: memory of gigabytes goes back
            await self._ground.in_thread(self._ground.exchange.remove_run, self.name)
            self.layout = None

    async def _attach(self, attachment: Attachment) -> Trainer:
        attachment = attachment.checked(self.driver.peer)
        ground = self._ground
        layout = await ground.in_thread(Layout.from_specs, attachment.specs, ground.part_bytes)
        async with self._attaching:
            if self.draining:
                raise refusal("draining", "the daemon is leaving and takes no new trainer")
            if len(self.trainers) >= ground.max_trainers:
                raise refusal(
                    "too_many_trainers",
                    f"run {self.name!r} has {len(self.trainers)} trainers here, expected at most "
                    f"{ground.max_trainers}",
                )
            attachment.check_company(self.name, self.trainers.values())
            self._settle_layout(layout)
            blocks = blocks_of(attachment, layout, self.driver.peer.params.max_group)
            make = partial(
                make_bucket, ground.in_thread, ground.buffers_dir,
                nbytes=layout.nbytes, data_dir=ground.data_dir,
            )  # fmt: skip
            bucket = await make(blocks=blocks, in_place=attachment.lives_here)
            trainer = Trainer(secrets.token_hex(8), attachment, bucket, asyncio.Event())
            if attachment.shared:
                trainer.shared = await sharing.join(self.trainers.values, bucket, make)
            ground.exchange.add_bucket(self.name, trainer.name, bucket)
            self.trainers[trainer.name] = trainer
        log_event(
            log, logging.INFO, "trainer attached",
            run=self.name, trainer=trainer.name, client=attachment.client, bytes=layout.nbytes,
        )  # fmt: skip
        asyncio.get_running_loop().call_later(HOLD_WITHIN_S, self._expect_hold, trainer.name)
        return trainer

    def leave(self, name: str, *, detached: bool = False) -> None:
        """A trainer detached, or its Hold stream ended. Its bucket goes now, or with the last round
        that sends from it."""
        trainer = self.trainers.pop(name, None)
        if trainer is None:
            return
        self._left_at, self._taken_along = self.driver.now(), detached
        trainer.gone.set()
        if trainer.worker:
            self.driver.handle(StoreClosed(trainer.worker))
        if trainer.known:
            self.driver.handle(TrainerGone(name))
        self._ground.exchange.remove_bucket(self.name, name)
        sharing.part(trainer, self.trainers.values())
        log_event(log, logging.INFO, "trainer gone", run=self.name, trainer=name)

    def residual_bytes(self) -> Mapping[str, int]:
        """Memory of the run's residuals, by the side that keeps them: sender, reducer."""
        owed = self._ground.exchange.residuals(self.name) if self.layout is not None else None
        return {} if owed is None else owed.nbytes

    @property
    def codec(self) -> str:
        """As it was asked for: "auto", or what all values of the group travel with."""
        return self._ground.codec

    def choices(self) -> Mapping[str, Choice]:
        """How contributions travelled last, by peer, where the codec is "auto"."""
        return self._ground.exchange.choices(self.name) if self.layout is not None else {}

    def noted(self, note: Note) -> RoundLine | None:
        """A note of the core; the finished line when it ends a round."""
        if note.what == "drained":
            self._drained.set()
        return self.history.note(note)

    async def depart(self, *, preempted: bool) -> None:
        """Begin nothing new; returns when nothing useful is left to do here: what runs has ended,
        and the others have what only we could give them. When cancelled, it has said goodbye."""
        self.draining = True
        peer = self.driver.peer
        for call in list(peer.queue):
            self.driver.handle(Cancelled(call.token))
            if (waiting := self._waiting.get(call.token)) is not None:
                waiting.cancel()
        try:
            # Before the goodbye: nobody asks a peer that has left, and it takes nobody in.
            while waiting_for := dependants(peer.state):
                self._owed = len(waiting_for)
                await asyncio.sleep(PROGRESS_S)
            self._owed = 0
        finally:
            self.driver.handle(Drained(preempted))
        await self._drained.wait()
        # Newcomers have what was promised, slower members of our last round their results.
        while peer.state.donor.serving or peer.conductor.lingering:  # noqa: ASYNC110  # no event
            await asyncio.sleep(PROGRESS_S)
        await self.driver.flush(FLUSH_S)

    def unfinished(self) -> str:
        """What a drain still waits for, in words; empty when for nothing."""
        peer = self.driver.peer
        serving = len(peer.state.donor.serving)
        words = {
            f"{self._owed} peers have yet to take our state": self._owed,
            f"a call is in {peer.phase}": peer.work is not None,
            f"{serving} snapshots are on their way": serving,
            "slower members read our results": peer.conductor.lingering,
        }
        return ", ".join(words_of_it for words_of_it, holds in words.items() if holds)

    def _settle_layout(self, layout: Layout) -> None:
        """The run's schema is its first trainer's; a new one only when nobody has the old one."""
        if self.layout is not None and layout.schema_digest == self.layout.schema_digest:
            return
        if self.layout is not None:
            if self.trainers:
                difference = self.layout.first_difference(layout.specs, layout.part_bytes)
                raise refusal(
                    "schema_differs",
                    f"run {self.name!r} averages other tensors on this node: {difference} "
                    "(here: the run, there: this trainer)",
                )
            if self.driver.peer.work is not None:
                raise refusal(
                    "schema_differs",
                    f"run {self.name!r} still ends a round of other tensors; try again in a moment",
                )
            self._ground.exchange.remove_run(self.name)
            self.layout = None
        ground = self._ground
        ground.exchange.add_run(self.name, layout, ground.codec, feedback=ground.feedback)
        self.layout = layout

    def _expect_hold(self, name: str) -> None:
        # The name and not the trainer, which would keep its bucket in memory until now.
        trainer = self.trainers.get(name)
        if trainer is not None and not trainer.held:
            log_event(log, logging.WARNING, "trainer never held", run=self.name, trainer=name)
            self.leave(name)

    # -- calls ------------------------------------------------------------------------------------

    async def sync(
        self, name: str, *, timeout_s: float, generation: int
    ) -> AsyncGenerator[Step, None]:
        """Bring a trainer up to date. Yields progress, then the end."""
        timeout_s = checked_timeout(timeout_s)
        trainer = self._begin(name, generation)
        try:
            await self._introduce(trainer)
            event = Synced(name, trainer.token, timeout_s)
            async with aclosing(self._watch(trainer, event)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._end(trainer)

    async def average(self, name: str, ask: Ask) -> AsyncGenerator[Step, None]:
        """Average a trainer's bucket. Yields progress, then the end."""
        if self.trainer(name).attachment.topology:
            raise refusal("topology_refused", f"trainer {name} exchanges with neighbours")
        async with self.call(name, ask.generation) as (trainer, norm):
            event = Contributed(
                name,
                trainer.token,
                ask.weight,
                ask.rounds,
                ask.min_participants,
                ask.on_partial,
                ask.timeout_s,
                norm,
            )
            async with aclosing(self._watch(trainer, event)) as steps:
                async for step in steps:
                    yield step

    async def exchange(self, name: str, request: Any) -> AsyncGenerator[Step, None]:
        """Exchange with the neighbours. Yields progress, then the end, whose outcome has a row."""
        topology = self._topology(name, pairs=False)
        mix, timeout_s = checked_mix(request, topology), checked_timeout(request.timeout_s)
        async with self.call(name, request.generation) as (trainer, _):
            event = Contributed(name, trainer.token, 1, timeout_s=timeout_s, mix=mix)
            async with aclosing(self._watch(trainer, event)) as steps:
                async for step in steps:
                    yield step

    async def meet(self, name: str, request: Any) -> AsyncGenerator[Step, None]:
        """Leave parameters here, add to them, or have them meet a neighbour's."""
        topology, timeout_s = self._topology(name, pairs=True), checked_timeout(request.timeout_s)
        action = checked_action(request.action)
        trainer, edges = self._begin(name, request.generation), self._ground.exchange.edges
        in_thread = self._ground.in_thread
        assert edges is not None  # while the node lives
        try:
            if action == "meet":
                event = MeetAsked(name, trainer.token, topology, timeout_s)
                async with aclosing(self._watch(trainer, event)) as steps:
                    async for step in steps:
                        yield step
                return
            await self._check_finite(trainer)
            if action == "start":
                await self._introduce(trainer)
                await in_thread(edges.pairs.start, self.name, name)
                self.driver.handle(ValuesKept(name))
            elif not await in_thread(edges.pairs.add, self.name, name):
                raise refusal("no_topology", f"trainer {name} has left no parameters here yet")
            yield Ended(Outcome(Status.COMPLETE), self.driver.peer.lineage, 0, 0, False)
        finally:
            self._end(trainer)

    def _topology(self, name: str, *, pairs: bool) -> str:
        """Of a trainer that attached for exchanges, or for meetings."""
        attachment = self.trainer(name).attachment
        if not attachment.topology or attachment.pairs is not pairs:
            what = "meetings" if pairs else "exchanges"
            raise refusal("no_topology", f"trainer {name} did not attach for {what} on a topology")
        return attachment.topology

    async def put_state(self, name: str, state: bytes) -> None:
        self.trainer(name)
        await self._ground.in_thread(self._ground.exchange.set_state, self.name, state)
        self.driver.handle(StateStored(len(state)))

    def get_state(self, name: str) -> bytes:
        self.trainer(name)
        return self._ground.exchange.state(self.name)

    @contextmanager
    def between_rounds(self, name: str, generation: int) -> Iterator[Any]:
        """Bucket, layout and residuals, while no round changes these. What was done with them is
        refused if another trainer's call began one meanwhile."""
        state = self.driver.peer.state
        if self.driver.peer.work is not None:
            raise refusal("bucket_busy", f"run {self.name!r} is in a round")
        trainer = self._begin(name, generation)
        try:
            owed = self._ground.exchange.residuals(self.name, settle=True)
            before = state.attempts, {} if owed is None else owed.dropped
            yield trainer.bucket, self.layout, owed
            if before != (state.attempts, {} if owed is None else owed.dropped):
                raise refusal("bucket_busy", f"run {self.name!r} began a round; ask again")
        finally:
            self._end(trainer)

    def trainer(self, name: str) -> Trainer:
        trainer = self.trainers.get(name)
        if trainer is None:
            raise refusal("unknown_trainer", f"no trainer {name!r} is attached to {self.name!r}")
        return trainer

    @asynccontextmanager
    async def call(self, name: str, generation: int) -> AsyncIterator[tuple[Trainer, float]]:
        """A call that has a trainer's bucket to itself, and its norm; it is finite, and the core
        knows of it."""
        trainer = self._begin(name, generation)
        try:
            norm = await self._check_finite(trainer)
            await self._introduce(trainer)
            yield trainer, norm
        finally:
            self._end(trainer)

    def _begin(self, name: str, generation: int) -> Trainer:
        trainer = self.trainer(name)
        if self.draining:
            raise refusal("draining", "the daemon is leaving and takes no more rounds")
        if trainer.token:
            raise refusal("bucket_busy", f"trainer {name}: its bucket is in another call")
        if not trainer.bucket.hand_over(generation):
            now = trainer.bucket.generation
            trainer.bucket.hand_back()
            raise refusal(
                "bucket_modified",
                f"the call says generation {generation}, the bucket says {now}; expected the same "
                "even number",
            )
        trainer.token = secrets.token_hex(8)
        return trainer

    def _end(self, trainer: Trainer) -> None:
        trainer.token = ""
        trainer.bucket.hand_back()

    async def _introduce(self, trainer: Trainer) -> None:
        """Tell the core of a trainer whose tensors are in its bucket now."""
        async with self._introducing:
            if trainer.known:
                return
            attachment, layout = trainer.attachment, self.layout
            assert layout is not None
            digest = b""
            if attachment.topology:
                # What lies in the bucket is a message: nobody starts from it, and all are equal.
                digest = schema_of(layout, attachment)
            elif not self.driver.peer.state.outdates(layout.schema_digest, attachment.version):
                # These tensors become the node's own: what others get from us must be sound.
                await self._check_finite(trainer)
                exchange = self._ground.exchange
                digest = await self._ground.in_thread(
                    exchange.initial_snapshot, self.name, trainer.name, attachment.version
                )
            self.trainer(trainer.name)
            trainer.known = True
            self.driver.handle(
                Attached(
                    trainer=trainer.name,
                    schema=schema_of(layout, attachment),
                    schema_text=schema_text(layout, attachment),
                    part_sizes=tuple(part.nbytes for part in layout.parts),
                    digest=digest,
                    version=attachment.version,
                    founder=attachment.founder,
                    founder_digest=attachment.founder_digest,
                )
            )

    async def _check_finite(self, trainer: Trainer) -> float:
        """Raises for a NaN; returns the norm of the bucket."""
        exchange = self._ground.exchange
        found = await self._ground.in_thread(exchange.examine, self.name, trainer.name)
        bad, norm = found[0], float(found[1])
        if bad is not None:
            self.driver.handle(ContributionRefused(trainer.name))
            raise not_finite(bad)
        return norm

    async def _watch(self, trainer: Trainer, event: Event) -> AsyncGenerator[Step, None]:
        """Hand the call to the core and follow it to its end; leaving early cancels it."""
        token = trainer.token
        finished = self._waiting[token] = self.driver.expect(token)
        gone = asyncio.ensure_future(trainer.gone.wait())
        self.driver.handle(event)
        told: Progressed | None = None
        try:
            while not finished.done():
                await asyncio.wait(
                    (finished, gone), timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED
                )
                if finished.done():
                    break
                if gone.done():
                    raise refusal("unknown_trainer", f"trainer {trainer.name} was detached")
                now = Progressed(*self.driver.peer.progress())
                if now != told:
                    told = now
                    yield now
            if finished.cancelled():
                raise refusal("draining", "the daemon stops")
            if trainer.bucket.in_place and self.layout is not None:
                await self._ground.in_thread(trainer.bucket.settle, self.layout.parts)
            yield self._ended(trainer, finished.result())
        finally:
            self._waiting.pop(token, None)
            gone.cancel()
            if not finished.done():
                self.driver.handle(Cancelled(token))
                finished.cancel()

    def _ended(self, trainer: Trainer, outcome: Outcome) -> Ended:
        error = refusal_of(outcome, trainer.name)
        if error is not None:
            raise error
        if outcome.accepted and not trainer.bucket.intact(trainer.bucket.expected):
            # Nothing was written into it once the trainer had changed it, so there is no result.
            raise refusal(
                "bucket_modified", f"trainer {trainer.name} changed its bucket during the call"
            )
        sent, received = self.history.bytes_of(outcome.group_id)
        lineage, bucket = self.driver.peer.lineage, trainer.bucket
        return Ended(outcome, lineage, sent, received, bucket.deltas is not None, bucket.moved)
