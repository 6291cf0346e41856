"""What goes wrong in a world and is known beforehand: who dies, freezes, drains or is cut off, and
when. One rule: every fault has a stream of its own, and every draw is made whether it is used or
not, so that an option changes what it names and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from moshpitd.sim.faults import Options, stream


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong on one node at one time.

    `what`: "kill" (the daemon), "trainer" (one trainer), "drain" (a notice, then the end), "freeze"
    (the daemon stands still), "cut off" (nobody reaches it). `back_after_s`: how long it lasts;
    None: for ever. `forgets`: the trainers' parameters are lost too.
    """

    at: float
    node: int
    what: str
    silent: bool = False
    back_after_s: float | None = None
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """From `at` to `until` (world time) the nodes `apart` and the rest are two worlds."""

    at: float
    until: float
    apart: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Population:
    """Who starts when, of those that are not there from the start, and who leaves."""

    nodes: int  # all that ever live
    births: tuple[tuple[float, int], ...] = ()  # (when, node)
    leavers: tuple[Fault, ...] = ()


def population(options: Options) -> Population:
    """Births and departures that are wanted; deaths by fault come on top and are not made up for.

    Nodes are numbered in order of their birth's reason, so that more joins leave everybody else
    who it was.
    """
    births: list[tuple[float, int]] = []
    leavers: list[Fault] = []
    nodes = options.peers
    here = list(range(options.peers))
    for number, resize in enumerate(options.resizes):
        rng = stream(options.seed, "resize", number)
        while len(here) < resize.peers:
            births.append((rng.uniform(resize.at_s, resize.at_s + resize.over_s), nodes))
            here.append(nodes)
            nodes += 1
        rng = stream(options.seed, "resize", "leave", number)
        for node in rng.sample(here, len(here) - resize.peers):
            at, noticed = rng.uniform(resize.at_s, resize.at_s + resize.over_s), rng.random() < 0.5
            leavers.append(Fault(at, node, "drain" if noticed else "kill"))
            here.remove(node)
    rng = stream(options.seed, "more joins")
    for _ in range(round(options.joins * options.peers)):
        births.append((rng.uniform(0.0, options.faults_s), nodes))
        nodes += 1
    return Population(nodes, tuple(births), tuple(leavers))


def plan(options: Options) -> list[Fault]:
    """Every fault of phase one that is known beforehand, in order of time."""
    everybody = population(options)
    faults: list[Fault] = list(everybody.leavers)
    for node in range(everybody.nodes):
        faults += _kills(options, node)
        rng = stream(options.seed, "fault", "trainer", node)
        if rng.random() < options.trainer_deaths:
            at, back = (
                rng.uniform(0.0, options.faults_s),
                rng.lognormvariate(0.0, 0.5) * options.back_s,
            )
            faults.append(
                Fault(at, node, "trainer", back_after_s=back, forgets=rng.random() < options.forget)
            )
        rng = stream(options.seed, "fault", "drain", node)
        if rng.random() < options.drains:
            faults.append(Fault(rng.uniform(0.0, options.faults_s), node, "drain"))
        for what, expected, length in (
            ("freeze", options.freezes, options.freeze_s),
            ("cut off", options.cut_offs, options.partition_s),
        ):
            rng = stream(options.seed, "fault", what, node)
            for at, lasts in _spells(rng, expected, length, options.faults_s):
                faults.append(Fault(at, node, what, back_after_s=lasts))
    return sorted(faults, key=lambda fault: (fault.at, fault.node, fault.what))


def partitions(options: Options) -> list[Partition]:
    """Every partition of phase one. Who is on which side depends on seed and number alone."""
    rng = stream(options.seed, "fault", "partition")
    spells = _spells(rng, options.partitions, options.partition_s, options.faults_s)
    found = []
    for number, (at, lasts) in enumerate(spells):
        sides = stream(options.seed, "fault", "sides", number)
        apart = [sides.random() < options.partition_share for _ in range(options.peers)]
        found.append(Partition(at, at + lasts, tuple(i for i, side in enumerate(apart) if side)))
    return found


def _spells(
    rng: Random, expected: float, length: float, span: float
) -> Iterator[tuple[float, float]]:
    """(start, duration) at exponential intervals, `expected` of them in `span` on average."""
    at = 0.0
    while expected > 0.0:
        at += rng.expovariate(expected / span)
        lasts = rng.lognormvariate(0.0, 0.5) * length
        if at >= span:
            return
        yield at, lasts


def _kills(options: Options, node: int) -> list[Fault]:
    """Deaths at exponential intervals. Every draw is made whether it is used or not, so that an
    option that changes one property of the deaths leaves the others as they were."""
    rng = stream(options.seed, "fault", "kill", node)
    found: list[Fault] = []
    at = 0.0
    while options.kills > 0:
        at += rng.expovariate(options.kills / options.faults_s)
        silent, forgets, leaves = (rng.random() for _ in range(3))
        back = rng.lognormvariate(0.0, 0.5) * options.back_s
        if at >= options.faults_s:
            break
        gone = leaves < options.leave
        found.append(
            Fault(
                at, node, "kill", silent=silent < options.vanish,
                back_after_s=None if gone else back, forgets=forgets < options.forget,
            )
        )  # fmt: skip
        if gone:
            break
    return found
