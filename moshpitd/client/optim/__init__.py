"""torch.optim shells: `from moshpitd.client.optim import LocalSGD` averages parameters through a
session; `by_name("onebit-adam", model.parameters(), session)` makes any other algorithm."""

from __future__ import annotations

from moshpitd.client.optim.gradient_averaging import GradientAveraging
from moshpitd.client.optim.local_sgd import LocalSGD, session_state
from moshpitd.client.optim.registry import ALGORITHMS, by_name

__all__ = ["ALGORITHMS", "GradientAveraging", "LocalSGD", "by_name", "session_state"]
