"""What a round of the daemon takes, from production Peers: the chain of hops that the formula
counts is the one that they walk. One rule: the network is so fast that only hops are left."""

from __future__ import annotations

import pytest

from moshpitd.core.params import Params
from moshpitd.sim.costs import rehearsal
from moshpitd.sim.costs.net import Net
from moshpitd.sim.costs.payload import layout_of

NET = Net("20 ms", 0.02, 1e12)
TINY = layout_of(256)


@pytest.mark.parametrize("peers", [3, 4, 9, 16])
@pytest.mark.parametrize("latency_s", [0.005, 0.02, 0.08])
def test_a_warm_round_of_a_flat_group_is_five_hops(peers: int, latency_s: float) -> None:
    net = Net("", latency_s, 1e12)
    came = rehearsal.rehearse(net, TINY, "float32", peers=peers)
    assert came.group_size == peers
    assert came.seconds == pytest.approx(5 * latency_s, rel=1e-3)
    formula = rehearsal.closed_form_s(net, TINY, "float32", peers=peers)
    assert came.seconds == pytest.approx(formula, rel=1e-3)


def test_two_alone_end_one_hop_apart() -> None:
    """And so the follower calls one hop before its leader: its Join is there when the other
    comes."""
    came = rehearsal.rehearse(NET, TINY, "float32", peers=2)
    assert came.seconds == pytest.approx(4 * 0.02, rel=1e-3)


def test_bytes_come_on_top() -> None:
    """16 MB between two at 1 Gb/s: both directions at once, contribution and result overlap."""
    layout, net = layout_of(4 << 20), Net("1 Gb/s", 0.02, 1e9)
    came = rehearsal.rehearse(net, layout, "float32", peers=2)
    bytes_s = net.bandwidth_s(layout.nbytes, layout.nbytes)
    assert came.seconds == pytest.approx(5 * 0.02 + bytes_s, rel=0.25)
    half = rehearsal.rehearse(net, layout, "float16", peers=2)
    assert half.seconds == pytest.approx(5 * 0.02 + bytes_s / 2, rel=0.25)


def test_more_peers_than_a_group_are_rehearsed_as_a_sweep() -> None:
    came = rehearsal.rehearse(NET, TINY, "float32", peers=9, params=Params(max_group=3))
    assert came.group_size == 3
    one = rehearsal.closed_form_s(NET, TINY, "float32", peers=3)
    assert 2 * one <= came.seconds <= 4 * one
