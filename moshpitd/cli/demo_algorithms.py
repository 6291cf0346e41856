"""What the demo plays for each algorithm. One rule: an algorithm is a row here and nothing else;
what it must prove follows from the row.

`shards` is "skewed" where the method is meant for data that differ between trainers (95 % of a
class at one of them), and "plain" where its paper assumes data distributed alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT = "moshpit-sgd"
"""Parameters averaged every 8 local steps, with yardsticks beside it: the demo without a name."""

STEPS = 480
PACE_S = 0.12
"""Together 58 s: the killed node is gone for 11 to 26 s, beginning at a fifth (measured with nine
processes on two cores that others use as well)."""
KILLED_AT = 5  # the part of the steps, one in so many, after which the node is killed

SGD = {"lr": 0.2, "momentum": 0.9}
"""As the plain loop of examples/digits.py has it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One performance. `steps` are of progress: updates that all count together where an algorithm
    has them, else each trainer's own."""

    name: str
    shards: Literal["skewed", "plain"] = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)  # JSON: `inner` by name
    steps: int = STEPS
    pace_s: float = PACE_S
    full_batch: bool = False  # whole shards, where a method compares gradients at two points
    equal: bool = True  # all trainers must hold the same bits before any last average
    rejoins: bool = True  # who was killed is given the others' state when it comes back
    together: int = 0  # of whom a round is; 0 is everybody
    store: bool = False  # no rounds: gradients go to a store, whose versions are the progress


def row(name: str, **options: Any) -> Row:
    """Replicas that compare every 8 updates, so that whoever comes back waits for a second."""
    return Row(name, options={"check_every": 8, **options})


def mixing(name: str, **options: Any) -> Row:
    """Peers that mix with neighbours: meant for data that differ; nobody's state is another's."""
    return Row(name, "skewed", options, equal=False, rejoins=False)


ROWS: dict[str, Row] = {
    found.name: found
    for found in (
        Row("gradient-averaging", options={"settle_every": 8}),
        row("gradient-allreduce", **SGD),
        row("bytegrad", **SGD),
        row("qadam", lr=0.001, betas=(0.9, 0.99), warmup_steps=100),
        Row("async-model-average", options={"every": 4, **SGD}, equal=False),
        Row("async-low-precision-average", options={"every": 4, **SGD}, equal=False),
        row("onebit-adam", lr=0.002, freeze_step=100),
        row("zero-one-adam", lr=0.002, freeze_step=100, variance_scaler=100),
        row("ef-signsgd", lr=0.05, momentum=0.9),
        row("powersgd", rank=2, **SGD),
        row("qsgd", **SGD),
        row("delayed-sgd", delay=1, **SGD),
        Row("target-batch", options={"check_every": 8, "target": 256, **SGD}, steps=200),
        Row(
            "diana", "skewed",
            {"check_every": 8, "lr": 0.5, "codec": "natural"}, full_batch=True,
        ),
        Row(
            "marina", "skewed",
            {"check_every": 8, "lr": 0.5, "codec": "natural", "chance": 0.2}, full_batch=True,
        ),
        Row(
            "diloco", "skewed",
            {"inner": "SGD", "every": 8, "check_every": 2, "outer_lr": 0.7, **SGD, "lr": 0.05},
            steps=72, pace_s=0.1,
        ),
        Row(
            "streaming-diloco", "skewed",
            {"inner": "SGD", "every": 8, "fragments": 2, "overlap": 1, "alpha": 0.25,
             "check_every": 4, **SGD, "lr": 0.05},
            steps=144, pace_s=0.1,
        ),
        mixing("d-psgd", topology="ring", **SGD),
        mixing("sgp", **SGD),
        mixing("choco-sgd", codec="qsgd", gamma=0.2, **SGD),
        mixing("decentralized", **SGD),
        mixing("low-precision-decentralized", **SGD),
        Row("ad-psgd", "skewed", SGD, equal=False, rejoins=False, together=2),
        Row("asysg-incon", "skewed", {"follow": True, **SGD}, equal=False),
        Row("asysg-con", options={"lr": 0.2}, steps=4 * STEPS, equal=False, store=True),
    )
}  # fmt: skip
NAMES = (DEFAULT, *ROWS)
