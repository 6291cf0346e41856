"""What a training algorithm needs of a swarm, as Protocols. One rule: an algorithm knows names,
values and weights, and never a rank: who takes part is told with every answer.

Four families, so that a swarm may offer some and not all (`require_...` says which is missing): the
group average, the exchange with neighbours (in rounds, or pair by pair), a parameter store, and
memory that the trainers of one node share.
`client.swarm` offers all on real daemons, `testing.ArithmeticSwarm` all in one process.

Every primitive is opened by a name that all trainers share (on daemons it is a run, `RUN.NAME`) and
takes mappings name -> tensor of one set of names, shapes and dtypes for its whole life. Floating
tensors are averaged, integers and bools take the maximum, as everywhere here. What is handed in is
not changed; what comes back belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from moshpitd.errors import ConfigError
from moshpitd.tensors.rules.asysg import BlockUpdate

Tensors = Mapping[str, Tensor]
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """A round on its way while the trainer goes on. One at a time for each primitive."""

    @property
    def done(self) -> bool:
        """Whether `land` would return at once."""
        ...

    def land(self) -> R_co:
        """Wait for it. To be called once."""
        ...


@dataclass(frozen=True, slots=True)
class Coding:
    """How values travel. `codec` is a name of `tensors.codecs`, `result` the codec of what comes
    back (the same one if empty). With `feedback` the error of either is kept where it was made and
    added to what goes next; it is part of the primitive's `state_dict`. `own`: the algorithm reads
    `Mean.own`, so it must be what was decoded."""

    codec: str = "float32"
    result: str = ""
    feedback: bool = False
    own: bool = False

    @property
    def back(self) -> str:
        return self.result or self.codec


EXACT = Coding()


@dataclass(frozen=True, slots=True)
class Mean:
    """One group average. Invariant: the tensors named in `missing` hold what was handed in.

    `own` is what the others decoded of this trainer's contribution: algorithms that learn from
    their own messages (DIANA) must use these bits and not what they meant to say. `contributors`
    are the peers whose values are inside, empty when there was no average at all.
    """

    tensors: dict[str, Tensor]
    own: dict[str, Tensor]
    contributors: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    excluded: bool = False
    """Others averaged without us: what they hold now is not what we hold."""

    @property
    def whole(self) -> bool:
        """Every tensor has a result that all members share, as far as can be known here."""
        return bool(self.contributors) and not self.missing and not self.excluded


class GroupAverage(Protocol):
    """sum_i w_i x_i / sum_i w_i over the group, equal bits on all members."""

    def average(self, tensors: Tensors, *, weight: int = 1) -> Mean:
        """Wait for the group and average with it. Weight 0 receives and does not count.

        Never raises for what peers or the daemon did: then `contributors` is empty and `tensors`
        are the trainer's own.
        """
        ...

    def begin(self, tensors: Tensors, *, weight: int = 1) -> Pending[Mean]:
        """The same without waiting: the contribution is taken now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the codec's error feedback still owes, and nothing else."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Averages(Protocol):
    """A swarm with group averages."""

    def averages(self, name: str, *, like: Tensors, coding: Coding = EXACT) -> GroupAverage:
        """Open one. `like` says names, shapes and dtypes; its values are not looked at."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """What one neighbour sent in this round, and the entry W_ij of the mixing matrix it has."""

    peer: str
    share: float
    tensors: dict[str, Tensor]
    mass: float = 1.0
    sequence: int = 0
    """How many messages this peer had sent before, counted from 0: a gap means a lost one."""
    full: dict[str, Tensor] | None = None
    """What the messages before this one add up to, for whoever missed some."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One round with the neighbours: row i of the mixing matrix, as it came to be.

    A share that could not be delivered stays with its sender, so `own_share` is what this peer
    keeps; on undirected graphs an edge counts in both directions or in none. `own` is what the
    neighbours decoded of this peer's message. `unheard` are those that the topology names and that
    this peer did not get a message from, or that did not get its own.
    """

    own_share: float
    own: dict[str, Tensor]
    messages: tuple[Message, ...] = ()
    unheard: tuple[str, ...] = ()


class NeighbourExchange(Protocol):
    """Synchronous: round t of all peers is one mixing W_t of the topology."""

    def exchange(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> Exchanged:
        """Send `tensors` to this round's neighbours and wait for theirs. `mass` travels beside
        them, uncoded (push-sum). Where messages are differences, `full` is what those before
        add up to: neighbours that are not named in `knows` get it as well, lossless."""
        ...

    def begin(
        self,
        tensors: Tensors,
        *,
        mass: float = 1.0,
        full: Tensors | None = None,
        knows: Collection[str] = (),
    ) -> Pending[Exchanged]:
        """The same without waiting."""
        ...

    def close(self) -> None: ...


class Meetings(Protocol):
    """Asynchronous pairs. The parameters live here, so that an average of two and a local update
    are each atomic, in any order."""

    def start(self, tensors: Tensors) -> None:
        """Put the parameters there; once, before anything else."""
        ...

    def add(self, update: Tensors) -> dict[str, Tensor]:
        """x += update; returns x, which holds all averages that others began meanwhile."""
        ...

    def meet(self) -> str:
        """If this peer is an active one: x_i, x_j <- (x_i + x_j) / 2 with one passive neighbour.
        Returns its name; empty where there is none to meet."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Neighbourhood(Protocol):
    """A swarm in which peers have neighbours. `topology` is a name of core/topologies."""

    def neighbours(
        self, name: str, *, like: Tensors, topology: str, coding: Coding = EXACT
    ) -> NeighbourExchange: ...

    def meetings(self, name: str, *, like: Tensors, topology: str) -> Meetings: ...


@dataclass(frozen=True, slots=True)
class Pulled:
    """A consistent snapshot of the store, and the version that it is."""

    tensors: dict[str, Tensor]
    version: int


class ParameterStore(Protocol):
    """Parameters that belong to nobody. Invariant: no gradient is applied more than the bound's
    versions after the one that it was read at."""

    def pull(self) -> Pulled:
        """Waits while the bound says so (`block`)."""
        ...

    def push(self, gradient: Tensors, *, version: int) -> bool:
        """x <- x - gamma sum of the batch's gradients. False: too old, pull again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """M gradients per update, staleness at most T, and what happens at the bound: a gradient that
    is too old is refused, or nobody gets so far ahead (`block`)."""

    gamma: float
    batch: int = 1
    max_staleness: int = 0
    block: bool = False


@runtime_checkable
class Stores(Protocol):
    def store(self, name: str, *, start: Tensors, options: StoreOptions) -> ParameterStore:
        """Open one; whoever opens it first says what it holds at version 0."""
        ...


class SharedParameters(Protocol):
    """Parameters in memory that all trainers of one node read and write without a lock. Invariant:
    every element holds what somebody wrote there, and nothing more is promised."""

    def read(self, into: Tensors) -> None:
        """Copy them into these tensors. Any of the writes that are under way may be missing."""
        ...

    def add(self, writes: Mapping[str, BlockUpdate]) -> None:
        """x[name].flatten()[start : start + len] += delta, in place, for every tensor named."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Memories(Protocol):
    def shared(self, name: str, *, start: Tensors) -> SharedParameters:
        """Open one; whoever of the node opens it first says what it holds."""
        ...


Swarm = Averages | Neighbourhood | Stores | Memories


def require_averages(swarm: object, algorithm: str) -> Averages:
    if not isinstance(swarm, Averages):
        raise _missing(swarm, algorithm, "group averages")
    return swarm


def require_neighbours(swarm: object, algorithm: str) -> Neighbourhood:
    if not isinstance(swarm, Neighbourhood):
        raise _missing(swarm, algorithm, "an exchange with neighbours")
    return swarm


def require_stores(swarm: object, algorithm: str) -> Stores:
    if not isinstance(swarm, Stores):
        raise _missing(swarm, algorithm, "a parameter store")
    return swarm


def require_memories(swarm: object, algorithm: str) -> Memories:
    if not isinstance(swarm, Memories):
        raise _missing(swarm, algorithm, "memory that the trainers of a node share")
    return swarm


def _missing(swarm: object, algorithm: str, primitive: str) -> ConfigError:
    return ConfigError(
        f"{algorithm} needs {primitive}, which {type(swarm).__name__} does not offer",
        key="algorithm",
        expected="another algorithm, or another swarm",
    )
