"""What the data plane holds of one run. One rule: plain state; `exchange` guards and moves it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from moshpitd.daemon.accumulate import Round
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import Choices
from moshpitd.daemon.transfer import Snapshots
from moshpitd.net.frames import RUN_BYTES
from moshpitd.tensors.deviation import Owed
from moshpitd.tensors.feedback import Residuals
from moshpitd.tensors.layout import Layout


def run_hash(run: str) -> bytes:
    """What names a run in a frame's header."""
    return hashlib.blake2b(run.encode(), digest_size=RUN_BYTES).digest()


@dataclass(slots=True)
class Ongoing:
    """One run: its layout, its trainers' buckets, and what is open in it."""

    name: str
    layout: Layout
    snapshots: Snapshots
    residuals: Residuals | None  # what codecs took away; None: every average rounds for good
    choices: Choices | None = None  # how contributions travel, where the run's codec is "auto"
    owed: Owed = field(default_factory=Owed)  # how much the others' may be, for audits
    buckets: dict[str, Bucket] = field(default_factory=dict)
    rounds: dict[bytes, Round] = field(default_factory=dict)
    leaving: list[Bucket] = field(default_factory=list)  # their trainers are gone, a round sends
