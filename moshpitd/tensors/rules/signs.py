"""One bit and one scale: the scaled sign, its two scales, and how bits are packed.

One rule: sign(0) = +1, on every device and in every packing, because a bit has no third value.
scale * sign(v) with scale = ||v||_1 / d is a contraction, delta = ||v||_1^2 / (d ||v||_2^2) in
[1/d, 1]. The RMS scale ||v||_2 / sqrt(d) (DeepSpeed's) is none for sparse vectors: a one-hot of 64
comes back with 1.75 times its own norm as error. L1 is the default; RMS is for bit-compatibility.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moshpitd.errors import RemoteProtocolError, TrainerError

_BITS = (128, 64, 32, 16, 8, 4, 2, 1)  # most significant bit first, as numpy.packbits does
SCALE_BYTES = 4


class Scale(Enum):
    """How long a vector of signs is made."""

    L1 = "l1"
    RMS = "rms"


@dataclass(frozen=True, slots=True)
class Signs:
    """A coded vector: value i is +scale where `positive[i]`, else -scale.

    scale: 0-d, dtype of the values. positive: 1-D bool. Where a mask was given, masked elements
    decode to zero; the mask is known at both ends (it follows from the frozen variance) and does
    not travel.
    """

    scale: Tensor
    positive: Tensor
    mask: Tensor | None = None

    def values(self) -> Tensor:
        """1-D, dtype of the scale; exactly two magnitudes at most: scale, and 0 where masked."""
        decoded = torch.where(self.positive, self.scale, -self.scale)
        return decoded if self.mask is None else decoded * self.mask


def encode_signs(values: Tensor, scale: Scale, mask: Tensor | None = None) -> Signs:
    """The scaled sign of 1-D floating `values`; `mask` 1-D bool, True where elements take part.

    Both scales are over the elements that take part; without a mask that is all of them, padding
    included (as DeepSpeed has it). A NaN or infinity has no sign worth sending: TrainerError
    (not_finite). Empty and zero vectors have scale 0.
    """
    if mask is not None:
        values = values * mask
    count = values.numel() if mask is None else int(mask.sum())
    if scale is Scale.L1:
        length = values.abs().sum() / max(1, count)
    else:
        length = torch.linalg.vector_norm(values) / math.sqrt(max(1, count))
    if not bool(torch.isfinite(length)):
        raise TrainerError(
            "one-bit codec: a value is NaN or too large, expected finite", reason="not_finite"
        )
    return Signs(length, values >= 0, mask)


def scaled_sign(values: Tensor, /) -> Tensor:
    """||v||_1 / d sign(v) as values of any shape: the compressor of EF-SignSGD, one scale per call.

    The paper takes one scale per tensor, so call it per tensor and not on a flattened bucket.
    """
    return encode_signs(values.reshape(-1), Scale.L1).values().reshape(values.shape)


def pack(positive: Tensor) -> Tensor:
    """1-D bool -> ceil(d / 8) bytes (uint8), most significant bit first, tail bits zero."""
    count = positive.numel()
    padded = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=positive.device)
    padded[:count] = positive
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=positive.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The inverse: 1-D uint8 of exactly ceil(numel / 8) bytes -> 1-D bool of `numel`."""
    if packed.numel() != -(-numel // 8):
        raise RemoteProtocolError(
            f"signs: {packed.numel()} bytes for {numel} elements, expected {-(-numel // 8)}"
        )
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return packed.view(-1, 1).bitwise_and(weights).ne(0).view(-1)[:numel]


def sign_bytes(numel: int) -> int:
    """Payload of one coded vector: a float32 scale and a bit per element."""
    return SCALE_BYTES + -(-numel // 8)
