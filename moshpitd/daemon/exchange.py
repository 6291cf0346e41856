"""The data plane of a node: carries out the effects that move tensors, for all its runs. One rule:
nothing is decided here; what happened is told to the core as an event, and the core says what next.

Threads: `handle` runs on the daemon's loop and returns at once (Linger, Close and LoadSnapshot not,
because what follows them hands buckets back to trainers). Contributions are encoded in the links'
writer threads and decoded in their reader threads; averages and copies run in two small pools of
our own, apart from each other, so that a digest of gigabytes does not hold up a round.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from moshpitd.core.effects import (
    Average,
    Await,
    Bar,
    Check,
    Close,
    Digest,
    DropSnapshot,
    Effect,
    FetchSnapshot,
    HandOver,
    Linger,
    LoadSnapshot,
    Open,
    OpenAudit,
    Push,
    PushAudit,
    PushSnapshot,
    RefreshSnapshot,
)
from moshpitd.core.events import Barred, Event, LinkLost, Listened, PartFailed
from moshpitd.core.outcome import Reason
from moshpitd.core.soundness import MAX_NORM
from moshpitd.daemon.accumulate import Round
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import AUTO, Choice, Choices, group_codec
from moshpitd.daemon.edges import EdgePlane
from moshpitd.daemon.intake import Intake
from moshpitd.daemon.ongoing import Ongoing, run_hash
from moshpitd.daemon.pacing import (
    ROUND_PRIORITY,
    SNAPSHOT_PRIORITY,
    Links,
    Pacer,
    Skipped,
    link,
)
from moshpitd.daemon.plane import Plane
from moshpitd.daemon.pulse import Pulse
from moshpitd.daemon.transfer import Snapshots
from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.tasks import give_way
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.feedback import Residuals
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import Rooms, Scratch
from moshpitd.tensors.reduction import examine_bucket

log = logging.getLogger(__name__)

AVERAGING_THREADS = min(4, os.cpu_count() or 1)  # bound by memory, and links want cores too

# What waits for the next round: all that a quarter of a bucket of 400 MB needs in float16, 24
# accumulators of 4 MiB and as many payloads of 2. With 32 MiB every such round cleared 50 to 200 MB
# of new pages in four daemons, 0.4 of 3 s of processor time; with 128 those of the last parts, one
# sample in fifty. It is memory that an idle daemon keeps.
ROOMS_BYTES = 144 << 20


class Exchange:
    """Invariant: a bucket's file goes when its trainer and the last round that uses it are through.
    `dropped` counts frames that led to no event, by reason."""

    def __init__(
        self,
        peer_id: str,
        post: Callable[[str, Event], None],
        *,
        timed: Callable[[str, str, float], None] = lambda codec, op, seconds: None,
        error_feedback: bool = True,
    ) -> None:
        """`post(run, event)` is called from any thread and must not block, and so is
        `timed(codec, "encode" or "decode", seconds)`."""
        self.peer_id = peer_id
        self.dropped: Counter[str] = Counter()
        self._error_feedback = error_feedback
        self._unfed: Counter[str] = Counter()  # residuals that were given up in runs that are over
        self._post = post
        self._timed = timed
        self._links: Links | None = None
        self._pacer: Pacer | None = None
        self._pulse: Pulse | None = None
        self.edges: EdgePlane | None = None  # exchanges with neighbours, meetings
        self._averaging = ThreadPoolExecutor(
            AVERAGING_THREADS, thread_name_prefix="average", initializer=give_way
        )
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="snapshot", initializer=give_way)
        self._scratch = Scratch()
        self._rooms = Rooms(keep_bytes=ROOMS_BYTES)
        self._intake = Intake(self._drop, partial(self._submit, self._averaging))
        self._lock = threading.Lock()  # guards the runs and what is in them
        self._runs: dict[str, Ongoing] = {}

    def use(self, links: Links) -> None:
        """The links, which are made with our callbacks and so come second."""
        self._links = links
        self._pacer = Pacer(links)
        self._pulse = Pulse(links, lambda run, heard: self._post(run, Listened(heard)))
        plane = Plane(
            self._intake, self._pacer, self._pulse, self._link,
            partial(self._submit, self._averaging), self._post, self._drop, self._timed, self._run,
        )  # fmt: skip
        self.edges = EdgePlane(plane, self.peer_id)

    def close(self) -> None:
        """End everything and join our threads.

        Better before the links are closed than after: a reader that waits for a group to open is
        let go here. What still waits to be sent is then skipped.
        """
        self._intake.close()
        with self._lock:
            names = list(self._runs)
        for name in names:
            self.remove_run(name)
        if self._pulse is not None:
            self._pulse.close()
        self._averaging.shutdown(wait=True, cancel_futures=True)
        self._copying.shutdown(wait=True, cancel_futures=True)

    # -- runs and buckets -------------------------------------------------------------------------

    def add_run(
        self, name: str, layout: Layout, codec: str, *, feedback: bool | None = None
    ) -> None:
        """`codec` is only checked (ConfigError): what is used is the codec of each group.
        `feedback` overrides the node's `error_feedback` for this run."""
        codec_for(group_codec(codec), "float32")
        snapshots = Snapshots(
            layout,
            run_hash=run_hash(name),
            post=partial(self._post, name),
            submit=partial(self._submit, self._copying),
            drop_frame=self._drop,
        )
        with self._lock:
            if name in self._runs:
                raise LocalProtocolError(f"run {name!r} exists")
            fed = self._error_feedback if feedback is None else feedback
            residuals = Residuals(layout) if fed else None
            choices = Choices() if codec == AUTO else None
            self._runs[name] = Ongoing(name, layout, snapshots, residuals, choices)
        self._intake.add_run(run_hash(name))

    def remove_run(self, name: str) -> None:
        """Close its rounds and transfers, remove its buckets."""
        run = self._run(name)
        if self.edges is not None:
            self.edges.end(name)
        for group_id in list(run.rounds):
            self._close(run, group_id)
        for nonce in run.snapshots.nonces():
            self._drop_transfer(run, nonce)
        for trainer in list(run.buckets):
            self.remove_bucket(name, trainer)
        self._intake.remove_run(run_hash(name))
        if run.residuals is not None:  # a leaving peer's are lost, and that is counted
            run.residuals.clear("run_ended")
            self._unfed.update(run.residuals.dropped)
        with self._lock:
            self._runs.pop(name, None)

    def add_bucket(self, name: str, trainer: str, bucket: Bucket) -> None:
        run = self._run(name)
        if bucket.nbytes != run.layout.nbytes:
            raise LocalProtocolError(
                f"bucket of {bucket.nbytes} bytes, expected {run.layout.nbytes} in run {name!r}"
            )
        with self._lock:
            run.buckets[trainer] = bucket

    def remove_bucket(self, name: str, trainer: str) -> None:
        """Remove the file now, or after the round that uses it. Unknown trainers are fine."""
        run = self._run(name)
        with self._lock:
            bucket = run.buckets.pop(trainer, None)
            if bucket is None:
                return
            if self.edges is not None:
                self.edges.pairs.gone(name, trainer)
            if any(current.uses(bucket) for current in run.rounds.values()):
                run.leaving.append(bucket)
                return
        bucket.close()

    def bucket(self, name: str, trainer: str) -> Bucket | None:
        return self._run(name).buckets.get(trainer)

    def examine(self, name: str, trainer: str) -> tuple[str | None, float]:
        """(tensor with the first NaN or infinity, norm) of a trainer's bucket. Blocks."""
        run = self._run(name)
        bucket = run.buckets.get(trainer)
        if bucket is None:
            return None, 0.0
        bad, squared = examine_bucket(run.layout, bucket.data)
        return bad, min(math.sqrt(squared), MAX_NORM)

    def counters(self, group_id: bytes) -> tuple[int, int]:
        """(bytes sent, bytes received) of payloads of an open or recently closed round."""
        with self._lock:
            for run in self._runs.values():
                current = run.rounds.get(group_id)
                if current is not None:
                    return current.moved
        return self._intake.counters(group_id)

    def residuals(self, name: str, *, settle: bool = False) -> Residuals | None:
        """What is owed to later rounds. `settle`, between rounds: those that linger have ended."""
        run = self._run(name)
        if settle:
            for lingering in list(run.rounds.values()):
                lingering.settle()
        return run.residuals

    def choices(self, name: str) -> Mapping[str, Choice]:
        """How contributions travelled last, by peer; empty unless the run's codec is "auto"."""
        choices = self._run(name).choices
        return {} if choices is None else choices.made()

    @property
    def residuals_dropped(self) -> Counter[str]:
        """Parts whose residual was given up, by reason: half a step of the codec is lost there."""
        with self._lock:
            fed = [run.residuals for run in self._runs.values() if run.residuals is not None]
        return sum((one.dropped for one in fed), Counter(self._unfed))

    # -- snapshots, as the driver and the API see them --------------------------------------------

    def initial_snapshot(self, name: str, trainer: str, version: int) -> bytes:
        """Make a trainer's bucket the donor copy of `version`; returns its digest. Blocks."""
        run = self._run(name)
        bucket = run.buckets.get(trainer)
        if bucket is None:
            raise LocalProtocolError(f"trainer {trainer!r} has no bucket in run {name!r}")
        return run.snapshots.initial(bucket, version)

    def set_state(self, name: str, state: bytes) -> None:
        """Opaque trainer state for newcomers. TrainerError(RESOURCE_EXHAUSTED) above 64 MiB."""
        self._run(name).snapshots.set_state(state)

    def state(self, name: str) -> bytes:
        return self._run(name).snapshots.state

    def snapshot_version(self, name: str) -> int | None:
        return self._run(name).snapshots.version

    # -- effects ----------------------------------------------------------------------------------

    def handle(self, name: str, effect: Effect) -> None:
        """Carry out an effect of the data plane; LocalProtocolError for any other."""
        run = self._run(name)
        if self.edges is not None and self.edges.handle(run, effect):
            return
        match effect:
            case Open():
                self._open(run, effect)
            case Push() | HandOver() | PushAudit():
                self._push(run, effect)
            case Average():
                self._average(run, effect)
            case Bar():
                self._bar(run, effect)
            case Await() | OpenAudit():
                current = run.rounds.get(effect.group_id)
                if current is not None:
                    current.expect(effect)
            case Check():
                current = run.rounds.get(effect.group_id)
                if current is not None:
                    self._submit(self._averaging, partial(current.check, effect.part))
            case Linger():
                current = run.rounds.get(effect.group_id)
                if current is not None:
                    current.linger()
            case Close():
                self._close(run, effect.group_id, kept=effect.kept, without=effect.without)
            case FetchSnapshot():
                self._fetch(run, effect)
            case PushSnapshot():
                self._push_snapshot(run, effect)
            case DropSnapshot():
                self._drop_transfer(run, effect.nonce)
            case LoadSnapshot():
                if run.residuals is not None:  # what was owed belonged to the parameters before
                    run.residuals.clear("snapshot")
                buckets = [run.buckets[t] for t in effect.trainers if t in run.buckets]
                run.snapshots.load(effect.nonce, effect.version, buckets)
                self._intake.shut(effect.nonce)
            case RefreshSnapshot():
                bucket = run.buckets.get(effect.trainer)
                if bucket is not None:
                    run.snapshots.refresh(bucket, effect.version)
            case Digest():
                run.snapshots.tell_digest(effect.version)
            case _:
                raise LocalProtocolError(f"{type(effect).__name__} is no effect of the data plane")

    def _open(self, run: Ongoing, effect: Open) -> None:
        for lingering in list(run.rounds.values()):
            lingering.settle()
        try:
            current = Round(
                effect,
                run.layout,
                run_hash=run_hash(run.name),
                buckets=run.buckets,
                scratch=self._scratch,
                rooms=self._rooms,
                post=partial(self._post, run.name),
                drop=self._drop,
                timed=self._timed,
                owed=run.owed,
                residuals=run.residuals,
                choices=run.choices,
            )
        except ConfigError as error:  # the group, made elsewhere, names a codec we do not have
            log.error("run %s: a round cannot be opened: %s", run.name, error)
            return
        with self._lock:
            run.rounds[current.group_id] = current
        others = [m.peer_id for i, m in enumerate(effect.group.members) if i != effect.index]
        if self._pulse is not None:
            self._pulse.watch(run.name, current.group_id, others)
        # Links first: what is pushed next waits in them, and a link that is up needs nothing.
        own = effect.group.members[effect.index]
        for index, member in enumerate(effect.group.members):
            if index != effect.index:
                # The smaller PeerID dials, unless the other one cannot be dialled.
                ours = self.peer_id < member.peer_id
                dials = bool(member.addresses) if ours else not own.addresses
                self._link(run, member.peer_id, member.addresses, dials=dials)
        self._intake.admit(current.group_id, current)

    def _push(self, run: Ongoing, effect: Push | HandOver | PushAudit) -> None:
        current = run.rounds.get(effect.group_id)
        if current is None or self._pacer is None:
            return
        to = current.group.members[effect.to].peer_id
        takes = self._links.takes(to) if self._links is not None and run.choices else None
        frames = current.frames(effect, takes=takes)
        first = isinstance(effect, Push) and not effect.result and effect.epoch == 0
        count = len(effect.parts) if first else 0
        self._pacer.put(to, effect.group_id, frames, priority=ROUND_PRIORITY, abreast=count)

    def _average(self, run: Ongoing, effect: Average) -> None:
        current = run.rounds.get(effect.group_id)
        if current is not None:
            task = partial(current.average, effect.part, effect.epoch)
            self._submit(self._averaging, task)
        else:  # it could not be opened; the log says why
            failed = PartFailed(
                effect.group_id, effect.part, Reason.CODEC, result=True, epoch=effect.epoch
            )
            self._post(run.name, failed)

    def _bar(self, run: Ongoing, effect: Bar) -> None:
        current = run.rounds.get(effect.group_id)
        if current is not None:
            # In the pool: a hundred thousand parts would hold up the loop, and each takes a lock.
            self._submit(self._averaging, partial(current.bar, effect))
        else:  # nothing of that group can touch a bucket
            barred = Barred(
                effect.group_id, effect.epoch, effect.parts, (), effect.asker, effect.number
            )
            self._post(run.name, barred)

    def _close(
        self, run: Ongoing, group_id: bytes, *, kept: bool = True, without: tuple[int, ...] = ()
    ) -> None:
        with self._lock:
            current = run.rounds.pop(group_id, None)
        if current is None:
            self._intake.shut(group_id)  # never opened here: its early frames are worth nothing
            return
        current.close(kept=kept, without=without)
        if self._pulse is not None:
            self._pulse.leave(group_id)
        self._intake.shut(group_id, counters=current.moved)
        if self._pacer is not None:
            self._pacer.discard(group_id)
        with self._lock:
            over = [b for b in run.leaving if not any(r.uses(b) for r in run.rounds.values())]
            run.leaving = [bucket for bucket in run.leaving if bucket not in over]
        for bucket in over:
            bucket.close()

    def _fetch(self, run: Ongoing, effect: FetchSnapshot) -> None:
        incoming = run.snapshots.fetch(
            effect.nonce, effect.donor, parts=effect.parts, state_bytes=effect.state_bytes
        )
        if incoming is not None:
            self._link(run, effect.donor, effect.addresses, dials=bool(effect.addresses))
            self._intake.admit(effect.nonce, incoming)

    def _push_snapshot(self, run: Ongoing, effect: PushSnapshot) -> None:
        frames = run.snapshots.serve(effect.nonce, effect.to)
        if frames is not None and self._pacer is not None:
            # Both ends dial if they can: who can reach whom is not known, and the links keep one.
            self._link(run, effect.to, effect.addresses, dials=bool(effect.addresses))
            self._pacer.put(effect.to, effect.nonce, frames, priority=SNAPSHOT_PRIORITY)

    def _drop_transfer(self, run: Ongoing, nonce: bytes) -> None:
        run.snapshots.drop(nonce)
        self._intake.shut(nonce)
        if self._pacer is not None:
            self._pacer.discard(nonce)

    # -- links ------------------------------------------------------------------------------------

    def _link(self, run: Ongoing, peer_id: str, addresses: tuple[str, ...], *, dials: bool) -> None:
        def failed(words: str) -> None:
            log.info("run %s: %s", run.name, words)
            self._post(run.name, LinkLost(peer_id, Reason.UNREACHABLE))

        if self._links is not None:
            link(self._links, peer_id, addresses, dials=dials, failed=failed)

    def link_lost(self, peer_id: str) -> None:
        """The pool's on_lost: what waited for that peer is gone, transfers with it fail.

        The network tells every run that the link is lost.
        """
        with self._lock:
            runs = list(self._runs.values())
        self._intake.link_lost(peer_id)
        if self._pacer is not None:
            self._pacer.forget(peer_id)
        for run in runs:
            for nonce in run.snapshots.transfers_with(peer_id):
                run.snapshots.fail(nonce, Reason.LINK_LOST)
                self._intake.shut(nonce)

    def on_send_failed(self, peer_id: str, header: Header, error: Exception) -> None:
        """A payload function raised: on purpose, or the frame does not fit."""
        if isinstance(error, Skipped):
            return
        log.error("a frame for %s was not sent: %s", peer_id, error)
        with self._lock:
            name = next((name for name in self._runs if run_hash(name) == header.run), None)
        if name is None:
            return
        if header.kind in (FrameKind.CONTRIBUTION, FrameKind.HANDOVER):
            result = header.kind is FrameKind.HANDOVER
            self._post(
                name,
                PartFailed(
                    header.group, header.part, Reason.CODEC, str(error), result, header.epoch
                ),
            )
        elif header.kind is FrameKind.SNAPSHOT:
            self._run(name).snapshots.fail(header.group, Reason.PART_SIZE)

    def on_frame(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """The pool's on_frame, in a reader thread; never raises."""
        self._intake.on_frame(peer_id, header, payload)

    def _run(self, name: str) -> Ongoing:
        run = self._runs.get(name)
        if run is None:
            raise LocalProtocolError(f"run {name!r} does not exist here")
        return run

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1  # a count lost between two threads is no harm

    def _submit(self, pool: ThreadPoolExecutor, task: Callable[[], None]) -> None:
        def logged() -> None:
            try:
                task()
            except Exception:
                log.exception("a task of the data plane failed")
                self._drop("internal")

        with suppress(RuntimeError):  # the pool is shut down: the node ends, nobody waits any more
            pool.submit(logged)
