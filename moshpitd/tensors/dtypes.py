"""Which dtypes travel, and by which rule. One rule: a dtype is in this table or is refused by name.

Names are torch's without the prefix ("float32"), because they travel in schemas and logs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moshpitd.errors import TrainerError


@dataclass(frozen=True, slots=True)
class DtypeRule:
    """One row: the torch dtype, its size, how contributions combine, in what they accumulate."""

    name: str
    torch_dtype: torch.dtype
    itemsize: int
    rule: str  # "mean" | "max"
    accumulate_in: torch.dtype


# The order is the order of the regions in a bucket, so it is part of the wire format: append only.
# Integers and bool take the maximum (step counters: the furthest one is right, a mean is no step).
# uint16/32/64 are absent because torch has no maximum kernel for them; float8, complex and
# quantized dtypes because a mean in them either is undefined or loses more than it says.
_ROWS = (
    DtypeRule("float64", torch.float64, 8, "mean", torch.float64),
    DtypeRule("float32", torch.float32, 4, "mean", torch.float32),
    DtypeRule("float16", torch.float16, 2, "mean", torch.float32),
    DtypeRule("bfloat16", torch.bfloat16, 2, "mean", torch.float32),
    DtypeRule("int64", torch.int64, 8, "max", torch.int64),
    DtypeRule("int32", torch.int32, 4, "max", torch.int32),
    DtypeRule("int16", torch.int16, 2, "max", torch.int16),
    DtypeRule("int8", torch.int8, 1, "max", torch.int8),
    DtypeRule("uint8", torch.uint8, 1, "max", torch.uint8),
    DtypeRule("bool", torch.bool, 1, "max", torch.bool),
)

DTYPES: dict[str, DtypeRule] = {row.name: row for row in _ROWS}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"; also for refused dtypes, so that a message can name them."""
    return str(dtype).removeprefix("torch.")


def dtype_rule(name: str, *, where: str) -> DtypeRule:
    """The row for `name`, or TrainerError(INVALID_ARGUMENT) that says which tensor asked for it."""
    row = DTYPES.get(name)
    if row is None:
        raise TrainerError(
            f"{where} has dtype {name}, which cannot be averaged; expected one of "
            f"{', '.join(DTYPES)}",
            reason="dtype_refused",
        )
    return row
