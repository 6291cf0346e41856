"""1-bit Adam, 0/1 Adam, 1-bit LAMB as shipped: worked examples, what may never be lost, and equal
replicas after parts were."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client.optim.registry import by_name
from moshpitd.errors import TrainerError
from moshpitd.tensors.rules import onebit, signs
from moshpitd.tensors.rules.common import mean
from moshpitd.testing.arithmetic import ArithmeticSwarm
from moshpitd.testing.coding import Cut
from tests.kit.rules import Quadratics, close, examples, named, normal, tensor
from tests.kit.trainers import SIGNS, Team

NAMES = ["onebit-adam", "zero-one-adam", "onebit-lamb"]


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state(team: Team, peer: int, key: str) -> Tensor:
    trainer = team.trainers[peer]
    return trainer.optimizer.state[trainer.x][key]  # type: ignore[no-any-return]


@pytest.mark.parametrize("example", examples("onebit_adam*"), ids=named)
def test_the_golden_onebit_adam(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    n, grads = inputs["n"], tensor(inputs["grads"])
    codec = "sign-l1" if "l1" in inputs["scale"] else "sign-rms"
    swarm = ArithmeticSwarm(n, cut=Cut.DEEPSPEED, coders=SIGNS)
    team = Team(
        swarm, "onebit-adam", [tensor(inputs["x0"])] * n, lr=inputs["lr"], eps=inputs["eps"],
        betas=tuple(inputs["betas"]), freeze_step=inputs["warmup_steps"], codec=codec,
    )  # fmt: skip
    frozen: Tensor | None = None
    for number, step in enumerate(outputs["steps"]):
        team.step(lambda i, k, x: grads[k][i])
        assert team.equal()
        for peer in range(n):
            close(state(team, peer, "exp_avg"), step["m"], atol)
            close(state(team, peer, "exp_avg_sq"), step["v"], atol)
            close(team.xs[peer], step["x"], atol)
        if number + 1 == inputs["warmup_steps"]:
            frozen = state(team, 0, "exp_avg_sq").clone()
        if number >= inputs["warmup_steps"]:
            assert frozen is not None
            assert torch.equal(state(team, 0, "exp_avg_sq"), frozen), "bitwise constant"
            debts = swarm.average("onebit-adam.momentum").debts
            errors = [debts[peer].sender["float64"] for peer in range(n)]
            close(torch.stack(errors), step["worker_error"], atol)
            served = [debts[peer].server["float64"].items()[0][1] for peer in range(n)]
            close(torch.stack(served), step["server_error"], atol)
    compressed = len(outputs["steps"]) - inputs["warmup_steps"]
    expected = outputs["bytes_per_worker_per_compressed_step"]
    sent = swarm.average("onebit-adam.momentum").sent
    assert sent[0] == compressed * (expected["phase1_send"] + expected["phase2_send"])


@pytest.mark.parametrize("name", NAMES)
def test_trainers_hold_equal_bits_and_it_trains(name: str) -> None:
    problem = Quadratics.random(draws(), workers=3, numel=40)
    a, b = problem.a.float(), problem.b.float()
    swarm = ArithmeticSwarm(3, seed=1)
    options = {"local_scaler": 20, "local_clipper": 4} if name == "zero-one-adam" else {}
    team = Team(
        swarm, name, [torch.ones(40)] * 3, lr=0.02, freeze_step=40, betas=(0.9, 0.99), **options
    )
    for trainer in team.trainers:
        torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.99)
    first = (team.mean - problem.optimum().float()).norm()
    team.step(lambda i, k, x: a[i] * (x - b[i]), steps=240)
    assert team.equal(), "240 is an exchange of 0/1 Adam too"
    assert (team.mean - problem.optimum().float()).norm() < 0.25 * first


@pytest.mark.parametrize("name", NAMES)
def test_elements_that_never_had_a_gradient_stay(name: str) -> None:
    team = Team(ArithmeticSwarm(2), name, [torch.ones(12)] * 2, lr=0.05, freeze_step=4)
    grads = normal(draws(), 12, 2, 12).float()
    grads[:, :, 3:7] = 0.0
    team.step(lambda i, k, x: grads[k][i], steps=12)
    for x in team.xs:
        assert torch.equal(x[3:7], torch.ones(4))
        assert (x[:3] != 1).all()


def test_nothing_is_lost_in_the_compressed_stage_whoever_comes_and_goes() -> None:
    """mean(m_i + e_i) + E = m + mean(e_i') + E' while the group is whole, and after it changed."""
    n, d = 4, 24
    swarm = ArithmeticSwarm(n, cut=Cut.BAGUA, coders=SIGNS)
    team = Team(swarm, "onebit-adam", [torch.zeros(d).double()] * n, lr=0.01, freeze_step=2)
    grads = normal(draws(1), 40, n, d)
    team.step(lambda i, k, x: grads[k][i], steps=3)
    channel = swarm.average("onebit-adam.momentum")

    def owed(members: list[int]) -> Tensor:
        server = torch.zeros(d).double()
        for peer in members:
            for start, piece in channel.debts[peer].server["float64"].items():
                server[start : start + piece.numel()] += piece[: d - start]
        return mean([channel.debts[peer].sender["float64"][:d] for peer in members]) + server

    k = 3
    for members in ([0, 1, 2, 3], [0, 1, 3], [0, 1, 3], [0, 3]):
        before = owed(members)
        momenta = [0.9 * state(team, i, "exp_avg") + 0.1 * grads[k][i] for i in members]
        team.step(lambda i, _, x, k=k: grads[k][i], peers=members)
        if members != [0, 1, 3] or k == 5:  # the first without peer 2 lost what that one served
            torch.testing.assert_close(
                mean(momenta) + before, state(team, 0, "exp_avg") + owed(members)
            )
        k += 1


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_on_bit_for_bit_errors_included(name: str) -> None:
    grads = normal(draws(2), 30, 2, 10).float()
    options = {"local_scaler": 3, "local_clipper": 4} if name == "zero-one-adam" else {}
    ends = []
    for interrupted in (False, True):
        swarm = ArithmeticSwarm(2)
        team = Team(swarm, name, [torch.ones(10)] * 2, lr=0.02, freeze_step=5, **options)
        team.step(lambda i, k, x: grads[k][i], steps=13)
        if interrupted:
            fresh = Team(ArithmeticSwarm(2), name, team.xs, lr=9.0, freeze_step=5, **options)
            # The new swarm's rounds begin at 0: only a codec with draws would notice.
            for old, new in zip(team.trainers, fresh.trainers, strict=True):
                room = io.BytesIO()
                torch.save(old.optimizer.state_dict(), room)
                room.seek(0)
                new.optimizer.load_state_dict(torch.load(room, weights_only=True))
                new.steps = old.steps
            team = fresh
        team.step(lambda i, k, x: grads[k][i], steps=12)
        ends.append(team.xs)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_the_warm_up_may_travel_in_half_precision() -> None:
    grads = normal(draws(3), 8, 2, 1000).float()
    sent, ends = {}, {}
    for codec in ("float32", "float16"):
        swarm = ArithmeticSwarm(2)
        team = Team(
            swarm, "onebit-adam", [torch.ones(1000)] * 2, lr=0.02, freeze_step=8, warm_codec=codec
        )
        team.step(lambda i, k, x: grads[k][i], steps=8)
        assert team.equal()
        sent[codec] = sum(swarm.average("onebit-adam.warm").sent.values())
        ends[codec] = team.xs[0]
    assert sent["float32"] == 8 * 2 * 4 * 1000
    assert sent["float16"] == 8 * 2 * (2 * 1000 + 4)
    assert not torch.equal(ends["float16"], ends["float32"])
    torch.testing.assert_close(ends["float16"], ends["float32"], rtol=0, atol=1e-3)


# ---- Equal replicas.


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_result_is_noticed_and_healed_at_the_next_comparison(name: str) -> None:
    swarm = ArithmeticSwarm(3)
    grads = normal(draws(3), 60, 3, 6).float()
    options = {"local_scaler": 10_000} if name == "zero-one-adam" else {}
    team = Team(swarm, name, [torch.ones(6)] * 3, lr=0.02, freeze_step=4, check_every=10, **options)
    swarm.lose_result(f"{name}.warm", round=1, peer=1, tensors=["0.0"])
    team.step(lambda i, k, x: grads[k][i], steps=3)
    assert not team.equal()
    team.step(lambda i, k, x: grads[k][i], steps=1)
    assert team.equal(), "compared at the freeze"
    assert [t.optimizer.resyncs for t in team.trainers] == [0, 1, 0]  # type: ignore[attr-defined]
    again = "move" if name == "zero-one-adam" else "momentum"
    swarm.lose_contribution(f"{name}.{again}", round=1, peer=2)
    swarm.lose_result(f"{name}.{again}", round=1, peer=2, tensors=["0.0"])
    team.step(lambda i, k, x: grads[k][i], steps=5)
    assert not team.equal()
    team.step(lambda i, k, x: grads[k][i], steps=1)
    assert team.equal()
    assert [t.optimizer.resyncs for t in team.trainers] == [0, 1, 1]  # type: ignore[attr-defined]
    assert all(t.optimizer.current for t in team.trainers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("hit", [0, 1])
def test_of_two_the_one_that_knows_of_a_missed_update_is_the_one_that_gives_way(hit: int) -> None:
    swarm = ArithmeticSwarm(2)
    grads = normal(draws(3), 60, 2, 6).float()
    team = Team(swarm, "onebit-adam", [torch.ones(6)] * 2, lr=0.02, freeze_step=40, check_every=10)
    swarm.lose_result("onebit-adam.warm", round=9, peer=hit, tensors=["0.0"])
    team.step(lambda i, k, x: grads[k][i], steps=10)
    assert team.equal()
    resyncs = [t.optimizer.resyncs for t in team.trainers]  # type: ignore[attr-defined]
    assert resyncs == [int(hit == 0), int(hit == 1)]


def test_silent_damage_is_outvoted() -> None:
    swarm = ArithmeticSwarm(3)
    grads = normal(draws(3), 60, 3, 6).float()
    team = Team(swarm, "onebit-adam", [torch.ones(6)] * 3, lr=0.02, freeze_step=4, check_every=10)
    team.step(lambda i, k, x: grads[k][i], steps=12)
    right = team.xs[0]
    with torch.no_grad():
        team.trainers[1].x[2] += 1.0
    swarm.play(lambda peer: team.trainers[peer].optimizer._compare())  # type: ignore[attr-defined]
    assert team.equal()
    torch.testing.assert_close(team.xs[1], right)


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_that_was_away_catches_up_and_goes_on(name: str) -> None:
    swarm = ArithmeticSwarm(3)
    grads = normal(draws(4), 90, 3, 6).float()
    options = {"local_scaler": 10, "local_clipper": 2} if name == "zero-one-adam" else {}
    team = Team(
        swarm, name, [torch.ones(6)] * 3, lr=0.02, freeze_step=15, check_every=10, **options
    )
    team.step(lambda i, k, x: grads[k][i], steps=7)
    team.step(lambda i, k, x: grads[k][i], steps=25, peers=[0, 2])

    def play(peer: int) -> None:
        trainer = team.trainers[peer]
        if peer == 1:
            while not trainer.optimizer.catch_up():  # type: ignore[attr-defined]
                pass
            trainer.steps = 40
        while trainer.steps < 60:
            trainer.step(lambda i, k, x: grads[k][i])

    swarm.play(play)
    assert team.equal()
    assert [t.optimizer.version for t in team.trainers] == [60] * 3  # type: ignore[attr-defined]


def test_an_overflow_counts_nothing_and_takes_what_the_others_found() -> None:
    swarm = ArithmeticSwarm(2)
    xs = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [by_name("onebit-adam", [x], swarm.peer(i), lr=0.1) for i, x in enumerate(xs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]

    def play(peer: int) -> None:
        factor = torch.tensor([1.0, float("inf") if peer else 2.0, 3.0])
        scalers[peer].scale((xs[peer] * factor).sum()).backward()
        scalers[peer].step(optimizers[peer])
        scalers[peer].update()

    swarm.play(play)
    assert torch.equal(xs[0], xs[1])
    assert (xs[0] != 1).all()
    assert [scaler.get_scale() for scaler in scalers] == [4.0, 2.0]


def test_bytes_of_the_compressed_stage_against_the_formula() -> None:
    n, d = 4, 1 << 12
    swarm = ArithmeticSwarm(n, cut=Cut.DEEPSPEED)
    team = Team(swarm, "onebit-adam", [torch.zeros(d)] * n, lr=0.01, freeze_step=2)
    grads = normal(draws(), 4, n, d).float()
    team.step(lambda i, k, x: grads[k][i], steps=2)
    warm = swarm.average("onebit-adam.warm").sent[0]
    team.step(lambda i, k, x: grads[k][i], steps=2)
    sent = swarm.average("onebit-adam.momentum").sent[0]
    assert sent == 2 * sum(onebit.bytes_per_worker(d, peers=n))
    assert 31 < warm / sent < 32
    assert signs.sign_bytes(d // n) == 132


def test_options_that_cannot_be() -> None:
    swarm = ArithmeticSwarm(1)
    x = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(TrainerError, match="freeze_step 0"):
        by_name("onebit-adam", x, swarm.peer(0), freeze_step=0)
    with pytest.raises(TrainerError, match="betas"):
        by_name("onebit-lamb", x, swarm.peer(0), betas=(1.0, 0.9))
    with pytest.raises(TrainerError, match="check_every 0"):
        by_name("zero-one-adam", x, swarm.peer(0), check_every=0)
