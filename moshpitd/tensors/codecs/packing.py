"""Flags and half bytes into bytes and back. One rule: no access is strided.

Both directions work on whole machine words (eight flags are one multiplication), because access to
every second or eighth byte runs at a tenth of the speed. The first of eight flags is the highest
bit, as numpy.packbits and DeepSpeed have it; the first of two half bytes is the lower one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.tensors.slices import scratch

# Byte i of a word moves to bit 63 - i: the sum over i of 2^(63 - 9 i), as int64.
_GATHER = 0x8040201008040201 - (1 << 64)
_SPREAD = 0x0101010101010101
_PICK = 0x0102040810204080  # bit 7 - i of byte i


def packed_bytes(numel: int, *, bits: int) -> int:
    return -(-numel * bits // 8)


def pack_flags(flags: Tensor, out: Tensor) -> None:
    """flags: 1-D bool; out: ceil(numel / 8) bytes of uint8. Bits behind the last flag are 0."""
    count = out.numel()
    padded = scratch(count * 8, torch.uint8, flags.device)
    padded[flags.numel() :].zero_()
    padded[: flags.numel()].copy_(flags)
    gathered = scratch(count, torch.int64, flags.device)
    torch.mul(padded.view(torch.int64), _GATHER, out=gathered)
    out.copy_(gathered.bitwise_right_shift_(56).bitwise_and_(0xFF))


def unpack_flags(packed: Tensor, numel: int) -> Tensor:
    """`numel` flags as uint8, 0 or not 0, in this thread's scratch for int64."""
    spread = scratch(packed.numel(), torch.int64, packed.device)
    spread.copy_(packed).mul_(_SPREAD).bitwise_and_(_PICK)
    return spread.view(torch.uint8)[:numel]


def nibble_room(numel: int, device: torch.device) -> Tensor:
    """uint8 scratch for `numel` numbers of 0 to 15; a last one that fills the byte is 0."""
    room = scratch(numel + numel % 2, torch.uint8, device)
    room[numel:].zero_()
    return room


def pack_nibbles(nibbles: Tensor, out: Tensor) -> None:
    """nibbles: a whole `nibble_room`; out: half as many bytes of uint8."""
    pairs = nibbles.view(torch.int16)
    joined = scratch(pairs.numel(), torch.int16, nibbles.device)
    torch.bitwise_right_shift(pairs, 4, out=joined)
    out.copy_(joined.bitwise_or_(pairs).bitwise_and_(0xFF))


def unpack_nibbles(packed: Tensor, numel: int) -> Tensor:
    """`numel` numbers of 0 to 15 as uint8, in this thread's scratch for int16."""
    room = scratch(2 * packed.numel(), torch.int16, packed.device)
    pairs, upper = room[: packed.numel()], room[packed.numel() :]
    torch.bitwise_left_shift(pairs.copy_(packed), 4, out=upper)
    return pairs.bitwise_or_(upper).bitwise_and_(0x0F0F).view(torch.uint8)[:numel]
