"""One link: the flows between this pool and another, from HELLO to the end.

One rule: a link ends in exactly one of two ways. Orderly, when all its flows did. Or lost, with a
reason, as soon as one flow is: then the pool says so, because frames may be missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moshpitd.net.channel import Channel
from moshpitd.net.flow import REMOVED, Counts, Flow
from moshpitd.net.frames import Header
from moshpitd.net.greeting import Hello, Security
from moshpitd.net.meter import Rate, Taking
from moshpitd.net.outbox import Outbox


def admit_all(peer_id: str) -> str | None:
    """The default of LinkCallbacks.admit: everybody who proves a PeerID may link."""
    return None


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What the pool tells its user, always from a thread of its own and never under a lock.

    on_frame(peer_id, header, payload): runs in a reader thread, which waits meanwhile; that wait is
    the back-pressure. Frames of one peer may come in several threads at once and in any order. The
    payload is valid until the call returns. RemoteProtocolError ends the link.
    on_lost(peer_id, reason): the link ended and frames in either direction may be missing.
    on_up(peer_id): a link stands. Not repeated when one link replaces another without loss.
    on_send_failed(peer_id, header, error): this frame's payload function raised; the link lives on.
    admit(peer_id): None, or the reason why this peer may not link (a ban, strikes).
    """

    on_frame: Callable[[str, Header, memoryview], None]
    on_lost: Callable[[str, str], None]
    on_up: Callable[[str], None]
    on_send_failed: Callable[[str, Header, Exception], None]
    admit: Callable[[str], str | None] = admit_all


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of the pool. Sizes in bytes, times in seconds."""

    # A part has at most 4 MiB unless somebody set it; with its label one fits. Each flow has two
    # buffers of this size, of which only the touched pages cost memory.
    payload_bytes_max: int = 8 << 20
    # One frame per part: 16 GiB in parts of 1 MiB to one peer, at about 200 bytes per waiting
    # frame.
    queue_frames_max: int = 16_384
    # A group has at most 64 members; the rest is for rounds that overlap and for snapshots.
    links_max: int = 256
    # Strangers that connect and say nothing hold a thread each, this many and this long at most.
    handshakes_max: int = 32
    handshake_timeout_s: float = 5.0
    dial_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What the operator chose. `flows` per link, 0: by measured rate and round trip. The caps hold
    for all links together, in megabit per second of TCP payload; 0: none."""

    flows: int = 0
    security: Security = Security.TLS
    upload_mbps: float = 0.0
    download_mbps: float = 0.0


class LinkOwner(Protocol):
    """What a link asks of its pool. All of it is called from the flows' threads."""

    def frame_arrived(self, link: Link, header: Header, payload: memoryview) -> None: ...

    def frame_sent(self, link: Link, header: Header, payload_bytes: int) -> None: ...

    def send_failed(self, link: Link, header: Header, error: Exception) -> None: ...

    def link_ended(self, link: Link, reason: str | None) -> None:
        """`reason` None: orderly. Called once per link."""
        ...


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of one link. `rtt_s` is None until a ping came back, the rates (bytes per second
    while busy) until enough was moved; `dialled` says by which side. `sealed`: TLS keeps every byte
    from being read or changed on its way, with `cipher`; without it nothing does."""

    peer_id: str
    dialled: bool
    sealed: bool
    cipher: str
    flows: int
    age_s: float
    bytes_in: int
    bytes_out: int
    waiting_frames: int
    rtt_s: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None


class Look(NamedTuple):
    """What one look at a link finds: bytes that are through, and whether more are on their way."""

    delivered: int
    heard: int
    sending: bool
    receiving: bool


class Link:
    """`dialled_at` is the address where this side dialled, None when the other side did. `session`
    names the other side's pool instance, `token` this link, for flows that join it."""

    def __init__(
        self,
        peer_id: str,
        outbox: Outbox,
        owner: LinkOwner,
        *,
        hello: Hello,
        dialled_at: str | None,
    ) -> None:
        self.peer_id = peer_id
        self.dialled_at = dialled_at
        self.session = hello.session
        self.token = hello.token
        self.sealed = hello.security == Security.TLS
        self.rtt_s: float | None = None
        self.up, self.down = Rate(), Rate()
        self.taking = Taking()
        self.cipher = ""
        self._outbox = outbox
        self._owner = owner
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._flows: list[Flow] = []
        self._numbers = 0  # given to further flows so far
        self._past = Counts(0, 0, 0, 0)  # of flows that ended
        self._retired: str | None = None
        self._over = False

    def add(
        self, channel: Channel, number: int, spawn: Callable[[str, Callable[[], None]], None]
    ) -> bool:
        """Start a flow on this channel; False if the link takes none any more."""
        self.cipher = channel.stream.cipher
        flow = Flow(channel, number, peer_id=self.peer_id, outbox=self._outbox, owner=self)
        with self._lock:
            if self._over or any(one.number == number for one in self._flows):
                return False
            self._flows.append(flow)
            if self._retired is not None:
                flow.retire(self._retired)
        flow.start(spawn)
        return True

    def retire(self, reason: str) -> None:
        """Say `reason` on every flow after the frame that it is sending, then end."""
        with self._lock:
            self._retired = reason
            flows = list(self._flows)
        for flow in flows:
            flow.retire(reason)

    def shrink(self) -> None:
        """End all flows but the first, without loss."""
        with self._lock:
            flows = [flow for flow in self._flows if flow.number > 0]
        for flow in flows:
            flow.retire(REMOVED)

    def end(self, reason: str | None) -> None:
        """End this link now; only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
            flows = list(self._flows)
        for flow in flows:
            flow.end(reason)
        self._owner.link_ended(self, reason)

    @property
    def dialled(self) -> bool:
        return self.dialled_at is not None

    @property
    def over(self) -> bool:
        return self._over

    @property
    def width(self) -> int:
        """How many flows it has."""
        return len(self._flows)

    def free_number(self) -> int:
        """For the next flow. Never one of before: where the other end has not let go of that yet,
        it drops the new one, and with a flow that breaks the whole link is lost."""
        with self._lock:
            self._numbers += 1
            return self._numbers

    def round_trip_s(self) -> float:
        """The shortest that TCP saw on any flow; 0 where the kernel does not tell."""
        with self._lock:
            flows = list(self._flows)
        return min((flow.round_trip_s() for flow in flows), default=0.0)

    @property
    def takes_bytes_per_s(self) -> float | None:
        """What all flows together take while they are handed payloads."""
        rate = self.taking.rate
        return None if rate is None else rate * max(1, self.width)

    @property
    def bytes_heard(self) -> int:
        """What came from the peer so far, also of frames that are still being read."""
        return self._counts().heard

    def _counts(self) -> Counts:
        with self._lock:
            each = [self._past, *(flow.counts() for flow in self._flows)]
        return Counts(*map(sum, zip(*each, strict=True)))

    def look(self, now: float) -> Look:
        """Take a sample of both rates."""
        with self._lock:
            flows = list(self._flows)
        waiting = [flow.outstanding() for flow in flows]
        counts = self._counts()
        look = Look(
            delivered=counts.handed - sum(count for count, _ in waiting),
            heard=counts.heard,
            sending=any(busy or count > 0 for count, busy in waiting),
            receiving=any(flow.receiving for flow in flows),
        )
        self.up.look(now, look.delivered, busy=look.sending)
        self.down.look(now, look.heard, busy=look.receiving)
        return look

    def stats(self) -> LinkStats:
        counts = self._counts()
        return LinkStats(
            peer_id=self.peer_id,
            dialled=self.dialled,
            sealed=self.sealed,
            cipher=self.cipher,
            flows=self.width,
            age_s=time.monotonic() - self._since,
            bytes_in=counts.bytes_in,
            bytes_out=counts.bytes_out,
            waiting_frames=len(self._outbox),
            rtt_s=self.rtt_s,
            up_bytes_per_s=self.up.value,
            down_bytes_per_s=self.down.value,
        )

    # -- what the flows call (FlowOwner) ----------------------------------------------------------

    def frame_arrived(self, header: Header, payload: memoryview) -> None:
        self._owner.frame_arrived(self, header, payload)

    def sent(self, header: Header, payload_bytes: int, seconds: float) -> None:
        self.taking.add(payload_bytes, seconds)
        self._owner.frame_sent(self, header, payload_bytes)

    def send_failed(self, header: Header, error: Exception) -> None:
        self._owner.send_failed(self, header, error)

    def pong(self, sent_ns: int) -> None:
        self.rtt_s = max(0.0, (time.monotonic_ns() - sent_ns) / 1e9)

    def flow_ended(self, flow: Flow, reason: str | None) -> None:
        with self._lock:
            self._flows.remove(flow)
            self._past = Counts(*map(sum, zip(self._past, flow.counts(), strict=True)))
            last = not self._flows
        if reason is not None or last:
            self.end(reason)
