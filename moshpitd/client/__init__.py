"""What a trainer imports: `from moshpitd.client import attach` and `from moshpitd.client.optim
import LocalSGD`."""

from __future__ import annotations

from moshpitd.client.result import PartialAverage, Progress, Result
from moshpitd.client.session import Session, attach
from moshpitd.errors import DaemonUnavailable, TrainerError

__all__ = [
    "DaemonUnavailable",
    "PartialAverage",
    "Progress",
    "Result",
    "Session",
    "TrainerError",
    "attach",
]
