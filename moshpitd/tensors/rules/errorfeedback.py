"""Error feedback: what a compressor left out is added to the next message.

One rule: the step size is inside, p = gamma g + e, so that a changing learning rate does not scale
old errors (EF-SGD and EF-SignSGD, arXiv 1901.09847, algorithms 1 and 2). Then x - e is plain SGD's
iterate and sum(delta) + e = gamma sum(g) for any compressor at all.

`Ec...Diana` adds learned shifts, with which full gradients converge linearly (arXiv 2010.12292).
Traps: momentum goes before the compressor; scaled sign is per tensor; the server's h of one step is
used from the next step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moshpitd.tensors.rules.common import Compressor, mean


def feed_back(update: Tensor, error: Tensor, compress: Compressor) -> tuple[Tensor, Tensor]:
    """(delta, new error) for update = gamma g: p = update + error, delta = C(p), error = p - delta.

    Any shape and floating dtype, all alike. The worker sends delta, x -= delta (or the mean of all
    workers' deltas: EC-SGD). With C = identity the error stays 0.
    """
    carried = update + error
    delta = compress(carried)
    return delta, carried - delta


def momentum_update(
    buffer: Tensor, grad: Tensor, *, momentum: float, x: Tensor, weight_decay: float = 0.0
) -> Tensor:
    """New momentum buffer b = mu b + (g + wd x): goes into `feed_back` times gamma."""
    return momentum * buffer + grad + weight_decay * x


def apply_mean(x: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """x - mean of the workers' deltas (each keeps its own error): EC-SGD's server."""
    return x - mean(deltas)


def error_bound(*, delta: float, gamma: float, sigma: float) -> float:
    """E||e||^2 <= 4 (1 - delta) gamma^2 sigma^2 / delta^2, sigma^2 bounding E||g||^2 (lemma 3 of
    the paper, from memory)."""
    return 4.0 * (1.0 - delta) * (gamma * sigma / delta) ** 2


# ---- EC-SGD with DIANA's shifts.


@dataclass(frozen=True, slots=True)
class EcWorker:
    """error e_i and shift h_i of one worker; zeros at the start."""

    error: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True)
class EcMessage:
    """What a worker sends: v = C(e + gamma g') and q = Q(g - h_i). Bytes |C| + |Q|."""

    step: Tensor
    learned: Tensor


def ec_diana_worker(
    state: EcWorker,
    grad: Tensor,
    *,
    mean_shift: Tensor,
    gamma: float,
    alpha: float,
    compress: Compressor,
    quantize: Compressor,
) -> tuple[EcMessage, EcWorker]:
    """g' = g - h_i + h; p = e + gamma g'; v = C(p); e = p - v; h_i += alpha Q(g - h_i).

    C may be biased (top-k), Q has to be unbiased with alpha <= 1 / (1 + omega). mean_shift is the
    server's h before this step. sum_i g_i' = sum_i g_i, so x - mean(e) follows the uncompressed
    path. alpha = 0 is EC-SGD; a shift fixed at grad f_i(x*) is EC-GD*; a gradient of
    `diana.lsvrg_gradient` makes it EC-LSVRG-DIANA.
    """
    step, error = feed_back(gamma * (grad - state.shift + mean_shift), state.error, compress)
    learned = quantize(grad - state.shift)
    return EcMessage(step, learned), EcWorker(error, state.shift + alpha * learned)


def ec_diana_server(
    x: Tensor, mean_shift: Tensor, messages: Sequence[EcMessage], *, alpha: float
) -> tuple[Tensor, Tensor]:
    """(x - mean v, h + alpha mean q): the new h equals mean h_i and counts from the NEXT step."""
    x = x - mean([message.step for message in messages])
    return x, mean_shift + alpha * mean([message.learned for message in messages])
