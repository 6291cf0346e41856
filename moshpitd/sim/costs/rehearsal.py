"""What a round of the daemon itself takes on a network: production Peers in the simulated world.
One rule: the world is calm and nothing in it is random, so that what is left is the protocol's own
chain of messages and bytes.

A daemon's control messages to one peer wait for no acknowledgement (`daemon.driver`), and neither
do the world's. A warm round in which all are ready at once is then a chain of five hops: the Join
of a follower, the leader's Begin, a contribution, its result, and Parity.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from moshpitd.core.effects import Finish
from moshpitd.core.events import Contributed, Event
from moshpitd.core.outcome import Status
from moshpitd.core.params import Params
from moshpitd.errors import InternalError
from moshpitd.sim.costs.net import Net
from moshpitd.sim.costs.payload import group_traffic, part_payloads
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import Node
from moshpitd.sim.world import World
from moshpitd.tensors.layout import Layout

MATCHMAKING_HOPS = 2
EXCHANGE_HOPS = 2
PARITY_HOPS = 1
ROUNDS = 4
"""The first of them finds links and records that it has to make; the median is a warm one."""
COMPUTE_S = 0.3
"""Between two rounds: long enough that the last message of one has arrived before the next."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A warm round: seconds of the slowest member from call to outcome."""

    seconds: float
    group_size: int


def closed_form_s(net: Net, layout: Layout, codec: str, *, peers: int) -> float:
    """The same by formula, for one flat group of equals: five hops and the bytes."""
    hops = MATCHMAKING_HOPS + EXCHANGE_HOPS + PARITY_HOPS
    busiest = max(one.sent for one in group_traffic(layout, codec, [1.0] * peers))
    return hops * net.latency_s + net.bandwidth_s(busiest, busiest)


def rehearse(
    net: Net, layout: Layout, codec: str, *, peers: int, params: Params | None = None
) -> Rehearsal:
    """Run it. More peers than `params.max_group` make sweeps on a grid, and one call is a sweep."""
    params = params or Params()
    sizes = part_payloads(layout, codec)
    rate = min(net.up_bytes_per_s, net.down_bytes_per_s)
    options = Options(
        params=params,
        peers=peers,
        parts=len(sizes),
        part_bytes=max(sizes),
        same_start=True,
        join_spread_s=0.0,
        rounds=1 if peers <= params.max_group else 0,
        compute_s=COMPUTE_S + 10.0 * net.latency_s,
        compute_sigma=0.0,
        compute_jitter=0.0,
        latency_s=net.latency_s,
        latency_sigma=0.0,
        jitter_sigma=0.0,
        directory_s=2.0 * net.latency_s,
        directory_sigma=0.0,
        rate_mbps=rate * 8.0 / 1e6,
        rate_sigma=0.0,
        goal=ROUNDS,
    )
    world = World(options)
    stopwatch = _Stopwatch(world)
    world.run()
    return stopwatch.median(peers)


class _Stopwatch:
    """Takes the time of every complete call, at the slowest member."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began: dict[int, float] = {}
        self._calls: list[Rehearsal] = []
        world.watchers.append(self._watch)

    def median(self, peers: int) -> Rehearsal:
        if len(self._calls) < peers:
            raise InternalError(f"no complete round of {peers} peers was rehearsed")
        turns = [
            max(self._calls[i : i + peers], key=lambda call: call.seconds)
            for i in range(0, len(self._calls) - peers + 1, peers)
        ]
        middle = statistics.median_low([turn.seconds for turn in turns])
        return next(turn for turn in turns if turn.seconds == middle)

    def _watch(self, node: Node, what: Event | object) -> None:
        if isinstance(what, Contributed):
            self._began[node.index] = self._world.now
        elif isinstance(what, Finish) and what.outcome.status is Status.COMPLETE:
            self._calls.append(
                Rehearsal(
                    seconds=self._world.now - self._began[node.index],
                    group_size=what.outcome.group_size,
                )
            )
