"""BAGUA's algorithms: worked examples, error bounds of the low precision all-reduce, the ring.

One rule: the codec is a stranger (tests.kit.rules.minmax_uint8), the rule must fit any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.errors import ConfigError
from moshpitd.tensors.rules import bagua, dpsgd
from moshpitd.tensors.rules.bagua import CELLS, QAdam, QAdamOptions
from moshpitd.tensors.rules.common import identity, mean
from tests.kit.rules import (
    close,
    dtype_of,
    examples,
    generators,
    minmax_uint8,
    named,
    normal,
    tensor,
)


@pytest.mark.parametrize("example", examples("minmax_uint8*"), ids=named)
def test_the_stranger_is_bagua_s_codec(example: dict[str, Any]) -> None:
    for case in example["outputs"]["cases"]:
        close(minmax_uint8(tensor(case["x"], torch.float32)), case["decoded"], example["atol"])


@pytest.mark.parametrize("example", examples("bytegrad*"), ids=named)
def test_the_golden_bytegrad(example: dict[str, Any]) -> None:
    values = list(tensor(example["inputs"]["X"], torch.float32))
    outputs, atol = example["outputs"], example["atol"]
    close(bagua.low_precision_allreduce(values, minmax_uint8), outputs["result"], atol)
    close(bagua.low_precision_allreduce(values, identity), outputs["exact_mean"], atol)
    chunks = [[minmax_uint8(c) for c in bagua.split_chunks(v, len(values))] for v in values]
    before = torch.cat([mean(list(column)) for column in zip(*chunks, strict=True)])
    close(before, outputs["mean_before_second_coding"], atol)


@given(generator=generators(), peers=st.integers(1, 6), d=st.integers(1, 40))
def test_bytegrad_is_within_its_bound_of_the_mean(
    generator: torch.Generator, peers: int, d: int
) -> None:
    values = list(normal(generator, peers, d))
    found = bagua.low_precision_allreduce(values, minmax_uint8)
    assert found.numel() == d
    exact = mean(values)
    torch.testing.assert_close(bagua.low_precision_allreduce(values, identity), exact)
    split = [bagua.split_chunks(value, peers) for value in values]
    for r, chunk in enumerate(bagua.split_chunks(exact - found, peers)):
        ranges = [float(s[r].max() - s[r].min()) for s in split]
        coded = mean([minmax_uint8(s[r]) for s in split])
        last = float(coded.max() - coded.min())
        bound = sum(ranges) / peers / 510 + last / 510
        assert float(chunk.abs().max()) <= bound * 1.001 + 1e-6


def test_bytegrad_of_nothing_and_its_bytes() -> None:
    empty = torch.zeros(0)
    assert bagua.low_precision_allreduce([empty, empty], identity).numel() == 0
    assert bagua.bytegrad_bytes(1000, peers=4) == 2 * 3 * (250 + 32)
    assert bagua.bytegrad_bytes(1000, peers=1) == 0
    assert bagua.low_precision_ring_bytes(1000) == 2 * 1032


# ---- QAdam.


@pytest.mark.parametrize("example", examples("bagua_qadam*"), ids=named)
def test_the_golden_qadam(example: dict[str, Any]) -> None:
    inputs, atol, dtype = example["inputs"], example["atol"], dtype_of(example)
    b1, b2 = inputs["betas"]
    options = QAdamOptions(inputs["warmup_steps"], inputs["lr"], (b1, b2), inputs["eps"])
    x = tensor(inputs["x0"], dtype)
    state = QAdam(torch.zeros_like(x), torch.zeros_like(x))
    steps = example["outputs"]["steps"]
    for rows, expected in zip(inputs["grads"], steps, strict=True):
        grads = list(tensor(rows, dtype))
        if bagua.qadam_is_compressed(state, options):
            momenta = [bagua.qadam_local_momentum(state, grad, options) for grad in grads]
            shared = bagua.low_precision_allreduce(momenta, minmax_uint8)
        else:
            shared = mean(grads)
        x, state = bagua.qadam_step(x, state, shared, options)
        assert state.step == expected["step"]
        close(state.m, expected["m"], atol)
        close(state.v, expected["v"], atol)
        close(x, expected["x"], atol)


@pytest.mark.parametrize("off_by_one", [True, False])
def test_the_last_warm_up_step_is_a_switch(off_by_one: bool) -> None:
    options = QAdamOptions(warmup_steps=2, off_by_one=off_by_one)
    grad = tensor([1.0, -2.0])
    x, state = tensor([0.0, 0.0]), QAdam(torch.zeros_like(grad), torch.zeros_like(grad))
    moments = []
    for _ in range(4):
        shared = grad
        if bagua.qadam_is_compressed(state, options):
            shared = bagua.qadam_local_momentum(state, grad, options)
        x, state = bagua.qadam_step(x, state, shared, options)
        moments.append((state.m.clone(), state.v.clone()))
    assert torch.equal(moments[1][1], moments[0][1]) == off_by_one
    assert torch.equal(moments[1][0], moments[0][0]) == off_by_one
    for _, v in moments[2:]:
        assert torch.equal(v, moments[1][1]), "frozen bit for bit from warm-up on"


def test_qadam_in_its_warm_up_is_torch_s_adam() -> None:
    generator = torch.Generator().manual_seed(4)
    start, options = normal(generator, 6), QAdamOptions(warmup_steps=50, weight_decay=0.1)
    parameter = torch.nn.Parameter(start.clone())
    adam = torch.optim.Adam([parameter], lr=options.lr, weight_decay=0.1)
    x, state = start, QAdam(torch.zeros_like(start), torch.zeros_like(start))
    for _ in range(20):
        grad = normal(generator, 6)
        parameter.grad = grad
        adam.step()
        x, state = bagua.qadam_step(x, state, bagua.gradient_with_decay(grad, x, options), options)
    torch.testing.assert_close(x, parameter.detach())
    plain = replace(options, weight_decay=0.0)
    assert bagua.gradient_with_decay(grad, x, plain) is grad


def test_qadam_needs_a_warm_up() -> None:
    with pytest.raises(ConfigError, match="warmup_steps: QAdam with 0"):
        QAdamOptions(warmup_steps=0)


# ---- The ring of differences.


@given(generator=generators(), n=st.integers(1, 6), exact=st.booleans())
def test_replicas_equal_the_neighbours_weights_and_exact_is_dpsgd(
    generator: torch.Generator, n: int, exact: bool
) -> None:
    start = normal(generator, 5)
    states = [bagua.ring_start(start) for _ in range(n)]
    twin = [start] * n
    rows: list[dict[int, float]] = []
    for i in range(n):
        row = {i: 1 / 3}
        for j in ((i - 1) % n, (i + 1) % n):
            row[j] = row.get(j, 0.0) + 1 / 3
        rows.append(row)
    for _ in range(3):
        updates = list(normal(generator, n, 5))
        compress = identity if exact else minmax_uint8
        coded = [
            compress(bagua.ring_difference(state, state.weights + update))
            for state, update in zip(states, updates, strict=True)
        ]
        states = [
            bagua.ring_apply(
                state,
                own=coded[i],
                from_left=coded[(i - 1) % n],
                from_right=coded[(i + 1) % n],
            )
            for i, state in enumerate(states)
        ]
        for i, state in enumerate(states):
            assert torch.equal(state.left, states[(i - 1) % n].weights)
            assert torch.equal(state.right, states[(i + 1) % n].weights)
        twin = dpsgd.swarm_step(twin, [-update for update in updates], rows=rows, gamma=1.0)
        if exact:
            torch.testing.assert_close(
                torch.stack([state.weights for state in states]), torch.stack(twin)
            )


# ---- Asynchronous average.


@given(generator=generators(), n=st.integers(1, 6))
def test_concurrent_updates_survive_an_asynchronous_average(
    generator: torch.Generator, n: int
) -> None:
    snapshots, updates = list(normal(generator, n, 4)), list(normal(generator, n, 4))
    total = torch.stack(snapshots).sum(0)
    moved = [
        snapshot + update + bagua.async_delta(snapshot=snapshot, total=total, contributors=n)
        for snapshot, update in zip(snapshots, updates, strict=True)
    ]
    for x, update in zip(moved, updates, strict=True):
        torch.testing.assert_close(x, mean(snapshots) + update)


def test_all_leave_together() -> None:
    assert bagua.goes_on([1, 1, 1])
    assert not bagua.goes_on([1, 0, 1])
    assert not bagua.goes_on([])


def test_the_cube_has_eight_cells() -> None:
    corners = {(c.centralized, c.full_precision, c.synchronous) for c in CELLS.values()}
    assert len(CELLS) == len(corners) == 8
    assert bagua.cell_rule("bytegrad").full_precision is False
    with pytest.raises(ConfigError, match="unknown cell 'ddp'"):
        bagua.cell_rule("ddp")
