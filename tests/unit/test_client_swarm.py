"""Group averages of `client.swarm` against a daemon without a swarm. One rule: what a round is told
is looked at in the bucket, where the daemon would encode it from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.client import attach
from moshpitd.client.buckets import copies_of
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.tensors.layout import Layout, TensorSpec
from tests.kit.fake_daemon import FOUNDER, FakeDaemon, Round, result


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def test_a_round_that_nobody_landed_does_not_write_over_the_next_contribution(
    daemon: FakeDaemon,
) -> None:
    """As after a checkpoint was loaded with a fragment or a look in flight."""
    told: list[list[float]] = []

    def nines(call: Round) -> Iterator[Any]:
        told.append(call.views()["x"].tolist())
        call.views()["x"].fill_(9.0)
        yield result(group_size=2, participants=2, contributors=[FOUNDER, "other"])

    daemon.answer = nines
    with attach("test", tensors=[torch.zeros(1)], socket=daemon.socket) as session:
        average = SwarmOfDaemons(session).averages("g", like={"x": torch.zeros(2)})
        average.begin({"x": torch.tensor([1.0, 1.0])})
        found = average.average({"x": torch.tensor([2.0, 3.0])})
        assert told == [[1.0, 1.0], [2.0, 3.0]]
        assert found.tensors["x"].tolist() == [9.0, 9.0]
        assert found.own["x"].tolist() == [2.0, 3.0]
        average.close()


def test_what_neighbours_say_is_where_the_model_is() -> None:
    """The bucket is in main memory; "meta" stands for a device that cannot compute with it."""
    layout = Layout.from_specs([TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "float32")])
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.gather([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])], block)
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    found = copies_of(layout, block, here)
    block.zero_()  # the next exchange
    assert [found[name].tolist() for name in here] == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    away = {name: tensor.to("meta") for name, tensor in here.items()}
    assert {copy.device.type for copy in copies_of(layout, block, away).values()} == {"meta"}
