"""What a parameter is while it is not gathered (stage 3).

Notable: a tensor whose memory was freed ends the process when a kernel reads it. So a parameter has another class while
it is freed: it keeps its identity, shape, dtype and name, answers questions about them, and refuses everything that
needs values with an error that names it, whoever holds it: a module, a list in another one, the user. A backward does
not ask the class; it compares versions, so a freed parameter has one that no graph has seen. Why: docs/adr/0004.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polyscale.errors import UnsupportedError
from polyscale_zero import _torch

FREED = 2**30
"""Added to the version of a freed parameter."""

_QUESTIONS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "type",
        "ndimension",
        "__len__",
        "__repr__",
        "__hash__",
        "__format__",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "has_names",
        "is_signed",
        "storage_offset",
        "is_shared",
        "is_inference",
        "get_device",
    ]
)
_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "grad",
        "grad_fn",
        "layout",
        "names",
        "itemsize",
        "nbytes",
        "retains_grad",
        "output_nr",
        "_version",
        "_base",
    ]
)
"""Beside these, every ``is_...``: of what kind of tensor and device it is."""


class Released:
    """Mixed into the class of a freed parameter."""

    __slots__ = ()

    def __repr__(self: Any, *_: Any, **__: Any) -> str:
        return f"<parameter {name_of(self)} of shape {tuple(self.shape)}, {self.dtype}, sharded and not gathered now>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        asks = owner in _ATTRIBUTES or owner.startswith("is_")
        allowed = asks if name in ("__get__", "__set__") else name in _QUESTIONS
        if allowed:
            with _torch.without_subclasses():
                return func(*args, **(kwargs or {}))
        raise refusal(_first_name((args, kwargs)), (owner if name in ("__get__", "__set__") else name) or "A use")


class Refusals:
    """Makes the parameters of one buffer refuse to be used while it is freed.

    Args:
        parameters: by name; they may be replaced until the first ``begin``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._named = parameters
        self._classes: list[type] = []
        self._versions: list[int] = []

    def begin(self) -> None:
        """The buffer is about to be freed; it may have been before."""
        if self._classes:
            return
        parameters = list(self._named.values())
        self._versions = [parameter._version for parameter in parameters]
        _torch.set_versions(parameters, [version + FREED for version in self._versions])
        for fqn, parameter in self._named.items():
            self._classes.append(type(parameter))
            vars(parameter)["_zero_name"] = fqn
            parameter.__class__ = _released_class(type(parameter))

    def end(self) -> None:
        """The buffer is whole again."""
        classes, self._classes = self._classes, []
        if classes:
            for parameter, cls in zip(self._named.values(), classes, strict=True):
                parameter.__class__ = cls
            _torch.set_versions(list(self._named.values()), self._versions)

    def written(self) -> None:
        """The values have changed: graphs that refer to them are outdated."""
        if self._classes:
            self._versions = [version + 1 for version in self._versions]
        else:
            torch.autograd.graph.increment_version(list(self._named.values()))


def is_released(parameter: torch.Tensor | None) -> bool:
    """Whether a parameter is freed at the moment."""
    return isinstance(parameter, Released)


def name_of(parameter: Any) -> str:
    """Name of a parameter that was freed once."""
    return str(vars(parameter).get("_zero_name", "a parameter"))


def explain(error: Exception) -> UnsupportedError | None:
    """Say what torch's errors mean that freed memory causes; None for any other."""
    text = str(error)
    version = re.search(r"is at version (\d+); expected version", text)
    if version and int(version[1]) >= FREED:
        return UnsupportedError(
            "A backward through the parameters of a unit that did not come through what its forward returned",
            why="under stage 3 a unit is gathered when the gradient of one of its outputs arrives, and this one came "
            "from a tensor that it gave away otherwise (kept as an attribute, for example)",
            fix="Return that tensor from the unit's forward; or use zero_optimization.stage 2",
        )
    if "setStorage" in text and "storage of size 0" in text:
        return refusal("a freed unit", "A use")
    return None


@functools.cache
def _released_class(cls: type) -> type:
    """The class of a freed parameter whose class is ``cls``."""
    asked = ("to_local", "full_tensor", "redistribute")  # a DTensor hands out its memory without asking anyone
    refused = {name: _refusing(name) for name in asked if hasattr(cls, name)}
    return type(cls)(f"Released{cls.__name__}", (Released, cls), {"__slots__": (), **refused})


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise refusal(name_of(self), name)

    return refuse


def _first_name(value: Any) -> str:
    items = value.values() if isinstance(value, Mapping) else value
    for item in items:
        if isinstance(item, Released):
            return name_of(item)
        if isinstance(item, (list, tuple, Mapping)) and (found := _first_name(item)) != "a parameter":
            return found
    return "a parameter"


def refusal(fqn: str, what: str) -> UnsupportedError:
    """The error for a use of a parameter that is not gathered."""
    return UnsupportedError(
        f"{what} of the parameter {fqn!r} outside the forward of its unit",
        why="under stage 3 each rank holds a shard of it, and it is whole only while its unit runs",
        fix="Call the module that owns it as a whole; read or write it with engine.parameters_store.gathered([name]); "
        "name the module class that is called in backends.options.zero.unit_classes; or, for all weights at once, "
        "engine.save and engine.load, or engine.export",
    )


def second_derivative() -> UnsupportedError:
    """The error for a backward with ``create_graph``."""
    return UnsupportedError(
        "A backward through a backward (create_graph=True) under stage 3",
        why="parameters are freed after the first backward, and the second needs them",
        fix="Use zero_optimization.stage 0, 1 or 2 for gradient penalties and other second derivatives",
    )
