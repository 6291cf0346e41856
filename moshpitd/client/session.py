"""A trainer's connection to its daemon. One rule: the model is written to inside `sync()` and
`average()`, in the thread that called them, and nowhere else.

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
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from torch import Tensor, nn

from moshpitd.client.buckets import Bucket
from moshpitd.client.checks import average_request, check_timeout, check_version
from moshpitd.client.keeper import Attachment, Keeper
from moshpitd.client.result import PartialAverage, Progress, Result, progress_of, result_of
from moshpitd.client.sources import Source, source_of
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.calls import Calls, EventStream
from moshpitd.rpc.channel import default_socket
from moshpitd.rpc.status import DaemonDraining, refusal
from moshpitd.rpc.stubs import API, messages
from moshpitd.tensors.layout import Layout, TensorSpec, specs_of

MAX_STATE_BYTES = 64 << 20  # Params.max_state_bytes
GRACE_S = 15.0
"""The daemon ends every call by the caller's timeout_s; one that is frozen (SIGSTOP, swap) cannot.
So long after that the client stops waiting for it, and trains on."""


@dataclass(frozen=True, slots=True)
class _Lineage:
    """How many averages the parameters contain, and which initial parameters they descend from."""

    version: int = 0
    founder: str = ""
    digest: bytes = b""


def attach(
    run: str,
    *,
    model: nn.Module | None = None,
    tensors: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    socket: str | os.PathLike[str] | None = None,
    version: int = 0,
    state: Mapping[str, Any] | None = None,
    sync: bool = True,
    timeout_s: float = 30.0,
) -> Session:
    """Attach these tensors to `run` of the daemon at `socket` (default:
    `rpc.channel.default_socket`).

    `version` (or `state`, from `Session.state_dict`) says what a checkpoint holds. With `sync` the
    swarm's parameters are loaded when there are any; `timeout_s` bounds the attach call and the
    sync one by one. A daemon that is not there is no error: the trainer starts at once, and the
    session attaches by itself when the daemon appears. Raises TrainerError for tensors that cannot
    be averaged (before any traffic), or that differ from what this run averages on this node.
    """
    session = Session(
        run, source_of(model, tensors), socket=socket, version=version, timeout_s=timeout_s
    )
    if state is not None:
        session.load_state_dict(state)
    session.start(sync=sync)
    return session


class Session:
    """Made by `attach`. Invariant: one round at a time; a second thread waits for its turn."""

    def __init__(
        self,
        run: str,
        source: Source,
        *,
        socket: str | os.PathLike[str] | None = None,
        version: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        if not run:
            raise refusal("bad_run", "run is empty, expected the name of a training job")
        self.run = run
        self._source = source
        self._specs = specs_of(source())
        if not self._specs:
            raise refusal("no_tensors", f"run {run!r}: no tensors to average")
        self._layout = Layout.from_specs(self._specs)  # refuses here, before any traffic
        self._lineage = _Lineage(check_version(version))
        self._timeout_s = check_timeout(timeout_s)
        self._calls = Calls(default_socket() if socket is None else socket)
        self._keeper = Keeper(self._calls, self._attach, run)
        self._turn = threading.Lock()
        self._attached: Attachment | None = None  # the last one, also when it is lost
        self.synced: Result | None = None
        """What the sync at attach found: `synced.loaded_snapshot` tells a newcomer from a
        founder."""

    def start(self, *, sync: bool) -> None:
        """Called once, by `attach`."""
        self._keeper.start()
        atexit.register(self.close)
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
    def peer_id(self) -> str:
        """The node's PeerID, empty before the first attach."""
        return self._attached.peer_id if self._attached else ""

    @property
    def joined(self) -> bool:
        """Whether the daemon had reached the swarm at the last attach."""
        return self._attached.joined if self._attached else False

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

        def begin(trainer: str, generation: int) -> EventStream[messages.RoundEvent]:
            request.trainer, request.generation = trainer, generation
            return self._calls.average(request, timeout_s + GRACE_S)

        result = self._round(begin, progress)
        if on_partial == "raise" and not result.accepted:
            raise PartialAverage(result)
        return result

    def sync(
        self, timeout_s: float = 30.0, progress: Callable[[Progress], None] | None = None
    ) -> Result:
        """Load the swarm's parameters if it is ahead of this trainer; contribute nothing.

        Ends at once when there is nobody to learn from. Errors as in `average`.
        """
        request = messages.SyncRequest(timeout_s=check_timeout(timeout_s))

        def begin(trainer: str, generation: int) -> EventStream[messages.RoundEvent]:
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
        with self._telling(attachment):
            self._calls.put_state(attachment.trainer, state, check_timeout(timeout_s))

    def get_state(self, timeout_s: float = 30.0) -> bytes:
        """The bytes that came with the loaded parameters (or were put last); empty when there are
        none."""
        attachment = self._keeper.current()
        with self._telling(attachment):
            return self._calls.get_state(attachment.trainer, check_timeout(timeout_s))

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model: which run, which version, descended from whom.

        Plain words and numbers, so that `torch.load(weights_only=True)` reads it.
        """
        lineage = self._lineage
        return {
            "run": self.run,
            "version": lineage.version,
            "founder": lineage.founder,
            "founder_digest": lineage.digest.hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model now holds the checkpoint that `state` came with. Attaches anew, because the
        daemon must know.

        Simpler: `attach(..., state=...)`, which says so from the start.
        """
        if state.get("run") != self.run:
            theirs = state.get("run")
            raise refusal("run_differs", f"a checkpoint of run {theirs!r}, not {self.run!r}")
        with self._turn:
            self._lineage = _Lineage(
                check_version(state.get("version", 0)),
                str(state.get("founder", "")),
                bytes.fromhex(state.get("founder_digest", "")),
            )
            if self._keeper.attached:
                why = DaemonUnavailable("attaching anew with a checkpoint's version")
                self._keeper.lost(self._keeper.current(), why)
                self._keeper.wait(self._timeout_s)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach. Safe to call twice, and at exit."""
        self._keeper.close()
        atexit.unregister(self.close)

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

    def _round(
        self,
        begin: Callable[[str, int], EventStream[messages.RoundEvent]],
        progress: Callable[[Progress], None] | None,
    ) -> Result:
        with self._turn:
            attachment = self._keeper.current()
            if self._keeper.draining:
                raise DaemonDraining(f"{self.run}: the daemon is leaving, train on locally")
            tensors = self._tensors()
            with self._telling(attachment):
                generation = attachment.bucket.fill(tensors)
                result = _result(begin(attachment.trainer, generation), progress)
            self._take(result, attachment.bucket, tensors)
            return result

    def _take(self, result: Result, bucket: Bucket, tensors: list[Tensor]) -> None:
        """Bring a result into the model; only then does the version count it."""
        if result.applied:
            if result.delta:
                bucket.add_to(tensors)
            else:
                # A loaded snapshot fills every part, whatever the round after it came to.
                bucket.copy_to(
                    tensors, skip=() if result.loaded_snapshot else result.parts_without_result
                )
        # A sync that loaded nothing found the trainer current: that is an answer about it as well.
        current = result.status == "complete" and result.rounds == 0
        if result.applied or result.status == "alone" or current:
            old = self._lineage
            named = result.founder != ""  # a daemon that knows of no lineage takes none away
            self._lineage = _Lineage(
                version=result.version,
                founder=result.founder if named else old.founder,
                digest=result.founder_digest if named else old.digest,
            )

    def _tensors(self) -> list[Tensor]:
        """The tensors of now, in the order of the specs that the daemon knows."""
        named = self._source()
        specs = specs_of(named)
        if specs != self._specs:
            difference = self._layout.first_difference(specs) or "their order"
            raise refusal("schema_changed", f"the tensors changed since attach: {difference}")
        return list(named.values())

    def _telling(self, attachment: Attachment) -> _Telling:
        return _Telling(self._keeper, attachment)

    def _attach(self) -> Attachment:
        """One attempt, in whichever thread the keeper runs it. Reads no tensor."""
        lineage = self._lineage
        request = messages.AttachRequest(
            run=self.run,
            tensors=[_tensor_message(spec) for spec in self._specs],
            version=lineage.version,
            founder=lineage.founder,
            founder_digest=lineage.digest,
            client=f"pid {os.getpid()} {os.path.basename(sys.argv[0] or 'python')}",
            api=API,
        )
        reply = self._calls.attach(request, self._timeout_s)
        if reply.part_bytes != self._layout.part_bytes:
            self._layout = Layout.from_specs(self._specs, part_bytes=reply.part_bytes)
        bucket = Bucket(
            reply.bucket_path,
            layout=self._layout,
            data_offset=reply.data_offset,
            nbytes=reply.bucket_bytes,
        )
        hold = self._calls.hold(reply.trainer)
        attachment = Attachment(
            reply.trainer, bucket, hold, reply.peer_id, reply.joined, reply.codec
        )
        self._attached = attachment
        return attachment


class _Telling:
    """Tells the keeper when a call shows that the attachment is dead, and turns that into
    DaemonUnavailable."""

    def __init__(self, keeper: Keeper, attachment: Attachment) -> None:
        self._keeper, self._attachment = keeper, attachment

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DaemonUnavailable) and not isinstance(error, DaemonDraining):
            self._keeper.lost(self._attachment, error)
        elif isinstance(error, TrainerError) and error.reason == "unknown_trainer":
            # The daemon was restarted between two calls, faster than the keeper noticed.
            why = DaemonUnavailable(f"the daemon was restarted: {error}")
            self._keeper.lost(self._attachment, why)
            raise why from error


def _tensor_message(spec: TensorSpec) -> messages.Tensor:
    return messages.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype)


def _result(
    stream: EventStream[messages.RoundEvent], progress: Callable[[Progress], None] | None
) -> Result:
    """Run the stream to its result. Ctrl-C and an error in the hook end the call at the daemon,
    too."""
    try:
        for event in stream:
            if event.HasField("result"):
                return result_of(event.result)
            if progress is not None and event.HasField("progress"):
                progress(progress_of(event.progress))
    finally:
        stream.cancel()
    raise DaemonUnavailable("the daemon ended the round without a result")
