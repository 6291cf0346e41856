"""`bench algorithms`, small: one algorithm on two daemons over a line that is capped and delayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moshpitd.cli.bench_algorithms_network import Cell, Plan, measure, networks
from moshpitd.cli.namespaces import missing


@pytest.mark.timeout(120)
def test_steps_are_timed_and_counted_over_an_emulated_line() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    (wan,) = (net for net in networks() if net.name == "wan")
    told: dict[str, Cell | str] = {}
    plan = Plan(peers=2, hidden=50, steps=4, compute_s=0.0, warm=0.2)
    measure(replace(wan, latency_s=0.03), ["d-psgd"], plan, told.__setitem__)
    cell = told["d-psgd"]
    assert isinstance(cell, Cell), cell
    # Join, Begin, the message and the word that it counts: three of them at least are in a row.
    assert cell.seconds_per_step > 2 * 0.03
    # 1956 parameters go out and come in; acknowledgements and control messages beside them.
    assert cell.busiest_node_bytes >= cell.bytes_per_step > 4 * 50 * 39
    assert cell.statuses == {"complete": 2 * 4}
