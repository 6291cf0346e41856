"""How many peers the run has, as far as the directory says, and which shapes have been proposed.

While all records lie under one key the count is exact. Beyond that it is what a few shards hold,
scaled up. Records outlive their peers, so those that are known to be lost and those that stand far
behind everybody's round number are not counted; and when the own shard turns out to be dead in
part, the other counted shards are taken to be as well.

One rule: it counts and remembers; what follows from a number is `placing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from moshpitd.core.grid import PEERS_KEY
from moshpitd.core.messages import Record, Shape
from moshpitd.core.params import Params
from moshpitd.core.shards import SHARD_FULL, STEP, counted, keys_of, surveyed
from moshpitd.core.swarm import Swarm

SHAPE_KEY = "shape"
"""Directory key under which the few that proposed a shape say so; too few to fill it. Their records
there carry the shape, and the round from which on it holds."""

STALE_ROUNDS = 8
"""A record so far behind the median round belongs to a peer that is gone: a live one is stored anew
within `refresh_s` of any change, and rounds of less than two seconds each are rare."""

KEPT = 64
"""Proposals remembered, the latest: eight epochs of the few that propose each."""


@dataclass(slots=True)
class Headcount:
    """Invariant: `counts` holds only shards of the current depth."""

    params: Params
    me: str
    depth: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # shard key -> live records at last look
    shard: tuple[str, ...] = ()  # PeerIDs in our shard at the last look
    proposals: dict[str, tuple[Shape, int]] = field(
        default_factory=dict
    )  # who proposes -> shape, and from which round on
    survey: dict[str, int | None] = field(default_factory=dict)  # shard key -> count, None: asked
    depths: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of the survey -> its keys
    _voices: tuple[Shape, dict[Shape, list[int]]] | None = None  # since nobody new proposes

    @property
    def key(self) -> str:
        """Our shard."""
        return keys_of(self.me, self.depth)[0]

    def propose(self, who: str, held: tuple[Shape, int]) -> None:
        self.proposals[who] = held
        self._voices = None

    def voices(self, ours: Shape) -> dict[Shape, list[int]]:
        """Shapes other than `ours` and not of an earlier epoch -> from which round on each of those
        that propose it says so."""
        if self._voices is not None and self._voices[0] is ours:
            return self._voices[1]
        voices: dict[Shape, list[int]] = {}
        for shape, since in self.proposals.values():
            if shape is not ours and shape.epoch >= ours.epoch:
                voices.setdefault(shape, []).append(since)
        self._voices = (ours, voices)
        return voices

    def seconded(self, shape: Shape) -> int:
        """How many say that they hold with it."""
        return sum(1 for held, _ in self.proposals.values() if held is shape or held == shape)

    def move(self, depth: int) -> None:
        if depth != self.depth:
            self.depth = depth
            self.counts.clear()
            self.survey.clear()

    def to_count(self) -> tuple[str, ...]:
        """The other shards that are looked up with ours."""
        return counted(self.me, self.depth)

    def begin_survey(self, fits: int) -> tuple[str, ...]:
        """Keys to look up before a shape is proposed; none while one survey runs. `fits`: the depth
        that our shape says."""
        if any(count is None for count in self.survey.values()):
            return ()
        # Who found its shard overfull is a step or two deeper than the shape says, and others have
        # yet to find that out: of a run that grows fast each depth holds a part.
        steps = range(STEP, self.depth + 2 * STEP, STEP)
        depths = sorted(dict.fromkeys((fits, self.depth, *steps))) if self.depth else [0]
        self.depths = {depth: surveyed(self.me, depth) for depth in depths}
        self.survey = dict.fromkeys(key for keys in self.depths.values() for key in keys)
        return tuple(self.survey)

    def surveyed(self, swarm: Swarm) -> int | None:
        """The number of peers, once every shard of the survey has been counted; then it is over."""
        counts = [count for count in self.survey.values() if count is not None]
        if not counts or len(counts) < len(self.survey):
            return None
        total = 0.0
        for depth, keys in self.depths.items():
            ours = 1 if self.key in keys else 0
            here = sum(self.survey[key] or 0 for key in keys) + ours
            total += here * (1 << depth) / len(keys)
        self.survey.clear()
        return max(1, round(total * self._living(swarm)))

    def found(self, key: str, records: tuple[Record, ...], swarm: Swarm, mine: Record) -> None:
        """The directory's answer for a shard or for the proposals."""
        if key == SHAPE_KEY:
            epoch = mine.shape.epoch
            self._voices = None
            for record in records:
                if record.schema == mine.schema and record.shape.epoch >= epoch:
                    self.proposals[record.peer_id] = (record.shape, record.round)
            latest = [it for it in self.proposals.items() if it[1][0].epoch >= epoch]
            if len(latest) > KEPT:  # of the newest epochs, wherever they stand in the answer
                latest = sorted(latest, key=lambda it: it[1][0].epoch)[-KEPT:]
            self.proposals = dict(latest)
            return
        here = key == self.key
        counts = here or key in self.to_count()
        if not counts and key not in self.survey:
            return
        oldest = swarm.census(mine.schema).median_round(mine.round, mine.shape) - STALE_ROUNDS
        schema, epoch = mine.schema, mine.shape.epoch
        live = [
            record.peer_id
            for record in records
            if record.schema == schema and (record.round >= oldest or record.shape.epoch > epoch)
        ]
        if key in self.survey:
            self.survey[key] = len(live)
        if here:
            self.shard = tuple(live[: self.params.max_candidates])
        if counts:
            self.counts[key] = len(live)

    def peers(self, swarm: Swarm, schema: bytes) -> int:
        """How many there are, ourselves among them."""
        known = swarm.living(schema)
        if not self.depth or self.key not in self.counts:
            counted_here = self.counts.get(PEERS_KEY, 0) if not self.depth else 0
            # Of a longer answer only a part is remembered: what is known is no count then.
            roomy = len(swarm.heard) < self.params.max_candidates and counted_here <= SHARD_FULL
            counted_here = round(counted_here * self._living(swarm))
            return (known if roomy else max(known, counted_here)) + 1
        total = (sum(self.counts.values()) + 1) * self._living(swarm)
        return max(1, round(total * (1 << self.depth) / len(self.counts)))

    def doubt(self, swarm: Swarm) -> float:
        """How much more than that of our shard the share that lives may be elsewhere, relative to
        it: a standard deviation of the lost. Two would hide that a third of all have died."""
        known, lost = swarm.known(self.shard)
        return sqrt(lost) / (known - lost + 1)

    def _living(self, swarm: Swarm) -> float:
        """The share of those recorded in our shard that live, as far as we know them."""
        if swarm.all_live():
            return 1.0
        known, lost = swarm.known(self.shard)
        return (known - lost + 1) / (known + 1)
