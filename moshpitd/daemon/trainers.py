"""What the local API and a run say to each other: plain records, and the checks of what is asked.

One rule: a value out of range is refused here by name, with the reason word that the client's own
checks use, because not every trainer uses the client library.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from moshpitd.core.events import Mix
from moshpitd.core.graph import OWN, PeerGraph
from moshpitd.core.messages import Lineage
from moshpitd.core.neighbours import most_neighbours
from moshpitd.core.outcome import OnPartial, Outcome, Reason, Status
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.soundness import MAX_MASS, MAX_SEQUENCE
from moshpitd.core.topologies import NAMES
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import AUTO
from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.tensors.blocks import Blocks
from moshpitd.tensors.codecs import CODECS
from moshpitd.tensors.layout import Layout, TensorSpec

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_ROUNDS = 64  # the client's bound too; a sweep of a grid has at most 8 dimensions
MAX_VERSION = 1 << 63
DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 86_400.0
MAX_KNOWN = 4096  # peers that a trainer may name as knowing it; a group has at most 64
SCHEMA_TEXT_BYTES = 4000  # a record carries 4096 characters, and 16 KiB in all


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a trainer says of itself when it attaches."""

    specs: tuple[TensorSpec, ...]
    version: int = 0
    founder: str = ""
    founder_digest: bytes = b""
    client: str = ""
    topology: str = ""  # it exchanges with neighbours, instead of averaging
    full: bool = False
    pairs: bool = False  # its parameters lie here and meet others
    shared: bool = False  # it writes to the run's shared file too
    in_place: bool = False  # its tensors live in its bucket
    own: PeerGraph | None = None  # what the topology "own" is on this node

    def checked(self, peer: Peer) -> Attachment:
        """With the operator's topology, where it mixes by that."""
        if self.topology == OWN:
            return replace(self, own=_own_topology(peer))._checked()
        if self.topology and self.topology not in NAMES:
            raise refusal(
                "topology_refused",
                f"topology {self.topology[:40]!r}, expected one of {', '.join((*NAMES, OWN))}",
            )
        return self._checked()

    def _checked(self) -> Attachment:
        if not self.specs:
            raise refusal("no_tensors", "no tensors to average, expected at least one")
        if not 0 <= self.version < MAX_VERSION or len(self.founder_digest) > 64:
            raise TrainerError(
                f"version {self.version} with a digest of {len(self.founder_digest)} bytes, "
                "expected a count of averages below 2^63 and at most 64 bytes"
            )
        if len(self.founder) > 128:
            raise TrainerError(f"founder of {len(self.founder)} characters, expected a PeerID")
        return self

    @property
    def manner(self) -> str:
        """How the run's peers meet, in words; empty where they average in groups. All have to: who
        averages waits for parts that a neighbour never sends, and two topologies are two
        matrices."""
        if not self.topology:
            return ""
        topology = self.topology if self.own is None else f"{OWN} {self.own.digest}"
        if self.pairs:
            return f"meetings of two on topology {topology}"
        return f"exchanges{' of differences' if self.full else ''} on topology {topology}"

    @property
    def lives_here(self) -> bool:
        """In place, where there is a result to move to: an exchange with neighbours has none."""
        return self.in_place and not self.topology

    def check_company(self, run: str, others: Collection[Trainer]) -> None:
        """May it join the run's `others` on this node?"""
        if others and (self.topology or any(other.attachment.topology for other in others)):
            raise refusal(
                "too_many_trainers",
                f"run {run!r} exchanges with neighbours, expected one trainer of it on a node: a "
                "neighbour is a node",
            )


def _own_topology(peer: Peer) -> PeerGraph:
    own = peer.state.own
    if own is None:
        raise refusal(
            "topology_refused",
            f"topology {OWN!r}, but this node has none; expected a file that "
            "averaging.topology_file names",
        )
    if peer.peer_id not in own.names:
        raise refusal(
            "topology_refused",
            f"topology {OWN!r} does not name this peer; expected {peer.peer_id} among the peers of "
            "the file that averaging.topology_file names",
        )
    return own


@dataclass(slots=True)
class Trainer:
    """One attached trainer. `gone` is set once; then nothing is left but what a round uses."""

    name: str
    attachment: Attachment
    bucket: Bucket
    gone: asyncio.Event
    known: bool = False  # the core has heard of it
    held: bool = False  # its Hold stream is open
    token: str = ""  # of its running call, empty when there is none
    worker: str = ""  # what it is called in a store, once it has pulled
    shared: Bucket | None = None  # the run's file for all trainers of this node, if it asked for it


@dataclass(frozen=True, slots=True)
class Ask:
    """An average: `weight` samples since the last one, `rounds` 0 for a sweep."""

    weight: int
    rounds: int
    min_participants: int
    on_partial: OnPartial
    timeout_s: float
    generation: int

    @classmethod
    def checked(cls, request: Any, params: Params) -> Ask:
        """From an AverageRequest; what it leaves out has the client library's defaults."""
        if not 0 <= request.weight <= params.max_weight:
            raise refusal(
                "weight_out_of_range",
                f"weight {request.weight}, expected an integer 0..{params.max_weight}",
            )
        if request.rounds > MAX_ROUNDS:
            raise refusal(
                "rounds_out_of_range",
                f"rounds {request.rounds}, expected 1..{MAX_ROUNDS}, or 0 for a sweep",
            )
        try:
            on_partial = OnPartial(request.on_partial or OnPartial.ACCEPT)
        except ValueError:
            words = ", ".join(OnPartial)
            raise refusal(
                "unknown_on_partial", f"on_partial {request.on_partial!r}, expected one of {words}"
            ) from None
        return cls(
            weight=request.weight,
            rounds=request.rounds,
            min_participants=max(1, request.min_participants),
            on_partial=on_partial,
            timeout_s=checked_timeout(request.timeout_s),
            generation=request.generation,
        )


def checked_mix(request: Any, topology: str) -> Mix:
    """From an ExchangeRequest."""
    if not 0 <= request.mass <= MAX_MASS:
        raise refusal(
            "mass_out_of_range", f"mass {request.mass}, expected a number from 0 to {MAX_MASS:.0f}"
        )
    if request.sequence > MAX_SEQUENCE or len(request.knows) > MAX_KNOWN:
        raise TrainerError(
            f"sequence {request.sequence} and {len(request.knows)} peers that know us, expected a "
            f"count below 2^63 and at most {MAX_KNOWN}"
        )
    return Mix(topology, request.sequence, request.mass, request.full, tuple(request.knows))


def checked_action(action: str) -> str:
    """Of a MeetRequest: a word that nobody knows must not be an update of parameters."""
    if action not in ("start", "add", "meet"):
        raise TrainerError(f"action {action[:40]!r}, expected start, add or meet")
    return action


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended, with what only this node knows of it."""

    outcome: Outcome
    lineage: Lineage
    bytes_sent: int
    bytes_received: int
    delta: bool
    moved: bool = False  # in place: the values lie in the other block of the bucket


@dataclass(frozen=True, slots=True)
class Progressed:
    """Where a running call is."""

    phase: str
    group_size: int
    parts_done: int
    parts: int
    round: int


Step: TypeAlias = Progressed | Ended
"""What a running call yields: progress, then once how it ended."""


def checked_run_name(name: str) -> str:
    """A run's name is part of file names, labels and keys; anything else is refused."""
    if RUN_NAME.fullmatch(name) is None:
        raise refusal(
            "bad_run",
            f"run {name[:80]!r}, expected 1 to 64 letters, digits, dots, underscores and hyphens, "
            "beginning with a letter or digit",
        )
    return name


def check_codec(run: str, codec: str, known: str) -> None:
    """A run has one codec. Empty asks for none; `known` is empty while the run does not exist."""
    if codec and codec not in (*CODECS, AUTO):
        raise refusal(
            "codec_refused",
            f"run {run!r}: codec {codec[:40]!r}, expected {', '.join((*CODECS, AUTO))}",
        )
    if codec and known and codec != known:
        raise refusal(
            "codec_differs", f"run {run!r} travels as {known} on this node, not as {codec}"
        )


def checked_timeout(timeout_s: float) -> float:
    if not 0 <= timeout_s < math.inf:
        raise refusal(
            "timeout_out_of_range",
            f"timeout_s {timeout_s}, expected a positive number of seconds",
        )
    return min(timeout_s, MAX_TIMEOUT_S) or DEFAULT_TIMEOUT_S


def refusal_of(outcome: Outcome, name: str) -> TrainerError | None:
    """The error that a failed call stands for when the trainer asked for something impossible.

    A weight is none of these: what is impossible by itself was refused before the core heard of it
    (`Ask.checked`), and that it is out of range among the others is what the others say. One of
    them lying must not end a training loop, so that stays a failed result with its reason.
    """
    if outcome.status is not Status.FAILED:
        return None
    match outcome.reason:
        case Reason.BUSY:
            return refusal("bucket_busy", f"trainer {name}: its bucket is in another call")
        case Reason.DRAINING:
            return refusal("draining", "the daemon is leaving and takes no more rounds")
        case Reason.TRAINER_GONE:
            return refusal("unknown_trainer", f"trainer {name} is not attached any more")
        case _:
            return None


def blocks_of(attachment: Attachment, layout: Layout, max_group: int) -> Blocks | None:
    """The room that an exchange with neighbours needs beside the message, or a trainer in place for
    the results beside its tensors."""
    if not attachment.topology:
        return Blocks(layout.nbytes, slots=0, full=False) if attachment.lives_here else None
    topology, own = attachment.topology, attachment.own
    slots = 1 if attachment.pairs else most_neighbours(topology, max_group, own)
    return Blocks(layout.nbytes, slots, attachment.full)


def schema_of(layout: Layout, attachment: Attachment) -> bytes:
    """What a run's peers agree on: the tensors, and how they meet."""
    digest = layout.schema_digest
    if not attachment.manner:
        return digest
    text = digest + attachment.manner.encode()
    return hashlib.blake2b(text, digest_size=len(digest)).digest()


def schema_text(layout: Layout, attachment: Attachment) -> str:
    """The schema for other peers' eyes: a line per tensor by name, cut to what a record carries.

    The part size and the manner are part of it and stand last, so that a difference there is found
    too.
    """
    last = f"parts of {layout.part_bytes} bytes"
    if attachment.manner:
        last += f" in {attachment.manner}"
    lines: list[str] = []
    room = SCHEMA_TEXT_BYTES - len(last)
    for spec in sorted(layout.specs, key=lambda spec: spec.name):
        line = f"{spec.name} ({spec})"
        room -= len(line.encode(errors="replace")) + 1
        if room < 0:
            break
        lines.append(line.encode(errors="replace").decode())
    return "\n".join([*lines, last])
