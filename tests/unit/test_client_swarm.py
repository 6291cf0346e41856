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
from moshpitd.client.primitives import StoreOptions
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.rpc.stubs import messages
from moshpitd.tensors.layout import Layout, TensorSpec
from tests.kit.fake_daemon import FOUNDER, FakeDaemon, Round, _refusing, result


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


def test_a_snapshot_before_a_refused_round_is_no_average(daemon: FakeDaemon) -> None:
    """A daemon that was restarted catches up in the call; what it loads is of another round."""
    asked = []

    def refused(call: Round) -> Iterator[Any]:
        asked.append(call.views()["x"].tolist())
        call.views()["x"].fill_(9.0)
        yield result(
            status="partial", accepted=False, loaded_snapshot=True, group_size=3, participants=2,
            contributors=[FOUNDER, "other"],
        )  # fmt: skip

    daemon.answer = refused
    with attach("test", tensors=[torch.zeros(1)], socket=daemon.socket) as session:
        average = SwarmOfDaemons(session).averages("g", like={"x": torch.zeros(2)})
        found = average.average({"x": torch.tensor([2.0, 3.0])})
        assert found.contributors == ()
        assert found.tensors["x"].tolist() == [2.0, 3.0]
        assert asked == [[2.0, 3.0]] * 3, "and it is asked for again"
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


class WithStore(FakeDaemon):
    """Pulls and pushes are refused for the reasons in `refuse`, one after the other."""

    refuse: tuple[str, ...] = ()

    def StorePull(self, request: Any, context: Any) -> Any:
        self._refuse(context)
        return messages.StorePullReply(version=3)

    def StorePush(self, request: Any, context: Any) -> Any:
        self._refuse(context)
        return messages.StorePushReply(verdict="taken")

    def _refuse(self, context: Any) -> None:
        with _refusing(context):
            if self.refuse:
                reason, *rest = self.refuse
                self.refuse = tuple(rest)
                raise refusal(reason, "this time")


def test_a_store_is_asked_again_until_what_stands_in_its_way_has_passed(tmp_path: Path) -> None:
    """Also a call of before, which a trainer was interrupted in and the daemon is still busy with;
    but never where waiting cures nothing."""
    daemon = WithStore(tmp_path)
    daemon.start()
    with attach("test", tensors=[torch.zeros(1)], socket=daemon.socket) as session:
        start = {"x": torch.tensor([1.0, 2.0])}
        store = SwarmOfDaemons(session).store("con", start=start, options=StoreOptions(0.1))
        daemon.refuse = ("bucket_busy", "store_timeout")
        pulled = store.pull()
        assert (pulled.version, pulled.tensors["x"].tolist()) == (3, [1.0, 2.0])
        assert daemon.refuse == ()
        daemon.refuse = ("bucket_busy",)
        assert not store.push(start, version=3), "nobody has it, so it is a refused one"
        assert store.push(start, version=3)
        daemon.refuse = ("store_differs",)
        with pytest.raises(TrainerError) as refused:
            store.pull()
        assert refused.value.reason == "store_differs"
        store.close()
    daemon.stop()
