"""PowerSGD: a gradient matrix as the product of two thin ones (arXiv 1905.13727).

One rule: M = g + e is n x m, Q is m x r and equal on all workers, and only sums travel:

    P = mean_i (M_i Q),   P^ = orthonormal columns of P,   Q <- mean_i (M_i^T P^)
    gradient = P^ Q^T,    e_i <- M_i - P^ (M_i^T P^)^T

Both steps are linear in M, so the workers get the rank-r approximation of the mean without anybody
holding it, and mean(M) = P^ Q^T + mean(e). Q is the start of the next step (power iteration).
Traps: a column of P that is zero, or in the span of those before, has no direction; it becomes
zero, and its zero column of Q would stay zero for ever, so `revived` draws a new one. Vectors do
not gain and travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEGLIGIBLE = 1e-5
"""Of a column's norm: what is left of it beside the columns before is rounding (float32 sums of
some thousand elements), and no direction."""


def compresses(shape: Sequence[int], rank: int) -> bool:
    """Whether rank (n + m) elements are fewer than n m."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return rank * (rows + columns) < rows * columns


def as_matrix(values: Tensor) -> Tensor:
    """n x m: the first dimension (output channels) by all others, at least float32."""
    wide = values if values.dtype == torch.float64 else values.float()
    return wide.reshape(values.shape[0], -1)


def start(shape: Sequence[int], rank: int, *, seed: int) -> Tensor:
    """A first Q, m x r standard normal, in float32. One seed, one Q: all workers draw the same."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(math.prod(shape[1:]), rank, generator=draw)


def left(matrix: Tensor, q: Tensor) -> Tensor:
    """P = M Q, n x r."""
    return matrix @ q


def right(matrix: Tensor, p: Tensor) -> Tensor:
    """M^T P^, m x r."""
    return matrix.T @ p


def restored(p: Tensor, q: Tensor) -> Tensor:
    """P^ Q^T, n x m."""
    return p @ q.T


def orthonormal(p: Tensor) -> Tensor:
    """Gram-Schmidt on the columns, in order, each twice (once leaves rounding of the first pass
    behind); a column without a direction of its own becomes zero. Plain sums and products: equal
    bits in, equal bits out on machines of a kind, which a library's QR does not promise."""
    found = p.clone()
    for index in range(p.shape[1]):
        column, before = found[:, index], found[:, :index]
        norm = torch.linalg.vector_norm(column)
        for _ in range(2):
            column = column - before @ (before.T @ column)
        kept = torch.linalg.vector_norm(column)
        alive = bool(kept > NEGLIGIBLE * norm)
        found[:, index] = column / kept if alive else torch.zeros_like(column)
    return found


def revived(q: Tensor, *, seed: int) -> Tensor:
    """q with a new normal draw in the place of every zero column."""
    dead = ~q.any(0)
    if not bool(dead.any()):
        return q.clone()
    drawn = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(q)
    return torch.where(dead, drawn, q)
