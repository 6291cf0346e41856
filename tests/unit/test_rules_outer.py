"""Outer steps, PowerSGD's algebra and accumulation, against numbers worked by hand.

One rule: where the rule is torch.optim.SGD's or a library's decomposition, that one is the witness.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moshpitd.errors import ConfigError
from moshpitd.tensors.rules import diloco, powersgd
from moshpitd.tensors.rules.accumulation import Accumulated
from tests.kit.rules import FLOAT, close, generators, normal, tensor

# ---- DiLoCo.


def test_two_outer_steps_by_hand() -> None:
    anchor, buffer = tensor([1.0]), tensor([0.0])
    # D = 0.5: m = 0.5, step 0.7 (0.5 + 0.9 0.5) = 0.665
    anchor, buffer = diloco.outer_step(anchor, buffer, tensor([0.5]), lr=0.7, momentum=0.9)
    close(anchor, [0.335], 1e-12)
    close(buffer, [0.5], 1e-12)
    # D = -0.2: m = 0.25, step 0.7 (-0.2 + 0.9 0.25) = 0.0175
    anchor, buffer = diloco.outer_step(anchor, buffer, tensor([-0.2]), lr=0.7, momentum=0.9)
    close(anchor, [0.3175], 1e-12)
    close(buffer, [0.25], 1e-12)
    plain, _ = diloco.outer_step(
        tensor([1.0]), tensor([1.0]), tensor([0.5]), lr=0.7, momentum=0.9, nesterov=False
    )
    close(plain, [1 - 0.7 * 1.4], 1e-12)


@given(generator=generators(), momentum=st.sampled_from([0.0, 0.5, 0.9]), nesterov=st.booleans())
def test_an_outer_step_is_torch_s_sgd(
    generator: torch.Generator, momentum: float, nesterov: bool
) -> None:
    nesterov = nesterov and momentum > 0
    twin = nn.Parameter(normal(generator, 5))
    sgd = torch.optim.SGD([twin], lr=0.3, momentum=momentum, nesterov=nesterov)
    anchor, buffer = twin.detach().clone(), torch.zeros(5, dtype=FLOAT)
    for _ in range(4):
        mean = normal(generator, 5)
        twin.grad = mean.clone()
        sgd.step()
        anchor, buffer = diloco.outer_step(
            anchor, buffer, mean, lr=0.3, momentum=momentum, nesterov=nesterov
        )
        torch.testing.assert_close(anchor, twin.detach())


def test_the_whole_outer_gradient_is_the_mean_of_what_was_reached() -> None:
    anchor, xs = tensor([2.0, 0.0]), [tensor([1.0, 4.0]), tensor([4.0, 2.0])]
    mean = torch.stack([diloco.outer_gradient(anchor, x) for x in xs]).mean(0)
    found, _ = diloco.outer_step(anchor, torch.zeros(2, dtype=FLOAT), mean, lr=1.0, momentum=0.0)
    close(found, [2.5, 3.0], 1e-12)


def test_mixing_and_the_cut_into_fragments() -> None:
    close(diloco.mixed(tensor([4.0]), tensor([2.0]), alpha=0.25), [2.5], 1e-12)
    odd = tensor([0.1 + 0.2])
    assert torch.equal(diloco.mixed(tensor([float("inf")]), odd, alpha=0.0), odd)
    assert diloco.fragments(5, 2) == ((0, 2, 4), (1, 3))
    assert diloco.check_schedule(every=12, count=3, overlap=4, alpha=0.5) == 4


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("every", {"every": 10, "count": 3}),
        ("every", {"every": 0}),
        ("overlap", {"overlap": 6, "count": 2}),
        ("overlap", {"overlap": -1}),
        ("alpha", {"alpha": 1.0}),
    ],
)
def test_schedules_that_cannot_be(key: str, given: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        diloco.check_schedule(**{"every": 10, "count": 1, "overlap": 0, "alpha": 0.5, **given})  # type: ignore[arg-type]
    assert refused.value.key == key
    with pytest.raises(ConfigError, match="fragments"):
        diloco.fragments(2, 3)


# ---- PowerSGD.


def test_a_rank_one_step_by_hand() -> None:
    # M = [[3, 0], [4, 0]], Q = (1, 1): P = (3, 4), P^ = (.6, .8), Q' = M^T P^ = (5, 0).
    matrix, q = tensor([[3.0, 0.0], [4.0, 0.0]]), tensor([[1.0], [1.0]])
    p = powersgd.orthonormal(powersgd.left(matrix, q))
    close(p, [[0.6], [0.8]], 1e-12)
    q = powersgd.right(matrix, p)
    close(q, [[5.0], [0.0]], 1e-12)
    close(powersgd.restored(p, q), [[3.0, 0.0], [4.0, 0.0]], 1e-12)


@given(generator=generators(), rank=st.integers(1, 4))
def test_columns_are_orthonormal_and_span_the_same(generator: torch.Generator, rank: int) -> None:
    p = normal(generator, 9, rank)
    found = powersgd.orthonormal(p)
    torch.testing.assert_close(found.T @ found, torch.eye(rank, dtype=FLOAT))
    torch.testing.assert_close(found @ (found.T @ p), p)
    library = torch.linalg.qr(p).Q
    torch.testing.assert_close(found @ found.T, library @ library.T)


def test_columns_without_a_direction_become_zero_and_live_again() -> None:
    p = tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])  # the second in the span of the first
    close(powersgd.orthonormal(p), [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 1e-12)
    q = tensor([[1.0, 0.0], [2.0, 0.0]])
    again = powersgd.revived(q, seed=1)
    close(again[:, 0], [1.0, 2.0], 0)
    assert again[:, 1].abs().min() > 0
    assert torch.equal(again, powersgd.revived(q, seed=1))
    assert not torch.equal(again, powersgd.revived(q, seed=2))
    assert torch.equal(powersgd.revived(again, seed=3), again)


@given(generator=generators())
def test_warm_starts_find_the_best_approximation(generator: torch.Generator) -> None:
    """Power iteration on one matrix ends at the singular vectors (Eckart and Young)."""
    u, _ = torch.linalg.qr(normal(generator, 8, 3))
    v, _ = torch.linalg.qr(normal(generator, 6, 3))
    matrix = u @ torch.diag(tensor([4.0, 2.0, 0.5])) @ v.T
    q = powersgd.start((8, 6), 2, seed=0).double()
    for _ in range(40):
        p = powersgd.orthonormal(powersgd.left(matrix, q))
        q = powersgd.right(matrix, p)
    left = matrix - powersgd.restored(p, q)
    assert torch.linalg.matrix_norm(left).item() == pytest.approx(0.5, abs=1e-6)


def test_what_is_compressed_and_in_which_shape() -> None:
    assert powersgd.compresses((64, 128), 2)
    assert powersgd.compresses((8, 3, 3, 3), 4)  # 4 (8 + 27) < 8 x 27
    assert not powersgd.compresses((64,), 1)
    assert not powersgd.compresses((4, 4), 2)  # 16 elements either way
    assert powersgd.as_matrix(torch.zeros(8, 3, 5, dtype=torch.bfloat16)).shape == (8, 15)
    assert powersgd.as_matrix(torch.zeros(2, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert powersgd.start((8, 3, 5), 2, seed=0).shape == (15, 2)


# ---- Accumulation.


def test_micro_batches_are_the_batch_that_holds_them_all() -> None:
    held = Accumulated()
    for gradient, samples in ((1.0, 2), (4.0, 1), (0.0, 5)):
        held.add({"x": tensor([gradient])}, samples)
    mean, samples = held.taken({"x": tensor([9.0])})
    close(mean["x"], [6 / 8], 1e-12)
    assert samples == 8
    mean, samples = held.taken({"x": tensor([9.0])})
    close(mean["x"], [0.0], 0)
    assert samples == 0


def test_many_half_precision_gradients_do_not_overflow() -> None:
    held, gradient = Accumulated(), torch.full((1,), 60_000.0, dtype=torch.float16)
    for _ in range(64):
        held.add({"x": gradient}, 1)
    assert torch.equal(held.taken({"x": gradient})[0]["x"], gradient)
