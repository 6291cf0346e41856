"""Which tensors of a trainer take part. One rule: they are asked for anew at every average,
because `model.to(...)` replaces buffers; only names, shapes and dtypes must stay what they were at
attach."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moshpitd.rpc.status import refusal

log = logging.getLogger("moshpitd.client")

Source = Callable[[], dict[str, Tensor]]
"""Name -> tensor, in an order that is the same at every call."""


def source_of(
    model: nn.Module | None, tensors: Mapping[str, Tensor] | Sequence[Tensor] | None
) -> Source:
    """The source for `attach(model=...)` or `attach(tensors=...)`: exactly one of the two."""
    if (model is None) == (tensors is None):
        raise refusal("no_tensors", "give attach() either model= or tensors=")
    if model is not None:
        _warn_of_left_out(model)
        return lambda: model_tensors(model)
    assert tensors is not None  # our own: the line above
    if isinstance(tensors, Mapping):
        named = dict(tensors)
    else:
        # Zero-padded, so that the order by name in a bucket is the order of the list.
        width = len(str(max(len(tensors) - 1, 0)))
        named = {f"{index:0{width}}": tensor for index, tensor in enumerate(tensors)}
    for name, value in named.items():
        _check_tensor(name, value)
    return lambda: named


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise refusal("bad_tensor", f"tensors[{name!r}] is a {kind}, expected a torch.Tensor")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, and the buffers of floating, integer or bool dtype, in the order of
    `state_dict()`.

    A tied tensor appears once, under its first name: averaged twice it would only cost twice, but
    written twice by a delta it would move twice.
    """
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or _left_out(tensor) or _memory(tensor) in seen:
            continue
        seen.add(_memory(tensor))
        found[name] = tensor
    return found


def _left_out(tensor: Tensor) -> bool:
    """A buffer that nobody can average, such as a complex table. A parameter never: it is refused
    by name."""
    if isinstance(tensor, nn.Parameter):
        return False
    return tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided


def _memory(tensor: Tensor) -> object:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _warn_of_left_out(model: nn.Module) -> None:
    names = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and _left_out(tensor)
    ]
    if names:
        log.warning("buffers that cannot be averaged are left alone: %s", ", ".join(names))
