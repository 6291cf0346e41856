"""S4 in the core: a member far slower than most costs the others two rounds, and none after.

One rule: links here take time (`Wires`), and who is late is judged by what comes of it: who is
inside which part, when the others ended, what the slow one offers next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.allreduce import Round
from moshpitd.core.lateness import IN_A_ROW, SLACK, WHOLE, Offer
from moshpitd.core.messages import Again, Parity, Without
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.errors import ConfigError
from tests.kit.hands import Audited, Contribution, Exchange, Hands, Item, Node, Result

LISTEN_S = 0.2
PARTS = 21
TIMED = ("exchange", "parity")
FAST_S, SLOW_S = 0.02, 0.4  # of the line, for one part


class Wires(Hands):
    """Every peer's uplink and downlink carry one part at a time, in order."""

    def __init__(self, count: int, *, parts: int = PARTS, params: Params | None = None) -> None:
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.queued: dict[str, dict[str, deque[Item]]] = {}
        self.sending: set[str] = set()
        self.down_free: dict[str, float] = {}
        self.due: list[tuple[float, int, str, Item, str, bool]] = []
        self.listens: Callable[[str], bool] = lambda who: True
        self.closed_at: dict[str, float] = {}
        self.stalled: dict[str, float] = {}  # origin -> nothing leaves it for so long in a round
        self.inside: dict[tuple[str, int], tuple[str, ...]] = {}
        self.deaf: Callable[[str, str], bool] = lambda who, whom: False
        super().__init__(count, parts=parts, params=params)

    def tell(self, name: str, event: Item, *, origin: str = "", plane: str = "self") -> None:
        if not isinstance(event, Contribution | Result | Audited) or plane != "bulk":
            super().tell(name, event, origin=origin, plane=plane)
            return
        self.queued.setdefault(origin, {}).setdefault(name, deque()).append(event)
        if origin not in self.sending:
            self._send_next(origin)

    def _send_next(self, origin: str) -> None:
        """Whoever has something for several sends to each in turn."""
        lanes = self.queued.get(origin, {})
        self.sending.discard(origin)
        for name in list(lanes):
            lane = lanes.pop(name)
            if lane:
                event = lane.popleft()
                lanes[name] = lane  # behind the others
                takes = self.stalled.pop(origin, 0.0) + self.up.get(origin, FAST_S)
                self.sending.add(origin)
                self._later(self.now + takes, name, event, origin, False)
                return

    def _later(self, at: float, *what: Any) -> None:
        self.sequence += 1
        self.due.append((at, self.sequence, *what))
        self.due.sort(key=lambda item: item[:2])

    def _step(self) -> None:
        """The next part gets to the far end of its line, or through it."""
        at, _, name, event, origin, here = self.due.pop(0)
        if here:
            super().tell(name, event, origin=origin, plane="bulk")
            self.settle()
            return
        self._send_next(origin)
        own = self.down.get(name, FAST_S)
        self.down_free[name] = max(at, self.down_free.get(name, 0.0) + own)
        self._later(self.down_free[name], name, event, origin, True)

    def go(self, of: list[str] | None = None, *, within_s: float = 60.0) -> None:
        """Until every call (of these) has its outcome."""
        end, looks_at = self.now + within_s, self.now + LISTEN_S

        def waits() -> bool:
            return any(of is None or self.calls[t][0] in of for t in self.open_calls())

        while waits():
            assert self.now < end, f"{self.open_calls()} not finished" + self.tail()
            until = min(looks_at, self.due[0][0] if self.due else looks_at)
            self.run(until_s=until)
            while self.due and self.due[0][0] <= self.now:
                self._step()
            if self.now >= looks_at:
                looks_at = self.now + LISTEN_S
                for name, node in self.nodes.items():
                    others = (o for o in self.nodes if o != name and not self.deaf(name, o))
                    if node.alive and self.listens(name):
                        super().tell(name, ev.Listened(tuple(others)))
                self.settle()

    def round(
        self,
        of: list[str] | None = None,
        *,
        awaited: list[str] | None = None,
        within_s: float = 60.0,
    ) -> dict[str, tuple[Outcome, float]]:
        """(outcome, seconds of the exchange and its parity) of a round of these (all)."""
        names = of or list(self.nodes)
        tokens = {
            name: self.contribute(name, [float(int(name[1:]) + 1)] * self.parts) for name in names
        }
        self.go(awaited, within_s=within_s)
        ended = {name: self.outcomes[t] for name, t in tokens.items() if t in self.outcomes}
        return {
            name: (outcome, sum(s for phase, s in outcome.seconds if phase in TIMED))
            for name, outcome in ended.items()
        }

    def _exchange(self, name: str, node: Node, effect: ef.Effect) -> None:
        super()._exchange(name, node, effect)
        if isinstance(effect, ef.Close):
            self.closed_at[name] = self.now
            # What it had queued is not sent any more.
            for to, lane in self.queued.get(name, {}).items():
                kept = (event for event in lane if group_of(event) != effect.group_id)
                self.queued[name][to] = deque(kept)

    def _put_in_place(
        self,
        node: Node,
        exchange: Exchange,
        part: int,
        mean: float,
        inside: tuple[int, ...],
        epoch: int,
    ) -> None:
        super()._put_in_place(node, exchange, part, mean, inside, epoch)
        names = [member.peer_id for member in exchange.open.group.members]
        holder = next(name for name, one in self.nodes.items() if one is node)
        self.inside[holder, part] = tuple(names[i] for i in inside)

    def mixed(self, name: str) -> list[int]:
        """Parts that hold a contribution of this peer; all holders hold the mean of who is inside,
        and the same one."""
        found = []
        for part in range(self.parts):
            inside = {self.inside[holder, part] for holder in self.nodes}
            assert len(inside) == 1, (part, inside)
            (who,) = inside
            mean = sum(int(one[1:]) + 1 for one in who) / len(who)
            for holder in self.nodes:
                assert self.value(holder, part) == pytest.approx(mean)
            found += [part] if name in who else []
        return found


def group_of(event: Item) -> bytes:
    assert isinstance(event, Contribution | Result | Audited)
    return event.group_id


FAST = [f"p0{i}" for i in range(7)]
SLOW = "p07"


def eight(*, params: Params | None = None, parts: int = PARTS, told: bool = True) -> Wires:
    """Seven alike and a slow one, which says so: then it reduces nothing."""
    wires = Wires(7, parts=parts, params=params)
    wires.add(SLOW, mbps=50.0 if told else 1000.0)
    wires.attach_all()
    wires.up[SLOW] = wires.down[SLOW] = SLOW_S
    return wires


def seconds(ended: dict[str, tuple[Outcome, float]], of: list[str]) -> float:
    return max(ended[name][1] for name in of)


# -- a slow link


def test_a_slow_member_paces_two_rounds_and_none_after() -> None:
    wires = eight()
    alone = seconds(wires.round(FAST), FAST)
    for _ in range(2):
        ended = wires.round()
        assert seconds(ended, FAST) > 5 * alone  # nobody knows yet
    paced, covered = [], set()
    for _ in range(20):
        ended = wires.round(awaited=FAST)
        paced.append(seconds(ended, FAST))
        for name in FAST:
            outcome = ended[name][0]
            assert outcome.status is Status.PARTIAL
            assert outcome.accepted
            assert outcome.parts_without_result == ()
            assert outcome.excluded == ((SLOW, Reason.SLOW),)
            assert outcome.contributors == tuple(FAST)
        wires.go()
        (last,) = [o for t, o in list(wires.outcomes.items())[-8:] if wires.calls[t][0] == SLOW]
        assert last.parts_without_result == ()
        assert dict(last.excluded) == {SLOW: Reason.SLOW}
        brought = wires.mixed(SLOW)
        assert len(brought) < PARTS / 2
        covered |= set(brought)
    # What it tries to offer more costs a quarter of the others' time and two looks, now and then.
    assert max(paced) < SLACK * alone + 3 * LISTEN_S
    assert len(covered) > PARTS / 2  # not the same ones in every round
    assert not wires.named("strike")


def test_it_says_at_once_which_parts_will_not_come_and_sends_no_others() -> None:
    wires = eight()
    for _ in range(2):
        wires.round()
    wires.sent.clear()
    wires.effects.clear()
    wires.round()
    said = [m for m in wires.said(Without, sender=SLOW) if isinstance(m, Without)]
    assert len(said) == 7
    assert len(set(said)) == 1
    assert said[0].reason is Reason.SLOW
    pushed = [p for e in wires.did(ef.Push, name=SLOW) if not e.result for p in e.parts]  # type: ignore[attr-defined]
    assert pushed
    assert sorted([*pushed, *said[0].parts]) == list(range(PARTS))


def test_what_a_slow_member_brings_grows_back_when_its_link_does() -> None:
    wires = eight()
    for _ in range(4):
        wires.round()
    assert len(wires.mixed(SLOW)) < PARTS / 3
    wires.up[SLOW] = wires.down[SLOW] = FAST_S
    for _ in range(9):
        ended = wires.round()
    assert len(wires.mixed(SLOW)) == PARTS
    assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())


def test_a_member_that_stalls_once_loses_nothing_by_it() -> None:
    wires = eight(told=False)
    wires.up[SLOW] = wires.down[SLOW] = FAST_S
    wires.round()
    wires.stalled[SLOW] = 5.0
    ended = wires.round()
    late = [m.late for m in wires.said(Parity, to=SLOW) if isinstance(m, Parity) and m.late]
    assert len(late) == 7  # all of them saw it
    assert seconds(ended, FAST) > 5.0
    assert seconds(wires.round(), FAST) < 1.5
    assert wires.mixed(SLOW) == list(range(PARTS))
    assert not wires.named("offers_less")
    assert not wires.named("member_excluded")


def test_who_has_begun_and_is_far_slower_is_left_out_of_what_it_has_not_delivered() -> None:
    wires = eight(parts=35)
    wires.up[SLOW] = 1.0
    ended = wires.round(awaited=FAST)
    for name in FAST:
        outcome, _ = ended[name]
        assert outcome.status is Status.PARTIAL
        assert outcome.parts_without_result == ()
        assert outcome.excluded == ((SLOW, Reason.SLOW),)
    assert seconds(ended, FAST) < 30.0 < 35 * wires.up[SLOW]
    wires.go()
    brought = wires.mixed(SLOW)
    assert 0 < len(brought) < 35
    said = {note.reason for _, note in wires.named("member_excluded")}
    assert said == {Reason.SLOW.value}
    assert not wires.named("strike")
    assert not wires.named("peer_lost")


def test_one_that_is_some_seconds_late_for_once_is_inside_every_part() -> None:
    """As on a machine with more daemons than cores, whatever one of the others says of it."""
    wires = eight(told=False)
    wires.up[SLOW] = 15 * FAST_S
    ended = wires.round()
    assert any(m.late for m in wires.said(Parity) if isinstance(m, Parity))
    assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert wires.mixed(SLOW) == list(range(PARTS))


def test_the_word_of_one_reducer_makes_the_others_leave_nobody_out() -> None:
    """It is the first to be through, and the slow one's other parts are still on their way."""
    wires = eight(told=False)
    wires.up[SLOW] = 15 * FAST_S

    def listens(who: str) -> bool:
        work = wires.nodes[who].peer.conductor.work
        if work is not None and isinstance(work.round, Round) and who != SLOW:
            members = [member.peer_id for member in work.round.group.members]
            late = tuple(WHOLE // 2 if name == SLOW else WHOLE for name in members)
            work.round.lateness.told(members.index(FAST[who == FAST[0]]), late)
        return True

    wires.listens = listens
    ended = wires.round()
    assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert wires.mixed(SLOW) == list(range(PARTS))


PACE_S = 0.1  # of the others' line, for one part: lateness is told beyond what silence is borne


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_link_at_a_quarter_of_the_others_rate_is_waited_for(count: int) -> None:
    """It has nothing to carry but its contribution; they carry what they reduce as well. Theirs
    were delivered in less than a third of its time all the same."""
    wires = uneven(count, slower=4.0)
    for _ in range(4):
        ended = wires.round()
        assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert wires.mixed(f"p0{count - 1}") == list(range(PARTS))
    assert not any(m.late for m in wires.said(Parity) if isinstance(m, Parity))


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_link_at_a_tenth_of_the_others_rate_is_not(count: int) -> None:
    wires = uneven(count, slower=10.0)
    for _ in range(2):
        wires.round()
    took = [seconds(wires.round(), [f"p0{i}" for i in range(count - 1)]) for _ in range(3)]
    assert wires.named("offers_less")
    assert len(wires.mixed(f"p0{count - 1}")) < PARTS / 2
    assert max(took) < PARTS * 10.0 * PACE_S / 2


def uneven(count: int, *, slower: float) -> Wires:
    """All know each other's rates, so the slow one reduces nothing."""
    wires = Wires(count - 1)
    name = f"p0{count - 1}"
    wires.add(name, mbps=1000.0 / slower)
    wires.attach_all()
    for one in wires.nodes:
        wires.up[one] = wires.down[one] = PACE_S
    wires.up[name] = wires.down[name] = PACE_S * slower
    return wires


def test_nothing_is_late_where_most_are() -> None:
    wires = eight()
    for name in FAST[:4]:
        wires.up[name] = SLOW_S
    for _ in range(4):
        ended = wires.round()
        assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert not any(m.late for m in wires.said(Parity) if isinstance(m, Parity))


def test_two_alone_wait_for_each_other() -> None:
    wires = Wires(2)
    wires.attach_all()
    wires.up["p01"] = SLOW_S
    for _ in range(4):
        assert wires.round()["p00"][0].status is Status.COMPLETE


def test_of_two_that_are_left_the_slow_one_brings_everything() -> None:
    wires = eight()
    for _ in range(3):
        wires.round()
    assert wires.named("offers_less")
    for name in FAST[1:]:
        wires.detach(name)
    wires.run(until_s=wires.now + 1.0)
    assert wires.round(["p00", SLOW])["p00"][0].status is Status.COMPLETE


def test_a_member_that_falls_silent_is_silent_and_not_slow() -> None:
    wires = eight(parts=35)
    wires.up[SLOW] = 1.0
    began = wires.now
    wires.deaf = lambda who, whom: whom == SLOW and wires.now > began + 3.0
    outcome, took = wires.round(awaited=FAST)["p00"]
    assert [who for who, _ in outcome.excluded] == [SLOW]
    assert Reason.SLOW.value not in {note.reason for _, note in wires.named("member_excluded")}
    assert took < 6.0


def test_a_reducer_that_stood_still_finds_nobody_late() -> None:
    wires = eight(parts=35)
    wires.up[SLOW] = 1.0
    began = wires.now
    wires.listens = lambda who: who != "p00" or not 0.5 < wires.now - began < 2.5
    wires.round()
    assert [name for name, _ in wires.named("woke")] == ["p00"]
    said = [m for m in wires.said(Parity) if isinstance(m, Parity)]
    assert any(m.late for m in said)
    assert not any(m.late for m in wires.said(Parity, sender="p00") if isinstance(m, Parity))


def test_whoever_is_not_listened_for_is_not_late() -> None:
    """As silence: a judge that does not get to look has no time for anybody."""
    wires = eight(parts=35)
    wires.up[SLOW] = 1.0
    wires.listens = lambda who: False
    ended = wires.round(within_s=120.0)
    assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert not any(m.late for m in wires.said(Parity) if isinstance(m, Parity))


def test_one_reducer_alone_makes_nobody_offer_less() -> None:
    wires = eight(told=False)
    wires.up[SLOW] = wires.down[SLOW] = FAST_S
    accused = (*[1000] * 7, 0)
    wires.change = lambda sender, to, message: (
        replace(message, late=accused)
        if isinstance(message, Parity) and sender == "p00"
        else message
    )
    for _ in range(4):
        ended = wires.round()
        assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert not wires.named("offers_less")


def test_a_part_that_is_taken_over_does_not_wait_for_a_slow_member_either() -> None:
    wires = eight()
    for _ in range(3):
        wires.round()
    tokens = {name: wires.contribute(name, [1.0] * PARTS) for name in wires.nodes}
    group = wires.nodes["p00"].opened[-1].group.group_id
    while wires.nodes["p03"].opened[-1].group.group_id == group:
        wires.step(1)
    wires.kill("p03")
    wires.go([name for name in FAST if name != "p03"])
    again = [p for m in wires.said(Again, to=SLOW) if isinstance(m, Again) for p in m.parts]
    assert again
    refused = [m for m in wires.said(Without, sender=SLOW) if isinstance(m, Without)][-1]
    assert refused.reason is Reason.SLOW
    assert set(refused.parts) <= set(again)
    outcome = wires.outcomes[tokens["p00"]]
    assert outcome.parts_without_result == ()
    assert dict(outcome.excluded)[SLOW] is Reason.SLOW
    assert dict(outcome.seconds)["exchange"] < PARTS * SLOW_S / 4


# -- a line so slow that the first part takes longer than silence is borne

LINE_S = 1.2  # for one part, of everybody: seven send six each
WITHIN_S = 2.0  # of one that is slower and within `slow_ratio`: its seventh is there at 14 s


def modem(up_s: float) -> Wires:
    """Seven parts, one reduced by each of the fast, in order: each waits for a part of all others,
    and the last of them for the last that the slow one sends."""
    wires = eight(parts=len(FAST))
    for name in FAST:
        wires.up[name] = LINE_S
    wires.up[SLOW] = up_s
    return wires


def test_who_is_heard_and_within_the_ratio_is_inside_however_late_its_first_part_comes() -> None:
    wires = modem(WITHIN_S)
    assert len(FAST) * WITHIN_S > wires.params.part_timeout_s
    for _ in range(3):
        ended = wires.round()
        assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
    assert wires.mixed(SLOW) == list(range(len(FAST)))
    assert not wires.named("member_excluded")
    assert not wires.named("offers_less")


def test_who_is_heard_and_brings_nothing_whole_in_time_learns_it_and_offers_less() -> None:
    """Nothing of it is whole before it is given up: an uplink that all its links share evenly."""
    wires = modem(4.0)
    wires.stalled[SLOW] = 16.0
    ended = wires.round(awaited=FAST)
    assert {ended[name][0].excluded for name in FAST} == {((SLOW, Reason.SLOW),)}
    wires.go()
    wires.stalled[SLOW] = 16.0
    wires.round()
    assert not wires.named("offers_less")
    said = [m for m in wires.said(Parity, to=SLOW) if isinstance(m, Parity)]
    assert all(m.late for m in said)
    for _ in range(4):
        wires.round()
        assert wires.mixed(SLOW)
    assert len(wires.named("offers_less")) == 4


def test_who_is_heard_and_never_sends_costs_one_wait_that_ends_before_the_others() -> None:
    wires = modem(FAST_S)
    wires.stalled[SLOW] = 1000.0
    ended = wires.round(awaited=FAST)
    for outcome, took in (ended[name] for name in FAST):
        assert outcome.excluded == ((SLOW, Reason.SLOW),)
        assert outcome.parts_without_result == ()
        assert took < wires.params.result_timeout_s
    assert not wires.named("takeover_started")


def test_who_is_not_heard_is_silent_as_soon_as_ever() -> None:
    wires = modem(FAST_S)
    wires.stalled[SLOW] = 1000.0
    wires.listens = lambda who: False
    ended = wires.round(awaited=FAST)
    for name in FAST:
        assert ended[name][0].excluded == ((SLOW, Reason.SILENT),)
    at = {note.reason for _, note in wires.named("member_excluded")}
    assert at == {Reason.SILENT.value}


# -- a slow listener


def test_a_slow_listener_is_waited_for_twice_and_then_gets_its_results_all_the_same() -> None:
    wires = eight()
    wires.up[SLOW] = FAST_S
    ends = []
    for _ in range(4):
        ended = wires.round(awaited=FAST)
        assert ended["p00"][0].status is Status.COMPLETE
        ends.append(seconds(ended, FAST))
        assert SLOW not in ended["p00"][0].agreed
        wires.go()
        assert wires.mixed(SLOW) == list(range(PARTS))
    parity_s = Params().parity_timeout_s
    assert min(ends[:2]) > parity_s > max(ends[2:])
    # The others' next group does not wait until it has taken everything.
    wires.round(awaited=FAST)
    outcome, _ = wires.round(FAST, awaited=FAST)["p00"]
    assert dict(outcome.seconds)["matchmaking"] < 1.0
    assert outcome.group_size == 7
    # When it has, it is waited for like anybody.
    wires.go()
    tokens = [wires.contribute(name, [1.0] * PARTS) for name in FAST]
    wires.run(until_s=wires.now + 0.5)
    tokens.append(wires.contribute(SLOW, [1.0] * PARTS))
    wires.down[SLOW] = FAST_S
    wires.go()
    assert [wires.outcomes[token].group_size for token in tokens] == [8] * 8
    assert all(SLOW in wires.round()["p00"][0].agreed for _ in range(2))


def test_results_stay_for_a_slow_member_as_long_as_its_call_may_last() -> None:
    wires = eight()
    for _ in range(2):
        wires.round()
    wires.down[SLOW] = 2.0  # PARTS of them are more than `result_timeout_s`
    wires.round(awaited=FAST)
    ended = wires.now
    wires.go()
    wires.run(until_s=wires.now + 1.0)
    assert wires.now - ended > wires.params.result_timeout_s
    for name in FAST:
        assert wires.closed_at[name] - ended > wires.params.result_timeout_s
    (last,) = [o for t, o in list(wires.outcomes.items())[-8:] if wires.calls[t][0] == SLOW]
    assert last.parts_without_result == ()


# -- what is learned


def test_an_offer_needs_two_late_rounds_in_a_row_and_most_of_the_reducers() -> None:
    offer = Offer(8)
    offer.learn([200] * 3, asked=7, parts=100)
    offer.learn([200] * 4, asked=7, parts=100)
    assert offer.share == 1.0
    offer.learn([], asked=7, parts=100)
    offer.learn([200] * 4, asked=7, parts=100)
    assert offer.share == 1.0
    offer.learn([100, 200, 200, 300], asked=7, parts=100)
    assert offer.share == 0.2


def test_an_offer_is_never_empty_and_grows_back_to_everything() -> None:
    offer = Offer(8)
    for _ in range(5):
        offer.learn([0] * 7, asked=7, parts=20)
    assert offer.share == 1 / 20
    rounds = 0
    while offer.share < 1.0:
        offer.learn([], asked=1, parts=20)
        rounds += 1
    assert rounds <= 7
    offer.learn([0] * 7, asked=7, parts=20)
    assert offer.share == 1.0  # it counts from the start again


def test_an_offer_that_is_late_at_some_falls_to_what_was_in_time() -> None:
    offer = Offer(8)
    for _ in range(IN_A_ROW):
        offer.learn([400] * 4, asked=4, parts=100)
    offer.learn([500, 500], asked=4, parts=100)
    assert offer.share == pytest.approx(0.4 * 0.75)
    offer.learn([0], asked=4, parts=100)  # one of four may be wrong
    assert offer.share > 0.4 * 0.75


def test_what_is_remembered_of_listeners_is_bounded() -> None:
    offer = Offer(3)
    for name in ("a", "b", "c", "d"):
        for _ in range(IN_A_ROW):
            offer.left(name, until=9.0)
    assert [offer.lags(name) for name in ("a", "b", "c", "d")] == [False, True, True, True]
    assert [offer.busy(name, 8.0) for name in ("a", "b", "c", "d")] == [False, True, True, True]
    assert not offer.busy("d", 9.0)
    offer.done("b")
    assert not offer.busy("b", 8.0)
    assert offer.lags("b")
    offer.heard("c")
    assert not offer.lags("c")
    assert not offer.busy("c", 8.0)


@pytest.mark.parametrize("ratio", [0.0, 1.2, 1e7])
def test_a_bound_that_no_round_could_keep_is_refused_by_name(ratio: float) -> None:
    with pytest.raises(ConfigError) as refused:
        Params(slow_ratio=ratio).check()
    assert refused.value.key == "slow_ratio"


def test_the_bound_is_a_setting_and_a_million_waits_for_everybody() -> None:
    wires = eight(params=Params(slow_ratio=1e6))
    for _ in range(3):
        ended = wires.round()
        assert all(outcome.status is Status.COMPLETE for outcome, _ in ended.values())
