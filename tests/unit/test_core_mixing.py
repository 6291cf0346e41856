"""Mixing schedules: the worked examples, and what must hold for any number of peers, dead or alive.

One rule: sums over peers are the test. A matrix is built by hand where the paper gives one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpitd.core import mixing, topologies
from moshpitd.core.mixing import EdgeMixing, GroupMixing, Mixing, MixingSchedule, matrix
from moshpitd.core.topologies import (
    MoshpitGrid,
    OnePeerExponential,
    OwnTopology,
    Pairs,
    RandomGroups,
    RandomMatching,
    Ring,
    StaticExponential,
    Torus,
    schedule_for,
    shift_one_peer,
)
from moshpitd.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
UNDIRECTED = ("ring", "torus", "complete", "pairs", "random-matching", "random-groups", "moshpit")

numbers = st.integers(1, 24)
rounds = st.integers(0, 40)


def golden(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob(pattern))]


def dense(found: Mixing) -> Any:
    return np.array(matrix(found))


def rho(w: Any) -> float:
    return float(np.linalg.norm(w - 1.0 / len(w), 2))


def schedule_named(name: str, peers: int, seed: int = 0) -> MixingSchedule:
    side = max(1, math.isqrt(peers))
    sides = (side, -(-peers // side))
    return schedule_for(name, peers, seed=seed, group_size=3, sides=sides)


def matrices() -> Iterator[Any]:
    for example in golden("topologies*.json"):
        for name, expected in example["outputs"]["matrices"].items():
            yield pytest.param(name, expected, id=f"{example['name']}-{name}")


def build(name: str) -> Any:
    """The matrix that a worked example calls by a name such as ring8, torus3x3 or static_exp8."""
    letters = name.rstrip("0123456789x")
    if name.endswith("_product"):
        peers = int("".join(filter(str.isdigit, name)))
        w = np.eye(peers)
        for t in range((peers - 1).bit_length()):
            w = dense(OnePeerExponential(peers).sample(t)) @ w
        return w
    if letters == "torus":
        rows, columns = map(int, name.removeprefix("torus").split("x"))
        return dense(Torus(rows * columns, rows).sample(0))
    peers = int(name.removeprefix(letters))
    topology = {"static_exp": "static-exponential"}.get(letters, letters)
    return dense(schedule_for(topology, peers).sample(0))


@pytest.mark.parametrize(("name", "expected"), list(matrices()))
def test_the_golden_topologies(name: str, expected: dict[str, Any]) -> None:
    w = build(name)
    np.testing.assert_allclose(w, np.array(expected["W"]), atol=1e-12)
    assert rho(w) == pytest.approx(expected["rho"], abs=1e-9)
    assert 1 - rho(w) ** 2 == pytest.approx(expected["p"], abs=1e-9)
    assert expected["doubly"]
    np.testing.assert_allclose(w.sum(0), 1.0)
    np.testing.assert_allclose(w.sum(1), 1.0)


@pytest.mark.parametrize("example", golden("topologies*.json"), ids=lambda e: e["name"])
def test_the_golden_pairs_of_bagua(example: dict[str, Any]) -> None:
    for peers, table in example["outputs"]["bagua_shift_one"].items():
        n = int(peers)
        for step, partners in enumerate(table):
            assert [shift_one_peer(rank, step=step, peers=n) for rank in range(n)] == partners


@pytest.mark.parametrize("peers", [3, 4, 5, 8, 16, 31])
def test_the_rho_of_a_ring_is_the_cosine_of_the_book(peers: int) -> None:
    waves = [abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / peers)) for k in range(1, peers)]
    assert rho(dense(Ring(peers).sample(0))) == pytest.approx(max(waves))


def test_two_neighbours_on_a_ring_halve() -> None:
    """Both neighbours are one peer; counted twice it would get two thirds."""
    np.testing.assert_allclose(dense(Ring(2).sample(0)), [[0.5, 0.5], [0.5, 0.5]])
    assert matrix(Ring(1).sample(0)) == [[1.0]]


def test_a_torus_of_a_prime_number_of_peers_is_a_ring() -> None:
    np.testing.assert_allclose(dense(Torus(7).sample(0)), dense(Ring(7).sample(0)))


@given(name=st.sampled_from(topologies.NAMES), peers=numbers, t=rounds, seed=st.integers(0, 99))
def test_every_schedule_is_doubly_stochastic_for_any_number_of_peers(
    name: str, peers: int, t: int, seed: int
) -> None:
    found = schedule_named(name, peers, seed).sample(t)
    w = dense(found)
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(0), 1.0)
    np.testing.assert_allclose(w.sum(1), 1.0)
    assert not found.needs_weights
    assert schedule_named(name, peers, seed).sample(t) == found, "the same seed, the same round"


@given(
    name=st.sampled_from(topologies.NAMES),
    peers=numbers,
    t=rounds,
    data=st.data(),
    late=st.booleans(),
)
def test_the_mass_of_the_dead_stays(
    name: str, peers: int, t: int, data: st.DataObject, late: bool
) -> None:
    dead = data.draw(st.sets(st.integers(0, peers - 1)))
    schedule = schedule_named(name, peers)
    found = schedule.sample(t).without(dead) if late else schedule.sample(t, dead)
    w = dense(found)
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(0), 1.0, err_msg="a column lost mass")
    for peer in dead:
        row = np.zeros(peers)
        row[peer] = 1.0
        np.testing.assert_allclose(w[peer], row, err_msg="a dead peer's value moved")
        np.testing.assert_allclose(w[:, peer], row, err_msg="a dead peer's value got out")
    if name in UNDIRECTED:
        np.testing.assert_allclose(w.sum(1), 1.0)
        np.testing.assert_allclose(w, w.T, err_msg="undirected mixing is symmetric")
    rows_are_one = np.allclose(w.sum(1), 1.0)
    assert found.needs_weights == (not rows_are_one)


def test_a_dead_peer_on_a_directed_graph_needs_weights() -> None:
    found = StaticExponential(8).sample(0, dead=[3])
    assert found.needs_weights
    assert isinstance(found, EdgeMixing)
    assert found.own[2] == pytest.approx(0.5), "2 sends to 3, 4 and 6 and keeps 3's share"
    assert {edge.target for edge in found.outgoing(2)} == {4, 6}


@pytest.mark.parametrize("peers", [2, 4, 8, 16, 32])
def test_one_peer_exponential_is_exact_for_powers_of_two(peers: int) -> None:
    w = np.eye(peers)
    for t in range((peers - 1).bit_length()):
        w = dense(OnePeerExponential(peers).sample(t + 5)) @ w  # from any round on
    assert rho(w) < 1e-12 or peers == 2


@given(peers=st.integers(2, 40))
def test_one_peer_exponential_reaches_everybody(peers: int) -> None:
    w = np.eye(peers)
    for t in range(2 * (peers - 1).bit_length()):
        w = dense(OnePeerExponential(peers).sample(t)) @ w
    assert (w > 0).all()


def test_more_out_peers_rotate_through_powers_of_k_plus_one() -> None:
    graph = OnePeerExponential(27, peers_per_round=2)
    assert [graph.shifts(t) for t in range(4)] == [[1, 2], [3, 6], [9, 18], [1, 2]]
    w = np.eye(27)
    for t in range(3):
        w = dense(graph.sample(t)) @ w
    assert rho(w) < 1e-12


def test_shifts_that_come_home_or_repeat_count_once() -> None:
    found = mixing.circulant(4, [1, 5, 4, 0])
    np.testing.assert_allclose(dense(found), dense(mixing.circulant(4, [1])))


@given(peers=st.integers(1, 33), step=st.integers(0, 100))
def test_partners_are_mutual(peers: int, step: int) -> None:
    partners = [shift_one_peer(rank, step=step, peers=peers) for rank in range(peers)]
    assert [partners[partner] for partner in partners] == list(range(peers))
    resting = sum(partner == rank for rank, partner in enumerate(partners))
    assert resting == peers % 2


@pytest.mark.parametrize("peers", [2, 6, 8])
def test_even_pairs_meet_the_whole_other_half(peers: int) -> None:
    half = peers // 2
    met = {(r, shift_one_peer(r, step=t, peers=peers)) for r in range(half) for t in range(half)}
    assert len(met) == half * half


@pytest.mark.parametrize("peers", [3, 5, 9])
def test_odd_pairs_meet_everybody_once(peers: int) -> None:
    met: list[tuple[int, ...]] = []
    for t in range(peers):
        found = Pairs(peers).sample(t)
        assert isinstance(found, GroupMixing)
        met += found.groups
    assert sorted(met) == list(combinations(range(peers), 2))


@given(peers=numbers, size=st.integers(1, 9), t=rounds, data=st.data())
def test_random_groups_are_dealt_among_the_living(
    peers: int, size: int, t: int, data: st.DataObject
) -> None:
    dead = data.draw(st.sets(st.integers(0, peers - 1)))
    found = RandomGroups(peers, size, seed=1).sample(t, dead)
    assert isinstance(found, GroupMixing)
    members = sorted(peer for group in found.groups for peer in group)
    assert members == [peer for peer in range(peers) if peer not in dead]
    alive = len(members)
    assert len(found.groups) == (max(1, alive // size) if alive else 0)
    if alive >= size:
        sizes = [len(group) for group in found.groups]
        assert min(sizes) >= size
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("peers", [1, 2, 7, 10])
def test_random_matching_leaves_at_most_one_alone(peers: int) -> None:
    seen = {RandomMatching(peers, seed=4).sample(t) for t in range(30)}
    for found in seen:
        assert isinstance(found, GroupMixing)
        assert len(found.groups) == peers // 2
    assert len(seen) > 1 or peers <= 2


# ---- How fast they mix: closed forms against worked examples, enumeration and draws.


CONTRACTION = golden("random_groups_contraction*.json")


@pytest.mark.parametrize("example", CONTRACTION, ids=lambda e: e["name"])
def test_the_golden_contraction_of_random_groups(example: dict[str, Any]) -> None:
    outputs = example["outputs"]
    for case in [*outputs["enumerated"], *outputs["monte_carlo"]]:
        peers, groups = case["N"], case["r"]
        exact = mixing.random_groups_factor(peers, groups)
        assert exact == pytest.approx(case["exact"], abs=1e-12)
        assert exact == pytest.approx(case.get("enumerated", exact), abs=1e-12)
        assert abs(exact - case.get("mc_mean", exact)) <= 5 * case.get("mc_stderr", 0.0)
        bound = mixing.random_groups_bound(peers, groups)
        assert bound == pytest.approx(case["paper"], abs=1e-12)
        gap = (peers - groups) / (peers**2 * (peers - 1))
        assert bound - exact == pytest.approx(gap, abs=1e-12)
    for case in outputs["with_failures"]:
        found = mixing.random_groups_factor_with_failures(
            case["N"], size=case.get("M", 32), failure=case["p"]
        )
        # "exact" in the file is the formula averaged over the draws of the same 20,000 trials as
        # mc_mean, not over the binomial law, so it is as uncertain as they are.
        assert abs(found - case["exact"]) <= 3 * case["mc_stderr"]
        assert abs(found - case["mc_mean"]) <= 5 * case["mc_stderr"]


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: 2 <= sum(s) <= 6))
@settings(max_examples=15)
def test_the_factor_is_that_of_all_partitions(sizes: list[int]) -> None:
    """The dumb twin: every ordered partition into groups of these sizes."""
    values = np.array([1.0, -2.0, 4.0, 0.5, 7.0, -3.0])[: sum(sizes)]

    def split(left: tuple[int, ...], sizes: list[int]) -> Iterator[list[tuple[int, ...]]]:
        if not sizes:
            yield []
            return
        for group in combinations(left, sizes[0]):
            rest = tuple(peer for peer in left if peer not in group)
            for others in split(rest, sizes[1:]):
                yield [group, *others]

    after = []
    for groups in split(tuple(range(sum(sizes))), sizes):
        w = dense(GroupMixing(sum(sizes), tuple(groups)))
        after.append((w @ values).var())
    factor = mixing.random_groups_factor(sum(sizes), len(sizes))
    assert np.mean(after) == pytest.approx(values.var() * factor, abs=1e-12)


def measured_factor(schedule: MixingSchedule, draws: int) -> tuple[float, float]:
    """Mean and standard error of V'/V over independent draws of values and rounds."""
    rng = np.random.default_rng(3)
    ratios = []
    for t in range(draws):
        values = rng.standard_normal(schedule.peers)
        ratios.append((dense(schedule.sample(t)) @ values).var() / values.var())
    return float(np.mean(ratios)), float(np.std(ratios) / math.sqrt(draws))


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        (RandomGroups(24, 4, seed=2), mixing.random_groups_factor(24, 6)),
        (RandomGroups(23, 4, seed=2), mixing.random_groups_factor(23, 5)),
        (RandomMatching(12, seed=2), mixing.random_matching_factor(12)),
        (RandomMatching(13, seed=2), mixing.random_matching_factor(13)),
    ],
)
def test_drawn_schedules_mix_as_fast_as_their_formula(
    schedule: MixingSchedule, factor: float
) -> None:
    mean, error = measured_factor(schedule, 1500)
    assert abs(mean - factor) < 5 * error


def test_formulas_at_their_ends() -> None:
    assert mixing.random_groups_factor(1, 1) == 0.0
    assert mixing.random_matching_factor(8) == pytest.approx(1 - (1 - (8 / 2 - 1) / (8 - 1)))
    assert mixing.random_pair_factor(5) == pytest.approx(1 - 1 / 4)
    assert mixing.random_pair_factor(1) == 0.0
    with_failures = mixing.random_groups_factor_with_failures
    assert with_failures(64, size=8, failure=0.0) == mixing.random_groups_factor(64, 8)
    assert with_failures(64, size=8, failure=1.0) == 1.0
    assert with_failures(1, size=8, failure=0.5) == 0.0
    assert with_failures(1, size=8, failure=1.0) == 1.0


def test_a_random_pair_takes_off_its_part() -> None:
    rng, peers = Random(5), 9
    values = np.array([rng.gauss(0, 1) for _ in range(peers)])
    after = [
        (dense(GroupMixing(peers, (pair,))) @ values).var()
        for pair in combinations(range(peers), 2)
    ]
    factor = mixing.random_pair_factor(peers)
    assert np.mean(after) == pytest.approx(values.var() * factor)


# ---- The Moshpit grid.


@pytest.mark.parametrize("rule", ["distinct", "position", "static"])
@pytest.mark.parametrize("sides", [(3, 3), (2, 2, 2), (4, 4)])
def test_a_full_grid_is_exact_after_d_rounds(sides: tuple[int, ...], rule: str) -> None:
    schedule = MoshpitGrid(math.prod(sides), sides, seed=8, rule=rule)
    for begin in (0, len(sides)):
        w = np.eye(schedule.peers)
        for t in range(begin, begin + len(sides)):
            w = dense(schedule.sample(t)) @ w
        assert rho(w) < 1e-12


@pytest.mark.parametrize("example", golden("moshpit_partial_grid*.json"), ids=lambda e: e["name"])
def test_the_golden_grid_with_failures_as_a_schedule(example: dict[str, Any]) -> None:
    inputs = example["inputs"]
    schedule = MoshpitGrid(
        len(inputs["coords"]),
        (inputs["M"],) * inputs["d"],
        rule="position",
        start=tuple(tuple(cell) for cell in inputs["coords"]),
    )
    values = np.array(inputs["X"])
    for t, (alive, expected) in enumerate(
        zip(inputs["alive"], example["outputs"]["per_round"], strict=True)
    ):
        found = schedule.sample(t, [peer for peer, up in enumerate(alive) if not up])
        assert isinstance(found, GroupMixing)
        assert sorted(found.groups) == [tuple(group) for group in expected["groups"]]
        values = dense(found) @ values
        np.testing.assert_allclose(values, expected["values"], atol=1e-12)
        assert schedule.coordinates(t + 1) == [tuple(cell) for cell in expected["coords"]]


def test_the_grid_remembers_who_was_dead_and_replays() -> None:
    deaths: dict[int, list[int]] = {1: [4], 3: [0, 7]}
    told = MoshpitGrid(10, (4, 3), seed=2)
    first = [told.sample(t, deaths.get(t, [])) for t in range(6)]
    assert [told.sample(t, deaths.get(t, [])) for t in range(6)] == first, "asked again"
    other = MoshpitGrid(10, (4, 3), seed=2)
    for t, dead in deaths.items():
        other.sample(t, dead)
    assert other.sample(5) == first[5], "told only what differs, in order"
    told.sample(1)
    assert told.coordinates(2) == MoshpitGrid(10, (4, 3), seed=2).coordinates(2)


def test_more_peers_than_cells_share_cells() -> None:
    found = MoshpitGrid(10, (2, 2), seed=1).sample(0)
    assert isinstance(found, GroupMixing)
    assert sorted(peer for group in found.groups for peer in group) == list(range(10))


# ---- The operator's own graph.


graphs = st.integers(2, 10).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20),
    )
)


@given(graph=graphs, arrows=st.booleans(), data=st.data())
def test_any_connected_graph_keeps_mass(
    graph: tuple[int, list[tuple[int, int]]], arrows: bool, data: st.DataObject
) -> None:
    peers, pairs = graph
    way = [(i, (i + 1) % peers) for i in range(peers)]  # connected, whatever else was drawn
    topology = OwnTopology(peers, (*pairs, *way), arrows)
    dead = data.draw(st.sets(st.integers(0, peers - 1)))
    for found in (topology.sample(0), topology.sample(0, dead)):
        w = dense(found)
        assert (w >= -1e-12).all()
        np.testing.assert_allclose(w.sum(0), 1.0)
        if not arrows:
            np.testing.assert_allclose(w, w.T)
    assert rho(dense(topology.sample(0))) < 1 or arrows


def test_the_golden_directed_graph_is_even_splits() -> None:
    for example in golden("sgp_pushsum*.json"):
        p = np.array(example["inputs"]["P_nonregular"])
        arrows = [(int(j), int(i)) for i, j in np.argwhere(p > 0) if i != j]
        found = OwnTopology(len(p), tuple(arrows), arrows=True).sample(0)
        np.testing.assert_allclose(dense(found), p)
        assert found.needs_weights


@pytest.mark.parametrize(
    ("pairs", "arrows", "word"),
    [
        (((0, 1),), False, "no way from peer 0 to 2"),
        (((0, 1), (1, 2)), True, "no way to peer 0 from 1"),
        (((1, 0), (2, 1)), True, "no way from peer 0 to 1"),
        (((0, 3), (1, 2)), False, "names a peer that does not exist"),
    ],
)
def test_a_graph_that_cannot_mix_is_refused(
    pairs: tuple[tuple[int, int], ...], arrows: bool, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        OwnTopology(3, pairs, arrows)


@pytest.mark.parametrize(
    ("pairs", "weights", "word"),
    [
        (((0, 1), (1, 2)), (0.5,), "1 weights for 2 edges"),
        (((0, 1), (1, 0)), (0.5, 0.5), "edge 1 0 has two weights"),
        (((0, 1), (1, 1)), (0.5, 0.5), "joins a peer to itself"),
        (((0, 1), (1, 2)), (0.5, -0.1), "edge 1 2 has the weight -0.1"),
        (((0, 1), (1, 2)), (0.5, 0.6), "edges of peer 1 carry 1.1"),
    ],
)
def test_weights_that_lose_mass_are_refused(
    pairs: tuple[tuple[int, int], ...], weights: tuple[float, ...], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        OwnTopology(3, pairs, weights=weights)


def test_own_weights_keep_mass_whoever_is_away() -> None:
    own = OwnTopology(3, ((0, 1), (1, 2)), weights=(0.25, 0.75))
    np.testing.assert_allclose(
        dense(own.sample(0)), [[0.75, 0.25, 0], [0.25, 0, 0.75], [0, 0.75, 0.25]]
    )
    np.testing.assert_allclose(
        dense(own.sample(0, [2])), [[0.75, 0.25, 0], [0.25, 0.75, 0], [0, 0, 1]]
    )
    arrows = OwnTopology(3, ((0, 1), (1, 2), (2, 0)), True, (0.5, 0.25, 1.0))
    w = dense(arrows.sample(0))
    np.testing.assert_allclose(w, [[0.5, 0, 1], [0.5, 0.75, 0], [0, 0.25, 0]])
    assert arrows.sample(0).needs_weights


def test_settings_that_make_no_schedule() -> None:
    with pytest.raises(ConfigError, match="unknown topology 'star'"):
        schedule_for("star", 3)
    with pytest.raises(ConfigError, match="0 peers"):
        schedule_for("ring", 0)
    with pytest.raises(ConfigError, match="3 rows"):
        Torus(8, rows=3)
    with pytest.raises(ConfigError, match="groups of 0"):
        RandomGroups(8, 0)


def test_active_peers_meet_passive_ones() -> None:
    ring = Ring(6).sample(0)
    assert isinstance(ring, EdgeMixing)
    assert topologies.passive_neighbours(1, ring) == (0, 2)
    assert topologies.passive_neighbours(2, ring) == ()
    odd = Ring(5).sample(0)
    assert isinstance(odd, EdgeMixing)
    assert [topologies.passive_neighbours(rank, odd) for rank in (1, 3)] == [(0, 2), (2, 4)]
