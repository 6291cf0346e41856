"""The second driver of `core.peer.Peer`: an agenda of calls in order of time instead of a clock
and a network. One rule: no protocol rule lives here; what a Peer asks for is done or fails as the
options say, and nothing else happens.

Phase one: faults, with every check after every event. Phase two: faults stop, the dead come back,
and every survivor must finish `goal` complete rounds within `bound_s`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, TypeAlias, get_args

from moshpitd.core.effects import Announce, Effect, Finish, LookUp, Note, Open, Send
from moshpitd.core.events import Announced, Event, Found, Received, Ticked, Undelivered
from moshpitd.core.messages import MESSAGES, Message
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.sim.agenda import Agenda
from moshpitd.sim.bulk import Bulk
from moshpitd.sim.checks import Checks
from moshpitd.sim.faults import Options
from moshpitd.sim.life import Life, make_nodes
from moshpitd.sim.meetings import OF_ATTEMPTS
from moshpitd.sim.meters import Figures, Meters
from moshpitd.sim.network import Directory, Links
from moshpitd.sim.nodes import MakePeer, Node, Participant, digest_of
from moshpitd.sim.trouble import Trouble
from moshpitd.sim.wire import DIAL_TIMEOUT_S

REPORT_S = 1.0
"""A lost message is reported to its sender after that: the transport's own retries take as long."""
SPIN = 32
"""A Peer that is ticked so often at one instant and still asks for that instant would tick for
ever."""

SAMPLE_S = 1e-3
"""So long before a stretch ends its census is taken: what happens at the very end belongs to the
next."""
STALE_TAIL = 4.0
"""What the directory shows late is there by then: 3 spreads of 0.5 are 4.5 medians, and nearly all
of it earlier."""

Watcher: TypeAlias = Callable[[Node, Event | Effect], None]
_STAMP = struct.Struct("<dI")
_CODE = {kind: str(number) for number, kind in enumerate((*get_args(Event), *get_args(Effect)))}
_MESSAGE = {kind: str(number) for number, kind in enumerate(MESSAGES)}


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. Two runs of one seed have equal reports."""

    seed: int
    digest: str
    peers: int
    events: int  # handed to Peers
    steps: int  # taken from the agenda
    ended_s: float  # world time
    outcomes: dict[str, int] = field(default_factory=dict)  # status or failed:reason -> count
    notes: dict[str, int] = field(default_factory=dict)
    group_sizes: dict[int, int] = field(default_factory=dict)
    figures: Figures | None = None


class World:
    """Invariant: everything that happens is on the agenda, and of two things at one instant the one
    that was put there first happens first."""

    def __init__(self, options: Options, make: MakePeer | None = None) -> None:
        self.options = options
        self.now = 0.0
        self.watchers: list[Watcher] = []
        """Called before every event and effect; a test kills a node from here at the very point it
        wants."""
        self.nodes = make_nodes(options)
        self.links = Links(options)
        self.directory = Directory(options)
        self.checks = Checks(options, lambda: self.now, self.links, self.directory)
        self.meters = Meters(options, self.links, self.directory, lambda: self.now)
        self.bulk = Bulk(self, self.links, self.checks, options)
        self.trouble = Trouble(self, options)
        self.life = Life(self, options, make or _production)
        self._by_id = {node.peer_id: node for node in self.nodes}
        self._agenda = Agenda()
        self._digest = blake2b(digest_size=16)
        self._events = self._steps = 0
        self._notes: Counter[str] = Counter()
        self.life.populate()
        self.trouble.populate()
        self.later(options.faults_s, self._settle)
        self.later(self.meters.length - SAMPLE_S, self._sample)

    def run(self) -> Report:
        """Until every survivor has reached the goal of phase two, and nothing is left open that
        members differed in."""
        self.run_until(self.life.satisfied, bound_s=self.options.faults_s + self.options.bound_s)
        self._go(lambda: not self.checks.bits.undecided, self.now + self.checks.longest_round_s)
        self.checks.at_the_end(self.nodes)
        return self.report()

    def run_until(self, done: Callable[[], bool], *, bound_s: float) -> None:
        """Until `done()`, which must come true within `bound_s` from now."""
        if not self._go(done, self.now + bound_s):
            late = self.life.late() or self.nodes
            self.checks.fail(f"did not get there within {bound_s} s ({len(late)} nodes)", *late[:3])

    def _go(self, done: Callable[[], bool], end: float) -> bool:
        """On until `done()`; false if it has not come true by `end`."""
        take, after_event = self._agenda.take, self.checks.after_event
        while not done():
            item = take(until=end)
            if item is None:
                return False
            self.now, _, call, args = item
            self._steps += 1
            call(*args)
            after_event()
        return True

    def report(self) -> Report:
        self.meters.sample(self.life.living)
        return Report(
            seed=self.options.seed,
            digest=self._digest.hexdigest(),
            peers=len(self.nodes),
            events=self._events,
            steps=self._steps,
            ended_s=self.now,
            outcomes=dict(sorted(self.life.outcomes.items())),
            notes=dict(sorted(self._notes.items())),
            group_sizes=dict(sorted(self.life.sizes.items())),
            figures=self.meters.figures(),
        )

    # -- what the other rooms of the world use -----------------------------------------------------

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._agenda.put(self.now + delay, call, args)

    def post(self, delay: float, node: Node, event: Event) -> None:
        """Tell the daemon that lives on `node` now; if it dies before, nobody hears it."""
        self.later(delay, self._tell_same, node, node.incarnation, event)

    def node(self, peer_id: str) -> Node:
        return self._by_id[peer_id]

    def find(self, peer_id: str) -> Node | None:
        """None: a liar made the name up."""
        return self._by_id.get(peer_id)

    def tell(self, node: Node, event: Event, *, at_least: float = 0.0) -> None:
        """Hand `event` to the daemon on `node`, if one lives there, and carry out what it asks, in
        order."""
        if node.thaws_at is not None:
            node.backlog.append((event, at_least))
            return
        peer, incarnation = node.peer, node.incarnation
        for watcher in self.watchers:
            watcher(node, event)
        if peer is None or node.incarnation != incarnation:
            return
        self._events += 1
        node.story.append((self.now, event))
        clock = node.clock_at(self.now)
        if clock > node.clock:
            node.clock = clock
        if at_least > node.clock:
            node.clock = at_least
        try:
            peer.handle(event, node.clock)
            effects = peer.take_effects()
        except Exception as error:
            self.checks.fail(f"raised {error!r} on {type(event).__name__}", node, cause=error)
        self._remember(node, event, effects)
        for effect in effects:
            for watcher in self.watchers:
                watcher(node, effect)
            if node.incarnation != incarnation:
                return  # a watcher killed it between two effects
            node.story.append((self.now, effect))
            to = self._by_id.get(effect.to) if isinstance(effect, Send) else None
            self.checks.effect(node, effect, to)
            if isinstance(effect, Send):
                self._send(node, effect, to)
            else:
                self._perform(node, effect)
        self._arm(node, peer)

    def rearm(self, node: Node) -> None:
        """Its timers counted on while it stood still."""
        if node.peer is not None:
            node.timer = None
            self._arm(node, node.peer)

    # -- effects -----------------------------------------------------------------------------------

    def _perform(self, node: Node, effect: Effect) -> None:
        if isinstance(effect, Note):
            self._notes[effect.what] += 1
            if effect.what in OF_ATTEMPTS:
                self.meters.noted(node, effect)
        elif isinstance(effect, Announce):
            takes_s = self.directory.storing(effect.key, node.peer_id, self.now)
            self.later(takes_s, self._stored, node, node.incarnation, effect)
        elif isinstance(effect, LookUp):
            self.later(self.directory.duration(), self._found, node, node.incarnation, effect)
        elif isinstance(effect, Finish):
            self.life.finished(node, effect)
        else:
            if isinstance(effect, Open):
                group = effect.group
                self.meters.opened(node, group, self._by_id.get(group.leader), self.life.living)
            self.bulk.handle(node, effect)

    def _send(self, node: Node, effect: Send, to: Node | None) -> None:
        if node.liar is None:
            self._send_to(node, effect.to, to, effect.message)
            return
        for other, message in node.liar.says(effect.to, effect.message):
            self._send_to(node, other, self._by_id.get(other), message)

    def _send_to(self, node: Node, to: str, other: Node | None, message: Message) -> None:
        if other is None:
            self.post(0.0, node, Undelivered(to, message))
            return
        links = self.links
        delay, fate = links.delay(node.index, other.index), links.fate()
        if not links.reaches(node.index, other.index):
            if links.is_told():
                told = node, node.incarnation, other, other.incarnation, Undelivered(to, message)
                self.later(DIAL_TIMEOUT_S, self._unreached, *told)
        elif not fate:
            for after in links.delays(delay):
                self.later(after, self._deliver, node, node.incarnation, other, message)
        elif fate == "reported":
            self.post(REPORT_S, node, Undelivered(to, message))

    def _unreached(
        self, node: Node, incarnation: int, other: Node, lived: int, event: Undelivered
    ) -> None:
        """A dial into a partition ends, perhaps long after the partition."""
        if other.incarnation == lived:
            self.checks.partings.unreached(node.index, other.index)
        self._tell_same(node, incarnation, event)

    def _deliver(self, node: Node, incarnation: int, other: Node, message: Message) -> None:
        if other.peer is not None:
            self.tell(other, Received(node.peer_id, message))
        elif node.incarnation == incarnation:
            delay = (
                DIAL_TIMEOUT_S if other.vanished else self.links.latency(node.index, other.index)
            )
            self.post(delay, node, Undelivered(other.peer_id, message))

    def _stored(self, node: Node, incarnation: int, effect: Announce) -> None:
        """The record is stored even if its daemon died meanwhile: the directory is not told of
        that."""
        works = self.directory.works() and not self.links.lonely(node.index)
        if works:
            self.directory.store(effect.key, effect.record, ttl_s=effect.ttl_s, now=self.now)
        self._tell_same(node, incarnation, Announced(effect.key, works))

    def _found(self, node: Node, incarnation: int, effect: LookUp) -> None:
        if not self.directory.works() or self.links.lonely(node.index):
            self._tell_same(node, incarnation, Found(effect.key, (), ok=False))
            return

        def unseen(peer_id: str, stored_at: float) -> bool:
            between = self.links.apart(node.index, self._by_id[peer_id].index)
            return between is not None and stored_at >= between.at

        records = self.directory.find(
            effect.key, asker=node.peer_id, now=self.now,
            unseen=unseen if self.links.parted else None,
        )  # fmt: skip
        self._tell_same(node, incarnation, Found(effect.key, records or (), ok=records is not None))

    # -- time --------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self.meters.sample(self.life.living)
        self.later(self.meters.length, self._sample)

    def _settle(self) -> None:
        self.links.calm()
        self.bulk.cut = 0.0
        self.directory.calm()
        self.trouble.calm()
        # What was sent or stored before may still be on its way.
        quiet = self.now + max(self.options.held_s, STALE_TAIL * self.options.stale_s)
        self.checks.partings.calm()
        self.checks.meetings.quiet_since = min(self.checks.meetings.quiet_since, quiet)
        self.life.settle()

    def _tell_same(self, node: Node, incarnation: int, event: Event) -> None:
        if node.incarnation == incarnation:
            self.tell(node, event)

    def _arm(self, node: Node, peer: Participant) -> None:
        deadline = peer.deadline()
        if deadline is None:
            return
        at = max(node.world_time(deadline), self.now)
        if node.timer is None or at < node.timer:
            node.timer = at
            self.later(at - self.now, self._tick, node, node.incarnation, at)

    def _tick(self, node: Node, incarnation: int, at: float) -> None:
        peer = node.peer
        if peer is None or node.incarnation != incarnation or node.timer != at:
            return  # that daemon is dead, or an earlier timer took this one's place
        node.timer = None
        if node.thaws_at is not None:
            return  # it is armed again when it wakes up
        deadline = peer.deadline()
        if deadline is None:
            return
        if node.world_time(deadline) > self.now + 1e-9:
            self._arm(node, peer)  # it was moved to later since
            return
        node.ticks_there = node.ticks_there + 1 if node.ticked_at == self.now else 0
        node.ticked_at = self.now
        if node.ticks_there > SPIN:
            self.checks.fail(
                f"asks again and again for deadline {deadline}, which has passed", node
            )
        self.tell(node, Ticked(), at_least=deadline)

    def _remember(self, node: Node, event: Event, effects: list[Effect]) -> None:
        """Fold into the digest what happened: enough of each event and effect that no two different
        runs agree."""
        said = _CODE[type(event)]
        if isinstance(event, Received):
            said += f"\n{event.sender} {_MESSAGE[type(event.message)]}"
        for effect in effects:
            if isinstance(effect, Send):
                said += f"\n{effect.to} {_MESSAGE[type(effect.message)]}"
            elif isinstance(effect, Note):
                said += f"\n{effect.what} {effect.peer} {effect.reason} {effect.detail}"
            elif isinstance(effect, Finish):
                trainer = node.trainer(effect.trainer)
                bits = digest_of(trainer.bucket).hex() if trainer else ""
                said += f"\n{effect.token} {effect.outcome} {bits}"
            else:
                said += f"\n{_CODE[type(effect)]}"
        self._digest.update(_STAMP.pack(self.now, node.index) + said.encode())


def _production(params: Params, peer_id: str, rng: Random, life: int) -> Participant:
    return Peer(params, peer_id, rng, run="sim", sequence=life << 32)
