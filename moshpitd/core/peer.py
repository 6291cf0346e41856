"""The protocol of one run on one node: events in, effects out, a deadline.

    peer.handle(event, now); peer.take_effects() -> list; peer.deadline() -> float | None

A call of a trainer (average or sync) becomes `Work`: catch up if needed, then as many rounds as
were asked for, each of them matchmaking (`Attempt`) and exchange (`Round`). One work at a time;
what trainers contribute meanwhile waits for the next one. Everything else in here answers other
peers.

Order of effects: those of one event come in the order in which they were decided, and the driver
carries them out in that order. One rule: nothing a peer, the network or a trainer does raises out
of `handle`.
"""

from __future__ import annotations

import random

from moshpitd.core import events as ev
from moshpitd.core.asking import Asking
from moshpitd.core.calls import Calls
from moshpitd.core.donor import Donor
from moshpitd.core.effects import Effect, Send
from moshpitd.core.exchanges import is_question
from moshpitd.core.graph import PeerGraph
from moshpitd.core.handover import has_company
from moshpitd.core.hearing import Hearing
from moshpitd.core.lateness import Offer
from moshpitd.core.messages import (
    Accepted,
    Again,
    Audit,
    Audited,
    Begin,
    Counts,
    Crcs,
    Declined,
    DigestQuery,
    DigestReply,
    Goodbye,
    Hello,
    Invite,
    Join,
    Later,
    Leave,
    Letter,
    Lineage,
    Message,
    Missing,
    NoResult,
    NotMember,
    Pair,
    PairAnswer,
    Parity,
    Promise,
    Record,
    Redirect,
    Resend,
    SnapshotOffer,
    SnapshotRefused,
    SnapshotRequest,
    TakeOver,
    Without,
)
from moshpitd.core.outcome import Reason
from moshpitd.core.pairs import Pairs
from moshpitd.core.params import Params
from moshpitd.core.placing import Place
from moshpitd.core.presence import Presence
from moshpitd.core.quiet import Quiet
from moshpitd.core.soundness import is_fair, is_sane, is_steady
from moshpitd.core.state import State
from moshpitd.core.storage import Storage
from moshpitd.core.store_words import STORE_EVENTS, STORE_MESSAGES
from moshpitd.core.swarm import Swarm
from moshpitd.core.work import Conductor, Work

MATCHING = (Accepted, Declined, Later, Redirect, Leave)
OF_A_ROUND = (
    NotMember, Without, NoResult, Parity, Missing, TakeOver, Promise, Again, Resend, Crcs,
    Audit, Audited, Letter, Counts,
)  # fmt: skip
EARLY = 128
"""Messages of rounds whose Begin is still on its way; a group of 16 says fewer before anybody's."""


class Peer:
    """Invariant: `work` is the only call that talks to other peers; at most one group at a time."""

    def __init__(
        self,
        params: Params,
        peer_id: str,
        rng: random.Random,
        *,
        run: str,
        codec: str = "float32",
        sequence: int = 0,
        own: PeerGraph | None = None,
    ) -> None:
        """`sequence` must exceed that of any record an earlier life of this peer made; `own` is
        the operator's topology, if there is one."""
        self.params, self.peer_id, self.run, self.codec = params, peer_id, run, codec
        self.state = State(
            params=params,
            peer_id=peer_id,
            rng=rng,
            codec=codec,
            swarm=Swarm(params, peer_id),
            place=Place(params, peer_id),
            presence=Presence(params, Record(peer_id, sequence, b"", 0, Lineage(), codec=codec)),
            donor=Donor(params),
            quiet=Quiet(params),
            offer=Offer(params.max_candidates),
            own=own,
        )
        self.conductor = Conductor(self.state)
        self.hearing = Hearing(self.state, self.conductor)
        self.asking = Asking(self.state, self.conductor)
        self.calls = Calls(self.state, self.conductor)
        self.pairs = Pairs(self.state)
        self.storage = Storage.of(self.state)

    # -- the doors

    def take_effects(self) -> list[Effect]:
        effects, self.state.effects = self.state.effects, []
        return effects

    def deadline(self) -> float | None:
        # Asked after every event, and nearly always nothing waits but the first two.
        times = (
            self.state.presence.deadline(),
            self.conductor.deadline(),
            self.calls.deadline(),
            self.pairs.deadline(),
            self.storage.deadline(),
        )
        earliest: float | None = None
        for at in times:
            if at is not None and (earliest is None or at < earliest):
                earliest = at
        return earliest

    def handle(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.Received():
                self._on_message(event.sender, event.message, now)
            case ev.Found():
                self.hearing.found(event, now)
            case ev.Announced():
                self.hearing.announced(event, now)
            case ev.Ticked():
                pass
            case ev.Contributed():
                self.calls.on_contributed(event, now)
            case ev.Synced():
                self.calls.on_synced(event, now)
            case ev.Attached():
                self.calls.on_attached(event, now)
            case ev.TrainerGone():
                self.pairs.gone(event.trainer, now)
                self.calls.on_trainer_gone(event.trainer, now)
                if not self.state.trainers:
                    self.storage.reset(now)
            case ev.Cancelled():
                self.pairs.cancelled(event.token)
                self.calls.on_cancelled(event.token, now)
            case ev.ValuesKept():
                if event.trainer in self.state.trainers:  # it may have left meanwhile
                    self.pairs.kept(event.trainer)
            case ev.MeetAsked():
                self.pairs.asked(event, now)
            case ev.ContributionRefused():
                self.state.refused_until = now + self.state.params.window_s
            case ev.Undelivered():
                self._on_undelivered(event.to, event.message, now)
            case ev.Addressed():
                self.state.presence.update(
                    addresses=event.addresses,
                    control=event.control,
                    up_mbps=event.up_mbps,
                    down_mbps=event.down_mbps,
                )
            case ev.Drained():
                self.calls.on_drained(now, preempted=event.preempted)
            case _ if isinstance(event, STORE_EVENTS):
                self.storage.handle(event, now)
            case _:
                self._on_data(event, now)
        self._advance(now)

    # -- for status

    @property
    def work(self) -> Work | None:
        return self.conductor.work

    @property
    def queue(self) -> list[ev.Contributed | ev.Synced]:
        return self.calls.queue

    @property
    def record(self) -> Record:
        return self.state.record

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def lineage(self) -> Lineage:
        return self.state.lineage

    @property
    def round(self) -> int:
        return self.state.place.round

    @property
    def shape(self) -> tuple[int, ...]:
        return self.state.place.shape.sides

    @property
    def coordinates(self) -> tuple[int, ...]:
        return self.state.place.coordinates

    @property
    def phase(self) -> str:
        work = self.work
        if work is None:
            return "idle"
        return (
            "exchange"
            if work.round is not None
            else "catch_up"
            if work.catch_up is not None
            else "matchmaking"
        )

    def progress(self) -> tuple[str, int, int, int, int]:
        """(phase, group size, parts done, parts, round) of the call that runs."""
        current = self.work.round if self.work is not None else None
        if current is None:
            return self.phase, 1, 0, len(self.state.part_sizes), self.state.place.round
        phase = "parity" if current.parity_sent_at is not None else "exchange"
        return (
            phase,
            len(current.group.members),
            current.parts_done(),
            len(self.state.part_sizes),
            current.group.round,
        )

    def under_way(self, now: float) -> bool:
        """Does anything go on here that the others need? For a run without trainers."""
        donor = self.state.donor
        return bool(
            self.work is not None
            or self.queue
            or self.conductor.lingering
            or donor.asked
            or any(until > now for _, until in donor.serving.values())
            or (self.storage.on_duty and has_company(self.state, now))
        )

    def peers(self) -> list[tuple[Record, float, str, str]]:
        """(record, heard at, state, note) of everybody known."""
        members: dict[str, bool] = {}
        if self.work is not None and self.work.round is not None:
            members = {member.peer_id: True for member in self.work.round.group.members}
        return self.state.swarm.lines(members)

    def _on_message(self, sender: str, message: Message, now: float) -> None:
        record = getattr(message, "record", None)
        if isinstance(record, Record):
            if record.peer_id != sender or not is_sane(record):
                self.state.strike(sender, Reason.NOT_MEMBER, now)
                return
            self.hearing.record(record, now, direct=True)
        else:
            self.state.swarm.alive(sender, now)
        work = self.conductor.work
        # In the order of how many there are of each: half of all are a Hello.
        if isinstance(message, Hello):
            if not message.answer:
                reply = (
                    Hello(self.state.record, answer=True)
                    if self.state.presence.present
                    else Goodbye(Reason.NO_TRAINER, self.state.record.sequence)
                )
                self.state.effects.append(Send(sender, reply))
            elif work is None or work.attempt is None:
                self.conductor.meeting.greeted(sender, message.record, now)
        elif isinstance(message, (Invite, Join)):
            self.asking.asked(sender, message, now)
        elif isinstance(message, MATCHING):
            if work is not None and work.attempt is not None and message.key == work.attempt.key:
                if isinstance(message, Redirect):
                    self.conductor.meeting.pointed_at(work.attempt, message.leader, now)
                work.attempt.receive(sender, message, now)
            elif isinstance(message, Leave) and work is not None and work.round is not None:
                self.asking.left_late(work.round, sender, message, now)
        elif isinstance(message, Begin):
            self.asking.begun(sender, message, now)
        elif (answer := self.conductor.verdicts.answer(sender, message)) is not None:
            self.state.effects += answer
        elif isinstance(message, OF_A_ROUND):
            if isinstance(message, Letter) and not is_fair(message):
                self.state.strike(sender, Reason.REFUSED, now)  # and its edge is dropped
            if isinstance(message, Parity):
                self.state.offer.done(sender)
            for ended in self.conductor.lingering:
                if ended.st.group_id == message.group_id:
                    ended.overheard(sender, message)
            if (
                work is not None
                and work.round is not None
                and message.group_id == work.round.group.group_id
            ):
                if isinstance(message, NotMember):
                    self.conductor.chain.stop()
                work.round.receive(sender, message, now)
            elif self.conductor.chain.heard(sender, message):
                pass
            elif is_question(message) and (work is None or work.attempt is None):
                # Its round is over here and the bucket is the trainer's again, or we never had it.
                own = self.state.peer_id
                self.state.effects.append(Send(sender, NotMember(message.group_id, own)))
            elif len(self.state.early) < EARLY:
                self.state.early.append((sender, message))
        elif isinstance(message, (SnapshotOffer, SnapshotRefused, DigestReply)):
            if work is not None and work.catch_up is not None:
                work.catch_up.receive(sender, message, now)
        elif isinstance(message, SnapshotRequest):
            refuse = None if message.record.schema == self.state.record.schema else Reason.SCHEMA
            if not self.state.trainers or self.state.draining:
                refuse = Reason.NO_TRAINER
            self.state.donor.request(
                sender, message, lineage=self.state.lineage, refuse=refuse, now=now
            )
        elif isinstance(message, DigestQuery):
            self.state.donor.query(sender, message)
        elif isinstance(message, (Pair, PairAnswer)):
            self.pairs.receive(sender, message, now)
        elif isinstance(message, Goodbye):
            if self.state.swarm.goes(sender, message):
                self.hearing.lose(sender, message.reason, now)
                self.pairs.lost(sender, message.reason)
                self.storage.lost(sender, now)
        elif isinstance(message, STORE_MESSAGES):
            if is_steady(message):
                self.storage.receive(sender, message, now)
            else:
                self.state.strike(sender, Reason.REFUSED, now)
        if work is not None and work.catch_up is not None:
            work.catch_up.heard(sender, now)

    def _on_undelivered(self, to: str, message: Message, now: float) -> None:
        work = self.conductor.work
        attempt = work.attempt if work is not None else None
        if attempt is not None and attempt.undelivered(to, message, now):
            return
        if isinstance(message, Begin) and work is not None and work.round is not None:
            if to not in work.told_again:
                work.told_again[to] = True
                self.state.effects.append(Send(to, message))
                return
            self.asking.disown(message.group, to)
        elif self.state.swarm.doubt(to, now):
            # One message may be lost where everything else arrives: ask before giving it up.
            self.state.effects.append(Send(to, Hello(self.state.record)))
            if isinstance(message, (Pair, PairAnswer)):
                self.pairs.lost(to, Reason.UNREACHABLE)  # whoever waits for it looks for another
            return
        if work is not None and work.round is not None:
            work.round.lost(to, Reason.UNREACHABLE, now)
        self.pairs.lost(to, Reason.UNREACHABLE)
        self.hearing.lose(to, Reason.UNREACHABLE, now)
        self.storage.lost(to, now)

    def _on_data(self, event: ev.Event, now: float) -> None:
        work = self.conductor.work
        current = work.round if work is not None else None
        catch_up = work.catch_up if work is not None else None
        match event:
            case (
                ev.PartArrived()
                | ev.PartRefused()
                | ev.Averaged()
                | ev.ResultArrived()
                | ev.PartFailed()
                | ev.Barred()
                | ev.AuditArrived()
                | ev.Checked()
                | ev.EdgesCoded()
                | ev.EdgeArrived()
                | ev.EdgeRefused()
            ):
                if current is not None and event.group_id == current.group.group_id:
                    if isinstance(
                        event, (ev.PartRefused, ev.EdgeRefused)
                    ) and 0 <= event.sender < len(current.group.members):
                        self.state.strike(
                            current.group.members[event.sender].peer_id, event.reason, now
                        )
                    current.handle(event, now)
            case ev.Listened():
                if current is not None:
                    current.handle(event, now)
            case ev.PairArrived():
                self.pairs.arrived(event.nonce)
            case ev.PairFailed():
                self.pairs.failed(event.nonce, event.reason, now)
            case ev.LinkLost():
                self.pairs.lost(event.peer, event.reason)
                self.storage.lost(event.peer, now)
                self.conductor.chain.lost(event.peer)
                if work is not None and work.attempt is not None:
                    work.attempt.lost(event.peer, event.reason, now)
                for ended in self.conductor.lingering:
                    ended.overheard(event.peer, None)
                if current is not None:
                    current.handle(event, now)
                if catch_up is not None and catch_up.donor == event.peer:
                    catch_up.transfer_failed(catch_up.nonce, event.reason, now)
            case ev.SnapshotProgressed():
                if catch_up is not None:
                    catch_up.progressed(event.nonce, now)
            case ev.SnapshotArrived():
                if catch_up is not None:
                    catch_up.arrived(event.nonce, event.digest, now)
            case ev.SnapshotFailed():
                self.state.donor.failed(event.nonce)
                if catch_up is not None:
                    catch_up.transfer_failed(event.nonce, event.reason, now)
            case ev.SnapshotSent():
                self.state.donor.sent(event.nonce)
            case ev.Digested():
                self.state.donor.digested(event.version, event.digest, self.state.lineage, now)
            case ev.SnapshotRefreshed():
                self.state.donor.holds(event.version, self.state.donor.witnesses)
                self.state.presence.update(has_snapshot=bool(self.state.trainers))
            case ev.StateStored():
                self.state.donor.state_bytes = event.nbytes
            case _:
                pass

    def _advance(self, now: float) -> None:
        """Let everything whose time has come end, and carry the work on until it waits for
        something."""
        state = self.state
        state.presence.tick(now)
        self.conductor.tick(now)
        self.calls.tick(now)
        self.pairs.tick(now)
        if state.donor.effects:
            state.collect(state.donor.effects)
        for _ in range(
            8 + 2 * len(self.calls.queue)
        ):  # each turn ends a step of the work; steps of one call are few
            work = self.conductor.work
            if work is None:
                if not self.calls.queue:
                    break
                self.calls.next_call(now)
                continue
            if not self.conductor.step(work, now):
                break
        if state.presence.effects:
            state.collect(state.presence.effects)
        if not self.storage.idle:
            self.storage.tick(now)
            self.state.effects += self.storage.take_effects()
