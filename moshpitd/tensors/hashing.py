"""Digest of a bucket's contents. One rule: equal bytes, equal digest, on every machine.

blake2b rather than a checksum: a newcomer compares the digest of a donor's snapshot with a second
member's word, and a checksum can be met on purpose.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError

DIGEST_BYTES = 16
_CHUNK_BYTES = 64 * 1024 * 1024  # keeps one call's time bounded; hashlib drops the GIL inside it


def digest(buffer: Tensor) -> bytes:
    """16 bytes of blake2b over a 1-D uint8 CPU tensor (contiguous, read only here)."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise LocalProtocolError(
            f"digest: got {buffer.dtype} {list(buffer.shape)}, expected contiguous 1-D uint8"
        )
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    view = buffer.detach().numpy().data  # no copy
    for start in range(0, len(view), _CHUNK_BYTES):
        state.update(view[start : start + _CHUNK_BYTES])
    return state.digest()
