"""How a peer becomes current: find out whose lineage and version hold, and take a snapshot from a
donor if ours do not.

Steps: ask the directory who is in the run, ask those peers for their record (a directory record
only proves that its peer once lived), decide, request a snapshot, have its digest confirmed by a
second member of the donor's last group, load it. Every step has an end; a donor that fails is
skipped and the next one asked.

One rule: nothing is loaded whose digest the donor's witnesses contradict.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum, auto

from moshpitd.core.effects import DropSnapshot, Effect, FetchSnapshot, LoadSnapshot, Note, Send
from moshpitd.core.grid import is_flat
from moshpitd.core.matchmaking import AGAIN_S
from moshpitd.core.messages import (
    DigestQuery,
    DigestReply,
    Hello,
    Lineage,
    Message,
    Record,
    SnapshotOffer,
    SnapshotRefused,
    SnapshotRequest,
)
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.swarm import Swarm, same_lineage

ASKED_AT_ONCE = 8
"""Peers asked for their record before deciding: enough for a median, few enough for one round trip
of a home line."""

BUSY_RETRY_S = 0.25
"""Wait before asking a donor again whose slots are taken: a small model is served within a few of
these."""

LATELY = 2.0
"""Refreshes: in so long the directory has named everybody in our shard."""

WITNESSES = 3
"""Members of the donor's last group asked to confirm its digest, one after another."""


class Step(Enum):
    LOOKING = auto()
    ASKING = auto()
    REQUESTED = auto()
    FETCHING = auto()
    WAITING = auto()
    CONFIRMING = auto()
    DONE = auto()


@dataclass(slots=True)
class CatchUp:
    """Invariant: at most one transfer is open, and it is dropped or loaded before DONE."""

    params: Params
    me: Record
    swarm: Swarm
    rng: random.Random
    part_count: int
    trainers: tuple[str, ...]
    deadline_at: float
    fresh: bool = (
        False  # first time since the trainer attached: a start (version 0) gives way to any result
    )
    step: Step = Step.LOOKING
    until: float = 0.0
    again_at: float = float("inf")  # when those that have not answered are asked once more
    asked: list[str] = field(default_factory=list)
    tried: dict[str, Reason] = field(default_factory=dict)
    donor: str = ""
    nonce: bytes = b""
    offer: SnapshotOffer | None = None
    staged: bytes = b""
    witnesses: list[str] = field(default_factory=list)
    named: bool = False  # by the donor
    loaded: bool = False
    confirmed: bool = False
    failed: Reason | None = None
    effects: list[Effect] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.step is Step.DONE

    def start(self, now: float, *, known: bool) -> None:
        """`known`: the directory was asked a moment ago; otherwise its answer comes as `found`."""
        if known:
            self._ask(now)
        else:
            self.until = now + 2 * self.params.answer_timeout_s

    def found(self, now: float) -> None:
        if self.step is Step.LOOKING:
            self._ask(now)

    def heard(self, peer_id: str, now: float) -> None:
        """The peer spoke for itself (or proved to be unreachable)."""
        if self.step is Step.ASKING and peer_id in self.asked:
            self.asked.remove(peer_id)
            if not self.asked:
                self._decide(now)

    def receive(self, sender: str, message: Message, now: float) -> None:
        match message:
            case SnapshotOffer() if (
                self.step is Step.REQUESTED and sender == self.donor and message.nonce == self.nonce
            ):
                self._on_offer(message, now)
            case SnapshotRefused() if sender == self.donor and message.nonce == self.nonce:
                if message.reason is Reason.BUSY:
                    self._drop()
                    self.step, self.until = Step.WAITING, now + BUSY_RETRY_S
                else:
                    self._next_donor(message.reason, now)
            case DigestReply() if self.step is Step.CONFIRMING and message.nonce == self.nonce:
                if self.witnesses and sender == self.witnesses[0]:
                    self._on_witness(message.digest, now)
            case _:
                pass

    def progressed(self, nonce: bytes, now: float) -> None:
        if nonce == self.nonce and self.step is Step.FETCHING:
            self.until = now + self.params.snapshot_timeout_s

    def arrived(self, nonce: bytes, digest: bytes, now: float) -> None:
        """Everything is staged."""
        if nonce != self.nonce or self.step is not Step.FETCHING or self.offer is None:
            return
        if digest != self.offer.digest:
            self._strike(self.donor, Reason.DIGEST, now)
            self._next_donor(Reason.DIGEST, now)
            return
        self.staged = digest
        self.step = Step.CONFIRMING
        offer = self.offer
        self.named = bool(offer.witnesses)
        # A donor that names nobody may be a liar: then anybody who holds that version has to do.
        # Only in a flat run: on a grid the groups of one version hold different values by right.
        others = [
            e.record.peer_id
            for e in self.swarm.live(self.me.schema)
            if e.record.version == offer.version
            and same_lineage(e.record.lineage, offer.lineage)
            and is_flat(e.record.shape)
        ]
        able = [w for w in offer.witnesses or others if w not in (self.donor, self.me.peer_id)]
        self.witnesses = able[:WITNESSES]
        self._ask_witness(now)

    def transfer_failed(self, nonce: bytes, reason: Reason, now: float) -> None:
        if nonce == self.nonce and self.step in (Step.REQUESTED, Step.FETCHING):
            self._next_donor(reason, now)

    def lost(self, peer_id: str, reason: Reason, now: float) -> None:
        """The peer cannot be reached, or said goodbye."""
        self.heard(peer_id, now)
        if reason in (Reason.DRAINING, Reason.PREEMPTED) and self.step is Step.FETCHING:
            return  # a donor that leaves finishes what it promised, and may be the only one
        if peer_id == self.donor and self.step in (Step.REQUESTED, Step.FETCHING):
            self._next_donor(reason, now)
        elif self.step is Step.CONFIRMING and self.witnesses and peer_id == self.witnesses[0]:
            self._on_witness(b"", now)

    def tick(self, now: float) -> None:
        if self.over:
            return
        if now >= self.deadline_at:
            self._end(Reason.TIMEOUT)
            return
        if self.step is Step.ASKING and now >= self.again_at:
            self.again_at = float("inf")
            self.effects += [Send(peer_id, Hello(self.me)) for peer_id in self.asked]
        if now < self.until:
            return
        match self.step:
            case Step.LOOKING | Step.WAITING:
                self._ask(now)
            case Step.ASKING:
                for peer_id in self.asked:
                    self.swarm.lose(peer_id, Reason.NO_ANSWER)
                self.asked = []
                self._decide(now)
            case Step.REQUESTED | Step.FETCHING:
                self._next_donor(
                    Reason.NO_ANSWER if self.step is Step.REQUESTED else Reason.SILENT, now
                )
            case Step.CONFIRMING:
                self._on_witness(b"", now)
            case _:
                pass

    def deadline(self) -> float:
        again_at = self.again_at if self.step is Step.ASKING else self.until
        return min(self.until, again_at, self.deadline_at)

    def sentence(self) -> str:
        """Why it failed, for people."""
        tried = ", ".join(f"{peer} ({reason.value})" for peer, reason in self.tried.items())
        return f"our state is not the swarm's and no donor gave it: {tried or 'none was reachable'}"

    def abandon(self, reason: Reason) -> None:
        if not self.over:
            self._end(reason)

    # -- steps

    def _ask(self, now: float) -> None:
        self.step = Step.ASKING
        self.until, self.again_at = now + self.params.answer_timeout_s, now + AGAIN_S
        fresh = now - self.params.found_fresh_s
        live = self.swarm.live(self.me.schema)
        unsure = [e.record.peer_id for e in live if e.direct_at < fresh]
        if len(unsure) > ASKED_AT_ONCE:
            # Of many a few will do, and those of our line on a large grid have just told us by
            # themselves: an answer says no more, and one in a hundred is waited for in vain.
            told = sum(1 for e in live if e.stated_at >= fresh)
            unsure = self.rng.sample(unsure, max(0, ASKED_AT_ONCE - told))
        self.asked = unsure
        for peer_id in unsure:
            if self.swarm.heard[peer_id].greeted_at < now:  # else the answer is on its way
                self.effects.append(Send(peer_id, Hello(self.me)))
        if not unsure:
            self._decide(now)

    def _decide(self, now: float) -> None:
        if not needs_snapshot(self.swarm, self.me, self.params, now, fresh=self.fresh):
            self._end(None)
            return
        winner = self.swarm.winning_lineage(self.me.lineage, self.me.version, self.me.schema)
        donors = [
            e.record
            for e in self.swarm.live(self.me.schema)
            if same_lineage(e.record.lineage, winner)
            and e.record.has_snapshot
            and e.record.peer_id not in self.tried
        ]
        if not donors:
            self._end(Reason.NO_DONOR)
            return
        latest = max(record.version for record in donors)
        # Among the latest any will do: newcomers that arrive together should not all ask the same
        # one.
        donor = self.rng.choice([record for record in donors if record.version == latest])
        self.donor, self.offer = donor.peer_id, None
        self.nonce = self.rng.randbytes(16)
        self.step, self.until = Step.REQUESTED, now + self.params.answer_timeout_s
        self._note("snapshot_started", donor.peer_id)
        self.effects.append(Send(donor.peer_id, SnapshotRequest(self.nonce, self.me)))

    def _on_offer(self, offer: SnapshotOffer, now: float) -> None:
        heard = [entry.record.version for entry in self.swarm.live(self.me.schema)]
        ceiling = max(heard, default=0) + self.params.max_version_lag
        winner = self.swarm.winning_lineage(self.me.lineage, self.me.version, self.me.schema)
        if not same_lineage(offer.lineage, winner) or not 0 <= offer.version <= ceiling:
            self._strike(self.donor, Reason.VERSION, now)
            self._next_donor(Reason.VERSION, now)
            return
        if offer.parts != self.part_count or offer.state_bytes > self.params.max_state_bytes:
            self._strike(self.donor, Reason.PART_SIZE, now)
            self._next_donor(Reason.PART_SIZE, now)
            return
        self.offer = offer
        self.step, self.until = Step.FETCHING, now + self.params.snapshot_timeout_s
        entry = self.swarm.heard.get(self.donor)
        addresses = entry.record.addresses if entry is not None else ()
        self.effects.append(
            FetchSnapshot(self.nonce, self.donor, addresses, offer.parts, offer.state_bytes)
        )

    def _ask_witness(self, now: float) -> None:
        if not self.witnesses or self.offer is None:
            self._load(confirmed=False)
            return
        self.until = now + self.params.answer_timeout_s
        self.effects.append(Send(self.witnesses[0], DigestQuery(self.nonce, self.offer.version)))

    def _on_witness(self, digest: bytes, now: float) -> None:
        if digest == self.staged:
            self._load(confirmed=True)
        elif digest:
            if (
                self.named
            ):  # its own last group says otherwise; a stranger may just hold another mean
                self._strike(self.donor, Reason.DIGEST, now)
            self._next_donor(Reason.DIGEST, now)
        else:
            # It moved on, or is gone: ask the next. If nobody knows, the donor's word has to do.
            self.witnesses.pop(0)
            self._ask_witness(now)

    def _load(self, *, confirmed: bool) -> None:
        assert self.offer is not None
        self.loaded, self.confirmed = True, confirmed
        self.effects.append(LoadSnapshot(self.nonce, self.offer.version, self.trainers))
        self._note("snapshot_loaded", self.donor, version=self.offer.version, confirmed=confirmed)
        self.step = Step.DONE

    def _next_donor(self, reason: Reason, now: float) -> None:
        self._note("snapshot_failed", self.donor, reason=reason.value)
        self.tried[self.donor] = reason
        if reason in (Reason.UNREACHABLE, Reason.NO_ANSWER):
            self.swarm.lose(self.donor, reason)
        self._drop()
        self._decide(now)

    def _drop(self) -> None:
        if self.nonce:
            self.effects.append(DropSnapshot(self.nonce))
        self.nonce, self.offer, self.donor, self.staged = b"", None, "", b""

    def _end(self, failed: Reason | None) -> None:
        self._drop()
        self.failed = failed
        self.step = Step.DONE

    def _strike(self, peer_id: str, reason: Reason, now: float) -> None:
        self.swarm.strike(peer_id, now)
        self._note("strike", peer_id, reason=reason.value)

    def _note(self, what: str, peer: str, *, reason: str = "", **fields: object) -> None:
        self.effects.append(Note(what, peer, reason, fields=dict(fields)))


def needs_snapshot(swarm: Swarm, me: Record, params: Params, now: float, *, fresh: bool) -> bool:
    """Another lineage holds, or the median heard in ours is more than `max_version_lag` ahead, or
    (`fresh`) we hold a start where the others hold results. The last only when a trainer attaches:
    in the first rounds of a grid some groups are done before others, and none of them is a
    newcomer."""
    winner = swarm.winning_lineage(me.lineage, me.version, me.schema)
    if not same_lineage(winner, me.lineage):
        return True
    if fresh and me.version == 0 and swarm.median_version(0, me.lineage, me.schema)[0] > 0:
        return True
    since = now - LATELY * params.refresh_s
    return swarm.lags(me.version, me.lineage, me.schema, since=since)


def adopted(me: Record, lineage: Lineage) -> Lineage:
    """The lineage to state after `lineage` won or was loaded: of two founders of the same bits the
    lower one."""
    if same_lineage(me.lineage, lineage):
        return min(me.lineage, lineage)
    return lineage
