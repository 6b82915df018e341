"""Chooses the units: the modules whose parameters are gathered and reduced together.

Automatic: the repeated blocks, that is the elements of an outermost list (ModuleList, Sequential) that have children of
their own and are two or more of one class. By name: every outermost module of the given classes. A block that shares a
parameter with anything outside itself stays with the root's unit, so tied weights are always in one unit; a plugin that
puts the shared parameters alone into the root's unit asks for such blocks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from polyscale.errors import ConfigError, nearest


def choose_units(
    root: nn.Module, class_names: Sequence[str] | None = None, *, plugin: str = "fsdp2", sharing: bool = False
) -> list[nn.Module]:
    """Return the unit modules of ``root`` in module order; the root itself, which holds the rest, is not listed.

    Args:
        root: the whole model.
        class_names: of the units; None: found.
        plugin: whose option ``unit_classes`` is, for errors.
        sharing: whether a block that shares a parameter with the outside is a unit too.

    Raises:
        ConfigError: a class name matches no module.
    """
    units = _by_class(root, class_names, plugin) if class_names else _repeated_blocks(root)
    units = [unit for unit in units if any(True for _ in unit.parameters())]
    return units if sharing else [unit for unit in units if not _shares(root, unit)]


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    if isinstance(root, (nn.ModuleList, nn.Sequential)):
        blocks = [child for child in root.children() if any(True for _ in child.children())]
        classes = Counter(type(block) for block in blocks)
        repeated = [block for block in blocks if classes[type(block)] >= 2]
        if repeated:
            return _distinct(repeated)
    units: list[nn.Module] = []
    for child in root.children():
        units.extend(_repeated_blocks(child))
    return _distinct(units)


def _by_class(root: nn.Module, class_names: Sequence[str], plugin: str) -> list[nn.Module]:
    present = {type(module).__name__ for module in root.modules()}
    for name in class_names:
        if name not in present:
            hint = nearest(name, present)
            raise ConfigError(
                f"backends.options.{plugin}.unit_classes has {name!r}",
                why="the model has no module of that class",
                fix=f"Did you mean {hint!r}?" if hint else f"Classes of this model: {', '.join(sorted(present))}",
            )
    return _distinct(_outermost(root, set(class_names)))


def _outermost(module: nn.Module, class_names: set[str]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found.extend([child] if type(child).__name__ in class_names else _outermost(child, class_names))
    return found


def _shares(root: nn.Module, unit: nn.Module) -> bool:
    """Whether a parameter of ``unit`` is also held by a module outside it."""
    inside = {id(module) for module in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    return any(
        id(parameter) in own
        for module in root.modules()
        if id(module) not in inside
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Drop repetitions: one block object that stands several times in a list is one unit."""
    return list({id(module): module for module in modules}.values())
