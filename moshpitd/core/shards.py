"""Where a run's records lie in the directory when there are too many for one key, and how many they
must be.

A directory answer is one message of at most about 2 MiB, so beyond `SHARD_FULL` peers the records
are spread over 2^depth keys by a hash of the PeerID. How deep follows from the grid's shape, which
all peers of an epoch share, so everybody looks where the others store. The members of shard 0 also
stay under the first key: whoever comes to the run without knowing its size finds them there.

One rule: pure functions of PeerIDs and numbers, so that nobody has to be told where to look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, log2

from moshpitd.core.grid import PEERS_KEY

SHARD_FULL = 64
"""Records under one key: 64 of 16 KiB, the largest allowed, are half of what an answer holds."""

SHARD_AIM = 40
"""Records per shard aimed at: a shard may hold 15 % more than its shape was made for, and the
hash spreads them unevenly (40 * 1.15 + 2.6 standard deviations = 64)."""

MAX_DEPTH = 16
"""65,536 shards of 40: two million peers."""

STEP = 4
"""Bits by which shards get finer while no shape fits: 16 hold 4,096 peers before they are overfull
too, 256 hold 65,536."""

COUNTED = 3
"""Shards counted at every look: ours and the two after it; a third more peers than one alone makes
the count 1.7 times as sure."""

ALL_COUNTED = 4
"""Up to so many shards all are counted: where a shape is for 100 peers, every peer matters."""

SURVEYED = 16
"""Shards counted before a shape is proposed: 640 peers, an estimate within 4 %."""


@lru_cache(maxsize=1 << 15)
def hash_of(peer_id: str) -> int:
    """64 bits that spread PeerIDs evenly."""
    return int.from_bytes(hashlib.blake2b(peer_id.encode(), digest_size=8).digest(), "big")


def depth_for(cells: int) -> int:
    """Bits of the hash that name a shard when the grid has so many cells."""
    if cells <= SHARD_FULL:
        return 0
    return min(MAX_DEPTH, ceil(log2(cells / SHARD_AIM)))


def shard_of(peer_id: str, depth: int) -> int:
    return hash_of(peer_id) >> (64 - depth)


def shard_key(number: int, depth: int) -> str:
    return f"{PEERS_KEY}/{number:0{depth}b}" if depth else PEERS_KEY


@lru_cache(maxsize=1 << 15)
def keys_of(peer_id: str, depth: int) -> tuple[str, ...]:
    """Keys under which the peer's record belongs; the first one is its shard."""
    number = shard_of(peer_id, depth) if depth else 0
    if depth and number == 0:
        return shard_key(0, depth), PEERS_KEY
    return (shard_key(number, depth),)


@lru_cache(maxsize=1 << 15)
def counted(peer_id: str, depth: int) -> tuple[str, ...]:
    """The shards after ours that are counted with it."""
    shards = 1 << depth
    number = shard_of(peer_id, depth) if depth else 0
    many = shards if shards <= ALL_COUNTED else COUNTED
    return tuple(shard_key((number + i) % shards, depth) for i in range(1, many))


def surveyed(peer_id: str, depth: int) -> tuple[str, ...]:
    """Shards evenly spread over all, for an estimate to base a shape on."""
    shards = 1 << depth
    number = shard_of(peer_id, depth) if depth else 0
    many = min(SURVEYED, shards)
    return tuple(shard_key((number + i * shards // many) % shards, depth) for i in range(many))


def position(peer_id: str, shard: Sequence[str], depth: int) -> float:
    """Where the peer stands among all, as a fraction: by its shard, then by its rank in it. Peers
    that know their own shards alone are spread over all positions almost evenly."""
    own = hash_of(peer_id)
    below = sum(1 for other in shard if hash_of(other) < own)
    return ((shard_of(peer_id, depth) if depth else 0) + (below + 0.5) / (len(shard) + 1)) / (
        1 << depth
    )


def draw(*words: object) -> float:
    """A number in [0, 1) that everybody draws alike from the same words."""
    text = "/".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64
