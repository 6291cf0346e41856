"""Error feedback, EC-SGD-DIANA, DIANA, ADIANA and MARINA: worked examples and what telescopes.

One rule: heterogeneous quadratics have an optimum that is known exactly; a method that claims to
reach it is run until it does.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.tensors.rules import diana, errorfeedback, marina
from moshpitd.tensors.rules.common import identity, mean, require_unbiased
from moshpitd.tensors.rules.errorfeedback import EcWorker
from moshpitd.tensors.rules.signs import scaled_sign
from tests.kit.rules import (
    FLOAT,
    Quadratics,
    chosen,
    close,
    examples,
    generators,
    named,
    normal,
    qsgd,
    rand_k,
    rounded,
    tensor,
    top_k,
)

workers_of = st.integers(1, 6)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=FLOAT)


# ---- EF-SGD.


@pytest.mark.parametrize("example", examples("ef_sgd*"), ids=named)
def test_the_golden_ef_sgd(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    codecs = {"scaled_sign": scaled_sign, **{f"top{k}": top_k(k) for k in range(1, 9)}}
    for name, steps in outputs.items():
        x, error = tensor(inputs["x0"]), torch.zeros_like(tensor(inputs["x0"]))
        for grad, step in zip(inputs["grads"], steps, strict=True):
            update = inputs["gamma"] * tensor(grad)
            delta, error = errorfeedback.feed_back(update, error, codecs[name])
            x = errorfeedback.apply_mean(x, [delta])
            close(delta, step["delta"], atol)
            close(error, step["e"], atol)
            close(x, step["x"], atol)


@given(
    generator=generators(), n=workers_of, codec=st.sampled_from([top_k(1), scaled_sign, rounded]),
    gammas=st.lists(st.floats(0, 0.5), min_size=1, max_size=6),
)  # fmt: skip
def test_nothing_is_lost_by_error_feedback_for_any_codec_and_any_step(
    generator: torch.Generator, n: int, codec: Any, gammas: list[float]
) -> None:
    start = normal(generator, 5)
    x, errors = start, [zeros(5) for _ in range(n)]
    walked, sent = zeros(5), zeros(5)
    for gamma in gammas:
        grads = list(normal(generator, n, 5))
        pairs = [
            errorfeedback.feed_back(gamma * grad, error, codec)
            for grad, error in zip(grads, errors, strict=True)
        ]
        deltas, errors = [delta for delta, _ in pairs], [error for _, error in pairs]
        x = errorfeedback.apply_mean(x, deltas)
        walked, sent = walked + gamma * mean(grads), sent + mean(deltas)
    torch.testing.assert_close(sent + mean(errors), walked)
    torch.testing.assert_close(x - mean(errors), start - walked)


@given(generator=generators(), d=st.integers(1, 12), k=st.integers(1, 12))
def test_the_compressors_contract_by_their_delta(
    generator: torch.Generator, d: int, k: int
) -> None:
    p, k = normal(generator, d), min(k, d)
    for codec, delta in (
        (top_k(k), k / d),
        (scaled_sign, float(p.abs().sum() ** 2 / (d * (p**2).sum()))),
    ):
        left = ((codec(p) - p) ** 2).sum()
        assert left <= (1 - delta) * (p**2).sum() + 1e-12


def test_identity_feedback_is_sgd_with_momentum() -> None:
    generator = torch.Generator().manual_seed(2)
    start = normal(generator, 4)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, buffer, error = start, zeros(4), zeros(4)
    for _ in range(6):
        grad = normal(generator, 4)
        parameter.grad = grad
        sgd.step()
        buffer = errorfeedback.momentum_update(buffer, grad, momentum=0.9, x=x, weight_decay=5e-4)
        delta, error = errorfeedback.feed_back(0.1 * buffer, error, identity)
        x = x - delta
        assert not error.any()
    torch.testing.assert_close(x, parameter.detach())


def test_the_error_stays_below_its_bound() -> None:
    generator = torch.Generator().manual_seed(3)
    error, delta, gamma, total, steps = zeros(8), 1 / 8, 0.1, 0.0, 400
    for _ in range(steps):
        _, error = errorfeedback.feed_back(gamma * normal(generator, 8), error, top_k(1))
        total += float((error**2).sum())
    assert total / steps < errorfeedback.error_bound(delta=delta, gamma=gamma, sigma=8**0.5)


def counterexample(worker: int, x: Tensor) -> Tensor:
    """f_i = <a_i, x>^2 + |x|^2 / 4 with a = (-3, 2, 2) and its rotations: from t (1, 1, 1) top-1
    picks three coordinates that all point uphill (arXiv 2002.12410, example 1)."""
    a = tensor([-3.0, 2.0, 2.0]).roll(worker)
    return 2 * (a @ x) * a + x / 2


def test_top_one_without_feedback_diverges_and_with_it_converges() -> None:
    start = torch.ones(3, dtype=FLOAT)
    plain, fed, errors = start, start, [zeros(3)] * 3
    for _ in range(400):
        plain = plain - 0.02 * mean([top_k(1)(counterexample(i, plain)) for i in range(3)])
        pairs = [
            errorfeedback.feed_back(0.02 * counterexample(i, fed), errors[i], top_k(1))
            for i in range(3)
        ]
        errors = [error for _, error in pairs]
        fed = errorfeedback.apply_mean(fed, [delta for delta, _ in pairs])
    assert torch.linalg.vector_norm(plain) > 10
    assert torch.linalg.vector_norm(fed) < 0.1


def test_biased_codecs_are_refused_unless_asked_for() -> None:
    require_unbiased("qsgd", unbiased=True, allow_no_ef=False, algorithm="diana")
    require_unbiased("top-k", unbiased=False, allow_no_ef=True, algorithm="diana")
    with pytest.raises(ConfigError, match="'top-k' is biased"):
        require_unbiased("top-k", unbiased=False, allow_no_ef=False, algorithm="diana")


# ---- EC-SGD-DIANA.


class EcSwarm:
    def __init__(self, x: Tensor, workers: int, *, gamma: float, alpha: float) -> None:
        self.x, self.h, self.gamma, self.alpha = x, torch.zeros_like(x), gamma, alpha
        self.states = [EcWorker(torch.zeros_like(x), torch.zeros_like(x))] * workers

    def step(self, grads: list[Tensor], compress: Any, quantize: Any) -> None:
        pairs = [
            errorfeedback.ec_diana_worker(
                state,
                grad,
                mean_shift=self.h,
                gamma=self.gamma,
                alpha=self.alpha,
                compress=compress,
                quantize=quantize,
            )
            for state, grad in zip(self.states, grads, strict=True)
        ]
        self.states = [state for _, state in pairs]
        self.x, self.h = errorfeedback.ec_diana_server(
            self.x, self.h, [message for message, _ in pairs], alpha=self.alpha
        )


@given(generator=generators(), n=workers_of)
def test_ec_diana_follows_the_uncompressed_path(generator: torch.Generator, n: int) -> None:
    start = normal(generator, 6)
    swarm, walked = EcSwarm(start, n, gamma=0.1, alpha=0.2), zeros(6)
    for _ in range(5):
        grads = list(normal(generator, n, 6))
        swarm.step(grads, top_k(1), rand_k(2, generator))
        walked = walked + 0.1 * mean(grads)
        errors = mean([state.error for state in swarm.states])
        torch.testing.assert_close(swarm.x - errors, start - walked)
        torch.testing.assert_close(swarm.h, mean([state.shift for state in swarm.states]))


def test_ec_diana_converges_linearly_where_ec_sgd_stalls() -> None:
    generator = torch.Generator().manual_seed(4)
    problem = Quadratics.random(generator, workers=4, numel=8)
    ends = {}
    for alpha in (0.0, 0.125):
        swarm = EcSwarm(zeros(8), 4, gamma=0.05, alpha=alpha)
        for _ in range(2500):
            swarm.step(problem.grads(swarm.x), top_k(1), rand_k(1, generator))
        ends[alpha] = float(torch.linalg.vector_norm(swarm.x - problem.optimum()))
    assert ends[0.125] < 1e-9
    assert ends[0.0] > 1e-4


# ---- DIANA.


@pytest.mark.parametrize("example", examples("diana*"), ids=named)
def test_the_golden_diana(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    x, alpha = tensor(inputs["x0"]), inputs["alpha"]
    shifts = [torch.zeros_like(x) for _ in problem.a]
    h = torch.zeros_like(x)
    for draws, step in zip(inputs["idx"], outputs["steps"], strict=True):
        pairs = [
            diana.diana_worker(grad, shift, alpha=alpha, quantize=chosen(draw))
            for grad, shift, draw in zip(problem.grads(x), shifts, draws, strict=True)
        ]
        messages, shifts = [m for m, _ in pairs], [h_i for _, h_i in pairs]
        estimate, h = diana.diana_server(h, messages, alpha=alpha)
        x = x - inputs["gamma"] * estimate
        close(torch.stack(messages), step["m"], atol)
        close(estimate, step["g_hat"], atol)
        close(torch.stack(shifts), step["h"], atol)
        close(x, step["x"], atol)
        torch.testing.assert_close(h, diana.mean_of_shifts(shifts))


@given(generator=generators(), n=workers_of, alpha=st.floats(0, 1))
def test_diana_with_an_exact_codec_is_gradient_descent(
    generator: torch.Generator, n: int, alpha: float
) -> None:
    shifts, h = list(normal(generator, n, 4)), None
    h = mean(shifts)
    for _ in range(3):
        grads = list(normal(generator, n, 4))
        pairs = [
            diana.diana_worker(grad, shift, alpha=alpha, quantize=identity)
            for grad, shift in zip(grads, shifts, strict=True)
        ]
        shifts = [shift for _, shift in pairs]
        estimate, h = diana.diana_server(h, [m for m, _ in pairs], alpha=alpha)
        torch.testing.assert_close(estimate, mean(grads))


def test_diana_is_unbiased_by_enumeration() -> None:
    """All draws of rand-1 of 3 for two workers, each equally likely."""
    generator = torch.Generator().manual_seed(5)
    grads, shifts = list(normal(generator, 2, 3)), list(normal(generator, 2, 3))
    estimates = []
    for draws in product(range(3), repeat=2):
        messages = [
            diana.diana_worker(g, h, alpha=0.3, quantize=chosen([draw]))[0]
            for g, h, draw in zip(grads, shifts, draws, strict=True)
        ]
        estimates.append(diana.diana_server(mean(shifts), messages, alpha=0.3)[0])
    torch.testing.assert_close(mean(estimates), mean(grads))


def run_diana(problem: Quadratics, quantize: Any, *, omega: float, steps: int) -> tuple[Any, ...]:
    n, d = problem.a.shape
    x, h, shifts = zeros(d), zeros(d), [zeros(d)] * n
    alpha = diana.diana_alpha(omega)
    for _ in range(steps):
        pairs = [
            diana.diana_worker(grad, shift, alpha=alpha, quantize=quantize)
            for grad, shift in zip(problem.grads(x), shifts, strict=True)
        ]
        shifts = [shift for _, shift in pairs]
        estimate, h = diana.diana_server(h, [m for m, _ in pairs], alpha=alpha)
        x = x - 0.1 * estimate
    return x, shifts


@pytest.mark.parametrize("name", ["rand-1", "qsgd"])
def test_diana_reaches_the_exact_optimum_of_different_functions(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    problem = Quadratics.random(generator, workers=4, numel=6)
    quantize, omega = {
        "rand-1": (rand_k(1, generator), 5.0),
        "qsgd": (qsgd(2, generator), 6**0.5 / 2),
    }[name]
    x, shifts = run_diana(problem, quantize, omega=omega, steps=1500)
    torch.testing.assert_close(x, problem.optimum(), atol=1e-9, rtol=0)
    for shift, grad in zip(shifts, problem.grads(problem.optimum()), strict=True):
        torch.testing.assert_close(shift, grad, atol=1e-8, rtol=0)


def test_vr_diana_reaches_it_with_one_sample_per_step() -> None:
    """Each worker has 3 samples with optima of their own around b_i."""
    generator = torch.Generator().manual_seed(7)
    problem = Quadratics.random(generator, workers=3, numel=4)
    spread = normal(generator, 3, 3, 4)
    spread = spread - spread.mean(1, keepdim=True)

    def sample_grad(worker: int, j: int, x: Tensor) -> Tensor:
        return problem.grad(worker, x) + spread[worker, j]

    x, h, shifts = zeros(4), zeros(4), [zeros(4)] * 3
    points = [diana.Snapshot(x, problem.grad(i, x)) for i in range(3)]
    alpha, quantize = diana.diana_alpha(1.0), rand_k(2, generator)
    for _ in range(1200):
        messages = []
        for i in range(3):
            j = int(torch.randint(3, (), generator=generator))
            grad = diana.lsvrg_gradient(
                sample_grad(i, j, x), sample_grad(i, j, points[i].point), points[i]
            )
            message, shifts[i] = diana.diana_worker(grad, shifts[i], alpha=alpha, quantize=quantize)
            messages.append(message)
            coin = bool(torch.rand((), generator=generator) < 1 / 3)
            points[i] = diana.lsvrg_refresh(
                points[i], x, coin=coin, full_gradient=lambda x, i=i: problem.grad(i, x)
            )
        estimate, h = diana.diana_server(h, messages, alpha=alpha)
        x = x - 0.1 * estimate
    torch.testing.assert_close(x, problem.optimum(), atol=1e-8, rtol=0)


def test_diana_formulas() -> None:
    assert diana.diana_alpha(3.0) == 0.25
    plain = diana.diana_gamma(smoothness=2.0, omega=3.0, workers=3)
    assert plain == pytest.approx(1 / (20 * 2**0.5 * 5))
    assert diana.diana_gamma(smoothness=2.0, omega=3.0, workers=3, samples=8) < plain


# ---- ADIANA.


def run_adiana(
    problem: Quadratics, quantize: Any, *, omega: float, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, list[Tensor]]:
    n, d = problem.a.shape
    chance = min(1.0, 1 / (1 + omega))
    mu, smooth = float(problem.a.min()), float(problem.a.max())
    eta = 1 / (2 * smooth * (1 + 4 * omega / n))
    plan = diana.adiana_steps(eta=eta, mu=mu, chance=chance, omega=omega)
    state, shifts = diana.adiana_start(zeros(d)), [zeros(d)] * n
    for _ in range(steps):
        x = diana.adiana_point(state, plan)
        sent = [
            diana.adiana_worker(gx, gw, shift, alpha=plan.alpha, quantize=quantize)
            for gx, gw, shift in zip(problem.grads(x), problem.grads(state.w), shifts, strict=True)
        ]
        shifts = [shift for _, _, shift in sent]
        move = bool(torch.rand((), generator=generator) < chance)
        state = diana.adiana_server(
            state, x, [a for a, _, _ in sent], [b for _, b, _ in sent], steps=plan, move=move
        )
    return state.y, state.shift, shifts


@pytest.mark.parametrize("omega", [0.0, 2.0])
def test_adiana_reaches_the_exact_optimum(omega: float) -> None:
    generator = torch.Generator().manual_seed(8)
    problem = Quadratics.random(generator, workers=4, numel=6)
    quantize = rand_k(2, generator) if omega else identity
    y, h, shifts = run_adiana(problem, quantize, omega=omega, steps=1500, generator=generator)
    torch.testing.assert_close(y, problem.optimum(), atol=1e-9, rtol=0)
    torch.testing.assert_close(h, mean(shifts))
    for shift, grad in zip(shifts, problem.grads(problem.optimum()), strict=True):
        torch.testing.assert_close(shift, grad, atol=1e-7, rtol=0)


def test_adiana_beats_diana_on_a_badly_conditioned_problem() -> None:
    a = torch.logspace(-3, 0, 8, dtype=FLOAT).repeat(3, 1)
    problem = Quadratics(a, normal(torch.Generator().manual_seed(9), 3, 8))
    generator = torch.Generator().manual_seed(10)
    y, _, _ = run_adiana(problem, identity, omega=0.0, steps=800, generator=generator)
    plain = zeros(8)
    for _ in range(800):
        plain = plain - mean(problem.grads(plain))
    accelerated = torch.linalg.vector_norm(y - problem.optimum())
    assert accelerated < 0.1 * torch.linalg.vector_norm(plain - problem.optimum())


# ---- MARINA.


def test_the_coin_is_shared_and_fair() -> None:
    flips = [marina.coin(3, k, chance=0.25) for k in range(1, 4001)]
    assert flips == [marina.coin(3, k, chance=0.25) for k in range(1, 4001)]
    assert abs(sum(flips) / len(flips) - 0.25) < 0.03
    assert flips != [marina.coin(4, k, chance=0.25) for k in range(1, 4001)]
    assert all(marina.coin(3, k, chance=1.0) for k in range(50))
    assert not any(marina.coin(3, k, chance=0.0) for k in range(1, 50))
    assert marina.coin(3, 0, chance=0.0), "the start is dense"


def run_marina(
    problem: Quadratics, quantize: Any, *, omega: float, steps: int, sampled: int | None = None
) -> Tensor:
    n, d = problem.a.shape
    generator = torch.Generator().manual_seed(1)
    chance = marina.marina_chance(omega)
    gamma = marina.marina_gamma(
        smoothness=float(problem.a.max()), omega=omega, workers=sampled or n, chance=chance
    )
    if sampled:
        gamma /= 3
    x, g, before = zeros(d), None, [None] * n
    for k in range(steps):
        heads = marina.coin(7, k, chance=chance)
        grads = problem.grads(x)
        who = list(range(n))
        if sampled and not heads:
            who = torch.randint(n, (sampled,), generator=generator).tolist()
        messages = [
            marina.marina_message(grads[i], before[i], heads=heads, quantize=quantize) for i in who
        ]
        g = marina.marina_estimate(g, messages, heads=heads)
        if heads:
            torch.testing.assert_close(g, mean(grads))
        x, before = marina.marina_step(x, g, gamma=gamma), grads
    return x


@pytest.mark.parametrize("sampled", [None, 2])
def test_marina_reaches_the_exact_optimum(sampled: int | None) -> None:
    generator = torch.Generator().manual_seed(11)
    problem = Quadratics.random(generator, workers=4, numel=6)
    x = run_marina(problem, rand_k(2, generator), omega=2.0, steps=800, sampled=sampled)
    torch.testing.assert_close(x, problem.optimum(), atol=1e-8, rtol=0)


@given(generator=generators(), n=workers_of)
@settings(max_examples=30)
def test_marina_with_an_exact_codec_is_gradient_descent(generator: torch.Generator, n: int) -> None:
    problem = Quadratics.random(generator, workers=n, numel=4)
    x, g, before = normal(generator, 4), None, [None] * n
    for k in range(6):
        heads = k in (0, 3)
        grads = problem.grads(x)
        messages = [
            marina.marina_message(grad, last, heads=heads, quantize=identity)
            for grad, last in zip(grads, before, strict=True)
        ]
        g = marina.marina_estimate(g, messages, heads=heads)
        torch.testing.assert_close(g, mean(grads))
        x, before = marina.marina_step(x, g, gamma=0.2), grads


def test_who_missed_a_tails_round_waits_for_heads() -> None:
    assert marina.may_apply(last_applied=4, round_number=5, heads=False)
    assert not marina.may_apply(last_applied=3, round_number=5, heads=False)
    assert marina.may_apply(last_applied=3, round_number=6, heads=True)
    with pytest.raises(LocalProtocolError, match="wait for a heads round"):
        marina.marina_estimate(None, [tensor([1.0])], heads=False)
    with pytest.raises(LocalProtocolError, match="gradient at the last point"):
        marina.marina_message(tensor([1.0]), None, heads=False, quantize=identity)


def test_marina_formulas() -> None:
    assert marina.marina_chance(3.0) == 0.25
    assert marina.marina_chance(3.0, batch=1, samples=9) == pytest.approx(0.1)
    gamma = marina.marina_gamma(smoothness=2.0, omega=3.0, workers=9, chance=0.25)
    assert gamma == pytest.approx(1 / (2 * (1 + 3 / 3)))
    assert marina.expected_floats(100, coded=10, chance=0.25) == 32.5
