"""How many bytes an algorithm puts on the wire, from the codecs and layouts of the daemon. One
rule: arithmetic only; no tensor is made, so any number of parameters will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moshpitd.core.balance import assign_reducers
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.layout import Layout, TensorSpec

FLOAT32_BYTES = 4
FRAME_HEADER_BYTES = 52
"""Header of one frame of a bulk link (net/frames, which this room may not import; a test compares).
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """Float32 values that travel under a codec, in buckets that go one after the other.

    `bucket_bytes` counts float32, as frameworks do; 0: everything is one bucket.
    """

    numel: int
    codec: str = "float32"
    bucket_bytes: int = 0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Values in each bucket; the last one has the rest."""
        step = self.bucket_bytes // FLOAT32_BYTES or self.numel
        return tuple(min(step, self.numel - start) for start in range(0, self.numel, step))

    @property
    def nbytes(self) -> int:
        """Of one copy of everything."""
        return self.chunked(1)

    def chunked(self, chunks: int) -> int:
        """Of one copy, with every bucket padded to a multiple of `chunks` and encoded in so many
        pieces (what a collective over that many workers sends around)."""
        codec = codec_for(self.codec, "float32")
        sizes = (codec.payload_bytes(-(-count // chunks), "float32") for count in self.buckets)
        return chunks * sum(sizes)


def layout_of(numel: int, part_bytes: int | None = None) -> Layout:
    """The daemon's layout of one float32 tensor."""
    return Layout.from_specs([TensorSpec("values", (numel,), "float32")], part_bytes)


def part_payloads(layout: Layout, codec: str) -> tuple[int, ...]:
    """Bytes of each part on the wire. Dtypes that a codec does not take travel raw."""
    return tuple(
        codec_for(codec, part.dtype).payload_bytes(part.numel, part.dtype) for part in layout.parts
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one member of a group sends and receives in one round. `frames` are those sent."""

    sent: int
    received: int
    frames: int

    @property
    def wire_sent(self) -> int:
        """With the headers of the frames; TLS adds about 22 bytes per 16 KiB."""
        return self.sent + self.frames * FRAME_HEADER_BYTES


def group_s(layout: Layout, codec: str, rates: Sequence[float]) -> float:
    """Seconds until the last member of an uneven group has moved its bytes. `rates` in bytes per
    second; max_i (1 + (n-2) w_i) m / b_i, but for whole parts."""
    traffic = group_traffic(layout, codec, rates)
    return max(one.sent / rate for one, rate in zip(traffic, rates, strict=True) if rate > 0)


def group_traffic(layout: Layout, codec: str, rates: Sequence[float]) -> tuple[Traffic, ...]:
    """Per member of a group whose usable rates (min of up and down) are `rates`: contributions to
    the parts that others reduce, results of the own parts to everybody, and the same inwards.

    The parts are assigned by the daemon's own rule (`core.balance`), by their raw sizes as in
    `core.allreduce`.
    """
    payloads = part_payloads(layout, codec)
    reducers = assign_reducers([part.nbytes for part in layout.parts], rates)
    members, total = len(rates), sum(payloads)
    traffic = []
    for index in range(members):
        own = [size for size, by in zip(payloads, reducers, strict=True) if by == index]
        foreign = len(payloads) - len(own)
        # What is sent to reducers comes back as results; what is received for the own parts goes
        # out as results: in a full round both directions carry the same.
        size = total - sum(own) + (members - 1) * sum(own)
        traffic.append(Traffic(size, size, foreign + (members - 1) * len(own)))
    return tuple(traffic)
