"""Gradients on their way while backward still runs. One rule: a bucket's transfer starts in the
hook of the last gradient that backward adds to it, and is waited for where the optimizer needs it.

A session holds one mapped bucket and has one round at a time, so each gradient bucket is a session
with a run of its own, `RUN.grad0`, `RUN.grad1`, ...: several can then be in flight with nothing
added to the daemon. What that costs per bucket: one more run in the directory (a record, and a
matchmaking exchange a round, some ten small messages between warm peers), a donor copy of the
bucket in the daemon's memory, and a thread while it is in flight. Hence few and large ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from moshpitd.client.flight import Flight
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.errors import DaemonUnavailable, TrainerError

log = logging.getLogger("moshpitd.client")

BUCKET_BYTES = 25 << 20  # as in torch's DDP: large enough that a round's latency is noise beside it
MAX_BUCKETS = 16
"""A daemon takes 64 runs, and sixteen transfers at once fill any wire: beyond that they grow."""


class Hook(Protocol):
    """What torch gives for a registered hook."""

    def remove(self) -> None: ...


class GradientBucket:
    """The gradients of some parameters. Invariant: while `flight` is in the air nobody writes to
    these gradients, and after `land` they are averages, or what they were."""

    def __init__(self, run: str, parameters: Mapping[str, nn.Parameter], socket: str) -> None:
        self._parameters = dict(parameters)
        self._started = False
        self.session = Session(run, self._gradients, socket=socket)
        self.flight: Flight | None = None
        self.launched = False
        self._waiting = set(self._parameters)
        self._error: Exception | None = None

    def start(self) -> None:
        """Attach. All peers begin with zeros, which makes them one lineage: gradients are nobody's
        to inherit, and a newcomer counts from its first round on."""
        self.session.start(sync=True)
        self._started = True

    def hook(self, begun: Callable[[], None], full: Callable[[GradientBucket], None]) -> list[Hook]:
        """`begun` hears of every gradient that is about to count, `full` of the last one; returns
        what to remove when the optimizer goes."""

        def arrived(name: str, _: Tensor) -> None:
            if self.launched:
                raise TrainerError(
                    f"a second backward reached {name!r} before the first one's gradients were "
                    "used, expected step(), or no_sync() around the backwards that only add up"
                )
            begun()
            self._waiting.discard(name)
            if not self._waiting:
                full(self)

        return [
            parameter.register_post_accumulate_grad_hook(partial(arrived, name))
            for name, parameter in self._parameters.items()
        ]

    def expect_all(self) -> None:
        """Backward is over. The next one begins anew, whatever part of the model this one used."""
        self._waiting = set(self._parameters)

    def launch(self, weight: int, **options: object) -> None:
        """Copy the gradients out and begin their round. A parameter that had no part in the loss
        contributes zeros, and gets a gradient if it had one elsewhere. Raises nothing: `land`
        does."""
        self.launched = True
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        try:
            self.flight = self.session.begin(
                weight,
                overlap=False,
                snapshots=False,
                **options,  # type: ignore[arg-type]
            )
        except (DaemonUnavailable, TrainerError) as error:
            self._error = error

    def land(self) -> Result:
        """Wait; the gradients are the averages then. Raises what the round raised."""
        error, flight = self._error, self.flight
        try:
            if error is not None:
                raise error
            assert flight is not None  # launched, and without an error
            return flight.land()
        finally:
            if flight is None or flight.done:  # else Ctrl-C ended the wait
                self.reset()

    def reset(self) -> None:
        """Ready for the next backward."""
        self.flight, self._error, self.launched = None, None, False
        self.expect_all()

    def close(self) -> None:
        self.session.close()

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        return {
            name: gradient
            if gradient is not None and self._started
            else torch.zeros_like(self._parameters[name])
            for name, gradient in found.items()
        }


def in_backward_order(
    named: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int
) -> list[dict[str, nn.Parameter]]:
    """Cut parameters that learn into buckets of about `bucket_bytes`, the last of the model first,
    because backward reaches them in about that order. A tied parameter appears once."""
    found = [(name, p) for name, p in named if p.requires_grad]
    total = sum(p.numel() * p.element_size() for _, p in found)
    room = max(bucket_bytes, -(-total // MAX_BUCKETS))
    buckets: list[dict[str, nn.Parameter]] = []
    size = room
    for name, parameter in reversed(found):
        if size >= room:
            buckets.append({})
            size = 0
        buckets[-1][name] = parameter
        size += parameter.numel() * parameter.element_size()
    return buckets
