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
from moshpitd.tensors.feedback import ErrorFeedback
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
    return feedback.compensate(part, torch.zeros(part.numel))


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
        c = feedback.compensate(part, values)
        decoded = coded(codec, c, seed=number)
        feedback.commit(part, c, decoded, included=included)
        if included:
            meant += values.double()
            arrived += decoded.double()
        else:
            assert torch.equal(left(feedback, part), before)
    residual = left(feedback, part).double()
    torch.testing.assert_close(arrived + residual, meant, atol=2e-5, rtol=0)
    assert feedback.norm() == pytest.approx(residual.norm().item())


@pytest.mark.parametrize("name", CONTRACTIVE)
def test_the_residual_of_a_contraction_stays_bounded(name: str) -> None:
    layout, codec = layout_of(256), CODECS[name]
    (part,) = parts_of(layout)
    feedback, largest, longest = ErrorFeedback(layout), 0.0, 0.0
    for number in range(300):
        values = normal(256, number)
        longest = max(longest, values.norm().item())
        c = feedback.compensate(part, values)
        feedback.commit(part, c, coded(codec, c, seed=number), included=True)
        largest = max(largest, feedback.norm())
    # ||e'|| <= sqrt(1 - delta) (||e|| + ||x||), so never above the fixed point of that.
    shrink = (1 - codec.contraction(256)) ** 0.5
    assert largest <= longest * shrink / (1 - shrink)


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
            p = feedback.compensate(part, inputs["gamma"] * torch.tensor(gradient))
            delta = coded(codec, p)
            feedback.commit(part, p, delta, included=True)
            x -= delta
            found = {"delta": delta, "x": x, "e": left(feedback, part)}
            for word, values in found.items():  # float32 here, float64 there
                torch.testing.assert_close(values, torch.tensor(expected[word]), atol=5e-7, rtol=0)


# -- parts ----------------------------------------------------------------------------------------


def test_the_residual_survives_another_cut() -> None:
    wide, narrow = layout_of(1000, part_bytes=1024), layout_of(1000, part_bytes=192)
    feedback = ErrorFeedback(wide)
    values = normal(1000)
    start = 0
    for part in parts_of(wide):
        feedback.commit(part, values[start : start + part.numel], torch.zeros(part.numel),
                        included=True)  # fmt: skip
        start += part.numel
    assert [part.numel for part in parts_of(narrow)][:2] == [48, 48]
    found = torch.cat([left(feedback, part) for part in parts_of(narrow)])
    assert torch.equal(found, values)


def test_parts_do_not_touch_each_other() -> None:
    layout = layout_of(100, part_bytes=64)
    feedback = ErrorFeedback(layout)
    first, second, third, *_ = parts_of(layout)
    feedback.commit(second, torch.ones(16), torch.zeros(16), included=True)
    assert left(feedback, first).tolist() == left(feedback, third).tolist() == [0.0] * 16
    assert left(feedback, second).tolist() == [1.0] * 16


def test_memory_is_taken_when_it_is_needed() -> None:
    layout = layout_of(1 << 28)  # 1 GiB of residual, of which one part is written
    feedback = ErrorFeedback(layout)
    part = parts_of(layout)[7]
    values = torch.ones(part.numel)
    assert feedback.nbytes == 0
    feedback.commit(part, values, values, included=False)
    assert feedback.nbytes == 0
    feedback.commit(part, values, 0.5 * values, included=True)
    assert feedback.nbytes == 1 << 30
    assert left(feedback, part).unique().tolist() == [0.5]


def test_other_dtypes_are_let_through() -> None:
    layout = layout_of(4)
    feedback = ErrorFeedback(layout)
    for dtype, torch_dtype in (("float64", torch.float64), ("int64", torch.int64)):
        (part,) = parts_of(layout, dtype)
        values = torch.arange(part.numel, dtype=torch_dtype)
        c = feedback.compensate(part, values)
        assert torch.equal(c, values)
        feedback.commit(part, c, c, included=True)
        feedback.hold(part, c, c)
        feedback.settle(part, included=True)
        feedback.fold(part, values)
    assert feedback.nbytes == 0


def test_compensate_never_gives_the_bucket_itself() -> None:
    layout = layout_of(4)
    (part,) = parts_of(layout)
    feedback, bucket, room = ErrorFeedback(layout), torch.ones(4), torch.empty(4)
    c = feedback.compensate(part, bucket)
    assert feedback.compensate(part, bucket, room) is room
    bucket.fill_(9.0)
    assert c.tolist() == room.tolist() == [1.0] * 4


def test_hold_and_settle_are_commit_in_two_halves() -> None:
    layout = layout_of(8)
    (part,) = parts_of(layout)
    feedback = ErrorFeedback(layout)
    feedback.hold(part, torch.full((8,), 7.0), torch.zeros(8))
    feedback.hold(part, torch.full((8,), 3.0), torch.ones(8))  # a repeated push
    assert left(feedback, part).tolist() == [0.0] * 8
    feedback.settle(part, included=True)
    assert left(feedback, part).tolist() == [2.0] * 8
    feedback.hold(part, torch.full((8,), 9.0), torch.zeros(8))
    feedback.settle(part, included=False)
    feedback.settle(part, included=False)  # never pushed, never in: nothing to do
    feedback.hold(part, torch.full((8,), 9.0), torch.zeros(8))
    feedback.abandon()
    assert left(feedback, part).tolist() == [2.0] * 8
    with pytest.raises(LocalProtocolError, match="never held"):
        feedback.settle(part, included=True)


def test_a_residual_that_is_not_finite_is_refused() -> None:
    layout = layout_of(2)
    (part,) = parts_of(layout)
    feedback = ErrorFeedback(layout)
    feedback.commit(part, torch.ones(2), torch.zeros(2), included=True)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(LocalProtocolError, match="not finite"):
            feedback.commit(part, torch.tensor([1.0, bad]), torch.zeros(2), included=True)
        assert left(feedback, part).tolist() == [1.0, 1.0]


def test_our_own_mistakes_are_local() -> None:
    layout = layout_of(4)
    (part,) = parts_of(layout)
    feedback = ErrorFeedback(layout)
    with pytest.raises(LocalProtocolError, match=r"got float32 \[3\], expected float32 \[4\]"):
        feedback.compensate(part, torch.zeros(3))
    with pytest.raises(LocalProtocolError, match="got float64"):
        feedback.commit(part, torch.zeros(4), torch.zeros(4).double(), included=True)
    elsewhere = parts_of(layout_of(40, part_bytes=64))[1]
    with pytest.raises(LocalProtocolError, match="elements 16 to 32 of float32, expected 0 to 4"):
        feedback.compensate(elsewhere, torch.zeros(16))
    with pytest.raises(LocalProtocolError, match="no region of dtype int8"):
        feedback.compensate(Part(0, 0, 4, 4, "int8", "max"), torch.zeros(4, dtype=torch.int8))


# -- between rounds -------------------------------------------------------------------------------


def filled(layout: Layout, values: Tensor) -> ErrorFeedback:
    feedback = ErrorFeedback(layout)
    (part,) = parts_of(layout)
    feedback.commit(part, values, torch.zeros_like(values), included=True)
    return feedback


def test_a_checkpoint_brings_it_back(tmp_path: Path) -> None:
    layout = layout_of(50)
    (part,) = parts_of(layout)
    feedback = filled(layout, normal(50))
    torch.save(feedback.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    feedback.clear()
    assert (feedback.norm(), feedback.nbytes) == (0.0, 0)
    again = filled(layout_of(50, part_bytes=64 * 16), torch.ones(50))
    again.load_state_dict(saved)
    assert torch.equal(left(again, part), normal(50))
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
    layout = layout_of(50)
    feedback = filled(layout, torch.ones(50))
    for load in (feedback.load_state_dict, feedback.take_over):
        with pytest.raises(TrainerError, match=words):
            load(state)
    assert left(feedback, parts_of(layout)[0]).tolist() == [1.0] * 50


def test_a_leaving_peer_hands_over_or_folds() -> None:
    layout = layout_of(10)
    (part,) = parts_of(layout)
    leaving, staying = filled(layout, normal(10)), filled(layout, torch.ones(10))
    handed = leaving.hand_over()
    assert leaving.norm() == 0.0
    staying.take_over(handed)
    torch.testing.assert_close(left(staying, part), normal(10) + 1)
    values = torch.full((10,), 2.0)
    staying.fold(part, values)
    torch.testing.assert_close(values, normal(10) + 3)
    assert staying.norm() == 0.0
    ErrorFeedback(layout).fold(part, values)
    torch.testing.assert_close(values, normal(10) + 3)


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

    def sent(feedback: ErrorFeedback, values: Tensor) -> Tensor:
        c = feedback.compensate(part, values) if fed else values
        decoded = coded(codec, c)
        if fed:
            feedback.commit(part, c, decoded, included=True)
        return decoded

    for _ in range(STEPS):
        for x in workers:
            x.sub_(curvature * (x - optimum), alpha=RATE)
        pairs = zip(senders, workers, strict=True)
        mean = torch.stack([sent(feedback, x) for feedback, x in pairs]).mean(0)
        result = sent(reducer, mean)
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
