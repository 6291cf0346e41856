"""Local against mini-batch SGD, sweeps by weight, delayed SGD: worked examples and exact limits.

One rule: what is exact in the paper (fixed points, stability) is tested as equality.
"""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.tensors.rules import delayed, localsgd
from moshpitd.tensors.rules.common import mean
from moshpitd.tensors.rules.delayed import DelayLine
from moshpitd.tensors.rules.localsgd import Gradient
from tests.kit.rules import Quadratics, close, examples, generators, named, normal, tensor


def oracles(problem: Quadratics, noise: Tensor) -> list[list[Gradient]]:
    """gradients[worker][step] with noise[step][worker] added."""

    def oracle(worker: int, drawn: Tensor) -> Gradient:
        return lambda x: problem.grad(worker, x) + drawn

    return [[oracle(i, step[i]) for step in noise] for i in range(len(problem.a))]


@pytest.mark.parametrize("example", examples("local_vs*"), ids=named)
def test_the_golden_local_and_minibatch(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem, gamma = Quadratics(tensor(inputs["A"]), tensor(inputs["B"])), inputs["gamma"]
    for rule, key in ((localsgd.local_round, "local"), (localsgd.minibatch_round, "minibatch")):
        x = tensor(inputs["x0"])
        for noise, expected in zip(tensor(inputs["noise"]), outputs[key], strict=True):
            x = rule(x, oracles(problem, noise), gamma=gamma)
            close(x, expected, atol)
    close(problem.optimum(), outputs["optimum"], atol)
    fixed = localsgd.quadratic_fixed_point(
        list(problem.a), list(problem.b), gamma=gamma, steps=inputs["H"]
    )
    close(fixed, outputs["local_gd_fixed_point"], atol)


@given(generator=generators(), n=st.integers(1, 5))
def test_one_step_rounds_are_the_same_algorithm(generator: torch.Generator, n: int) -> None:
    problem = Quadratics.random(generator, workers=n, numel=4)
    gradients = oracles(problem, normal(generator, 1, n, 4))
    x = normal(generator, 4)
    local = localsgd.local_round(x, gradients, gamma=0.1)
    torch.testing.assert_close(local, localsgd.minibatch_round(x, gradients, gamma=0.1))
    wanted = x - 0.1 * mean([own[0](x) for own in gradients])
    torch.testing.assert_close(local, wanted)


@given(generator=generators(), n=st.integers(2, 4), steps=st.integers(1, 6), equal=st.booleans())
def test_local_gradient_descent_ends_at_its_own_fixed_point(
    generator: torch.Generator, n: int, steps: int, equal: bool
) -> None:
    problem = Quadratics.random(generator, workers=n, numel=3)
    if equal:
        problem = Quadratics(problem.a[:1].repeat(n, 1), problem.b)
    gradients = oracles(problem, torch.zeros(steps, n, 3, dtype=torch.float64))
    fixed = localsgd.quadratic_fixed_point(list(problem.a), list(problem.b), gamma=0.2, steps=steps)
    torch.testing.assert_close(localsgd.local_round(fixed, gradients, gamma=0.2), fixed)
    if equal or steps == 1:
        torch.testing.assert_close(fixed, problem.optimum())
    torch.testing.assert_close(
        localsgd.minibatch_round(problem.optimum(), gradients, gamma=0.2), problem.optimum()
    )


def test_workers_of_a_minibatch_take_equally_many_steps() -> None:
    with pytest.raises(LocalProtocolError, match=r"took \[1, 2\] steps"):
        localsgd.minibatch_round(tensor([0.0]), [[torch.clone], [torch.clone] * 2], gamma=0.1)


# ---- Sweeps by weight.


def sweep(values: list[Tensor], weights: list[float], *, keep: bool) -> list[float]:
    """Two rounds on a 2 x 2 grid: rows, then columns."""
    for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for group in groups:
            average = localsgd.weighted_mean(
                [values[i] for i in group], [weights[i] for i in group]
            )
            weight = localsgd.weight_after_round([weights[i] for i in group])
            for i in group:
                values[i] = average
                weights[i] = weights[i] if keep else weight
    return [value.item() for value in values]


def test_a_weighted_sweep_is_exact_with_mean_weights_and_not_with_own() -> None:
    def start() -> tuple[list[Tensor], list[float]]:
        return [tensor([x]) for x in (1.0, 2.0, 5.0, 9.0)], [1.0, 3.0, 1.0, 1.0]

    assert sweep(*start(), keep=False) == pytest.approx([3.5] * 4)
    own = sweep(*start(), keep=True)
    assert sorted({round(value, 4) for value in own}) == [3.0625, 4.375]


@given(generator=generators(), weights=st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_any_weights_are_exact_after_a_sweep(
    generator: torch.Generator, weights: list[int]
) -> None:
    weights = [weight + (index == 0) for index, weight in enumerate(weights)]
    if not (weights[0] + weights[1] and weights[2] + weights[3]):
        weights[2] += 1
    values = list(normal(generator, 4, 1))
    wanted = sum(w * v.item() for w, v in zip(weights, values, strict=True)) / sum(weights)
    found = sweep(values, [float(weight) for weight in weights], keep=False)
    assert found == pytest.approx([wanted] * 4)


def test_weights_that_give_no_average() -> None:
    with pytest.raises(LocalProtocolError, match="one above 0"):
        localsgd.weighted_mean([tensor([1.0])], [0.0])
    with pytest.raises(LocalProtocolError, match="one above 0"):
        localsgd.weighted_mean([tensor([1.0]), tensor([1.0])], [2.0, -1.0])


# ---- Delays.


def grows(rate: float, tau: int, steps: int = 3000) -> bool:
    """x_{t+1} = x_t - rate x_{t - tau} from x = 1, run through the shipped rule."""
    x, line, past = tensor([1.0]), DelayLine(tau), 0.0
    for step in range(steps):
        line, grad = delayed.pass_through(line, x)
        x = delayed.delayed_step(x, grad, gamma=rate)
        if step == steps // 2:
            past = max(abs(x.item()), *(abs(g.item()) for g in line.waiting), 1e-300)
    now = max(abs(x.item()), *(abs(g.item()) for g in line.waiting), 0.0)
    return now > past


def radius(rate: float, tau: int) -> float:
    """Largest root of z^(tau+1) = z^tau - rate, the dumb twin."""
    companion = torch.zeros(tau + 1, tau + 1, dtype=torch.float64)
    companion[0, 0] = 1.0
    companion[0, tau] -= rate
    companion[1:, :-1] += torch.eye(tau, dtype=torch.float64)
    return max(abs(complex(z)) for z in torch.linalg.eigvals(companion).tolist())


@pytest.mark.parametrize("example", examples("delayed*"), ids=named)
def test_the_golden_stability(example: dict[str, Any]) -> None:
    for case in example["outputs"]["thresholds"]:
        limit = delayed.stability_limit(case["tau"])
        assert limit == pytest.approx(case["theory"], abs=1e-12)
        assert limit == pytest.approx(case["measured"], abs=example["atol"])


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 10])
def test_the_rule_is_stable_exactly_below_its_limit(tau: int) -> None:
    limit = delayed.stability_limit(tau)
    assert radius(limit * 0.999, tau) < 1 < radius(limit * 1.001, tau)
    assert not grows(limit * 0.99, tau, 1200)
    assert grows(limit * 1.01, tau, 1200)


@given(tau=st.integers(0, 60))
def test_the_adaptive_step_is_stable_at_every_delay(tau: int) -> None:
    assert delayed.adaptive_gamma(1.5, tau=tau) < delayed.stability_limit(tau)
    limit = cmath.pi / (2 * tau) if tau else 2.0
    assert delayed.stability_limit(tau) <= limit


@given(tau=st.integers(0, 5), steps=st.integers(0, 12))
def test_a_gradient_comes_out_once_tau_steps_later(tau: int, steps: int) -> None:
    line, out = DelayLine(tau), []
    for step in range(steps):
        line, grad = delayed.pass_through(line, tensor([float(step)]))
        out.append(None if grad is None else grad.item())
        assert len(line.waiting) <= tau
    assert out == [None if step < tau else float(step - tau) for step in range(steps)]


def test_delays_that_cannot_be_and_averages_that_can() -> None:
    with pytest.raises(ConfigError, match="tau: a delay of -1"):
        DelayLine(-1)
    close(delayed.averaged_gradient([tensor([1.0]), tensor([4.0])]), [2.5], 1e-12)
