"""EF-SignSGD, EC-SGD(-DIANA), DIANA, VR-DIANA, ADIANA, MARINA as shipped: worked examples, paths
that telescope, and the exact optimum of functions that differ."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client.optim.registry import by_name
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.testing import ArithmeticSwarm
from moshpitd.testing.coding import Cut, Draw
from tests.kit.rules import FLOAT, Quadratics, chosen, close, examples, named, normal, tensor, top_k
from tests.kit.trainers import SIGNS, Team


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rand_k(k: int) -> Any:
    """rand-k in float64 from the draw's seed."""

    def code(values: Tensor, draw: Draw) -> Tensor:
        generator = torch.Generator().manual_seed(draw.seed % 2**62)
        return chosen(torch.randperm(values.numel(), generator=generator)[:k].tolist())(values)

    return code


def swarm_of(n: int, seed: int = 0, k: int = 2) -> ArithmeticSwarm:
    coders = {**SIGNS, "top-k": lambda values, draw: top_k(1)(values), "natural": rand_k(k)}
    return ArithmeticSwarm(n, seed=seed, cut=Cut.TENSORS, coders=coders)


# ---- Error feedback.


@pytest.mark.parametrize("example", examples("ef_sgd*"), ids=named)
@pytest.mark.parametrize("two_sided", [False, True])
def test_the_golden_ef_sgd(example: dict[str, Any], two_sided: bool) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    for key, steps in outputs.items():
        name = "ef-signsgd" if key == "scaled_sign" else "ec-sgd"
        coders = dict(SIGNS)
        if key.startswith("top"):
            coders["top-k"] = lambda values, draw, key=key: top_k(int(key[3:]))(values)
        swarm = ArithmeticSwarm(1, cut=Cut.TENSORS, coders=coders)
        team = Team(swarm, name, [tensor(inputs["x0"])], lr=inputs["gamma"], two_sided=two_sided)
        for k, step in enumerate(steps):
            team.step(lambda i, _, x, k=k: tensor(inputs["grads"][k]))
            error = swarm.average(f"{name}.step").debts[0].sender["float64"]
            close(error, step["e"], atol)
            close(team.xs[0], step["x"], atol)


@pytest.mark.parametrize("name", ["ef-signsgd", "ec-sgd", "ec-sgd-diana"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_x_minus_the_errors_is_plain_sgd_also_when_lr_changes(name: str, two_sided: bool) -> None:
    n, grads, start = 3, normal(draws(1), 12, 3, 6), normal(draws(), 6)
    swarm = swarm_of(n)
    team = Team(swarm, name, [start] * n, lr=0.2, two_sided=two_sided)
    walked = start.clone()
    for k in range(12):
        lr = 0.2 / (1 + k)
        for trainer in team.trainers:
            trainer.optimizer.param_groups[0]["lr"] = lr
        team.step(lambda i, _, x, k=k: grads[k][i])
        walked = walked - lr * grads[k].mean(0)
        debts = swarm.average(f"{name}.step").debts
        owed = torch.stack([debts[i].sender["float64"] for i in range(n)]).mean(0)
        for debt in debts.values():
            for errors in debt.server.values():
                for begin, piece in errors.items():
                    owed[begin : begin + piece.numel()] += piece
        assert team.equal()
        torch.testing.assert_close(team.xs[0] - owed, walked)


def test_with_an_exact_codec_it_is_torch_s_sgd() -> None:
    grads, start = normal(draws(1), 6, 3, 5), normal(draws(), 5)
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    team = Team(swarm_of(3), "ec-sgd", [start] * 3, lr=0.1, codec="float32", **options)
    twin = nn.Parameter(start.clone())
    sgd = torch.optim.SGD([twin], lr=0.1, **options)
    for k in range(6):
        twin.grad = grads[k].mean(0)
        sgd.step()
    team.step(lambda i, k, x: grads[k][i], steps=6)
    torch.testing.assert_close(team.xs[0], twin.detach())


def counterexample(worker: int, x: Tensor) -> Tensor:
    a = tensor([-3.0, 2.0, 2.0]).roll(worker)
    return 2 * (a @ x) * a + x / 2


def test_top_one_diverges_without_feedback_and_converges_with_it() -> None:
    ends = {}
    for name, options in (
        ("ec-sgd", {"two_sided": False}),
        ("gradient-allreduce", {"codec": "top-k", "allow_no_ef": True}),
    ):
        swarm = swarm_of(3)
        team = Team(swarm, name, [torch.ones(3, dtype=FLOAT)] * 3, lr=0.02, **options)
        if name == "gradient-allreduce":  # the mean comes back exactly in the counterexample
            for trainer in team.trainers:
                trainer.optimizer._coding = type(trainer.optimizer._coding)(  # type: ignore[attr-defined]
                    "top-k", result="float32"
                )
        team.step(lambda i, k, x: counterexample(i, x), steps=400)
        ends[name] = float(team.xs[0].norm())
    assert ends["ec-sgd"] < 0.1
    assert ends["gradient-allreduce"] > 10


def test_ec_diana_reaches_the_exact_optimum_where_ec_sgd_stalls() -> None:
    problem = Quadratics.random(draws(4), workers=4, numel=8)
    ends = {}
    for name, options in (
        ("ec-sgd", {"two_sided": False}),
        ("ec-sgd-diana", {"alpha": 0.125}),
    ):
        team = Team(swarm_of(4, k=1), name, [torch.zeros(8, dtype=FLOAT)] * 4, lr=0.05, **options)
        team.step(lambda i, k, x: problem.grad(i, x), steps=1200)
        ends[name] = float((team.xs[0] - problem.optimum()).norm())
    assert ends["ec-sgd-diana"] < 1e-6
    assert ends["ec-sgd"] > 1e-4


# ---- DIANA and its relatives.


@pytest.mark.parametrize("example", examples("diana*"), ids=named)
def test_the_golden_diana(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    n = len(problem.a)
    stored = {"natural": lambda values, d: chosen(inputs["idx"][d.round][d.peer])(values)}
    swarm = ArithmeticSwarm(n, cut=Cut.TENSORS, coders=stored)
    team = Team(
        swarm, "diana", [tensor(inputs["x0"])] * n, lr=inputs["gamma"], alpha=inputs["alpha"]
    )
    for step in outputs["steps"]:
        team.step(lambda i, k, x: problem.grad(i, x))
        states = [trainer.optimizer.state[trainer.x] for trainer in team.trainers]
        close(torch.stack([state["shift"] for state in states]), step["h"], atol)
        close(team.xs[0], step["x"], atol)
        torch.testing.assert_close(
            states[0]["mean_shift"], torch.stack([state["shift"] for state in states]).mean(0)
        )
    assert team.equal()


def test_diana_reaches_the_exact_optimum_also_when_the_group_changes() -> None:
    problem = Quadratics.random(draws(6), workers=4, numel=6)
    team = Team(swarm_of(4), "diana", [torch.zeros(6, dtype=FLOAT)] * 4, lr=0.1, alpha=1 / 3)
    team.step(lambda i, k, x: problem.grad(i, x), steps=60)
    team.step(lambda i, k, x: problem.grad(i, x), steps=40, peers=[0, 1, 3])
    three = [0, 1, 3]
    states = [team.trainers[i].optimizer.state[team.trainers[i].x] for i in three]
    torch.testing.assert_close(
        states[0]["mean_shift"], torch.stack([state["shift"] for state in states]).mean(0)
    )
    team.step(lambda i, k, x: problem.grad(i, x), steps=700, peers=three)
    a, b = problem.a[three], problem.b[three]
    torch.testing.assert_close(team.xs[0], (a * b).sum(0) / a.sum(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["diana", "ec-sgd-diana"])
def test_h_is_the_mean_of_all_shifts_after_a_peer_came_back_without_its_own(name: str) -> None:
    """And by the weights that its messages count with; else every step after it is biased."""
    problem = Quadratics.random(draws(6), workers=3, numel=6)
    team = Team(
        swarm_of(3), name, [torch.zeros(6, dtype=FLOAT)] * 3, lr=0.05, alpha=1 / 3, check_every=5
    )
    weights = (1, 2, 5)

    def weigh() -> None:
        for trainer, weight in zip(team.trainers, weights, strict=True):
            trainer.optimizer.samples = weight  # type: ignore[attr-defined]

    weigh()
    team.step(lambda i, k, x: problem.grad(i, x), steps=20)
    team.step(lambda i, k, x: problem.grad(i, x), steps=10, peers=[0, 1])
    team.trainers[2] = team.trainer(2, torch.ones(6, dtype=FLOAT))
    weigh()

    def play(peer: int) -> None:
        trainer = team.trainers[peer]
        if peer == 2:
            while not trainer.optimizer.catch_up():  # type: ignore[attr-defined]
                pass
        while trainer.optimizer.version < 60:  # type: ignore[attr-defined]
            trainer.step(lambda i, k, x: problem.grad(i, x))

    team.swarm.play(play)
    assert team.equal()
    states = [trainer.optimizer.state[trainer.x] for trainer in team.trainers]
    shifts = torch.stack([state["shift"] for state in states])
    wanted = (shifts * tensor(weights)[:, None]).sum(0) / sum(weights)
    for state in states:
        torch.testing.assert_close(state["mean_shift"], wanted)


def closure_of(x: nn.Parameter, gradient: Any) -> Any:
    def closure() -> float:
        x.grad = gradient(x.detach()).clone()
        return 0.0

    return closure


def test_vr_diana_reaches_it_with_one_sample_a_step() -> None:
    problem = Quadratics.random(draws(7), workers=3, numel=4)
    spread = normal(draws(8), 3, 3, 4)
    spread = spread - spread.mean(1, keepdim=True)
    swarm = swarm_of(3)
    xs = [nn.Parameter(torch.zeros(4, dtype=FLOAT)) for _ in range(3)]
    optimizers = [
        by_name(
            "vr-diana", [x], swarm.peer(i), lr=0.1, alpha=0.5, refresh=1 / 3, seed=i,
            full_gradient=closure_of(x, lambda at, i=i: problem.grad(i, at)),
        )
        for i, x in enumerate(xs)
    ]  # fmt: skip

    def play(peer: int) -> None:
        samples = draws(100 + peer)
        for _ in range(500):
            j = int(torch.randint(3, (), generator=samples))
            gradient = lambda at, j=j: problem.grad(peer, at) + spread[peer, j]  # noqa: E731
            optimizers[peer].step(closure_of(xs[peer], gradient))

    swarm.play(play)
    for x in xs:
        torch.testing.assert_close(x.detach(), problem.optimum(), atol=1e-5, rtol=0)
    with pytest.raises(TrainerError, match=r"needs step\(closure\)"):
        optimizers[0].step()


def test_adiana_reaches_it_too() -> None:
    problem = Quadratics.random(draws(8), workers=4, numel=6)
    mu, smooth, omega = float(problem.a.min()), float(problem.a.max()), 2.0
    eta = 1 / (2 * smooth * (1 + 4 * omega / 4))
    swarm = swarm_of(4)
    xs = [nn.Parameter(torch.zeros(6, dtype=FLOAT)) for _ in range(4)]
    optimizers = [
        by_name("adiana", [x], swarm.peer(i), eta=eta, mu=mu, chance=1 / 3)
        for i, x in enumerate(xs)
    ]
    for optimizer in optimizers:
        optimizer._shifts._alpha = 1 / 3  # type: ignore[attr-defined]  # of rand-2 of 6

    def play(peer: int) -> None:
        for _ in range(500):
            gradient = lambda at: problem.grad(peer, at)  # noqa: E731
            optimizers[peer].step(closure_of(xs[peer], gradient))
        optimizers[peer].solution()  # type: ignore[attr-defined]

    swarm.play(play)
    for x in xs:
        torch.testing.assert_close(x.detach(), problem.optimum(), atol=1e-5, rtol=0)


# ---- MARINA.


@pytest.mark.parametrize("name", ["marina", "pp-marina"])
def test_marina_reaches_the_exact_optimum(name: str) -> None:
    problem = Quadratics.random(draws(9), workers=4, numel=6)
    team = Team(swarm_of(4), name, [torch.zeros(6, dtype=FLOAT)] * 4, lr=0.1, chance=0.3)
    if name == "pp-marina":
        for trainer in team.trainers:
            trainer.optimizer.draw_from(trainer.peer)  # type: ignore[attr-defined]
    team.step(lambda i, k, x: problem.grad(i, x), steps=500)
    assert team.equal()
    torch.testing.assert_close(team.xs[0], problem.optimum(), atol=1e-7, rtol=0)


def test_exact_marina_is_gradient_descent() -> None:
    problem, start = Quadratics.random(draws(9), workers=3, numel=4), normal(draws(), 4)
    team = Team(swarm_of(3), "marina", [start] * 3, lr=0.1, codec="float32", chance=0.3)
    x = start
    for _ in range(10):
        x = x - 0.1 * torch.stack(problem.grads(x)).mean(0)
    team.step(lambda i, k, x: problem.grad(i, x), steps=10)
    torch.testing.assert_close(team.xs[0], x)


def test_a_missed_difference_is_healed_at_the_next_full_round() -> None:
    problem = Quadratics.random(draws(9), workers=3, numel=4)
    swarm = swarm_of(3)
    team = Team(swarm, "marina", [torch.zeros(4, dtype=FLOAT)] * 3, lr=0.1, chance=0.2, seed=1)
    optimizer = team.trainers[0].optimizer
    heads = [k for k in range(40) if optimizer.heads(k)]  # type: ignore[attr-defined]
    after = next(k for k in heads[1:] if not optimizer.heads(k - 1))  # type: ignore[attr-defined]
    tails = after - 1 - sum(k < after for k in heads)  # number of that difference round
    swarm.lose_result("marina.difference", round=tails, peer=2, tensors=["0.0"])
    team.step(lambda i, k, x: problem.grad(i, x), steps=after)
    assert not team.equal()
    team.step(lambda i, k, x: problem.grad(i, x))
    assert team.equal()


@pytest.mark.parametrize("name", ["diana", "marina", "adiana", "ec-sgd-diana"])
def test_biased_codecs_are_refused(name: str) -> None:
    x, peer = [nn.Parameter(torch.zeros(2))], ArithmeticSwarm(1).peer(0)
    options: dict[str, Any] = {"eta": 0.1, "mu": 0.1} if name == "adiana" else {}
    key = "shift_codec" if name == "ec-sgd-diana" else "codec"
    with pytest.raises(ConfigError, match="'top-k' is biased"):
        by_name(name, x, peer, **options, **{key: "top-k"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ef-signsgd", {}),
        ("ec-sgd", {"codec": "int8"}),
        ("ec-sgd-diana", {"codec": "sign-l1"}),
        ("diana", {"codec": "qsgd"}),
        ("marina", {"codec": "qsgd", "chance": 0.3}),
    ],
)
def test_with_the_codecs_of_the_wire_and_over_a_checkpoint(
    name: str, options: dict[str, Any]
) -> None:
    problem = Quadratics.random(draws(2), workers=3, numel=64)
    a, b = problem.a.float(), problem.b.float()
    team = Team(ArithmeticSwarm(3), name, [torch.zeros(64)] * 3, lr=0.1, **options)
    team.step(lambda i, k, x: a[i] * (x - b[i]), steps=40)
    fresh = Team(ArithmeticSwarm(3, seed=1), name, team.xs, lr=9.0, **options)
    for old, new in zip(team.trainers, fresh.trainers, strict=True):
        room = io.BytesIO()
        torch.save(old.optimizer.state_dict(), room)
        room.seek(0)
        new.optimizer.load_state_dict(torch.load(room, weights_only=True))
    fresh.step(lambda i, k, x: a[i] * (x - b[i]), steps=80)
    assert fresh.equal()
    off = (fresh.xs[0] - problem.optimum().float()).norm() / problem.optimum().norm()
    assert off < (0.2 if "sign" in name or "sign-l1" in options.values() else 0.02)
