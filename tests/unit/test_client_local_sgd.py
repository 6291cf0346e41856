"""LocalSGD: when it averages, what counts as a sample, and that torch takes it for an optimizer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moshpitd.client import PartialAverage, Result, Session, TrainerError, attach
from moshpitd.client.optim import LocalSGD, session_state
from moshpitd.client.optim.schedule import EverySeconds, EverySteps, schedule_of
from tests.kit.fake_daemon import FakeDaemon, Round, nobody, result


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.fixture
def session(daemon: FakeDaemon, model: nn.Module) -> Iterator[Session]:
    with attach("test", model=model, socket=daemon.socket, sync=False) as session:
        yield session


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **options: Any) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step(**options)


def test_a_plain_loop_needs_three_more_lines(daemon: FakeDaemon, model: nn.Module) -> None:
    optimizer: torch.optim.Optimizer = sgd(model)
    session = attach("test", model=model, socket=daemon.socket)
    optimizer = LocalSGD(optimizer, session, every=4)
    train(model, optimizer, 8)
    session.close()
    assert [call.weight for call in daemon.calls[1:]] == [4, 4]  # after the sync


def test_weights_count_samples_since_the_last_average(
    daemon: FakeDaemon, model: nn.Module, session: Session
) -> None:
    optimizer = LocalSGD(sgd(model), session, every=2)
    train(model, optimizer, 2, samples=32)
    daemon.answer = nobody
    train(model, optimizer, 2, samples=10)  # alone: nobody's average holds them yet
    train(model, optimizer, 2)
    assert [call.weight for call in daemon.calls] == [64, 20, 22]
    assert (optimizer.steps, optimizer.samples) == (6, 22)
    assert optimizer.last is not None
    assert optimizer.last.status == "alone"


def test_a_skipped_result_and_a_delta_keep_the_samples(
    daemon: FakeDaemon, model: nn.Module, session: Session
) -> None:
    optimizer = LocalSGD(sgd(model), session, every=1)
    daemon.answer = lambda call: iter([result("partial", accepted=False, group_size=3)])
    train(model, optimizer, 1, samples=5)
    assert optimizer.samples == 5

    def zeros(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.zero_()
        yield result(delta=True)

    daemon.answer = zeros
    train(model, optimizer, 1, samples=5)
    assert optimizer.samples == 10
    daemon.answer = lambda call: iter([result("failed", accepted=False, loaded_snapshot=True)])
    train(model, optimizer, 1, samples=5)
    assert optimizer.samples == 0


def test_a_failed_average_does_not_shift_the_schedule(
    daemon: FakeDaemon, model: nn.Module, session: Session
) -> None:
    steps_at: list[int] = []
    optimizer = LocalSGD(
        sgd(model), session, every=3, on_result=lambda _: steps_at.append(optimizer.steps)
    )
    daemon.answer = lambda call: iter([result("failed", accepted=False, reason="timeout")])
    train(model, optimizer, 10)
    assert steps_at == [3, 6, 9]


def test_bad_samples_are_refused_before_the_step(model: nn.Module, session: Session) -> None:
    optimizer = LocalSGD(sgd(model), session, every=1)
    before = model.weight.clone()  # type: ignore[operator]
    for samples in (-1, float("nan"), 0.5):
        with pytest.raises(TrainerError, match="weight"):
            train(model, optimizer, 1, samples=samples)
    assert torch.equal(model.weight, before)  # type: ignore[arg-type]
    assert optimizer.steps == 0


def test_mistakes_of_the_trainer_are_raised_and_passing_refusals_are_not(
    daemon: FakeDaemon, model: nn.Module, session: Session
) -> None:
    optimizer = LocalSGD(sgd(model), session, every=1)

    def busy(call: Round) -> Iterator[Any]:
        raise TrainerError("a round still runs", code="ABORTED", reason="bucket_busy")
        yield

    daemon.answer = busy
    train(model, optimizer, 1)
    assert optimizer.missed == 1
    with torch.no_grad():
        model.bias.fill_(float("nan"))  # type: ignore[operator, union-attr]
    with pytest.raises(TrainerError, match="'bias'"):
        optimizer.average()


def test_options_and_their_overrides(
    daemon: FakeDaemon, model: nn.Module, session: Session
) -> None:
    seen: list[Result] = []
    optimizer = LocalSGD(
        sgd(model), session, every=1, on_partial="raise", timeout_s=7, on_result=seen.append
    )
    daemon.answer = lambda call: iter([result("partial", accepted=False, group_size=3)])
    with pytest.raises(PartialAverage):
        train(model, optimizer, 1)
    final = optimizer.average(min_participants=4, on_partial="accept")
    assert [outcome.group_size for outcome in seen] == [3, 3]
    assert final is seen[1]
    first, second = daemon.calls
    assert (first.on_partial, first.timeout_s, first.min_participants) == ("raise", 7.0, 1)
    assert (second.on_partial, second.timeout_s, second.min_participants) == ("accept", 7.0, 4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "either|every="),
        ({"every": 8, "every_s": 1.0}, "every="),
        ({"every": 0}, "every 0"),
        ({"every_s": -1.0}, "every_s -1"),
        ({"every": 8, "on_partial": "maybe"}, "on_partial"),
        ({"every": 8, "on_error": "ignore"}, "on_error"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(
    model: nn.Module, session: Session, options: Any, word: str
) -> None:
    with pytest.raises(TrainerError, match=word):
        LocalSGD(sgd(model), session, **options)


def test_it_is_an_optimizer_for_torch(model: nn.Module, session: Session) -> None:
    inner = sgd(model)
    optimizer = LocalSGD(inner, session, every=100)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state is inner.state
    assert "run='test'" in repr(optimizer)
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert len(inner.param_groups) == 2

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)


def test_checkpoints_go_round(daemon: FakeDaemon, model: nn.Module, session: Session) -> None:
    optimizer = LocalSGD(sgd(model), session, every=2)
    train(model, optimizer, 3, samples=8)
    saved = optimizer.state_dict()
    assert saved["local_sgd"]["session"]["version"] == 1

    again = LocalSGD(sgd(model), session, every=2)
    again.load_state_dict(saved)
    assert (again.steps, again.samples) == (3, 8)
    assert again.optimizer.state_dict()["state"].keys() == saved["state"].keys()
    assert session_state(saved) == session.state_dict()

    plain = sgd(model).state_dict()
    again.load_state_dict(plain)
    assert (again.steps, again.samples) == (0, 0)
    assert session_state(plain) is None


def test_every_steps_counts_from_the_first() -> None:
    schedule = EverySteps(8)
    due = [step for step in range(1, 33) if schedule.due(steps=step, now=0.0, attached=True)]
    assert due == [8, 16, 24, 32]


def test_every_seconds_begins_anew_at_the_end_of_a_round() -> None:
    schedule = EverySeconds(10.0, random.Random(0))
    assert schedule.due(steps=1, now=100.0, attached=True)  # it waits for them, not they for it
    schedule.averaged(now=113.0, together=True)
    assert not schedule.due(steps=2, now=122.9, attached=True)
    assert schedule.due(steps=3, now=123.0, attached=True)


def test_every_seconds_is_due_as_soon_as_the_daemon_is_back() -> None:
    schedule = EverySeconds(10.0, random.Random(0))
    schedule.averaged(now=100.0, together=True)
    assert schedule.due(steps=1, now=110.0, attached=False)  # one try, which says that it is away
    schedule.away()
    assert not schedule.due(steps=2, now=125.0, attached=False)
    assert schedule.due(steps=3, now=125.5, attached=True)
    schedule.averaged(now=126.0, together=True)
    assert not schedule.due(steps=4, now=135.9, attached=True)


def test_who_comes_and_meets_nobody_tries_twice_in_a_row() -> None:
    schedule = EverySeconds(10.0, random.Random(0))
    schedule.averaged(now=100.0, together=False)
    assert schedule.due(steps=1, now=100.1, attached=True)
    schedule.averaged(now=105.0, together=False)
    assert not schedule.due(steps=2, now=109.9, attached=True)
    assert schedule.due(steps=3, now=115.0, attached=True)
    schedule.averaged(now=115.0, together=True)
    schedule.averaged(now=125.0, together=False)
    assert not schedule.due(steps=4, now=129.9, attached=True)
    schedule.away()
    schedule.averaged(now=130.0, together=False)
    assert schedule.due(steps=5, now=130.1, attached=True)


def test_two_trainers_out_of_phase_meet() -> None:
    """Phases 12 s apart, T = 30 s, a window of 5 s: with fixed phases they would never meet."""
    schedules = [EverySeconds(30.0, random.Random(seed)) for seed in (1, 2)]
    waits: list[float | None] = [None, None]  # until when each one waits in its window
    starts = (0.0, 12.0)
    for tick in range(10 * 600):
        now = tick / 10
        for at, schedule in enumerate(schedules):
            wait = waits[at]
            if wait is not None and now >= wait:
                waits[at] = None
                schedule.averaged(now=now, together=False)
            elif (
                wait is None and now >= starts[at] and schedule.due(steps=1, now=now, attached=True)
            ):
                waits[at] = now + 5.0
        if None not in waits:
            return
    pytest.fail("not in one window within 10 minutes")


def test_schedule_of_refuses_what_is_no_number() -> None:
    with pytest.raises(TrainerError, match="every 'often'"):
        schedule_of("often", None)
