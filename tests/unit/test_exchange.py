"""The data plane in a round: whole nodes wired together, and single frames that break a rule."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moshpitd.core.effects import Average, Close, LookUp, Push
from moshpitd.core.events import (
    Averaged,
    Event,
    LinkLost,
    PartArrived,
    PartFailed,
    PartRefused,
    ResultArrived,
)
from moshpitd.core.outcome import Reason
from moshpitd.daemon import averaging, early, exchange, intake
from moshpitd.daemon.exchange import Exchange
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.pacing import Skipped
from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkCallbacks, LinkPool
from moshpitd.tensors.codecs import CODECS, Codec, codec_for
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import bytes_of
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


def over_tcp(
    number: int, where: Path, post: Callable[[str, Event], None]
) -> tuple[Exchange, LinkPool, tuple[str, ...]]:
    """A node on a real LinkPool, TLS and all."""
    identity = Identity.load_or_create(where / f"identity-{number}")
    plane = Exchange(identity.peer_id, post)
    callbacks = LinkCallbacks(
        on_frame=plane.on_frame,
        on_lost=lambda peer_id, _: plane.link_lost(peer_id),
        on_up=lambda _: None,
        on_send_failed=plane.on_send_failed,
    )
    pool = LinkPool(identity, callbacks, host="127.0.0.1")
    return plane, pool, (f"127.0.0.1:{pool.port}",)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Plane]]:
    """Two nodes with one trainer each."""
    with planes(2, layout_of(some_tensors(0)), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        yield made


def expected(
    inputs: list[dict[str, Tensor]], weights: list[float], bound: Callable[[float], float]
) -> list[tuple[Tensor, float]]:
    """The dumb twin: (value, tolerance) per tensor, computed in float64 all at once."""
    result = []
    for name in inputs[0]:
        stack = torch.stack([tensors[name] for tensors in inputs])
        if not stack.is_floating_point():
            value = stack.any(0) if stack.dtype == torch.bool else stack.amax(0)
            result.append((value, 0.0))
            continue
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        value = (stack.double() * shares.view(-1, *[1] * (stack.dim() - 1))).sum(0)
        top = float(stack.double().abs().max()) if stack.numel() else 0.0
        slack = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 2e-3}
        tolerance = slack.get(stack.dtype, 2e-2) * top
        if stack.dtype == torch.float32:
            once = bound(5.0)  # as a contribution, and then as the result of what that made of it
            tolerance += once + bound(5.0 + once)
        result.append((value, tolerance))
    return result


def assert_close(got: list[Tensor], want: list[tuple[Tensor, float]]) -> None:
    for tensor, (value, tolerance) in zip(got, want, strict=True):
        if tensor.is_floating_point():
            assert torch.allclose(tensor.double(), value, rtol=0, atol=tolerance)
        else:
            assert torch.equal(tensor, value)


# -- whole rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_everybody_gets_the_weighted_mean_in_the_same_bits(
    count: int, codec: str, tmp_path: Path
) -> None:
    inputs = [some_tensors(seed) for seed in range(count)]
    weights = [10.0, 20.0, 30.0, 2.5][:count]
    with planes(count, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made, weights=weights, codec=codec)
        known = play_round(made, group, open_round(made, group))
        close_round(made, group)
        everybody = tuple(range(count))
        assert all(who == everybody for part in known for who, _ in part.values())
        assert all(part == known[0] for part in known), "the same payloads, by their crc32"
        want = expected(inputs, weights, CODECS[codec].error_bound)
        for plane in made:
            assert_close(plane.values("t"), want)
            assert torch.equal(plane.buckets["t"].data, made[0].buckets["t"].data)
        sent, received = zip(*(p.exchange.counters(group.group_id) for p in made), strict=True)
        assert sum(sent) == sum(received) > 0
        assert all(plane.exchange.dropped == {} for plane in made)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_round_over_real_links(codec: str, tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path, over_tcp) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        for _ in range(2):
            group = group_of(made, codec=codec)
            known = play_round(made, group, open_round(made, group))
            close_round(made, group)
            assert all(part == known[0] for part in known)
        want = expected(inputs, [1.0] * 3, lambda top: 2 * CODECS[codec].error_bound(top))
        for plane in made:
            assert_close(plane.values("t"), want)
            assert torch.equal(plane.buckets["t"].data, made[0].buckets["t"].data)


def test_the_crc32_of_a_result_is_computed_once_and_goes_to_all(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made, codec="float16")
        play_round(made, group, open_round(made, group))
        close_round(made, group)
        told = [one for plane in made for one in plane.links.told]
    assert {known for kind, known in told if kind is FrameKind.RESULT} == {True}
    assert {known for kind, known in told if kind is FrameKind.CONTRIBUTION} == {False}


def test_a_newcomer_gets_the_average_and_is_not_in_it(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made, weights=[1, 0, 3])
        known = play_round(made, group, open_round(made, group))
        close_round(made, group)
        assert {who for part in known for who, _ in part.values()} == {(0, 2)}
        want = expected([inputs[0], inputs[2]], [1.0, 3.0], lambda _: 0.0)
        assert_close(made[1].values("t"), want)


def test_trainers_of_one_node_go_in_together_by_weight(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(4)]
    with planes(2, layout_of(inputs[0]), tmp_path) as made:
        for name, tensors in zip("abc", inputs, strict=False):
            made[0].trainer(name, tensors)
        made[1].trainer("t", inputs[3])
        group = group_of(made, weights=[4.0, 2.0])
        local = {0: (("a", 1), ("b", 3), ("c", 0))}
        play_round(made, group, open_round(made, group, trainers=local))
        close_round(made, group)
        # a and b share weight 4 as 1 : 3; c contributes nothing and still gets the result.
        want = expected([inputs[0], inputs[1], inputs[3]], [1.0, 3.0, 2.0], lambda _: 0.0)
        for name in "abc":
            assert_close(made[0].values(name), want)
            assert torch.equal(made[0].buckets[name].data, made[1].buckets["t"].data)


def test_a_late_trainer_gets_what_it_has_to_add_over_a_sweep(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(4)]
    own = some_tensors(9)
    with planes(2, layout_of(inputs[0]), tmp_path) as made:
        made[0].trainer("a", inputs[0])
        made[0].trainer("late", own)
        made[1].trainer("t", inputs[1])
        for second in (False, True):
            if second:  # the second round of the sweep meets other values
                made[0].layout.gather(list(inputs[2].values()), made[1].buckets["t"].data)
            group = group_of(made)
            local = {0: (("a", 1),)}
            play_round(made, group, open_round(made, group, trainers=local, late={0: ("late",)}))
            close_round(made, group)
        average = made[0].values("a")
        for delta, start, result, mine in zip(
            made[0].values("late"), inputs[0].values(), average, own.values(), strict=True
        ):
            if delta.is_floating_point():
                moved = result.double() - start.double()
                slack = 1e-5 if delta.dtype in (torch.float32, torch.float64) else 5e-2
                assert torch.allclose(delta.double(), moved, rtol=0, atol=slack)
            elif delta.dtype == torch.bool:
                assert torch.equal(mine | delta, mine | result)
            else:
                assert torch.equal(mine + delta, torch.maximum(mine, result))


def test_a_late_trainer_adds_zeros_where_there_is_no_result(pair: list[Plane]) -> None:
    plane = pair[0]
    bucket = plane.trainer("late", some_tensors(5))
    group = group_of(pair)
    open_round([plane], group, late={0: ("late",)})
    close_round([plane], group)
    assert not any(view.any() for view in plane.layout.views(bucket.data))


def test_a_missing_contribution_is_left_out_whole(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made)
        reducers = open_round(made, group)
        set_generation(made[2].buckets["t"], 3)  # its trainer fills the bucket in the middle
        mine = {part for part, reducer in enumerate(reducers) if reducer != 2}
        known = play_round(made, group, reducers, absent=frozenset((part, 2) for part in mine))
        failed = [e for e in made[2].quiet() if isinstance(e, PartFailed)]
        assert {e.part for e in failed} == set(range(len(reducers))), "also those it reduces"
        assert {(e.reason, e.result) for e in failed} == {(Reason.BUCKET_MODIFIED, False)}
        assert {who for part in known for who, _ in part.values()} == {(0, 1)}
        assert_close(made[0].values("t"), expected(inputs[:2], [1.0, 1.0], lambda _: 0.0))
        filled = list(inputs[2].values())
        for got, new in zip(made[2].values("t"), filled, strict=True):
            assert torch.equal(got, new), "what the trainer fills in is not overwritten"
        close_round(made, group)


def test_a_contribution_that_is_not_finite_is_refused_by_tensor_name(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(4)]
    inputs[3]["weight"][20, 3] = float("nan")
    with planes(4, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        assert made[3].exchange.examine(RUN, "t")[0] == "weight"
        bad, norm = made[0].exchange.examine(RUN, "t")
        floats = [value for value in inputs[0].values() if value.is_floating_point()]
        together = sum(float(value.double().square().sum()) for value in floats)
        assert bad is None
        assert norm == pytest.approx(together**0.5, rel=1e-4)
        group = group_of(made)
        reducers = open_round(made, group)
        known = play_round(made, group, reducers)
        close_round(made, group)
        refused = [e for plane in made for e in plane.quiet() if isinstance(e, PartRefused)]
        assert len(refused) == 1, "one element spoils one part"
        assert {(e.sender, e.reason) for e in refused} == {(3, Reason.NOT_FINITE)}
        assert all("'weight'" in e.detail for e in refused)
        bad = {e.part for e in refused}
        for part, (who, _) in known[0].items():
            assert who == ((0, 1, 2) if part in bad else (0, 1, 2, 3))
        without = expected(inputs[:3], [1.0] * 3, lambda _: 0.0)
        for name, got, (value, tolerance) in zip(
            inputs[0], made[0].values("t"), without, strict=True
        ):
            assert torch.isfinite(got.double()).all(), name
            if name == "weight":
                assert abs(float(got[20, 3]) - float(value[20, 3])) <= tolerance


@pytest.mark.parametrize("value", [1e7, 1e153, 1e200, -1e308])
def test_a_contribution_beyond_the_norm_limit_is_refused_also_where_its_square_overflows(
    value: float, tmp_path: Path
) -> None:
    inputs = [some_tensors(seed) for seed in range(4)]
    inputs[3]["wide"][5] = value
    with planes(4, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made)
        reducers = open_round(made, group, norm_limit=1e6)
        play_round(made, group, reducers)
        close_round(made, group)
        refused = [e for plane in made for e in plane.quiet() if isinstance(e, PartRefused)]
        assert {(e.sender, e.reason) for e in refused} == {(3, Reason.NORM)}
        assert all("'wide'" in e.detail and "at most 1e+06" in e.detail for e in refused)
        for plane in made[:3]:  # who sent it keeps what it has of its own part, if it reduces it
            where = list(inputs[0]).index("wide")
            assert plane.values("t")[where].abs().max() < 1e6


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_a_norm_whose_bound_is_above_the_limit_is_told_exactly(
    codec: str, limit: float, tmp_path: Path
) -> None:
    # One value that is not 0 per part: its square is all, and the bound is a thousand of them.
    peaks = torch.zeros(4096).index_fill_(0, torch.arange(0, 4096, 1024), 1.0)
    inputs = [{"weight": peaks}, *[{"weight": torch.zeros(4096)}] * 3]
    with planes(4, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made, codec=codec)
        play_round(made, group, open_round(made, group, norm_limit=limit))
        close_round(made, group)
        refused = [e for plane in made for e in plane.quiet() if isinstance(e, PartRefused)]
        assert {e.reason for e in refused} == ({Reason.NORM} if limit < 1.0 else set())


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("size", [1e22, 3e38])
def test_an_average_whose_square_overflows_is_in_the_same_bits_everywhere(
    codec: str, size: float, tmp_path: Path
) -> None:
    inputs = [{"weight": torch.randn(4096).clamp_(-1, 1) * size} for _ in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made, codec=codec)
        known = play_round(made, group, open_round(made, group))
        close_round(made, group)
        assert all(who == (0, 1, 2) for part in known for who, _ in part.values())
        want = expected(inputs, [1.0] * 3, lambda _: 2 * CODECS[codec].error_bound(size))
        for plane in made:
            assert_close(plane.values("t"), want)
            assert torch.equal(plane.buckets["t"].data, made[0].buckets["t"].data)


# -- failures of our own work ---------------------------------------------------------------------


class BrokenCodec(Codec):
    name, code, block, unbiased = "broken", 77, 1, False

    def payload_bytes(self, numel: int, dtype: str) -> int:
        return numel * 4

    def error_bound(self, absmax: float) -> float:
        return 0.0

    def omega(self, numel: int) -> float:
        return 0.0

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        raise RuntimeError("the codec fell over")

    decode = encode


def test_a_codec_that_raises_is_a_part_without_result_with_its_name(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODECS, "broken", BrokenCodec())
    plane = pair[0]
    before = plane.buckets["t"].data.clone()
    group = group_of(pair, codec="broken")
    reducers = open_round(pair, group)
    part = next(p.index for p in plane.layout.parts if p.dtype == "float32")
    reducer, sender = pair[reducers[part]], pair[1 - reducers[part]]
    reducer.exchange.handle(RUN, Average(group.group_id, part))
    failed = reducer.wait(PartFailed)
    want = "broken: the codec fell over"
    assert failed == PartFailed(group.group_id, part, Reason.CODEC, want, result=True)
    sender.exchange.handle(RUN, Push(group.group_id, reducers[part], (part,), result=False))
    assert sender.wait(PartFailed) == replace(failed, result=False)
    close_round(pair, group)
    assert torch.equal(plane.buckets["t"].data, before)


def test_a_codec_nobody_has_ends_in_parts_without_result(pair: list[Plane]) -> None:
    group = group_of(pair, codec="unheard-of")
    open_round(pair, group)
    pair[0].exchange.handle(RUN, Average(group.group_id, 0))
    failed = pair[0].wait(PartFailed)
    assert failed.reason is Reason.CODEC
    assert failed.result
    with pytest.raises(ConfigError):
        pair[0].exchange.add_run("other", pair[0].layout, "unheard-of")


def test_nobody_in_a_part_is_said_so(pair: list[Plane]) -> None:
    group = group_of(pair, weights=[0, 0])
    open_round(pair, group)
    pair[0].exchange.handle(RUN, Average(group.group_id, 0))
    want = PartFailed(group.group_id, 0, Reason.NO_CONTRIBUTORS, result=True)
    assert pair[0].wait(PartFailed) == want


def test_an_average_that_overflows_its_type_is_no_result(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "first_nonfinite", lambda values: 3)
    group = group_of(pair)
    open_round(pair, group)
    pair[0].exchange.handle(RUN, Average(group.group_id, 0))
    failed = pair[0].wait(PartFailed)
    assert (failed.reason, failed.result) == (Reason.NOT_FINITE, True)


def test_a_trainer_that_is_gone_before_the_round_opens(pair: list[Plane]) -> None:
    plane = pair[0]
    plane.exchange.remove_bucket(RUN, "t")
    plane.exchange.remove_bucket(RUN, "t")
    group = group_of(pair)
    open_round(pair, group)
    plane.exchange.handle(RUN, Average(group.group_id, 0))
    kinds = [plane.wait(PartFailed), plane.wait(PartFailed)]
    assert [(e.reason, e.result) for e in kinds] == [
        (Reason.TRAINER_GONE, False),
        (Reason.NO_CONTRIBUTORS, True),
    ]


# -- single frames --------------------------------------------------------------------------------


def contribution(
    plane: Plane, group_id: bytes, part: int, **changes: Any
) -> tuple[Header, memoryview]:
    """What a sender whose values are all ones would send, with some fields changed."""
    spot = plane.layout.parts[part]
    values = torch.ones(spot.numel, dtype=getattr(torch, spot.dtype))
    payload = changes.pop("payload", None) or bytes_of(values)
    header = Header(
        FrameKind.CONTRIBUTION, run_hash(RUN), group_id, part,
        length=len(payload), crc=zlib.crc32(payload),
    )  # fmt: skip
    return replace(header, **changes), payload


def float_part(plane: Plane, *, even: bool) -> int:
    """A float32 part; with two members the even ones are reduced by member 0."""
    return next(
        p.index for p in plane.layout.parts if p.dtype == "float32" and (p.index % 2 == 0) is even
    )


@pytest.mark.parametrize(
    ("changes", "sender", "reason"),
    [
        ({"part": 1 << 30}, "peer-1", "no_such_part"),
        ({"epoch": 1}, "peer-1", "wrong_reducer"),  # of two members the other one is next
        ({"epoch": 2}, "peer-1", None),  # then it is our turn again: it waits for our bar
        ({"group": b"?" * 16}, "peer-1", None),  # held: it may be early
        ({"run": b"?" * 8}, "peer-1", "unknown_run"),
        ({}, "stranger", "not_a_member"),
        ({}, "peer-0", "wrong_reducer"),
        ({"kind": FrameKind.SNAPSHOT}, "peer-1", "wrong_kind"),
        ({"kind": FrameKind.RESULT, "contributors": 3}, "peer-1", "wrong_reducer"),
    ],
)
def test_a_frame_that_cannot_be_meant_is_dropped(
    pair: list[Plane], changes: dict[str, Any], sender: str, reason: str | None
) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round(pair, group)
    header, payload = contribution(plane, group.group_id, float_part(plane, even=True))
    plane.exchange.on_frame(sender, replace(header, **changes), payload)
    assert plane.quiet() == []
    assert plane.exchange.dropped == ({} if reason is None else {reason: 1})


def test_a_part_of_the_other_reducer_is_dropped(pair: list[Plane]) -> None:
    group = group_of(pair)
    open_round(pair, group)
    header, payload = contribution(pair[0], group.group_id, float_part(pair[0], even=False))
    pair[0].exchange.on_frame("peer-1", header, payload)
    assert pair[0].exchange.dropped == {"wrong_reducer": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payload": memoryview(bytearray(12))}, Reason.PART_SIZE),
        ({"codec": 3}, Reason.CODEC),
        ({"codec": 200}, Reason.CODEC),
    ],
)
def test_a_bad_contribution_is_refused_once(
    pair: list[Plane], changes: dict[str, Any], reason: Reason
) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round(pair, group)
    part = float_part(plane, even=True)
    header, payload = contribution(plane, group.group_id, part, **changes)
    plane.exchange.on_frame("peer-1", header, payload)
    refused = plane.wait(PartRefused)
    assert (refused.part, refused.sender, refused.reason) == (part, 1, reason)
    good = contribution(plane, group.group_id, part)
    plane.exchange.on_frame("peer-1", *good)
    assert plane.exchange.dropped == {"repeated": 1}
    plane.exchange.handle(RUN, Average(group.group_id, part))
    assert plane.wait(Averaged).contributors == (0,)


def test_a_contribution_counts_once_and_not_after_the_part_is_closed(pair: list[Plane]) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round(pair, group)
    part = float_part(plane, even=True)
    frame = contribution(plane, group.group_id, part)
    plane.exchange.on_frame("peer-1", *frame)
    plane.exchange.on_frame("peer-1", *frame)
    assert plane.wait(PartArrived) == PartArrived(group.group_id, part, 1)
    plane.exchange.handle(RUN, Average(group.group_id, part))
    plane.exchange.handle(RUN, Average(group.group_id, part))
    event = plane.wait(Averaged)
    assert event.contributors == (0, 1)
    plane.exchange.on_frame("peer-1", *frame)
    plane.exchange.handle(RUN, Close(group.group_id))
    plane.exchange.on_frame("peer-1", *frame)
    assert plane.exchange.dropped == {"repeated": 1, "part_closed": 1, "group_closed": 1}
    assert [type(e) for e in plane.quiet()] == [PartArrived, Averaged]
    spot = plane.layout.parts[part]
    mine = plane.layout.part_view(plane.buckets["t"].data, spot)
    assert zlib.crc32(bytes_of(mine)) == event.crc


def test_a_member_of_weight_0_may_not_contribute(pair: list[Plane]) -> None:
    plane = pair[0]
    group = group_of(pair, weights=[1, 0])
    open_round(pair, group)
    part = float_part(plane, even=True)
    plane.exchange.on_frame("peer-1", *contribution(plane, group.group_id, part))
    assert plane.wait(PartRefused).reason is Reason.WEIGHT


@pytest.mark.parametrize(
    ("contributors", "fill", "reason"),
    [
        (0, 1.0, Reason.REFUSED),
        (1 << 2, 1.0, Reason.REFUSED),
        (1 << 63, 1.0, Reason.REFUSED),
        (3, float("nan"), Reason.NOT_FINITE),
        (3, float("inf"), Reason.NOT_FINITE),
        (3, 1.0, None),
    ],
)
def test_a_result_is_checked_before_it_touches_the_bucket(
    pair: list[Plane], contributors: int, fill: float, reason: Reason | None
) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round(pair, group)
    part = float_part(plane, even=False)
    spot = plane.layout.parts[part]
    mine = plane.layout.part_view(plane.buckets["t"].data, spot)
    before = mine.clone()
    header, payload = contribution(
        plane, group.group_id, part,
        kind=FrameKind.RESULT, contributors=contributors,
        payload=bytes_of(torch.full((spot.numel,), fill)),
    )  # fmt: skip
    plane.exchange.on_frame("peer-1", header, payload)
    event = plane.wait(PartRefused, ResultArrived)
    if reason is None:
        assert event == ResultArrived(group.group_id, part, 1, (0, 1), header.crc)
        assert torch.equal(mine, torch.ones(spot.numel))
    else:
        assert isinstance(event, PartRefused)
        assert (event.reason, event.result) == (reason, True)
        assert torch.equal(mine, before)
    plane.exchange.on_frame("peer-1", header, payload)
    assert sum(plane.exchange.dropped.values()) == 1, "accepted once"


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.RESULT])
def test_an_infinity_in_a_coded_payload_is_used_for_nothing(
    pair: list[Plane], kind: FrameKind
) -> None:
    plane = pair[0]
    group = group_of(pair, codec="float16")
    open_round(pair, group)
    result = kind is FrameKind.RESULT
    spot = plane.layout.parts[float_part(plane, even=not result)]
    before = plane.layout.part_view(plane.buckets["t"].data, spot).clone()
    codec = codec_for("float16", "float32")
    payload = torch.empty(codec.payload_bytes(spot.numel, "float32"), dtype=torch.uint8)
    codec.encode(torch.randn(spot.numel), payload)
    payload[-2:] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    header, body = contribution(
        plane, group.group_id, spot.index,
        kind=kind, contributors=3 if result else 0, codec=codec.code, payload=bytes_of(payload),
    )  # fmt: skip
    plane.exchange.on_frame("peer-1", header, body)
    refused = plane.wait(PartRefused, PartArrived, ResultArrived)
    assert isinstance(refused, PartRefused)
    assert (refused.reason, refused.result) == (Reason.NOT_FINITE, result)
    assert torch.equal(plane.layout.part_view(plane.buckets["t"].data, spot), before)


# -- early frames ---------------------------------------------------------------------------------


def test_frames_that_come_before_the_group_opens_are_not_lost(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, tensors in zip(made, inputs, strict=True):
            plane.trainer("t", tensors)
        group = group_of(made)
        reducers = open_round(made[1:], group)
        for me in (1, 2):
            mine = tuple(p for p, reducer in enumerate(reducers) if reducer == 0)
            made[me].exchange.handle(RUN, Push(group.group_id, 0, mine, result=False))
        made[0].links.dial("peer-1", ("memory",))
        made[0].links.dial("peer-2", ("memory",))
        open_round(made[:1], group)
        arrived = {
            (e.part, e.sender) for e in (made[0].wait(PartArrived) for _ in range(2 * len(mine)))
        }
        assert arrived == {(part, sender) for part in mine for sender in (1, 2)}


def test_early_frames_are_bounded_then_the_reader_waits_then_they_are_dropped(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "LINK_BYTES", 8192)
    monkeypatch.setattr(intake, "WAIT_S", 0.05)
    plane = pair[0]
    group = group_of(pair)
    parts = [p.index for p in plane.layout.parts if p.index % 2 == 0 and p.dtype == "float32"]
    big = [contribution(plane, group.group_id, part) for part in parts]
    plane.exchange.on_frame("peer-1", *big[0])
    filler = contribution(plane, b"x" * 16, parts[0])
    plane.exchange.on_frame("peer-1", *filler)
    started = time.monotonic()
    plane.exchange.on_frame("peer-1", *filler)
    assert time.monotonic() - started >= 0.05
    assert plane.exchange.dropped == {"group_unknown": 1}
    started = time.monotonic()
    for _ in range(20):
        plane.exchange.on_frame("peer-1", *filler)
    assert time.monotonic() - started < 0.5, "a group waited for in vain is not waited for again"
    # The group opens while the reader waits for it with the next frame.
    monkeypatch.setattr(intake, "WAIT_S", 20.0)
    reader = threading.Thread(target=plane.exchange.on_frame, args=("peer-1", *big[1]))
    reader.start()
    open_round([plane], group)
    reader.join(20)
    assert {plane.wait(PartArrived).part, plane.wait(PartArrived).part} == set(parts[:2])


def test_frames_of_a_lost_link_and_of_a_closed_group_are_not_kept(pair: list[Plane]) -> None:
    plane = pair[0]
    groups = [group_of(pair) for _ in range(2)]
    part = float_part(plane, even=True)
    for group in groups:
        plane.exchange.on_frame("peer-1", *contribution(plane, group.group_id, part))
    plane.exchange.handle(RUN, Close(groups[0].group_id))
    plane.exchange.on_frame("peer-1", *contribution(plane, groups[0].group_id, part))
    assert plane.exchange.dropped == {"group_closed": 1}
    plane.exchange.link_lost("peer-1")
    open_round([plane], groups[1])
    plane.exchange.handle(RUN, Average(groups[1].group_id, part))
    assert plane.wait(PartArrived, Averaged).contributors == (0,)


# -- the end of a round, links, buckets -----------------------------------------------------------


def test_after_close_nothing_is_written_or_sent(pair: list[Plane]) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round([plane], group)
    part = float_part(plane, even=False)
    header, payload = contribution(
        plane, group.group_id, part, kind=FrameKind.RESULT, contributors=3
    )
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    before = plane.buckets["t"].data.clone()
    plane.exchange.handle(RUN, Close(group.group_id))
    current.take("peer-1", header, payload)  # a reader that had found the round before it closed
    current.average(float_part(plane, even=True))
    assert torch.equal(plane.buckets["t"].data, before)
    assert plane.quiet() == []
    assert list(current.outgoing((part,), result=False)) == []


def test_a_contribution_whose_part_was_closed_without_us_is_not_sent(pair: list[Plane]) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round([plane], group)
    part, other = [p.index for p in plane.layout.parts if p.dtype == "float32" and p.index % 2]
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    waiting = dict(zip((part, other), current.outgoing((part, other), result=False), strict=True))
    frame = contribution(plane, group.group_id, part, kind=FrameKind.RESULT, contributors=2)
    plane.exchange.on_frame("peer-1", *frame)
    room = memoryview(bytearray(8192))
    with pytest.raises(Skipped):
        waiting[part][1](room)  # the bucket holds the result by now
    assert len(waiting[other][1](room)) == plane.layout.parts[other].nbytes
    plane.exchange.handle(RUN, Close(group.group_id))
    with pytest.raises(Skipped):
        waiting[other][1](room)


def test_a_bucket_that_changes_while_it_is_encoded_is_not_sent(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round([plane], group)
    part = float_part(plane, even=False)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    read = current._shared.local.contribution

    def fill_meanwhile(spot: Part) -> Tensor:
        set_generation(plane.buckets["t"], 3)
        return read(spot)

    monkeypatch.setattr(current._shared.local, "contribution", fill_meanwhile)
    [(_, payload_fn)] = current.outgoing((part,), result=False)
    with pytest.raises(Skipped):
        payload_fn(memoryview(bytearray(8192)))
    assert plane.wait(PartFailed).reason is Reason.BUCKET_MODIFIED
    set_generation(plane.buckets["t"], 2)
    plane.exchange.handle(RUN, Average(group.group_id, 0))
    reasons = [plane.wait(PartFailed).reason, plane.wait(PartFailed).reason]
    assert reasons == [Reason.BUCKET_MODIFIED, Reason.NO_CONTRIBUTORS]


def test_close_waits_for_the_thread_that_writes(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = pair[0]
    group = group_of(pair)
    open_round([plane], group)
    inside, go_on, log = threading.Event(), threading.Event(), []
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    put = current._shared.local.apply

    def slow(*args: Any, **named: Any) -> None:
        inside.set()
        go_on.wait(20)
        put(*args, **named)
        log.append("written")

    monkeypatch.setattr(current._shared.local, "apply", slow, raising=False)
    plane.exchange.handle(RUN, Average(group.group_id, 0))
    inside.wait(20)
    closer = threading.Thread(
        target=lambda: (plane.exchange.handle(RUN, Close(group.group_id)), log.append("closed"))
    )
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    closer.join(20)
    assert log == ["written", "closed"]


def test_a_bucket_goes_when_its_trainer_and_the_round_are_through(pair: list[Plane]) -> None:
    plane = pair[0]
    idle = plane.trainer("idle", some_tensors(3))
    group = group_of(pair)
    open_round([plane], group)
    plane.exchange.remove_bucket(RUN, "idle")
    plane.exchange.remove_bucket(RUN, "t")
    assert not idle.path.exists()
    assert plane.buckets["t"].path.exists(), "the round sends from it"
    plane.exchange.handle(RUN, Average(group.group_id, 0))
    assert plane.wait(Averaged).contributors == (0,)
    plane.exchange.handle(RUN, Close(group.group_id))
    assert not plane.buckets["t"].path.exists()


def test_the_smaller_peer_id_dials_unless_the_other_cannot_be_dialled(tmp_path: Path) -> None:
    with planes(3, layout_of(some_tensors(0)), tmp_path) as made:
        made[2].addresses = ()
        group = group_of(made)
        open_round(made, group)
        plans = []
        for plane in made:
            assert isinstance(plane.links, MemoryLinks)
            plans.append((plane.links.dialled, plane.links.expected))
        assert plans[0] == (["peer-1"], ["peer-2"])
        assert plans[2] == (["peer-0", "peer-1"], [])


def test_a_peer_that_cannot_be_reached_is_a_lost_link(pair: list[Plane]) -> None:
    group = group_of(pair)
    stranger = replace(group.members[1], peer_id="peer-9")
    group = replace(group, members=(group.members[0], stranger))
    open_round(pair[:1], group)
    assert pair[0].wait(LinkLost) == LinkLost("peer-9", Reason.UNREACHABLE)


def test_effects_that_are_not_ours_and_runs_that_are_not_here_are_our_own_mistakes(
    pair: list[Plane],
) -> None:
    plane = pair[0]
    with pytest.raises(LocalProtocolError, match="LookUp"):
        plane.exchange.handle(RUN, LookUp("key"))
    with pytest.raises(LocalProtocolError, match="other"):
        plane.exchange.handle("other", Close(b""))
    with pytest.raises(LocalProtocolError, match="exists"):
        plane.exchange.add_run(RUN, plane.layout, "float32")
    assert plane.exchange.counters(b"never") == (0, 0)


def test_what_is_remembered_of_closed_rounds_is_bounded(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CLOSED_REMEMBERED", 3)
    plane = pair[0]
    for _ in range(6):
        group = group_of(pair)
        open_round([plane], group)
        close_round([plane], group)
    assert len(plane.exchange._intake._closed) == 3
    assert plane.exchange._runs[RUN].rounds == {}
    assert exchange.AVERAGING_THREADS >= 1
