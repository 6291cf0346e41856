"""AsySG as shipped: the worked examples, T = 0 is mini-batch SGD bit for bit, and no gradient is
older than T. One rule: what was applied is read from the store and never from the optimizer."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moshpitd.client.optim.asysg import AsySGCon, AsySGIncon
from moshpitd.client.optim.registry import by_name
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.testing import ArithmeticSwarm
from moshpitd.testing.asynchronous import Shelf
from tests.kit.rules import Quadratics, close, examples, named, normal, tensor
from tests.kit.trainers import Team, Trainer


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shelf_of(swarm: ArithmeticSwarm) -> Shelf:
    return swarm._stores["asysg-con"]


def started(team: Team) -> Team:
    for trainer in team.trainers:
        optimizer = trainer.optimizer
        assert isinstance(optimizer, (AsySGCon, AsySGIncon))
        optimizer.start()
    return team


# ---- con: a store.


@pytest.mark.parametrize("example", examples("asysg_con*"), ids=named)
def test_the_golden_con(example: dict[str, Any]) -> None:
    """One trainer per gradient: it starts when the store is at the version that it shall read."""
    inputs, atol = example["inputs"], example["atol"]
    a, b, x0 = tensor(inputs["a"]), tensor(inputs["b"]), tensor(inputs["x0"])
    taus, noise, per_update = inputs["tau"], tensor(inputs["noise"]), inputs["M"]
    swarm = ArithmeticSwarm(len(taus) * per_update)
    team = Team(
        swarm, "asysg-con", [x0] * swarm.count,
        lr=inputs["gamma"], batch=per_update, max_staleness=inputs["T"],
    )  # fmt: skip
    path = []
    for k in range(len(taus) + 1):
        for number, trainer in enumerate(team.trainers):
            if number // per_update - taus[number // per_update][number % per_update] == k:
                assert isinstance(trainer.optimizer, AsySGCon)
                trainer.optimizer.start()
        path.append(shelf_of(swarm).store.x.clone())
        for trainer in team.trainers[k * per_update : (k + 1) * per_update]:
            of = divmod(trainer.peer, per_update)
            trainer.step(lambda i, step, x, of=of: a * (x - b) + noise[of])  # type: ignore[misc]
    close(torch.stack(path), example["outputs"]["X"], atol)
    assert [sorted(one.staleness) for one in shelf_of(swarm).updates] == [sorted(t) for t in taus]


def test_staleness_zero_is_minibatch_sgd_bit_for_bit() -> None:
    """All trainers read, then all push, in an order that changes with every update."""
    workers, gamma = 3, 0.05
    problem = Quadratics.random(draws(), workers=workers, numel=4)
    team = Team(
        ArithmeticSwarm(workers), "asysg-con", [normal(draws(1), 4)] * workers,
        lr=gamma, batch=workers, max_staleness=0,
    )  # fmt: skip
    x = team.xs[0]
    for k in range(6):
        for trainer in team.trainers:
            assert isinstance(trainer.optimizer, AsySGCon)
            trainer.optimizer.version = None  # those that pushed early hold the version before
            trainer.optimizer.start()
        total = torch.zeros_like(x)
        for peer in [(k + i) % workers for i in range(workers)]:
            total = total + problem.grad(peer, x)
            team.trainers[peer].step(lambda i, k, x: problem.grad(i, x))
        x = x - gamma * total
        assert torch.equal(shelf_of(team.swarm).store.x, x)
    assert shelf_of(team.swarm).store.version == 6


@given(
    turns=st.lists(st.integers(0, 3), min_size=10, max_size=60),
    bound=st.integers(0, 3),
    batch=st.integers(1, 3),
)
@settings(max_examples=40)
def test_no_gradient_is_older_than_the_bound(turns: list[int], bound: int, batch: int) -> None:
    problem = Quadratics.random(draws(), workers=4, numel=3)
    team = started(
        Team(
            ArithmeticSwarm(4), "asysg-con", [torch.zeros(3, dtype=torch.float64)] * 4,
            lr=0.05, batch=batch, max_staleness=bound,
        )
    )  # fmt: skip
    for turn in turns:
        team.trainers[turn].step(lambda i, k, x: problem.grad(i, x))
    shelf = shelf_of(team.swarm)
    assert all(max(update.staleness) <= bound for update in shelf.updates)
    refused = sum(trainer.optimizer.refused for trainer in team.trainers)  # type: ignore[attr-defined]
    applied = sum(len(update.staleness) for update in shelf.updates)
    assert applied + refused + len(shelf.store.waiting) == len(turns)


def test_a_bound_of_zero_wastes_the_slower_of_two() -> None:
    team = started(Team(ArithmeticSwarm(2), "asysg-con", [torch.zeros(2)] * 2, max_staleness=0))
    for peer in (0, 1):
        team.trainers[peer].step(lambda i, k, x: x - 1)
    assert [trainer.optimizer.refused for trainer in team.trainers] == [0, 1]  # type: ignore[attr-defined]
    assert shelf_of(team.swarm).store.version == 1


def test_blocking_wastes_nothing_and_a_trainer_that_leaves_holds_nobody_up() -> None:
    problem = Quadratics.random(draws(), workers=3, numel=4)
    team = Team(
        ArithmeticSwarm(3), "asysg-con", [torch.zeros(4, dtype=torch.float64)] * 3,
        lr=0.1, batch=2, max_staleness=1, block=True,
    )  # fmt: skip

    def play(peer: int) -> None:
        trainer = team.trainers[peer]
        trainer.optimizer.start()  # type: ignore[attr-defined]
        for k in range(40):
            if peer == 2 and k == 5:
                break
            trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + k / 4)
            trainer.step(lambda i, k, x: problem.grad(i, x))
        trainer.optimizer.close()

    team.swarm.play(play)
    assert sum(trainer.optimizer.refused for trainer in team.trainers) == 0  # type: ignore[attr-defined]
    assert all(max(update.staleness) <= 1 for update in shelf_of(team.swarm).updates)
    assert shelf_of(team.swarm).store.version >= 40


def test_trainers_that_do_not_agree_on_the_store_are_told() -> None:
    swarm = ArithmeticSwarm(2)
    for peer, lr in ((0, 0.1), (1, 0.2)):
        team = Team(swarm, "asysg-con", [torch.zeros(2)] * 2, lr=lr)
        optimizer: Any = team.trainers[peer].optimizer
        if peer == 0:
            optimizer.start()
            continue
        with pytest.raises(TrainerError, match=r"gamma=0\.1.*gamma=0\.2") as refused:
            optimizer.start()
        assert refused.value.reason == "store_differs"


def test_a_scheduler_scales_and_weight_decay_pulls() -> None:
    x0 = torch.tensor([2.0, -1.0])
    team = started(
        Team(ArithmeticSwarm(1), "asysg-con", [x0], lr=0.5, weight_decay=0.1, max_staleness=0)
    )
    team.trainers[0].optimizer.param_groups[0]["lr"] = 0.25
    team.trainers[0].step(lambda i, k, x: torch.ones(2))
    torch.testing.assert_close(team.xs[0], x0 - 0.25 * (1 + 0.1 * x0))


# ---- incon: shared memory.


@pytest.mark.parametrize("example", examples("asysg_incon*"), ids=named)
def test_the_golden_incon(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    a, b, noise = tensor(inputs["a"]), tensor(inputs["b"]), tensor(inputs["noise"])
    swarm = ArithmeticSwarm(1)
    team = started(
        Team(
            swarm, "asysg-incon", [tensor(inputs["x0"])], lr=inputs["gamma"],
            blocks=len(a), choose=lambda step: inputs["coord"][step],
        )
    )  # fmt: skip
    memory = swarm._memories["asysg-incon"]
    memory.missed = {k: tuple(missed) for k, missed in enumerate(inputs["J"])}
    for k in range(len(noise)):
        close(team.xs[0], outputs["x_hat"][k], atol)
        team.trainers[0].step(lambda i, step, x: a * (x - b) + noise[step])
        close(memory.values["0.0"], outputs["X"][k], atol)


def test_blocks_are_cut_from_all_elements_in_a_row() -> None:
    """Five elements in two tensors, three blocks: 1, 2 and 2 elements, across the border."""
    swarm = ArithmeticSwarm(1)
    xs = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 1))]
    optimizer = by_name(
        "asysg-incon", xs, swarm.peer(0), lr=1.0, blocks=3, choose=lambda step: step
    )
    optimizer.start()  # type: ignore[attr-defined]
    written = []
    for _ in range(3):
        for x in xs:
            x.grad = -torch.ones_like(x)
        optimizer.step()
        written.append(torch.cat([x.detach().reshape(-1) for x in xs]).tolist())
    assert written == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_trainers_of_one_node_find_the_optimum_together() -> None:
    problem = Quadratics.random(draws(), workers=3, numel=8)
    starts = [torch.zeros(8, dtype=torch.float64)] * 3
    team = started(Team(ArithmeticSwarm(3), "asysg-incon", starts, lr=0.1, blocks=2))

    order = random.Random(0)
    for k in range(900):  # any order: whoever steps last has read longest ago
        trainer = team.trainers[order.randrange(3)]
        trainer.optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 30)
        trainer.step(lambda i, k, x: problem.grad(i, x))
    team.trainers[0].optimizer.start()  # type: ignore[attr-defined]
    off = (team.mean - problem.optimum()).norm() / problem.optimum().norm()
    assert off < 0.1


# ---- both.


def test_a_change_of_the_parameters_between_steps_goes_into_the_memory_once() -> None:
    """As an average with other nodes makes it, while another trainer of the node writes too."""
    start = torch.zeros(4, dtype=torch.float64)
    team = started(Team(ArithmeticSwarm(2), "asysg-incon", [start] * 2, lr=1.0, follow=True))
    ones = torch.ones(4, dtype=torch.float64)
    for peer in (0, 1):
        team.trainers[peer].step(lambda i, k, x: ones)
    with torch.no_grad():
        team.trainers[0].x.add_(10.0)
    team.trainers[1].step(lambda i, k, x: ones)
    team.trainers[0].step(lambda i, k, x: ones)
    assert torch.equal(team.trainers[0].x.detach(), 10.0 - 4.0 * ones)
    team.trainers[0].step(lambda i, k, x: ones)
    team.trainers[1].step(lambda i, k, x: ones)
    assert torch.equal(team.trainers[1].x.detach(), 10.0 - 6.0 * ones)


BOTH = pytest.mark.parametrize("name", ["asysg-con", "asysg-incon"])


def held(swarm: ArithmeticSwarm, name: str) -> Tensor:
    found = swarm._memories[name].values["0.0"] if "incon" in name else shelf_of(swarm).store.x
    return found.clone()


@BOTH
def test_a_gradient_that_was_taken_elsewhere_is_dropped(name: str) -> None:
    """Whoever comes second and did not call start has a gradient of its own parameters."""
    swarm = ArithmeticSwarm(3)
    team = Team(swarm, name, [torch.zeros(2), torch.ones(2), torch.zeros(2)], lr=0.5)
    team.trainers[0].optimizer.start()  # type: ignore[attr-defined]
    for peer, after in ((1, 0.0), (2, -0.5)):  # the third held what the first had opened it with
        team.trainers[peer].step(lambda i, k, x: torch.ones(2))
        assert held(swarm, name).tolist() == [after] * 2
        assert torch.equal(team.xs[peer], held(swarm, name))


@BOTH
def test_an_overflow_pushes_nothing_and_reads_on(name: str) -> None:
    swarm = ArithmeticSwarm(2)
    team = started(Team(swarm, name, [torch.zeros(2)] * 2, lr=0.5))
    team.trainers[0].step(lambda i, k, x: torch.ones(2))
    optimizer = team.trainers[1].optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    team.trainers[1].step(lambda i, k, x: torch.full((2,), float("inf")))
    assert held(swarm, name).tolist() == [-0.5] * 2
    assert team.xs[1].tolist() == [-0.5] * 2


@BOTH
def test_a_checkpoint_opens_what_is_not_open_and_takes_what_is(name: str) -> None:
    swarm = ArithmeticSwarm(2)
    team = started(Team(swarm, name, [torch.zeros(2)] * 2, lr=0.5))
    team.trainers[0].step(lambda i, k, x: torch.ones(2))
    file = io.BytesIO()
    torch.save(team.trainers[0].optimizer.state_dict(), file)
    file.seek(0)
    saved, x = torch.load(file, weights_only=True), team.xs[0]

    resumed = Team(ArithmeticSwarm(1), name, [x], lr=0.5).trainers[0]
    resumed.optimizer.load_state_dict(saved)
    resumed.step(lambda i, k, x: torch.ones(2))
    assert resumed.x.tolist() == [-1.0] * 2, "nobody had it open: the checkpoint is the start"

    other: Trainer = team.trainers[1]
    other.optimizer.load_state_dict(saved)
    other.step(lambda i, k, x: torch.ones(2))
    assert held(swarm, name).tolist() == [-0.5] * 2, "its gradient was taken elsewhere"
    other.step(lambda i, k, x: torch.ones(2))
    assert held(swarm, name).tolist() == [-1.0] * 2


@BOTH
def test_options_and_swarms_that_cannot_be(name: str) -> None:
    x = nn.Parameter(torch.zeros(2))
    peer = ArithmeticSwarm(1).peer(0)
    with pytest.raises(ConfigError, match="which object does not offer"):
        by_name(name, [x], object())
    wrong = {"asysg-con": ["batch", "lr"], "asysg-incon": ["blocks"]}[name]
    for option in wrong:
        with pytest.raises(TrainerError, match=f"{option if option != 'blocks' else '0 blocks'}"):
            by_name(name, [x], peer, **{option: 0})
    x.grad = torch.zeros(2).to_sparse()
    with pytest.raises(TrainerError, match="sparse"):
        by_name(name, [x], peer).step()
