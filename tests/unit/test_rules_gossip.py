"""D-PSGD, push-sum, AD-PSGD, CHOCO and DCD: worked examples, and where the mean goes.

One rule: whatever a round does, the sum over peers is checked against the gradients alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules import adpsgd, choco, common, dpsgd, pushsum
from moshpitd.tensors.rules.choco import Arrival, Inbox
from moshpitd.tensors.rules.common import identity, mean
from moshpitd.tensors.rules.dpsgd import Order
from moshpitd.tensors.rules.pushsum import PushSum
from tests.kit.rules import (
    FLOAT,
    Quadratics,
    close,
    examples,
    generators,
    named,
    normal,
    qsgd,
    rounded,
    tensor,
    top_k,
)

Rows = list[dict[int, float]]
peers_of = st.integers(1, 9)


def sparse(w: list[list[float]]) -> Rows:
    return [{j: weight for j, weight in enumerate(row) if weight} for row in w]


def ring(n: int) -> Rows:
    """Written out here: tensors may not import the core's schedules, and a test of the rules need
    not."""
    if n < 3:
        return [dict.fromkeys(range(n), 1 / n) for _ in range(n)]
    return [{i: 1 / 3, (i - 1) % n: 1 / 3, (i + 1) % n: 1 / 3} for i in range(n)]


def circle(n: int, shift: int, dead: frozenset[int] = frozenset()) -> Rows:
    """Everybody gives half to i + shift; a half that cannot be delivered stays."""
    rows: Rows = [{i: 0.5} for i in range(n)]
    for i in range(n):
        target = (i + shift) % n
        goes = target != i and i not in dead and target not in dead
        to = target if goes else i
        rows[to][i] = rows[to].get(i, 0.0) + 0.5
    return rows


def stack(states: list[Tensor]) -> Tensor:
    return torch.stack(states)


def distance(states: list[Tensor]) -> float:
    x = stack(states)
    return float(torch.linalg.matrix_norm(x - x.mean(0)))


# ---- D-PSGD.


@pytest.mark.parametrize("example", examples("dpsgd*"), ids=named)
def test_the_golden_dpsgd(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    rows, gamma = sparse(inputs["W"]), inputs["gamma"]
    for order, expected in (
        (Order.MIX_THEN_STEP, outputs["X"][1:]),
        (Order.ADAPT_THEN_COMBINE, outputs["adapt_then_combine"]),
    ):
        states = list(tensor(inputs["X0"]))
        for k, noise in enumerate(inputs["noise"]):
            grads = [problem.grad(i, x) + tensor(noise[i]) for i, x in enumerate(states)]
            if order is Order.MIX_THEN_STEP:
                close(stack(grads), outputs["grads"][k], atol)
            states = dpsgd.swarm_step(states, grads, rows=rows, gamma=gamma, order=order)
            if k < len(expected):
                close(stack(states), expected[k], atol)


@given(
    generator=generators(), n=peers_of, gamma=st.floats(0, 1), order=st.sampled_from(list(Order))
)
def test_dpsgd_moves_the_mean_by_the_mean_gradient(
    generator: torch.Generator, n: int, gamma: float, order: Order
) -> None:
    states, grads = list(normal(generator, n, 5)), list(normal(generator, n, 5))
    moved = dpsgd.swarm_step(states, grads, rows=ring(n), gamma=gamma, order=order)
    torch.testing.assert_close(mean(moved), mean(states) - gamma * mean(grads))
    if gamma == 0 and n > 2:
        eigen = 1 / 3 + 2 / 3 * torch.cos(2 * torch.pi * torch.arange(1, n, dtype=FLOAT) / n)
        assert distance(moved) <= float(eigen.abs().max()) * distance(states) + 1e-12


@given(generator=generators(), n=peers_of, order=st.sampled_from(list(Order)))
def test_dpsgd_on_the_complete_graph_from_equal_starts_is_minibatch_sgd(
    generator: torch.Generator, n: int, order: Order
) -> None:
    start, grads = normal(generator, 4), list(normal(generator, n, 4))
    rows = [dict.fromkeys(range(n), 1 / n) for _ in range(n)]
    moved = dpsgd.swarm_step([start] * n, grads, rows=rows, gamma=0.3, order=order)
    if order is Order.ADAPT_THEN_COMBINE:
        for x in moved:
            torch.testing.assert_close(x, start - 0.3 * mean(grads))
    else:
        torch.testing.assert_close(mean(moved), start - 0.3 * mean(grads))
        again = dpsgd.swarm_step(moved, grads, rows=rows, gamma=0.0, order=order)
        torch.testing.assert_close(again[0], start - 0.3 * mean(grads))


def test_any_local_optimizer_may_run_during_the_exchange() -> None:
    before, after = tensor([1.0, 2.0]), tensor([0.5, 2.5])
    mixed = dpsgd.mix([before, tensor([3.0, 0.0])], [0.5, 0.5])
    close(dpsgd.carry_update(mixed, before=before, after=after), [1.5, 1.5], 1e-12)
    step = dpsgd.mix_then_step(mixed, grad=before - after, gamma=1.0)
    torch.testing.assert_close(step, dpsgd.carry_update(mixed, before=before, after=after))


def test_dpsgd_formulas() -> None:
    gamma = dpsgd.theory_gamma(smoothness=2.0, sigma=0.5, steps=100, peers=4)
    assert gamma == pytest.approx(1 / (4 + 0.5 * 5))
    assert dpsgd.bytes_per_step(1000, neighbours=2) == 8000


# ---- What all families share.


def test_sums_are_in_order_and_in_float32_at_least() -> None:
    halves = [torch.full((3,), 2048.0, dtype=torch.float16), torch.ones(3, dtype=torch.float16)]
    summed = common.weighted_sum([*halves, halves[1]], [1.0, 1.0, 1.0])
    assert summed.dtype == torch.float16
    assert summed.tolist() == [2050.0] * 3, "2048 + 1 is 2048 in float16; twice so"
    assert mean([tensor([0.5, 7.0])] * 3).tolist() == [0.5, 7.0]


def test_tensors_that_do_not_match_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="no tensors"):
        mean([])
    with pytest.raises(LocalProtocolError, match=r"tensor 1 is \(1,\)"):
        mean([tensor([1.0, 2.0]), tensor([1.0])])
    with pytest.raises(LocalProtocolError, match="2 weights for 1"):
        common.weighted_sum([tensor([1.0])], [0.5, 0.5])


# ---- Push-sum.


@pytest.mark.parametrize("example", examples("sgp*"), ids=named)
def test_the_golden_push_sum(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    problem = Quadratics(tensor(inputs["A"]), tensor(inputs["B"]))
    states = [pushsum.start(x) for x in tensor(inputs["X0"])]
    n, gamma = len(states), inputs["gamma"]
    for shift, expected in zip(inputs["shifts"], outputs["steps"], strict=True):
        stepped = [
            pushsum.local_step(state, grad=problem.grad(i, state.z), gamma=gamma)
            for i, state in enumerate(states)
        ]
        messages = [pushsum.split(state, [0.5]) for state in stepped]
        states = [pushsum.absorb(messages[i][0], messages[(i - shift) % n][1]) for i in range(n)]
        whole = pushsum.swarm_mix(stepped, circle(n, shift))
        for state, other in zip(states, whole, strict=True):
            torch.testing.assert_close(state.x, other.x)
            assert state.weight == pytest.approx(other.weight, abs=1e-15)
        close(stack([state.x for state in states]), expected["x"], atol)
        close(tensor([state.weight for state in states]), expected["w"], atol)
        close(stack([state.z for state in states]), expected["z"], atol)

    rows = sparse(inputs["P_nonregular"])
    plain = [pushsum.start(tensor([x])) for x in inputs["x_nonregular"]]
    seen = [[state.z.item() for state in plain]]
    for _ in range(200):
        plain = pushsum.swarm_mix(plain, rows)
        seen.append([state.z.item() for state in plain])
    for expected in outputs["nonregular_z_after"]:
        off = min(max(abs(a - b) for a, b in zip(row, expected, strict=True)) for row in seen)
        assert off < 1e-9
    close(tensor([state.weight for state in plain]), outputs["nonregular_w_final"], max(atol, 1e-9))
    total = sum(inputs["x_nonregular"]) / len(plain)
    close(tensor(seen[-1]), [total] * len(plain), 1e-9)


@given(
    generator=generators(), n=peers_of, gamma=st.floats(0, 1), steps=st.integers(1, 6),
    data=st.data(),
)  # fmt: skip
def test_push_sum_keeps_all_mass_when_peers_die(
    generator: torch.Generator, n: int, gamma: float, steps: int, data: st.DataObject
) -> None:
    states = [pushsum.start(x) for x in normal(generator, n, 3)]
    for t in range(steps):
        grads = normal(generator, n, 3)
        before = sum(state.x for state in states)
        stepped = [
            pushsum.local_step(state, grad=grad, gamma=gamma)
            for state, grad in zip(states, grads, strict=True)
        ]
        dead = frozenset(data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2)))
        states = pushsum.swarm_mix(stepped, circle(n, 2**t, dead))
        assert sum(state.weight for state in states) == pytest.approx(n)
        torch.testing.assert_close(sum(state.x for state in states), before - gamma * grads.sum(0))
    wanted = sum(state.x for state in states) / n
    for t in range(100):
        states = pushsum.swarm_mix(states, circle(n, 1 + t % max(1, n - 1)))
    for state in states:
        torch.testing.assert_close(state.z, wanted)


def test_an_undelivered_message_comes_home() -> None:
    state = PushSum(tensor([4.0, -2.0]), 1.5)
    kept, messages = pushsum.split(state, [0.25, 0.5])
    back = pushsum.absorb(kept, messages)
    close(back.x, [4.0, -2.0], 1e-12)
    assert back.weight == 1.5
    assert kept.weight == pytest.approx(0.375)


def test_a_leaver_hands_its_mass_over_and_a_newcomer_brings_its_own() -> None:
    states = [pushsum.start(tensor([x])) for x in (1.0, 2.0, 6.0)]
    stayed = [states[0], pushsum.absorb(states[1], [pushsum.leave(states[2])])]
    rows: Rows = [{0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}]
    mixed = pushsum.swarm_mix(stayed, rows)
    assert [state.z.item() for state in mixed] == pytest.approx([3.0, 3.0])
    joined = [*mixed, pushsum.start(mixed[0].z)]
    assert sum(state.weight for state in joined) == pytest.approx(4.0)
    assert joined[-1].z.item() == pytest.approx(3.0)


def test_push_sum_refuses_shares_that_make_mass_and_weights_that_are_gone() -> None:
    state = pushsum.start(tensor([1.0]))
    for shares in ([0.6, 0.6], [-0.1]):
        with pytest.raises(LocalProtocolError, match="sum to <= 1"):
            pushsum.split(state, shares)
    with pytest.raises(LocalProtocolError, match="gave without receiving"):
        _ = PushSum(tensor([1.0]), 0.0).z
    assert pushsum.bytes_per_step(100, out_peers=2) == 808
    moved = pushsum.carry_update(state, before=tensor([1.0]), after=tensor([0.25]))
    assert moved.x.item() == 0.25


# ---- AD-PSGD.


@given(generator=generators(), gamma=st.floats(0, 1))
def test_an_event_of_adpsgd_moves_the_sum_by_one_gradient(
    generator: torch.Generator, gamma: float
) -> None:
    active, passive, grad = normal(generator, 3, 6)
    new_active, new_passive = adpsgd.event(active, passive, grad=grad, gamma=gamma)
    torch.testing.assert_close(new_active + new_passive, active + passive - gamma * grad)
    torch.testing.assert_close(new_passive, (active + passive) / 2)


@given(generator=generators())
def test_opposite_deltas_keep_local_steps_that_happened_meanwhile(
    generator: torch.Generator,
) -> None:
    one, other, late_one, late_other = normal(generator, 4, 6)
    delta, negative = adpsgd.average_delta(one, other), adpsgd.average_delta(other, one)
    assert torch.equal(delta, -negative)
    after_one, after_other = one + late_one + delta, other + late_other + negative
    torch.testing.assert_close(after_one - late_one, after_other - late_other)
    torch.testing.assert_close(after_one + after_other, one + other + late_one + late_other)
    assert adpsgd.bytes_per_event(10) == 40


def test_adpsgd_converges_on_a_quadratic() -> None:
    generator = torch.Generator().manual_seed(1)
    problem = Quadratics.random(generator, workers=5, numel=3)
    states = list(normal(generator, 5, 3))
    for k in range(6000):
        i = int(torch.randint(5, (), generator=generator))
        j = (i + 1) % 5
        grad = problem.grad(i, states[i])
        states[i], states[j] = adpsgd.event(
            states[i], states[j], grad=grad, gamma=1.0 / (10 + k / 10)
        )
    torch.testing.assert_close(mean(states), problem.optimum(), atol=0.05, rtol=0)


# ---- CHOCO and DCD.


def choco_round(
    states: list[choco.Choco],
    grads: list[Tensor],
    *,
    rows: Rows,
    eta: float,
    gamma: float,
    codec: Any,
) -> list[choco.Choco]:
    coded = [
        choco.choco_message(state, grad=grad, eta=eta, compress=codec)
        for state, grad in zip(states, grads, strict=True)
    ]
    return [
        choco.choco_mix(
            state,
            own=coded[i][0],
            own_weight=rows[i][i],
            others=[(weight, coded[j][0]) for j, weight in rows[i].items() if j != i],
            gamma=gamma,
        )
        for i, (_, state) in enumerate(coded)
    ]


codecs = st.sampled_from(["top", "qsgd", "rounded", "exact"])


def codec_named(name: str, generator: torch.Generator) -> Any:
    return {
        "top": top_k(2),
        "qsgd": qsgd(4, generator),
        "rounded": rounded,
        "exact": identity,
    }[name]


@given(generator=generators(), n=peers_of, codec=codecs, gamma=st.floats(0.01, 1))
def test_choco_moves_the_mean_by_the_gradient_only_for_any_codec(
    generator: torch.Generator, n: int, codec: str, gamma: float
) -> None:
    rows, compress = ring(n), codec_named(codec, generator)
    states = [choco.choco_start(x) for x in normal(generator, n, 6)]
    for _ in range(4):
        grads = list(normal(generator, n, 6))
        wanted = mean([state.x for state in states]) - 0.2 * mean(grads)
        states = choco_round(states, grads, rows=rows, eta=0.2, gamma=gamma, codec=compress)
        torch.testing.assert_close(mean([state.x for state in states]), wanted)
        for i, state in enumerate(states):
            publics = [states[j].public for j in rows[i]]
            torch.testing.assert_close(state.around, dpsgd.mix(publics, list(rows[i].values())))


@given(generator=generators(), n=peers_of)
def test_exact_choco_with_gamma_one_is_adapt_then_combine(
    generator: torch.Generator, n: int
) -> None:
    start = list(normal(generator, n, 4))
    grads = list(normal(generator, n, 4))
    states = [choco.choco_start(x) for x in start]
    moved = choco_round(states, grads, rows=ring(n), eta=0.1, gamma=1.0, codec=identity)
    wanted = dpsgd.swarm_step(start, grads, rows=ring(n), gamma=0.1, order=Order.ADAPT_THEN_COMBINE)
    torch.testing.assert_close(stack([state.x for state in moved]), stack(wanted))


def test_choco_gossip_agrees_with_a_biased_codec() -> None:
    generator = torch.Generator().manual_seed(7)
    start = list(normal(generator, 5, 12))
    states = [choco.choco_start(x) for x in start]
    zeros = [torch.zeros(12, dtype=FLOAT)] * 5
    for _ in range(800):
        states = choco_round(states, zeros, rows=ring(5), eta=0.0, gamma=0.2, codec=top_k(1))
    for state in states:
        torch.testing.assert_close(state.x, mean(start), atol=1e-3, rtol=0)
    equal = choco.choco_start_equal(start[0])
    assert torch.equal(equal.public, start[0])
    assert torch.equal(equal.around, start[0])


def test_a_lost_message_is_noticed_and_healed() -> None:
    """Peer 1 misses round 1 of peer 0: it sees the gap, stops applying, and rebuilds s."""
    inbox = Inbox()
    verdict, inbox = choco.arrive(inbox, 0)
    assert verdict is Arrival.APPLY
    verdict, inbox = choco.arrive(inbox, 0)
    assert verdict is Arrival.REPEATED
    verdict, inbox = choco.arrive(inbox, 2)
    assert verdict is Arrival.LOST
    assert choco.arrive(inbox, 1)[0] is Arrival.LOST, "too late: s is rebuilt anyway"
    inbox = choco.resynced(3)
    assert choco.arrive(inbox, 3) == (Arrival.APPLY, Inbox(4))
    assert choco.arrive(inbox, 2)[0] is Arrival.REPEATED

    generator = torch.Generator().manual_seed(2)
    states = [choco.choco_start(x) for x in normal(generator, 4, 6)]
    rows, zeros = ring(4), [torch.zeros(6, dtype=FLOAT)] * 4
    for _ in range(3):
        states = choco_round(states, zeros, rows=rows, eta=0.0, gamma=0.3, codec=top_k(2))
    right = states[1].around
    wrong = choco.Choco(states[1].x, states[1].public, right + 1.0)
    healed = choco.choco_resync(
        wrong,
        own_weight=rows[1][1],
        others=[(weight, states[j].public) for j, weight in rows[1].items() if j != 1],
    )
    torch.testing.assert_close(healed.around, right)
    assert torch.equal(healed.x, wrong.x), "a resync moves no parameters"


def test_the_theory_step_of_choco() -> None:
    exact = choco.choco_gamma(gap=1.0, delta=1.0, beta=1.0)
    assert exact == pytest.approx(1 / (16 + 1 + 4 + 2 - 8))
    assert choco.choco_gamma(gap=0.1, delta=0.01, beta=1.3) < 1e-4


@given(generator=generators(), n=st.integers(1, 7))
@settings(max_examples=40)
def test_dcd_with_an_exact_codec_is_dpsgd_and_replicas_follow(
    generator: torch.Generator, n: int
) -> None:
    rows, states = ring(n), list(normal(generator, n, 5))
    grads = list(normal(generator, n, 5))
    coded = [
        choco.dcd_message(
            x,
            grad=grads[i],
            eta=0.2,
            own_weight=rows[i][i],
            others=[(weight, states[j]) for j, weight in rows[i].items() if j != i],
            compress=identity,
        )
        for i, x in enumerate(states)
    ]
    moved = [x + q for x, q in zip(states, coded, strict=True)]
    wanted = dpsgd.swarm_step(states, grads, rows=rows, gamma=0.2)
    torch.testing.assert_close(stack(moved), stack(wanted))
