"""The values as they are. One rule: every dtype of a layout, and not one bit changed."""

from __future__ import annotations

import torch
from torch import Tensor

from moshpitd.errors import RemoteProtocolError
from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.payload import check_flat, check_payload
from moshpitd.tensors.dtypes import DTYPES


class RawCodec(Codec):
    """The values as they are, of any dtype; lossless. Its name says what it is for float32."""

    name = "float32"
    code = 0
    block = 1
    unbiased = True

    def payload_bytes(self, numel: int, dtype: str) -> int:
        return numel * DTYPES[dtype].itemsize

    def error_bound(self, absmax: float) -> float:
        return 0.0

    def omega(self, numel: int) -> float:
        return 0.0

    def encode(self, values: Tensor, out: Tensor, *, seed: int = 0) -> int:
        size = values.numel() * values.element_size()
        check_flat(values, out, size, codec=self.name)
        out[:size].copy_(values.detach().view(torch.uint8))
        return size

    def decode(self, payload: Tensor, out: Tensor) -> None:
        size = out.numel() * out.element_size()
        check_payload(payload, size, codec=self.name)
        if out.dtype == torch.bool and size and int(payload.max().item()) > 1:
            # A bool that holds 2 compares unequal to True in some kernels and equal in others.
            raise RemoteProtocolError("payload of a bool part has bytes other than 0 and 1")
        out.view(torch.uint8).copy_(payload)
