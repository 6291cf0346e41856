"""Real Peers wired together by hand: messages in one queue, a dictionary for a directory, lists of floats for tensors.

Time stands still unless a test moves it (`run` jumps to the next deadline only when nothing else is left to do), so
transcripts are short and exact. `drop` decides which messages are lost.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.messages import Record
from moshpitd.core.outcome import OnPartial, Outcome, Reason
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer

SCHEMA = b"schema-of-the-tests"


@dataclass
class Exchange:
    """One group's data at one peer."""

    open: ef.Open
    sums: dict[int, float] = field(default_factory=dict)
    inside: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)


@dataclass
class Node:
    peer: Peer
    values: dict[str, list[float]]  # trainer -> one float per part
    exchanges: dict[bytes, Exchange] = field(default_factory=dict)
    snapshot: tuple[int, list[float]] | None = None
    staged: dict[bytes, list[float]] = field(default_factory=dict)
    alive: bool = True


class Hands:
    """All peers, the queue between them, and everything that was said."""

    def __init__(
        self, count: int, *, params: Params | None = None, parts: int = 4, seed: int = 0
    ) -> None:
        self.now = 0.0
        self.queue: deque[tuple[str, ev.Event]] = deque()
        self.directory: dict[str, dict[str, Record]] = {}
        self.transcript: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.notes: list[tuple[str, ef.Note]] = []
        self.drop: Callable[[str, str, object], bool] = lambda sender, to, what: False
        self.params = params or Params()
        self.parts, self.seed = parts, seed
        self.nodes: dict[str, Node] = {}
        self.tokens = 0
        for index in range(count):
            self.add(f"p{index:02d}")

    def add(self, name: str, *, schema: bytes = SCHEMA, dialable: bool = True) -> Node:
        peer = Peer(
            self.params,
            name,
            random.Random(f"{self.seed}/{name}"),
            run="r",
            sequence=int(self.now * 1000),
        )
        node = self.nodes[name] = Node(peer, {})
        self.tell(name, ev.Addressed((f"{name}:1",) if dialable else (), (), 1000.0, 1000.0))
        return node

    def attach(
        self,
        name: str,
        values: list[float],
        *,
        trainer: str = "t",
        version: int = 0,
        schema: bytes = SCHEMA,
        founder: str = "",
        digest: bytes = b"",
    ) -> None:
        node = self.nodes[name]
        node.values[trainer] = list(values)
        own = digest_of(values)
        if node.snapshot is None:
            node.snapshot = (version, list(values))
        self.tell(
            name,
            ev.Attached(
                trainer, schema, f"{schema!r}", (8,) * self.parts, own, version, founder, digest
            ),
        )

    def attach_all(self, values: dict[str, list[float]] | None = None) -> None:
        """Everybody starts from the same bits unless told otherwise, so all are of one lineage."""
        for name in self.nodes:
            self.attach(name, (values or {}).get(name, [0.0] * self.parts))
        self.run(until_s=1.0)

    def contribute(
        self,
        name: str,
        values: list[float] | None = None,
        *,
        weight: int = 1,
        trainer: str = "t",
        rounds: int = 1,
        min_participants: int = 1,
        on_partial: OnPartial = OnPartial.ACCEPT,
        timeout_s: float = 60.0,
    ) -> str:
        if values is not None:
            self.nodes[name].values[trainer] = list(values)
        self.tokens += 1
        token = f"{name}/{self.tokens}"
        self.tell(
            name,
            ev.Contributed(trainer, token, weight, rounds, min_participants, on_partial, timeout_s),
        )
        return token

    def sync(self, name: str, trainer: str = "t") -> str:
        self.tokens += 1
        token = f"{name}/{self.tokens}"
        self.tell(name, ev.Synced(trainer, token, 30.0))
        return token

    def kill(self, name: str) -> None:
        """No more events for it; the others' links to it break."""
        self.nodes[name].alive = False
        for other in self.nodes:
            if other != name:
                self.tell(other, ev.LinkLost(name))

    def tell(self, name: str, event: ev.Event) -> None:
        self.queue.append((name, event))

    def run(self, *, until_s: float = 120.0, turns: int = 200_000) -> None:
        """Until nothing is left to do before `until_s` (on this clock)."""
        for _ in range(turns):
            if self.queue:
                name, event = self.queue.popleft()
                if self.nodes[name].alive:
                    self._give(name, event)
                continue
            deadlines = [
                (d, n)
                for n, node in self.nodes.items()
                if node.alive and (d := node.peer.deadline()) is not None
            ]
            if not deadlines or min(deadlines)[0] > until_s:
                self.now = max(self.now, until_s)
                return
            self.now = max(self.now, min(deadlines)[0])
            self._give(min(deadlines)[1], ev.Ticked())
        raise AssertionError("no end in sight: " + "\n".join(self.transcript[-40:]))

    def finish(self, *, within_s: float = 60.0) -> None:
        """Until every call that was made has its outcome."""
        end = self.now + within_s
        for _ in range(500_000):
            if self.queue:
                name, event = self.queue.popleft()
                if self.nodes[name].alive:
                    self._give(name, event)
                continue
            if all(
                n.peer.work is None and not n.peer.queue for n in self.nodes.values() if n.alive
            ):
                return
            deadline, name = min(
                (d, n)
                for n, node in self.nodes.items()
                if node.alive and (d := node.peer.deadline()) is not None
            )
            assert deadline <= end, f"not finished by {end}: " + "\n".join(self.transcript[-40:])
            self.now = max(self.now, deadline)
            self._give(name, ev.Ticked())
        raise AssertionError("no end in sight")

    def named(self, what: str) -> list[tuple[str, ef.Note]]:
        return [(name, note) for name, note in self.notes if note.what == what]

    # -- effects ------------------------------------------------------------------------------------------------------

    def _give(self, name: str, event: ev.Event | _Contribution) -> None:
        if isinstance(event, _Contribution):
            _land(self, name, event)
            return
        node = self.nodes[name]
        node.peer.handle(event, self.now)
        for effect in node.peer.take_effects():
            self._carry_out(name, node, effect)

    def _carry_out(self, name: str, node: Node, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self.transcript.append(f"{self.now:8.3f} {name} -> {effect.to} {effect.message}")
                if self.drop(name, effect.to, effect.message):
                    return
                if effect.to not in self.nodes or not self.nodes[effect.to].alive:
                    self.tell(name, ev.Undelivered(effect.to, effect.message))
                else:
                    self.tell(effect.to, ev.Received(name, effect.message))
            case ef.Announce():
                self.directory.setdefault(effect.key, {})[name] = effect.record
                self.tell(name, ev.Announced(effect.key, True))
            case ef.LookUp():
                records = tuple(
                    r for n, r in self.directory.get(effect.key, {}).items() if n != name
                )
                self.tell(name, ev.Found(effect.key, records))
            case ef.Open():
                node.exchanges[effect.group.group_id] = Exchange(effect)
            case ef.Push():
                self._push(name, node, effect)
            case ef.Average():
                self._average(name, node, effect)
            case ef.Close():
                node.exchanges.pop(effect.group_id, None)
            case ef.Finish():
                self.outcomes[effect.token] = effect.outcome
                self.transcript.append(
                    f"{self.now:8.3f} {name} finished {effect.token} {effect.outcome}"
                )
            case ef.Note():
                self.notes.append((name, effect))
            case ef.PushSnapshot():
                if (
                    node.snapshot is not None
                    and effect.to in self.nodes
                    and self.nodes[effect.to].alive
                ):
                    self.nodes[effect.to].staged[effect.nonce] = list(node.snapshot[1])
                    self.tell(
                        effect.to, ev.SnapshotArrived(effect.nonce, digest_of(node.snapshot[1]))
                    )
                    self.tell(name, ev.SnapshotSent(effect.nonce))
            case ef.LoadSnapshot():
                values = node.staged[effect.nonce] if effect.nonce else node.snapshot[1]  # type: ignore[index]
                node.snapshot = (effect.version, list(values))
                for trainer in effect.trainers:
                    node.values[trainer] = list(values)
            case ef.RefreshSnapshot():
                node.snapshot = (effect.version, list(node.values[effect.trainer]))
                self.tell(name, ev.SnapshotRefreshed(effect.version))
            case ef.Digest():
                held = node.snapshot is not None and node.snapshot[0] == effect.version
                self.tell(
                    name, ev.Digested(effect.version, digest_of(node.snapshot[1]) if held else b"")
                )  # type: ignore[index]
            case _:
                pass

    def _own(self, node: Node, exchange: Exchange, part: int) -> float:
        trainers = exchange.open.trainers
        total = sum(weight for _, weight in trainers)
        if not total:
            return node.values[trainers[0][0]][part]
        return sum(node.values[trainer][part] * weight for trainer, weight in trainers) / total

    def _push(self, name: str, node: Node, effect: ef.Push) -> None:
        exchange = node.exchanges.get(effect.group_id)
        if exchange is None:
            return
        to = exchange.open.group.members[effect.to].peer_id
        for part in effect.parts:
            if self.drop(name, to, (effect, part)) or not self.nodes[to].alive:
                continue
            other = self.nodes[to].exchanges.get(effect.group_id)
            if effect.result:
                value, inside = exchange.results[part]
                if other is None:
                    continue
                for trainer, _ in other.open.trainers:
                    self.nodes[to].values[trainer][part] = value
                self.tell(
                    to,
                    ev.ResultArrived(
                        effect.group_id, part, exchange.open.index, inside, hash_of(value)
                    ),
                )
                continue
            value = self._own(node, exchange, part)
            self.queue.append(
                (
                    to,
                    _Contribution(
                        effect.group_id, part, exchange.open.index, value, exchange.open.weight
                    ),
                )
            )  # type: ignore[arg-type]

    def _average(self, name: str, node: Node, effect: ef.Average) -> None:
        exchange = node.exchanges[effect.group_id]
        part, index = effect.part, exchange.open.index
        exchange.closed.add(part)
        inside = list(exchange.inside.get(part, []))
        total = sum(exchange.open.group.members[i].weight for i in inside)
        value = exchange.sums.get(part, 0.0)
        if exchange.open.weight > 0:
            value += exchange.open.weight * self._own(node, exchange, part)
            total += exchange.open.weight
            inside.append(index)
        if not inside:
            self.tell(
                name, ev.PartFailed(effect.group_id, part, Reason.NO_CONTRIBUTORS, result=True)
            )
            return
        mean = value / total
        exchange.results[part] = (mean, tuple(sorted(inside)))
        for trainer, _ in exchange.open.trainers:
            node.values[trainer][part] = mean
        self.tell(name, ev.Averaged(effect.group_id, part, tuple(sorted(inside)), hash_of(mean)))


@dataclass(frozen=True)
class _Contribution:
    group_id: bytes
    part: int
    sender: int
    value: float
    weight: float


def _land(hands: Hands, name: str, item: _Contribution) -> None:
    """A contribution reaches its reducer's accumulator."""
    exchange = hands.nodes[name].exchanges.get(item.group_id)
    if exchange is None:
        hands.queue.append((name, item))  # type: ignore[arg-type]  # before Begin: held
        return
    if item.part in exchange.closed:
        return
    exchange.sums[item.part] = exchange.sums.get(item.part, 0.0) + item.weight * item.value
    exchange.inside.setdefault(item.part, []).append(item.sender)
    hands.tell(name, ev.PartArrived(item.group_id, item.part, item.sender))


def digest_of(values: list[float]) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


def hash_of(value: float) -> int:
    return zlib.crc32(repr(value).encode())
