"""What `bench delay` measures with: a ring that averages exactly, and steps that all count. No
figure is held against anything here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from moshpitd.cli.bench_delay import SYSTEMS, ideal_s, judged, results_of
from moshpitd.testing.bench.ring import RingMember, following, listening, preceding
from moshpitd.testing.proxy import Proxies

DELAY_S = 0.001


@pytest.mark.parametrize(("count", "numel"), [(1, 5), (2, 5), (3, 100), (5, 3)])
def test_the_ring_averages_exactly(count: int, numel: int) -> None:
    """Whole numbers whose mean is one: float32 adds them without rounding, in any order."""
    draw = torch.Generator().manual_seed(count)
    first = [torch.randint(-1000, 1000, (numel,), generator=draw) * count for _ in range(count)]
    values = [one.float() for one in first]

    def average(member: RingMember, own: torch.Tensor) -> None:
        member.average(own)
        own.add_(count)  # the second must not see anything of the first
        member.average(own)

    with Proxies() as proxies, ExitStack() as ends:
        listeners = [ends.enter_context(listening()) for _ in range(count)]
        paths = [proxies.to(f"127.0.0.1:{one.getsockname()[1]}") for one in listeners]
        for path in paths:
            path.slow(DELAY_S)
        dialled = [
            ends.enter_context(following(("127.0.0.1", path.port)))
            for path in (*paths[1:], paths[0])
        ]
        accepted = [ends.enter_context(preceding(listener)) for listener in listeners]
        members = [
            RingMember(index, count, following=after, preceding=before)
            for index, (after, before) in enumerate(zip(dialled, accepted, strict=True))
        ]
        pairs = zip(members, values, strict=True)
        threads = [threading.Thread(target=average, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = torch.stack(first).sum(0).div(count, rounding_mode="floor").float() + count
    for own in values:
        assert torch.equal(own, expected)


def test_every_step_of_every_system_counts(tmp_path: Path) -> None:
    """Real daemons and trainers, over a delay. What it exits with is the bars' business."""
    file = tmp_path / "delay.json"
    size = ["--peers", "3", "--steps", "2", "--params", "3000", "--delay-ms", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "moshpitd.cli.main", "bench", "delay", *size, "--json", str(file)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert file.exists(), run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert run.returncode == (0 if report["passed"] else 1)
    assert [one["system"] for one in report["results"]] == list(SYSTEMS)
    for one in report["results"]:
        assert (one["counted"], one["steps"]) == (2, 2), one
        assert min(one["seconds"]) > 0


def test_the_verdict_is_of_steps_that_count() -> None:
    least = ideal_s(8, 0.02)
    told = [
        {"system": system, "seconds": seconds, "trouble": trouble}
        for system, seconds, trouble in (
            ("ring all-reduce", 0.25, ""),
            ("d-psgd", 0.0625, ""),
            ("d-psgd", 0.01, "trainer 3 heard 1 of 2 neighbours"),
            ("low-precision-decentralized", 0.11, ""),
        )
    ]
    results = results_of(told, least)
    assert [(one["system"], one["counted"], one["steps"]) for one in results] == [
        ("ring all-reduce", 1, 1),
        ("d-psgd", 1, 2),
        ("low-precision-decentralized", 1, 1),
        ("group average", 0, 0),
    ]
    verdict = judged(results)
    assert verdict["times_faster"]["d-psgd"] == pytest.approx(4.0)
    assert verdict["times_faster"]["group average"] is None
    assert [bar["met"] for bar in verdict["bars"]] == [True, False]
    assert not verdict["passed"]
    assert judged(results_of(told[:3], least))["passed"] is False, "no figure is no bar met"
