"""What Prometheus sees of one node.

One rule: labels are bounded; a peer id, an address or a sentence is never one.

Every node has a registry of its own, so that several nodes live in one process. The core's notes
are translated here and nowhere else (`observe`); the rest of the daemon calls the named methods.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from moshpitd.core.effects import Note
from moshpitd.core.outcome import Reason, Status
from moshpitd.daemon.choosing import Choice

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
OTHER: Final = "other"
MAX_RUNS: Final = 64  # runs with labels of their own, whatever names trainers invent

# Seconds. 20 ms is a round of tiny tensors on loopback, 600 s the default end of an exchange.
_PHASE_BUCKETS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_PHASES = ("catch_up", "matchmaking", "exchange", "parity")
_REASONS = frozenset(reason.value for reason in Reason)
_OUTCOMES = frozenset(status.value for status in Status)
_STATES = ("heard", "member", "lost")
# Words that a peer says itself when it goes; every other reason means that we lost it.
_LEFT = frozenset((Reason.DRAINING, Reason.WITHDRAWN, Reason.NO_TRAINER, Reason.TRAINER_GONE))
_PREEMPTED = "preempted"

M = TypeVar("M", Counter, Gauge, Histogram)


class NodeMetrics:
    """All metrics of one node. As thread-safe as prometheus-client, whose locks suffice."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        self._runs: set[str] = set()
        self._choices: dict[str, set[tuple[str, str]]] = {}  # what was told of each run
        self._observers: Mapping[str, Callable[[str, Note], None]] = self._table()
        self._by_run: list[tuple[Counter | Gauge | Histogram, tuple[str, ...]]] = []
        own = self.registry

        def counter(name: str, words: str, *labels: str) -> Counter:
            return self._listed(Counter(name, words, labels, registry=own), labels)

        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return self._listed(Gauge(name, words, labels, registry=own), labels)

        self.rounds = counter(
            "moshpit_rounds", "Attempts to average, by how they ended.", "run", "outcome"
        )
        # Each of these is followed by a round_ended, which counts the outcome.
        self.ungrouped = counter(
            "moshpit_attempts_without_group", "Matchmaking that found no group.", "run", "reason"
        )
        seconds = Histogram(
            "moshpit_round_seconds",
            "Duration of a round's phases.",
            ("run", "phase"),
            buckets=_PHASE_BUCKETS,
            registry=own,
        )
        self.round_seconds = self._listed(seconds, ("run", "phase"))
        self.group_size = gauge("moshpit_group_size", "Members of the last group, with us.", "run")
        self.peers = gauge("moshpit_peers", "Peers known, without us.", "run", "state")
        self.peer_events = counter(
            "moshpit_peer_events", "Peers that came and went.", "run", "event"
        )
        self.bytes = counter("moshpit_bytes", "Bytes on the network.", "run", "direction", "kind")
        self.parts = counter("moshpit_parts", "Parts that were closed, by result.", "run", "result")
        self.excluded = counter(
            "moshpit_excluded", "Members that fell out of a running round.", "run", "reason"
        )
        self.takeovers = counter(
            "moshpit_takeovers", "Times we took parts of a lost reducer over.", "run", "reason"
        )
        self.stalls = counter(
            "moshpit_stalls", "Times that this daemon stood still during a round.", "run"
        )
        self.refusals = counter("moshpit_refusals", "Peers refused.", "run", "reason")
        self.snapshots = counter("moshpit_snapshots", "Snapshots fetched, served.", "run", "event")
        self.codec_seconds = counter(
            "moshpit_codec_seconds", "Time spent in codecs.", "codec", "op"
        )
        self.residual_bytes = gauge(
            "moshpit_residual_bytes",
            "Memory of what codecs took away and later rounds bring.",
            "run",
            "side",
        )
        self.residual_parts_dropped = gauge(
            "moshpit_residual_parts_dropped",
            "Parts whose residual was given up since the start: half a step of the codec each.",
            "reason",
        )
        self.contribution_links = gauge(
            "moshpit_contribution_links",
            "Links by the codec that contributions travelled with last, for runs with codec auto.",
            "run",
            "codec",
            "reason",
        )
        self.link_rate = gauge(
            "moshpit_link_bytes_per_second", "Rate of one bulk link while busy.", "direction"
        )
        self.strikes = counter("moshpit_strikes", "Breaches of the protocol by peers.", "reason")
        self.parity_mismatches = counter(
            "moshpit_parity_mismatches", "Members that reported other bits than ours.", "run"
        )
        self.trainers = gauge("moshpit_trainers", "Trainers attached.", "run")
        self.version = gauge("moshpit_version", "Averages inside our parameters.", "run")
        self.version_lag = gauge("moshpit_version_lag", "Versions behind the median heard.", "run")
        self.grid_epoch = gauge("moshpit_grid_epoch", "Epoch of the grid's shape.", "run")
        self.runs_forgotten = counter(
            "moshpit_runs_forgotten", "Runs without trainers that were let go.", "reason"
        )
        self.joined = gauge("moshpit_joined", "1 when the swarm is reached.")
        self.draining = gauge("moshpit_draining", "1 while the node leaves.")
        self.drain_left = gauge("moshpit_drain_left_seconds", "What is left of a drain's budget.")
        self.build = gauge("moshpit_build_info", "Always 1.", "version")
        self.build.labels(version).set(1)
        ProcessCollector(registry=self.registry)

    def _listed(self, metric: M, labels: tuple[str, ...]) -> M:
        if "run" in labels:
            self._by_run.append((metric, labels))
        return metric

    # -- what the core notes ---------------------------------------------------------------------

    def observe(self, run: str, note: Note) -> None:
        """Count a note. An unknown `what` is a newer core and no reason to fail."""
        observer = self._observers.get(note.what)
        if observer is not None:
            observer(self._run(run), note)

    def _table(self) -> Mapping[str, Callable[[str, Note], None]]:
        """One line per note of the core; a test compares with NOTES."""
        return {
            "attempt_started": _uncounted,
            "group_formed": self._group_formed,
            "attempt_ended": lambda run, note: self.ungrouped.labels(run, _reason(note)).inc(),
            "member_excluded": lambda run, note: self.excluded.labels(run, _reason(note)).inc(),
            "part_without_result": lambda run, _: self.parts.labels(run, "without_result").inc(),
            "offers_less": self._offers_less,
            "takeover_started": lambda run, note: self.takeovers.labels(run, _reason(note)).inc(),
            "part_taken_over": lambda run, _: self.parts.labels(run, "taken_over").inc(),
            "part_repaired": lambda run, _: self.parts.labels(run, "repaired").inc(),
            "audit_failed": lambda run, _: self.parts.labels(run, "audit_failed").inc(),
            "woke": lambda run, _: self.stalls.labels(run).inc(),
            "round_ended": self._round_ended,
            "parity_differs": lambda run, _: self.parity_mismatches.labels(run).inc(),
            "peer_heard": lambda run, _: self.peer_events.labels(run, "joined").inc(),
            "peer_lost": self._peer_lost,
            "strike": lambda _, note: self.strikes.labels(_reason(note)).inc(),
            "refused": lambda run, note: self.refusals.labels(run, _reason(note)).inc(),
            "shape_adopted": self._shape_adopted,
            "lineage_adopted": _uncounted,
            "snapshot_started": lambda run, _: self.snapshots.labels(run, "started").inc(),
            "snapshot_loaded": self._snapshot_loaded,
            "snapshot_failed": lambda run, _: self.snapshots.labels(run, "failed").inc(),
            "snapshot_served": lambda run, _: self.snapshots.labels(run, "served").inc(),
            "drained": _uncounted,
        }

    def _group_formed(self, run: str, note: Note) -> None:
        self._set(self.group_size, run, note.fields.get("size"))

    def _round_ended(self, run: str, note: Note) -> None:
        self.rounds.labels(run, _among(str(note.fields.get("outcome", "")), _OUTCOMES)).inc()
        self._set(self.group_size, run, note.fields.get("group_size"))
        self._set(self.version, run, note.fields.get("version"))
        parts, without = note.fields.get("parts"), note.fields.get("without_result")
        if isinstance(parts, int) and isinstance(without, int):
            self.parts.labels(run, "averaged").inc(parts - without)
        for phase, seconds in _phases(note.fields.get("seconds")):
            self.round_seconds.labels(run, phase).observe(seconds)

    def _offers_less(self, run: str, note: Note) -> None:
        parts, offered = note.fields.get("parts"), note.fields.get("offered")
        if isinstance(parts, int) and isinstance(offered, int):
            self.parts.labels(run, "withheld").inc(max(0, parts - offered))

    def _peer_lost(self, run: str, note: Note) -> None:
        said = "left" if note.reason in _LEFT else "lost"
        event = _PREEMPTED if note.reason == _PREEMPTED else said
        self.peer_events.labels(run, event).inc()

    def _shape_adopted(self, run: str, note: Note) -> None:
        self._set(self.grid_epoch, run, note.fields.get("epoch"))

    def _snapshot_loaded(self, run: str, note: Note) -> None:
        self.snapshots.labels(run, "loaded").inc()
        self._set(self.version, run, note.fields.get("version"))

    def _set(self, gauge: Gauge, run: str, value: object) -> None:
        if isinstance(value, int | float):
            gauge.labels(run).set(value)

    # -- what the daemon itself counts -----------------------------------------------------------

    def add_carried(self, run: str, kind: str, sent: bool, count: int) -> None:
        """`kind`: part, result, snapshot, handover, audit, control."""
        direction = "sent" if sent else "received"
        self.bytes.labels(self._run(run), direction, kind).inc(count)

    def add_codec_seconds(self, codec: str, op: str, seconds: float) -> None:
        """`op`: encode or decode."""
        self.codec_seconds.labels(codec, op).inc(seconds)

    def set_link_rates(self, sent: float | None, received: float | None) -> None:
        """Bytes per second of one link while it is busy; None: not measured yet."""
        for direction, rate in (("sent", sent), ("received", received)):
            if rate is not None:
                self.link_rate.labels(direction).set(rate)

    def set_residual_bytes(self, run: str, sides: Mapping[str, int]) -> None:
        """`sides`: sender, reducer."""
        for side, nbytes in sides.items():
            self.residual_bytes.labels(self._run(run), side).set(nbytes)

    def set_choices(self, run: str, choices: Iterable[Choice]) -> None:
        """Links by codec and reason; nothing for a run that does not choose."""
        counts = Tally((one.codec, one.reason) for one in choices)
        known = self._choices.setdefault(self._run(run), set())
        known.update(counts)
        for codec, reason in known:
            self.contribution_links.labels(self._run(run), codec, reason).set(counts[codec, reason])

    def set_residual_parts_dropped(self, reasons: Mapping[str, int]) -> None:
        """`reasons`: snapshot, run_ended, withdrawn, not_finite."""
        for reason, count in reasons.items():
            self.residual_parts_dropped.labels(reason).set(count)

    def set_trainers(self, run: str, count: int) -> None:
        self.trainers.labels(self._run(run)).set(count)

    def set_peers(self, run: str, states: Mapping[str, int]) -> None:
        """How many peers are in each state: heard, member, lost."""
        for state in _STATES:
            self.peers.labels(self._run(run), state).set(states.get(state, 0))

    def set_version(self, run: str, version: int, *, lag: int = 0) -> None:
        self.version.labels(self._run(run)).set(version)
        self.version_lag.labels(self._run(run)).set(lag)

    def set_joined(self, joined: bool) -> None:
        self.joined.set(joined)

    def set_draining(self, draining: bool) -> None:
        self.draining.set(draining)

    def set_drain_left(self, seconds: float) -> None:
        self.drain_left.set(seconds)

    def forget(self, run: str, reason: str) -> None:
        """The run was let go (`reason`: idle, limit): its series end, and its label is free."""
        self.runs_forgotten.labels(reason).inc()
        self._runs.discard(run)
        self._choices.pop(run, None)
        for metric, labels in self._by_run:
            samples = [sample for family in metric.collect() for sample in family.samples]
            for values in {
                tuple(sample.labels[label] for label in labels)
                for sample in samples
                if sample.labels.get("run") == run
            }:
                metric.remove(*values)

    def render(self) -> bytes:
        """The text of /metrics, to be served as `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _run(self, run: str) -> str:
        if run not in self._runs:
            if len(self._runs) >= MAX_RUNS:
                return OTHER
            self._runs.add(run)
        return run


def _uncounted(_run: str, _note: Note) -> None:
    """Notes that the log tells better than a counter."""


def _reason(note: Note) -> str:
    return _among(note.reason, _REASONS)


def _among(word: str, known: frozenset[str]) -> str:
    return word if word in known else OTHER


def _phases(seconds: object) -> Iterable[tuple[str, float]]:
    """Phase and duration, given as a dict or as pairs; only phases that we know."""
    pairs = seconds.items() if isinstance(seconds, Mapping) else seconds
    if isinstance(pairs, Iterable):
        for phase, duration in pairs:
            if phase in _PHASES:
                yield phase, float(duration)


__all__ = ["CONTENT_TYPE", "MAX_RUNS", "OTHER", "NodeMetrics"]
