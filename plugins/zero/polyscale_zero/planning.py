"""Which parameters share a buffer, and which unit they belong to.

Notable: a buffer never mixes dtypes, meshes, placements or whether its parameters are trained. A parameter that modules
of several units hold belongs to the root unit, which is whole while any of them runs. Parameters come in the order of
their registration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyscale.errors import ConfigError, UnsupportedError, nearest
from polyscale.interfaces.precision import PrecisionPolicy
from polyscale.parameters.inspect import FoundParameter, master_dtype, mesh_of
from polyscale_zero import _torch
from polyscale_zero.flat import Kind

FEWEST = 2**16
"""Elements of the smallest buffer that a unit is split into."""
SMALL_PART = 8
"""A part of the root with less than one in so many of its elements has no buffer of its own."""


@dataclass(frozen=True)
class Plan:
    """One buffer to be made: what its parameters have in common, and which they are."""

    kind: Kind
    members: tuple[FoundParameter, ...]


def owners(found: Sequence[FoundParameter], roots: Sequence[nn.Module], units: Sequence[nn.Module]) -> dict[str, int]:
    """Name of a parameter -> number of its unit in ``units``; -1: the root's."""
    inside: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for module in unit.modules():
            inside.setdefault(id(module), set()).add(number)  # several where units hold one module
    holders: dict[int, set[int]] = {}
    for root in roots:
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(id(parameter), set()).update(inside.get(id(module), {-1}))
    return {
        entry.fqn: next(iter(numbers)) if len(numbers) == 1 else -1
        for entry in found
        for numbers in [holders[id(entry.parameter)]]
    }


def with_leaves(
    root: nn.Module, units: list[nn.Module], classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]
) -> list[nn.Module]:
    """Put a module that must not be split in the place of the units inside it.

    Args:
        root: the whole model.
        units: its units.
        classes: class names of modules that are gathered as a whole.
        names: their names.
        suffixes: ends of their names.

    Raises:
        ConfigError: one of them matches no module.
    """
    modules = dict(root.named_modules())
    matched = {
        **{cls: [m for m in modules.values() if type(m).__name__ == cls] for cls in classes},
        **{name: [modules[name]] if name in modules else [] for name in names},
        **{end: [m for name, m in modules.items() if name and name.endswith(end)] for end in suffixes},
    }
    for given, found in matched.items():
        if not found:
            near = nearest(given, [*modules, *(type(module).__name__ for module in modules.values())])
            raise ConfigError(
                f"zero_optimization.leaf_module has {given!r}",
                why="it matches no module of the model",
                fix=f"Did you mean {near!r}?" if near else "model.named_modules() lists them",
            )
    leaves = [module for found in matched.values() for module in found if module is not root]
    inside = {id(child): leaf for leaf in leaves for child in leaf.modules() if child is not leaf}
    outermost = {id(leaf): leaf for leaf in leaves if id(leaf) not in inside}
    kept: dict[int, nn.Module] = {}
    for unit in units:
        holder = next((leaf for leaf in outermost.values() if any(unit is child for child in leaf.modules())), unit)
        kept[id(holder)] = holder
    return list(kept.values())


def refuse_complex(found: Sequence[FoundParameter]) -> None:
    """Refuse what backends do not sum and norms do not count.

    Raises:
        UnsupportedError: a parameter is complex.
    """
    for entry in found:
        if entry.parameter.is_complex():
            raise UnsupportedError(
                f"The parameter {entry.fqn!r} of {entry.parameter.dtype}",
                why="zero adds and gathers real numbers",
                fix="Hold torch.view_as_real(values) as the parameter, and view_as_complex it in forward",
            )


def around_units(found: Sequence[FoundParameter], owner: dict[str, int]) -> list[list[FoundParameter]]:
    """The root's parameters: those before the first unit, and the others.

    The gradients of a head are complete when backward begins and those of an embedding when it ends, so in a buffer
    that both share the head's would stay until then. What is small stays with the rest: a buffer is a collective.
    """
    own = [entry for entry in found if owner[entry.fqn] == -1]
    first = next((place for place, entry in enumerate(found) if owner[entry.fqn] != -1), len(found))
    before = [entry for entry in found[:first] if owner[entry.fqn] == -1]
    after = own[len(before) :]
    sizes = [sum(entry.parameter.numel() for entry in part) for part in (before, after)]
    return [before, after] if min(sizes) * SMALL_PART >= sum(sizes) > 0 else [own]


def half_a_unit(found: Sequence[FoundParameter], owner: dict[str, int]) -> int:
    """Elements of half of the largest unit, but not too few for a collective of its own.

    While one part of a unit's gradients is reduced the other one is made, so that it takes less memory than a whole
    unit's gradients beside the whole ones of the unit before.
    """
    sizes: dict[int, int] = {}
    for entry in found:
        sizes[owner[entry.fqn]] = sizes.get(owner[entry.fqn], 0) + entry.parameter.numel()
    inner = [size for number, size in sizes.items() if number != -1] or list(sizes.values())
    return max(max(inner, default=0) // 2, FEWEST)


@dataclass(frozen=True)
class Rules:
    """How a parameter is held.

    Attributes:
        precision: dtypes.
        pinned: names that compute in their master's dtype.
        resident: names that stay whole; None: all.
        most: elements of a buffer.
    """

    precision: PrecisionPolicy
    pinned: frozenset[str]
    resident: frozenset[str] | None
    most: int

    def kind(self, entry: FoundParameter, meshes: list[object]) -> Kind:
        """What ``entry`` has in common with others; ``meshes`` grows by those that are new."""
        parameter = entry.parameter
        master = master_dtype(parameter, self.precision.master)
        compute = self.precision.parameter
        names = (entry.fqn, *entry.tied_to)
        if compute is None or not parameter.is_floating_point() or self.pinned.intersection(names):
            compute = master
        mesh, placements = mesh_of(parameter)
        number = -1
        if mesh is not None:
            key = (mesh, placements)
            if key not in meshes:
                meshes.append(key)
            number = meshes.index(key)
        resident = self.resident is None or entry.fqn in self.resident
        return Kind(compute, master, parameter.requires_grad, resident, number)


def plans(entries: Sequence[FoundParameter], rules: Rules, meshes: list[object]) -> Iterator[Plan]:
    """Sort the parameters of one unit into buffers."""
    by_kind: dict[Kind, list[FoundParameter]] = {}
    for entry in entries:
        by_kind.setdefault(rules.kind(entry, meshes), []).append(entry)
    for kind, members in by_kind.items():
        chunk: list[FoundParameter] = []
        size = 0
        for entry in members:
            numel = _torch.inner(entry.parameter).numel()
            if chunk and size + numel > rules.most:
                yield Plan(kind, tuple(chunk))
                chunk, size = [], 0
            chunk.append(entry)
            size += numel
        if chunk:
            yield Plan(kind, tuple(chunk))


def persistent(found: Sequence[FoundParameter], *, threshold: int | None, total: int | None) -> frozenset[str]:
    """Names of the parameters of at most ``threshold`` elements, as long as they have at most ``total`` in all."""
    kept: set[str] = set()
    left = total if total is not None else 2**62
    for entry in found:
        numel = torch.Size(entry.parameter.shape).numel()
        if threshold is not None and numel <= threshold and numel <= left:
            kept.add(entry.fqn)
            left -= numel
    return frozenset(kept)
