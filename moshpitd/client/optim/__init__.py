"""torch.optim shells over the averaging session: `from moshpitd.client.optim import LocalSGD`."""

from __future__ import annotations

from moshpitd.client.optim.gradient_averaging import GradientAveraging
from moshpitd.client.optim.local_sgd import LocalSGD, session_state

__all__ = ["GradientAveraging", "LocalSGD", "session_state"]
