"""How far an average may be from the true mean, from what each codec promises of itself.

One rule: a bound comes from `Codec.error_bound` and the inputs alone, never from what a run gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moshpitd.tensors.codecs import CODECS

FLOAT32_STEPS = 4 * 2.0**-24
"""Additions and one division in float32, for groups of a few members."""


def true_mean(values: Sequence[torch.Tensor], weights: Sequence[int] = ()) -> torch.Tensor:
    """sum w_i x_i / sum w_i in float64."""
    weights = weights or [1] * len(values)
    total = sum(own.double() * weight for own, weight in zip(values, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(weights)


def mean_bound(codec: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Per element (float64), for a first round or one without error feedback: every contribution
    is rounded once, then their mean is.

    `values` are float32 tensors that begin at a block's border, so blocks are counted from 0.
    """
    inputs = [_rounding(codec, own) for own in values]
    into = torch.stack(inputs).mean(0)
    mean = true_mean([own.reshape(-1).abs() for own in values]) + into
    return into + _rounding(codec, mean) + mean * FLOAT32_STEPS


def _rounding(codec: str, values: torch.Tensor) -> torch.Tensor:
    """What encoding and decoding may change, per element."""
    chosen, flat = CODECS[codec], values.reshape(-1).double().abs()
    if chosen.error_bound(1.0) == 0:
        return torch.zeros(flat.numel(), dtype=torch.float64)
    step = chosen.block or flat.numel()
    bounds = [chosen.error_bound(block.max().item()) for block in flat.split(step)]
    return torch.tensor(bounds, dtype=torch.float64).repeat_interleave(step)[: flat.numel()]


class Bounds:
    """The same round after round, with error feedback: what was rounded away comes with the next.

    So an average is not within the codec's bound of mean(x), but of mean(x + what is owed), and
    what is owed is within the bound of the round before: about twice `mean_bound`. In return the
    sum of all averages stays within `owed` of the sum of all means, after any number of rounds.
    """

    def __init__(self, codec: str, numel: int) -> None:
        self._codec = codec
        self._sender = torch.zeros(numel, dtype=torch.float64)
        self._reducer = torch.zeros(numel, dtype=torch.float64)

    def of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """How far the next average may be from the mean of these."""
        sender, reducer = self._sender, self._reducer
        inputs = [_rounding(self._codec, own.reshape(-1).double().abs() + sender) for own in values]
        into = sender + torch.stack(inputs).mean(0)
        mean = true_mean([own.reshape(-1).abs() for own in values]) + into + reducer
        last = _rounding(self._codec, mean)
        # Who reduces a part may owe since long ago: the largest of all rounds.
        self._sender = torch.stack([sender, *inputs]).amax(0)
        self._reducer = torch.maximum(reducer, last)
        return into + reducer + last + mean * FLOAT32_STEPS

    def owed(self, *, reducers: int) -> torch.Tensor:
        """What all owe together, where so many members have reduced every part at some time."""
        return self._sender + reducers * self._reducer
