"""Error feedback in the data plane. One rule: what went in is in the averages or still owed.

With x_i the values and r the results of rounds of equal weights, whoever reduces which part:
sum of r + mean of what senders owe + sum of what reducers owe = sum of mean(x). That is exact up to
float32 rounding, so every test of a lost or doubled residual is a comparison with 1e-5.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moshpitd.core.effects import Average, Bar, Close, LoadSnapshot, Push
from moshpitd.core.events import Averaged, Barred, PartArrived, ResultArrived
from moshpitd.core.messages import Group
from moshpitd.daemon.pacing import Skipped
from moshpitd.net.frames import FrameKind
from moshpitd.tensors.codecs import CODECS
from moshpitd.tensors.feedback import ErrorFeedback, Residuals
from moshpitd.tensors.layout import Part
from moshpitd.tensors.owing import load_residual, write_residual
from tests.kit.bounds import Bounds, true_mean
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
from tests.unit.test_exchange import over_tcp
from tests.unit.test_exchange_takeover import frame

NUMEL = 6000  # six parts of 4096 bytes: each of three members reduces two
CONTRIBUTION = FrameKind.CONTRIBUTION
LOSSY = ["float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "natural"]


def tensors(values: Tensor) -> dict[str, Tensor]:
    return {"w": values, "steps": torch.arange(5)}


def owed_bytes(plane: Plane) -> dict[str, int]:
    residuals = plane.exchange.residuals(RUN)
    return {} if residuals is None else residuals.nbytes


def normal(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Plane]]:
    with planes(3, layout_of(tensors(normal(0))), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", tensors(normal(number)))
        yield made


def fill(plane: Plane, values: Tensor) -> None:
    plane.layout.gather([torch.arange(5) if n == "steps" else values for n in ("w", "steps")],
                        plane.buckets["t"].data)  # fmt: skip


def result(plane: Plane) -> Tensor:
    return plane.values("t")[0]


def residuals(plane: Plane) -> Residuals:
    found = plane.exchange._runs[RUN].residuals
    assert found is not None
    return found


def owed(feedback: ErrorFeedback) -> Tensor:
    state = feedback.state_dict()
    return state.get("float32", torch.zeros(NUMEL)).double()


def owed_by_all(made: Sequence[Plane]) -> Tensor:
    senders = torch.stack([owed(residuals(plane).sender) for plane in made]).mean(0)
    return senders + torch.stack([owed(residuals(plane).reducer) for plane in made]).sum(0)


def encode_at_known_rates(plane: Plane) -> None:
    """As if the last hour had encoded 1 kB/s and copied 1 TB/s: what a machine really does in the
    few milliseconds of a test decides nothing then."""
    choices = plane.exchange._runs[RUN].choices
    assert choices is not None
    choices.encoded("float16", 3_600_000, 3600.0)
    choices.encoded("float32", 3600 * 10**12, 3600.0)


def play(made: Sequence[Plane], codec: str, seed: int) -> tuple[list[Tensor], Tensor]:
    """A round of fresh random values; (values, result)."""
    values = [normal(seed * 10 + number) for number in range(len(made))]
    for plane, own in zip(made, values, strict=True):
        fill(plane, own)
    group = group_of(made, codec=codec)
    play_round(made, group, open_round(made, group))
    close_round(made, group)
    assert all(torch.equal(result(plane), result(made[0])) for plane in made)
    return values, result(made[0])


# -- whole rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_not_in_the_averages_is_owed_also_when_the_group_changes(
    codec: str, three: list[Plane]
) -> None:
    bounds = Bounds(codec, NUMEL)
    meant, got = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for turn in range(8):
        order = [three[(turn + i) % 3] for i in range(3)]  # so that parts change their reducers
        values, average = play(order, codec, turn)
        allowed = bounds.of(values)
        assert ((average.double() - true_mean(values)).abs() <= allowed).all()
        meant += true_mean(values)
        got += average.double()
        torch.testing.assert_close(got + owed_by_all(three), meant, atol=2e-5, rtol=0)
    # Not a random walk: after any number of rounds the sums differ by what is owed and no more.
    assert ((got - meant).abs() <= bounds.owed(reducers=3) + 2e-5).all()


def test_without_feedback_the_errors_add_up(tmp_path: Path) -> None:
    """The same rounds, so that the test above can fail."""
    values = torch.linspace(0.1, 1.0, NUMEL)
    off = {}
    for fed in (False, True):
        (tmp_path / str(fed)).mkdir()
        with planes(3, layout_of(tensors(values)), tmp_path / str(fed), feedback=fed) as made:
            for plane in made:
                plane.trainer("t", tensors(values))
            got = torch.zeros(NUMEL).double()
            for _ in range(8):  # equal values: the same error every time
                for plane in made:
                    fill(plane, values)
                group = group_of(made, codec="int8")
                play_round(made, group, open_round(made, group))
                close_round(made, group)
                got += result(made[0]).double()
            off[fed] = (got - 8 * values.double()).abs().max().item()
            assert all((p.exchange.residuals(RUN) is None) is not fed for p in made)
    assert off[False] > 3 * off[True]


def test_over_real_links_too(tmp_path: Path) -> None:
    with planes(3, layout_of(tensors(normal(0))), tmp_path, over_tcp) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", tensors(normal(number)))
        meant = got = torch.zeros(NUMEL).double()
        for turn in range(3):
            values, average = play(made, "float16", turn)
            meant, got = meant + true_mean(values), got + average.double()
        torch.testing.assert_close(got + owed_by_all(made), meant, atol=1e-5, rtol=0)


def test_a_round_without_loss_pays_what_is_owed(three: list[Plane]) -> None:
    values, average = play(three, "int8", 1)
    debt = owed_by_all(three)
    assert debt.any()
    # In another order, so that members also owe to parts that they reduce themselves now.
    later, exact = play(three[1:] + three[:1], "float32", 2)
    meant = true_mean(values) + true_mean(later)
    paid = average.double() + exact.double()
    torch.testing.assert_close(paid + owed_by_all(three), meant, atol=1e-5, rtol=0)
    assert not any(owed(residuals(plane).sender).any() for plane in three)
    # Who reduced a part then and does not now still owes; when it is its turn again it pays.
    values, more = play(three, "float32", 3)
    meant, paid = meant + true_mean(values), paid + more.double()
    torch.testing.assert_close(paid, meant, atol=1e-5, rtol=0)
    assert not owed_by_all(three).any()


def test_contributions_go_raw_where_that_is_faster_and_nothing_is_lost(tmp_path: Path) -> None:
    """Links change their minds between rounds; what is owed does not depend on it."""
    raw, coded = CODECS["float32"].code, CODECS["float16"].code
    with planes(3, layout_of(tensors(normal(0))), tmp_path, codec="auto") as made:
        for number, plane in enumerate(made):
            plane.trainer("t", tensors(normal(number)))
        meant, got = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        fast, slow = 1e15, 1.0  # bytes per second
        for turn, rate in enumerate((None, slow, fast, slow, fast, fast)):
            for plane in made:
                plane.links.codes.clear()
                encode_at_known_rates(plane)
                plane.links.rates = {f"peer-{n}": rate for n in range(3)} if rate else {}
            # One peer is behind a slow line all the time.
            for plane in made[:2]:
                plane.links.rates["peer-2"] = slow
            values, average = play(made, "float16", turn)
            meant, got = meant + true_mean(values), got + average.double()
            torch.testing.assert_close(got + owed_by_all(made), meant, atol=2e-5, rtol=0)
            used = made[0].links.codes
            contribution = {
                to: {code for kind, peer, code in used if (kind, peer) == (CONTRIBUTION, to)}
                for to in ("peer-1", "peer-2")
            }
            # Integers always travel raw.
            assert contribution["peer-1"] - {raw} == (set() if rate == fast else {coded})
            assert contribution["peer-2"] - {raw} == {coded}
            results = {code for kind, _, code in used if kind is FrameKind.RESULT}
            assert results - {raw} == {coded}, "of results there is one for all"
        reasons = {one.reason for one in made[0].exchange.choices(RUN).values()}
        assert reasons == {"raw_is_faster", "coding_pays"}


def test_a_part_keeps_its_codec_for_the_round(tmp_path: Path) -> None:
    """Pushed again to who follows a dead reducer, over a link of another kind: the same bytes."""
    with planes(3, layout_of(tensors(normal(0))), tmp_path, codec="auto") as made:
        for number, plane in enumerate(made):
            plane.trainer("t", tensors(normal(number)))
        encode_at_known_rates(made[0])
        fill(made[0], normal(7))
        group = group_of(made, codec="float16")
        open_round(made, group)
        current = made[0].exchange._runs[RUN].rounds[group.group_id]

        def codec_of(part: int, *, epoch: int, takes: float) -> int:
            push = Push(group.group_id, 1, (part,), False, epoch)
            header, _ = next(current.frames(push, takes=takes))
            return header.codec

        coded, raw = CODECS["float16"].code, CODECS["float32"].code
        slow, fast = 1.0, 1e15
        assert [codec_of(0, epoch=e, takes=t) for e, t in enumerate((slow, fast))] == [coded, coded]
        assert [codec_of(1, epoch=e, takes=t) for e, t in enumerate((fast, slow))] == [raw, raw]
        close_round(made, group)


def test_only_float32_parts_owe_anything(tmp_path: Path) -> None:
    inputs = [some_tensors(seed) for seed in range(3)]
    with planes(3, layout_of(inputs[0]), tmp_path) as made:
        for plane, own in zip(made, inputs, strict=True):
            plane.trainer("t", own)
        for _ in range(2):
            group = group_of(made, codec="int8")
            play_round(made, group, open_round(made, group))
            close_round(made, group)
        for plane in made:
            lossy = sum(part.nbytes for part in plane.layout.parts if part.dtype == "float32")
            sides = owed_bytes(plane)
            assert 0 < sides["sender"] + sides["reducer"] <= 2 * lossy
            reduced = {p.index for p in plane.layout.parts if residuals(plane).reducer.has(p)}
            sent = {p.index for p in plane.layout.parts if residuals(plane).sender.has(p)}
            assert not reduced & sent, "one's own part is not coded on the way in"
            assert {plane.layout.parts[index].dtype for index in reduced | sent} == {"float32"}


@pytest.mark.parametrize("codec", ["bagua-minmax-uint8", "rand-k", "sign-rms"])
def test_a_codec_that_does_not_contract_is_not_fed(codec: str, three: list[Plane]) -> None:
    play(three, codec, 0)
    assert all(sum(owed_bytes(p).values()) == 0 for p in three)


# -- outcomes: everything else leaves the residuals as they were ---------------------------------


def states(made: Sequence[Plane]) -> list[tuple[Tensor, Tensor]]:
    return [(owed(residuals(p).sender), owed(residuals(p).reducer)) for p in made]


def same(before: list[tuple[Tensor, Tensor]], after: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(before, after, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


def test_a_sender_that_was_left_out_owes_what_it_did(three: list[Plane]) -> None:
    play(three, "int8", 0)
    before = states(three)
    for number, plane in enumerate(three):
        fill(plane, normal(50 + number))
    group = group_of(three, codec="int8")
    reducers = open_round(three, group)
    # Member 2 encodes and sends; its contribution to parts of member 0 is then not waited for.
    mine = [p for p, reducer in enumerate(reducers) if reducer == 0]
    absent = frozenset((part, 2) for part in mine)
    set_generation(three[2].buckets["t"], 3)
    known = play_round(three, group, reducers, absent=absent | frozenset(
        (part, 2) for part, reducer in enumerate(reducers) if reducer == 1))  # fmt: skip
    close_round(three, group)
    assert {who for who, _ in known[0].values()} == {(0, 1)}
    after = states(three)
    assert torch.equal(after[2][0], before[2][0]), "it was in no part"
    assert not torch.equal(after[0][0], before[0][0])


def test_a_bucket_that_changes_while_it_is_coded_leaves_them(
    three: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(three, "int8", 0)
    before = states(three)
    plane = three[0]
    group = group_of(three, codec="int8")
    reducers = open_round(three, group)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    encode = current._shared.encode

    def changes_meanwhile(*args: object, **named: object) -> int:
        set_generation(plane.buckets["t"], 3)
        return encode(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(current._shared, "encode", changes_meanwhile, raising=False)
    absent = frozenset((part, 0) for part, reducer in enumerate(reducers) if reducer != 0)
    play_round(three, group, reducers, absent=absent)
    close_round(three, group)
    assert torch.equal(states(three)[0][0], before[0][0])


@pytest.mark.parametrize("how", ["failed", "disputed"])
def test_a_round_that_is_not_used_leaves_them(three: list[Plane], how: str) -> None:
    play(three, "int8", 0)
    before = states(three)
    for number, plane in enumerate(three):
        fill(plane, normal(70 + number))
    group = group_of(three, codec="int8")
    play_round(three, group, open_round(three, group))
    parts = tuple(range(len(three[0].layout.parts)))
    for plane in three:
        if how == "failed":
            plane.exchange.handle(RUN, Close(group.group_id, kept=False))
        else:
            plane.exchange.handle(RUN, Close(group.group_id, without=parts))
    assert same(before, states(three))


def test_a_part_in_dispute_leaves_its_own_alone(three: list[Plane]) -> None:
    play(three, "int8", 0)
    before = states(three)
    group = group_of(three, codec="int8")
    play_round(three, group, open_round(three, group))
    for plane in three:
        plane.exchange.handle(RUN, Close(group.group_id, without=(0,)))
    spot = three[0].layout.parts[0]
    assert spot.dtype == "float32"
    inside, rest = slice(0, spot.numel), slice(spot.numel, NUMEL)
    for (sent, made), (was_sent, was_made) in zip(states(three), before, strict=True):
        assert torch.equal(sent[inside], was_sent[inside])
        assert torch.equal(made[inside], was_made[inside])
        assert not torch.equal(sent[rest], was_sent[rest])


def test_the_next_round_settles_one_that_lingers(three: list[Plane]) -> None:
    """Its Close comes when the slowest member was heard; by then the next is under way."""
    play(three, "int8", 0)
    before = states(three)
    lingers = group_of(three, codec="int8")
    play_round(three, lingers, open_round(three, lingers))
    assert same(before, states(three))
    following = group_of(three, codec="int8")
    open_round(three, following)
    settled = states(three)
    assert not same(before, settled)
    close_round(three, lingers)
    assert same(settled, states(three)), "once"
    close_round(three, following)
    assert same(settled, states(three)), "and nothing came of that one"


# -- takeovers ------------------------------------------------------------------------------------


def first_part(made: Sequence[Plane], group: Group, reducer: int) -> int:
    count = len(group.members)
    every = made[0].layout.parts
    return next(p.index for p in every if p.dtype == "float32" and p.index % count == reducer)


def collect(plane: Plane, group: Group, part: int, senders: Sequence[Plane], epoch: int) -> None:
    for sender in senders:
        push = Push(group.group_id, _index(group, plane), (part,), result=False, epoch=epoch)
        sender.exchange.handle(RUN, push)
    for _ in senders:
        plane.wait(PartArrived)
    plane.exchange.handle(RUN, Average(group.group_id, part, epoch))
    plane.wait(Averaged)


def _index(group: Group, plane: Plane) -> int:
    return next(i for i, m in enumerate(group.members) if m.peer_id == plane.peer_id)


def test_a_result_that_was_taken_over_is_not_the_reducers_any_more(three: list[Plane]) -> None:
    """Member 0 made a result of epoch 0; a higher epoch is in place at the end."""
    play(three, "int8", 0)
    before = states(three)
    group = group_of(three, codec="int8")
    open_round(three, group)
    part = first_part(three, group, 0)
    collect(three[0], group, part, three[1:], 0)
    three[0].exchange.handle(RUN, Bar(group.group_id, 1, (part,)))
    three[0].wait(Barred)
    other = next(
        i for i in (1, 2)
        if three[0].exchange._runs[RUN].rounds[group.group_id]
        ._shared.ledger._succession.reducer(part, 1) == i
    )  # fmt: skip
    numel = three[0].layout.parts[part].numel
    payload = torch.empty(CODECS["int8"].payload_bytes(numel, "float32"), dtype=torch.uint8)
    CODECS["int8"].encode(torch.ones(numel), payload)
    header, _ = frame(three[0], group, part, 1.0, epoch=1, inside=0b110)
    room = memoryview(payload.numpy().data)
    header = replace(header, length=len(room), crc=zlib.crc32(room), codec=3)
    three[0].exchange.on_frame(f"peer-{other}", header, room)
    three[0].wait(ResultArrived)
    close_round(three, group)
    after = states(three)
    assert torch.equal(after[0][1], before[0][1]), "its result is in place nowhere"
    assert torch.equal(after[0][0], before[0][0]), "and it is not inside what is"


def test_a_repeated_push_is_the_same_bytes_and_counts_once(three: list[Plane]) -> None:
    play(three, "int8", 0)
    group = group_of(three, codec="int8")
    open_round(three, group)
    plane, part = three[1], first_part(three, group, 0)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    own, owing = result(plane).clone(), owed(residuals(plane).sender)
    payloads = []
    for epoch in (0, 3):
        [(_, payload_of)] = list(current.outgoing((part,), result=False, epoch=epoch))
        payloads.append(bytes(payload_of(memoryview(bytearray(8192)))))
    assert payloads[0] == payloads[1]
    spot = plane.layout.parts[part]
    decoded = torch.empty(spot.numel)
    CODECS["int8"].decode(torch.frombuffer(bytearray(payloads[0]), dtype=torch.uint8), decoded)
    collect(three[0], group, part, three[1:], 0)
    three[0].exchange.handle(RUN, Push(group.group_id, 1, (part,), result=True))
    plane.wait(ResultArrived)
    close_round(three, group)
    start = (spot.offset_bytes - plane.layout.parts[0].offset_bytes) // 4
    here = slice(start, start + spot.numel)
    want = own[here].double() + owing[here] - decoded.double()
    torch.testing.assert_close(owed(residuals(plane).sender)[here], want, atol=1e-6, rtol=0)


def test_a_push_that_went_wrong_after_one_that_arrived_owes_nothing_and_is_counted(
    three: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that arrived are gone, and with them what they left out."""
    play(three, "int8", 0)
    group = group_of(three, codec="int8")
    open_round(three, group)
    plane, part = three[1], first_part(three, group, 0)
    spot = plane.layout.parts[part]
    assert residuals(plane).sender.has(spot)
    current = plane.exchange._runs[RUN].rounds[group.group_id]
    collect(three[0], group, part, three[1:], 0)
    read = current._shared.local.contribution

    def fill_meanwhile(spot: Part) -> Tensor:
        set_generation(plane.buckets["t"], 3)
        return read(spot)

    monkeypatch.setattr(current._shared.local, "contribution", fill_meanwhile)
    [(_, payload_of)] = list(current.outgoing((part,), result=False, epoch=3))
    with pytest.raises(Skipped):
        payload_of(memoryview(bytearray(8192)))
    three[0].exchange.handle(RUN, Push(group.group_id, 1, (part,), result=True))
    plane.wait(ResultArrived)
    close_round(three, group)
    assert not residuals(plane).sender.has(spot)
    assert plane.exchange.residuals_dropped == {"withdrawn": 1}


# -- their end ------------------------------------------------------------------------------------


def test_a_loaded_snapshot_forgets_them_and_is_counted(three: list[Plane]) -> None:
    play(three, "int8", 0)
    plane = three[0]
    parts = sum(residuals(plane).sender.has(p) + residuals(plane).reducer.has(p)
                for p in plane.layout.parts)  # fmt: skip
    assert parts > 0
    plane.exchange.initial_snapshot(RUN, "t", 4)
    plane.exchange.handle(RUN, LoadSnapshot(b"", 4, ("t",)))
    assert sum(owed_bytes(plane).values()) == 0
    assert plane.exchange.residuals_dropped == {"snapshot": parts}


def test_they_go_with_their_run(three: list[Plane]) -> None:
    play(three, "int8", 0)
    plane = three[0]
    plane.exchange.remove_run(RUN)
    assert set(plane.exchange.residuals_dropped) == {"run_ended"}
    plane.exchange.add_run(RUN, plane.layout, "int8")
    assert sum(owed_bytes(plane).values()) == 0


def test_a_residual_goes_through_a_bucket_and_back(three: list[Plane]) -> None:
    """What a checkpoint holds: both sides, where their elements lie; the rest of the bucket, and a
    bucket of which nothing is owed, stay as they are."""
    group = group_of(three, codec="int8")
    play_round(three, group, open_round(three, group))
    close_round(three, group)
    plane, other = three[0], three[1]
    residuals = plane.exchange.residuals(RUN, settle=True)
    theirs = other.exchange.residuals(RUN, settle=True)
    assert residuals is not None
    assert theirs is not None
    bucket = plane.exchange.bucket(RUN, "t")
    assert bucket is not None
    layout = plane.layout
    for mine, another in (
        (residuals.sender, theirs.sender),
        (residuals.reducer, theirs.reducer),
    ):
        wanted = mine.state_dict()["float32"]
        assert float(wanted.abs().max()) > 0
        assert write_residual(mine, layout, bucket.data)
        steps = layout.views(bucket.data)[1]
        assert steps.dtype == torch.int64
        load_residual(another, layout, bucket.data)
        assert torch.equal(another.state_dict()["float32"], wanted)
        before = bucket.data.clone()
        load_residual(another, layout, None)
        assert another.state_dict() == {}
        assert not write_residual(another, layout, bucket.data)
        assert torch.equal(bucket.data, before)
