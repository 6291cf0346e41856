"""tensors/layout, transfer, hashing. One rule: what a peer derives depends on the specs alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moshpitd.errors import ConfigError, LocalProtocolError, TrainerError
from moshpitd.tensors.dtypes import DTYPES
from moshpitd.tensors.hashing import digest
from moshpitd.tensors.layout import (
    ALIGNMENT_BYTES,
    MAX_PARTS,
    PARTS_AT_LEAST,
    Layout,
    TensorSpec,
    specs_of,
)
from moshpitd.tensors.transfer import Staging

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SPECS = st.lists(
    st.tuples(SHAPES, st.sampled_from(sorted(DTYPES))),
    max_size=12,
).map(lambda rows: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)])


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 100, spec.shape, generator=source)
    return (whole % 2 == 0) if spec.dtype == "bool" else whole.to(DTYPES[spec.dtype].torch_dtype)


def dirty_buffer(layout: Layout) -> Tensor:
    return torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)


@given(SPECS, st.sampled_from([64, 128, 1 << 20]))
def test_parts_tile_every_region_and_cross_none(specs: list[TensorSpec], part_bytes: int) -> None:
    layout = Layout.from_specs(specs, part_bytes)
    assert [part.index for part in layout.parts] == list(range(len(layout.parts)))
    for region in layout.regions:
        assert region.offset_bytes % ALIGNMENT_BYTES == 0
        parts = [part for part in layout.parts if part.dtype == region.dtype]
        end = region.offset_bytes
        for part in parts:
            assert part.offset_bytes == end
            assert 0 < part.nbytes <= part_bytes
            assert part.nbytes == part.numel * DTYPES[part.dtype].itemsize
            assert part.rule == ("mean" if "float" in part.dtype else "max")
            end += part.nbytes
        assert sum(part.numel for part in parts) == region.numel
    assert sum(p.numel for p in layout.parts) == sum(s.numel for s in specs)


@given(SPECS, st.randoms(use_true_random=False))
def test_the_order_of_the_specs_does_not_matter(
    specs: list[TensorSpec], rng: random.Random
) -> None:
    shuffled = specs.copy()
    rng.shuffle(shuffled)
    one, two = Layout.from_specs(specs), Layout.from_specs(shuffled)
    assert one.schema_digest == two.schema_digest
    assert len(one.schema_digest) == 16
    assert one.parts == two.parts
    assert one.first_difference(shuffled) is None
    buffers = [dirty_buffer(one), dirty_buffer(two)]
    for layout, buffer in zip((one, two), buffers, strict=True):
        layout.gather([random_tensor(s, int(s.name[1:])) for s in layout.specs], buffer)
    assert digest(buffers[0]) == digest(buffers[1])


@given(SPECS, st.booleans())
def test_gather_then_scatter_is_the_identity(specs: list[TensorSpec], staged: bool) -> None:
    layout = Layout.from_specs(specs, 64)
    # 24 bytes: every tensor larger than that takes several turns through both halves.
    staging = Staging.for_device(torch.device("cpu"), half_bytes=24) if staged else None
    tensors = [random_tensor(spec, i) for i, spec in enumerate(specs)]
    buffer = dirty_buffer(layout)
    layout.gather(tensors, buffer, staging=staging)
    for tensor, view in zip(tensors, layout.views(buffer), strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    layout.scatter(buffer, back, staging=staging)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


@given(SPECS, st.data(), st.booleans())
def test_scatter_leaves_skipped_parts_alone(
    specs: list[TensorSpec], data: st.DataObject, staged: bool
) -> None:
    layout = Layout.from_specs(specs, 64)
    skip = data.draw(st.sets(st.sampled_from(layout.parts)) if layout.parts else st.just(set()))
    staging = Staging.for_device(torch.device("cpu"), half_bytes=24) if staged else None
    old = [random_tensor(spec, i) for i, spec in enumerate(specs)]
    new = [random_tensor(spec, i + 100) for i, spec in enumerate(specs)]
    expected, bucket = dirty_buffer(layout), dirty_buffer(layout)
    layout.gather(new, expected)
    layout.gather(new, bucket)
    layout.gather(old, before := dirty_buffer(layout))
    for part in skip:
        layout.part_view(expected, part).copy_(layout.part_view(before, part))
    layout.scatter(bucket, old, {part.index for part in skip}, staging=staging)
    layout.gather(old, after := dirty_buffer(layout))
    assert torch.equal(after, expected)


@pytest.mark.parametrize("staged", [False, True])
def test_noncontiguous_and_grad_tensors_go_both_ways(staged: bool) -> None:
    staging = Staging.for_device(torch.device("cpu"), half_bytes=64) if staged else None
    base = torch.arange(60.0).reshape(6, 10)
    tensors = {
        "transposed": base.clone().t(),
        "strided": base.clone()[::2, 1::3],
        "parameter": torch.nn.Parameter(torch.randn(7, 3)),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }
    layout = Layout.from_specs(specs_of(tensors), 64)
    buffer = dirty_buffer(layout)
    layout.gather(list(tensors.values()), buffer, staging=staging)
    wanted = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    skip = {layout.parts[1].index}
    skipped = layout.part_view(buffer, layout.parts[1]).numel()
    layout.scatter(buffer, list(tensors.values()), skip, staging=staging)
    wrong = sum(int((tensors[name] != wanted[name]).sum()) for name in tensors)
    assert 0 < wrong <= skipped
    layout.scatter(buffer, list(tensors.values()), staging=staging)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.stride() == wanted[name].stride() or name == "strided"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_cuda_tensors_go_both_ways(pinned: bool) -> None:
    tensors = {
        "large": torch.randn(3000, 4000, device="cuda"),  # 48 MB: three turns through 16 MiB halves
        "transposed": torch.randn(50, 70, device="cuda").t(),
        "half": torch.randn(1001, device="cuda").half(),
        "step": torch.tensor(41, device="cuda"),
        "on_the_host": torch.randn(33),
        "empty": torch.empty(0, 3, device="cuda"),
    }
    layout = Layout.from_specs(specs_of(tensors))
    buffer = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8, pin_memory=pinned)
    layout.gather(list(tensors.values()), buffer)
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor, view in zip(tensors.values(), layout.views(buffer), strict=True):
        assert torch.equal(view, tensor.cpu())
        tensor.zero_()
    layout.scatter(buffer, list(tensors.values()), {len(layout.parts) + 1})
    assert all(torch.equal(tensors[name], wanted[name]) for name in tensors)
    for tensor in tensors.values():
        tensor.zero_()
    layout.scatter(buffer, list(tensors.values()), {0})
    assert int((tensors["large"] != wanted["large"]).sum()) <= layout.parts[0].numel
    assert torch.equal(tensors["transposed"], wanted["transposed"])


@given(SPECS)
def test_every_element_of_every_part_has_its_tensors_name(specs: list[TensorSpec]) -> None:
    layout = Layout.from_specs(specs, 64)
    owners = {dtype: [] for dtype in DTYPES}
    for spec in sorted(specs, key=lambda spec: spec.name):
        owners[spec.dtype] += [spec.name] * spec.numel
    for part in layout.parts:
        names = [layout.tensor_at(part, element) for element in range(part.numel)]
        assert names == owners[part.dtype][: part.numel]
        del owners[part.dtype][: part.numel]
        with pytest.raises(LocalProtocolError):
            layout.tensor_at(part, part.numel)


def test_more_than_2_31_elements_by_arithmetic() -> None:
    huge = TensorSpec("huge", (3, 2**40), "float64")
    layout = Layout.from_specs([TensorSpec("w", (2**31 + 1,), "float32"), huge], 1 << 30)
    assert layout.nbytes == 3 * 2**43 + 4 * (2**31 + 1)
    last = layout.parts[-1]
    assert (last.numel, last.offset_bytes + last.nbytes) == (1, layout.nbytes)
    assert layout.tensor_at(last, 0) == "w"


def test_more_than_2_31_elements_touched_in_a_sparse_file(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2**31 + 1,), "float32"), TensorSpec("z", (3,), "float32")]
    layout = Layout.from_specs(specs)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(layout.nbytes)  # a hole: no block is allocated until it is written
    buffer = torch.from_file(str(path), shared=True, size=layout.nbytes, dtype=torch.uint8)
    a, z = layout.views(buffer)
    a[-1] = 5.0
    a[2**31 - 1] = 3.0
    z[0] = 7.0
    last = layout.parts[-1]
    tail = layout.part_view(buffer, last)
    assert tail.tolist() == [5.0, 7.0, 0.0, 0.0]
    assert [layout.tensor_at(last, i) for i in range(2)] == ["a", "z"]
    assert layout.part_view(buffer, layout.parts[-2])[-1] == 3.0
    assert path.stat().st_blocks * 512 < 1 << 20


def test_first_difference_is_one_sentence() -> None:
    here = [TensorSpec("fc1", (10, 64), "float32"), TensorSpec("fc2", (10,), "float32")]
    layout = Layout.from_specs(here)
    assert layout.first_difference(here) is None
    assert (
        layout.first_difference(here[:1]) == "tensor 'fc2' (float32 [10]) exists here but not there"
    )
    assert (
        layout.first_difference([*here, TensorSpec("fc3", (), "int64")])
        == "tensor 'fc3' (int64 []) exists there but not here"
    )
    assert (
        layout.first_difference([here[0], TensorSpec("fc2", (10,), "float16")])
        == "tensor 'fc2' is float32 [10] here but float16 [10] there"
    )
    assert layout.first_difference(here, 64) == "part_bytes is 262144 here but 64 there"
    assert Layout.from_specs(here, 64).schema_digest != layout.schema_digest
    assert Layout.from_specs(here[:1]).schema_digest != layout.schema_digest


def test_no_two_schemas_spell_the_same_bytes() -> None:
    pairs = [
        ([TensorSpec("a", (1, 2), "float32")], [TensorSpec("a", (12,), "float32")]),
        ([TensorSpec("a", (), "float32")], [TensorSpec("a", (0,), "float32")]),
        ([TensorSpec("a", (1,), "int8")], [TensorSpec("a", (1,), "uint8")]),
        ([TensorSpec("a int8 [1];", (1,), "int8")], [TensorSpec("a", (1,), "int8")]),
    ]
    for one, two in pairs:
        assert Layout.from_specs(one).schema_digest != Layout.from_specs(two).schema_digest


REFUSED = [
    ("complex64", lambda: torch.zeros(2, dtype=torch.complex64)),
    ("float8_e4m3fn", lambda: torch.zeros(2).to(torch.float8_e4m3fn)),
    ("uint16", lambda: torch.zeros(2, dtype=torch.uint16)),
    ("quint8", lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)),
    ("sparse", lambda: torch.eye(3).to_sparse()),
    ("meta", lambda: torch.empty(3, device="meta")),
    ("expanded", lambda: torch.zeros(1).expand(4)),
]


@pytest.mark.parametrize(("word", "make"), REFUSED, ids=[word for word, _ in REFUSED])
@pytest.mark.filterwarnings("ignore")  # torch's deprecation of the quantized dtypes
def test_what_cannot_be_averaged_is_refused_by_name(word: str, make) -> None:
    with pytest.raises(TrainerError, match=rf"'layer\.odd'.*{word}") as caught:
        specs_of({"layer.fine": torch.zeros(1), "layer.odd": make()})
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.reason in {"dtype_refused", "shape_refused"}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([TensorSpec("odd", (1,), "complex64")], "'odd' has dtype complex64"),
        ([TensorSpec("a", (1,), "int8")] * 2, "'a' is named twice"),
        ([TensorSpec("", (1,), "int8")], "unusable name"),
        ([TensorSpec("x" * 1025, (1,), "int8")], "unusable name"),
        ([TensorSpec("a", (-1,), "int8")], "none negative"),
        ([TensorSpec("a", (1,) * 65, "int8")], "at most 64 dimensions"),
        ([TensorSpec("a", (2**62, 2), "int8")], "at most"),
        ([TensorSpec("a", ((MAX_PARTS + 1) << 22,), "int8")], "larger part_bytes"),
    ],
)
def test_specs_that_make_no_layout(specs: list[TensorSpec], words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        Layout.from_specs(specs)


@pytest.mark.parametrize("part_bytes", [0, -64, 63, 100])
def test_part_bytes_out_of_range(part_bytes: int) -> None:
    with pytest.raises(ConfigError, match="part_bytes"):
        Layout.from_specs([], part_bytes)


def test_tensors_that_are_not_the_specs() -> None:
    layout = Layout.from_specs([TensorSpec("w", (3,), "float32")])
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for wrong in ([], [torch.zeros(4)], [torch.zeros(3, dtype=torch.float64)]):
        with pytest.raises(TrainerError, match="expected") as caught:
            layout.gather(wrong, buffer)
        assert caught.value.reason == "schema_differs"
        with pytest.raises(TrainerError, match="expected"):
            layout.scatter(buffer, wrong)
    for bad in (buffer[:8], buffer.view(torch.float32), buffer.view(3, 4)):
        with pytest.raises(LocalProtocolError, match="bucket: got"):
            layout.views(bad)


def test_a_layout_of_nothing() -> None:
    layout = Layout.from_specs([])
    assert (layout.nbytes, layout.parts, layout.views(torch.empty(0, dtype=torch.uint8))) == (
        0,
        (),
        [],
    )


def test_digest_is_of_the_bytes() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert digest(data) == digest(data.clone())
    assert digest(data) != digest(data[:99])
    assert len(digest(torch.empty(0, dtype=torch.uint8))) == 16
    for bad in (data.float(), data[::2], data.view(10, 10)):
        with pytest.raises(LocalProtocolError):
            digest(bad)


@pytest.mark.parametrize(
    ("mib", "part_kib"),
    [
        (0, 256),
        (1, 256),
        (31, 256),
        (32, 512),
        (64, 1024),
        (127, 1024),
        (128, 2048),
        (255, 2048),
        (256, 4096),
        (1 << 20, 4096),
    ],
)
def test_parts_grow_with_the_model_while_there_are_enough_to_share_out(
    mib: int, part_kib: int
) -> None:
    layout = Layout.from_specs([TensorSpec("a", (mib << 18,), "float32")] if mib else [])
    assert layout.part_bytes == part_kib << 10
    assert part_kib == 256 or len(layout.parts) >= PARTS_AT_LEAST
