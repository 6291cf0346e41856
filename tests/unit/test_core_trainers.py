"""The local side: several trainers of one node, and every way in which one of them may go.

One rule: whatever a trainer does, every call that still has somebody to answer gets exactly one
Finish (Hands checks the "exactly").
"""

from __future__ import annotations

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import Goodbye, Invite, Join, Parity
from moshpitd.core.outcome import OnPartial, Reason, Status
from moshpitd.core.params import Params
from tests.kit.hands import Hands

PARTS = 4


def node(trainers: int = 3, *, others: int = 1, params: Params | None = None) -> Hands:
    """p00 has so many trainers t, u, v that hold one state; the others have one each."""
    hands = Hands(1 + others, params=params)
    hands.attach_all()
    for trainer in "uvwx"[: trainers - 1]:
        hands.attach("p00", trainer=trainer)
        hands.settle()
        hands.sync("p00", trainer=trainer)
        hands.finish()
    return hands


def averaging(hands: Hands) -> None:
    """p00 and p01 are in an exchange that ends as soon as `hands.hold` lets it."""
    hands.hold = lambda sender, to, message: isinstance(message, Parity)
    hands.contribute("p00", [1.0] * PARTS)
    hands.run(until_s=hands.now + 1.0)
    hands.contribute("p01", [3.0] * PARTS)
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "exchange"


def go_on(hands: Hands) -> None:
    hands.hold = lambda sender, to, message: False
    hands.release()


# -- the local window


def test_three_trainers_within_the_window_are_one_contribution_of_the_summed_weight() -> None:
    hands = node()
    tokens = [
        hands.contribute("p00", [float(value)] * PARTS, trainer=trainer, weight=weight)
        for trainer, value, weight in (("t", 1, 10), ("u", 2, 20), ("v", 3, 30))
    ]
    other = hands.contribute("p01", [9.0] * PARTS, weight=40)
    hands.finish()
    opened = hands.nodes["p00"].opened[-1]
    assert opened.trainers == (("t", 10), ("u", 20), ("v", 30))
    assert opened.weight == 60.0
    expected = (10 * 1 + 20 * 2 + 30 * 3 + 40 * 9) / 100
    for trainer in "tuv":
        assert hands.value("p00", trainer=trainer) == pytest.approx(expected)
    for token in (*tokens, other):
        assert hands.outcomes[token].status is Status.COMPLETE
        assert hands.outcomes[token].total_weight == 100.0
        assert hands.outcomes[token].participants == 2  # peers, not trainers


def test_the_window_ends_when_all_trainers_are_in() -> None:
    hands = node()
    began = hands.now
    for trainer in "tuv":
        hands.contribute("p00", trainer=trainer)
    hands.contribute("p01")
    hands.finish()
    assert hands.now == began


def test_the_window_ends_by_itself_for_those_who_came() -> None:
    hands = node()
    began = hands.now
    first = hands.contribute("p00", trainer="t")
    hands.contribute("p00", trainer="u")
    hands.contribute("p01")
    hands.finish()
    assert hands.nodes["p00"].opened[-1].trainers == (("t", 1), ("u", 1))
    assert hands.ended_at[first] - began == pytest.approx(hands.params.local_window_s)


def test_a_late_trainer_gets_the_result_as_a_delta() -> None:
    hands = node(2, others=2)  # p02 stays idle, so matchmaking takes its window
    hands.contribute("p00", [1.0] * PARTS, trainer="t")
    hands.contribute("p01", [3.0] * PARTS)
    hands.run(until_s=hands.now + 2.0)
    late = hands.contribute("p00", [10.0] * PARTS, trainer="u")
    hands.finish()
    assert hands.nodes["p00"].opened[-1].late == ("u",)
    assert hands.value("p00", trainer="t") == 2.0
    assert hands.value("p00", trainer="u") == 11.0  # what it held, plus average minus contribution
    assert hands.outcomes[late].status is Status.COMPLETE


def test_a_late_trainer_that_is_left_alone_makes_its_node_hold_the_result() -> None:
    """Whose contribution it was is gone before the exchange is over."""
    hands = node(2, others=2)
    hands.contribute("p00", [1.0] * PARTS, trainer="t")
    hands.contribute("p01", [3.0] * PARTS)
    hands.run(until_s=hands.now + 2.0)
    late = hands.contribute("p00", [10.0] * PARTS, trainer="u")
    hands.hold = lambda sender, to, message: isinstance(message, Parity)
    while not hands.nodes["p00"].opened:
        hands.run(until_s=hands.now + 0.1)
    hands.detach("p00", trainer="t")
    go_on(hands)
    hands.finish()
    assert hands.value("p00", trainer="u") == 11.0
    assert hands.outcomes[late].version == hands.nodes["p00"].peer.version == 1


def test_what_comes_during_an_exchange_waits_for_the_next_one() -> None:
    hands = node(2)
    averaging(hands)
    queued = hands.contribute("p00", [5.0] * PARTS, trainer="u")
    hands.settle()
    assert queued not in hands.outcomes
    go_on(hands)
    hands.contribute("p01", [7.0] * PARTS)
    hands.finish()
    assert hands.value("p00", trainer="u") == 6.0
    assert len(hands.nodes["p00"].opened) == 2


def test_a_sync_during_an_exchange_waits_its_turn() -> None:
    hands = node(2)
    averaging(hands)
    token = hands.sync("p00", trainer="u")
    hands.settle()
    assert token not in hands.outcomes
    go_on(hands)
    hands.finish()
    assert hands.outcomes[token].status is Status.COMPLETE


def test_two_syncs_at_once_are_one_catch_up() -> None:
    hands = node(2)
    hands.run(until_s=hands.now + 20.0)
    looked = len(hands.did(ef.LookUp, name="p00"))
    tokens = [hands.sync("p00", trainer=trainer) for trainer in "tu"]
    hands.finish()
    assert {hands.outcomes[token].status for token in tokens} == {Status.COMPLETE}
    assert len(hands.did(ef.LookUp, name="p00")) - looked <= 1


# -- refusals


@pytest.mark.parametrize("weight", [-1, float("nan"), 1.0, True, None, "1", (1 << 32) + 1])
def test_a_weight_that_is_none_is_refused_before_anything_happens(weight: object) -> None:
    hands = node(1)
    before = len(hands.sent)
    token = hands.contribute("p00", weight=weight)  # type: ignore[arg-type]
    hands.settle()
    outcome = hands.outcomes[token]
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.WEIGHT)
    assert not outcome.accepted
    assert len(hands.sent) == before


@pytest.mark.parametrize("weight", [0, 1, 1 << 32])
def test_the_bounds_of_a_weight_are_weights(weight: int) -> None:
    hands = node(1)
    token = hands.contribute("p00", weight=weight)
    hands.finish()
    assert hands.outcomes[token].reason is not Reason.WEIGHT


def test_all_weights_zero_changes_nothing_and_says_so() -> None:
    hands = node(1)
    tokens = [
        hands.contribute("p00", [1.0] * PARTS, weight=0),
        hands.contribute("p01", [2.0] * PARTS, weight=0),
    ]
    hands.finish()
    for token in tokens:
        outcome = hands.outcomes[token]
        assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.NO_CONTRIBUTORS)
        assert "all weights are 0" in outcome.detail
        assert not outcome.accepted
    assert (hands.value("p00"), hands.value("p01")) == (1.0, 2.0)


def test_a_second_contribution_of_one_trainer_is_busy() -> None:
    hands = node(1)
    first, second = hands.contribute("p00"), hands.contribute("p00")
    hands.settle()
    assert hands.outcomes[second].reason is Reason.BUSY
    assert not hands.outcomes[second].accepted
    hands.finish()
    assert hands.outcomes[first].reason is not Reason.BUSY


def test_a_trainer_that_never_attached_is_gone() -> None:
    hands = node(1)
    tokens = [hands.contribute("p00", trainer="nobody"), hands.sync("p00", trainer="nobody")]
    hands.settle()
    assert [hands.outcomes[token].reason for token in tokens] == [Reason.TRAINER_GONE] * 2


# -- cancelled


def test_a_cancelled_call_in_the_local_window_takes_nobody_along() -> None:
    hands = node(2)
    first = hands.contribute("p00", trainer="t")
    hands.settle()
    hands.cancel(first)
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "idle"
    hands.contribute("p00", trainer="u")
    hands.contribute("p01")
    hands.finish()
    assert hands.nodes["p00"].opened[-1].trainers == (("u", 1),)


def test_a_cancelled_call_in_the_exchange_lets_it_end() -> None:
    hands = node(2)
    averaging(hands)
    queued = hands.contribute("p00", trainer="u")
    hands.settle()
    hands.cancel(queued)
    token = next(t for t in hands.calls if t.startswith("p00") and t not in hands.outcomes)
    hands.cancel(token)
    go_on(hands)
    hands.finish()
    assert hands.outcomes[token].status is Status.COMPLETE  # nobody listens any more
    assert len(hands.nodes["p00"].opened) == 1


def test_a_cancelled_sync_ends_its_catch_up() -> None:
    hands = Hands(2)
    hands.attach_all({"p01": [5.0] * PARTS})
    hands.drop = lambda sender, to, what: True
    token = hands.sync("p01")
    hands.settle()
    assert hands.nodes["p01"].peer.phase == "catch_up"
    hands.cancel(token)
    hands.settle()
    assert hands.nodes["p01"].peer.phase == "idle"


def test_cancelling_what_is_not_there_does_nothing() -> None:
    hands = node(1)
    hands.tell("p00", ev.Cancelled("no such token"))
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "idle"


# -- gone


def test_a_trainer_that_dies_before_it_contributed_is_not_waited_for() -> None:
    hands = node(2)
    hands.detach("p00", trainer="u")
    hands.contribute("p00", trainer="t")
    hands.contribute("p01")
    began = hands.now
    hands.finish()
    assert hands.now == began


def test_a_trainer_that_dies_in_the_local_window_is_not_in() -> None:
    hands = node(3)
    hands.contribute("p00", trainer="t")
    hands.contribute("p00", trainer="u")
    hands.settle()
    hands.detach("p00", trainer="t")
    hands.contribute("p01")
    hands.finish()
    assert hands.nodes["p00"].opened[-1].trainers == (("u", 1),)


def test_the_last_trainer_dies_while_matching_and_the_others_are_told_at_once() -> None:
    hands = node(1, others=2)
    hands.contribute("p00")
    token = hands.contribute("p01")
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "matchmaking"
    hands.detach("p00")
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "idle"
    last = hands.said(Goodbye, sender="p00")[-1]
    assert isinstance(last, Goodbye)
    assert last.reason is Reason.NO_TRAINER
    assert not hands.nodes["p00"].peer.record.has_snapshot
    hands.contribute("p02")
    hands.finish()
    assert hands.outcomes[token].group_size == 2


def test_the_last_trainer_dies_in_the_exchange_and_its_contribution_counts() -> None:
    hands = node(1)
    averaging(hands)
    hands.nodes["p00"].values["t"] = [1.0] * PARTS
    hands.tell("p00", ev.TrainerGone("t"))
    hands.calls = {k: c for k, c in hands.calls.items() if c[0] != "p00"}
    go_on(hands)
    hands.finish()
    assert hands.value("p01") == 2.0
    assert not hands.nodes["p00"].peer.record.has_snapshot


def test_a_trainer_dies_while_its_sync_runs() -> None:
    hands = Hands(2)
    hands.attach_all({"p01": [5.0] * PARTS})
    hands.attach("p01", trainer="u")
    hands.settle()
    hands.drop = lambda sender, to, what: True
    hands.sync("p01")
    hands.settle()
    hands.detach("p01")
    hands.settle()
    hands.detach("p01")  # twice is once
    hands.detach("p01", trainer="u")
    hands.settle()
    assert hands.nodes["p01"].peer.phase == "idle"


def test_a_queued_call_of_a_dead_trainer_is_forgotten() -> None:
    hands = node(2)
    averaging(hands)
    hands.contribute("p00", trainer="u")
    hands.settle()
    hands.detach("p00", trainer="u")
    go_on(hands)
    hands.finish()
    assert len(hands.nodes["p00"].opened) == 1


# -- drain


def test_a_drain_lets_the_exchange_end_and_begins_nothing() -> None:
    hands = node(1)
    averaging(hands)
    hands.tell("p00", ev.Drained())
    hands.settle()
    assert not hands.named("drained")
    go_on(hands)
    hands.finish()
    assert [name for name, _ in hands.named("drained")] == ["p00"]
    refused = hands.contribute("p00")
    hands.settle()
    assert hands.outcomes[refused].reason is Reason.DRAINING


def test_a_drain_ends_what_has_not_come_to_an_exchange() -> None:
    hands = node(2)
    waiting = hands.contribute("p00", trainer="t")
    hands.settle()
    hands.tell("p00", ev.Drained())
    hands.settle()
    outcome = hands.outcomes[waiting]
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.DRAINING)
    assert not outcome.accepted
    assert hands.named("drained")


def test_a_sweep_stops_after_the_round_that_runs_at_a_drain() -> None:
    hands = node(1)
    hands.hold = lambda sender, to, message: isinstance(message, Parity)
    tokens = [hands.contribute(name, rounds=3) for name in ("p00", "p01")]
    hands.settle()
    hands.tell("p00", ev.Drained())
    hands.settle()
    go_on(hands)
    hands.finish()
    assert hands.outcomes[tokens[0]].rounds == 1


# -- status


def test_status_words_for_a_peer_that_does_nothing() -> None:
    hands = node(1)
    peer = hands.nodes["p00"].peer
    assert peer.progress() == ("idle", 1, 0, PARTS, 0)
    assert (peer.shape, peer.coordinates, peer.round, peer.version) == ((1,), (0,), 0, 0)
    assert [(line[0].peer_id, line[2], line[3]) for line in peer.peers()] == [("p01", "heard", "")]
    hands.tell("p00", ev.Received("p01", Goodbye(Reason.DRAINING)))
    hands.settle()
    assert [line[2:] for line in peer.peers()] == [("lost", "draining")]


def test_a_call_that_times_out_while_matching_has_failed() -> None:
    hands = node(1)
    token = hands.contribute("p00", timeout_s=2.0)
    hands.finish()
    outcome = hands.outcomes[token]
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.TIMEOUT)
    assert not outcome.accepted
    assert hands.ended_at[token] == pytest.approx(hands.calls[token][2])


# -- found by these tests


def test_a_queued_call_ends_by_its_own_timeout() -> None:
    hands = node(2)
    averaging(hands)
    hands.held.clear()  # the exchange waits two seconds for parity
    token = hands.contribute("p00", trainer="u", timeout_s=0.5)
    hands.finish()
    assert hands.ended_at[token] <= hands.calls[token][2]


def test_a_late_call_ends_by_its_own_timeout() -> None:
    hands = node(2, others=2)
    hands.contribute("p00", trainer="t")
    hands.contribute("p01")
    hands.run(until_s=hands.now + 2.0)
    token = hands.contribute("p00", trainer="u", timeout_s=1.0)
    hands.finish()
    assert hands.ended_at[token] <= hands.calls[token][2]


def test_a_drain_refuses_what_is_queued() -> None:
    hands = node(2)
    averaging(hands)
    queued = hands.contribute("p00", trainer="u")
    hands.tell("p00", ev.Drained())
    hands.settle()
    before = len(hands.sent)
    go_on(hands)
    hands.finish()
    begun = [m for *_, who, _, m in hands.sent[before:] if who == "p00"]
    assert not [m for m in begun if isinstance(m, Join | Invite)]
    assert hands.outcomes[queued].reason is Reason.DRAINING


def test_a_sync_after_a_drain_is_refused() -> None:
    hands = node(1)
    hands.tell("p00", ev.Drained())
    token = hands.sync("p00")
    hands.finish()
    assert hands.outcomes[token].reason is Reason.DRAINING


def test_a_draining_peer_is_not_announced_again() -> None:
    hands = node(1)
    hands.tell("p00", ev.Drained())
    hands.detach("p00")
    hands.settle()
    before = len(hands.did(ef.Announce, name="p00"))
    hands.attach("p00")
    hands.settle()
    assert len(hands.did(ef.Announce, name="p00")) == before


def test_the_donor_copy_is_not_taken_from_a_dead_trainers_bucket() -> None:
    hands = node(2)
    averaging(hands)
    hands.tell("p00", ev.TrainerGone("t"))
    hands.calls = {k: c for k, c in hands.calls.items() if c[:2] != ("p00", "t")}
    go_on(hands)
    hands.finish()
    refreshed = hands.did(ef.RefreshSnapshot, name="p00")
    assert "t" not in {r.trainer for r in refreshed}  # type: ignore[union-attr]


def test_a_cancelled_call_takes_its_weight_along() -> None:
    hands = node(2, others=2)
    first = hands.contribute("p00", [1.0] * PARTS, trainer="t", weight=9)
    hands.contribute("p00", [5.0] * PARTS, trainer="u", weight=1)
    hands.contribute("p01", [0.0] * PARTS)
    hands.settle()
    assert hands.nodes["p00"].peer.phase == "matchmaking"
    hands.cancel(first)
    hands.contribute("p02", [0.0] * PARTS)
    hands.finish()
    opened = hands.nodes["p00"].opened[-1]
    assert opened.weight == sum(weight for _, weight in opened.trainers)


def test_a_cancel_does_not_fail_another_trainers_late_call() -> None:
    hands = node(2, others=2)
    first = hands.contribute("p00", trainer="t")
    hands.contribute("p01")
    hands.run(until_s=hands.now + 2.0)
    late = hands.contribute("p00", trainer="u")
    hands.settle()
    hands.cancel(first)
    hands.finish()
    assert hands.outcomes[late].reason is not Reason.WITHDRAWN


def test_a_trainer_that_skips_what_its_neighbour_takes_has_to_load_before_it_contributes() -> None:
    hands = node(2)
    hands.push_fault = {("p01", part): Reason.CODEC for part in range(PARTS)}
    hands.contribute("p00", [1.0] * PARTS, trainer="t")
    skipped = hands.contribute("p00", [5.0] * PARTS, trainer="u", on_partial=OnPartial.SKIP)
    hands.contribute("p01")
    hands.finish()
    assert not hands.outcomes[skipped].accepted
    assert hands.nodes["p00"].peer.version == 1
    hands.push_fault = {}
    for trainer in "tu":
        hands.contribute("p00", trainer=trainer)
    hands.contribute("p01")
    hands.finish()
    assert hands.nodes["p00"].opened[-1].trainers == (("t", 1), ("u", 0))


def test_a_second_trainer_of_another_schema_does_not_get_our_state() -> None:
    hands = node(1)
    hands.attach("p00", trainer="u", schema=b"other")
    hands.settle()
    hands.sync("p00", trainer="u")
    hands.finish()
    loads = hands.did(ef.LoadSnapshot, name="p00")
    assert "u" not in {name for load in loads for name in load.trainers}  # type: ignore[union-attr]


def test_a_round_that_nobody_of_ours_was_left_to_take_makes_our_state_no_newer() -> None:
    """Its only trainer dies in a round, which ends for the others' sake: the donor copy is what it
    was, so whoever attaches next brings the newer state, also while the round still runs."""
    hands = node(1)
    averaging(hands)
    hands.tell("p00", ev.TrainerGone("t"))
    hands.calls = {k: c for k, c in hands.calls.items() if c[0] != "p00"}
    go_on(hands)
    hands.finish()
    peer = hands.nodes["p00"].peer
    assert (peer.version, peer.state.donor.version) == (0, 0)
    hands.attach("p00", [5.0] * PARTS, trainer="u", version=1)
    hands.settle()
    assert peer.state.trainers == {"u": False}
    assert peer.version == 1


def test_a_trainer_older_than_our_copy_takes_it_and_not_one_that_is_as_old() -> None:
    hands = node(1)
    averaging(hands)
    go_on(hands)
    hands.finish()
    hands.tell("p00", ev.TrainerGone("t"))
    hands.settle()
    peer = hands.nodes["p00"].peer
    assert (peer.version, peer.state.donor.version) == (1, 1)
    hands.attach("p00", trainer="u", version=0)
    hands.settle()
    assert peer.state.trainers == {"u": True}
    hands.tell("p00", ev.TrainerGone("u"))
    hands.settle()
    hands.attach("p00", trainer="v", version=1)
    hands.settle()
    assert peer.state.trainers == {"v": False}
    hands.tell("p00", ev.TrainerGone("v"))
    hands.settle()
    peer.state.presence.update(version=4)  # of a sweep that was not over, and nothing copied
    hands.attach("p00", trainer="w", version=2)
    hands.settle()
    assert peer.state.trainers == {"w": False}
    assert peer.version == 2
