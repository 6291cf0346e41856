"""What one round of each algorithm asks of a network. One rule: counts only; seconds are made of
them in `steps` and `events`.

| operation | hops in a row | bytes of the busiest node |
|---|---|---|
| ring all-reduce, b buckets | 2 (n-1) b | 2 (n-1)/n m each way |
| butterfly all-reduce | 4 b (a round trip per phase), 2 b eager | 2 (n-1)/n m each way |
| k neighbours | b | k m each way |
| parameter server, s shards | 4 b | 2 n m / s, half of it each way and one after the other |
| one round in a group of g | as the butterfly | 2 (g-1)/g m each way |
| one peer per round | 1 | m each way |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moshpitd.sim.costs.net import Net
from moshpitd.sim.costs.payload import Payload

KADEMLIA_K = 20
"""Peers asked per step of a look-up in a Kademlia table."""
LOOK_UPS = 2
"""A store and a look-up before a group can form."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One round of an algorithm, seen from its busiest node.

    `turns`: the two directions of that node carry one after the other instead of at once (a server
    must have everything before it answers); each of the others then moves `each` both ways, over
    links that may be the slower ones. `waits_for`: peers whose compute one member waits for.
    `everybody`: a single failure among all peers spoils the round for all. `gathers`: peers have to
    find each other first. `background`: the transfer never holds a step up.
    """

    name: str
    peers: int
    hops: float
    sent: float
    received: float
    connections: int
    waits_for: int
    turns: bool = False
    each: float = 0.0
    everybody: bool = False
    gathers: bool = False
    background: bool = False


def ring(peers: int, payload: Payload, *, connections: int = 1) -> Operation:
    """Ring all-reduce: reduce-scatter, then all-gather, bucket by bucket."""
    chunk = payload.chunked(peers) / peers
    steps = 2 * (peers - 1)
    return Operation(
        "ring all-reduce",
        peers,
        hops=steps * len(payload.buckets),
        sent=steps * chunk,
        received=steps * chunk,
        connections=connections,
        waits_for=peers,
        everybody=True,
    )


def butterfly(peers: int, payload: Payload, *, eager: bool = False) -> Operation:
    """Scatter-reduce and all-gather, everybody with everybody. Eager: nobody waits for an
    acknowledgement between the two phases."""
    chunk = payload.chunked(peers) / peers
    return Operation(
        "butterfly all-reduce",
        peers,
        hops=(2 if eager else 4) * len(payload.buckets),
        sent=2 * (peers - 1) * chunk,
        received=2 * (peers - 1) * chunk,
        connections=peers - 1,
        waits_for=peers,
        everybody=True,
    )


def neighbours(peers: int, payload: Payload, *, degree: int, connections: int = 0) -> Operation:
    """Everybody sends all it has to `degree` others (D-PSGD, gossip, one peer per round)."""
    size = degree * payload.nbytes
    return Operation(
        f"{degree} neighbour{'s' if degree > 1 else ''}",
        peers,
        hops=len(payload.buckets),
        sent=size,
        received=size,
        connections=connections or degree,
        waits_for=degree + 1,
    )


def parameter_server(peers: int, payload: Payload, *, shards: int = 1) -> Operation:
    """Push to `shards` servers, pull from them. The servers are the busiest nodes."""
    size = peers * payload.nbytes / shards
    return Operation(
        "parameter server",
        peers,
        hops=4 * len(payload.buckets),
        sent=size,
        received=size,
        connections=peers,
        waits_for=peers,
        turns=True,
        each=payload.nbytes,
    )


def group_round(peers: int, size: int, payload: Payload) -> Operation:
    """One round of groups of `size`, each a butterfly (Moshpit, random groups)."""
    inside = butterfly(size, payload)
    return Operation(
        f"groups of {size}",
        peers,
        hops=inside.hops,
        sent=inside.sent,
        received=inside.received,
        connections=inside.connections,
        waits_for=size,
        gathers=True,
    )


def asynchronous(peers: int, payload: Payload) -> Operation:
    """Averaging in a thread beside the training, which never waits for it (BAGUA's async)."""
    size = 2 * (peers - 1) / peers * payload.nbytes
    return Operation(
        "asynchronous",
        peers,
        hops=0,
        sent=size,
        received=size,
        connections=peers - 1,
        waits_for=1,
        background=True,
    )


def matchmaking_s(net: Net, peers: int, *, window_s: float) -> float:
    """Window, then a store and a look-up of log N / log k steps, each a round trip."""
    steps = math.ceil(math.log2(peers) / math.log2(KADEMLIA_K)) if peers > 1 else 0
    return window_s + LOOK_UPS * steps * 2.0 * (2.0 * net.latency_s)
