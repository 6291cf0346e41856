"""An operator's own topology on real daemons: its shares are those of the rounds, while a peer
comes and goes, and a node that was given no file says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moshpitd.client import attach
from moshpitd.client.optim import by_name
from moshpitd.client.primitives import Exchanged
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import TrainerError
from moshpitd.net.identity import Identity
from moshpitd.testing import LocalSwarm

PEERS = 3
WITHIN_S = 20.0
Row = tuple[float, frozenset[tuple[str, float]]]  # kept, and of whom what


def row_of(found: Exchanged) -> Row:
    heard = frozenset((message.peer, round(message.share, 9)) for message in found.messages)
    return round(found.own_share, 9), heard


class Trainer(threading.Thread):
    """Steps of D-PSGD without a gradient, until it is told to end; `rows` are those it had."""

    def __init__(self, socket: Path, peer: int) -> None:
        super().__init__(daemon=True)
        self._socket, self._peer = socket, peer
        self.rows: set[Row] = set()
        self.ending = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        x = nn.Parameter(torch.full((500,), float(self._peer)))
        try:
            with attach("house", tensors=[x], socket=self._socket) as session:
                swarm = SwarmOfDaemons(session, timeout_s=WITHIN_S / 2)
                optimizer: Any = by_name("d-psgd", [x], swarm, lr=0.1, topology="own")
                while not self.ending.is_set():
                    x.grad = torch.zeros_like(x)
                    optimizer.step()
                    self.rows.add(row_of(optimizer.last))
                optimizer.close()
        except Exception as error:
            self.error = error


async def until_had(wanted: dict[Trainer, Row]) -> None:
    """Until each has had the row that is wanted of it."""
    ends_at = time.monotonic() + WITHIN_S
    while not all(row in trainer.rows for trainer, row in wanted.items()):
        errors = [trainer.error for trainer in wanted if trainer.error]
        assert not errors, errors
        assert time.monotonic() < ends_at, [trainer.rows for trainer in wanted]
        await asyncio.sleep(0.05)


async def end(trainers: Collection[Trainer]) -> None:
    for trainer in trainers:
        trainer.ending.set()
    for trainer in trainers:
        await asyncio.to_thread(trainer.join, WITHIN_S)
        assert not trainer.is_alive()


async def test_the_files_shares_are_those_of_the_rounds_while_a_peer_comes_and_goes() -> None:
    async with LocalSwarm(0) as swarm:
        homes = [swarm.folder / str(index) for index in range(PEERS)]
        for home in homes:
            home.mkdir(mode=0o700)
        a, b, c = (Identity.load_or_create(home / "identity.key").peer_id for home in homes)
        file = swarm.folder / "house.toml"
        file.write_text(
            'edges = [["attic", "hall", 0.5], ["hall", "cellar", 0.25]]\n'
            f'[peers]\nattic = "{a}"\nhall = "{b}"\ncellar = "{c}"\n',
            encoding="utf-8",
        )
        for _ in homes:
            await swarm.add(averaging__topology_file=str(file))
        await swarm.together()
        trainers = [Trainer(swarm.socket(peer), peer) for peer in range(PEERS)]
        for trainer in trainers:
            trainer.start()
        attic, hall, cellar = trainers
        try:
            await until_had(
                {
                    attic: (0.5, frozenset({(b, 0.5)})),
                    hall: (0.25, frozenset({(a, 0.5), (c, 0.25)})),
                    cellar: (0.75, frozenset({(b, 0.25)})),
                }
            )
            await end([cellar])
            hall.rows.clear()
            attic.rows.clear()
            # What the cellar would have got stays in the hall: both rows still sum to one.
            await until_had(
                {attic: (0.5, frozenset({(b, 0.5)})), hall: (0.5, frozenset({(a, 0.5)}))}
            )
            again = Trainer(swarm.socket(2), 2)
            trainers.append(again)
            again.start()
            await until_had({again: (0.75, frozenset({(b, 0.25)}))})
        finally:
            await end(trainers)


async def test_a_node_without_a_file_refuses_the_name() -> None:
    async with LocalSwarm(1) as swarm:
        trainer = Trainer(swarm.socket(0), 0)
        trainer.start()
        await asyncio.to_thread(trainer.join, WITHIN_S)
        trainer.ending.set()
        assert isinstance(trainer.error, TrainerError)
        with pytest.raises(TrainerError, match=r"averaging\.topology_file"):
            raise trainer.error
