"""What the data plane says of the parts of a round, and what follows from it. One rule: a part that
cannot come from its reducer is left to the takeover; only its own reducer's failure is final.
"""

from __future__ import annotations

from moshpitd.core.comparison import Comparison
from moshpitd.core.events import Averaged, PartFailed, PartRefused, ResultArrived
from moshpitd.core.messages import Held, NoResult, Without
from moshpitd.core.standing import Standing
from moshpitd.core.takeover import Takeovers


class Parts:
    """Invariant: what is reported of a part is what is in its bucket."""

    def __init__(self, standing: Standing, takeovers: Takeovers, comparison: Comparison) -> None:
        self._st = standing
        self._takeovers = takeovers
        self._comparison = comparison

    def reduces(self, index: int, part: int, epoch: int) -> bool:
        st = self._st
        return (
            st.is_open(part)
            and st.now_reduces[part] == index != self._st.index
            and st.epoch(part) == epoch
        )

    def averaged(self, event: Averaged) -> None:
        st = self._st
        if st.closing.get(event.part) != event.epoch:
            return
        del st.closing[event.part]
        if not st.is_open(event.part):
            return
        st.put(_held(event))
        if event.epoch == st.epoch(event.part):
            for to in st.others():
                st.push(to, (event.part,), result=True, epoch=event.epoch)

    def arrived(self, event: ResultArrived) -> None:
        st = self._st
        if not 0 <= event.part < st.parts() or event.sender == self._st.index:
            return
        known = st.results.get(event.part)
        if known is not None and known.epoch > event.epoch:
            return
        st.put(_held(event))
        self._takeovers.arrived(event.part)
        self._comparison.arrived(event.part)

    def refused(self, event: PartRefused) -> None:
        """The data plane would not have what a member sent."""
        st = self._st
        if not 0 <= event.sender < len(st.lanes) or event.sender == self._st.index:
            return
        st.detail(f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value)
        if not event.result:
            st.clear(event.part, event.sender)
            return
        if event.epoch == st.epoch(event.part):
            self._comparison.failed(event.part)
        self._takeovers.failed(event.part, event.sender, event.epoch)
        if self.reduces(event.sender, event.part, event.epoch):
            self._takeovers.leave([event.part], event.reason)

    def failed(self, event: PartFailed) -> None:
        st = self._st
        detail = f" ({event.detail})" if event.detail else ""
        st.detail(f"part {event.part}: {self._st.cause(event.reason)}{detail}")
        if event.result:
            mine = event.part in st.awaiting and event.epoch == st.epoch(event.part)
            if mine or st.closing.get(event.part) == event.epoch:
                st.closing.pop(event.part, None)
                st.give_up(event.part, event.reason)
                st.tell(NoResult(self._st.group_id, event.reason, event.epoch, (event.part,)))
        elif 0 <= event.part < st.parts():
            # Ours to reduce: then the data plane leaves us out of it by itself.
            st.send(
                st.now_reduces[event.part],
                Without(self._st.group_id, event.reason, (event.part,)),
            )


def _held(event: Averaged | ResultArrived) -> Held:
    mask = 0
    for i in event.contributors:
        mask |= 1 << i
    return Held(event.part, event.epoch, mask, event.crc)
