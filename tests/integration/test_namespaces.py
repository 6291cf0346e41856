"""Real daemons on lines of their own: capped by the kernel, one slower than the others, then lossy.

Whether the exchange is fast enough there is a bench's business (`moshpitd bench namespaces`); here
every member must hold the mean, whatever the lines do, and the slow one be spared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moshpitd.cli.namespaces import Line, lose, lost, missing, namespaces, remove_left_behind
from moshpitd.client import Result, Session, attach
from moshpitd.errors import ConfigError
from moshpitd.rpc.calls import Calls
from tests.kit.fake_daemon import until
from tests.kit.namespaces import Make, daemons, lines, names

__all__ = ["lines"]

COUNT = 600_000  # 2.4 MB: 0.8 s of the slow line per vector
# 19 parts, so that shares of them are shares; a codec that rounds nothing, so that the mean is one.
SETTINGS = ("averaging.part_bytes=131072", "averaging.codec=float32")


@pytest.fixture
def homes() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.timeout(120)
def test_the_mean_arrives_over_a_slow_line_and_over_lossy_ones(homes: Path, lines: Make) -> None:
    places = lines([Line(100, 100), Line(100, 100), Line(25, 25)])
    own = [torch.zeros(COUNT) for _ in places]
    with daemons(homes, places, *SETTINGS) as nodes, ThreadPoolExecutor(len(nodes)) as pool:

        def joined(index: int) -> Session:
            session = attach("lines", tensors={"w": own[index]}, socket=nodes[index].socket)
            assert session.wait_attached(60.0)
            return session

        sessions = list(pool.map(joined, range(len(nodes))))
        try:
            # Who has heard of nobody yet is alone at once, as often as it is asked.
            for node in nodes:
                with closing(Calls(node.socket)) as calls:
                    until(
                        lambda calls=calls: len(calls.peers("lines").peers) == 2,
                        timeout_s=60.0,
                        what="each of three knows the other two",
                    )
            for _ in range(4):  # who comes late may catch up, and then enter once with weight 0
                warm = _average(pool, sessions, own, 1)
                if all(one.participants == len(own) for one in warm):
                    break
            results = _average(pool, sessions, own, 2)
            _check(results, own, 2)
            # A quarter of the others' speed is too little for a share: it only sends its vector,
            # and the others send half a vector to each other and half a one back, to both.
            sent = [result.bytes_sent / (4 * COUNT) for result in results]
            assert sent == pytest.approx([1.5, 1.5, 1.0], abs=0.1)
            if missing(loss=True):
                pytest.skip(f"the second half: {missing(loss=True)}")
            for place in places:
                lose(place, 0.01)
            _check(_average(pool, sessions, own, 3), own, 3)
            assert all(lost(place) > 0 for place in places)
        finally:
            for session in sessions:
                session.close()


def _average(
    pool: ThreadPoolExecutor, sessions: list[Session], own: list[torch.Tensor], turn: int
) -> list[Result]:
    """All at once; before it, member i holds the values of (turn, i)."""
    for index, tensor in enumerate(own):
        tensor.copy_(_values(turn, index))
    return list(pool.map(lambda session: session.average(timeout_s=60.0), sessions))


def _values(turn: int, index: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(10 * turn + index))


def _check(results: list[Result], own: list[torch.Tensor], turn: int) -> None:
    ends = [(one.status, one.participants) for one in results]
    assert ends == [("complete", len(own))] * 3, "\n".join(map(str, results))
    mean = sum(_values(turn, index).double() for index in range(len(own))) / len(own)
    torch.testing.assert_close(own[0].double(), mean, rtol=1e-6, atol=1e-6)
    for other in own[1:]:
        assert torch.equal(own[0], other)


def test_lines_are_capped_both_ways_and_nothing_of_them_stays(lines: Make) -> None:
    lines([Line(1, 1)])  # skips where there are none
    before = names()
    with namespaces([Line(30, 7), Line(40, 8)]) as (one, other):
        assert {one.name, other.name, one.hub} <= set(names())
        caps = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in (
                ["tc", "-n", one.name, "qdisc", "show", "dev", "eth0"],
                ["tc", "-n", one.hub, "qdisc", "show", "dev", one.port],
            )
        ]
        for told, rate in zip(caps, ("30Mbit", "7Mbit"), strict=True):
            assert "tbf" in told
            assert f"rate {rate}" in told
    assert names() == before
    with pytest.raises(ConfigError, match="rate"), namespaces([Line(30, 7), Line(0, 1)]):
        raise AssertionError("a line of no rate was made")
    assert names() == before


def test_what_a_killed_maker_left_is_removed_and_what_lives_stays(lines: Make) -> None:
    (mine,) = lines([Line(1, 1)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, env=os.environ, check=False
    )
    (left,) = killed.stdout.split()
    assert left in names()
    assert left in remove_left_behind()
    assert left not in names()
    assert mine.name in names()


KILLED = """
import os, signal
from moshpitd.cli.namespaces import Line, namespaces
with namespaces([Line(1, 1)]) as (one,):
    print(one.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
