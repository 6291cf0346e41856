"""Dial-back: another peer tries our bulk link addresses, because only others can prove that they
work.

One rule: a peer dials back only where the asker is connected from, seldom, and says nothing but
what it found. Otherwise any stranger could make this host knock at any door.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from moshpitd.errors import RemoteProtocolError, Unreachable
from moshpitd.net import wire
from moshpitd.net.p2pd import P2pd
from moshpitd.net.tls import Credentials, parse_address, probe

DIAL_BACK_HANDLER = "/moshpitd/dialback/1"
DIAL_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 15.0  # four addresses at 3 s each, and the way there
ADDRESSES_MAX = 4
AT_ONCE_MAX = 4
# One question per peer in this time; a daemon asks at start and when its addresses change.
PAUSE_S = 5.0
REMEMBERED_MAX = 1024
NOT_DIALLED = "not dialled"


@dataclass(frozen=True, slots=True)
class DialBackQuestion:
    """Please dial these addresses ("host:port") and prove that my PeerID answers."""

    addresses: tuple[str, ...] = field(metadata={"max": ADDRESSES_MAX})


@dataclass(frozen=True, slots=True)
class DialBackAnswer:
    """One entry per address asked for: empty if the asker answered there, else the cause."""

    causes: tuple[str, ...] = field(metadata={"max": ADDRESSES_MAX})


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """What one peer found at one of our addresses; `cause` is empty when it reached us."""

    peer_id: str
    address: str
    cause: str

    @property
    def reached(self) -> bool:
        return not self.cause

    @property
    def tried(self) -> bool:
        """False where the peer had a reason not to dial: that proves nothing."""
        return f": {NOT_DIALLED}" not in self.cause


class DialBack:
    """The answering side. `live` returns the running p2pd, which knows where peers come from."""

    def __init__(self, credentials: Credentials, live: Callable[[], P2pd]) -> None:
        self._credentials = credentials
        self._live = live
        self._running = 0
        self._asked: OrderedDict[str, float] = OrderedDict()

    async def receive(self, payload: bytes, sender: Any) -> bytes:
        """Called by p2pd's client for every question."""
        return await self.answer(sender.to_base58(), payload)

    async def answer(self, peer_id: str, payload: bytes) -> bytes:
        """Dial what the question names. Raises RemoteProtocolError for a bad question or a hasty
        one.
        """
        question = wire.unpack(DialBackQuestion, payload, peer=peer_id)
        now = time.monotonic()
        if now - self._asked.get(peer_id, -PAUSE_S) < PAUSE_S or self._running >= AT_ONCE_MAX:
            raise RemoteProtocolError("dial-back asked too often", peer=peer_id)
        self._asked[peer_id] = now
        self._asked.move_to_end(peer_id)
        if len(self._asked) > REMEMBERED_MAX:
            self._asked.popitem(last=False)
        self._running += 1
        try:
            hosts = await self._hosts_of(peer_id)
            causes = [await self._dial(peer_id, one, hosts) for one in question.addresses]
        finally:
            self._running -= 1
        return wire.pack(DialBackAnswer(tuple(cause[:200] for cause in causes)))

    async def _hosts_of(self, peer_id: str) -> set[str]:
        connected = await self._live().p2p.list_peers()
        peers = [peer for peer in connected if str(peer.peer_id) == peer_id]
        paths = [str(one).strip("/").split("/") for peer in peers for one in peer.addrs]
        return {words[1] for words in paths if words[0] in ("ip4", "ip6")}

    async def _dial(self, peer_id: str, address: str, hosts: set[str]) -> str:
        try:
            host = str(ipaddress.ip_address(parse_address(address)[0]))
            if host not in hosts:
                return f"{address}: {NOT_DIALLED}, you are not connected from there"
            found, _ = await asyncio.to_thread(
                probe, self._credentials, address, timeout_s=DIAL_TIMEOUT_S
            )
        except ValueError:
            return f"{address}: {NOT_DIALLED}, only literal addresses are"
        except Unreachable as error:
            return str(error)
        return "" if found == peer_id else f"{address}: wrong PeerID {found}"


async def ask(client: Any, peer: Any, addresses: tuple[str, ...]) -> list[DialBackResult]:
    """What `peer` (hivemind's PeerID) finds at our `addresses`; empty if it does not say."""
    addresses = addresses[:ADDRESSES_MAX]
    question = wire.pack(DialBackQuestion(addresses))
    peer_id = peer.to_base58()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            payload = await client.call_unary_handler(peer, DIAL_BACK_HANDLER, question)
        causes = wire.unpack(DialBackAnswer, payload, peer=peer_id).causes
        return [
            DialBackResult(peer_id, address, cause)
            for address, cause in zip(addresses, causes, strict=True)
        ]
    # No answer, an unwilling one or nonsense (an answer of another length is a ValueError): this
    # peer proves nothing either way.
    except (
        P2PDaemonError,
        P2PHandlerError,
        TimeoutError,
        RemoteProtocolError,
        OSError,
        ValueError,
    ):
        return []
