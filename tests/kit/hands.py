"""Real Peers wired together by hand: messages in lanes, a dictionary for a directory, lists of
floats for tensors.

Time stands still unless a test moves it: `run` and `finish` jump to the next deadline only when
nothing else is left to do, so transcripts are short and exact. Messages keep their order on one
lane (origin, receiver, plane); with `shuffle` lanes overtake each other as on a network. `drop`
decides which messages are lost, `hold` which wait until `release`.

One rule: only the public doors of a Peer are used here (handle, take_effects, deadline), so that
the core may be cut into other pieces without touching a test.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from moshpitd.core import effects as ef
from moshpitd.core import events as ev
from moshpitd.core.group import group_id_of
from moshpitd.core.messages import Begin, Held, Member, Message, Record
from moshpitd.core.outcome import OnPartial, Outcome, Reason
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.succession import Succession

SCHEMA = b"schema-of-the-tests"
STUCK_TICKS = 50  # so many wake-ups at one instant with nothing said: a driver would spin


@dataclass
class Exchange:
    """One group's data at one peer."""

    open: ef.Open
    own: list[float]
    bars: dict[int, int] = field(default_factory=dict)  # part -> nothing below this epoch
    sums: dict[tuple[int, int], float] = field(default_factory=dict)  # (part, epoch)
    inside: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    results: dict[int, tuple[float, tuple[int, ...], int]] = field(default_factory=dict)
    closed: set[tuple[int, int]] = field(default_factory=set)
    awaited: set[tuple[int, int, int]] = field(default_factory=set)  # (sender, part, epoch)
    lingers: bool = False  # the buckets went back
    audits: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Node:
    """Invariant: a group is in `exchanges`, or in `over`, or was never opened here."""

    peer: Peer
    values: dict[str, list[float]]  # trainer -> one float per part
    exchanges: dict[bytes, Exchange] = field(default_factory=dict)
    over: set[bytes] = field(default_factory=set)
    early: dict[bytes, list[Contribution | Audited | Result]] = field(default_factory=dict)
    opened: list[ef.Open] = field(default_factory=list)
    attempts: int = 0
    snapshot: tuple[int, list[float]] | None = None
    staged: dict[bytes, list[float]] = field(default_factory=dict)
    alive: bool = True


@dataclass(frozen=True)
class Contribution:
    """A part on its way to its reducer."""

    group_id: bytes
    part: int
    sender: int
    value: float
    weight: float
    epoch: int = 0


@dataclass(frozen=True)
class Audited:
    """A contribution on its way to whoever checks its reducer."""

    group_id: bytes
    part: int
    sender: int
    value: float
    weight: float


@dataclass(frozen=True)
class Result:
    """A part on its way back, or handed over by whoever holds it."""

    group_id: bytes
    part: int
    sender: int
    value: float
    inside: tuple[int, ...]
    crc: int
    epoch: int = 0


Item = ev.Event | Contribution | Audited | Result


class Hands:
    """All peers, the lanes between them, and everything that was said."""

    def __init__(
        self,
        count: int,
        *,
        params: Params | None = None,
        parts: int = 4,
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        self.now = 0.0
        self.lanes: dict[tuple[str, str, str], deque[tuple[int, Item]]] = {}
        self.sequence = 0
        self.shuffle = random.Random(f"shuffle/{seed}") if shuffle else None
        self.directory: dict[str, dict[str, Record]] = {}
        self.transcript: list[str] = []
        self.sent: list[tuple[float, str, str, Message]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.ended_at: dict[str, float] = {}
        self.calls: dict[str, tuple[str, str, float]] = {}  # token -> (name, trainer, deadline)
        self.notes: list[tuple[str, ef.Note]] = []
        self.effects: list[tuple[str, ef.Effect]] = []
        self.held: list[tuple[str, str, Message]] = []
        self.drop: Callable[[str, str, object], bool] = lambda sender, to, what: False
        self.hold: Callable[[str, str, Message], bool] = lambda sender, to, message: False
        self.change: Callable[[str, str, Message], Message] = lambda sender, to, message: message
        self.spoil: Callable[[str, int, float], float] = lambda name, part, mean: mean
        self.lie: Callable[[str, str, int, float], float] = lambda name, to, part, value: value
        self.snapshot_fault: dict[str, str] = {}  # donor -> "corrupt" | "hang" | "fail"
        self.average_fault: dict[tuple[str, int], Reason | None] = {}  # (name, part); None: silence
        self.push_fault: dict[tuple[str, int], Reason] = {}
        self.directory_fault: set[str] = set()  # names whose look-ups fail
        self.params = params or Params()
        self.parts, self.seed = parts, seed
        self.nodes: dict[str, Node] = {}
        self.tokens = 0
        for index in range(count):
            self.add(f"p{index:02d}")

    # -- what a test does ----------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        dialable: bool = True,
        mbps: float = 1000.0,
        params: Params | None = None,
    ) -> Node:
        rng = random.Random(f"{self.seed}/{name}")
        peer = Peer(params or self.params, name, rng, run="r", sequence=int(self.now * 1000))
        node = self.nodes[name] = Node(peer, {})
        addresses = (f"{name}:1",) if dialable else ()
        self.tell(name, ev.Addressed(addresses, (), mbps, mbps))
        return node

    def attach(
        self,
        name: str,
        values: list[float] | None = None,
        *,
        trainer: str = "t",
        version: int = 0,
        schema: bytes = SCHEMA,
        text: str = "",
        founder: str = "",
        digest: bytes = b"",
    ) -> None:
        node = self.nodes[name]
        start = list(values) if values is not None else [0.0] * self.parts
        first = not node.values
        node.values[trainer] = start
        if first and (node.snapshot is None or version >= node.snapshot[0]):
            node.snapshot = (version, list(start))
        sizes = (8,) * self.parts
        own = digest_of(start)
        event = ev.Attached(
            trainer, schema, text or repr(schema), sizes, own, version, founder, digest
        )
        self.tell(name, event)

    def attach_all(self, values: dict[str, list[float]] | None = None) -> None:
        """Everybody starts from the same bits unless told otherwise, so all are of one lineage."""
        for name in self.nodes:
            self.attach(name, (values or {}).get(name))
        self.run(until_s=self.now + 1.0)

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
        token = self._token(name, trainer, timeout_s)
        event = ev.Contributed(
            trainer, token, weight, rounds, min_participants, on_partial, timeout_s
        )
        self.tell(name, event)
        return token

    def sync(self, name: str, *, trainer: str = "t", timeout_s: float = 30.0) -> str:
        token = self._token(name, trainer, timeout_s)
        self.tell(name, ev.Synced(trainer, token, timeout_s))
        return token

    def cancel(self, token: str) -> None:
        name = self.calls.pop(token)[0]
        self.tell(name, ev.Cancelled(token))

    def detach(self, name: str, *, trainer: str = "t") -> None:
        """The trainer goes; its calls have nobody left to answer."""
        self.calls = {k: c for k, c in self.calls.items() if c[:2] != (name, trainer)}
        self.nodes[name].values.pop(trainer, None)
        self.tell(name, ev.TrainerGone(trainer))

    def kill(self, name: str) -> None:
        """No more events for it; what it sent is still on its way, then the links break."""
        self.nodes[name].alive = False
        for other in self.nodes:
            if other != name:
                self.tell(other, ev.LinkLost(name), origin=name, plane="bulk")

    def tell(self, name: str, event: Item, *, origin: str = "", plane: str = "self") -> None:
        lane = self.lanes.setdefault((origin or name, name, plane), deque())
        lane.append((self.sequence, event))
        self.sequence += 1

    def release(self) -> None:
        """Hand over what was held."""
        held, self.held = self.held, []
        for sender, to, message in held:
            self._hand_over(sender, to, message)

    def run(self, *, until_s: float = 120.0, turns: int = 200_000) -> None:
        """Until nothing is left to do before `until_s` (on this clock)."""
        stuck = 0
        for _ in range(turns):
            if self._turn():
                stuck = 0
                continue
            at, name = min(self._deadlines(), default=(float("inf"), ""))
            if at > until_s:
                self.now = max(self.now, until_s)
                return
            stuck = 0 if at > self.now else stuck + 1
            assert stuck < STUCK_TICKS, f"{name} asks to be woken at {at} for ever" + self.tail()
            self.now = max(self.now, at)
            self._give(name, ev.Ticked())
        raise AssertionError("no end in sight" + self.tail())

    def finish(self, *, within_s: float = 200.0) -> None:
        """Until every call that was made has its outcome and nothing is on its way."""
        end = self.now + within_s
        stuck = 0
        for _ in range(500_000):
            if self._turn():
                stuck = 0
                continue
            if not self.open_calls():
                return
            at, name = min(self._deadlines(), default=(float("inf"), ""))
            assert at <= end, f"{self.open_calls()} not finished by {end}" + self.tail()
            stuck = 0 if at > self.now else stuck + 1
            assert stuck < STUCK_TICKS, f"{name} asks to be woken at {at} for ever" + self.tail()
            self.now = max(self.now, at)
            self._give(name, ev.Ticked())
        raise AssertionError("no end in sight" + self.tail())

    def settle(self) -> None:
        """Hand over everything that is on its way; time stands still."""
        while self._turn():
            pass

    def step(self, turns: int) -> None:
        """So many events and no more."""
        for _ in range(turns):
            if not self._turn():
                return

    def start(self, count: int = 0, **options: Any) -> dict[str, str]:
        """The first `count` nodes (or all) contribute their own number; token by name."""
        names = list(self.nodes)[: count or len(self.nodes)]
        return {
            name: self.contribute(name, [float(index)] * self.parts, **options)
            for index, name in enumerate(names)
        }

    # -- what a test asks ----------------------------------------------------------------------

    def open_calls(self) -> list[str]:
        return [
            token
            for token, (name, _, _) in self.calls.items()
            if token not in self.outcomes and self.nodes[name].alive
        ]

    def named(self, what: str) -> list[tuple[str, ef.Note]]:
        return [(name, note) for name, note in self.notes if note.what == what]

    def said(self, kind: type, *, sender: str = "", to: str = "") -> list[Message]:
        return [
            message
            for _, who, whom, message in self.sent
            if isinstance(message, kind) and sender in ("", who) and to in ("", whom)
        ]

    def did(self, kind: type, *, name: str = "") -> list[ef.Effect]:
        return [e for who, e in self.effects if isinstance(e, kind) and name in ("", who)]

    def reasons(self) -> set[Reason]:
        """Every reason that anybody gave: in a message, a note or an outcome."""
        found: set[Reason] = set()
        for *_, message in self.sent:
            found |= {r for r in [getattr(message, "reason", None)] if r is not None}
        known = {reason.value: reason for reason in Reason}
        for _, note in self.notes:
            found |= {known[word] for word in [note.reason] if word in known}
            if note.what == "attempt_ended":
                said = {word.replace("_", " "): reason for word, reason in known.items()}
                found |= {reason for words, reason in said.items() if words in note.detail}
        for outcome in self.outcomes.values():
            found |= {outcome.reason} if outcome.reason is not None else set()
            found |= {reason for _, reason in outcome.excluded}
        return found

    def value(self, name: str, part: int = 0, *, trainer: str = "t") -> float:
        return self.nodes[name].values[trainer][part]

    def tail(self) -> str:
        return "\n" + "\n".join(self.transcript[-40:])

    # -- turning -------------------------------------------------------------------------------

    def _token(self, name: str, trainer: str, timeout_s: float) -> str:
        self.tokens += 1
        token = f"{name}/{self.tokens}"
        self.calls[token] = (name, trainer, self.now + timeout_s)
        return token

    def _turn(self) -> bool:
        """Hand over one event; False when none is on its way."""
        lanes = [(lane[0][0], key) for key, lane in self.lanes.items() if lane]
        if not lanes:
            return False
        key = self.shuffle.choice(lanes)[1] if self.shuffle else min(lanes)[1]
        _, event = self.lanes[key].popleft()
        if self.nodes[key[1]].alive:
            self._give(key[1], event)
        return True

    def _deadlines(self) -> Iterator[tuple[float, str]]:
        for name, node in self.nodes.items():
            if node.alive:
                at = node.peer.deadline()
                if at is not None:
                    yield at, name

    def _give(self, name: str, event: Item) -> None:
        node = self.nodes[name]
        if isinstance(event, Contribution | Audited | Result):
            self._land(name, node, event)
            return
        node.peer.handle(event, self.now)
        for effect in node.peer.take_effects():
            self.effects.append((name, effect))
            self._carry_out(name, node, effect)

    # -- effects -------------------------------------------------------------------------------

    def _carry_out(self, name: str, node: Node, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._send(name, effect.to, effect.message)
            case ef.Announce():
                self.directory.setdefault(effect.key, {})[name] = effect.record
                if effect.ttl_s <= 0.0:
                    del self.directory[effect.key][name]  # taken back
                self.tell(name, ev.Announced(effect.key, True))
            case ef.LookUp():
                ok = name not in self.directory_fault
                records = self.directory.get(effect.key, {}) if ok else {}
                found = tuple(r for n, r in records.items() if n != name)
                self.tell(name, ev.Found(effect.key, found, ok))
            case ef.Finish():
                assert effect.token not in self.outcomes, f"{effect.token} finished twice"
                self.outcomes[effect.token] = effect.outcome
                self.ended_at[effect.token] = self.now
                self._write(f"{name} finished {effect.token}: {_told(effect.outcome)}")
            case ef.Note():
                assert effect.what in ef.NOTES, effect
                self.notes.append((name, effect))
                node.attempts += effect.what == "attempt_started"
            case (
                ef.Open() | ef.Push() | ef.Average() | ef.Bar() | ef.HandOver() | ef.Await()
                | ef.PushAudit() | ef.OpenAudit() | ef.Check() | ef.Linger() | ef.Close()
            ):  # fmt: skip
                self._exchange(name, node, effect)
            case _:
                self._snapshot(name, node, effect)

    def _send(self, name: str, to: str, message: Message) -> None:
        assert name != to, f"{name} talks to itself: {message}"
        message = self.change(name, to, message)
        self.sent.append((self.now, name, to, message))
        self._write(f"{name} -> {to} {spoken(message)}")
        if self.drop(name, to, message):
            return
        if self.hold(name, to, message):
            self.held.append((name, to, message))
            return
        self._hand_over(name, to, message)

    def _hand_over(self, name: str, to: str, message: Message) -> None:
        if to not in self.nodes or not self.nodes[to].alive:
            self.tell(name, ev.Undelivered(to, message))
        else:
            self.tell(to, ev.Received(name, message), origin=name, plane="control")

    def _write(self, line: str) -> None:
        self.transcript.append(f"{self.now:7.3f} {line}")

    # -- the data plane ------------------------------------------------------------------------

    def _exchange(self, name: str, node: Node, effect: ef.Effect) -> None:
        match effect:
            case ef.Open():
                assert node.attempts > len(node.opened), f"{name} is in two groups of one attempt"
                group_id = effect.group.group_id
                own = [_own(node, effect, part) for part in range(self.parts)]
                node.exchanges[group_id] = Exchange(effect, own)
                node.opened.append(effect)
                for item in node.early.pop(group_id, []):  # after the other effects of this event
                    self.tell(name, item, plane="early")
            case ef.Push():
                self._push(name, node, effect)
            case ef.Average():
                self._average(name, node, effect)
            case ef.Bar():
                self._bar(name, node, effect)
            case ef.HandOver():
                self._give_result(name, node, effect, effect.parts)
            case ef.Await():
                exchange = node.exchanges[effect.group_id]
                exchange.awaited |= {(effect.sender, p, effect.epoch) for p in effect.parts}
            case ef.PushAudit():
                self._push_audit(name, node, effect)
            case ef.OpenAudit():
                node.exchanges[effect.group_id].audits |= {part: [] for part in effect.parts}
            case ef.Check():
                self._check(name, node, effect)
            case ef.Linger():
                node.exchanges[effect.group_id].lingers = True
            case ef.Close():
                node.exchanges.pop(effect.group_id, None)
                node.over.add(effect.group_id)
            case _:
                raise AssertionError(effect)

    def _push(self, name: str, node: Node, effect: ef.Push) -> None:
        exchange = node.exchanges[effect.group_id]
        me = exchange.open.index
        to = exchange.open.group.members[effect.to].peer_id
        if effect.result:
            self._give_result(name, node, effect, effect.parts)
            return
        for part in effect.parts:
            reason = self.push_fault.get((name, part))
            if reason is not None:
                self.tell(name, ev.PartFailed(effect.group_id, part, reason, "by the test"))
                continue
            if to not in self.nodes or self.drop(name, to, (effect, part)):
                continue
            if part in exchange.results:
                continue  # what is in the bucket now is the result
            weight, value = exchange.open.weight, exchange.own[part]
            item = Contribution(effect.group_id, part, me, value, weight, effect.epoch)
            self.tell(to, item, origin=name, plane="bulk")

    def _give_result(
        self, name: str, node: Node, effect: ef.Push | ef.HandOver, parts: tuple[int, ...]
    ) -> None:
        exchange = node.exchanges[effect.group_id]
        to = exchange.open.group.members[effect.to].peer_id
        for part in parts:
            if to not in self.nodes or self.drop(name, to, (effect, part)):
                continue
            value, inside, _ = exchange.results[part]
            value = self.lie(name, to, part, value)
            item = Result(
                effect.group_id, part, exchange.open.index, value, inside, crc_of(value),
                effect.epoch,
            )  # fmt: skip
            self.tell(to, item, origin=name, plane="bulk")

    def _land(self, name: str, node: Node, item: Contribution | Audited | Result) -> None:
        """A contribution reaches its reducer's accumulator, or a result the bucket."""
        exchange = node.exchanges.get(item.group_id)
        if exchange is None:
            if item.group_id not in node.over:
                node.early.setdefault(item.group_id, []).append(item)  # before Begin: held
            return
        if exchange.lingers:
            return
        if isinstance(item, Audited):
            if item.part in exchange.audits:
                exchange.audits[item.part].append((item.value, item.weight))
                self._give(name, ev.AuditArrived(item.group_id, item.part, item.sender))
            return
        part, epoch = item.part, item.epoch
        succession = Succession(exchange.open.group, exchange.open.reducers)
        bar = exchange.bars.get(part, 0)
        if isinstance(item, Contribution):
            assert succession.reducer(part, epoch) == exchange.open.index
            if epoch < bar or (part, epoch) in exchange.closed:
                return
            weighted = item.weight * item.value
            exchange.sums[part, epoch] = exchange.sums.get((part, epoch), 0.0) + weighted
            exchange.inside.setdefault((part, epoch), []).append(item.sender)
            self._give(name, ev.PartArrived(item.group_id, part, item.sender, epoch))
            return
        # As in daemon/ledger.py: never below a promise, and what was asked for is answered once.
        key, held = (item.sender, part, epoch), exchange.results.get(part)
        expected = key in exchange.awaited
        if not expected and succession.reducer(part, epoch) != item.sender:
            return
        if epoch < bar or (held is not None and epoch < held[2] + (not expected)):
            return
        exchange.awaited.discard(key)
        self._put_in_place(node, exchange, part, item.value, item.inside, epoch)
        event = ev.ResultArrived(item.group_id, part, item.sender, item.inside, item.crc, epoch)
        self._give(name, event)  # at once: what a link says is never overtaken by its end

    def _bar(self, name: str, node: Node, effect: ef.Bar) -> None:
        exchange = node.exchanges[effect.group_id]
        parts = tuple(p for p in effect.parts if exchange.bars.get(p, 0) <= effect.epoch)
        held = []
        for part in parts:
            exchange.bars[part] = effect.epoch
            if part in exchange.results:
                value, inside, epoch = exchange.results[part]
                mask = sum(1 << i for i in inside)
                held.append(Held(part, epoch, mask, crc_of(value)))
        event = ev.Barred(
            effect.group_id, effect.epoch, parts, tuple(held), effect.asker, effect.number
        )
        self.tell(name, event)

    def _push_audit(self, name: str, node: Node, effect: ef.PushAudit) -> None:
        exchange = node.exchanges[effect.group_id]
        opened = exchange.open
        to = opened.group.members[effect.to].peer_id
        for part in effect.parts:
            if to in self.nodes and not self.drop(name, to, (effect, part)):
                item = Audited(
                    effect.group_id, part, opened.index, exchange.own[part], opened.weight
                )
                self.tell(to, item, origin=name, plane="bulk")

    def _check(self, name: str, node: Node, effect: ef.Check) -> None:
        exchange = node.exchanges[effect.group_id]
        given = list(exchange.audits[effect.part])
        value, inside, _ = exchange.results[effect.part]
        if exchange.open.index in inside:
            given.append((exchange.own[effect.part], exchange.open.weight))
        mean = sum(v * w for v, w in given) / sum(w for _, w in given)
        right = abs(mean - value) <= 1e-9 * max(1.0, abs(mean))
        self.tell(name, ev.Checked(effect.group_id, effect.part, right, f"{mean} is not {value}"))

    def _average(self, name: str, node: Node, effect: ef.Average) -> None:
        exchange = node.exchanges[effect.group_id]
        part, index, epoch = effect.part, exchange.open.index, effect.epoch
        if epoch < exchange.bars.get(part, 0):
            return
        exchange.closed.add((part, epoch))
        if (name, part) in self.average_fault:
            reason = self.average_fault[name, part]
            if reason is not None:
                failed = ev.PartFailed(
                    effect.group_id, part, reason, "by the test", result=True, epoch=epoch
                )
                self.tell(name, failed)
            return
        inside = list(exchange.inside.get((part, epoch), []))
        total = sum(exchange.open.group.members[i].weight for i in inside)
        value = exchange.sums.get((part, epoch), 0.0)
        if exchange.open.weight > 0:
            value += exchange.open.weight * exchange.own[part]
            total += exchange.open.weight
            inside.append(index)
        if not inside:
            reason = Reason.NO_CONTRIBUTORS
            failed = ev.PartFailed(effect.group_id, part, reason, result=True, epoch=epoch)
            self.tell(name, failed)
            return
        mean, who = self.spoil(name, part, value / total), tuple(sorted(inside))
        self._put_in_place(node, exchange, part, mean, who, epoch)
        self.tell(name, ev.Averaged(effect.group_id, part, who, crc_of(mean), epoch))

    def _put_in_place(
        self,
        node: Node,
        exchange: Exchange,
        part: int,
        mean: float,
        inside: tuple[int, ...],
        epoch: int,
    ) -> None:
        before = exchange.results.get(part, (exchange.own[part],))[0]
        exchange.results[part] = (mean, inside, epoch)
        for trainer, _ in exchange.open.trainers:
            if trainer in node.values:
                node.values[trainer][part] = mean
        for trainer in exchange.open.late:
            if trainer in node.values:
                node.values[trainer][part] += mean - before

    # -- snapshots -----------------------------------------------------------------------------

    def _snapshot(self, name: str, node: Node, effect: ef.Effect) -> None:
        match effect:
            case ef.PushSnapshot():
                self._push_snapshot(name, node, effect)
            case ef.LoadSnapshot():
                if effect.nonce:
                    values = node.staged.pop(effect.nonce)
                else:
                    assert node.snapshot is not None
                    values = node.snapshot[1]
                node.snapshot = (effect.version, list(values))
                for trainer in effect.trainers:
                    node.values[trainer] = list(values)
            case ef.DropSnapshot():
                node.staged.pop(effect.nonce, None)
            case ef.RefreshSnapshot():
                if effect.trainer in node.values:  # its bucket goes with it
                    node.snapshot = (effect.version, list(node.values[effect.trainer]))
                    self.tell(name, ev.SnapshotRefreshed(effect.version))
            case ef.Digest():
                held = node.snapshot is not None and node.snapshot[0] == effect.version
                digest = digest_of(node.snapshot[1]) if held and node.snapshot else b""
                self.tell(name, ev.Digested(effect.version, digest))
            case ef.FetchSnapshot():
                pass
            case _:
                raise AssertionError(f"unknown effect {effect}")

    def _push_snapshot(self, name: str, node: Node, effect: ef.PushSnapshot) -> None:
        fault = self.snapshot_fault.get(name)
        receiver = self.nodes.get(effect.to)
        if fault == "fail" or receiver is None or not receiver.alive:
            self.tell(name, ev.SnapshotFailed(effect.nonce, Reason.LINK_LOST))
            if receiver is not None:
                lost = ev.SnapshotFailed(effect.nonce, Reason.LINK_LOST)
                self.tell(effect.to, lost, origin=name, plane="bulk")
            return
        assert node.snapshot is not None
        values = list(node.snapshot[1])
        if fault == "corrupt":
            values[0] += 1.0
        progress = ev.SnapshotProgressed(effect.nonce)
        self.tell(effect.to, progress, origin=name, plane="control")
        if fault == "hang":
            return
        # On the control lane behind the offer: a transfer never overtakes what announces it.
        receiver.staged[effect.nonce] = values
        arrived = ev.SnapshotArrived(effect.nonce, digest_of(values))
        self.tell(effect.to, arrived, origin=name, plane="control")
        self.tell(name, ev.SnapshotSent(effect.nonce))


def _own(node: Node, opened: ef.Open, part: int) -> float:
    """The node's contribution: the weighted mean over its trainers."""
    trainers = [(node.values[t][part], weight) for t, weight in opened.trainers if t in node.values]
    if not trainers:
        return 0.0
    total = sum(weight for _, weight in trainers)
    if not total:
        return trainers[0][0]
    return sum(value * weight for value, weight in trainers) / total


def digest_of(values: list[float]) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


def crc_of(value: float) -> int:
    return zlib.crc32(repr(value).encode())


def record_of(peer: Peer, **changes: object) -> Record:
    """What the peer says of itself, changed: for a forged message."""
    return replace(peer.record, **changes)  # type: ignore[arg-type]


def forge_begin(
    hands: Hands,
    liar: str,
    victim: str,
    /,
    *,
    member: Callable[[Member], Member] = lambda member: member,
    **changes: object,
) -> None:
    """A leader lies to one member: its Begin says something else there, under a right id."""

    def change(sender: str, to: str, message: Message) -> Message:
        if not isinstance(message, Begin) or (sender, to) != (liar, victim):
            return message
        members = tuple(member(line) for line in message.group.members)
        group = replace(message.group, members=members)
        group = replace(group, **changes)  # type: ignore[arg-type]
        return Begin(replace(group, group_id=group_id_of(group)))

    hands.change = change


def spoken(message: Message) -> str:
    """A message in one short line: what matters of it, byte strings by their first bytes."""
    words = []
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        if isinstance(value, Record):
            value = f"{value.peer_id}#{value.sequence} v{value.version} r{value.round}"
        elif name == "group":
            members = " ".join(f"{m.peer_id}*{m.weight:g}" for m in value.members)
            value = f"{value.group_id.hex()[:8]} r{value.round} [{members}]"
        elif isinstance(value, bytes):
            value = value.hex()[:8]
        elif isinstance(value, float):
            value = f"{value:g}"
        words.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(words)})"


def _told(outcome: Outcome) -> str:
    reason = f" {outcome.reason.value}" if outcome.reason is not None else ""
    taken = "accepted" if outcome.accepted else "not accepted"
    excluded = "".join(f", without {who} ({why.value})" for who, why in outcome.excluded)
    return (
        f"{outcome.status.value}{reason}, {taken}, {outcome.participants} of {outcome.group_size}, "
        f"version {outcome.version}{excluded}"
    )
