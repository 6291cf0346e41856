"""After the end of a round: results stay for slower members, without anybody waiting for them. One
rule: only while nothing can touch the bucket any more, which is the trainer's again.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpitd.core.effects import Close, Effect
from moshpitd.core.messages import Message, Parity
from moshpitd.core.outcome import Reason
from moshpitd.core.standing import Standing


@dataclass(slots=True)
class Lingering:
    """Invariant: until it is over, our results of the round can be read by the others."""

    st: Standing
    until: float
    over: bool = False

    @property
    def effects(self) -> list[Effect]:
        return self.st.effects

    def wanted(self) -> bool:
        """May somebody still be reading what we reduced? With a result for every part here, nothing
        that arrives is put into the bucket any more."""
        st = self.st
        return not st.without and not st.missing and st.index in st.now_reduces and st.unheard()

    def tick(self, now: float) -> None:
        """Let go when everybody was heard, is gone, or had its time."""
        if not self.over and not (self.st.unheard() and now < self.until):
            self.over = True
            self.st.effects.append(Close(self.st.group_id))

    def overheard(self, sender: str, message: Message | None) -> None:
        """A last message of a member, or (None) the news that it is gone."""
        index = self.st.index_of(sender)
        if index is None:
            return
        if message is None:
            self.st.lanes[index].gone = self.st.lanes[index].gone or Reason.LINK_LOST
        elif isinstance(message, Parity):
            self.st.lanes[index].parity = message.digest
