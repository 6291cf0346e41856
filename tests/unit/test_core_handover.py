"""What a leaving peer owes the others: who would lose something for good, and who is told what."""

from __future__ import annotations

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.handover import dependants, is_last_holder
from moshpitd.core.messages import Goodbye, Hello, Parity
from moshpitd.core.outcome import Reason, Status
from moshpitd.core.store_words import Rules, StoreClosed, StoreOpened, StorePullAsked
from tests.kit.hands import Hands, digest_of, record_of

PARTS = 4


def alone(rounds: int = 3) -> Hands:
    """One peer that trained alone for a while."""
    hands = Hands(1)
    hands.attach_all()
    for turn in range(rounds):
        hands.contribute("p00", [float(turn)] * PARTS)
        hands.finish()
    assert hands.nodes["p00"].peer.version == rounds
    return hands


def arrive(hands: Hands, name: str, values: float = 77.0) -> None:
    hands.add(name)
    hands.attach(name, [values] * PARTS)
    hands.settle()


def owed(hands: Hands, name: str = "p00") -> list[str]:
    return dependants(hands.nodes[name].peer.state)


def test_a_peer_that_trained_alone_owes_its_state_to_who_arrives_until_they_have_it() -> None:
    hands = alone()
    assert owed(hands) == []
    arrive(hands, "p01")
    arrive(hands, "p02", 78.0)
    assert owed(hands) == ["p01", "p02"]
    hands.sync("p01")
    hands.finish()
    assert hands.value("p01") == 2.0
    assert owed(hands) == []  # p02 can have it from p01 now
    assert owed(hands, "p01") == []


def test_a_round_leaves_nothing_that_only_one_holds() -> None:
    hands = Hands(3)
    hands.attach_all()
    for _ in range(2):
        hands.start()
        hands.finish()
    assert [owed(hands, name) for name in hands.nodes] == [[], [], []]
    arrive(hands, "p90")
    assert [owed(hands, name) for name in ("p00", "p01", "p02")] == [[], [], []]


@pytest.mark.parametrize(("ahead", "waits"), [(8, False), (9, True)])
def test_a_peer_of_our_lineage_counts_when_it_is_so_far_behind_that_it_will_ask(
    ahead: int, waits: bool
) -> None:
    hands = Hands(2)
    hands.attach_all()
    hands.start()
    hands.finish()  # both hold version 1
    peer = hands.nodes["p00"].peer
    peer.state.presence.update(version=1 + ahead)
    peer.state.donor.holds(1 + ahead, ())
    assert owed(hands) == (["p01"] if waits else [])


def test_a_peer_that_only_the_directory_knows_is_not_waited_for() -> None:
    hands = alone()
    hands.add("p01")
    ghost = record_of(hands.nodes["p01"].peer, schema=hands.nodes["p00"].peer.record.schema)
    hands.tell("p00", ev.Found("peers", (ghost,)))
    hands.drop = lambda sender, to, what: to == "p01"
    hands.settle()
    assert owed(hands) == []
    hands.tell("p00", ev.Received("p01", Hello(ghost, answer=True)))
    hands.settle()
    assert owed(hands) == ["p01"]


def test_a_peer_that_is_lost_is_not_waited_for() -> None:
    hands = alone()
    arrive(hands, "p01")
    hands.tell("p00", ev.Received("p01", Goodbye(Reason.NO_TRAINER)))
    hands.settle()
    assert owed(hands) == []


def test_a_state_that_nobody_would_take_is_owed_to_nobody() -> None:
    hands = Hands(3)
    hands.attach_all({"p02": [5.0] * PARTS})  # the two others are of one lineage, which wins
    hands.start(2)
    hands.finish()
    assert owed(hands, "p02") == []


def test_without_a_trainer_nothing_is_offered_and_nothing_owed() -> None:
    hands = alone()
    arrive(hands, "p01")
    hands.detach("p00")
    hands.settle()
    assert owed(hands) == []


def fetching(hands: Hands, name: str) -> tuple[str, bytes, str]:
    """(token, nonce, donor) of a newcomer whose transfer has begun and hangs."""
    hands.snapshot_fault = dict.fromkeys(hands.nodes, "hang")
    token = hands.sync(name)
    while not hands.did(ef.FetchSnapshot, name=name):
        hands.step(1)
    (fetch,) = hands.did(ef.FetchSnapshot, name=name)
    assert isinstance(fetch, ef.FetchSnapshot)
    return token, fetch.nonce, fetch.donor


@pytest.mark.parametrize("preempted", [False, True])
def test_a_donor_that_leaves_finishes_the_transfer_that_it_promised(preempted: bool) -> None:
    hands = alone()
    arrive(hands, "p01")
    token, nonce, donor = fetching(hands, "p01")
    hands.tell(donor, ev.Drained(preempted))
    hands.settle()
    assert len(hands.said(Goodbye, sender=donor, to="p01")) == 1
    held = list(hands.nodes[donor].snapshot[1])  # type: ignore[index]
    hands.nodes["p01"].staged[nonce] = held
    hands.tell("p01", ev.SnapshotArrived(nonce, digest_of(held)))
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert hands.nodes["p01"].values["t"] == held


def test_a_donor_that_leaves_and_dies_on_the_way_is_replaced() -> None:
    hands = Hands(3)
    hands.attach_all()
    hands.start()
    hands.finish()
    arrive(hands, "p90")
    token, _, donor = fetching(hands, "p90")
    hands.tell(donor, ev.Drained())
    hands.settle()
    hands.snapshot_fault = {}
    hands.kill(donor)
    hands.finish()
    assert hands.outcomes[token].loaded_snapshot
    assert {(n.peer, n.reason) for _, n in hands.named("snapshot_failed")} == {(donor, "link_lost")}


def test_a_preempted_peer_says_so_and_its_trainer_hears_that_the_daemon_leaves() -> None:
    hands = Hands(2)
    hands.attach_all()
    waiting = hands.contribute("p00")
    hands.settle()
    hands.tell("p00", ev.Drained(preempted=True))
    hands.settle()
    said = hands.said(Goodbye, sender="p00")
    assert [message.reason for message in said] == [Reason.PREEMPTED]  # type: ignore[union-attr]
    outcome = hands.outcomes[waiting]
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.DRAINING)
    (line,) = hands.nodes["p01"].peer.peers()
    assert line[2:] == ("lost", "preempted")


def test_what_a_peer_says_in_its_last_round_does_not_take_its_goodbye_back() -> None:
    hands = Hands(3)
    hands.attach_all()
    hands.hold = lambda sender, to, message: isinstance(message, Parity) and sender == "p02"
    tokens = hands.start()
    hands.settle()
    hands.tell("p02", ev.Drained())
    hands.settle()
    hands.hold = lambda sender, to, message: False
    hands.release()
    hands.finish()
    assert {hands.outcomes[token].status for token in tokens.values()} == {Status.COMPLETE}
    for name in ("p00", "p01"):
        states = {line[0].peer_id: line[2] for line in hands.nodes[name].peer.peers()}
        assert states["p02"] == "lost"
    began = hands.now
    again = hands.start(2)
    hands.finish()
    assert {hands.outcomes[token].group_size for token in again.values()} == {2}
    assert hands.now - began < 0.5


def kept_alone(hands: Hands, name: str) -> bool:
    return is_last_holder(hands.nodes[name].peer.state, hands.now)


def averaged(count: int) -> Hands:
    """Peers that were in one round together."""
    hands = Hands(count)
    hands.attach_all()
    hands.start()
    hands.finish()
    return hands


def test_a_run_that_is_left_is_not_the_last_copy_while_somebody_is_known_to_train_it() -> None:
    hands = averaged(3)
    hands.detach("p00")
    hands.settle()
    assert not kept_alone(hands, "p00")
    hands.detach("p01")
    hands.settle()
    assert not kept_alone(hands, "p01"), "p02 is there"
    hands.detach("p02")
    hands.settle()
    assert kept_alone(hands, "p02"), "both others said goodbye to it"
    hands.now += hands.params.heard_fresh_s + 1
    assert kept_alone(hands, "p00"), "whom it heard last is a long time ago"


def test_who_came_since_and_has_not_caught_up_holds_nothing() -> None:
    hands = averaged(2)
    hands.kill("p01")
    hands.tell("p00", ev.Undelivered("p01", Hello(hands.nodes["p00"].peer.record)))
    hands.tell("p00", ev.Undelivered("p01", Hello(hands.nodes["p00"].peer.record)))
    hands.settle()
    arrive(hands, "p02")
    hands.detach("p00")
    hands.settle()
    assert kept_alone(hands, "p00")


def test_what_was_never_mixed_with_anybodys_is_nobodys_last_copy() -> None:
    hands = alone()
    hands.detach("p00")
    hands.settle()
    assert not kept_alone(hands, "p00")


def test_a_state_that_was_taken_from_others_is_one() -> None:
    hands = alone()
    arrive(hands, "p01")
    hands.sync("p01")
    hands.finish()
    hands.detach("p00")
    hands.settle()
    hands.detach("p01")
    hands.settle()
    assert kept_alone(hands, "p01")


def test_a_run_is_under_way_until_a_snapshot_that_it_gives_has_arrived_or_is_given_up() -> None:
    hands = alone()
    arrive(hands, "p01")
    peer = hands.nodes["p00"].peer
    hands.snapshot_fault["p00"] = "hang"
    hands.sync("p01")
    while not peer.state.donor.serving:
        hands.step(1)
    hands.detach("p00")
    hands.settle()
    assert peer.under_way(hands.now)
    assert not peer.under_way(hands.now + peer.params.round_timeout_s), "nobody waits so long"


def test_a_run_is_under_way_while_its_call_is() -> None:
    hands = averaged(2)
    peer = hands.nodes["p00"].peer
    assert not peer.under_way(hands.now)
    hands.contribute("p00", [1.0] * PARTS)
    hands.step(1)
    assert peer.under_way(hands.now)


def test_a_store_is_a_duty_while_anybody_may_rely_on_it() -> None:
    hands = averaged(2)
    peer, now = hands.nodes["p00"].peer, hands.now
    peer.handle(StoreOpened("p00/t", Rules(0.1, 1, 2, block=False)), now)
    peer.handle(StorePullAsked("token", "p00/t"), now)
    assert peer.storage.on_duty
    assert peer.under_way(now)
    assert not peer.under_way(now + peer.params.heard_fresh_s + 1), "they found another"
    peer.handle(StoreClosed("p00/t"), now)
    peer.handle(ev.TrainerGone("t"), now)
    assert not peer.storage.on_duty
    assert not peer.under_way(now)
