"""The third mode: every message of a round on a heap. One rule: nothing is added up here that the
closed form adds up; it comes out of who waits for whom, or it does not.

Nodes have one uplink and one downlink, which carry one message at a time; a message reaches the
other end `latency_s` after it left, and takes its turn there. Synchronous methods come out as the
closed form says. Asynchronous ones have no closed form: `server_steps` and `pair_steps` tell their
rates and how stale what they apply is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moshpitd.core.balance import assign_reducers
from moshpitd.core.mixing import EdgeMixing, Mixing, MixingSchedule
from moshpitd.sim.costs.net import Lognormal, Net
from moshpitd.sim.costs.operations import matchmaking_s
from moshpitd.sim.costs.payload import Payload

Call = Callable[[], None]


class Clock:
    """Invariant: calls happen in order of time, and in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call]] = []
        self._sequence = 0

    def at(self, instant: float, call: Call) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (instant, self._sequence, call))

    def run(self, *, until: float = float("inf")) -> float:
        """Until nothing is left, or `until`; returns when the last thing happened."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return self.now


class Fabric:
    """Nodes 0..n-1 on one kind of link."""

    def __init__(self, clock: Clock, net: Net, nodes: int) -> None:
        self._clock, self._net = clock, net
        self._up = [0.0] * nodes
        self._down = [0.0] * nodes

    def send(
        self, source: int, target: int, size: float, then: Call, *, connections: int = 1
    ) -> None:
        """Queue a message behind what `source` sends already; `then` when the last byte is there.

        `connections`: over how many a node spreads its bytes, which is what windows divide by.
        """
        net, clock = self._net, self._clock
        slowed = net.window_s(size, connections)
        leaves = max(clock.now, self._up[source])
        left = self._up[source] = leaves + max(size / net.up_bytes_per_s, slowed)

        def first_byte() -> None:
            # Its turn is taken when it gets here, not when it was sent: others may be sooner. A
            # slow sender does not block the downlink; it only ends no sooner than it has sent.
            begins = max(clock.now, self._down[target])
            self._down[target] = begins + max(size / net.down_bytes_per_s, slowed)
            clock.at(max(self._down[target], left + net.latency_s), then)

        clock.at(leaves + net.latency_s, first_byte)

    def acknowledge(self, then: Call) -> None:
        """A message without a body, the other way."""
        self._clock.at(self._clock.now + self._net.latency_s, then)


class Barrier:
    """Calls `then` once, at the `count`-th arrival."""

    def __init__(self, count: int, then: Call) -> None:
        self._left, self._then = count, then

    def arrive(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


def ring_s(peers: int, payload: Payload, net: Net, *, connections: int = 1) -> float:
    """One ring all-reduce: chunk by chunk to the right-hand neighbour, bucket after bucket."""
    clock = Clock()
    fabric = Fabric(clock, net, peers)
    steps = 2 * (peers - 1)
    chunks = [_share(payload, bucket, peers) for bucket in payload.buckets for _ in range(steps)]

    def pass_on(node: int, step: int) -> None:
        if step < len(chunks):
            right = (node + 1) % peers
            # A node may send its next chunk when it has the one from its left.
            fabric.send(
                node, right, chunks[step], lambda: pass_on(right, step + 1), connections=connections
            )

    for node in range(peers):
        pass_on(node, 0)
    return clock.run()


def butterfly_s(peers: int, payload: Payload, net: Net, *, eager: bool = False) -> float:
    """One butterfly all-reduce over all, bucket after bucket."""
    clock = Clock()
    fabric = Fabric(clock, net, peers)
    sizes = [_share(payload, bucket, peers) * peers for bucket in payload.buckets]
    members = tuple(range(peers))

    def bucket(number: int) -> None:
        if number < len(sizes):
            _reduce(fabric, members, sizes[number], eager=eager, then=lambda: bucket(number + 1))

    bucket(0)
    return clock.run()


def _reduce(
    fabric: Fabric,
    group: Sequence[int],
    size: float,
    *,
    eager: bool,
    then: Call,
) -> None:
    """Scatter-reduce and all-gather of `size` bytes inside a group of equals."""
    peers = len(group)
    if peers == 1:
        then()
        return
    reducers = assign_reducers([1] * peers, [1.0] * peers)  # the daemon's own split
    share = size / peers

    def phase(after: Call) -> None:
        messages = peers * (peers - 1)
        done = Barrier(messages, after)
        for index, node in enumerate(group):
            for turn in range(1, peers):
                # Right-hand neighbour first, as in core.allreduce: nobody is flooded.
                other = group[reducers[(index + turn) % peers]]
                arrive = done.arrive if eager else lambda: fabric.acknowledge(done.arrive)
                fabric.send(node, other, share, arrive, connections=peers - 1)

    phase(lambda: phase(then))


def server_s(peers: int, payload: Payload, net: Net, *, shards: int = 1) -> float:
    """One synchronous step of a parameter server whose shards live on nodes of their own."""
    clock = Clock()
    fabric = Fabric(clock, net, peers + shards)
    sizes = [Payload(count, payload.codec).nbytes / shards for count in payload.buckets]

    def push(number: int) -> None:
        if number == len(sizes):
            return
        pulled = Barrier(peers * shards, lambda: push(number + 1))

        def pull() -> None:
            for worker in range(peers):
                for shard in range(shards):

                    def answer(worker: int = worker, shard: int = shard) -> None:
                        size, there = sizes[number], peers + shard
                        fabric.send(there, worker, size, pulled.arrive, connections=peers)

                    fabric.acknowledge(answer)  # the request

        pushed = Barrier(peers * shards, pull)
        for worker in range(peers):
            for shard in range(shards):
                size, there = sizes[number], peers + shard
                fabric.send(
                    worker,
                    there,
                    size,
                    lambda: fabric.acknowledge(pushed.arrive),
                    connections=peers,
                )

    push(0)
    return clock.run()


def schedule_s(
    schedule: MixingSchedule,
    payload: Payload,
    net: Net,
    *,
    rounds: int,
    window_s: float | None = None,
    compute: Lognormal | None = None,
    seed: int = 0,
) -> float:
    """`rounds` rounds of the daemon's own schedules: groups reduce, edges send whole copies.

    Nobody waits for more than its own group or neighbours, so with a `compute` that varies a slow
    peer is felt round by round further away. `window_s`: what forming a group costs beside the
    look-up; None where partners are known and nothing has to form.
    """
    clock = Clock()
    fabric = Fabric(clock, net, schedule.peers)
    gathering = 0.0 if window_s is None else matchmaking_s(net, schedule.peers, window_s=window_s)
    rng = np.random.default_rng(seed)
    work = (compute or Lognormal()).draw(rng, rounds, schedule.peers)
    mixings = [schedule.sample(t) for t in range(rounds)]
    plans = [_plan_of(mixing) for mixing in mixings]
    _Run(clock, fabric, payload, plans, work.tolist(), gathering).start()
    return clock.run()


@dataclass(slots=True)
class _Plan:
    """One round: either the group of each peer, or whom each sends to and how many send to it."""

    groups: dict[int, Sequence[int]] = field(default_factory=dict)
    targets: dict[int, list[int]] = field(default_factory=dict)
    expected: Counter[int] = field(default_factory=Counter)
    edges: bool = False


def _plan_of(mixing: Mixing) -> _Plan:
    if not isinstance(mixing, EdgeMixing):
        return _Plan(groups={member: group for group in mixing.groups for member in group})
    plan = _Plan(expected=Counter(edge.target for edge in mixing.edges), edges=True)
    for edge in mixing.edges:
        plan.targets.setdefault(edge.source, []).append(edge.target)
    for source, targets in plan.targets.items():
        # To the right-hand side first, as in a group: two senders at one door would take turns.
        targets.sort(key=lambda target: (target - source) % mixing.peers)
    return plan


@dataclass(slots=True)
class _Run:
    """Peers that go through their rounds, each as soon as it can."""

    clock: Clock
    fabric: Fabric
    payload: Payload
    plans: list[_Plan]
    work: list[list[float]]
    gathering_s: float
    ready: dict[tuple[int, int], int] = field(default_factory=dict)  # (round, leader) -> members
    inbox: Counter[tuple[int, int]] = field(default_factory=Counter)  # (round, peer) -> copies
    sent: set[tuple[int, int]] = field(default_factory=set)

    def start(self) -> None:
        for peer in range(len(self.work[0]) if self.work else 0):
            self.begin(peer, 0)

    def begin(self, peer: int, t: int) -> None:
        if t < len(self.plans):
            when = self.clock.now + self.work[t][peer]
            self.clock.at(when, lambda: self.mix(peer, t))

    def mix(self, peer: int, t: int) -> None:
        plan = self.plans[t]
        if plan.edges:
            self._exchange(plan, peer, t)
            return
        group = plan.groups.get(peer, (peer,))
        key = (t, group[0])
        self.ready[key] = self.ready.get(key, 0) + 1
        if self.ready[key] == len(group):
            begins = self.clock.now + self.gathering_s
            self.clock.at(begins, lambda: self._average(group, t))

    def _average(self, group: Sequence[int], t: int) -> None:
        def done() -> None:
            for member in group:
                self.begin(member, t + 1)

        _reduce(self.fabric, group, self.payload.chunked(len(group)), eager=False, then=done)

    def _exchange(self, plan: _Plan, peer: int, t: int) -> None:
        targets = plan.targets.get(peer, [])
        self.sent.add((t, peer))
        for target in targets:
            arrived = partial(self._arrived, plan, target, t)
            size, connections = self.payload.nbytes, len(targets)
            self.fabric.send(peer, target, size, arrived, connections=connections)
        self._proceed(plan, peer, t)

    def _arrived(self, plan: _Plan, peer: int, t: int) -> None:
        self.inbox[t, peer] += 1
        self._proceed(plan, peer, t)

    def _proceed(self, plan: _Plan, peer: int, t: int) -> None:
        if (t, peer) in self.sent and self.inbox[t, peer] == plan.expected[peer]:
            self.sent.discard((t, peer))
            self.begin(peer, t + 1)


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """What a method without barriers came to. `staleness`: updates by how many others were applied
    between the read they are based on and themselves -> how often."""

    steps_per_s: float
    staleness: dict[int, int]

    @property
    def stalest(self) -> int:
        return max(self.staleness, default=0)


def server_steps(
    workers: int,
    payload: Payload,
    net: Net,
    *,
    compute: Lognormal,
    seconds: float,
    seed: int = 0,
) -> Asynchronous:
    """AsySG over a network: each worker pulls, computes and pushes on its own (ALGORITHMS 2.8)."""
    clock = Clock()
    fabric = Fabric(clock, net, workers + 1)
    rng = np.random.default_rng(seed)
    version = 0
    staleness: Counter[int] = Counter()
    size = payload.nbytes

    def pull(worker: int) -> None:
        def asked() -> None:
            read = version
            fabric.send(workers, worker, size, lambda: work(worker, read), connections=workers)

        fabric.acknowledge(asked)

    def work(worker: int, read: int) -> None:
        done = clock.now + float(compute.draw(rng, 1)[0])
        clock.at(done, lambda: fabric.send(worker, workers, size, lambda: apply(worker, read)))

    def apply(worker: int, read: int) -> None:
        nonlocal version
        staleness[version - read] += 1
        version += 1
        pull(worker)

    for worker in range(workers):
        pull(worker)
    clock.run(until=seconds)
    return Asynchronous(version / seconds, dict(sorted(staleness.items())))


def pair_steps(
    workers: int,
    payload: Payload,
    net: Net,
    *,
    compute: Lognormal,
    seconds: float,
    seed: int = 0,
) -> Asynchronous:
    """AD-PSGD: each worker computes and, meanwhile, averages with a random other (ALGORITHMS 2.5).

    The average of a step runs beside the next compute; a step waits only if the one before is still
    under way. Staleness counts the averages that touched a worker's copy while it computed.
    """
    clock = Clock()
    fabric = Fabric(clock, net, workers)
    rng = np.random.default_rng(seed)
    touched = [0] * workers
    staleness: Counter[int] = Counter()
    size, steps = payload.nbytes, 0

    def compute_from(worker: int) -> None:
        read = touched[worker]
        both = Barrier(2, lambda: applied(worker, read))
        clock.at(clock.now + float(compute.draw(rng, 1)[0]), both.arrive)
        other = (worker + 1 + int(rng.integers(workers - 1))) % workers

        def answered() -> None:
            touched[worker] += 1
            touched[other] += 1
            both.arrive()

        fabric.send(worker, other, size, lambda: fabric.send(other, worker, size, answered))

    def applied(worker: int, read: int) -> None:
        nonlocal steps
        steps += 1
        staleness[touched[worker] - read - 1] += 1  # its own average is no surprise
        compute_from(worker)

    for worker in range(workers):
        compute_from(worker)
    clock.run(until=seconds)
    return Asynchronous(steps / seconds, dict(sorted(staleness.items())))


def _share(payload: Payload, bucket: int, chunks: int) -> float:
    """Bytes of one of `chunks` pieces of one bucket."""
    return Payload(bucket, payload.codec).chunked(chunks) / chunks
