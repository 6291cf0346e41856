"""A node's side of the network: control messages, the directory and the bulk links of all its runs.

One rule: what comes in is decoded, checked and handed to the run that it names, and nothing else;
what cannot be decoded is counted against whoever sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any

from moshpitd.core.events import Addressed, Event, LinkLost, Received
from moshpitd.core.messages import (
    Counts,
    Goodbye,
    Hello,
    Invite,
    Join,
    Letter,
    Message,
    Parity,
    Record,
    SnapshotRequest,
)
from moshpitd.core.outcome import Reason
from moshpitd.daemon.addresses import parse_host_port
from moshpitd.daemon.exchange import Exchange
from moshpitd.daemon.interfaces import link_addresses
from moshpitd.daemon.logs import log_event
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.pace import Pace
from moshpitd.daemon.reachability import Reachability
from moshpitd.daemon.runs import Run
from moshpitd.daemon.settings import Settings
from moshpitd.daemon.storage import Storages
from moshpitd.errors import (
    LocalProtocolError,
    MoshpitError,
    RemoteProtocolError,
    TransportError,
    Unreachable,
)
from moshpitd.net import wire
from moshpitd.net.bootstrap import Status
from moshpitd.net.control import Control, ControlOptions
from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkCallbacks, LinkOptions, LinkPool, Moved, Security
from moshpitd.net.p2pd import P2pdOptions

log = logging.getLogger(__name__)

MAX_CONTROL_ADDRESSES = 16  # what a record carries
CLOCK_WARN_S = 3.0  # less disturbs nothing
ON_LINKS = (Letter, Counts, Parity)
"""Words about what the same link carries: the loss of a link that loses them is an event of its
own. A call through p2pd costs both ends more than the message that it speaks of."""
WORD_PRIORITY = -1  # before the parts of any round: somebody waits for it, and it is small
WANT_AN_ANSWER = (Hello, Invite, Join, SnapshotRequest)


class Network:
    """Invariant: between `open` and `close` the links are there; between `start` and `stop` the
    control plane is. `runs` is the node's own table, read from link threads too."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        exchange: Exchange,
        storages: Storages,
        runs: Mapping[str, Run],
        *,
        conflict: Callable[[str], None],
    ) -> None:
        network = settings.network
        self.garbled = 0
        self.control_bytes: Counter[tuple[str, bool]] = Counter()  # by (run, whether sent)
        self._pace = Pace(
            up_mbps=_least(network.up_mbps, settings.limits.upload_mbps),
            down_mbps=_least(network.down_mbps, settings.limits.download_mbps),
        )
        self._exchange, self._storages = exchange, storages
        self._runs = runs
        self._replies: set[asyncio.Task[None]] = set()
        listen = parse_host_port(network.link_listen)
        callbacks = LinkCallbacks(
            on_frame=self._frame,
            on_lost=self._link_lost,
            on_up=_ignore,
            on_send_failed=exchange.on_send_failed,
        )
        self._links = LinkPool(
            identity,
            callbacks,
            host=listen.host,
            port=listen.port,
            options=link_options(settings),
        )
        exchange.use(self._links)
        storages.use(self._links)
        self.link_addresses = link_addresses(listen, self._links.port, network.link_announce)
        options = ControlOptions(
            data_dir=settings.paths().data_dir,
            bootstrap=tuple(network.bootstrap),
            p2pd=P2pdOptions(listen=tuple(network.listen), announce=tuple(network.announce)),
            links=self.link_addresses,
        )
        try:
            self._control = Control(
                identity,
                options,
                self._received,
                on_conflict=conflict,
                credentials=self._links.credentials,
            )
        except BaseException:
            self._links.close()
            raise
        self._reachability = Reachability(self._control.ask_dial_back, joined=lambda: self.joined)
        self._watching: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> None:
        """Start the control plane; joining goes on in the background. Raises ConfigError."""
        await self._control.start()
        self._started = True
        self._watching = asyncio.create_task(self._reachability.watch())

    async def stop(self) -> None:
        """Stop the control plane, then end the links."""
        for task in (*self._replies, self._watching):
            if task is not None:
                task.cancel()
        if self._started:
            self._started = False
            await self._control.stop()
        await asyncio.to_thread(self._links.close)

    # -- what goes out ----------------------------------------------------------------------------

    async def send(self, run: str, to: str, message: Message) -> None:
        """Deliver a message. Raises MoshpitError when that fails."""
        if not self._started:
            raise Unreachable("the node stops")
        payload = wire.encode(run, message)
        if run in self._runs:  # a stranger's question about any other is answered, and not counted
            self.control_bytes[run, True] += len(payload)
        await self._control.send(to, payload)

    def at_once(self, run: str, to: str, message: Message) -> bool:
        """Put it on the link to that peer, if it is one of those and the link is up."""
        if not isinstance(message, ON_LINKS) or not self._links.is_up(to):
            return False
        payload = wire.encode(run, message)
        header = Header(FrameKind.WORD, run_hash(run))
        try:
            self._links.send(to, header, lambda _: payload, priority=WORD_PRIORITY)
        except (TransportError, LocalProtocolError):
            return False
        return True

    async def announce(self, run: str, key: str, record: Record, *, ttl_s: float) -> bool:
        """Store our record; whether anybody (ourselves alone count) holds it now. A ttl of 0 takes
        it back."""
        if ttl_s <= 0:
            await self._control.withdraw(_key(run, key))
            return True
        return await self._control.announce(_key(run, key), wire.pack(record), ttl_s=ttl_s)

    async def look_up(self, run: str, key: str) -> tuple[Record, ...]:
        """Everybody's record under `key`. Raises MoshpitError when nobody could be asked."""
        records = []
        for author, value in await self._control.lookup(_key(run, key)):
            try:
                record = wire.unpack(Record, value, peer=author)
            except RemoteProtocolError as error:
                self._count_garbled(error)
                continue
            if record.peer_id == author:
                records.append(record)
        return tuple(records)

    def addressed(self) -> Addressed:
        """Where we are and how fast, for the records of our peers."""
        up, down = self._links.rates()
        return Addressed(
            addresses=self.link_addresses,
            control=tuple(self._control.visible_addresses()[:MAX_CONTROL_ADDRESSES]),
            up_mbps=self._pace.up(up),
            down_mbps=self._pace.down(down),
        )

    def forget(self, run: str) -> None:
        """The run is over."""
        for sent in (False, True):
            self.control_bytes.pop((run, sent), None)

    # -- what comes in ----------------------------------------------------------------------------

    def post(self, run: str, event: Event) -> None:
        """An event of the data plane, from any thread."""
        current = self._runs.get(run)
        if current is not None:
            current.driver.post(event)

    def _received(self, sender: str, payload: bytes) -> None:
        try:
            envelope = wire.decode(payload, peer=sender)
        except RemoteProtocolError as error:
            self._count_garbled(error)
            raise
        run = self._runs.get(envelope.run)
        if run is not None:
            self.control_bytes[run.name, False] += len(payload)
            run.driver.handle(Received(sender, envelope.message))
        elif isinstance(envelope.message, WANT_AN_ANSWER):
            # A record of our earlier life, or of a run that was let go, is still in the directory;
            # nobody shall wait for us. The number is that of a record made now, which one of a
            # later life exceeds (see `Node._make_run`): a goodbye that arrives after that is none.
            goodbye = Goodbye(Reason.NO_TRAINER, int(time.time() * 1000))
            reply = self.send(envelope.run, sender, goodbye)
            task = asyncio.create_task(_quietly(reply))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)

    def _frame(self, peer_id: str, header: Header, payload: memoryview) -> None:
        """From a link's thread."""
        if header.kind is FrameKind.WORD:
            self._word(peer_id, bytes(payload))
            return
        whose = self._storages if header.kind is FrameKind.STORE else self._exchange
        whose.on_frame(peer_id, header, payload)

    def _word(self, peer_id: str, payload: bytes) -> None:
        try:
            envelope = wire.decode(payload, peer=peer_id)
        except RemoteProtocolError as error:
            self._count_garbled(error)
            return
        if isinstance(envelope.message, ON_LINKS):
            self.post(envelope.run, Received(peer_id, envelope.message))

    def _link_lost(self, peer_id: str, reason: str) -> None:
        """From a link's thread."""
        log_event(log, logging.INFO, "link lost", peer=peer_id, reason=reason)
        self._exchange.link_lost(peer_id)
        self._storages.link_lost(peer_id)
        # Every run, also one that has no exchange with it: in matchmaking it may be the leader that
        # we wait for, and a message to it would take two seconds longer to find that out.
        for run in list(self._runs):
            self.post(run, LinkLost(peer_id))

    def _count_garbled(self, error: RemoteProtocolError) -> None:
        self.garbled += 1
        log_event(log, logging.WARNING, "garbled", peer=error.peer, reason=error.reason)

    # -- what people see --------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        return self._started and self._control.joined

    @property
    def swarm_peers(self) -> int:
        """In the routing table, with us."""
        return self._control.table_size + 1

    def link_rates(self) -> tuple[float | None, float | None]:
        """(sent, received) in bytes per second: of one link while it is busy, the median over those
        that are up; None where no link has carried enough to tell."""
        stats = self._links.stats()
        up = [one.up_bytes_per_s for one in stats if one.up_bytes_per_s is not None]
        down = [one.down_bytes_per_s for one in stats if one.down_bytes_per_s is not None]
        return median(up) if up else None, median(down) if down else None

    def link_lines(self) -> list[dict[str, Any]]:
        """The fields of LinkLine for every link that stands."""
        return [
            {
                "peer_id": one.peer_id,
                "cipher": one.cipher,
                "integrity": one.sealed,
                "flows": one.flows,
                "bytes_sent": one.bytes_out,
                "bytes_received": one.bytes_in,
                "rtt_s": one.rtt_s or 0.0,
                "up_bytes_per_s": one.up_bytes_per_s or 0.0,
                "down_bytes_per_s": one.down_bytes_per_s or 0.0,
            }
            for one in self._links.stats()
        ]

    def moved(self) -> dict[Moved, int]:
        """Bytes of the bulk links so far, by run hash, kind and direction."""
        return self._links.moved()

    def warnings(self) -> list[str]:
        """What an operator should set right."""
        warnings = self._reachability.warnings()
        warnings += self._link_warnings()
        offset_s = self._control.clock_offset_s
        if abs(offset_s) >= CLOCK_WARN_S:
            side = "behind" if offset_s > 0 else "ahead of"
            warnings.append(f"this host's clock is {abs(offset_s):.0f} s {side} the swarm's")
        return warnings

    def _link_warnings(self) -> list[str]:
        warnings = sorted(self._links.misfits().values())
        if self._links.options.security is not Security.TLS:
            warnings.append(
                "links.security is authenticated: what the bulk links carry is neither encrypted "
                "nor protected against change; its integrity rests on the trusted network"
            )
        return warnings

    def control_addresses(self) -> list[str]:
        """Multiaddrs with our PeerID."""
        return self._control.visible_addresses()

    def bootstrap(self) -> list[tuple[str, str]]:
        """Each configured address with what became of it, our own left out."""
        return [
            (one.address, _state(one.status, one.detail))
            for one in self._control.bootstrap_status()
            if one.status is not Status.SELF
        ]


def link_options(settings: Settings) -> LinkOptions:
    """What the operator chose, as the links take it."""
    links, limits = settings.links, settings.limits
    return LinkOptions(
        flows=links.flows if isinstance(links.flows, int) else 0,
        security=Security[links.security.upper()],
        upload_mbps=limits.upload_mbps,
        download_mbps=limits.download_mbps,
    )


def _least(rate_mbps: float, cap_mbps: float) -> float:
    return min(rate_mbps, cap_mbps) if cap_mbps > 0 else rate_mbps


def _key(run: str, key: str) -> str:
    return f"moshpitd/run/{run}/{key}"


def _state(status: Status, detail: str) -> str:
    if status is Status.PENDING:
        return "waiting"
    return f"{status} ({detail})" if detail else str(status)


def _ignore(_peer_id: Any) -> None:
    """A link is up: the exchange finds out when it sends."""


async def _quietly(work: Awaitable[None]) -> None:
    with contextlib.suppress(MoshpitError):
        await work
