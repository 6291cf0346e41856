"""Some parts are reduced by a second member too, after the results are known, and compared.

Parity finds a reducer that tells members different things; it cannot find one consistent lie. An
audit does, with the probability `audit_fraction` per part: the next in the part's order that lives
decides by its own coin, after the results are out, so a liar cannot know which parts are checked.
What is wrong keeps local values everywhere; it is the auditor's word against the reducer's, so only
the auditor, who knows, strikes.

One rule: an audit only ever takes a result away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from moshpitd.core.effects import Check, OpenAudit, PushAudit
from moshpitd.core.events import AuditArrived, Checked
from moshpitd.core.messages import Audit, Audited
from moshpitd.core.outcome import Reason
from moshpitd.core.standing import Standing, chunks
from moshpitd.core.verdict import bits_of


@dataclass(slots=True)
class Audits:
    """Invariant: `awaiting` and `checking` are the parts of ours that are not decided yet."""

    st: Standing
    rng: random.Random
    until: float | None = None
    awaiting: dict[int, int] = field(default_factory=dict)  # part -> contributors not here yet
    checking: dict[int, bool] = field(default_factory=dict)
    wrong: dict[int, bool] = field(default_factory=dict)
    heard: dict[int, bool] = field(default_factory=dict)  # members that said Audited
    told: bool = False
    strikes: list[int] = field(default_factory=list)  # members whose results were wrong

    def start(self, now: float) -> None:
        st = self.st
        self.until = now + st.params.part_timeout_s
        alive = [i for i in range(len(st.lanes)) if st.alive(i)]
        wanted: dict[int, list[int]] = {}
        for part, held in st.results.items():
            reducer = st.now_reduces[part]
            able = [i for i in alive if i != reducer]
            following = st.succession.following(part, st.epoch(part), able)
            if following is None or following[1] != st.index or reducer == st.index:
                continue
            if self.rng.random() >= st.group.audit_fraction:
                continue
            inside = bits_of(held.contributors)
            if not all(i in alive for i in inside):
                continue  # what a dead member contributed cannot be had again
            others = held.contributors & ~(1 << st.index)
            self.awaiting[part] = others
            for i in bits_of(others):
                wanted.setdefault(i, []).append(part)
        for chunk in chunks(list(self.awaiting)):
            st.effects.append(OpenAudit(st.group_id, chunk))
        for i, some in wanted.items():
            for chunk in chunks(some):
                st.send(i, Audit(st.group_id, chunk))
        for part in [part for part, others in self.awaiting.items() if not others]:
            self._check(part)
        self._tell()

    def asked(self, sender: int, message: Audit) -> None:
        st = self.st
        parts = tuple(part for part in message.parts if 0 <= part < st.parts())
        if st.group.audit_fraction > 0 and parts:
            st.effects.append(PushAudit(st.group_id, sender, parts))

    def arrived(self, event: AuditArrived) -> None:
        others = self.awaiting.get(event.part)
        if others is None:
            return
        self.awaiting[event.part] = others = others & ~(1 << event.sender)
        if not others:
            self._check(event.part)

    def checked(self, event: Checked) -> None:
        if self.checking.pop(event.part, None) is None:
            return
        if not event.right:
            st = self.st
            reducer = st.now_reduces[event.part]
            peer = st.group.members[reducer].peer_id
            st.note("audit_failed", peer=peer, reason=Reason.AUDIT.value, part=event.part)
            st.detail(f"part {event.part}: {peer} reduced it wrongly ({event.detail})")
            self.wrong[event.part] = True
            if reducer not in self.strikes:
                self.strikes.append(reducer)
            st.dispute(event.part, Reason.AUDIT)
        self._tell()

    def told_by(self, sender: int, message: Audited) -> None:
        """Somebody has checked its share. Its word is enough to keep local values."""
        st = self.st
        self.heard[sender] = True
        for part in message.wrong:
            st.detail(f"part {part}: {st.group.members[sender].peer_id} found it wrong")
            st.dispute(part, Reason.AUDIT)

    def gone(self, index: int) -> None:
        """What it contributed cannot be checked any more."""
        for part in [part for part, others in self.awaiting.items() if others >> index & 1]:
            del self.awaiting[part]
        if self.until is not None:
            self._tell()

    def over(self, now: float) -> bool:
        """Everybody has said what it found, is gone, or had its time."""
        if self.until is None:
            return False
        if now >= self.until:
            return True
        return self.told and all(i in self.heard for i in self.st.others())

    def _check(self, part: int) -> None:
        del self.awaiting[part]
        self.checking[part] = True
        self.st.effects.append(Check(self.st.group_id, part))

    def _tell(self) -> None:
        if not self.told and not self.awaiting and not self.checking:
            self.told = True
            self.st.tell(Audited(self.st.group_id, tuple(self.wrong)))
