"""What every codec is and promises. One rule: a promise made here has a property test.

Three promises, in rising strength of what they ask: `error_bound` holds for every value of every
call; `omega` bounds the mean squared error relative to the vector, for a stochastic codec in
expectation over seeds; `unbiased` says that this expectation is the value itself. They are what an
algorithm needs to know to choose its step size (`omega`) or to be allowed at all (`contraction`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.tensors.reduction import examine
from moshpitd.tensors.slices import scratch


class Codec(Protocol):
    """Turns 1-D contiguous values into bytes and back.

    `name` is what people write in settings, `code` what travels in a frame. `block` is how many
    values in a row share a scale, so that `error_bound` is about them; 0: all of them.
    `unbiased`: the mean of decode(encode(x, seed)) over seeds is x, up to float32 rounding. True
    for the lossless codec too; false for a codec that rounds to nearest, whatever its size.
    """

    name: str
    code: int
    block: int
    unbiased: bool

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: str) -> int:
        """Exact payload size; arithmetic only, so any size will do."""
        ...

    @abstractmethod
    def error_bound(self, absmax: float) -> float:
        """Largest |decoded - value| in a block whose largest magnitude is `absmax`."""
        ...

    @abstractmethod
    def omega(self, numel: int) -> float:
        """E ||decoded - x||^2 <= omega ||x||^2 for every x of `numel` elements.

        Holds where the largest magnitude of every block is at least 2^-100; smaller ones meet the
        end of float32 and are left to `error_bound`.
        """
        ...

    def contraction(self, numel: int) -> float:
        """delta of E ||decoded - x||^2 <= (1 - delta) ||x||^2; 0: no contraction is promised.

        Error feedback needs delta > 0: the residual it keeps is bounded by 1 / delta^2 times what
        comes in per round (ALGORITHMS 2.11), and grows without a bound where delta is 0.
        """
        return max(0.0, 1.0 - self.omega(numel))

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write the payload to the front of `out` (1-D uint8); return its length.

        A pure function of (values, seed); only stochastic codecs look at the seed, of which the
        lowest 64 bits count. Values must be finite: TrainerError(not_finite) where the codec
        notices (the lossy ones do).
        """
        ...

    def encode_fed(
        self,
        values: Tensor,
        out: Tensor,
        *,
        added: Tensor | None,
        left: Tensor,
        seed: int = 0,
        decoded: Tensor | None = None,
    ) -> int:
        """`encode` of c = values + added, and left = c - decode(payload), which is also written to
        `decoded` where that is given; returns the payload's length.

        The bytes are those of `encode(c)`. Here c is made whole before it is encoded; a codec that
        works block by block does better in one visit per slice. After an error `left` and
        `decoded` are undefined.
        """
        if added is None:
            left.copy_(values)
        else:
            torch.add(values, added, out=left)
        size = self.encode(left, out, seed=seed)
        if decoded is None:
            decoded = scratch(left.numel(), left.dtype, left.device, name="fed")
        self.decode(out[:size], decoded)
        left.sub_(decoded)
        return size

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill `out` from a payload of exactly `payload_bytes`, else RemoteProtocolError.

        Products and sums are separate operations of IEEE float32, so every device decodes to the
        same bits. A lying sender can make a decoded value infinite: check with `first_nonfinite`
        before use.
        """
        ...

    def decode_examined(self, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        """`decode`, and what `reduction.examine` says of the values: here in a second pass."""
        self.decode(payload, out)
        return examine(out)
