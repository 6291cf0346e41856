"""The data plane of exchanges with neighbours and of meetings, without links: what is written
where, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moshpitd.core.effects import OpenEdges, OpenPair
from moshpitd.core.events import (
    EdgeArrived,
    EdgeRefused,
    EdgesCoded,
    Event,
    PairArrived,
    PairFailed,
)
from moshpitd.core.messages import Group, Lineage, Member, Shape
from moshpitd.core.outcome import Reason
from moshpitd.daemon.buffers import HEADER_BYTES, Bucket, create_bucket
from moshpitd.daemon.edges import Edges
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.daemon.pairing import Half, Values
from moshpitd.daemon.plane import Plane
from moshpitd.net.frames import Header
from moshpitd.tensors.blocks import DECODED, Blocks
from moshpitd.tensors.layout import Layout, TensorSpec

SPECS = (TensorSpec("w", (200,), "float32"), TensorSpec("v", (3,), "float64"))
LAYOUT = Layout.from_specs(SPECS, part_bytes=512)
BLOCKS = Blocks(LAYOUT.nbytes, slots=2, full=True)


class Side:
    """One member's bucket and what its data plane told."""

    def __init__(self, where: Path, seed: int, blocks: Blocks = BLOCKS) -> None:
        self.bucket: Bucket = create_bucket(
            where, nbytes=LAYOUT.nbytes, data_dir=where, blocks=blocks
        )
        self.told: list[Event] = []
        self.dropped: Counter[str] = Counter()
        generator = torch.Generator().manual_seed(seed)
        for view in LAYOUT.views(self.bucket.data):
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
        for view in LAYOUT.views(self.block(blocks.own_full)) if blocks.full else ():
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
        self.bucket.hand_over(0)
        nothing = cast(Any, None)
        self.plane = Plane(
            nothing, nothing, nothing, nothing, lambda task: task(),
            lambda run, event: self.told.append(event), self._drop, lambda *_: None, nothing,
        )  # fmt: skip

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def block(self, index: int) -> torch.Tensor:
        blocks = self.bucket.blocks
        assert blocks is not None
        return blocks.of(self.bucket.area, index)

    def views(self, index: int) -> list[torch.Tensor]:
        return LAYOUT.views(self.block(index))


def group(codec: str) -> Group:
    members = tuple(Member(f"p{i}", 1, 1.0, 0, False, 1.0, 1.0) for i in range(3))
    return Group(b"g" * 16, "k", "p0", 1, 0, Shape(), b"s", Lineage(), codec, members)


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[list[Side]]:
    made = [Side(tmp_path, seed) for seed in range(3)]
    yield made
    for side in made:
        side.bucket.close()


def edges(sides: list[Side], codec: str = "float32") -> list[Edges]:
    """Three on a ring: everybody hears both others."""
    found = []
    for index, side in enumerate(sides):
        others = tuple(i for i in range(3) if i != index)
        opening = OpenEdges(group(codec), index, "t", sources=others, targets=others)
        found.append(Edges(opening, LAYOUT, side.bucket, "r", side.plane))
    return found


def sent(frames: Iterator[Frame] | None) -> list[tuple[Header, memoryview]]:
    assert frames is not None
    room = memoryview(bytearray(4096))
    return [(header, memoryview(bytearray(payload(room)))) for header, payload in frames]


@pytest.mark.parametrize("codec", ["float32", "int8", "top-k", "qsgd"])
def test_a_neighbour_gets_what_the_sender_says_that_it_gets(sides: list[Side], codec: str) -> None:
    one, two, three = edges(sides, codec)
    for header, payload in sent(one.frames(in_full=True)):
        two.take("p0", header, payload)
    for header, payload in sent(one.frames(in_full=False)):
        three.take("p0", header, payload)
    one.encode_all()
    assert sides[0].told == [EdgesCoded(b"g" * 16)]
    decoded = sides[0].views(DECODED)
    for side in sides[1:]:
        for ours, theirs in zip(decoded, side.views(BLOCKS.slot(0)), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        sides[0].views(BLOCKS.own_full), sides[1].views(BLOCKS.slot(0, full=True)), strict=True
    ):
        assert torch.equal(ours, theirs)
    exact = codec == "float32"
    assert torch.equal(decoded[0], LAYOUT.views(sides[0].bucket.data)[0]) is exact
    assert torch.equal(decoded[1], LAYOUT.views(sides[0].bucket.data)[1]), "float64 travels raw"
    parts = len(LAYOUT.parts)
    lefts = [(e.full, e.left) for e in sides[1].told if isinstance(e, EdgeArrived)]
    assert lefts == [(full, left) for full in (False, True) for left in reversed(range(parts))]
    assert one.moved[0] > 0
    assert not sides[1].dropped


def test_what_cannot_be_used_is_refused_and_drops_nothing_else(sides: list[Side]) -> None:
    one, two, _ = edges(sides)
    (header, payload), *_ = sent(one.frames(in_full=False))
    two.take("p9", header, payload)
    assert sides[1].dropped == {"not_a_neighbour": 1}
    two.take("p0", header, payload[:-1])
    two.take("p0", header, payload)  # its place is taken: once only, also of what was refused
    assert sides[1].told == [EdgeRefused(b"g" * 16, 0, Reason.PART_SIZE)]
    assert sides[1].dropped["part_closed"] == 1
    two.take("p2", header, memoryview(bytearray(b"\xff" * payload.nbytes)))  # NaN of any dtype
    assert sides[1].told[-1] == EdgeRefused(b"g" * 16, 2, Reason.NOT_FINITE)
    coded = Header(header.kind, header.run, header.group, 1, codec=3)
    two.take("p2", coded, sent(one.frames(in_full=False))[1][1])
    assert sides[1].told[-1] == EdgeRefused(b"g" * 16, 2, Reason.CODEC)


def test_nothing_is_written_after_the_end(sides: list[Side]) -> None:
    one, two, _ = edges(sides)
    frames = one.frames(in_full=True)
    header, payload = next(frames)
    sending = [payload for _, payload in frames]
    arrived = memoryview(bytearray(payload(memoryview(b""))))
    one.close()
    two.close()
    two.take("p0", header, arrived)
    assert sides[1].told == []
    assert all(bool((view == 0).all()) for view in sides[1].views(BLOCKS.slot(0)))
    for late in sending:
        with pytest.raises(Skipped):
            late(memoryview(b""))


def test_a_bucket_that_its_trainer_changes_ends_the_exchange(sides: list[Side]) -> None:
    one, _, _ = edges(sides)
    mapped = sides[0].bucket._mapping
    mapped[8:16] = (2).to_bytes(8, "little")
    one.encode_all()
    (told,) = sides[0].told
    assert isinstance(told, EdgesCoded)
    assert told.reason is Reason.BUCKET_MODIFIED


def sent_kind() -> Any:
    return next(iter(Edges.kinds))


def test_room_is_made_for_all_blocks(sides: list[Side]) -> None:
    bucket = sides[0].bucket
    assert BLOCKS.count == 2 + 2 + 1 + 2
    assert bucket.file_bytes == HEADER_BYTES + BLOCKS.total == bucket.path.stat().st_size
    starts = [BLOCKS.of(bucket.area, index).data_ptr() for index in range(BLOCKS.count)]
    assert all(later - sooner >= LAYOUT.nbytes for sooner, later in pairwise(starts))


# -- meetings


def test_two_take_the_mean_and_the_sum_stays(tmp_path: Path) -> None:
    two_slots = Blocks(LAYOUT.nbytes, slots=1, full=False)
    sides = [Side(tmp_path, seed, two_slots) for seed in range(2)]
    values = [Values(LAYOUT, side.bucket) for side in sides]
    for one in values:
        one.start()
    before = [[view.clone() for view in side.views(2)] for side in sides]
    halves = [
        Half(
            OpenPair(b"n" * 16, f"p{1 - index}", (), "t", active=index == 0),
            "r", values[index], side.plane,
        )
        for index, side in enumerate(sides)
    ]  # fmt: skip
    assert halves[1].outgoing() is None, "there is nothing to average with yet"
    for header, payload in sent(halves[0].outgoing()):
        halves[1].take("p0", header, payload)
    assert sides[1].told == [PairArrived(b"n" * 16)]
    update = [view.clone() for view in LAYOUT.views(sides[0].bucket.data)]
    values[0].add()  # the active one's trainer goes on meanwhile
    for _ in range(2):  # its answer is asked for twice: applied once on either side
        answer = sent(halves[1].outgoing())
    for header, payload in answer:
        halves[0].take("p1", header, payload)
    again = Half(OpenPair(b"n" * 16, "p1", (), "t", active=True), "r", values[0], sides[0].plane)
    for header, payload in answer:
        again.take("p1", header, payload)
    for index, (own, other) in enumerate(zip(*before, strict=True)):
        mean = (own + other) / 2
        torch.testing.assert_close(sides[1].views(2)[index], mean)
        torch.testing.assert_close(sides[0].views(2)[index], mean + update[index])
    for side in sides:
        side.bucket.close()


def test_a_half_that_is_not_finite_is_not_applied(tmp_path: Path) -> None:
    blocks = Blocks(LAYOUT.nbytes, slots=1, full=False)
    side = Side(tmp_path, 0, blocks)
    values = Values(LAYOUT, side.bucket)
    values.start()
    half = Half(OpenPair(b"n" * 16, "p1", (), "t", active=True), "r", values, side.plane)
    before = side.block(2).clone()
    part = LAYOUT.parts[0]
    header = Header(sent_kind(), part=0)
    half.take("p1", header, memoryview(bytearray(b"\xff" * part.nbytes)))
    assert side.told == [PairFailed(b"n" * 16, Reason.NOT_FINITE)]
    assert torch.equal(side.block(2), before)
    side.bucket.close()
