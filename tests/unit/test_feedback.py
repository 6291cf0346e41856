"""tensors/feedback. One rule: nothing is lost, so everything that went in is in x, e or the air."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.tensors.codecs import CODECS, Codec
from moshpitd.tensors.codecs.sparse import TopKCodec
from moshpitd.tensors.feedback import ErrorFeedback, Residuals, feeds
from moshpitd.tensors.layout import Layout, Part, TensorSpec

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CONTRACTIVE = [
    "float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "nuqsgd", "natural", "top-k",
    "sign-l1",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layout_of(numel: int, *, part_bytes: int = 1 << 20) -> Layout:
    specs = [
        TensorSpec("a", (3,), "float64"),
        TensorSpec("b", (numel,), "float32"),
        TensorSpec("c", (5,), "int64"),
    ]
    return Layout.from_specs(specs, part_bytes)


def parts_of(layout: Layout, dtype: str = "float32") -> list[Part]:
    return [part for part in layout.parts if part.dtype == dtype]


def coded(codec: Codec, values: Tensor, *, seed: int = 0) -> Tensor:
    payload = torch.empty(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
    codec.encode(values, payload, seed=seed)
    out = torch.empty_like(values)
    codec.decode(payload, out)
    return out


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def left(feedback: ErrorFeedback, part: Part) -> Tensor:
    """The residual of a part."""
    found = torch.zeros(part.numel)
    state = feedback.state_dict()
    if state:
        first = part.offset_bytes - next(p for p in feedback._of_region()).offset_bytes
        found += state["float32"][first // 4 :][: part.numel]
    return found


def sent(
    feedback: ErrorFeedback, part: Part, values: Tensor, codec: Codec, *, seed: int = 0,
    included: bool | None = True,
) -> Tensor:  # fmt: skip
    """What arrives of these values; `included` None: the outcome is still open."""
    payload = torch.empty(codec.payload_bytes(values.numel(), "float32"), dtype=torch.uint8)
    size = feedback.encode(part, values, payload, codec=codec, seed=seed)
    out = torch.empty_like(values)
    codec.decode(payload[:size], out)
    if included is not None:
        feedback.settle(part, included=included)
    return out


# -- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTRACTIVE)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=25)
def test_what_was_decoded_and_the_residual_are_what_was_meant(
    name: str, outcomes: list[bool], numel: int, seed: int
) -> None:
    layout = layout_of(numel)
    (part,) = parts_of(layout)
    feedback, codec = ErrorFeedback(layout), CODECS[name]
    meant, arrived = torch.zeros(numel).double(), torch.zeros(numel).double()
    for number, included in enumerate(outcomes):
        values = normal(numel, seed + number)
        before = left(feedback, part)
        decoded = sent(feedback, part, values, codec, seed=number, included=included)
        if included:
            meant += values.double()
            arrived += decoded.double()
        else:
            assert torch.equal(left(feedback, part), before)
    residual = left(feedback, part).double()
    torch.testing.assert_close(arrived + residual, meant, atol=2e-5, rtol=0)
    assert feedback.norm() == pytest.approx(residual.norm().item())


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("numel", [2, 700, 140_000])
def test_one_visit_gives_the_bytes_and_the_rest_of_encode_and_decode(name: str, numel: int) -> None:
    """`encode_fed` of the block codecs is another loop than `encode` and `decode`."""
    codec, values, added = CODECS[name], normal(numel), normal(numel, 1) * 1e-3
    payload = torch.empty(codec.payload_bytes(numel, "float32"), dtype=torch.uint8)
    for extra in (added, None):
        c = values if extra is None else values + extra
        room, rest = torch.empty_like(payload), torch.empty(numel)
        size = codec.encode(c, payload, seed=5)
        assert codec.encode_fed(values, room, added=extra, left=rest, seed=5) == size
        assert torch.equal(room[:size], payload[:size])
        decoded = torch.empty(numel)
        codec.decode(payload[:size], decoded)
        assert torch.equal(rest, c - decoded)
        told, rest = torch.empty(numel), torch.empty(numel)
        codec.encode_fed(values, room, added=extra, left=rest, seed=5, decoded=told)
        # Bit by bit, also the sign of a zero: it is what all others will hold.
        assert torch.equal(told.view(torch.int32), decoded.view(torch.int32))
        assert torch.equal(room[:size], payload[:size])
        assert torch.equal(rest, c - decoded)


@pytest.mark.parametrize("name", CONTRACTIVE)
def test_the_residual_of_a_contraction_stays_bounded(name: str) -> None:
    layout, codec = layout_of(256), CODECS[name]
    (part,) = parts_of(layout)
    feedback, largest, longest = ErrorFeedback(layout), 0.0, 0.0
    for number in range(300):
        values = normal(256, number)
        longest = max(longest, values.norm().item())
        sent(feedback, part, values, codec, seed=number)
        largest = max(largest, feedback.norm())
    # ||e'|| <= sqrt(1 - delta) (||e|| + ||x||), so never above the fixed point of that.
    shrink = (1 - codec.contraction(256)) ** 0.5
    assert largest <= longest * shrink / (1 - shrink)


def test_which_codecs_are_fed() -> None:
    assert [name for name, codec in CODECS.items() if feeds(codec, 256)] == [
        "float32",
        *CONTRACTIVE,
    ]
    assert not feeds(object(), 256)  # type: ignore[arg-type]


def test_golden_ef_sgd() -> None:
    case = json.loads((GOLDEN / "ef_sgd.json").read_text(encoding="utf-8"))
    inputs: dict[str, Any] = case["inputs"]
    codecs: dict[str, Codec] = {
        "scaled_sign": CODECS["sign-l1"],
        "top2": TopKCodec(name="top-2", code=200, one_in=3),
    }
    layout = layout_of(6)
    (part,) = parts_of(layout)
    for title, codec in codecs.items():
        feedback, x = ErrorFeedback(layout), torch.tensor(inputs["x0"])
        for gradient, expected in zip(inputs["grads"], case["outputs"][title], strict=True):
            delta = sent(feedback, part, inputs["gamma"] * torch.tensor(gradient), codec)
            x -= delta
            found = {"delta": delta, "x": x, "e": left(feedback, part)}
            for word, values in found.items():  # float32 here, float64 there
                torch.testing.assert_close(values, torch.tensor(expected[word]), atol=5e-7, rtol=0)


# -- outcomes -------------------------------------------------------------------------------------

INT8 = CODECS["int8"]


def test_a_repeat_is_the_same_bytes_until_the_outcome(layout: Layout) -> None:
    feedback, values = ErrorFeedback(layout), normal(96)
    part = parts_of(layout)[0]
    sent(feedback, part, normal(96, 1), INT8)
    before = left(feedback, part)
    first = sent(feedback, part, values, INT8, included=None)
    again = sent(feedback, part, values, INT8, included=None)
    assert torch.equal(first, again)
    assert torch.equal(left(feedback, part), before), "nothing was settled yet"
    feedback.settle(part, included=True)
    torch.testing.assert_close(left(feedback, part), before + values - first)
    assert not torch.equal(sent(feedback, part, values, INT8), first), "now it is another sum"


def test_an_outcome_counts_once_and_only_for_what_is_held(layout: Layout) -> None:
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    feedback.settle(part, included=True)
    assert not feedback.has(part)
    sent(feedback, part, normal(96), INT8, included=None)
    assert feedback.held() == [part]
    feedback.settle(part, included=False)
    feedback.settle(part, included=True)
    assert feedback.held() == []
    assert not feedback.has(part)


def test_what_is_given_whole_owes_nothing_afterwards(layout: Layout) -> None:
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    sent(feedback, part, normal(96), INT8)
    owed, values, out = left(feedback, part), normal(96, 2), torch.empty(96)
    for included in (False, True):
        feedback.give(part, values, out)
        torch.testing.assert_close(out, values + owed)
        assert torch.equal(left(feedback, part), owed)
        feedback.settle(part, included=included)
    assert not feedback.has(part)
    feedback.give(part, values, out)
    assert torch.equal(out, values)


def test_a_part_that_was_coded_and_then_given_whole_owes_what_the_last_did(layout: Layout) -> None:
    """We sent it to a reducer that died, and reduce it ourselves now."""
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    sent(feedback, part, normal(96), INT8, included=None)
    feedback.give(part, normal(96), torch.empty(96))
    feedback.settle(part, included=True)
    assert not feedback.has(part)


def test_what_was_withdrawn_is_not_owed_and_counted_if_it_arrived_all_the_same(
    layout: Layout,
) -> None:
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    sent(feedback, part, normal(96), INT8)
    owed = left(feedback, part)
    sent(feedback, part, normal(96, 3), INT8, included=None)
    feedback.withdraw(part)
    feedback.settle(part, included=False)
    assert torch.equal(left(feedback, part), owed)
    feedback.withdraw(part)
    feedback.settle(part, included=True)
    assert not feedback.has(part)
    assert feedback.dropped == {"withdrawn": 1}


def test_a_residual_that_overflows_its_part_is_given_up(layout: Layout) -> None:
    """Values near the largest float32: x is finite, x + e is not. It must not fail for ever."""
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    top = torch.finfo(torch.float32).max
    feedback.load_state_dict({"float32": torch.full((numel_of(layout),), top / 2)})
    values = torch.full((96,), top)
    assert torch.isfinite(sent(feedback, part, values, INT8)).all()
    assert feedback.dropped == {"not_finite": 1}
    feedback.load_state_dict({"float32": torch.full((numel_of(layout),), top / 2)})
    out = torch.empty(96)
    feedback.give(part, values, out)
    assert torch.equal(out, values)
    assert feedback.dropped == {"not_finite": 2}
    with pytest.raises(TrainerError, match="NaN or infinity"):
        sent(feedback, part, torch.full((96,), float("nan")), INT8)
    assert feedback.held() == []


def test_the_decoded_values_of_a_result_are_given_too(layout: Layout) -> None:
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    payload = torch.empty(INT8.payload_bytes(96, "float32"), dtype=torch.uint8)
    total, owed = torch.zeros(96), torch.zeros(96)
    for number in range(3):
        values, decoded, alone = normal(96, number), torch.empty(96), torch.empty(96)
        feedback.encode(part, values, payload, codec=INT8, decoded=decoded)
        INT8.decode(payload, alone)
        assert torch.equal(decoded, alone)
        feedback.settle(part, included=True)
        total += values - decoded
        owed = left(feedback, part)
    torch.testing.assert_close(owed, total, atol=1e-5, rtol=0)


# -- parts ----------------------------------------------------------------------------------------


@pytest.fixture
def layout() -> Layout:
    """Three float32 parts of 96, 96 and 48 elements between two other regions."""
    return layout_of(240, part_bytes=384)


def numel_of(layout: Layout) -> int:
    return sum(part.numel for part in parts_of(layout))


def test_parts_do_not_touch_each_other(layout: Layout) -> None:
    feedback = ErrorFeedback(layout)
    first, second, third = parts_of(layout)
    sent(feedback, second, normal(96), INT8)
    assert not left(feedback, first).any()
    assert not left(feedback, third).any()
    assert left(feedback, second).any()


def test_memory_is_taken_when_it_is_needed() -> None:
    layout = layout_of(1 << 28)  # 1 GiB of residual, of which one part is written
    feedback, codec = ErrorFeedback(layout), CODECS["float16"]
    part = parts_of(layout)[7]
    assert feedback.nbytes == 0
    for expected in (part.nbytes, 2 * part.nbytes, 2 * part.nbytes):  # e, then e and e'
        sent(feedback, part, normal(part.numel), codec)
        assert feedback.nbytes == expected
    feedback.clear()
    assert feedback.nbytes == 0


def test_what_is_none_of_this_layout_is_our_own_mistake(layout: Layout) -> None:
    feedback, part = ErrorFeedback(layout), parts_of(layout)[0]
    room = torch.empty(960, dtype=torch.uint8)
    with pytest.raises(LocalProtocolError, match=r"got float32 \[3\], expected float32 \[96\]"):
        feedback.encode(part, torch.zeros(3), room, codec=INT8)
    with pytest.raises(LocalProtocolError, match="got float64"):
        feedback.give(part, torch.zeros(96).double(), torch.zeros(96).double())
    with pytest.raises(LocalProtocolError, match="none of this layout"):
        feedback.encode(
            parts_of(layout_of(40, part_bytes=64))[1], torch.zeros(16), room, codec=INT8
        )
    (wide,) = parts_of(layout, "float64")
    with pytest.raises(LocalProtocolError, match="float64"):
        feedback.give(wide, torch.zeros(3).double(), torch.zeros(3).double())


# -- between rounds -------------------------------------------------------------------------------


def filled(layout: Layout, seed: int) -> ErrorFeedback:
    feedback = ErrorFeedback(layout)
    for part in parts_of(layout):
        sent(feedback, part, normal(part.numel, seed + part.index), INT8)
    return feedback


def test_a_checkpoint_brings_it_back_also_to_another_cut(layout: Layout, tmp_path: Path) -> None:
    feedback = filled(layout, 0)
    torch.save(feedback.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    norm = feedback.norm()
    feedback.clear("snapshot")
    assert (feedback.norm(), feedback.nbytes, feedback.dropped["snapshot"]) == (0.0, 0, 3)
    narrow = layout_of(240, part_bytes=64)
    again = filled(narrow, 9)
    again.load_state_dict(saved)
    assert again.norm() == pytest.approx(norm)
    assert torch.equal(again.state_dict()["float32"], saved["float32"])
    again.load_state_dict(ErrorFeedback(layout).state_dict())
    assert again.norm() == 0.0


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"float32": torch.zeros(49)}, "expected 50 elements"),
        ({"float32": torch.zeros(50).double()}, "float64"),
        ({"float64": torch.zeros(3).double()}, "expected 0 elements"),
        ({"b": torch.zeros(50)}, "residual 'b'"),
        ({"float32": torch.full((50,), float("nan"))}, "NaN"),
    ],
)
def test_a_checkpoint_of_something_else_changes_nothing(state: Any, words: str) -> None:
    feedback = filled(layout_of(50), 0)
    before = feedback.state_dict()["float32"]
    for load in (feedback.load_state_dict, feedback.take_over):
        with pytest.raises(TrainerError, match=words):
            load(state)
    assert torch.equal(feedback.state_dict()["float32"], before)


def test_a_leaving_peer_hands_over(layout: Layout) -> None:
    leaving, staying = filled(layout, 0), filled(layout, 7)
    want = leaving.state_dict()["float32"] + staying.state_dict()["float32"]
    staying.take_over(leaving.hand_over())
    assert (leaving.norm(), leaving.dropped) == (0.0, {})
    torch.testing.assert_close(staying.state_dict()["float32"], want)


def test_both_sides_are_counted_together(layout: Layout) -> None:
    both = Residuals(layout)
    part = parts_of(layout)[1]
    sent(both.sender, part, normal(96), INT8)
    sent(both.reducer, part, normal(96), INT8)
    sent(both.reducer, part, normal(96), INT8)
    assert both.nbytes == {"sender": 384, "reducer": 768}
    both.clear("run_ended")
    assert both.nbytes == {"sender": 0, "reducer": 0}
    assert both.dropped == {"run_ended": 2}


# -- what it is for -------------------------------------------------------------------------------

WORKERS, NUMEL, STEPS, RATE = 4, 64, 1400, 1e-3


def final_loss(name: str, *, fed: bool) -> float:
    """LocalSGD with every=1 on a quadratic: each worker steps, then all take the coded average.

    DESIGN 4: the codec is applied to contributions and to the result, so errors are fed back at
    both ends. The curvatures are 1 to 3, so that no coordinate is done after these steps.
    """
    codec, layout = CODECS[name], layout_of(NUMEL)
    (part,) = parts_of(layout)
    optimum = 2 * torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) - 1
    curvature = torch.linspace(1, 3, NUMEL)
    senders, reducer = [ErrorFeedback(layout) for _ in range(WORKERS)], ErrorFeedback(layout)
    workers = [torch.zeros(NUMEL) for _ in range(WORKERS)]

    def arrives(feedback: ErrorFeedback, values: Tensor) -> Tensor:
        return sent(feedback, part, values, codec) if fed else coded(codec, values)

    for _ in range(STEPS):
        for x in workers:
            x.sub_(curvature * (x - optimum), alpha=RATE)
        pairs = zip(senders, workers, strict=True)
        mean = torch.stack([arrives(feedback, x) for feedback, x in pairs]).mean(0)
        result = arrives(reducer, mean)
        for x in workers:
            x.copy_(result)
    return float((curvature * (workers[0] - optimum).square()).mean().item()) / 2


@pytest.fixture(scope="module")
def lossless() -> float:
    return final_loss("float32", fed=False)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_parameters_survive_a_lossy_average_with_feedback_only(name: str, lossless: float) -> None:
    assert final_loss(name, fed=True) == pytest.approx(lossless, rel=0.03)
    assert final_loss(name, fed=False) > 3 * lossless
