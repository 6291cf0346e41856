"""Asynchronous SGD, AsySG-con and AsySG-incon (arXiv 1506.08272).

One rule: no gradient is applied more than T versions after the one that it was read at. `con`: a
parameter store over the network, consistent snapshots with version numbers; each update sums at
least M gradients: x_{k+1} = x_k - gamma sum_m g_m(x_{k - tau}). `incon`: memory shared by the
trainers of one node, one block of coordinates written per update, read without a lock.

Two ways to keep the bound. REFUSE: a gradient that is too old is thrown away, its worker pulls
again; nobody waits. BLOCK: no gradient is wasted; the store puts off an update, or a pull, as long
as some worker's gradient could no longer be applied in time. T = 0 is mini-batch SGD with step
gamma M on the mean.

Trap: in shared memory single stores are atomic, increments are not (torch's add_ reads, adds and
writes): updates can be lost, so tests bound the effect instead of asking for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError
from moshpitd.tensors.rules.common import weighted_sum


class Bound(Enum):
    """What happens when the staleness bound is in the way."""

    REFUSE = "refuse"
    BLOCK = "block"


class Pushed(Enum):
    """What became of a gradient."""

    TAKEN = "taken"  # waits for others, or was applied
    TOO_OLD = "too_old"  # staleness above T: pull again
    NOT_PULLED = "not_pulled"  # BLOCK only: this worker has nothing outstanding at that version


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gradient that is in the store but not applied. version: what its worker had read."""

    worker: str
    version: int
    grad: Tensor


@dataclass(frozen=True, slots=True)
class Store:
    """The parameters and what is on its way to them.

    Invariants: version = number of updates applied; every gradient in an update has version - read
    <= max_staleness; a worker has at most one pull outstanding. x: any shape, floating dtype.
    """

    x: Tensor
    gamma: float
    batch: int = 1
    max_staleness: int = 0
    bound: Bound = Bound.REFUSE
    version: int = 0
    pulled: tuple[tuple[str, int], ...] = ()  # (worker, version read), BLOCK only
    waiting: tuple[Waiting, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"updates of {self.batch} gradients", key="M", expected="1 or more")
        if self.max_staleness < 0:
            raise ConfigError(
                f"a staleness bound of {self.max_staleness}", key="T", expected="0 or more"
            )


@dataclass(frozen=True, slots=True)
class Update:
    """One applied update, for logs and staleness histograms: tau of each gradient in it."""

    version: int
    staleness: tuple[int, ...]


def update(x: Tensor, grads: Sequence[Tensor], *, gamma: float) -> Tensor:
    """x - gamma sum_m g_m: the sum, not the mean, in the order given."""
    return x - gamma * weighted_sum(grads, [1.0] * len(grads))


def pull(store: Store, worker: str) -> tuple[int | None, Store]:
    """(version read, store); the worker's snapshot is `store.x`. None: ask again after an update.

    REFUSE never says None. BLOCK does when this gradient and those outstanding could not all be
    applied within T versions (more than M (T + 1) of them). A second pull replaces the first.
    """
    if store.bound is Bound.REFUSE:
        return store.version, store
    store = forget(store, worker, drop_waiting=False)
    outstanding = [version for _, version in store.pulled]
    outstanding += [item.version for item in store.waiting]
    if not _in_time(store, [*outstanding, store.version], first=store.version):
        return None, store
    return store.version, replace(store, pulled=(*store.pulled, (worker, store.version)))


def push(
    store: Store, worker: str, grad: Tensor, *, version: int
) -> tuple[Pushed, Store, list[Update]]:
    """Put a gradient into the store and apply all updates that are now possible.

    `version` is what the worker read. A version from the future is our own mistake
    (LocalProtocolError): check a remote worker's claim before calling.
    """
    if version > store.version:
        raise LocalProtocolError(
            f"gradient of {worker} read at version {version}, expected at most {store.version}"
        )
    if store.version - version > store.max_staleness:
        return Pushed.TOO_OLD, forget(store, worker, drop_waiting=False), []
    if store.bound is Bound.BLOCK and (worker, version) not in store.pulled:
        return Pushed.NOT_PULLED, store, []
    store = forget(store, worker, drop_waiting=False)
    store = replace(store, waiting=(*store.waiting, Waiting(worker, version, grad)))
    store, updates = advance(store)
    return Pushed.TAKEN, store, updates


def forget(store: Store, worker: str, *, drop_waiting: bool = True) -> Store:
    """A worker is gone: nobody waits for its pull any more.

    Call `advance` afterwards, others may be free to go on; with fewer than M workers left, lower
    `batch` first (dataclasses.replace), or no update comes together. `drop_waiting` also takes back
    gradients that it left; keep them (False) if they arrived whole.
    """
    pulled = tuple(item for item in store.pulled if item[0] != worker)
    waiting = store.waiting
    if drop_waiting:
        waiting = tuple(item for item in waiting if item.worker != worker)
    return replace(store, pulled=pulled, waiting=waiting)


def advance(store: Store) -> tuple[Store, list[Update]]:
    """Apply batches of M gradients, oldest first, as long as the bound allows.

    A batch is larger than M only where M was lowered with gradients waiting (the workers became
    fewer) and leaving some for the next update would make them too old.
    """
    updates = []
    while size := _next_batch(store):
        ordered = sorted(store.waiting, key=lambda item: item.version)  # stable: arrival order
        chosen, rest = ordered[:size], ordered[size:]
        updates.append(
            Update(store.version + 1, tuple(store.version - item.version for item in chosen))
        )
        store = replace(
            store,
            x=update(store.x, [item.grad for item in chosen], gamma=store.gamma),
            version=store.version + 1,
            waiting=tuple(rest),
        )
    return store, updates


def _next_batch(store: Store) -> int:
    """How many of the oldest waiting gradients the next update takes; 0 while it has to wait."""
    pulled = [version for _, version in store.pulled]
    waiting = sorted(item.version for item in store.waiting)
    for size in range(store.batch, len(waiting) + 1):
        if _in_time(store, [*pulled, *waiting[size:]], first=store.version + 1):
            return size
    return 0


def _in_time(store: Store, versions: Sequence[int], *, first: int) -> bool:
    """Whether gradients read at `versions` can all be applied within T, M per update, from the
    update at version `first` on.

    The i-th oldest goes into update first + i // M at the earliest, so this is the test of earliest
    deadlines: passing it, the oldest-first order never misses one.
    """
    return all(
        first + index // store.batch - version <= store.max_staleness
        for index, version in enumerate(sorted(versions))
    )


def theory_gamma(*, gap: float, batch: int, smoothness: float, steps: int, sigma: float) -> float:
    """sqrt(f0 / (M L K sigma^2)), f0 = f(x0) - f* (corollary for con)."""
    return float((gap / (batch * smoothness * steps * sigma**2)) ** 0.5)


def steps_needed(
    *, gap: float, batch: int, smoothness: float, staleness: int, sigma: float
) -> float:
    """K >= 4 M L f0 (T+1)^2 / sigma^2: from there on T of the order of sqrt(K) costs nothing, and
    mean ||grad||^2 <= 4 sigma sqrt(f0 L / (M K))."""
    return 4 * batch * smoothness * gap * (staleness + 1) ** 2 / sigma**2


# ---- incon: one node's shared memory.


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """A write of one update: x[start : start + len] += delta. `incon` of the paper: one element."""

    start: int
    delta: Tensor


def block_update(grads: Sequence[Tensor], *, start: int, stop: int, gamma: float) -> BlockUpdate:
    """-gamma sum_m g_m on the elements [start, stop) of 1-D gradients taken at a torn read x^."""
    total = weighted_sum([grad[start:stop] for grad in grads], [1.0] * len(grads))
    return BlockUpdate(start, -gamma * total)


def apply_block(x: Tensor, write: BlockUpdate) -> Tensor:
    """x after a write, as a new 1-D tensor (the real buffer is written in place by its owner)."""
    moved = x.clone()
    moved[write.start : write.start + write.delta.numel()] += write.delta
    return moved


def torn_read(x: Tensor, missing: Sequence[BlockUpdate]) -> Tensor:
    """x^ = x_k - sum over j in J(k) of (x_{j+1} - x_j): what a reader without a lock may have seen.

    `missing` are writes among the last T that the reader missed, in any subset. None missing: a
    consistent read, and the algorithm is stochastic coordinate descent.
    """
    seen = x.clone()
    for write in missing:
        seen[write.start : write.start + write.delta.numel()] -= write.delta
    return seen


def con_bytes(numel: int) -> int:
    """Payload per gradient, float32: 4 d down and 4 d up."""
    return 8 * numel
