"""The long forms of scenarios S1, S13 and S15; the short ones are in integration/.

One rule: a process each where starting one is the situation, nodes in this process elsewhere.
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from moshpitd.client import attach
from moshpitd.client.optim import LocalSGD
from moshpitd.net.identity import Identity
from moshpitd.testing import LocalSwarm
from tests.kit.bounds import mean_bound, true_mean
from tests.kit.ports import address_of, free_port
from tests.kit.processes import DaemonProcess, wait_for
from tests.kit.swarm import average, same_bits, trainers

CODECS = ("float32", "float16", "bfloat16", "int8")
FRESH_SWARMS = 60
FLOATS = 300_000
TOGETHER_S = 30.0
PATIENT = {"averaging__window_s": 8.0, "averaging__answer_timeout_s": 4.0}
"""A machine that stands still for a second must not look like a lost peer."""
DOWN_S = 40.0
JOINED_S = 10.0


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)


def seed_of(place: Path) -> tuple[Path, int, str]:
    """(home, port, bootstrap address) of a seed that does not live yet."""
    home, port = place / "seed", free_port()
    home.mkdir()
    return home, port, address_of(Identity.load_or_create(home / "identity.key"), port)


@pytest.mark.parametrize("repetition", range(20))
def test_five_processes_that_start_within_200_ms_are_one_swarm(
    repetition: int, place: Path
) -> None:
    """S1, with the seed last in every second repetition."""
    rng = random.Random(repetition)
    home, port, address = seed_of(place)
    daemons = [DaemonProcess(place / str(i), bootstrap=(address,)) for i in range(4)]
    seed = DaemonProcess(home, port=port, bootstrap=(address,))
    daemons.insert(4 if repetition % 2 else rng.randrange(4), seed)
    with ExitStack() as ending:
        for daemon in daemons:
            ending.callback(daemon.end)
            daemon.start()
            time.sleep(rng.uniform(0, 0.05))  # the situation: they start up to 200 ms apart
        for daemon in daemons:
            daemon.up()
        wait_for(
            lambda: all(it and it.swarm_peers == 5 for it in [one.status() for one in daemons]),
            TOGETHER_S,
            "status of all five shows five peers",
        )
        for daemon in daemons:
            status = daemon.status()
            assert status is not None, "status is silent now"
            states = [one.state for one in status.bootstrap]
            assert states == ([] if daemon is seed else ["ok"]), states
            assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize("codec", CODECS)
async def test_the_first_round_of_every_fresh_swarm_is_right(codec: str) -> None:
    """S13: one round in each of 60 fresh swarms. Logging is off, because the fault that this is
    about was a race: a stream that broke early looked like one that had ended.
    """
    generator = torch.Generator().manual_seed(60)
    logging.disable(logging.CRITICAL)
    try:
        for turn in range(FRESH_SWARMS):
            values = [torch.randn(FLOATS, generator=generator) for _ in range(3)]
            tensors = [{"w": torch.zeros(FLOATS)} for _ in values]
            async with (
                LocalSwarm(3, averaging__codec=codec, **PATIENT) as swarm,
                trainers(swarm, "fresh", tensors) as sessions,
            ):
                for own, value in zip(tensors, values, strict=True):
                    own["w"].copy_(value)
                results = await average(swarm, sessions)
            for result in results:
                assert (result.status, result.participants) == ("complete", 3), f"{turn}: {result}"
                assert result.parts_without_result == ()
            assert same_bits(tensors), f"swarm {turn}: the peers hold different bits"
            off = (tensors[0]["w"].double() - true_mean(values)).abs()
            assert (off <= mean_bound(codec, values)).all(), f"swarm {turn}"
    finally:
        logging.disable(logging.NOTSET)


def test_a_trainer_trains_from_the_first_second_while_every_bootstrap_peer_is_down(
    place: Path,
) -> None:
    """S15: the trainer is there before its daemon answers, the bootstrap peer comes 40 s later, and
    the daemon is in the swarm within 10 s of that.
    """
    home, port, address = seed_of(place)
    daemon = DaemonProcess(place / "node", bootstrap=(address,))
    seed = DaemonProcess(home, port=port)
    model = torch.nn.Linear(4, 1)
    steps: list[float] = []
    ended = threading.Event()

    sgd = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()

    step(sgd)  # torch's own first step imports for seconds

    def train() -> None:
        with attach("early", model=model, socket=daemon.socket) as session:
            optimizer = LocalSGD(sgd, session, every=8)
            while not ended.is_set():
                step(optimizer)
                steps.append(time.monotonic())
                ended.wait(0.05)

    trainer = threading.Thread(target=train)
    with ExitStack() as ending:
        ending.callback(daemon.end)
        ending.callback(seed.end)
        ending.callback(trainer.join)
        ending.callback(ended.set)
        start = time.monotonic()
        daemon.start()
        trainer.start()
        wait_for(lambda: steps, 1.0 + 4.0, "the first step, at once")
        daemon.up()
        wait_for(lambda: time.monotonic() - start > DOWN_S, DOWN_S + 1, "40 s have passed")
        status = daemon.status()
        assert not status.joined
        assert [one.state for one in status.bootstrap] == ["refused"]
        (run,) = status.runs
        assert (run.trainers, run.last_outcome) == (1, "alone (no_peers)")
        seed.start()
        seed.up()
        took_s = wait_for(lambda: daemon.status().joined, JOINED_S, "the daemon is in the swarm")
        assert took_s < JOINED_S
        before = len(steps)
        wait_for(lambda: len(steps) > before + 16, 10.0, "training goes on")
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert steps[0] - start < 2.0
        assert max(gaps) < 5.0, f"a pause of {max(gaps):.1f} s"
