"""The data plane while parts change their reducer: bars, hand-overs, pushes again, raced orders."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moshpitd.core.effects import Average, Await, Bar, Close, HandOver, Linger, Push
from moshpitd.core.events import (
    Averaged,
    Barred,
    Listened,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.messages import Group, Held
from moshpitd.core.outcome import Reason
from moshpitd.core.succession import Succession
from moshpitd.daemon import accumulate, early
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.pacing import Skipped
from moshpitd.daemon.pulse import Pulse
from moshpitd.daemon.sending import LABEL
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import CODECS
from moshpitd.tensors.mapped import bytes_of
from moshpitd.tensors.reduction import PartAccumulator
from tests.kit.planes import (
    RUN,
    MemoryLinks,
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
from tests.unit.test_exchange import over_tcp


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Plane]]:
    # Small parts, so that there is one of every order of succession.
    with planes(4, layout_of(some_tensors(0), 512), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        yield made


def float_parts(plane: Plane, *, reducer: int, count: int = 4) -> list[int]:
    """Parts of float32 that this member reduces in epoch 0 (parts go round the members)."""
    every = plane.layout.parts
    return [p.index for p in every if p.dtype == "float32" and p.index % count == reducer]


def order_of(group: Group, part: int) -> list[int]:
    """Who reduces the part in epoch 0, 1, 2 ..."""
    count = len(group.members)
    reducers = tuple(p % count for p in range(part + 1))
    named = [Succession(group, reducers).reducer(part, epoch) for epoch in range(count)]
    assert sorted(n for n in named if n is not None) == list(range(count))
    return [n for n in named if n is not None]


def where(plane: Plane, group: Group, fits: Callable[[list[int]], bool]) -> int:
    """A part of float32 whose reducers come in such an order."""
    every = (p.index for p in plane.layout.parts if p.dtype == "float32")
    return next(part for part in every if fits(order_of(group, part)))


def ask(plane: Plane, effect: Any) -> None:
    plane.exchange.handle(RUN, effect)


def bar(plane: Plane, group: Group, epoch: int, *parts: int) -> Barred:
    ask(plane, Bar(group.group_id, epoch, parts))
    event = plane.wait(Barred)
    assert isinstance(event, Barred)
    return event


def values_of(plane: Plane, part: int, trainer: str = "t") -> Tensor:
    spot = plane.layout.parts[part]
    return plane.layout.part_view(plane.buckets[trainer].data, spot)


def frame(
    plane: Plane,
    group: Group,
    part: int,
    fill: float,
    *,
    kind: FrameKind = FrameKind.RESULT,
    epoch: int = 0,
    inside: int = 0b1111,
) -> tuple[Header, memoryview]:
    """What somebody would send whose values of that part are all `fill`."""
    values = bytes_of(torch.full((plane.layout.parts[part].numel,), fill))
    payload = memoryview(bytearray(values))
    if kind is FrameKind.HANDOVER:
        payload = memoryview(bytearray(LABEL.pack(zlib.crc32(values)) + bytes(values)))
    return Header(
        kind, run_hash(RUN), group.group_id, part, epoch=epoch,
        contributors=0 if kind is FrameKind.CONTRIBUTION else inside,
        length=len(payload), crc=zlib.crc32(payload),
    ), payload  # fmt: skip


def arrives(plane: Plane, sender: int, made: tuple[Header, memoryview]) -> None:
    plane.exchange.on_frame(f"peer-{sender}", *made)


# -- bars -----------------------------------------------------------------------------------------


def test_a_bar_says_what_is_held_and_stops_what_is_below(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    held_part, other = float_parts(plane, reducer=1)[0], float_parts(plane, reducer=2)[0]
    arrives(plane, 1, frame(plane, group, held_part, 3.0))
    arrived = plane.wait(ResultArrived)
    before = values_of(plane, other).clone()
    told = bar(plane, group, 1, held_part, other)
    assert told == Barred(
        group.group_id, 1, (held_part, other), (Held(held_part, 0, 0b1111, arrived.crc),)
    )
    arrives(plane, 2, frame(plane, group, other, 7.0))
    assert plane.exchange.dropped == {"below_bar": 1}
    assert torch.equal(values_of(plane, other), before)
    assert values_of(plane, held_part).eq(3.0).all()


def test_parts_that_are_barred_higher_are_left_out_of_the_answer(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    assert bar(plane, group, 2, 1, 2).parts == (1, 2)
    assert bar(plane, group, 1, 1, 2, 3).parts == (3,)
    assert bar(plane, group, 2, 1, 3, 1 << 40).parts == (1, 3)
    assert bar(plane, group_of(four), 1, 5).parts == (5,), "nothing of that group is open here"


def test_a_bar_drops_contributions_below_it_and_opens_the_part_anew(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    # A part that we reduce in epoch 2, after two others; and one of ours from the start.
    part = where(plane, group, lambda order: order[2] == 0)
    kind = FrameKind.CONTRIBUTION
    arrives(plane, 3, frame(plane, group, part, 9.0, kind=kind))
    assert plane.exchange.dropped == {"wrong_reducer": 1}
    bar(plane, group, 2, part)
    for sender, value in ((1, 4.0), (1, 4.0), (3, 8.0)):
        arrives(plane, sender, frame(plane, group, part, value, kind=kind, epoch=2))
    assert plane.wait(PartArrived) == PartArrived(group.group_id, part, 1, 2)
    assert plane.exchange.dropped == {"wrong_reducer": 1, "repeated": 1}
    mine = values_of(plane, part).clone()
    ask(plane, Average(group.group_id, part, 2))
    averaged = plane.wait(Averaged)
    assert (averaged.contributors, averaged.epoch) == ((0, 1, 3), 2)
    assert torch.allclose(values_of(plane, part), (mine + 12.0) / 3)


def test_the_own_part_of_an_epoch_that_is_over_is_not_averaged(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=0)[0]
    before = values_of(plane, part).clone()
    made = frame(plane, group, part, 1.0, kind=FrameKind.CONTRIBUTION)
    arrives(plane, 1, made)
    plane.wait(PartArrived)
    assert bar(plane, group, 1, part).held == ()
    ask(plane, Average(group.group_id, part, 0))
    arrives(plane, 2, made)
    bar(plane, group, 1, part)  # the pool is through with what was asked before
    assert plane.exchange.dropped == {"below_bar": 1}
    assert not [e for e in plane.quiet() if isinstance(e, Averaged | PartFailed)]
    assert torch.equal(values_of(plane, part), before)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    assert current._reducer._open == {}, "what was added below the bar is dropped"
    # A result of the one who took it over replaces nothing of ours, and ours comes never after it.
    taker = order_of(group, part)[1]
    arrives(plane, taker, frame(plane, group, part, 5.0, epoch=1, inside=0b1110))
    arrived = plane.wait(ResultArrived)
    assert (arrived.contributors, arrived.epoch) == ((1, 2, 3), 1)
    assert values_of(plane, part).eq(5.0).all()


def held_at_a_look(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Values that arrive are looked at until the second is set; the first says that it began."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(values: Tensor) -> tuple[None, float]:
        inside.set()
        assert go_on.wait(20)
        return None, 0.0

    monkeypatch.setattr(accumulate, "examine", slow)
    return inside, go_on


@pytest.mark.parametrize("kind", [FrameKind.RESULT, FrameKind.CONTRIBUTION, FrameKind.HANDOVER])
def test_a_bar_overtakes_a_frame_that_is_being_decoded(
    four: list[Plane], kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=0 if kind is FrameKind.CONTRIBUTION else 1)[0]
    before = values_of(plane, part).clone()
    inside, go_on = held_at_a_look(monkeypatch)
    reader = threading.Thread(
        target=arrives, args=(plane, 1, frame(plane, group, part, 7.0, kind=kind))
    )
    reader.start()
    assert inside.wait(20)
    assert bar(plane, group, 1, part) == Barred(group.group_id, 1, (part,), ())
    go_on.set()
    reader.join(20)
    assert [type(e) for e in plane.quiet()] == [Barred]
    assert sum(plane.exchange.dropped.values()) == 1
    assert torch.equal(values_of(plane, part), before)


def test_an_average_that_runs_when_the_bar_comes_is_held(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four, codec="float16")
    open_round(four[:1], group)
    part = float_parts(plane, reducer=0)[0]
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    inside, go_on = threading.Event(), threading.Event()
    encode = current._shared.encode

    def slow(*args: Any, **named: Any) -> int:
        inside.set()
        assert go_on.wait(20)
        return encode(*args, **named)

    monkeypatch.setattr(current._shared, "encode", slow, raising=False)
    ask(plane, Average(group.group_id, part, 0))
    assert inside.wait(20)
    ask(plane, Bar(group.group_id, 1, (part,)))
    go_on.set()
    told = plane.wait(Barred)
    averaged = next(e for e in plane.seen if isinstance(e, Averaged))
    assert told.held == (Held(part, 0, 1, averaged.crc),)
    assert plane.seen.index(averaged) < plane.seen.index(told), "what is held was told of before"


@pytest.mark.parametrize("seed", range(40))
def test_raced_orders_end_in_the_highest_epoch_and_true_promises(
    four: list[Plane], seed: int
) -> None:
    """Two reducers of one part at two epochs, and the bar between them, in threads."""
    rng = random.Random(seed)
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = where(plane, group, lambda order: 0 not in order[:2])
    first, second = order_of(group, part)[:2]
    start = threading.Barrier(3)
    jobs: list[Callable[[], None]] = [
        lambda: arrives(plane, first, frame(plane, group, part, 1.0)),
        lambda: ask(plane, Bar(group.group_id, 1, (part,))),
        lambda: arrives(plane, second, frame(plane, group, part, 2.0, epoch=1)),
    ]
    rng.shuffle(jobs)

    def run(job: Callable[[], None]) -> None:
        start.wait(20)
        job()

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    told = plane.wait(Barred)
    events = plane.quiet()
    assert values_of(plane, part).eq(2.0).all()
    results = [e for e in events if isinstance(e, ResultArrived)]
    assert [e.epoch for e in results] in ([0, 1], [1])
    if results[0].epoch == 0:
        assert events.index(results[0]) < events.index(told), "nothing below a bar after it"
        assert told.held != ()
    for one in told.held:
        assert one in [Held(part, e.epoch, 0b1111, e.crc) for e in results]


# -- two epochs of one part -----------------------------------------------------------------------


def test_a_higher_epoch_replaces_a_lower_one_and_never_the_other_way(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    own = some_tensors(9)
    plane.trainer("late", own)
    open_round(four[:1], group, late={0: ("late",)})
    part = where(plane, group, lambda order: 0 not in order[:3])
    order = order_of(group, part)
    mine = values_of(plane, part).clone()
    for epoch, value in ((0, 1.0), (2, 3.0)):
        arrives(plane, order[epoch], frame(plane, group, part, value, epoch=epoch))
        assert plane.wait(ResultArrived).epoch == epoch
        assert values_of(plane, part).eq(value).all()
        delta = values_of(plane, part, "late")
        assert torch.allclose(delta, value - mine, atol=1e-6), "the delta follows the result"
    for epoch in (0, 1, 2):
        arrives(plane, order[epoch], frame(plane, group, part, 9.0, epoch=epoch))
    arrives(plane, order[1], frame(plane, group, part, 9.0, epoch=2))
    arrives(plane, order[2], frame(plane, group, part, 9.0, epoch=9))
    assert plane.exchange.dropped == {"part_closed": 3, "wrong_reducer": 2}
    assert values_of(plane, part).eq(3.0).all()


@pytest.mark.parametrize("kind", [FrameKind.RESULT, FrameKind.HANDOVER])
def test_no_result_is_put_into_a_bucket_that_went_back(
    four: list[Plane], kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer reads it, or the next round of the sweep: its generation is still the same."""
    plane = four[0]
    group = group_of(four)
    open_round(four[:2], group)
    mine = where(plane, group, lambda order: order[0] == 0)
    ask(plane, Average(group.group_id, mine, 0))
    made = plane.wait(Averaged)
    part = where(plane, group, lambda order: order[0] == 1 and order[1] != 0)
    later = order_of(group, part)[1]
    arrives(plane, 1, frame(plane, group, part, 3.0))
    plane.wait(ResultArrived)
    ask(plane, Await(group.group_id, later, (part,), 1))
    inside, go_on = held_at_a_look(monkeypatch)
    came = frame(plane, group, part, 7.0, kind=kind, epoch=1)
    reader = threading.Thread(target=arrives, args=(plane, later, came))
    reader.start()  # one is looked at when the bucket goes back ...
    assert inside.wait(20)
    ask(plane, Linger(group.group_id))
    go_on.set()
    reader.join(20)
    again = frame(plane, group, part, 8.0, epoch=5)
    arrives(plane, order_of(group, part)[5 % 4], again)  # ... and one comes afterwards
    assert plane.exchange.dropped == {"part_closed": 1}, "it is not even decoded"
    ask(plane, Average(group.group_id, float_parts(plane, reducer=0)[1], 0))
    assert values_of(plane, part).eq(3.0).all()
    # What we made is still there for slower members.
    ask(plane, Push(group.group_id, 1, (mine,), True, 0))
    assert four[1].wait(ResultArrived).crc == made.crc
    assert [e.epoch for e in plane.quiet() if isinstance(e, ResultArrived)] == [0]
    assert len([e for e in plane.quiet() if isinstance(e, Averaged)]) == 1
    close_round(four[:2], group)


def test_what_the_next_round_of_a_sweep_put_in_place_is_not_handed_over_for_this_one(
    four: list[Plane],
) -> None:
    """It would be refused as damaged, with a strike for us; where a codec loses bits, taken."""
    plane, group, following = four[0], group_of(four), group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    arrives(plane, 1, frame(plane, group, part, 3.0))
    plane.wait(ResultArrived)
    ((_, payload),) = plane.exchange._runs[RUN].rounds[group.group_id].hand_over((part,), epoch=1)
    ask(plane, Linger(group.group_id))
    room = memoryview(bytearray(8192))
    values = torch.frombuffer(payload(room)[LABEL.size :], dtype=torch.float32)
    assert values.eq(3.0).all(), "the trainer has not touched it since"
    open_round(four[:1], following)
    arrives(plane, 1, frame(plane, following, part, 5.0))
    plane.wait(ResultArrived)
    assert values_of(plane, part).eq(5.0).all()
    with pytest.raises(Skipped):
        payload(room)
    close_round(four[:1], group)
    close_round(four[:1], following)


def test_a_late_trainer_follows_a_replaced_maximum(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    plane.trainer("late", some_tensors(9))
    open_round(four[:1], group, late={0: ("late",)})
    part = next(p.index for p in plane.layout.parts if p.dtype == "int64")
    order = order_of(group, part)
    before = values_of(plane, part, "late").clone()
    spot = plane.layout.parts[part]
    for epoch, value in ((0, 1000), (1, 50), (2, -1000)):
        if order[epoch] == 0:
            continue
        payload = bytes_of(torch.full((spot.numel,), value))
        header = Header(
            FrameKind.RESULT, run_hash(RUN), group.group_id, part,
            epoch=epoch, contributors=0b1111, crc=zlib.crc32(payload),
        )  # fmt: skip
        arrives(plane, order[epoch], (header, payload))
        plane.wait(ResultArrived)
        moved = before + values_of(plane, part, "late")
        assert torch.equal(moved, before.clamp(min=value))


# -- contributions pushed again -------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_contribution_is_the_same_bytes_again(four: list[Plane], codec: str) -> None:
    plane = four[0]
    group, another = group_of(four, codec=codec), group_of(four, codec=codec)
    open_round(four[:1], group)
    parts = (*float_parts(plane, reducer=1), *float_parts(plane, reducer=2))
    current = plane.exchange._runs[RUN].rounds[group.group_id]

    def sent(epoch: int, from_round: Any = current) -> list[bytes]:
        room = memoryview(bytearray(1 << 16))
        frames = from_round.outgoing(parts, result=False, epoch=epoch)
        made = [(header, bytes(payload_fn(room))) for header, payload_fn in frames]
        assert {header.epoch for header, _ in made} == {epoch}
        return [payload for _, payload in made]

    first = sent(0)
    assert sent(1) == first
    bar(plane, group, 3, *parts)
    assert sent(3) == first
    open_round(four[:1], another)
    elsewhere = sent(0, plane.exchange._runs[RUN].rounds[another.group_id])
    drawn = codec in ("qsgd", "nuqsgd", "natural", "rand-k")
    assert (elsewhere != first) is drawn, "a stochastic codec draws anew for another group"


def test_a_contribution_is_not_read_where_a_result_is_in_place(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four, group)
    kept, placed = float_parts(plane, reducer=1)[0], float_parts(plane, reducer=2)[0]
    arrives(plane, 2, frame(plane, group, placed, 3.0))
    taker = order_of(group, kept)[1]
    taker = taker if taker != 0 else order_of(group, kept)[2]
    epoch = order_of(group, kept).index(taker)
    bar(four[taker], group, epoch, kept)
    ask(plane, Push(group.group_id, taker, (placed, kept), result=False, epoch=epoch))
    assert four[taker].wait(PartArrived) == PartArrived(group.group_id, kept, 0, epoch)
    assert four[taker].exchange.dropped == {}


def test_a_push_that_waits_is_skipped_when_its_part_is_barred_above(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    ours, theirs = float_parts(plane, reducer=0)[0], float_parts(plane, reducer=1)[0]
    ask(plane, Average(group.group_id, ours, 0))
    plane.wait(Averaged)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    waiting = [
        *current.outgoing((theirs,), result=False),
        *current.outgoing((ours,), result=True),
    ]
    room = memoryview(bytearray(1 << 16))
    assert all(len(payload_fn(room)) for _, payload_fn in waiting)
    bar(plane, group, 1, ours, theirs)
    for _, payload_fn in waiting:
        with pytest.raises(Skipped):
            payload_fn(room)
    assert list(current.outgoing((ours,), result=True)) == []


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "qsgd"])
def test_a_dead_reducer_s_parts_are_taken_over_with_who_is_left(
    four: list[Plane], codec: str
) -> None:
    """Member 1 averages nothing: promise, push again, average in a later epoch, same bits."""
    group = group_of(four, codec=codec)
    reducers = open_round(four, group)
    survivors = [0, 2, 3]
    lost = [p for p, reducer in enumerate(reducers) if reducer == 1]
    for part in lost:
        order = order_of(group, part)
        epoch = 1
        taker = order[epoch]
        for member in survivors:
            assert bar(four[member], group, epoch, part).held == ()
        for member in survivors:
            if member != taker:
                push = Push(group.group_id, taker, (part,), result=False, epoch=epoch)
                ask(four[member], push)
        came = {four[taker].wait(PartArrived).sender for _ in range(len(survivors) - 1)}
        assert came == {member for member in survivors if member != taker}
        ask(four[taker], Average(group.group_id, part, epoch))
        averaged = four[taker].wait(Averaged)
        assert averaged.contributors == (0, 2, 3)
        for member in survivors:
            if member != taker:
                ask(four[taker], Push(group.group_id, member, (part,), result=True, epoch=epoch))
                arrived = four[member].wait(ResultArrived)
                assert (arrived.crc, arrived.epoch) == (averaged.crc, epoch)
                assert arrived.contributors == averaged.contributors
    for part in lost:
        values = [bytes(bytes_of(values_of(four[m], part).contiguous())) for m in survivors]
        assert values[0] == values[1] == values[2]
        exact = torch.stack([four[0].layout.part_view(plane, four[0].layout.parts[part])
                             for plane in _start(four, survivors)])  # fmt: skip
        if exact.dtype == torch.float32:
            once = CODECS[codec].error_bound(float(exact.abs().max()))
            slack = 2 * once + CODECS[codec].error_bound(float(exact.abs().max()) + once) + 1e-6
            assert torch.allclose(values_of(four[0], part), exact.mean(0), rtol=0, atol=slack)


def _start(made: list[Plane], members: list[int]) -> list[Tensor]:
    """The buckets as they were before the round."""
    buckets = []
    for member in members:
        buffer = torch.zeros(made[0].layout.nbytes, dtype=torch.uint8)
        made[0].layout.gather(list(some_tensors(member).values()), buffer)
        buckets.append(buffer)
    return buckets


# -- frames that are ahead of us ------------------------------------------------------------------


def test_a_contribution_ahead_of_its_bar_waits_for_it(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = where(plane, group, lambda order: order[2] == 0)
    kind = FrameKind.CONTRIBUTION
    arrives(plane, 3, frame(plane, group, part, 8.0, kind=kind, epoch=2))
    bar(plane, group, 1, part)
    assert not [e for e in plane.quiet() if isinstance(e, PartArrived)], "no stranger raises a bar"
    assert plane.exchange.dropped == {}
    bar(plane, group, 2, part)
    assert plane.wait(PartArrived) == PartArrived(group.group_id, part, 3, 2)
    arrives(plane, 3, frame(plane, group, part, 8.0, kind=kind, epoch=2))
    assert plane.exchange.dropped == {"repeated": 1}
    ask(plane, Average(group.group_id, part, 2))
    assert plane.wait(Averaged).contributors == (0, 3)


def test_what_waits_for_a_bar_is_bounded_and_goes_with_the_round(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "LINK_BYTES", 1500)
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = where(plane, group, lambda order: order[1] == 0)
    made = frame(plane, group, part, 8.0, kind=FrameKind.CONTRIBUTION, epoch=1)
    sender = 1
    for _ in range(5):
        arrives(plane, sender, made)
    fit = 1500 // len(made[1])
    assert plane.exchange.dropped == {"ahead": 5 - fit}
    bar(plane, group, 1, part)
    plane.wait(PartArrived)
    close_round([plane], group)
    # A frame that a bar passed by is below it.
    group = group_of(four)
    open_round([plane], group)
    part = where(plane, group, lambda order: order[1] == 0)
    arrives(plane, sender, replace_epoch(made, group, part))
    before = plane.exchange.dropped["below_bar"]
    bar(plane, group, 2, part)
    bar(plane, group, 2, part)
    assert plane.exchange.dropped["below_bar"] == before + 1


def replace_epoch(
    made: tuple[Header, memoryview], group: Group, part: int
) -> tuple[Header, memoryview]:
    return replace(made[0], group=group.group_id, part=part), made[1]


# -- hand-overs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "make"), [(name, None) for name in CODECS] + [("int8", over_tcp)]
)
def test_what_is_handed_over_is_the_same_bits_under_the_same_label(
    tmp_path: Path, codec: str, make: Any
) -> None:
    with planes(3, layout_of(some_tensors(0)), tmp_path, make) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        group = group_of(made, codec=codec)
        reducers = open_round(made[:2], group)
        parts = tuple(range(len(reducers)))
        known = play_pair(made, group, reducers)
        # Member 2 opens late and has nothing; 1 takes everything over and 2 asks member 0 for it.
        open_round(made[2:], group)
        bar(made[2], group, 7, *parts)
        ask(made[2], Await(group.group_id, 0, parts, 7))
        ask(made[0], HandOver(group.group_id, 2, parts, 7))
        for _ in parts:
            event = made[2].wait(ResultArrived, PartRefused)
            assert event == ResultArrived(
                group.group_id, event.part, 0, known[event.part][0], known[event.part][1], 7
            )
        assert torch.equal(made[2].buckets["t"].data, made[0].buckets["t"].data)
        told = bar(made[2], group, 8, *parts)
        assert {(h.part, h.epoch, h.crc) for h in told.held} == {
            (part, 7, known[part][1]) for part in parts
        }


def play_pair(
    made: list[Plane], group: Group, reducers: tuple[int, ...]
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Members 0 and 1 average every part between them, and hold it."""
    known = {}
    for part in range(len(reducers)):
        me = reducers[part]
        epoch = 0
        if me == 2:  # not there: the first of the others in the part's order takes it
            order = order_of_three(group, part, reducers)
            epoch = next(e for e in range(1, 3) if order[e] != 2)
            me = order[epoch]
        for plane in made[:2]:
            bar(plane, group, epoch, part)
        ask(made[1 - me], Push(group.group_id, me, (part,), result=False, epoch=epoch))
        made[me].wait(PartArrived)
        ask(made[me], Average(group.group_id, part, epoch))
        averaged = made[me].wait(Averaged)
        ask(made[me], Push(group.group_id, 1 - me, (part,), result=True, epoch=epoch))
        assert made[1 - me].wait(ResultArrived).crc == averaged.crc
        known[part] = (averaged.contributors, averaged.crc)
    return known


def order_of_three(group: Group, part: int, reducers: tuple[int, ...]) -> list[int | None]:
    return [Succession(group, reducers).reducer(part, epoch) for epoch in range(3)]


def test_a_hand_over_nobody_asked_for_counts_only_from_the_reducer(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    kind = FrameKind.HANDOVER
    arrives(plane, 2, frame(plane, group, part, 3.0, kind=kind))
    assert plane.exchange.dropped == {"wrong_reducer": 1}
    arrives(plane, 1, frame(plane, group, part, 3.0, kind=kind))
    values = bytes_of(torch.full((plane.layout.parts[part].numel,), 3.0))
    assert plane.wait(ResultArrived) == ResultArrived(
        group.group_id, part, 1, (0, 1, 2, 3), zlib.crc32(values)
    )


def test_what_was_asked_for_replaces_what_is_in_place_once(four: list[Plane]) -> None:
    """A part that differs from the majority's is repaired under the epoch that it has."""
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    arrives(plane, 1, frame(plane, group, part, 3.0))
    kind = FrameKind.HANDOVER
    ask(plane, Await(group.group_id, 2, (part,), 0))
    arrives(plane, 3, frame(plane, group, part, 6.0, kind=kind))  # somebody else
    arrives(plane, 2, frame(plane, group, part, 4.0, kind=kind, inside=0b0111))
    arrives(plane, 2, frame(plane, group, part, 5.0, kind=kind))
    assert plane.exchange.dropped == {"wrong_reducer": 2}
    assert values_of(plane, part).eq(4.0).all()
    assert [plane.wait(ResultArrived).contributors for _ in range(2)] == [(0, 1, 2, 3), (0, 1, 2)]
    # What we promised meanwhile stands above what we asked for.
    ask(plane, Await(group.group_id, 2, (part,), 1))
    bar(plane, group, 2, part)
    arrives(plane, 2, frame(plane, group, part, 7.0, kind=kind, epoch=1))
    assert plane.exchange.dropped == {"wrong_reducer": 2, "below_bar": 1}
    assert values_of(plane, part).eq(4.0).all()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda payload: payload[:-4], Reason.PART_SIZE),
        (lambda payload: payload[:3], Reason.PART_SIZE),
        (lambda payload: b"\1" + payload[1:], Reason.REFUSED),
        (lambda payload: payload[:-1] + b"\x42", Reason.REFUSED),  # not what its label says
        (lambda payload: _relabelled(payload[:-4] + b"\0\0\xc0\x7f"), Reason.NOT_FINITE),
    ],
)
def test_a_bad_hand_over_is_refused_before_the_bucket(
    four: list[Plane], damage: Callable[[bytes], bytes], reason: Reason
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    before = values_of(plane, part).clone()
    header, payload = frame(plane, group, part, 3.0, kind=FrameKind.HANDOVER, epoch=0)
    plane.exchange.on_frame("peer-1", header, memoryview(bytearray(damage(bytes(payload)))))
    refused = plane.wait(PartRefused)
    assert (refused.reason, refused.result, refused.sender, refused.part) == (reason, True, 1, part)
    assert torch.equal(values_of(plane, part), before)


def _relabelled(payload: bytes) -> bytes:
    return LABEL.pack(zlib.crc32(payload[LABEL.size :])) + payload[LABEL.size :]


def test_what_a_trainer_took_back_is_not_held_and_not_handed_over(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four, group)
    part = float_parts(plane, reducer=1)[0]
    arrives(plane, 1, frame(plane, group, part, 3.0))
    assert bar(plane, group, 1, part).held != ()
    set_generation(plane.buckets["t"], 4)
    ask(plane, HandOver(group.group_id, 2, (part,), 1))
    failed = plane.wait(PartFailed)
    assert (failed.reason, failed.result, failed.epoch) == (Reason.BUCKET_MODIFIED, True, 1)
    assert bar(plane, group, 2, part).held == ()
    ask(plane, HandOver(group.group_id, 2, (part + 1,), 1))
    assert plane.exchange.dropped == {"nothing_to_hand_over": 1}


def test_a_bucket_that_is_taken_back_while_it_is_read_is_not_handed_over(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    arrives(plane, 1, frame(plane, group, part, 3.0))
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    [(_, payload_fn)] = current.hand_over((part,), epoch=1)
    looks = iter([True, False])
    monkeypatch.setattr(Bucket, "intact", lambda self, generation: next(looks))
    with pytest.raises(Skipped):
        payload_fn(memoryview(bytearray(1 << 16)))
    assert plane.wait(PartFailed).reason is Reason.BUCKET_MODIFIED


# -- our own failures -----------------------------------------------------------------------------


def test_an_addition_that_fails_is_a_part_without_result(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    first = float_parts(plane, reducer=0)[0]
    add = PartAccumulator.add
    calls = iter(range(100))

    def breaks(
        self: PartAccumulator, values: Tensor, weight: float, *, small: bool = False
    ) -> None:
        if next(calls) == 1:
            raise MemoryError("no room for a part")
        add(self, values, weight, small=small)

    monkeypatch.setattr(PartAccumulator, "add", breaks)
    kind = FrameKind.CONTRIBUTION
    arrives(plane, 1, frame(plane, group, first, 1.0, kind=kind))
    arrives(plane, 2, frame(plane, group, first, 1.0, kind=kind))
    failed = plane.wait(PartFailed)
    assert failed == PartFailed(
        group.group_id, first, Reason.CODEC, "adding: no room for a part", True, 0
    )
    arrives(plane, 3, frame(plane, group, first, 1.0, kind=kind))
    assert plane.exchange.dropped == {"part_closed": 1}


def test_an_average_that_fails_anywhere_says_so(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)

    def breaks(self: PartAccumulator) -> Tensor:
        raise MemoryError("no room for a mean")

    monkeypatch.setattr(PartAccumulator, "take", breaks)
    ask(plane, Average(group.group_id, 0, 0))
    want = PartFailed(group.group_id, 0, Reason.CODEC, "averaging: no room for a mean", True, 0)
    assert plane.wait(PartFailed) == want


def test_our_own_failure_over_a_frame_is_told_too(
    four: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    part = float_parts(plane, reducer=1)[0]
    current = plane.exchange._runs[RUN].rounds[group.group_id]

    def breaks(*args: Any, **named: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(current._shared.local, "apply", breaks, raising=False)
    arrives(plane, 1, frame(plane, group, part, 1.0))
    refused = plane.wait(PartRefused)
    assert (refused.reason, refused.detail, refused.result) == (
        Reason.CODEC,
        "using it: no room",
        True,
    )
    assert bar(plane, group, 1, part).held == ()


def test_after_close_a_bar_is_not_answered_by_the_round(four: list[Plane]) -> None:
    plane = four[0]
    group = group_of(four)
    open_round(four[:1], group)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    ask(plane, Close(group.group_id))
    current.bar(Bar(group.group_id, 1, (0, 1)))
    assert plane.quiet() == []


# -- who is heard ---------------------------------------------------------------------------------


def test_who_sent_something_since_the_last_look_is_told_while_a_round_is_open(
    tmp_path: Path,
) -> None:
    with planes(3, layout_of(some_tensors(0)), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        links = made[0].links
        assert isinstance(links, MemoryLinks)
        told: list[tuple[str, tuple[str, ...]]] = []
        pulse = Pulse(links, lambda run, heard: told.append((run, heard)), every_s=3600.0)
        group = group_of(made)
        open_round(made, group)
        links.bytes_in["peer-1"] += 100  # before the round: says nothing about now
        pulse._thread = threading.current_thread()  # looks are taken by hand here
        pulse.watch("a", b"1", ["peer-1", "peer-2"])
        pulse.watch("b", b"2", ["peer-2"])
        pulse.look()
        assert told == [("a", ()), ("b", ())], "that somebody listens is told in any case"
        told.clear()
        pulse.look()
        assert told == [("a", ("peer-1", "peer-2")), ("b", ("peer-2",))], "pings are answered"
        assert isinstance(made[2].links, MemoryLinks)
        made[2].links.frozen = True
        pulse.look()
        told.clear()
        pulse.look()
        assert told == [("a", ("peer-1",)), ("b", ())]
        links.bytes_in["peer-2"] = 1  # a new link counts from 0
        told.clear()
        pulse.leave(b"1")
        pulse.look()
        pulse.look()
        assert told == [("b", ("peer-2",)), ("b", ())]
        pulse.leave(b"2")
        told.clear()
        pulse.look()
        assert told == []
        pulse._thread = None
        pulse.close()
        pulse.watch("a", b"3", ["peer-1"])
        assert pulse._thread is None


def test_the_exchange_tells_the_run_of_a_live_link_and_rests_without_rounds(
    four: list[Plane],
) -> None:
    def pulses() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "pulse"]

    already = len(pulses())
    group = group_of(four)
    open_round(four, group)
    heard: set[str] = set()
    while len(heard) < 3:
        heard.update(four[0].wait(Listened).heard)
    assert heard == {"peer-1", "peer-2", "peer-3"}
    close_round(four, group)
    assert len(pulses()) == already + 4
    assert all(plane.exchange._pulse._rounds == {} for plane in four if plane.exchange._pulse)


def test_a_whole_round_still_holds_with_bars_of_epoch_0(four: list[Plane]) -> None:
    """A bar at epoch 0 promises nothing that was not so before."""
    group = group_of(four)
    reducers = open_round(four, group)
    for plane in four:
        bar(plane, group, 0, *range(len(reducers)))
    known = play_round(four, group, reducers)
    assert all(part == known[0] for part in known)
    close_round(four, group)
