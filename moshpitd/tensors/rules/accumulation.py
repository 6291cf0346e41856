"""Gradients of several micro-batches as one (2.2 and 2.20 of the specifications: the swarm-wide
target batch, and accumulation that makes communication rare).

One rule: a gradient counts as often as samples are in it, so k micro-batches are the one batch that
holds them all, whatever their sizes:

    g = sum_k n_k g_k / sum_k n_k
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Accumulated:
    """Invariant: `mean` is the running mean of what was added, weighted by samples. A mean and not
    a sum: a sum of thousands of half-precision gradients overflows."""

    mean: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0

    def add(self, gradients: Mapping[str, Tensor], samples: int) -> None:
        """mean += (g - mean) n / (all samples). `samples` at least 1."""
        self.samples += samples
        share = samples / self.samples
        for name, gradient in gradients.items():
            held = self.mean.get(name)
            self.mean[name] = gradient.clone() if held is None else held + (gradient - held) * share

    def taken(self, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """(mean, samples), zeros and 0 where nothing was added; begins anew."""
        found = {name: self.mean.get(name, torch.zeros_like(value)) for name, value in like.items()}
        samples, self.samples, self.mean = self.samples, 0, {}
        return found, samples
