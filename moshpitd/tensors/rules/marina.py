"""MARINA, VR-MARINA and PP-MARINA: compressed differences of gradients, full ones now and then.

One rule: the coin of a round is a function of (seed, round), so nobody has to be told it
(arXiv 2102.07845, algorithm 1). g^0 = grad f(x^0), dense; x^{k+1} = x^k - gamma g^k; then on heads
all send full gradients, g = mean grad f_i(x^{k+1}); on tails g += mean Q(grad f_i(x^{k+1}) - grad
f_i(x^k)). Expected floats per worker and round: p d + (1-p) |Q|.

Trap: g is biased given the past and adds up, so a worker that misses one tails round holds a wrong
g until the next heads: the natural point to resync, and the only one that needs no snapshot
(`may_apply`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from torch import Tensor

from moshpitd.errors import LocalProtocolError
from moshpitd.tensors.rules.common import Compressor, mean


def coin(seed: int, round_number: int, *, chance: float) -> bool:
    """True (heads, full gradients) with probability `chance`; equal on all peers and machines.

    Round 0, the start, is always heads.
    """
    if round_number == 0:
        return True
    digest = hashlib.blake2b(f"marina/{seed}/{round_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < chance * 2.0**64


def marina_message(
    grad: Tensor, before: Tensor | None, *, heads: bool, quantize: Compressor
) -> Tensor:
    """What a worker sends: grad f_i(x^{k+1}) whole, or Q(grad f_i(x^{k+1}) - grad f_i(x^k)).

    VR-MARINA: both gradients of the same mini-batch on tails, full local gradient on heads.
    `before` may be None on heads only. Any shape and floating dtype.
    """
    if heads:
        return grad.clone()
    if before is None:
        raise LocalProtocolError("marina: a tails round, expected the gradient at the last point")
    return quantize(grad - before)


def marina_estimate(g: Tensor | None, messages: Sequence[Tensor], *, heads: bool) -> Tensor:
    """The new g: mean of the messages on heads (exact), g + mean of the messages on tails.

    PP-MARINA: on tails `messages` are those of the r sampled workers (with repetition, each its own
    draw of Q), on heads those of all. `g` may be None on heads only.
    """
    if heads:
        return mean(messages)
    if g is None:
        raise LocalProtocolError("marina: no estimate yet, expected to wait for a heads round")
    return g + mean(messages)


def marina_step(x: Tensor, g: Tensor, *, gamma: float) -> Tensor:
    """x^{k+1} = x^k - gamma g^k."""
    return x - gamma * g


def may_apply(*, last_applied: int, round_number: int, heads: bool) -> bool:
    """Whether a worker whose g contains all rounds up to `last_applied` may use this round's
    messages: always on heads, on tails only if it missed none."""
    return heads or round_number == last_applied + 1


def marina_chance(omega: float, *, batch: int | None = None, samples: int | None = None) -> float:
    """p = 1 / (1 + omega); VR: min(that, b / (b + m)) for mini-batches of b out of m samples."""
    chance = 1.0 / (1.0 + omega)
    if batch is not None and samples is not None:
        chance = min(chance, batch / (batch + samples))
    return chance


def marina_gamma(*, smoothness: float, omega: float, workers: int, chance: float) -> float:
    """1 / (L (1 + sqrt((1-p) omega / (p n)))); with p = 1/(1+omega) it is 1 / (L (1 + omega /
    sqrt(n)))."""
    return 1.0 / (smoothness * (1.0 + math.sqrt((1.0 - chance) * omega / (chance * workers))))


def expected_floats(numel: int, *, coded: float, chance: float) -> float:
    """p d + (1-p) |Q|: floats that a worker sends per round on average."""
    return chance * numel + (1.0 - chance) * coded
