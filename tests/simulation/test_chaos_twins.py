"""The chaos suite's cases in the deterministic world, small: the same situation, the same outcome,
and every check of the world after every event. What only a kernel can do (a full tmpfs, sockets and
files that a kill -9 leaves behind) has no twin.

One rule: a case begins at a named event, such as an Open, not at a time that happens to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from moshpitd.core.effects import Effect, LoadSnapshot, Open, Send
from moshpitd.core.events import Drained, Event
from moshpitd.core.messages import Join
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.sim.faults import Options
from moshpitd.sim.nodes import Node, Trainer
from moshpitd.sim.plan import Partition
from moshpitd.sim.world import World

CALM = Options(parts=8, same_start=True, join_spread_s=0.2, compute_sigma=0.0, compute_jitter=0.1)
FOREVER_S = 1e9
SILENT_S = 25.0
"""Of a silence that is to be judged by the Peers: after 30 s the world's TCP gives a link up, and
says so."""
ROUND_S = 8.0
"""A call of survivors, beside its window: a silence of 1.2 s, listened for twice a second, and
takeovers; below `part_timeout_s`, the fixed bound of 10 s."""


def settled(options: Options) -> World:
    """A world in which everybody has averaged with everybody at least once."""
    world = World(replace(options, faults_s=FOREVER_S))
    trainers = [node.trainers[0] for node in world.nodes]
    world.run_until(lambda: all(trainer.complete for trainer in trainers), bound_s=60.0)
    return world


def whole(world: World, nodes: Sequence[Node], *, size: int, bound_s: float) -> None:
    """Each of `nodes` ends a call in a whole group of `size`."""
    before = {node.index: len(node.trainers[0].outcomes) for node in nodes}

    def is_whole(o: Outcome) -> bool:
        return o.status is Status.COMPLETE and o.participants == o.group_size == size

    world.run_until(
        lambda: all(
            any(map(is_whole, node.trainers[0].outcomes[before[node.index] :])) for node in nodes
        ),
        bound_s=bound_s,
    )


def at_effect(world: World, nodes: Sequence[Node], wanted: Callable[[Effect], bool]) -> Effect:
    """Run until one of these nodes asks for something like that."""
    seen: list[Effect] = []

    def watch(who: Node, item: Event | Effect) -> None:
        if who in nodes and not isinstance(item, Event) and wanted(item):
            seen.append(item)

    world.watchers.append(watch)
    world.run_until(lambda: bool(seen), bound_s=60.0)
    world.watchers.remove(watch)
    return seen[0]


def opens(effect: Effect) -> bool:
    return isinstance(effect, Open)


def next_outcomes(world: World, nodes: Sequence[Node], *, bound_s: float) -> dict[int, Outcome]:
    """What the calls come to that are open now."""
    assert all(node.trainers[0].token for node in nodes)
    before = {node.index: len(node.trainers[0].outcomes) for node in nodes}
    world.run_until(
        lambda: all(len(node.trainers[0].outcomes) > before[node.index] for node in nodes),
        bound_s=bound_s,
    )
    return {node.index: node.trainers[0].outcomes[before[node.index]] for node in nodes}


def of_survivors(outcomes: dict[int, Outcome], *, least: int) -> None:
    """Every part has a result, and at least so many are in all of them."""
    for index, outcome in outcomes.items():
        assert outcome.accepted, (index, outcome)
        assert outcome.parts_without_result == (), (index, outcome)
        assert outcome.participants >= least, (index, outcome)


def distortion(world: World) -> float:
    held = np.stack([node.trainers[0].values for node in world.nodes])
    return float(((held - held.mean(0)) ** 2).sum(1).mean())


# -- killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_daemons_killed_at_random_moments(seed: int) -> None:
    options = replace(CALM, seed=seed, peers=4, kills=3.0, back_s=4.0, faults_s=90.0, goal=3)
    world = World(options)
    report = world.run()
    assert report.outcomes.get("complete", 0) >= 4 * options.goal
    assert report.group_sizes.get(4, 0) >= 4 * options.goal
    assert not any(outcome.startswith("failed") for outcome in report.outcomes)


@pytest.mark.parametrize("role", ["leader", "reducer", "sender"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_before_or_after_begin(seed: int, begun: bool, role: str) -> None:
    """S21. Whoever has a hundredth of the others' link only sends."""
    calm = replace(CALM, seed=seed, peers=4, rate_sigma=0.0, part_bytes=1 << 17)
    world = World(replace(calm, faults_s=FOREVER_S))
    slow = max(world.nodes, key=lambda node: node.peer_id)
    slow.plane.up_mbps = slow.plane.down_mbps = 10.0
    slow.trainers[0].compute_s *= 1.5  # whoever comes last does not lead
    trainers = [node.trainers[0] for node in world.nodes]
    world.run_until(lambda: all(trainer.complete for trainer in trainers), bound_s=90.0)
    if begun:
        opening = at_effect(world, world.nodes, opens)
        assert isinstance(opening, Open)
        leader, names = opening.group.leader, [one.peer_id for one in opening.group.members]
        assert len(names) == 4
        assert names.index(slow.peer_id) not in opening.reducers
        assert set(opening.reducers) == set(range(4)) - {names.index(slow.peer_id)}
    else:
        joining = at_effect(
            world, world.nodes, lambda it: isinstance(it, Send) and isinstance(it.message, Join)
        )
        assert isinstance(joining, Send)
        leader = joining.to
    first = world.node(leader)
    assert first is not slow
    other = next(node for node in world.nodes if node is not first and node is not slow)
    victim = {"leader": first, "reducer": other, "sender": slow}[role]
    others = [node for node in world.nodes if node is not victim]
    world.life.kill(victim)
    whole(world, others, size=3, bound_s=10.0 + ROUND_S)
    world.life.start(victim)
    whole(world, world.nodes, size=4, bound_s=60.0)


@pytest.mark.parametrize("seed", range(3))
def test_one_daemon_killed_twenty_times(seed: int) -> None:
    """S7: the others go on without it, and take it back each time."""
    world = settled(replace(CALM, seed=seed, peers=3))
    victim, others = world.nodes[0], world.nodes[1:]
    moments = np.random.default_rng(seed)
    for _ in range(20):
        until = world.now + moments.uniform(0.0, 3.0)
        world.later(until - world.now, lambda: None)
        world.run_until(lambda until=until: world.now >= until, bound_s=10.0)
        world.life.kill(victim, silent=bool(moments.integers(2)))
        world.life.start(victim)
    whole(world, others, size=3, bound_s=60.0)
    whole(world, world.nodes, size=3, bound_s=60.0)


def test_all_daemons_restarted_one_after_another() -> None:
    """A notice, the end, and back again; the others are never held up."""
    world = settled(replace(CALM, peers=4))
    for node in world.nodes:
        others = [other for other in world.nodes if other is not node]
        before = {other.index: len(other.trainers[0].outcomes) for other in others}
        world.tell(node, Drained())
        whole(world, others, size=3, bound_s=30.0)
        for other in others:
            for outcome in other.trainers[0].outcomes[before[other.index] :]:
                assert outcome.status is Status.COMPLETE, outcome
        world.life.kill(node)
        world.life.start(node)
        whole(world, world.nodes, size=4, bound_s=60.0)


# -- stopped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [4, 64])
@pytest.mark.parametrize("frozen_s", [SILENT_S, 60.0])
def test_one_is_stopped_in_a_round(frozen_s: float, lag: int) -> None:
    """The survivors of its round are through at the adaptive deadline; the woken one takes a
    snapshot if it is further behind than max_version_lag, and is in the next groups."""
    world = settled(replace(CALM, peers=4, params=replace(Params(), max_version_lag=lag)))
    victim, others = world.nodes[1], [node for node in world.nodes if node.index != 1]
    loaded: list[float] = []
    world.watchers.append(
        lambda node, item: (
            loaded.append(world.now) if node is victim and isinstance(item, LoadSnapshot) else None
        )
    )
    at_effect(world, [victim], opens)
    frozen_at = world.now
    world.trouble.freeze(victim, frozen_s)
    of_survivors(next_outcomes(world, others, bound_s=ROUND_S), least=3)
    whole(world, others, size=3, bound_s=30.0)
    world.run_until(lambda: world.now > frozen_at + frozen_s, bound_s=frozen_s + 1.0)
    whole(world, world.nodes, size=4, bound_s=60.0)
    assert bool(loaded) == (lag == 4)
    versions = {node.trainers[0].version for node in world.nodes}
    assert max(versions) - min(versions) <= 1


# -- silent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_one_whose_links_fall_silent(seed: int) -> None:
    world = settled(replace(CALM, seed=seed, peers=4, loss_silent=1.0))
    victim = world.nodes[seed % 4]
    others = [node for node in world.nodes if node is not victim]
    at_effect(world, [victim], opens)
    world.trouble.cut_off(victim, SILENT_S)
    of_survivors(next_outcomes(world, others, bound_s=ROUND_S), least=3)
    whole(world, others, size=3, bound_s=30.0)
    whole(world, world.nodes, size=4, bound_s=120.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [4, 6])
def test_two_halves_go_on_and_meet_again(count: int, seed: int) -> None:
    world = settled(replace(CALM, seed=seed, peers=count, loss_silent=1.0, step_size=0.0))
    for node in world.nodes:
        node.trainers[0].values[:] = float(2**node.index)
    halves = [[n for n in world.nodes if n.index % 2 == side] for side in (0, 1)]
    at_effect(world, world.nodes[:1], opens)
    cut = Partition(world.now, world.now + SILENT_S, tuple(n.index for n in halves[0]))
    world.links.split(1, cut)
    for half in halves:
        whole(world, half, size=count // 2, bound_s=SILENT_S)
        means = {node.trainers[0].values.tobytes() for node in half}
        assert len(means) == 1  # each side agrees with itself
    apart = distortion(world)
    world.links.heal(1)
    whole(world, world.nodes, size=count, bound_s=120.0)
    assert distortion(world) < 1e-18 * max(1.0, apart)


# -- uneven ----------------------------------------------------------------------------------------


PACED_ROUNDS = 2
"""A slow link is believed when most reducers have met it twice in a row."""


@pytest.mark.parametrize("seed", range(3))
def test_one_of_eight_is_on_a_link_ten_times_slower(seed: int) -> None:
    """S4: it reduces nothing, and once it is known it paces nobody: the others' rounds end when
    theirs would without it, with what it can bring by then inside and the rest for a reason."""
    options = replace(
        CALM, seed=seed, peers=8, parts=64, part_bytes=1 << 17, rate_mbps=100.0, rate_sigma=0.0,
        parts_overtake=True,
    )  # fmt: skip
    alike = settled(options)
    usual_s = exchange_s(alike.nodes[0].trainers[0].outcomes[-1])
    own_s = 8e-6 * options.parts * options.part_bytes / 10.0
    assert usual_s < own_s / 4
    world = World(replace(options, faults_s=FOREVER_S))
    slow = world.nodes[5]
    slow.plane.up_mbps = slow.plane.down_mbps = 10.0
    others = [node.trainers[0] for node in world.nodes if node is not slow]
    opened: list[Open] = []
    world.watchers.append(
        lambda node, item: opened.append(item) if isinstance(item, Open) else None
    )

    def rounds(trainer: Trainer) -> list[Outcome]:
        """Of this trainer, those with the slow one in the group."""
        return [o for o in trainer.outcomes if o.group_size == 8]

    world.run_until(lambda: all(len(rounds(t)) >= PACED_ROUNDS + 4 for t in others), bound_s=300.0)
    for trainer in others:
        later = rounds(trainer)[PACED_ROUNDS:]
        assert max(map(exchange_s, later)) < 1.5 * usual_s
        for outcome in later:
            assert outcome.accepted
            assert outcome.parts_without_result == ()
            assert outcome.excluded == ((slow.peer_id, Reason.SLOW),)
            assert slow.peer_id not in outcome.contributors
            assert outcome.participants == 7
    # Its own rounds end with every result, and it does not hold up the others' next ones.
    mine = slow.trainers[0].outcomes
    assert len(mine) >= PACED_ROUNDS + 3
    assert all(not o.parts_without_result and o.accepted for o in mine)
    assert len(others[0].outcomes) > len(mine)
    for one in opened:
        names = [member.peer_id for member in one.group.members]
        if slow.peer_id in names:
            assert names.index(slow.peer_id) not in one.reducers


def exchange_s(outcome: Outcome) -> float:
    return sum(s for phase, s in outcome.seconds if phase in ("exchange", "parity"))


@pytest.mark.parametrize("seed", range(6))
def test_a_network_that_loses_and_is_slow(seed: int) -> None:
    """Every twentieth message is lost, and a part takes a tenth of a second."""
    options = replace(CALM, seed=seed, peers=4, loss=0.05, rate_mbps=84.0, faults_s=60.0)
    report = World(options).run()
    assert report.outcomes.get("complete", 0) >= 8
    assert not any(outcome.startswith("failed") for outcome in report.outcomes)
