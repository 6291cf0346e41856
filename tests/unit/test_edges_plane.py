"""The data plane of exchanges with neighbours and of meetings, without links: what is written
where, and what is refused."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moshpitd.core.effects import ClosePair, OpenEdges, OpenPair
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
from moshpitd.daemon.intake import Intake
from moshpitd.daemon.ongoing import Ongoing
from moshpitd.daemon.pacing import Frame, Skipped
from moshpitd.daemon.pairing import Half, PairPlane, Values
from moshpitd.daemon.plane import Plane
from moshpitd.net.frames import Header
from moshpitd.tensors.blocks import DECODED, Blocks
from moshpitd.tensors.layout import Layout, TensorSpec
from tests.kit.planes import RUN, planes

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


class ClosedFirst:
    """The lock of an encoder that gets it only after the exchange was closed."""

    def __init__(self, edges: Edges) -> None:
        self._edges, self._lock = edges, threading.Lock()

    def __enter__(self) -> None:
        edges, self._edges._coding = self._edges, self._lock
        edges.close()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("writer", [False, True])
def test_an_encoder_that_waited_for_its_turn_writes_nothing_after_the_end(
    sides: list[Side], writer: bool
) -> None:
    one, _, _ = edges(sides)
    one._coding = cast(Any, ClosedFirst(one))
    if writer:
        (_, payload), *_ = one.frames(in_full=False)
        with pytest.raises(Skipped):
            payload(memoryview(b""))
    else:
        one.encode_all()
    assert not sides[0].block(DECODED).any()
    assert sides[0].told == []


def test_a_payload_that_breaks_its_codec_is_its_senders(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = edges(sides, "int8")
    frames = sent(one.frames(in_full=False))
    (header, payload), *_ = [it for it in frames if LAYOUT.parts[it[0].part].dtype == "float32"]

    def broken(*_: object) -> None:
        raise IndexError("an index that is none")

    monkeypatch.setattr(two._codecs["float32"], "decode", broken)
    two.take("p0", header, payload)
    assert sides[1].told == [EdgeRefused(b"g" * 16, 0, Reason.CODEC)]


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


@pytest.mark.parametrize("active", [False, True])
def test_a_half_that_would_make_ours_infinite_is_not_applied(tmp_path: Path, active: bool) -> None:
    """Every value is finite, and a sum or a difference of two is not."""
    side = Side(tmp_path, 0, Blocks(LAYOUT.nbytes, slots=1, full=False))
    largest = [torch.finfo(view.dtype).max for view in LAYOUT.views(side.bucket.data)]
    for view, most in zip(LAYOUT.views(side.bucket.data), largest, strict=True):
        view[-1] = 0.9 * most
    values = Values(LAYOUT, side.bucket)
    values.start()
    before = side.block(2).clone()
    half = Half(OpenPair(b"n" * 16, "p1", (), "t", active=active), "r", values, side.plane)
    other = Side(tmp_path, 1, Blocks(LAYOUT.nbytes, slots=1, full=False))
    for view, most in zip(LAYOUT.views(other.bucket.data), largest, strict=True):
        view[-1] = (0.9 if active else -0.9) * most
    theirs = Values(LAYOUT, other.bucket)
    theirs.start()
    pushing = Half(OpenPair(b"n" * 16, "p0", (), "t", active=True), "r", theirs, other.plane)
    for header, payload in sent(pushing.outgoing()):
        half.take("p1", header, payload)
    if not active:
        assert half.outgoing() is None
    assert side.told[-1] == PairFailed(b"n" * 16, Reason.NOT_FINITE)
    assert torch.equal(side.block(2), before)
    assert half.outgoing() is None or active, "nothing of it is sent"
    side.bucket.close()
    other.bucket.close()


class Watched:
    """What a plane of pairs asks of the pulse, the pacer and the links."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


def test_a_meeting_under_the_name_of_a_round_that_runs_takes_nothing_from_it(
    tmp_path: Path,
) -> None:
    side = Side(tmp_path, 0)
    others = Watched()
    intake = Intake(side._drop, lambda task: task())
    run = Ongoing("r", LAYOUT, cast(Any, None), None, buckets={"t": side.bucket})
    side.plane = replace(
        side.plane, intake=intake, pacer=cast(Any, others), pulse=cast(Any, others),
        link=others.link, run=lambda _: run,
    )  # fmt: skip
    plane = PairPlane(side.plane, "p0")
    plane.start("r", "t")
    (running, _, _) = edges([side, side, side])
    intake.add_run(running.run_hash)
    assert intake.admit(b"g" * 16, running)
    opened = OpenPair(b"g" * 16, "p1", (), "t", active=False)
    plane.handle(run, opened)
    assert side.told == [PairFailed(b"g" * 16, Reason.REFUSED)]
    plane.handle(run, ClosePair(b"g" * 16))
    assert others.calls == []
    header = Header(sent_kind(), running.run_hash, b"g" * 16)
    intake.on_frame("p1", header, memoryview(bytearray(LAYOUT.parts[0].nbytes)))
    assert isinstance(side.told[-1], EdgeArrived), "the round still gets what is its own"
    plane.handle(run, replace(opened, nonce=b"n" * 16))
    assert "watch" in others.calls
    side.bucket.close()


def test_the_memory_of_parameters_goes_with_their_trainer(tmp_path: Path) -> None:
    def mapped(path: str) -> bool:
        return path in Path("/proc/self/maps").read_text()

    blocks = Blocks(LAYOUT.nbytes, slots=1, full=False)
    with planes(1, LAYOUT, tmp_path) as (plane,):
        where, exchange = plane.where, plane.exchange
        bucket = create_bucket(where, nbytes=LAYOUT.nbytes, data_dir=where, blocks=blocks)
        path = str(bucket.path)
        exchange.add_bucket(RUN, "t", bucket)
        assert exchange.edges is not None
        exchange.edges.pairs.start(RUN, "t")
        del bucket
        assert mapped(path)
        exchange.remove_bucket(RUN, "t")
        gc.collect()
        assert not mapped(path)
        exchange.edges.pairs.start(RUN, "t")  # was asked for before it left: nothing to keep
        assert not exchange.edges.pairs.add(RUN, "t")
