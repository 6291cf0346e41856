"""Trainers in place at the data plane: what is read stays, what comes of it lies beside it, and
everybody else cannot tell the difference."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moshpitd.core.effects import Close, Digest, LoadSnapshot, RefreshSnapshot
from moshpitd.core.events import Digested, SnapshotRefreshed
from moshpitd.daemon import buffers
from moshpitd.daemon.buffers import Bucket, create_bucket
from moshpitd.daemon.local import LocalValues
from moshpitd.errors import TrainerError
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.hashing import digest
from moshpitd.tensors.layout import Layout
from moshpitd.tensors.mapped import Scratch
from tests.kit.planes import (
    RUN,
    Plane,
    close_round,
    group_of,
    layout_of,
    open_round,
    planes,
    play_round,
    set_generation,
    some_tensors,
)
from tests.unit.test_snapshots import Gate, refreshed


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_a_sweep_beside_copying_trainers_ends_in_the_same_bits(codec: str, tmp_path: Path) -> None:
    """Two rounds of one call: the second contributes what the first came to."""
    inputs = [some_tensors(seed) for seed in range(4)]
    with planes(4, layout_of(inputs[0]), tmp_path) as made:
        for number, (plane, tensors) in enumerate(zip(made, inputs, strict=True)):
            plane.trainer("t", tensors, in_place=number < 2)
        before = [plane.buckets["t"].data.clone() for plane in made[:2]]
        for members in (made[:3], made[1:]):
            group = group_of(members, weights=[3.0, 1.0, 2.0], codec=codec)
            play_round(members, group, open_round(members, group))
            close_round(members, group)
        for plane, values in zip(made[:2], before, strict=True):
            bucket = plane.buckets["t"]
            assert bucket.moved
            assert torch.equal(bucket.data, values), "what the trainer holds is never written to"
        assert torch.equal(made[1].buckets["t"].result, made[3].buckets["t"].data)
        first = (3 * inputs[0]["weight"] + inputs[1]["weight"] + 2 * inputs[2]["weight"]) / 6
        second = (3 * first + first + 2 * inputs[3]["weight"]) / 6
        for plane, mean in ((made[0], first), (made[1], second), (made[2], second)):
            found = dict(zip(inputs[0], plane.values("t"), strict=True))["weight"]
            torch.testing.assert_close(found, mean, rtol=0, atol=5e-3)


def test_a_part_without_a_result_is_whole_before_the_trainer_moves(tmp_path: Path) -> None:
    layout = layout_of(some_tensors(0))
    bucket, contribution = in_place(tmp_path, layout)
    last = layout.parts[-1].index
    for part in layout.parts[:-1]:
        layout.part_view(bucket.result, part).fill_(1)
        bucket.placed(part.index)
    bucket.settle(layout.parts)
    part = layout.parts[last]
    assert torch.equal(layout.part_view(bucket.result, part), layout.part_view(contribution, part))
    assert torch.equal(bucket.data, contribution)
    assert bucket.moved
    bucket.close()


def test_a_trainer_that_gave_up_gets_nothing_more_in_any_block(tmp_path: Path) -> None:
    layout = layout_of(some_tensors(0))
    bucket, _ = in_place(tmp_path, layout)
    local = local_values(layout, {"t": bucket}, late=())
    part = layout.parts[0]
    set_generation(bucket, 5)  # odd: the tensors are its own again
    local.apply(part, torch.ones_like(layout.part_view(bucket.data, part)))
    assert not layout.part_view(bucket.result, part).any()
    assert local.unusable() is not None, "nor is read what it trains on"
    bucket.placed(layout.parts[1].index)
    bucket.settle(layout.parts)
    assert not bucket.result.any()
    bucket.close()


@pytest.mark.parametrize(
    ("giver", "late"), list(itertools.product(("copying", "in place"), repeat=2))
)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_late_trainer_adds_the_same_whoever_is_in_place(
    tmp_path: Path, giver: str, late: str, dtype: str
) -> None:
    """Also where a result of a higher epoch replaces one, and over the rounds of a sweep."""
    layout = layout_of({"w": torch.zeros(50, dtype=getattr(torch, dtype))})
    (part,) = layout.parts
    buckets = {"giver": a_bucket(tmp_path, layout, giver), "late": a_bucket(tmp_path, layout, late)}
    start, own = (torch.full((50,), value).to(getattr(torch, dtype)) for value in (4, 6))
    layout.part_view(buckets["giver"].data, part).copy_(start)
    layout.part_view(buckets["late"].data, part).copy_(own)
    for results in ((5, 7), (9,)):  # two rounds
        local = local_values(layout, buckets, late=("late",))
        for value in results:
            local.apply(part, torch.full_like(start, value))
            assert torch.equal(local.contribution(part), torch.full_like(start, value))
        local.finish({part.index})
    delta = layout.part_view(buckets["late"].result, part)
    assert torch.equal(delta, torch.full_like(start, 5 if dtype == "float32" else 3))
    if late == "in place":
        assert torch.equal(layout.part_view(buckets["late"].data, part), own)
        assert not buckets["late"].moved, "its tensors stay where they are"
    for bucket in buckets.values():
        bucket.close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with planes(1, layout_of(some_tensors(0)), tmp_path) as (made,):
        made.trainer("t", some_tensors(0), in_place=True)
        yield made


def test_a_snapshot_goes_to_the_other_block_and_counts_from_there(plane: Plane) -> None:
    bucket = plane.buckets["t"]
    first = plane.exchange.initial_snapshot(RUN, "t", 1)
    before = bucket.data.clone()
    plane.exchange.handle(RUN, LoadSnapshot(b"", 1, ("t",)))
    assert torch.equal(bucket.result, before)
    assert bucket.moved
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    assert plane.wait(SnapshotRefreshed) == SnapshotRefreshed(2)
    plane.exchange.handle(RUN, Digest(2))
    assert plane.wait(Digested).digest == first == digest(before)


def test_the_round_of_a_trainer_that_died_goes_on_with_what_it_left(plane: Plane) -> None:
    bucket, part = plane.buckets["t"], plane.layout.parts[0]
    local = local_values(plane.layout, {"t": bucket}, late=())
    result = torch.full_like(plane.layout.part_view(bucket.data, part), 3)
    local.apply(part, result)
    bucket.hand_back()  # its call is gone, and nobody took the values back
    out = torch.empty(part.nbytes, dtype=torch.uint8)
    assert local.has_result()
    assert local.read_result(part, out)
    assert torch.equal(out.view(result.dtype), result), "what is handed over is the result"
    other = plane.layout.parts[1]
    contribution = plane.layout.part_view(bucket.data, other)
    assert torch.equal(local.contribution(other), contribution)


def test_nothing_is_loaded_where_a_trainer_lives_outside_a_call(plane: Plane) -> None:
    bucket = plane.buckets["t"]
    plane.exchange.initial_snapshot(RUN, "t", 1)
    bucket.hand_back()
    bucket.area.zero_()  # stands for what it has trained meanwhile
    plane.exchange.handle(RUN, LoadSnapshot(b"", 1, ("t",)))
    assert not bucket.area.any()


def test_the_call_ends_when_the_copy_of_its_result_is_made(plane: Plane) -> None:
    bucket = plane.buckets["t"]
    gate = Gate(plane)
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    waiting = threading.Thread(target=bucket.settle, args=(plane.layout.parts,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.open()
    waiting.join(20)
    assert not waiting.is_alive()
    assert plane.exchange.snapshot_version(RUN) == 2


@pytest.mark.parametrize("how", ["handed over again", "taken back"])
def test_a_copy_that_came_too_late_is_none(
    plane: Plane, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has a bound; behind it the trainer may be anywhere in its blocks."""
    monkeypatch.setattr(buffers, "COPY_WITHIN_S", 0.01)
    bucket = plane.buckets["t"]
    gate = Gate(plane)
    bucket.placed(0)
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    bucket.settle(plane.layout.parts)
    bucket.hand_back()
    set_generation(bucket, 3)
    if how == "handed over again":
        set_generation(bucket, 6)
        assert bucket.hand_over(6)
    gate.open()
    assert not refreshed(plane, 2)


def test_room_for_two_blocks_is_asked_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_free_bytes", lambda _: 3 << 20)
    blocks = Blocks(2 << 20, slots=0, full=False)
    with pytest.raises(TrainerError, match=r"2 blocks of 2097152.*buffers_dir") as refused:
        create_bucket(tmp_path, nbytes=2 << 20, data_dir=tmp_path, blocks=blocks, in_place=True)
    assert refused.value.reason == "no_room"
    create_bucket(tmp_path, nbytes=2 << 20, data_dir=tmp_path).close()


def test_a_round_alone_moves_nobody(plane: Plane) -> None:
    bucket = plane.buckets["t"]
    group = group_of([plane])
    open_round([plane], group)
    plane.exchange.handle(RUN, Close(group.group_id))
    bucket.settle(plane.layout.parts)
    assert not bucket.moved
    plane.exchange.handle(RUN, RefreshSnapshot(1, "t"))
    plane.wait(SnapshotRefreshed)
    plane.exchange.handle(RUN, Digest(1))
    assert plane.wait(Digested) == Digested(1, digest(bucket.data))


# -- buckets without a node ----------------------------------------------------------------------


def a_bucket(where: Path, layout: Layout, manner: str) -> Bucket:
    blocks = Blocks(layout.nbytes, slots=0, full=False) if manner == "in place" else None
    bucket = create_bucket(
        where, nbytes=layout.nbytes, data_dir=where, blocks=blocks, in_place=blocks is not None
    )
    set_generation(bucket, 4)
    assert bucket.hand_over(4)
    return bucket


def in_place(where: Path, layout: Layout) -> tuple[Bucket, torch.Tensor]:
    bucket = a_bucket(where, layout, "in place")
    layout.gather(list(some_tensors(0).values()), bucket.data)
    return bucket, bucket.data.clone()


def local_values(
    layout: Layout, buckets: dict[str, Bucket], *, late: tuple[str, ...]
) -> LocalValues:
    givers = [(name, 1.0) for name in buckets if name not in late]
    return LocalValues(layout, trainers=givers, late=late, buckets=buckets, scratch=Scratch())
