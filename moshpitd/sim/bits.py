"""Do members hold the same bits (DESIGN 7)? A difference where nobody was parted from anybody is a
fault as soon as two have told each other Parity. Where somebody was, Parity is what finds it: it is
remembered, and judged when the round is over for both. One rule: it reads what lies at the data
planes, what outcomes say, and who was really parted, never the state of a Peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import NoReturn, Protocol

from moshpitd.core.outcome import Outcome
from moshpitd.sim.nodes import Node, Payload, Round
from moshpitd.sim.partings import Partings


class Fail(Protocol):
    def __call__(self, what: str, *nodes: Node) -> NoReturn: ...


@dataclass(slots=True)
class Side:
    """One member's part in one group, seen from its data plane.

    Invariant: `round_` is there until the round is over for it; from then on `held` is what it
    ended with.
    """

    node: Node
    index: int
    opened_at: float
    round_: Round | None
    held: dict[int, Payload] = field(default_factory=dict)  # when it last said Parity, or the end
    died_at: float = math.inf  # while it was in the round
    discarded: bool = False
    without: frozenset[int] = frozenset()  # parts that it reports without a result
    disputed: dict[int, bool] = field(default_factory=dict)  # because members differ there


@dataclass(frozen=True, slots=True)
class Difference:
    """Two members that said Parity to each other held other bits of a part then."""

    group_id: bytes
    part: int
    one: Node
    other: Node
    since: float
    too_late: bool = False  # for one of them the round was over: it cannot be repaired any more

    def __str__(self) -> str:
        pair = f"{self.one.peer_id} and {self.other.peer_id}"
        where = f"part {self.part} of {self.group_id.hex()[:8]}"
        return f"{pair} differ in {where} since {self.since:.3f} s"


@dataclass(frozen=True, slots=True)
class _Claim:
    """Whom a member said to agree with at the end, and the bits of each of its results."""

    members: tuple[str, ...]
    crcs: dict[int, int]


class Bits:
    """Invariant: a difference is in `_open` until it is judged or one of its two members died in
    the round."""

    def __init__(self, partings: Partings, now: Callable[[], float], fail: Fail) -> None:
        self._partings, self._now, self._fail = partings, now, fail
        self._sides: dict[bytes, dict[str, Side]] = {}
        self._in: dict[str, dict[bytes, Side]] = {}  # peer -> rounds that are not over for it
        # group -> (who told, whom) -> when first
        self._told: dict[bytes, dict[tuple[str, str], float]] = {}
        self._claims: dict[bytes, dict[str, _Claim]] = {}
        self._open: dict[tuple[bytes, int, str, str], Difference] = {}

    # -- what happens to a member's round ----------------------------------------------------------

    def opened(self, node: Node, round_: Round) -> None:
        """Whoever opens a round has left the one before."""
        self._over(node, list(self._in.get(node.peer_id, {})))
        side = Side(node, round_.index, self._now(), round_)
        self._sides.setdefault(round_.group.group_id, {})[node.peer_id] = side
        self._in.setdefault(node.peer_id, {})[round_.group.group_id] = side

    def lasts(self, node: Node, group_id: bytes) -> bool:
        return group_id in self._in.get(node.peer_id, {})

    def disputed(self, node: Node, group_hex: object, part: object) -> None:
        """As its note says, and perhaps not what it reports."""
        for group_id, side in self._in.get(node.peer_id, {}).items():
            if group_id.hex() == group_hex and isinstance(part, int):
                side.disputed[part] = True

    def closes(self, node: Node, group_id: bytes, *, kept: bool, without: tuple[int, ...]) -> None:
        """Its round is over, here at the latest; `kept` false: nothing of it is used."""
        side = self._side(node, group_id)
        if side is not None:
            side.discarded = not kept
            side.without |= frozenset(without)
            self._over(node, [group_id])

    def finished(self, node: Node, trainer: str, outcome: Outcome) -> None:
        """The trainer has its bucket back, and with it what the round came to."""
        rounds = self._in.get(node.peer_id, {})
        mine = [
            key
            for key, side in rounds.items()
            if side.round_ is not None and trainer in side.round_.trainers
        ]
        side = self._side(node, outcome.group_id)
        if side is not None:
            side.without |= frozenset(outcome.parts_without_result)
        self._over(node, mine)

    def died(self, node: Node) -> None:
        """What it held died with it; nothing that it differed in is left to be judged."""
        for side in self._in.pop(node.peer_id, {}).values():
            side.died_at, side.round_ = self._now(), None
        for key, it in list(self._open.items()):
            if any(self._sides[it.group_id][at].died_at < math.inf for at in key[2:]):
                del self._open[key]

    def _over(self, node: Node, groups: list[bytes]) -> None:
        for group_id in groups:
            side = self._in.get(node.peer_id, {}).pop(group_id, None)
            if side is not None and side.round_ is not None:
                side.held, side.round_ = dict(side.round_.results), None

    def _side(self, node: Node, group_id: bytes) -> Side | None:
        return self._sides.get(group_id, {}).get(node.peer_id)

    # -- what members tell each other --------------------------------------------------------------

    def parity(self, node: Node, other: str, group_id: bytes) -> list[Difference]:
        """It says Parity; returns the differences that this brings to light.

        Compared are members that told each other: each side of a partition goes on with what it
        has, which may include what came from the other side before.
        """
        sides = self._sides[group_id]
        mine = sides[node.peer_id]
        if mine.round_ is not None:
            mine.held = dict(mine.round_.results)
        told = self._told.setdefault(group_id, {})
        told.setdefault((node.peer_id, other), self._now())
        if (other, node.peer_id) not in told:
            return []
        yours = sides[other]
        one, two = sorted((node.peer_id, other))
        found = [p for p in mine.held.keys() & yours.held.keys() if self._differ(mine, yours, p)]
        if not found:
            return []
        new = []
        excused = self._somebody_parted(group_id)
        for part in sorted(found):
            if not excused and not _left_out(mine, yours, part):
                self._fail(f"holds other bits of part {part} than {other}", node)
            key = (group_id, part, one, two)
            if key not in self._open and yours.died_at == math.inf:
                nodes, late = (sides[one].node, sides[two].node), yours.round_ is None
                self._open[key] = Difference(group_id, part, *nodes, self._now(), late)
                new.append(self._open[key])
        return new

    @staticmethod
    def _differ(one: Side, other: Side, part: int) -> bool:
        a, b = one.held[part], other.held[part]
        if a.crc != b.crc:
            return True
        # Who was pushed one result has one array of it: nearly always.
        return a.values is not b.values and a.values.tobytes() != b.values.tobytes()

    def _somebody_parted(self, group_id: bytes) -> bool:
        """Did any two of its members not reach each other, since it began, while both lived?"""
        sides = self._sides[group_id].values()
        since = min(side.opened_at for side in sides)
        return any(self._parted(group_id, *pair, since) for pair in combinations(sides, 2))

    def _parted(self, group_id: bytes, one: Side, other: Side, since: float) -> bool:
        """Did these two not reach each other while both lived? In a group with a liar anybody may
        have been told so of anybody."""
        until = min(one.died_at, other.died_at, self._now())
        ends = one.node.index, other.node.index
        lies = any(side.node.lied for side in self._sides[group_id].values())
        return lies or self._partings.between(group_id, *ends, since, until)

    def _lost_each_other(self, it: Difference, one: Side, other: Side) -> bool:
        """Were they parted after one of them had said Parity, so that the other could not compare
        any more? Or is one in none of the other's average?"""
        told, names = self._told[it.group_id], (it.one.peer_id, it.other.peer_id)
        since = min(told[names], told[names[::-1]])
        return _left_out(one, other, it.part) or self._parted(it.group_id, one, other, since)

    # -- what must be true at the end --------------------------------------------------------------

    @property
    def undecided(self) -> bool:
        return bool(self._open)

    def judge(self) -> None:
        """Every difference whose round is over for both."""
        for key, it in list(self._open.items()):
            sides = self._sides[it.group_id]
            one, other = sides[it.one.peer_id], sides[it.other.peer_id]
            if one.round_ is None and other.round_ is None:
                del self._open[key]
                self._judge(it, one, other)

    def _judge(self, it: Difference, one: Side, other: Side) -> None:
        """Repaired, or given up by one of them, or they had really lost each other. That neither
        may say then that they agree is judged by what they claim."""
        if one.discarded or other.discarded or not self._differ(one, other, it.part):
            return
        if any(it.part in side.disputed and it.part in side.without for side in (one, other)):
            return
        if it.too_late or self._lost_each_other(it, one, other):
            return
        self._fail(
            f"end with other bits: {it}; the round is over, neither repaired nor gave it up, and"
            " they had stayed in touch",
            it.one, it.other,
        )  # fmt: skip

    def at_the_end(self) -> None:
        """Nothing is left open."""
        for it in self._open.values():
            self._fail(f"never ended the round in which {it}", it.one, it.other)

    def claims(self, node: Node, outcome: Outcome, round_: Round) -> None:
        """Two members in each other's `agreed` hold the same bits."""
        without = outcome.parts_without_result
        crcs = {part: it.crc for part, it in sorted(round_.results.items()) if part not in without}
        said = self._claims.setdefault(outcome.group_id, {})
        for peer_id in outcome.agreed:
            other = said.get(peer_id)
            if other is not None and node.peer_id in other.members and other.crcs != crcs:
                differ = [p for p in crcs.keys() | other.crcs if crcs.get(p) != other.crcs.get(p)]
                self._fail(
                    f"and {peer_id} say that they agree, and differ in {sorted(differ)}", node
                )
        said[node.peer_id] = _Claim(outcome.agreed, crcs)


def _left_out(one: Side, other: Side, part: int) -> bool:
    """Is one of them in none of the other's average, because a third lost it alone? It learns of
    the difference by Parity."""
    a, b = one.held[part], other.held[part]
    return not (other.index in a.contributors and one.index in b.contributors)
