"""Daemons that are not there, die, come back, drain or forget; the trainer goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.client import DaemonUnavailable, Session, TrainerError, attach
from moshpitd.client.optim import LocalSGD
from moshpitd.errors import ConfigError
from moshpitd.rpc.status import refusal
from tests.kit.fake_daemon import FakeDaemon, Round, progress, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def session_of(daemon: FakeDaemon, **options: Any) -> tuple[Session, torch.Tensor]:
    values = torch.full((3,), 4.0)
    return attach("test", tensors=[values], socket=daemon.socket, **options), values


def test_no_daemon_at_start_is_no_error(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    session, values = session_of(daemon)
    with session:
        assert not session.attached
        with pytest.raises(DaemonUnavailable, match=r"fake\.sock"):
            session.average()
        daemon.start()
        assert session.wait_attached(10)
        session.average()
        assert torch.equal(values, torch.full((3,), 2.0))
    daemon.stop()


def test_a_restarted_daemon_gets_the_tensors_again(daemon: FakeDaemon) -> None:
    session, values = session_of(daemon)
    with session:
        session.average()
        old = daemon.only_trainer()
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        with pytest.raises(DaemonUnavailable):
            session.average()
        assert torch.equal(values, torch.full((3,), 2.0))
        daemon.start()
        assert session.wait_attached(10)
        new = daemon.only_trainer()
        assert (new.request.version, new.request.founder) == (1, "12D3KooWFake")
        assert new.path != old.path
        assert session.average().version == 2
        assert torch.equal(values, torch.full((3,), 1.0))


def test_a_daemon_that_dies_in_a_round_leaves_the_model_alone(daemon: FakeDaemon) -> None:
    begun = threading.Event()

    def scribbles(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.fill_(99.0)
        yield progress("exchange")
        begun.set()
        call.cancelled.wait(10)

    daemon.answer = scribbles
    session, values = session_of(daemon)

    def kill() -> None:
        begun.wait(10)
        daemon.stop()

    killer = threading.Thread(target=kill)
    killer.start()
    with session:
        with pytest.raises(DaemonUnavailable):
            session.average()
        killer.join(10)
        assert torch.equal(values, torch.full((3,), 4.0))
        assert session.version == 0
    daemon.start()


def test_a_forgotten_trainer_attaches_again(daemon: FakeDaemon) -> None:
    session, _ = session_of(daemon)
    with session:
        first = daemon.only_trainer()
        daemon.trainers.clear()  # a restart that the Hold stream did not show yet
        with pytest.raises(DaemonUnavailable, match="restarted"):
            session.average()
        until(lambda: bool(daemon.trainers) and daemon.only_trainer() is not first, what="again")
        assert session.wait_attached(10)
        assert session.average().status == "complete"


def test_refusals_in_the_background_are_told_at_the_next_average(daemon: FakeDaemon) -> None:
    session, _ = session_of(daemon)
    with session:
        daemon.refuse_attach = refusal("no_room", "400 MB needed in /dev/shm, 64 MB free")
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        daemon.start()

        def told() -> bool:
            try:
                session.average()
            except DaemonUnavailable:
                return False
            except TrainerError as error:
                return error.code == "RESOURCE_EXHAUSTED" and "400 MB" in str(error)
            return False

        until(told, what="the refusal is raised")
        daemon.refuse_attach = None
        assert session.wait_attached(15)


def test_a_draining_daemon_keeps_its_trainer_but_runs_no_round(daemon: FakeDaemon) -> None:
    session, values = session_of(daemon)
    with session:
        daemon.draining.set()
        until(lambda: session.draining, what="the trainer hears of it")
        with pytest.raises(DaemonUnavailable, match="leaving"):
            session.average()
        assert session.attached
        assert daemon.gone == []
        assert torch.equal(values, torch.full((3,), 4.0))


def test_a_refusal_because_of_draining_costs_no_attachment(daemon: FakeDaemon) -> None:
    def leaving(call: Round) -> Iterator[Any]:
        raise refusal("draining", "this daemon is leaving")
        yield

    daemon.answer = leaving
    session, _ = session_of(daemon)
    with session:
        with pytest.raises(DaemonUnavailable, match="this daemon is leaving"):
            session.average()
        assert session.attached


def test_local_sgd_trains_through_a_restart(daemon: FakeDaemon) -> None:
    session, values = session_of(daemon)
    values.requires_grad_(True)
    with session:
        optimizer = LocalSGD(torch.optim.SGD([values], lr=0.5), session, every=2)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                values.sum().backward()
                optimizer.step()

        steps(2)  # 4 - 2 * 0.5 = 3, averaged with a zero of weight 1: 2 * 3 / 3 = 2
        assert torch.equal(values.detach(), torch.full((3,), 2.0))
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        steps(4)
        assert torch.equal(values.detach(), torch.zeros(3))
        assert (optimizer.missed, optimizer.samples) == (2, 4)
        daemon.start()
        assert session.wait_attached(10)
        steps(2)  # -1, and all 6 steps count: 6 * -1 / 7
        assert torch.allclose(values.detach(), torch.full((3,), -6 / 7))
        assert optimizer.samples == 0

        asking = LocalSGD(torch.optim.SGD([values], lr=0.5), session, every=1, on_error="raise")
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        with pytest.raises(DaemonUnavailable):
            asking.step()
        daemon.start()


def test_a_bucket_that_cannot_be_opened_is_a_sentence(daemon: FakeDaemon) -> None:
    made = daemon._bucket

    def elsewhere(*arguments: Any) -> Any:
        trainer = made(*arguments)
        trainer.path.rename(trainer.path.with_suffix(".moved"))
        return trainer

    daemon._bucket = elsewhere  # type: ignore[method-assign]
    with pytest.raises(TrainerError, match="mount its buffers_dir") as caught:
        session_of(daemon)
    assert caught.value.reason == "bucket_unreachable"


def test_a_bucket_of_another_age_is_refused(daemon: FakeDaemon) -> None:
    made = daemon._bucket

    def older(*arguments: Any) -> Any:
        trainer = made(*arguments)
        trainer.mapping[:4] = b"MPB0"
        return trainer

    daemon._bucket = older  # type: ignore[method-assign]
    with pytest.raises(TrainerError, match="different ages") as caught:
        session_of(daemon)
    assert caught.value.reason == "api_differs"


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        attach("test", tensors=[torch.ones(1)], socket=tmp_path / ("x" * 120))
