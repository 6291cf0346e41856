"""How far an average may be from the true mean, from what each codec promises of itself.

One rule: a bound comes from `Codec.error_bound` and the inputs alone, never from what a run gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moshpitd.tensors.codecs import CODECS, HALF_BLOCK, INT8_BLOCK

_BLOCKS = {"float32": 1, "float16": HALF_BLOCK, "bfloat16": HALF_BLOCK, "int8": INT8_BLOCK}
FLOAT32_STEPS = 4 * 2.0**-24
"""Additions and one division in float32, for groups of a few members."""


def true_mean(values: Sequence[torch.Tensor], weights: Sequence[int] = ()) -> torch.Tensor:
    """sum w_i x_i / sum w_i in float64."""
    weights = weights or [1] * len(values)
    total = sum(own.double() * weight for own, weight in zip(values, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(weights)


def mean_bound(codec: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Per element (float64): every contribution is rounded once, then their mean is.

    `values` are float32 tensors that begin at a block's border, so blocks are counted from 0.
    """
    inputs = [_rounding(codec, own) for own in values]
    into = torch.stack(inputs).mean(0)
    mean = true_mean([own.reshape(-1).abs() for own in values]) + into
    return into + _rounding(codec, mean) + mean * FLOAT32_STEPS


def _rounding(codec: str, values: torch.Tensor) -> torch.Tensor:
    """What encoding and decoding may change, per element."""
    chosen, step = CODECS[codec], _BLOCKS[codec]
    if step == 1:
        return torch.zeros(values.numel(), dtype=torch.float64)
    flat = values.reshape(-1).double().abs()
    bounds = [chosen.error_bound(block.max().item()) for block in flat.split(step)]
    return torch.tensor(bounds, dtype=torch.float64).repeat_interleave(step)[: flat.numel()]
