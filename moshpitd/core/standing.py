"""How one round stands at one member: which parts are open, who reduces them now, who owes what.

One rule: bookkeeping only. Nothing here decides that somebody is dead or a part is lost; what is
said to others goes through the few doors at the end, so that nobody who is out is told anything.
"""

from __future__ import annotations

import binascii
import hashlib
from dataclasses import dataclass, field

from moshpitd.core.effects import Average, Effect, Note, Push, Send
from moshpitd.core.messages import Group, Held, Message
from moshpitd.core.outcome import DISPUTED, Reason
from moshpitd.core.params import Params
from moshpitd.core.quiet import Quiet
from moshpitd.core.succession import Succession
from moshpitd.core.verdict import Lane, bits_of

PARTS_AT_ONCE = 65_536  # parts named in one message: its bound on the wire, 256 KiB of stamps
LOOKS = 5
"""Looks in a row that must find nothing of a peer: on a machine so loaded that we look seldom, the
others get as many chances to be heard as on an idle one."""
MAX_DETAILS = 8  # a few causes explain a round; thousands hide them


@dataclass(slots=True)
class Standing:
    """Invariant: a part is open, or has a result, or is without one for a reason, and `missing`
    counts the open ones; a lane owes as many parts as it has bits in `awaiting`, and as many
    results as there are open parts that it reduces."""

    params: Params
    group: Group
    index: int
    reducers: tuple[int, ...]  # by assignment
    succession: Succession
    lanes: list[Lane]
    missing: int
    now: float  # the instant of what is being handled
    now_reduces: list[int] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)  # parts beyond epoch 0
    awaiting: dict[int, int] = field(default_factory=dict)  # parts we collect -> senders expected
    closing: dict[int, int] = field(default_factory=dict)  # part at the data plane -> epoch
    results: dict[int, Held] = field(default_factory=dict)
    without: dict[int, Reason] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    late: tuple[int, ...] = ()  # what our Parity says of the others' pace (see lateness)
    effects: list[Effect] = field(default_factory=list)

    @property
    def group_id(self) -> bytes:
        return self.group.group_id

    def parts(self) -> int:
        return len(self.now_reduces)

    def is_open(self, part: int) -> bool:
        return (
            0 <= part < len(self.now_reduces)
            and part not in self.results
            and part not in self.without
        )

    def epoch(self, part: int) -> int:
        return self.epochs.get(part, 0)

    def index_of(self, peer_id: str) -> int | None:
        for i, member in enumerate(self.group.members):
            if member.peer_id == peer_id:
                return i
        return None

    def alive(self, index: int) -> bool:
        return self.lanes[index].gone is None

    def others(self) -> list[int]:
        """Members but us that are not out, our right-hand neighbour first: when everybody starts
        there, nobody is flooded by all at once."""
        lanes, after = self.lanes, self.index + 1
        turn = (*range(after, len(lanes)), *range(self.index))
        return [i for i in turn if lanes[i].gone is None]

    def open_of(self, reducer: int) -> list[int]:
        """Open parts that this member reduces now."""
        if not self.lanes[reducer].owes_results:
            return []
        return [p for p, r in enumerate(self.now_reduces) if r == reducer and self.is_open(p)]

    def unheard(self) -> bool:
        """Has a member that is not out yet to say Parity?"""
        # Asked after every message: the first that is found ends it.
        for i, lane in enumerate(self.lanes):
            if lane.parity is None and lane.gone is None and i != self.index:
                return True
        return False

    def heard(self, peer_ids: tuple[str, ...], quiet: Quiet) -> list[int]:
        """Bytes came from these. Returns who owes something and was quiet for too long."""
        heard = dict.fromkeys(peer_ids)
        silent = []
        for index in self.others():
            lane, peer_id = self.lanes[index], self.group.members[index].peer_id
            gap_s = self.now - lane.heard_at
            owes = lane.owes_parts or lane.owes_results or lane.parity is None
            if peer_id in heard:
                quiet.heard(peer_id, gap_s)
                lane.heard_at, lane.unheard = self.now, 0
                continue
            lane.unheard += 1
            if owes and lane.unheard >= LOOKS and gap_s >= quiet.limit_s(peer_id):
                silent.append(index)
        return silent

    # -- who reduces a part, and from whom it still collects

    def assign(self, part: int, reducer: int, epoch: int) -> None:
        """`reducer` has the part from now on. What we collected for it ourselves is void."""
        self.forget(part)
        if self.is_open(part):
            self._owed(part, -1)
        self.now_reduces[part], self.epochs[part] = reducer, epoch
        if self.is_open(part):
            self._owed(part, +1)

    def collect(self, part: int, senders: int) -> None:
        """We reduce the part and wait for these (a bit mask); for nobody, and it closes at once."""
        for i in bits_of(senders):
            self.lanes[i].owes_parts += 1
        self.awaiting[part] = senders
        if not senders:
            self._close(part)

    def clear(self, part: int, sender: int) -> None:
        """`sender` is in the part, or will not be: stop waiting for it there."""
        bits = self.awaiting.get(part, 0)
        if not bits >> sender & 1:
            return
        self.awaiting[part] = bits = bits & ~(1 << sender)
        self.lanes[sender].owes_parts -= 1
        if not bits:
            self._close(part)

    def forget(self, part: int) -> None:
        """Collect nothing more for the part."""
        for i in bits_of(self.awaiting.pop(part, 0)):
            self.lanes[i].owes_parts -= 1

    def owing(self, *, forget: bool) -> list[int]:
        """Whose contributions we wait for. `forget`: and collect for no part any more."""
        found = [i for i, lane in enumerate(self.lanes) if lane.owes_parts and i != self.index]
        for part in list(self.awaiting) if forget else ():
            self.forget(part)
        return found

    def _close(self, part: int) -> None:
        del self.awaiting[part]
        self.closing[part] = self.epoch(part)
        self.effects.append(Average(self.group_id, part, self.epoch(part)))

    def _owed(self, part: int, by: int) -> None:
        reducer = self.now_reduces[part]
        if reducer != self.index:
            self.lanes[reducer].owes_results += by

    # -- what became of a part

    def put(self, held: Held) -> None:
        """A result is in place."""
        part = held.part
        if self.without.get(part) in DISPUTED:
            return  # nobody takes it: `Close` names the part
        if self.is_open(part):
            self._owed(part, -1)
            self.missing -= 1
        elif part in self.without:
            # It was given up while its result was on the way. It is in the bucket now, so it
            # counts: what is reported and what is held must not differ.
            del self.without[part]
        self.forget(part)
        self.results[part] = held

    def give_up(self, part: int, reason: Reason) -> None:
        """The part keeps local values."""
        if not self.is_open(part):
            return
        self._owed(part, -1)
        self.forget(part)
        self.without[part] = reason
        self.missing -= 1
        self.note("part_without_result", reason=reason.value, part=part)

    def dispute(self, part: int, reason: Reason) -> None:
        """Members hold different results, and no majority: all keep local values there."""
        if self.results.pop(part, None) is not None:
            self.without[part] = reason
            self.note("part_without_result", reason=reason.value, part=part)

    def left_traces(self) -> bool:
        """Has a result got into the bucket? One that is disputed by now stays there as well."""
        return bool(self.results) or any(why in DISPUTED for why in self.without.values())

    def contributors(self) -> dict[int, int]:
        return {part: held.contributors for part, held in self.results.items()}

    def stamp(self, part: int) -> int:
        """What members compare of a part: its payload and who is said to be inside. 0: none."""
        held = self.results.get(part)
        if held is None:
            return 0
        return binascii.crc32(held.contributors.to_bytes(8, "big"), held.crc) or 1

    def digest(self) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        for part in range(self.parts()):
            state.update(self.stamp(part).to_bytes(4, "big"))
        return state.digest()

    # -- what is said

    def send(self, to: int, message: Message) -> None:
        if to != self.index and self.alive(to):
            self.effects.append(Send(self.group.members[to].peer_id, message))

    def tell(self, message: Message) -> None:
        """Say it to every member that is not out."""
        for i, member in enumerate(self.group.members):
            if i != self.index and self.alive(i):
                self.effects.append(Send(member.peer_id, message))

    def push(self, to: int, parts: tuple[int, ...], *, result: bool, epoch: int = 0) -> None:
        if parts and to != self.index and self.alive(to):
            self.effects.append(Push(self.group_id, to, parts, result, epoch))

    def cause(self, reason: Reason) -> str:
        """The reason in words that name what is to be looked at."""
        return f"{reason.value}, {self.group.codec}" if reason is Reason.CODEC else reason.value

    def detail(self, sentence: str) -> None:
        if len(self.details) < MAX_DETAILS and sentence not in self.details:
            self.details.append(sentence)

    def note(self, what: str, *, peer: str = "", reason: str = "", **fields: object) -> None:
        said = {"group": self.group_id.hex(), **fields}
        self.effects.append(Note(what, peer, reason, fields=said))


def chunks(parts: list[int]) -> list[tuple[int, ...]]:
    return [tuple(parts[at : at + PARTS_AT_ONCE]) for at in range(0, len(parts), PARTS_AT_ONCE)]
