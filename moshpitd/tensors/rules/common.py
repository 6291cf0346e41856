"""What every family of rules needs: compressors as callables, sums in a fixed order, checks.

One rule: a sum is taken in the order of its arguments and in at least float32, so that peers that
hold the same contributions compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError


class Compressor(Protocol):
    """C(x): what the receiver will decode, as values of x's shape and dtype.

    Whoever sends encodes once and hands the rule a callable that returns the decoded payload, so
    sender and receiver agree on every bit. Unbiased: E C(x) = x, E||C(x) - x||^2 <= omega ||x||^2.
    Contractive: E||C(x) - x||^2 <= (1 - delta) ||x||^2. Draws of a random compressor are its own
    business (a seed bound into the callable): rules call it exactly once per message.
    """

    def __call__(self, values: Tensor, /) -> Tensor: ...


def identity(values: Tensor, /) -> Tensor:
    """The exact compressor: omega = 0, delta = 1. A copy, so that no state aliases an input."""
    return values.clone()


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """(1/n) sum of n >= 1 tensors, added in order; half types are added in float32."""
    return weighted_sum(tensors, [1.0] * len(tensors), divisor=len(tensors))


def weighted_sum(
    tensors: Sequence[Tensor], weights: Sequence[float], *, divisor: float = 1.0
) -> Tensor:
    """sum_i weights[i] tensors[i] / divisor, added in order, float64 in float64 and the rest in
    float32, rounded once to the tensors' dtype.

    The division comes last: one rounding for it instead of one per tensor.
    """
    same_shape(tensors)
    if len(weights) != len(tensors):
        raise LocalProtocolError(
            f"mixing: {len(weights)} weights for {len(tensors)} tensors, expected as many"
        )
    first = tensors[0]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = first.to(wide) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor.to(wide), alpha=weight)
    if divisor != 1.0:
        total.div_(divisor)
    return total.to(first.dtype)


def same_shape(tensors: Sequence[Tensor]) -> None:
    """At least one tensor, all of one shape and dtype: broadcasting would mix wrong elements."""
    if not tensors:
        raise LocalProtocolError("mixing: no tensors, expected at least one")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise LocalProtocolError(
                f"mixing: tensor {index} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(first.shape)} {first.dtype}"
            )


def require_unbiased(codec: str, *, unbiased: bool, allow_no_ef: bool, algorithm: str) -> None:
    """Refuse a biased compressor where nothing feeds its error back.

    Averaging plain top-k or sign messages does not converge for n > 1 in general, not even with
    full gradients (three-worker counterexample, arXiv 2002.12410). ConfigError names the option.
    """
    if not (unbiased or allow_no_ef):
        raise ConfigError(
            f"{algorithm} has no error feedback and {codec!r} is biased: it may diverge",
            key="codec",
            expected="an unbiased codec, an algorithm with error feedback, or allow_no_ef = true",
        )
