"""One round as the client follows it: the stream of events up to its result, and what a broken
stream says about the attachment. One rule: nothing here touches a tensor, so that it may run in any
thread."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from moshpitd.client.keeper import Attachment, Keeper
from moshpitd.client.result import Progress, Result, progress_of, result_of
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.calls import EventStream
from moshpitd.rpc.status import DaemonDraining
from moshpitd.rpc.stubs import messages

Stream = EventStream[messages.RoundEvent]
Begin = Callable[[str, int], Stream]
"""Starts a call for (trainer, generation of its filled bucket)."""


class Telling:
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


def follow(stream: Stream, progress: Callable[[Progress], None] | None) -> Result:
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
