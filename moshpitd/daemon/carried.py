"""What the links and the control plane carried, for the metrics. One rule: sources count upwards,
and only what was added since the last time is told on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from moshpitd.daemon.ongoing import run_hash
from moshpitd.net.frames import FrameKind
from moshpitd.net.links import Moved

CONTROL = "control"
_KINDS = {
    FrameKind.CONTRIBUTION: "part",
    FrameKind.RESULT: "result",
    FrameKind.SNAPSHOT: "snapshot",
    FrameKind.HANDOVER: "handover",
    FrameKind.AUDIT: "audit",
    FrameKind.WORD: CONTROL,
    FrameKind.STORE: "store",
}


class Carried:
    """`tell(run, kind, sent, count)` is called for what is new. Bytes of runs that are not here,
    which anybody can send, are left out: the links' own totals have them."""

    def __init__(self, tell: Callable[[str, str, bool, int], None]) -> None:
        self._tell = tell
        self._told: Counter[tuple[str, str, bool]] = Counter()

    def update(
        self,
        runs: Iterable[str],
        moved: Mapping[Moved, int],
        control: Mapping[tuple[str, bool], int],
    ) -> None:
        """`control` by (run, whether sent)."""
        names = {run_hash(name): name for name in runs}
        now: Counter[tuple[str, str, bool]] = Counter()
        for key, count in moved.items():
            if key.run in names and key.kind in _KINDS:
                now[names[key.run], _KINDS[key.kind], key.sent] += count
        here = set(names.values())
        for (run, sent), count in control.items():
            if run in here:
                now[run, CONTROL, sent] += count
        for what, count in now.items():
            if count > self._told[what]:
                self._tell(*what, count - self._told[what])
                self._told[what] = count

    def forget(self, run: str) -> None:
        """Control bytes of a run of that name begin at 0 again; those of the links go on."""
        for sent in (False, True):
            self._told.pop((run, CONTROL, sent), None)
