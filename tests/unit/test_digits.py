"""The example: its data, its yardsticks, and four trainers of it in one process with a daemon that
only averages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moshpitd.examples import digits
from tests.kit.fake_daemon import FakeDaemon, Round, result


def test_shards_are_skewed_and_together_hold_every_image_once() -> None:
    _, y, _, test_y = digits.images()
    shards = [digits.shard(y, index, 4) for index in range(4)]
    assert sorted(torch.cat(shards).tolist()) == list(range(len(y)))
    for index, mine in enumerate(shards):
        own = (y[mine] % 4 == index).double().mean()
        assert 0.9 <= own <= 0.99
    assert len(test_y.unique()) == 10


def test_the_yardsticks() -> None:
    assert digits.train_central(of=4, seed=0, steps=digits.STEPS) >= 0.97
    for index in range(4):
        assert digits.train_alone(index=index, of=4, seed=index, steps=digits.STEPS) <= 0.75


class Meeting:
    """All trainers of the fake in every round: the exact mean of the floats, weighted."""

    def __init__(self, of: int) -> None:
        self._present: list[Round] = []
        self._barrier = threading.Barrier(of, action=self._average)

    def __call__(self, call: Round) -> Iterator[Any]:
        self._present.append(call)
        self._barrier.wait(60)
        names = [f"peer {index}" for index in range(self._barrier.parties)]
        yield result(group_size=len(names), participants=len(names), contributors=names, version=1)

    def _average(self) -> None:
        total = sum(call.request.weight for call in self._present)
        for name, first in self._present[0].views().items():
            mean = torch.zeros_like(first)
            for call in self._present:
                mean += call.views()[name] * (call.request.weight / total)
            for call in self._present:
                call.views()[name].copy_(mean)
        self._present.clear()


def test_four_trainers_learn_together_what_none_learns_alone(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path).start()
    daemon.answer = Meeting(4)

    def trainer(index: int) -> None:
        digits.main(
            f"--socket {daemon.socket} --index {index} --of 4 --seed {index} "
            f"--json {tmp_path}/{index}.json --dump {tmp_path}/{index}.pt".split()
        )

    threads = [threading.Thread(target=trainer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    daemon.stop()
    for index in range(4):
        lines = [json.loads(line) for line in (tmp_path / f"{index}.json").read_text().splitlines()]
        assert (lines[0]["event"], lines[-1]["event"]) == ("start", "end")
        rounds = [line for line in lines if line["event"] == "round"]
        assert len(rounds) >= digits.STEPS / digits.EVERY
        assert lines[-1]["accuracy"] >= 0.95
        assert lines[-1]["together"]
        assert len(lines[-1]["final"]["contributors"]) == 4
    dumps = sorted(tmp_path.glob("*.pt"))
    assert digits.max_difference(dumps) == 0.0
