"""D-PSGD, gossip, push-sum and AD-PSGD as shipped: the worked examples, and where the mean goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client.optim.registry import by_name
from moshpitd.core.mixing import EdgeMixing, circulant
from moshpitd.core.topologies import OnePeerExponential
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.tensors.rules import dpsgd
from moshpitd.testing.arithmetic import ArithmeticSwarm
from tests.kit.rules import FLOAT, Quadratics, close, examples, named, normal, tensor
from tests.kit.trainers import Fixed, Team


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("example", examples("dpsgd*"), ids=named)
@pytest.mark.parametrize("order", ["mix-then-step", "adapt-then-combine"])
def test_the_golden_dpsgd(example: dict[str, Any], order: str) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    swarm = ArithmeticSwarm(len(problem.a), topologies={"file": Fixed(inputs["W"])})
    team = Team(
        swarm, "d-psgd", list(tensor(inputs["X0"])),
        lr=inputs["gamma"], topology="file", order=order,
    )  # fmt: skip
    key = {"mix-then-step": "X", "adapt-then-combine": "adapt_then_combine"}[order]
    expected = outputs[key][1:] if order == "mix-then-step" else outputs[key]
    noise = tensor(inputs["noise"])
    team.step(lambda i, k, x: problem.grad(i, x) + noise[k][i], steps=len(noise))
    for k, rows in enumerate(expected):
        close(torch.stack([trainer.path[k] for trainer in team.trainers]), rows, atol)


@pytest.mark.parametrize("topology", ["ring", "torus", "complete", "pairs", "random-matching"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_mean_moves_by_exactly_the_mean_gradient(topology: str, count: int) -> None:
    grads = normal(draws(1), 6, count, 4)
    team = Team(
        ArithmeticSwarm(count, seed=3), "d-psgd", list(normal(draws(), count, 4)),
        lr=0.3, topology=topology,
    )  # fmt: skip
    start = team.mean
    team.step(lambda i, k, x: grads[k][i], steps=4)
    # Two die, and come back.
    alive = list(range(count))[: max(1, count - 2)]
    gone = team.xs[len(alive) :]
    team.step(lambda i, k, x: grads[k][i], peers=alive)
    for x, kept in zip(team.xs[len(alive) :], gone, strict=True):
        assert torch.equal(x, kept)
    moved = grads[:4].mean(1).sum(0) + grads[4][: len(alive)].sum(0) / count
    torch.testing.assert_close(team.mean, start - 0.3 * moved)


def test_a_lost_edge_counts_in_neither_direction() -> None:
    swarm = ArithmeticSwarm(5)
    team = Team(swarm, "d-psgd", list(normal(draws(), 5, 3)), lr=0.1)
    start = team.mean
    swarm.lose_edge("d-psgd", round=0, between=(1, 2))
    team.step(lambda i, k, x: torch.zeros_like(x))
    torch.testing.assert_close(team.mean, start)
    last = team.trainers[1].optimizer.last  # type: ignore[attr-defined]
    assert last.unheard == ("peer2",)
    assert last.own_share == pytest.approx(2 / 3)


def test_dpsgd_contracts_by_rho_of_its_ring() -> None:
    team = Team(ArithmeticSwarm(8), "d-psgd", list(normal(draws(), 8, 5)), lr=0.1)

    def distance() -> float:
        return float(torch.linalg.matrix_norm(torch.stack(team.xs) - team.mean))

    before = distance()
    team.step(lambda i, k, x: torch.zeros_like(x), steps=3)
    assert distance() <= 0.80474**3 * before * (1 + 1e-9)


def test_momentum_is_torch_s_and_the_complete_graph_is_minibatch_sgd() -> None:
    grads = normal(draws(2), 5, 3, 4)
    start = normal(draws(), 4)
    team = Team(
        ArithmeticSwarm(3), "d-psgd", [start] * 3, lr=0.1, momentum=0.9, nesterov=True,
        weight_decay=0.01, topology="complete", order="adapt-then-combine",
    )  # fmt: skip
    twin = nn.Parameter(start.clone())
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for k in range(5):
        twin.grad = grads[k].mean(0)
        sgd.step()
    team.step(lambda i, k, x: grads[k][i], steps=5)
    torch.testing.assert_close(team.mean, twin.detach())


def test_gossip_meets_one_other_and_rests_when_odd() -> None:
    team = Team(ArithmeticSwarm(5, seed=1), "gossip", list(normal(draws(), 5, 3)), lr=0.1)
    start = team.mean
    team.step(lambda i, k, x: torch.zeros_like(x), steps=60)
    torch.testing.assert_close(torch.stack(team.xs), start.expand(5, 3))


# ---- Push-sum.


@pytest.mark.parametrize("example", examples("sgp*"), ids=named)
def test_the_golden_push_sum(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    n = len(problem.a)

    class Shifts:
        peers = n

        def sample(self, t: int, dead: Any = ()) -> EdgeMixing:
            return circulant(n, [inputs["shifts"][t]])

    swarm = ArithmeticSwarm(n, topologies={"file": Shifts()})
    team = Team(swarm, "sgp", list(tensor(inputs["X0"])), lr=inputs["gamma"], topology="file")
    for expected in outputs["steps"]:
        team.step(lambda i, k, z: problem.grad(i, z))
        close(torch.stack(team.xs), expected["z"], atol)
        close(tensor([t.optimizer.mass for t in team.trainers]), expected["w"], atol)  # type: ignore[attr-defined]

    rows = Fixed(inputs["P_nonregular"])
    swarm = ArithmeticSwarm(rows.peers, topologies={"file": rows})
    plain = Team(
        swarm, "sgp", [tensor([x]) for x in inputs["x_nonregular"]], lr=0.0, topology="file"
    )
    plain.step(lambda i, k, z: torch.zeros_like(z), steps=200)
    masses = tensor([t.optimizer.mass for t in plain.trainers])  # type: ignore[attr-defined]
    close(masses, outputs["nonregular_w_final"], 1e-9)
    wanted = sum(inputs["x_nonregular"]) / rows.peers
    close(torch.cat(plain.xs), [wanted] * rows.peers, 1e-9)


def test_push_sum_keeps_its_mass_when_peers_die_and_a_checkpoint_keeps_it_too() -> None:
    n = 6
    team = Team(ArithmeticSwarm(n), "sgp", list(normal(draws(), n, 3)), lr=0.2)
    grads = normal(draws(1), 40, n, 3)

    def masses() -> list[float]:
        return [trainer.optimizer.mass for trainer in team.trainers]  # type: ignore[attr-defined]

    def whole() -> Tensor:
        return sum(x * mass for x, mass in zip(team.xs, masses(), strict=True))  # type: ignore[return-value]

    before, moved = whole(), torch.zeros(3, dtype=FLOAT)
    for k, alive in enumerate(([0, 1, 2, 3, 4, 5], [0, 2, 3], [1, 2, 4, 5], [0, 1, 3, 4, 5])):
        team.step(lambda i, _, z, k=k: grads[k][i], peers=alive)
        moved = moved + 0.2 * grads[k][alive].sum(0)
    assert sum(masses()) == pytest.approx(n)
    assert max(masses()) != pytest.approx(1.0), "with dead peers the weights are needed"
    torch.testing.assert_close(whole(), before - moved)

    saved = team.trainers[2].optimizer.state_dict()
    again = team.trainer(2, team.xs[2])
    again.optimizer.load_state_dict(saved)
    again.steps, team.trainers[2] = team.trainers[2].steps, again
    team.step(lambda i, k, z: torch.zeros_like(z), steps=60)
    torch.testing.assert_close(whole(), before - moved)
    torch.testing.assert_close(torch.stack(team.xs), ((before - moved) / n).expand(n, 3))


def test_one_peer_exponential_is_exact_after_log2_n_steps() -> None:
    team = Team(ArithmeticSwarm(8), "sgp", list(normal(draws(), 8, 3)), lr=0.1)
    start = team.mean
    assert OnePeerExponential(8).shifts(2) == [4]
    team.step(lambda i, k, z: torch.zeros_like(z), steps=3)
    torch.testing.assert_close(torch.stack(team.xs), start.expand(8, 3))


# ---- AD-PSGD.


def test_an_event_is_mean_minus_the_gradient_of_an_older_copy() -> None:
    starts = list(normal(draws(), 4, 3))
    swarm = ArithmeticSwarm(4)
    team = Team(swarm, "ad-psgd", starts, lr=0.1)
    for trainer in team.trainers:
        trainer.optimizer.start()  # type: ignore[attr-defined]
    swarm._meetings["ad-psgd"].order = {1: [2]}
    grad = normal(draws(1), 3)
    team.trainers[1].step(lambda i, k, x: grad)
    middle = (starts[1] + starts[2]) / 2
    torch.testing.assert_close(team.xs[1], middle - 0.1 * grad)
    assert team.trainers[1].optimizer.met == "peer2"  # type: ignore[attr-defined]
    team.trainers[2].step(lambda i, k, x: 2 * grad)
    torch.testing.assert_close(team.xs[2], middle - 0.2 * grad), "a passive peer only answers"
    assert team.trainers[2].optimizer.met == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_adpsgd_loses_no_update_whatever_the_order(count: int) -> None:
    team = Team(ArithmeticSwarm(count, seed=2), "ad-psgd", list(normal(draws(), count, 4)), lr=0.05)
    start, grads = torch.stack(team.xs).sum(0), normal(draws(3), 20, count, 4)
    for trainer in team.trainers:
        trainer.optimizer.start()  # type: ignore[attr-defined]
    team.step(lambda i, k, x: grads[k][i], steps=20)  # all threads at once
    held = team.swarm._meetings["ad-psgd"].values
    total = torch.stack([held[peer]["0.0"] for peer in range(count)]).sum(0)
    torch.testing.assert_close(total, start - 0.05 * grads.sum((0, 1)))


def test_adpsgd_converges() -> None:
    problem = Quadratics.random(draws(4), workers=5, numel=3)
    team = Team(ArithmeticSwarm(5), "ad-psgd", list(normal(draws(), 5, 3)), lr=0.05)
    for trainer in team.trainers:
        trainer.optimizer.start()  # type: ignore[attr-defined]
    for k in range(400):
        for trainer in team.trainers:
            trainer.optimizer.param_groups[0]["lr"] = 1.0 / (10 + k / 4)
            trainer.step(lambda i, k, x: problem.grad(i, x))
    torch.testing.assert_close(team.mean, problem.optimum(), atol=0.05, rtol=0)


# ---- What all optimizers promise torch.


@pytest.mark.parametrize("name", ["d-psgd", "gossip", "sgp", "ad-psgd"])
def test_they_are_torch_optimizers(name: str) -> None:
    swarm = ArithmeticSwarm(1)
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.0}]
    optimizer = by_name(name, groups, swarm.peer(0), lr=0.5, momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, bias = torch.randn(8, 3), model.bias.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return float(loss.detach())

    first = optimizer.step(closure)
    scheduler.step()
    for _ in range(3):
        last = optimizer.step(closure)
    assert first is not None
    assert last is not None
    assert last < first
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert torch.equal(model.bias, bias), "its group has lr 0"
    with pytest.raises(TrainerError, match="after the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    saved = optimizer.state_dict()
    other = by_name(name, groups, swarm.peer(0), lr=0.5, momentum=0.9)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.05
    with pytest.raises(TrainerError, match="a checkpoint of"):
        by_name("sgp" if name != "sgp" else "d-psgd", groups, swarm.peer(0)).load_state_dict(saved)


@pytest.mark.parametrize("name", ["d-psgd", "sgp", "ad-psgd"])
def test_gradscaler_unscales_and_an_overflow_moves_nothing(name: str) -> None:
    x = nn.Parameter(torch.ones(2))
    optimizer = by_name(name, [x], ArithmeticSwarm(1).peer(0), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((x * torch.tensor([1.0, 2.0])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert x.tolist() == [0.75, 0.5]
    optimizer.zero_grad()
    scaler.scale((x * torch.tensor([1.0, float("inf")])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert x.tolist() == [0.75, 0.5]
    assert scaler.get_scale() == 4.0


def test_names_and_options_that_nobody_knows() -> None:
    x = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match="unknown algorithm 'sgd'"):
        by_name("sgd", x, ArithmeticSwarm(1).peer(0))
    with pytest.raises(ConfigError, match="unexpected keyword"):
        by_name("sgp", x, ArithmeticSwarm(1).peer(0), beta=1)
    with pytest.raises(ConfigError, match="d-psgd needs an exchange with neighbours"):
        by_name("d-psgd", x, object())
    with pytest.raises(TrainerError, match="order 'both'"):
        by_name("d-psgd", x, ArithmeticSwarm(1).peer(0), order="both")
    with pytest.raises(TrainerError, match="momentum where Nesterov"):
        by_name("d-psgd", x, ArithmeticSwarm(1).peer(0), nesterov=True)


def test_the_row_of_a_dead_ring_is_the_rule_s() -> None:
    """The shipped class against `rules.dpsgd.swarm_step` on what the schedule says."""
    starts, grads = list(normal(draws(), 5, 3)), list(normal(draws(1), 5, 3))
    team = Team(ArithmeticSwarm(5), "d-psgd", starts, lr=0.1)
    alive = [0, 1, 3, 4]
    team.step(lambda i, k, x: grads[i], peers=alive)
    rows = team.swarm.schedule("ring").sample(0, [2]).rows()
    wanted = dpsgd.swarm_step(starts, grads, rows=rows, gamma=0.1)
    for peer in alive:
        torch.testing.assert_close(team.xs[peer], wanted[peer])
