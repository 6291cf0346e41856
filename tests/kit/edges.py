"""Exchanges with neighbours without a network: the state machines of one group, wired by a random
scheduler that delays, loses and kills. One rule: everything comes from one seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from moshpitd.core.effects import OpenEdges, Send
from moshpitd.core.events import EdgeArrived, EdgesCoded, LinkLost, Mix
from moshpitd.core.graph import PeerGraph
from moshpitd.core.messages import Group, Lineage, Member, Message, Shape
from moshpitd.core.neighbours import Neighbours, Verdicts
from moshpitd.core.outcome import Reason, Row
from moshpitd.core.params import Params
from moshpitd.core.quiet import Quiet

PARTS = (1024, 1024, 512)
TIMEOUT_S = 60.0


def group_of(peers: int, t: int) -> Group:
    members = tuple(
        Member(f"peer{index:02}", 1, 1.0, 0, False, 100.0, 100.0, (f"10.0.0.{index}:1",))
        for index in range(peers)
    )
    return Group(
        bytes([t + 1]) * 16, "peers", members[0].peer_id, 1, t, Shape(), b"s", Lineage(),
        "float32", members,
    )  # fmt: skip


@dataclass
class World:
    """`loss`: chance of a control message to vanish. Steps are taken in random order."""

    peers: int
    topology: str
    t: int
    seed: int
    loss: float = 0.0
    full: bool = False
    own: PeerGraph | None = None
    params: Params = field(default_factory=Params)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = 0.0
        self.group = group_of(self.peers, self.t)
        self.names = [member.peer_id for member in self.group.members]
        self.verdicts = {name: Verdicts() for name in self.names}
        self.dead: set[str] = set()
        self.doubted: set[tuple[str, str]] = set()
        self.machines: dict[str, Neighbours] = {}
        self.todo: list[tuple[str, ...] | tuple[object, ...]] = []
        # Frames of one pair keep their order, as those of one flow do.
        self.frames: dict[tuple[str, str], deque[EdgeArrived]] = {}
        self.ended_at: dict[str, float] = {}
        for index, name in enumerate(self.names):
            self.machines[name] = Neighbours(
                params=self.params,
                group=self.group,
                me=name,
                part_sizes=PARTS,
                trainer="t",
                mix=Mix(self.topology, 10 * index, 1.0 + index, self.full),
                started=0.0,
                deadline_at=TIMEOUT_S,
                quiet=Quiet(self.params),
                own=self.own,
            )
        for name in self.names:
            self.machines[name].start(0.0)
            self.collect(name)

    def rows(self) -> dict[str, Row]:
        """Of the living that ended with one."""
        found = {}
        for name in self.names:
            outcome = self.machines[name].finished
            if name not in self.dead and outcome is not None and outcome.row is not None:
                found[name] = outcome.row
        return found

    # -- what happens

    def cut(self, one: str, other: str) -> None:
        """Their link breaks, and with it what is on its way; control messages still pass."""
        for pair in ((one, other), (other, one)):
            self.frames.pop(pair, None)
            self.todo.append(("link", *pair))

    def kill(self, name: str) -> None:
        """Its links break; what it had put on them may still arrive."""
        self.dead.add(name)
        for other in self.names:
            if other not in self.dead:
                self.todo.append(("link", other, name))

    def run(self, *, kills: int = 0, cuts: int = 0) -> None:
        """Until everybody living has ended. `kills` and `cuts` at random moments."""
        at, cut_at = (
            sorted(self.rng.randrange(1, 12 * self.peers) for _ in range(count))
            for count in (kills, cuts)
        )
        steps = 0
        while any(m.finished is None for n, m in self.machines.items() if n not in self.dead):
            steps += 1
            assert steps < 20_000, f"seed {self.seed}: no end"
            while at and steps >= at[0]:
                at.pop(0)
                self.kill(self.rng.choice([name for name in self.names if name not in self.dead]))
            while cut_at and steps >= cut_at[0]:
                cut_at.pop(0)
                self.cut(*self.rng.sample(self.names, 2))
            pairs = [pair for pair, frames in self.frames.items() if frames]
            choice = self.rng.randrange(len(self.todo) + len(pairs) + 1)
            if choice < len(self.todo):
                self.step(self.todo.pop(choice))
            elif choice < len(self.todo) + len(pairs):
                self.frame(*pairs[choice - len(self.todo)])
            elif not self.todo and not pairs:
                self.wait()

    def step(self, step: tuple[object, ...]) -> None:
        kind, to, what = step[0], str(step[1]), step[2]
        if to in self.dead:
            return
        machine = self.machines[to]
        if kind == "coded":
            machine.handle(EdgesCoded(self.group.group_id), self.now)
        elif kind == "link":
            machine.handle(LinkLost(str(what)), self.now)
        elif kind == "undelivered":
            machine.lost(str(what), Reason.UNREACHABLE, self.now)
        else:
            sender, message = str(what), step[3]
            answer = self.verdicts[to].answer(sender, message)  # type: ignore[arg-type]
            if answer is not None:
                for effect in answer:
                    assert isinstance(effect, Send)
                    self.post(to, effect.to, effect.message)
            else:
                machine.receive(sender, message, self.now)  # type: ignore[arg-type]
        self.collect(to)

    def frame(self, source: str, target: str) -> None:
        event = self.frames[source, target].popleft()
        if target not in self.dead:
            self.machines[target].handle(event, self.now)
            self.collect(target)

    def wait(self) -> None:
        living = [name for name in self.names if name not in self.dead]
        open_ = [name for name in living if self.machines[name].finished is None]
        self.now = max(self.now, min(self.machines[name].deadline() for name in open_))
        for name in open_:
            self.machines[name].tick(self.now)
            self.collect(name)

    def collect(self, name: str) -> None:
        machine = self.machines[name]
        effects, machine.effects = machine.effects, []
        for effect in effects:
            if isinstance(effect, Send):
                self.post(name, effect.to, effect.message)
            elif isinstance(effect, OpenEdges):
                self.todo.append(("coded", name, ""))
                for target in effect.targets:
                    frames = self.frames.setdefault((name, self.names[target]), deque())
                    for full in (False, True) if target in effect.in_full else (False,):
                        frames += [
                            EdgeArrived(self.group.group_id, effect.index, left, full)
                            for left in reversed(range(len(PARTS)))
                        ]
        if machine.finished is not None and name not in self.ended_at:
            self.ended_at[name] = self.now
            self.verdicts[name].remember(machine)

    def post(self, sender: str, to: str, message: Message) -> None:
        if to in self.dead:
            self.todo.append(("undelivered", sender, to))
        elif self.rng.random() >= self.loss:
            self.todo.append(("message", to, sender, message))
            if self.loss and (sender, to) not in self.doubted and self.rng.random() < 0.1:
                self.doubted.add((sender, to))  # it was late, and passes for lost
                self.todo.append(("undelivered", sender, to))
