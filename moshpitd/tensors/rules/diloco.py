"""DiLoCo and its streaming form: many local steps, one outer step (arXiv 2311.08105, 2501.18512).

One rule: the outer step is torch.optim.SGD's on the mean of what the trainers moved,

    D = mean_i (a - x_i),    m <- mu m + D,    a <- a - lr (D + mu m)    (Nesterov's)

from the anchor a that all of them share. lr = 1 and mu = 0 make it the mean of the parameters, so
with H = 1 and plain SGD inside it is mini-batch SGD. Trap: mu = 0.9 makes a step of lr = 0.7 ten
times as long in the end; both defaults belong together.

Streaming cuts the tensors into fragments that take their outer steps in turn, so that the same
bytes are spread over all of H steps, and lands each result tau steps after it began; by then x has
moved on, and x <- alpha x + (1 - alpha) a keeps a part of that.
"""

from __future__ import annotations

from torch import Tensor

from moshpitd.errors import ConfigError


def outer_gradient(anchor: Tensor, x: Tensor) -> Tensor:
    """a - x: what local training took off, so that a step against it goes where training went."""
    return anchor - x


def outer_step(
    anchor: Tensor,
    buffer: Tensor,
    mean: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool = True,
) -> tuple[Tensor, Tensor]:
    """(anchor, momentum buffer) after one outer step; all of one shape, none is changed."""
    if momentum == 0:
        return anchor - lr * mean, buffer.clone()
    buffer = momentum * buffer + mean
    return anchor - lr * (mean + momentum * buffer if nesterov else buffer), buffer


def mixed(x: Tensor, anchor: Tensor, *, alpha: float) -> Tensor:
    """alpha x + (1 - alpha) anchor; the anchor's own bits for alpha = 0."""
    return anchor.clone() if alpha == 0 else alpha * x + (1.0 - alpha) * anchor


def fragments(tensors: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Which tensors each of `count` fragments holds: every count-th one (the paper's strided
    pattern), so that no fragment is only the first or only the last layers."""
    if not 1 <= count <= tensors:
        raise ConfigError(
            f"{count} fragments of {tensors} tensors", key="fragments", expected=f"1..{tensors}"
        )
    return tuple(tuple(range(first, tensors, count)) for first in range(count))


def check_schedule(*, every: int, count: int, overlap: int, alpha: float) -> int:
    """Steps between two fragments, every / count; ConfigError for what cannot be.

    A fragment lands before the next one leaves: one round in flight is what a link is sized for,
    and when none is in flight trainers can be compared.
    """
    if every < 1 or every % count:
        raise ConfigError(
            f"every {every} steps in {count} fragments", key="every", expected="a multiple"
        )
    spacing = every // count
    if not 0 <= overlap <= spacing:
        raise ConfigError(
            f"{overlap} steps of overlap",
            key="overlap",
            expected=f"0..{spacing}, every / fragments",
        )
    if not 0 <= alpha < 1:
        raise ConfigError(f"mixing {alpha}", key="alpha", expected="0 to below 1")
    return spacing
