"""Tensors that live in the bucket: an average moves them over, and nothing else touches them."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client import DaemonUnavailable, PartialAverage, Session, TrainerError, attach
from moshpitd.client.optim import LocalSGD
from moshpitd.errors import ConfigError
from tests.kit.fake_daemon import FakeDaemon, Round, Trainer, nobody, progress, result, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def session_of(daemon: FakeDaemon, tensors: Any, **options: Any) -> Session:
    return attach("test", tensors=tensors, socket=daemon.socket, in_place=True, **options)


def block_of(trainer: Trainer, tensor: Tensor) -> int:
    """In which block of the daemon's mapping a change of the tensor shows; -1 for none."""
    before = [block.clone() for block in trainer.blocks]
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.zero_().add_(77)
    changed = [not torch.equal(*both) for both in zip(before, trainer.blocks, strict=True)]
    with torch.no_grad():
        tensor.copy_(kept)
    assert changed.count(True) <= 1
    return changed.index(True) if any(changed) else -1


def test_an_average_moves_the_tensors_from_block_to_block(daemon: FakeDaemon) -> None:
    weights = torch.full((3, 4), 8.0)
    with session_of(daemon, {"w": weights}) as session:
        trainer = daemon.only_trainer()
        assert block_of(trainer, weights) == 0
        for count, block in ((1, 1), (2, 0), (3, 1)):
            assert trainer.generation % 2, "outside a call the values are the trainer's"
            assert session.average().accepted
            assert torch.equal(weights, torch.full((3, 4), 8.0 / 2**count))
            assert block_of(trainer, weights) == block
        where = weights.data_ptr()
    assert weights.data_ptr() != where, "a trainer that left holds none of the daemon's memory"
    assert torch.equal(weights, torch.full((3, 4), 1.0))
    weights.add_(1)


def test_a_tensor_is_saved_and_copied_alone(daemon: FakeDaemon) -> None:
    tensors = {"half": torch.ones(3, dtype=torch.bfloat16), "large": torch.arange(1e5)}
    with session_of(daemon, tensors):
        file = io.BytesIO()
        torch.save(tensors["half"], file)
        assert file.tell() < 5000, "not the whole bucket"
        again = copy.deepcopy(tensors["half"])
        assert torch.equal(again, tensors["half"])
        assert again.untyped_storage().nbytes() == 6


def test_an_optimizer_goes_on_and_a_graph_of_before_does_not(daemon: FakeDaemon) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    inputs = torch.arange(12.0).view(4, 3) / 10

    def train(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        one(inputs).square().sum().backward()
        optimizer.step()

    ours = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    parameters = list(model.parameters())
    with attach("test", model=model, socket=daemon.socket, in_place=True) as session:
        for _ in range(3):
            train(model, ours)
            train(twin, theirs)
            graph = (model.weight * model.weight).sum()
            session.average()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.div_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                graph.backward()
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def scribbled(**fields: Any) -> Any:
    def answer(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.fill_(5.0)
        yield result(**({"accepted": False, "version": 1} | fields))

    return answer


@pytest.mark.parametrize("status", ["failed", "partial"])
def test_what_is_not_accepted_moves_nothing(daemon: FakeDaemon, status: str) -> None:
    values = torch.ones(3)
    daemon.answer = scribbled(status=status)
    with session_of(daemon, [values]) as session:
        assert not session.average(on_partial="skip").applied
        with pytest.raises(PartialAverage):
            session.average(on_partial="raise")
        assert torch.equal(values, torch.ones(3))
        assert block_of(daemon.only_trainer(), values) == 0


def test_a_part_without_a_result_keeps_the_local_values(daemon: FakeDaemon) -> None:
    values = torch.ones(150_000)  # three parts

    daemon.answer = scribbled(
        status="partial", accepted=True, parts=3, parts_without_result=[1], reason="silent"
    )
    with session_of(daemon, [values]) as session:
        parts = session.layout.parts
        session.average()
        pieces = values.split([part.numel for part in parts])
        assert [piece.unique().tolist() for piece in pieces] == [[5.0], [1.0], [5.0]]
        assert block_of(daemon.only_trainer(), values) == 1


def test_alone_stays_where_it_is(daemon: FakeDaemon) -> None:
    values = torch.ones(3)
    daemon.answer = nobody
    with session_of(daemon, [values]) as session:
        assert session.average().status == "alone"
        assert block_of(daemon.only_trainer(), values) == 0
        assert torch.equal(values, torch.ones(3))


def test_a_delta_is_added_in_place(daemon: FakeDaemon) -> None:
    values = torch.tensor([1.0, 2.0])

    def late(call: Round) -> Iterator[Any]:
        call.views()["0"].copy_(torch.tensor([0.5, 0.0]))
        yield result(delta=True, version=9)

    daemon.answer = late
    with session_of(daemon, [values]) as session:
        session.average()
        assert torch.equal(values, torch.tensor([1.5, 2.0]))
        assert block_of(daemon.only_trainer(), values) == 0


def test_a_snapshot_moves_it_even_when_its_round_failed(daemon: FakeDaemon) -> None:
    values = torch.zeros(3)

    def moved(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.fill_(7.0)
        yield result("failed", accepted=True, loaded_snapshot=True, version=12)

    daemon.sync_answer = moved
    with session_of(daemon, [values]) as session:
        assert session.version == 12
        assert torch.equal(values, torch.full((3,), 7.0))
        assert block_of(daemon.only_trainer(), values) == 1


@pytest.mark.parametrize("way", ["killed", "hook", "given up"])
def test_a_call_that_breaks_leaves_the_model_and_takes_it_back(
    daemon: FakeDaemon, way: str
) -> None:
    """What the daemon still writes lands where nobody reads."""
    began, go_on = threading.Event(), threading.Event()

    def scribbles(call: Round) -> Iterator[Any]:
        yield progress("exchange")
        began.set()
        go_on.wait(10)
        for view in call.views().values():
            view.fill_(99.0)

    def hook(_: Any) -> None:
        if way == "hook":
            raise ZeroDivisionError

    daemon.answer = scribbles
    values = torch.full((3,), 4.0)
    session = session_of(daemon, [values])
    with session:
        trainer = daemon.only_trainer()
        if way == "given up":
            flight = session.begin(overlap=False)
            assert began.wait(10)
            assert trainer.generation % 2 == 0, "until the round is over it is not ours"
            session.give_up()
            with pytest.raises(DaemonUnavailable):
                flight.land()
        else:
            if way == "killed":
                killer = threading.Thread(target=lambda: began.wait(10) and daemon.stop())
                killer.start()
            with pytest.raises((DaemonUnavailable, ZeroDivisionError)):
                session.average(progress=hook)
        assert trainer.generation % 2
        go_on.set()
        if way == "killed":
            killer.join(10)
        values.add_(1)
        assert torch.equal(values, torch.full((3,), 5.0))


def test_a_daemon_that_comes_back_gets_the_tensors_into_its_new_file(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.full((3,), 8.0)
    with session_of(daemon, [values]) as session:
        session.average()
        old = daemon.only_trainer()
        assert block_of(old, values) == 1
        daemon.stop()
        until(lambda: not session.attached, what="the client notices")
        values.mul_(2)  # training goes on in the file that is gone
        daemon.start()
        assert session.wait_attached(10)
        session.average()
        assert torch.equal(values, torch.full((3,), 4.0))
        assert block_of(old, values) == -1
        assert block_of(daemon.only_trainer(), values) == 1
    assert "are not where they were put" not in caplog.text


def test_a_flight_without_overlap_moves_the_tensors_when_it_lands(daemon: FakeDaemon) -> None:
    values = torch.full((3,), 8.0)
    with session_of(daemon, [values]) as session:
        flight = session.begin(overlap=False)
        assert flight.wait(10)
        assert torch.equal(values, torch.full((3,), 8.0))
        assert daemon.only_trainer().generation % 2
        flight.land()
        assert torch.equal(values, torch.full((3,), 4.0))
        assert block_of(daemon.only_trainer(), values) == 1


def test_replaced_storage_is_moved_in_again_and_said_once(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    with attach("test", model=model, socket=daemon.socket, in_place=True) as session:
        with caplog.at_level(logging.WARNING):
            for value in (6.0, 10.0):
                state = {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}
                model.load_state_dict(state, assign=True)
                session.average()
                assert torch.equal(model.weight, torch.full((2, 2), value / 2))
                assert block_of(daemon.only_trainer(), model.bias) >= 0
        assert caplog.text.count("2 tensors are not where they were put (the first: 'weight')") == 1
        model.weight = nn.Parameter(torch.zeros(2, 2).t())
        with pytest.raises(TrainerError, match="'weight' is of strides"):
            session.average()


def test_a_daemon_that_is_too_old_has_them_copied(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.knows_in_place = False
    values = torch.full((3,), 8.0)
    where = values.data_ptr()
    with session_of(daemon, [values]) as session:
        session.average()
        session.average()
    assert torch.equal(values, torch.full((3,), 2.0))
    assert values.data_ptr() == where
    assert caplog.text.count("too old for in_place") == 1


def a_computed_one() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.ones(2, 3).t().clone(memory_format=torch.preserve_format)}, "strides"),
        ({"w": torch.ones(6)[:3]}, "'w' is a view"),
        ({"w": a_computed_one()}, "not a leaf"),
        ({"a": (one := torch.ones(3)), "b": one.data}, "'b' is in the same memory as 'a'"),
    ],
)
def test_tensors_that_cannot_live_there_are_refused_before_any_traffic(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(TrainerError, match=words) as refused:
        attach("test", tensors=tensors, socket=tmp_path / "none.sock", in_place=True)
    assert refused.value.reason == "bad_tensor"
    assert "expected" in str(refused.value)


def test_memory_that_a_model_shares_in_secret_is_refused(tmp_path: Path) -> None:
    tied, secret = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
    tied[1].weight = tied[0].weight  # the same object: it moves as one
    secret.register_buffer("shadow", secret.weight.data, persistent=False)
    with attach("test", model=tied, socket=tmp_path / "none.sock", in_place=True, sync=False):
        pass
    with pytest.raises(TrainerError, match="'shadow' is in the same memory as 'weight'"):
        attach("test", model=secret, socket=tmp_path / "none.sock", in_place=True)


def test_overlap_is_refused(daemon: FakeDaemon) -> None:
    model = nn.Linear(2, 2)
    with attach("test", model=model, socket=daemon.socket, in_place=True) as session:
        with pytest.raises(ConfigError, match="overlap"):
            session.begin()
        with pytest.raises(ConfigError, match="overlap"):
            LocalSGD(torch.optim.SGD(model.parameters()), session, every=1, overlap=True)
        assert session.begin(overlap=False).land().accepted
