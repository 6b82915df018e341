"""The tensors in what a module is given and returns, whatever they are wrapped in.

Notable: torch looks into tuples, lists and dicts, and into classes that were registered with it. A dataclass, or any
object with attributes, is looked into here, because a unit is gathered when the gradient of its output arrives. What a
module is given may be written into (a list that it appends to, a cache), so only tuples are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyscale._torch import innermost, tree_leaves, tree_map
from polyscale.errors import UnsupportedError
from polyscale_zero import _torch

DEEPEST = 4
"""How many levels of objects within objects are looked into."""
_PLAIN = (int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device, torch.nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in containers and in the attributes of objects."""
    seen: dict[int, Any] = {}  # held, so that no other object gets its number
    level = [value]
    for _ in range(DEEPEST):
        inside: list[Any] = []
        for leaf in tree_leaves(level):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen[id(leaf)] = leaf
                inside += _attributes(leaf)
        level = inside


def awaited(value: Any, expect: Callable[[], None], done: Callable[[], None]) -> Any:
    """Arrange that ``done`` is called in a backward for each tensor, once every use of it in the module is computed.

    Args:
        value: what a module is given: (arguments, keyword arguments).
        expect: called now for each tensor for which ``done`` will be.
        done: called in a backward.

    Returns:
        ``value`` with aliases in the places of tensors, one for all places of the same one. A tensor in a list or in
        another object that may be written into stays; ``done`` then waits for its other uses, too.
    """
    aliases: dict[int, torch.Tensor] = {}

    def map_item(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if not _is_awaited(item):
                return item
            if id(item) not in aliases:
                aliases[id(item)] = _torch.after_uses(item, done)
                expect()
            return aliases[id(item)]
        if type(item) is tuple:
            return tuple(map(map_item, item))
        for leaf in tree_leaves(item):
            if isinstance(leaf, torch.Tensor) and _is_awaited(leaf) and _torch.before_gradient(leaf, done):
                expect()
        return item

    args, kwargs = value
    return map_item(args), {name: map_item(item) for name, item in kwargs.items()}


def _is_awaited(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)


def without_memory_of(addresses: frozenset[int], value: Any, owner: str) -> Any:
    """Copy the tensors in ``value`` that lie in memory which will be freed (a parameter, a view of one).

    Args:
        addresses: of the storages.
        value: what a module returns.
        owner: the module's name.

    Raises:
        UnsupportedError: an object that torch cannot rebuild holds such a tensor.
    """
    if not any(_lies_in(tensor, addresses) for tensor in tensors_in(value)):
        return value

    def copy(item: Any) -> Any:
        return item.clone() if isinstance(item, torch.Tensor) and _lies_in(item, addresses) else item

    copied = tree_map(copy, value)
    if any(_lies_in(tensor, addresses) for tensor in tensors_in(copied)):
        raise UnsupportedError(
            f"{owner} returns its parameter, or a view of one, in an object",
            why="under stage 3 the parameter is freed after its forward, and torch cannot put a copy into the object",
            fix="Return a copy (parameter.clone()), or return it in a tuple or a dict",
        )
    return copied


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        found += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return found


def _lies_in(tensor: torch.Tensor, addresses: frozenset[int]) -> bool:
    inside = (inner for inner in innermost(tensor) if inner.layout == torch.strided and inner.numel())
    return any(inner.untyped_storage().data_ptr() in addresses for inner in inside)
