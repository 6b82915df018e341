"""Names of torch that are private or depend on its version. Nothing else in this package uses such a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def without_subclasses() -> Any:
    """A context in which ``__torch_function__`` of tensor subclasses is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the numbers by which autograd finds that a tensor was written into since a graph was recorded."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))  # type: ignore[attr-defined]


def inner(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the elements: a DTensor's local one, another tensor itself. Not a view of it."""
    return parameter._local_tensor if hasattr(parameter, "device_mesh") else parameter  # type: ignore[attr-defined,no-any-return]


def local_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, cut as its parameter is: autograd may leave a DTensor's as partial sums."""
    wanted = getattr(parameter, "placements", None)
    if wanted is not None and getattr(gradient, "placements", wanted) != wanted:
        gradient = gradient.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return inner(gradient)


def before_gradient(tensor: torch.Tensor, call: Callable[[], None]) -> bool:
    """Call ``call`` in a backward before anything is computed from the gradient of ``tensor``, which has a graph.

    Hooks sit on graph nodes, so an operator that later writes into the tensor in place does not take them off. One
    that writes into a view makes new nodes for it, behind which that of the memory it is a view of remains.

    Returns:
        Whether it could be hooked: a leaf has no node.
    """
    nodes = [found.grad_fn for found in (tensor, tensor._base) if found is not None and found.grad_fn is not None]
    for node in nodes:
        node.register_prehook(lambda _gradients: call())
    return bool(nodes)


def after_uses(tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """Return an alias of ``tensor``, and call ``call`` in a backward once every use of the alias has been computed."""
    alias = tensor.view_as(tensor)
    if alias.grad_fn is not None:
        alias.grad_fn.register_hook(lambda _inputs, _outputs: call())
    return alias


def not_compiled(function: Callable[..., Any]) -> Any:
    """``function``, which ``torch.compile`` leaves as it is."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]
