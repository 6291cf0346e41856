"""What a peer knows of the others in its run, and what follows from it: how many there are, which
round and version they are at, and whose lineage everybody should descend from.

One rule: knowledge is bounded (`Params.max_candidates`), ages (`heard_fresh_s`), and nothing in it
is believed further than two peers confirm it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moshpitd.core.messages import Lineage, Record, Shape
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params

GOODBYES = (Reason.NO_TRAINER, Reason.DRAINING, Reason.PREEMPTED)
"""Why a peer leaves, in its own words."""


@dataclass(slots=True)
class Heard:
    """One other peer. `direct_at` is the last time it spoke itself; a record out of the directory
    only proves that it lived."""

    record: Record
    heard_at: float
    direct_at: float = float("-inf")
    stated_at: float = float("-inf")  # when it last said itself what stands in `record`
    lost: Reason | None = None
    missed: int = 0  # windows in a row that it was waited for in vain
    strikes: float = 0.0
    struck_at: float = 0.0
    note: str = ""


class Swarm:
    """Invariant: at most one entry per peer, never ourselves, at most `max_candidates` entries."""

    def __init__(self, params: Params, me: str) -> None:
        self.params = params
        self.me = me
        self.heard: dict[str, Heard] = {}

    def hear(self, record: Record, now: float, *, direct: bool) -> bool:
        """Learn a record; True if the peer was unknown or had been lost."""
        if record.peer_id == self.me:
            return False
        entry = self.heard.get(record.peer_id)
        if entry is None:
            if len(self.heard) >= self.params.max_candidates and not self._make_room(now):
                return False
            never = float("-inf")
            at = now if direct else never
            self.heard[record.peer_id] = Heard(record, now, direct_at=at, stated_at=at)
            return True
        newer = record.sequence > entry.record.sequence
        was_lost = entry.lost is not None
        if record.round > entry.record.round:
            entry.missed = 0  # it moves again
        if direct or newer:
            # A peer's own words hold whatever their number: it may have lost its counter in a
            # crash.
            entry.record, entry.heard_at = record, now
            entry.lost = None
        if direct:
            entry.direct_at = entry.stated_at = now
        return was_lost and entry.lost is None

    def advanced(self, members: list[str], version: int) -> None:
        """These peers were in a round with us: their records are older than what they hold now."""
        for peer_id in members:
            entry = self.heard.get(peer_id)
            if entry is not None and entry.record.version < version:
                entry.record = replace(entry.record, version=version)

    def alive(self, peer_id: str, now: float) -> None:
        """The peer spoke (a message without a record). Who said goodbye in the middle of a round
        still says a lot until it ends; only its record takes a goodbye back."""
        entry = self.heard.get(peer_id)
        if entry is not None:
            entry.heard_at = entry.direct_at = now
            if entry.lost not in GOODBYES:
                entry.lost = None

    def lose(self, peer_id: str, reason: Reason) -> bool:
        """The peer is gone until it is heard again; True if it counted as alive."""
        entry = self.heard.get(peer_id)
        if entry is None or entry.lost is not None:
            return False
        entry.lost = reason
        return True

    def expire(self, now: float) -> list[str]:
        """Forget peers not heard of for `heard_fresh_s`; their ids."""
        old = [
            p for p, entry in self.heard.items() if now - entry.heard_at > self.params.heard_fresh_s
        ]
        for peer_id in old:
            del self.heard[peer_id]
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
        """Peers that are not known to be gone and train the same tensors, in order of first
        hearing."""
        return [
            entry
            for entry in self.heard.values()
            if entry.lost is None and entry.record.schema == schema
        ]

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
        rounds = [own, *(e.record.round for e in self.live(schema) if e.record.shape == shape)]
        return max(own, upper_median(rounds))

    def median_version(
        self, own: int, lineage: Lineage, schema: bytes, *, since: float = float("-inf")
    ) -> tuple[int, int]:
        """(upper median of the versions heard in this lineage, ours among them; number of others
        heard)."""
        versions = [
            e.record.version
            for e in self.live(schema)
            if same_lineage(e.record.lineage, lineage) and e.stated_at >= since
        ]
        return upper_median([own, *versions]), len(versions)

    def winning_lineage(self, own: Lineage, own_version: int, schema: bytes) -> Lineage:
        """The one lineage that may average: confirmed by two peers before not, then the highest
        confirmed version, then the lowest founder.

        The version that counts for a lineage is the second highest claimed in it (the highest where
        only one peer speaks for it), so one liar cannot lift a lineage over the others.
        """
        claims: dict[bytes, tuple[Lineage, list[int]]] = {own.digest: (own, [own_version])}
        for entry in self.live(schema):
            lineage = entry.record.lineage
            held, versions = claims.setdefault(lineage.digest, (lineage, []))
            versions.append(entry.record.version)
            if lineage.founder < held.founder:  # the same state under two founders is one lineage
                claims[lineage.digest] = (lineage, versions)

        def rank(claim: tuple[Lineage, list[int]]) -> tuple[bool, int]:
            ordered = sorted(claim[1], reverse=True)
            return len(ordered) >= 2, ordered[min(1, len(ordered) - 1)]

        best = max(rank(claim) for claim in claims.values())
        return min(
            (claim[0] for claim in claims.values() if rank(claim) == best),
            key=lambda it: (it.founder, it.digest),
        )

    def _make_room(self, now: float) -> bool:
        """Drop the entry that is lost or, failing that, stalest; a struck-out peer keeps its entry
        longest."""
        gone = [(e.strikes, e.heard_at, p) for p, e in self.heard.items() if e.lost is not None]
        if not gone:
            gone = [
                (0.0, e.heard_at, p)
                for p, e in self.heard.items()
                if now - e.heard_at > self.params.ttl_s
            ]
        if not gone:
            return False
        del self.heard[min(gone)[2]]
        return True


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
