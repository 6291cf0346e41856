"""Codecs: a part's values to payload bytes and back. One rule: encode is a pure function.

Same values and same seed, same bytes, on any thread: a repeated push must equal the first, and all
members of a group decode one payload to the same bits. A codec keeps no state; scratch belongs to
the thread. One file per family; `contract.py` says what each promises, this file is the registry.

| name | bytes for d values | loses | with error feedback |
|---|---|---|---|
| float32 | 4 d | nothing | not needed |
| float16, bfloat16 | 2 d + 4 per 131,072 | 2^-11, 2^-8 of each value | yes |
| int8 | d + 4 per 1,024 | absmax / 254 | yes |
| int4 | ceil(d / 2) + 4 per 64 | absmax / 14 | yes |
| minmax-uint8 | d + 8 per 1,024 | range / 510 | yes |
| bagua-minmax-uint8 | d + 32 | (range + 1e-7) / 510, or refuses | no: may not contract |
| qsgd | d + 4 per 512 | norm / 127, unbiased | yes |
| nuqsgd | ceil(d / 2) + 4 per 8,192 | norm / 2, unbiased | yes |
| natural | d + ceil(d / 8) | at most x itself, unbiased | yes |
| top-k, 1 in 100 | 8 k | all but k values | yes, and never without |
| rand-k, 1 in 100 | 8 + 4 k | all but k values, unbiased | no: omega = 99 |
| sign-l1 | 4 + ceil(d / 8) | up to absmax | yes, and never without |
| sign-rms | 4 + ceil(d / 8) | up to absmax | no: may not contract |

A block that holds one value everywhere comes back exactly under float16, bfloat16, int8, int4,
minmax-uint8 and both signs.

Lossy codecs exist for float32 only. float64 asked for more precision than they have, the half types
are as small already, and a rounded integer is a wrong integer; so `codec_for` gives those raw.
"""

from __future__ import annotations

import torch

from moshpitd.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from moshpitd.tensors.codecs.absmax import INT4_BLOCK, INT8_BLOCK, AbsmaxCodec
from moshpitd.tensors.codecs.contract import Codec
from moshpitd.tensors.codecs.half import HALF_BLOCK, HalfCodec
from moshpitd.tensors.codecs.levels import (
    NUQSGD_BUCKET,
    QSGD_BUCKET,
    DyadicLevels,
    NormCodec,
    UniformLevels,
)
from moshpitd.tensors.codecs.minmax import MINMAX_BLOCK, BaguaMinmaxCodec, MinmaxCodec
from moshpitd.tensors.codecs.natural import NaturalCodec
from moshpitd.tensors.codecs.raw import RawCodec
from moshpitd.tensors.codecs.sign import SignCodec
from moshpitd.tensors.codecs.sparse import DENSITY, RandKCodec, TopKCodec
from moshpitd.tensors.dtypes import DTYPES

__all__ = [
    "CODECS",
    "HALF_BLOCK",
    "INT4_BLOCK",
    "INT8_BLOCK",
    "MINMAX_BLOCK",
    "NUQSGD_BUCKET",
    "QSGD_BUCKET",
    "RAW",
    "Codec",
    "HalfCodec",
    "RawCodec",
    "codec_by_code",
    "codec_for",
]

RAW = RawCodec()
# Codes are on the wire: append, never change. A code stands for its parameters too; another number
# of levels or another density is another codec with another code.
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RAW,
        HalfCodec(name="float16", code=1, dtype=torch.float16),
        HalfCodec(name="bfloat16", code=2, dtype=torch.bfloat16),
        AbsmaxCodec(name="int8", code=3, bits=8, block=INT8_BLOCK),
        AbsmaxCodec(name="int4", code=4, bits=4, block=INT4_BLOCK),
        MinmaxCodec(),
        BaguaMinmaxCodec(),
        NormCodec(name="qsgd", code=7, levels=UniformLevels(steps=127, bits=8), bucket=QSGD_BUCKET),
        NormCodec(
            name="nuqsgd", code=8, levels=DyadicLevels(halvings=6, bits=4), bucket=NUQSGD_BUCKET
        ),
        NaturalCodec(),
        TopKCodec(name="top-k", code=10, one_in=DENSITY),
        RandKCodec(name="rand-k", code=11, one_in=DENSITY),
        SignCodec(name="sign-l1", code=12, root=False),
        SignCodec(name="sign-rms", code=13, root=True),
    )
}
_BY_CODE = {codec.code: codec for codec in CODECS.values()}


def codec_for(name: str, dtype: str) -> Codec:
    """The codec called `name` for a part of `dtype`: raw for everything but float32."""
    chosen = CODECS.get(name)
    if chosen is None:
        raise ConfigError(f"unknown codec {name!r}", key="codec", expected=", ".join(CODECS))
    if dtype not in DTYPES:
        raise LocalProtocolError(f"codec {name}: dtype {dtype!r} has no region in any layout")
    return chosen if dtype == "float32" else RAW


def codec_by_code(code: int) -> Codec:
    """The codec a frame names; RemoteProtocolError for a code that nobody here knows."""
    chosen = _BY_CODE.get(code)
    if chosen is None:
        raise RemoteProtocolError(f"unknown codec code {code}, expected one of {sorted(_BY_CODE)}")
    return chosen
