"""What is averaged in a bench, what must come out, and who is inside it.

One rule: the truth is computed from the seeds alone, in float64; nothing that a system returned or
reported goes into it.

Peer i contributes one block of random numbers again and again. A prime number of them, so that no
part begins where another does: values that landed in the wrong part are wrong values. The mean over
any members with any weights is then a block as well, which costs nothing to compute, and comparing
100 million values with it costs two passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from moshpitd.tensors.codecs import CODECS
from moshpitd.tensors.layout import part_bytes_for
from moshpitd.tensors.mapped import bytes_of

Subset = tuple[int, ...]

BLOCK = 1_048_573  # the largest prime below 2^20
PIECES = 8  # tensors of a model: one flat tensor would be kinder to us than models are
ALL_SUBSETS = 6  # members of which all subsets are tried: 63
GLANCE = 512
"""Values that are looked at to tell who is in a part: that two subsets of normal numbers agree in
all of them within 0.1 has no chance."""
FLOAT32_STEP = 2.0**-24
FEEDBACK = 2.0
"""With error feedback a sender adds what it owes from the round before, at most another bound."""
WIDEST = "int8"
"""Of the codecs that `auto` chooses from."""


def block(peer: int, round_number: int, *, of: int = BLOCK) -> Tensor:
    """The values of one peer in one round, float32."""
    source = torch.Generator().manual_seed(round_number * 1009 + peer + 1)
    return torch.randn(min(of, BLOCK), generator=source)


def flat_tensor(numel: int) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor and the views of it that stand for a model's parameters, in its order."""
    flat = torch.zeros(numel)
    # 16 values are 64 bytes: the bucket then holds the same order without gaps.
    step = -(-numel // (16 * PIECES)) * 16
    return flat, list(flat.split(step))


def fill(flat: Tensor, own: Tensor) -> None:
    """The block again and again, over the whole tensor."""
    for piece in flat.split(own.numel()):
        piece.copy_(own[: piece.numel()])


@dataclass(frozen=True, slots=True)
class Truth:
    """What all members of a round contributed, and how far from the mean a codec may be."""

    blocks: tuple[Tensor, ...]
    weights: tuple[int, ...]
    bound: float

    @classmethod
    def of_round(
        cls, round_number: int, weights: Sequence[int], *, codec: str, numel: int
    ) -> Truth:
        blocks = tuple(block(peer, round_number, of=numel) for peer in range(len(weights)))
        largest = max(float(one.abs().max()) for one in blocks)
        return cls(blocks, tuple(weights), mean_bound(codec, largest, members=len(weights)))

    def mean(self, inside: Iterable[int]) -> Tensor:
        """sum w_i x_i / sum w_i over these members, one block, float32."""
        members = list(inside)
        total = sum(self.weights[i] for i in members)
        summed = torch.zeros(self.blocks[0].numel(), dtype=torch.float64)
        for i in members:
            summed += self.blocks[i].double() * (self.weights[i] / total)
        return summed.float()


def mean_bound(codec: str, largest: float, *, members: int) -> float:
    """How far a mean of values up to `largest` may be off: every contribution is rounded once, and
    then their mean is."""
    chosen = CODECS[codec if codec in CODECS else WIDEST]
    into = chosen.error_bound(largest) * FEEDBACK
    out = chosen.error_bound(largest + into) * FEEDBACK
    return (into + out) * 1.01 + largest * members * 4 * FLOAT32_STEP


def candidates(members: int, doubtful: Sequence[int]) -> list[Subset]:
    """Who may be inside a part, likeliest first: all but any of the doubtful ones, then any
    subset of a small group."""
    sure = [i for i in range(members) if i not in doubtful]
    found: dict[Subset, None] = {}
    for count in range(len(doubtful) + 1):
        for missing in combinations(doubtful, count):
            inside = tuple(sorted([*sure, *(i for i in doubtful if i not in missing)]))
            if inside:
                found[inside] = None
    if members <= ALL_SUBSETS:
        for count in range(members, 0, -1):
            for inside in combinations(range(members), count):
                found[inside] = None
    return list(found)


@dataclass(slots=True)
class Inside:
    """Who is in which part of a tensor. Part numbers are those of the daemon's layout."""

    parts: int
    members: list[Subset | None]  # by part; None: no mean of any candidates
    worst: float = 0.0  # largest error of a part that is a mean, in bounds

    @property
    def unexplained(self) -> list[int]:
        return [part for part, inside in enumerate(self.members) if inside is None]

    def counts(self) -> dict[str, int]:
        """Parts by who is in them: {"0,1,2": 381}."""
        found: dict[str, int] = {}
        for inside in self.members:
            if inside is not None:
                key = ",".join(map(str, inside))
                found[key] = found.get(key, 0) + 1
        return found


def part_numel_of(flat: Tensor) -> int:
    """Values of a part in the daemon's layout of so many float32."""
    return part_bytes_for(flat.numel() * 4) // 4


def look_inside(
    flat: Tensor, truth: Truth, *, doubtful: Sequence[int] = (), part_numel: int = 0
) -> Inside:
    """Compare every value of every part with the mean of whoever is in it. `part_numel` 0: as a
    daemon cuts it by itself."""
    part_numel = part_numel or part_numel_of(flat)
    means: dict[Subset, Tensor] = {}

    def wrapped(inside: Subset) -> Tensor:
        if inside not in means:
            once = truth.mean(inside)
            extra = min(part_numel, flat.numel())
            means[inside] = torch.cat([once] * (1 + -(-extra // once.numel())))
        return means[inside]

    choices = candidates(len(truth.blocks), doubtful)
    size = truth.blocks[0].numel()
    found = Inside(-(-flat.numel() // part_numel), [])
    for number, part in enumerate(flat.split(part_numel)):
        start = number * part_numel % size
        inside = _inside_part(part, wrapped, choices, start, truth.bound)
        if inside is not None:
            error = _error(part, wrapped(inside), start)
            found.worst = max(found.worst, error / truth.bound)
            if error > truth.bound:
                inside = None
        # The guess of the last part is the likeliest of the next.
        if inside is not None and choices[0] != inside:
            choices.remove(inside)
            choices.insert(0, inside)
        found.members.append(inside)
    return found


def _inside_part(
    part: Tensor,
    wrapped: Callable[[Subset], Tensor],
    choices: list[Subset],
    start: int,
    bound: float,
) -> Subset | None:
    glance = part[:GLANCE]
    for inside in choices:
        if _error(glance, wrapped(inside), start) <= bound:
            return inside
    return None


def _error(values: Tensor, mean: Tensor, start: int) -> float:
    """NaN counts as infinitely wrong."""
    error = float((values - mean[start : start + values.numel()]).abs_().max())
    return error if error == error else float("inf")


def fingerprint(flat: Tensor) -> str:
    """sha256 of the bits."""
    return hashlib.sha256(bytes_of(flat)).hexdigest()
