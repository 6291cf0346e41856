"""S7: twenty kill -9 at random moments under a supervisor. integration/ has three of them.

One rule: what may be left is looked for by the daemon's own folder.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moshpitd.testing import LocalSwarm
from tests.kit.flapping import Flapping, accepted_again
from tests.kit.ports import free_port
from tests.kit.processes import DaemonProcess

KILLS = 20


@pytest.mark.timeout(900)
async def test_a_daemon_killed_twenty_times_leaves_nothing_and_is_taken_back(place: Path) -> None:
    async with LocalSwarm(1) as swarm:
        address = swarm.node(0).status()["addresses"][0]
        daemon = DaemonProcess(
            place / "d", port=free_port(), bootstrap=(address,), http=free_port()
        )
        flapping = Flapping(daemon, random.Random(20))
        try:
            bystander = flapping.place_a_bystander()
            await swarm.call(flapping.kill_often, KILLS)
            await accepted_again(swarm, daemon)
            await swarm.call(daemon.end)
            assert await swarm.call(flapping.left_behind) == []
            assert bystander.poll() is None
        finally:
            await swarm.call(daemon.end)
            flapping.end()
