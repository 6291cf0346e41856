"""Memory that trainers of one node share, against a daemon without a swarm: who fills it, what is
in it after a trainer or the daemon died, and what is not let in."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moshpitd.client import Session, attach
from moshpitd.client.memory import NodeMemory
from moshpitd.client.optim.registry import by_name
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.tensors.rules.asysg import BlockUpdate
from tests.kit.fake_daemon import FakeDaemon, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


@pytest.fixture
def session(daemon: FakeDaemon) -> Iterator[Session]:
    with attach("test", tensors=[torch.zeros(1)], socket=daemon.socket) as session:
        yield session


def memory_of(session: Session, *values: float) -> NodeMemory:
    return SwarmOfDaemons(session).shared("asysg", start={"x": torch.tensor(values)})


def held(memory: NodeMemory) -> list[float]:
    into: dict[str, Tensor] = {"x": torch.empty(2)}
    memory.read(into)
    found: list[float] = into["x"].tolist()
    return found


def test_the_first_one_fills_it_and_both_write(session: Session) -> None:
    first, second = memory_of(session, 1.0, 2.0), memory_of(session, 7.0, 7.0)
    assert held(first) == held(second) == [1.0, 2.0]
    first.add({"x": BlockUpdate(0, torch.tensor([0.5, 0.5]))})
    second.add({"x": BlockUpdate(1, torch.tensor([0.25]))})
    assert held(first) == held(second) == [1.5, 2.75]
    first.close()
    second.add({"x": BlockUpdate(0, torch.tensor([-1.5]))})
    assert held(second) == [0.0, 2.75]
    second.close()


def test_who_died_while_filling_it_leaves_that_to_the_next(
    daemon: FakeDaemon, session: Session
) -> None:
    memory_of(session, 9.0, 9.0).close()
    path = daemon.buffers / "test.asysg-1.shared"
    with path.open("r+b") as file:  # as a killed trainer leaves it: odd
        file.seek(8)
        file.write(struct.pack("<Q", 1))
    memory = memory_of(session, 1.0, 2.0)
    assert held(memory) == [1.0, 2.0]
    memory.close()


def shares_with(memory: NodeMemory, daemon: FakeDaemon) -> bool:
    """Is it attached to the daemon of now? A session that has not noticed yet that the one before
    is gone calls itself attached, too."""
    try:
        path = memory._session.attachment().shared_path
    except DaemonUnavailable:
        return False
    return path.endswith(f"-{daemon.life}.shared")


def test_a_new_daemon_gets_what_the_trainers_have(daemon: FakeDaemon, session: Session) -> None:
    first, second = memory_of(session, 1.0, 2.0), memory_of(session, 0.0, 0.0)
    daemon.stop()
    first.add({"x": BlockUpdate(0, torch.tensor([4.0]))})
    assert held(second) == [5.0, 2.0], "nobody needs the daemon for this"
    daemon.start()
    for memory in (first, second):
        until(lambda memory=memory: shares_with(memory, daemon))  # type: ignore[misc]
        assert held(memory) == [5.0, 2.0]
    second.add({"x": BlockUpdate(1, torch.tensor([1.0]))})
    assert held(first) == [5.0, 3.0], "both are in the new file"
    first.close()
    second.close()


def test_without_a_daemon_a_trainer_has_memory_of_its_own(tmp_path: Path) -> None:
    fake = FakeDaemon(tmp_path)
    with attach("test", tensors=[torch.zeros(1)], socket=fake.socket) as session:
        memory = memory_of(session, 1.0, 2.0)
        memory.add({"x": BlockUpdate(0, torch.tensor([1.0]))})
        assert held(memory) == [2.0, 2.0]
        fake.start()
        until(lambda: memory._session.attached)
        assert held(memory) == [2.0, 2.0]
        assert memory_of(session, 0.0, 0.0)._values["x"].tolist() == [2.0, 2.0]
        memory.close()
    fake.stop()


def test_a_tensor_that_is_no_row_of_memory_is_written_to_as_well(tmp_path: Path) -> None:
    """A transposed one, or channels last: blocks go by its elements in order, as in the file."""
    fake = FakeDaemon(tmp_path)
    with attach("test", tensors=[torch.zeros(1)], socket=fake.socket) as session:
        start = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()
        memory = SwarmOfDaemons(session).shared("asysg", start={"x": start})
        memory.add({"x": BlockUpdate(1, torch.tensor([0.5]))})
        into: dict[str, Tensor] = {"x": torch.empty(2, 2)}
        memory.read(into)
        assert into["x"].tolist() == [[1.0, 2.5], [3.0, 4.0]]
        memory.close()


def test_what_is_not_finite_is_nobodys(session: Session) -> None:
    x, y = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = by_name("asysg-incon", [x, y], session, lr=1.0)
    x.grad, y.grad = torch.ones(2), torch.tensor([0.0, float("nan")])
    with pytest.raises(TrainerError, match=r"update of '0\.1' holds a NaN") as refused:
        optimizer.step()
    assert refused.value.reason == "not_finite"
    assert x.tolist() == [0.0, 0.0], "not even the part that was sound"
    y.grad = torch.ones(2)
    optimizer.step()
    assert x.tolist() == y.tolist() == [-1.0, -1.0]
    optimizer.close()
