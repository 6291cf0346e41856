"""The bulk links of this daemon: who is linked, who dials, and which of two links to one peer
stays.

One rule: at most one link per peer is sent on, and a change from one to another loses nothing.
Where frames may have been lost, `on_lost` says so; there is no third case. Everything here blocks
or runs in threads, because OpenSSL releases the GIL: measured on 2 cores with both ends, 1.2 GB/s
this way against 0.3 GB/s for TLS inside an event loop.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from moshpitd.errors import LinkBroken, ProtocolError, RemoteProtocolError, Unreachable
from moshpitd.net.channel import Channel
from moshpitd.net.flow import SUPERSEDED
from moshpitd.net.frames import GROUP_BYTES, RUN_BYTES, FrameKind, Header
from moshpitd.net.greeting import Hello, Misfits, Security, greet_caller, greet_dialled
from moshpitd.net.identity import Identity
from moshpitd.net.link import Link, LinkCallbacks, LinkLimits, LinkOptions, LinkStats
from moshpitd.net.outbox import URGENT, Outbox, PayloadFunction
from moshpitd.net.throttle import throttle
from moshpitd.net.tls import Credentials, listen
from moshpitd.net.traffic import Moved
from moshpitd.net.watch import FLOWS_MAX, Watch

__all__ = [
    "LinkCallbacks",
    "LinkLimits",
    "LinkOptions",
    "LinkPool",
    "LinkStats",
    "Moved",
    "Security",
]

log = logging.getLogger(__name__)


class LinkPool:
    """Links to peers by PeerID. Methods may be called from any thread, also from callbacks, except
    close.
    """

    def __init__(
        self,
        identity: Identity,
        callbacks: LinkCallbacks,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        limits: LinkLimits | None = None,
        options: LinkOptions | None = None,
    ) -> None:
        self.limits = limits or LinkLimits()
        self.options = options or LinkOptions()
        self.credentials = Credentials(identity)
        self._own_id = identity.peer_id
        self._callbacks = callbacks
        # Tells a restarted peer from the one before: a link to the old one is dead, whoever dialled
        # it.
        self._session = secrets.token_bytes(RUN_BYTES)
        self._lock = threading.Lock()
        self._outboxes: dict[str, Outbox] = {}
        self._active: dict[str, Link] = {}
        self._links: set[Link] = set()
        self._dials: dict[str, Future[None]] = {}
        self._threads: set[threading.Thread] = set()
        self._handshakes = threading.Semaphore(self.limits.handshakes_max)
        self._closing = threading.Event()
        self._caps = (
            throttle(self.options.upload_mbps, self._closing),
            throttle(self.options.download_mbps, self._closing),
        )
        self._watch = Watch(
            self, flows=self.options.flows, closing=self._closing, spawn=self._spawn
        )
        self._misfits = Misfits()
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._spawn("link-accept", self._accept_all)
        self._spawn("link-watch", self._watch.run)

    # -- what the user calls -----------------------------------------------------------------------

    def dial(self, peer_id: str, addresses: Sequence[str]) -> Future[None]:
        """Link to a peer at one of its addresses ("host:port"), tried in order.

        The future is done when a link to the peer is up (also when the peer dialled meanwhile), or
        holds Unreachable with one cause per address. For a pair the smaller PeerID should dial if
        it can.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closing.is_set():
                future.set_exception(Unreachable("the link pool is closed"))
                return future
            if peer_id in self._active:
                future.set_result(None)
                return future
            if peer_id in self._dials:
                return self._dials[peer_id]
            self._outbox(peer_id)
            self._dials[peer_id] = future
        self._spawn(
            f"link-dial-{peer_id[-6:]}", lambda: self._dial(peer_id, tuple(addresses), future)
        )
        return future

    def expect(self, peer_id: str) -> None:
        """This peer will dial: let frames for it wait, and admit it even when the pool is full."""
        with self._lock:
            self._outbox(peer_id)

    def send(
        self, peer_id: str, header: Header, payload_fn: PayloadFunction | None, *, priority: int = 0
    ) -> None:
        """Queue a frame; lower priorities first. `payload_fn` runs in the writer thread just before
        sending.

        Raises Unreachable if the peer was never dialled, expected or linked, and LocalProtocolError
        if too many frames wait. What was queued when a link is lost is forgotten; `on_lost` speaks
        for all of it.
        """
        with self._lock:
            outbox = self._outboxes.get(peer_id)
        if outbox is None:
            raise Unreachable(f"{peer_id}: no link, and none is being made")
        outbox.put(priority, header, payload_fn)

    def ping(self, peer_id: str) -> None:
        """Ask for a round trip; its time appears in `stats`."""
        header = Header(FrameKind.PING, contributors=time.monotonic_ns())
        self.send(peer_id, header, None, priority=URGENT)

    def discard(self, group: bytes) -> int:
        """Forget every waiting frame of a group, to all peers. Returns how many there were."""
        with self._lock:
            outboxes = list(self._outboxes.values())
        return sum(outbox.discard(group) for outbox in outboxes)

    def drop(self, peer_id: str) -> None:
        """End the links to a peer and forget what waits for it. `on_lost` is not called: the user
        knows.
        """
        with self._lock:
            outbox = self._outboxes.pop(peer_id, None)
            self._active.pop(peer_id, None)
            links = [link for link in self._links if link.peer_id == peer_id]
            self._links.difference_update(links)
        if outbox is not None:
            outbox.close()
        for link in links:
            link.end("dropped")

    def is_up(self, peer_id: str) -> bool:
        with self._lock:
            return peer_id in self._active

    def heard(self, peer_id: str) -> int:
        """Bytes received from that peer so far, on all links to it, also those of frames that are
        still being read: as long as this grows, the peer lives."""
        with self._lock:
            links = [link for link in self._links if link.peer_id == peer_id]
        return self._watch.traffic.heard_before(peer_id) + sum(link.bytes_heard for link in links)

    def stats(self) -> list[LinkStats]:
        """One entry per link that is sent on."""
        with self._lock:
            links = list(self._active.values())
        return [link.stats() for link in links]

    def takes(self, peer_id: str) -> float | None:
        """Bytes per second that the link to this peer takes while payloads are handed to it; None
        without a link, or before it has carried any."""
        with self._lock:
            link = self._active.get(peer_id)
        return None if link is None else link.takes_bytes_per_s

    def rates(self) -> tuple[float | None, float | None]:
        """(up, down) in bytes per second: the most that all links together were seen to carry
        lately; None until enough was moved."""
        return self._watch.traffic.up.value, self._watch.traffic.down.value

    def moved(self) -> dict[Moved, int]:
        """Bytes of whole frames since the start, by run, kind and direction."""
        return self._watch.traffic.moved()

    def misfits(self) -> dict[str, str]:
        """Peers that could not link because links.security differs, with the sentence for it."""
        return self._misfits.words()

    def close(self, *, farewell_timeout_s: float = 1.0) -> None:
        """Say farewell, end every link, join every thread. Not from a callback."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            outboxes, links = list(self._outboxes.values()), list(self._links)
        _wake_accept(self._listener)
        self._watch.wake()
        for outbox in outboxes:
            outbox.close()
        deadline = time.monotonic() + farewell_timeout_s
        while time.monotonic() < deadline and any(not link.over for link in links):
            time.sleep(0.01)
        for link in links:
            link.end("closed here")
        while True:
            with self._lock:
                if not self._threads:
                    break
                thread = self._threads.pop()
            thread.join()
        self._listener.close()

    # -- what the links call (LinkOwner) -----------------------------------------------------------

    def frame_arrived(self, link: Link, header: Header, payload: memoryview) -> None:
        with self._lock:
            if link not in self._links:
                raise LinkBroken("dropped")
        self._watch.count(header, len(payload), sent=False)
        self._callbacks.on_frame(link.peer_id, header, payload)

    def frame_sent(self, link: Link, header: Header, payload_bytes: int) -> None:
        self._watch.count(header, payload_bytes, sent=True)

    def send_failed(self, link: Link, header: Header, error: Exception) -> None:
        self._tell(self._callbacks.on_send_failed, link.peer_id, header, error)

    def link_ended(self, link: Link, reason: str | None) -> None:
        self._watch.traffic.keep(link)
        with self._lock:
            if link not in self._links:
                return  # dropped, or replaced after a loss that was already told
            self._links.discard(link)
            active = self._active.get(link.peer_id)
            if reason is None and active is not link:
                return
            # Either the active link ended, or a superseded one broke before its end: frames sent on
            # it may be missing, so the peer counts as lost and the active link must not hide that.
            outbox = self._forget(link.peer_id)
        self._finish_loss(link.peer_id, outbox, active, reason or "ended")

    def _forget(self, peer_id: str) -> Outbox | None:
        """Under the lock: the peer has no link any more."""
        active = self._active.pop(peer_id, None)
        if active is not None:
            self._links.discard(active)
        return self._outboxes.pop(peer_id, None)

    def _finish_loss(
        self, peer_id: str, outbox: Outbox | None, link: Link | None, reason: str
    ) -> None:
        if outbox is not None:
            outbox.close()
        if link is not None:
            link.end(reason)
        if not self._closing.is_set():
            self._tell(self._callbacks.on_lost, peer_id, reason)

    @staticmethod
    def _tell(callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            # A user's mistake must not leave a link half made or half ended.
            log.exception("a callback of the links failed")

    # -- what the watch calls (Watched) ------------------------------------------------------------

    def all_links(self) -> tuple[list[Link], list[Link]]:
        with self._lock:
            return list(self._links), list(self._active.values())

    def add_flow(self, link: Link) -> bool:
        assert link.dialled_at is not None
        number = link.free_number()
        channel, hello = self._connect(link.peer_id, link.dialled_at, token=link.token, flow=number)
        self._fit_out(channel)
        if hello.session == link.session and link.add(channel, number, self._spawn):
            return True
        channel.abandon()
        return False

    # -- making links ------------------------------------------------------------------------------

    def _outbox(self, peer_id: str) -> Outbox:
        """Under the lock."""
        if peer_id not in self._outboxes:
            self._outboxes[peer_id] = Outbox(frames_max=self.limits.queue_frames_max)
        return self._outboxes[peer_id]

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self._lock:
            # Finished threads are forgotten here and not by themselves: close() must be able to
            # join whatever might still run.
            self._threads = {one for one in self._threads if one.is_alive()}
            thread.start()
            self._threads.add(thread)

    def _dial(self, peer_id: str, addresses: tuple[str, ...], future: Future[None]) -> None:
        causes: list[str] = []
        try:
            if peer_id == self._own_id:
                raise Unreachable("that is this peer itself")
            for address in addresses:
                if self._closing.is_set() or self.is_up(peer_id):
                    break
                try:
                    token = secrets.token_bytes(GROUP_BYTES)
                    channel, hello = self._connect(peer_id, address, token=token, flow=0)
                    self._adopt(channel, peer_id, hello, dialled_at=address)
                    break
                except (Unreachable, LinkBroken, ProtocolError) as error:
                    self._misfits.remember(peer_id, error)
                    text = str(error)
                    causes.append(text if text.startswith(address) else f"{address}: {text}")
            if not self.is_up(peer_id):
                raise Unreachable(f"{peer_id}: " + ("; ".join(causes) or "no address is known"))
        except Exception as error:
            self._settle(peer_id, future, error)
        else:
            self._settle(peer_id, future, None)

    def _settle(self, peer_id: str, future: Future[None], error: Exception | None) -> None:
        with self._lock:
            self._dials.pop(peer_id, None)
        # The user may have cancelled it; the link, if any, stays.
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _connect(
        self, peer_id: str, address: str, *, token: bytes, flow: int
    ) -> tuple[Channel, Hello]:
        """A greeted connection. Raises Unreachable, LinkBroken, ProtocolError."""
        limits = self.limits
        proven = self.credentials.connect(
            address,
            expected=peer_id,
            timeout_s=limits.dial_timeout_s,
        )
        channel, hello = greet_dialled(
            proven,
            Hello(self._session, token, flow, self.options.security),
            timeout_s=limits.handshake_timeout_s,
            payload_bytes_max=limits.payload_bytes_max,
        )
        # Which link this is was our word; what comes back is the other side's session.
        return channel, Hello(hello.session, token, flow, hello.security)

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or a connection gone before it was taken: neither ends the
                # daemon.
                log.warning("cannot accept a link: %s", error.strerror or error)
                time.sleep(0.1)
                continue
            if self._closing.is_set() or not self._handshakes.acquire(blocking=False):
                raw.close()
                continue
            self._spawn("link-greet", lambda raw=raw: self._greet(raw))  # type: ignore[misc]

    def _greet(self, raw: socket.socket) -> None:
        limits = self.limits
        try:
            proven = self.credentials.accept(raw, timeout_s=limits.handshake_timeout_s)
            channel, hello = greet_caller(
                proven,
                Hello(self._session, bytes(GROUP_BYTES), 0, self.options.security),
                own_id=self._own_id,
                refusal=self._refusal,
                timeout_s=limits.handshake_timeout_s,
                payload_bytes_max=limits.payload_bytes_max,
            )
            if hello.flow == 0:
                self._adopt(channel, proven.peer_id, hello, dialled_at=None)
            else:
                self._join(channel, proven.peer_id, hello)
        except (LinkBroken, ProtocolError) as error:
            # Port scanners and strangers arrive here all day; whoever is missing has its own
            # message.
            log.debug("no link for a caller: %s", error)
            if isinstance(error, RemoteProtocolError):
                self._misfits.remember(error.peer, error)
        except Exception:
            log.exception("greeting a caller failed")
        finally:
            self._handshakes.release()

    def _refusal(self, peer_id: str, hello: Hello) -> str | None:
        with self._lock:
            if hello.flow > 0:
                link = self._link_of(peer_id, hello)
                fits = link is not None and link.width < FLOWS_MAX
                return None if fits else "no link that takes this flow"
            if len(self._links) >= self.limits.links_max and peer_id not in self._outboxes:
                return f"{self.limits.links_max} links are in use"
        return self._callbacks.admit(peer_id)

    def _link_of(self, peer_id: str, hello: Hello) -> Link | None:
        """Under the lock: the link that a further flow belongs to."""
        link = self._active.get(peer_id)
        if link is None or (link.session, link.token) != (hello.session, hello.token):
            return None
        return link

    def _adopt(
        self, channel: Channel, peer_id: str, hello: Hello, *, dialled_at: str | None
    ) -> None:
        dialled = dialled_at is not None
        self._fit_out(channel)
        self._misfits.forget(peer_id)
        with self._lock:
            if self._closing.is_set():
                channel.abandon()
                return
            old = self._active.get(peer_id)
            crossing = old is not None and old.session == hello.session and old.dialled != dialled
            lost_outbox = None
            if old is not None and not crossing:
                # The peer restarted, or gave the old link up before this side noticed. Frames of
                # the old link may be missing.
                lost_outbox = self._forget(peer_id)
            outbox = self._outbox(peer_id)
            link = Link(peer_id, outbox, self, hello=hello, dialled_at=dialled_at)
            self._links.add(link)
            # Both dialled at once: the link that the smaller PeerID dialled stays, as both ends
            # know.
            wins = not crossing or dialled == (self._own_id < peer_id)
            if crossing and old is not None:
                (old if wins else link).retire(SUPERSEDED)
            if wins:
                self._active[peer_id] = link
                outbox.hand_to(link)
        if not crossing:
            if old is not None:
                self._finish_loss(peer_id, lost_outbox, old, "replaced by a newer link")
            self._tell(self._callbacks.on_up, peer_id)
        if not link.add(channel, 0, self._spawn):
            channel.abandon()

    def _fit_out(self, channel: Channel) -> None:
        """What every flow of ours has."""
        channel.stream.wire.up, channel.stream.wire.down = self._caps

    def _join(self, channel: Channel, peer_id: str, hello: Hello) -> None:
        """A further flow that the other side dialled."""
        self._fit_out(channel)
        with self._lock:
            link = self._link_of(peer_id, hello)
        if link is None or not link.add(channel, hello.flow, self._spawn):
            channel.abandon()


def _wake_accept(listener: socket.socket) -> None:
    """Wake a thread out of accept()."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        listener.close()
