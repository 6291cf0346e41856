"""After the end of a round: results stay for slower members, without anybody waiting for them. One
rule: from `Linger` on nothing touches the bucket, which is the trainer's again or the next round's:
whoever refused what we took may have another take a part over, and send us its result.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpitd.core.effects import Close, Effect, Linger
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

    def begins(self, now: float) -> bool:
        """May somebody still be reading what we reduced, and is there a result of every part?"""
        st = self.st
        whole = not st.without and not st.missing
        wanted = whole and st.index in st.now_reduces and st.unheard() and now < self.until
        if wanted:
            st.effects.append(Linger(st.group_id))
        return wanted

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
