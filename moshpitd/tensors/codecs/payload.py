"""How payloads lie in bytes, and what may be wrong with them. One rule: nothing is encoded here.

Payloads are little-endian. Scales come first, because they are float32 and must be aligned; codes
follow without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError, RemoteProtocolError, TrainerError
from moshpitd.tensors.dtypes import dtype_name
from moshpitd.tensors.slices import SLICE_BYTES, slice_bounds

FLOAT32_BYTES = 4
LARGEST = torch.finfo(torch.float32).max
# The step of float32 near zero; every bound needs it once the scale is that small.
TINIEST = 2.0**-149
# One slice of float32 values; a whole number of every codec's blocks.
SLICE = SLICE_BYTES // FLOAT32_BYTES


def blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def block_slices(numel: int, *, block: int, step: int = SLICE) -> Iterator[tuple[int, int, int]]:
    """(start, stop, width): slices of whole blocks, then the tail that does not fill one."""
    whole = numel - numel % block
    for start, stop in slice_bounds(whole, step=step):
        yield start, stop, block
    if whole < numel:
        yield whole, numel, numel - whole


def scales_and_codes(room: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`count` float32 scales, then all that follows as codes of `dtype`."""
    border = count * FLOAT32_BYTES
    return room[:border].view(torch.float32), room[border:].view(dtype)


def aligned(payload: Tensor) -> Tensor:
    """The payload, copied only if torch would refuse a typed view at its offset in its storage."""
    return payload if payload.storage_offset() % FLOAT32_BYTES == 0 else payload.clone()


def aligned_room(out: Tensor, size: int) -> Tensor:
    """The front of `out`, or a temporary of that size where no typed view of `out` is possible.

    Hand it to `landed` when it is filled.
    """
    return out[:size] if out.storage_offset() % FLOAT32_BYTES == 0 else torch.empty_like(out[:size])


def landed(room: Tensor, out: Tensor) -> int:
    """Bring a filled `aligned_room` to the front of `out`, if it is not there; its length."""
    size = room.numel()
    if room.data_ptr() != out.data_ptr():
        out[:size].copy_(room)
    return size


def check_float32(dtype: str, *, codec: str) -> None:
    if dtype != "float32":
        raise LocalProtocolError(
            f"codec {codec}: got {dtype}, expected float32 (codec_for gives raw)"
        )


def check_flat(values: Tensor, out: Tensor, size: int, *, codec: str) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise LocalProtocolError(
            f"codec {codec}: values of shape {list(values.shape)}, expected contiguous 1-D"
        )
    if out.dtype != torch.uint8 or out.dim() != 1 or out.numel() < size or not out.is_contiguous():
        raise LocalProtocolError(
            f"codec {codec}: room {dtype_name(out.dtype)} {list(out.shape)}, expected contiguous "
            f"1-D uint8 of at least {size} bytes"
        )


def check_payload(payload: Tensor, size: int, *, codec: str) -> None:
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise RemoteProtocolError(
            f"payload of codec {codec}: {dtype_name(payload.dtype)} {list(payload.shape)}, "
            f"expected {size} bytes"
        )


def checked_scales(scales: Tensor, *, codec: str) -> Tensor:
    if not bool(torch.isfinite(scales).all().item()):
        raise RemoteProtocolError(f"payload of codec {codec}: a scale is not finite")
    return scales


def checked_norm(squared: float, *, codec: str) -> float:
    """What compiled decoders return: the squared norm, or -1 where a scale is not finite."""
    if squared < 0:
        raise RemoteProtocolError(f"payload of codec {codec}: a scale is not finite")
    return squared


def check_finite(*numbers: float, codec: str) -> None:
    """Numbers that are finite exactly when all values are: their extremes, or a sum in float64."""
    if not all(math.isfinite(number) for number in numbers):
        raise TrainerError(
            f"codec {codec}: the values hold NaN or infinity, expected finite values",
            reason="not_finite",
        )


def checked_extremes(values: Tensor, *, codec: str) -> tuple[float, float]:
    """(lowest, highest) of all values, which are finite; (0, 0) of none."""
    low, high = math.inf, -math.inf
    for start, stop in slice_bounds(values.numel(), step=SLICE):
        least, most = (side.item() for side in torch.aminmax(values[start:stop]))
        check_finite(least, most, codec=codec)
        low, high = min(low, least), max(high, most)
    return (low, high) if low <= high else (0.0, 0.0)
