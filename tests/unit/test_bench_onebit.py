"""What `bench onebit` makes of what daemons and trainers said, and what all trainers share."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moshpitd.cli.bench_onebit import PART_BYTES, PEERS, expected_ratio, report_of
from moshpitd.cli.main import app
from moshpitd.client.primitives import Coding
from moshpitd.tensors.layout import Layout, specs_of
from moshpitd.testing.bench.characters import (
    BATCH,
    CONTEXT,
    HELD_OUT,
    LEAST,
    LR,
    TEXT,
    VOCABULARY,
    batches,
    held_out,
    loss_of,
    new_model,
    rate,
    share,
    text,
)
from moshpitd.testing.bench.onebit import alone, float16_bytes
from moshpitd.testing.coding import Arithmetic, Brought, CodedAverage

TENSORS = {"0.0": torch.ones(300, 300), "0.1": torch.ones(7)}  # 90,007 elements
EACH = float16_bytes(Layout.from_specs(specs_of(TENSORS), PART_BYTES), PEERS)


def told(*, bytes_sent: float, onebit: float = 2.0, digests: tuple[int, ...] = (5, 5)) -> Any:
    return {
        "float16_bytes": EACH,
        "trainers": [
            {
                "losses": [9.0, *[onebit] * 5], "parameters": 90_007, "live": 90_007,
                "digest": digest, "statuses": {"complete": 100}, "missed": 0, "resyncs": 0,
            }
            for digest in digests
        ],
        "warm_bytes": 20 * EACH,
        "bytes": bytes_sent,
        "warm_seconds": 1.0,
        "train_seconds": 4.0,
    }  # fmt: skip


def report(adam: float = 2.0, naive: float = 2.5, **fields: Any) -> dict[str, Any]:
    exact = 100 * EACH / expected_ratio(0.2)
    losses = {"adam": [9.0] + [adam] * 5, "naive": [9.0] + [naive] * 5}
    given = told(**{"bytes_sent": exact, **fields})
    return report_of(given, losses, steps=100, freeze_step=20)


def test_the_formula_is_that_of_the_paper() -> None:
    assert expected_ratio(0.15) == pytest.approx(4.92, abs=0.005)
    assert expected_ratio(1.0) == 1.0


def test_the_float16_volume_is_what_a_coded_average_sends() -> None:
    arithmetic = Arithmetic(part=PART_BYTES // 4)
    average = CodedAverage("all", Coding("float16", feedback=True), arithmetic)
    average.work(0, {peer: Brought(TENSORS, 1) for peer in range(PEERS)})
    assert sum(average.sent.values()) == EACH == 6 * (2 * 90_007 + 6 * 4)


def test_a_run_that_keeps_every_bar() -> None:
    found = report()
    assert found["passed"]
    assert found["volume_ratio"] == pytest.approx(found["expected"])
    assert found["warm_over_formula"] == pytest.approx(1.0)
    assert found["ratio_loss"] == 1.0
    assert found["ratio_naive"] == 1.25


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"onebit": 2.03}, [0]),
        ({"bytes_sent": 100 * EACH / expected_ratio(0.2) * 1.06}, [1]),
        ({"bytes_sent": 100 * EACH / expected_ratio(0.2) * 0.94}, [1]),
        ({"naive": 2.05}, [2]),
        ({"digests": (5, 6)}, []),
    ],
)
def test_a_bar_that_is_missed_is_named(fields: Any, missed: list[int]) -> None:
    found = report(**fields)
    assert not found["passed"]
    assert [index for index, bar in enumerate(found["bars"]) if not bar["met"]] == missed


def test_trainers_have_texts_of_their_own_and_nobody_what_is_held_out() -> None:
    assert text().shape == (TEXT,)
    assert int(text().min()) >= 0
    assert int(text().max()) < VOCABULARY
    shares = torch.cat([share(index, PEERS) for index in range(PEERS)])
    assert torch.equal(shares, text()[: len(shares)])
    assert len(shares) <= TEXT - HELD_OUT
    for (x, y), (again, _) in islice(zip(batches(2, PEERS), batches(2, PEERS), strict=False), 3):
        assert x.shape == (BATCH, CONTEXT)
        assert torch.equal(x[:, 1:], y[:, :-1]), "the next character"
        assert torch.equal(x, again), "everybody's are a function of the trainer and the step"


def test_no_parameter_of_the_model_has_a_gradient_of_rounding_errors_alone() -> None:
    """The bias of attention's keys has: softmax does not see it. Its variance would be 1e-20, and
    one bit of momentum over that a step of thousands of learning rates."""
    model = new_model()
    loss_of(model, *held_out()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.flatten(1).abs().amax() if parameter.ndim > 1
                        else parameter.grad.abs().amax())  # fmt: skip
        assert largest > 1e-5, name
        if parameter.ndim == 1:
            assert float(parameter.grad.abs().median()) > 1e-5, name


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate(step, 400) for step in range(400)]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) <= LR
    assert rates[-1] == pytest.approx(LEAST * LR, rel=0.01)


@pytest.mark.parametrize("how", ["adam", "naive"])
def test_those_in_one_process_learn(how: str) -> None:
    found = alone({"how": how, "peers": 2, "steps": 12, "part_bytes": PART_BYTES})["losses"]
    assert len(found) == 12
    assert found[-1] < found[0]


def test_the_verb_is_there() -> None:
    found = CliRunner().invoke(app, ["bench", "onebit", "--help"])
    assert found.exit_code == 0
    assert "freeze" in found.output
