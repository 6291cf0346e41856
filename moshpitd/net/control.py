"""Small messages between peers, and the directory: hivemind's P2P and DHTNode, inside this process.

One rule: nothing here needs anybody else to be there. It starts alone, announces to itself, and
joins whenever one of the configured addresses answers; a message is acknowledged only after the
receiver's callback has taken it; and no failure of a peer or of p2pd comes out as anything but a
value or a TransportError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

from moshpitd.errors import ConfigError, RemoteProtocolError, Unreachable
from moshpitd.net import wire
from moshpitd.net.bootstrap import (
    Bootstrap,
    BootstrapAddress,
    BootstrapStatus,
    Status,
    peer_id_of,
)
from moshpitd.net.dialback import DIAL_BACK_HANDLER, DialBack, DialBackResult, ask
from moshpitd.net.directory import Directory, SignedRecords
from moshpitd.net.identity import Identity
from moshpitd.net.messenger import MESSAGE_HANDLER, SEND_TIMEOUT_S, Messenger, OnMessage
from moshpitd.net.p2pd import P2pd, P2pdFolder, P2pdOptions, port_of
from moshpitd.net.tasks import ended
from moshpitd.net.tls import Credentials, probe

log = logging.getLogger(__name__)

NODE_TTL_S = 300.0
# Own neighbourhood in the DHT: asked often right after joining, because peers that join together
# learn of each other only from the second question on; then rarely.
REFRESH_FIRST_S, REFRESH_LAST_S, REFRESH_FACTOR = 1.0, 60.0, 1.5
RESTART_FIRST_S, RESTART_LAST_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What this daemon says of itself under node/PEER_ID: where p2pd and the bulk links can be
    dialled.

    `instance` differs between two daemons with one identity, and between two starts of one daemon.
    """

    instance: bytes
    control: tuple[str, ...] = field(default=(), metadata={"max": 16})
    links: tuple[str, ...] = field(default=(), metadata={"max": 16})


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """Settings of the control plane. Addresses are multiaddrs, `links` are "host:port"."""

    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    p2pd: P2pdOptions = field(default_factory=P2pdOptions)
    # Where this daemon's bulk links can be dialled; announced, and asked when an identity is
    # doubted.
    links: tuple[str, ...] = ()


def _ignore(message: str) -> None:
    """The default of Control.on_conflict."""


class Control:
    """The control plane of one daemon. All methods belong to the event loop that called `start`.

    on_message(peer_id, payload): plain or async; its return is what acknowledges the message.
    on_conflict(words): another daemon answers under this identity; this one should stop.
    """

    def __init__(
        self,
        identity: Identity,
        options: ControlOptions,
        on_message: OnMessage,
        *,
        on_conflict: Callable[[str], None] = _ignore,
        credentials: Credentials | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self._options = options
        self._on_conflict = on_conflict
        self._credentials = credentials
        self._messenger = Messenger(self._live, self._control_addresses, on_message)
        self._dial_back = DialBack(credentials, self._live) if credentials else None
        self._instance = secrets.token_bytes(16)
        self._rng = random.Random()
        self._directory = Directory(self.peer_id, self._live_node, self._rng)
        self._bootstrap = Bootstrap(
            options.bootstrap, attempt=self._greet, joined=self._joined, rng=self._rng
        )
        self._folder: P2pdFolder | None = None
        self._p2pd: P2pd | None = None
        self._node: DHTNode | None = None
        self._listen = options.p2pd
        self._visible: tuple[str, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()
        self._confirmed = False

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start p2pd and the DHT node and begin to join. Raises ConfigError only for what the
        operator can change; unreachable bootstrap addresses are statuses.
        """
        self._folder = P2pdFolder(self._options.data_dir)
        try:
            await asyncio.to_thread(self._folder.clean)
            await self._open()
        except BaseException:
            await self._close()
            self._folder.release()
            raise
        self._bootstrap.start()
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._refresh()),
        ]

    async def stop(self) -> None:
        """End everything that start began; nothing is left in the data directory's p2pd folder."""
        await ended(self._tasks)
        self._tasks = []
        await self._bootstrap.stop()
        await self._close()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.clean)
            self._folder.release()
            self._folder = None

    async def _open(self) -> None:
        assert self._folder is not None
        self._p2pd = await P2pd.start(self._folder, self._identity.path, self._listen)
        if self._p2pd.peer_id != self.peer_id:
            raise ConfigError(
                f"p2pd reads another PeerID ({self._p2pd.peer_id}) from it",
                file=str(self._identity.path),
                key="identity",
            )
        await self._look_at_oneself()
        port = port_of(self._visible)
        if port is not None and not self._options.p2pd.announce:
            # After a crash of p2pd the same port again, or everybody's address book is wrong.
            listen = tuple(one.replace("/tcp/0", f"/tcp/{port}") for one in self._listen.listen)
            self._listen = replace(self._listen, listen=listen)
        await self._p2pd.client.add_unary_handler(MESSAGE_HANDLER, self._messenger.receive)
        if self._dial_back is not None:
            await self._p2pd.client.add_unary_handler(DIAL_BACK_HANDLER, self._dial_back.receive)
        self._node = await DHTNode.create(
            p2p=self._p2pd.p2p,
            # A function of the PeerID: a restarted daemon takes its own place in everybody's table.
            node_id=DHTID.generate(source=self.peer_id),
            # Strict mode refuses clocks more than 3 s apart.
            strict=False,
            ensure_bootstrap_success=False,
            record_validator=SignedRecords(self._identity, self._directory.now),
            # hivemind doubles a silent peer's ban each time, without end: one seed that was down
            # for ten minutes would be left out of look-ups for hours. A constant 5 s is enough.
            backoff_rate=1.0,
        )

    async def _look_at_oneself(self) -> None:
        visible = await self._live().p2p.get_visible_maddrs(latest=True)
        self._visible = tuple(str(one) for one in visible)

    async def _close(self) -> None:
        node, self._node = self._node, None
        p2pd, self._p2pd = self._p2pd, None
        if node is not None:
            node.is_alive = False
        if node is not None and p2pd is not None and p2pd.alive:
            # It unregisters its handlers at p2pd, which may die meanwhile.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await node.shutdown()
        if p2pd is not None:
            await p2pd.stop()
        await self._directory.settle()

    async def _watch(self) -> None:
        """Start p2pd again whenever it ends."""
        delay_s = RESTART_FIRST_S
        while True:
            if self._p2pd is not None:
                words = await self._p2pd.ended()
                log.error("%s; starting it again", words)
            await self._close()
            try:
                await self._open()
                delay_s = RESTART_FIRST_S
                await self._bootstrap.again()
                self._hurry.set()
            except Exception as error:
                log.error("p2pd does not start again: %s", error)
                await self._close()
                await asyncio.sleep(delay_s)
                delay_s = min(RESTART_LAST_S, delay_s * 2)

    # -- messages and questions -------------------------------------------------------------------

    async def send(
        self, peer_id: str, payload: bytes, *, timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        """See Messenger.send."""
        await self._messenger.send(peer_id, payload, timeout_s=timeout_s)

    async def ask_dial_back(self, *, peers: int = 2) -> list[DialBackResult]:
        """Let some peers dial our link addresses; one result per peer that answered and address."""
        known = list(self._live_node().protocol.routing_table.peer_id_to_uid)
        chosen = self._rng.sample(known, min(peers, len(known)))
        client = self._live().client
        answers = await asyncio.gather(*(ask(client, one, self._options.links) for one in chosen))
        return [result for answer in answers for result in answer]

    async def _control_addresses(self, peer_id: str) -> tuple[str, ...]:
        record = await self.find_node(peer_id)
        return record.control if record is not None else ()

    # -- the directory -----------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        """See Directory.announce."""
        return await self._directory.announce(key, value, ttl_s=ttl_s)

    async def withdraw(self, key: str) -> None:
        """See Directory.withdraw."""
        await self._directory.withdraw(key)

    async def lookup(self, key: str) -> list[tuple[str, bytes]]:
        """See Directory.lookup."""
        return await self._directory.lookup(key)

    async def find_node(self, peer_id: str) -> NodeRecord | None:
        """What a daemon says of itself, or None."""
        for author, value in await self.lookup(node_key(peer_id)):
            if author == peer_id:
                with contextlib.suppress(RemoteProtocolError):
                    return wire.unpack(NodeRecord, value, peer=peer_id)
        return None

    @property
    def clock_offset_s(self) -> float:
        """The swarm's clock minus this host's."""
        return self._directory.clock_offset_s

    # -- joining -----------------------------------------------------------------------------------

    async def _greet(self, address: BootstrapAddress) -> tuple[Status, str]:
        """One attempt at a bootstrap address that accepts TCP connections."""
        if address.peer_id == self.peer_id:
            return Status.SELF, ""
        peer_id = peer_id_of(address.peer_id)
        await self._live().client.connect(peer_id, [address.transport])
        node = self._live_node()
        if await node.protocol.call_ping(peer_id, strict=False) is None:
            return Status.SILENT, "libp2p answers, the directory does not"
        return Status.OK, ""

    async def _joined(self) -> None:
        """A bootstrap address answered for the first time, or again."""
        try:
            await self._directory.explore()
            await self._directory.measure_clock()
            if not self._confirmed and await self._identity_is_taken():
                return
            self._confirmed = True
            await self._announce_node()
            await self._directory.store_again()
        except Unreachable as error:
            log.warning("after joining: %s", error)
        self._hurry.set()

    async def _announce_node(self) -> None:
        record = NodeRecord(self._instance, self._visible[:16], self._options.links[:16])
        await self.announce(node_key(self.peer_id), wire.pack(record), ttl_s=NODE_TTL_S)

    async def _identity_is_taken(self) -> bool:
        """Whether another living daemon announces this PeerID. A record alone may be from before a
        kill -9; so its link addresses are dialled, and whoever answers must prove the key with
        another certificate.
        """
        record = await self.find_node(self.peer_id)
        if record is None or record.instance == self._instance or self._credentials is None:
            return False
        for address in record.links:
            try:
                peer_id, certificate = await asyncio.to_thread(probe, self._credentials, address)
            except Unreachable:
                continue
            if peer_id == self.peer_id and certificate != self._credentials.certificate:
                words = f"identity in use: {self.peer_id} also answers at {address}"
                log.error("%s", words)
                self._on_conflict(words)
                return True
        return False

    async def _refresh(self) -> None:
        """Keep the routing table, the clock offset and the node's own record fresh."""
        delay_s, announced_at = REFRESH_FIRST_S, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s * self._rng.uniform(0.8, 1.2)):
                    await self._hurry.wait()
            delay_s = min(REFRESH_LAST_S, delay_s * REFRESH_FACTOR)
            if self._hurry.is_set():
                self._hurry.clear()
                delay_s = REFRESH_FIRST_S
            try:
                self._live().forget_finished_calls()
                await self._look_at_oneself()  # NAT traversal finds addresses as it goes
                if self.table_size == 0:
                    continue
                await self._directory.explore()
                await self._directory.measure_clock()
                if self._directory.now() > announced_at + NODE_TTL_S / 3:
                    if not self._confirmed and await self._identity_is_taken():
                        continue
                    self._confirmed = True
                    await self._announce_node()
                    announced_at = self._directory.now()
            except Exception as error:
                # p2pd may be gone at any of these awaits; the next turn tries again.
                log.debug("refreshing the directory failed: %s", error)

    # -- what people see ---------------------------------------------------------------------------

    def bootstrap_status(self) -> list[BootstrapStatus]:
        """One entry per configured address, in their order."""
        return self._bootstrap.statuses()

    @property
    def table_size(self) -> int:
        """Peers in the directory's routing table, without this one."""
        node = self._node
        return len(node.protocol.routing_table.peer_id_to_uid) if node is not None else 0

    @property
    def joined(self) -> bool:
        """Whether this daemon knows any other; a daemon without bootstrap addresses waits to be
        found.
        """
        return self.table_size > 0

    def visible_addresses(self) -> list[str]:
        """Multiaddrs with our PeerID at which p2pd says that it can be dialled."""
        return list(self._visible)

    def _live(self) -> P2pd:
        if self._p2pd is None:
            raise Unreachable("p2pd is not running")
        return self._p2pd

    def _live_node(self) -> DHTNode:
        if self._node is None:
            raise Unreachable("the directory is not running")
        return self._node


def node_key(peer_id: str) -> str:
    """The key of a daemon's own record."""
    return f"moshpitd/node/{peer_id}"


def _is_unknown_address(message: str) -> bool:
    return (
        "no addresses" in message or "routing: not found" in message or "failed to find" in message
    )
