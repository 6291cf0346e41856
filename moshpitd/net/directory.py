"""Signed records of the directory: what a storing or asking node accepts, and whose word it is.

One rule: a record counts only under the PeerID that signed it. The signature covers key, PeerID,
value and expiry, so nobody can move a record, alter it or keep it alive beyond its time; a node
that stores for others refuses what does not hold, and so does one that asks.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from moshpitd.net.identity import Identity, verify

# Separates these signatures from everything else that the identity key signs.
CONTEXT = b"moshpitd-directory-1\0"
SIGNATURE_BYTES = 64
# A record is a peer's description of itself. At most 64 lie under one key, and hivemind's unary
# answers hold about 2 MiB: 64 * 16 KiB is half of that.
RECORD_BYTES_MAX = 16 * 1024
# Nobody announces for longer; clocks may be this wrong on top.
TTL_MAX_S = 3600.0
CLOCK_TOLERANCE_S = 600.0


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's hook for checking records. `clock` is the swarm's time as far as this node knows it."""

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
    # hivemind loads value and subkey after this check; what it would load must be plain bytes under a
    # plain text, whoever signed it.
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
