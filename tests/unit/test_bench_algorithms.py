"""What `bench algorithms` makes of its runs and of what was measured, by hand; and that its small
task is learned by one of each family, with what they send and wait for counted."""

from __future__ import annotations

from typing import Any

import pytest

from moshpitd.cli.bench_algorithms import _nets
from moshpitd.cli.bench_algorithms_network import Cell, networks, pace
from moshpitd.cli.bench_algorithms_rows import COLUMNS, loss_at, rows_of, seconds_per_step
from moshpitd.client.optim import ALGORITHMS
from moshpitd.errors import ConfigError
from moshpitd.sim.costs.net import Net
from moshpitd.testing.bench import algorithms as bench
from moshpitd.testing.bench.by_name import options_of

NET = Net("test", latency_s=0.1, up_bits_per_s=8e6, goodput=1.0)  # 1 MB/s


def run_of(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": name, "lr": 0.1, "seed": 0, "peers": 4, "parameters": 1000, "steps": 100,
        "samples": 12800, "losses": [2.0, 1.0, 0.5], "bytes_per_step": 4000.0,
        "busiest_node_bytes": 8000.0, "waited": {"average": 1.0}, "hidden": {}, "tuning": False,
        **changes,
    }  # fmt: skip


def test_a_step_waits_for_hops_and_for_the_busiest_node() -> None:
    run = run_of("gradient-allreduce")
    assert seconds_per_step(run, NET, params=1000, compute_s=0.5) == pytest.approx(0.908)
    # A hundred times the parameters, a hundred times the bytes.
    assert seconds_per_step(run, NET, params=1e5, compute_s=0.5) == pytest.approx(1.7)
    neighbour = run_of("d-psgd", waited={"exchange": 1.0})
    assert seconds_per_step(neighbour, NET, params=1000, compute_s=0.5) == pytest.approx(0.608)


def test_a_hidden_round_costs_what_it_takes_longer_than_a_step() -> None:
    run = run_of("async-model-average", waited={}, hidden={"average": 0.125})
    # One round in eight steps: 0.4 s of hops and 64 kB.
    assert seconds_per_step(run, NET, params=1000, compute_s=0.5) == 0.5
    assert seconds_per_step(run, NET, params=1000, compute_s=0.4) == pytest.approx(0.4 + 0.064 / 8)


def test_losses_at_a_time_lie_on_the_curve() -> None:
    run = run_of("x")
    assert [loss_at(run, step) for step in (0, 25, 50, 75, 100, 1e9)] == [
        2.0, 1.5, 1.0, 0.75, 0.5, 0.5,
    ]  # fmt: skip


def test_rows_have_every_column_and_no_run_of_the_tuning() -> None:
    runs = [
        run_of("gradient-allreduce"),
        run_of("gradient-allreduce", lr=0.3, tuning=True),
        run_of("gradient-allreduce", seed=1, losses=[2.0, 1.0, 0.7]),
    ]
    rows = rows_of(runs, networks(), {}, params=1000, compute_s=0.5)
    assert len(rows) == 2 * len(networks())
    assert all(tuple(row) == COLUMNS for row in rows)
    assert [row["loss_std"] for row in rows] == pytest.approx([0.1] * len(rows))
    assert rows[0]["loss_at_seconds"] == 1.0, "half of the yardstick's own steps"
    assert {row["seconds_from"] for row in rows} == {"modelled"}


def cell_of(seconds: float) -> Cell:
    return Cell(seconds, 100.0, 200.0, 0, (2.0, 1.0), {})


def test_what_was_measured_is_in_the_rows_and_in_the_budget() -> None:
    runs = [run_of("gradient-allreduce"), run_of("d-psgd"), run_of("sgp")]
    cells = {("lan", "gradient-allreduce"): cell_of(2.0), ("lan", "d-psgd"): cell_of(1.0)}
    net = networks()[0]
    found = {
        row["algorithm"]: row for row in rows_of(runs, [net], cells, params=1000, compute_s=0.5)
    }
    one = found["d-psgd"]
    assert (one["bytes_per_step"], one["busiest_node_bytes"]) == (100.0, 200.0)
    assert (one["seconds_per_step"], one["seconds_from"]) == (1.0, "measured")
    assert one["loss_at_seconds"] == 0.5, "twice the steps in the same seconds: all of them"
    assert found["gradient-allreduce"]["loss_at_seconds"] == 1.0
    assert found["sgp"]["seconds_from"] == "modelled"
    assert found["sgp"]["seconds_per_step"] == seconds_per_step(
        runs[2], net, params=1000, compute_s=0.5
    )


def test_a_cell_is_the_slowest_trainers_pace_without_its_first_meetings() -> None:
    told: list[dict[str, Any]] = [
        {"seconds": [1.0, 9.0, 2.0], "openings": [False, True, False], "loss": 0.5,
         "statuses": {"complete": 3}},
        {"seconds": [2.0, 9.0, 2.0], "openings": [False, True, False], "loss": 0.7,
         "statuses": {"complete": 2, "partial lost": 1}},
    ]  # fmt: skip
    warm = [{"loss": 1.5}, {"loss": 1.6}]
    assert Cell.of(warm, told, [300, 900]) == Cell(
        seconds_per_step=2.0, bytes_per_step=200.0, busiest_node_bytes=300.0, openings=1,
        losses=(1.5, 0.5), statuses={"complete": 5, "partial lost": 1},
    )  # fmt: skip
    assert pace([3.0, 5.0], [True, True]) == 4.0, "there are no others"


def test_a_warm_up_is_the_same_part_of_the_timed_steps() -> None:
    def options(name: str, of: int = 200) -> dict[str, Any]:
        return options_of(name, before=8, timed=16, of=of)

    assert options("onebit-adam") == {"freeze_step": 8 + 3}
    assert options("qadam") == {"warmup_steps": 8 + 3}
    assert options("qadam", of=20) == {"warmup_steps": 8 + 16}, "none of its run is compressed"
    assert options("d-psgd") == {}


def test_a_network_is_known_or_refused() -> None:
    assert [net.name for net in _nets("wan,lan,wan")] == ["wan", "lan"]
    with pytest.raises(ConfigError, match=r"unknown network 'moon'.*expected lan, wan"):
        _nets("lan,moon")
    with pytest.raises(ConfigError, match="unknown network ''"):
        _nets("")


@pytest.mark.parametrize(
    ("name", "lr", "kind", "hidden"),
    [
        ("gradient-allreduce", 0.3, "average", False),
        ("moshpit-sgd", 0.3, "average", False),
        ("diloco", 0.1, "average", False),
        ("streaming-diloco", 0.1, "average", True),
        ("low-precision-decentralized", 0.3, "exchange", False),
    ],
)
def test_the_small_task_is_learned_and_counted(
    name: str, lr: float, kind: str, hidden: bool
) -> None:
    found = bench.run(name, lr, 0, peers=2, steps=80)
    assert found["steps"] == 80
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["busiest_node_bytes"] >= found["bytes_per_step"] > 0
    assert found["hidden" if hidden else "waited"][kind] > 0


def test_every_algorithm_has_a_grid_and_options_that_it_takes() -> None:
    assert set(bench.OPTIONS) <= {*ALGORITHMS}
    problem = bench.Problem(0, 2)
    for name in bench.NAMES:
        swarm = bench.ArithmeticSwarm(2)
        peer = bench.Counted(swarm.peer(0), bench.Tally())
        bench.make(name, bench.grid_of(name)[0], problem, problem.model(), 0, peer)
