"""How a run's tensors lie in a bucket, and the parts it is cut into. One rule: a layout is a pure
function of (specs, part_bytes), so that every peer derives the same parts without talking about it.

A bucket has one region per dtype, in the order of `dtypes.DTYPES`, each starting at a multiple of
64 bytes (a cache line, and more than any dtype's alignment). Inside a region the tensors follow
each other by name without gaps, so that a region is one flat array and a part is a range of it.
Parts never cross a region: each has one dtype and one rule. All sizes are Python integers.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, TrainerError
from moshpitd.tensors.dtypes import DTYPES, dtype_name, dtype_rule
from moshpitd.tensors.transfer import Carrier, Staging

ALIGNMENT_BYTES = 64
SMALL_PART_BYTES = 256 << 10
LARGE_PART_BYTES = 4 << 20  # 8 MiB of float64 with its slack would not fit a frame (net/link.py)
# In so many parts a model is cut at least before its parts get larger: among 16 members of equal
# speed the one with a part more than its share carries a tenth more at most.
PARTS_AT_LEAST = 64
MAX_TENSORS = 1 << 20  # a name and a shape each; above this the schema itself becomes a load
MAX_PARTS = 1 << 20  # 4 TiB in parts of 4 MiB; assignments and outcomes list every part
MAX_BUCKET_BYTES = 1 << 62  # what an offset on the wire and in mmap can say
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 64  # torch's own bound
_SCHEMA_TAG = b"moshpitd layout 1"  # change it when the rules of this file change


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a peer says about one tensor: dtype is torch's name without the prefix ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of the bucket's data area: the unit that one member reduces."""

    index: int
    offset_bytes: int
    nbytes: int
    numel: int
    dtype: str
    rule: str  # "mean" | "max"


@dataclass(frozen=True, slots=True)
class Region:
    """All tensors of one dtype: `members` are spec indices by name, `starts` first elements."""

    dtype: str
    offset_bytes: int
    numel: int
    members: tuple[int, ...]
    starts: tuple[int, ...]


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Specs of named tensors; TrainerError names the first one that cannot be averaged, and why."""
    specs = []
    for name, tensor in tensors.items():
        where = f"tensor {name!r}"
        dtype = dtype_name(tensor.dtype)
        dtype_rule(dtype, where=where)
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise TrainerError(f"{where} is {kind}, expected a dense one", reason="dtype_refused")
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise TrainerError(
                f"{where} is expanded (several elements share memory), so an average cannot be "
                "written to it; expected a tensor of its own, for example .clone()",
                reason="shape_refused",
            )
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype))
    return tuple(specs)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every tensor and every part lies. Invariant: equal digests, equal parts.

    `schema_digest` covers part_bytes too: peers that agree on the tensors but not on the parts
    must not meet in a group. The order in which specs were given is not part of it.
    """

    specs: tuple[TensorSpec, ...]
    part_bytes: int
    nbytes: int
    parts: tuple[Part, ...]
    regions: tuple[Region, ...]
    schema_digest: bytes
    _offsets: tuple[int, ...]  # bytes, in spec order

    @classmethod
    def from_specs(cls, specs: Iterable[TensorSpec], part_bytes: int | None = None) -> Layout:
        """`part_bytes` None: by the size of it all (`part_bytes_for`). TrainerError
        (INVALID_ARGUMENT) names the tensor; ConfigError is about part_bytes."""
        if part_bytes is not None and (part_bytes <= 0 or part_bytes % ALIGNMENT_BYTES):
            raise ConfigError(
                f"{part_bytes} is no part size",
                key="part_bytes",
                expected=f"a positive multiple of {ALIGNMENT_BYTES}",
            )
        given = tuple(specs)
        _check_specs(given)
        regions, nbytes = _regions(given)
        if part_bytes is None:
            part_bytes = part_bytes_for(nbytes)
        offsets = [0] * len(given)
        for region in regions:
            size = DTYPES[region.dtype].itemsize
            for member, start in zip(region.members, region.starts, strict=True):
                offsets[member] = region.offset_bytes + start * size
        return cls(
            specs=given,
            part_bytes=part_bytes,
            nbytes=nbytes,
            parts=_parts(regions, part_bytes),
            regions=regions,
            schema_digest=_schema_digest(given, part_bytes),
            _offsets=tuple(offsets),
        )

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One typed view per tensor, in spec order, of a 1-D uint8 host buffer of >= nbytes."""
        self._check_buffer(buffer)
        views = []
        for spec, offset in zip(self.specs, self._offsets, strict=True):
            row = DTYPES[spec.dtype]
            flat = buffer[offset : offset + spec.numel * row.itemsize]
            views.append(flat.view(row.torch_dtype).view(spec.shape))
        return views

    def part_view(self, buffer: Tensor, part: Part) -> Tensor:
        """The part as a 1-D view of its dtype."""
        self._check_buffer(buffer)
        flat = buffer[part.offset_bytes : part.offset_bytes + part.nbytes]
        return flat.view(DTYPES[part.dtype].torch_dtype)

    def region_view(self, buffer: Tensor, region: Region) -> Tensor:
        """All parts of a region together, likewise."""
        self._check_buffer(buffer)
        row = DTYPES[region.dtype]
        stop = region.offset_bytes + region.numel * row.itemsize
        return buffer[region.offset_bytes : stop].view(row.torch_dtype)

    def gather(
        self, tensors: Sequence[Tensor], buffer: Tensor, *, staging: Staging | None = None
    ) -> None:
        """Trainer to bucket: tensors in spec order, of any strides and devices.

        The gaps between regions become 0, so that the digest of a bucket is that of its tensors.
        """
        self._check_tensors(tensors)
        carrier = Carrier(buffer, staging)
        end = 0
        for region in self.regions:
            buffer[end : region.offset_bytes].zero_()
            end = region.offset_bytes + region.numel * DTYPES[region.dtype].itemsize
        for tensor, view in zip(tensors, self.views(buffer), strict=True):
            carrier.collect(tensor, view)
        carrier.finish()

    def scatter(
        self,
        buffer: Tensor,
        tensors: Sequence[Tensor],
        skip_parts: Set[int] = frozenset(),
        *,
        staging: Staging | None = None,
    ) -> None:
        """Bucket to trainer, in place; elements that lie in a skipped part keep their values."""
        self._check_tensors(tensors)
        carrier = Carrier(buffer, staging)
        views = self.views(buffer)
        first_part = 0
        for region in self.regions:
            step = self.part_bytes // DTYPES[region.dtype].itemsize
            for member, start in zip(region.members, region.starts, strict=True):
                stop = start + self.specs[member].numel
                kept = _kept(start, stop, step=step, first_part=first_part, skip=skip_parts)
                if kept:
                    carrier.deliver(views[member], tensors[member], kept)
            first_part += -(-region.numel // step)
        carrier.finish()

    def first_difference(
        self, other_specs: Iterable[TensorSpec], other_part_bytes: int | None = None
    ) -> str | None:
        """One sentence about the first difference, or None; "here" is this layout."""
        theirs = {spec.name: spec for spec in other_specs}
        for spec in self.specs:
            other = theirs.get(spec.name)
            if other is None:
                return f"tensor {spec.name!r} ({spec}) exists here but not there"
            if (other.shape, other.dtype) != (spec.shape, spec.dtype):
                return f"tensor {spec.name!r} is {spec} here but {other} there"
        mine = {spec.name for spec in self.specs}
        for spec in theirs.values():
            if spec.name not in mine:
                return f"tensor {spec.name!r} ({spec}) exists there but not here"
        if other_part_bytes is not None and other_part_bytes != self.part_bytes:
            return f"part_bytes is {self.part_bytes} here but {other_part_bytes} there"
        return None

    def tensor_at(self, part: Part, element: int) -> str:
        """Name of the tensor that owns this element of the part, so that a NaN has a name."""
        if not 0 <= element < part.numel:
            raise LocalProtocolError(f"part {part.index} has {part.numel} elements, not {element}")
        region = next(region for region in self.regions if region.dtype == part.dtype)
        first = (part.offset_bytes - region.offset_bytes) // DTYPES[part.dtype].itemsize
        return self.tensor_in(region, first + element)

    def tensor_in(self, region: Region, element: int) -> str:
        """The same for an element of a region."""
        # Empty tensors start where the next one does; the rightmost start is the one with elements.
        at = bisect_right(region.starts, element) - 1
        return self.specs[region.members[at]].name

    def names_in(self, part: Part) -> frozenset[str]:
        """The tensors that the part holds at least one element of."""
        region = next(region for region in self.regions if region.dtype == part.dtype)
        first = (part.offset_bytes - region.offset_bytes) // DTYPES[part.dtype].itemsize
        found = set()
        for member, start in zip(region.members, region.starts, strict=True):
            spec = self.specs[member]
            if max(start, first) < min(start + spec.numel, first + part.numel):
                found.add(spec.name)
        return frozenset(found)

    def _check_buffer(self, buffer: Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < self.nbytes:
            raise LocalProtocolError(
                f"bucket: got {dtype_name(buffer.dtype)} {list(buffer.shape)}, expected 1-D uint8 "
                f"of at least {self.nbytes} bytes"
            )

    def _check_tensors(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.specs):
            raise TrainerError(
                f"got {len(tensors)} tensors, expected {len(self.specs)}", reason="schema_differs"
            )
        for spec, tensor in zip(self.specs, tensors, strict=True):
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            if shape != spec.shape or dtype != spec.dtype:
                raise TrainerError(
                    f"tensor {spec.name!r} is {dtype} {list(shape)}, expected {spec}",
                    reason="schema_differs",
                )


def _check_specs(specs: tuple[TensorSpec, ...]) -> None:
    if len(specs) > MAX_TENSORS:
        raise TrainerError(f"{len(specs)} tensors, expected at most {MAX_TENSORS}")
    seen: set[str] = set()
    for spec in specs:
        where = f"tensor {spec.name[:80]!r}"
        dtype_rule(spec.dtype, where=where)
        if not 0 < len(spec.name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
            raise TrainerError(
                f"{where} has an unusable name, expected 1 to {MAX_NAME_BYTES} bytes"
            )
        if spec.name in seen:
            raise TrainerError(f"{where} is named twice, expected each name once")
        if len(spec.shape) > MAX_DIMENSIONS or any(size < 0 for size in spec.shape):
            raise TrainerError(
                f"{where} has shape {list(spec.shape)[:8]}, expected at most {MAX_DIMENSIONS} "
                "dimensions, none negative",
                reason="shape_refused",
            )
        seen.add(spec.name)


def _regions(specs: tuple[TensorSpec, ...]) -> tuple[tuple[Region, ...], int]:
    """The regions in the table's order, and the size of the data area."""
    by_dtype: dict[str, list[int]] = {name: [] for name in DTYPES}
    for index, spec in enumerate(specs):
        by_dtype[spec.dtype].append(index)
    regions: list[Region] = []
    end = 0
    for dtype, members in by_dtype.items():
        if not members:
            continue
        members.sort(key=lambda index: specs[index].name)
        starts, numel = [], 0
        for index in members:
            starts.append(numel)
            numel += specs[index].numel
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = offset + numel * DTYPES[dtype].itemsize
        regions.append(Region(dtype, offset, numel, tuple(members), tuple(starts)))
    if end > MAX_BUCKET_BYTES:
        raise TrainerError(f"the tensors need {end} bytes, expected at most {MAX_BUCKET_BYTES}")
    return tuple(regions), end


def part_bytes_for(nbytes: int) -> int:
    """The part size of a model of so many bytes: 256 KiB, and up to 4 MiB where that leaves enough
    parts to share out. What a part costs beside its bytes is some 0.1 ms at each end; but a line is
    idle until the first result can come back and while the last ones do, a part from everybody at
    a time, and on a line of 25 Mbit/s a part of 1 MiB is 0.2 s in float16."""
    size = SMALL_PART_BYTES
    while size < LARGE_PART_BYTES and nbytes >= PARTS_AT_LEAST * 2 * size:
        size *= 2
    return size


def _parts(regions: tuple[Region, ...], part_bytes: int) -> tuple[Part, ...]:
    count = sum(-(-r.numel * DTYPES[r.dtype].itemsize // part_bytes) for r in regions)
    if count > MAX_PARTS:
        raise TrainerError(
            f"the tensors make {count} parts of {part_bytes} bytes, expected at most {MAX_PARTS}: "
            "set a larger part_bytes"
        )
    parts: list[Part] = []
    for region in regions:
        row = DTYPES[region.dtype]
        step = part_bytes // row.itemsize
        for start in range(0, region.numel, step):
            numel = min(step, region.numel - start)
            offset = region.offset_bytes + start * row.itemsize
            size = numel * row.itemsize
            parts.append(Part(len(parts), offset, size, numel, region.dtype, row.rule))
    return tuple(parts)


def _schema_digest(specs: tuple[TensorSpec, ...], part_bytes: int) -> bytes:
    """Every field with its length in front, so that no two schemas spell the same bytes."""
    state = hashlib.blake2b(_SCHEMA_TAG, digest_size=16)
    state.update(b"%d %d;" % (part_bytes, len(specs)))
    for spec in sorted(specs, key=lambda spec: spec.name):
        name = spec.name.encode(errors="surrogatepass")
        shape = ",".join(map(str, spec.shape)).encode()
        state.update(b"%d %b %b [%b];" % (len(name), name, spec.dtype.encode(), shape))
    return state.digest()


def _kept(
    start: int, stop: int, *, step: int, first_part: int, skip: Set[int]
) -> list[tuple[int, int]]:
    """Element ranges of one tensor (relative to it) outside skipped parts, neighbours joined."""
    if start == stop:
        return []
    if not skip:
        return [(0, stop - start)]
    ranges: list[tuple[int, int]] = []
    for part in range(start // step, (stop - 1) // step + 1):
        if first_part + part in skip:
            continue
        low = max(start, part * step) - start
        high = min(stop, (part + 1) * step) - start
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return ranges
