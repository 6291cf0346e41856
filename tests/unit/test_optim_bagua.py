"""BAGUA's cube as shipped: worked examples, all eight cells train, async cells lose no update, and
replicas that must be equal are."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
import torch
from torch import nn

from moshpitd.client.optim.bagua import CUBE, AsyncModelAverage
from moshpitd.client.optim.registry import by_name
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.tensors.rules import bagua
from moshpitd.testing import ArithmeticSwarm
from moshpitd.testing.coding import Cut
from tests.kit.rules import Quadratics, close, dtype_of, examples, named, normal, tensor
from tests.kit.trainers import Team


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_cube_is_complete_and_named_as_in_the_rules() -> None:
    assert set(CUBE) == set(bagua.CELLS)
    for name, kind in CUBE.items():
        cell = bagua.CELLS[name]
        assert kind.replicated == (cell.centralized and cell.synchronous)


@pytest.mark.parametrize("name", list(CUBE))
def test_every_cell_trains(name: str) -> None:
    problem = Quadratics.random(draws(), workers=4, numel=64)
    a, b = problem.a.float(), problem.b.float()
    options: dict[str, Any] = {"every": 2, "delay": 1} if "average" in name else {}
    team = Team(ArithmeticSwarm(4), name, [torch.zeros(64)] * 4, lr=0.3, **options)
    for trainer in team.trainers:
        if hasattr(trainer.optimizer, "start"):
            trainer.optimizer.start()

    def play(peer: int) -> None:
        for k in range(120):
            team.trainers[peer].optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 10)
            team.trainers[peer].step(lambda i, k, x: a[i] * (x - b[i]))

    if name == "async-decentralized":  # nobody waits for anybody: one order of events of many
        for k in range(120):
            for trainer in team.trainers:
                trainer.optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 10)
                trainer.step(lambda i, k, x: a[i] * (x - b[i]))
    else:
        team.swarm.play(play)
    off = (team.mean - problem.optimum().float()).norm() / problem.optimum().norm()
    assert off < 0.06
    if CUBE[name].replicated:
        assert team.equal()


# ---- Centralized, synchronous.


@pytest.mark.parametrize("example", examples("bytegrad*"), ids=named)
def test_the_golden_bytegrad(example: dict[str, Any]) -> None:
    values, outputs = tensor(example["inputs"]["X"], torch.float32), example["outputs"]
    n = len(values)
    for name, codec, key in (
        ("bytegrad", "bagua-minmax-uint8", "result"),
        ("gradient-allreduce", "float32", "exact_mean"),
    ):
        swarm = ArithmeticSwarm(n, cut=Cut.BAGUA)
        start = torch.zeros(values.shape[1])
        team = Team(swarm, name, [start] * n, lr=1.0, codec=codec)
        team.step(lambda i, k, x: values[i])
        for x in team.xs:
            close(-x, outputs[key], example["atol"])


def test_mean_gradients_through_any_torch_optimizer_are_minibatch() -> None:
    grads, start = normal(draws(1), 6, 3, 5), normal(draws(), 5)
    team = Team(
        ArithmeticSwarm(3), "gradient-allreduce", [start] * 3, inner=torch.optim.AdamW, lr=0.1
    )
    twin = nn.Parameter(start.clone())
    adam = torch.optim.AdamW([twin], lr=0.1)
    for k in range(6):
        twin.grad = grads[k].mean(0)
        adam.step()
    team.step(lambda i, k, x: grads[k][i], steps=6)
    for x in team.xs:
        torch.testing.assert_close(x, twin.detach())
    assert team.equal()


def test_samples_are_weights() -> None:
    team = Team(ArithmeticSwarm(2), "gradient-allreduce", [torch.zeros(1).double()] * 2, lr=1.0)
    team.trainers[1].optimizer.samples = 3  # type: ignore[attr-defined]
    team.step(lambda i, k, x: torch.full_like(x, float(4 * i)))
    assert [x.item() for x in team.xs] == [-3.0, -3.0]


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam])
def test_a_newcomer_without_state_gets_the_others_momentum_too(inner: Any) -> None:
    swarm, grads = ArithmeticSwarm(3), normal(draws(2), 60, 3, 5).float()
    options = {"momentum": 0.9} if inner is torch.optim.SGD else {}
    team = Team(
        swarm, "bytegrad", [torch.ones(5)] * 3, inner=inner, lr=0.05, check_every=10, **options
    )
    team.step(lambda i, k, x: grads[k][i], steps=13, peers=[0, 2])

    def play(peer: int) -> None:
        trainer = team.trainers[peer]
        if peer == 1:
            while not trainer.optimizer.catch_up():  # type: ignore[attr-defined]
                pass
            trainer.steps = 20
        while trainer.steps < 33:
            trainer.step(lambda i, k, x: grads[k][i])

    swarm.play(play)
    assert team.equal()
    assert team.trainers[1].optimizer.resyncs == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["bytegrad", "qsgd", "qadam", "gradient-allreduce"])
def test_a_part_that_one_peer_did_not_get_is_healed(name: str) -> None:
    swarm, grads = ArithmeticSwarm(3), normal(draws(3), 60, 3, 6).float()
    team = Team(swarm, name, [torch.ones(6)] * 3, lr=0.05, check_every=50)
    channel = "warm" if name == "qadam" else "gradient"
    swarm.lose_result(f"{name}.{channel}", round=20, peer=1, tensors=["0.0"])
    team.step(lambda i, k, x: grads[k][i], steps=49)
    assert not team.equal()
    team.step(lambda i, k, x: grads[k][i])
    assert team.equal()


@pytest.mark.parametrize("name", ["gradient-allreduce", "qsgd", "nuqsgd"])
def test_biased_codecs_without_feedback_are_refused_unless_asked_for(name: str) -> None:
    x, peer = [nn.Parameter(torch.zeros(2))], ArithmeticSwarm(1).peer(0)
    with pytest.raises(ConfigError, match="'top-k' is biased"):
        by_name(name, x, peer, codec="top-k")
    by_name(name, x, peer, codec="top-k", feedback=True)
    by_name(name, x, peer, codec="top-k", allow_no_ef=True)


# ---- QAdam.


@pytest.mark.parametrize("example", examples("bagua_qadam*"), ids=named)
def test_the_golden_qadam(example: dict[str, Any]) -> None:
    inputs, atol, dtype = example["inputs"], example["atol"], dtype_of(example)
    grads, n = tensor(inputs["grads"], dtype), inputs["n"]
    team = Team(
        ArithmeticSwarm(n, cut=Cut.BAGUA), "qadam", [tensor(inputs["x0"], dtype)] * n,
        lr=inputs["lr"], betas=tuple(inputs["betas"]), eps=inputs["eps"],
        warmup_steps=inputs["warmup_steps"], codec="bagua-minmax-uint8",
    )  # fmt: skip
    for k, expected in enumerate(example["outputs"]["steps"]):
        team.step(lambda i, _, x, k=k: grads[k][i])
        for trainer, x in zip(team.trainers, team.xs, strict=True):
            state = trainer.optimizer.state[trainer.x]
            close(state["exp_avg"], expected["m"], atol)
            close(state["exp_avg_sq"], expected["v"], atol)
            close(x, expected["x"], atol)
    assert team.equal()


def test_qadam_needs_a_warm_up() -> None:
    with pytest.raises(ConfigError, match="warmup_steps"):
        by_name("qadam", [nn.Parameter(torch.zeros(1))], ArithmeticSwarm(1).peer(0), warmup_steps=0)


# ---- Asynchronous averages.


@pytest.mark.parametrize("name", ["async-model-average", "async-low-precision-average"])
def test_async_averages_lose_no_local_update(name: str) -> None:
    """mean(x) = mean(x0) - lr mean(all gradients), whatever was in flight when."""
    n, grads = 4, normal(draws(4), 20, 4, 6).float()
    starts = list(normal(draws(), n, 6).float())
    swarm = ArithmeticSwarm(n)
    team = Team(swarm, name, starts, lr=0.1, every=3, delay=2)
    before = team.mean
    team.step(lambda i, k, x: grads[k][i], steps=20)
    swarm.play(lambda peer: team.trainers[peer].optimizer.land())  # type: ignore[attr-defined]
    landed = [t.optimizer.landed for t in team.trainers]  # type: ignore[attr-defined]
    assert landed == [6] * n
    moved = 0.1 * grads.mean(1).sum(0)
    exact = name == "async-model-average"
    # With 8 bits what is owed is still owed; it is no more than the codec's last rounding.
    torch.testing.assert_close(
        team.mean, before - moved, atol=1e-5 if exact else 0.02, rtol=0 if not exact else 1e-5
    )


def test_without_steps_in_between_it_is_exact_averaging() -> None:
    starts = list(normal(draws(), 3, 6))
    team = Team(ArithmeticSwarm(3), "async-model-average", starts, lr=0.1, every=1, delay=0)
    team.step(lambda i, k, x: torch.zeros_like(x))
    for x in team.xs:
        torch.testing.assert_close(x, torch.stack(starts).mean(0))


def test_its_warm_up_is_synchronous_and_a_peer_may_leave_any_time() -> None:
    grads, start = normal(draws(5), 20, 3, 4), normal(draws(), 4)
    swarm = ArithmeticSwarm(3)
    team = Team(swarm, "async-model-average", [start] * 3, lr=0.1, every=2, delay=1, warmup_steps=5)
    team.step(lambda i, k, x: grads[k][i], steps=5)
    torch.testing.assert_close(team.xs[0], start - 0.1 * grads[:5].mean(1).sum(0))
    assert team.equal()
    team.step(lambda i, k, x: grads[k][i], steps=4)
    before, landed = team.mean, team.trainers[0].optimizer.landed  # type: ignore[attr-defined]
    assert landed > 0
    team.step(lambda i, k, x: torch.zeros_like(x), steps=4, peers=[0, 1])
    assert team.trainers[0].optimizer.landed > landed  # type: ignore[attr-defined]
    assert torch.isfinite(before).all()


def test_async_checkpoints() -> None:
    swarm = ArithmeticSwarm(1)
    team = Team(
        swarm, "async-low-precision-average", [torch.ones(4)], lr=0.1, momentum=0.9, every=1
    )
    team.step(lambda i, k, x: x, steps=3)
    room = io.BytesIO()
    torch.save(team.trainers[0].optimizer.state_dict(), room)
    room.seek(0)
    other = Team(swarm, "async-low-precision-average", team.xs, lr=5.0, momentum=0.0, every=1)
    other.trainers[0].optimizer.load_state_dict(torch.load(room, weights_only=True))
    assert other.trainers[0].optimizer.param_groups[0]["momentum"] == 0.9
    assert other.trainers[0].optimizer.steps == 3
    other.step(lambda i, k, x: x)
    with pytest.raises(TrainerError, match="every 0"):
        AsyncModelAverage([nn.Parameter(torch.zeros(1))], swarm.peer(0), every=0, lr=0.1)


def test_who_missed_whole_updates_notices_in_the_next_and_counts_on_with_the_others() -> None:
    team = Team(
        ArithmeticSwarm(3), "gradient-allreduce", [torch.zeros(4)] * 3, lr=0.1, check_every=10
    )
    gradient = lambda i, k, x: x - i  # noqa: E731
    team.step(gradient, steps=2)
    team.step(gradient, steps=3, peers=[0, 2])
    optimizers: list[Any] = [trainer.optimizer for trainer in team.trainers]
    assert [(o.version, o.current) for o in optimizers] == [(5, True), (2, True), (5, True)]
    team.step(gradient)
    assert [(o.version, o.current) for o in optimizers] == [(6, True), (6, False), (6, True)]
    assert not team.equal()
    team.step(gradient, steps=4)
    assert team.equal(), "all compared at update 10"
    assert [o.resyncs for o in optimizers] == [0, 1, 0]


def test_who_meets_nobody_any_more_waits_where_the_others_compare() -> None:
    swarm = ArithmeticSwarm(3)
    team = Team(swarm, "gradient-allreduce", [torch.zeros(4)] * 3, lr=0.1, check_every=10)
    gradient = lambda i, k, x: x - i  # noqa: E731
    team.step(gradient, steps=2)
    swarm.lose_contribution("gradient-allreduce.gradient", round=2, peer=1)
    team.step(gradient, peers=[1])  # a round of its own, with nobody in it

    def play(peer: int) -> None:
        trainer, optimizer = team.trainers[peer], cast(Any, team.trainers[peer].optimizer)
        while optimizer.version < 20:
            trainer.step(gradient)

    swarm.lose_contribution("gradient-allreduce.gradient", round=3, peer=1)
    swarm.play(play)
    found: Any = team.trainers[1].optimizer
    assert found.missed >= 1
    assert found.resyncs == 1
    assert team.equal()
