"""Whether other peers can dial this node's bulk links, proved by asking them to.

One rule: only what others found counts. One proof is enough, silence proves nothing, and a node
that nobody reaches says so with each address and its cause, in `status` and in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from moshpitd.daemon.logs import log_event

log = logging.getLogger(__name__)

JOINED_POLL_S = 1.0
AGAIN_S = 30.0
"""Until somebody has reached us: a firewall rule or a forwarded port takes the operator minutes."""
RECHECK_S = 600.0
"""After a proof: leases of forwarded ports and addresses of clouds change, but not by the minute.
"""


class Finding(Protocol):
    """What one peer found at one address; `cause` is empty when it reached us there, `tried` false
    when it had a reason not to dial."""

    @property
    def peer_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def tried(self) -> bool: ...


class Reachability:
    """Invariant: `warnings()` tells of the last time that anybody answered."""

    def __init__(
        self, ask: Callable[[], Awaitable[Sequence[Finding]]], *, joined: Callable[[], bool]
    ) -> None:
        self._ask = ask
        self._joined = joined
        self._warnings: list[str] = []

    def warnings(self) -> list[str]:
        return list(self._warnings)

    async def watch(self) -> None:
        """Ask as soon as there is somebody, and again from time to time, until cancelled."""
        while True:
            if not self._joined():
                await asyncio.sleep(JOINED_POLL_S)
                continue
            await self.check()
            await asyncio.sleep(AGAIN_S if self._warnings else RECHECK_S)

    async def check(self) -> None:
        """Ask once."""
        try:
            found = [one for one in await self._ask() if one.tried]
        except Exception as error:
            # p2pd may be gone at any moment; whoever restarts it says so.
            log.debug("asking others to dial us failed: %s", error)
            return
        if not found:
            return
        reached = any(not one.cause for one in found)
        causes = dict.fromkeys(one.cause for one in found if one.cause)  # "address: reason" each
        warnings = [] if reached else [f"no peer could dial our links: {'; '.join(causes)}"]
        if warnings != self._warnings:
            self._warnings = warnings
            for warning in warnings:
                log_event(log, logging.WARNING, "address", warning=warning)
            if not warnings:
                log_event(log, logging.INFO, "links can be dialled", peer=found[0].peer_id)
