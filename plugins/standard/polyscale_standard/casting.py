"""Dtype changes of a whole model: parameters that compute in 16 bits, and those pinned to their master's dtype."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from polyscale._torch import tree_map
from polyscale.errors import ConfigError
from polyscale.interfaces.parallelism import Part
from polyscale.interfaces.precision import PrecisionPolicy
from polyscale.parameters.inspect import FoundParameter, find_parameters


def pinned_names(found: Iterable[FoundParameter], precision: PrecisionPolicy) -> frozenset[str]:
    """Return the names of the parameters that compute in their master's dtype.

    Raises:
        ConfigError: a name that was given matches no parameter.
    """
    if precision.parameter is None:
        return frozenset()
    known = [name for entry in found for name in (entry.fqn, *entry.tied_to)]
    pinned = set(precision.pinned_exactly).intersection(known)
    for given in precision.pinned:
        matched = [name for name in known if matches(name, given)]
        if not matched:
            raise ConfigError(
                f"data_types.keep_in_fp32_modules has {given!r}",
                why="it matches no parameter name",
                fix=f"Names look like {known[0]!r}; write for example 'norm' or '*norm*'" if known else "",
            )
        pinned.update(matched)
    return frozenset(pinned)


def matches(name: str, given: str) -> bool:
    """Whether the parameter ``name`` is meant by ``given``: "norm" means "norm", "norm.weight" and "a.norm.weight"."""
    if any(sign in given for sign in "*?["):
        return fnmatch.fnmatchcase(name, given)
    return f".{given}." in f".{name}."


def pinned_modules(parts: list[Part], pinned: frozenset[str]) -> list[nn.Module]:
    """Return the modules that own pinned parameters, under any name of a tied one.

    Raises:
        ConfigError: a module owns pinned and other parameters: its computation cannot have two dtypes.
    """
    wanted = {id(e.parameter) for e in find_parameters(parts) if pinned.intersection((e.fqn, *e.tied_to))}
    modules = []
    for part in parts:
        for name, module in part.module.named_modules():
            prefix = ".".join(filter(None, (part.prefix, name)))
            own = {key: p for key, p in module._parameters.items() if p is not None}
            matched = [key for key, p in own.items() if id(p) in wanted]
            if matched and len(matched) < len(own):
                rest = sorted(set(own) - set(matched))
                raise ConfigError(
                    f"data_types.keep_in_fp32_modules pins {', '.join(matched)} of {prefix or 'the model'}",
                    why=f"the same module also owns {', '.join(rest)}, and it computes in one dtype",
                    fix=f"Pin all of them, with {prefix!r}",
                )
            if matched:
                modules.append(module)
    return modules


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nest of containers."""

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return tree_map(cast, value)


def cast_whole_model(parts: list[Part], compute: torch.dtype | None, pinned: frozenset[str]) -> list[Any]:
    """Install the hooks that cast inputs to the compute dtype, and around pinned modules to theirs and back."""
    if compute is None:
        return []
    handles = [part.module.register_forward_pre_hook(_cast_inputs(lambda: compute), with_kwargs=True) for part in parts]
    for module in pinned_modules(parts, pinned):
        first = next(p for p in module._parameters.values() if p is not None)
        handles.append(module.register_forward_pre_hook(_cast_inputs(_dtype_of(first)), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _m, _i, output: cast_floating(output, compute)))
    return handles


def _dtype_of(parameter: torch.Tensor) -> Callable[[], torch.dtype]:
    return lambda: parameter.dtype


def _cast_inputs(dtype: Callable[[], torch.dtype]) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating(args, dtype()), cast_floating(kwargs, dtype())

    return hook
