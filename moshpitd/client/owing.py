"""A session whose error feedback can be saved and loaded. One rule: what the daemon owes travels
through the bucket, between rounds, where the elements that it belongs to lie.

Without this a trainer that goes on from a checkpoint, on a daemon that went on without it, would be
paid twice what was paid since, and on a new daemon lose what was owed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from moshpitd.client.keeper import Attachment
from moshpitd.client.rounds import Telling
from moshpitd.client.session import Session
from moshpitd.errors import TrainerError
from moshpitd.rpc.status import refusal
from moshpitd.rpc.stubs import messages
from moshpitd.tensors.owing import lossy_view

R = TypeVar("R")

SIDES = ("sender", "reducer")
BUSY_POLL_S = 0.05
OWING_TIMEOUT_S = 30.0
"""For a copy of one bucket, which takes a second for a billion elements."""


class OwingSession(Session):
    def residuals(self) -> dict[str, Tensor]:
        """Side ("sender", "reducer") -> flat float32 values in the order of the bucket; a side that
        owes nothing is left out. Errors as in `average`."""
        found: dict[str, Tensor] = {}
        with self._turn:
            self._settle()
            attachment = self._ready()
            bucket = attachment.bucket
            with Telling(self._keeper, attachment):
                for side in SIDES:
                    # The daemon writes into the bucket: its generation moves on, so that nobody
                    # takes what is there for the last result.
                    request = _request(attachment, side, bucket.fill_from(bucket.data[:0]))
                    reply = _patiently(self._calls.get_residuals, request)
                    if not reply.nothing:
                        found[side] = lossy_view(bucket.layout, bucket.data).clone()
        return found

    def owe(self, residuals: Mapping[str, Any]) -> None:
        """What `residuals` gave, in the place of what the daemon owes now. TrainerError for one of
        other tensors; nothing has changed then."""
        with self._turn:
            self._settle()
            attachment = self._ready()
            layout = attachment.bucket.layout
            data = torch.zeros(layout.nbytes, dtype=torch.uint8)
            for side in SIDES:
                _check(lossy_view(layout, data), residuals.get(side), f"{self.run}: {side}")
            with Telling(self._keeper, attachment):
                for side in SIDES:
                    values = residuals.get(side)
                    if values is not None:
                        lossy_view(layout, data).copy_(values)
                    request = _request(attachment, side, attachment.bucket.fill_from(data))
                    request.nothing = values is None
                    _patiently(self._calls.put_residuals, request)


def _request(attachment: Attachment, side: str, generation: int) -> messages.ResidualsRequest:
    return messages.ResidualsRequest(
        trainer=attachment.trainer, generation=generation, reducer=side == "reducer"
    )


def _patiently(call: Callable[[messages.ResidualsRequest, float], R], request: Any) -> R:
    """Another trainer of the node may be in a round, which is over in a moment."""
    until = time.monotonic() + OWING_TIMEOUT_S
    while True:
        try:
            return call(request, OWING_TIMEOUT_S)
        except TrainerError as error:
            if error.reason != "bucket_busy" or time.monotonic() > until:
                raise
            time.sleep(BUSY_POLL_S)


def _check(region: Tensor, values: Tensor | None, where: str) -> None:
    if values is not None and values.shape != region.shape:
        raise refusal(
            "schema_differs",
            f"{where} residual of {values.numel()} elements, expected {region.numel()}",
        )
