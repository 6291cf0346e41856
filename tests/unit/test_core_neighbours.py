"""The exchange with neighbours against its dumb twin, the matrix of the schedule itself: in any
order of messages, with deaths at any moment and with lost messages."""

from __future__ import annotations

import pytest

from moshpitd.core.effects import Note, Send
from moshpitd.core.events import (
    Contributed,
    EdgeArrived,
    EdgeRefused,
    EdgesCoded,
    LinkLost,
    Listened,
    Mix,
    PartArrived,
    Received,
)
from moshpitd.core.exchanges import exchange_of
from moshpitd.core.messages import Counts, Letter, NotMember
from moshpitd.core.mixing import EdgeMixing
from moshpitd.core.neighbours import REMEMBERED, Neighbours, Verdicts, most_neighbours, rows_of
from moshpitd.core.outcome import Outcome, Reason, Row, Status
from moshpitd.core.peer import EARLY, Peer
from moshpitd.core.topologies import NAMES, schedule_for
from tests.kit.edges import PARTS, TIMEOUT_S, World, group_of

UNDIRECTED = ("ring", "torus", "complete", "pairs", "random-matching", "random-groups")
DIRECTED = ("static-exponential", "one-peer-exponential")
SEEDS = range(60)


def dense(world: World, rows: dict[str, Row]) -> list[list[float]]:
    """W as it came to be: what each row says that it took of each peer."""
    index = {name: i for i, name in enumerate(world.names)}
    found = [[0.0] * world.peers for _ in world.names]
    for name, row in rows.items():
        found[index[name]][index[name]] = row.own_share
        for heard in row.heard:
            found[index[name]][index[heard.peer_id]] += heard.share
    return found


@pytest.mark.parametrize("topology", NAMES)
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7, 8])
def test_undisturbed_it_is_the_matrix_of_the_schedule(topology: str, peers: int) -> None:
    for t in range(3):
        world = World(peers, topology, t, seed=t)
        world.run()
        rows = world.rows()
        assert len(rows) == peers
        expected = rows_of(world.group, topology)
        for index, line in enumerate(dense(world, rows)):
            for source, share in enumerate(line):
                assert share == pytest.approx(expected[index].get(source, 0.0), abs=1e-12)
        assert all(m.finished is not None for m in world.machines.values())
        assert all(m.finished.status is Status.COMPLETE for m in world.machines.values())  # type: ignore[union-attr]
        for row in rows.values():
            assert row.unheard == ()
            for heard in row.heard:
                of = world.names.index(heard.peer_id)
                assert (heard.mass, heard.sequence, heard.full) == (1.0 + of, 10 * of, False)
            assert sorted(one.slot for one in row.heard) == list(range(len(row.heard)))


@pytest.mark.parametrize("topology", UNDIRECTED)
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_an_edge_counts_at_both_ends_or_at_none(topology: str, loss: float) -> None:
    for seed in SEEDS:
        peers = 2 + seed % 7
        world = World(peers, topology, seed % 3, seed=seed, loss=loss, full=bool(seed % 2))
        world.run(kills=seed % 3 if peers > 3 else 0, cuts=seed % 5)
        rows, living = world.rows(), [name for name in world.names if name not in world.dead]
        assert set(rows) == set(living), f"seed {seed}"
        heard = {name: {one.peer_id for one in row.heard} for name, row in rows.items()}
        for one in living:
            total = rows[one].own_share + sum(message.share for message in rows[one].heard)
            assert total == pytest.approx(1.0), f"seed {seed}: row of {one}"
            for other in living:
                assert (other in heard[one]) == (one in heard[other]), f"seed {seed}"
                assert not (other in heard[one] and other in rows[one].unheard)
        assert max(world.ended_at.values()) <= TIMEOUT_S + world.params.parity_timeout_s


@pytest.mark.parametrize("topology", DIRECTED)
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_share_is_with_its_sender_or_its_receiver(topology: str, loss: float) -> None:
    for seed in SEEDS:
        peers = 2 + seed % 7
        world = World(peers, topology, seed % 3, seed=seed, loss=loss)
        world.run(kills=seed % 3 if peers > 3 else 0, cuts=seed % 5)
        rows, living = world.rows(), [name for name in world.names if name not in world.dead]
        assert set(rows) == set(living), f"seed {seed}"
        matrix, expected = dense(world, rows), rows_of(world.group, topology)
        for name in living:
            source = world.names.index(name)
            to_the_dead = sum(
                row.get(source, 0.0)
                for target, row in enumerate(expected)
                if world.names[target] in world.dead
                and world.names[target] not in rows[name].unheard
            )
            column = sum(line[source] for line in matrix)
            assert column + to_the_dead == pytest.approx(1.0), f"seed {seed}: {name}"


def test_who_was_dead_before_is_the_schedule_without_it() -> None:
    for topology in ("ring", "torus", *DIRECTED):
        for peers in (3, 6, 7):
            world = World(peers, topology, 0, seed=1)
            world.kill(world.names[1])
            world.frames = {
                pair: f for pair, f in world.frames.items() if world.names[1] not in pair
            }
            world.todo = [step for step in world.todo if len(step) < 4 or step[2] != world.names[1]]
            world.run()
            mixing = schedule_for(topology, peers).sample(0)
            assert isinstance(mixing, EdgeMixing)
            expected = mixing.without([1]).rows()
            for index, line in enumerate(dense(world, world.rows())):
                for source, share in enumerate(line if index != 1 else ()):
                    assert share == pytest.approx(expected[index].get(source, 0.0)), topology


# -- one machine at a time


def pair(topology: str = "ring") -> World:
    """Two machines, coded, that have said nothing to each other yet."""
    world = World(2, topology, 0, seed=0)
    world.todo.clear()
    world.frames.clear()
    for machine in world.machines.values():
        machine.handle(EdgesCoded(world.group.group_id), 0.0)
    return world


def take(world: World, to: int) -> None:
    """The other's message, whole, and its letter."""
    machine, sender = world.machines[world.names[to]], 1 - to
    machine.receive(world.names[sender], Letter(world.group.group_id, 5, 1.0, False), world.now)
    for left in reversed(range(len(PARTS))):
        machine.handle(EdgeArrived(world.group.group_id, sender, left), world.now)


def said(world: World, who: int) -> list[Counts]:
    effects, world.machines[world.names[who]].effects = world.machines[world.names[who]].effects, []
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in sent if isinstance(message, Counts)]


def runs(machine: Neighbours) -> bool:
    return machine.finished is None


def ended(machine: Neighbours) -> Outcome:
    assert machine.finished is not None
    return machine.finished


def test_what_was_promised_is_not_taken_back_by_a_lost_link() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    take(world, 0)
    assert said(world, 0) == [Counts(world.group.group_id, True)]
    machine.handle(LinkLost(other), 1.0)
    assert runs(machine)
    assert said(world, 0) == [Counts(world.group.group_id, True, ask=True)]
    machine.receive(other, Counts(world.group.group_id, True, answer=True), 1.1)
    assert machine.finished is not None
    assert machine.finished.status is Status.COMPLETE


def test_before_the_promise_a_lost_link_drops_the_edge() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    machine.handle(LinkLost(other), 1.0)
    assert said(world, 0) == [Counts(world.group.group_id, False)]
    assert machine.finished is not None
    assert machine.finished.status is Status.PARTIAL
    assert machine.finished.row == Row(1.0, (), (other,))


def test_an_edge_that_the_other_end_drops_is_dropped() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    take(world, 0)
    machine.receive(other, Counts(world.group.group_id, False), 1.0)
    assert machine.finished is not None
    assert machine.finished.row == Row(1.0, (), (other,))


@pytest.mark.parametrize(("mass", "sequence"), [(-1.0, 5), (1e30, 5), (1.0, -1), (1.0, 1 << 63)])
def test_a_letter_that_nobody_can_go_on_with_drops_the_edge(mass: float, sequence: int) -> None:
    """A negative mass would make the sum of masses 0; a sequence that no reply to the trainer can
    carry would end its call."""
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    for left in reversed(range(len(PARTS))):
        machine.handle(EdgeArrived(world.group.group_id, 1, left), 0.1)
    machine.receive(other, Letter(world.group.group_id, sequence, mass, False), 0.2)
    assert said(world, 0) == [Counts(world.group.group_id, False)]
    assert ended(machine).row == Row(1.0, (), (other,))
    assert ended(machine).excluded == ((other, Reason.REFUSED),)


def test_a_message_that_is_not_finite_or_not_ours_drops_the_edge() -> None:
    for refused in (True, False):
        world = pair()
        machine, other = world.machines[world.names[0]], world.names[1]
        if refused:
            refusal = EdgeRefused(world.group.group_id, 1, Reason.NOT_FINITE)
            machine.handle(refusal, 0.5)
        else:
            machine.receive(other, NotMember(world.group.group_id, other), 0.5)
        reason = Reason.NOT_FINITE if refused else Reason.NOT_MEMBER
        assert machine.finished is not None
        assert machine.finished.excluded == ((other, reason),)


def test_a_message_that_cannot_be_encoded_is_a_failed_exchange() -> None:
    world = World(2, "ring", 0, seed=0)
    machine = world.machines[world.names[0]]
    machine.handle(EdgesCoded(world.group.group_id, Reason.BUCKET_MODIFIED, "changed"), 0.1)
    assert machine.finished is not None
    assert (machine.finished.status, machine.finished.reason) == (
        Status.FAILED,
        Reason.BUCKET_MODIFIED,
    )
    assert not machine.finished.accepted
    assert machine.finished.row is None


def test_a_silent_neighbour_costs_one_deadline() -> None:
    """Its link is up and says nothing: neither data nor a closed connection."""
    world = pair()
    machine, now = world.machines[world.names[0]], 0.0
    while machine.finished is None:
        now += 0.2
        machine.handle(Listened(()), now)
        machine.tick(now)
        assert now < 30.0
    assert machine.finished.excluded == ((world.names[1], Reason.SILENT),)
    assert now <= world.params.part_timeout_s + 0.2


def test_who_stood_still_believes_answers_only() -> None:
    """What was said to it while it was frozen may have been taken back since."""
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    machine.handle(Listened((other,)), 0.2)
    take(world, 0)
    said(world, 0)
    machine.receive(other, Counts(world.group.group_id, True), 9.0)
    assert runs(machine)
    assert Counts(world.group.group_id, True, ask=True) in said(world, 0)
    machine.receive(other, Counts(world.group.group_id, False, answer=True), 9.1)
    assert machine.finished is not None
    assert machine.finished.row == Row(1.0, (), (other,))


def test_a_late_taker_hears_that_its_share_was_kept() -> None:
    world = World(3, "one-peer-exponential", 0, seed=0)
    giver, taker = world.machines[world.names[0]], world.names[1]
    giver.handle(EdgesCoded(world.group.group_id), 0.0)
    giver.lost(taker, Reason.UNREACHABLE, 1.0)
    giver.lost(world.names[2], Reason.UNREACHABLE, 1.0)
    assert giver.finished is not None
    world.verdicts[world.names[0]].remember(giver)
    answer = world.verdicts[world.names[0]].answer(taker, Counts(world.group.group_id, True))
    assert answer is not None
    assert [effect.message for effect in answer] == [  # type: ignore[union-attr]
        Counts(world.group.group_id, False, answer=True)
    ]


def test_room_is_for_the_most_that_any_round_brings() -> None:
    found = {name: most_neighbours(name, 16) for name in NAMES}
    assert found == {
        "ring": 2, "torus": 4, "complete": 15, "static-exponential": 4, "one-peer-exponential": 1,
        "pairs": 1, "random-matching": 1, "random-groups": 15, "moshpit": 15,
    }  # fmt: skip
    for name in NAMES:
        for peers in range(1, 17):
            for t in range(6):
                rows = rows_of(group_of(peers, t), name)
                most = max(sum(1 for s in row if s != i) for i, row in enumerate(rows))
                assert most <= found[name], (name, peers, t)


# -- out of turn, twice, from strangers, late


def test_what_neighbours_have_no_use_for_changes_nothing() -> None:
    world = pair()
    machine, (me, other) = world.machines[world.names[0]], world.names
    group_id = world.group.group_id
    for event in (
        PartArrived(group_id, 0, 1),  # of an average, not of this exchange
        EdgeRefused(group_id, 0, Reason.NOT_FINITE),  # of ourselves
        EdgeRefused(group_id, 7, Reason.NOT_FINITE),  # of nobody
    ):
        machine.handle(event, 0.1)
    machine.receive("stranger", Counts(group_id, False), 0.1)
    machine.receive("stranger", NotMember(group_id, other), 0.1)
    machine.receive(other, NotMember(group_id, "stranger"), 0.1)
    assert machine.effects == []
    assert runs(machine)
    assert me == world.group.leader


def test_the_first_letter_is_the_one_that_counts() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    take(world, 0)
    machine.receive(other, Letter(world.group.group_id, 6, 9.0, False), 0.1)
    machine.receive(other, Counts(world.group.group_id, True), 0.2)
    row = ended(machine).row
    assert row is not None
    assert [(one.sequence, one.mass) for one in row.heard] == [(5, 1.0)]


def test_a_refusal_after_the_promise_takes_nothing_back() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    take(world, 0)
    said(world, 0)
    machine.handle(EdgeRefused(world.group.group_id, 1, Reason.NOT_FINITE), 0.1)
    assert said(world, 0) == []
    machine.receive(other, Counts(world.group.group_id, True), 0.2)
    assert ended(machine).status is Status.COMPLETE


def test_a_settled_edge_is_not_dropped_by_who_says_that_it_never_was() -> None:
    """The others are still open, so the round is; what was agreed on with one stands."""
    world = World(3, "ring", 0, seed=0)
    machine, other = world.machines[world.names[0]], world.names[1]
    machine.handle(EdgesCoded(world.group.group_id), 0.0)
    machine.receive(other, Letter(world.group.group_id, 5, 1.0, False), 0.0)
    for left in reversed(range(len(PARTS))):
        machine.handle(EdgeArrived(world.group.group_id, 1, left), 0.0)
    machine.receive(other, Counts(world.group.group_id, True), 0.1)
    said(world, 0)
    machine.receive(other, NotMember(world.group.group_id, other), 0.2)
    assert said(world, 0) == []
    machine.lost(world.names[2], Reason.UNREACHABLE, 0.3)
    row = ended(machine).row
    assert row is not None
    assert [one.peer_id for one in row.heard] == [other]


def test_who_never_says_that_an_edge_counts_is_waited_for_until_the_end() -> None:
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    take(world, 0)
    now = 0.0
    while runs(machine):
        assert machine.deadline() >= now
        now = machine.deadline()
        machine.tick(now)
    assert now == TIMEOUT_S + world.params.parity_timeout_s
    assert ended(machine).excluded == ((other, Reason.NO_ANSWER),)
    asked = [one for one in said(world, 0) if one.ask]
    assert len(asked) >= TIMEOUT_S / world.params.answer_timeout_s - 1


def test_a_message_that_is_never_encoded_ends_the_round() -> None:
    """Nothing of ours goes out, and what came counts all the same where its giver has said so."""
    for heard in (False, True):
        world = World(3, "one-peer-exponential", 0, seed=0)
        machine, (me, taker, giver) = world.machines[world.names[0]], world.names
        if heard:
            machine.receive(giver, Letter(world.group.group_id, 5, 1.0, False), 0.0)
            for left in reversed(range(len(PARTS))):
                machine.handle(EdgeArrived(world.group.group_id, 2, left), 0.0)
            machine.receive(giver, Counts(world.group.group_id, True), 0.1)
        machine.tick(TIMEOUT_S)
        assert runs(machine)
        machine.tick(TIMEOUT_S + world.params.parity_timeout_s)
        if heard:
            assert ended(machine).status is Status.PARTIAL
            assert ended(machine).contributors == (me, giver)
            assert ended(machine).excluded == ((taker, Reason.TIMEOUT),)
        else:
            assert ended(machine).status is Status.FAILED
            assert ended(machine).reason is Reason.TIMEOUT
            assert ended(machine).row is None


def test_who_stood_still_promises_again_only_with_a_question() -> None:
    """It has promised nothing yet: what the other said meanwhile is not believed, and not asked
    about before there is something to promise."""
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    group_id = world.group.group_id
    machine.handle(Listened((other,)), 0.2)
    machine.receive(other, Counts(group_id, True), 9.0)  # the first thing after a long sleep
    assert said(world, 0) == []
    world.now = 9.1
    take(world, 0)
    assert said(world, 0) == [Counts(group_id, True, ask=True)]
    assert runs(machine)
    machine.receive(other, Counts(group_id, True, answer=True), 9.2)
    assert ended(machine).status is Status.COMPLETE


def test_where_somebody_listens_a_sleep_before_the_first_look_is_noticed() -> None:
    """The round began, then we stood still: nobody is blamed for what was not heard meanwhile."""
    world = pair()
    machine, other = world.machines[world.names[0]], world.names[1]
    machine.quiet.listens = True
    machine.start(0.0)
    machine.effects.clear()
    slept_s = world.params.part_timeout_s + 1.0
    machine.tick(slept_s)
    assert runs(machine)
    assert [effect.what for effect in machine.effects if isinstance(effect, Note)] == ["woke"]
    machine.handle(LinkLost(other), slept_s)
    assert not runs(machine)


def test_a_round_that_is_over_answers_questions_and_nothing_else() -> None:
    world = World(2, "ring", 0, seed=0)
    world.run()
    verdicts, other = world.verdicts[world.names[0]], world.names[1]
    group_id = world.group.group_id
    assert verdicts.answer(other, Counts(group_id, False)) == []
    assert verdicts.answer(other, Counts(group_id, True, answer=True)) == []
    assert verdicts.answer(other, Counts(group_id, True)) == []
    assert verdicts.answer(other, Counts(b"another", True, ask=True)) is None
    told = verdicts.answer(other, Counts(group_id, True, ask=True))
    assert told == [Send(other, Counts(group_id, True, answer=True))]


def test_only_the_last_rounds_are_remembered() -> None:
    verdicts, other, groups = Verdicts(), "", []
    for t in range(REMEMBERED + 1):
        world = World(2, "ring", t, seed=0)
        world.run()
        verdicts.remember(world.machines[world.names[0]])
        groups.append(world.group.group_id)
        other = world.names[1]
    known = [verdicts.answer(other, Counts(one, True, ask=True)) is not None for one in groups]
    assert known == [False] + [True] * REMEMBERED


def test_a_call_with_neighbours_is_an_exchange_with_neighbours() -> None:
    world = pair()
    peer = Peer(world.params, world.names[0], world.rng, run="r")
    begun = exchange_of(
        peer.state,
        world.group,
        calls=[Contributed("t", "1", 1, mix=Mix("ring", 3))],
        late=(),
        deadline_at=1e9,
        now=5.0,
    )
    assert isinstance(begun, Neighbours)
    assert (begun.trainer, begun.mix.sequence) == ("t", 3)
    assert begun.deadline_at == 5.0 + world.params.round_timeout_s


def test_letters_of_groups_that_never_begin_are_held_up_to_a_bound() -> None:
    world = pair()
    peer = Peer(world.params, world.names[0], world.rng, run="r")
    for sequence in range(EARLY + 5):
        letter = Letter(world.group.group_id, sequence, 1.0, False)
        peer.handle(Received(world.names[1], letter), 0.0)
    held = [message for _, message in peer.state.early]
    assert [one.sequence for one in held if isinstance(one, Letter)] == list(range(EARLY))
