"""Exchanges that follow one another without matchmaking: one hop and the words about it, and the
mixing stays what it is when peers die, come late, are slow, and messages vanish."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moshpitd.core.chain import successor
from moshpitd.core.events import LinkLost, Received
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Counts, Group, Invite, Join, Letter, NotMember
from moshpitd.core.neighbours import Neighbours, rows_of
from moshpitd.core.outcome import Reason, Status
from tests.kit.chains import Chains

UNDIRECTED = ("ring", "torus", "complete", "pairs", "random-matching")
DIRECTED = ("static-exponential", "one-peer-exponential")


def asked(world: Chains) -> dict[str, int]:
    return {name: node.asked for name, node in world.nodes.items()}


def shares(world: Chains) -> Counter[tuple[str, int, str, int]]:
    """(taker, its step, giver, the giver's step) -> how often that share was taken."""
    return Counter(
        (name, step, one.peer_id, one.sequence)
        for name, node in world.nodes.items()
        for step, outcome in node.outcomes.items()
        if outcome.row is not None
        for one in outcome.row.heard
    )


def mixed_fairly(world: Chains, *, directed: bool, but: tuple[str, ...] = ()) -> None:
    """Of all exchanges so far that ended at both ends: an edge counts at both or at none, a share
    is at its giver or at its taker. `but`: those that died, whose last step nobody knows."""
    taken = shares(world)
    assert max(taken.values(), default=1) == 1
    by_giver: Counter[tuple[str, int]] = Counter()
    for name, node in world.nodes.items():
        for step, outcome in node.outcomes.items():
            row = outcome.row
            if row is None:
                assert outcome.status in (Status.ALONE, Status.FAILED)
                continue
            for one in row.heard:
                by_giver[one.peer_id, one.sequence] += 1
                giver = world.nodes[one.peer_id]
                if one.peer_id in but or one.sequence not in giver.outcomes:
                    continue
                assert giver.outcomes[one.sequence].group_id == outcome.group_id
                if not directed:
                    assert taken[one.peer_id, one.sequence, name, step], (name, step, one)
            if not directed:
                total = row.own_share + sum(one.share for one in row.heard)
                assert total == pytest.approx(1.0), (name, step)
    if directed:
        for name, node in world.nodes.items():
            for step, outcome in node.outcomes.items():
                row, group = outcome.row, outcome.group_id
                others = [
                    one.outcomes[s].row
                    for other, one in world.nodes.items()
                    if other != name
                    for s in one.outcomes
                    if one.outcomes[s].group_id == group
                ]
                members = [one for one in world.nodes if one != name]
                ended = sum(1 for one in others if one is not None)
                if name in but or row is None or ended < len(members) or set(but) & set(members):
                    continue
                given = sum(
                    one.share
                    for other in others
                    if other is not None
                    for one in other.heard
                    if (one.peer_id, one.sequence) == (name, step)
                )
                assert row.own_share + given == pytest.approx(1.0), (name, step)


def nobody_waits_for_a_window(world: Chains, since: float) -> None:
    for name, node in world.nodes.items():
        for step, ended in node.ended.items():
            took = ended - node.began[step]
            assert ended < since or took < world.params.window_s, (name, step, took)


@pytest.mark.parametrize("topology", [*UNDIRECTED, *DIRECTED])
@pytest.mark.parametrize("peers", [2, 3, 8])
def test_undisturbed_no_step_but_the_first_asks_for_a_group(topology: str, peers: int) -> None:
    world = Chains(peers, topology)
    world.settle(3)
    before = asked(world)
    world.settle(20)
    assert asked(world) == before
    for node in world.nodes.values():
        last = [node.outcomes[step] for step in sorted(node.outcomes)[-15:]]
        assert {one.status for one in last} == {Status.COMPLETE}
    mixed_fairly(world, directed=topology in DIRECTED)


@pytest.mark.parametrize(
    ("topology", "hops"), [("ring", 2), ("pairs", 2), ("static-exponential", 3)]
)
def test_it_takes_the_message_and_the_words_about_it(topology: str, hops: int) -> None:
    """On directed edges the giver answers the taker. All begin at the same instant."""
    world = Chains(8, topology)
    for node in world.nodes.values():
        node.compute_s = lambda: -world.now % 1.0 or 1.0
    world.settle(8)
    for node in world.nodes.values():
        took = {step: node.ended[step] - node.began[step] for step in node.ended}
        last = [took[step] for step in sorted(took)[-5:]]
        assert max(last) <= hops * world.delay_s + 0.005, took


def test_large_messages_look_for_a_group_each_time() -> None:
    world = Chains(3, "ring", parts=(1 << 20,) * 3)
    world.settle(3)
    before = asked(world)
    world.settle(5)
    assert all(asked(world)[name] >= before[name] + 5 for name in list(world.nodes)[1:])
    assert not [message for _, _, message in world.said if isinstance(message, NotMember)]


@pytest.mark.parametrize("topology", [*UNDIRECTED, *DIRECTED])
def test_one_that_comes_late_is_met_and_then_nobody_asks_again(topology: str) -> None:
    world = Chains(4, topology)
    world.settle(5)
    late, at = world.add(), world.now
    world.settle(10)
    nobody_waits_for_a_window(world, at)
    before = asked(world)
    world.settle(10)
    assert asked(world) == before
    met = {one for (_, _, one, _) in shares(world)}
    assert late in met
    mixed_fairly(world, directed=topology in DIRECTED)


@pytest.mark.parametrize("topology", [*UNDIRECTED, *DIRECTED])
@pytest.mark.parametrize("seed", range(2))
def test_one_that_dies_costs_its_edges(topology: str, seed: int) -> None:
    world = Chains(5, topology, seed=seed, jitter=1.0)
    world.settle(5)
    victim = world.rng.choice(list(world.nodes))
    world.run(world.now + world.rng.uniform(0.0, 0.2))
    world.kill(victim)
    at = world.now
    world.settle(15)
    nobody_waits_for_a_window(world, at)
    before = asked(world)
    world.settle(5)
    assert asked(world) == before, "the living follow on again"
    living = [name for name in world.nodes if name != victim]
    assert all(world.nodes[name].outcomes[max(world.nodes[name].outcomes)].row for name in living)
    mixed_fairly(world, directed=topology in DIRECTED, but=(victim,))


@pytest.mark.parametrize("topology", [*UNDIRECTED, *DIRECTED])
@pytest.mark.parametrize("seed", range(2))
def test_lost_late_and_repeated_messages_change_no_share(topology: str, seed: int) -> None:
    world = Chains(5, topology, seed=seed, jitter=3.0, loss=0.05, twice=0.2)
    world.settle(12, within_s=600.0)
    world.loss = world.twice = 0.0
    world.settle(8)
    before = asked(world)
    world.settle(4)
    assert asked(world) == before
    mixed_fairly(world, directed=topology in DIRECTED)


@pytest.mark.parametrize("topology", ["ring", "one-peer-exponential"])
@pytest.mark.parametrize("seed", range(4))
def test_links_that_break_and_come_back_change_no_share(topology: str, seed: int) -> None:
    world = Chains(5, topology, seed=seed, jitter=1.0)
    world.settle(3)
    for _ in range(12):
        world.run(world.now + world.rng.uniform(0.0, 0.3))
        world.cut(*world.rng.sample(list(world.nodes), 2))
    world.settle(8)
    before = asked(world)
    world.settle(4)
    assert asked(world) == before
    mixed_fairly(world, directed=topology in DIRECTED)


def test_a_slow_trainer_is_waited_for_as_long_as_matchmaking_would() -> None:
    world = Chains(4, "ring")
    world.settle(4)
    slow = world.nodes["peer02"]
    slow.compute_s = lambda: 1.0  # less than the window: everybody waits
    world.settle(3)
    before = asked(world)
    world.settle(3)
    assert asked(world) == before
    slow.compute_s = lambda: 30.0
    step = max(world.nodes["peer01"].outcomes)
    world.run(world.now + 15.0)
    others = [world.nodes[name] for name in ("peer00", "peer01", "peer03")]
    assert all(max(node.outcomes) > step + 20 for node in others), "the others go on"
    for node in others:
        waited = max(node.ended[one] - node.began[one] for one in node.ended if one > step)
        assert waited < 2 * world.params.window_s + 1.0
    slow.compute_s = lambda: 0.06
    world.run(world.now + 20.0)
    world.settle(0)
    mixed_fairly(world, directed=False)
    last = others[0].outcomes[max(others[0].outcomes)]
    assert last.group_size == 4, "it is met again"


def test_who_says_that_it_leaves_ends_the_chain_for_all() -> None:
    world = Chains(6, "ring")
    world.settle(4)
    world.leave("peer03")
    world.nodes["peer03"].alive = False
    world.settle(6)
    before = asked(world)
    world.settle(6)
    assert asked(world) == before
    assert world.nodes["peer00"].outcomes[max(world.nodes["peer00"].outcomes)].group_size == 5
    mixed_fairly(world, directed=False, but=("peer03",))


# -- one peer at a time


def between(topology: str = "ring") -> tuple[Chains, str, Group]:
    """A world in which one peer is between two exchanges, and the group that is to follow there."""
    world = Chains(4, topology)
    world.settle(4)
    name = "peer01"
    node = world.nodes[name]
    while node.open or node.peer.conductor.chain.next is None:
        world.run(world.now + 0.001)
    world.said.clear()
    return world, name, node.peer.conductor.chain.next


def refusals(world: Chains, sender: str, group: Group) -> set[str]:
    """To whom it said that it is not in that group."""
    no = NotMember(group.group_id, sender)
    return {to for origin, to, message in world.said if origin == sender and message == no}


def test_a_group_follows_by_what_all_members_know() -> None:
    world, name, group = between()
    others = [node.peer.conductor.chain.next for one, node in world.nodes.items() if one != name]
    world.run(world.now + 0.1)
    opened = [node.opened for node in world.nodes.values()]
    assert all(group.group_id in one for one in opened), others
    after = successor(group)
    assert (after.members, after.round) == (group.members, group.round + 1)
    assert after.group_id == group_id_of(after) != group.group_id
    assert rows_of(after, "pairs") != rows_of(group, "pairs")


def test_who_hears_a_no_does_not_open_the_group_and_says_so_when_asked() -> None:
    world, name, group = between()
    world.tell(name, Received("peer03", NotMember(group.group_id, "peer03")))
    assert refusals(world, name, group) == set()  # who said it has told everybody
    world.tell(name, Received("peer00", Letter(group.group_id, 9, 1.0, False)))
    assert refusals(world, name, group) == {"peer00"}
    world.run(world.now + 3.0)
    assert group.group_id not in world.nodes[name].opened
    mixed_fairly(world, directed=False)


def test_who_hears_a_no_tells_those_who_have_begun_already() -> None:
    world, name, group = between()
    world.tell(name, Received("peer00", Letter(group.group_id, 9, 1.0, False)))
    assert refusals(world, name, group) == set()
    world.tell(name, Received("peer03", NotMember(group.group_id, "peer03")))
    assert refusals(world, name, group) == {"peer00"}


def test_a_no_that_comes_before_the_last_exchange_has_ended_counts() -> None:
    world, name, _ = between()
    node = world.nodes[name]
    while not node.open:
        world.run(world.now + 0.001)
    (opened,) = node.open.values()
    follows = successor(opened.group)
    world.tell(name, Received("peer03", NotMember(follows.group_id, "peer03")))
    world.run(world.now + 3.0)
    assert opened.group.group_id in node.over
    assert follows.group_id not in node.opened
    assert refusals(world, name, follows) == set(world.nodes) - {name}
    mixed_fairly(world, directed=False)


def test_nobody_says_no_for_another_and_no_stranger_for_a_group() -> None:
    world, name, group = between()
    world.tell(name, Received("peer03", NotMember(group.group_id, "peer00")))
    world.tell(name, Received("stranger", NotMember(group.group_id, "stranger")))
    assert world.nodes[name].peer.conductor.chain.next == group


def test_who_was_waited_for_in_vain_looks_for_a_group() -> None:
    world, name, group = between()
    world.tell(name, Received("peer00", Counts(group.group_id, False)))
    assert refusals(world, name, group) == set(world.nodes) - {name}
    world.run(world.now + 3.0)
    assert group.group_id not in world.nodes[name].opened


def test_who_wants_to_meet_us_ends_the_chain_and_a_late_join_does_not() -> None:
    world, name, group = between()
    peer = world.nodes[name].peer
    known = world.nodes["peer03"].peer.record
    attempt = next(one.attempt for one in group.members if one.peer_id == "peer03")
    late = Join(group.key, attempt, known, 1.0, False)
    world.tell(name, Received("peer03", late))
    assert peer.conductor.chain.next == group
    world.tell(name, Received("peer03", replace(late, attempt=attempt + 1)))
    assert peer.conductor.chain.next is None
    assert refusals(world, name, group) == set(world.nodes) - {name}

    world, name, group = between()
    new = replace(known, peer_id="stranger")
    world.tell(name, Received("stranger", Invite(group.key, 0, new, 1.0)))
    assert refusals(world, name, group) == set(world.nodes) - {name}


def test_a_member_that_looks_for_a_group_is_not_waited_for() -> None:
    """Its word that it is out was lost; its Join comes."""
    world, name, group = between()
    attempt = next(one.attempt for one in group.members if one.peer_id == "peer02")
    known = world.nodes["peer02"].peer.record
    world.nodes["peer02"].alive = False  # says nothing more
    while group.group_id not in world.nodes[name].open:
        world.run(world.now + 0.001)
    world.tell(name, Received("peer02", Join(group.key, attempt + 1, known, 1.0, False)))
    current = world.nodes[name].peer.conductor.work
    assert current is not None
    assert isinstance(current.round, Neighbours)
    assert current.round.lines["peer02"].dropped is Reason.NOT_MEMBER


def test_a_lost_link_ends_the_chain_where_it_was() -> None:
    world, name, group = between()
    world.tell(name, LinkLost("stranger"))
    assert world.nodes[name].peer.conductor.chain.next == group
    world.tell(name, LinkLost("peer03"))
    assert refusals(world, name, group) == set(world.nodes) - {name}


def test_an_edge_that_did_not_count_is_a_doubt() -> None:
    """The link broke and both ends live: who they are is to be asked again."""
    world, name, group = between()
    while group.group_id not in world.nodes[name].open:
        world.run(world.now + 0.001)
    world.tell(name, LinkLost("peer02"))
    world.run(world.now + 1.0)
    last = next(
        one for one in world.nodes[name].outcomes.values() if one.group_id == group.group_id
    )
    assert last.excluded == (("peer02", Reason.LINK_LOST),)
    assert refusals(world, name, successor(group)) == set(world.nodes) - {name}
    mixed_fairly(world, directed=False)


def test_a_giver_hears_that_its_taker_is_there() -> None:
    """Or it would take a large message that is still on its way for one that nobody takes."""
    world, name, group = between("static-exponential")
    world.run(world.now + 0.1)
    index = [one.peer_id for one in group.members].index(name)
    rows = rows_of(group, "static-exponential")
    others = {one for one in rows[index] if one != index}
    others |= {target for target, row in enumerate(rows) if index in row and target != index}
    told = {
        to
        for origin, to, message in world.said
        if origin == name and isinstance(message, Letter) and message.group_id == group.group_id
    }
    assert told == {group.members[one].peer_id for one in others}
    assert len(told) == 3, "one of them only gives"
