"""The directory: signed records under keys, announced for a while and looked up by anybody.

One rule: a record counts only under the PeerID that signed it. The signature covers key, PeerID,
value and expiry, so nobody can move a record, alter it or keep it alive beyond its time; a node
that stores for others refuses what does not hold, and so does one that asks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import statistics
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from moshpitd.errors import Oversized, Unreachable
from moshpitd.net.identity import Identity, verify

log = logging.getLogger(__name__)

# Separates these signatures from everything else that the identity key signs.
CONTEXT = b"moshpitd-directory-1\0"
SIGNATURE_BYTES = 64
# A record is a peer's description of itself. At most 64 lie under one key, and hivemind's unary
# answers hold about 2 MiB: 64 * 16 KiB is half of that.
RECORD_BYTES_MAX = 16 * 1024
# Nobody announces for longer; clocks may be this wrong on top.
TTL_MAX_S = 3600.0
CLOCK_TOLERANCE_S = 600.0
DIRECTORY_TIMEOUT_S = 15.0
SETTLE_TIMEOUT_S = 1.0
# Peers asked for their clock; the median of seven survives three that lie.
CLOCK_PEERS = 7
CLOCK_TIMEOUT_S = 3.0
CLOCK_WARN_S = 5.0


@dataclass(slots=True)
class _Announced:
    value: bytes
    ttl_s: float
    until: float = 0.0
    stored_until: float = 0.0


class Directory:
    """Our records and everybody's, over whatever DHT node `node` returns (or raises Unreachable).

    Expiries are instants of the swarm's clock: this host's, corrected by what the peers say.
    """

    def __init__(self, peer_id: str, node: Callable[[], DHTNode], rng: random.Random) -> None:
        self.clock_offset_s = 0.0
        self._peer_id = peer_id
        self._node = node
        self._rng = rng
        self._announced: dict[str, _Announced] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def now(self) -> float:
        return float(get_dht_time()) + self.clock_offset_s

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        """Store our signed record under `key` for `ttl_s`; True if at least one node took it (this
        one counts while alone). Stored again by itself after joining, not otherwise: call it every
        third of the ttl. Raises Oversized, and Unreachable when the directory does not answer in
        time.
        """
        if len(value) > RECORD_BYTES_MAX - 16:
            raise Oversized(f"record of {len(value)} bytes under {key}, at most {RECORD_BYTES_MAX}")
        entry = self._announced.setdefault(key, _Announced(value, ttl_s))
        entry.value, entry.ttl_s = value, min(ttl_s, TTL_MAX_S)
        entry.until = self.now() + entry.ttl_s
        return await self._store(key, entry)

    async def withdraw(self, key: str) -> None:
        """Take our record back: an empty one takes its place until the old one would have
        expired.
        """
        entry = self._announced.pop(key, None)
        if entry is not None:
            entry.value = b""
            await self._store(key, entry)

    async def store_again(self) -> None:
        """Store every live record of ours anew: the nodes that are to hold them have changed."""
        for key, entry in list(self._announced.items()):
            if entry.until > self.now():
                await self._store(key, entry)
            else:
                del self._announced[key]

    async def lookup(self, key: str) -> list[tuple[str, bytes]]:
        """(PeerID, value) of every live record under `key`, our own included, sorted by PeerID.

        Signatures have been checked. Raises Unreachable when the directory does not answer in time.
        """
        found = await self._bounded(self._node().get(key, latest=True), f"look-up of {key}")
        entries = getattr(found, "value", None)
        if not isinstance(entries, dict):
            return []
        now = self.now()
        return sorted(
            (peer_id, entry.value)
            for peer_id, entry in entries.items()
            if isinstance(entry.value, bytes) and entry.value and entry.expiration_time > now
        )

    async def _store(self, key: str, entry: _Announced) -> bool:
        # The directory keeps the later of two records, so a new value needs a later expiry, also
        # when the ttl shrank or the offset moved in between.
        entry.stored_until = max(self.now() + entry.ttl_s, entry.stored_until + 0.001)
        storing = self._node().store(key, entry.value, entry.stored_until, subkey=self._peer_id)
        return bool(await self._bounded(storing, f"storing {key}"))

    async def explore(self) -> None:
        """Ask for the neighbourhood of our own place and of a random one; whoever answers is in the
        routing table from then on."""
        node = self._node()
        places = [node.node_id, DHTID.generate()]
        await self._bounded(node.find_nearest_nodes(places), "exploring")

    async def settle(self) -> None:
        """Wait for what is still running, after p2pd has stopped and every call in it fails."""
        if self._running:
            await asyncio.wait(self._running, timeout=SETTLE_TIMEOUT_S)
        for task in list(self._running):
            task.cancel()

    async def _bounded(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        """The result of `work`, or Unreachable after the directory's timeout.

        The work is left to end by itself (each of its calls has a timeout): hivemind's traversal,
        when cancelled, leaves tasks behind that asyncio reports as destroyed.
        """
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=DIRECTORY_TIMEOUT_S)
        if not done:
            raise Unreachable(f"{what}: no answer within {DIRECTORY_TIMEOUT_S:g} s")
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen; whoever waits gets it from the task

    async def measure_clock(self) -> None:
        """Ask some peers for their clock and take the median of the differences."""
        node = self._node()
        peers = list(node.protocol.routing_table.peer_id_to_uid)
        peers = self._rng.sample(peers, min(CLOCK_PEERS, len(peers)))
        offsets = await asyncio.gather(*(_offset_to(node, peer) for peer in peers))
        known = [offset for offset in offsets if offset is not None]
        if not known:
            return
        # This clock has a vote of its own: of two peers nobody can say whose clock is off.
        offset_s = statistics.median([0.0, *known])
        if abs(offset_s - self.clock_offset_s) > CLOCK_WARN_S:
            side = "behind" if offset_s > 0 else "ahead of"
            log.warning("this host's clock is %.0f s %s the swarm's", abs(offset_s), side)
        self.clock_offset_s = offset_s


async def _offset_to(node: DHTNode, peer: Any) -> float | None:
    before = get_dht_time()
    try:
        request = dht_pb2.PingRequest(peer=node.protocol.node_info)
        answer = await node.protocol.get_stub(peer).rpc_ping(request, timeout=CLOCK_TIMEOUT_S)
    # A silent peer, a lying peer, a dying p2pd: no vote.
    except Exception:
        return None
    return float(answer.dht_time) - float(before + get_dht_time()) / 2


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's hook for checking records. `clock` is the swarm's time as far as this node knows
    it.
    """

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._clock = clock

    def sign_value(self, record: DHTRecord) -> bytes:
        value: bytes = record.value
        return value + self._identity.sign(_covered(record, value))

    def validate(self, record: DHTRecord) -> bool:
        """Called for every record that comes in, also inside answers; any bytes are allowed."""
        if not SIGNATURE_BYTES < len(record.value) <= RECORD_BYTES_MAX + SIGNATURE_BYTES:
            return False
        if record.expiration_time > self._clock() + TTL_MAX_S + CLOCK_TOLERANCE_S:
            return False
        return _holds(record)

    def strip_value(self, record: DHTRecord) -> bytes:
        value: bytes = record.value[:-SIGNATURE_BYTES]
        return value


# One look-up sees a record once per replica, and again at every refresh.
@functools.lru_cache(maxsize=8192)
def _holds(record: DHTRecord) -> bool:
    value, signature = record.value[:-SIGNATURE_BYTES], record.value[-SIGNATURE_BYTES:]
    # hivemind loads value and subkey after this check; what it would load must be plain bytes under
    # a plain text, whoever signed it.
    try:
        peer_id = MSGPackSerializer.loads(record.subkey)
        content = MSGPackSerializer.loads(value)
    except Exception:
        return False
    if type(peer_id) is not str or type(content) is not bytes:
        return False
    return verify(peer_id, _covered(record, value), signature)


def _covered(record: DHTRecord, value: bytes) -> bytes:
    parts = (record.key, record.subkey, value)
    lengths = struct.pack("!IIId", *(len(part) for part in parts), record.expiration_time)
    return CONTEXT + lengths + b"".join(parts)
