"""AsySG-con on real daemons: parts spread over three of them, and one that is lost."""

from __future__ import annotations

import asyncio

import torch
from torch import nn

from moshpitd.client import Session, attach
from moshpitd.client.optim.asysg import AsySGCon
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.core.store_words import shard_of
from moshpitd.testing import LocalSwarm
from tests.kit.fake_daemon import until

PEERS, WIDTH, STEPS = 3, 8192, 12
RUN = "job.asysg-con"


class Trainer:
    def __init__(self, swarm: LocalSwarm, peer: int) -> None:
        self.x = nn.Parameter(torch.zeros(WIDTH))
        self.wanted = torch.linspace(0, 1, WIDTH) + peer
        self.session: Session = attach("job", tensors=[self.x], socket=swarm.socket(peer))
        assert self.session.wait_attached(30)
        self.optimizer = AsySGCon([self.x], SwarmOfDaemons(self.session), lr=0.05, max_staleness=64)
        self.seen = [self.start()]

    def start(self) -> tuple[int, torch.Tensor]:
        self.optimizer.start()
        assert self.optimizer.version is not None
        return self.optimizer.version, self.x.detach().clone()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.x.grad = self.x.detach() - self.wanted
            self.optimizer.step()
            self.seen.append(self.start())

    def close(self) -> None:
        self.optimizer.close()
        self.session.close()


def _present(swarm: LocalSwarm, peer: int) -> Session:
    """In the store's run, without a part in the store."""
    return attach(RUN, tensors={"0.0": torch.zeros(WIDTH)}, socket=swarm.socket(peer))


async def test_a_store_is_spread_over_daemons_and_survives_one() -> None:
    async with LocalSwarm(PEERS, averaging__part_bytes=4096) as swarm:
        # Else the first would begin alone, and be joined by the others some seconds later.
        first = [await swarm.call(_present, swarm, peer) for peer in range(PEERS)]
        storages = [swarm.node(peer).runs[RUN].driver.peer.storage for peer in range(PEERS)]
        for storage in storages:
            await swarm.call(until, lambda storage=storage: len(storage.common.live()) == PEERS - 1)
        trainers = await asyncio.gather(
            *(swarm.call(Trainer, swarm, peer) for peer in range(PEERS))
        )
        await asyncio.gather(*(swarm.call(trainer.train, STEPS) for trainer in trainers))
        terms = storages[0].common.terms
        assert terms is not None
        assert all(storage.common.terms == terms for storage in storages)
        assert len(terms.owners) > 1
        parts = len(swarm.node(0).runs[RUN].driver.peer.state.part_sizes)
        shards = [shard_of(owner, terms.owners, parts) for owner in terms.owners]
        assert sorted(part for shard in shards for part in shard) == list(range(parts))

        # Whoever read a version read the same values, part by part made by different daemons.
        by_version: dict[int, torch.Tensor] = {}
        for trainer in trainers:
            assert trainer.optimizer.refused == 0
            for version, x in trainer.seen:
                assert torch.equal(by_version.setdefault(version, x), x)
        last = max(by_version)
        assert last == PEERS * STEPS, "every gradient is one version"
        wanted = torch.stack([trainer.wanted for trainer in trainers]).mean(0)
        assert (by_version[last] - wanted).abs().max() < 1.0, "of 2 at the start"

        # The coordinator's node goes, and its trainer with it.
        ids = [swarm.node(peer).peer_id for peer in range(PEERS)]
        lost = ids.index(terms.ballot.coordinator)
        left = [trainer for peer, trainer in enumerate(trainers) if peer != lost]
        await swarm.stop_node(lost)
        before = max(version for trainer in left for version, _ in trainer.seen)
        await asyncio.gather(*(swarm.call(trainer.train, STEPS) for trainer in left))
        after = swarm.node((lost + 1) % PEERS).runs[RUN].driver.peer.storage.common.terms
        assert after is not None
        assert after.ballot.epoch > terms.ballot.epoch
        assert ids[lost] not in after.owners
        assert after.version >= before - 1, "from the newest that a survivor had pulled"
        versions = [trainer.optimizer.version or 0 for trainer in left]
        assert max(versions) > before
        for one in (*trainers, *first):
            await swarm.call(one.close)
