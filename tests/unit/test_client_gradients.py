"""GradientAveraging against a daemon without a swarm: when a bucket leaves, what comes back, and
who counts as current."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moshpitd.client import Result, Session, TrainerError, attach
from moshpitd.client.optim import GradientAveraging
from moshpitd.client.optim.gradient_averaging import CURRENT
from moshpitd.client.optim.gradient_buckets import MAX_BUCKETS, in_backward_order
from tests.kit.fake_daemon import FakeDaemon, Round, nobody, result, until

TINY = 1  # bytes: a bucket for every parameter


def halves(call: Round) -> Iterator[Any]:
    """A group of two of equal weight; the other one has zeros everywhere."""
    for view in call.views().values():
        view.div_(2)
    versions = call.trainer.request.version
    yield result(group_size=2, participants=2, version=versions + 1)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    fake.answer = halves
    fake.sync_answer = current
    yield fake
    fake.stop()


def current(call: Round) -> Iterator[Any]:
    yield result("complete", version=call.trainer.request.version)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))


@pytest.fixture
def session(daemon: FakeDaemon, model: nn.Module) -> Iterator[Session]:
    with attach("test", model=model, socket=daemon.socket) as session:
        yield session


@pytest.fixture
def made(model: nn.Module, session: Session) -> Iterator[Any]:
    optimizers: list[GradientAveraging] = []

    def make(**options: Any) -> GradientAveraging:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"bucket_bytes": TINY, **options}
        optimizers.append(GradientAveraging(model, inner, session, **options))
        return optimizers[-1]

    yield make
    for optimizer in optimizers:
        optimizer.close()


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.ones(1, 3)).sum()).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def of_run(daemon: FakeDaemon, run: str) -> list[Any]:
    names = {name for name, trainer in daemon.trainers.items() if trainer.request.run == run}
    return [call for call in daemon.calls if call.trainer in names and hasattr(call, "weight")]


def test_a_step_is_made_with_the_mean(daemon: FakeDaemon, model: nn.Module, made: Any) -> None:
    backward(model)
    alone = gradients(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = made()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    for p, old, own in zip(model.parameters(), before, alone, strict=True):
        torch.testing.assert_close(p.detach(), old - own / 2)
    assert [len(of_run(daemon, f"test.grad{at}")) for at in (0, 1)] == [1, 1]
    assert of_run(daemon, "test") == []


def test_a_bucket_leaves_as_soon_as_backward_has_filled_it(
    daemon: FakeDaemon, model: nn.Sequential, made: Any
) -> None:
    """The last layer's gradient is averaging before the first layer's exists."""
    made()
    arrived = threading.Event()

    def answer(call: Round) -> Iterator[Any]:
        arrived.set()
        yield from halves(call)

    daemon.answer = answer
    seen: list[bool] = []
    hidden = model[0](torch.ones(1, 3))
    hidden.register_hook(lambda grad: seen.append(arrived.wait(10)))
    model[1](hidden).sum().backward()
    assert seen == [True]


def test_without_overlap_nothing_leaves_before_the_step(
    daemon: FakeDaemon, model: nn.Module, made: Any
) -> None:
    optimizer = made(overlap=False)
    count = len(daemon.calls)
    backward(model)
    assert len(daemon.calls) == count
    optimizer.step()
    assert len(daemon.calls) == count + 2


def test_gradients_can_be_changed_after_averaging(model: nn.Module, made: Any) -> None:
    optimizer = made()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = [(p.detach() - old) for p, old in zip(model.parameters(), before, strict=True)]
    assert sum(float(m.square().sum()) for m in moved) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_no_sync_adds_up_and_a_second_backward_without_it_is_told(
    daemon: FakeDaemon, model: nn.Module, made: Any
) -> None:
    backward(model)
    once = gradients(model)
    optimizer = made(bucket_bytes=1 << 20)  # both in one, so that a part can fill it in part
    optimizer.zero_grad()
    count = len(daemon.calls)
    with optimizer.no_sync():
        backward(model)
        (model[0](torch.ones(1, 3)).sum() * 0).backward()  # a part of the model only
    assert len(daemon.calls) == count
    backward(model)
    optimizer.synchronize()
    for grad, own in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(grad, own)  # (own + own) / 2
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(TrainerError, match="second backward"):
        backward(model)


def test_a_parameter_without_a_gradient_contributes_zeros_and_gets_the_mean(
    daemon: FakeDaemon, model: nn.Sequential, made: Any
) -> None:
    optimizer = made()

    def theirs(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.add_(1.0)
        yield result(group_size=2, version=1)

    daemon.answer = theirs
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    assert torch.equal(model[1].weight.grad, torch.ones(1, 2))


def test_a_closure_is_averaged_each_time(model: nn.Module, made: Any) -> None:
    optimizer = made()

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return float(loss.detach())

    before = model[1].weight.detach().clone()
    hidden = model[0](torch.ones(1, 3)).detach()
    assert isinstance(optimizer.step(closure), float)
    torch.testing.assert_close(model[1].weight.detach(), before - hidden / 2)


def test_who_missed_a_mean_counts_next_to_nothing_until_parameters_were_averaged(
    daemon: FakeDaemon, model: nn.Module, made: Any
) -> None:
    results: list[Result] = []
    optimizer = made(settle_every=3, on_result=results.append)
    optimizer.samples = 5

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()

    version = iter(range(1, 100))

    def counting(call: Round) -> Iterator[Any]:
        last = "grad0" in call.trainer.request.run
        yield result(group_size=2, version=next(version) if last else 0)

    daemon.answer = counting
    steps(1)
    assert optimizer.current
    daemon.answer = nobody
    steps(1)
    assert not optimizer.current
    daemon.answer = counting
    steps(1)
    assert [call.weight for call in of_run(daemon, "test.grad0")] == [5 * CURRENT, 5 * CURRENT, 5]
    assert of_run(daemon, "test") == []
    steps(1)  # the third average: parameters, too
    assert [call.weight for call in of_run(daemon, "test")] == [1]
    assert optimizer.current
    assert optimizer.settled is not None
    assert [r.status for r in results].count("alone") == 2


def test_a_daemon_that_goes_leaves_the_local_gradient(
    daemon: FakeDaemon, model: nn.Module, session: Session, made: Any
) -> None:
    backward(model)
    alone = gradients(model)
    optimizer = made()
    daemon.stop()
    until(lambda: not session.attached, what="the client notices")
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert (optimizer.missed, optimizer.current) == (2, False)
    for grad, own in zip(gradients(model), alone, strict=True):
        torch.testing.assert_close(grad, own)
    daemon.start()


def test_a_batch_that_was_given_up_is_no_second_backward(model: nn.Module, made: Any) -> None:
    optimizer = made()
    backward(model)
    optimizer.zero_grad()
    assert not optimizer.current  # the others stepped with it
    backward(model)
    optimizer.step()


def test_a_nan_is_told_by_the_step(model: nn.Module, made: Any) -> None:
    optimizer = made()
    backward(model, float("nan"))
    with pytest.raises(TrainerError, match="NaN"):
        optimizer.step()


def test_it_is_an_optimizer_and_its_checkpoint_goes_round(model: nn.Module, made: Any) -> None:
    optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    backward(model)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    saved = optimizer.state_dict()
    assert saved["gradient_averaging"]["session"]["run"] == "test"
    optimizer.load_state_dict(saved)
    assert "2 buckets" in repr(optimizer)


def test_closing_lets_go_of_the_model(daemon: FakeDaemon, model: nn.Module, made: Any) -> None:
    optimizer = made()
    optimizer.close()
    count = len(daemon.calls)
    backward(model)
    assert len(daemon.calls) == count


def test_buckets_are_cut_from_the_end_and_grow_when_there_would_be_too_many() -> None:
    layers = [(f"{at}", nn.Parameter(torch.zeros(10))) for at in range(100)]
    layers[7][1].requires_grad_(False)
    buckets = in_backward_order(layers, 120)
    assert list(buckets[0]) == ["99", "98", "97", "96", "95", "94", "93"]
    assert len(buckets) <= MAX_BUCKETS
    assert sum(map(len, buckets)) == 99
    few = in_backward_order(layers[:6], 80)
    assert [list(bucket) for bucket in few] == [["5", "4"], ["3", "2"], ["1", "0"]]
