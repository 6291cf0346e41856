"""CHOCO-SGD and DCD-PSGD as shipped: where the mean goes, what replicas hold, how losses heal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client.optim.registry import by_name
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.tensors.rules import choco, dpsgd
from moshpitd.tensors.rules.common import mean
from moshpitd.testing import ArithmeticSwarm
from tests.kit.rules import Quadratics, normal, rounded, top_k
from tests.kit.trainers import Team

CODERS = {
    "top-k": lambda values, draw: top_k(2)(values),
    "natural": lambda values, draw: rounded(values),
    "qsgd": lambda values, draw: (values * 64).round() / 64,
}


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def publics(team: Team) -> list[Tensor]:
    return [t.optimizer._public()["0.0"].clone() for t in team.trainers]  # type: ignore[attr-defined]


def assert_replicas_hold(team: Team, *, ring: int) -> None:
    held = publics(team)
    for trainer in team.trainers:
        replicas = trainer.optimizer.replicas  # type: ignore[attr-defined]
        around = {f"peer{(trainer.peer + by) % ring}" for by in (1, -1)} - {f"peer{trainer.peer}"}
        assert set(replicas.copies) == replicas.knows == around
        for peer, copy in replicas.copies.items():
            assert torch.equal(copy["0.0"], held[int(peer[4:])])


@pytest.mark.parametrize("codec", ["top-k", "natural", "float32"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_choco_moves_the_mean_by_the_gradient_only_for_any_codec(
    codec: str, count: int, overlap: bool
) -> None:
    swarm = ArithmeticSwarm(count, coders=CODERS)
    starts, grads = list(normal(draws(), count, 6)), normal(draws(1), 12, count, 6)
    team = Team(swarm, "choco-sgd", starts, lr=0.2, codec=codec, gamma=0.5, overlap=overlap)
    before = team.mean
    if count > 1:
        swarm.lose_edge("choco-sgd", round=3, between=(0, 1))
    for k in range(12):
        team.step(lambda i, _, x, k=k: grads[k][i])
        torch.testing.assert_close(team.mean, before - 0.2 * grads[: k + 1].mean(1).sum(0))
    if not overlap:
        assert_replicas_hold(team, ring=count)


def test_it_is_the_rules_choco_step_by_step() -> None:
    """Against the one-sum form of the paper on a static ring."""
    n, starts, grads = 4, list(normal(draws(), 4, 6)), normal(draws(1), 6, 4, 6)
    team = Team(
        ArithmeticSwarm(n, coders=CODERS), "choco-sgd", starts, lr=0.2, codec="top-k", gamma=0.3
    )
    states = [choco.choco_start(x) for x in starts]
    for k in range(6):
        coded = [
            choco.choco_message(state, grad=grads[k][i], eta=0.2, compress=top_k(2))
            for i, state in enumerate(states)
        ]
        states = [
            choco.choco_mix(
                state,
                own=coded[i][0],
                own_weight=1 / 3,
                others=[(1 / 3, coded[(i + by) % n][0]) for by in (1, -1)],
                gamma=0.3,
            )
            for i, (_, state) in enumerate(coded)
        ]
        team.step(lambda i, _, x, k=k: grads[k][i])
        torch.testing.assert_close(torch.stack(team.xs), torch.stack([s.x for s in states]))


def test_a_message_lost_without_its_sender_s_knowledge_is_noticed_and_healed() -> None:
    n = 4
    swarm = ArithmeticSwarm(n, coders=CODERS)
    team = Team(swarm, "choco-sgd", list(normal(draws(), n, 6)), lr=0.1, codec="top-k", gamma=0.3)
    zero = lambda i, k, x: torch.zeros_like(x)  # noqa: E731
    team.step(zero, steps=3)
    assert_replicas_hold(team, ring=n)
    swarm.lose_message("choco-sgd", round=3, source=1, target=2)
    team.step(zero)
    replicas = team.trainers[2].optimizer.replicas  # type: ignore[attr-defined]
    assert "peer1" not in replicas.copies
    before = team.mean
    team.step(zero)  # peer 1's difference is not usable, peer 2 sends its copy in full
    torch.testing.assert_close(team.mean, before), "an edge that one end cannot use, neither does"
    team.step(zero)
    assert_replicas_hold(team, ring=n)
    team.step(zero, steps=300)
    torch.testing.assert_close(torch.stack(team.xs), before.expand(n, 6), atol=1e-4, rtol=0)


def test_choco_goes_on_while_peers_come_and_go() -> None:
    n = 5
    swarm = ArithmeticSwarm(n, coders=CODERS)
    team = Team(swarm, "choco-sgd", list(normal(draws(), n, 6)), lr=0.1, codec="top-k", gamma=0.3)
    before = team.mean
    zero = lambda i, k, x: torch.zeros_like(x)  # noqa: E731
    for alive in ([0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4]):
        team.step(zero, steps=2, peers=alive)
        torch.testing.assert_close(team.mean, before)
    team.step(zero, steps=2)
    assert_replicas_hold(team, ring=n)


def test_a_restored_peer_sends_and_gets_copies_in_full() -> None:
    n = 3
    swarm = ArithmeticSwarm(n, coders=CODERS)
    team = Team(swarm, "choco-sgd", list(normal(draws(), n, 6)), lr=0.1, codec="top-k", gamma=0.3)
    zero = lambda i, k, x: torch.zeros_like(x)  # noqa: E731
    team.step(zero, steps=4)
    saved = team.trainers[1].optimizer.state_dict()
    team.step(zero, steps=2)
    again = team.trainer(1, team.trainers[1].path[3])
    again.optimizer.load_state_dict(saved)
    team.trainers[1] = again
    before = team.mean
    team.step(zero, steps=3)
    torch.testing.assert_close(team.mean, before)
    assert_replicas_hold(team, ring=n)


def test_it_trains_with_the_codecs_of_the_wire() -> None:
    problem = Quadratics.random(draws(), workers=4, numel=64)
    a, b = problem.a.float(), problem.b.float()
    for name, options in (
        ("choco-sgd", {"codec": "sign-l1", "gamma": 0.2}),
        ("choco-sgd", {"codec": "int8", "gamma": 1.0}),
        ("dcd-psgd", {"codec": "natural"}),
        ("dcd-psgd", {"codec": "qsgd"}),
        ("low-precision-decentralized", {}),
        ("async-low-precision-decentralized", {"gamma": 0.7}),
    ):
        team = Team(ArithmeticSwarm(4), name, [torch.zeros(64)] * 4, lr=0.3, **options)
        for trainer in team.trainers:
            torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda k: 1 / (1 + k / 10))

        def play(peer: int, team: Team = team) -> None:
            for k in range(120):
                team.trainers[peer].optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 10)
                team.trainers[peer].step(lambda i, k, x: a[i] * (x - b[i]))

        team.swarm.play(play)
        off = (team.mean - problem.optimum().float()).norm() / problem.optimum().norm()
        assert off < 0.05, (name, options)


# ---- DCD.


@pytest.mark.parametrize("count", [1, 2, 5])
def test_exact_dcd_is_dpsgd_from_its_second_step_on(count: int) -> None:
    swarm = ArithmeticSwarm(count)
    start, grads = normal(draws(), 6), normal(draws(1), 5, count, 6)
    team = Team(swarm, "dcd-psgd", [start] * count, lr=0.2, codec="float32")
    states = [start] * count
    rows = swarm.schedule("ring").sample(0).rows()
    for k in range(5):
        states = dpsgd.swarm_step(states, list(grads[k]), rows=rows, gamma=0.2)
        team.step(lambda i, _, x, k=k: grads[k][i])
        torch.testing.assert_close(torch.stack(team.xs), torch.stack(states))
        assert_replicas_hold(team, ring=count)


def test_dcd_from_unequal_starts_agrees_and_its_replicas_are_exact() -> None:
    swarm = ArithmeticSwarm(5, coders=CODERS)
    starts = list(normal(draws(), 5, 6))
    team = Team(swarm, "dcd-psgd", starts, lr=0.1, codec="qsgd")
    team.step(lambda i, k, x: torch.zeros_like(x), steps=40)
    assert_replicas_hold(team, ring=5)
    torch.testing.assert_close(torch.stack(team.xs), mean(starts).expand(5, 6), atol=5 / 64, rtol=0)


def test_refusals() -> None:
    x = [nn.Parameter(torch.zeros(2))]
    peer = ArithmeticSwarm(2).peer(0)
    with pytest.raises(ConfigError, match="'top-k' decodes into the parameters, and it is biased"):
        by_name("dcd-psgd", x, peer, codec="top-k")
    by_name("dcd-psgd", x, peer, codec="top-k", allow_biased=True)
    with pytest.raises(ConfigError, match="unknown codec 'gzip'"):
        by_name("choco-sgd", x, peer, codec="gzip")
    with pytest.raises(TrainerError, match="gamma 0"):
        by_name("choco-sgd", x, peer, gamma=0)


def test_bytes_of_a_ring_of_differences() -> None:
    d = 2048
    swarm = ArithmeticSwarm(4)
    team = Team(swarm, "low-precision-decentralized", [torch.zeros(d)] * 4, lr=0.1)
    grads = normal(draws(), 3, 4, d).float()
    team.step(lambda i, k, x: grads[k][i])
    first = swarm.bytes_sent(0)
    team.step(lambda i, k, x: grads[k][i])
    assert swarm.bytes_sent(0) - first == 2 * (d + 8 * 2), "two blocks of 1,024"
    assert first == 2 * (d + 8 * 2) + 2 * 4 * d, "replicas are exchanged with the first"
