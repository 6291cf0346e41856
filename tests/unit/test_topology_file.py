"""The operator's topology file: what it means, and by which file and key it is refused; and its
matrix in exchanges in which peers come, go and die."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moshpitd.client.optim import by_name
from moshpitd.core.events import MeetAsked
from moshpitd.core.graph import OWN, PeerGraph
from moshpitd.core.mixing import matrix
from moshpitd.core.neighbours import most_neighbours, rows_of
from moshpitd.core.outcome import Status
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.topologies import OwnTopology
from moshpitd.daemon.settings import Settings
from moshpitd.daemon.topology_file import read_topology
from moshpitd.daemon.trainers import Attachment, schema_of, schema_text
from moshpitd.errors import ConfigError, TrainerError
from moshpitd.sim.costs.distortion import Population
from moshpitd.tensors.layout import Layout, TensorSpec
from moshpitd.testing import ArithmeticSwarm
from tests.kit.edges import World, group_of
from tests.unit.test_core_pairs import Ring as Meetings

IDS = {word: f"12D3KooW{letter * 44}" for word, letter in zip("abcd", "ABCD", strict=True)}
PEERS = "\n[peers]\n" + "\n".join(f'{word} = "{peer_id}"' for word, peer_id in IDS.items())
CHAIN = 'edges = [["a", "b"], ["c", "b"], ["c", "d"]]'
SHARES = 'edges = [["a", "b", 0.5], ["c", "b", 0.25], ["c", "d", 0.75]]'


def graph(text: str, tmp_path: Path, max_peers: int = 16) -> PeerGraph:
    file = tmp_path / "ring.toml"
    file.write_text(text, encoding="utf-8")
    return read_topology(file, max_peers=max_peers)


def test_shares_are_metropolis_and_hastings_or_what_is_written(tmp_path: Path) -> None:
    third = 1 / 3
    assert matrix(graph(CHAIN + PEERS, tmp_path).sample(0)) == [
        pytest.approx(row)
        for row in (
            [1 - third, third, 0, 0],
            [third, third, third, 0],
            [0, third, third, third],
            [0, 0, third, 1 - third],
        )
    ]
    written = [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.25, 0, 0.75], [0, 0, 0.75, 0.25]]
    found = graph(SHARES + PEERS, tmp_path)
    assert matrix(found.sample(0)) == [pytest.approx(row) for row in written]
    assert found.names == tuple(IDS.values())
    assert found.most_neighbours == 2
    same = graph(f"matrix = {written}" + PEERS, tmp_path)
    assert matrix(same.sample(0)) == [pytest.approx(row) for row in written]
    assert same.digest == found.digest
    assert graph(CHAIN + PEERS, tmp_path).digest != found.digest


def test_the_order_of_a_file_is_nobodys_business(tmp_path: Path) -> None:
    turned = "\n[peers]\n" + "\n".join(f'{w} = "{i}"' for w, i in reversed(IDS.items()))
    assert graph(SHARES + turned, tmp_path).digest == graph(SHARES + PEERS, tmp_path).digest


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('edges = [["a", "e"]]', "edges[0]", "'e' is unknown .*expected a name of .peers.: a, b"),
        ('edges = [["a", "b"], ["c", "d"]]', "edges", "no way from peer a to c .*a connected"),
        (f"directed = true\n{CHAIN}", "edges", "no way from peer a to c"),
        (SHARES.replace("0.25", "-0.25"), "edges[1]", "-0.25 is negative .*a share of 0 or more"),
        (SHARES.replace("0.25", "0"), "edges[1]", "the share 0 .*above 0"),
        (SHARES.replace("0.25", "nan"), "edges[1]", "nan is refused .*a number"),
        (SHARES.replace("0.25", "0.6"), "edges", "edges of peer b carry 1.1 .*rows and columns"),
        (SHARES.replace(", 0.25", ""), "edges", "2 of 3 have a share .*all of them, or none"),
        ('edges = [["a", "b"], ["b", "a"]]', "edges[1]", "is here before.*each pair of peers once"),
        ('edges = [["a", "a"]]', "edges[0]", "joins a peer to itself"),
        ('edges = [["a"]]', "edges[0]", "is refused"),
        ("edges = 3", "edges", "a list of pairs"),
        ("", "edges, matrix", "neither is here .*one of the two"),
        ("edges = []\nmatrix = []", "edges, matrix", "both are here"),
        ("matrix = [[1, 0], [0, 1]]", "matrix", "another shape .*4 rows of 4"),
        (
            "matrix = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0.5]]",
            "matrix",
            "column of d sums to 0.5 .*doubly stochastic",
        ),
        (
            "matrix = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]",
            "matrix",
            "a takes 1 of b, which takes 0 of it .*directed = true",
        ),
        (f"{CHAIN}\nweights = 3", "weights", "no key of a topology .*peers, edges, matrix"),
        (f"{CHAIN}\ndirected = 1", "directed", "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_mix_is_refused_by_file_and_key(
    text: str, key: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        graph(text + PEERS, tmp_path)
    assert caught.value.file == str(tmp_path / "ring.toml")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("peers", "key", "words"),
    [
        ("", "peers", "names nobody"),
        ('[peers]\na = "here"', "peers.a", "'here' is no PeerID"),
        (f'[peers]\na = "{IDS["a"]}"\nb = "{IDS["a"]}"', "peers.b", "is the PeerID of a too"),
        (PEERS, "peers", "4 peers .*averaging.max_group = 3"),
    ],
)
def test_peers_have_a_peer_id_each(peers: str, key: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        graph(f"{CHAIN}\n{peers}", tmp_path, max_peers=3)
    assert caught.value.key == key


def test_a_setting_is_refused_by_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "ring.toml"
    config = tmp_path / "moshpitd.toml"
    config.write_text(f'[averaging]\ntopology_file = "{file}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ring\.toml: No such file"):
        Settings.load(config, environ={})
    file.write_text("edges = [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ring\.toml: .*expected TOML"):
        Settings.load(config, environ={})
    file.write_text(SHARES.replace("0.25", "-1") + PEERS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ring\.toml: edges\[1\]: -1 is negative"):
        Settings.load(config, environ={})
    file.write_text(SHARES + PEERS, encoding="utf-8")
    found = Settings.load(config, environ={}).own_topology()
    assert found is not None
    assert found.names == tuple(IDS.values())
    assert Settings().own_topology() is None


def test_the_example_is_one(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "configs" / "topology.toml"
    found = read_topology(example, max_peers=16)
    assert found.peers == 3
    assert matrix(found.sample(0)) == [pytest.approx([1 / 3] * 3)] * 3


# -- who mixes with whom


def ring_of(names: list[str], *, directed: bool = False) -> PeerGraph:
    pairs = tuple((i, (i + 1) % len(names)) for i in range(len(names)))
    weights = tuple(0.1 + 0.3 * i / len(names) for i in range(len(names)))
    return PeerGraph(tuple(names), OwnTopology(len(names), pairs, directed, weights))


@pytest.mark.parametrize("directed", [False, True])
def test_the_present_mix_and_the_rest_stays_at_home(directed: bool) -> None:
    """Any subset, in any order, with a stranger: columns sum to one, and rows where it is
    undirected."""
    names = [f"p{i}" for i in range(6)]
    own, rng = ring_of(names, directed=directed), random.Random(3)
    for _ in range(60):
        members = rng.sample([*names, "stranger"], rng.randrange(1, 8))
        rows = own.rows(members)
        whole = dict(zip(names, own.sample(0).rows(), strict=True))
        for index, member in enumerate(members):
            assert sum(row.get(index, 0.0) for row in rows) == pytest.approx(1.0)
            if not directed:
                assert sum(rows[index].values()) == pytest.approx(1.0)
            if member == "stranger":
                assert rows[index] == {index: 1.0}
                continue
            for source, share in rows[index].items():
                if source != index:
                    assert share == whole[member][names.index(members[source])]


@pytest.mark.parametrize("peers", [2, 3, 5, 8])
def test_undisturbed_an_exchange_is_the_files_matrix(peers: int) -> None:
    names = [member.peer_id for member in group_of(peers, 0).members]
    own = ring_of([*reversed(names), "absent"])  # another order, and one that is not there
    world = World(peers, OWN, 1, seed=peers, own=own)
    world.run()
    expected = rows_of(world.group, OWN, own)
    for index, row in enumerate(world.rows().values()):
        found = {names.index(one.peer_id): one.share for one in row.heard}
        assert found | {index: row.own_share} == pytest.approx(expected[index])
    ended = [machine.finished for machine in world.machines.values()]
    assert all(one is not None and one.status is Status.COMPLETE for one in ended)


def test_in_exchanges_with_deaths_and_losses_an_edge_counts_at_both_ends_or_at_none() -> None:
    for seed in range(40):
        peers = 2 + seed % 6
        names = [member.peer_id for member in group_of(peers, 0).members]
        own = ring_of([*names, "absent"])
        world = World(peers, OWN, 0, seed=seed, loss=0.3, own=own)
        world.run(kills=seed % 3 if peers > 3 else 0, cuts=seed % 4)
        heard = {name: {one.peer_id for one in row.heard} for name, row in world.rows().items()}
        for name, row in world.rows().items():
            total = row.own_share + sum(one.share for one in row.heard)
            assert total == pytest.approx(1.0), f"seed {seed}: row of {name}"
            for other in heard:
                assert (other in heard[name]) == (name in heard[other]), f"seed {seed}"


def test_a_bucket_has_room_for_the_most_that_anybody_takes() -> None:
    star = PeerGraph(tuple("abcde"), OwnTopology(5, tuple((0, i) for i in range(1, 5))))
    assert most_neighbours(OWN, 16, star) == 4


def test_active_and_passive_take_turns_along_every_way() -> None:
    """A star whose middle is the second: by rank the leaves, even all of them, would never meet."""
    star = PeerGraph(tuple("abcde"), OwnTopology(5, tuple((1, i) for i in (0, 2, 3, 4))))
    everybody = set("abcde")
    assert star.partners("b", everybody) == ["a", "c", "d", "e"]
    assert star.partners("b", {"d"}) == ["d"]
    assert [star.partners(name, everybody) for name in "acde"] == [[], [], [], []]
    assert star.partners("stranger", everybody) == []
    triangle = PeerGraph(tuple("abc"), OwnTopology(3, ((0, 1), (1, 2), (2, 0))))
    assert [triangle.partners(name, set("abc")) for name in "abc"] == [[], ["a"], ["a"]], (
        "two that are both active would wait for each other"
    )


def test_a_meeting_is_with_a_neighbour_of_the_file() -> None:
    meetings = Meetings(5, seed=1)
    star = PeerGraph(tuple(meetings.names), OwnTopology(5, tuple((1, i) for i in (0, 2, 3, 4))))
    met = set()
    for turn in range(40):
        peer = meetings.nodes["peer1"].peer
        peer.state.own = star
        peer.handle(MeetAsked("t", f"{turn}", OWN, 20.0), 0.0)
        assert peer.pairs.meeting is not None
        met.add(peer.pairs.meeting.partner)
        peer.pairs.cancelled(f"{turn}")
        peer.take_effects()
    assert met == {"peer0", "peer2", "peer3", "peer4"}


# -- the trainer's side


def test_who_is_not_named_or_has_no_file_cannot_attach() -> None:
    own = ring_of(["me", "you", "them"])
    attachment = Attachment((TensorSpec("w", (8,), "float32"),), topology=OWN)

    def peer(name: str, graph: PeerGraph | None) -> Peer:
        return Peer(Params(), name, random.Random(1), run="r", own=graph)

    with pytest.raises(TrainerError, match=r"averaging\.topology_file") as caught:
        attachment.checked(peer("me", None))
    assert caught.value.reason == "topology_refused"
    with pytest.raises(TrainerError, match="expected stranger among the peers"):
        attachment.checked(peer("stranger", own))
    with pytest.raises(TrainerError, match=r"expected one of ring, .*, own"):
        replace(attachment, topology="star").checked(peer("me", own))
    assert attachment.checked(peer("me", own)).own is own


def test_two_files_are_two_runs_and_say_so() -> None:
    spec = TensorSpec("w", (8,), "float32")
    layout = Layout.from_specs((spec,), part_bytes=4096)
    one = Attachment((spec,), topology=OWN, own=ring_of(["a", "b", "c"]))
    other = replace(one, own=ring_of(["a", "b", "c", "d"]))
    assert schema_of(layout, one) != schema_of(layout, other)
    assert one.own is not None
    assert f"exchanges on topology own {one.own.digest}" in schema_text(layout, one)


def test_d_psgd_by_name_mixes_by_it_in_arithmetic() -> None:
    """One step from far apart, without a gradient: x becomes W x; the mean stays."""
    own = ring_of(["a", "b", "c", "d"])
    swarm = ArithmeticSwarm(4, topologies={OWN: own})

    def step(index: int) -> float:
        x = torch.nn.Parameter(torch.tensor([float(index**2)], dtype=torch.float64))
        optimizer = by_name("d-psgd", [x], swarm.peer(index), lr=0.1, topology=OWN)
        x.grad = torch.zeros_like(x)
        optimizer.step()
        return float(x.detach())

    found = swarm.play(step)
    w = matrix(own.sample(0))
    assert found == pytest.approx([sum(w[i][j] * j**2 for j in range(4)) for i in range(4)])


def test_the_simulator_draws_it_while_peers_come_and_go() -> None:
    own = ring_of([f"p{i}" for i in range(8)])
    population = Population.drawn(own, np.random.default_rng(1))
    total = population.values.sum()
    for t in range(60):
        population.mix(t, dead=[t % 8, (3 * t) % 8])
    assert population.values.sum() == pytest.approx(total)
    assert population.distortion < 0.05
