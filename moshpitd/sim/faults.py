"""What a world is like and what goes wrong in it, drawn from one seed. One rule: every option and
every fault has a stream of its own, so that adding one does not shift the draws of another and old
seeds keep their meaning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any

from moshpitd.core.grid import sides_for
from moshpitd.core.params import Params


def stream(seed: int, *names: object) -> Random:
    """The generator that belongs to these names: a function of seed and names alone, not of who
    drew before."""
    name = "/".join(str(part) for part in (seed, *names))
    return Random(int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "big"))


@dataclass(frozen=True, slots=True)
class Resize:
    """From `at_s` on, within `over_s`, nodes are born or leave until `peers` are there.

    Who leaves is drawn; half of them get a notice first, the others die.
    """

    at_s: float
    peers: int
    over_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a world but the draws themselves. Durations are seconds of world time,
    chances 0..1.

    Invariant: with the last group (faults) at its defaults nothing ever fails, so a world that
    fails then has found a bug of the protocol's happy path.
    """

    seed: int = 0
    params: Params = field(default_factory=Params)
    peers: int = 50
    trainers: int = 1
    """Trainers on each node."""
    parts: int = 6
    elements: int = 3
    """float64 values in each part: few, because the averages are computed for real."""
    part_bytes: int = 1 << 20
    """What a part weighs on the wire and in Attached; only time depends on it."""
    same_start: bool = False
    """All trainers start from the same values (one init seed) instead of each from its own."""
    join_spread_s: float = 2.0
    """Nodes start within this time."""
    newcomers: int = 0
    """That many of the nodes start in the middle of phase one."""
    joins: float = 0.0
    """Further nodes that start at any time in phase one, as a share of `peers`."""
    resizes: tuple[Resize, ...] = ()
    """The swarm grows and shrinks, in this order."""
    max_weight: int = 64
    """Weights are drawn from 1..this."""
    rounds: int = 1
    """`rounds` of every call: 1, or 0 for a sweep."""
    call_timeout_s: float = 60.0
    lone_calls: int = 0
    """So many calls in a row without a group, and the trainer is stuck: a fault; 0: it may be."""

    compute_s: float = 3.0
    """Median time between the end of a call and the next."""
    compute_sigma: float = 0.2
    """Spread of that between nodes (lognormal), for ever."""
    compute_jitter: float = 0.1
    """Spread of that from step to step."""
    latency_s: float = 0.02
    """Median one-way delay of a link."""
    latency_sigma: float = 0.5
    jitter_sigma: float = 0.1
    """Spread of one link's delays from message to message; it also reorders them."""
    directory_s: float = 0.1
    """Median time of one directory operation."""
    directory_sigma: float = 0.5
    rate_mbps: float = 1000.0
    rate_sigma: float = 0.3
    up_ratio: float = 1.0
    """Uplink over downlink (ADSL: 0.1)..."""
    up_sigma: float = 0.0
    """...and the spread of that between nodes (lognormal)."""
    parts_overtake: bool = False
    """Parts take a receiver's downlink in the order in which they get there, not in which they were
    queued: of a slow sender among fast ones, whose queue would hold up everybody's. And what it
    contributes leaves for all reducers in turn, or most would not meet it as a slow one."""
    clock_spread_s: float = 1e6
    """Each node's monotonic clock starts somewhere in here: no two share one."""
    clock_rate: float = 0.0
    """Each node's clock runs faster or slower than the world's by up to this share."""
    stragglers: float = 0.0
    """Share of nodes that compute..."""
    straggle: float = 4.0
    """...so many times longer than the others."""
    hiccups: float = 0.0
    """Chance that a step takes `straggle` times as long as usual."""
    beat_s: float = 0.0
    """Trainers contribute at multiples of this, all at once; 0: when they have computed."""
    step_size: float = 0.01
    """Size of a local step; 0 leaves averaging alone."""
    directory_answer: int = 0
    """Records that fit one answer of the directory (hivemind carries about 2 MiB); 0: all do."""

    undialable: float = 0.0
    """Share of nodes behind a NAT: nobody can open a link to them."""
    loss: float = 0.0
    """Chance that a control message is lost..."""
    loss_silent: float = 0.5
    """...and that its sender is not told."""
    stale: float = 0.0
    """Chance that what is stored in the directory shows up only `stale_s` later (median)."""
    stale_s: float = 5.0
    hidden: float = 0.0
    """Chance that a record is missing from one answer."""
    directory_fails: float = 0.0
    """Chance that a directory operation fails outright."""
    cut: float = 0.0
    """Chance that the link of a pair breaks in a round although both live."""
    refused: float = 0.0
    """Chance that a contribution is refused at the door (not finite)."""
    impatient: float = 0.0
    """Chance that a trainer gives up a call early."""
    kills: float = 0.0
    """Expected deaths of a daemon per node in phase one."""
    vanish: float = 0.0
    """Share of deaths that close no connection (power, network gone)."""
    forget: float = 0.0
    """Share of deaths that take the trainers and their parameters along."""
    leave: float = 0.0
    """Share of deaths without return."""
    back_s: float = 5.0
    """Median time until a dead daemon is back."""
    trainer_deaths: float = 0.0
    """Expected deaths of a trainer (its daemon lives) per node in phase one."""
    drains: float = 0.0
    """Share of nodes that get a preemption notice in phase one and leave for good."""
    drain_s: float = 10.0
    """From notice to end."""

    duplicates: float = 0.0
    """Chance that a control message arrives a second time, up to `held_s` later."""
    held: float = 0.0
    """Chance that a control message is held up, so that later ones overtake it..."""
    held_s: float = 2.0
    """...by up to this long."""
    oneway: float = 0.0
    """Chance, for each ordered pair, that the first cannot reach the second."""
    partitions: float = 0.0
    """Expected number of partitions in phase one..."""
    partition_s: float = 10.0
    """...their median length..."""
    partition_share: float = 0.3
    """...and the share of nodes that each cuts off together."""
    cut_offs: float = 0.0
    """Expected times per node that it alone is cut off, for about `partition_s`."""
    freezes: float = 0.0
    """Expected times per node that its daemon stands still (SIGSTOP, a laptop's lid)..."""
    freeze_s: float = 5.0
    """...and for how long (median)."""
    liars: float = 0.0
    """Share of nodes whose daemons lie..."""
    lies: float = 0.2
    """...in this share of what they send."""

    faults_s: float = 0.0
    """Length of phase one. After it nothing fails any more."""
    goal: int = 2
    """Complete rounds that every survivor must finish in phase two..."""
    bound_s: float = 240.0
    """...within this time."""

    def everybody_can_meet(self) -> bool:
        """Does nothing in here keep a message, an answer of the directory or a daemon from its
        work? Deaths do not count: they take one end of a meeting away."""
        return not (
            self.loss or self.stale or self.hidden or self.directory_fails or self.oneway
            or self.partitions or self.cut_offs or self.held or self.directory_answer or self.liars
        )  # fmt: skip

    def slice_of(self, part: int) -> slice:
        """Where a part lies in a trainer's vector."""
        return slice(part * self.elements, (part + 1) * self.elements)


def draw(
    seed: int, *, peers: int = 0, max_group: int | None = None, faults_s: float = 60.0
) -> Options:
    """The world of a seed, of 100 to 300 peers unless a number is given. Which faults exist at all
    is drawn too: a fault that is always on hides what happens without it."""
    chosen: dict[str, Any] = {
        name: pick(stream(seed, "option", name)) for name, pick in DRAWN.items()
    }
    peers = peers or stream(seed, "option", "peers").randint(100, 300)
    options = replace(Options(seed=seed, peers=peers, faults_s=faults_s), **chosen)
    if options.rounds == 0:  # a sweep waits a window and exchanges once per side of the grid
        options = replace(options, call_timeout_s=max(options.call_timeout_s, 60.0))
    group = max_group or stream(seed, "option", "max_group").choice((8, 16))
    options = replace(options, params=replace(Params(), max_group=group))
    options = _in_time(options)
    # Phase two lasts as long as the slowest computes, while everybody else goes on.
    options = replace(options, straggle=min(options.straggle, 16.0 / options.compute_s))
    # The slowest has to compute for its rounds too: straggler, hiccup, 3 sigma of its machine.
    slowest = options.compute_s * math.exp(3.0 * options.compute_sigma)
    slowest *= options.straggle if options.stragglers or options.hiccups else 1.0
    return replace(options, bound_s=options.bound_s + 2.0 * options.goal * slowest)


RESULTS = 1.25
"""Of the time in which a peer sends its whole contribution, for the results of one part to fifteen
others, of twelve parts: what a reducer has yet to do when the last contribution is there."""


def _in_time(options: Options) -> Options:
    """Rates with which rounds can be complete: a round that cannot be over within its call is a
    setting that nobody would keep, and who is too slow for the others is left out for good reason
    (DESIGN 7), so of nobody complete rounds could be asked."""
    params, call_s = options.params, options.call_timeout_s
    bits = 8e-6 * options.parts * options.part_bytes
    least = 6.0 * bits / min(call_s, 30.0)  # Mbit/s of the median's uplink

    def slowest(options: Options) -> float:  # uplink, of some hundred: 3 sigma
        return math.exp(3.0 * math.hypot(options.rate_sigma, options.up_sigma))

    if bits * slowest(options) > params.silence_min_s * options.up_ratio * options.rate_mbps:
        # Seconds, so within `slow_ratio` of the others, and in an order that no queue turns round.
        options = replace(options, up_sigma=min(options.up_sigma, 0.2), parts_overtake=True)
        # Its last part is there before it would be silent ...
        least = max(least, bits * slowest(options) / params.part_timeout_s)
        if options.rounds == 0:
            # ... and a sweep waits a window for each line and for the last messages, and exchanges;
            # a fifth is left for what goes wrong.
            lines = len(sides_for(options.peers, params.max_group))
            spare_s = 0.8 * call_s / lines - params.window_s - params.parity_timeout_s
            least = max(least, bits * (slowest(options) + RESULTS) / spare_s)
    return replace(options, rate_mbps=max(options.rate_mbps, least / options.up_ratio))


def _sometimes(chance: float, low: float, high: float) -> Callable[[Random], float]:
    """0 or, with `chance`, something between `low` and `high`."""

    def pick(rng: Random) -> float:
        amount = rng.uniform(low, high)
        return amount if rng.random() < chance else 0.0

    return pick


DRAWN: dict[
    str, Callable[[Random], object]
] = {  # option -> how it is drawn; each from its own stream
    "trainers": lambda rng: rng.choice((1, 1, 1, 2)),
    "parts": lambda rng: rng.choice((1, 3, 6, 12)),
    "same_start": lambda rng: rng.random() < 0.3,
    "join_spread_s": lambda rng: rng.choice((0.2, 2.0, 10.0)),
    "newcomers": lambda rng: rng.choice((0, 3, 8)),
    "rounds": lambda rng: rng.choice((1, 1, 0)),
    "call_timeout_s": lambda rng: rng.choice((60.0, 60.0, 10.0)),
    "compute_s": lambda rng: rng.choice((1.0, 3.0, 6.0)),
    "compute_sigma": lambda rng: rng.choice((0.0, 0.2, 0.5)),
    "stragglers": _sometimes(0.3, 0.02, 0.15),
    "straggle": lambda rng: rng.choice((2.0, 4.0, 8.0)),
    "hiccups": _sometimes(0.3, 0.01, 0.1),
    "latency_s": lambda rng: rng.choice((0.001, 0.02, 0.08)),
    "latency_sigma": lambda rng: rng.choice((0.0, 0.5, 1.0)),
    "jitter_sigma": lambda rng: rng.choice((0.0, 0.1, 0.5)),
    "directory_s": lambda rng: rng.choice((0.03, 0.1, 0.5)),
    "rate_mbps": lambda rng: rng.choice((100.0, 1000.0, 1000.0, 10000.0)),
    "up_ratio": lambda rng: rng.choice((1.0, 1.0, 0.1)),
    "up_sigma": lambda rng: rng.choice((0.0, 0.3)),
    "clock_rate": lambda rng: rng.choice((0.0, 1e-4, 0.01)),
    "undialable": _sometimes(0.4, 0.02, 0.4),
    "loss": _sometimes(0.6, 0.001, 0.05),
    "stale": _sometimes(0.5, 0.02, 0.3),
    "hidden": _sometimes(0.5, 0.01, 0.2),
    "directory_fails": _sometimes(0.4, 0.01, 0.1),
    "cut": _sometimes(0.4, 0.0005, 0.005),
    "refused": _sometimes(0.4, 0.01, 0.05),
    "impatient": _sometimes(0.3, 0.005, 0.02),
    "kills": _sometimes(0.8, 0.05, 0.6),
    "vanish": lambda rng: rng.choice((0.0, 0.3, 1.0)),
    "forget": lambda rng: rng.choice((0.0, 0.5, 1.0)),
    "leave": lambda rng: rng.choice((0.0, 0.2, 0.5)),
    "back_s": lambda rng: rng.choice((0.5, 5.0, 15.0)),
    "trainer_deaths": _sometimes(0.4, 0.02, 0.2),
    "drains": _sometimes(0.4, 0.02, 0.15),
    "drain_s": lambda rng: rng.choice((2.0, 10.0, 30.0)),
    "duplicates": _sometimes(0.4, 0.001, 0.05),
    "held": _sometimes(0.4, 0.001, 0.05),
    "held_s": lambda rng: rng.choice((0.2, 2.0, 8.0)),
    "oneway": _sometimes(0.25, 0.0005, 0.01),
    "partitions": _sometimes(0.3, 0.5, 2.0),
    "partition_s": lambda rng: rng.choice((2.0, 10.0, 40.0)),
    "partition_share": lambda rng: rng.choice((0.05, 0.3, 0.5)),
    "cut_offs": _sometimes(0.25, 0.01, 0.1),
    "freezes": _sometimes(0.4, 0.02, 0.3),
    "freeze_s": lambda rng: rng.choice((1.0, 5.0, 30.0)),
    "liars": _sometimes(0.25, 0.005, 0.05),
    "lies": lambda rng: rng.choice((0.05, 0.2, 0.6)),
}
