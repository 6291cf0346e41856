"""The exchange against its dumb twin: a weighted mean written down directly.

The twin is told who is in a part (that is what the core reports, and what the data plane did) and
must get the same number; and who may be in a part is bounded from outside: whoever was not hurt is
in every part, whoever never sent is in none.

One rule: bits are compared with ==; only the twin's own sum is compared within rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import (
    Accepted,
    Again,
    Begin,
    Crcs,
    Goodbye,
    Hello,
    Missing,
    NoResult,
    NotMember,
    Parity,
    Promise,
    Resend,
    TakeOver,
    Without,
)
from moshpitd.core.outcome import OnPartial, Outcome, Reason, Status
from moshpitd.core.params import Params
from tests.kit.hands import Hands, Result, crc_of

MAX_WEIGHT = 1 << 32


@dataclass
class Swarm:
    """A group about to average. `tokens`, `values` and `weights` are by name."""

    hands: Hands
    tokens: dict[str, str]
    values: dict[str, list[float]]
    weights: dict[str, int]

    def outcome(self, name: str) -> Outcome:
        return self.hands.outcomes[self.tokens[name]]

    def together(self, name: str, dead: list[str]) -> list[str]:
        """Those that live and ended in the same group as `name`."""
        alive = [other for other in self.tokens if other not in dead]
        ours = self.outcome(name).group_id if name in alive else b""
        return [other for other in alive if ours and self.outcome(other).group_id == ours]

    def begun(self) -> None:
        """Run up to the moment at which everybody has entered the group."""
        while sum(bool(node.opened) for node in self.hands.nodes.values()) < len(self.tokens):
            self.hands.step(1)

    def reducers(self) -> tuple[int, ...]:
        return self.hands.nodes["p00"].opened[-1].reducers


def swarm(
    count: int,
    *,
    parts: int = 4,
    weights: list[int] | None = None,
    seed: int = 0,
    shuffle: bool = False,
    params: Params | None = None,
    **options: object,
) -> Swarm:
    hands = Hands(count, parts=parts, seed=seed, shuffle=shuffle, params=params)
    hands.attach_all()
    rng = random.Random(seed)
    names = list(hands.nodes)
    chosen = dict(zip(names, weights or [1] * count, strict=True))
    values = {name: [rng.uniform(-3, 3) for _ in range(parts)] for name in names}
    tokens = {
        name: hands.contribute(name, values[name], weight=chosen[name], **options)  # type: ignore[arg-type]
        for name in names
    }
    return Swarm(hands, tokens, values, chosen)


def twin(it: Swarm, part: int, inside: list[str]) -> float:
    total = sum(it.weights[name] for name in inside)
    return sum(it.weights[name] * it.values[name][part] for name in inside) / total


# -- nobody is hurt


@pytest.mark.parametrize("count", [2, 3, 5, 7])
@pytest.mark.parametrize("parts", [0, 1, 4, 13])
def test_everybody_holds_the_mean_and_the_same_bits(count: int, parts: int) -> None:
    it = swarm(count, parts=parts)
    it.hands.finish()
    names = list(it.tokens)
    for name in names:
        outcome = it.outcome(name)
        assert outcome.status is Status.COMPLETE
        assert outcome.contributors == tuple(names)
        assert (outcome.parts, outcome.version, outcome.rounds) == (parts, 1, 1)
        assert outcome.total_weight == count
        assert [phase for phase, _ in outcome.seconds] == [
            "catch_up", "matchmaking", "exchange", "parity",
        ]  # fmt: skip
        assert it.hands.nodes[name].values["t"] == it.hands.nodes["p00"].values["t"]
    for part in range(parts):
        assert it.hands.value("p00", part) == pytest.approx(twin(it, part, names))
    assert not it.hands.named("parity_differs")


weights = st.one_of(st.integers(0, 4), st.integers(0, MAX_WEIGHT))


@settings(max_examples=60)
@given(
    st.lists(weights, min_size=2, max_size=7),
    st.integers(0, 9),
    st.integers(0, 10_000),
)
def test_any_weights_give_the_weighted_mean_to_all(
    chosen: list[int], parts: int, seed: int
) -> None:
    anything = Params(max_weight_ratio=1e12)
    it = swarm(len(chosen), parts=parts, weights=chosen, seed=seed, params=anything)
    it.hands.finish()
    names = list(it.tokens)
    sizes = {it.outcome(name).group_size for name in names}
    assert sizes == {len(names)}
    inside = [name for name in names if it.weights[name]]
    for name in names:
        outcome = it.outcome(name)
        if not inside:
            assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.NO_CONTRIBUTORS)
            assert not outcome.accepted
            assert it.hands.nodes[name].values["t"] == it.values[name]
            continue
        assert outcome.status is Status.COMPLETE
        assert outcome.contributors == tuple(inside)
        assert outcome.participants == len(inside)
        assert outcome.total_weight == float(sum(chosen))
        assert it.hands.nodes[name].values["t"] == it.hands.nodes["p00"].values["t"]
    for part in range(parts if inside else 0):
        assert it.hands.value("p00", part) == pytest.approx(twin(it, part, inside))


def test_ten_twenty_and_thirty_samples() -> None:
    it = swarm(3, parts=1, weights=[10, 20, 30])
    it.hands.finish()
    assert it.hands.value("p01") == pytest.approx(twin(it, 0, ["p00", "p01", "p02"]))
    assert it.outcome("p02").total_weight == 60.0


def test_a_peer_that_nobody_can_dial_reduces_nothing_and_is_in_every_part() -> None:
    hands = Hands(2, parts=6)
    hands.add("p02", dialable=False)
    hands.attach_all()
    tokens = hands.start()
    hands.finish()
    assert set(hands.nodes["p00"].opened[-1].reducers) == {0, 1}
    assert {hands.outcomes[t].participants for t in tokens.values()} == {3}


def test_nobody_can_be_dialled_and_there_is_no_group() -> None:
    hands = Hands(0)
    for name in ("p00", "p01"):
        hands.add(name, dialable=False)
    hands.attach_all()
    tokens = hands.start()
    hands.finish()
    for token in tokens.values():
        outcome = hands.outcomes[token]
        assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.NO_REDUCER)
        assert not outcome.accepted
        assert outcome.group_size == 2
    assert not hands.did(ef.Open)
    assert {node.peer.version for node in hands.nodes.values()} == {0}


# -- somebody is hurt, at any moment


@settings(max_examples=150)
@given(
    count=st.integers(2, 7),
    parts=st.integers(1, 9),
    chosen=st.lists(st.integers(0, 5), min_size=7, max_size=7),
    when=st.integers(0, 200),
    victims=st.integers(1, 3),
    seed=st.integers(0, 100_000),
)
def test_whoever_dies_at_any_moment_the_others_end_and_agree(
    count: int, parts: int, chosen: list[int], when: int, victims: int, seed: int
) -> None:
    it = swarm(count, parts=parts, weights=chosen[:count], seed=seed, shuffle=True)
    it.hands.step(when)
    rng = random.Random(seed)
    dead = rng.sample(list(it.tokens), min(victims, count - 1))
    for name in dead:
        it.hands.kill(name)
        it.hands.step(rng.randrange(30))
    it.hands.finish()
    check_accounts(it, dead)
    for name in it.tokens:
        together = it.together(name, dead)
        if any(it.weights[other] for other in together):
            assert it.outcome(name).parts_without_result == ()
            assert set(together) <= set(it.outcome(name).agreed)


@settings(max_examples=100)
@given(
    count=st.integers(2, 5),
    parts=st.integers(1, 6),
    lost=st.floats(0.0, 0.5),
    seed=st.integers(0, 100_000),
)
def test_whatever_the_data_plane_loses_every_call_ends_and_accounts_are_exact(
    count: int, parts: int, lost: float, seed: int
) -> None:
    it = swarm(count, parts=parts, seed=seed, shuffle=True)
    rng = random.Random(seed)
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple) and rng.random() < lost
    it.hands.finish()
    # What vanishes without a broken link may leave a member with an older result, or with none.
    check_accounts(it, [], same_bits=False)


def check_accounts(it: Swarm, dead: list[str], *, same_bits: bool = True) -> None:
    """What outcomes claim is what was done, and members that list each other hold equal bits."""
    alive = [name for name in it.tokens if name not in dead]
    for name in alive:
        outcome = it.outcome(name)
        if outcome.group_size == 1 or not outcome.contributors:
            continue
        values = it.hands.nodes[name].values["t"]
        results = [p for p in range(outcome.parts) if p not in outcome.parts_without_result]
        if outcome.status is Status.COMPLETE:
            assert outcome.parts_without_result == ()
            assert outcome.reason is None
            for part in results:
                assert values[part] == pytest.approx(twin(it, part, list(outcome.contributors)))
        assert outcome.participants == len(outcome.contributors)
        inside = [it.weights[who] for who in outcome.contributors]
        assert outcome.total_weight == float(sum(inside))
        if outcome.reason is Reason.PARITY:
            continue  # the bucket holds what is in dispute, and nobody takes it from there
        for part in outcome.parts_without_result:
            elsewhere = [it.hands.value(other, part) for other in it.tokens if other != name]
            assert values[part] in [it.values[name][part], *elsewhere]
    for a in alive:
        for b in alive:
            same_group = it.outcome(a).group_id == it.outcome(b).group_id != b""
            if same_group and a != b and in_touch(it, a, b):
                agree(it, a, b)
    assert not (same_bits and it.hands.named("parity_differs"))


def in_touch(it: Swarm, a: str, b: str) -> bool:
    """They are in each other's final set of survivors."""
    return a in it.outcome(b).agreed and b in it.outcome(a).agreed


def agree(it: Swarm, a: str, b: str) -> None:
    """The same bits, wherever both have a result."""
    without = {*it.outcome(a).parts_without_result, *it.outcome(b).parts_without_result}
    for part in range(it.outcome(a).parts):
        if part not in without and it.outcome(a).accepted and it.outcome(b).accepted:
            assert it.hands.value(a, part) == it.hands.value(b, part)


def test_a_sender_that_dies_is_in_what_it_finished() -> None:
    it = swarm(3, parts=3)
    it.hands.drop = lambda sender, to, what: (
        isinstance(what, tuple) and sender == "p02" and to == "p01"
    )
    it.begun()
    it.hands.settle()
    it.hands.kill("p02")
    it.hands.finish()
    outcome = it.outcome("p00")
    assert outcome.status is Status.PARTIAL
    assert outcome.excluded[0] == ("p02", Reason.LINK_LOST)
    assert outcome.contributors == ("p00", "p01")  # p02 is not inside every part
    assert it.hands.value("p00", 0) == pytest.approx(twin(it, 0, ["p00", "p01", "p02"]))
    assert it.hands.value("p00", 1) == pytest.approx(twin(it, 1, ["p00", "p01"]))


def test_a_reducer_that_dies_is_followed_by_the_next_in_each_parts_order() -> None:
    it = swarm(4, parts=24)
    it.hands.average_fault = {("p03", part): None for part in range(24)}
    it.begun()
    it.hands.settle()
    it.hands.kill("p03")
    it.hands.finish()
    its = [part for part, reducer in enumerate(it.reducers()) if reducer == 3]
    for name in ("p00", "p01", "p02"):
        outcome = it.outcome(name)
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.LINK_LOST)
        assert outcome.parts_without_result == ()
        assert outcome.contributors == ("p00", "p01", "p02")  # its own went with it there
        for part in range(24):
            inside = ["p00", "p01", "p02"] + ["p03"] * (part not in its)
            assert it.hands.value(name, part) == pytest.approx(twin(it, part, inside))
    took = {name for name, _ in it.hands.named("part_taken_over")}
    assert len(took) > 1  # its share spreads over the survivors


def test_what_a_dead_reducer_gave_to_one_goes_to_all() -> None:
    """The result left the victim for one survivor only: all end with those bits, it included."""
    it = swarm(4, parts=8)
    it.hands.drop = lambda sender, to, what: (
        isinstance(what, tuple) and sender == "p03" and to != "p01"
        and isinstance(what[0], ef.Push) and what[0].result
    )  # fmt: skip
    it.begun()
    it.hands.settle()
    it.hands.kill("p03")
    it.hands.finish()
    for name in ("p00", "p01", "p02"):
        assert it.outcome(name).status is Status.COMPLETE
        assert it.outcome(name).contributors == ("p00", "p01", "p02", "p03")
        for part in range(8):
            assert it.hands.value(name, part) == it.hands.value("p01", part)
    assert not it.hands.named("part_taken_over")


@pytest.mark.parametrize("seed", range(20))
def test_all_die_but_one(seed: int) -> None:
    it = swarm(5, parts=12, seed=seed, shuffle=True)
    rng = random.Random(seed)
    it.begun()
    for name in ("p04", "p00", "p02", "p01"):
        it.hands.step(rng.randrange(25))
        it.hands.kill(name)
    it.hands.finish()
    outcome = it.outcome("p03")
    assert outcome.parts_without_result == ()
    assert "p03" in outcome.contributors


@pytest.mark.parametrize("seed", range(20))
def test_a_reducer_that_only_one_member_lost_takes_part_in_its_own_replacement(seed: int) -> None:
    """The link between two members breaks; both live and see everybody else."""
    it = swarm(4, parts=12, seed=seed, shuffle=True)
    it.begun()
    it.hands.step(seed * 3)
    broken = {("p00", "p03"), ("p03", "p00")}
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple) and (sender, to) in broken
    it.hands.tell("p00", ev.LinkLost("p03"), origin="p03", plane="bulk")
    it.hands.tell("p03", ev.LinkLost("p00"), origin="p00", plane="bulk")
    it.hands.finish()
    for name in it.tokens:
        assert it.outcome(name).parts_without_result == ()
        for part in range(12):
            assert it.hands.value(name, part) == it.hands.value("p01", part)


def test_many_parts_without_a_result_are_told_by_the_first_few() -> None:
    it = swarm(2, parts=30)
    it.hands.average_fault = {("p01", part): Reason.CODEC for part in range(30)}
    it.hands.finish()
    assert it.outcome("p00").detail.endswith("...")


def test_no_part_has_a_result_and_the_round_failed() -> None:
    it = swarm(2, parts=2)
    it.hands.average_fault = {
        (name, part): Reason.CODEC for name in ("p00", "p01") for part in (0, 1)
    }
    it.hands.finish()
    for name in it.tokens:
        outcome = it.outcome(name)
        assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.CODEC)
        assert not outcome.accepted
        assert "codec_failed, float32 (by the test)" in outcome.detail
        assert it.hands.nodes[name].peer.version == 0
        assert it.hands.nodes[name].peer.round == 1  # the axis moves on for all alike


def test_a_codec_that_fails_at_the_reducer_costs_that_part_and_says_so() -> None:
    it = swarm(3, parts=6)
    mine = 0
    it.hands.average_fault = {("p00", mine): Reason.CODEC}
    it.hands.finish()
    assert it.reducers()[mine] == 0
    for name in it.tokens:
        outcome = it.outcome(name)
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.CODEC)
        assert outcome.parts_without_result == (mine,)
        assert outcome.contributors == ("p00", "p01", "p02")
    told = it.hands.said(NoResult)
    assert {m.parts for m in told} == {(mine,)}  # type: ignore[union-attr]
    assert "codec_failed" in it.outcome("p00").detail


def test_a_bucket_that_was_modified_is_left_out_of_the_parts_not_yet_sent() -> None:
    it = swarm(3, parts=6)
    it.hands.push_fault = {("p01", part): Reason.BUCKET_MODIFIED for part in range(6)}
    it.hands.finish()
    outcome = it.outcome("p00")
    assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.WITHDRAWN)
    assert outcome.contributors == ("p00", "p02")
    assert outcome.excluded == (("p01", Reason.WITHDRAWN),)
    assert it.hands.said(Without, sender="p01")
    assert "bucket_modified (by the test)" in it.outcome("p01").detail


def test_a_refused_contribution_is_left_out_with_a_strike_and_its_reason() -> None:
    it = swarm(3, parts=3)
    group = None
    it.hands.drop = lambda sender, to, what: (
        isinstance(what, tuple) and sender == "p02" and to == "p00"
    )
    it.begun()
    it.hands.settle()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    refused = ev.PartRefused(group, 0, 2, Reason.NOT_FINITE, "layer.weight")
    it.hands.tell("p00", refused)
    it.hands.finish()
    outcome = it.outcome("p00")
    assert outcome.status is Status.PARTIAL
    assert "not_finite: layer.weight" in outcome.detail
    assert it.hands.value("p01", 0) == pytest.approx(twin(it, 0, ["p00", "p01"]))
    assert [(n, s.peer, s.reason) for n, s in it.hands.named("strike")] == [
        ("p00", "p02", "not_finite")
    ]


def test_a_refused_result_is_taken_over_with_a_strike() -> None:
    it = swarm(2, parts=2)
    it.hands.drop = lambda sender, to, what: from_its_reducer(what) and sender == "p01"
    it.begun()
    it.hands.settle()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    bad = ev.PartRefused(group, 1, 1, Reason.PART_SIZE, "512 bytes", result=True)
    it.hands.tell("p00", bad)
    it.hands.tell("p00", bad)  # a second one changes nothing
    it.hands.tell("p00", ev.PartRefused(group, 1, 9, Reason.PART_SIZE, result=True))
    it.hands.finish()
    outcome = it.outcome("p00")
    assert (outcome.status, outcome.parts_without_result) == (Status.COMPLETE, ())
    assert "512 bytes" in outcome.detail
    assert it.hands.named("strike")[0][1].peer == "p01"
    # p01 itself held a sound one, so that is what both have now.
    assert it.hands.value("p00", 1) == it.hands.value("p01", 1)
    assert it.hands.value("p00", 1) == pytest.approx(twin(it, 1, ["p00", "p01"]))


def from_its_reducer(what: object) -> bool:
    return isinstance(what, tuple) and isinstance(what[0], ef.Push) and what[0].result


# -- silence


def test_a_silent_sender_is_left_out_after_part_timeout_and_not_earlier() -> None:
    it = swarm(2, parts=2)
    it.hands.drop = lambda sender, to, what: (
        sender == "p01" and isinstance(what, tuple) and not from_its_reducer(what)
    )
    begun = it.hands.now
    it.hands.finish()
    outcome = it.outcome("p00")
    assert outcome.excluded == (("p01", Reason.SILENT),)
    assert outcome.contributors == ("p00",)
    assert it.hands.params.part_timeout_s <= it.hands.ended_at[it.tokens["p00"]] - begun
    assert it.hands.ended_at[it.tokens["p00"]] - begun <= it.hands.params.part_timeout_s + 2.1


def test_a_silent_reducer_is_given_up_after_result_timeout() -> None:
    """It lives and answers, but its results never leave it: bounded even so."""
    it = swarm(2, parts=2)
    it.hands.drop = lambda sender, to, what: sender == "p01" and isinstance(what, tuple)
    it.hands.push_fault = {("p01", part): Reason.CODEC for part in range(2)}
    begun = it.hands.now
    it.hands.finish()
    outcome = it.outcome("p00")
    assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.SILENT)
    assert outcome.excluded == (("p01", Reason.SILENT),)
    assert outcome.parts_without_result == ()
    assert it.hands.value("p00", 1) == it.values["p00"][1]  # nobody else is left
    took = it.hands.ended_at[it.tokens["p00"]] - begun
    assert took == pytest.approx(it.hands.params.result_timeout_s, abs=2.1)


def test_the_round_ends_by_the_callers_timeout_whatever_trickles_in() -> None:
    it = swarm(2, parts=4, timeout_s=8.0)
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple)
    it.hands.finish()
    for name in it.tokens:
        outcome = it.outcome(name)
        assert outcome.status is Status.PARTIAL  # its own parts have its own values
        assert outcome.reason is Reason.TIMEOUT
        assert it.hands.ended_at[it.tokens[name]] <= it.hands.calls[it.tokens[name]][2] + 2.0


def test_one_end_by_round_timeout() -> None:
    params = Params(
        part_timeout_s=1.0, result_timeout_s=2.0, parity_timeout_s=0.5, round_timeout_s=3.0
    )
    it = swarm(2, parts=2, params=params)
    it.begun()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple)
    it.hands.lanes.clear()
    for _ in range(6):  # somebody speaks all the time, and yet nothing comes
        it.hands.run(until_s=it.hands.now + 0.7)
        for name, other in (("p00", "p01"), ("p01", "p00")):
            it.hands.tell(name, ev.Received(other, Without(group, Reason.WITHDRAWN, (99,))))
        it.hands.settle()
    it.hands.finish()
    assert it.outcome("p00").reason is Reason.TIMEOUT


def test_a_parity_that_never_comes_is_waited_for_two_seconds() -> None:
    it = swarm(2)
    it.hands.drop = lambda sender, to, what: isinstance(what, Parity) and sender == "p01"
    it.hands.finish()
    assert it.outcome("p00").status is Status.COMPLETE
    assert it.hands.ended_at[it.tokens["p00"]] - it.hands.ended_at[it.tokens["p01"]] == (
        pytest.approx(it.hands.params.parity_timeout_s)
    )
    assert dict(it.outcome("p00").seconds)["parity"] == pytest.approx(2.0)


def test_progress_is_told_while_the_exchange_runs() -> None:
    it = swarm(2, parts=4)
    it.hands.average_fault = {("p01", part): None for part in range(4)}
    it.begun()
    it.hands.settle()
    assert it.hands.nodes["p00"].peer.phase == "exchange"
    assert it.hands.nodes["p00"].peer.progress() == ("exchange", 2, 2, 4, 0)
    state = {line[0].peer_id: line[2] for line in it.hands.nodes["p00"].peer.peers()}
    assert state == {"p01": "member"}
    it2 = swarm(2)
    it2.hands.hold = lambda sender, to, message: isinstance(message, Parity)
    it2.hands.settle()
    assert it2.hands.nodes["p00"].peer.progress()[0] == "parity"


# -- what members tell each other


def test_a_member_that_withdraws_everything_is_not_waited_for() -> None:
    it = swarm(3, parts=3)
    it.hands.drop = lambda sender, to, what: (
        sender == "p02" and isinstance(what, tuple) and not what[0].result
    )
    it.begun()
    it.hands.settle()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    for name in ("p00", "p01"):
        it.hands.tell(name, ev.Received("p02", Without(group, Reason.BUCKET_MODIFIED)))
    it.hands.finish()
    outcome = it.outcome("p00")
    assert outcome.excluded == (("p02", Reason.BUCKET_MODIFIED),)
    assert outcome.parts_without_result == ()
    assert it.hands.ended_at[it.tokens["p00"]] < 3.0 + 1.0


def test_other_bits_are_noted() -> None:
    it = swarm(3)
    it.hands.change = lambda sender, to, message: (
        Parity(message.group_id, b"other", 0)
        if isinstance(message, Parity) and (sender, to) == ("p01", "p00")
        else message
    )
    it.hands.finish()
    assert [(name, note.peer) for name, note in it.hands.named("parity_differs")] == [
        ("p00", "p01")
    ]


def test_strangers_and_liars_change_nothing() -> None:
    it = swarm(3, parts=3)
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple) and sender == "p02"
    it.begun()
    it.hands.settle()
    group = it.hands.nodes["p01"].opened[-1].group.group_id
    lies = (
        ("p09", Parity(group, b"", 0)),
        ("p02", NotMember(group, "p00")),  # neither itself nor the leader
        ("p00", NotMember(group, "p09")),
        ("p00", NoResult(group, Reason.CODEC, 0, (2, -1, 99))),  # not its part
        ("p00", NoResult(b"another group", Reason.CODEC, 0, (0,))),
        ("p00", Without(group, Reason.CODEC, (-1, 99))),
        ("p00", Goodbye(Reason.DRAINING)),  # it leaves after this round
        ("p02", Missing(group, 0, Reason.SILENT, 1, (-1, 99))),
        ("p02", Missing(group, 0, Reason.SILENT, 0, (1,))),
        ("p02", TakeOver(group, 1, 0, (0,))),  # p00 reduces it in epoch 0
        ("p02", TakeOver(group, 1, 1, (-1, 99))),
        ("p00", Promise(group, 77, 0, (0,))),  # nobody asked
        ("p00", Again(group, 7, (0, -1, 99))),
        ("p00", Resend(group, 0, (0, -1, 99))),
        ("p02", Crcs(group, 5, b"123")),
        ("p02", Crcs(group, 1 << 40, b"1234")),
    )
    for sender, message in lies:
        it.hands.tell("p01", ev.Received(sender, message))
    for event in (
        ev.PartArrived(group, 99, 2),
        ev.PartArrived(group, 1, 9),
        ev.Averaged(group, 99, (0,), 0),
        ev.Barred(b"another group", 1, (0,), ()),
        ev.Listened(("p09",)),
        ev.PartFailed(group, 99, Reason.CODEC, result=True),
        ev.PartFailed(group, 99, Reason.CODEC),
        ev.PartRefused(group, 0, 9, Reason.CODEC),
        ev.PartArrived(b"another group", 1, 0),
        ev.LinkLost("p09"),
    ):
        it.hands.tell("p01", event)
    it.hands.settle()
    assert it.hands.nodes["p01"].peer.phase == "exchange"
    it.hands.finish()
    assert it.outcome("p01").excluded == (("p02", Reason.SILENT),)


# -- what the caller asked for


@pytest.mark.parametrize("choice", list(OnPartial))
def test_a_partial_result_is_taken_or_not_as_the_caller_chose(choice: OnPartial) -> None:
    it = swarm(3, parts=3, on_partial=choice)
    it.hands.push_fault = {("p02", part): Reason.CODEC for part in range(3)}
    it.hands.finish()
    taken = choice is OnPartial.ACCEPT
    for name in it.tokens:
        outcome = it.outcome(name)
        assert outcome.status is Status.PARTIAL
        assert outcome.accepted is taken
        assert outcome.version == (1 if taken else 0)


def test_too_few_participants_leave_the_values_alone() -> None:
    it = swarm(2, min_participants=3)
    it.hands.finish()
    for name in it.tokens:
        outcome = it.outcome(name)
        assert outcome.reason is Reason.TOO_FEW
        assert not outcome.accepted
        assert outcome.version == 0


def test_alone_where_two_were_wanted_is_not_accepted() -> None:
    it = swarm(1, min_participants=2)
    it.hands.finish()
    outcome = it.outcome("p00")
    assert (outcome.status, outcome.reason) == (Status.ALONE, Reason.NO_PEERS)
    assert not outcome.accepted


def test_where_none_can_be_dialled_the_leader_waits_for_one_that_can() -> None:
    hands = Hands(0)
    for name in ("p00", "p01"):
        hands.add(name, dialable=False)
    hands.attach_all()
    tokens = hands.start()
    began = hands.now
    hands.run(until_s=began + 3.0)
    assert not hands.said(Begin)
    hands.add("p02")
    hands.attach("p02")
    tokens["p02"] = hands.contribute("p02", [2.0] * hands.parts)
    hands.finish()
    for name, token in tokens.items():
        outcome = hands.outcomes[token]
        assert (outcome.status, outcome.participants) == (Status.COMPLETE, 3)
        assert hands.value(name) == 1.0
    assert max(hands.ended_at.values()) <= began + Params().window_s


# -- sweeps


@pytest.mark.parametrize(("sides", "count"), [((2, 2), 4), ((3, 3), 9), ((2, 2, 2), 8)])
def test_a_sweep_over_a_full_grid_is_exact(sides: tuple[int, ...], count: int) -> None:
    params = Params(max_group=max(sides), grid_sides=sides)
    it = swarm(count, weights=[1 + i % 3 for i in range(count)], params=params, rounds=0)
    it.hands.finish()
    names = list(it.tokens)
    for part in range(4):
        for name in names:
            assert it.hands.value(name, part) == pytest.approx(twin(it, part, names))
    assert {it.outcome(name).rounds for name in names} == {len(sides)}
    assert {it.outcome(name).version for name in names} == {len(sides)}


def test_the_two_by_two_example_with_unequal_weights_gives_three_and_a_half() -> None:
    hands = Hands(4, params=Params(max_group=2, grid_sides=(2, 2)), parts=1)
    hands.attach_all()
    for name, x, weight in zip(hands.nodes, (1.0, 2.0, 5.0, 9.0), (1, 3, 1, 1), strict=True):
        hands.contribute(name, [x], weight=weight, rounds=0)
    hands.finish()
    assert [hands.value(name) for name in hands.nodes] == pytest.approx([3.5] * 4)


def two_by_two(*undialable: str) -> tuple[Hands, dict[str, Outcome]]:
    """A sweep of four. Lines: p00 and p02, p01 and p03; then p00 and p01, p02 and p03."""
    hands = Hands(0, params=Params(max_group=2, grid_sides=(2, 2)))
    for name in ("p00", "p01", "p02", "p03"):
        hands.add(name, dialable=name not in undialable)
    hands.attach_all()
    tokens = hands.start(rounds=0)
    hands.finish()
    return hands, {name: hands.outcomes[token] for name, token in tokens.items()}


def test_a_line_without_a_reducer_does_not_cost_the_average_of_the_line_before() -> None:
    hands, ended = two_by_two("p00", "p01")
    for name in ("p02", "p03"):
        assert (ended[name].status, ended[name].version) == (Status.COMPLETE, 2)
    for name, other, mean in (("p00", "p02", 1.0), ("p01", "p03", 2.0)):
        outcome = ended[name]
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.NO_REDUCER)
        assert "dialled" in outcome.detail
        assert (outcome.accepted, outcome.version) == (True, 1)
        assert (outcome.contributors, outcome.participants) == ((name, other), 2)
        assert hands.value(name) == mean


def test_nor_does_it_end_the_sweep() -> None:
    """In their first line nobody can be dialled; the second has somebody."""
    hands, ended = two_by_two("p00", "p02")
    for name, other in (("p00", "p03"), ("p02", "p01")):
        outcome = ended[name]
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.NO_REDUCER)
        assert (outcome.accepted, outcome.rounds) == (True, 2)
        assert set(outcome.contributors) == {name, other}
        assert hands.value(name) == hands.value(other)


def test_what_a_sweep_keeps_has_as_many_inside_as_the_caller_wants() -> None:
    """Of a round that came to nothing, none are; of the one before, two."""
    for wanted, accepted in ((2, True), (3, False)):
        hands = Hands(0, params=Params(max_group=2, grid_sides=(2, 2)))
        for name in ("p00", "p01", "p02", "p03"):
            hands.add(name, dialable=name in ("p02", "p03"))
        hands.attach_all()
        tokens = hands.start(rounds=0, min_participants=wanted)
        hands.finish()
        assert hands.outcomes[tokens["p00"]].accepted is accepted


def test_a_line_that_disputes_all_of_its_results_has_overwritten_the_line_before() -> None:
    """Neither the one average nor the other is in the bucket, whatever part of it is looked at."""
    hands = Hands(4, params=Params(max_group=2, grid_sides=(2, 2)))
    hands.attach_all()
    hands.lie = lambda name, to, part, value: (
        value + 1.0 if to in ("p00", "p01") and len(hands.nodes[to].opened) == 2 else value
    )
    tokens = hands.start(rounds=0)
    hands.finish()
    assert hands.value("p00") != hands.value("p01")
    for name in ("p00", "p01"):
        outcome = hands.outcomes[tokens[name]]
        assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.PARITY)
        assert (outcome.accepted, outcome.version) == (False, 0)
        assert hands.nodes[name].peer.version == 0
    assert hands.outcomes[tokens["p02"]].version == 2


def test_two_rounds_in_one_call_are_two_rounds() -> None:
    it = swarm(2, rounds=2)
    it.hands.finish()
    assert [it.outcome(name).rounds for name in it.tokens] == [2, 2]
    assert {it.outcome(name).version for name in it.tokens} == {2}


# -- found by these tests


def test_an_average_that_is_never_answered_ends_with_the_call() -> None:
    it = swarm(2, timeout_s=30.0)
    it.hands.average_fault = {("p00", 0): None}
    it.hands.finish()
    # Ours never came, so after a while the other one made it.
    assert it.outcome("p00").parts_without_result == ()
    assert it.hands.ended_at[it.tokens["p00"]] <= 30.0 + 1.0


def test_a_sweep_that_is_not_accepted_does_not_raise_the_version() -> None:
    hands = Hands(4, params=Params(max_group=2, grid_sides=(2, 2)))
    hands.attach_all()
    tokens = hands.start(rounds=0, on_partial=OnPartial.SKIP)
    hands.drop = lambda sender, to, what: (
        isinstance(what, tuple) and sender == "p00" and hands.nodes["p00"].peer.round == 1
    )
    hands.finish()
    outcome = hands.outcomes[tokens["p00"]]
    assert not outcome.accepted  # the trainer keeps what it had
    assert outcome.version == 0


def test_who_gives_a_member_up_tells_it() -> None:
    hands = Hands(2)
    hands.attach_all()
    hands.drop = lambda sender, to, what: isinstance(what, tuple) and sender == "p01"
    short = hands.contribute("p00", timeout_s=3.0)
    token = hands.contribute("p01")
    hands.finish()
    assert hands.ended_at[token] - hands.ended_at[short] <= 3.0


def test_a_leave_that_reaches_the_leader_after_begin_counts_as_not_member() -> None:
    hands = Hands(3)
    hands.attach_all()
    hands.drop = lambda sender, to, what: isinstance(what, Begin) and to == "p02"
    tokens = hands.start()
    hands.finish()
    assert hands.said(Accepted, to="p02")
    assert hands.ended_at[tokens["p00"]] <= 13.0


def test_a_parity_that_overtakes_begin_still_counts() -> None:
    hands = Hands(1)
    hands.add("p01", dialable=False)
    hands.attach_all()
    hands.contribute("p00", weight=1)
    token = hands.contribute("p01", weight=0)
    hands.hold = lambda sender, to, message: isinstance(message, Begin)
    hands.settle()
    assert hands.said(Parity, sender="p00")
    hands.hold = lambda sender, to, message: False
    hands.release()
    hands.finish()
    assert hands.ended_at[token] < 2.0


def test_a_result_that_lands_late_is_counted_or_kept_out() -> None:
    it = swarm(3, parts=3)
    it.hands.drop = lambda sender, to, what: isinstance(what, tuple) and sender == "p02"
    link = ("p01", "p00", "bulk")
    it.begun()
    it.hands.settle()
    it.hands.run(until_s=it.hands.now + it.hands.params.part_timeout_s - 0.1)
    it.hands.now += 0.1  # now p02 is given up, so p01 closes its part
    it.hands.tell("p01", ev.Ticked())
    it.hands.tell("p00", ev.Ticked())
    while not any(isinstance(item, Result) for _, item in it.hands.lanes.get(link, ())):
        it.hands.step(1)
    lost = Hello(it.hands.nodes["p00"].peer.record)
    it.hands._give("p00", ev.Undelivered("p01", lost))  # overtakes what is on the link
    it.hands.finish()
    outcome = it.outcome("p00")
    for part in outcome.parts_without_result:
        assert it.hands.value("p00", part) == it.values["p00"][part]


def test_a_deadline_that_has_come_is_over_whatever_the_rounding() -> None:
    for tenths in range(100, 300):
        hands = Hands(2)
        hands.now = tenths / 10
        hands.attach_all()
        hands.drop = lambda sender, to, what: sender == "p01" and from_its_reducer(what)
        hands.start()
        hands.finish()


def test_a_result_in_our_own_name_is_ignored() -> None:
    it = swarm(2, parts=2)
    it.hands.average_fault = {("p00", 0): None}
    it.begun()
    it.hands.settle()
    group = it.hands.nodes["p00"].opened[-1].group.group_id
    it.hands.tell("p00", ev.PartRefused(group, 0, 0, Reason.CODEC, result=True))
    it.hands.settle()
    it.hands.nodes["p00"].exchanges[group].results[0] = (1.0, (0, 1), 0)
    it.hands.tell("p00", ev.Averaged(group, 0, (0, 1), crc_of(1.0)))
    it.hands.settle()
    phase = it.hands.nodes["p00"].peer.progress()
    assert phase[2] <= phase[3]
    it.hands.finish()
    assert it.outcome("p00").parts_without_result == ()
