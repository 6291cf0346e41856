"""Rounds that run while the trainer computes: nothing it learns meanwhile is lost, whatever becomes
of the round."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.client import DaemonUnavailable, PartialAverage, Session, TrainerError, attach
from moshpitd.client.optim import LocalSGD
from tests.kit.fake_daemon import (
    Answer,
    FakeDaemon,
    Round,
    nobody,
    progress,
    result,
    until,
    with_a_peer_at_zero,
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


class Gate:
    """An answer that is held back until the test opens it, for every round anew."""

    def __init__(self, daemon: FakeDaemon, then: Answer = with_a_peer_at_zero) -> None:
        self.then = then
        self.reached = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.inside = self.most = 0
        daemon.answer = self._answer

    def open(self) -> None:
        # One that was given up may not have noticed yet, and would take what is another's.
        until(lambda: self.inside <= 1, what="at most one round waits at the gate")
        self.opened.release()

    def wait(self) -> None:
        assert self.reached.acquire(timeout=10), "a round reaches the daemon"

    def _answer(self, call: Round) -> Iterator[Any]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.reached.release()
        try:
            yield progress("exchange")
            while not self.opened.acquire(timeout=0.01):
                if call.cancelled.is_set():
                    return
            yield from self.then(call)
        finally:
            self.inside -= 1


def session_of(daemon: FakeDaemon, tensors: Any, **options: Any) -> Session:
    return attach("test", tensors=tensors, socket=daemon.socket, sync=False, **options)


def local_sgd(values: torch.Tensor, session: Session, **options: Any) -> LocalSGD:
    return LocalSGD(torch.optim.SGD([values], lr=1.0), session, overlap=True, **options)


def step(optimizer: LocalSGD, values: torch.Tensor, **options: Any) -> None:
    """values -= 1."""
    optimizer.zero_grad()
    values.sum().backward()
    optimizer.step(**options)


def landed(optimizer: LocalSGD) -> None:
    until(lambda: not optimizer.in_flight, what="the round is over")


# -- one flight -----------------------------------------------------------------------------------


def test_what_the_trainer_does_meanwhile_stays(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin(weight=3)
        gate.wait()
        values.sub_(1.0)
        assert not flight.done
        gate.open()
        outcome = flight.land()
        assert (outcome.status, session.version) == ("complete", 1)
        assert torch.equal(values, torch.full((3,), 5.0))  # 8 - 1 + (6 - 8)
        assert flight.land() is outcome
        assert torch.equal(values, torch.full((3,), 5.0)), "landed twice, added once"


def test_without_overlap_the_average_replaces(daemon: FakeDaemon) -> None:
    values = torch.full((3,), 0.1)
    with session_of(daemon, {"w": values}) as session:

        def third(call: Round) -> Iterator[Any]:
            call.views()["w"].fill_(1 / 3)
            yield result(version=1)

        daemon.answer = third
        flight = session.begin(overlap=False)
        assert flight.wait(10)
        flight.land()
    assert torch.equal(values, torch.full((3,), 1 / 3))  # the average's own bits, not a sum


def test_tensors_of_every_kind(daemon: FakeDaemon) -> None:
    tensors = {
        "w": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "wide": torch.tensor([1.0], dtype=torch.float64),
        "empty": torch.empty(0, 2),
        "count": torch.tensor(7),
        "ahead": torch.tensor([9]),
        "mask": torch.tensor([True, False, False]),
    }

    def others(call: Round) -> Iterator[Any]:
        views = call.views()
        views["w"].mul_(2)
        views["half"].fill_(3)
        views["wide"].fill_(1 + 1e-12)
        views["count"].fill_(12)  # the maximum over all
        views["mask"].copy_(torch.tensor([True, True, False]))
        yield result(version=1)

    gate = Gate(daemon, others)
    with session_of(daemon, tensors) as session:
        flight = session.begin()
        gate.wait()
        tensors["w"].add_(1)
        tensors["half"].add_(1)
        tensors["count"].add_(2)
        tensors["ahead"].add_(1)
        tensors["mask"][2] = True
        gate.open()
        flight.land()
    assert torch.equal(tensors["w"], torch.arange(6.0).view(2, 3).t() * 2 + 1)
    assert tensors["half"].tolist() == [4.0] * 5
    assert tensors["wide"].item() == 1 + 1e-12
    assert tensors["count"].item() == 14
    assert tensors["ahead"].item() == 10
    assert tensors["mask"].tolist() == [True, True, True]


def test_a_part_without_a_result_adds_nothing(daemon: FakeDaemon) -> None:
    values = torch.full((150_001,), 4.0)  # three parts, the last one odd

    def one_is_missing(call: Round) -> Iterator[Any]:
        call.views()["w"].fill_(2.0)  # also what a reducer that was given up for wrote late
        yield result("partial", version=1, group_size=2, parts=3, parts_without_result=[1])

    gate = Gate(daemon, one_is_missing)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        gate.wait()
        values.sub_(1)
        gate.open()
        flight.land()
    part = (256 << 10) // 4
    expected = torch.full((150_001,), 1.0)
    expected[part : 2 * part] = 3.0
    assert torch.equal(values, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "failed", "accepted": False, "reason": "timeout"},
        {"status": "partial", "accepted": False, "group_size": 3},
    ],
)
def test_a_round_that_failed_adds_nothing(daemon: FakeDaemon, fields: Any) -> None:
    def scribbles(call: Round) -> Iterator[Any]:
        call.views()["w"].fill_(99.0)
        yield result(**fields)

    daemon.answer = scribbles
    values = torch.full((3,), 4.0)
    with session_of(daemon, {"w": values}) as session:
        outcome = session.begin().land()
        assert outcome.status == fields["status"]
        assert session.version == 0
        with pytest.raises(PartialAverage):
            session.begin(on_partial="raise").land()
    assert torch.equal(values, torch.full((3,), 4.0))


def test_a_loaded_snapshot_replaces_and_the_steps_since_are_gone(daemon: FakeDaemon) -> None:
    def snapshot(call: Round) -> Iterator[Any]:
        call.views()["w"].fill_(70.0)
        yield result("failed", accepted=False, loaded_snapshot=True, version=9)

    gate = Gate(daemon, snapshot)
    values = torch.full((3,), 4.0)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        gate.wait()
        values.sub_(1)
        gate.open()
        flight.land()
        assert session.version == 9
    assert torch.equal(values, torch.full((3,), 70.0))


def test_values_of_one_round_take_no_snapshot(daemon: FakeDaemon) -> None:
    def stale(status: str) -> Answer:
        def answer(call: Round) -> Iterator[Any]:
            call.views()["w"].fill_(70.0)
            yield result(status, loaded_snapshot=True, version=9)

        return answer

    values = torch.full((3,), 4.0)
    with session_of(daemon, {"w": values}) as session:
        for status in ("alone", "failed"):
            daemon.answer = stale(status)
            session.begin(overlap=False, snapshots=False).land()
            assert torch.equal(values, torch.full((3,), 4.0)), status
        daemon.answer = stale("complete")  # entered with weight 0: the mean of the others is new
        session.begin(overlap=False, snapshots=False).land()
    assert torch.equal(values, torch.full((3,), 70.0))


def test_a_late_trainer_of_the_node_adds_the_delta_that_it_is_given(daemon: FakeDaemon) -> None:
    def late(call: Round) -> Iterator[Any]:
        call.views()["w"].fill_(0.5)
        yield result(delta=True, version=1)

    gate = Gate(daemon, late)
    values = torch.full((3,), 4.0)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        gate.wait()
        values.sub_(1)
        gate.open()
        flight.land()
    assert torch.equal(values, torch.full((3,), 3.5))


def test_whoever_asks_for_the_next_round_lands_the_one_in_flight(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0)
    with session_of(daemon, {"w": values}) as session:
        first = session.begin()  # to 4
        gate.wait()
        values.add_(2.0)
        gate.open()
        gate.open()
        outcome = session.average()  # (8 + 2 - 4) / 2
        assert torch.equal(values, torch.full((3,), 3.0))
        assert first.land().status == outcome.status == "complete"
        assert torch.equal(values, torch.full((3,), 3.0))
    assert gate.most == 1


def test_a_mistake_of_the_trainer_is_told_when_it_lands(daemon: FakeDaemon) -> None:
    values = torch.full((3,), float("nan"))
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        with pytest.raises(TrainerError, match="'w'"):
            flight.land()
        values.fill_(2.0)
        assert session.average().status == "complete"


def test_an_error_in_the_hook_is_told_when_it_lands(daemon: FakeDaemon) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError

    with session_of(daemon, {"w": torch.ones(3)}) as session:
        flight = session.begin(progress=broken)
        with pytest.raises(ZeroDivisionError):
            flight.land()


# -- daemons that go, sessions that end -----------------------------------------------------------


def test_a_daemon_that_dies_in_a_flight_adds_nothing(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=1)
        step(optimizer, values)
        gate.wait()
        daemon.stop()
        landed(optimizer)
        step(optimizer, values)  # lands the broken one; beginning another fails as well
        assert (optimizer.missed, optimizer.samples) == (2, 2)
        assert torch.equal(values.detach(), torch.full((3,), 6.0))
        daemon.start()
        assert session.wait_attached(10)
        step(optimizer, values)
        gate.wait()
        gate.open()
        optimizer.land()
        assert daemon.calls[-1].weight == 3
        assert torch.equal(values.detach(), torch.full((3,), 5 * 3 / 4))
        assert optimizer.samples == 0


def test_a_daemon_restarted_before_the_landing_hears_of_the_version_that_will_be(
    daemon: FakeDaemon,
) -> None:
    values = torch.full((3,), 8.0)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        assert flight.wait(10)
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        daemon.start()
        assert session.wait_attached(10)
        assert (session.version, daemon.only_trainer().request.version) == (0, 1)
        flight.land()
        assert session.version == 1
    assert torch.equal(values, torch.full((3,), 4.0))


def test_closing_ends_a_flight_and_leaves_the_model_alone(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0)
    session = session_of(daemon, {"w": values})
    flight = session.begin()
    gate.wait()
    session.close()
    assert flight.wait(10)
    with pytest.raises(DaemonUnavailable):
        flight.land()
    assert torch.equal(values, torch.full((3,), 8.0))
    assert len(daemon.detached) == 1


def test_a_result_that_is_here_can_be_landed_after_closing(daemon: FakeDaemon) -> None:
    values = torch.full((3,), 8.0)
    session = session_of(daemon, {"w": values})
    flight = session.begin()
    assert flight.wait(10)
    session.close()
    flight.land()
    assert torch.equal(values, torch.full((3,), 4.0))


def test_a_checkpoint_gives_the_flight_up(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=1)
        saved = optimizer.state_dict()
        step(optimizer, values, samples=5)
        gate.wait()
        assert optimizer.state_dict()["local_sgd"]["samples"] == 5  # in flight: nobody's yet
        assert optimizer.state_dict()["local_sgd"]["session"]["version"] == 0
        with torch.no_grad():
            values.fill_(20.0)
        optimizer.load_state_dict(saved)
        assert not optimizer.in_flight
        assert optimizer.land() is None
        step(optimizer, values)
        gate.wait()
        gate.open()
        optimizer.land()
        assert torch.equal(values.detach(), torch.full((3,), 19 / 2))


def test_a_session_that_loads_a_checkpoint_gives_the_flight_up(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 8.0)
    with session_of(daemon, {"w": values}) as session:
        flight = session.begin()
        gate.wait()
        session.load_state_dict({"run": "test", "version": 4})
        with pytest.raises(DaemonUnavailable, match="given up"):
            flight.land()
        assert list(daemon.trainers.values())[-1].request.version == 4
        assert torch.equal(values, torch.full((3,), 8.0))


# -- LocalSGD -------------------------------------------------------------------------------------


def test_a_step_never_waits_and_one_round_is_in_flight(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 10.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=2)
        for _ in range(2):
            step(optimizer, values)  # the second begins a round with weight 2, at 8
        gate.wait()
        for _ in range(3):
            step(optimizer, values)  # due at 4, but one is in flight
        assert (optimizer.in_flight, optimizer.samples) == (True, 5)
        gate.open()
        landed(optimizer)
        step(optimizer, values)  # 4, lands: + (16/3 - 8); what was due begins now
        gate.wait()
        assert optimizer.samples == 4
        before = 4 + 16 / 3 - 8
        assert values.tolist() == pytest.approx([before] * 3)
        gate.open()
        assert optimizer.land() is optimizer.last
        assert [call.weight for call in daemon.calls] == [2, 4]
        assert values.tolist() == pytest.approx([before * 4 / 5] * 3)
        assert (optimizer.samples, optimizer.missed, gate.most) == (0, 0, 1)


def test_alone_and_snapshots_count_samples_as_they_must(daemon: FakeDaemon) -> None:
    gate = Gate(daemon, nobody)
    values = torch.full((3,), 10.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=1)
        step(optimizer, values)
        gate.wait()
        step(optimizer, values)
        gate.open()
        optimizer.land()
        assert optimizer.samples == 2  # alone: nobody's average holds them

        def snapshot(call: Round) -> Iterator[Any]:
            yield result("failed", accepted=False, loaded_snapshot=True, version=3)

        gate.then = snapshot
        step(optimizer, values)
        gate.wait()
        step(optimizer, values)
        gate.open()
        optimizer.land()
        assert optimizer.samples == 0  # the step made meanwhile went with the parameters


def test_average_lands_and_is_then_a_round_of_its_own(daemon: FakeDaemon) -> None:
    gate = Gate(daemon)
    values = torch.full((3,), 9.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=1)
        step(optimizer, values)  # 8, begins
        gate.wait()
        gate.open()
        gate.open()
        final = optimizer.average()
        assert final is not None
        assert final.version == 1
        assert torch.equal(values.detach(), torch.full((3,), 2.0))
        assert [call.weight for call in daemon.calls] == [1, 1]


def test_mistakes_are_raised_by_the_step_that_lands_them(daemon: FakeDaemon) -> None:
    values = torch.full((3,), 9.0, requires_grad=True)
    with session_of(daemon, {"w": values}) as session:
        optimizer = local_sgd(values, session, every=1)
        with torch.no_grad():
            values[0] = float("nan")
        step(optimizer, values)
        landed(optimizer)
        with pytest.raises(TrainerError, match="'w'"):
            step(optimizer, values)
