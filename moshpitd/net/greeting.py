"""The first words on a connection: who believes to talk to whom, over what, and for which link.

One rule: nothing is agreed before TLS has proved both PeerIDs, and what the two sides configured
differently is refused in words that both can read.

The dialler says HELLO inside TLS: its session, the link's token, the number of the flow (0 begins a
link), the security it wants, and the PeerID that it expects. The listener answers HELLO or FAREWELL
with the reason. If both want `authenticated`, both leave TLS behind these two frames.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from moshpitd.errors import LinkBroken, RemoteProtocolError
from moshpitd.net.channel import TEXT_BYTES_MAX, Channel
from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.tls import Proven

log = logging.getLogger(__name__)

# Misfits that are remembered. They are for the operator here, so a few are enough.
MISFITS_MAX = 16


class Security(IntEnum):
    """What protects the frames of a link. Both ends must want the same."""

    TLS = 0
    AUTHENTICATED = 1
    """Both PeerIDs are proved, then plain TCP: only the frames' crc32, against accidents."""

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Hello:
    """What a side says of itself. `session` names its pool, `token` the link, `flow` its number."""

    session: bytes
    token: bytes
    flow: int
    security: int

    def header(self) -> Header:
        return Header(
            FrameKind.HELLO, run=self.session, group=self.token, part=self.flow, codec=self.security
        )

    @classmethod
    def of(cls, header: Header) -> Hello:
        return cls(header.run, header.group, header.part, header.codec)


class SecurityDiffers(RemoteProtocolError):
    """Both ends are healthy; their operators have to agree."""


class Misfits:
    """Peers that could not link because the operators chose differently; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: OrderedDict[str, str] = OrderedDict()

    def remember(self, peer_id: str, error: Exception) -> None:
        """Errors of another kind are no misfits."""
        if not isinstance(error, SecurityDiffers):
            return
        with self._lock:
            news = peer_id not in self._words
            self._words[peer_id] = error.reason
            while len(self._words) > MISFITS_MAX:
                self._words.popitem(last=False)
        if news:
            log.warning("no link to %s: %s", peer_id, error.reason)

    def forget(self, peer_id: str) -> None:
        """A link to it stands."""
        with self._lock:
            self._words.pop(peer_id, None)

    def words(self) -> dict[str, str]:
        with self._lock:
            return dict(self._words)


def greet_dialled(
    proven: Proven, hello: Hello, *, timeout_s: float, payload_bytes_max: int
) -> tuple[Channel, Hello]:
    """The dialler's part: the channel to go on with, and what the other side said."""
    channel = Channel(proven.stream, payload_bytes_max=payload_bytes_max)
    try:
        channel.send_text(hello.header(), proven.peer_id)
        header, text = _receive(channel, timeout_s)
        if header.kind is FrameKind.FAREWELL:
            # A refusal carries what the listener is set to, so that both sides know the cause.
            differs = header.codec != hello.security
            kind = SecurityDiffers if differs else RemoteProtocolError
            raise kind(f"refused there: {text}", peer=proven.peer_id)
        return _settled(channel, proven, hello.security, timeout_s), Hello.of(header)
    except BaseException:
        channel.abandon()
        raise


def greet_caller(
    proven: Proven,
    own: Hello,
    *,
    own_id: str,
    refusal: Callable[[str, Hello], str | None],
    timeout_s: float,
    payload_bytes_max: int,
) -> tuple[Channel, Hello]:
    """The listener's part, likewise. `refusal(peer_id, hello)` says why not, or None."""
    channel = Channel(proven.stream, payload_bytes_max=payload_bytes_max)
    try:
        header, wanted = _receive(channel, timeout_s)
        hello = Hello.of(header)
        error: RemoteProtocolError | None = None
        if header.kind is not FrameKind.HELLO:
            error = RemoteProtocolError("FAREWELL before HELLO", peer=proven.peer_id)
        elif proven.peer_id == own_id:
            error = RemoteProtocolError("this is your own PeerID", peer=proven.peer_id)
        elif wanted != own_id:
            error = RemoteProtocolError(f"wrong PeerID: this is {own_id}", peer=proven.peer_id)
        elif hello.security != own.security:
            error = SecurityDiffers(
                f"links.security is {_word(own.security)} at {own_id} and "
                f"{_word(hello.security)} at {proven.peer_id}: both must say the same",
                peer=proven.peer_id,
            )
        elif (words := refusal(proven.peer_id, hello)) is not None:
            error = RemoteProtocolError(words, peer=proven.peer_id)
        if error is not None:
            channel.send_text(Header(FrameKind.FAREWELL, codec=own.security), error.reason)
            raise error
        channel.send_text(own.header(), own_id)
        return _settled(channel, proven, own.security, timeout_s), hello
    except BaseException:
        channel.abandon()
        raise


def _settled(channel: Channel, proven: Proven, security: int, timeout_s: float) -> Channel:
    if security == Security.AUTHENTICATED:
        channel.stream = proven.stream.strip(timeout_s)
    return channel


def _receive(channel: Channel, timeout_s: float) -> tuple[Header, str]:
    received = channel.receive(timeout_s, payload_bytes_max=TEXT_BYTES_MAX)
    if received is None:
        raise LinkBroken("closed before HELLO")
    header, payload = received
    if header.kind not in (FrameKind.HELLO, FrameKind.FAREWELL):
        raise RemoteProtocolError(f"{header.kind.name} before HELLO")
    return header, bytes(payload[:300]).decode(errors="replace")


def _word(security: int) -> str:
    try:
        return Security(security).word
    except ValueError:
        return f"an unknown {security}"
