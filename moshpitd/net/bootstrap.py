"""The way into the swarm: the configured addresses, tried until each has been seen, with its
status.

One rule: an address that does not answer is a status with a cause, never an exception and never the
end of trying. Every address has a task of its own, so a black hole delays nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from moshpitd.errors import ConfigError
from moshpitd.net.identity import is_peer_id
from moshpitd.net.tasks import ended

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 10.0
# Between two tries of a silent address: from the first to the last, growing by half. The last is
# below 10 s, so that a swarm whose seed comes back is found within that time.
BACKOFF_FIRST_S, BACKOFF_LAST_S, BACKOFF_FACTOR = 0.25, 4.0, 1.5
# How often an address that answered is asked again: a restarted seed knows nobody until somebody
# calls.
RECHECK_S = 10.0

EXPECTED = "a multiaddr such as /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."


class Status(StrEnum):
    """What became of a bootstrap address; these words appear in `status`, in /readyz and in the
    log.
    """

    PENDING = "not tried yet"
    OK = "ok"
    SELF = "this daemon itself"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNRESOLVED = "name does not resolve"
    UNROUTED = "no route"
    WRONG_PEER = "wrong PeerID"
    UNKNOWN = "no address known"
    SILENT = "answers, but not as a peer"


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """A multiaddr with a PeerID. `host` and `port` are None where TCP is not the transport."""

    text: str
    peer_id: str
    transport: Any
    host: str | None
    port: int | None

    @classmethod
    def parse(cls, text: str) -> BootstrapAddress:
        """Raises ConfigError naming the address."""
        try:
            parsed = Multiaddr(text)
            peer_id = str(parsed["p2p"])
            transport = Multiaddr(text.rstrip("/").rpartition("/p2p/")[0])
        # A foreign parser on an operator's text: ValueError, KeyError, LookupError and more.
        except Exception as error:
            raise ConfigError(
                f"{text!r} is no bootstrap address", key="bootstrap", expected=EXPECTED
            ) from error
        if not is_peer_id(peer_id):
            raise ConfigError(
                f"{text!r} names no Ed25519 PeerID", key="bootstrap", expected=EXPECTED
            )
        words = text.strip("/").split("/")
        tcp = len(words) >= 4 and words[0] in ("ip4", "ip6", "dns", "dns4", "dns6")
        tcp = tcp and words[2] == "tcp"
        port = int(words[3]) if tcp else None
        if port == 0:
            raise ConfigError(
                f"{text!r} has port 0, which nobody can dial", key="bootstrap", expected=EXPECTED
            )
        return cls(text, peer_id, transport, words[1] if tcp else None, port)


@dataclass(frozen=True, slots=True)
class BootstrapStatus:
    """One line of `status`: the address, what became of it, and in which words."""

    address: str
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.address}: {self.status}" + (f" ({self.detail})" if self.detail else "")


async def probe_tcp(address: BootstrapAddress) -> tuple[Status, str] | None:
    """Why a plain TCP connection fails, or None when it stands. libp2p's own answer mixes causes
    and, after a failure, only says "dial backoff"; asking it less often also keeps that back-off
    small.
    """
    if address.host is None:
        return None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return Status.TIMEOUT, f"no answer in {PROBE_TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return Status.REFUSED, ""
    except socket.gaierror as error:
        return Status.UNRESOLVED, error.strerror or ""
    except OSError as error:
        return Status.UNROUTED, error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


# p2pd was asked again too soon and did not dial at all.
BACKED_OFF = "p2pd waits before it dials again"
# What go-libp2p says when its routing does not find a peer.
UNKNOWN_MARKS = ("no addresses", "routing: not found", "failed to find")
_REMOTE_KEY = re.compile(r"remote key matches (\w+)")


def read_failure(message: str) -> tuple[Status, str]:
    """The status in what go-libp2p says of a failed dial."""
    if "peer id mismatch" in message:
        found = _REMOTE_KEY.search(message)
        return Status.WRONG_PEER, f"found {found[1]}" if found else ""
    if "dial to self" in message:
        return Status.SELF, ""
    if "connection refused" in message:
        return Status.REFUSED, ""
    if "i/o timeout" in message or "deadline exceeded" in message:
        return Status.TIMEOUT, ""
    if any(mark in message for mark in UNKNOWN_MARKS):
        return Status.UNKNOWN, ""
    if "dial backoff" in message:
        return Status.SILENT, BACKED_OFF
    return Status.SILENT, message.replace("\n", " ")[-160:]


class Bootstrap:
    """The tasks of all configured addresses. `attempt` connects and greets; `joined` hears of every
    first success and of every success after a failure.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        attempt: Callable[[BootstrapAddress], Awaitable[tuple[Status, str]]],
        joined: Callable[[], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self._addresses = tuple(BootstrapAddress.parse(text) for text in addresses)
        self._status = {
            one.text: BootstrapStatus(one.text, Status.PENDING) for one in self._addresses
        }
        self._attempt = attempt
        self._joined = joined
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = asyncio.Condition()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(one)) for one in self._addresses]

    async def stop(self) -> None:
        await ended(self._tasks)

    async def again(self) -> None:
        """Try every address anew at once: what had been reached is forgotten (p2pd was started
        again).
        """
        for text in self._status:
            self._status[text] = BootstrapStatus(text, Status.PENDING)
        async with self._woken:
            self._woken.notify_all()

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s * self._rng.uniform(0.8, 1.2)), self._woken:
                await self._woken.wait()

    def statuses(self) -> list[BootstrapStatus]:
        return [self._status[one.text] for one in self._addresses]

    async def _keep(self, address: BootstrapAddress) -> None:
        delay_s = BACKOFF_FIRST_S
        while True:
            status, detail = await self._try(address)
            known = self._status[address.text]
            before = known.status
            if detail == BACKED_OFF and before not in (Status.PENDING, Status.OK):
                # Nothing new: what the last real try found still stands. Else a wrong PeerID would
                # change its words, and write a line, at every second try.
                status, detail = before, known.detail
            self._status[address.text] = BootstrapStatus(address.text, status, detail)
            if status is not before:
                level = logging.INFO if status in (Status.OK, Status.SELF) else logging.WARNING
                log.log(level, "bootstrap %s", self._status[address.text])
            if status is Status.OK:
                delay_s = BACKOFF_FIRST_S
                if before is not Status.OK:
                    await self._joined()
                await self._pause(RECHECK_S)
            elif status is Status.SELF:
                return
            else:
                await self._pause(delay_s)
                delay_s = min(BACKOFF_LAST_S, delay_s * BACKOFF_FACTOR)

    async def _try(self, address: BootstrapAddress) -> tuple[Status, str]:
        try:
            failure = await probe_tcp(address)
            if failure is not None:
                return failure
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._attempt(address)
        except TimeoutError:
            return Status.SILENT, f"no libp2p handshake in {CONNECT_TIMEOUT_S:g} s"
        except Exception as error:
            # Whatever goes wrong with one address must not end the trying.
            log.debug("bootstrap %s failed", address.text, exc_info=True)
            return read_failure(str(error))


def peer_id_of(text: str) -> PeerID:
    """hivemind's form of a PeerID."""
    return PeerID.from_base58(text)
