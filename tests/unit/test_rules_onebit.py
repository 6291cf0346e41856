"""1-bit Adam, 0/1 Adam, 1-bit LAMB and their all-reduce: worked examples and what no step may lose.

One rule: the telescoping sum is the test of error feedback, whatever happens to the membership.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.tensors.rules import onebit, onebit_adam, onebit_lamb, signs
from moshpitd.tensors.rules.common import mean
from moshpitd.tensors.rules.onebit import ServerErrors
from moshpitd.tensors.rules.onebit_adam import Journey, Moments, ZeroOneClock, ZeroOnePolicy
from moshpitd.tensors.rules.onebit_lamb import Lamb
from moshpitd.tensors.rules.signs import Scale
from tests.kit.rules import (
    FLOAT,
    Quadratics,
    close,
    dtype_of,
    examples,
    generators,
    named,
    normal,
    tensor,
)

BETAS = (0.9, 0.999)
scales = st.sampled_from(list(Scale))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=FLOAT)


class Swarm:
    """n peers of 1-bit Adam in one process, errors and all."""

    def __init__(self, x: Tensor, peers: int, scale: Scale, size: int | None = None) -> None:
        self.x, self.peers, self.scale = x, peers, scale
        self.size = size or onebit.padded_size(x.numel(), peers)
        self.moments = Moments(torch.zeros_like(x), torch.zeros_like(x))
        self.worker_errors = [x.new_zeros(self.size) for _ in range(peers)]
        spans = onebit.equal_spans(self.size, peers)
        self.server_errors = [x.new_zeros(stop - start) for start, stop in spans]
        self.mask: Tensor | None = None

    def warmup(self, grads: list[Tensor], **options: Any) -> None:
        self.moments = onebit_adam.warmup(self.moments, mean(grads), betas=BETAS)
        self.x = onebit_adam.apply(self.x, self.moments, **options)

    def compressed(self, grads: list[Tensor], **options: Any) -> onebit.Reduced:
        sent = [
            onebit.pad(onebit_adam.local_momentum(self.moments, grad, betas=BETAS), self.size)
            for grad in grads
        ]
        mask = None if self.mask is None else onebit.pad(self.mask, self.size)
        reduced = onebit.compressed_allreduce(
            sent, self.worker_errors, self.server_errors, scale=self.scale, mask=mask
        )
        self.worker_errors, self.server_errors = reduced.worker_errors, reduced.server_errors
        self.moments = onebit_adam.compressed(self.moments, reduced.result[: self.x.numel()])
        self.x = onebit_adam.apply(self.x, self.moments, **options)
        return reduced


@pytest.mark.parametrize("example", examples("onebit_adam*"), ids=named)
def test_the_golden_onebit_adam(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    dtype = dtype_of(example)
    peers, options = inputs["n"], {"lr": inputs["lr"], "eps": inputs["eps"]}
    assert inputs["padded"] == onebit.padded_size(inputs["d"], peers)
    scale = Scale.L1 if "l1" in inputs["scale"] else Scale.RMS
    swarm = Swarm(tensor(inputs["x0"], dtype), peers, scale, inputs["padded"])
    frozen: Tensor | None = None
    for number, (grads, step) in enumerate(zip(inputs["grads"], outputs["steps"], strict=True)):
        rows = list(tensor(grads, dtype))
        if number < inputs["warmup_steps"]:
            swarm.warmup(rows, **options)
            frozen = swarm.moments.v
        else:
            reduced = swarm.compressed(rows, **options)
            assert frozen is not None
            assert torch.equal(swarm.moments.v, frozen), "the variance is bitwise constant"
            check_codes(reduced, step, atol)
        close(swarm.moments.m, step["m"], atol)
        close(swarm.moments.v, step["v"], atol)
        close(swarm.x, step["x"], atol)
    sent = outputs["bytes_per_worker_per_compressed_step"]
    assert onebit.bytes_per_worker(inputs["padded"], peers=peers) == (
        sent["phase1_send"],
        sent["phase2_send"],
    )


def check_codes(reduced: onebit.Reduced, step: dict[str, Any], atol: float) -> None:
    for codes, which in ((reduced.worker_codes, "worker"), (reduced.server_codes, "server")):
        close(torch.stack([code.scale for code in codes]), step[f"{which}_scale"], atol)
        packed = [bytes(signs.pack(code.positive).tolist()).hex() for code in codes]
        bits = step[f"{which}_bits"]
        assert packed == bits if isinstance(bits, list) else "".join(packed) == bits
    close(torch.stack(reduced.worker_errors), step["worker_error"], atol)
    close(torch.stack(reduced.server_errors), step["server_error"], atol)


@pytest.mark.parametrize("example", examples("onebit_scale*"), ids=named)
def test_the_golden_contraction_of_the_two_scales(example: dict[str, Any]) -> None:
    """The file's vectors have names only: one-hots are rebuilt, for all rows the theory is."""
    for row in example["outputs"]["rows"]:
        for key in ("l1", "rms"):
            found = row["l1_over_d_rel_err" if key == "l1" else "rms_rel_err"]
            assert found == pytest.approx(row[f"{key}_theory"], abs=1e-9)
        if "hot" in row["vector"]:
            v = zeros(row["d"])
            v[0] = 1.0
            for scale, key in ((Scale.L1, "l1_over_d_rel_err"), (Scale.RMS, "rms_rel_err")):
                left = v - signs.encode_signs(v, scale).values()
                assert float((left**2).sum()) == pytest.approx(row[key], abs=1e-9)


@given(generator=generators(), d=st.integers(1, 40), sparse=st.booleans())
def test_the_error_of_a_scaled_sign_is_its_closed_form(
    generator: torch.Generator, d: int, sparse: bool
) -> None:
    v = normal(generator, d)
    if sparse:
        v[1:] = 0.0
    l1, l2 = v.abs().sum(), torch.linalg.vector_norm(v)
    for scale, theory in (
        (Scale.L1, 1 - l1**2 / (d * l2**2)),
        (Scale.RMS, 2 - 2 * l1 / (math.sqrt(d) * l2)),
    ):
        error = ((v - signs.encode_signs(v, scale).values()) ** 2).sum() / l2**2
        torch.testing.assert_close(error, theory, atol=1e-9, rtol=1e-9)
        if scale is Scale.L1:
            assert error <= 1 - 1 / d + 1e-9


def test_signs_of_zero_and_of_nothing() -> None:
    code = signs.encode_signs(zeros(3), Scale.RMS)
    assert code.positive.all(), "sign(0) = +1"
    assert code.values().tolist() == [0.0] * 3
    assert signs.encode_signs(zeros(0), Scale.L1).values().numel() == 0
    for bad in (math.nan, math.inf):
        with pytest.raises(TrainerError, match="NaN or too large") as refused:
            signs.encode_signs(tensor([1.0, bad]), Scale.L1)
        assert refused.value.reason == "not_finite"


@given(generator=generators(), d=st.integers(0, 70))
def test_bits_pack_and_unpack(generator: torch.Generator, d: int) -> None:
    positive = normal(generator, d) >= 0
    packed = signs.pack(positive)
    assert packed.numel() == signs.sign_bytes(d) - signs.SCALE_BYTES
    assert torch.equal(signs.unpack(packed, d), positive)
    with pytest.raises(RemoteProtocolError, match="expected"):
        signs.unpack(packed, d + 8)


def test_the_first_bit_is_the_most_significant() -> None:
    assert signs.pack(torch.tensor([True, False, False])).tolist() == [0b1000_0000]


def test_scaled_sign_keeps_the_shape() -> None:
    coded = signs.scaled_sign(tensor([[3.0, -1.0], [0.0, 0.0]]))
    assert coded.tolist() == [[1.0, -1.0], [1.0, 1.0]]


# ---- The all-reduce.


@given(
    generator=generators(), peers=st.integers(1, 5), d=st.integers(1, 30), scale=scales,
    masked=st.booleans(),
)  # fmt: skip
def test_nothing_is_lost_in_a_compressed_allreduce(
    generator: torch.Generator, peers: int, d: int, scale: Scale, masked: bool
) -> None:
    values = list(normal(generator, peers, d))
    mask = normal(generator, d) > 0 if masked else None
    if mask is not None:
        values = [value * mask for value in values]
    worker = [zeros(d) for _ in range(peers)]
    server = [zeros(stop - start) for start, stop in onebit.equal_spans(d, peers)]
    for _ in range(3):
        found = onebit.compressed_allreduce(values, worker, server, scale=scale, mask=mask)
        before = mean([v + e for v, e in zip(values, worker, strict=True)]) + torch.cat(server)
        after = found.result + mean(found.worker_errors) + torch.cat(found.server_errors)
        torch.testing.assert_close(before, after)
        assert found.result.abs().unique().numel() <= peers + int(masked)
        if mask is not None:
            assert not found.result[~mask].any(), "a masked element stays zero"
            assert not torch.cat(found.server_errors)[~mask].any()
        worker, server = found.worker_errors, found.server_errors


def test_padding_sizes_and_spans() -> None:
    assert onebit.padded_size(32, 4) == 32
    assert onebit.padded_size(33, 4) == 64
    assert onebit.padded_size(1, 3) == 72, "3 * lcm(3, 8)"
    assert onebit.equal_spans(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert onebit.equal_spans(2, 3) == [(0, 1), (1, 2), (2, 2)]
    with pytest.raises(LocalProtocolError, match="more room"):
        onebit.pad(zeros(3), 2)


@given(n=st.integers(1, 16), chunks=st.integers(1, 50))
def test_bytes_are_a_thirty_second_of_float32(n: int, chunks: int) -> None:
    d = 8 * n * chunks
    sent = sum(onebit.bytes_per_worker(d, peers=n))
    assert sent == 2 * (n - 1) * (d / (8 * n) + 4)
    ring = 2 * (n - 1) / n * 4 * d
    assert sent - 8 * (n - 1) == pytest.approx(ring / 32)


def test_weights_count_in_the_servers_mean() -> None:
    chunks = [tensor([1.0, 1.0]), tensor([4.0, 4.0])]
    code, error = onebit.server_encode(chunks, zeros(2), scale=Scale.L1, weights=[2.0, 1.0])
    close(code.values() + error, [2.0, 2.0], 1e-12)


# ---- Adam on top.


@given(generator=generators(), scale=scales)
@settings(max_examples=20)
def test_always_zero_gradients_stay_zero_and_the_variance_stays_put(
    generator: torch.Generator, scale: Scale
) -> None:
    swarm = Swarm(normal(generator, 12), 3, scale)
    dead = torch.arange(12) % 4 == 0
    start = swarm.x

    def grads() -> list[Tensor]:
        return list(normal(generator, 3, 12) * ~dead)

    for _ in range(4):
        swarm.warmup(grads(), lr=0.01)
    swarm.mask = onebit.momentum_mask(swarm.moments.v)
    assert torch.equal(swarm.mask, ~dead)
    frozen = swarm.moments.v.clone()
    for _ in range(6):
        swarm.compressed(grads(), lr=0.01)
        assert torch.equal(swarm.moments.v, frozen)
        assert torch.equal(swarm.x[dead], start[dead])
        assert not swarm.moments.m[dead].any()


def test_without_the_mask_they_explode() -> None:
    """Why the mask exists: m / (sqrt(0) + eps) is a scale divided by eps."""
    generator = torch.Generator().manual_seed(0)
    swarm = Swarm(zeros(8), 1, Scale.L1, 8)
    live = torch.arange(8) > 0
    for _ in range(3):
        swarm.warmup([normal(generator, 8) * live], lr=0.01)
    swarm.compressed([normal(generator, 8) * live], lr=0.01)
    assert swarm.x[0].abs() > 1e4


def train(problem: Quadratics, *, feedback: bool, adam: bool = False) -> float:
    """Distance to the optimum after a fixed schedule, for Adam, 1-bit Adam and 1-bit without e."""
    generator = torch.Generator().manual_seed(3)
    swarm = Swarm(zeros(16), 4, Scale.L1, onebit.padded_size(16, 4))
    for k in range(500):
        noise = normal(generator, 4, 16) * 0.1
        grads = [g + e for g, e in zip(problem.grads(swarm.x), noise, strict=True)]
        lr = 0.05 if k < 200 else 0.05 * 0.98 ** (k - 200)
        if adam or k < 100:
            swarm.warmup(grads, lr=lr)
            continue
        swarm.compressed(grads, lr=lr)
        if not feedback:
            swarm.worker_errors = [torch.zeros_like(e) for e in swarm.worker_errors]
            swarm.server_errors = [torch.zeros_like(e) for e in swarm.server_errors]
    return float(torch.linalg.vector_norm(swarm.x - problem.optimum()))


def test_onebit_adam_ends_where_adam_does_and_no_feedback_does_not() -> None:
    problem = Quadratics.random(torch.Generator().manual_seed(1), workers=4, numel=16)
    scale = torch.logspace(0, -1.5, 16, dtype=FLOAT)  # coordinates of very different size
    problem = Quadratics(problem.a, problem.b * scale)
    adam = train(problem, feedback=True, adam=True)
    one_bit = train(problem, feedback=True)
    naive = train(problem, feedback=False)
    assert one_bit < 5 * adam + 0.02
    assert naive > 3 * one_bit


def test_weight_decay_is_decoupled() -> None:
    moments = Moments(tensor([1.0]), tensor([4.0]))
    moved = onebit_adam.apply(tensor([10.0]), moments, lr=0.1, eps=0.0, weight_decay=0.5)
    assert moved.item() == pytest.approx(10 - 0.1 * (0.5 + 5.0))


# ---- Server errors under churn.

spans = st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(sorted)


@given(generator=generators(), cuts=spans, asked=st.lists(spans, max_size=4))
def test_residuals_belong_to_elements(
    generator: torch.Generator, cuts: list[int], asked: list[list[int]]
) -> None:
    """The dumb twin is one dense vector; every element is taken exactly once."""
    dense, errors = zeros(41), ServerErrors()
    for start, stop in list(pairwise(cuts))[::2]:
        piece = normal(generator, stop - start)
        dense[start:stop] = piece
        errors.put(start, piece)
    for ends in asked:
        first, last = ends[0], ends[-1]
        assert torch.equal(errors.take((first, last), zeros(1)), dense[first:last])
        dense[first:last] = 0.0
    left = zeros(41)
    for start, piece in errors.items():
        left[start : start + piece.numel()] = piece
    assert torch.equal(left, dense)


@given(generator=generators(), cuts=spans, keep=spans)
def test_what_is_outside_the_new_ranges_is_handed_over(
    generator: torch.Generator, cuts: list[int], keep: list[int]
) -> None:
    errors, dense = ServerErrors(), zeros(41)
    for start, stop in list(pairwise(cuts))[::2]:
        dense[start:stop] = normal(generator, stop - start)
        errors.put(start, dense[start:stop])
    kept = list(pairwise(keep))[::2]
    leaving = errors.outside(kept)
    inside = torch.zeros(41, dtype=torch.bool)
    for low, high in kept:
        inside[low:high] = True
    for pieces, where in ((leaving, ~inside), (errors.items(), inside)):
        found = zeros(41)
        for start, piece in pieces:
            found[start : start + piece.numel()] = piece
        assert torch.equal(found, dense * where)
    for start, piece in leaving:
        errors.put(start, piece)
    assert torch.equal(errors.take((0, 41), zeros(1)), dense)


def test_two_servers_of_one_range_are_noticed() -> None:
    errors = ServerErrors()
    errors.put(4, zeros(4))
    errors.put(8, zeros(0))
    with pytest.raises(LocalProtocolError, match=r"\[6, 9\) overlaps \[4, 8\)"):
        errors.put(6, zeros(3))


@given(generator=generators(), sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5))
@settings(max_examples=40)
def test_error_feedback_survives_a_change_of_membership(
    generator: torch.Generator, sizes: list[int]
) -> None:
    """Peers come and go; server errors move with their elements, a leaver's worker error to a
    survivor. In every step what came in equals what went out and what is still owed."""
    d = 24
    worker = [zeros(d) for _ in range(sizes[0])]
    servers = [ServerErrors() for _ in range(sizes[0])]
    owed = zeros(d)
    for n in sizes:
        spans_now = onebit.equal_spans(d, n)
        moving = [
            piece
            for rank, errors in enumerate(servers)
            for piece in errors.outside([spans_now[rank]] if rank < n else [])
        ]
        old = len(servers)
        servers = [*servers, *(ServerErrors() for _ in range(n - old))][:n]
        for start, piece in moving:
            for errors, (low, high) in zip(servers, spans_now, strict=True):
                first, last = max(low, start), min(high, start + piece.numel())
                if first < last:
                    errors.put(first, piece[first - start : last - start])
        left = sum(worker[n:], zeros(d))
        worker = [*worker[:n], *(zeros(d) for _ in range(n - len(worker)))]
        worker[0] = worker[0] + left
        values = list(normal(generator, n, d))
        ranges = list(zip(servers, spans_now, strict=True))
        server = [errors.take(span, zeros(1)) for errors, span in ranges]
        # What is owed before the step, in units of sums over the n peers of this step.
        before = sum(worker, zeros(d)) + n * torch.cat(server) + sum(values)
        found = onebit.compressed_allreduce(values, worker, server, scale=Scale.L1)
        worker = found.worker_errors
        after = sum(worker, zeros(d)) + n * torch.cat(found.server_errors)
        torch.testing.assert_close(before, after + n * found.result)
        for errors, (start, _), residual in zip(
            servers, spans_now, found.server_errors, strict=True
        ):
            errors.put(start, residual)
        owed = after
    restored = ServerErrors()
    for errors in servers:  # a checkpoint of everybody, read by one peer
        for start, piece in errors.items():
            restored.put(start, piece)
    n = sizes[-1]
    torch.testing.assert_close(n * restored.take((0, d), zeros(1)) + sum(worker, zeros(d)), owed)


def test_a_server_error_folds_into_a_worker() -> None:
    folded = onebit.fold_into_worker(zeros(4), tensor([0.5, -0.5]), start=1, contributors=3)
    close(mean([folded, zeros(4), zeros(4)]), [0.0, 0.5, -0.5, 0.0], 1e-12)


# ---- 0/1 Adam.


def test_zero_one_adam_refreshes_ever_more_rarely_and_then_exchanges_ever_more_rarely() -> None:
    policy = ZeroOnePolicy(freeze_step=20, variance_scaler=2, local_scaler=4, local_clipper=4)
    clock, refreshed, exchanged = ZeroOneClock(), [], []
    for step in range(1, 49):
        if clock.refreshes_variance(policy):
            refreshed.append(step)
        if clock.exchanges(policy):
            exchanged.append(step)
        clock = clock.tick(policy)
    assert refreshed == [1, 2, 4, 6, 8, 12, 16]
    assert exchanged[:20] == list(range(1, 21)), "every step before the freeze"
    assert exchanged[20:] == [21, 22, 23, 24, 26, 28, 32, 36, 40, 44, 48]
    with pytest.raises(ConfigError, match="local_clipper"):
        ZeroOnePolicy(local_clipper=0)


def test_zero_one_adam_with_one_local_step_and_no_error_is_frozen_adam() -> None:
    """Interval 1 and an exact all-reduce: the exchange undoes and redoes the mean step exactly."""
    generator = torch.Generator().manual_seed(5)
    problem = Quadratics.random(generator, workers=3, numel=6)
    start = normal(generator, 6)
    moments = Moments(zeros(6), torch.ones(6, dtype=FLOAT))
    plain, plain_moments = start, moments
    peers = [(start, moments, Journey(start)) for _ in range(3)]
    for _ in range(5):
        momentum = onebit_adam.local_momentum(
            plain_moments, mean(problem.grads(plain)), betas=BETAS
        )
        plain_moments = onebit_adam.compressed(plain_moments, momentum)
        plain = onebit_adam.apply(plain, plain_moments, lr=0.1)
        stepped = [
            onebit_adam.zero_one_local(x, m, journey, problem.grad(i, x), betas=BETAS, lr=0.1)
            for i, (x, m, journey) in enumerate(peers)
        ]
        denominator = moments.v.sqrt() + 1e-8
        total = mean([(x - journey.origin) * denominator for x, _, journey in stepped])
        peers = [
            onebit_adam.zero_one_exchange(x, m, journey, reduce=lambda _, total=total: total)
            for x, m, journey in stepped
        ]
        for x, m, journey in peers:
            torch.testing.assert_close(x, plain)
            torch.testing.assert_close(m.m, plain_moments.m)
            assert torch.equal(x, peers[0][0]), "equal bits on all peers"
            assert journey.lrs == 0


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 0.01), (False, 0.12)])
def test_zero_one_adam_trains_with_local_steps(exact: bool, tolerance: float) -> None:
    """With signs the distance is of the order of the last learning rate over sqrt(v)."""
    reduce = exactly if exact else reduce_once
    generator = torch.Generator().manual_seed(6)
    problem = Quadratics.random(generator, workers=4, numel=16)
    policy = ZeroOnePolicy(freeze_step=60, variance_scaler=4, local_scaler=60, local_clipper=4)
    clock, x, size = ZeroOneClock(), zeros(16), 16
    swarm = Swarm(x, 4, Scale.L1, size)
    peers = [(x, swarm.moments, Journey(x)) for _ in range(4)]
    for k in range(1000):
        lr = 0.02 * 0.997**k
        if not clock.frozen(policy):
            grads = problem.grads(x)
            if clock.refreshes_variance(policy):
                shared = mean(grads)
            else:
                shared = reduce(swarm, grads)
            swarm.moments = onebit_adam.zero_one_before_freeze(
                swarm.moments, shared, betas=BETAS, refresh=clock.refreshes_variance(policy)
            )
            x = onebit_adam.apply(x, swarm.moments, lr=lr)
            peers = [(x, swarm.moments, Journey(x)) for _ in range(4)]
        else:
            if clock.step == policy.freeze_step:
                fresh = Swarm(x, 4, Scale.L1, size)  # errors are reset once
                swarm.worker_errors, swarm.server_errors = fresh.worker_errors, fresh.server_errors
            peers = [
                onebit_adam.zero_one_local(p, m, j, problem.grad(i, p), betas=BETAS, lr=lr)
                for i, (p, m, j) in enumerate(peers)
            ]
            if clock.exchanges(policy):
                denominator = swarm.moments.v.sqrt() + 1e-8
                moves = [(p - j.origin) * denominator for p, _, j in peers]
                total = reduce(swarm, moves)
                peers = [
                    onebit_adam.zero_one_exchange(p, m, j, reduce=lambda _, total=total: total)
                    for p, m, j in peers
                ]
                assert all(torch.equal(p, peers[0][0]) for p, _, _ in peers)
        clock = clock.tick(policy)
    torch.testing.assert_close(peers[0][0], problem.optimum(), atol=tolerance, rtol=0)


def exactly(_: Swarm, values: list[Tensor]) -> Tensor:
    return mean(values)


def reduce_once(swarm: Swarm, values: list[Tensor]) -> Tensor:
    found = onebit.compressed_allreduce(
        values, swarm.worker_errors, swarm.server_errors, scale=swarm.scale
    )
    swarm.worker_errors, swarm.server_errors = found.worker_errors, found.server_errors
    return found.result


# ---- 1-bit LAMB.


def test_lamb_warms_up_with_the_trust_ratio_and_freezes_its_average() -> None:
    x = tensor([3.0, 4.0])
    state = Lamb(Moments(zeros(2), zeros(2)), zeros(2))
    moved, state = onebit_lamb.lamb_warmup(x, state, tensor([1.0, 0.0]), betas=BETAS, lr=0.1)
    update = 0.1 / math.sqrt(0.001)
    ratio = min(10.0, 5.0 / update)
    close(moved, [3.0 - 0.1 * ratio * update, 4.0], 1e-6)
    assert state.coefficient == pytest.approx(0.1 * ratio)
    assert torch.equal(state.fresh, state.moments.v)
    _, still = onebit_lamb.lamb_warmup(zeros(2), state, zeros(2), betas=BETAS, lr=0.1)
    assert still.coefficient == state.coefficient, "a ratio of exactly 1 is not averaged in"


def test_lamb_after_the_freeze_keeps_v_and_bounds_its_factor() -> None:
    v = tensor([0.04, 0.01])
    state = Lamb(Moments(tensor([0.1, 0.1]), v), v, coefficient=2.0)
    x, factors = tensor([1.0, 1.0]), [1.0]
    for _ in range(30):
        momentum = state.moments.m * 0.5
        x, state = onebit_lamb.lamb_compressed(x, state, momentum, betas=(0.5, 0.9), lr=0.01)
        factors.append(state.factor)
        assert torch.equal(state.moments.v, v)
        assert 0.5 <= state.factor <= 4.0
    for last, now in pairwise(factors):
        assert 0.9 * last - 1e-12 <= now <= 1.1 * last + 1e-12
    _, decayed = onebit_lamb.lamb_compressed(
        x, state, state.moments.m * 0.5, betas=(0.5, 0.9), lr=0.01, weight_decay=10.0
    )
    assert decayed.factor < state.factor, "the part of the update that is weight decay counts as 1"
    assert factors[-1] > 1.5, "fresh variance shrinks, so the frozen one slows LAMB too much"


def test_lamb_scales_momenta_to_one_size() -> None:
    momenta = [tensor([3.0, 3.0]), tensor([0.01]), zeros(4)]
    factors = onebit_lamb.united_scaling(momenta)
    united = (3.0 + 0.01 + 0.0) / 3
    assert factors == pytest.approx([united / 3.0, united / 0.01, 1.0])
