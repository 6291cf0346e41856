"""One message to one peer, acknowledged: p2pd's unary calls with our names for what can go wrong.

One rule: `send` returns only after the receiver's callback has taken the message, and raises only
TransportErrors. A message that was reported undelivered may still have arrived; receivers drop
repetitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from hivemind.p2p import P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from moshpitd.errors import ConfigError, Oversized, RemoteProtocolError, Unreachable
from moshpitd.net import wire
from moshpitd.net.bootstrap import BootstrapAddress, Status, peer_id_of, read_failure
from moshpitd.net.identity import is_peer_id
from moshpitd.net.p2pd import P2pd

log = logging.getLogger(__name__)

# The protocol's name at p2pd; another version is another name, so old and new never misread each
# other.
MESSAGE_HANDLER = "/moshpitd/control/1"
MESSAGE_BYTES_MAX = wire.MESSAGE_BYTES_MAX
# Many times a round trip through a relay; the core has deadlines of its own below it.
SEND_TIMEOUT_S = 5.0

# on_message(peer_id, payload), plain or async; its return acknowledges the message.
OnMessage: TypeAlias = Callable[[str, bytes], Awaitable[None] | None]


class Messenger:
    """Both ends. `live` returns the running p2pd or raises Unreachable; `addresses_of` asks the
    directory for the control addresses of a peer that p2pd's own routing does not find."""

    def __init__(
        self,
        live: Callable[[], P2pd],
        addresses_of: Callable[[str], Awaitable[tuple[str, ...]]],
        on_message: OnMessage,
    ) -> None:
        self._live = live
        self._addresses_of = addresses_of
        self._on_message = on_message

    async def send(self, peer_id: str, payload: bytes, *, timeout_s: float) -> None:
        """Return when the peer's callback has taken the message. Raises Oversized, or Unreachable
        with the cause."""
        if len(payload) > MESSAGE_BYTES_MAX:
            raise Oversized(
                f"message of {len(payload)} bytes to {peer_id}, "
                f"at most {MESSAGE_BYTES_MAX} may be sent"
            )
        if not is_peer_id(peer_id):
            raise Unreachable(f"{peer_id[:80]!r} is no PeerID")
        try:
            async with asyncio.timeout(timeout_s):
                await self._deliver(peer_id, payload)
        except TimeoutError:
            raise Unreachable(f"{peer_id}: no answer within {timeout_s:g} s") from None
        except P2PHandlerError as error:
            raise Unreachable(f"{peer_id}: the peer could not take it: {error}") from None
        # p2pd's own errors, and any broken pipe to p2pd itself.
        except (P2PDaemonError, OSError, EOFError) as error:
            status, detail = read_failure(str(error))
            words = f"{status} ({detail})" if detail else str(status)
            raise Unreachable(f"{peer_id}: {words}") from None

    async def receive(self, payload: bytes, sender: Any) -> bytes:
        """Called by p2pd's client for every message; the empty answer is the acknowledgement."""
        peer_id = sender.to_base58()
        if len(payload) > MESSAGE_BYTES_MAX:
            raise RemoteProtocolError(f"message of {len(payload)} bytes", peer=peer_id)
        try:
            result = self._on_message(peer_id, payload)
            if inspect.isawaitable(result):
                await result
        except RemoteProtocolError:
            raise  # the sender is told; the callback has counted it
        except Exception:
            log.exception("a message from %s could not be handled", peer_id)
            raise
        return b""

    async def _deliver(self, peer_id: str, payload: bytes) -> None:
        target = peer_id_of(peer_id)
        try:
            await self._live().client.call_unary_handler(target, MESSAGE_HANDLER, payload)
        except P2PDaemonError as error:
            if isinstance(error, P2PHandlerError) or (
                read_failure(str(error))[0] is not Status.UNKNOWN
            ):
                raise
            # p2pd's routing does not know where that peer is; its own record may.
            multiaddrs = await self._addresses_of(peer_id)
            if not multiaddrs:
                raise
            await self._connect(peer_id, multiaddrs)
            await self._live().client.call_unary_handler(target, MESSAGE_HANDLER, payload)

    async def _connect(self, peer_id: str, multiaddrs: tuple[str, ...]) -> None:
        known = []
        for text in multiaddrs:
            with contextlib.suppress(ConfigError):
                address = BootstrapAddress.parse(text)
                if address.peer_id == peer_id:
                    known.append(address.transport)
        await self._live().client.connect(peer_id_of(peer_id), known)
