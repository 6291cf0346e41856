"""What a late trainer adds: exact for integers and bools, also at the ends of their range."""

from __future__ import annotations

import pytest
import torch

from moshpitd.tensors.delta import max_delta, mean_delta
from moshpitd.tensors.mapped import Scratch, anonymous, bytes_of, tensor_of, typed


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_adding_the_delta_gives_the_maximum_for_every_pair(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    values = torch.tensor([ends.min, ends.min + 1, 0, 1, 7, ends.max - 1, ends.max], dtype=dtype)
    own, result = (grid.reshape(-1) for grid in torch.meshgrid(values, values, indexing="ij"))
    out = torch.empty_like(own)
    max_delta(out, result=result, own=own)
    assert torch.equal(own + out, torch.maximum(own, result))


def test_bools_are_or_ed_and_never_cleared() -> None:
    own, result = torch.tensor([True, True, False, False]), torch.tensor([True, False] * 2)
    out = torch.empty_like(own)
    max_delta(out, result=result, own=own)
    assert torch.equal(own | out, own | result)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 300_001])
def test_deltas_add_up_over_rounds(dtype: torch.dtype, numel: int) -> None:
    start, first, second = (torch.randn(numel).to(dtype) for _ in range(3))
    out = torch.full_like(start, float("nan"))  # what was there does not matter in the first round
    mean_delta(out, result=first, contribution=start, onto=False)
    mean_delta(out, result=second, contribution=first, onto=True)
    slack = 1e-5 if dtype in (torch.float32, torch.float64) else 0.1
    assert torch.allclose(out.double(), second.double() - start.double(), rtol=0, atol=slack)


def test_scratch_of_one_name_is_reused_and_grows() -> None:
    scratch = Scratch()
    first = scratch.take("a", numel=8, dtype="float32")
    assert scratch.take("a", numel=4, dtype="float64").data_ptr() == first.data_ptr()
    assert scratch.take("b", numel=8, dtype="float32").data_ptr() != first.data_ptr()
    assert scratch.take("a", numel=100, dtype="bool").dtype == torch.bool


def test_bytes_and_tensors_share_their_memory() -> None:
    buffer = bytearray(24)
    values = typed(tensor_of(buffer, offset=8), "float32")
    values.fill_(1.0)
    assert bytes(buffer) == bytes(8) + b"\0\0\x80?" * 4
    assert bytes_of(values) == memoryview(buffer)[8:]
    assert tensor_of(bytearray()).numel() == 0
    assert not anonymous(10_000).any()
    assert anonymous(0).numel() == 0
