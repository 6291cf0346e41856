"""What all runs of a node stand on. One rule: a run knows nothing of its node but this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import Choice
from moshpitd.daemon.edges import EdgePlane
from moshpitd.tensors.feedback import Residuals
from moshpitd.tensors.layout import Layout


class Store(Protocol):
    """What a run needs of the exchange. The three marked calls block and run in a thread."""

    edges: EdgePlane | None

    def add_run(
        self, name: str, layout: Layout, codec: str, *, feedback: bool | None = None
    ) -> None: ...
    def remove_run(self, name: str) -> None: ...
    def add_bucket(self, name: str, trainer: str, bucket: Bucket) -> None: ...
    def remove_bucket(self, name: str, trainer: str) -> None: ...
    def initial_snapshot(self, name: str, trainer: str, version: int) -> bytes: ...  # blocks
    def examine(self, name: str, trainer: str) -> tuple[str | None, float]: ...  # blocks
    def set_state(self, name: str, state: bytes) -> None: ...  # blocks
    def state(self, name: str) -> bytes: ...
    def choices(self, name: str) -> Mapping[str, Choice]: ...
    def residuals(self, name: str, *, settle: bool = False) -> Residuals | None: ...


@dataclass(frozen=True, slots=True)
class Ground:
    """What all runs of a node stand on. `in_thread(function, *arguments)` runs what blocks."""

    exchange: Store
    codec: str
    feedback: bool | None  # None: as the settings say
    part_bytes: int | None  # None: by the size of the model
    buffers_dir: Path
    data_dir: Path
    max_trainers: int
    in_thread: Callable[..., Awaitable[Any]]
