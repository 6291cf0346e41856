"""The primitives of `client.primitives` on real daemons. One rule: one group average is one run of
its own, `RUN.NAME`, with one codec for its life.

    session = attach("digits", model=model)
    optimizer = by_name("onebit-adam", model.parameters(), session, lr=1e-3)

A session has one bucket and one round at a time, and a run one codec and one schema, so averages
that differ in any of these are runs that differ; it is what GradientAveraging does per bucket, and
needs nothing new of the daemon but a codec per run. Error feedback is the daemon's own, on both
sides, and stays there while the run has a trainer: `state_dict` of an average is empty. The tensors
are gradients or momenta, which are nobody's to inherit: all peers attach with zeros, one lineage,
and a snapshot that a catch-up loads never reaches a caller.

Offered so far: group averages. An exchange with neighbours and a store need messages that the core
does not have yet; asking for an algorithm on them is an error that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from moshpitd.client.flight import Flight
from moshpitd.client.optim.options import PASSING, AverageOptions, check_options
from moshpitd.client.primitives import EXACT, Coding, Mean, Tensors
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.client.sources import source_of
from moshpitd.errors import ConfigError, DaemonUnavailable, TrainerError

log = logging.getLogger("moshpitd.client")


ATTACH_WITHIN_S = 30.0
"""For a daemon that is there: attaching takes milliseconds, and seconds on a machine that swaps."""


class SwarmOfDaemons:
    """`Averages` beside a session. `options` go to every round; `rounds` is a sweep if not given,
    so that a full grid is exact."""

    def __init__(self, session: Session, **options: Unpack[AverageOptions]) -> None:
        self._options: AverageOptions = {"rounds": "sweep", **options}
        check_options(self._options)
        self.session = session
        self.bytes_sent = 0
        """Of all finished rounds, as the daemon counted them."""

    def averages(self, name: str, *, like: Tensors, coding: Coding = EXACT) -> DaemonAverage:
        if coding.back != coding.codec:
            raise ConfigError(
                f"{name}: {coding.codec} there and {coding.back} back",
                key="codec",
                expected="one codec both ways, which is all that a group of daemons agrees on",
            )
        run = f"{self.session.run}.{name}"
        values = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
        session = Session(
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
        return DaemonAverage(self, session, values, self._options)


class DaemonAverage:
    """One run. Invariant: between `begin` and `land` nobody writes to `values`."""

    def __init__(
        self,
        swarm: SwarmOfDaemons,
        session: Session,
        values: dict[str, Tensor],
        options: AverageOptions,
    ) -> None:
        self.session = session
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
        flight: Flight | None = None
        try:
            with torch.no_grad():
                for name, value in self._values.items():
                    value.copy_(sent[name])
            flight = self.session.begin(weight, overlap=False, snapshots=False, **self._options)
        except DaemonUnavailable as error:
            log.warning("%s: no average this time: %s", self.session.run, error)
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
        return DaemonRound(self, flight, sent, weight)

    def finished(self, result: Result, sent: dict[str, Tensor], weight: int) -> Mean:
        """For a round: what became of it."""
        self._swarm.bytes_sent += result.bytes_sent
        if not result.applied or result.status == "alone":
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
        """Nothing: the daemon keeps what codecs owe, and a trainer that restarts finds it there."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            log.warning(
                "%s: what a codec owed in the checkpoint is dropped: the daemon keeps its own",
                self.session.run,
            )

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
        if self._flight is None:
            return Mean(dict(self._sent), dict(self._sent))
        try:
            result = self._flight.land()
        except DaemonUnavailable as error:
            log.warning("%s: no average this time: %s", self._owner.session.run, error)
            return Mean(dict(self._sent), dict(self._sent))
        except TrainerError as error:
            if error.reason not in PASSING:
                raise
            return Mean(dict(self._sent), dict(self._sent))
        return self._owner.finished(result, self._sent, self._weight)
