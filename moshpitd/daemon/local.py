"""The buckets of this node's trainers in one round. One rule: a bucket that its trainer took back
is neither read for an average nor written to.

A trainer in place keeps its contribution, and the result lies beside it; read is what would lie in
an ordinary bucket (`Bucket.holding`), so that nothing else differs.

The values of a part come straight from the bucket when one trainer contributes, and are averaged
part by part while encoding when there are several, so a node needs no further buffer of the
bucket's size. All calls about one part come under that part's lock (see `accumulate.Round`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import Bucket, Deltas
from moshpitd.tensors.codecs.compiled import Coded
from moshpitd.tensors.delta import max_delta, mean_delta
from moshpitd.tensors.kernels import copy_past
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Scratch, Tensor
from moshpitd.tensors.reduction import PartAccumulator


@dataclass(frozen=True, slots=True)
class Source:
    """A trainer's bucket in this round: its share of our contribution, and what it must stay."""

    bucket: Bucket
    generation: int
    weight: float = 0.0

    def intact(self) -> bool:
        return self.bucket.intact(self.generation)


class LocalValues:
    """Invariant: our contribution to a part is read before the first bucket gets its result."""

    def __init__(
        self,
        layout: Layout,
        *,
        trainers: Sequence[tuple[str, float]],
        late: Sequence[str],
        buckets: Mapping[str, Bucket],
        scratch: Scratch,
    ) -> None:
        self._layout = layout
        self._scratch = scratch
        self._sources = _sources(trainers, buckets)
        # One of weight 0 beside others is no part of our contribution, but still gets the result.
        self._givers = [source for source in self._sources if source.weight > 0]
        self._late = [_late(buckets[name]) for name in late if name in buckets]

    def uses(self, bucket: Bucket) -> bool:
        return any(source.bucket is bucket for source in (*self._sources, *self._late))

    def unusable(self) -> tuple[Reason, str] | None:
        """Why our contribution cannot be used, if so. Asked before and after reading it."""
        if not self._givers:
            return Reason.TRAINER_GONE, "no bucket is left"
        if not all(source.intact() for source in self._givers):
            return Reason.BUCKET_MODIFIED, "the trainer changed its bucket during the round"
        return None

    def contribution(self, part: Part) -> Tensor:
        """Our values of a part; a view of the bucket where one trainer contributes."""
        if len(self._givers) == 1:
            return self._part(self._givers[0].bucket, part)
        together = PartAccumulator(part.numel, part.dtype, part.rule)
        for source in self._givers:
            together.add(self._part(source.bucket, part), source.weight)
        out = self._scratch.take("local", numel=part.numel, dtype=part.dtype)
        together.mean(out)
        return out

    def apply(self, part: Part, values: Tensor) -> None:
        """Put a result in place; the late trainers first.

        The other buckets still hold our contribution then, or the result of a lower epoch that this
        one replaces: in both cases what a late trainer has to add moves by new - old.
        """
        for late in self._late:
            if _writable(late):
                self._apply_delta(late.bucket, part, values)
        for source in self._sources:
            if _writable(source):
                copy_past(values, self._layout.part_view(source.bucket.result, part))
                source.bucket.placed(part.index)

    def apply_coded(self, part: Part, values: Coded) -> None:
        """`apply` of what was not decoded yet: straight to the bucket where there is only one."""
        if len(self._sources) == 1 and not self._late:
            bucket = self._sources[0].bucket
            if _writable(self._sources[0]):
                values.decode(self._layout.part_view(bucket.result, part), past=True)
                bucket.placed(part.index)
            return
        room = self._scratch.take("result", numel=part.numel, dtype=part.dtype)
        values.decode(room)
        self.apply(part, room)

    def has_result(self) -> bool:
        """Whether what was applied is still there: in a bucket that its trainer left alone."""
        return any(source.intact() for source in self._sources)

    def read_result(self, part: Part, out: Tensor) -> bool:
        """Copy the bytes of the result in place to `out` (uint8); False: no bucket holds it."""
        for source in self._sources:
            if source.intact():
                stop = part.offset_bytes + part.nbytes
                out.copy_(source.bucket.holding(part.index)[part.offset_bytes : stop])
                if source.intact():
                    return True
        return False

    def finish(self, applied: Container[int]) -> None:
        """The round is over. Late trainers add their bucket: parts without a result are zeros."""
        for late in self._late:
            for part in self._layout.parts:
                if part.index not in applied and _writable(late):
                    self._apply_delta(late.bucket, part, None)

    def _part(self, bucket: Bucket, part: Part) -> Tensor:
        """What a bucket has of it: the contribution, or the result that took its place."""
        return self._layout.part_view(bucket.holding(part.index), part)

    def _apply_delta(self, bucket: Bucket, part: Part, values: Tensor | None) -> None:
        """Turn a late trainer's part into a delta, or add this round's. None: no result."""
        deltas, out = bucket.deltas, self._layout.part_view(bucket.result, part)
        if deltas is None:
            return  # the call ended, and the bucket was handed back
        first = part.index not in deltas.parts
        if first and part.rule == "max":
            deltas.own[part.index] = self._layout.part_view(bucket.data, part).clone()
        deltas.parts.add(part.index)
        if values is not None and part.rule == "max":
            max_delta(out, result=values, own=deltas.own[part.index])
        elif values is not None and self.unusable() is None:
            mean_delta(out, result=values, contribution=self.contribution(part), onto=not first)
        elif first:
            out.zero_()  # no result, or nobody knows any more what our contribution was


def _sources(trainers: Sequence[tuple[str, float]], buckets: Mapping[str, Bucket]) -> list[Source]:
    """Local trainers by weight; when all weights are 0 (a newcomer) they count alike."""
    known = [(buckets[name], weight) for name, weight in trainers if name in buckets]
    alike = not any(weight > 0 for _, weight in known)
    return [Source(bucket, bucket.expected, 1.0 if alike else weight) for bucket, weight in known]


def _late(bucket: Bucket) -> Source:
    """A trainer that only gets the result. In a sweep it comes again, with its deltas so far."""
    generation = bucket.expected
    if bucket.deltas is None or bucket.deltas.generation != generation:
        bucket.deltas = Deltas(generation)
    return Source(bucket, generation)


def _writable(source: Source) -> bool:
    """A trainer that took its bucket back fills it with something new: that must survive."""
    if not source.intact():
        return False
    source.bucket.writes += 1
    return True
