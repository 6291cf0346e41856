"""What the parts of one Peer share: what it knows, what it is, and the effects it has decided on.

One rule: state only, plus the few questions that everybody asks of it; whoever changes it says so
in a Note.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from moshpitd.core.catchup import needs_snapshot
from moshpitd.core.donor import Donor
from moshpitd.core.effects import Effect, Note, Send
from moshpitd.core.graph import PeerGraph
from moshpitd.core.lateness import Offer
from moshpitd.core.messages import Hello, Lineage, Message, Record
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params
from moshpitd.core.placing import Place
from moshpitd.core.presence import Presence
from moshpitd.core.quiet import Quiet
from moshpitd.core.swarm import Swarm, same_lineage


@dataclass(slots=True)
class State:
    """Invariant: `presence.record` is what we would tell anybody now."""

    params: Params
    peer_id: str
    rng: random.Random
    codec: str
    swarm: Swarm
    place: Place
    presence: Presence
    donor: Donor
    quiet: Quiet
    offer: Offer
    own: PeerGraph | None = None  # the operator's topology
    part_sizes: tuple[int, ...] = ()
    trainers: dict[str, bool] = field(default_factory=dict)  # trainer -> it has to load our state
    invites: dict[str, tuple[str, float]] = field(default_factory=dict)  # leader -> (key, until)
    caught_up: bool = False
    newcomer: bool = False
    had_company: bool = False
    draining: bool = False
    sweeping: bool = False  # the call that runs has had a round of several
    sweeps: bool = False  # the last call asked for a sweep
    refused_until: float = float("-inf")
    attempts: int = 0
    norm: float = 0.0  # of what our trainers contribute to the running call
    early: list[tuple[str, Message]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    @property
    def record(self) -> Record:
        return self.presence.record

    @property
    def version(self) -> int:
        return self.presence.record.version

    @property
    def lineage(self) -> Lineage:
        return self.presence.record.lineage

    def refuse(self, record: Record, now: float) -> Reason | None:
        """Why we do not average with that peer now."""
        if not self.trainers:
            return Reason.NO_TRAINER
        if self.draining:
            return Reason.DRAINING
        if now < self.refused_until:
            return Reason.REFUSED
        if record.schema != self.record.schema:
            return Reason.SCHEMA
        if self.swarm.strikes(record.peer_id, now) >= self.params.max_strikes:
            return Reason.STRIKES
        if not same_lineage(record.lineage, self.lineage):
            return Reason.LINEAGE
        if self.version - record.version > self.params.max_version_lag:
            return Reason.VERSION
        since = now - self.params.window_s
        if self.swarm.too_far_ahead(
            record.version, self.version, self.lineage, self.record.schema, since=since
        ):
            self.strike(record.peer_id, Reason.VERSION, now)
            return Reason.VERSION
        return None

    def outdates(self, schema: bytes, version: int) -> bool:
        """Does a trainer that attaches with this load what the node has? Another one is here; or
        the donor copy is newer. That our version is newer is not enough: nothing may be copied of
        it, in a sweep that is not over or where those that held it are gone."""
        newer = (self.donor.version or 0) > version
        return bool(self.trainers) or (newer and schema == self.record.schema)

    def behind(self, now: float) -> bool:
        return needs_snapshot(self.swarm, self.record, self.params, now, fresh=False)

    def tell_everybody(self) -> None:
        """Our record says something else now. Whoever holds the one before would not ask us to its
        group: it has another lineage, or no trainer here."""
        for entry in self.swarm.live(self.record.schema)[: self.params.max_group]:
            self.effects.append(Send(entry.record.peer_id, Hello(self.record, answer=True)))

    def collect(self, effects: list[Effect]) -> None:
        self.effects += effects
        effects.clear()

    def strike(self, peer_id: str, reason: Reason, now: float) -> None:
        self.swarm.strike(peer_id, now)
        self.note("strike", peer_id, reason)

    def note(
        self, what: str, peer: str = "", reason: str = "", detail: str = "", **fields: object
    ) -> None:
        self.effects.append(Note(what, peer, str(reason), detail, fields))
