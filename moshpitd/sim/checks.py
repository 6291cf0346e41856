"""What must hold in every world, after every event. One rule: a check reads what was asked for and
what really moved, never the state of a Peer, so that a Peer cannot be right by its own account
only.

The average is compared with a dumb twin: the weighted mean of the contributions as they lay in the
buckets at Open, computed directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import numpy as np

from moshpitd.core.effects import (
    NOTES,
    Close,
    Effect,
    Finish,
    LoadSnapshot,
    Note,
    RefreshSnapshot,
    Send,
)
from moshpitd.core.messages import Group, Hello, Parity, Record
from moshpitd.core.outcome import Outcome, Reason, Status
from moshpitd.errors import MoshpitError
from moshpitd.sim.bits import Bits
from moshpitd.sim.deadlines import Deadlines, Due
from moshpitd.sim.faults import Options
from moshpitd.sim.meetings import OF_ATTEMPTS, Meetings
from moshpitd.sim.network import Directory, Links
from moshpitd.sim.nodes import Node, Payload, Round, Vector
from moshpitd.sim.partings import Partings
from moshpitd.sim.sizes import over_bound, overgrown

SLACK_S = 1e-3
"""A deadline is met if Finish comes within this of it: timers are floats on clocks with an
offset."""
RTOL = 1e-12
"""The order of additions differs between reducer and twin; float64 sums of 64 values agree to
this."""
STORY_LINES = 200
"""Length of a transcript: what led to a failure is seldom further back than one round of one
group."""
ROUNDS_KEPT = 8
"""Rounds remembered per peer: a sweep has as many as the grid has sides, and those are at most
8."""


class Violation(MoshpitError):
    """A property does not hold. Carries all that is needed to see it again: seed, options, time,
    and what the peers involved saw and did before."""

    def __init__(self, what: str, options: Options, at: float, transcript: str) -> None:
        self.what, self.options, self.at, self.transcript = what, options, at, transcript
        super().__init__(f"seed {options.seed} at {at:.6f} s: {what}\n{options}\n{transcript}")


class Checks:
    """Invariant: it holds no reference that a Peer could change."""

    def __init__(
        self, options: Options, now: Callable[[], float], links: Links, directory: Directory
    ) -> None:
        self._options, self._now = options, now
        self.meetings = Meetings(options, links, directory, now)
        self._calls: dict[str, float] = {}  # open ones, and when they began
        self._deadlines = Deadlines()
        self.partings = Partings(links, now)
        self.bits = Bits(self.partings, now, self.fail)
        self._abandoned: dict[str, None] = {}
        self._swept: dict[str, tuple[str, Round]] = {}  # peer -> its open call, its last round
        self._groups: dict[bytes, Group] = {}
        self._reducers: dict[bytes, tuple[int, ...]] = {}
        self._contributions: dict[bytes, dict[int, tuple[float, Vector]]] = {}
        # peer -> its last rounds, and when it said Parity in each.
        self._recent: dict[str, dict[bytes, tuple[float, Round]]] = {}
        self._loaded: dict[str, tuple[float, int]] = {}  # peer -> when it loaded which version
        self._told: dict[int, Record] = {}  # node -> the last record of a Hello, which is bounded
        self._disputed: set[tuple[str, object, object]] = set()  # (who says so, group in hex, part)

    def fail(self, what: str, *nodes: Node, cause: Exception | None = None) -> NoReturn:
        who = ", ".join(node.peer_id for node in nodes)
        raise Violation(f"{who} {what}", self._options, self._now(), transcript(nodes)) from cause

    def died(self, node: Node) -> None:
        """What its last rounds came to died with it."""
        self._recent.pop(node.peer_id, None)
        self._loaded.pop(node.peer_id, None)
        self._deadlines.drop(node)
        self.meetings.died(node)
        self.bits.died(node)

    # -- calls end by their deadline ---------------------------------------------------------------

    def called(self, node: Node, token: str, timeout_s: float) -> float:
        """A call begins; returns when it must be over.

        An exchange that runs into the call's timeout takes what is there, and that may take its own
        data plane and then the others' last messages one parity timeout each.
        """
        own_s = timeout_s + 2.0 * self._options.params.parity_timeout_s  # on its own clock
        self._calls[token] = self._now()
        return self._expect(node, token, own_s, f"did not finish {token}")

    @property
    def longest_round_s(self) -> float:
        """A call, and after it the results stay for slower members."""
        params = self._options.params
        return (
            self._options.call_timeout_s + 2.0 * params.parity_timeout_s + params.result_timeout_s
        )

    def _expect(self, node: Node, key: str | bytes, own_s: float, what: str) -> float:
        """`own_s` on its own clock from now, and as long as it may yet stand still."""
        frozen_s = 0.0 if node.thaws_at is None else node.thaws_at - self._now()
        at = self._now() + own_s / node.clock_rate + frozen_s + SLACK_S
        self._deadlines.expect(key, Due(node, at, what))
        return at

    def frozen(self, node: Node, seconds: float) -> None:
        """What it has open may take so much longer, and nobody else's."""
        self._deadlines.frozen(node, seconds)
        self.meetings.frozen(node)
        self.partings.frozen(node.index, seconds)

    def abandoned(self, node: Node, token: str) -> None:
        """Nobody waits for this call any more (the daemon died, the trainer died or gave up)."""
        if self._calls.pop(token, None) is not None:
            self._deadlines.met(node, token)
            self._abandoned[token] = None

    def after_event(self) -> None:
        if self.bits.undecided:
            self.bits.judge()
        due = self._deadlines.late(self._now())
        if due is not None:
            self.fail(f"{due.what} by its deadline {due.at:.3f}", due.node)

    def at_the_end(self, nodes: Iterable[Node]) -> None:
        """What is too dear to look at after every event: nothing that a Peer keeps has outgrown
        the bounds of Params, and every difference was judged."""
        self.bits.at_the_end()
        for node in nodes:
            found = overgrown(node.peer, self._options) if node.peer is not None else None
            if found is not None:
                self.fail(f"keeps {found[1]} entries in {found[0]}", node)

    # -- effects -----------------------------------------------------------------------------------

    def effect(self, node: Node, effect: Effect, to: Node | None = None) -> None:
        if isinstance(effect, Note):
            what = effect.what
            if what in OF_ATTEMPTS:
                self.meetings.noted(node, effect, self.fail)
            if what not in NOTES:
                self.fail(f"noted {what!r}, which is not one of NOTES", node)
            if what == "part_without_result" and effect.reason == Reason.PARITY:
                told = effect.fields
                self._disputed.add((node.peer_id, told["group"], told["part"]))
                self.bits.disputed(node, told["group"], told["part"])
            return
        self.meetings.said(node, effect, to)
        if (
            isinstance(effect, Send)
            and isinstance(effect.message, Hello)
            and effect.message.record is self._told.get(node.index)
        ):
            return  # half of all; many are told the same record
        match effect:
            case LoadSnapshot():
                self._loaded[node.peer_id] = (self._now(), effect.version)
                self._swept.pop(node.peer_id, None)  # what it holds now is not what it weighed
                self._overwritten(node, effect.trainers)
            case RefreshSnapshot() if not self._recent.get(node.peer_id):
                # A run of one peer: its own rounds count, and nothing moves.
                self._loaded[node.peer_id] = (self._now(), effect.version)
            case Finish():
                self._finished(node, effect)
            case Send(to=other, message=Parity(group_id=group_id)) if group_id in node.plane.rounds:
                self._settled(node, node.plane.rounds[group_id])
                self._compared(node, other, group_id)
            case Close():
                self._in_place(node, effect.group_id)
                self.bits.closes(node, effect.group_id, kept=effect.kept, without=effect.without)
            case Send(message=message):
                if (broken := over_bound(message)) is not None:
                    self.fail(f"sends {broken}", node)
                if isinstance(message, Hello):
                    self._told[node.index] = message.record
            case _:
                pass

    def _finished(self, node: Node, effect: Finish) -> None:
        outcome = effect.outcome
        if outcome.reason is not Reason.BUSY:
            for group_id, round_ in node.plane.rounds.items():
                self._in_place(node, group_id, effect.trainer)
                round_.returned.add(effect.trainer)
            self.bits.finished(node, effect.trainer, outcome)
        if effect.token in self._abandoned:
            return
        since = self._calls.pop(effect.token, None)
        if since is None:
            self.fail(f"finishes {effect.token}, which is not an open call", node)
        self._deadlines.met(node, effect.token)
        trainer = node.trainer(effect.trainer)
        if trainer is None:
            self.fail(f"finishes {effect.token} of unknown trainer {effect.trainer}", node)
        if outcome.accepted and not np.isfinite(trainer.bucket).all():
            self.fail(f"hands a bucket that is not finite to {effect.trainer}", node)
        if outcome.status is Status.FAILED and outcome.reason is None:
            self.fail("fails without a reason", node)
        if outcome.status is Status.ALONE and outcome.group_size != 1:
            self.fail(f"is alone in a group of {outcome.group_size}", node)
        self._judge(node, effect.trainer, outcome, since)
        if not outcome.accepted:  # what was averaged in it is in no trainer's parameters
            rounds = self._recent.get(node.peer_id, {})
            for key, (at, round_) in list(rounds.items()):
                if at >= since and effect.trainer in round_.buckets:
                    del rounds[key]

    def _judge(self, node: Node, trainer: str, outcome: Outcome, since: float) -> None:
        """The outcome of a call that began at `since` against the rounds that it really had.

        A sweep reports the worst of its rounds. The version counts what is in the bucket, so it
        follows from the last snapshot or round that put values of others there. A round with only
        our own in it may count (others got them) or not, as may one of another trainer, which had
        left before it was over or not.
        """
        rounds = self._recent.get(node.peer_id, {})
        held = [
            (
                at, 0, 1 + max(it.version for it in round_.group.members),
                _with_others(round_) and (trainer in round_.buckets or trainer in round_.late),
            )
            for at, round_ in rounds.values()
            if round_.results
        ]  # fmt: skip
        # A daemon that wakes up ends its round and loads what it spoiled in one instant.
        at, version = self._loaded.get(node.peer_id, (-1.0, 0))
        held.append((at, 1, version, True))
        allowed: list[int] = []
        for at, _, version, certain in sorted(held, reverse=True):
            if at < since:
                allowed.clear()  # nothing certain in this call
                break
            allowed.append(version)
            if certain:
                break
        if outcome.accepted and allowed and outcome.version not in allowed:
            self.fail(f"ends at version {outcome.version}, its bucket holds {allowed}", node)
        if outcome.status not in (Status.COMPLETE, Status.PARTIAL) or not outcome.group_id:
            return
        _, round_ = rounds.get(outcome.group_id, (0.0, None))
        if (
            not (round_ and round_.results)
            and outcome.status is Status.PARTIAL
            and not outcome.participants
        ):
            return  # a later round of a sweep came to nothing
        if round_ is None:
            self.fail("reports a round that it did not have lately", node)
        results, group, without = round_.results, round_.group, outcome.parts_without_result
        # One that came at this very instant is not known to the Peer yet; a disputed one stays.
        present = [part for part in without if round_.placed.get(part, math.inf) < self._now()]
        here = node.peer_id, outcome.group_id.hex()
        if not self._disputed.issuperset((*here, part) for part in present):
            self.fail(f"has results in place for parts {present}, which it reports without", node)
        parts = [part for part in range(self._options.parts) if part not in without]
        missing = [part for part in parts if part not in results]
        if missing:
            self.fail(f"claims results for parts {missing} that never arrived", node)
        inside = [
            member.peer_id
            for index, member in enumerate(group.members)
            if all(index in results[part].contributors for part in parts)
        ]
        counted = outcome.contributors
        if not set(counted) <= set(inside):
            self.fail(f"reports contributors {counted}, in every part are {inside}", node)
        if outcome.participants != len(counted):
            self.fail(f"counts {outcome.participants} of {counted}", node)
        expected = [member.peer_id for member in group.members if member.weight > 0.0]
        if outcome.status is Status.COMPLETE and (without or not set(expected) <= set(counted)):
            self.fail(f"calls it complete with {counted} of {expected}, without {without}", node)
        weights = {member.peer_id: member.weight for member in group.members}
        total = math.fsum(weights[peer_id] for peer_id in counted)
        if not math.isclose(outcome.total_weight, total, rel_tol=RTOL):
            self.fail(f"reports weight {outcome.total_weight}, that of {counted} is {total}", node)
        self.bits.claims(node, outcome, round_)

    # -- rounds ------------------------------------------------------------------------------------

    def opened(self, node: Node, round_: Round) -> None:
        group = round_.group
        open_ = [key for key, other in node.plane.rounds.items() if not other.settled]
        if open_:
            self.fail(f"opens {group.group_id.hex()[:8]} inside {open_[0].hex()[:8]}", node)
        known = self._groups.setdefault(group.group_id, group)
        if known != group:
            self.fail(f"knows another group under the id {group.group_id.hex()[:8]}", node)
        if self._reducers.setdefault(group.group_id, round_.reducers) != round_.reducers:
            self.fail(f"assigns other reducers: {round_.reducers}", node)
        names = [member.peer_id for member in group.members]
        if not 2 <= len(names) <= self._options.params.max_group or len(set(names)) != len(names):
            self.fail(f"opens a group of {names}", node)
        if names[round_.index] != node.peer_id:
            self.fail(f"takes the place of {names[round_.index]}", node)
        if group.members[round_.index].weight != round_.weight:
            said = group.members[round_.index].weight
            self.fail(f"opens with weight {round_.weight}, Begin says {said}", node)
        if len(round_.reducers) != self._options.parts or not all(
            0 <= r < len(names) for r in round_.reducers
        ):
            self.fail(f"has {self._options.parts} parts and reducers {round_.reducers}", node)
        heaviest = max(member.weight for member in group.members)
        if not 0.0 <= heaviest <= self._options.params.max_weight:
            self.fail(f"opens a group with a weight of {heaviest}", node)
        self._conserved(node, round_)
        own_s = self.longest_round_s
        self._expect(node, group.group_id, own_s, f"has not closed {group.group_id.hex()[:8]}")
        share = self._contributions.setdefault(group.group_id, {})
        if round_.index in share:
            self.fail(f"opens group {group.group_id.hex()[:8]} a second time", node)
        share[round_.index] = (round_.weight, round_.value.copy())
        self.bits.opened(node, round_)

    def _conserved(self, node: Node, round_: Round) -> None:
        """Within a sweep the weight that a group averaged is spread evenly over its members, so
        that the total is the same in every round where all contributions arrived.

        It is the weight of whoever is in what lies in the bucket now, at the end of the round
        before: Parity may have repaired a part to a result of fewer since it was settled.
        """
        token, before = self._swept.pop(node.peer_id, ("", None))
        if before is None or not any(trainer.token == token for trainer in node.trainers):
            return
        share = _left_to_each(before, self._options.parts)
        if share is not None and not math.isclose(round_.weight, share, rel_tol=RTOL):
            name = before.group.group_id.hex()[:8]
            self.fail(f"weighs {round_.weight} after {name}, which left {share} to each", node)

    def _sweeps(self, node: Node, round_: Round) -> None:
        """It holds the results of a round; remember where its next in the same call comes from."""
        token = next((it.token for it in node.trainers if it.name in round_.buckets), "")
        if token:
            self._swept[node.peer_id] = (token, round_)

    def averaged(self, node: Node, round_: Round, part: int, payload: Payload) -> None:
        """The dumb twin."""
        shares = self._contributions[round_.group.group_id]
        where = self._options.slice_of(part)
        for index in payload.contributors:
            if index not in shares:
                self.fail(f"averages part {part} with member {index}, which never opened", node)
        total = math.fsum(shares[index][0] for index in payload.contributors)
        for at, mean in enumerate(payload.values.tolist()):
            each = [
                (shares[index][0], shares[index][1][where][at]) for index in payload.contributors
            ]
            twin = math.fsum(weight * float(value) for weight, value in each) / total
            if not math.isclose(mean, twin, rel_tol=RTOL, abs_tol=RTOL):
                self.fail(
                    f"averages element {at} of part {part} to {mean!r}, the twin to {twin!r}", node
                )

    def closed(self, node: Node, round_: Round) -> None:
        self._deadlines.met(node, round_.group.group_id)
        self._settled(node, round_)

    def _settled(self, node: Node, round_: Round) -> None:
        """It says Parity, or closes: its bucket holds the results, and they do not change.

        After that a round may stay open for slower members to read from, with its buckets returned.
        """
        if round_.settled:
            return
        round_.settled = True
        recent = self._recent.setdefault(node.peer_id, {})
        recent[round_.group.group_id] = (self._now(), round_)
        if len(recent) > ROUNDS_KEPT:
            del recent[next(iter(recent))]
        self._sweeps(node, round_)
        self._holds(node, round_, list(round_.buckets))

    def _in_place(self, node: Node, group_id: bytes, trainer: str = "") -> None:
        """The round ends for that trainer, or for all: also after a repair its bucket holds the
        results, unless another round has it by now."""
        round_ = node.plane.rounds.get(group_id)
        if round_ is not None and round_.settled and self.bits.lasts(node, group_id):
            names = [trainer] if trainer else list(round_.buckets)
            self._holds(node, round_, [name for name in names if name not in round_.returned])

    def _overwritten(self, node: Node, trainers: tuple[str, ...]) -> None:
        """A snapshot goes over what rounds that linger put into these buckets."""
        for group_id, round_ in node.plane.rounds.items():
            for name in trainers:
                if name in round_.trainers:
                    self._in_place(node, group_id, name)
                    round_.returned.add(name)

    def _holds(self, node: Node, round_: Round, names: list[str]) -> None:
        for part, payload in round_.results.items():
            where, values = self._options.slice_of(part), payload.values.tobytes()
            for name in names:
                bucket = round_.buckets.get(name)
                if bucket is not None and bucket[where].tobytes() != values:
                    self.fail(
                        f"has other values in the bucket of {name} than the result of part {part}",
                        node,
                    )

    def _compared(self, node: Node, other: str, group_id: bytes) -> None:
        """A difference that is remembered is part of what the round owes by its deadline."""
        for found in self.bits.parity(node, other, group_id):
            for here in (found.one, found.other):
                what = f"has not closed {group_id.hex()[:8]}, where {found}"
                self._deadlines.reword(here, group_id, what)

    def placed(self, node: Node, round_: Round, part: int, payload: Payload) -> None:
        """A result goes into buckets."""
        if not np.isfinite(payload.values).all():
            self.fail(f"gets a result of part {part} that is not finite", node)
        returned = [name for name in round_.trainers if name in round_.returned]
        if returned:
            self.fail(f"gets a result into the bucket of {returned}, which it gave back", node)

    def serving(self, node: Node) -> None:
        if len(node.plane.outgoing) > self._options.params.snapshot_slots:
            self.fail(f"serves {len(node.plane.outgoing)} snapshots at once", node)


def _with_others(round_: Round) -> bool:
    """Is anything but our own contribution in the results?"""
    own = (round_.index,)
    return any(payload.contributors != own for payload in round_.results.values())


def _left_to_each(round_: Round, parts: int) -> float | None:
    """What each member weighs after this round: the weight of those that are in every part, spread
    over all. None where a part has no result, which a member may not be sure of yet."""
    if len(round_.results) < parts:
        return None
    members = round_.group.members
    masks = [set(payload.contributors) for payload in round_.results.values()]
    inside = (one.weight for index, one in enumerate(members) if all(index in m for m in masks))
    return math.fsum(inside) / len(members)


# -- transcripts -----------------------------------------------------------------------------------


def transcript(nodes: Iterable[Node]) -> str:
    """What these nodes saw and did, merged by time, the last STORY_LINES lines."""
    lines: list[tuple[float, int, str]] = []
    for node in nodes:
        for at, item in node.story:
            text = item if isinstance(item, str) else brief(item)
            lines.append((at, len(lines), f"{at:12.6f} {node.peer_id} {text}"))
    return "\n".join(text for _, _, text in sorted(lines)[-STORY_LINES:])


def brief(value: Any) -> str:
    """One line for an event, effect or message: default fields, long tuples and hashes cut
    short."""
    if isinstance(value, bytes):
        return value.hex()[:8] or "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        head = ", ".join(brief(item) for item in value[:4])
        return f"({head}{f', ... {len(value)}' if len(value) > 4 else ''})"
    if isinstance(value, Record):
        place = f"r{value.round} {value.coordinates} of {value.shape.epoch}:{value.shape.sides}"
        return f"<{value.peer_id} v{value.version} {brief(value.lineage.digest)} {place}>"
    if isinstance(value, Group):
        members = " ".join(f"{member.peer_id}*{member.weight:g}" for member in value.members)
        return f"<{brief(value.group_id)} r{value.round} led by {value.leader}: {members}>"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [
            f"{one.name}={brief(item)}"
            for one in fields(value)
            if (item := getattr(value, one.name)) != one.default
            and not (isinstance(item, dict | tuple) and not item)
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    return str(value)
