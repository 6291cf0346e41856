"""The primitives of `client.primitives` on real daemons. One rule: one group average is one run of
its own, `RUN.NAME`, with one codec for its life.

    session = attach("digits", model=model)
    optimizer = by_name("onebit-adam", model.parameters(), session, lr=1e-3)

A session has one bucket and one round at a time, and a run one codec and one schema, so averages
that differ in any of these are runs that differ; it is what GradientAveraging does per bucket, and
needs nothing new of the daemon but a codec per run. Error feedback is the daemon's own, on both
sides; `state_dict` of an average asks for it, and `load_state_dict` puts it back. The tensors are
gradients or momenta, which are nobody's to inherit: all peers attach with zeros, one lineage, and a
snapshot that a catch-up loads never reaches a caller.

Where an algorithm needs codes one way and the exact mean back (DIANA, MARINA), values are coded
here and what they decode to travels as float32: the right arithmetic, and no bytes saved until a
group can agree on two codecs.

Also offered: exchanges with neighbours (`client.neighbours`), meetings in pairs
(`client.meetings`), a parameter store (`client.store`), and memory that the trainers of one node
share (`client.memory`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from moshpitd.client.flight import Flight
from moshpitd.client.meetings import DaemonMeetings
from moshpitd.client.memory import NodeMemory
from moshpitd.client.neighbours import DaemonNeighbours
from moshpitd.client.options import PASSING, AverageOptions, check_options
from moshpitd.client.owing import OwingSession
from moshpitd.client.primitives import EXACT, Coding, Mean, StoreOptions, Tensors
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.client.sources import source_of
from moshpitd.client.store import DaemonStore
from moshpitd.errors import ConfigError, DaemonUnavailable, TrainerError
from moshpitd.tensors.codecs import codec_for
from moshpitd.tensors.dtypes import dtype_name

log = logging.getLogger("moshpitd.client")


ATTACH_WITHIN_S = 30.0
"""For a daemon that is there: attaching takes milliseconds, and seconds on a machine that swaps."""

ATTEMPTS = 3
"""Of one average. The first round of a run may meet before all have heard of each other."""


MAX_RUN_NAME = 64
"""What a daemon takes; a run's name is part of file names, labels and keys."""


def run_name(*words: str) -> str:
    """`RUN.NAME`, the same on all peers; of one that is too long the end is a digest of all."""
    whole = ".".join(words)
    if len(whole) <= MAX_RUN_NAME:
        return whole
    digest = hashlib.blake2b(whole.encode(), digest_size=6).hexdigest()
    return f"{whole[: MAX_RUN_NAME - len(digest) - 1]}.{digest}"


class SwarmOfDaemons:
    """`Averages` and `Neighbourhood` beside a session. `options` go to every round; `rounds` is a
    sweep if not given, so that a full grid is exact."""

    def __init__(
        self,
        session: Session,
        *,
        heard: Callable[[str, Result], None] | None = None,
        **options: Unpack[AverageOptions],
    ) -> None:
        """`heard(run, result)` hears of every finished round, in the thread that landed it."""
        self._heard = heard
        self._options: AverageOptions = {"rounds": "sweep", **options}
        check_options(self._options)
        self.session = session
        self.bytes_sent = 0
        """Of all finished rounds, as the daemon counted them."""

    def neighbours(
        self, name: str, *, like: Tensors, topology: str, coding: Coding = EXACT
    ) -> DaemonNeighbours:
        if coding.feedback or coding.back != coding.codec:
            raise ConfigError(
                f"{name}: an exchange with neighbours has no error feedback and nothing comes back",
                key="codec",
                expected="a codec alone; algorithms on differences keep what it rounds away",
            )
        run = run_name(self.session.run, name, topology)
        return DaemonNeighbours(
            run,
            socket=self.session.socket,
            like=like,
            topology=topology,
            coding=coding,
            timeout_s=self._options.get("timeout_s", 60.0),
            heard=partial(self.finished, run),
        )

    def meetings(self, name: str, *, like: Tensors, topology: str) -> DaemonMeetings:
        run = run_name(self.session.run, name, topology)
        return DaemonMeetings(
            run,
            socket=self.session.socket,
            like=like,
            topology=topology,
            timeout_s=self._options.get("timeout_s", 60.0),
            heard=partial(self.finished, run),
        )

    def finished(self, run: str, result: Result) -> None:
        """For what was opened here: one of its rounds is over."""
        self.bytes_sent += result.bytes_sent
        if self._heard is not None:
            self._heard(run, result)

    def averages(self, name: str, *, like: Tensors, coding: Coding = EXACT) -> DaemonAverage:
        here = ""
        if coding.back != coding.codec:
            if coding.back != "float32" or coding.feedback:
                raise ConfigError(
                    f"{name}: {coding.codec} there and {coding.back} back",
                    key="codec",
                    expected="one codec both ways, which is all that a group of daemons agrees on",
                )
            here, coding = coding.codec, EXACT
        run = run_name(self.session.run, name)
        values = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
        session = OwingSession(
            run,
            source_of(None, values),
            socket=self.session.socket,
            codec=coding.codec,
            feedback=coding.feedback,
        )
        session.start(sync=True)
        if self.session.attached:
            # An average that begins before it is attached is a missed update of everybody's.
            session.wait_attached(ATTACH_WITHIN_S)
        return DaemonAverage(self, session, values, self._options, here, owes=coding.feedback)

    def shared(self, name: str, *, start: Tensors) -> NodeMemory:
        return NodeMemory.opened(self.session, name, start, ATTACH_WITHIN_S)

    def store(self, name: str, *, start: Tensors, options: StoreOptions) -> DaemonStore:
        return DaemonStore.opened(self.session, name, start, options, ATTACH_WITHIN_S)


class DaemonAverage:
    """One run. Invariant: between `begin` and `land` nobody writes to `values`."""

    def __init__(
        self,
        swarm: SwarmOfDaemons,
        session: OwingSession,
        values: dict[str, Tensor],
        options: AverageOptions,
        coded_here: str = "",
        *,
        owes: bool = False,
    ) -> None:
        self.session, self._owes = session, owes
        self._coded_here, self._rounds = coded_here, 0
        self._before: Flight | None = None
        self._swarm, self._values, self._options = swarm, values, options

    def average(self, tensors: Tensors, *, weight: int = 1) -> Mean:
        return self.begin(tensors, weight=weight).land()

    def begin(self, tensors: Tensors, *, weight: int = 1) -> DaemonRound:
        sent = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if [*sent] != [*self._values]:
            raise TrainerError(
                f"{self.session.run}: tensors {[*sent][:3]}..., expected {[*self._values][:3]}...",
                reason="schema_changed",
            )
        if self._coded_here:
            sent = self._decoded(sent)
        return DaemonRound(self, self.take_off(sent, weight), sent, weight)

    def take_off(self, sent: Tensors, weight: int) -> Flight | None:
        """For a round: one attempt; None where there is no daemon."""
        self._end_the_one_before()
        try:
            with torch.no_grad():
                for name, value in self._values.items():
                    value.copy_(sent[name])
            flight = self.session.begin(weight, overlap=False, snapshots=False, **self._options)
            self._before = flight
            return flight
        except DaemonUnavailable as error:
            log.warning("%s: no average this time: %s", self.session.run, error)
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
        return None

    def _end_the_one_before(self) -> None:
        """A round that nobody landed, because a checkpoint was loaded or the others' state came,
        still writes to `values`: before this one's contribution does, and never after it."""
        before, self._before = self._before, None
        if before is not None:
            with suppress(DaemonUnavailable, TrainerError):  # told to whoever landed it, if any
                before.land()

    def _decoded(self, tensors: Tensors) -> dict[str, Tensor]:
        """What the codec makes of each tensor; another draw in every round and on every peer."""
        self._rounds += 1
        found = {}
        for index, (name, tensor) in enumerate(tensors.items()):
            if not tensor.is_floating_point():
                found[name] = tensor
                continue
            dtype = dtype_name(tensor.dtype)
            codec = codec_for(self._coded_here, dtype)
            flat = tensor.detach().reshape(-1).contiguous()
            room = torch.empty(
                codec.payload_bytes(flat.numel(), dtype), dtype=torch.uint8, device=flat.device
            )
            words = f"{self.session.run}/{self.session.peer_id}/{self._rounds}/{index}".encode()
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")
            codec.encode(flat, room, seed=seed)
            decoded = torch.empty_like(flat)
            codec.decode(room, decoded)
            found[name] = decoded.reshape(tensor.shape)
        return found

    def finished(self, result: Result, sent: dict[str, Tensor], weight: int) -> Mean:
        """For a round: what became of it."""
        self._swarm.finished(self.session.run, result)
        if not result.accepted or result.status == "alone":
            return Mean(dict(sent), dict(sent))
        missing = self._missing(result)
        found = {
            name: sent[name] if name in missing else value.detach().clone()
            for name, value in self._values.items()
        }
        inside = self.session.peer_id in result.contributors
        return Mean(
            tensors=found,
            own=dict(sent),
            contributors=result.contributors,
            missing=missing,
            excluded=weight > 0 and not inside,
        )

    def _missing(self, result: Result) -> frozenset[str]:
        """Tensors that any part without a result lies in."""
        layout = self.session.layout
        names = [layout.names_in(layout.parts[index]) for index in result.parts_without_result]
        return frozenset().union(*names)

    def state_dict(self) -> dict[str, Any]:
        """What this node's codec owes, on both sides, and how many draws were made here. Without a
        daemon that cannot be known, and the checkpoint says that nothing is."""
        found: dict[str, Any] = {"rounds": self._rounds} if self._rounds else {}
        if self._owes:
            try:
                return found | dict(self.session.residuals())
            except DaemonUnavailable as error:
                log.warning("%s: error feedback is not saved: %s", self.session.run, error)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds = int(state.get("rounds", 0))
        if not self._owes:
            return
        try:
            self.session.owe(state)
        except DaemonUnavailable as error:
            log.warning("%s: error feedback is not loaded: %s", self.session.run, error)

    def close(self) -> None:
        self.session.close()


class DaemonRound:
    """A round in flight: `client.primitives.Pending`."""

    def __init__(
        self, owner: DaemonAverage, flight: Flight | None, sent: dict[str, Tensor], weight: int
    ) -> None:
        self._owner, self._flight, self._sent, self._weight = owner, flight, sent, weight

    @property
    def done(self) -> bool:
        return self._flight is None or self._flight.done

    def land(self) -> Mean:
        """An attempt that met nobody, or too few, is made again: for trainers that must stay equal
        a missed round costs more than a second window."""
        result: Result | None = None
        for left in reversed(range(ATTEMPTS)):
            result = self._landed()
            if result is None or (result.accepted and result.status != "alone") or not left:
                break
            self._flight = self._owner.take_off(self._sent, self._weight)
        if result is None:
            return Mean(dict(self._sent), dict(self._sent))
        return self._owner.finished(result, self._sent, self._weight)

    def _landed(self) -> Result | None:
        if self._flight is None:
            return None
        try:
            return self._flight.land()
        except DaemonUnavailable as error:
            log.warning("%s: no average this time: %s", self._owner.session.run, error)
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
        return None
