"""Do the members hold the same bits? If digests differ, every member says the stamp of every part,
the majority's result replaces the others, and where there is no majority all keep local values.

One rule: a strict majority of those that hold a result of a part decides; it finds damage and a
reducer that tells members different things, not one consistent lie (which audits are for). Who does
not hear everybody counts other votes, so what somebody decided is known only when it has said it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moshpitd.core.effects import Await
from moshpitd.core.messages import Crcs, Parity, Resend
from moshpitd.core.outcome import Reason
from moshpitd.core.standing import PARTS_AT_ONCE, Standing, chunks

STAMP_BYTES = 4


@dataclass(slots=True)
class Comparison:
    """Invariant: `repairs` are the parts whose right result we wait for: its stamp, and those that
    hold it, the one that we asked first."""

    st: Standing
    until: float | None = None  # None: nobody's digest differed yet
    votes: dict[int, bytearray] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)  # member -> stamps heard so far
    again: dict[int, bool] = field(default_factory=dict)  # said Parity after its stamps
    repairs: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    disputed: dict[int, bool] = field(default_factory=dict)
    judged: bool = False
    wanting: bool = False  # we change something, and the others wait for our Parity
    spoken: bytes = b""  # the digest of what we last said that we hold

    def say(self) -> None:
        """These are our bits."""
        st = self.st
        self.spoken = st.digest()
        st.tell(Parity(st.group_id, self.spoken, len(st.without), st.late))

    def differing(self) -> list[int]:
        """Members that hold a result of every part, as we do, and other bits."""
        if self.st.without:
            return []
        digest = self.st.digest()
        return [
            i
            for i, lane in enumerate(self.st.lanes)
            if i != self.st.index
            and lane.gone is None
            and lane.parity is not None
            and not lane.parity_without
            and lane.parity != digest
        ]

    def start(self, now: float) -> None:
        """Tell everybody what we hold. Whoever hears it does the same."""
        if self.until is not None:
            return
        st = self.st
        self.until = now + st.params.parity_timeout_s
        for i in self.differing():
            st.note("parity_differs", peer=st.group.members[i].peer_id)
        self.spoken = st.digest()
        stamps = bytearray()
        for part in range(st.parts()):
            stamps += st.stamp(part).to_bytes(STAMP_BYTES, "big")
        self.votes[st.index], self.said[st.index] = stamps, st.parts()
        for first in range(0, st.parts(), PARTS_AT_ONCE):
            some = stamps[first * STAMP_BYTES : (first + PARTS_AT_ONCE) * STAMP_BYTES]
            st.tell(Crcs(st.group_id, first, bytes(some)))

    def wanted(self) -> bool:
        """Somebody holds other bits, or says that somebody does."""
        return bool(self.votes or self.differing())

    def heard(self, sender: int, message: Crcs) -> None:
        st = self.st
        size = st.parts() * STAMP_BYTES
        start = message.first * STAMP_BYTES
        if self.judged or len(message.crcs) % STAMP_BYTES or start + len(message.crcs) > size:
            return
        if start != self.said.get(sender, 0) * STAMP_BYTES:
            return  # a piece again, or one that overtook another: it is as if it were not said
        vote = self.votes.setdefault(sender, bytearray())
        vote += message.crcs
        self.said[sender] = len(vote) // STAMP_BYTES

    def parity(self, sender: int) -> None:
        """A member says Parity. After its stamps it means: what I lacked I have by now."""
        if self.said.get(sender) == self.st.parts():
            self.again[sender] = True

    def open(self, now: float) -> bool:
        """Still comparing or repairing?"""
        if self.until is None or now >= self.until:
            return False
        return bool(self.repairs) if self.judged else not self._complete()

    def _complete(self) -> bool:
        parts = self.st.parts()
        lanes = enumerate(self.st.lanes)
        return all(self.said.get(i) == parts for i, lane in lanes if lane.gone is None)

    def judge(self, now: float, last: float) -> list[int]:
        """Ask for what the majority holds otherwise, give up what no majority holds; returns the
        members that have to as well. `last`: whoever waits for our call waits no longer; what is
        not repaired by then keeps local values, and who has not said so by then is not agreed
        with."""
        st = self.st
        self.judged = True
        self.until = min(now + st.params.parity_timeout_s, max(now, last))
        parts = st.parts()
        voters = [i for i in self.votes if self.said[i] == parts and (i == st.index or st.alive(i))]
        needy: dict[int, bool] = {}
        for part in range(parts):
            stamps = {i: self._stamp(i, part) for i in voters}
            if len(dict.fromkeys(stamps.values())) == 1:
                continue
            counts = Counter(stamp for stamp in stamps.values() if stamp)
            stamp, votes = counts.most_common(1)[0]
            if 2 * votes <= counts.total():
                self._dispute(part)
                needy.update((i, True) for i in voters)
                continue
            needy.update((i, True) for i in voters if stamps[i] not in (0, stamp))
            if part in st.results and stamps[st.index] != stamp:
                # Its reducer last: what it sent here was damaged, or it lies.
                holders = [i for i in voters if stamps[i] == stamp]
                holders.sort(key=lambda i: (i == st.now_reduces[part], i))
                self.repairs[part] = (stamp, holders)
        self.wanting = bool(self.repairs or self.disputed)
        self._ask(list(self.repairs))
        return [i for i in needy if i != st.index and i not in self.again]

    def agrees(self, index: int) -> bool:
        """Does that member say that it holds the same bits as we do, and have we said so too?"""
        st, lane = self.st, self.st.lanes[index]
        if st.digest() != self.spoken:
            return False
        if not self.judged or index in self.again:
            return lane.parity == self.spoken
        return self.said.get(index) == st.parts() and all(
            self._stamp(index, part) == st.stamp(part) for part in range(st.parts())
        )

    def arrived(self, part: int) -> None:
        """A result of this part is in place: is it the one we asked for?"""
        repair = self.repairs.get(part)
        if repair is None:
            return
        if self.st.stamp(part) != repair[0]:
            self.failed(part)
            return
        del self.repairs[part]
        self.st.note("part_repaired", part=part)

    def failed(self, part: int) -> None:
        """What came was not it: ask the next that holds it."""
        repair = self.repairs.get(part)
        if repair is None:
            return
        repair[1].pop(0)
        if repair[1]:
            self._ask([part])
        else:
            del self.repairs[part]
            self._dispute(part)

    def gone(self, index: int) -> None:
        for part, (_, holders) in list(self.repairs.items()):
            if index in holders[1:]:
                holders.remove(index)
            elif index == holders[0]:
                self.failed(part)

    def _ask(self, parts: list[int]) -> None:
        st = self.st
        wanted: dict[tuple[int, int], list[int]] = {}
        for part in parts:
            wanted.setdefault((self.repairs[part][1][0], st.epoch(part)), []).append(part)
        for (holder, epoch), some in wanted.items():
            for chunk in chunks(some):
                st.effects.append(Await(st.group_id, holder, chunk, epoch))
                st.send(holder, Resend(st.group_id, epoch, chunk))

    def _dispute(self, part: int) -> None:
        self.disputed[part] = True
        self.st.dispute(part, Reason.PARITY)

    def close(self) -> None:
        """Time is up: what was not repaired keeps local values."""
        for part in self.repairs:
            self._dispute(part)
        self.repairs.clear()

    def _stamp(self, member: int, part: int) -> int:
        at = part * STAMP_BYTES
        return int.from_bytes(self.votes[member][at : at + STAMP_BYTES], "big")
