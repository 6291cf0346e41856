"""What the tests of the training rules share: worked examples, compressors, small problems.

One rule: nothing here is the code under test; compressors are written from their definitions, so
that a rule is checked against a stranger's codec.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT = torch.float64


def examples(*patterns: str) -> list[dict[str, Any]]:
    """All worked examples whose names match; more of a kind may be dropped into the folder."""
    files = sorted({path for pattern in patterns for path in GOLDEN.glob(f"{pattern}.json")})
    assert files, f"no worked example for {patterns} in {GOLDEN}"
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def named(example: dict[str, Any]) -> str:
    return str(example["name"])


def dtype_of(example: dict[str, Any]) -> torch.dtype:
    return torch.float32 if example["dtype"] == "float32" else torch.float64


def tensor(values: Any, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def close(ours: Tensor, theirs: Any, atol: float) -> None:
    torch.testing.assert_close(ours, tensor(theirs, ours.dtype), atol=atol, rtol=0)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=FLOAT)


def generators() -> st.SearchStrategy[torch.Generator]:
    """Seeded generators: hypothesis shrinks the seed, torch fills the tensors."""
    return st.integers(0, 2**31 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


# ---- Compressors, from their definitions.


def top_k(k: int) -> Callable[[Tensor], Tensor]:
    """The k largest magnitudes, ties to the lowest index."""

    def compress(values: Tensor) -> Tensor:
        order = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
        kept = torch.zeros_like(values)
        kept[order] = values[order]
        return kept

    return compress


def chosen(indices: list[int]) -> Callable[[Tensor], Tensor]:
    """rand-k with its draw written down: the coordinates times d / k."""

    def compress(values: Tensor) -> Tensor:
        kept = torch.zeros_like(values)
        kept[indices] = values[indices] * (values.numel() / len(indices))
        return kept

    return compress


def rand_k(k: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def compress(values: Tensor) -> Tensor:
        draw = torch.randperm(values.numel(), generator=generator)[:k].tolist()
        return chosen(draw)(values)

    return compress


def qsgd(levels: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def compress(values: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(values)
        if not norm:
            return torch.zeros_like(values)
        scaled = values.abs() / norm * levels
        uniform = torch.rand(values.shape, generator=generator, dtype=values.dtype)
        return norm / levels * values.sign() * (scaled.floor() + (uniform < scaled.frac()))

    return compress


def rounded(values: Tensor) -> Tensor:
    """A crude biased compressor of any scale: float16 rounding, then a twentieth too small."""
    return values.to(torch.float16).to(values.dtype) * 0.95


def minmax_uint8(values: Tensor) -> Tensor:
    """BAGUA's MinMaxUInt8 in float32, wrap-around and all."""
    low, high = values.min(), values.max()
    scale = 255.0 / (high - low + 1e-7)
    upper = torch.round(high * scale)
    lower = upper - 255.0
    codes = (torch.minimum(torch.round(values * scale), upper) - lower).to(torch.int64) & 255
    return (codes.to(values.dtype) + lower) / scale


# ---- Problems.


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = sum a_i (x - b_i)^2 / 2 per worker, as in most worked examples."""

    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, generator: torch.Generator, *, workers: int, numel: int) -> Quadratics:
        a = 0.5 + torch.rand(workers, numel, generator=generator, dtype=FLOAT)
        return cls(a, normal(generator, workers, numel))

    def grad(self, worker: int, x: Tensor) -> Tensor:
        return self.a[worker] * (x - self.b[worker])

    def grads(self, x: Tensor) -> list[Tensor]:
        return [self.grad(worker, x) for worker in range(len(self.a))]

    def optimum(self) -> Tensor:
        return (self.a * self.b).sum(0) / self.a.sum(0)


def rho(rows: list[list[float]]) -> float:
    """||W - 11^T/n||_2."""
    w = tensor(rows)
    return float(torch.linalg.matrix_norm(w - 1.0 / len(rows), 2))


def nearly(value: float, other: float, tolerance: float = 1e-12) -> bool:
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance)
