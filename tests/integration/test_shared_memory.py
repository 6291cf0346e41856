"""AsySG-incon on a real daemon: two processes write to one file, and one of them is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.optim.asysg import AsySGIncon
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.testing import LocalSwarm
from tests.kit.fake_daemon import until

WIDTH, STEPS = 1000, 2000
OTHER = """
import sys
import torch
torch.set_num_threads(1)
from tests.integration.test_shared_memory import Trainer
trainer = Trainer(sys.argv[1], wanted=3.0)
print("ready", flush=True)
for line in sys.stdin:
    trainer.train(int(line))
    print(*trainer.range(), flush=True)
"""


class Trainer:
    def __init__(self, socket: str | Path, *, wanted: float) -> None:
        self.x, self.wanted = nn.Parameter(torch.zeros(WIDTH)), wanted
        self.session: Session = attach("job", tensors=[self.x], socket=socket, sync=False)
        self.optimizer = AsySGIncon([self.x], SwarmOfDaemons(self.session), lr=0.02)
        self.optimizer.start()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.x.grad = self.x.detach() - self.wanted
            self.optimizer.step()

    def range(self) -> tuple[float, float]:
        return self.x.min().item(), self.x.max().item()

    def close(self) -> None:
        self.optimizer.close()
        self.session.close()


def _start(socket: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(socket)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _order(to: IO[str], steps: int) -> None:
    to.write(f"{steps}\n")
    to.flush()


async def test_two_processes_share_memory_and_one_survives_the_other() -> None:
    async with LocalSwarm(1) as swarm:
        other = _start(swarm.socket(0))
        to, of = _pipes(other)
        try:
            assert await swarm.call(of.readline) == "ready\n"
            mine = await swarm.call(Trainer, swarm.socket(0), wanted=1.0)
            run = swarm.node(0).runs["job.asysg-incon"]
            (file,) = {trainer.shared for trainer in run.trainers.values()}
            assert file is not None

            # At once: both pull at the same values, and lost increments do not lose the values.
            _order(to, STEPS)
            await swarm.call(mine.train, STEPS)
            low, high = map(float, (await swarm.call(of.readline)).split())
            assert low > 0.9
            assert high < 3.1
            # In turn nothing is lost: what one reads is what the other left.
            _order(to, STEPS)
            low, high = map(float, (await swarm.call(of.readline)).split())
            assert abs(low - 3) < 1e-3
            assert abs(high - 3) < 1e-3
            await swarm.call(mine.train, 1)
            low, high = mine.range()  # its model was older: that gradient is worth what it is
            assert low > 2.8
            assert high < 3.2

            _order(to, 10**9)
            other.send_signal(signal.SIGKILL)
            other.wait()
            await swarm.call(until, lambda: len(run.trainers) == 1, what="the daemon noticed")
            assert file.path.exists(), "ours still writes to it"
            await swarm.call(mine.train, STEPS)
            low, high = mine.range()
            assert abs(low - 1) < 1e-3
            assert abs(high - 1) < 1e-3

            await swarm.call(mine.close)
            await swarm.call(until, lambda: not run.trainers, what="the last one has left")
            assert not file.path.exists()
        finally:
            other.kill()
            other.wait()
