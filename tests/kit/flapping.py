"""A daemon that is killed again and again under a supervisor, and what it may leave behind (S7).

One rule: what is counted is looked for by the daemon's own folder, so nothing of anybody else's is
ever taken for a leak, nor missed.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

import torch

from moshpitd.testing import LocalSwarm
from tests.kit.processes import UP_WITHIN_S, DaemonProcess, TrainerProcess, processes_with, wait_for
from tests.kit.swarm import trainers, until

ALIVE_S = 3.0  # a daemon that is ready is killed within so long
GONE_S = 5.0  # a p2pd whose daemon was killed notices by itself


class Flapping:
    """Kills `daemon` at random moments: every second time before it is ready, else up to 3 s after.

    `starts` has how long each start took to be ready, for those that came so far.
    """

    def __init__(self, daemon: DaemonProcess, rng: random.Random) -> None:
        self.daemon, self.starts = daemon, [8.0]
        self._rng = rng
        self._bystander: subprocess.Popen[bytes] | None = None

    def kill_once(self, *, before_ready: bool) -> None:
        """One life of the daemon."""
        daemon, began = self.daemon, time.monotonic()
        daemon.start()
        if before_ready:
            until = began + self._rng.uniform(0.0, min(self.starts))
            while time.monotonic() < until and not daemon.ready():
                time.sleep(0.02)
        else:
            wait_for(daemon.ready, UP_WITHIN_S, "the daemon is ready")
            self.starts.append(time.monotonic() - began)
            time.sleep(self._rng.uniform(0.0, ALIVE_S))
        daemon.kill()

    def kill_often(self, kills: int) -> None:
        """Half of them before it is ready. A trainer attaches in every fourth life, so that there
        is a mapped file to be left behind."""
        for turn in range(kills):
            if turn % 4 == 1:
                self._with_a_trainer()
            else:
                self.kill_once(before_ready=turn % 2 == 0)

    def _with_a_trainer(self) -> None:
        daemon = self.daemon
        daemon.start()
        wait_for(daemon.ready, UP_WITHIN_S, "the daemon is ready")
        trainer = TrainerProcess(daemon.socket, "flapping")
        try:
            trainer.attached()
            assert list(daemon.buffers.glob("*.bucket"))
            daemon.kill()
        finally:
            trainer.end()

    def left_behind(self) -> list[str]:
        """What is left when the daemon is down for good: processes, sockets, mapped files."""
        bystander = self._bystander.pid if self._bystander is not None else 0

        def helpers() -> list[str]:
            return [
                f"{pid} {line[:200]}"
                for pid, line in processes_with(self.daemon.home)
                if pid != bystander
            ]

        end = time.monotonic() + GONE_S
        while helpers() and time.monotonic() < end:
            time.sleep(0.05)
        return [*helpers(), *self.sockets(), *map(str, self.daemon.buffers.glob("*"))]

    def sockets(self) -> list[str]:
        return [str(path) for path in self.daemon.home.rglob("*") if path.is_socket()]

    def end(self) -> None:
        """End the bystander."""
        if self._bystander is not None:
            self._bystander.kill()
            self._bystander.wait()

    def place_a_bystander(self) -> subprocess.Popen[bytes]:
        """A process that looks a little like a p2pd of this daemon and is none of it."""
        mark = f"-listen=/unix{self.daemon.home / 'p2pd'}/p2pd-x.sock"
        argv = [sys.executable, "-c", "import time; time.sleep(3600)", "p2pd", mark]
        self._bystander = subprocess.Popen(argv, start_new_session=True)
        return self._bystander


async def accepted_again(swarm: LocalSwarm, daemon: DaemonProcess) -> None:
    """The daemon comes up under the identity and at the port that it had, and averages with a node
    that saw it die."""
    peer_id = daemon.peer_id
    daemon.start()
    await swarm.call(daemon.up)
    took_s = await until(
        lambda: swarm.node(0).status()["swarm_peers"] == 2, timeout_s=30, what="it is back"
    )
    assert took_s < 30.0
    assert (await swarm.call(daemon.status)).peer_id == peer_id
    own = {"w": torch.zeros(1000)}
    async with trainers(swarm, "again", [own]) as (session,):
        trainer = TrainerProcess(daemon.socket, "again", value=2.0)
        try:
            await swarm.call(trainer.attached)
            for _ in range(3):  # who comes last loads the other's state and enters with weight 0
                own["w"].fill_(4.0)
                mine, theirs = await asyncio.gather(
                    swarm.call(session.average), swarm.call(trainer.average, fill=2.0)
                )
                if (mine.participants, theirs["participants"]) == (2, 2):
                    break
        finally:
            await swarm.call(trainer.end)
    assert (mine.participants, theirs["participants"]) == (2, 2), (mine, theirs)
    assert peer_id in mine.contributors
    assert own["w"].tolist() == [3.0] * 1000
