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
from moshpitd.net.channel import TEXT_BYTES_MAX, Channel
from moshpitd.net.frames import RUN_BYTES, FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.link import SUPERSEDED, URGENT, Link, LinkCallbacks, LinkLimits, LinkStats
from moshpitd.net.outbox import Outbox, PayloadFunction
from moshpitd.net.tls import Credentials, Proven, listen

__all__ = ["LinkCallbacks", "LinkLimits", "LinkPool", "LinkStats"]

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
    ) -> None:
        self.limits = limits or LinkLimits()
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
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._spawn("link-accept", self._accept_all)

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
        self.send(
            peer_id,
            Header(FrameKind.PING, contributors=time.monotonic_ns()),
            None,
            priority=URGENT,
        )

    def heard(self, peer_id: str) -> int:
        """Bytes that came on the link to this peer so far; 0 without a link."""
        with self._lock:
            link = self._active.get(peer_id)
        return 0 if link is None else link.stats().bytes_in

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

    def stats(self) -> list[LinkStats]:
        """One entry per link that is sent on."""
        with self._lock:
            links = list(self._active.values())
        return [link.stats() for link in links]

    def close(self, *, farewell_timeout_s: float = 1.0) -> None:
        """Say farewell, end every link, join every thread. Not from a callback."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            outboxes, links = list(self._outboxes.values()), list(self._links)
        _wake_accept(self._listener)
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
        self._callbacks.on_frame(link.peer_id, header, payload)

    def send_failed(self, link: Link, header: Header, error: Exception) -> None:
        self._tell(self._callbacks.on_send_failed, link.peer_id, header, error)

    def link_ended(self, link: Link, reason: str | None) -> None:
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
                    self._greet_as_dialler(
                        self.credentials.connect(
                            address, expected=peer_id, timeout_s=self.limits.dial_timeout_s
                        )
                    )
                    break
                except (Unreachable, LinkBroken, ProtocolError) as error:
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

    def _greet_as_dialler(self, proven: Proven) -> None:
        channel = Channel(proven, payload_bytes_max=self.limits.payload_bytes_max)
        try:
            channel.send_text(FrameKind.HELLO, proven.peer_id, run=self._session)
            header, text = self._receive_greeting(channel)
            if header.kind is FrameKind.FAREWELL:
                raise RemoteProtocolError(f"refused there: {text}")
        except BaseException:
            channel.abandon()
            raise
        self._adopt(channel, dialled=True, session=header.run)

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
        try:
            timeout_s = self.limits.handshake_timeout_s
            self._greet_as_listener(self.credentials.accept(raw, timeout_s=timeout_s))
        except (LinkBroken, ProtocolError) as error:
            # Port scanners and strangers arrive here all day; whoever is missing has its own
            # message.
            log.debug("no link for a caller: %s", error)
        except Exception:
            log.exception("greeting a caller failed")
        finally:
            self._handshakes.release()

    def _greet_as_listener(self, proven: Proven) -> None:
        channel = Channel(proven, payload_bytes_max=self.limits.payload_bytes_max)
        try:
            header, text = self._receive_greeting(channel)
            refusal = self._refusal(proven.peer_id, header, text)
            if refusal is not None:
                channel.send_text(FrameKind.FAREWELL, refusal)
                raise RemoteProtocolError(refusal, peer=proven.peer_id)
            channel.send_text(FrameKind.HELLO, self._own_id, run=self._session)
        except BaseException:
            channel.abandon()
            raise
        self._adopt(channel, dialled=False, session=header.run)

    def _receive_greeting(self, channel: Channel) -> tuple[Header, str]:
        received = channel.receive(
            self.limits.handshake_timeout_s, payload_bytes_max=TEXT_BYTES_MAX
        )
        if received is None:
            raise LinkBroken("closed before HELLO")
        header, payload = received
        if header.kind not in (FrameKind.HELLO, FrameKind.FAREWELL):
            raise RemoteProtocolError(f"{header.kind.name} before HELLO")
        return header, bytes(payload[:100]).decode(errors="replace")

    def _refusal(self, peer_id: str, header: Header, wanted: str) -> str | None:
        if header.kind is not FrameKind.HELLO:
            return "FAREWELL before HELLO"
        if peer_id == self._own_id:
            return "this is your own PeerID"
        if wanted != self._own_id:
            return f"wrong PeerID: this is {self._own_id}"
        with self._lock:
            if len(self._links) >= self.limits.links_max and peer_id not in self._outboxes:
                return f"{self.limits.links_max} links are in use"
        return self._callbacks.admit(peer_id)

    def _adopt(self, channel: Channel, *, dialled: bool, session: bytes) -> None:
        peer_id = channel.peer_id
        with self._lock:
            if self._closing.is_set():
                channel.abandon()
                return
            old = self._active.get(peer_id)
            crossing = old is not None and old.session == session and old.dialled != dialled
            lost_outbox = None
            if old is not None and not crossing:
                # The peer restarted, or gave the old link up before this side noticed. Frames of
                # the old link may be missing.
                lost_outbox = self._forget(peer_id)
            outbox = self._outbox(peer_id)
            link = Link(channel, outbox, self, dialled=dialled, session=session)
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
        link.start(self._spawn)


def _wake_accept(listener: socket.socket) -> None:
    """Wake a thread out of accept()."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        listener.close()
