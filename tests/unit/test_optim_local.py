"""DiLoCo, Streaming DiLoCo, PowerSGD, delayed SGD and the swarm-wide target batch as shipped:
worked examples, the algorithms that they coincide with, missed updates, and checkpoints."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client.optim.registry import by_name
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.tensors.rules import delayed
from moshpitd.testing import ArithmeticSwarm
from moshpitd.testing.coding import Cut
from tests.kit.rules import FLOAT, Quadratics, close, examples, named, normal, tensor
from tests.kit.trainers import Team

SGD = torch.optim.SGD
EXACT_OUTER = {"outer_lr": 1.0, "outer_momentum": 0.0}
ALL: dict[str, dict[str, Any]] = {
    "diloco": {"inner": torch.optim.Adam, "lr": 0.05, "every": 2, "outer_lr": 0.5},
    "streaming-diloco": {
        "inner": torch.optim.Adam, "lr": 0.05, "every": 4, "fragments": 2, "overlap": 1,
    },
    "powersgd": {"lr": 0.05, "momentum": 0.9, "rank": 1},
    "delayed-sgd": {"lr": 0.1, "delay": 2, "momentum": 0.5},
    "target-batch": {"lr": 0.1, "momentum": 0.9, "target": 5},
}  # fmt: skip


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pair:
    """Trainers with a matrix and a vector each, so that fragments and ranks mean something."""

    def __init__(self, swarm: ArithmeticSwarm, name: str, count: int, **options: Any) -> None:
        self.swarm, self.name = swarm, name
        self.options = {**ALL[name], "check_every": 8, **options}
        self.models = [self.model() for _ in range(count)]
        self.optimizers = [self.optimizer(peer) for peer in range(count)]
        self.steps = [0] * count
        target = draws(7)
        self.goals = [
            (torch.randn(6, 5, generator=target), torch.randn(6, generator=target))
            for _ in range(count)
        ]

    def model(self) -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.zeros(6))]

    def optimizer(self, peer: int) -> Any:
        return by_name(self.name, self.models[peer], self.swarm.peer(peer), **self.options)

    def step(self, peer: int) -> None:
        for x, goal in zip(self.models[peer], self.goals[peer], strict=True):
            noise = torch.randn(x.shape, generator=draws(100 * self.steps[peer] + peer))
            x.grad = x.detach() - goal + 0.1 * noise
        self.optimizers[peer].samples = 1 + peer
        self.optimizers[peer].step()
        self.steps[peer] += 1

    def play(self, steps: int, peers: list[int] | None = None) -> None:
        def play(peer: int) -> None:
            for _ in range(steps):
                self.step(peer)

        self.swarm.play(play, peers)

    def state(self, peer: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.optimizers[peer].replicated_state()
        return found

    def equal(self) -> bool:
        first = self.state(0)
        return all(
            torch.equal(value, first[name])
            for peer in range(1, len(self.models))
            for name, value in self.state(peer).items()
        )

    @property
    def vector(self) -> Tensor:
        return torch.cat([x.detach().flatten() for x in self.models[0]])


# ---- Worked examples.


@pytest.mark.parametrize("example", examples("local_vs*"), ids=named)
@pytest.mark.parametrize("name", ["diloco", "target-batch"])
def test_the_golden_local_and_minibatch(example: dict[str, Any], name: str) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem, noise = Quadratics(tensor(inputs["A"]), tensor(inputs["B"])), tensor(inputs["noise"])
    n, every, gamma = len(problem.a), inputs["H"], inputs["gamma"]
    if name == "diloco":
        key, options = "local", {"inner": SGD, "lr": gamma, "every": every, **EXACT_OUTER}
    else:
        # What the swarm has is known a micro-batch later: asked for with n (H - 1), taken with n H.
        key, options = "minibatch", {"lr": gamma * every, "target": n * (every - 1)}
    team = Team(ArithmeticSwarm(n), name, [tensor(inputs["x0"])] * n, **options)
    for number, expected in enumerate(outputs[key]):
        team.step(
            lambda i, k, x, number=number: problem.grad(i, x) + noise[number][k % every][i],
            steps=every,
        )
        for x in team.xs:
            close(x, expected, atol)
    assert [t.optimizer.version for t in team.trainers] == [inputs["R"]] * n  # type: ignore[attr-defined]


@pytest.mark.parametrize("example", examples("local_vs*"), ids=named)
def test_the_golden_fixed_points(example: dict[str, Any]) -> None:
    """With full gradients local SGD ends beside the optimum, and mini-batch SGD at it."""
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem, gamma, every = Quadratics(tensor(inputs["A"]), tensor(inputs["B"])), 0.1, inputs["H"]
    assert gamma == inputs["gamma"]
    n, start = len(problem.a), tensor(inputs["x0"])
    local = {"inner": SGD, "lr": gamma, "every": every, **EXACT_OUTER}
    for name, options, key in (
        ("diloco", local, "local_gd_fixed_point"),
        ("target-batch", {"lr": gamma * every, "target": n * (every - 1)}, "optimum"),
    ):
        team = Team(ArithmeticSwarm(n), name, [start] * n, check_every=10_000, **options)
        team.step(lambda i, k, x: problem.grad(i, x), steps=150 * every)
        close(team.xs[0], outputs[key], max(atol, 1e-12))


@pytest.mark.parametrize("example", examples("delayed*"), ids=named)
def test_the_golden_stability(example: dict[str, Any]) -> None:
    """Curvature 1: the shipped class shrinks just below each threshold and grows just above it."""
    for case in example["outputs"]["thresholds"]:
        tau, atol = case["tau"], example["atol"]
        for lr, grows in ((case["measured"] - atol, False), (case["measured"] + atol, True)):
            options = {"delay": tau, "adaptive": False, "lr": lr, "check_every": 10_000}
            team = Team(ArithmeticSwarm(1), "delayed-sgd", [tensor([1.0])], **options)
            team.step(lambda i, k, x: x, steps=1200)
            path = torch.stack(team.trainers[0].path).abs().flatten()
            early, late = path[300 : 300 + 60].max(), path[-60:].max()
            assert bool(late > early) == grows, (tau, lr)


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_delayed_sgd_applies_the_mean_gradient_of_that_many_steps_ago(tau: int) -> None:
    problem, start = Quadratics.random(draws(1), workers=3, numel=4), normal(draws(), 4)
    team = Team(ArithmeticSwarm(3), "delayed-sgd", [start] * 3, delay=tau, lr=0.3)
    team.step(lambda i, k, x: problem.grad(i, x), steps=12)
    past = [start.clone()]
    for step in range(12):
        x = past[-1]
        if step >= tau:
            gamma = delayed.adaptive_gamma(0.3, tau=tau)
            x = x - gamma * torch.stack(problem.grads(past[step - tau])).mean(0)
        past.append(x)
    torch.testing.assert_close(team.xs[0], past[-1])
    assert team.equal()


@pytest.mark.parametrize("tau", [0, 1, 5])
def test_the_adaptive_step_is_stable_where_the_whole_one_is_not(tau: int) -> None:
    ends = []
    for adaptive in (True, False):
        options = {"delay": tau, "adaptive": adaptive, "lr": 1.5, "momentum": 0.0}
        team = Team(ArithmeticSwarm(1), "delayed-sgd", [tensor([1.0])], **options)
        team.step(lambda i, k, x: x, steps=400)
        ends.append(float(team.xs[0].abs()))
    assert ends[0] < 1e-2
    assert (ends[1] > 10) == (tau > 0)


# ---- What they coincide with.


@pytest.mark.parametrize("name", ["diloco", "streaming-diloco", "powersgd", "target-batch"])
def test_where_it_must_it_is_minibatch_sgd(name: str) -> None:
    problem, start = Quadratics.random(draws(1), workers=3, numel=5), normal(draws(), 5)
    options: dict[str, dict[str, Any]] = {
        "diloco": {"inner": SGD, "every": 1, **EXACT_OUTER},
        "streaming-diloco": {
            "inner": SGD, "every": 1, "fragments": 1, "overlap": 0, "alpha": 0.0,
            "codec": "float32", **EXACT_OUTER,
        },
        "powersgd": {},
        "target-batch": {"target": 3},
    }  # fmt: skip
    team = Team(ArithmeticSwarm(3), name, [start] * 3, lr=0.1, **options[name])
    team.step(lambda i, k, x: problem.grad(i, x), steps=12)
    x, made = start.clone(), team.trainers[0].optimizer.version  # type: ignore[attr-defined]
    assert made == (6 if name == "target-batch" else 12)  # two micro-batches at the same x
    for _ in range(made):
        x = x - 0.1 * torch.stack(problem.grads(x)).mean(0)
    torch.testing.assert_close(team.xs[0], x)


def test_powersgd_of_full_rank_is_exact_and_of_rank_one_owes_the_rest() -> None:
    swarm = ArithmeticSwarm(3)
    pair = Pair(swarm, "powersgd", 3, momentum=0.0, lr=0.1)
    start = [x.detach().clone() for x in pair.models[0]]
    taken = torch.zeros(6, 5, dtype=torch.float64)
    for _ in range(6):
        pair.play(1)
        grads = torch.stack([pair.models[peer][0].grad for peer in range(3)])  # the mean's, by now
        assert torch.equal(grads[0], grads[1])
        assert int(torch.linalg.matrix_rank(grads[0])) == 1
        taken += grads[0].double()
    torch.testing.assert_close(pair.models[0][0].detach(), start[0] - 0.1 * taken.float())
    assert pair.equal()


def test_what_powersgd_took_and_what_it_owes_is_the_mean_gradient() -> None:
    swarm, total = ArithmeticSwarm(2), torch.zeros(8, 6)
    xs = [nn.Parameter(torch.zeros(8, 6)) for _ in range(2)]
    optimizers: list[Any] = [by_name("powersgd", [x], swarm.peer(i), lr=1.0, rank=2)
                             for i, x in enumerate(xs)]  # fmt: skip
    weights = [1, 3]
    for k in range(10):
        grads = torch.randn(2, 8, 6, generator=draws(k))
        total += (weights[0] * grads[0] + weights[1] * grads[1]) / 4
        for x, grad, optimizer, weight in zip(xs, grads, optimizers, weights, strict=True):
            x.grad, optimizer.samples = grad.clone(), weight
        swarm.play(lambda peer: optimizers[peer].step())
    owed = sum(w * o._errors["0.0"] for w, o in zip(weights, optimizers, strict=True)) / 4
    torch.testing.assert_close(-xs[0].detach() + owed, total, atol=1e-4, rtol=1e-4)
    assert float(owed.norm()) > 0.1
    assert swarm.bytes_sent(0) < 0.75 * 10 * 4 * 8 * 6


def test_a_trainer_that_the_others_averaged_without_still_owes_all_of_it() -> None:
    pair = Pair(ArithmeticSwarm(3), "powersgd", 3, momentum=0.0)
    pair.swarm.lose_contribution("powersgd.right", round=1, peer=2)
    pair.play(1)
    before = pair.optimizers[2]._errors["0.0"].clone()
    pair.play(1)
    owed = pair.optimizers[2]._errors["0.0"]
    noise = torch.randn(6, 5, generator=draws(100 + 2))
    gradient = torch.ones(6, 5) - pair.goals[2][0] + 0.1 * noise
    assert float((owed - before).norm()) > 0.5 * float(gradient.norm())
    assert not pair.optimizers[2].current
    pair.play(6)
    assert pair.equal()
    assert [optimizer.resyncs for optimizer in pair.optimizers] == [0, 0, 1]


@pytest.mark.parametrize("lost", ["left", "right", "both"])
def test_without_the_others_half_a_powersgd_trainer_owes_all_of_it(lost: str) -> None:
    """No P: its Q is about other columns and counts nothing. No Q: nobody was there for it, so the
    update is missed, and not passed over as if nobody had had a gradient."""
    pair = Pair(ArithmeticSwarm(3), "powersgd", 3, momentum=0.0)
    pair.play(1)
    before = pair.optimizers[2]._errors["0.0"].clone()
    x = pair.models[2][0].detach().clone()
    if lost != "right":
        pair.swarm.lose_result("powersgd.left", round=1, peer=2, tensors=["0.0"])
    for peer in range(3 if lost != "left" else 0):
        pair.swarm.lose_contribution("powersgd.right", round=1, peer=peer)
    pair.play(1)
    noise = torch.randn(6, 5, generator=draws(100 + 2))
    gradient = x - pair.goals[2][0] + 0.1 * noise
    torch.testing.assert_close(pair.optimizers[2]._errors["0.0"], before + gradient)
    assert pair.optimizers[2].missed == 1


def test_a_powersgd_trainer_that_meets_nobody_trains_on_and_says_so() -> None:
    """A swarm of one: what it takes and what it owes is its gradient, and nothing is owed twice."""
    swarm, total = ArithmeticSwarm(1), torch.zeros(8, 6)
    for number in range(10):
        for half in ("left", "right"):
            swarm.lose_contribution(f"powersgd.{half}", round=number, peer=0)
    x = nn.Parameter(torch.zeros(8, 6))
    optimizer: Any = by_name("powersgd", [x], swarm.peer(0), lr=1.0, rank=2)
    for k in range(10):
        x.grad = torch.randn(8, 6, generator=draws(k))
        total += x.grad
        swarm.play(lambda peer: optimizer.step())
    torch.testing.assert_close(optimizer._errors["0.0"] - x.detach(), total, atol=1e-4, rtol=1e-4)
    assert not optimizer.current
    assert optimizer.missed == 10


def test_every_seed_of_powersgd_is_another_start() -> None:
    starts = []
    for seed in (0, 1, 2**32, 2**40, 2**62):
        x = nn.Parameter(torch.zeros(8, 6))
        optimizer: Any = by_name("powersgd", [x], ArithmeticSwarm(1).peer(0), seed=seed)
        starts.append(tuple(optimizer._q["0.0"].flatten().tolist()))
    assert len(set(starts)) == len(starts)


def test_diloco_is_nesterov_on_what_all_moved() -> None:
    problem, start = Quadratics.random(draws(1), workers=3, numel=4), normal(draws(), 4)
    team = Team(ArithmeticSwarm(3), "diloco", [start] * 3, inner=SGD, lr=0.1, every=4)
    for trainer in team.trainers:
        trainer.optimizer.samples = 1 + trainer.peer  # type: ignore[attr-defined]
    twin = nn.Parameter(start.clone())
    outer = SGD([twin], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        ends = []
        for worker in range(3):
            x = twin.detach().clone()
            for _ in range(4):
                x = x - 0.1 * problem.grad(worker, x)
            ends.append((1 + worker) * (twin.detach() - x))
        twin.grad = torch.stack(ends).sum(0) / 6
        outer.step()
    team.step(lambda i, k, x: problem.grad(i, x), steps=12)
    torch.testing.assert_close(team.xs[0], twin.detach())
    assert team.equal()


def test_fragments_take_turns_and_land_later_and_mixed() -> None:
    problem, swarm = Quadratics.random(draws(1), workers=2, numel=3), ArithmeticSwarm(2)
    pairs = [[nn.Parameter(torch.zeros(3, dtype=FLOAT)) for _ in range(2)] for _ in range(2)]
    optimizers: list[Any] = [
        by_name(
            "streaming-diloco", xs, swarm.peer(i), inner=SGD, lr=0.1, every=4, fragments=2,
            overlap=1, alpha=0.25, codec="float32", **EXACT_OUTER,
        )
        for i, xs in enumerate(pairs)
    ]  # fmt: skip

    def play(peer: int) -> None:
        for x in pairs[peer]:
            x.grad = problem.grad(peer, x.detach())
        optimizers[peer].step()

    def local(peer: int, steps: int) -> Tensor:
        x = torch.zeros(3, dtype=FLOAT)
        for _ in range(steps):
            x = x - 0.1 * problem.grad(peer, x)
        return x

    for _ in range(2):
        swarm.play(play)
    assert [optimizer.version for optimizer in optimizers] == [0, 0]  # left, and not landed
    swarm.play(play)
    mean = torch.stack([local(peer, 2) for peer in range(2)]).mean(0)
    for peer in range(2):
        torch.testing.assert_close(
            pairs[peer][0].detach(), 0.25 * local(peer, 3) + 0.75 * mean, msg="fragment 0"
        )
        torch.testing.assert_close(pairs[peer][1].detach(), local(peer, 3), msg="fragment 1 waits")
        torch.testing.assert_close(optimizers[peer].replicated_state()["x.0.0"], mean)
    for _ in range(2):
        swarm.play(play)
    mean = torch.stack([local(peer, 4) for peer in range(2)]).mean(0)
    for peer in range(2):
        torch.testing.assert_close(optimizers[peer].replicated_state()["x.0.1"], mean)
    assert [optimizer.version for optimizer in optimizers] == [2, 2]


def test_outer_gradients_of_four_bits_train_too() -> None:
    ends = {}
    for codec in ("float32", "nuqsgd", "int4"):
        problem = Quadratics.random(draws(3), workers=4, numel=512)
        a, b = problem.a.float(), problem.b.float()
        team = Team(
            ArithmeticSwarm(4), "diloco", [torch.zeros(512)] * 4, inner=SGD, lr=0.05, every=4,
            outer_lr=0.4, outer_momentum=0.5, codec=codec,
        )  # fmt: skip
        team.step(lambda i, k, x, a=a, b=b: a[i] * (x - b[i]), steps=160)
        best = problem.optimum().float()
        ends[codec] = float((team.xs[0] - best).norm() / best.norm()), team.swarm.bytes_sent(0)
        assert team.equal()
    assert max(off for off, _ in ends.values()) < 0.12
    assert ends["float32"][1] > 7 * ends["nuqsgd"][1]


def test_uneven_trainers_make_one_batch_of_the_target() -> None:
    """Every step is the mean gradient over all samples that anybody took since the last one."""
    swarm, target = ArithmeticSwarm(3), 40
    xs = [nn.Parameter(torch.zeros(2, dtype=FLOAT)) for _ in range(3)]
    optimizers: list[Any] = [
        by_name("target-batch", [x], swarm.peer(i), lr=1.0, target=target) for i, x in enumerate(xs)
    ]
    seen: list[list[tuple[int, Tensor, int]]] = [[], [], []]

    def play(peer: int) -> None:
        for k in range(20):
            gradient = torch.randn(2, generator=draws(10 * k + peer), dtype=FLOAT)
            samples = 1 + 2 * peer
            seen[peer].append((optimizers[peer].version, gradient, samples))
            xs[peer].grad, optimizers[peer].samples = gradient.clone(), samples
            optimizers[peer].step()

    swarm.play(play)
    steps = optimizers[0].version
    assert steps >= 3
    wanted = torch.zeros(2, dtype=FLOAT)
    for version in range(steps):
        part = [(g, n) for one in seen for v, g, n in one if v == version]
        total = sum(n for _, n in part)
        assert target <= total <= target + 2 * 9, "and what came in during the last look"
        wanted -= sum((g * n for g, n in part), torch.zeros(2, dtype=FLOAT)) / total
    for x in xs:
        torch.testing.assert_close(x.detach(), wanted)


def test_fewer_trainers_take_more_micro_batches_to_the_same_batch() -> None:
    counts = []
    for n in (1, 2, 4):
        team = Team(ArithmeticSwarm(n), "target-batch", [tensor([0.0])] * n, lr=0.1, target=16)
        team.step(lambda i, k, x: x - 1, steps=64)
        counts.append(team.trainers[0].optimizer.version)  # type: ignore[attr-defined]
    assert counts == [3, 7, 12]


# ---- Missed updates, overflows, checkpoints.


@pytest.mark.parametrize("name", list(ALL))
def test_a_peer_that_was_away_catches_up(name: str) -> None:
    pair = Pair(ArithmeticSwarm(3), name, 3)
    pair.play(9)
    pair.play(40, peers=[0, 2])

    def play(peer: int) -> None:
        optimizer = pair.optimizers[peer]
        if peer == 1:
            while not optimizer.catch_up():
                pass
        while optimizer.version < 80:
            pair.step(peer)

    pair.swarm.play(play)
    assert pair.optimizers[1].resyncs == 1
    assert pair.equal()
    assert [optimizer.version for optimizer in pair.optimizers] == [80] * 3


@pytest.mark.parametrize("lost", ["contribution", "result"])
def test_a_comparison_without_the_one_that_was_away_tells_it_nothing(lost: str) -> None:
    """Two that are equal compare, and it only listens, or hears nothing: it is not brought up to
    date, and waits for the next comparison."""
    pair = Pair(ArithmeticSwarm(3), "powersgd", 3)
    pair.play(8)
    pair.play(13, peers=[0, 2])
    number, found = 21 // pair.optimizers[0]._check_every, []
    if lost == "contribution":
        pair.swarm.lose_contribution("powersgd.check", round=number, peer=1)
    else:
        pair.swarm.lose_result("powersgd.check", round=number, peer=1, tensors=["words"])

    def play(peer: int) -> None:
        optimizer = pair.optimizers[peer]
        while peer == 1 and not (optimizer.catch_up() and optimizer.current):
            found.append((optimizer.current, optimizer.resyncs))
        while optimizer.version < 40:
            pair.step(peer)

    pair.swarm.play(play)
    assert found == [(False, 0)]
    assert pair.optimizers[1].resyncs == 1
    assert pair.equal()


def test_who_joins_delayed_sgd_opens_all_its_rounds_at_once() -> None:
    """On daemons each is a run, and who opens one at its first use is late for that round."""
    pair = Pair(ArithmeticSwarm(1), "delayed-sgd", 1)
    assert not pair.optimizers[0].catch_up()
    rounds = {f"gradient{turn}" for turn in range(3)}
    assert rounds <= pair.optimizers[0]._open.keys()
    pair.play(3)
    assert pair.optimizers[0].version == 3, "opened for what an update sends"


def test_a_delayed_trainer_that_is_behind_counts_on_once() -> None:
    """What two rounds under way say of one lag is one correction."""
    pair = Pair(ArithmeticSwarm(3), "delayed-sgd", 3, check_every=1000)
    pair.play(9)
    pair.play(6, peers=[0, 2])  # rounds go by names in turn; after 2 x 3 the names are in step
    seen = []
    for _ in range(12):
        pair.play(1)
        seen.append(pair.optimizers[0].version - pair.optimizers[1].version)
    assert seen[:2] == [6, 6]  # until a round that began together has come back
    assert seen[3:] == [0] * 9


def test_a_delayed_trainer_that_counted_ahead_comes_back_in_step() -> None:
    """On its own it counted what nobody else did; of what it has under way twice, it compares as
    much as the others have."""
    pair = Pair(ArithmeticSwarm(3), "delayed-sgd", 3)
    pair.play(9)
    pair.optimizers[1].version += 3
    pair.optimizers[1].current = False
    pair.play(15)
    assert [optimizer.version for optimizer in pair.optimizers] == [24] * 3
    assert pair.equal()
    assert [optimizer.resyncs for optimizer in pair.optimizers] == [0, 1, 0]


@pytest.mark.parametrize("name", list(ALL))
def test_a_lost_result_is_healed_at_the_next_comparison(name: str) -> None:
    pair = Pair(ArithmeticSwarm(3), name, 3)
    channel = {
        "diloco": "outer", "streaming-diloco": "outer0", "powersgd": "left",
        "delayed-sgd": "gradient0", "target-batch": "gradient",
    }[name]  # fmt: skip
    pair.swarm.lose_result(f"{name}.{channel}", round=1, peer=1, tensors=["0.0"])
    for _ in range(200):
        pair.play(1)
        if pair.optimizers[1].missed:
            break
    assert not pair.equal()
    for _ in range(200):
        pair.play(1)
        if pair.optimizers[1].current:
            break
    assert pair.equal()
    assert [optimizer.resyncs for optimizer in pair.optimizers] == [0, 1, 0]


@pytest.mark.parametrize("name", list(ALL))
def test_a_restarted_trainer_goes_on_bit_for_bit(name: str) -> None:
    codec = {"codec": "int4"} if name == "diloco" else {}  # with error feedback
    pair = Pair(ArithmeticSwarm(2, seed=3, cut=Cut.PARTS), name, 2, **codec)
    pair.play(7)
    if name == "streaming-diloco":
        pair.swarm.play(lambda peer: pair.optimizers[peer].land())
    saved = []

    def save(peer: int) -> None:
        file = io.BytesIO()
        torch.save(
            {"model": pair.models[peer], "optimizer": pair.optimizers[peer].state_dict()}, file
        )
        saved.append((peer, file))

    pair.swarm.play(save)
    steps, rounds = list(pair.steps), {}
    for key, (_, found) in pair.swarm._averages.items():
        rounds[key] = found._open.number + int(found._open.closed)
    pair.play(9)
    wanted = pair.vector

    again = Pair(ArithmeticSwarm(2, seed=3, cut=Cut.PARTS), name, 2, **codec)
    for key, number in rounds.items():  # draws of random codecs go by the number of the round
        again.swarm._average(key, None)[1]._open.number = number
    for peer, file in saved:
        file.seek(0)
        state = torch.load(file, weights_only=False)
        with torch.no_grad():
            for x, old in zip(again.models[peer], state["model"], strict=True):
                x.copy_(old)
        again.optimizers[peer].load_state_dict(state["optimizer"])
    again.steps = steps
    again.play(9)
    assert torch.equal(again.vector, wanted)


@pytest.mark.parametrize("name", ["delayed-sgd", "target-batch", "diloco", "powersgd"])
def test_a_checkpoint_from_elsewhere_is_brought_to_the_parameters(name: str) -> None:
    """A dtype stands for a device here: what was loaded works with what is computed next, and the
    checkpoint stays as it is."""
    pair = Pair(ArithmeticSwarm(1), name, 1, **({"target": 500} if name == "target-batch" else {}))
    pair.play(5)

    def wide(found: Any) -> Any:
        if isinstance(found, Tensor):
            return found.double() if found.is_floating_point() else found
        if isinstance(found, dict):
            return {key: wide(value) for key, value in found.items()}
        return type(found)(map(wide, found)) if isinstance(found, (list, tuple)) else found

    def tensors(found: Any) -> list[Tensor]:
        if isinstance(found, dict):
            found = list(found.values())
        if isinstance(found, (list, tuple)):
            return [one for value in found for one in tensors(value)]
        return [found] if isinstance(found, Tensor) else []

    saved = pair.optimizers[0].state_dict()
    saved["moshpitd"] = wide(saved["moshpitd"])
    before = [value.clone() for value in tensors(saved["moshpitd"])]
    assert before
    pair.optimizers[0].load_state_dict(saved)
    held = pair.optimizers[0].state_dict()["moshpitd"]
    assert {value.dtype for value in tensors(held)} == {torch.float32}
    for value in tensors(held):
        value.zero_()
    pair.play(5)
    assert all(map(torch.equal, tensors(saved["moshpitd"]), before))


@pytest.mark.parametrize("name", list(ALL))
def test_schedulers_closures_and_overflows(name: str) -> None:
    swarm = ArithmeticSwarm(2)
    options = {**ALL[name], "inner": SGD} if "diloco" in name else ALL[name]
    xs = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    if name == "streaming-diloco":
        options = {**options, "fragments": 1}
    optimizers: list[Any] = [
        by_name(name, [{"params": [x], "lr": 0.1}], swarm.peer(i), **options)
        for i, x in enumerate(xs)
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]

    def play(peer: int) -> None:
        for k in range(8):
            bad = float("inf") if peer and k == 1 else 2.0
            optimizers[peer].zero_grad()
            scalers[peer].scale((xs[peer] * torch.tensor([1.0, bad, 3.0])).sum()).backward()
            scalers[peer].step(optimizers[peer])
            scalers[peer].update()
            schedulers[peer].step()

        def closure() -> float:
            optimizers[peer].zero_grad()
            loss = xs[peer].sum()
            loss.backward()
            return loss.item()

        assert math.isfinite(optimizers[peer].step(closure))

    swarm.play(play)
    for x, optimizer in zip(xs, optimizers, strict=True):
        assert bool(x.isfinite().all())
        assert bool((x < 1).all())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**8)
    assert all(
        torch.equal(value, optimizers[1].replicated_state()[key])
        for key, value in optimizers[0].replicated_state().items()
    )


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("diloco", {"every": 0}, ConfigError),
        ("diloco", {"outer_lr": 0.0}, TrainerError),
        ("diloco", {"outer_momentum": 1.0}, TrainerError),
        ("streaming-diloco", {"fragments": 3}, ConfigError),
        ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 3}, ConfigError),
        ("powersgd", {"rank": 0}, TrainerError),
        ("powersgd", {"codec": "int8"}, ConfigError),
        ("delayed-sgd", {"delay": -1}, TrainerError),
        ("delayed-sgd", {"codec": "top-k"}, ConfigError),
        ("target-batch", {"target": 0}, TrainerError),
        ("target-batch", {"ask_every": 0}, TrainerError),
        ("target-batch", {"codec": "sign-l1"}, ConfigError),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(
    name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    xs = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]
    with pytest.raises(error):
        by_name(name, xs, ArithmeticSwarm(1).peer(0), **options)
