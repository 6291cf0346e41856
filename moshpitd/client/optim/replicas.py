"""Trainers that must hold equal state: how a difference is noticed and healed. One rule: whoever
may have missed an update says so, and counts nothing until it has been made equal.

Every `every` updates all trainers compare (version, digest of the state): one average of integers,
which take the maximum, of x and of -x, so that each learns whether all are equal. Only if not, they
learn who is right: those that missed nothing at the highest version; of several digests among
these, the one that more than half of them hold. Then the whole state is averaged once, lossless,
and only the right ones count: all hold the same bits again.

An update is missed when its average was partial in a way that others need not share: no result for
a tensor here, nobody met, or others averaged without us. Every update's average also carries the
version that it is, of those who missed none (an integer, so the members learn the highest): who is
behind has missed some, and counts on from there, in step with the others. Who meets nobody although
it had company waits where the others compare. Nothing heals a wrong state that is equal on most:
that is training.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from moshpitd.client.checks import check_weight
from moshpitd.client.optim.distributed import Gradients, SwarmOptimizer
from moshpitd.client.primitives import (
    EXACT,
    Averages,
    Coding,
    GroupAverage,
    Mean,
    Pending,
    require_averages,
)
from moshpitd.errors import TrainerError
from moshpitd.tensors.hashing import digest

log = logging.getLogger("moshpitd.client")

CHECK_EVERY = 50
"""Updates between two comparisons. At a hundred bytes each they cost latency only, and this bounds
what a missed update can grow to."""


VERSION = "version"  # the name of the integer that travels with every update


class NothingToApplyError(Exception):
    """This trainer's gradients overflowed, and nobody else's were there. Never leaves a step."""


class Replicated(SwarmOptimizer):
    """A SwarmOptimizer whose trainers hold equal parameters and equal state (`replicated_state`).

    `version` counts applied updates; `current` is whether this trainer knows of none that it
    missed; `resyncs` counts how often it was brought up to date. A trainer that joins late calls
    `catch_up()` until it says True.
    """

    replicated = True

    def __init__(
        self,
        params: Any,
        swarm: object,
        defaults: dict[str, Any],
        *,
        check_every: int = CHECK_EVERY,
    ) -> None:
        if check_every < 1:
            raise TrainerError(f"check_every {check_every}, expected at least 1 update")
        super().__init__(params, defaults)
        self._swarm: Averages = require_averages(swarm, self.algorithm)
        self._check_every = check_every
        self._open: dict[str, GroupAverage] = {}
        self._owed: dict[str, Any] = {}  # error feedback from a checkpoint, until it is opened
        self.samples: float | SupportsIndex = 1
        """What the next step counts in averages, for example the batch's size."""
        self.version = 0
        self.current = True
        self.resyncs = 0
        self.missed = 0
        self._behind = 0  # by how many updates, as this one's averages say
        self._jumped = 0  # what all such corrections of `version` add up to
        self._alone = False  # an average of this update had nobody in it
        self._company = False  # there were others, and nobody has met none since

    # -- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _update(self, gradients: Gradients) -> bool:
        """One update. False: it was missed, or not made in the way the others made it."""

    def replicated_state(self) -> dict[str, Tensor]:
        """Live tensors that are equal on all trainers; parameters first. Integers among them take
        the maximum of the right ones, so counters may be in it."""
        return {f"x.{name}": value for name, value in self.parameters().items()}

    def _restored(self) -> None:
        """The replicated state was replaced, by another one."""

    def average(
        self, name: str, tensors: Mapping[str, Tensor], *, coding: Coding, weight: int
    ) -> Mean:
        """A group average of this algorithm, opened at its first use."""
        return self.begin(name, tensors, coding=coding, weight=weight).land()

    def begin(
        self, name: str, tensors: Mapping[str, Tensor], *, coding: Coding, weight: int
    ) -> OfAnUpdate:
        """The same without waiting: one of a name at a time."""
        sent = {**tensors, VERSION: torch.tensor([self._claim])}
        counted = self.version - self._jumped
        return OfAnUpdate(self, self._begin(name, sent, coding, weight), weight, counted)

    def _begin(
        self, name: str, tensors: Mapping[str, Tensor], coding: Coding, weight: int
    ) -> Pending[Mean]:
        return self._opened(name, tensors, coding).begin(tensors, weight=weight)

    def _opened(self, name: str, like: Mapping[str, Tensor], coding: Coding) -> GroupAverage:
        if name not in self._open:
            self._open[name] = self._swarm.averages(
                f"{self.algorithm}.{name}", like=like, coding=coding
            )
            if name in self._owed:
                self._open[name].load_state_dict(self._owed.pop(name))
        return self._open[name]

    def choices(self) -> dict[str, Coding]:
        """Averages of tensors like the parameters of which an update makes one or another. Who
        joins opens them all at once: it would be late for each at its first use otherwise, and
        make its choices behind the others."""
        return {}

    def landed(self, found: Mean, *, weight: int, counted: int) -> Mean:
        """For `OfAnUpdate`: note what an average says of the others, and take that out."""
        if not weight and not found.contributors:
            raise NothingToApplyError
        tensors = dict(found.tensors)
        highest = int(tensors.pop(VERSION))
        if not found.contributors:
            self._alone = True
        elif VERSION not in found.missing and highest:
            # Who is not current goes along with those who are, also backwards: on its own it may
            # have counted what nobody else did.
            # What was corrected since it began is not corrected again.
            lag = highest - 1 - (counted + self._jumped)
            if lag > 0 or not self.current:
                self._behind = lag
        self._company = self._company or len(found.contributors) > 1
        own = {name: values for name, values in found.own.items() if name != VERSION}
        return replace(found, tensors=tensors, own=own, missing=found.missing - {VERSION})

    def weight(self, gradients: Gradients) -> int:
        """What this trainer counts in an update: nothing without sound gradients."""
        return check_weight(self.samples) if gradients.sound else 0

    # -- a step -----------------------------------------------------------------------------------

    def _advance(self, gradients: Gradients) -> None:
        self._try_update(gradients)
        if self._compares() or (self._alone and self._company):
            self._company = False  # who finds nobody there either does not wait in every step
            self._compare()

    def _try_update(self, gradients: Gradients) -> None:
        self._behind, self._alone = 0, False
        try:
            good = self._update(gradients)
        except NothingToApplyError:
            good = True  # nobody had a sound gradient, so nobody moved
        if self._behind:
            log.warning("%s: %d updates behind at %d", self.algorithm, self._behind, self.version)
            good = False
            self._jump(self._behind)
        if not good:
            self.current = False
            self.missed += 1
        self.version += 1

    def _jump(self, updates: int) -> None:
        self.version += updates
        self._jumped += updates

    @property
    def _claim(self) -> int:
        """1 + version, or 0 from who may have missed an update."""
        return self.version + 1 if self.current else 0

    def _compares(self) -> bool:
        """Whether this update is one after which all compare."""
        return self.version % self._check_every == 0

    def catch_up(self) -> bool:
        """For a trainer that joins, or was away: wait for the others' next comparison and take
        their state. False: nobody came; call again."""
        self.current = False
        for name, coding in self.choices().items():
            self._opened(name, {**self.parameters(), VERSION: torch.tensor([0])}, coding)
        with torch.no_grad():
            return self._compare()

    def _compare(self) -> bool:
        """Whether anybody else was there."""
        state = self.replicated_state()
        mine = state_digest(state)
        claim = self._claim
        words = [claim, mine, mine if claim else 0, self.version]
        sent = torch.tensor([*words, *(-word for word in words)])
        found = self._begin("check", {"words": sent}, EXACT, 1).land()
        if len(found.contributors) < 2:
            return False
        self._company = True
        if not found.whole:
            # Nothing of ours is in it, or it did not get here: that the others are equal among
            # themselves, or that our own words are equal to our own, says nothing of us.
            self.current = False
            return True
        most, least = found.tensors["words"].chunk(2)
        if torch.equal(most, -least):
            self.current = True
            return True
        best, largest = int(most[0]), int(most[2])
        right = claim == best
        held = torch.tensor([float(right), float(right and mine == largest)])
        share = self._begin("vote", {"held": held}, EXACT, 1).land()
        if not share.whole:
            self.current = False
            return True
        among, largest_held = share.tensors["held"].tolist()
        if right and largest_held > 0:
            right = (mine == largest) == (2 * largest_held > among)
        self._replace(state, weight=1 if right else 0, version=best - 1 if best else int(most[3]))
        return True

    def _replace(self, state: dict[str, Tensor], *, weight: int, version: int) -> None:
        found = self._begin("state", state, EXACT, weight).land()
        if not found.whole:
            self.current = False
            return
        other = version != self.version
        for name, tensor in state.items():
            other = other or not torch.equal(tensor, found.tensors[name])
            tensor.copy_(found.tensors[name])
        if not weight:
            self.resyncs += 1
            log.warning("%s: state of the others loaded, version %d", self.algorithm, version)
        self._jump(version - self.version)
        self.current = True
        if other:
            self._restored()

    # -- checkpoints ------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        owed = {name: opened.state_dict() for name, opened in self._open.items()}
        return {"version": self.version, "current": self.current, "owed": {**self._owed, **owed}}

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        self.version, self.current = int(extra["version"]), bool(extra["current"])
        self._owed = dict(extra["owed"])
        for name, opened in self._open.items():
            opened.load_state_dict(self._owed.pop(name, {}))

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()


@dataclass(frozen=True, slots=True)
class OfAnUpdate:
    """An average of an update on its way: `client.primitives.Pending`."""

    owner: Replicated
    pending: Pending[Mean]
    weight: int
    counted: int  # the version of the update that it began in, without corrections

    @property
    def done(self) -> bool:
        return self.pending.done

    def land(self) -> Mean:
        return self.owner.landed(self.pending.land(), weight=self.weight, counted=self.counted)


def state_digest(state: Mapping[str, Tensor]) -> int:
    """63 bits over all tensors: equal bits, equal digest, and its negative is an int64 too. It
    finds accidents; who lies about it harms nobody's state but its own."""
    found = b"".join(
        digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        for tensor in state.values()
    )
    whole = digest(torch.frombuffer(bytearray(found), dtype=torch.uint8))
    return int.from_bytes(whole[:8], "big") >> 1
