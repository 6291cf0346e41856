"""What a peer knows of the others in its run, and what follows from it: how many there are, which
round and version they are at, and whose lineage everybody should descend from.

One rule: knowledge is bounded (`Params.max_candidates`), ages (`heard_fresh_s`), and nothing in it
is believed further than two peers confirm it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moshpitd.core.census import Census
from moshpitd.core.messages import Goodbye, Lineage, Record, Shape
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params

GOODBYES = (Reason.NO_TRAINER, Reason.DRAINING, Reason.PREEMPTED)
"""Why a peer leaves, in its own words."""

GRAVES = 4
"""Lost peers remembered by name, per peer that is remembered whole: as long as their records last
in a run that loses a third of its peers per ttl."""

DOUBT_S = 10.0
"""Two messages within so long that could not be delivered are no accident."""

OVERTAKEN_S = 2.0
"""Two messages of one peer overtake each other within so long; who lost its counter was away for
longer."""

VOICES = 3
"""The fewest whose median is believed."""

FULL_S = 1.0
"""With no room for a new peer, none is looked for again for so long: a directory answer may name a
thousand."""


EXPIRE_S = 30.0
"""Between two looks for peers that are forgotten: a twentieth of the time that takes."""


@dataclass(slots=True)
class Heard:
    """One other peer. `direct_at` is the last time it spoke itself; a record out of the directory
    only proves that it lived."""

    record: Record
    heard_at: float
    direct_at: float = float("-inf")
    stated_at: float = float("-inf")  # when it last said itself what stands in `record`
    greeted_at: float = float("-inf")  # when we said Hello on hearing of it; it will answer
    lost: Reason | None = None
    left: int = 0  # sequence of its record when it said goodbye
    doubted_at: float = float("-inf")  # when a message to it was not delivered, and it was asked
    missed: int = 0  # windows in a row that it was waited for in vain
    strikes: float = 0.0
    struck_at: float = 0.0
    note: str = ""


class Swarm:
    """Invariant: at most one entry per peer, never ourselves, at most `max_candidates` entries;
    each census counts exactly the entries of its schema that are not lost."""

    def __init__(self, params: Params, me: str) -> None:
        self.params = params
        self.me = me
        self.heard: dict[str, Heard] = {}
        self._gone: dict[str, int] = {}  # lost and forgotten -> sequence of its last record
        self._full_until = self._expire_at = float("-inf")
        self._census: dict[bytes, Census] = {}
        self._live: dict[bytes, dict[str, Heard]] = {}  # schema -> those that are not lost

    def hear(self, record: Record, now: float, *, direct: bool) -> bool:
        """Learn a record; True if the peer was unknown or had been lost."""
        if record.peer_id == self.me:
            return False
        entry = self.heard.get(record.peer_id)
        if entry is None:
            if not direct and record.sequence <= self._gone.get(record.peer_id, -1):
                return False
            if len(self.heard) >= self.params.max_candidates and not self._make_room(now):
                return False
            never = float("-inf")
            at = now if direct else never
            entry = self.heard[record.peer_id] = Heard(record, now, direct_at=at, stated_at=at)
            self._gone.pop(record.peer_id, None)
            self._count(entry)
            return True
        was_lost = entry.lost is not None
        if record.round > entry.record.round:
            entry.missed = 0  # it moves again
        newer = record.sequence > entry.record.sequence
        if newer and was_lost and not direct:
            entry.record = record  # that it lived once is no news; it has to be asked
        elif newer or (direct and now - entry.stated_at > OVERTAKEN_S):
            # A peer's own words hold whatever their number: it may have lost its counter in a
            # crash.
            self._replace(entry, record)
            entry.heard_at = now
        elif direct and (entry.lost not in GOODBYES or record.sequence > entry.left):
            # Overtaken by what it said later; or back, and we knew its new record already.
            self._replace(entry, entry.record)
            entry.heard_at = now
        if direct:
            entry.direct_at = entry.stated_at = now
        return was_lost and entry.lost is None

    def advanced(self, members: list[str], version: int) -> None:
        """These peers were in a round with us: their records are older than what they hold now."""
        for peer_id in members:
            entry = self.heard.get(peer_id)
            if entry is not None and entry.record.version < version:
                newer = replace(entry.record, version=version)
                if entry.lost is None:
                    self._census[newer.schema].exchange(entry.record, newer)
                entry.record = newer

    def alive(self, peer_id: str, now: float) -> None:
        """The peer spoke (a message without a record). Who said goodbye in the middle of a round
        still says a lot until it ends; only its record takes a goodbye back."""
        entry = self.heard.get(peer_id)
        if entry is not None:
            entry.heard_at = entry.direct_at = now
            if entry.lost is not None and entry.lost not in GOODBYES:
                entry.lost = None
                self._count(entry)

    def lose(self, peer_id: str, reason: Reason) -> bool:
        """The peer is gone until it is heard again; True if it counted as alive."""
        entry = self.heard.get(peer_id)
        if entry is None or entry.lost is not None:
            return False
        self._discount(entry)
        entry.lost = reason
        return True

    def goes(self, peer_id: str, goodbye: Goodbye) -> bool:
        """Whether its goodbye counts: not if it has come back since, as messages overtake each
        other."""
        entry = self.heard.get(peer_id)
        if entry is None:
            return True
        if 0 < goodbye.sequence < entry.record.sequence:
            return False
        entry.left = goodbye.sequence or entry.record.sequence
        return True

    def doubt(self, peer_id: str, now: float) -> bool:
        """A message to it was not delivered; True if that happens for the first time lately."""
        entry = self.heard.get(peer_id)
        if entry is None or entry.lost is not None or now - entry.doubted_at <= DOUBT_S:
            return False
        entry.doubted_at = now
        return True

    def is_news(self, record: Record) -> bool:
        """Does a record out of the directory say more than we know?"""
        entry = self.heard.get(record.peer_id)
        if entry is None:
            known = self._gone.get(record.peer_id, -1)
            return record.peer_id != self.me and record.sequence > known
        return record.sequence > entry.record.sequence

    def is_lost(self, peer_id: str) -> bool:
        entry = self.heard.get(peer_id)
        return peer_id in self._gone if entry is None else entry.lost is not None

    def known(self, peer_ids: Sequence[str]) -> tuple[int, int]:
        """(of how many of these we ever found out whether they live, how many of those are lost)"""
        entries = [entry for entry in map(self.heard.get, peer_ids) if entry is not None]
        lost = sum(1 for entry in entries if entry.lost is not None)
        gone = sum(map(self._gone.__contains__, peer_ids)) if self._gone else 0
        return len(entries) + gone, lost + gone

    def all_live(self) -> bool:
        """Is nobody known to be lost?"""
        return not self._gone and len(self.heard) == sum(map(len, self._live.values()))

    def expire(self, named: Iterable[str], now: float) -> list[str]:
        """Forget peers not heard of for `heard_fresh_s`, as which counts that the directory has
        `named` them; their ids."""
        if now < self._expire_at:
            return []
        self._expire_at = now + EXPIRE_S
        here, fresh_s = dict.fromkeys(named), self.params.heard_fresh_s
        old = [
            peer_id
            for peer_id, entry in self.heard.items()
            if now - entry.heard_at > fresh_s and peer_id not in here
        ]
        for peer_id in old:
            self._forget(peer_id)
        return old

    def strike(self, peer_id: str, now: float) -> None:
        """One protocol break; strikes halve every `strike_half_life_s`."""
        entry = self.heard.get(peer_id)
        if entry is not None:
            entry.strikes, entry.struck_at = self.strikes(peer_id, now) + 1.0, now

    def strikes(self, peer_id: str, now: float) -> float:
        entry = self.heard.get(peer_id)
        if entry is None or not entry.strikes:
            return 0.0
        return float(
            entry.strikes * 0.5 ** ((now - entry.struck_at) / self.params.strike_half_life_s)
        )

    def live(self, schema: bytes) -> list[Heard]:
        """Peers that are not known to be gone and train the same tensors, in the order in which
        they were first heard or came back."""
        return list(self._live.get(schema, {}).values())

    def gone(self) -> frozenset[str]:
        """Those that we have heard of and lost since."""
        lost = (peer_id for peer_id, entry in self.heard.items() if entry.lost is not None)
        return frozenset((*lost, *self._gone))

    def living(self, schema: bytes) -> int:
        """How many those are."""
        return len(self._live.get(schema, ()))

    def census(self, schema: bytes) -> Census:
        """What the live peers that train the same tensors say, added up."""
        return self._census.get(schema) or Census()

    def lines(self, members: dict[str, bool]) -> list[tuple[Record, float, str, str]]:
        """(record, heard at, member | heard | lost, note) of everybody known."""
        lines = []
        for peer_id, entry in self.heard.items():
            state = "member" if peer_id in members else "heard" if entry.lost is None else "lost"
            note = entry.note or (entry.lost.value if entry.lost else "")
            lines.append((entry.record, entry.heard_at, state, note))
        return lines

    def round_number(self, own: int, shape: Shape, schema: bytes) -> int:
        """The upper median of the round numbers heard (our own among them) if that is ahead of
        ours."""
        return max(own, self.census(schema).median_round(own, shape))

    def median_version(
        self, own: int, lineage: Lineage, schema: bytes, *, since: float = float("-inf")
    ) -> tuple[int, int]:
        """(upper median of the versions heard in this lineage, ours among them; number of others
        heard)."""
        if since == float("-inf"):
            return self.census(schema).median_version(own, lineage.digest)
        versions = [
            e.record.version
            for e in self.live(schema)
            if same_lineage(e.record.lineage, lineage) and e.stated_at >= since
        ]
        return upper_median([own, *versions]), len(versions)

    def too_far_ahead(
        self, version: int, own: int, lineage: Lineage, schema: bytes, *, since: float
    ) -> bool:
        """Does it claim more than `max_version_lag` above the median of those that stated theirs
        `since`? Two others are too few to tell."""
        lag = self.params.max_version_lag
        lowest = self.census(schema).lowest_version(lineage.digest)
        if version - min(own, own if lowest is None else lowest) <= lag:
            return False  # no median of these is lower than their lowest
        median, others = self.median_version(own, lineage, schema, since=since)
        return others >= 3 and version - median > lag

    def lags(self, own: int, lineage: Lineage, schema: bytes, *, since: float) -> bool:
        """Is the median more than `max_version_lag` ahead of us: that of all known, or that of
        those heard `since`? Of a large swarm most are known from a round long ago, and what they
        held then says nothing of now."""
        highest = self.census(schema).highest_version(lineage.digest)
        lag = self.params.max_version_lag
        if highest is None or highest - own <= lag:
            return False  # no median is higher than their highest
        if self.median_version(own, lineage, schema)[0] - own > lag:
            return True
        lately = [
            e.record.version
            for e in self.live(schema)
            if e.heard_at >= since and same_lineage(e.record.lineage, lineage)
        ]
        return len(lately) >= VOICES and upper_median([own, *lately]) - own > lag

    def winning_lineage(self, own: Lineage, own_version: int, schema: bytes) -> Lineage:
        """The one lineage that may average: confirmed by two peers before not, then the highest
        confirmed version, then the lowest founder.

        The version that counts for a lineage is the second highest claimed in it (the highest where
        only one peer speaks for it), so one liar cannot lift a lineage over the others.
        """
        return self.census(schema).winner(own, own_version)

    def _make_room(self, now: float) -> bool:
        """Drop the stalest eighth, of those that are lost or that nothing was heard of lately; a
        struck-out peer keeps its entry longest."""
        if now < self._full_until:
            return False
        gone = [
            (e.strikes, e.heard_at, p)
            for p, e in self.heard.items()
            if e.lost is not None or now - e.heard_at > self.params.found_fresh_s
        ]
        if not gone:
            self._full_until = now + FULL_S
            return False
        for _, _, peer_id in sorted(gone)[: max(1, self.params.max_candidates // 8)]:
            self._forget(peer_id)
        return True

    def _forget(self, peer_id: str) -> None:
        entry = self.heard.pop(peer_id)
        if entry.lost is None:
            self._discount(entry)
            return
        # The directory will name it again for a while: that is no news, and it does not count.
        self._gone[peer_id] = entry.record.sequence
        while len(self._gone) > GRAVES * self.params.max_candidates:
            del self._gone[next(iter(self._gone))]

    def _replace(self, entry: Heard, record: Record) -> None:
        """`record` is what the peer says now, and it lives."""
        old = entry.record
        if entry.lost is None and old.schema == record.schema:
            self._census[old.schema].exchange(old, record)
            entry.record = record
            return
        if entry.lost is None:
            self._discount(entry)
        entry.record, entry.lost = record, None
        self._count(entry)

    def _count(self, entry: Heard) -> None:
        schema = entry.record.schema
        census = self._census.get(schema)
        if census is None:
            census = self._census[schema] = Census()
            self._live[schema] = {}
        census.add(entry.record)
        self._live[schema][entry.record.peer_id] = entry

    def _discount(self, entry: Heard) -> None:
        schema = entry.record.schema
        self._census[schema].remove(entry.record)
        del self._live[schema][entry.record.peer_id]
        if not self._live[schema]:
            del self._census[schema], self._live[schema]


def same_lineage(a: Lineage, b: Lineage) -> bool:
    """Two founders that started from the same bits are one lineage."""
    return a.digest == b.digest


def upper_median(values: list[int]) -> int:
    """The middle value; of an even number the upper one."""
    return sorted(values)[len(values) // 2]


def first_difference(ours: str, theirs: str) -> str:
    """The first line in which two schema texts differ, as a sentence."""
    a, b = ours.split("\n"), theirs.split("\n")
    for i in range(max(len(a), len(b))):
        mine = a[i] if i < len(a) else "nothing"
        other = b[i] if i < len(b) else "nothing"
        if mine != other:
            return f"tensor {i}: ours is {mine}, theirs {other}"
    return "the schemas differ beyond the first lines that a record can carry"
