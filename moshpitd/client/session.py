"""A trainer's connection to its daemon. One rule: the model is written to inside `sync()`,
`average()` and a flight's `land()`, in the thread that called them, and nowhere else (in place it
is moved by `begin()` and `close()`, too).

    session = attach(run="digits", model=model)
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), session, every=8)

installs no signal handler, starts no process, and works from any thread. One background thread per
session keeps it attached (`client.keeper`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from torch import Tensor, nn

from moshpitd.client.checks import average_request, check_timeout, check_version
from moshpitd.client.flight import Flight, Plan, bring_in
from moshpitd.client.keeper import DETACH_TIMEOUT_S, Attachment, Keeper
from moshpitd.client.kept import Kept
from moshpitd.client.lineage import Lineage
from moshpitd.client.placing import all_of, bucket_of, check_movable, no_overlap
from moshpitd.client.result import PartialAverage, Progress, Result
from moshpitd.client.rounds import Begin, Stream, Telling, follow
from moshpitd.client.sources import Source, source_of
from moshpitd.errors import DaemonUnavailable
from moshpitd.rpc.calls import Calls
from moshpitd.rpc.channel import default_socket
from moshpitd.rpc.status import DaemonDraining, refusal
from moshpitd.rpc.stubs import API, messages
from moshpitd.tensors.layout import Layout, TensorSpec, specs_of

MAX_STATE_BYTES = 64 << 20  # Params.max_state_bytes
GRACE_S = 15.0
"""The daemon ends every call by the caller's timeout_s; one that is frozen (SIGSTOP, swap) cannot.
So long after that the client stops waiting for it, and trains on."""


def attach(
    run: str,
    *,
    model: nn.Module | None = None,
    tensors: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    socket: str | os.PathLike[str] | None = None,
    version: int = 0,
    state: Mapping[str, Any] | None = None,
    sync: bool = True,
    in_place: bool = False,
    timeout_s: float = 30.0,
) -> Session:
    """Attach these tensors to `run` of the daemon at `socket` (default:
    `rpc.channel.default_socket`).

    `version` (or `state`, from `Session.state_dict`) says what a checkpoint holds. With `sync` the
    swarm's parameters are loaded when there are any; `timeout_s` bounds the attach call and the
    sync one by one. A daemon that is not there is no error: the trainer starts at once, and the
    session attaches by itself when the daemon appears. Raises TrainerError for tensors that cannot
    be averaged (before any traffic), or that differ from what this run averages on this node.

    `in_place`: the tensors move into memory that the daemon maps too, and an average copies nothing
    on this side (`client.placing`). Their objects stay, their storage does not: aliases of the old
    one (`flat[2:5]`, `p.data` kept from before) no longer follow. For dense, contiguous CPU tensors
    that share no memory (TrainerError names the one that is not); no round can run while they
    change, so `overlap` is refused. `close` moves them to memory of their own.
    """
    source = source_of(model, tensors)
    if in_place:
        check_movable(source(), () if model is None else all_of(model))
    session = Session(
        run, source, socket=socket, version=version, timeout_s=timeout_s, in_place=in_place
    )
    if state is not None:
        session.load_state_dict(state)
    session.start(sync=sync)
    return session


class Session:
    """Made by `attach`. Invariant: one round at a time; a second thread waits for its turn, and
    whoever asks for the next round lands the one in flight first."""

    def __init__(
        self,
        run: str,
        source: Source,
        *,
        socket: str | os.PathLike[str] | None = None,
        version: int = 0,
        timeout_s: float = 30.0,
        codec: str = "",
        feedback: bool = True,
        topology: str = "",
        full: bool = False,
        pairs: bool = False,
        shared: bool = False,
        in_place: bool = False,
    ) -> None:
        """As `attach`; `codec` is of this run only, and what follows `feedback` not of averages."""
        if not run:
            raise refusal("bad_run", "run is empty, expected the name of a training job")
        self.run = run
        self._source = source
        self._codec, self._feedback, self._topology = codec, feedback, topology
        self._full, self._pairs, self._shared = full, pairs, shared
        self.in_place = in_place
        """As asked for. A daemon that is too old for it has the tensors copied as ever."""
        self._specs = specs_of(source())
        if not self._specs:
            raise refusal("no_tensors", f"run {run!r}: no tensors to average")
        self._layout = Layout.from_specs(self._specs)  # refuses here, before any traffic
        self._lineage = Lineage(check_version(version))
        self._timeout_s = check_timeout(timeout_s)
        self._calls = Calls(default_socket() if socket is None else socket)
        self._keeper = Keeper(self._calls, self._attach, run)
        self._turn = threading.Lock()
        self._flight: Flight | None = None  # begun and not landed
        self._ahead: Lineage | None = None  # of a result that arrived and is not landed
        self._kept: Kept | None = None  # made by the first flight that needs it
        self._attached: Attachment | None = None  # the last one, also when it is lost
        self.synced: Result | None = None
        """What the sync at attach found: `synced.loaded_snapshot` tells a newcomer from a
        founder."""

    def start(self, *, sync: bool) -> None:
        """Called once, by `attach`."""
        self._keeper.start()
        atexit.register(self._detach)
        if not sync:
            return
        try:
            self.synced = self.sync(self._timeout_s)
        except DaemonUnavailable:
            # Said in the log already. The first average brings the trainer up to date instead.
            return

    # -- what a trainer reads ---------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the daemon is there now."""
        return self._keeper.attached

    @property
    def draining(self) -> bool:
        return self._keeper.draining

    @property
    def version(self) -> int:
        """How many averages the parameters contain."""
        return self._lineage.version

    @property
    def socket(self) -> str:
        """The path of the daemon's socket."""
        return self._calls.socket

    @property
    def layout(self) -> Layout:
        """How the tensors lie in parts; the daemon's part size once it was attached."""
        return self._layout

    @property
    def peer_id(self) -> str:
        """The node's PeerID, empty before the first attach."""
        return self._attached.peer_id if self._attached else ""

    @property
    def joined(self) -> bool:
        """Whether the daemon had reached the swarm at the last attach."""
        return self._attached.joined if self._attached else False

    def attachment(self) -> Attachment:  # raises what stands in its way
        return self._keeper.current()

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for the daemon; False when it did not appear in time. Training need not wait for
        it."""
        return self._keeper.wait(timeout_s)

    # -- rounds -----------------------------------------------------------------------------------

    def average(
        self,
        weight: float | SupportsIndex = 1,
        *,
        rounds: int | Literal["sweep"] = 1,
        min_participants: int = 1,
        on_partial: Literal["accept", "skip", "raise"] = "accept",
        timeout_s: float = 60.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Result:
        """Average with the swarm: x <- sum_i w_i x_i / sum_i w_i over the contributors, in place.

        `weight`: samples since the last average, an integer 0..2^32 (0 = let the others' values
        count). `rounds="sweep"` runs one round per dimension of the grid. Fewer contributors than
        `min_participants` is a failed average. `on_partial` says what a partial result is worth:
        take it, keep the local values and report it, or raise PartialAverage. Integer tensors take
        the maximum. Raises TrainerError for what the trainer did wrong (`reason`: not_finite with
        the tensor's name, schema_changed ...), DaemonUnavailable when the daemon is gone: the model
        is unchanged then, and the session re-attaches in the background.
        """
        request = average_request(
            weight,
            rounds=rounds,
            min_participants=min_participants,
            on_partial=on_partial,
            timeout_s=timeout_s,
        )

        result = self._round(self._asking(request), progress)
        if on_partial == "raise" and not result.accepted:
            raise PartialAverage(result)
        return result

    def begin(
        self,
        weight: float | SupportsIndex = 1,
        *,
        rounds: int | Literal["sweep"] = 1,
        min_participants: int = 1,
        on_partial: Literal["accept", "skip", "raise"] = "accept",
        timeout_s: float = 60.0,
        progress: Callable[[Progress], None] | None = None,
        overlap: bool = True,
        snapshots: bool = True,
    ) -> Flight:
        """Begin an average and go on; `land()` on what is returned brings its result in.

        Options and errors as in `average`; those of the round itself are raised by `land`, and
        `progress` is called in another thread. The contribution is taken now. With `overlap` the
        tensors may change until `land`, which adds `average - contribution` to them; it costs a
        copy of all tensors in memory (ConfigError for a session in place). Without, they must not
        change: the average replaces them.
        `snapshots=False` is for values that mean something in this round only, such as gradients:
        what a catch-up loads never reaches them. Lands a round that is still in flight first.
        """
        request = average_request(
            weight,
            rounds=rounds,
            min_participants=min_participants,
            on_partial=on_partial,
            timeout_s=timeout_s,
        )
        if overlap and self.in_place:
            raise no_overlap(self.run)
        with self._turn:
            self._settle()
            attachment = self._ready()
            tensors = self._tensors()
            bucket = attachment.bucket
            kept = self._keep(bucket.layout, tensors) if overlap else None
            flight = self._flight = Flight(
                Plan(
                    trainer=attachment.trainer,
                    bucket=bucket,
                    begin=self._asking(request),
                    telling=Telling(self._keeper, attachment),
                    progress=progress,
                    arrived=self._arrived,
                    land=self._land,
                    raise_partial=on_partial == "raise",
                    snapshots=snapshots,
                    kept=kept,
                    generation=0 if overlap else bucket.fill(tensors),
                )
            )
            flight.start()
            return flight

    def give_up(self) -> None:
        """Forget the round in flight, if any: its result would belong to other parameters."""
        with self._turn:
            self._give_up()

    def sync(
        self, timeout_s: float = 30.0, progress: Callable[[Progress], None] | None = None
    ) -> Result:
        """Load the swarm's parameters if it is ahead of this trainer; contribute nothing.

        Ends at once when there is nobody to learn from. Errors as in `average`.
        """
        request = messages.SyncRequest(timeout_s=check_timeout(timeout_s))

        def begin(trainer: str, generation: int) -> Stream:
            request.trainer, request.generation = trainer, generation
            return self._calls.sync(request, timeout_s + GRACE_S)

        return self._round(begin, progress)

    def put_state(self, state: bytes, timeout_s: float = 30.0) -> None:
        """Leave opaque bytes (step, scheduler, optimizer; at most 64 MiB) that newcomers get with
        the parameters."""
        if len(state) > MAX_STATE_BYTES:
            raise refusal(
                "state_too_large",
                f"{len(state)} bytes of state, expected at most {MAX_STATE_BYTES}",
            )
        attachment = self._keeper.current()
        with Telling(self._keeper, attachment):
            self._calls.put_state(attachment.trainer, state, check_timeout(timeout_s))

    def get_state(self, timeout_s: float = 30.0) -> bytes:
        """The bytes that came with the loaded parameters (or were put last); empty when there are
        none."""
        attachment = self._keeper.current()
        with Telling(self._keeper, attachment):
            return self._calls.get_state(attachment.trainer, check_timeout(timeout_s))

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model: which run, which version, descended from whom.

        Plain words and numbers, so that `torch.load(weights_only=True)` reads it.
        """
        return {"run": self.run, **self._lineage.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model now holds the checkpoint that `state` came with. Attaches anew, because the
        daemon must know. A round in flight is about other parameters and is given up.

        Simpler: `attach(..., state=...)`, which says so from the start.
        """
        if state.get("run") != self.run:
            theirs = state.get("run")
            raise refusal("run_differs", f"a checkpoint of run {theirs!r}, not {self.run!r}")
        with self._turn:
            self._give_up()
            self._lineage = Lineage.of_checkpoint(state)
            if self._keeper.attached:
                why = DaemonUnavailable("attaching anew with a checkpoint's version")
                self._keeper.lost(self._keeper.current(), why)
                self._keeper.wait(self._timeout_s)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach. Safe to call twice. A round in flight is given up; one whose result is here
        already can still be landed. In place, the tensors get memory of their own again, so call
        it in the thread that trains; at exit they stay where they are."""
        self._detach()
        if self._attached is not None and self._turn.acquire(timeout=DETACH_TIMEOUT_S):
            try:
                self._attached.bucket.move_out(self._source())
            finally:
                self._turn.release()

    def _detach(self) -> None:
        flight = self._flight
        if flight is not None and not flight.done:
            flight.cancel()
        self._keeper.close()
        if flight is not None and not flight.done:
            flight.end(DETACH_TIMEOUT_S)
        atexit.unregister(self._detach)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- below ------------------------------------------------------------------------------------

    def _round(self, begin: Begin, progress: Callable[[Progress], None] | None) -> Result:
        with self._turn:
            self._settle()
            attachment = self._ready()
            tensors = self._tensors()
            with Telling(self._keeper, attachment):
                generation = attachment.bucket.fill(tensors)
                try:
                    result = follow(begin(attachment.trainer, generation), progress)
                finally:
                    attachment.bucket.take_back(generation)
            if result.applied:
                bring_in(result, attachment.bucket, tensors)
            self._lineage = self._lineage.after(result)
            return result

    def _asking(self, request: messages.AverageRequest) -> Begin:
        def begin(trainer: str, generation: int) -> Stream:
            request.trainer, request.generation = trainer, generation
            return self._calls.average(request, request.timeout_s + GRACE_S)

        return begin

    def _ready(self) -> Attachment:
        attachment = self._keeper.current()
        if self._keeper.draining:
            raise DaemonDraining(f"{self.run}: the daemon is leaving, train on locally")
        return attachment

    def _keep(self, layout: Layout, tensors: list[Tensor]) -> Kept:
        """The contribution in a buffer of our own. Only one flight has it at a time."""
        if self._kept is None or self._kept.layout != layout:
            self._kept = Kept(layout, pinned=any(tensor.is_cuda for tensor in tensors))
        self._kept.take(tensors)
        return self._kept

    def _arrived(self, flight: Flight, result: Result) -> None:
        """In the flight's thread. The model gets the result when it is landed, but a daemon that we
        attach to in between will next see a model that has it."""
        if self._flight is flight:
            self._ahead = self._lineage.after(result)

    def _land(self, flight: Flight) -> None:
        with self._turn:
            if self._flight is flight:
                self._settle()

    def _settle(self) -> None:
        """Bring in the round in flight, if any. What became of it is told by its `land`."""
        flight = self._flight
        if flight is None:
            return
        flight.wait()  # before it is taken off: Ctrl-C here loses nothing
        self._flight = None
        try:
            if flight.result is not None:
                flight.bring_in(self._tensors())
                self._lineage = self._lineage.after(flight.result)
        except BaseException as error:
            flight.result, flight.error = None, error
        finally:
            self._ahead = None

    def _give_up(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.end(self._timeout_s)
        flight.result = None
        flight.error = DaemonUnavailable("the round was given up: other parameters were loaded")
        # A thread that did not end in time still has the buffer; it keeps it.
        self._ahead = self._kept = None

    def _tensors(self) -> list[Tensor]:
        """The tensors of now, in the order of the specs that the daemon knows."""
        named = self._source()
        specs = specs_of(named)
        if specs != self._specs:
            difference = self._layout.first_difference(specs) or "their order"
            raise refusal("schema_changed", f"the tensors changed since attach: {difference}")
        return list(named.values())

    def _attach(self) -> Attachment:
        """One attempt, in whichever thread the keeper runs it. Reads no tensor."""
        lineage = self._ahead or self._lineage
        request = messages.AttachRequest(
            run=self.run,
            tensors=[_tensor_message(spec) for spec in self._specs],
            version=lineage.version,
            founder=lineage.founder,
            founder_digest=lineage.digest,
            client=f"pid {os.getpid()} {os.path.basename(sys.argv[0] or 'python')}",
            api=API,
            codec=self._codec,
            no_feedback=not self._feedback,
            topology=self._topology,
            full=self._full,
            pairs=self._pairs,
            shared=self._shared,
            in_place=self.in_place,
        )
        reply = self._calls.attach(request, self._timeout_s)
        if reply.part_bytes != self._layout.part_bytes:
            self._layout = Layout.from_specs(self._specs, part_bytes=reply.part_bytes)
        bucket = bucket_of(reply, self._layout, run=self.run, in_place=self.in_place)
        hold = self._calls.hold(reply.trainer)
        attachment = Attachment(
            reply.trainer, bucket, hold, reply.peer_id, reply.joined, reply.codec, reply.shared_path
        )
        self._attached = attachment
        return attachment


def _tensor_message(spec: TensorSpec) -> messages.Tensor:
    return messages.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype)
