"""What the records heard add up to: versions per lineage, round numbers per shape, kept up as
records come and go.

One rule: every question here costs the logarithm of the peers known, because a peer asks several
of them at every message it hears, and a swarm of ten thousand is in one process in the simulator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from moshpitd.core.messages import Lineage, Record, Shape


@dataclass(slots=True)
class Claim:
    """The peers of one lineage. Invariant: as many versions as founders counted."""

    versions: list[int] = field(default_factory=list)  # sorted
    founders: dict[str, int] = field(default_factory=dict)  # founder named -> by how many
    _lowest: str | None = None  # of them, once somebody has asked

    def lowest(self) -> str:
        if self._lowest is None:
            self._lowest = min(self.founders)
        return self._lowest

    def add(self, founder: str) -> None:
        known = self.founders.get(founder, 0)
        self.founders[founder] = known + 1
        if self._lowest is not None and founder < self._lowest:
            self._lowest = founder

    def remove(self, founder: str) -> None:
        self.founders[founder] -= 1
        if not self.founders[founder]:
            del self.founders[founder]
            if founder == self._lowest:
                self._lowest = None


@dataclass(slots=True)
class Census:
    """The live records of one schema. Invariant: equal to what counting them anew would give."""

    claims: dict[bytes, Claim] = field(default_factory=dict)  # lineage digest -> its peers
    rounds: dict[Shape, list[int]] = field(default_factory=dict)  # shape -> sorted round numbers
    _winner: tuple[Lineage, int, Lineage] | None = None

    def add(self, record: Record) -> None:
        claim = self.claims.get(record.lineage.digest)
        if claim is None:
            claim = self.claims[record.lineage.digest] = Claim()
        insort(claim.versions, record.version)
        claim.add(record.lineage.founder)
        rounds = self.rounds.get(record.shape)
        if rounds is None:
            rounds = self.rounds[record.shape] = []
        insort(rounds, record.round)
        self._winner = None

    def remove(self, record: Record) -> None:
        digest = record.lineage.digest
        claim = self.claims[digest]
        _discard(claim.versions, record.version)
        claim.remove(record.lineage.founder)
        if not claim.versions:
            del self.claims[digest]
        rounds = self.rounds[record.shape]
        _discard(rounds, record.round)
        if not rounds:
            del self.rounds[record.shape]
        self._winner = None

    def exchange(self, old: Record, new: Record) -> None:
        """`new` takes the place of `old`; most records differ in a number or two."""
        # A record follows another of its peer mostly with the very same lineage and shape.
        same = old.lineage is new.lineage or old.lineage == new.lineage
        if not same or not (old.shape is new.shape or old.shape == new.shape):
            self.remove(old)
            self.add(new)
            return
        if old.version != new.version:
            versions = self.claims[old.lineage.digest].versions
            _discard(versions, old.version)
            insort(versions, new.version)
            self._winner = None
        if old.round != new.round:
            rounds = self.rounds[old.shape]
            _discard(rounds, old.round)
            insort(rounds, new.round)

    def voices(self) -> dict[Shape, int]:
        return {shape: len(rounds) for shape, rounds in self.rounds.items()}

    def median_round(self, own: int, shape: Shape) -> int:
        """Upper median of the round numbers under this shape, `own` among them."""
        return median_with(self.rounds.get(shape, []), own)

    def median_version(self, own: int, digest: bytes) -> tuple[int, int]:
        """(upper median of the versions in this lineage, `own` among them; number of others)."""
        claim = self.claims.get(digest)
        versions = claim.versions if claim is not None else []
        return median_with(versions, own), len(versions)

    def lowest_version(self, digest: bytes) -> int | None:
        claim = self.claims.get(digest)
        return claim.versions[0] if claim is not None else None

    def highest_version(self, digest: bytes) -> int | None:
        claim = self.claims.get(digest)
        return claim.versions[-1] if claim is not None else None

    def winner(self, own: Lineage, version: int) -> Lineage:
        """See `Swarm.winning_lineage`; ours counts as one more voice for its lineage."""
        held = self._winner
        if held is not None and held[0] == own and held[1] == version:
            return held[2]
        winner = self._elect(own, version)
        self._winner = (own, version, winner)
        return winner

    def _elect(self, own: Lineage, version: int) -> Lineage:
        best: tuple[bool, int] | None = None
        winner = own
        if own.digest not in self.claims:
            best = (False, version)
        for digest, claim in self.claims.items():
            versions, founder = claim.versions, claim.lowest()
            if digest == own.digest:
                rank = (True, _second(versions, version))
                founder = min(founder, own.founder)
            elif len(versions) > 1:
                rank = (True, versions[-2])
            else:
                rank = (False, versions[-1])
            lineage = Lineage(founder, digest)
            if best is None or rank > best or (rank == best and lineage < winner):
                best, winner = rank, lineage
        return winner


def median_with(ordered: list[int], own: int) -> int:
    """Upper median of a sorted list and one more value, without building the list of both."""
    middle, at = (len(ordered) + 1) // 2, bisect_left(ordered, own)
    if middle == at:
        return own
    return ordered[middle] if middle < at else ordered[middle - 1]


def _second(ordered: list[int], own: int) -> int:
    """Second largest of a sorted, non-empty list and one more value."""
    if own >= ordered[-1]:
        return ordered[-1]
    return max(own, ordered[-2]) if len(ordered) > 1 else own


def _discard(ordered: list[int], value: int) -> None:
    del ordered[bisect_left(ordered, value)]
