"""What a round of the daemon takes, from production Peers: the chain of hops that the formula
counts is the one that they walk. One rule: the network is so fast that only hops are left."""

from __future__ import annotations

from collections import Counter

import pytest

from moshpitd.core.effects import Send
from moshpitd.core.messages import Begin
from moshpitd.core.params import Params
from moshpitd.sim.costs import rehearsal
from moshpitd.sim.costs.net import Net
from moshpitd.sim.costs.payload import layout_of
from moshpitd.sim.faults import Options
from moshpitd.sim.world import World

NET = Net("20 ms", 0.02, 1e12)
TINY = layout_of(256)


@pytest.mark.parametrize("peers", [3, 4, 9, 16])
@pytest.mark.parametrize("latency_s", [0.005, 0.02, 0.08])
def test_a_warm_round_of_a_flat_group_is_eight_hops(peers: int, latency_s: float) -> None:
    net = Net("", latency_s, 1e12)
    came = rehearsal.rehearse(net, TINY, "float32", peers=peers)
    assert came.group_size == peers
    assert came.seconds == pytest.approx(8 * latency_s, rel=1e-3)
    formula = rehearsal.closed_form_s(net, TINY, "float32", peers=peers)
    assert came.seconds == pytest.approx(formula, rel=1e-3)


def test_two_alone_end_one_hop_apart() -> None:
    """And so call one hop apart in the next round: the first waits for the second."""
    came = rehearsal.rehearse(NET, TINY, "float32", peers=2)
    assert 8 * 0.02 * 0.999 < came.seconds < 9 * 0.02 * 1.001


def test_begin_is_the_third_message_to_a_follower() -> None:
    """Which is what MATCHMAKING_HOPS is made of; a core that sends fewer changes the constant."""
    sent: Counter[tuple[int, str]] = Counter()
    before_begin: list[int] = []

    def watch(node: object, what: object) -> None:
        if isinstance(what, Send):
            key = (node.index, what.to)  # type: ignore[attr-defined]
            sent[key] += 1
            if isinstance(what.message, Begin):
                before_begin.append(sent[key])
        elif type(what).__name__ == "Contributed":
            for key in [key for key in sent if key[0] == node.index]:  # type: ignore[attr-defined]
                del sent[key]

    world = World(
        Options(
            peers=4, parts=1, same_start=True, join_spread_s=0.0, compute_s=1.0, compute_sigma=0.0,
            compute_jitter=0.0, latency_s=0.02, latency_sigma=0.0, jitter_sigma=0.0,
            directory_s=0.04, directory_sigma=0.0, rate_sigma=0.0, goal=4,
        )
    )  # fmt: skip
    world.watchers.append(watch)
    world.run()
    warm = before_begin[-3:]
    assert warm == [rehearsal.MESSAGES_TO_BEGIN] * 3


def test_bytes_come_on_top() -> None:
    """16 MB between two at 1 Gb/s: both directions at once, contribution and result overlap."""
    layout, net = layout_of(4 << 20), Net("1 Gb/s", 0.02, 1e9)
    came = rehearsal.rehearse(net, layout, "float32", peers=2)
    bytes_s = net.bandwidth_s(layout.nbytes, layout.nbytes)
    assert came.seconds == pytest.approx(8 * 0.02 + bytes_s, rel=0.25)
    half = rehearsal.rehearse(net, layout, "float16", peers=2)
    assert half.seconds == pytest.approx(8 * 0.02 + bytes_s / 2, rel=0.25)


def test_more_peers_than_a_group_are_rehearsed_as_a_sweep() -> None:
    came = rehearsal.rehearse(NET, TINY, "float32", peers=9, params=Params(max_group=3))
    assert came.group_size == 3
    one = rehearsal.closed_form_s(NET, TINY, "float32", peers=3)
    assert 2 * one <= came.seconds <= 4 * one
