"""What is known of a large run: the census against counting anew, shards, the count of peers, and
when a shape is proposed and adopted.

One rule: the reference in a test is the dumb way to compute the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpitd.core.catchup import CatchUp, needs_snapshot
from moshpitd.core.census import Census, median_with
from moshpitd.core.crowd import PATIENCE
from moshpitd.core.effects import Announce, LookUp, Send
from moshpitd.core.events import Announced, Attached, Event, Found, Ticked
from moshpitd.core.grid import PEERS_KEY, cell_along, is_flat, meeting_key, sides_for
from moshpitd.core.headcount import KEPT, SHAPE_KEY, STALE_ROUNDS, Headcount
from moshpitd.core.messages import Lineage, Record, Shape
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.placing import EPOCHS_AHEAD, Place, Sight
from moshpitd.core.shards import (
    SHARD_FULL,
    STEP,
    counted,
    depth_for,
    hash_of,
    keys_of,
    position,
    shard_key,
    shard_of,
    surveyed,
)
from moshpitd.core.swarm import Swarm, upper_median

SCHEMA = b"one"


def record(name: str, *, sequence: int = 1, **changes: object) -> Record:
    plain = Record(name, sequence, SCHEMA, 0, Lineage("f", b"d"))
    return replace(plain, **changes)  # type: ignore[arg-type]


def names(count: int) -> list[str]:
    return [f"peer{i}" for i in range(count)]


# -- the census


@st.composite
def records(draw: st.DrawFn) -> Record:
    return record(
        draw(st.sampled_from(names(6))),
        sequence=draw(st.integers(0, 3)),
        version=draw(st.integers(0, 4)),
        round=draw(st.integers(0, 4)),
        lineage=Lineage(draw(st.sampled_from("abc")), draw(st.sampled_from([b"x", b"y", b"z"]))),
        shape=Shape(draw(st.integers(0, 2)), (4, 4)),
        coordinates=(0, 0),
        schema=draw(st.sampled_from([SCHEMA, b"two"])),
    )


def winner_by_scanning(swarm: Swarm, own: Lineage, version: int) -> Lineage:
    claims: dict[bytes, tuple[Lineage, list[int]]] = {own.digest: (own, [version])}
    for entry in swarm.heard.values():
        if entry.lost is not None or entry.record.schema != SCHEMA:
            continue
        lineage = entry.record.lineage
        held, versions = claims.setdefault(lineage.digest, (lineage, []))
        versions.append(entry.record.version)
        if lineage.founder < held.founder:
            claims[lineage.digest] = (lineage, versions)

    def rank(claim: tuple[Lineage, list[int]]) -> tuple[bool, int]:
        ordered = sorted(claim[1], reverse=True)
        return len(ordered) >= 2, ordered[min(1, len(ordered) - 1)]

    best = max(rank(claim) for claim in claims.values())
    return min(
        (claim[0] for claim in claims.values() if rank(claim) == best),
        key=lambda it: (it.founder, it.digest),
    )


@given(
    st.lists(st.tuples(records(), st.sampled_from(["direct", "found", "lose", "alive", "round"]))),
    st.integers(0, 4),
)
def test_the_census_is_what_counting_anew_gives(
    steps: list[tuple[Record, str]], own_version: int
) -> None:
    swarm, own = Swarm(Params(max_candidates=4), "peer0"), Lineage("b", b"x")
    for now, (said, how) in enumerate(steps):
        if how == "lose":
            swarm.lose(said.peer_id, Reason.UNREACHABLE)
        elif how == "alive":
            swarm.alive(said.peer_id, float(now))
        elif how == "round":
            swarm.advanced([said.peer_id], said.version)
        else:
            swarm.hear(said, float(20 * now), direct=how == "direct")
        live = [e for e in swarm.heard.values() if e.lost is None and e.record.schema == SCHEMA]
        assert {e.record.peer_id for e in swarm.live(SCHEMA)} == {e.record.peer_id for e in live}
        assert swarm.living(SCHEMA) == len(live)
        assert swarm.winning_lineage(own, own_version, SCHEMA) == winner_by_scanning(
            swarm, own, own_version
        )
        versions = [e.record.version for e in live if e.record.lineage.digest == b"x"]
        assert swarm.median_version(own_version, own, SCHEMA) == (
            upper_median([own_version, *versions]),
            len(versions),
        )
        for shape in {e.record.shape for e in live}:
            rounds = [e.record.round for e in live if e.record.shape == shape]
            assert swarm.census(SCHEMA).rounds[shape] == sorted(rounds)
            median = max(2, upper_median([2, *rounds]))
            assert swarm.round_number(2, shape, SCHEMA) == median


@given(st.lists(st.integers(0, 9)), st.integers(0, 9))
def test_a_median_with_one_more_value(values: list[int], own: int) -> None:
    assert median_with(sorted(values), own) == upper_median([own, *values])


def test_an_empty_census_knows_only_us() -> None:
    own = Lineage("me", b"m")
    assert Census().winner(own, 3) == own
    assert Census().median_version(3, b"m") == (3, 0)


def test_a_dead_peers_record_is_no_news_when_it_has_been_forgotten() -> None:
    swarm = Swarm(Params(max_candidates=2), "me")
    swarm.hear(record("dead", sequence=5), 0.0, direct=True)
    swarm.lose("dead", Reason.UNREACHABLE)
    swarm.hear(record("a"), 20.0, direct=True)
    swarm.hear(record("b"), 40.0, direct=True)
    assert "dead" not in swarm.heard
    assert swarm.is_lost("dead")
    assert swarm.known(["dead", "stranger"]) == (1, 1)
    assert not swarm.is_news(record("dead", sequence=5))
    assert not swarm.hear(record("dead", sequence=5), 41.0, direct=False)
    assert swarm.hear(record("dead", sequence=6), 60.0, direct=False)
    assert not swarm.is_lost("dead")


def test_of_two_messages_that_are_not_delivered_the_first_only_raises_doubt() -> None:
    swarm = Swarm(Params(), "me")
    swarm.hear(record("a"), 0.0, direct=True)
    assert swarm.doubt("a", 1.0)
    assert not swarm.doubt("a", 2.0)
    assert swarm.doubt("a", 60.0)  # a minute later it is another accident
    assert not swarm.doubt("stranger", 1.0)


# -- shards


@given(st.integers(1, 50_000))
def test_shards_are_neither_overfull_nor_empty(cells: int) -> None:
    depth = depth_for(cells)
    mean = cells / (1 << depth)
    assert mean <= SHARD_FULL
    assert cells <= SHARD_FULL or mean >= 20


def test_ten_thousand_peers_fit_their_shards() -> None:
    depth = depth_for(10_000)
    sizes: dict[int, int] = {}
    for name in names(10_000):
        sizes[shard_of(name, depth)] = sizes.get(shard_of(name, depth), 0) + 1
    assert len(sizes) == 1 << depth
    assert max(sizes.values()) <= SHARD_FULL


@given(st.text(min_size=1, max_size=8), st.integers(0, 12))
def test_a_record_lies_in_its_shard_and_shard_0_at_the_first_key_too(name: str, depth: int) -> None:
    keys = keys_of(name, depth)
    number = shard_of(name, depth) if depth else 0
    assert keys[0] == shard_key(number, depth)
    assert (PEERS_KEY in keys) == (number == 0)
    others = counted(name, depth)
    assert len({keys[0], *others}) == (3 if depth > 2 else 1 << depth)
    wide = surveyed(name, depth)
    assert len(set(wide)) == len(wide) == min(16, 1 << depth)
    assert keys[0] in wide


def test_peers_that_know_their_shards_alone_are_spread_evenly() -> None:
    """Positions by shard and rank: ten equal slices of the run hold nearly equally many."""
    everybody, depth = names(2_000), depth_for(2_000)
    shards: dict[int, list[str]] = {}
    for name in everybody:
        shards.setdefault(shard_of(name, depth), []).append(name)
    places = [
        position(name, [n for n in shards[shard_of(name, depth)] if n != name], depth)
        for name in everybody
    ]
    assert all(0.0 <= place < 1.0 for place in places)
    assert len(set(places)) == len(places)
    tenths = [sum(1 for place in places if int(10 * place) == i) for i in range(10)]
    assert max(tenths) < 1.35 * min(tenths)
    by_hash = sorted(everybody, key=hash_of)
    assert [places[everybody.index(name)] for name in by_hash] == sorted(places)


def test_the_lines_of_a_first_round_are_even_though_each_knows_a_part_of_its_shard() -> None:
    """One in ten of a shard has not arrived in each one's eyes: with the first axis slowest the
    lines of 1,000 peers varied like hashes do (3.1 around 10), as each rank is off by some
    cells."""
    shape, depth, rng = Shape(1, (10, 10, 10)), 4, random.Random(3)
    shards: dict[int, list[str]] = {}
    for name in names(1_000):
        shards.setdefault(shard_of(name, depth), []).append(name)
    sizes: dict[str, int] = {}
    for name in names(1_000):
        others = [n for n in shards[shard_of(name, depth)] if n != name]
        known = rng.sample(others, round(0.9 * len(others)))
        coordinates = cell_along(int(1_000 * position(name, known, depth)), shape.sides, 0)
        key = meeting_key(shape, coordinates, 0)
        sizes[key] = sizes.get(key, 0) + 1
    assert pstdev([*sizes.values(), *[0] * (100 - len(sizes))]) < 2.0


# -- counting


def run_of(count: int, **changes: object) -> list[Record]:
    return [record(name, **changes) for name in names(count)]


def counting(
    everybody: Sequence[Record], cells: int, *, me: str = "me", round_number: int = 20
) -> tuple[Headcount, Swarm, Record]:
    """Our count after a look at our shards."""
    mine = record(me, shape=everybody[0].shape, round=round_number)
    swarm, count = Swarm(Params(), me), Headcount(Params(), me)
    count.move(depth_for(cells))
    for key in (count.key, *count.to_count()):
        found = tuple(r for r in everybody if keys_of(r.peer_id, count.depth)[0] == key)
        for one in found if key == count.key else ():
            swarm.hear(one, 0.0, direct=False)
        count.found(key, found, swarm, mine)
    return count, swarm, mine


@pytest.mark.parametrize("peers", [300, 1_000, 10_000])
def test_a_count_of_three_shards_is_near_the_truth(peers: int) -> None:
    everybody = run_of(peers, round=20, shape=Shape(1, (peers,)))
    estimates = []
    for i in range(40):
        count, swarm, _ = counting(everybody, peers, me=f"me{i}")
        estimates.append(count.peers(swarm, SCHEMA))
    estimates.sort()
    assert abs(estimates[20] - peers) < 0.1 * peers
    assert all(0.6 * peers < estimate < 1.5 * peers for estimate in estimates)


def test_what_is_stale_or_dead_does_not_count() -> None:
    peers = 1_000
    stale = [
        replace(r, round=20 - STALE_ROUNDS - 1) if i % 3 == 0 else r
        for i, r in enumerate(run_of(peers, round=20, shape=Shape(1, (peers,))))
    ]
    count, swarm, _ = counting(stale, peers)
    assert 0.5 * peers < count.peers(swarm, SCHEMA) < 0.9 * peers
    count, swarm, _ = counting(run_of(peers, round=20, shape=Shape(1, (peers,))), peers)
    before = count.peers(swarm, SCHEMA)
    for i, peer_id in enumerate(count.shard):
        if i % 4:  # three of four are dead: the other shards will be no better
            swarm.lose(peer_id, Reason.UNREACHABLE)
    assert 0.2 * before < count.peers(swarm, SCHEMA) < 0.35 * before


def test_a_survey_is_over_when_all_its_shards_have_been_counted() -> None:
    peers = 1_000
    everybody = run_of(peers, round=20, shape=Shape(1, (peers,)))
    count, swarm, mine = counting(everybody, peers)
    keys = count.begin_survey(count.depth)
    assert len(keys) == 4 * 16
    assert count.begin_survey(count.depth) == ()  # one at a time
    for key in keys:
        assert count.surveyed(swarm) is None
        found = tuple(r for r in everybody if keys_of(r.peer_id, count.depth)[0] == key)
        count.found(key, found, swarm, mine)
    estimate = count.surveyed(swarm)
    assert estimate is not None
    assert abs(estimate - peers) < 0.12 * peers
    assert count.surveyed(swarm) is None


def test_a_survey_counts_those_too_that_are_a_step_deeper_or_not_yet_as_deep() -> None:
    """In a run that grows fast each depth of the directory holds a part. Who found its shard
    overfull went a step deeper; a survey of that depth alone counted 2,000 of 8,000. And of 10,000
    with a shape for 294 (depth 3) those at 3 counted 5,200, those at 4 and 8 8,500: no two proposed
    one shape (10,000 peers, seed 2)."""
    everybody = run_of(6_000, round=0)
    at = {r.peer_id: (3, 4, 8, 8)[i % 4] for i, r in enumerate(everybody)}
    mine, swarm = record("me"), Swarm(Params(), "me")
    for depth in (3, 4, 8):
        count = Headcount(Params(), "me")
        count.move(depth)
        for key in count.begin_survey(3):
            found = tuple(r for r in everybody if keys_of(r.peer_id, at[r.peer_id])[0] == key)
            count.found(key, found, swarm, mine)
        estimate = count.surveyed(swarm)
        assert estimate is not None
        assert abs(estimate - 6_000) < 0.12 * 6_000


def test_of_a_shard_that_holds_far_too_many_no_more_are_remembered_than_params_allow() -> None:
    """A newcomer found 1,054 records under the first key."""
    count, swarm = Headcount(Params(), "me"), Swarm(Params(), "me")
    count.found(PEERS_KEY, tuple(run_of(1_000)), swarm, record("me"))
    assert len(count.shard) == Params().max_candidates
    assert count.counts[PEERS_KEY] == 1_000


@pytest.mark.parametrize("first", [True, False])
def test_the_newest_proposals_are_kept_wherever_they_stand_in_a_long_answer(first: bool) -> None:
    count, swarm = Headcount(Params(), "me"), Swarm(Params(), "me")
    old = [record(f"old{i}", shape=Shape(1, (7, 7, 7))) for i in range(200)]
    new = [record(f"new{i}", shape=Shape(2, (12, 12, 11))) for i in range(2)]
    count.found(SHAPE_KEY, tuple(new + old if first else old + new), swarm, record("me"))
    assert len(count.proposals) == KEPT
    assert {"new0", "new1"} <= count.proposals.keys()


def test_more_than_one_answer_names_is_counted_and_not_taken_for_what_is_remembered() -> None:
    count, swarm = Headcount(Params(), "me"), Swarm(Params(), "me")
    everybody = tuple(run_of(200))
    for one in everybody[:SHARD_FULL]:
        swarm.hear(one, 0.0, direct=False)
    count.found(PEERS_KEY, everybody, swarm, record("me"))
    assert count.peers(swarm, SCHEMA) == 201


# -- shapes


def place_of(peers: int, *, epoch: int = 1, round_number: int = 5) -> tuple[Place, Sight]:
    """A peer on a grid for `peers`, all of whom it knows to be there."""
    sides = sides_for(peers, 16)
    shape = Shape(epoch, sides)
    everybody = run_of(peers, round=round_number, shape=shape, coordinates=(0,) * len(sides))
    count, swarm, _ = counting(everybody, prod(sides), round_number=round_number)
    place = Place(Params(), "me", shape=shape, coordinates=(0,) * len(sides), round=round_number)
    place.crowd.made_for, place.met = peers, True
    return place, Sight(swarm, SCHEMA, count, random.Random(1))


@pytest.mark.parametrize(
    ("depth", "counted", "sides"),
    [
        (8, 10_022, (10, 10, 10, 10)),
        (8, 10_022 * 108 // 100, (10, 10, 10, 10)),  # two standard deviations too high
        (8, 11_900, (11, 10, 10, 10)),
        (8, 2_100, (13, 13, 12)),  # lines of 14 would often be split
        (4, 1_080, (11, 10, 10)),  # all shards are counted: it is right
        (4, 1_050, (10, 10, 10)),
        (4, 3_200, (15, 15, 15)),  # near the largest group some room is better
    ],
)
def test_a_survey_that_is_too_high_gives_no_more_cells_than_there_are_peers(
    depth: int, counted: int, sides: tuple[int, ...]
) -> None:
    """10,022 peers that were counted as 10,600 met on 11,000 cells: nine in a line of ten."""
    place, sight = place_of(100)
    sight.count.move(depth)
    place.surveyed(counted, sight, 100.0)
    assert place.shape.sides == sides or (
        place.proposal is not None and place.proposal[0].sides == sides
    )


@pytest.mark.parametrize(
    ("sides", "counted", "kept"),
    [
        ((10, 10, 10, 9), 10_917, True),
        ((10, 10, 10, 9), 12_500, False),  # a quarter more than there were
        ((10, 10, 10, 10), 9_000, True),
        ((10, 10, 10, 10), 8_000, False),
        ((13, 13, 13), 2_500, True),
        ((13, 13, 13), 2_800, False),  # lines of 13 would hold more than 16
    ],
)
def test_a_sample_that_is_within_the_band_keeps_the_shape(
    sides: tuple[int, ...], counted: int, kept: bool
) -> None:
    """Of ten thousand peers (seed 0 of ten-thousand.toml, 10,022 by then) those of three shards
    counted 12,715, by chance, and asked. The survey said 10,917, and one round met on a new grid of
    10,000 cells, filled to 0.61, although 9,000 held them all."""
    cells = prod(sides)
    place, sight = place_of(cells)
    ours = cells * 127 // 100
    place.crowd.made_for, place.crowd.peers, place.crowd.outside = cells, ours, PATIENCE
    assert sight.count.depth > STEP
    place.surveyed(counted, sight, 100.0)
    assert (place.proposal is None) is kept
    if kept:  # and the number that this peer counts is the measure from now on
        assert (place.crowd.made_for, place.crowd.outside) == (ours, 0)


@pytest.mark.parametrize(
    ("counted", "kept"), [(290, False), (300, True), (343, True), (400, True), (410, False)]
)
def test_where_all_shards_are_counted_the_band_lies_around_the_number(
    counted: int, kept: bool
) -> None:
    place, sight = place_of(343)
    place.crowd.made_for, place.crowd.peers, place.crowd.outside = 343, 430, PATIENCE
    assert sight.count.depth <= STEP
    place.surveyed(counted, sight, 100.0)
    assert (place.proposal is None) is kept


@pytest.mark.parametrize(("lost", "kept"), [(0, True), (3, True), (6, False), (11, False)])
def test_who_died_in_one_shard_by_chance_shrinks_no_run(lost: int, kept: bool) -> None:
    """610 peers on 648 cells, of whom 30 had died one by one, three of them in one shard. Those who
    saw that took the same share of 647 records for dead, and all went to 512 cells."""
    place, sight = place_of(648)
    shard = sight.count.shard[:17]
    sight = replace(sight, count=replace(sight.count, shard=shard))
    for peer_id in shard[:lost]:
        sight.swarm.lose(peer_id, Reason.UNREACHABLE)
    place.crowd.made_for, place.crowd.peers, place.crowd.outside = 648, 409, PATIENCE
    place.surveyed(647 * (18 - lost) // 18, sight, 100.0)
    assert (place.proposal is None) is kept


def propose(sight: Sight, shape: Shape, since: int, *voices: str) -> None:
    for voice in voices:
        sight.count.propose(voice, (shape, since))


def test_a_shape_that_fits_is_kept_for_ever() -> None:
    place, sight = place_of(1_000)
    place.crowd.made_for = sight.count.peers(sight.swarm, SCHEMA)
    for i in range(10):
        place.round += 1
        place.prepare(sight, 100.0 + i)
    assert place.proposal is None
    assert not place.survey_due
    assert not place.changes


def test_what_one_peer_proposes_holds_if_our_count_says_the_same() -> None:
    place, sight = place_of(1_000)
    propose(sight, Shape(2, (11, 10, 10)), 0, "peer7")
    place.prepare(sight, 100.0)
    assert place.shape == Shape(2, (11, 10, 10))


def test_what_one_peer_proposes_is_not_believed_against_our_count() -> None:
    place, sight = place_of(1_000)
    propose(sight, Shape(2, (5, 5)), 0, "liar")
    place.prepare(sight, 100.0)
    assert place.shape.epoch == 1
    propose(sight, Shape(2, (5, 5)), 0, "second")
    place.prepare(sight, 100.0)
    assert place.shape == Shape(2, (5, 5))  # two voices are


@pytest.mark.parametrize("met", [False, True])
def test_a_newcomer_goes_to_where_all_are_though_other_newcomers_stand_with_it(met: bool) -> None:
    """Twenty of 2,000 that joined between two rounds stood on a grid of their own until the next:
    they knew of each other there, and all others were in later rounds."""
    place, sight = place_of(60, round_number=0)  # what lies under the first key, as they count
    place.met = met
    grid = Shape(4, (13, 13, 12))
    for name in names(4):
        at = record(name, sequence=2, shape=grid, coordinates=(0, 0, 0), round=3)
        sight.swarm.hear(at, 100.0, direct=True)
    place.prepare(sight, 100.0)
    assert place.shape == (grid if not met else Shape(1, sides_for(60, 16)))
    assert place.round == (3 if not met else 0)


def test_one_voice_cannot_use_up_the_epochs() -> None:
    place, sight = place_of(1_000)
    propose(sight, Shape(2 + EPOCHS_AHEAD, (11, 10, 10)), 0, "liar")
    place.prepare(sight, 100.0)
    assert place.shape.epoch == 1


def test_a_proposal_holds_from_its_round_on() -> None:
    place, sight = place_of(1_000, round_number=5)
    propose(sight, Shape(2, (11, 10, 10)), 7, "peer7", "peer8")
    for number in (5, 6):
        place.round = number
        place.prepare(sight, 100.0)
        assert place.shape.epoch == 1
        assert place.pending == (Shape(2, (11, 10, 10)), 7)
    place.round = 7
    place.prepare(sight, 100.0)
    assert place.shape.epoch == 2


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ((10, 10, 9), (11, 10, 10)),
        ((14, 14), (9, 9, 9)),  # a longer side is not a larger grid
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_proposals_of_one_epoch_the_larger_one_is_taken_by_all(
    smaller: tuple[int, ...], larger: tuple[int, ...], first: int
) -> None:
    place, sight = place_of(prod(larger))
    for sides in (smaller, larger) if first == 0 else (larger, smaller):
        propose(sight, Shape(2, sides), 0, f"a{sides}", f"b{sides}")
        place.prepare(sight, 100.0)
    assert place.shape == Shape(2, larger)
    # As well where records say so, and nobody proposes any more.
    place, sight = place_of(prod(larger))
    for i, sides in enumerate((smaller, smaller, larger, larger)):
        at = record(f"there{i}", shape=Shape(2, sides), coordinates=(0,) * len(sides))
        sight.swarm.hear(at, 100.0, direct=True)
    place.prepare(sight, 100.0)
    assert place.shape == Shape(2, larger)


@pytest.mark.parametrize("change", [1.2, 3.0])
def test_a_change_of_numbers_is_answered_by_a_few_after_a_survey(change: float) -> None:
    """Beyond the band for three rounds, or by far at once; and only by those that were drawn."""
    like, sight = place_of(1_000)
    peers = sight.count.peers(sight.swarm, SCHEMA)
    drawn, rounds_taken = 0, []
    for i in range(2_000):
        place = Place(like.params, f"me{i}", shape=like.shape, coordinates=(0, 0, 0), round=5)
        place.crowd.made_for, place.met = round(peers / change), True
        place.crowd.trend, place.crowd.taken_at = ((0.0, peers), (0.0, peers)), 0.0
        for rounds in range(1, PATIENCE + 1):
            place.round += 1
            place.prepare(sight, 100.0 + 6 * rounds)
            if place.survey_due:
                drawn += 1
                rounds_taken.append(rounds)
                break
    assert 0 < drawn < 60
    assert min(rounds_taken) == (PATIENCE if change < 1.4 else 1)


def test_a_count_that_grows_at_every_look_is_waited_out() -> None:
    place, sight = place_of(1_000)
    place.crowd.made_for, place.crowd.trend = 100, ((0.0, 300), (0.0, 300))
    place.prepare(sight, 10.0)
    assert not place.crowd.steady
    assert not place.survey_due
    place.prepare(sight, 11.0)
    assert place.crowd.steady


@pytest.mark.parametrize(("version", "goes_back"), [(3, True), (0, False)])
@pytest.mark.parametrize("ahead", [1, 2])
def test_who_went_on_alone_goes_back_to_those_in_its_shard_that_have_met(
    version: int, goes_back: bool, ahead: int
) -> None:
    """It has never met, and is ahead by attempts alone: at its next call, seven seconds later, the
    directory has long said where the others are. One ahead of 10,000 was alone in four calls."""
    place, sight = place_of(1_000, round_number=1)
    place.met, place.round, place.lonely = False, 1 + ahead, 1
    place.past = [(98.0, 0), (99.0, place.round)]
    for entry in sight.swarm.live(SCHEMA):
        newer = replace(entry.record, sequence=entry.record.sequence + 1, version=version)
        sight.swarm.hear(newer, 104.0, direct=False)
    place.prepare(replace(sight, found_at=104.0), 106.0)
    assert (place.round == 1) is goes_back


def test_below_half_fill_the_groups_are_random() -> None:
    place, sight = place_of(1_000)
    others = Shape(1, (20, 20, 15))
    place.shape, place.crowd.made_for, place.crowd.taken_at = others, 6_000, 84.9
    place.coordinates = (19, 3, 3)
    place.prepare(sight, 99.0)
    assert place.sparse == 0  # just after a change a count misses those that have not moved yet
    place.prepare(sight, 100.0)
    assert place.sparse == 2
    assert place.key().startswith("random/1/5/2.")
    groups: dict[str, int] = {}
    for name in names(1_000):
        other = Place(Params(), name, shape=others, coordinates=(0, 0, 0), round=5, sparse=2)
        groups[other.key()] = groups.get(other.key(), 0) + 1
    assert sum(groups.values()) / len(groups) == pytest.approx(1_000 * 4 * 20 / 6_000, rel=0.1)
    here = [name for name in names(1_000) if place.meets(record(name, shape=others))]
    assert len(here) == groups.get(place.key(), 0)
    place.params = Params(grid_sides=(16, 16))
    place.prepare(sight, 100.0)
    assert not place.sparse  # a pinned grid stays one


# -- round numbers


@pytest.mark.parametrize("ours", [3, 6, 7])
def test_who_is_out_of_step_goes_to_where_most_of_its_shard_are(ours: int) -> None:
    place, sight = out_of_step(ours)
    place.prepare(replace(sight, found_at=98.0), 100.0)
    assert place.round == 5


def test_who_is_one_ahead_may_just_be_earlier_and_a_sweep_belongs_together() -> None:
    place, sight = out_of_step(6)
    place.prepare(replace(sight, found_at=97.0), 100.0)  # not all may have stored theirs
    assert place.round == 6
    place.prepare(replace(sight, found_at=98.0, sweeping=True), 100.0)
    assert place.round == 6


def test_sweeps_begin_with_the_same_axis_whenever_they_begin() -> None:
    for sweeping, expected in ((True, 5), (False, 6)):
        place, sight = place_of(1_000, round_number=5)
        place.prepare(replace(sight, sweeps=True, sweeping=sweeping), 100.0)
        assert place.round == expected


def out_of_step(ours: int) -> tuple[Place, Sight]:
    """We are in that round since 90 s, and all others said at 95 s that they are in round 5."""
    place, sight = place_of(1_000, round_number=5)
    place.round = ours
    place.past.append((90.0, ours))
    for entry in sight.swarm.heard.values():
        entry.heard_at = 95.0
    return place, sight


def test_the_dead_and_those_not_heard_of_lately_do_not_say_where_the_others_are() -> None:
    place, sight = out_of_step(6)
    for entry in sight.swarm.heard.values():
        entry.heard_at = 60.0
    place.prepare(replace(sight, found_at=98.0), 100.0)
    assert place.round == 6


def test_a_newcomer_skips_rounds_that_are_over_and_waits_for_one_that_is_not() -> None:
    """Who has never met goes on too when it stays alone, at version 0: of 10,000 one was drawn from
    round to round by two such, ahead of everybody, and had no group in four calls."""
    for ahead, version, expected in ((1, 3, 0), (6, 3, 6), (6, 0, 0)):
        place, sight = place_of(1_000, round_number=ahead)
        place.met, place.round = False, 0
        for entry in sight.swarm.live(SCHEMA):
            newer = replace(entry.record, sequence=entry.record.sequence + 1, version=version)
            sight.swarm.hear(newer, 0.0, direct=False)
        place.prepare(sight, 100.0)
        assert place.round == expected


def test_a_flat_run_counts_exactly_and_looks_at_no_proposals() -> None:
    swarm, count = Swarm(Params(), "me"), Headcount(Params(), "me")
    mine = record("me")
    for one in run_of(9):
        swarm.hear(one, 0.0, direct=True)
    count.found(PEERS_KEY, tuple(run_of(9)), swarm, mine)
    assert count.peers(swarm, SCHEMA) == 10
    place = Place(Params(), "me")
    place.prepare(Sight(swarm, SCHEMA, count, random.Random(0)), 1.0)
    assert is_flat(place.shape)
    assert count.key == PEERS_KEY != SHAPE_KEY


# -- who has lost sight of the others


def test_who_looks_deeper_than_its_shape_says_still_asks_for_proposals() -> None:
    """A run that outgrows its shape by far: its shard is overfull, so the peer looks deeper, in a
    shard where next to nobody is. It counts few there, and must hear of the shape that fits all
    the same: on the old one it would be alone for ever."""
    peer = Peer(Params(), "me", random.Random(1), run="r")
    old, new = Shape(1, (8, 8)), Shape(2, (9, 9, 8))
    crowd = tuple(
        record(name, shape=old, coordinates=(i % 8, i // 8 % 8))
        for i, name in enumerate(names(300))
    )
    proposed = tuple(
        record(f"proposes{i}", shape=new, coordinates=(0, 0, 0), schema=SCHEMA) for i in range(2)
    )
    peer.handle(Attached("t", SCHEMA, "", (8,), b"d", founder="f", founder_digest=b"d"), 0.0)
    now, told = 0.0, []
    while now < 10.0:
        now += 0.1
        events: list[Event] = []
        for effect in peer.take_effects():
            if isinstance(effect, Announce):
                events.append(Announced(effect.key, ok=True))
            elif isinstance(effect, LookUp) and effect.key == PEERS_KEY:
                events.append(Found(effect.key, crowd))
            elif isinstance(effect, LookUp):
                there = proposed if effect.key == SHAPE_KEY and now > 2.0 else ()
                events.append(Found(effect.key, there))
        told.append(peer.state.place.shape)
        for event in [*events, Ticked()]:
            peer.handle(event, now)
    assert old in told
    assert peer.state.place.shape == new


@pytest.mark.parametrize(
    ("lately", "versions_ahead", "behind"),
    [
        (3, 9, True),
        (3, 8, False),  # within what a grid may differ by
        (2, 50, False),  # two are too few to tell
    ],
)
def test_most_are_known_from_a_round_long_ago_and_say_nothing_of_now(
    lately: int, versions_ahead: int, behind: bool
) -> None:
    """Of a run of hundreds a peer remembers everybody it ever met, and hears its shard and its line
    again: at version 12 among peers at 136 it was refused by each that it asked, for five minutes,
    and took no snapshot, because the median of what it remembered was its own version."""
    swarm, me = Swarm(Params(), "me"), record("me", version=12)
    for name in names(100):
        swarm.hear(record(name, version=12), 0.0, direct=True)
    assert not needs_snapshot(swarm, me, Params(), 1.0, fresh=False)
    for name in names(lately):
        swarm.hear(record(name, version=12 + versions_ahead, sequence=2), 100.0, direct=False)
    assert needs_snapshot(swarm, me, Params(), 100.0, fresh=False) is behind


@pytest.mark.parametrize(("voices", "speaks"), [(15, True), (16, False), (None, False)])
def test_what_enough_have_seconded_nobody_seconds_any_more(
    voices: int | None, speaks: bool
) -> None:
    """Who counts few peers takes itself for one of the few that speak: of 2,500 that started within
    two seconds 470 did, and of 10,000 too many for one answer of the directory. Nor does who has
    not heard yet how many have (None): of 10,000 that arrived within six seconds 5,000 had not."""
    peer = Peer(Params(), "me", random.Random(1), run="r")
    shape, scale = Shape(1, (9, 9, 8)), peer.conductor.meeting.scale
    peer.state.place.shape, peer.state.place.crowd.peers = shape, 16
    peer.state.place.crowd.taken_at = 1.0
    if voices is not None:
        there = (record(it, shape=shape, coordinates=(0, 0, 0)) for it in names(voices))
        peer.state.presence.update(schema=SCHEMA)
        scale.found(Found(SHAPE_KEY, tuple(there)), 2.0)
    scale._speak()
    said = [it.key for it in peer.take_effects() if isinstance(it, Announce)]
    assert said == ([SHAPE_KEY] if speaks else [])


@pytest.mark.parametrize(
    ("known", "told", "asked"),
    [(100, 0, 8), (100, 5, 3), (100, 20, 0), (6, 2, 4)],  # of few all that are in doubt
)
def test_who_begins_asks_as_many_as_have_not_just_told_it_what_they_hold(
    known: int, told: int, asked: int
) -> None:
    """Eight were asked by each of 10,000 that began with nine others in their line who had just
    said what they hold; with one message in a hundred lost most lines waited two seconds for an
    answer."""
    swarm, me = Swarm(Params(), "me"), record("me")
    for i, name in enumerate(names(known)):
        swarm.hear(record(name), 50.0, direct=False)
        if i < told:
            swarm.hear(record(name, sequence=2), 99.0, direct=True)
    rng, trainers = random.Random(1), ("t",)
    catch_up = CatchUp(Params(), me, swarm, rng, 1, trainers, deadline_at=200.0, fresh=True)
    catch_up.start(100.0, known=True)
    hellos = [it for it in catch_up.effects if isinstance(it, Send)]
    assert len(hellos) == asked
    assert catch_up.over is (not asked)
    assert all(it.to not in names(told) for it in hellos)
