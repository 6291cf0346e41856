"""Every kind of fault does what its option says, and costs the others no more than it may. One
rule: a test turns on one kind in a world that is calm otherwise, and looks at what moved."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from moshpitd.core.effects import Effect, Finish, Note, Open, Send
from moshpitd.core.events import (
    Drained,
    Event,
    Found,
    LinkLost,
    PartRefused,
    Received,
    Ticked,
    Undelivered,
)
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Begin, Lineage, Record
from moshpitd.core.outcome import Reason, Status
from moshpitd.sim import faults
from moshpitd.sim.faults import Options, draw
from moshpitd.sim.liars import Habits
from moshpitd.sim.network import Directory
from moshpitd.sim.nodes import Node
from moshpitd.sim.plan import partitions, plan
from moshpitd.sim.world import World

CALM = Options(
    parts=4,
    same_start=True,
    join_spread_s=0.2,
    compute_sigma=0.0,
    compute_jitter=0.1,
)


def settled(options: Options) -> World:
    """A world in which everybody has averaged with everybody at least once."""
    world = World(options)
    trainers = [node.trainers[0] for node in world.nodes]
    world.run_until(lambda: all(trainer.complete for trainer in trainers), bound_s=60.0)
    return world


def completes(world: World, nodes: list[Node], *, size: int, bound_s: float) -> None:
    """Each of `nodes` ends a call in a whole group of `size`."""
    before = {node.index: len(node.trainers[0].outcomes) for node in nodes}

    def whole(node: Node) -> bool:
        new = node.trainers[0].outcomes[before[node.index] :]
        return any(
            o.status is Status.COMPLETE and o.participants == o.group_size == size for o in new
        )

    world.run_until(lambda: all(whole(node) for node in nodes), bound_s=bound_s)


# -- standing still --------------------------------------------------------------------------------


def test_a_frozen_daemon_hears_nothing_and_then_everything_in_order() -> None:
    world = settled(replace(CALM, peers=4))
    victim, told = world.nodes[0], list[tuple[float, Event | Effect]]()
    world.watchers.append(
        lambda node, item: told.append((world.now, item)) if node is victim else None
    )
    frozen_at = world.now
    world.trouble.freeze(victim, 20.0)
    others = [node for node in world.nodes if node is not victim]
    completes(world, others, size=3, bound_s=19.0)
    assert told == []
    waiting = [event for event, _ in victim.backlog]
    assert waiting
    world.run_until(lambda: world.now > frozen_at + 20.0, bound_s=30.0)
    heard = [item for _, item in told if isinstance(item, Event)]
    heard = heard[1:] if isinstance(heard[0], Ticked) else heard  # an overdue timer may come first
    assert heard[: len(waiting)] == waiting
    completes(world, world.nodes, size=4, bound_s=60.0)


def test_only_the_frozen_may_be_late() -> None:
    world = settled(replace(CALM, peers=3, call_timeout_s=8.0))
    victim = world.nodes[1]
    world.run_until(lambda: bool(victim.trainers[0].token), bound_s=20.0)
    world.trouble.freeze(victim, 60.0)
    completes(world, [node for node in world.nodes if node is not victim], size=2, bound_s=60.0)
    completes(world, world.nodes, size=3, bound_s=120.0)


def test_timers_go_on_while_a_daemon_stands_still() -> None:
    world = settled(replace(CALM, peers=2))
    victim = world.nodes[0]
    world.trouble.freeze(victim, 5.0)
    clock = victim.clock
    world.run_until(lambda: victim.thaws_at is None, bound_s=6.0)
    world.run_until(lambda: victim.clock > clock + 5.0, bound_s=2.0)


def test_death_ends_a_freeze() -> None:
    world = settled(replace(CALM, peers=3))
    victim = world.nodes[0]
    world.trouble.freeze(victim, 1000.0)
    world.run_until(lambda: bool(victim.backlog), bound_s=30.0)
    world.life.kill(victim)
    assert victim.thaws_at is None
    assert not victim.backlog
    world.life.start(victim)
    completes(world, world.nodes, size=3, bound_s=60.0)


# -- cut off ---------------------------------------------------------------------------------------


def test_both_sides_of_a_partition_go_on_and_meet_again() -> None:
    options = replace(CALM, seed=3, peers=8, partitions=4.0, partition_s=60.0, faults_s=40.0)
    cut = next(it for it in partitions(options) if 2 <= len(it.apart) <= 6)
    world = settled(replace(CALM, seed=3, peers=8))
    world.links.split(1, cut)
    sides = [
        [node for node in world.nodes if (node.index in cut.apart) is side]
        for side in (False, True)
    ]
    for side in sides:
        completes(world, side, size=len(side), bound_s=90.0)
    world.links.heal(1)
    completes(world, world.nodes, size=8, bound_s=60.0)


def test_nothing_crosses_a_partition() -> None:
    world = settled(replace(CALM, peers=6))
    cut = replace(partitions(replace(CALM, peers=6, faults_s=9.0, partitions=9.0))[0], apart=(0, 1))
    world.links.split(1, cut)
    since, crossed = world.now, []

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, Received) and world.now > since + 1.0:
            sender = world.node(item.sender)
            if (node.index in cut.apart) is not (sender.index in cut.apart):
                crossed.append(item)

    world.watchers.append(watch)
    world.run_until(lambda: world.now > since + 40.0, bound_s=41.0)
    assert not crossed


def test_one_that_is_cut_off_is_alone_and_says_so() -> None:
    world = settled(replace(CALM, peers=4))
    victim = world.nodes[2]
    world.trouble.cut_off(victim, 40.0)
    before = len(victim.trainers[0].outcomes)
    world.run_until(lambda: len(victim.trainers[0].outcomes) > before + 1, bound_s=39.0)
    assert victim.trainers[0].outcomes[-1].status is Status.ALONE
    completes(world, world.nodes, size=4, bound_s=90.0)


def test_a_record_stored_behind_a_partition_is_not_found() -> None:
    options = replace(CALM, peers=3)
    world = World(options)
    record = Record(world.nodes[0].peer_id, 1, b"", 0, world.nodes[0].trainers[0].lineage)
    world.directory.store("k", record, ttl_s=300.0, now=1.0)
    world.directory.store("k", replace(record, peer_id="later"), ttl_s=300.0, now=3.0)
    found = world.directory.find("k", asker="", now=4.0, unseen=lambda peer, at: at > 2.0)
    assert [it.peer_id for it in found] == [record.peer_id]
    assert len(world.directory.find("k", asker="", now=4.0)) == 2


def test_one_direction_may_be_missing() -> None:
    world = World(replace(CALM, peers=40, oneway=0.2, faults_s=99.0))
    pairs = [(i, j) for i in range(40) for j in range(40) if i != j]
    blocked = [pair for pair in pairs if not world.links.reaches(*pair)]
    assert 0.1 < len(blocked) / len(pairs) < 0.3
    assert any((j, i) not in blocked for i, j in blocked)
    told: Counter[str] = Counter()
    world.watchers.append(
        lambda node, item: told.update([item.to] if isinstance(item, Undelivered) else [])
    )
    world.run_until(lambda: told.total() > 9, bound_s=60.0)
    world.links.calm()
    assert all(world.links.reaches(*pair) for pair in pairs)


# -- messages --------------------------------------------------------------------------------------


def test_a_duplicate_arrives_twice_and_changes_nothing() -> None:
    world = World(replace(CALM, peers=6, duplicates=1.0, held_s=0.2, faults_s=30.0))
    sent: Counter[tuple[str, str, int]] = Counter()
    got: Counter[tuple[str, str, int]] = Counter()

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, Send):
            sent[node.peer_id, item.to, id(item.message)] += 1
        elif isinstance(item, Received):
            got[item.sender, node.peer_id, id(item.message)] += 1

    world.watchers.append(watch)
    world.run()
    assert got.total() > 1.8 * sent.total()


def test_a_message_that_is_held_up_is_overtaken() -> None:
    world = World(replace(CALM, peers=6, held=0.2, held_s=1.0, jitter_sigma=0.0, faults_s=30.0))
    order: dict[tuple[str, str], list[int]] = {}
    arrived: dict[tuple[str, str], list[int]] = {}

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, Send):
            order.setdefault((node.peer_id, item.to), []).append(id(item.message))
        elif isinstance(item, Received):
            arrived.setdefault((item.sender, node.peer_id), []).append(id(item.message))

    world.watchers.append(watch)
    world.run()
    assert any(arrived[pair] != order[pair][: len(arrived[pair])] for pair in arrived)


# -- machines --------------------------------------------------------------------------------------


def test_clocks_that_run_apart_change_no_promise() -> None:
    world = World(replace(CALM, peers=6, clock_rate=0.02, goal=4))
    rates = {node.clock_rate for node in world.nodes}
    assert len(rates) == 6
    assert max(rates) - min(rates) > 0.01
    report = world.run()
    assert report.outcomes["complete"] >= 24


def test_uplinks_and_downlinks_differ() -> None:
    world = World(replace(CALM, peers=20, up_ratio=0.1, up_sigma=0.3))
    ratios = [node.plane.up_mbps / node.plane.down_mbps for node in world.nodes]
    assert 0.05 < sorted(ratios)[10] < 0.2
    assert len(set(ratios)) == 20
    same = World(replace(CALM, peers=20))
    downs = [[node.plane.down_mbps for node in it.nodes] for it in (world, same)]
    assert downs[0] == downs[1]


def test_stragglers_and_hiccups_are_slow_and_get_there() -> None:
    options = replace(CALM, peers=20, stragglers=0.2, straggle=5.0, faults_s=5.0)
    world = World(options)
    slow = [node for node in world.nodes if node.trainers[0].compute_s > 2.0 * options.compute_s]
    assert 1 <= len(slow) <= 10
    world.run()
    assert all(len(node.trainers[0].outcomes) >= options.goal for node in slow)
    steps = [World(replace(options, stragglers=0.0, hiccups=chance)) for chance in (0.0, 1.0)]
    for world in steps:
        world.run()
    assert steps[1].now > 3.0 * steps[0].now


def test_on_a_beat_everybody_contributes_at_once() -> None:
    world = World(replace(CALM, peers=6, beat_s=10.0))
    at: list[float] = []
    world.watchers.append(
        lambda node, item: at.append(world.now) if type(item).__name__ == "Contributed" else None
    )
    world.run()
    assert at
    assert all(moment % 10.0 == pytest.approx(0.0, abs=1e-9) for moment in at)


def test_a_notice_lets_a_node_finish_and_begin_nothing_new() -> None:
    world = settled(replace(CALM, peers=4))
    victim = world.nodes[0]
    opened: list[float] = []
    notes: list[str] = []

    def watch(node: Node, item: Event | Effect) -> None:
        if node is victim and isinstance(item, Open):
            opened.append(world.now)
        if node is victim and isinstance(item, Note):
            notes.append(item.what)

    world.watchers.append(watch)
    world.run_until(lambda: bool(opened), bound_s=30.0)  # in the middle of a round
    since, calls = world.now, len(victim.trainers[0].outcomes)
    world.tell(victim, Drained())
    world.run_until(lambda: "drained" in notes, bound_s=world.options.drain_s)
    assert victim.trainers[0].outcomes[calls].status is Status.COMPLETE
    world.run_until(lambda: world.now > since + 30.0, bound_s=31.0)
    assert opened[-1] <= since
    others = world.nodes[1:]
    completes(world, others, size=3, bound_s=30.0)


def test_an_answer_of_the_directory_has_an_end() -> None:
    world = World(replace(CALM, peers=30, directory_answer=8))
    answers: list[int] = []
    world.watchers.append(
        lambda node, item: answers.append(len(item.records)) if isinstance(item, Found) else None
    )
    world.run_until(lambda: len(answers) > 60, bound_s=60.0)
    assert max(answers) == 8


def test_a_goodbye_never_comes_before_what_it_takes_back() -> None:
    """Of a DHT's two records the one with the later expiry holds, whichever came first. A goodbye
    that overtook its store left a tenth of 10,000 peers under the first key for 300 s."""
    directory, mine = Directory(Options(directory_sigma=1.0)), Record("x", 1, b"", 0, Lineage())
    due = [(directory.storing(str(i % 9), "x", 1.0), i % 9, i < 9) for i in range(18)]
    assert any(due[i + 9][0] < due[i][0] + 2e-6 for i in range(9))  # it would have
    for takes_s, key, first in sorted(due):
        now, ttl_s = 1.0 + takes_s, 300.0 if first else 0.0
        directory.store(str(key), mine, ttl_s=ttl_s, now=now)
    assert all(directory.find(str(key), asker="y", now=50.0) == () for key in range(9))


@pytest.mark.parametrize("stale", [0.0, 0.3])
def test_an_answer_that_is_remembered_is_the_one_that_looking_again_gives(stale: float) -> None:
    """Stores, withdrawals, late ones and expiries at random, asked for in between by everybody."""
    rng, now = Random(3), 0.0
    directory = Directory(Options(stale=stale, stale_s=2.0))
    told: list[tuple[Record, ...]] = []
    for number in range(700):
        now += rng.expovariate(2.0)
        key, name = rng.choice("ab"), rng.choice("xyz")
        if rng.random() < 0.3:
            ttl_s = rng.choice((0.0, 3.0, 30.0))
            mine = Record(name, number, b"", 0, Lineage())
            directory.store(key, mine, ttl_s=ttl_s, now=now)
        else:
            answer = directory.find(key, asker=name, now=now)
            forgetful = deepcopy(directory)
            forgetful._whole.clear()
            assert answer == forgetful.find(key, asker=name, now=now)
            assert answer is not None
            told.append(answer)
    assert len(set(told)) > 50


def test_a_line_in_which_nobody_can_be_dialled_keeps_nobody_from_sweeping() -> None:
    """Four in ten are behind a NAT, and lines are of four: a third of the sweeps of those meet a
    line without a reducer. They end with what the other lines gave, and are not left behind."""
    options = replace(
        CALM, seed=2, peers=30, rounds=0, undialable=0.4, compute_s=6.0, compute_sigma=0.2,
        same_start=False, join_spread_s=2.0, goal=3, bound_s=300.0, faults_s=5.0,
        params=replace(CALM.params, max_group=4),
    )  # fmt: skip
    world, kept = World(options), Counter[bool]()

    def watch(node: Node, item: Event | Effect) -> None:
        outcome = item.outcome if isinstance(item, Finish) else None
        if outcome is not None and outcome.reason is Reason.NO_REDUCER:
            assert not node.dialable
            if outcome.loaded_snapshot:
                return  # which the trainer has to take in any case
            assert outcome.accepted is (outcome.status is Status.PARTIAL)
            assert bool(outcome.contributors) is outcome.accepted
            kept[outcome.accepted] += 1

    world.watchers.append(watch)
    world.run()
    assert kept[True] > 5 * kept[False]


# -- liars -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_liar_among_honest_ones_stops_nobody(seed: int) -> None:
    """With one liar of nine the honest ones complete rounds while it lies, and after."""
    world = settled(replace(CALM, seed=seed, peers=9, faults_s=1e9))
    liar, honest = world.nodes[seed % 9], [n for n in world.nodes if n.index != seed % 9]
    liar.liar = Habits(faults.stream(seed, "liar under test"), liar.peer_id, lies=0.5)
    liar.lied = True
    before = {node.index: len(node.trainers[0].outcomes) for node in honest}

    def often(node: Node) -> bool:
        new = node.trainers[0].outcomes[before[node.index] :]
        return sum(len(o.contributors) >= 6 for o in new) >= 2

    world.run_until(lambda: all(often(node) for node in honest), bound_s=300.0)
    for node in honest:
        assert np.isfinite(node.trainers[0].values).all()


def test_what_is_not_a_number_reaches_no_bucket() -> None:
    world = settled(replace(CALM, peers=5, rate_sigma=0.0, faults_s=1e9))
    refused: list[PartRefused] = []
    world.watchers.append(
        lambda node, item: refused.append(item) if isinstance(item, PartRefused) else None
    )
    liar = world.nodes[0]

    class Spoiler:
        def says(self, to: str, message: object) -> list[tuple[str, object]]:
            return [(to, message)]

        def pushes(self, values: np.ndarray) -> np.ndarray:
            return np.full_like(values, np.nan)

    liar.liar = Spoiler()  # type: ignore[assignment]
    world.run_until(lambda: any(r.result for r in refused), bound_s=60.0)
    assert any(not r.result for r in refused)
    ended = [len(node.trainers[0].outcomes) for node in world.nodes]
    world.run_until(
        lambda: all(
            len(node.trainers[0].outcomes) > n for node, n in zip(world.nodes, ended, strict=True)
        ),
        bound_s=90.0,
    )
    for node in world.nodes[1:]:
        assert np.isfinite(node.trainers[0].values).all()
        assert liar.peer_id not in node.trainers[0].outcomes[-1].contributors


def test_a_member_that_a_liar_made_up_is_one_that_nobody_reaches() -> None:
    """It has the address of a real one, which answers to another name; the rest end their round."""
    world = settled(replace(CALM, peers=4, rate_sigma=0.0, faults_s=1e9))
    lost: dict[str, LinkLost] = {}

    def watch(node: Node, item: Event | Effect) -> None:
        if isinstance(item, LinkLost) and item.peer == "ghost":
            lost[node.peer_id] = item

    world.watchers.append(watch)

    class Forger:
        def says(self, to: str, message: object) -> list[tuple[str, object]]:
            if isinstance(message, Begin):
                group = message.group
                ghost = replace(group.members[0], peer_id="ghost")
                forged = replace(group, members=(*group.members, ghost))
                message = Begin(replace(forged, group_id=group_id_of(forged)))
            return [(to, message)]

        def pushes(self, values: np.ndarray) -> np.ndarray:
            return values

    leader = min(world.nodes, key=lambda node: node.peer_id)
    leader.liar = Forger()  # type: ignore[assignment]
    others = [node for node in world.nodes if node is not leader]
    world.run_until(lambda: len(lost) == len(others), bound_s=90.0)
    assert {item.reason for item in lost.values()} == {Reason.UNREACHABLE}
    ended = [len(node.trainers[0].outcomes) for node in others]
    world.run_until(
        lambda: all(
            len(node.trainers[0].outcomes) > n for node, n in zip(others, ended, strict=True)
        ),
        bound_s=90.0,
    )


# -- draws -----------------------------------------------------------------------------------------


def test_an_option_more_shifts_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [draw(seed) for seed in range(5)]
    more = {"max_weight": lambda rng: rng.choice((64,)), **faults.DRAWN}
    monkeypatch.setattr(faults, "DRAWN", more)
    assert [draw(seed) for seed in range(5)] == before


@pytest.mark.parametrize("more", ["freezes", "cut_offs", "drains", "trainer_deaths", "kills"])
def test_a_fault_more_leaves_the_others_where_they_were(more: str) -> None:
    options = replace(CALM, peers=30, faults_s=60.0, kills=0.3, freezes=0.3, cut_offs=0.3)
    changed = replace(options, **{more: 0.9})
    kind = {"freezes": "freeze", "cut_offs": "cut off", "drains": "drain", "kills": "kill"}
    others = [fault for fault in plan(options) if fault.what != kind.get(more, "trainer")]
    assert [it for it in plan(changed) if it.what != kind.get(more, "trainer")] == others
    assert plan(changed) != plan(options)


def test_which_faults_exist_at_all_is_drawn() -> None:
    worlds = [draw(seed) for seed in range(60)]
    for name in ("freezes", "partitions", "liars", "oneway", "duplicates", "drains", "kills"):
        amounts = [getattr(options, name) for options in worlds]
        assert 0 < sum(amount > 0.0 for amount in amounts) < len(amounts), name
    assert all(100 <= options.peers <= 300 for options in worlds)


def test_a_world_ends_its_faults() -> None:
    options = replace(
        CALM, peers=20, faults_s=20.0, freezes=0.5, freeze_s=100.0, partitions=1.0,
        partition_s=1000.0, cut_offs=0.3, liars=0.2, oneway=0.05, duplicates=0.1, held=0.1,
    )  # fmt: skip
    world = World(options)
    finished: list[float] = []
    world.watchers.append(
        lambda node, item: finished.append(world.now) if isinstance(item, Finish) else None
    )
    world.run()
    assert finished[-1] > options.faults_s
    assert not any(node.liar or node.thaws_at for node in world.nodes)
    assert not world.links.parted
