"""AsySG-con and AsySG-incon: worked examples, and a bound that no order of events may break.

One rule: the store is driven by hypothesis like a machine; staleness is read from what it applied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.tensors.rules import asysg
from moshpitd.tensors.rules.asysg import Bound, Pushed, Store
from tests.kit.rules import Quadratics, close, examples, generators, named, normal, tensor


@pytest.mark.parametrize("example", examples("asysg_con*"), ids=named)
def test_the_golden_con(example: dict[str, Any]) -> None:
    inputs, atol = example["inputs"], example["atol"]
    a, b = tensor(inputs["a"]), tensor(inputs["b"])
    store = Store(
        tensor(inputs["x0"]), inputs["gamma"], batch=inputs["M"], max_staleness=inputs["T"]
    )
    history = [store.x]
    for k, (taus, noise) in enumerate(zip(inputs["tau"], inputs["noise"], strict=True)):
        for m, (tau, drawn) in enumerate(zip(taus, noise, strict=True)):
            grad = a * (history[k - tau] - b) + tensor(drawn)
            pushed, store, updates = asysg.push(store, f"w{m}", grad, version=k - tau)
            assert pushed is Pushed.TAKEN
        assert [update.version for update in updates] == [k + 1]
        assert sorted(updates[0].staleness) == sorted(taus)
        history.append(store.x)
    close(torch.stack(history), example["outputs"]["X"], atol)


@pytest.mark.parametrize("example", examples("asysg_incon*"), ids=named)
def test_the_golden_incon(example: dict[str, Any]) -> None:
    inputs, outputs, atol = example["inputs"], example["outputs"], example["atol"]
    a, b, x = tensor(inputs["a"]), tensor(inputs["b"]), tensor(inputs["x0"])
    writes: list[asysg.BlockUpdate] = []
    for k, (coord, missed, noise) in enumerate(
        zip(inputs["coord"], inputs["J"], inputs["noise"], strict=True)
    ):
        seen = asysg.torn_read(x, [writes[j] for j in missed])
        close(seen, outputs["x_hat"][k], atol)
        grad = a * (seen - b) + tensor(noise)
        writes.append(
            asysg.block_update([grad], start=coord, stop=coord + 1, gamma=inputs["gamma"])
        )
        x = asysg.apply_block(x, writes[-1])
        close(x, outputs["X"][k], atol)


class Workers:
    """n workers around a store: pulls and pushes in whatever order they are told to."""

    def __init__(self, store: Store, count: int) -> None:
        self.store, self.count = store, count
        self.read: dict[int, tuple[int, Tensor]] = {}
        self.applied: list[asysg.Update] = []
        self.refused = 0

    def turn(self, worker: int) -> bool:
        """One action of a worker: push what it has, else pull. False: it was put off."""
        name = str(worker)
        if worker not in self.read:
            version, self.store = asysg.pull(self.store, name)
            if version is None:
                return False
            assert version == self.store.version
            self.read[worker] = (version, self.store.x)
            return True
        version, x = self.read.pop(worker)
        before = self.store.version
        pushed, self.store, updates = asysg.push(self.store, name, x, version=version)
        if pushed is not Pushed.TAKEN:
            assert self.store.bound is Bound.REFUSE
            self.refused += 1
        assert [update.version for update in updates] == list(
            range(before + 1, self.store.version + 1)
        )
        self.applied += updates
        return True

    def lose(self, worker: int) -> None:
        self.read.pop(worker, None)
        self.store = asysg.forget(self.store, str(worker), drop_waiting=False)
        self.store, updates = asysg.advance(self.store)
        self.applied += updates


@given(
    n=st.integers(1, 5), batch=st.integers(1, 4), bound=st.integers(0, 4),
    how=st.sampled_from(list(Bound)), turns=st.lists(st.integers(0, 4), max_size=80),
    lost=st.dictionaries(st.integers(0, 79), st.integers(0, 4), max_size=3),
)  # fmt: skip
@settings(max_examples=150)
def test_no_order_of_events_breaks_the_staleness_bound(
    n: int, batch: int, bound: int, how: Bound, turns: list[int], lost: dict[int, int]
) -> None:
    x = tensor([1.0])
    workers = Workers(Store(x, 0.01, batch=min(batch, n), max_staleness=bound, bound=how), n)
    for number, turn in enumerate(turns):
        workers.turn(turn % n)
        if number in lost:
            workers.lose(lost[number] % n)
    for update in workers.applied:
        assert max(update.staleness) <= bound
        assert len(update.staleness) == workers.store.batch
    assert workers.store.version == len(workers.applied)


@given(n=st.integers(1, 5), batch=st.integers(1, 4), bound=st.integers(0, 3), seed=st.randoms())
@settings(max_examples=25)
def test_blocking_never_wastes_a_gradient_and_never_stalls(
    n: int, batch: int, bound: int, seed: Any
) -> None:
    """With all workers alive: whenever every worker has had its turn, the store has moved on."""
    batch = min(batch, n)
    store = Store(tensor([1.0]), 0.01, batch=batch, max_staleness=bound, bound=Bound.BLOCK)
    workers = Workers(store, n)
    for _ in range(12):
        before = workers.store.version
        for _ in range(2):  # pull, then push: in two different orders
            for worker in seed.sample(range(n), n):
                workers.turn(worker)
        for worker in list(workers.read):
            workers.turn(worker)
        assert workers.store.version > before
    assert workers.refused == 0


def test_refusing_drops_what_is_too_old_and_blocking_waits_for_it() -> None:
    x, grad = tensor([1.0]), tensor([0.5])
    refusing = Store(x, 0.1, max_staleness=0)
    slow, refusing = asysg.pull(refusing, "slow")
    assert slow == 0
    _, refusing, _ = asysg.push(refusing, "fast", grad, version=0)
    pushed, refusing, updates = asysg.push(refusing, "slow", grad, version=slow)
    assert (pushed, updates) == (Pushed.TOO_OLD, [])
    assert refusing.version == 1

    blocking = Store(x, 0.1, max_staleness=1, bound=Bound.BLOCK)
    for name in ("slow", "fast"):
        version, blocking = asysg.pull(blocking, name)
        assert version == 0
    assert asysg.pull(blocking, "third")[0] is None, "M (T + 1) are out already"
    _, blocking, updates = asysg.push(blocking, "fast", grad, version=0)
    assert len(updates) == 1
    version, blocking = asysg.pull(blocking, "fast")
    assert version == 1
    _, blocking, updates = asysg.push(blocking, "fast", grad, version=1)
    assert updates == [], "version 2 would be two ahead of what slow has read"
    pushed, _, updates = asysg.push(blocking, "slow", grad, version=0)
    assert pushed is Pushed.TAKEN
    assert [update.staleness for update in updates] == [(1,), (1,)]
    gone = asysg.forget(blocking, "slow")
    gone, updates = asysg.advance(gone)
    assert [update.staleness for update in updates] == [(0,)], "nobody waits for the dead"


def test_a_store_for_fewer_workers_takes_what_is_there() -> None:
    store = Store(tensor([0.0]), 1.0, batch=4, bound=Bound.BLOCK)
    for name in "abc":
        version, store = asysg.pull(store, name)
        assert version == 0
        _, store, updates = asysg.push(store, name, tensor([1.0]), version=0)
        assert updates == []
    store, updates = asysg.advance(replace(store, batch=2))
    assert [update.staleness for update in updates] == [(0, 0, 0)], "T = 0: all three or none"
    assert store.x.item() == -3.0


@given(generator=generators(), workers=st.integers(1, 4), how=st.sampled_from(list(Bound)))
@settings(max_examples=30)
def test_staleness_zero_is_minibatch_sgd(
    generator: torch.Generator, workers: int, how: Bound
) -> None:
    problem = Quadratics.random(generator, workers=workers, numel=3)
    start = normal(generator, 3)
    store, x = Store(start, 0.05, batch=workers, max_staleness=0, bound=how), start
    for k in range(5):
        for worker in range(workers):
            version, store = asysg.pull(store, str(worker))
            assert version == k
        for worker in range(workers):
            grad = problem.grad(worker, store.x if worker == 0 else x)
            _, store, _ = asysg.push(store, str(worker), grad, version=k)
        x = x - 0.05 * workers * torch.stack(problem.grads(x)).mean(0)
        torch.testing.assert_close(store.x, x)


def test_a_worker_has_one_pull_and_no_future() -> None:
    store = Store(tensor([0.0]), 1.0, batch=1, max_staleness=3, bound=Bound.BLOCK)
    _, store = asysg.pull(store, "a")
    _, store = asysg.pull(store, "a")
    assert store.pulled == (("a", 0),), "a second pull replaces the first"
    with pytest.raises(LocalProtocolError, match="read at version 1, expected at most 0"):
        asysg.push(store, "a", tensor([1.0]), version=1)
    _, store, _ = asysg.push(store, "a", tensor([1.0]), version=0)
    pushed, again, updates = asysg.push(store, "a", tensor([1.0]), version=0)
    assert (pushed, updates) == (Pushed.NOT_PULLED, []), "a repeated push counts once"
    assert again == store


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="M: updates of 0"):
        Store(tensor([0.0]), 1.0, batch=0)
    with pytest.raises(ConfigError, match="T: a staleness bound of -1"):
        Store(tensor([0.0]), 1.0, max_staleness=-1)


@given(generator=generators(), width=st.integers(1, 6))
def test_reading_everything_is_block_coordinate_descent(
    generator: torch.Generator, width: int
) -> None:
    problem = Quadratics.random(generator, workers=1, numel=6)
    x = normal(generator, 6)
    for start in range(0, 6, width):
        stop = min(6, start + width)
        wanted = x.clone()
        wanted[start:stop] -= 0.1 * problem.grad(0, x)[start:stop]
        seen = asysg.torn_read(x, [])
        write = asysg.block_update([problem.grad(0, seen)], start=start, stop=stop, gamma=0.1)
        kept = x.clone()
        moved = asysg.apply_block(x, write)
        assert torch.equal(x, kept), "pure"
        torch.testing.assert_close(moved, wanted)
        torch.testing.assert_close(asysg.torn_read(moved, [write]), x)
        x = moved


def test_asysg_formulas() -> None:
    gamma = asysg.theory_gamma(gap=2.0, batch=2, smoothness=1.0, steps=100, sigma=0.5)
    assert gamma == pytest.approx((2.0 / (2 * 100 * 0.25)) ** 0.5)
    needed = asysg.steps_needed(gap=2.0, batch=2, smoothness=1.0, staleness=3, sigma=0.5)
    assert needed == pytest.approx(4 * 2 * 2 * 16 / 0.25)
    assert asysg.con_bytes(10) == 80


def test_staleness_of_the_order_of_sqrt_k_costs_little() -> None:
    """f = sum x^2 / (1 + x^2), noise 1: mean squared gradient hardly rises up to T = 9."""
    means = []
    for delay in (0, 9):
        generator = torch.Generator().manual_seed(11)
        x, total, steps = torch.ones(10, dtype=torch.float64), 0.0, 1500
        history = [x]
        for _ in range(steps):
            old = history[max(0, len(history) - 1 - delay)]
            clean = 2 * old / (1 + old**2) ** 2
            here = 2 * x / (1 + x**2) ** 2
            total += float((here**2).sum())
            grad = clean + normal(generator, 10) / 10**0.5
            x = asysg.update(x, [grad], gamma=0.03)
            history.append(x)
        means.append(total / steps)
    assert means[1] < 1.3 * means[0]
