"""What the recorder knows of ATen operators: what they read, write and set."""

from __future__ import annotations

from typing import Any

import torch

from polyscale import _torch
from polyscale.parameters.deferred_log import TensorRef, history_of, leaves


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Operators that set every element they are given without looking at what it was.
FILLS = _aten(
    "normal_ uniform_ fill_.Scalar fill_.Tensor zero_ copy_ random_ random_.from random_.to exponential_ cauchy_ "
    "log_normal_ geometric_ bernoulli_.float bernoulli_.Tensor"
)
# Operators that use only shape, strides and dtype of their first argument.
GEOMETRY_ONLY = _aten(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like randint_like.low_dtype "
    "new_empty new_zeros new_ones new_full new_empty_strided"
)
UNINITIALISED = _aten("empty.memory_format empty_strided empty_permuted empty_like new_empty new_empty_strided")
# What torch itself puts beside a tensor on meta: the number of ``weight[0] = 1.0``, a real tensor brought over.
_TO_META = _aten("scalar_tensor _to_copy")
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def needs_values(func: Any) -> bool:
    """Whether an operator cannot run on meta, because what it returns depends on values."""
    return any(tag in func.tags for tag in _NEEDS_VALUES)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes."""
    found = []
    for position, name in _torch.written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def sets_target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator sets its target without reading it, under another name either (``w.copy_(w)``)."""
    if func.name() not in FILLS:
        return False
    found = [history_of(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return found.count(found[0]) == 1


def covers_storage(ref: TensorRef) -> bool:
    """Whether a tensor is all of its storage, row by row."""
    expected = 1
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return ref.offset == 0 and expected * ref.dtype.itemsize == ref.history.nbytes


def brings_to_meta(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether torch puts a number or a real tensor beside one that is on meta already."""
    device = kwargs.get("device")
    return func.name() in _TO_META and device is not None and device.type == "meta"
