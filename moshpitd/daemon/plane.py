"""What the parts of the data plane share that are not averages. One rule: plain references, made
once when the links are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moshpitd.core.events import Event
from moshpitd.daemon.intake import Intake
from moshpitd.daemon.ongoing import Ongoing
from moshpitd.daemon.pacing import Pacer
from moshpitd.daemon.pulse import Pulse


class LinkTo(Protocol):
    """Have a link to a member: the exchange's own."""

    def __call__(
        self, run: Ongoing, peer_id: str, addresses: tuple[str, ...], *, dials: bool
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Plane:
    """`post` and `drop` may be called from any thread; `submit` runs a task in a pool."""

    intake: Intake
    pacer: Pacer
    pulse: Pulse
    link: LinkTo
    submit: Callable[[Callable[[], None]], None]
    post: Callable[[str, Event], None]
    drop: Callable[[str], None]
    timed: Callable[[str, str, float], None]
    run: Callable[[str], Ongoing]
