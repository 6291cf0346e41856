"""Newcomers and lineages: what is loaded, from whom, and what is not believed.

One rule: a test looks at the values that trainers hold in the end, not only at the outcome.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import (
    DigestQuery,
    DigestReply,
    Goodbye,
    Hello,
    Lineage,
    Record,
    SnapshotOffer,
    SnapshotRefused,
    SnapshotRequest,
)
from moshpitd.core.outcome import Reason, Status
from moshpitd.core.params import Params
from tests.kit.hands import Hands, digest_of, record_of

PARTS = 4


def trained(count: int = 3, *, rounds: int = 2, params: Params | None = None) -> Hands:
    """So many peers that hold the same results of so many rounds."""
    hands = Hands(count, params=params)
    hands.attach_all()
    for _ in range(rounds):
        hands.start()
        hands.finish()
    assert {node.peer.version for node in hands.nodes.values()} == {rounds}
    return hands


def newcomer(hands: Hands, name: str = "p90", *, dialable: bool = True) -> str:
    hands.add(name, dialable=dialable)
    hands.attach(name, [77.0] * PARTS)
    hands.settle()
    return name


def synced(hands: Hands, name: str, **options: object) -> ef.Finish:
    token = hands.sync(name, **options)  # type: ignore[arg-type]
    hands.finish()
    return next(f for f in hands.did(ef.Finish) if f.token == token)  # type: ignore[union-attr, return-value]


def refuse_everything(hands: Hands) -> list[SnapshotRefused]:
    return [m for m in hands.said(SnapshotRefused) if isinstance(m, SnapshotRefused)]


# -- the way it should go


def test_a_newcomer_loads_a_confirmed_snapshot_and_enters_with_weight_zero() -> None:
    hands = trained()
    held = list(hands.nodes["p00"].values["t"])
    name = newcomer(hands)
    tokens = {n: hands.contribute(n, [float(i)] * PARTS) for i, n in enumerate(hands.nodes)}
    hands.finish()
    outcome = hands.outcomes[tokens[name]]
    loaded = hands.named("snapshot_loaded")
    assert [who for who, _ in loaded] == [name]
    assert loaded[0][1].fields == {"version": 2, "confirmed": True}
    assert hands.nodes[name].snapshot is not None
    assert outcome.loaded_snapshot
    assert outcome.accepted
    assert hands.said(DigestQuery, sender=name)
    assert held != [77.0] * PARTS
    # Whoever led, it contributed nothing of its own.
    if outcome.group_size > 1:
        group = hands.nodes[name].opened[-1].group
        assert {m.weight for m in group.members if m.peer_id == name} == {0.0}
        assert hands.value(name) == hands.value("p00")
        assert hands.nodes[name].peer.version == 3


def test_a_sync_alone_brings_a_newcomer_up_to_date() -> None:
    hands = trained()
    name = newcomer(hands)
    outcome = synced(hands, name).outcome
    assert (outcome.status, outcome.loaded_snapshot, outcome.version) == (Status.COMPLETE, True, 2)
    assert hands.nodes[name].values["t"] == hands.nodes["p00"].values["t"]
    assert hands.named("snapshot_served")
    again = synced(hands, name).outcome  # nothing to do any more
    assert (again.status, again.loaded_snapshot) == (Status.COMPLETE, False)
    # It serves the next one itself.
    record = hands.nodes[name].peer.record
    assert record.has_snapshot
    assert record.lineage == hands.nodes["p00"].peer.lineage


def test_a_cold_start_from_different_bits_ends_in_the_lowest_founders() -> None:
    hands = Hands(3)
    hands.attach_all({name: [float(i)] * PARTS for i, name in enumerate(hands.nodes)})
    for name in hands.nodes:
        hands.sync(name)
    hands.finish()
    assert all(node.values["t"] == [0.0] * PARTS for node in hands.nodes.values())
    assert {node.peer.lineage for node in hands.nodes.values()} == {
        Lineage("p00", digest_of([0.0] * PARTS))
    }
    assert {note.peer for _, note in hands.named("lineage_adopted")} == {"p00"}
    tokens = hands.start()
    hands.finish()
    assert {hands.outcomes[t].group_size for t in tokens.values()} == {3}


@pytest.mark.parametrize("seed", range(5))
def test_a_cold_start_of_all_at_once_is_one_group_in_any_order(seed: int) -> None:
    hands = Hands(4, seed=seed, shuffle=True)
    for i, name in enumerate(hands.nodes):
        hands.attach(name, [float(i)] * PARTS)
    for name in hands.nodes:
        hands.contribute(name)
    hands.finish(within_s=60.0)
    hands.run(until_s=hands.now + 10.0)
    for name in hands.nodes:
        hands.contribute(name)
    hands.finish(within_s=60.0)
    assert len({node.peer.lineage.digest for node in hands.nodes.values()}) == 1
    assert len({tuple(node.values["t"]) for node in hands.nodes.values()}) == 1


def test_the_same_bits_under_two_founders_are_one_lineage_and_nothing_is_loaded() -> None:
    hands = Hands(3)
    hands.attach_all()
    hands.start()
    hands.finish()
    assert not hands.named("snapshot_loaded")
    assert {node.peer.lineage.founder for node in hands.nodes.values()} == {"p00"}


def test_everybody_resumes_from_another_checkpoint_of_one_version() -> None:
    hands = Hands(3)
    for i, name in enumerate(hands.nodes):
        hands.attach(name, [float(i)] * PARTS, version=40)
    hands.run(until_s=1.0)
    for name in hands.nodes:
        hands.sync(name)
    hands.finish()
    assert all(node.values["t"] == [0.0] * PARTS for node in hands.nodes.values())
    assert {node.peer.version for node in hands.nodes.values()} == {40}


def test_the_latest_of_several_checkpoints_wins() -> None:
    hands = Hands(3)
    for i, name in enumerate(hands.nodes):
        hands.attach(name, [float(i)] * PARTS, version=40 + i)
    hands.run(until_s=1.0)
    for name in hands.nodes:
        hands.sync(name)
    hands.finish()
    assert all(node.values["t"] == [2.0] * PARTS for node in hands.nodes.values())


def test_a_lineage_of_two_beats_a_higher_version_of_one() -> None:
    hands = Hands(3)
    for name, value, version in (("p00", 5.0, 3), ("p01", 5.0, 3), ("p02", 9.0, 10**6)):
        hands.attach(name, [value] * PARTS, version=version, founder="f")
    hands.run(until_s=1.0)
    for name in hands.nodes:
        hands.sync(name)
    hands.finish()
    assert all(node.values["t"] == [5.0] * PARTS for node in hands.nodes.values())


def test_a_peer_that_lags_too_far_takes_a_snapshot() -> None:
    hands = Hands(3, params=Params(max_version_lag=2))
    hands.attach_all()
    for _ in range(4):
        hands.start(2)
        hands.finish()
    assert hands.nodes["p02"].peer.version == 0
    token = hands.contribute("p02", [50.0] * PARTS)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert hands.nodes["p02"].peer.version >= 4


def test_a_snapshot_between_two_rounds_of_a_call_replaces_what_the_first_came_to() -> None:
    """Else the outcome would name a group whose average is in no bucket any more."""
    hands = Hands(2, params=Params(max_version_lag=2, max_group=2))
    hands.attach_all()
    hands.push_fault = {("p01", part): Reason.BUCKET_MODIFIED for part in range(PARTS)}
    token = hands.contribute("p00", [1.0] * PARTS, rounds=2)
    first = hands.contribute("p01", [3.0] * PARTS)
    while first not in hands.outcomes:
        hands.step(1)
    hands.settle()
    assert hands.outcomes[first].status is Status.PARTIAL
    assert hands.nodes["p00"].peer.version == 1
    assert token not in hands.outcomes
    start = hands.nodes["p00"].peer.lineage
    for name in ("p02", "p03", "p04", "p05"):
        hands.add(name)
        hands.attach(name, [50.0] * PARTS, version=20, founder=start.founder, digest=start.digest)
        hands.contribute(name)  # so that it is heard of
    hands.finish()
    outcome = hands.outcomes[token]
    assert (hands.value("p00"), outcome.version) == (50.0, 20)
    assert (outcome.accepted, outcome.loaded_snapshot) == (True, True)
    assert (outcome.status, outcome.group_id) == (Status.ALONE, b"")
    assert (outcome.contributors, outcome.agreed) == (("p00",), ())


def test_a_peer_alone_for_an_hour_is_joined_by_a_second_within_one_window() -> None:
    hands = Hands(1)
    hands.attach_all()
    for hour in range(12):
        hands.contribute("p00", [float(hour)] * PARTS)
        hands.finish()
        hands.run(until_s=hands.now + 300.0)
    assert hands.nodes["p00"].peer.version == 12
    hands.add("a-lower-id")
    hands.attach("a-lower-id", [99.0] * PARTS)
    hands.settle()
    tokens = [hands.contribute("p00", [11.0] * PARTS), hands.contribute("a-lower-id")]
    hands.finish()
    assert [hands.outcomes[t].group_size for t in tokens] == [2, 2]
    assert hands.value("a-lower-id") == hands.value("p00") == 11.0  # the fresh start did not win
    assert max(hands.ended_at[t] for t in tokens) - hands.now <= 5.0


def test_two_trainers_of_one_node_of_which_one_is_fresh() -> None:
    hands = trained()
    hands.attach("p00", [99.0] * PARTS, trainer="u")
    hands.settle()
    tokens = {name: hands.contribute(name) for name in hands.nodes}
    fresh = hands.contribute("p00", trainer="u", weight=5)
    hands.finish()
    assert hands.outcomes[fresh].loaded_snapshot
    assert hands.value("p00", trainer="u") == hands.value("p00") == hands.value("p01")
    assert hands.nodes["p00"].opened[-1].weight == 1.0  # the fresh one added nothing
    assert {hands.outcomes[t].group_size for t in tokens.values()} == {3}


def test_a_trainer_that_comes_back_gets_the_state_that_its_node_kept() -> None:
    hands = trained()
    held = list(hands.nodes["p00"].values["t"])
    hands.detach("p00")
    hands.settle()
    hands.attach("p00", [0.0] * PARTS)
    hands.settle()
    assert synced(hands, "p00").outcome.loaded_snapshot
    assert hands.nodes["p00"].values["t"] == held
    assert hands.did(ef.LoadSnapshot, name="p00")[-1] == ef.LoadSnapshot(b"", 2, ("t",))


# -- donors that fail


def test_a_donor_whose_bytes_do_not_have_its_digest_is_struck_and_the_next_one_asked() -> None:
    hands = trained()
    hands.snapshot_fault = {"p00": "corrupt", "p01": "corrupt"}
    name = newcomer(hands)
    assert synced(hands, name).outcome.loaded_snapshot
    assert hands.nodes[name].values["t"] == hands.nodes["p02"].values["t"]
    struck = {note.peer for _, note in hands.named("strike")}
    assert struck <= {"p00", "p01"}
    assert {note.reason for _, note in hands.named("snapshot_failed")} <= {"digest_differs"}


def test_a_witness_that_contradicts_a_liar_is_believed() -> None:
    hands = trained()
    honest = list(hands.nodes["p01"].values["t"])
    hands.nodes["p00"].snapshot = (2, [666.0] * PARTS)  # lies consistently
    name = newcomer(hands)
    for liar in ("p01", "p02"):
        hands.tell(liar, ev.Drained())  # only the liar offers itself; the others still witness
    hands.settle()
    hands.tell(name, ev.Received("p01", Hello(hands.nodes["p01"].peer.record, answer=True)))
    outcome = synced(hands, name).outcome
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.NO_DONOR)
    assert "p00 (digest_differs)" in outcome.detail
    assert hands.nodes[name].values["t"] == [77.0] * PARTS
    assert hands.nodes["p01"].values["t"] == honest
    assert ("p00", "digest_differs") in {(n.peer, n.reason) for _, n in hands.named("strike")}


@pytest.mark.parametrize("fault", ["hang", "fail"])
def test_a_transfer_that_breaks_or_stalls_goes_on_with_the_next_donor(fault: str) -> None:
    hands = trained()
    hands.snapshot_fault = {"p00": fault, "p01": fault}
    name = newcomer(hands)
    began = hands.now
    token = hands.sync(name, timeout_s=100.0)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert hands.nodes[name].values["t"] == hands.nodes["p02"].values["t"]
    limit = 2 * hands.params.snapshot_timeout_s + 1 if fault == "hang" else 1.0
    assert hands.now - began <= limit


def test_a_donor_that_dies_in_the_middle_is_replaced() -> None:
    hands = trained()
    hands.snapshot_fault = dict.fromkeys(hands.nodes, "hang")
    name = newcomer(hands)
    token = hands.sync(name)
    while not hands.did(ef.FetchSnapshot, name=name):
        hands.step(1)
    donor = hands.did(ef.FetchSnapshot, name=name)[0].donor  # type: ignore[union-attr]
    hands.settle()
    hands.snapshot_fault = {}
    hands.kill(donor)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert ("link_lost", donor) in {(n.reason, n.peer) for _, n in hands.named("snapshot_failed")}


def test_a_donor_that_never_answers_is_skipped_after_the_answer_timeout() -> None:
    hands = trained()
    hands.drop = lambda sender, to, what: isinstance(what, SnapshotRequest) and to != "p02"
    name = newcomer(hands)
    token = hands.sync(name)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert hands.now - 2.0 <= 3 * hands.params.answer_timeout_s


def test_a_donor_that_cannot_be_reached_is_skipped_at_once() -> None:
    hands = trained()
    name = newcomer(hands)
    for dead in ("p00", "p01"):
        hands.nodes[dead].alive = False
    began = hands.now
    token = hands.sync(name)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert hands.now - began < 1.0


def test_nobody_offers_a_snapshot_and_the_call_says_so_within_ten_seconds() -> None:
    hands = trained(2)
    name = newcomer(hands)
    for other in ("p00", "p01"):
        hands.detach(other)
    hands.settle()
    forged = [
        record_of(hands.nodes[o].peer, sequence=99, has_snapshot=False) for o in ("p00", "p01")
    ]
    hands.drop = lambda sender, to, what: isinstance(what, Goodbye)
    for record in forged:
        hands.tell(name, ev.Received(record.peer_id, Hello(record, answer=True)))
    began = hands.now
    outcome = synced(hands, name).outcome
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.NO_DONOR)
    assert "none was reachable" in outcome.detail
    assert hands.now - began <= 10.0


def test_a_catch_up_ends_with_its_call() -> None:
    hands = trained()
    hands.snapshot_fault = dict.fromkeys(hands.nodes, "hang")
    name = newcomer(hands)
    outcome = synced(hands, name, timeout_s=7.0).outcome
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.TIMEOUT)
    assert hands.nodes[name].staged == {}


def test_an_offer_of_another_size_or_too_much_state_is_refused() -> None:
    hands = trained()
    hands.change = lambda sender, to, message: (
        replace(message, parts=99) if isinstance(message, SnapshotOffer) else message
    )
    name = newcomer(hands)
    assert synced(hands, name).outcome.reason is Reason.NO_DONOR
    assert {note.reason for _, note in hands.named("snapshot_failed")} == {"wrong_part_size"}


def test_witnesses_that_have_moved_on_or_are_silent_are_passed_over() -> None:
    hands = trained(4)
    name = newcomer(hands)
    hands.change = lambda sender, to, message: (
        replace(message, digest=b"") if isinstance(message, DigestReply) else message
    )
    count = 0

    def drop(sender: str, to: str, what: object) -> bool:
        nonlocal count
        count += isinstance(what, DigestQuery)
        return isinstance(what, DigestQuery) and count == 1

    hands.drop = drop
    assert synced(hands, name).outcome.loaded_snapshot
    assert hands.named("snapshot_loaded")[-1][1].fields["confirmed"] is False


def test_a_witness_that_dies_is_passed_over_at_once() -> None:
    hands = trained(3)
    name = newcomer(hands)
    hands.hold = lambda sender, to, message: isinstance(message, DigestQuery)
    token = hands.sync(name)
    hands.settle()
    witness = hands.held[0][1]
    hands.nodes[witness].alive = False
    hands.hold = lambda sender, to, message: False
    hands.release()
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot


# -- the donor's side


def request(record: Record, number: int) -> SnapshotRequest:
    return SnapshotRequest(bytes([number]) * 16, record)


def test_a_donor_serves_two_at_once_and_says_busy_to_the_third() -> None:
    hands = trained(params=Params(snapshot_slots=2))
    hands.snapshot_fault = {"p00": "hang"}
    record = hands.nodes["p01"].peer.record
    for number in range(3):
        hands.tell("p00", ev.Received("p01", request(record, number)))
    hands.settle()
    assert [m.reason for m in refuse_everything(hands)] == [Reason.BUSY]
    hands.tell("p00", ev.SnapshotFailed(bytes([0]) * 16, Reason.LINK_LOST))
    hands.tell("p00", ev.Received("p01", request(record, 4)))
    hands.settle()
    assert len(refuse_everything(hands)) == 1


def test_a_slot_that_was_never_given_back_is_free_after_the_round_timeout() -> None:
    hands = trained(params=Params(snapshot_slots=2))
    hands.snapshot_fault = {"p00": "hang"}
    record = hands.nodes["p01"].peer.record
    for number in range(2):
        hands.tell("p00", ev.Received("p01", request(record, number)))
    hands.settle()
    hands.now += hands.params.round_timeout_s + 1.0
    hands.tell("p00", ev.Received("p01", request(record, 3)))
    hands.settle()
    assert refuse_everything(hands) == []


def test_a_donor_refuses_another_schema_and_one_without_a_trainer_everybody() -> None:
    hands = trained()
    record = record_of(hands.nodes["p01"].peer, schema=b"other")
    hands.tell("p00", ev.Received("p01", request(record, 1)))
    hands.detach("p00")
    hands.tell("p00", ev.Received("p01", request(hands.nodes["p01"].peer.record, 2)))
    hands.settle()
    assert [m.reason for m in refuse_everything(hands)] == [Reason.SCHEMA, Reason.NO_TRAINER]


def test_a_peer_that_never_had_a_state_has_no_snapshot() -> None:
    hands = Hands(1)
    hands.attach("p00")
    hands.run(until_s=1.0)
    peer = hands.nodes["p00"].peer
    peer.state.donor.version = None  # as after a start that could not make its copy
    hands.tell(
        "p00", ev.Received("p09", request(Record("p09", 1, peer.record.schema, 0, Lineage()), 1))
    )
    hands.nodes["p09"] = hands.nodes["p00"]
    hands.settle()
    assert [m.reason for m in refuse_everything(hands)] == [Reason.NO_SNAPSHOT]


def test_a_snapshot_that_is_replaced_while_its_digest_is_computed_is_superseded() -> None:
    hands = trained()
    peer = hands.nodes["p00"].peer
    record = hands.nodes["p01"].peer.record
    peer.handle(ev.SnapshotRefreshed(9), hands.now)
    peer.handle(ev.Received("p01", request(record, 1)), hands.now)
    peer.handle(ev.Received("p01", DigestQuery(b"n" * 16, 9)), hands.now)
    assert ef.Digest(9) in peer.take_effects()
    peer.handle(ev.Digested(9, b""), hands.now)
    said = [e.message for e in peer.take_effects() if isinstance(e, ef.Send)]
    assert SnapshotRefused(bytes([1]) * 16, Reason.SUPERSEDED) in said
    assert DigestReply(b"n" * 16, 9, b"") in said
    peer.handle(ev.Received("p01", DigestQuery(b"n" * 16, 10**9)), hands.now)
    said = [e.message for e in peer.take_effects() if isinstance(e, ef.Send)]
    assert said == [DigestReply(b"n" * 16, 10**9, b"")]


def test_only_the_last_few_digests_are_remembered() -> None:
    hands = trained()
    peer = hands.nodes["p00"].peer
    for version in range(10, 20):
        peer.handle(ev.Digested(version, bytes([version])), hands.now)
    peer.take_effects()
    for version, known in ((19, True), (16, True), (15, False)):
        peer.handle(ev.Received("p01", DigestQuery(b"n", version)), hands.now)
        reply = peer.take_effects()[-1]
        assert isinstance(reply, ef.Send)
        assert bool(reply.message.digest) is known  # type: ignore[union-attr]


def test_the_size_of_the_trainers_state_is_offered() -> None:
    hands = trained()
    for name in hands.nodes:
        hands.tell(name, ev.StateStored(1234))
    name = newcomer(hands)
    synced(hands, name)
    assert {m.state_bytes for m in hands.said(SnapshotOffer)} == {1234}  # type: ignore[union-attr]


# -- found by these tests


@pytest.mark.parametrize("version", [-3, 10**12])
def test_an_offer_of_an_impossible_version_is_refused(version: int) -> None:
    hands = trained()
    hands.change = lambda sender, to, message: (
        replace(message, version=version) if isinstance(message, SnapshotOffer) else message
    )
    name = newcomer(hands)
    synced(hands, name)
    assert 0 <= hands.nodes[name].peer.version <= 2 + hands.params.max_version_lag


def test_an_offer_of_another_lineage_is_refused() -> None:
    hands = trained()
    hands.change = lambda sender, to, message: (
        replace(message, lineage=Lineage("x", b"x"))
        if isinstance(message, SnapshotOffer)
        else message
    )
    name = newcomer(hands)
    synced(hands, name)
    assert hands.nodes[name].peer.lineage.digest != b"x"


def test_a_liar_that_names_no_witness_is_not_believed_while_others_could_be_asked() -> None:
    hands = trained(4)
    hands.nodes["p00"].snapshot = (2, [666.0] * PARTS)
    hands.change = lambda sender, to, message: (
        replace(message, witnesses=()) if isinstance(message, SnapshotOffer) else message
    )
    hands.drop = lambda sender, to, what: isinstance(what, SnapshotRequest) and to != "p00"
    name = newcomer(hands)
    synced(hands, name)
    assert hands.nodes[name].values["t"] != [666.0] * PARTS
