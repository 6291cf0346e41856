"""Births, deaths and daily work: when daemons start, die and return, and what trainers do between
calls. One rule: it tells Peers what happened to them and their trainers, as facts; it never looks
into one."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from moshpitd.core.effects import Finish
from moshpitd.core.events import (
    Addressed,
    Attached,
    Cancelled,
    Contributed,
    ContributionRefused,
    Drained,
    Event,
    TrainerGone,
)
from moshpitd.core.outcome import Reason, Status
from moshpitd.sim.bulk import Bulk
from moshpitd.sim.checks import SLACK_S, Checks
from moshpitd.sim.faults import Options, stream
from moshpitd.sim.meters import Meters
from moshpitd.sim.nodes import MakePeer, Node, Plane, Trainer, Vector, digest_of
from moshpitd.sim.plan import Fault, plan, population
from moshpitd.sim.trouble import Trouble

SCHEMA = b"sim schema 00000"
STORY = 256
"""Events and effects kept per node for the transcript of a failure..."""

MANY = 1_000
BRIEF = 32
"""...and, in a world of so many nodes, where each thousand of stories is a third of a gigabyte."""


class Outside(Protocol):
    """What life needs of the world."""

    now: float
    nodes: list[Node]
    checks: Checks
    bulk: Bulk
    trouble: Trouble
    meters: Meters

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None: ...

    def post(self, delay: float, node: Node, event: Event) -> None: ...

    def tell(self, node: Node, event: Event) -> None: ...


class Life:
    """Invariant: a trainer has at most one open call, and no call outlives the daemon that it was
    made to."""

    def __init__(self, world: Outside, options: Options, make: MakePeer) -> None:
        self._world, self._options, self._make = world, options, make
        self._refused = stream(options.seed, "refused")
        self._impatient = stream(options.seed, "impatient")
        self._hiccups = stream(options.seed, "hiccups")
        # (node, trainer) of those that have not reached the goal of phase two.
        self._due: dict[tuple[int, int], None] = {}
        self.calm = False
        self.living = 0  # daemons
        self.outcomes: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()

    def populate(self) -> None:
        """Put all births, and all deaths that are known beforehand, on the agenda."""
        options, joins = self._options, stream(self._options.seed, "joins")
        everybody = population(options)
        for at, index in everybody.births:
            self._world.later(at, self._return, self._world.nodes[index])
        for node in self._world.nodes[: options.peers]:
            at = joins.uniform(0.0, options.join_spread_s)
            if node.index >= options.peers - options.newcomers:
                at = options.faults_s * joins.uniform(0.2, 0.8)
            self._world.later(at, self._return, node)
        for fault in plan(options):
            self._world.later(fault.at, self._suffer, fault)

    def settle(self) -> None:
        """Phase two begins: the dead come back, and everybody starts to count."""
        self.calm = True
        for node in self._world.nodes:
            if node.gone:
                continue
            self._return(node)
            for trainer in node.trainers:
                self._return_trainer(node, trainer)
                trainer.complete = 0
                if not node.lied:  # others may shun it for as long as they remember
                    self._due[(node.index, trainer.number)] = None

    def satisfied(self) -> bool:
        return self.calm and (not self._due or not self._options.goal)

    def late(self) -> list[Node]:
        """Nodes whose trainers have not reached the goal."""
        return [
            self._world.nodes[index] for index in dict.fromkeys(index for index, _ in self._due)
        ]

    # -- daemons -----------------------------------------------------------------------------------

    def start(self, node: Node) -> None:
        """A new daemon under the node's old PeerID; its trainers attach."""
        node.incarnation += 1
        self.living += 1
        node.vanished = False
        node.timer = None
        rng = stream(self._options.seed, "peer", node.index, node.incarnation)
        node.peer = self._make(self._options.params, node.peer_id, rng, node.incarnation)
        address, plane = (f"/sim/{node.index}",), node.plane
        here = Addressed(address if node.dialable else (), address, plane.up_mbps, plane.down_mbps)
        self._world.post(0.0, node, here)
        for trainer in node.trainers:
            if trainer.alive:
                self.attach(node, trainer)

    def kill(self, node: Node, *, silent: bool = False, forgets: bool = False) -> None:
        """The daemon dies at once. Its trainers live on with their values, unless the machine
        forgets."""
        if node.peer is None:
            return
        node.story.append((self._world.now, "-- killed --"))
        node.thaws_at, node.backlog = None, []
        node.peer, node.vanished, node.died_at = None, silent, self._world.now
        self.living -= 1
        node.incarnation += 1  # nothing that is on its way may find the next daemon
        for trainer in node.trainers:
            self._disconnect(node, trainer)
            if forgets:
                _forget(self._options, node, trainer)
        self._world.checks.died(node)
        self._world.bulk.died(node, self._world.nodes)

    def _suffer(self, fault: Fault) -> None:
        node = self._world.nodes[fault.node]
        if node.peer is None or node.gone:
            return
        trainer = node.trainers[0]
        if fault.what == "kill":
            self.kill(node, silent=fault.silent, forgets=fault.forgets)
            node.gone = fault.back_after_s is None
            if fault.back_after_s is not None:
                self._world.later(fault.back_after_s, self._return, node)
        elif fault.what == "freeze":
            self._world.trouble.freeze(node, fault.back_after_s or 0.0)
        elif fault.what == "cut off":
            self._world.trouble.cut_off(node, fault.back_after_s or 0.0)
        elif fault.what == "trainer":
            self.lose_trainer(node, trainer, forgets=fault.forgets)
            self._world.later(fault.back_after_s or 0.0, self._return_trainer, node, trainer)
        else:
            node.gone = True
            self._world.tell(node, Drained())
            self._world.later(self._options.drain_s, self.kill, node)

    def _return(self, node: Node) -> None:
        if node.peer is None and not node.gone:
            self.start(node)

    # -- trainers ----------------------------------------------------------------------------------

    def attach(self, node: Node, trainer: Trainer) -> None:
        """The trainer (re-)attaches with what it knows of its past, and goes on computing."""
        first = not any(other.attached for other in node.trainers)
        trainer.alive = trainer.attached = True
        trainer.attachments += 1
        trainer.before = (trainer.name, trainer.bucket)
        trainer.name = f"t{trainer.number}.{trainer.attachments}"
        trainer.bucket, trainer.lone = trainer.values.copy(), 0
        if first and (node.plane.copy is None or node.plane.copy_version <= trainer.version):
            # What the first trainer brings is the node's state, and what a newcomer would get.
            node.plane.copy, node.plane.copy_version = trainer.values.copy(), trainer.version
        event = Attached(
            trainer=trainer.name,
            schema=SCHEMA,
            schema_text=f"{self._options.parts * self._options.elements} x float64",
            part_sizes=(self._options.part_bytes,) * self._options.parts,
            digest=digest_of(trainer.values),
            version=trainer.version,
            founder=trainer.lineage.founder,
            founder_digest=trainer.lineage.digest,
        )
        self._world.post(0.0, node, event)
        self._compute(node, trainer)

    def lose_trainer(self, node: Node, trainer: Trainer, *, forgets: bool = False) -> None:
        """A trainer dies; its daemon notices the broken stream."""
        if not trainer.alive:
            return
        self._disconnect(node, trainer)
        trainer.alive = False
        if forgets:
            _forget(self._options, node, trainer)
        self._world.tell(node, TrainerGone(trainer.name))

    def _return_trainer(self, node: Node, trainer: Trainer) -> None:
        if not trainer.alive:
            trainer.alive = True
            if node.peer is not None and not node.gone:
                self.attach(node, trainer)

    def _disconnect(self, node: Node, trainer: Trainer) -> None:
        trainer.attached = False
        self._world.checks.abandoned(node, trainer.token)
        trainer.token = ""

    def _compute(self, node: Node, trainer: Trainer) -> None:
        jitter = self._options.compute_jitter
        seconds = trainer.compute_s * (trainer.rng.lognormvariate(0.0, jitter) if jitter else 1.0)
        if self._options.hiccups and self._hiccups.random() < self._options.hiccups:
            seconds *= self._options.straggle
        beat = self._options.beat_s
        if beat:
            seconds = beat * math.floor(self._world.now / beat + 1.0) - self._world.now
        self._world.later(seconds, self._contribute, node, trainer, trainer.name)

    def _contribute(self, node: Node, trainer: Trainer, name: str) -> None:
        if trainer.name != name or not trainer.attached:
            return  # that step was computed for an attachment that is over
        open_ = node.plane.rounds.values()
        if any(name in r.trainers and name not in r.returned for r in open_):
            self._compute(node, trainer)  # it gave up a call whose round still owns the bucket
            return
        trainer.calls += 1
        trainer.values += trainer.step
        trainer.bucket[:] = trainer.values
        weight = trainer.rng.randint(1, self._options.max_weight)
        if (
            not self.calm
            and self._options.refused
            and self._refused.random() < self._options.refused
        ):
            self._compute(node, trainer)
            self._world.tell(node, ContributionRefused(trainer.name))
            return
        timeout_s = self._options.call_timeout_s
        trainer.token = token = f"{node.peer_id}.{trainer.name}.{trainer.calls}"
        due = self._world.checks.called(node, token, timeout_s)
        self._world.later(due + SLACK_S - self._world.now, self._world.checks.after_event)
        if (
            not self.calm
            and self._options.impatient
            and self._impatient.random() < self._options.impatient
        ):
            patience = self._impatient.uniform(0.0, 10.0)
            self._world.later(patience, self._give_up, node, trainer, token)
        self._world.meters.contributed(node, trainer)
        rounds = self._options.rounds
        self._world.tell(
            node, Contributed(trainer.name, token, weight, rounds=rounds, timeout_s=timeout_s)
        )

    def _give_up(self, node: Node, trainer: Trainer, token: str) -> None:
        if trainer.token == token:
            self._disconnect(node, trainer)
            trainer.attached = True
            self._compute(node, trainer)
            self._world.tell(node, Cancelled(token))

    def finished(self, node: Node, effect: Finish) -> None:
        """The end of a call: copy back what was accepted, and compute the next step."""
        outcome, trainer = effect.outcome, node.trainer(effect.trainer)
        failed = outcome.status is Status.FAILED
        self.outcomes[f"failed:{outcome.reason}" if failed else str(outcome.status)] += 1
        if trainer is None or trainer.token != effect.token:
            return
        trainer.token = ""
        trainer.outcomes.append(outcome)
        self._world.meters.finished(trainer, effect.token, outcome.group_id)
        if outcome.accepted:
            trainer.values[:] = trainer.bucket
            trainer.version = outcome.version
            trainer.lineage = node.peer.lineage if node.peer is not None else trainer.lineage
        if outcome.group_size > 1:
            self.sizes[outcome.group_size] += 1
        trainer.lone = 0 if outcome.group_size > 1 else trainer.lone + 1
        if trainer.lone and trainer.lone == self._options.lone_calls and not self._only(node):
            calls = ", ".join(str(it.status) for it in trainer.outcomes[-trainer.lone :])
            self._world.checks.fail(f"is stuck: no group in {trainer.lone} calls ({calls})", node)
        # Whoever is the last one left can only be alone, and who computes for longer than a window
        # while a grid moves on may find its line empty each time: it is enough that its calls end.
        # So may who cannot be dialled find nobody there who can: then that line had no reducer, and
        # it is enough that the sweep keeps what the others gave.
        reduced = outcome.reason is not Reason.NO_REDUCER
        excused = trainer.straggles or self._only(node) or not (reduced or node.dialable)
        if outcome.status is Status.COMPLETE or (self.calm and excused and not failed):
            trainer.complete += 1
            if trainer.complete >= self._options.goal:
                self._due.pop((node.index, trainer.number), None)
        self._compute(node, trainer)

    def _only(self, node: Node) -> bool:
        return all(other is node or other.gone for other in self._world.nodes)


def make_nodes(options: Options) -> list[Node]:
    many = population(options).nodes
    return [_node(options, index, BRIEF if many > MANY else STORY) for index in range(many)]


def _node(options: Options, index: int, story: int) -> Node:
    """The machine: what it is like depends on the seed and its index alone."""
    seed = options.seed
    # Hashed, so that the order of PeerIDs (which decides who leads) is not the order of birth.
    peer_id = f"{blake2b(f'{seed}/id/{index}'.encode(), digest_size=2).hexdigest()}.{index}"
    rate = options.rate_mbps * stream(seed, "rate", index).lognormvariate(0.0, options.rate_sigma)
    up = options.up_ratio * stream(seed, "up", index).lognormvariate(0.0, options.up_sigma)
    drift = stream(seed, "clock rate", index).uniform(-options.clock_rate, options.clock_rate)
    return Node(
        index=index,
        peer_id=peer_id,
        clock_offset=stream(seed, "clock", index).uniform(0.0, options.clock_spread_s),
        dialable=stream(seed, "undialable", index).random() >= options.undialable,
        trainers=[_trainer(options, index, number) for number in range(options.trainers)],
        plane=Plane(up_mbps=rate * up, down_mbps=rate),
        clock_rate=1.0 + drift,
        story=deque(maxlen=story),
    )


def _trainer(options: Options, index: int, number: int) -> Trainer:
    speed = stream(options.seed, "compute", index, number)
    compute_s = options.compute_s * speed.lognormvariate(0.0, options.compute_sigma)
    straggles = stream(options.seed, "straggler", index).random() < options.stragglers
    if straggles:
        compute_s *= options.straggle
    return Trainer(
        number=number,
        values=_initial(options, index, number, "init"),
        step=options.step_size * _initial(options, index, number, "step"),
        compute_s=compute_s,
        rng=speed,
        straggles=straggles,
    )


def _initial(options: Options, index: int, number: int, what: str) -> Vector:
    """Standard normal values. With `same_start` all trainers get the same initial ones, never the
    same steps."""
    names = (what,) if what == "init" and options.same_start else (what, index, number)
    rng = stream(options.seed, *names)
    return np.array([rng.gauss(0.0, 1.0) for _ in range(options.parts * options.elements)])


def _forget(options: Options, node: Node, trainer: Trainer) -> None:
    """The process is gone: fresh parameters, no past."""
    trainer.values[:] = _initial(options, node.index, trainer.number, "init")
    trainer.version, trainer.lineage = 0, type(trainer.lineage)()
