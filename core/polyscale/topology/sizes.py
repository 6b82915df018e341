"""Sizes of the axes of both views: what fits the world, what fills it up, and what is refused with the numbers.

Notable: plain arithmetic, without torch. The last axis of a view varies fastest over the ranks.
"""

from __future__ import annotations

import math

from polyscale.errors import ConfigError, nearest

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
ALL_AXES = tuple(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES)))


def view_of(*names: str) -> tuple[str, ...]:
    """The axes of the view that has all of ``names``: the dense one where both have them.

    Raises:
        ConfigError: no view has them all, or they do not stand in its order.
    """
    for name in names:
        check_axis(name)
    axes = DENSE_AXES if all(name in DENSE_AXES for name in names) else EXPERT_AXES
    places = [axes.index(name) if name in axes else -1 for name in names]
    if not names or -1 in places or places != sorted(set(places)):
        raise ConfigError(
            f"mesh{names!r}",
            why="Axes must belong to one view and stand in its order",
            fix=f"Views: {', '.join(DENSE_AXES)}; {', '.join(EXPERT_AXES)}",
        )
    return axes


def check_axis(name: str) -> None:
    """Refuse a name that no axis has.

    Raises:
        ConfigError: with the name that was perhaps meant.
    """
    if name not in ALL_AXES:
        close = nearest(name, ALL_AXES)
        hint = f"Did you mean {close!r}? " if close else ""
        raise ConfigError(
            f"topology axis {name!r}", why="There is none of that name", fix=f"{hint}Axes: {', '.join(ALL_AXES)}"
        )


def coordinate(name: str, sizes: dict[str, int], rank: int) -> int:
    """Index of ``rank`` along an axis of either view."""
    axes = view_of(name)
    behind = math.prod(sizes[axis] for axis in axes[axes.index(name) + 1 :])
    return rank // behind % sizes[name]


def parts_along(axes: list[str], view: tuple[str, ...], sizes: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Cut the world into the sets of ranks that differ along ``axes`` of ``view`` only.

    Returns:
        The sets, in the order of their first ranks; the ranks of each ascend.
    """
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes[axis] for axis in view)):
        place = tuple(coordinate(axis, sizes, rank) for axis in view if axis not in axes)
        parts.setdefault(place, []).append(rank)
    return tuple(tuple(part) for part in parts.values())


def resolve_sizes(dense: dict[str, int], *, ep: int, etp: int, world_size: int) -> dict[str, int]:
    """Fill up the axis that is -1 and check that both views multiply to the world.

    Args:
        dense: sizes of the five dense axes; at most one is -1.
        ep: ranks over which experts are spread.
        etp: tensor parallel ranks inside an expert.
        world_size: number of ranks.

    Returns:
        The size of every axis of both views.

    Raises:
        ConfigError: with the numbers that do not fit.
    """
    given = _listed(dense)
    for name, size in {**dense, "ep": ep, "etp": etp}.items():
        valid = isinstance(size, int) and not isinstance(size, bool)
        if not valid or not (size > 0 or (size == -1 and name in dense)):
            raise ConfigError(f"topology.{name} = {size!r}", why="A size is a positive whole number (-1 fills up)")
    open_axes = [name for name, size in dense.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"topology with {given}", why="Only one axis can take what is left", fix="Give one of them")
    fixed = math.prod(size for size in dense.values() if size != -1)
    if world_size % fixed or (not open_axes and fixed != world_size):
        raise ConfigError(
            f"topology with {given}",
            why=f"The sizes multiply to {fixed}, and there are {world_size} ranks",
            fix=_how_to_fit(dense, fixed=fixed, world_size=world_size, open_axes=open_axes),
        )
    sizes = {name: world_size // fixed if size == -1 else size for name, size in dense.items()}
    expert_world = sizes["dp_shard"] * sizes["sp"] * sizes["tp"]
    if expert_world % (ep * etp):
        raise ConfigError(
            f"topology with ep = {ep}, etp = {etp}",
            why=f"ep * etp = {ep * etp} does not divide dp_shard * sp * tp = {expert_world}",
            fix=f"Choose ep and etp so that their product divides {expert_world}",
        )
    return {**sizes, "edp": expert_world // (ep * etp), "ep": ep, "etp": etp}


def _how_to_fit(dense: dict[str, int], *, fixed: int, world_size: int, open_axes: list[str]) -> str:
    if open_axes or world_size % fixed:
        return f"Start a multiple of {fixed} ranks, or choose sizes that divide {world_size}"
    others = {name: size for name, size in dense.items() if name != "dp_shard"}
    return f"Start {fixed} ranks, or set dp_shard to -1 or {world_size // math.prod(others.values())}"


def _listed(sizes: dict[str, int]) -> str:
    wide = [f"{name} = {size}" for name, size in sizes.items() if size != 1]
    return ", ".join(wide) or "every size 1"
