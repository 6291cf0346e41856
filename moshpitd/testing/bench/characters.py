"""A small transformer that predicts the next character of the standard library's sources. One rule:
text, initial parameters, batches and learning rate are functions of (trainer, step), so that every
way of training sees the same.

Text: the sources in the order of their paths, up to `TEXT` characters; the last tenth is held out,
what is before it is cut into equal parts, one per trainer. Python's version decides what they say.

A trap of 1-bit Adam decided on the model: the bias of attention's keys has a gradient that is 0 but
for rounding, because softmax does not see it. Its frozen variance would be about 1e-20, not 0, so
that no mask finds it, and one bit of momentum over that is a step of ten thousand learning rates.
This model has no such bias.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from moshpitd.errors import ConfigError

TEXT = 2_000_000
HELD_OUT = 200_000
VOCABULARY = 128
"""ASCII; anything else is character 0."""
WIDTH, LAYERS, HEADS, CONTEXT = 64, 2, 4, 64
BATCH = 16  # windows of one trainer's step: 15 ms of a core
TEST_WINDOWS = 128  # 8,192 characters
LR, BETAS, EPS = 5e-3, (0.9, 0.98), 1e-4
"""Of 2, 3 and 5 thousandths the last was best. The epsilon bounds what one bit does to elements of
small variance (the median of sqrt(v) is 1e-3): 1-bit Adam ends 1 % lower than with 1e-8, Adam 1 %
higher. beta2 as in the first Transformer, so that a variance is worth freezing after 150 steps."""
RISE, LEAST = 40, 0.1  # steps until the learning rate is whole; the share of it at the end


Batch = tuple[Tensor, Tensor]
"""Characters and those that follow them, each (BATCH or TEST_WINDOWS, CONTEXT)."""


@cache
def text() -> Tensor:
    """1-D int64, `TEXT` characters of {0, ..., 127}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    held = bytearray()
    for path in sorted(root.glob("*.py")):
        held += path.read_bytes()
        if len(held) >= TEXT:
            break
    if len(held) < TEXT:
        raise ConfigError(
            f"{root} holds {len(held)} characters of sources", expected=f"at least {TEXT}"
        )
    found = torch.frombuffer(held[:TEXT], dtype=torch.uint8).long()
    return torch.where(found < VOCABULARY, found, 0)


def share(index: int, of: int) -> Tensor:
    whole = text()[:-HELD_OUT]
    size = len(whole) // of
    return whole[index * size : (index + 1) * size]


def batches(index: int, of: int) -> Iterator[Batch]:
    own, draw = share(index, of), torch.Generator().manual_seed(1 + index)
    while True:
        starts = torch.randint(len(own) - CONTEXT, (BATCH,), generator=draw)
        windows = own[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield windows[:, :-1], windows[:, 1:]


def held_out() -> Batch:
    own = text()[-HELD_OUT:]
    starts = torch.arange(TEST_WINDOWS) * ((HELD_OUT - CONTEXT - 1) // TEST_WINDOWS)
    windows = own[starts[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look, self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.look(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        wide = nn.functional.gelu(self.widen(self.between(x)))
        return torch.add(x, self.narrow(wide))


class Characters(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.meaning, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.meaning, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        logits: Tensor = self.head(self.last(self.blocks(self.meaning(x) + self.place(places))))
        return logits


def new_model() -> Characters:
    torch.manual_seed(0)
    return Characters()


def rate(step: int, steps: int) -> float:
    """A linear rise, then half a cosine down."""
    down = LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return LR * min(1.0, (step + 1) / RISE) * down


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
